"""Preferences: the shapes of pairs and of marked answers, what their prompt is, and one reason for each bad record."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError
from rowmill.kinds.reading.canonicalization import hash_row_content
from rowmill.schema.rows import Rejected, Row
from tests.support.row_reading import load, read

U, A, B = ({"role": role, "content": text} for role, text in (("user", "U1"), ("assistant", "A1"), ("assistant", "B1")))
U2, A2, B2 = ({**one, "content": one["content"].replace("1", "2")} for one in (U, A, B))
HH = ("\n\nHuman: U1\n\nAssistant: A1", "\n\nHuman: U1\n\nAssistant: B1")


def _read(record: Any, splits: dict[str, Any] | None = None, **options: Any) -> Row | Rejected:
    return read(record, {"kind": "preference", **options}, splits=splits or {})


def _row(record: Any, **options: Any) -> Row:
    row = _read(record, **options)
    assert isinstance(row, Row), row
    return row


def _sides(row: Row) -> tuple[list[Any], Any, Any]:
    return list(row.messages), *(json.loads(row.columns[name] or "null") for name in ("chosen", "rejected"))


SAME: list[tuple[str, dict[str, Any]]] = [
    ("explicit", {"prompt": "U1", "chosen": "A1", "rejected": "B1"}),
    ("explicit", {"prompt": [U], "chosen": [A], "rejected": [B]}),
    ("explicit", {"prompt": [U], "chosen": [U, A], "rejected": [U, B]}),
    ("explicit", {"question": "U1", "chosen_response": "A1", "rejected_response": "B1"}),
    ("explicit", {"prompt": "U1", "chosen": A, "rejected": B}),
    ("explicit", {"prompt": "U1", "chosen": [A], "rejected": [B]}),
    ("implicit", {"prompt": "U1", "chosen": [U, A], "rejected": [U, B], "messages": [U, A]}),
    ("implicit", {"chosen": [U, A], "rejected": [U, B]}),
    ("implicit", {"chosen_messages": [{**U, "loss_weight": 0.0}, A], "rejected_messages": [U, B]}),
    ("hh_text", dict(zip(("chosen", "rejected"), HH, strict=True))),
    ("sharegpt_pair", {"conversations": [{"from": "human", "value": "U1"}], "chosen": {"from": "gpt", "value": "A1"},
                       "rejected": {"from": "gpt", "value": "B1"}}),
    ("rejected_branch", {"messages": [U, A], "rejected_response": "B1"}),
    ("rejected_branch", {"messages": [U, A], "rejected_messages": [U, B]}),
    ("ranked", {"prompt": "U1", "completions": [{"completion": "B1", "score": 1}, {"completion": "A1", "score": 3},
                                                {"completion": "C1", "score": 2}]}),
    ("ranked", {"context": "U1", "completions": [{"response": "A1", "rank": 1}, {"response": "B1", "rank": 2}]}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "record"), SAME, ids=range(len(SAME)))
def test_every_shape_of_a_pair_gives_the_same_row(schema: str, record: dict[str, Any]) -> None:
    row = _row(record)

    assert row.report.schema == schema
    assert row.messages == (U,)
    plain = [[{key: one[key] for key in ("role", "content")} for one in side] for side in _sides(row)[1:]]
    assert plain == [[A], [B]]


def test_input_system_and_history_beside_an_instruction_belong_to_the_prompt() -> None:
    record = {"instruction": "U2", "input": "more", "system": "S", "history": [["U1", "A1"]],
              "chosen": "A2", "rejected": "B2"}  # fmt: skip

    row = _row(record)

    assert [one["content"] for one in row.messages] == ["S", "U1", "A1", "U2\nmore"]

    ranked = [{"completion": "A1", "score": 3}, {"completion": "B1", "score": 1}]

    row = _row({"instruction": "Add.", "input": "1 and 2", "completions": ranked})

    assert [one["content"] for one in row.messages] == ["Add.\n1 and 2"]


@pytest.mark.parametrize("label", [True, 1, False, 0])
def test_marked_answer_is_the_good_or_the_bad_side(label: Any) -> None:
    for record in ({"prompt": "U1", "completion": "A1", "label": label}, {"messages": [U, A], "kto_tag": label}):
        row = _row(record, objective="unpaired")

        assert _sides(row) == (([U], [A], None) if label else ([U], None, [A]))
        assert row.columns["label"] is bool(label)
        assert isinstance(_read(record), Rejected)


def test_prompt_ends_with_the_last_user_that_both_sides_have() -> None:
    row = _row({"messages": [U, A, U2, A2], "label": True}, objective="unpaired")

    assert _sides(row) == ([U, A, U2], [A2], None)

    row = _row({"chosen": [U, A, U2, A2], "rejected": [U, A, U2, B2]})

    assert _sides(row) == ([U, A, U2], [A2], [B2])
    assert _sides(_row({"chosen": [U, A, U2, A2], "rejected": [U, B]})) == ([U], [A, U2, A2], [B])


def test_exchanged_sides_exchange_only_the_sides() -> None:
    for _, record in SAME[:9]:
        chosen, rejected = (next(key for key in record if key.startswith(side)) for side in ("chosen", "rejected"))
        one, other = _row(record), _row({**record, chosen: record[rejected], rejected: record[chosen]})

        assert _sides(one)[0] == _sides(other)[0]
        assert _sides(one)[1:] == _sides(other)[:0:-1]
        assert one.group_key == other.group_key


@pytest.mark.parametrize(
    ("record", "field", "margin"),
    [
        ({"margin": 0.5}, "auto", 0.5),
        ({"score_chosen": 8, "score_rejected": 6.5}, "auto", 1.5),
        ({"score_chosen": 8}, "auto", None),
        ({}, "auto", None),
        ({"margin": 0.5}, None, None),
        ({"meta": {"gap": -1}}, "meta.gap", -1.0),
    ],
)
def test_margin_is_a_column_or_the_difference_of_scores(record: Any, field: str | None, margin: float | None) -> None:
    row = _row({"prompt": "U1", "chosen": "A1", "rejected": "B1", **record}, margin_field=field)

    assert row.columns["margin"] == margin


def test_rows_of_one_prompt_are_one_group_and_equal_in_their_sides() -> None:
    one, same = _row(SAME[0][1]), _row({**SAME[0][1], "margin": 2})
    other = _row({"prompt": "U1", "chosen": "A1", "rejected": "C1"})
    elsewhere = _row({"prompt": "U2", "chosen": "A1", "rejected": "B1"})

    assert hash_row_content(one) == hash_row_content(same)
    assert hash_row_content(one) != hash_row_content(other)
    assert one.group_key == other.group_key != elsewhere.group_key
    keyed = _row({**SAME[0][1], "topic": "x"}, splits={"group_key": "topic"})
    assert keyed.group_key == '"x"'


PAIR: dict[str, Any] = {"prompt": "U1", "chosen": "A1", "rejected": "B1"}
HOSTILE: list[tuple[Any, str]] = [
    ({}, "unknown_schema"), ([], "not_an_object"), ({"prompt": "U1", "chosen": "A1"}, "unknown_schema"),
    ({**PAIR, "rejected": "A1"}, "identical_sides"), ({**PAIR, "rejected": " "}, "empty_completion"),
    ({**PAIR, "rejected": []}, "empty_completion"), ({**PAIR, "rejected": {"a": 3}}, "bad_messages"),
    ({**PAIR, "prompt": 3}, "content_not_text"), ({**PAIR, "prompt": " "}, "empty_conversation"),
    ({**PAIR, "rejected": [3]}, "bad_messages"), ({**PAIR, "rejected": [{"content": "x"}]}, "bad_messages"),
    ({**PAIR, "margin": float("nan")}, "bad_margin"), ({**PAIR, "margin": "1"}, "bad_margin"),
    ({**PAIR, "margin": True}, "bad_margin"), ({**PAIR, "margin": 1e300}, "bad_margin"),
    ({**PAIR, "score_chosen": 3e38, "score_rejected": -3e38}, "bad_margin"),
    ({**PAIR, "prompt": "other", "chosen": [U, A], "rejected": [U, B]}, "prompt_mismatch"),
    ({**PAIR, "chosen": [U, A], "rejected": [B]}, "prompt_mismatch"),
    ({"chosen": [U, A], "rejected": [U2, B]}, "prompt_mismatch"),
    ({"chosen": [U, A], "rejected": [U, A, U2, B]}, "empty_completion"),
    ({"chosen": [U, A], "rejected": [U]}, "empty_completion"), ({"chosen": [], "rejected": [U]}, "empty_completion"),
    ({"chosen": [A], "rejected": [B]}, "prompt_mismatch"), ({"chosen": [U, U2], "rejected": [U, A]}, "prompt_mismatch"),
    ({"prompt": "U1", "completions": [{"completion": "A", "rank": 1}, {"completion": "B", "rank": 1}]}, "tied"),
    ({"prompt": "U1", "completions": [{"completion": "A", "rank": "1"}]}, "bad_messages"),
    ({"prompt": "U1", "completions": [{"words": "A", "rank": 1}, {"words": "B", "rank": 2}]}, "content_not_text"),
    ({"prompt": "U1", "completion": "A1", "label": True}, "unpaired_row"),
    ({"prompt": "U1", "completion": "A1", "label": "yes"}, "bad_label"),
    ({"prompt": "U1", "completion": "A1", "label": 2}, "bad_label"),
    ({"prompt": "U1", "completion": "A1", "label": 1.0}, "bad_label"),
    ({"messages": [A], "rejected_response": "B1"}, "prompt_mismatch"),
    ({"messages": [U, A], "rejected_response": "A1"}, "identical_sides"),
    ({"instruction": "U1", "input": 3, "chosen": "A", "rejected": "B"}, "content_not_text"),
    ({"instruction": "U1", "history": [3], "chosen": "A", "rejected": "B"}, "bad_messages"),
    ({"chosen": "\n\nHuman:", "rejected": "\n\nHuman: x"}, "prompt_mismatch"),
    ({**PAIR, "history": "We spoke before."}, "unread_prompt"),
    ({**PAIR, "choices": ["a", "b"]}, "unread_prompt"),
    ({**PAIR, "prompt": [U], "context": "what the prompt is about"}, "unread_prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_records_have_one_reason_each(record: Any, reason: str) -> None:
    made = _read(record)

    assert isinstance(made, Rejected), made
    assert made.reason == reason


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from([U, A, B, HH[0], HH[1]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "rank"]), inner),
    max_leaves=6,
)
_COLUMNS = (
    "prompt chosen rejected messages rejected_response rejected_messages completions label completion context "
    "conversations instruction history margin"
)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(_COLUMNS.split()), _VALUES), st.sampled_from(["paired", "unpaired"]))
def test_no_record_raises(record: dict[str, Any], objective: str) -> None:
    made = _read(record, objective=objective)

    assert isinstance(made, Rejected) or made.messages


@pytest.mark.parametrize(
    ("options", "groups", "part"),
    [
        ({}, {"truncation": {"overlong": "split"}}, "would divide a pair"),
        ({}, {"truncation": {"max_length": 40}}, "2 sides of an example are in one sequence; at most 32 fit"),
        ({}, {"packing": {"pack_strategy": "concat", "pack": None}}, "would divide a pair|concat"),
        ({}, {"packing": {"slice_strategy": "drop"}}, "does not read this option"),
        ({}, {"packing": {"block_cross_document_attention": False}}, "show one side to the other"),
        ({}, {"loss": {"weights": True}}, "does not read this option"),
    ],
)
def test_what_would_divide_a_pair_is_refused(options: dict[str, Any], groups: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        load({"kind": "preference"} | options, groups=groups)


def test_limit_of_a_side_is_half_a_sequence_of_a_pair() -> None:
    assert load({"kind": "preference"}).limit_of("rows") == 32
    assert load({"kind": "preference", "objective": "unpaired"}).limit_of("rows") == 64
    assert load({"kind": "preference"}, seq_len=65).limit_of("rows") == 32


def test_real_pairs_have_prompts_and_sides_and_marked_answers_their_labels(real_data: Path) -> None:
    records = json.loads((real_data / "preference/dpo_en_demo.json").read_text(encoding="utf-8"))
    lines = (real_data / "preference/v1_dpo_demo.jsonl").read_text(encoding="utf-8").split("\n")
    records += [json.loads(line) for line in lines if line]

    rows = [_row(record) for record in records]

    assert len(rows) == 310
    assert len({row.group_key for row in rows}) == 304
    assert len({hash_row_content(row) for row in rows}) == 305

    records = json.loads((real_data / "preference/kto_en_demo.json").read_text(encoding="utf-8"))

    rows = [_row(record, objective="unpaired") for record in records]

    assert [row.columns["label"] for row in rows] == [record["label"] for record in records]
