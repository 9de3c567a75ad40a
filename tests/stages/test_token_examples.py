"""Token rows through the stages: ids and masks are those of the records, packed like other examples."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.recipes import LENIENT, TO_EXAMPLES, Workspace, chat

pytestmark = pytest.mark.slow

TOKENS: dict[str, Any] = {"kind": "tokens"}


def test_exported_examples_read_in_as_tokens_are_equal_and_pack(tmp_path: Path) -> None:
    examples = Workspace(tmp_path / "chats").one("a.jsonl", [chat(i, turns=2) for i in range(40)]).examples()
    records = [{"input_ids": one["input_ids"], "loss_mask": one["loss_mask"]} for one in examples]

    made = Workspace(tmp_path / "tokens").one("a.jsonl", records, TOKENS).build()

    for one, again in zip(examples, made.examples(), strict=True):
        assert all(one[name] == again[name] for name in ("input_ids", "loss_mask", "trained_tokens"))
    packed = made.manifest("rows", "packed_shards")
    assert packed.facts["segments"] == 40
    assert packed.facts["sequences"] < 40
    assert packed.facts["trained_tokens"] == sum(sum(one["loss_mask"]) for one in examples)
    assert "failed" not in made.outcomes("rows", "tokenized_examples").values()
    assert made.facts("rows", "tokenized_examples")["same_tokenization"] == 1
    rows = made.rows_of("rows", "packed_shards", file="shard")
    names = [name for row in rows for name in row["example_ids"]]
    assert len(set(names)) == 40


def test_ids_outside_the_vocabulary_are_rejected_and_holes_in_it_close_the_gate(tmp_path: Path) -> None:
    size = 600
    records = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6, size + 9], "loss_mask": [0, 1, 1]},
    ]
    narrow = Workspace(tmp_path / "narrow").one("a.jsonl", records, TOKENS)
    wide = Workspace(tmp_path / "wide").one("a.jsonl", records, TOKENS, vocab_size=size + 100)

    rejected = narrow.build(only=TO_EXAMPLES)
    unknown = wide.build(only=TO_EXAMPLES)

    assert [line[1:] for line in rejected.manifest("rows", "tokenized_examples").ledger[1:]] == [("bad_tokens", 1)]
    assert (
        rejected.facts("rows", "tokenized_examples")["unknown_ids"],
        unknown.facts("rows", "tokenized_examples")["unknown_ids"],
    ) == (0, 1)
    assert unknown.outcomes("rows", "tokenized_examples")["unknown_ids"] == "failed"


def test_ids_of_a_teacher_outside_the_vocabulary_are_rejected(tmp_path: Path) -> None:
    record = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    records = [record | {"teacher_ids": [[8, 9], [10, last]]} for last in (599, 600)]
    kind = TOKENS | {"token_fields": {"teacher_ids": {"type": "int32", "size": 2}}}

    built = Workspace(tmp_path).one("a.jsonl", records, kind).build(only=TO_EXAMPLES)

    assert built.rejects() == [(1, "bad_field")]
    assert built.details() == ["teacher_ids holds 600; ids are 0 to 599"]
    assert [one["teacher_ids"] for one in built.examples()] == [[[0, 0], [8, 9], [10, 599]]]


def test_ids_of_another_tokenizer_are_noticed(tmp_path: Path) -> None:
    records = [{"input_ids": [(7 * i + k) % 250 + 3 for k in range(30)], "response_length": 10} for i in range(20)]

    made = Workspace(tmp_path).one("a.jsonl", records, TOKENS).build(only=TO_EXAMPLES)

    assert made.facts("rows", "tokenized_examples")["same_tokenization"] < 0.5
    assert made.outcomes("rows", "tokenized_examples")["same_tokenization"] == "failed"


@pytest.mark.parametrize(
    ("truncation", "lengths"),
    [
        ({}, [20]),
        ({"overlong": "truncate", "token_cut": "allow"}, [64, 20]),
        ({"overlong": "truncate", "token_cut": "allow", "truncate_side": "right"}, [64, 20]),
        ({"overlong": "keep"}, [100, 20]),
    ],
    ids=["drop", "left", "right", "keep"],
)
def test_overlong_rows_are_dropped_cut_or_kept(tmp_path: Path, truncation: dict[str, Any], lengths: list[int]) -> None:
    records = [{"input_ids": list(range(3, 103)), "response_length": 99}, {"input_ids": list(range(3, 23)),
                "response_length": 9}]  # fmt: skip

    made = Workspace(tmp_path).one("a.jsonl", records, TOKENS, truncation={"max_length": 64, **truncation}).examples()

    assert [len(one["input_ids"]) for one in made] == lengths
    if "truncate_side" in truncation:
        assert made[0]["input_ids"] == list(range(3, 67))
    elif lengths[0] == 64:
        assert made[0]["input_ids"] == list(range(39, 103))


def test_token_rows_mix_with_chats(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    rollouts = [{"input_ids": [i + 3, 6, 7], "response_length": 2} for i in range(20)]
    datasets = {
        "chats": workspace.dataset("chats.jsonl", [chat(i) for i in range(20)]),
        "rollouts": workspace.dataset("r.jsonl", rollouts, TOKENS),
    }

    made = workspace.recipe(datasets, gates=LENIENT | {"same_tokenization": {"at_least": 0}}).build()

    assert made.facts("training_splits")["sequences"] > 0
