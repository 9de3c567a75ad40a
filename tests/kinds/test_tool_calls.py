"""Tools and calls: one canonical shape, matching ids, results linked to calls."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.json import Json
from rowmill.kinds.shared.messages import RejectError, Tools, link_calls, read_calls, read_tools
from rowmill.schema.rows import Message, Row
from tests.support.canonical_rows import kept, rejection

FIELDS = Tools().tools_fields
BARE = {"name": "f", "description": "d", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": BARE}


def row_of(messages: list[Json], **options: Any) -> Row:
    return kept({"messages": messages}, tools=Tools(**options))


def reason(messages: list[Json], **options: Any) -> str:
    return rejection({"messages": messages}, tools=Tools(**options)).reason


def call(arguments: Json, **more: Json) -> dict[str, Json]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def arguments_of(text: Json, **options: Any) -> Json:
    row = row_of([{"role": "assistant", "content": None, "tool_calls": [call(text)]}], **options)
    return row.messages[0]["tool_calls"][0]["function"]["arguments"]


# Tools


@pytest.mark.parametrize(
    ("value", "tools", "from_text"),
    [
        ([WRAPPED], (WRAPPED,), False),
        ([BARE], (WRAPPED,), False),
        (BARE, (WRAPPED,), False),
        (WRAPPED, (WRAPPED,), False),
        ([{"function": BARE}], ({"function": BARE, "type": "function"},), False),
        ({"f": {"description": "d"}}, ({"type": "function", "function": {"name": "f", "description": "d"}},), False),
        ({"f": WRAPPED}, (WRAPPED,), False),
        (orjson.dumps([BARE]).decode(), (WRAPPED,), True),
        (orjson.dumps(BARE).decode(), (WRAPPED,), True),
        ([orjson.dumps(BARE).decode()], (WRAPPED,), False),
        *((blank, None, False) for blank in (None, "", " ", [], {}, "[]", "null")),
    ],
)
def test_tools_are_normalized_to_one_shape(value: Json, tools: Json, from_text: bool) -> None:
    assert read_tools({"tools": value}, FIELDS) == (tools, tools is not None, from_text)


@pytest.mark.parametrize("none", [None, "", " ", [], {}, "[]", "null"])
def test_nulls_of_tools_hide_no_column_and_survive_in_schemas(none: Json) -> None:
    offered = read_tools({"tools": none, "tool_schemas": " ", "functions": orjson.dumps([BARE]).decode()}, FIELDS)

    assert offered[0] == (WRAPPED,)

    tool = {"name": "f", "parameters": {"properties": {"x": {"default": None}}}}
    offered = read_tools({"tools": [tool]}, FIELDS)

    assert offered[0] == ({"type": "function", "function": tool},)


@pytest.mark.parametrize(
    "value", ["none", "{", "3", 3, True, [{}], [{"type": "function"}], [{"function": {"name": ""}}], [[BARE]], {"f": 3}]
)
def test_tools_unparsable_or_nameless_are_rejected(value: Json) -> None:
    with pytest.raises(RejectError) as found:
        read_tools({"tools": value}, FIELDS)

    assert found.value.rejected.reason == "bad_tools"


# Calls


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [call({"a": 1}, id="x")]},
        {"tool_calls": [call('{"a": 1}', id="x")]},
        {"tool_calls": orjson.dumps([call({"a": 1}, id="x")]).decode()},
        {"tool_calls": [{"name": "f", "arguments": {"a": 1}, "id": "x"}]},
        {"tool_calls": [{"name": "f", "parameters": {"a": 1}, "id": "x"}]},
        {"tool_calls": call({"a": 1}, id="x")},
        {"content": [{"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}}]},
        {"content": [{"type": "tool_call", "value": '{"id": "x", "name": "f", "arguments": {"a": 1}}'}]},
        {"tool_calls": None, "function_call": {"name": "f", "arguments": '{"a": 1}', "id": "x"}},
    ],
)
def test_calls_are_normalized_to_one_shape(message: dict[str, Json]) -> None:
    row = row_of([{"role": "assistant", "content": None, **message}])

    expected = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert row.messages[0]["tool_calls"] == [expected]
    assert row.messages[0].keys() <= {"role", "content", "tool_calls", "arguments_source"}


def test_calls_may_be_separate_turns_and_ids_other_than_text_are_renewed() -> None:
    record = {
        "conversations": [
            {"from": "human", "value": "U"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "R"},
            {"from": "gpt", "value": "A"},
        ]
    }
    row = kept(record)

    assert [message["role"] for message in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert row.messages[1]["content"] == ""
    assert row.messages[2]["tool_call_id"] == row.messages[1]["tool_calls"][0]["id"] == "call_0"
    assert row.report.unknown_roles == ()

    row = row_of(
        [
            {"role": "assistant", "content": "", "tool_calls": [call({}, id=7)]},
            {"role": "tool", "content": "R", "tool_call_id": 7},
        ]
    )

    assert row.messages[0]["tool_calls"][0]["id"] == row.messages[1]["tool_call_id"] == "call_0"


def test_call_keeps_the_text_next_to_it_and_an_empty_list_is_none() -> None:
    row = row_of([{"role": "assistant", "content": "Let me see.", "tool_calls": [call({})]}])

    assert row.messages[0]["content"] == "Let me see."

    row = row_of([{"role": "assistant", "content": "A", "tool_calls": []}])

    assert row.messages[0] == {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        *(
            (calls, "bad_tool_call")
            for calls in (
                "not json", 3, [3], ["x"], [{}], [{"function": {}}], [{"function": {"name": " "}}], [None], '"x"',
            )
        ),
        *(([call(value)], "bad_tool_arguments") for value in (3, [1], True)),
    ],
)  # fmt: skip
def test_call_without_a_name_or_with_arguments_of_another_type_is_rejected(calls: Json, expected: str) -> None:
    assert reason([{"role": "assistant", "content": "A", "tool_calls": calls}]) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"b": 1, "a": None}, {"b": 1, "a": None}),
        ('{"b": 1, "a": null}', {"b": 1, "a": None}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("", {}),
        (" ", {}),
        (None, {}),
        ('""', {}),
        ("null", {}),
    ],
)
def test_arguments_become_an_object(arguments: Json, expected: Json) -> None:
    found = arguments_of(arguments)

    assert list(found.items()) == list(expected.items())


def test_arguments_keep_their_source_their_keys_and_long_integers() -> None:
    text = orjson.dumps(orjson.dumps(orjson.dumps({"a": 1}).decode()).decode()).decode()

    assert arguments_of(text, arguments="string") == text

    nested = {"a": {"a": [{"a": 1}, {"a": "a:a"}]}, "b": ":"}

    assert arguments_of(orjson.dumps(nested).decode()) == nested

    row = row_of([{"role": "assistant", "content": "", "tool_calls": [call('{"a":  1}'), call({"b": 2})]}])

    assert row.messages[0]["arguments_source"] == ['{"a":  1}', None]

    calls = read_calls([{"function": {"name": "f", "arguments": '{"n": 123456789012345678901234567890}'}}])

    assert calls.calls[0]["function"]["arguments"] == {"n": 123456789012345678901234567890}

    text = '{"name": "f", "arguments": {"a": 1, "a": 2}}'

    for key in ("arguments", "parameters", "input", "args"):
        called = row_of([{"role": "assistant", "content": None, "tool_calls": [{"name": "f", key: {"a": 1}}]}])
        assert called.messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert reason([{"role": "function_call", "content": {"name": "f", "params": {"a": 1}}}]) == "bad_tool_call"

    assert reason([{"role": "function_call", "content": text}]) == "bad_tool_call"
    assert reason([{"role": "assistant", "content": "", "tool_calls": f"[{text}]"}]) == "bad_tool_call"


def test_python_literals_of_tools_calls_and_arguments_are_read_and_never_printed() -> None:
    text = "{'a': None, 'b': [True], 'c': \"it's\"}"
    record = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call(text)]}], "tools": repr([WRAPPED])}

    row = kept(record)

    [message] = row.messages
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": None, "b": [True], "c": "it's"}
    assert "arguments_source" not in message
    assert row.tools == (WRAPPED,)
    asked = {"role": "function_call", "content": repr({"name": "f", "arguments": {"a": None}})}
    assert row_of([asked]).messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": None}


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        "{'a': 1, 'a': 2}",
        '{"a": 1, "a": 1}',
        '{"x": {"a": 1, "b": 2, "a": 3}}',
        '{"x": [{"a": {"b": 1, "b": 2}}]}',
        '{"a": 1, "\\u0061": 2}',
        '{"a": 12345678901234567890123, "a": 2}',
        orjson.dumps('{"a": 1, "a": 2}').decode(),
        *("{a: 1}", "[1]", "3", "plain"),
    ],
)
def test_arguments_unparsable_or_with_a_repeated_key_are_rejected_unless_strings_are_asked_for(text: str) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [call(text)]}

    assert arguments_of(text, arguments="string") == text
    for form in ("auto", "object"):
        assert reason([message], arguments=form) == "bad_tool_arguments"


@pytest.mark.slow
@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers(-99, 99) | st.text(), st.lists, max_leaves=5)))
def test_arguments_as_text_and_as_object_are_equal(arguments: dict[str, Json]) -> None:
    assert arguments_of(orjson.dumps(arguments).decode()) == arguments_of(arguments) == arguments


# Reasoning before calls

CALL = '{"name": "f", "arguments": {"q": "what is </think>{}?"}}'
THOUGHT = "<think>look it up</think>"


@pytest.mark.parametrize(
    "turn",
    [
        # hiyouga/LlamaFactory pull request 9610, of issues 9522 and 9550.
        {"from": "function_call", "value": f"{THOUGHT}\n{CALL}"},
        {"from": "function_call", "value": f"{THOUGHT}[{CALL}]"},
        {"from": "function_call", "value": f"{THOUGHT}<tool_call>\n{CALL}\n</tool_call>"},
        {"from": "gpt", "value": "", "tool_calls": f"{THOUGHT}[{CALL}]"},
        {"from": "gpt", "value": None, "function_call": f"{THOUGHT}{CALL}"},
        {"from": "gpt", "value": THOUGHT, "tool_calls": f"[{CALL}]"},
    ],
)
def test_reasoning_before_a_call_is_reasoning_in_every_form_of_calls(turn: dict[str, Json]) -> None:
    row = row_of([{"from": "human", "value": "U"}, turn])

    assert (row.messages[1]["content"], row.messages[1]["reasoning_content"]) == ("", "look it up")
    [made] = row.messages[1]["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": {"q": "what is </think>{}?"}}


def test_text_before_a_call_stays_and_several_calls_are_all_read() -> None:
    text = f"{THOUGHT}I look.<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"

    message = row_of([{"role": "user", "content": "U"}, {"role": "function_call", "content": text}]).messages[1]

    assert (message["content"], message["reasoning_content"]) == ("I look.", "look it up")
    assert len(message["tool_calls"]) == 2


@pytest.mark.parametrize(
    "text", [THOUGHT, f"{THOUGHT}not JSON", f"{THOUGHT}{CALL} and more", f"I look. {CALL}", f"{THOUGHT}<tool_call>x"]
)
def test_turn_of_calls_without_a_whole_call_is_rejected(text: str) -> None:
    assert reason([{"role": "user", "content": "U"}, {"role": "function_call", "content": text}]) == "bad_tool_call"


def test_reasoning_before_a_call_in_a_transcript_and_in_an_answer_of_calls_is_read() -> None:
    told = f"USER: U\n\n\nASSISTANT: {THOUGHT} <functioncall> " + '{"name": "f", "arguments": {"a": 1}}'
    asked = {"query": "U", "answers": f'{THOUGHT}[{{"name": "f", "arguments": {{"a": 1}}}}]', "tools": [BARE]}
    for record in ({"chat": told}, asked):
        message = kept(record).messages[1]

        assert (message["content"], message["reasoning_content"]) == ("", "look it up")
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


# Ids


def conversation(*messages: str) -> list[Message]:
    """Build a conversation from shorthand: `u`, `c` a call without an id, `c=x` with one, `t` and `t=x` results."""
    out: list[Message] = []
    for word in messages:
        kind, _, name = word.partition("=")
        if kind == "c":
            body = {"name": "f", "arguments": {}}
            out.append({"role": "assistant", "tool_calls": [{"id": name or None, "function": body}]})
        elif kind == "t":
            out.append({"role": "tool", **({"tool_call_id": name} if name else {})})
        else:
            out.append({"role": {"u": "user", "a": "assistant"}[kind]})
    return out


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (["c", "t", "c", "t"], ["call_0", "call_0", "call_1", "call_1"]),
        (["c", "c", "t", "t"], ["call_0", "call_1", "call_0", "call_1"]),
        (["c=x", "t"], ["x", "x"]),
        (["c=call_0", "c", "t", "t"], ["call_0", "call_1", "call_0", "call_1"]),
        (["c=x", "c=y", "t=y", "t"], ["x", "y", "y", "x"]),
        (["c", "u", "t"], ["call_0", None, None]),
        (["t"], [None]),
        (["c", "t", "t"], ["call_0", "call_0", None]),
        (["c=x", "t=z", "t"], ["x", "z", "x"]),
    ],
)
def test_ids_are_numbered_and_matched_in_order(messages: list[str], expected: list[str | None]) -> None:
    written = conversation(*messages)
    link_calls(written)

    ids = [m["tool_calls"][0]["id"] if "tool_calls" in m else m.get("tool_call_id") for m in written]
    assert ids == expected


@given(st.lists(st.sampled_from(["u", "a", "c", "c=x", "t", "t=x"]), max_size=12))
def test_every_call_gets_an_id_and_linking_is_idempotent(messages: list[str]) -> None:
    written = conversation(*messages)
    link_calls(written)
    again = [dict(message) for message in written]
    link_calls(again)

    assert all(call["id"] for message in written for call in message.get("tool_calls", ()))
    assert again == written
