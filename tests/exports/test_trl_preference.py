"""The export for TRL's preference trainers: its columns are the sides of examples, and it refuses what TRL trains."""

import ast
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmill.core.errors import ConfigError
from rowmill.schema.rows import Message
from rowmill.stages.exports import format_trainer_pointer
from tests.support.built_exports import load_rows, open_built_export
from tests.support.messages import assistant, user
from tests.support.preferences import cut_sides, preference, preference_workspace
from tests.support.recipes import Built, Workspace, sentence

pytestmark = pytest.mark.slow

PAIRS: dict[str, Any] = {"kind": "preference"}
MARKED: dict[str, Any] = {**PAIRS, "objective": "unpaired"}
Ids = tuple[int, ...]


def _record(i: int) -> dict[str, Any]:
    return {**preference(i), **({} if i % 3 else {"margin": i / 4})}


def _with_exports(
    folder: Path, form: dict[str, Any], *exports: dict[str, Any], records: Any = None, **groups: Any
) -> Workspace:
    named = [{"kind": "trl_preference", **one} for one in exports]
    return preference_workspace(folder, form, named, records=records or [_record(i) for i in range(20)], **groups)


def _load(built: Built, name: str) -> Any:
    return load_rows(built, name), open_built_export(built, name)


def _sides(example: dict[str, Any]) -> list[tuple[Ids, Ids]]:
    """Return the prompt and the answer of each side of an example, up to its last target."""
    found: list[tuple[Ids, Ids]] = []
    for ids, mask in cut_sides(example):
        size, last = example["prompt_length"], int(np.flatnonzero(mask)[-1]) + 1
        found.append((tuple(ids[:size]), tuple(ids[size:last])))
    return found


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("pairs")
    exports = [{"name": name, "trainer": name, "shard_sequences": 7} for name in ("reward", "dpo")]
    return _with_exports(folder, PAIRS, *exports, packing={"pack": True}).build()


def test_rewards_are_whole_sides_and_dpo_has_the_prompt_once_in_the_order_of_training(pairs: Built) -> None:
    rewards, exported = _load(pairs, "reward")
    examples = pairs.examples("rows")
    expected = Counter((*(prompt + answer for prompt, answer in _sides(one)), one["margin"] or 0.0) for one in examples)
    assert len(examples) == 20
    assert Counter((tuple(row["chosen_ids"]), tuple(row["rejected_ids"]), row["margin"]) for row in rewards) == expected
    assert len(exported.files) == 3
    assert exported.card["trainer"] == "reward"
    assert exported.count("segments") == 40
    rows, exported = _load(pairs, "dpo")
    sides = [_sides(one) for one in examples]
    expected = Counter((chosen[0], chosen[1], rejected[1]) for chosen, rejected in sides)
    assert all(chosen[0] == rejected[0] for chosen, rejected in sides)
    assert rows.column_names == ["prompt_ids", "chosen_ids", "rejected_ids"]
    assert Counter(tuple(map(tuple, row.values())) for row in rows) == expected
    assert exported.count("tokens") == sum(len(one) for row in expected.elements() for one in row)
    assert [row["chosen_ids"] for row in rewards] == [row["prompt_ids"] + row["chosen_ids"] for row in rows]


def test_mixed_datasets_keep_the_columns_of_each_pair(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    short = [{"prompt": f"{i}?", "chosen": sentence(i, 4), "rejected": "no", "margin": i} for i in range(100, 130)]
    files = {"talks": [_record(i) for i in range(30)], "shorts": short}
    sets = {name: workspace.dataset(f"{name}.jsonl", records, PAIRS) for name, records in files.items()}
    exports = [{"kind": "trl_preference", "name": name, "trainer": name} for name in ("reward", "dpo")]
    mixed = {"train_weights": {"talks": 1, "shorts": 1}, "stop_strategy": "all_exhausted"}
    built = workspace.recipe(sets, seq_len=1024, exports=exports, mixture=mixed).build()
    rewards, answers = _load(built, "reward")[0], _load(built, "dpo")[0]
    pairs = [(_sides(one), one["margin"] or 0.0) for name in sets for one in built.examples(name)]
    expected = Counter((chosen[0], chosen[1], rejected[1], margin) for (chosen, rejected), margin in pairs)
    found = [(*map(tuple, one.values()), other["margin"]) for one, other in zip(answers, rewards, strict=True)]
    is_short = [margin >= 100 for *_, margin in found]
    assert Counter(found) == expected
    assert sorted(is_short) not in (is_short, is_short[::-1])


def test_kto_exchanges_answers_inside_a_block(tmp_path: Path) -> None:
    exports = [
        {"name": "plain", "trainer": "kto"},
        {"name": "blocks", "trainer": "kto", "kl_block": 6, "shard_sequences": 2},
    ]
    built = _with_exports(tmp_path, MARKED, *exports).build()
    plain, _ = _load(built, "plain")
    rows, exported = _load(built, "blocks")
    expected = Counter((*_sides(one)[0], one["sides"] == [1]) for one in built.examples("rows"))
    assert Counter((tuple(r["prompt_ids"]), tuple(r["completion_ids"]), r["label"]) for r in rows) == expected
    assert plain.to_list() == rows.remove_columns("KL_completion_ids").to_list()
    assert len(rows) == 40
    assert len(exported.files) == 4
    answers = rows["completion_ids"][:]
    for first in range(0, 40, 6):
        block = answers[first : first + 6]
        assert rows["KL_completion_ids"][first : first + 6] == [block[-1], *block[:-1]]


def test_exchanged_answer_fits_behind_its_prompt(tmp_path: Path) -> None:
    long = {"prompt": sentence(1, 60), "completion": "yes", "label": True}
    answer = {"prompt": "why", "completion": sentence(2, 80), "label": False}
    workspace = _with_exports(
        tmp_path, MARKED, {"name": "kto", "trainer": "kto", "kl_block": 2}, records=[long, answer]
    )
    text = workspace.config.read_text(encoding="utf-8").replace("seq_len: 1024", "seq_len: 120")
    workspace.config.write_text(text, encoding="utf-8")
    rows, _ = _load(workspace.build(), "kto")
    by_size = sorted(rows, key=lambda row: len(row["prompt_ids"]))
    short, filled = by_size
    assert len(filled["prompt_ids"]) + len(filled["KL_completion_ids"]) == 120
    assert filled["KL_completion_ids"] == short["completion_ids"][: len(filled["KL_completion_ids"])]
    assert len(filled["KL_completion_ids"]) < len(short["completion_ids"])


def _branches() -> list[dict[str, Any]]:
    def turns(word: str) -> list[Message]:
        return [assistant(f"{word} one"), user("more"), assistant(f"{word} two")]

    return [{"prompt": f"{i}?", "chosen": turns(f"good {i}"), "rejected": turns(f"bad {i}")} for i in range(4)]


def test_answer_with_untrained_tokens_inside_is_refused_or_accepted(tmp_path: Path) -> None:
    strict = _with_exports(tmp_path / "strict", PAIRS, {"name": "dpo"}, records=_branches())
    with pytest.raises(ConfigError, match=r"exports\.dpo: .* tokens without loss inside an answer, and TRL's DPOTrain"):
        strict.build()

    exports = [{"name": "dpo", "accept_untrained_as_trained": True}, {"name": "reward", "trainer": "reward"}]
    built = _with_exports(tmp_path / "lenient", PAIRS, *exports, records=_branches()).build()

    rows, exported = _load(built, "dpo")
    assert exported.card["accept_untrained_as_trained"] is True
    answers = [_sides(one)[0][1] for one in built.examples("rows")]
    assert Counter(tuple(row["chosen_ids"]) for row in rows) == Counter(answers)
    assert len(load_rows(built, "reward")) == 4


def test_pointer_shows_the_subclass_and_no_limit_of_trl(pairs: Built) -> None:
    said = {
        one.name: format_trainer_pointer(one, pairs.manifest("exports", one.name), "/data")
        for one in pairs.project.recipe.exports
    }

    assert "_prepare_dataset" not in said["reward"]
    for text in said.values():
        assert "max_length=None" in text
        assert "/data/data/*.parquet" in text
        ast.parse(text.replace("…", "*a"))
    assert "def _prepare_dataset(self, dataset, *args, **kwargs):\n        return dataset" in said["dpo"]
