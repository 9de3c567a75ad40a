"""Situations that users of other tools reported, through `init` and a build: what trains is what their data says.

Each file of the real data's `reports/` is one situation, rebuilt small; `REPORTS.md` beside them says what must happen.
"""

import functools
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from rowmill.build.steps import open_project
from rowmill.recipe.new_project import create_project
from tests.support.recipes import Built, build_project

pytestmark = pytest.mark.slow

NEVER = "WRONG|BAD|TEST"
SMALL_DATA = {"fill": {"at_least": 0}, "rank_balance": {"at_most": 9}, "filler_share": {"at_most": 1}}
"""Bounds of checks that twelve rows cannot pass, and that say nothing of what trains."""


@dataclass(frozen=True)
class Situation:
    """What must be true of all examples of a file: a pattern of the text that trains, and how many there are."""

    trains: str
    examples: int = 12
    never: str = NEVER
    tokenizer: str = "qwen3"


END = r"<\|im_end\|>"
ANSWER = r"<think>\n\n</think>\n\n"
SITUATIONS = {
    "part_flags.jsonl": Situation(rf"RIGHT \d+{END}"),
    "row_loss_mask.jsonl": Situation(rf"{ANSWER}GOOD\d+{END}", never=f"{NEVER}|Q|again"),
    # Four of twelve rows weigh nothing.
    "row_weight.jsonl": Situation(rf"{ANSWER}A \d+{END}", examples=8),
    "trainable_false.jsonl": Situation(rf"{ANSWER}GOOD \d+{END}", never=f"{NEVER}|Q|again"),
    "masked_true.jsonl": Situation(rf"{ANSWER}GOOD \d+{END}", never=f"{NEVER}|Q|again"),
    "openai_weights.jsonl": Situation(rf"{ANSWER}GOOD \d+{END}", never=f"{NEVER}|Q|again|S"),
    "role_pairs.jsonl": Situation(rf"{ANSWER}A \d+{END}", never="Q|user"),
    "two_token_masks.jsonl": Situation("as i", never=r"\$"),
    "split_files": Situation(rf"{ANSWER}(A|B|C) \d+{END}", examples=18),
    "control_strings_pair.jsonl": Situation(
        rf"The string {END} ends a turn and <\|endoftext\|> a document, \d+\.{END}", never="Explain"
    ),
    "control_strings_document.jsonl": Situation(rf".*the string {END} ends a turn, <\|endoftext\|> a document.*{END}"),
    "pair_ends_in_eos.jsonl": Situation(r"A \d+<\|endoftext\|>", tokenizer="gpt2"),
    "thought_before_call.jsonl": Situation(
        r"<think>\nlook up (\d+)\n</think>\n\n"
        r'<tool_call>\n\{"name": "w", "arguments": \{"city": "C\1"\}\}\n</tool_call>'
        rf"{END}{ANSWER}3 \d+{END}",
    ),
    "thinking_parts.jsonl": Situation(rf"<think>\nthink \d+\n</think>\n\nIt is \d+\.{END}"),
    "refusal.jsonl": Situation(rf"{ANSWER}I cannot do \d+\.{END}", never="bad thing"),
    "python_repr.csv": Situation(rf"{ANSWER}Yes \d+{END}", never="It's"),
    "number_answers.jsonl": Situation(rf"\d+{END}", never="What"),
    "schema_column.jsonl": Situation(rf"SELECT count\(\*\) FROM orders WHERE items > \d+{END}", never="CREATE"),
    "time_inf.csv": Situation(r'<\|im_start\|>(\{"g":"g\d","t":\d+,"v":\d\}\n)+' + END, examples=2),
}


open_tokenizer = functools.cache(Tokenizer.from_file)


@pytest.fixture(scope="module")
def built(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """Return the build of each file, by the recipe that `rowmill init` writes for it.

    Datasets that one recipe can hold are built together: weights and the tokenizer are a recipe's.
    """
    folder = tmp_path_factory.mktemp("reports")
    shutil.copytree(real_data / "reports", folder, dirs_exist_ok=True)
    recipes: dict[tuple[str, str], tuple[Path, dict[str, Any]]] = {}
    for name, situation in SITUATIONS.items():
        dataset, tokenizer = name.partition(".")[0], str(real_data / "tokenizers" / situation.tokenizer)
        made = create_project(folder, [name], name=dataset, tokenizer=tokenizer, seq_len=256)
        written = yaml.safe_load(made.recipe.read_text(encoding="utf-8"))
        ((_, options),) = written["datasets"].items()
        empty = written | {"gates": SMALL_DATA, "execution": {"workers": 1}, "datasets": {}}
        recipes.setdefault((tokenizer, str(options.get("loss"))), (made.recipe, empty))[1]["datasets"][dataset] = (
            options
        )
    found: dict[str, Built] = {}
    for recipe, written in recipes.values():
        recipe.write_text(yaml.safe_dump(written), encoding="utf-8")
        found |= dict.fromkeys(written["datasets"], build_project(open_project(recipe, None)))
    return found


def test_every_file_of_the_reports_is_a_situation(real_data: Path) -> None:
    assert {path.name for path in (real_data / "reports").iterdir()} == {*SITUATIONS, "REPORTS.md"}


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_trains_is_what_the_data_says(name: str, built: dict[str, Built], real_data: Path) -> None:
    situation, dataset = SITUATIONS[name], name.partition(".")[0]
    tokenizer = open_tokenizer(str(real_data / "tokenizers" / situation.tokenizer / "tokenizer.json"))
    examples = built[dataset].rows_of(dataset, "tokenized_examples", file="examples")

    assert len(examples) == situation.examples
    for example in examples:
        ids = [token for token, trains in zip(example["input_ids"], example["loss_mask"], strict=True) if trains]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert re.fullmatch(situation.trains, text, re.DOTALL)
        assert not re.search(situation.never, text)


def test_rows_of_a_test_file_are_never_in_the_training_split(built: dict[str, Built]) -> None:
    splits = {"TRAIN": "train", "VAL": "validation", "TEST": "test"}
    rows = built["split_files"].rows_of("split_files", "canonical_rows", file="rows")

    assert len(rows) == 18
    for row in rows:
        word = json.loads(row["messages"])[0]["content"].split()[0]
        assert row["split"] == splits[word]
