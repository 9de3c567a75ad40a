"""Canonical rows: no JSON value raises, Arrow's nulls are removed, group and order keys, real data."""

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.conversation.options import Template
from rowmill.core.json import Json, to_json
from rowmill.kinds.base import DatasetOptions
from rowmill.kinds.catalog import Auto, Chat, Supervised, Text
from rowmill.kinds.reading.canonicalization import (
    Canonicalizer,
    hash_plain_chat,
    hash_row_content,
    list_present_columns,
    remove_nulls,
)
from rowmill.kinds.shared.reasoning import Reasoning
from rowmill.schema.ledger import REJECT_REASONS
from rowmill.schema.rows import ParseReport, PlainChat, Rejected, Row, make_plain_report
from tests.end_to_end.test_real_rows import read_records
from tests.support.canonical_rows import canonicalize_row, kept, rejection

COLUMNS = [
    *("messages", "conversations", "prompt", "question", "response", "completion", "answer", "instruction", "input"),
    *("output", "history", "system", "text", "tools", "functions", "chat_template_kwargs", "sys", "id"),
]
KEYS = [
    *("role", "content", "from", "value", "type", "text", "reasoning", "reasoning_content", "tool_calls", "name"),
    *("function_call", "function", "arguments", "id", "tool_call_id", "train", "weight", "loss_weight", "input"),
]
WORDS = st.sampled_from(
    [
        *("user", "assistant", "system", "tool", "human", "gpt", "function_call", "think", "critic", "f", "", " "),
        *("<think>r</think>A", "<think>", "</think>", "{", "[]", "{}", "null", '{"name": "f"}', '[{"role": "user"}]'),
        *("reasoning", "tool_use", "image", "merge"),
    ]
)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats()
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
VALUES: st.SearchStrategy[Json] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=5)
        | st.fixed_dictionaries({"role": WORDS, "content": inner}, optional={"tool_calls": inner, "weight": inner})
        | inner.map(lambda value: orjson.dumps(value, default=str).decode() if _is_json(value) else "?")
    ),
    max_leaves=12,
)
ROLES = st.sampled_from(["user", "assistant", "assistant", "system", "tool", "gpt", "function_call", "think", "critic"])
CALLS = st.lists(st.fixed_dictionaries({"name": WORDS}, optional={"arguments": VALUES, "id": VALUES}), max_size=2)
EXTRAS: dict[str, st.SearchStrategy[Json]] = {
    "tool_calls": CALLS | VALUES,
    "reasoning": WORDS | VALUES,
    "reasoning_content": WORDS | VALUES,
    "train": VALUES,
    "weight": st.sampled_from([0, 1, 0.5, None]) | VALUES,
    "name": VALUES,
}


def messages_with(role: str, content: str) -> st.SearchStrategy[list[Json]]:
    optional = {key: value | st.none() for key, value in EXTRAS.items()}
    plain = st.fixed_dictionaries({role: ROLES, content: WORDS})
    return st.lists(
        plain | st.fixed_dictionaries({role: ROLES, content: WORDS | VALUES}, optional=optional), max_size=5
    )


MESSAGES = messages_with("role", "content")
RECORDS = st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=5) | st.fixed_dictionaries(
    {"messages": MESSAGES, "conversations": messages_with("from", "value")},
    optional={"tools": CALLS | VALUES, "chat_template_kwargs": VALUES, "sys": WORDS | VALUES},
)
CONFIGS = [
    DatasetOptions(format=Auto()),
    DatasetOptions(format=Chat(system_prompt="sys", single_turn=True, unknown_roles="reject")),
    DatasetOptions(format=Chat(dataset_schema="sharegpt"), reasoning=Reasoning(think_mode="drop")),
    DatasetOptions(
        format=Chat(dataset_schema="messages", domain_key="id"), reasoning=Reasoning(extract_think_tags=False)
    ),
    DatasetOptions(format=Chat(prompt_fields=["instruction"], on_existing_system="replace", system_prompt="system")),
    DatasetOptions(format=Supervised()),
    DatasetOptions(format=Text()),
]


def _is_json(value: Json) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


# Invariants


@pytest.mark.slow
@given(st.lists(RECORDS, max_size=4), st.sampled_from(CONFIGS))
def test_row_does_not_depend_on_the_records_read_before_it(records: list[Json], config: DatasetOptions) -> None:
    kept = Canonicalizer(config)

    assert [repr(kept(record)) for record in records] == [repr(canonicalize_row(record, config)) for record in records]


@pytest.mark.slow
@given(
    RECORDS | st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": ROLES, "content": WORDS}), max_size=3)},
        optional={"images": WORDS | VALUES, "label": VALUES, "tools": VALUES, "system": WORDS | VALUES, "id": WORDS},
    ),
    st.sampled_from(CONFIGS),
    st.booleans(),
)  # fmt: skip
def test_plain_chat_is_the_row_that_reading_the_record_gives(
    record: dict[str, Json], config: DatasetOptions, arrow: bool
) -> None:
    reader = Canonicalizer(config)
    chat = reader.read_plain(record)

    if chat is not None:
        report = make_plain_report(chat.schema)
        whole = Row("conversation", tuple(chat.messages), report=report, read_columns=chat.read_columns)
        assert reader.read(record, arrow=arrow) == (whole,)
        assert not list_present_columns(record, reader.unread_preferences)
        assert hash_plain_chat(chat.messages) == hash_row_content(whole)


HI: list[Json] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("record", "schema", "columns"),
    [
        ({"messages": HI, "id": "7"}, "messages", ("messages",)),
        ({"messages": to_json(HI)}, "messages", ("messages",)),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
            "sharegpt",
            ("conversations",),
        ),
        ({"conversation": [{"input": "Hi", "output": "Hello"}]}, "exchanges", ("conversation",)),
        ({"dialog": ["Hi", "Hello"]}, "turns", ("dialog",)),
        ({"chat": "USER: Hi\nASSISTANT: Hello"}, "transcript", ("chat",)),
        ({"prompt": "Hi", "response": "Hello"}, "prompt_response", ("prompt", "response")),
        ({"instruction": "Hi", "output": "Hello"}, "alpaca", ("instruction", "output")),
    ],
)
def test_chat_of_roles_and_texts_is_plain_in_every_shape(
    record: dict[str, Json], schema: str, columns: tuple[str, ...]
) -> None:
    chat = Canonicalizer(DatasetOptions(format=Chat())).read_plain(record)

    assert chat is not None
    assert chat == PlainChat(schema, HI, columns)
    assert hash_plain_chat(chat.messages) == hash_row_content(Row("conversation", tuple(chat.messages)))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{**HI[0], "name": "Ann"}, HI[1]]},
        {"messages": [HI[0], {"role": "assistant", "content": "<think>r</think>Hello"}]},
        {"messages": [HI[0], {"role": "assistant", "content": " "}]},
        {"messages": [HI[0], {"role": "critic", "content": "Hello"}]},
        {"messages": [HI[0], {"role": "assistant", "content": ["Hello"]}]},
        {"messages": HI, "tools": [{"name": "f"}]},
        {"messages": HI, "images": ["cat.jpg"]},
        {"messages": HI, "label": False},
        {"messages": HI, "train": True},
        {"messages": HI, "turns_kept": [0, 1]},
        {"messages": HI, "system": "Be brief."},
        {"messages": HI, "context": "Oslo is cold."},
        {"messages": []},
        {"text": "Hi"},
    ],
)
def test_record_with_more_to_read_is_not_plain(record: dict[str, Json]) -> None:
    assert Canonicalizer(DatasetOptions(format=Auto())).read_plain(record) is None


@pytest.mark.parametrize(
    "reader",
    [
        Canonicalizer(DatasetOptions(format=Chat(system_prompt="id"))),
        Canonicalizer(DatasetOptions(format=Chat(single_turn=True))),
        Canonicalizer(DatasetOptions(format=Chat(domain_key="id"))),
        Canonicalizer(DatasetOptions(format=Chat()), group_key="id"),
        Canonicalizer(DatasetOptions(format=Chat()), order_key="id"),
        Canonicalizer(DatasetOptions(format=Chat(), template=Template(chat_template_kwargs="id"))),
    ],
)
def test_no_chat_is_plain_where_options_read_another_column(reader: Canonicalizer) -> None:
    assert reader.read_plain({"messages": HI, "id": "7"}) is None


@pytest.mark.slow
@given(st.one_of(RECORDS, RECORDS, VALUES), st.sampled_from(CONFIGS), st.booleans())
def test_any_json_value_becomes_a_row_or_a_reject_with_a_known_reason(
    record: Json, config: DatasetOptions, arrow: bool
) -> None:
    before = repr(record)
    found = canonicalize_row(record, config, arrow=arrow)

    assert repr(record) == before
    if isinstance(found, Rejected):
        assert found.reason in REJECT_REASONS
        return
    assert len(hash_row_content(found)) == 16
    for message in found.messages:
        assert isinstance(message["role"], str)
        assert isinstance(message["content"], str)
        assert isinstance(message.get("reasoning_content", ""), str)
        assert None not in message.values()
        for call in message.get("tool_calls", ()):
            assert list(call) == ["id", "type", "function"]
            assert call["id"]
            assert call["function"]["name"]
            assert isinstance(call["function"]["arguments"], (dict, str))


@pytest.mark.slow
@given(st.fixed_dictionaries({"messages": MESSAGES}))
def test_canonical_row_is_a_fixed_point_of_reading(record: Json) -> None:
    """Tags are not extracted here: the rest of a text after extraction may look like tags again."""
    canonicalizer = Canonicalizer(
        DatasetOptions(format=Chat(), reasoning=Reasoning(extract_think_tags=False, reasoning_keys=[]))
    )
    row = canonicalizer(record)
    if isinstance(row, Rejected):
        return

    again = canonicalizer({"messages": [without(message, "arguments_source") for message in row.messages]})
    assert isinstance(again, Row)
    assert hash_row_content(again) == hash_row_content(row)
    assert again.report.unknown_roles == row.report.unknown_roles


def without(message: dict[str, Json], key: str) -> dict[str, Json]:
    return {name: value for name, value in message.items() if name != key}


@given(VALUES)
def test_nulls_of_arrow_are_removed_at_every_level(value: Json) -> None:
    def has_null(one: Json) -> bool:
        inner = list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else []
        return (isinstance(one, dict) and None in one.values()) or any(map(has_null, inner))

    assert not has_null(remove_nulls(value))


# Through Arrow


TOOL_DIALOGUE: list[Json] = [
    {
        "messages": [
            {"role": "user", "content": "U"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}],
            },
            {"role": "tool", "content": "R", "tool_call_id": "x", "name": "f"},
            {"role": "assistant", "content": "A", "weight": 1.0},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}},
            {"type": "function", "function": {"name": "g", "parameters": {"properties": {"b": {"enum": ["x"]}}}}},
        ],
    },
    {"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}], "tools": None},
]


def through_arrow(records: list[Json]) -> list[Json]:
    return pa.Table.from_pylist(records).to_pylist()


@pytest.mark.parametrize("odd", ['"\\ud800"', "NaN", "1e999"])
@pytest.mark.parametrize("number", ["1", "12345678901234567890123"])
def test_invalid_json_text_is_rejected_with_or_without_a_long_integer(odd: str, number: str) -> None:
    talk = f'[{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": "a", "x": {odd}, "y": {number}}}]'

    assert rejection({"messages": talk}).reason == "bad_messages"


def test_rows_through_arrow_are_the_rows_from_json_with_the_nulls_of_arguments() -> None:
    canonicalizer = Canonicalizer(DatasetOptions(format=Chat()))

    direct = [canonicalizer(record) for record in TOOL_DIALOGUE]
    assert [canonicalizer(record, arrow=True) for record in through_arrow(TOOL_DIALOGUE)] == direct

    row = canonicalize_row(through_arrow(TOOL_DIALOGUE)[0], DatasetOptions(format=Chat()), arrow=True)

    assert isinstance(row, Row)
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


# Keys


DIALOGUE: dict[str, Json] = {"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]}


@pytest.mark.parametrize(
    ("key", "record", "expected"),
    [
        ("id", {"id": "a"}, '"a"'),
        ("id", {"id": 1}, "1"),
        ("meta.id", {"meta": {"id": "a"}}, '"a"'),
        ("meta.id", {"meta.id": "b", "meta": {"id": "a"}}, '"b"'),
        (["id", "meta.id"], {"id": 1, "meta": {"id": "a"}}, '[1,"a"]'),
        (["id"], {"id": 1}, "[1]"),
        (None, {"id": 1}, None),
    ],
)
def test_group_key_is_canonical_json(key: Any, record: dict[str, Json], expected: str | None) -> None:
    row = Canonicalizer(DatasetOptions(format=Chat()), group_key=key)({**DIALOGUE, **record})

    assert isinstance(row, Row)
    assert row.group_key == expected


@pytest.mark.parametrize("record", [{}, {"id": None}, {"id": 1, "meta": 3}, {"id": 1, "meta": {"id": None}}])
def test_group_key_null_is_rejected(record: dict[str, Json]) -> None:
    row = Canonicalizer(DatasetOptions(format=Chat()), group_key=["id", "meta.id"])({**DIALOGUE, **record})

    assert isinstance(row, Rejected)
    assert row.reason == "group_missing"


def test_order_key_is_text_as_written_and_the_report_counts_the_noticed_features() -> None:
    canonicalizer = Canonicalizer(DatasetOptions(format=Text()), order_key="at")

    rows = [canonicalizer({"text": "T", "at": at}) for at in ("2024-05-01", 7, None)]
    assert [row.order_key if isinstance(row, Row) else row.reason for row in rows] == [
        "2024-05-01",
        "7",
        "order_missing",
    ]

    record = {
        "messages": [
            {"role": "critic", "content": "C"},
            {"role": "assistant", "content": "<think>a</think>x<think>b</think>y", "thinking": "t"},
        ],
        "tools": None,
        "functions": '[{"name": "f"}]',
    }
    row = kept(record, Auto())

    assert row.report == ParseReport(
        schema="messages",
        extracted_think_from_content=2,
        moved_reasoning_keys=1,
        tools_present=True,
        tools_parsed_from_string=True,
        unknown_roles=("critic",),
    )
    assert row.messages[1] == {"role": "assistant", "content": "xy", "reasoning_content": "t\n\na\n\nb"}


def test_tools_are_those_of_each_record_whether_or_not_the_one_before_has_the_same() -> None:
    canonicalizer = Canonicalizer(DatasetOptions(format=Auto()))
    first, other = '[{"name": "f"}]', '[{"name": "g"}]'
    offered = [first, first, other, "{", "{", other, None, [{"name": "h"}], other, None, first]
    talk = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]

    rows = [canonicalizer({"messages": talk, "tools": tools}) for tools in offered]
    found = [
        row.reason if isinstance(row, Rejected) else row.tools and row.tools[0]["function"]["name"] for row in rows
    ]

    assert found == ["f", "f", "g", "bad_tools", "bad_tools", "g", None, "h", "g", None, "f"]


@pytest.mark.parametrize(
    ("value", "domain"), [("wiki", "wiki"), (None, "__default__"), (3, "__default__"), (" ", "__default__")]
)
def test_domain_without_a_text_is_the_default(value: Json, domain: str) -> None:
    assert kept({"text": "T", "source": value}, Text(domain_key="source")).domain == domain


# Real data


@pytest.mark.real_data
def test_real_tool_dialogues_have_results_that_answer_calls_and_are_the_same_through_arrow(real_data: Path) -> None:
    for file in ("tools/glaive_toolcall_en_demo.json", "tools/tau_airline_gpt4o.messages.jsonl"):
        for record in read_records(real_data / file):
            row = kept(record, Auto())
            calls = [call for message in row.messages for call in message.get("tool_calls", ())]
            results = [message["tool_call_id"] for message in row.messages if message["role"] == "tool"]
            assert set(results) <= {call["id"] for call in calls}
            assert all(isinstance(call["function"]["arguments"], dict) for call in calls)

    canonicalizer = Canonicalizer(DatasetOptions(format=Auto()))
    for file in ("tools/tau_airline_gpt4o.messages.jsonl", "reasoning/reason_tool_use_demo_50.jsonl"):
        records = read_records(real_data / file)
        for record, other in zip(records, through_arrow(records), strict=True):
            assert canonicalizer(other, arrow=True) == canonicalizer(record)
