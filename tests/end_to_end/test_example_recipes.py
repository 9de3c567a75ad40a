"""The recipes in `configs/examples` are what the how-tos say: each loads, builds and gives what its page promises."""

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from rowmill.build import steps
from rowmill.build.in_memory import sft_tokenize
from rowmill.recipe import recipe
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.rows import Rejected
from tests.docs.test_docs import blocks
from tests.support.recipes import Built, build_project

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs/examples/rows"


@pytest.fixture
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Built:
    """Build the recipe that the test is named for, as far as its tokens."""
    marker = request.node.get_closest_marker("example")
    project = steps.open_project(FOLDER / f"{marker.args[0]}.yaml", str(tmp_path))
    return build_project(project, only=("raw_dataset", "canonical_rows", "tokenized_examples"))


def rows_of(built: Built, dataset: str) -> list[dict[str, Any]]:
    return built.rows_of(dataset, "canonical_rows", file="rows")


def rejects(built: Built, dataset: str) -> Counter[str]:
    return Counter(reason for _, reason in built.rejects(dataset))


def test_examples_are_no_part_of_the_demo() -> None:
    demo = {path.stem for path in recipe.find_recipes(ROOT / "configs")}
    assert demo.isdisjoint(path.stem for path in (ROOT / "configs/examples").glob("*/*.yaml"))


def test_every_example_has_a_test_and_a_page() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/coming-from").glob("*.md"))

    for path in FOLDER.glob("*.yaml"):
        assert f'mark.example("{path.stem}")' in here
        assert path.stem in pages or path.stem.startswith("own-")


@pytest.mark.parametrize(
    ("page", "name"),
    [("qlora-train", "qlora-train"), ("astrai", "astrai"), ("evsys", "evsys"), ("levanter", "levanter-formats")],
)
def test_page_links_the_recipe_of_the_folder(page: str, name: str) -> None:
    text = (ROOT / f"docs/coming-from/{page}.md").read_text(encoding="utf-8")

    assert f"](../../configs/examples/rows/{name}.yaml)" in text
    assert (FOLDER / f"{name}.yaml").is_file()


@pytest.mark.parametrize(
    "name",
    [
        "coming-from/qlora-train",
        "coming-from/evsys",
        "coming-from/astrai",
        "how-to/choose-a-template",
        "your-own-format",
    ],
)
def test_python_on_a_page_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [shown, *_] = blocks(ROOT / f"docs/{name}.md", "python")
    assert "assert" in shown
    exec(compile(shown, name, "exec"), {})


@pytest.mark.example("qlora-train")
def test_qlora_train_answers_train_and_reasoning_does_not(built: Built) -> None:
    examples = built.examples("chats")
    reasoning = 0
    for one in examples:
        starts = [*one["span_starts"], one["tokens"]]
        for kind, start, stop in zip(one["span_kinds"], starts, starts[1:], strict=False):
            if SPAN_KINDS[kind] == "reasoning":
                reasoning += 1
                assert stop - start <= 64
                assert not any(one["loss_mask"][start:stop])
            elif SPAN_KINDS[kind] in ("user", "system", "tool_result"):
                assert not any(one["loss_mask"][start:stop])
    assert reasoning > 50
    assert all(one["tokens"] <= 512 for one in examples)
    assert any(one["exchanges_removed"] for one in examples)


@pytest.mark.example("astrai")
def test_astrai_mask_filters_and_domains(built: Built) -> None:
    chats, tasks, texts = (rows_of(built, name) for name in ("chats", "tasks", "documents"))

    assert {row["domain"] for row in chats} > {"classroom"}
    assert {row["domain"] for row in texts} > {"Notes 1"}
    assert all(len(row["text"]) >= 50 for row in texts)
    assert rejects(built, "documents")["too_short"] == 1
    assert rejects(built, "tasks")["duplicate"] > 0
    assert len(chats) <= 200
    for one in built.examples("tasks"):
        answer = one["span_starts"][one["span_kinds"].index(SPAN_KINDS.index("assistant"))]
        assert one["loss_mask"] == [i >= answer for i in range(one["tokens"])]
    assert tasks
    assert built.examples("exercises")


@pytest.mark.parametrize("template", [None, "chatml"])
def test_astrai_masks_whole_messages_with_the_options_of_the_page(template: str | None) -> None:
    from transformers import AutoTokenizer

    page = (ROOT / "docs/coming-from/astrai.md").read_text(encoding="utf-8")
    options = yaml.safe_load(page.split("```yaml\n")[1].partition("```")[0])
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/demo/tokenizer", bos_token="<|endoftext|>")
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": f"Text {i}."} for i, role in enumerate(roles)]
    options["template"] = {"chat_template": template}
    [made] = sft_tokenize([{"messages": messages}], tokenizer, max_seq_len=512, options=options)
    assert not isinstance(made, Rejected)
    [tokens] = made
    texts = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages]
    alone = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert tokens.ids.tolist() == [tokenizer.bos_token_id, *chain.from_iterable(alone)]
    trains = ([role == "assistant"] * len(ids) for role, ids in zip(roles, alone, strict=True))
    assert tokens.loss_mask.tolist() == [False, *chain.from_iterable(trains)]


@pytest.mark.example("evsys")
def test_evsys_last_answer_trains_a_part_of_every_answer(built: Built) -> None:
    every = {one["row_ids"][0]: one for one in built.examples("every_answer")}
    last = {one["row_ids"][0]: one for one in built.examples("last_answer")}

    assert every.keys() == last.keys()
    assert rejects(built, "every_answer")["no_assistant"] == 1
    fewer = 0
    for name, one in last.items():
        assert one["input_ids"] == every[name]["input_ids"]
        assert all(wide or not narrow for narrow, wide in zip(one["loss_mask"], every[name]["loss_mask"], strict=True))
        fewer += one["trained_tokens"] < every[name]["trained_tokens"]
    assert fewer > 20


@pytest.mark.example("levanter-formats")
def test_levanter_formats_single_turns_and_everything(built: Built) -> None:
    for row in rows_of(built, "chats"):
        roles = [message["role"] for message in json.loads(row["messages"])]
        assert roles.count("user") <= 1
        assert roles.count("assistant") <= 1
    for one in built.examples("everything"):
        assert one["loss_mask"] == [i > 0 for i in range(one["tokens"])]
    for one in built.examples("tasks"):
        assert one["loss_mask"][-1]
        assert not one["loss_mask"][0]
    assert len(built.examples("documents")) > 200


@pytest.mark.example("own-rows")
def test_own_rows_are_conversations_and_pairs(built: Built) -> None:
    rows = rows_of(built, "exercises")

    assert {row["kind"] for row in rows} == {"conversation", "pair"}
    assert {row["domain"] for row in rows} == {"quoted", "bare", "pairs"}
    assert rejects(built, "exercises").keys() <= {"skipped_by_format", "duplicate", "overlong"}
    assert len(built.examples("exercises")) == len(rows)


@pytest.mark.example("own-tokens")
def test_own_tokens_train_the_first_words(built: Built) -> None:
    for one in built.examples("documents"):
        assert one["loss_mask"] == [0 < i < 64 for i in range(one["tokens"])]
    assert len(built.examples("documents")) > 50
