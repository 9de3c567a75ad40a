"""Prompts: where prompt, ground truth and data source are found, what is rejected, and what counts as equal."""

import json
from typing import Any

import pytest

from rowmill.core.errors import ConfigError
from rowmill.kinds.reading.canonicalization import hash_row_content
from rowmill.recipe import recipe
from rowmill.schema.rows import Rejected, Row
from tests.support.row_reading import load, read

USER, ANSWER = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}


def _read(record: Any, **options: Any) -> Row | Rejected:
    return read(record, {"kind": "prompts", **options})


def _row(record: Any, **options: Any) -> Row:
    row = _read(record, **options)
    assert isinstance(row, Row), row
    return row


def _reason(record: Any, **options: Any) -> str:
    row = _read(record, **options)
    assert isinstance(row, Rejected), row
    return row.reason


@pytest.mark.parametrize(
    ("record", "truth", "source"),
    [
        ({"question": "2 + 3?", "answer": "5"}, "5", ["rows"]),
        ({"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "5"}, "data_source": "gsm8k"}, "5",
         ["gsm8k"]),
        ({"prompt": [USER], "reward_spec": {"ground_truth": 5}}, 5, ["rows"]),
        ({"messages": [USER, ANSWER], "ground_truth": ["5", "five"], "dataset": ["math", "code"]}, ["5", "five"],
         ["math", "code"]),
        ({"prompt": USER, "solution": {"tests": [1]}}, {"tests": [1]}, ["rows"]),
        ({"conversations": None, "messages": [{"from": "human", "value": "2 + 3?"}], "label": 0}, 0, ["rows"]),
        ({"input": "2 + 3?", "label": "5", "datasource": "openrlhf"}, "5", ["openrlhf"]),
        ({"instruction": "2 +", "input": "3?", "expected_answer": "5", "data_source": 7}, "5", ["rows"]),
    ],
    ids=["text", "verl", "skyrl", "open-instruct", "one-message", "sharegpt", "openrlhf", "instruction"],
)  # fmt: skip
def test_prompt_truth_and_source_are_found_in_the_columns_of_trainers(
    record: dict[str, Any], truth: Any, source: list[str]
) -> None:
    row = _row(record)

    assert row.kind == "prompt"
    assert row.messages == ({"role": "user", "content": "2 +\n3?" if "instruction" in record else "2 + 3?"},)
    assert json.loads(row.columns["ground_truth"]) == truth
    assert row.columns["data_source"] == source


def test_pattern_takes_its_last_match_and_carried_fields_are_json_of_their_paths() -> None:
    record = {"question": "2 + 3?", "answer": "2 + 3 = #### 4\nno, #### 5"}

    assert json.loads(_row(record, ground_truth_pattern="#### (.+)$").columns["ground_truth"]) == "5"
    assert _reason({**record, "answer": "5"}, ground_truth_pattern="#### (.+)$") == "missing_ground_truth"
    assert _reason({**record, "answer": 5}, ground_truth_pattern="(.+)") == "missing_ground_truth"

    record = {"prompt": "2 + 3?", "answer": "5", "meta": {"level": 3}, "tests": [{"in": "x"}, None]}

    row = _row(record, carry_fields=["meta.level", "tests", "absent"])

    assert json.loads(row.columns["extra"]) == {"meta.level": 3, "tests": [{"in": "x"}, None], "absent": None}


def test_answer_at_the_end_is_dropped_or_becomes_the_truth_or_rejects() -> None:
    record = {"messages": [USER, ANSWER]}

    assert _reason(record) == "missing_ground_truth"
    assert _row(record, require_ground_truth=False).columns["ground_truth"] is None
    taken = _row(record, trailing_assistant="ground_truth")
    assert (taken.messages, taken.columns["ground_truth"]) == ((USER,), '"5"')
    assert _reason({**record, "answer": "5"}, trailing_assistant="reject") == "prompt_ends_with_assistant"
    assert _row({**record, "answer": "5"}).report.notes == ("trailing_assistant",)
    assert _reason({"messages": [ANSWER], "answer": "5"}) == "empty_conversation"


def test_equal_prompts_are_copies_whatever_their_truth_and_flags() -> None:
    first = _row({"prompt": [USER], "answer": "5", "data_source": "a"})
    second = _row({"prompt": [{**USER, "train": True}], "answer": "6"})
    other = _row({"prompt": [USER], "answer": "5", "tools": [{"type": "function", "function": {"name": "add"}}]})

    assert hash_row_content(first) == hash_row_content(second)
    assert hash_row_content(first) != hash_row_content(other)


HOSTILE: list[tuple[Any, str]] = [
    ({}, "missing_field"), ({"prompt": None, "answer": "5"}, "missing_field"), ({"prompt": " "}, "empty_text"),
    ({"prompt": 3, "answer": "5"}, "content_not_text"), ({"prompt": [], "answer": "5"}, "empty_conversation"),
    ({"prompt": [3], "answer": "5"}, "bad_messages"), ({"prompt": [[USER]], "answer": "5"}, "bad_messages"),
    ({"prompt": [{"role": "user", "content": {"a": 1}}], "answer": "5"}, "content_not_text"),
    ({"prompt": [{"content": "x"}], "answer": "5"}, "bad_messages"), ([], "not_an_object"), ("x", "not_an_object"),
    ({"prompt": "<image> 2 + 3?", "images": ["a.png"], "answer": "5"}, "multimodal_content"),
    ({"prompt": "2 + 3?", "reward_model": "rule"}, "missing_ground_truth"),
    ({"instruction": 3, "answer": "5"}, "content_not_text"),
    ({"instruction": "add", "input": "7", "answer": "5"}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("record", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_records_have_one_reason_each(record: Any, reason: str) -> None:
    made = _read(record)

    assert (made.reason if isinstance(made, Rejected) else "") == reason


@pytest.mark.parametrize(
    ("options", "groups", "part"),
    [
        ({"ground_truth_pattern": "("}, {}, "not a regular expression"),
        ({"ground_truth_pattern": "a"}, {}, "has 0 groups"),
        ({"ground_truth_pattern": "(a)(b)"}, {}, "has 2 groups"),
        ({}, {"truncation": {"overlong": "truncate"}}, "cannot be done to a prompt"),
        ({}, {"loss": {"supervise": "last_turn"}}, "does not read this group"),
        ({}, {"packing": {"pack": True}}, "does not read this group"),
        ({}, {"truncation": {"token_cut": "allow"}}, "does not read this option"),
    ],
)
def test_what_cannot_be_done_to_prompts_is_refused(options: dict[str, Any], groups: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        load({"kind": "prompts"} | options, groups=groups)


def test_one_recipe_has_one_objective() -> None:
    source = {"train_urls": ["a.jsonl"]}
    datasets = {"chats": {"source": source, "format": {"kind": "chat"}},
                "rows": {"source": source, "format": {"kind": "prompts"}}}  # fmt: skip

    with pytest.raises(ConfigError, match=r"datasets\.rows\.format\.kind: prompts has the objective prompts"):
        recipe.parse_recipe({"tokenizer": "t", "seq_len": 64, "datasets": datasets}, name="demo", where="demo.yaml")
