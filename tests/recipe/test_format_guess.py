"""Guessing a format from records: each known shape, evidence that holds no data, and no guess where nothing fits.

What belongs here: records in, options out. What does not: files (`test_new_project.py`).
"""

from typing import Any

import pytest

from rowmill.formats.canonicalization import canonicalize_row
from rowmill.recipe.format_guess import PAIR_COLUMNS, guess_format
from rowmill.recipe.recipe import parse_recipe
from rowmill.schema.rows import Row

ASKED = {"role": "user", "content": "What is 1 + 1?"}
ANSWERED = {"role": "assistant", "content": "2"}
SECRET = "4111-1111"


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"messages": [ASKED, ANSWERED], "id": 1}, {"kind": "chat"}),
        ({"messages": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'}, {"kind": "chat"}),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, {"kind": "chat"}),
        ({"dialogue": [ASKED, ANSWERED], "tags": ["a"]}, {"kind": "chat", "messages_field": "dialogue"}),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, {"kind": "chat"}),
        (
            {"instruction": "a", "input": "", "output": "b"},
            {"kind": "supervised", "input_field": "instruction", "output_field": "output"},
        ),
        (
            {"question": "a", "answer": "b", "level": 1},
            {"kind": "supervised", "input_field": "question", "output_field": "answer"},
        ),
        ({"text": "a b c", "url": "x"}, {"kind": "text"}),
        ({"document": "a b c", "year": 1999}, {"kind": "text", "text_key": "document"}),
        ({"lines": "a b c"}, {"kind": "text", "text_key": "lines"}),
        ({"customer": "ada", "item": "tea", "price": 3}, {"kind": "records"}),
    ],
)
def test_guess_reads_the_records_it_was_made_from(record: dict[str, Any], options: dict[str, Any]) -> None:
    guess = guess_format([record] * 3)

    assert guess is not None
    assert guess.options == options
    if options["kind"] != "records":
        values = {
            "tokenizer": "t",
            "seq_len": 9,
            "datasets": {"d": {"source": {"train_urls": ["a.json"]}, "format": options}},
        }
        assert isinstance(canonicalize_row(record, parse_recipe(values, name="r", where="r").datasets["d"]), Row)


@pytest.mark.parametrize("pair", PAIR_COLUMNS)
def test_every_pair_of_columns_is_a_format_that_reads_it(pair: tuple[str, str]) -> None:
    prompt, response = pair

    guess = guess_format([{prompt: "a", response: "b"}])

    assert guess is not None
    assert (guess.options["input_field"], guess.options["output_field"]) == pair


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASKED], "reward_model": {"style": "rule"}},
        {"chosen_messages": [ASKED, ANSWERED], "rejected_messages": [ASKED, ANSWERED]},
        {"turns": ["a", "b"], "id": 1},
        {},
    ],
    ids=["prompts without answers", "preference pairs", "lists of text", "nothing"],
)
def test_no_guess_where_no_format_fits(record: dict[str, Any]) -> None:
    assert guess_format([record]) is None


def test_minority_does_not_decide() -> None:
    guess = guess_format([{"text": "a"}, {"text": "b"}, {"messages": [ASKED, ANSWERED]}])

    assert guess is not None
    assert guess.options == {"kind": "text"}


def test_evidence_names_columns_and_types_and_no_value() -> None:
    guess = guess_format([{"messages": [{**ASKED, "content": SECRET}, ANSWERED], "label": True, "card": SECRET}])

    assert guess is not None
    assert guess.columns == {"messages": "list", "label": "boolean", "card": "string"}
    assert "`messages` is a list of messages in 1 of 1 records" in guess.evidence[0]
    assert "`label` is a column of preference data" in guess.evidence[1]
    assert SECRET not in "".join(guess.evidence)
