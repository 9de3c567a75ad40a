"""Preferences of plain text: ids are those of prompt, answer and EOS, without a template."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rowmill.schema.rows import Rejected
from tests.support.recipes import Workspace, sentence, tokenizer_json
from tests.support.row_reading import read

RAW: dict[str, Any] = {"kind": "preference", "text": "raw"}

EOS = 2


def _encode(text: str) -> list[int]:
    return Tokenizer.from_str(tokenizer_json()).encode(text).ids


def _record(i: int, **columns: Any) -> dict[str, Any]:
    return {"prompt": f" {sentence(i, 6)}\n", "chosen": f" {sentence(i + 1, 5)} ", "rejected": sentence(i, 9)} | columns


ASKED = "\n\nHuman: one?\n\nAssistant: two.\n\nHuman: three?\n\nAssistant:"


def test_texts_of_hh_are_parted_behind_the_last_marker_that_both_have(tmp_path: Path) -> None:
    record = {"chosen": f"{ASKED} four,\n\nAssistant of all.", "rejected": f"{ASKED} five. "}

    [example] = Workspace(tmp_path).one("a.jsonl", [record], RAW).examples()

    sides = [[*_encode(ASKED), *_encode(record[name].removeprefix(ASKED)), EOS] for name in ("chosen", "rejected")]
    assert example["input_ids"] == [*sides[0], *sides[1]]
    assert example["prompt_length"] == len(_encode(ASKED))
    assert [sum(example["loss_mask"][: len(sides[0])]), sum(example["loss_mask"])] == [
        len(sides[0]) - len(_encode(ASKED)),
        len(sides[0]) + len(sides[1]) - 2 * len(_encode(ASKED)),
    ]


HOSTILE_HH = [
    (ASKED + " a", ASKED + " a", "identical_sides"),
    (ASKED + " a", ASKED.removesuffix("\n\nAssistant:"), "empty_completion"),
    (ASKED + " a", ASKED + "  ", "empty_completion"),
    (ASKED + " a", ASKED + " b\n\nHuman: and?\n\nAssistant: c", "content_not_text"),
    ("\n\nHuman: one?\n\nAssistant: a", "\n\nHuman: two?\n\nAssistant: a", "prompt_mismatch"),
    (ASKED + " a", "\n\nHuman: one?\n\nAssistant: two.\n\nAssistant: three", "prompt_mismatch"),
]


@pytest.mark.parametrize(("chosen", "rejected", "reason"), HOSTILE_HH)
def test_texts_of_hh_that_cannot_be_parted_have_one_reason(chosen: str, rejected: str, reason: str) -> None:
    row = read({"chosen": chosen, "rejected": rejected}, RAW)

    assert isinstance(row, Rejected)
    assert row.reason == reason


@pytest.mark.parametrize("add_eos", ["auto", False])
def test_sides_are_prompt_answer_and_eos_exactly(tmp_path: Path, add_eos: Any) -> None:
    records = [_record(0), _record(1, chosen="<think>a</think> b", margin=0.5)]
    workspace = Workspace(tmp_path).one("a.jsonl", records, {**RAW, "add_eos": add_eos})

    examples = workspace.examples()

    end = [EOS] if add_eos else []
    for example, record in zip(examples, records, strict=True):
        prompt = _encode(record["prompt"])
        sides = [[*_encode(record[name]), *end] for name in ("chosen", "rejected")]
        assert example["input_ids"] == [*prompt, *sides[0], *prompt, *sides[1]]
        lengths = [len(prompt), len(sides[0]), len(prompt), len(sides[1])]
        assert example["loss_mask"] == [bool(k % 2) for k, length in enumerate(lengths) for _ in range(length)]
        assert (example["prompt_length"], example["margin"]) == (len(prompt), record.get("margin"))


@pytest.mark.slow
def test_texts_need_no_template_and_everything_else_is_rejected_with_a_reason(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    hostile = [
        (_record(1, chosen=[messages[1], messages[1]]), "content_not_text"),
        (_record(2, prompt=messages), "content_not_text"),
        (_record(3, rejected=" \n"), "empty_completion"),
        (_record(4, prompt=""), "prompt_mismatch"),
        (_record(5, chosen=sentence(5, 9)), "identical_sides"),
        (_record(6, chosen={"role": "user", "content": "b"}), "prompt_mismatch"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: b\n\nAssistant: b"}, "prompt_mismatch"),
        ({"chosen": 1, "rejected": 2, "prompt": 3}, "content_not_text"),
        (_record(7, chosen=sentence(1, 300)), "overlong_after_structure"),
    ]
    workspace = Workspace(tmp_path).one("a.jsonl", [_record(0), *(record for record, _ in hostile)], RAW)
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    named = {key: value for key, value in json.loads(config.read_text()).items() if key != "chat_template"}
    config.write_text(json.dumps(named))

    built = workspace.build()

    assert built.rejects() == [(i, reason) for i, (_, reason) in enumerate(hostile, start=1)]
    results = {one.check: one.outcome for _, found in built.steps.values() for one in found}
    assert (results["render_equal"], results["prompt_identical"]) == ("not_applicable", "passed")
    assert len(built.segments()) == 2


def test_unpaired_and_cut_answers(tmp_path: Path) -> None:
    form = {**RAW, "objective": "unpaired"}
    records = [{"prompt": "a b", "completion": sentence(1, 40), "label": True}, _record(2)]
    limits = {"max_length": 20, "token_cut": "allow"}

    examples = Workspace(tmp_path).one("a.jsonl", records, form, truncation=limits).examples()

    assert [(one["sides"], one["tokens"] <= 20) for one in examples] == [([1], True), ([1], True), ([0], True)]
    assert examples[0]["tokens_cut"] > 0
