"""Prompts through the stages: ids with the generation prompt, none trained, and the ground truth beside them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import ContextOverflowError
from rowmill.schema.shard_counts import PackingCounts
from rowmill.stages.packed_shards.stage import identify_packed_shards
from rowmill.stages.tokenized_examples.stage import identify_tokenized_examples
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer
from tests.end_to_end.test_row_vectors import workspace as vector_workspace
from tests.support.recipes import CHAT, CHATML, TO_EXAMPLES, TO_ROWS, TO_SHARDS, Workspace, sentence

PROMPTS: dict[str, Any] = {"kind": "prompts"}


def _vector(folder: Path, limit: int, **row: Any) -> list[dict[str, Any]]:
    record = {"prompt": "U1", "answer": "A1", **row}
    return vector_workspace(folder).one("a.jsonl", [record], PROMPTS, truncation={"max_length": limit}).examples()


@pytest.mark.slow
def test_vector_of_the_specification_has_twelve_ids_and_no_target(tmp_path: Path) -> None:
    [example] = _vector(tmp_path / "12", 12)

    assert len(example["input_ids"]) == 12
    assert not any(example["loss_mask"])
    assert (example["context_tokens"], example["template_tokens"], example["trained_tokens"]) == (2, 10, 0)
    assert (example["ground_truth"], example["data_source"], example["extra"]) == ('"A1"', ["rows"], None)
    assert _vector(tmp_path / "11", 11) == []


def _records(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{sentence(i, 6)} why?", "answer": f"so #### {i}", "level": i % 3} for i in range(count)]


def test_ids_are_those_of_the_template_with_its_generation_prompt(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    workspace = Workspace(tmp_path).one("a.jsonl", _records(20), PROMPTS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    examples = workspace.examples()

    assert len(examples) == 20
    for example, record in zip(examples, _records(20), strict=True):
        asked = [{"role": "user", "content": record["question"]}]
        wanted = tokenizer.apply_chat_template(asked, chat_template=CHATML, add_generation_prompt=True, tokenize=False)
        assert example["input_ids"] == tokenizer.encode(wanted, add_special_tokens=False)

    workspace = Workspace(tmp_path).one("a.jsonl", [{"prompt": "say <|im_end|> twice", "answer": "5"}], PROMPTS)

    [example] = workspace.examples()

    encoder = Encoder(open_tokenizer(str(tmp_path / "tokenizer"), tmp_path))
    text = encoder.decode(example["input_ids"])
    assert text == "<|im_start|>user\nsay <|im_end|> twice<|im_end|>\n<|im_start|>assistant\n"
    assert example["input_ids"].count(encoder.encode(["<|im_end|>"]).ids[0]) == 1


def test_short_prompts_of_a_long_context_share_a_shard(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)

    made = workspace.one("a.jsonl", _records(40), PROMPTS, seq_len=1 << 17, gates={}).build(only=TO_SHARDS)

    assert [file.rows for file in made.manifest("rows", "packed_shards").files("shard")] == [40]
    # A sequence is one prompt, so that it is nearly empty by design.
    results = made.outcomes("rows", "packed_shards")
    assert made.manifest("rows", "packed_shards").get_counts(PackingCounts).share_filled() < 0.01
    assert "fill" not in results
    assert "failed" not in results.values()


@pytest.mark.slow
def test_prompts_are_built_to_ranks_and_what_needs_a_target_does_not_apply(tmp_path: Path) -> None:
    form = {**PROMPTS, "ground_truth_pattern": "#### (.+)$", "carry_fields": ["level"]}
    workspace = Workspace(tmp_path).one("a.jsonl", [*_records(40), {"question": "nothing?", "answer": "none"}], form)

    made = workspace.build()

    rows = made.manifest("rows", "canonical_rows")
    assert dict(row[:2] for row in rows.tables["rejects"].rows) == {"missing_ground_truth": 1}
    results = {result.check: result.outcome for _, found in made.steps.values() for result in found}
    assert "failed" not in results.values()
    assert (results["zero_loss_rows"], results["empty_step"]) == ("not_applicable", "not_applicable")
    packed = made.facts("rows", "packed_shards")
    assert (packed["sequences"], packed["segments"], packed["trained_tokens"]) == (40, 40, 0)
    examples = made.manifest("rows", "tokenized_examples")
    own = ["messages", "tools", "template_kwargs", "ground_truth", "data_source", "extra"]
    assert [name for name, _ in examples.schema][-6:] == own
    rows = made.rows_of("rows", "packed_shards", file="shard")
    assert {tuple(row["ground_truth"]) for row in rows} == {(json.dumps(str(i)),) for i in range(40)}
    asked = [json.loads(text) for row in rows for text in row["messages"]]
    assert sorted(one["content"] for [one] in asked) == sorted(record["question"] for record in _records(40))
    assert {(str(row["data_source"]), str(row["extra"])) for row in rows} == {
        (str([["rows"]]), str([json.dumps({"level": level}, separators=(",", ":"))])) for level in range(3)
    }
    order = made.facts("training_splits")
    assert order["rank_balance"] < 0.2


def test_columns_of_prompts_are_part_of_the_identity_of_their_stages(tmp_path: Path) -> None:
    source = {"train_urls": ["data/a.jsonl"]}
    forms = {"asked": PROMPTS, "chats": CHAT}
    recipes = {
        name: Workspace(tmp_path).recipe({name: {"source": source, "format": form}}).project.recipe
        for name, form in forms.items()
    }

    for decides in (lambda of: identify_tokenized_examples(recipes[of], of)["examples"],
                    lambda of: identify_packed_shards(recipes[of], of)):  # fmt: skip
        assert "messages string" in decides("asked")["columns"]
        assert decides("chats")["columns"] == []


def test_copies_of_a_prompt_with_other_truths_warn(tmp_path: Path) -> None:
    records = [*_records(5), {"question": _records(1)[0]["question"], "answer": "other"}]
    workspace = Workspace(tmp_path).one("a.jsonl", records, PROMPTS)

    made = workspace.build(only=TO_ROWS)

    facts = made.facts("rows", "canonical_rows")
    assert (facts["ground_truth_conflicts"], facts["kept"]) == (1, 5)
    result = made.result("ground_truth_conflicts", "rows", "canonical_rows")
    assert (result.passed, result.blocking) == (False, False)


@pytest.mark.slow
def test_overlong_prompts_are_dropped_kept_or_stop_the_build(tmp_path: Path) -> None:
    records = [{"prompt": sentence(1, 200), "answer": "5"}, {"prompt": "short?", "answer": "6"}]

    def build(policy: str) -> Any:
        workspace = Workspace(tmp_path / policy)
        options = {"max_length": 64, "overlong": policy}
        return workspace.one("a.jsonl", records, PROMPTS, truncation=options).build().manifest("rows", "packed_shards")

    assert build("drop").facts["segments"] == 1
    assert build("keep").facts["segments"] == 2
    with pytest.raises(ContextOverflowError, match="1 row is longer than 64 tokens"):
        build("raise")


@pytest.mark.slow
def test_real_prompts_keep_their_truths(tmp_path: Path, real_data: Path) -> None:
    form = {**PROMPTS, "ground_truth_pattern": "#### (.+)$"}
    content = (real_data / "math/gsm8k_train.jsonl").read_bytes()
    workspace = Workspace(tmp_path)
    workspace.recipe({"gsm8k": workspace.dataset("gsm8k_train.jsonl", content, form)}, seq_len=1024)

    made = workspace.build(only=TO_EXAMPLES)

    rows = made.facts("gsm8k", "canonical_rows")
    assert (rows["records"], rows["rejected"], rows["ground_truth_conflicts"]) == (7473, 0, 0)
    assert made.manifest("gsm8k", "canonical_rows").tables["schemas"].rows == (("question", 7473),)
    examples = made.manifest("gsm8k", "tokenized_examples")
    assert examples.facts["examples"] == 7473
    table = made.project.store.table(examples.files("examples")[0], ["ground_truth", "data_source"])
    assert json.loads(table.column("ground_truth")[0].as_py()) == "72"
    assert table.column("data_source")[0].as_py() == ["gsm8k"]
