"""Filters: lengths, and which rows are equal."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rowmill.core.json import Json
from rowmill.kinds.base import DatasetOptions
from rowmill.kinds.catalog import Auto, Chat
from rowmill.kinds.reading.canonicalization import Canonicalizer, hash_row_content
from rowmill.kinds.shared.filters import (
    Filters,
    hash_record_prefix,
)
from rowmill.schema.rows import Rejected, Row
from tests.support.canonical_rows import kept


def row_of(record: Json) -> Row:
    return kept(record, Auto())


def dialogue(**message: Json) -> dict[str, Json]:
    return {"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A", **message}]}


@pytest.mark.parametrize(("length", "reason"), [(2, "too_short"), (3, None), (5, None), (6, "too_long")])
def test_length_limits_are_inclusive(length: int, reason: str | None) -> None:
    read = Canonicalizer(DatasetOptions(format=Auto(), filters=Filters(min_chars=3, max_chars=5)))

    row = read({"text": "x" * length})

    assert (row.reason if isinstance(row, Rejected) else None) == reason


def test_length_of_a_document_is_checked_and_chats_have_none() -> None:
    options = DatasetOptions(format=Auto(), filters=Filters(min_chars=3))

    assert Canonicalizer(options)({"text": "ab"}) == Rejected("too_short", "2 characters, at least 3")
    assert isinstance(Canonicalizer(options)(dialogue()), Row)

    assert isinstance(Canonicalizer(DatasetOptions(format=Chat(), filters=Filters(min_chars=99)))(dialogue()), Row)


@pytest.mark.parametrize(("given_", "meant"), [(True, "exact"), (False, "off"), ("prefix200", "prefix200")])
def test_deduplicate_accepts_yaml_booleans(given_: Json, meant: str) -> None:
    assert Filters(deduplicate=given_).deduplicate == meant


@pytest.mark.parametrize(
    "wrong", [{"deduplicate": 1}, {"max_items": 0}, {"max_items": True}, {"min_chars": 3, "max_chars": 2}]
)
def test_wrong_option_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Filters(**wrong)


@pytest.mark.parametrize(
    ("change", "beside"),
    [
        *(
            (change, {})
            for change in (
                {"content": "B"}, {"role": "user"}, {"reasoning": "r"}, {"tool_calls": [{"name": "f"}]},
                {"train": False}, {"weight": 0},
            )
        ),
        ({}, {"tools": [{"name": "f"}]}),
        ({}, {"chat_template_kwargs": {"x": 1}}),
    ],
)  # fmt: skip
def test_content_hash_distinguishes_messages_and_other_fields(change: dict[str, Json], beside: dict[str, Json]) -> None:
    assert hash_row_content(row_of(dialogue())) != hash_row_content(row_of({**dialogue(**change), **beside}))


def test_content_hash_is_of_what_a_row_says_and_the_prefix_hash_of_its_beginning() -> None:
    sharegpt = {"id": 7, "conversations": [{"value": "U", "from": "human"}, {"from": "gpt", "value": "A"}]}
    extras = {"messages": [{"content": "U", "role": "user", "time": 1}, {"role": "assistant", "content": "A"}]}

    hashes = {
        hash_row_content(row_of(record)) for record in (dialogue(), sharegpt, extras, {"prompt": "U", "answer": "A"})
    }
    assert len(hashes) == 1
    assert len(hashes.pop()) == 16

    assert hash_row_content(Row("text", text="x")) != hash_row_content(Row("pair", text="x"))

    system = {"role": "system", "content": "s" * 150}
    records: list[dict[str, Json]] = [{"messages": [system, *dialogue(content=text)["messages"]]} for text in "AB"]

    assert len({hash_row_content(row_of(record)) for record in records}) == 2
    assert len({hash_record_prefix(record) for record in records}) == 1


@given(st.text(alphabet="aé€😀", min_size=195, max_size=230))
def test_prefix_hash_counts_characters_not_bytes(text: str) -> None:
    """The record begins with six characters of its own: `{"a":"`."""
    assert hash_record_prefix({"a": text}) == hash_record_prefix({"a": text[:194] + "x"})
    assert hash_record_prefix({"a": text}) != hash_record_prefix({"a": text[:193] + "x" + text[194:]})
