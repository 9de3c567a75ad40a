"""Formats: the union of kinds, aliases, detection of shapes, and reading of messages."""

import pkgutil
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from rowmill import kinds
from rowmill.conversation.options import Loss, Template
from rowmill.core.config import describe_field
from rowmill.core.json import Json, from_json, to_json
from rowmill.kinds.base import DatasetOptions
from rowmill.kinds.catalog import Auto, Chat, Format, Preference, Python, Supervised, Text
from rowmill.kinds.reading.canonicalization import Canonicalizer
from rowmill.kinds.shared.messages import Tools
from rowmill.schema.rows import Row
from tests.support.canonical_rows import kept, rejection

ADAPTER: TypeAdapter[Any] = TypeAdapter(Format)
SHARED = {"base", "catalog", "context", "joint_rows", "reading", "shared"}
"""Modules of the folder that are no kind: the contract, the list, and what several kinds have in common."""


def reason(record: Json, options: Any = None, **groups: Any) -> str:
    return rejection(record, options, **groups).reason


def turns(row: Row) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row.messages]


def chat(*contents: tuple[str, Json]) -> dict[str, Json]:
    return {"messages": [{"role": role, "content": content} for role, content in contents]}


def test_exchange_keeps_its_system_text_and_the_keys_of_its_answer() -> None:
    first = {"system": "Be brief.", "input": "U1", "output": "A1", "loss": False}
    second = {"input": "U2", "output": "A2", "reasoning_content": "R2", "note": "n"}

    assert kept({"conversation": [first, second]}).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "A1", "train": False},
        {"role": "user", "content": "U2"},
        {"role": "assistant", "content": "A2", "reasoning_content": "R2", "note": "n"},
    )
    assert reason({"conversation": [{"instruction": "Sum up.", "input": "U", "output": "A"}]}) == "unread_prompt"


# The union


def test_union_has_one_member_per_module() -> None:
    members = {member.__module__ for member in get_args(get_args(Format)[0])}
    modules = {
        f"rowmill.kinds.{module.name}{'.records' if module.ispkg else ''}"
        for module in pkgutil.iter_modules(kinds.__path__)
        if module.name not in SHARED
    }

    assert members == modules


@pytest.mark.parametrize("kind", ["chat", "supervised", "text", "auto", "python"])
def test_kind_dumped_and_loaded_is_equal(kind: str) -> None:
    model = ADAPTER.validate_python({"kind": kind, **({"class": "a:B"} if kind == "python" else {})})

    assert ADAPTER.validate_python(model.model_dump()) == model
    assert ADAPTER.validate_json(model.model_dump_json()) == model


@pytest.mark.parametrize("model", [Chat, Supervised, Text, Auto, Python])
def test_every_field_is_documented(model: Any) -> None:
    assert [name for name in model.model_fields if not describe_field(model, name)] == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Auto()),
        ({"type": "chat"}, Chat()),
        ({"type": "instruction"}, Supervised()),
        ({"kind": "instruction"}, Supervised()),
        ({"kind": "chat", "messages_key": "dialog"}, Chat(messages_field="dialog")),
        ({"kind": "supervised", "prompt_key": "q"}, Supervised(input_field="q")),
        ({"kind": "supervised", "input_key": "q", "target_key": "a"}, Supervised(input_field="q", output_field="a")),
        ({"kind": "supervised", "response_key": "a"}, Supervised(output_field="a")),
        ({"kind": "text", "enforce_eos": True}, Text(add_eos="auto")),
        ({"kind": "text", "enforce_eos": False}, Text(add_eos=False)),
    ],
)
def test_alias_means_its_field(given: dict[str, Json], expected: Any) -> None:
    assert ADAPTER.validate_python(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"type": "chat", "kind": "chat"},
        {"kind": "chat", "messages_key": "a", "messages_field": "a"},
        {"kind": "supervised", "prompt_key": "a", "input_key": "a"},
        {"kind": "text", "enforce_eos": True, "add_eos": True},
    ],
)
def test_alias_together_with_its_field_is_refused(given: dict[str, Json]) -> None:
    with pytest.raises(ValidationError, match="both are set"):
        ADAPTER.validate_python(given)


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "chat", "message_field": "a"},
        {"kind": "chat", "assistant_roles": "assistant"},
        {"kind": "chat", "prompt_fields": []},
        {"kind": "chat", "role_map": {"narrator": " "}},
        {"kind": "supervised", "separate_with": True},
        {"kind": "supervised", "separate_with": -1},
        {"kind": "text", "add_eos": 1},
        {"kind": "nothing"},
    ],
)
def test_wrong_option_is_refused(given: dict[str, Json]) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(given)


# Which shape


@pytest.mark.parametrize(
    ("record", "schema"),
    [
        (chat(("user", "U"), ("assistant", "A")), "messages"),
        ({"messages": '[{"role":"user","content":"U"},{"role":"assistant","content":"A"}]'}, "messages"),
        ({"conversations": [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]}, "sharegpt"),
        ({"messages": [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]}, "sharegpt"),
        ({"instruction": "U", "output": "A"}, "alpaca"),
        ({"prompt": "U", "response": {"role": "assistant", "content": "A"}}, "prompt_response"),
        ({"prompt": "U", "response": "A"}, "prompt_response"),
        ({"prompt": None, "question": "U", "answer": "A"}, "prompt_response"),
        ({"prompt": [{"role": "user", "content": "U"}], "completion": "A"}, "prompt_response"),
        ({"messages": None, "prompt": "U", "completion": [{"role": "assistant", "content": "A"}]}, "prompt_response"),
    ],
)
def test_shape_is_recognised(record: Json, schema: str) -> None:
    row = kept(record)

    assert row.report.schema == schema
    assert turns(row) == [("user", "U"), ("assistant", "A")]


def test_shape_is_the_first_that_matches_each_record_or_the_named_one() -> None:
    record = {**chat(("user", "U"), ("assistant", "A")), "prompt": "P", "response": "R", "text": "T"}

    assert kept(record, Auto()).report.schema == "messages"
    assert kept({"instruction": "I", "output": "O", "prompt": "P", "response": "R"}).report.schema == "alpaca"

    assert kept({"text": "T"}, Auto()).text == "T"
    assert reason({"text": "T"}) == "unknown_schema"

    record = {**chat(("user", "U"), ("assistant", "A")), "prompt": "P", "response": "R"}

    assert turns(kept(record, Chat(dataset_schema="prompt_response"))) == [("user", "P"), ("assistant", "R")]

    records: list[Json] = [
        {"messages": None, "conversations": [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]},
        chat(("user", "U"), ("assistant", "A")),
        {"instruction": "U", "output": "A"},
    ]
    canonicalizer = Canonicalizer(DatasetOptions(format=Chat()))

    rows = [canonicalizer(record) for record in records]

    assert [row.report.schema for row in rows if isinstance(row, Row)] == ["sharegpt", "messages", "alpaca"]
    assert [turns(row) for row in rows if isinstance(row, Row)] == [[("user", "U"), ("assistant", "A")]] * 3


@pytest.mark.parametrize(
    ("record", "options", "expected"),
    [
        ({"foo": 1}, Chat(), "unknown_schema"),
        ({}, Auto(), "unknown_schema"),
        ({"messages": "hello"}, Chat(), "bad_messages"),
        ({"messages": "[broken"}, Chat(), "bad_messages"),
        ({"messages": {"role": "user"}}, Chat(), "bad_messages"),
        ({"messages": ["hello"]}, Chat(), "bad_messages"),
        ({"messages": [{"role": "user", "content": "U"}, "hello"]}, Chat(), "bad_messages"),
        ({"messages": [{"role": 3, "content": "U"}]}, Chat(), "bad_messages"),
        ({"messages": [{"role": ["user"], "content": "U"}]}, Chat(), "bad_messages"),
        ({"messages": [{"content": "U"}]}, Chat(), "bad_messages"),
        ({"messages": []}, Chat(), "empty_conversation"),
        ({"messages": None}, Chat(), "unknown_schema"),
        ({"messages": None}, Chat(dataset_schema="messages"), "missing_field"),
        ({"foo": 1}, Chat(messages_field="dialog"), "missing_field"),
        ({"prompt": "U", "response": "A"}, Chat(dataset_schema="messages"), "unknown_schema"),
        ({"prompt": 3, "response": "A"}, Chat(), "content_not_text"),
        ({"instruction": 3, "output": "A"}, Chat(), "content_not_text"),
        ({"instruction": "U", "output": "A", "history": [["a"]]}, Chat(), "bad_messages"),
        ("a string", Chat(), "not_an_object"),
        ({"prompt": "ab"}, Supervised(), "missing_field"),
        ({"prompt": None, "response": "cd"}, Supervised(), "missing_field"),
        ({"prompt": "ab", "response": {"a": 3}}, Supervised(), "content_not_text"),
        ({"prompt": 3, "response": "ab"}, Supervised(), "content_not_text"),
        ({"prompt": "ab", "response": " "}, Supervised(), "empty_text"),
        ({"instruction": "I", "input": 3, "output": "O"}, Supervised(), "content_not_text"),
        ({"text": 3}, Text(), "content_not_text"),
        ({"text": " \n"}, Text(), "empty_text"),
        ({"text": None}, Text(), "missing_field"),
        ({}, Text(), "missing_field"),
        ({"message_id": "m1", "parent_id": None, "text": "Why?", "role": "prompter"}, Auto(), "unknown_schema"),
    ],
)
def test_record_of_no_shape_or_without_its_texts_is_rejected(record: Json, options: Any, expected: str) -> None:
    assert reason(record, options) == expected


@pytest.mark.parametrize(
    ("columns", "options", "hint"),
    [
        (["messagez"], Chat(), "no known shape in messagez; did you mean messages?"),
        (["Messages", "id"], Chat(), "no known shape in Messages, id; did you mean messages?"),
        (["promptt", "responze"], Auto(), "no known shape in promptt, responze; did you mean prompt and response?"),
        (["dialgoue", "topic"], Chat(), "no known shape in dialgoue, topic; did you mean dialogue?"),
        (["tasklist"], Chat(prompt_fields=["task"]), "no known shape in tasklist"),
        (["Task"], Chat(prompt_fields=["task"]), "no known shape in Task; did you mean task?"),
        (
            ["threaad"],
            Chat(messages_field="thread"),
            "thread is absent or null; the record has threaad; did you mean thread?",
        ),
        (["prompt", "prompts"], Chat(), "no known shape in prompt, prompts"),
        (["conversation_id", "note"], Chat(), "no known shape in conversation_id, note"),
    ],
)
def test_record_with_a_mistyped_column_is_asked_what_was_meant(columns: list[str], options: Any, hint: str) -> None:
    assert rejection(dict.fromkeys(columns, "A text."), options).detail == hint


def test_alpaca_has_its_input_and_history_whatever_its_response_is_called() -> None:
    record = {"instruction": "U", "input": "more", "response": "A"}

    assert turns(kept(record)) == [("user", "U\nmore"), ("assistant", "A")]
    assert turns(kept(record, Chat(dataset_schema="alpaca"))) == [("user", "U\nmore"), ("assistant", "A")]
    assert turns(kept(record, Chat(prompt_fields=["instruction"]))) == [("user", "U\nmore"), ("assistant", "A")]

    record = {"instruction": "I", "input": "X", "output": "O", "system": "S", "history": [["U0", "A0"]]}

    expected = [("system", "S"), ("user", "U0"), ("assistant", "A0"), ("user", "I\nX"), ("assistant", "O")]
    assert turns(kept(record)) == expected
    assert turns(kept({"instruction": "I", "input": " ", "output": "O"}))[0] == ("user", "I")


INSTRUCTIONS = Chat(prompt_fields=["question", "instruction"], response_fields=["answer", "input"])


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"instruction": "I", "input": "X", "answer": "A"}, "I\nX"),
        ({"instruction": "I", "input": " ", "answer": "A"}, "I"),
        ({"instruction": "I", "input": None, "answer": "A"}, "I"),
        ({"instruction": [{"role": "user", "content": "I"}], "answer": "A"}, "I"),
        ({"instruction": "I", "input": "X", "context": "Y", "answer": "A"}, "I\nX\nY"),
        ({"instruction": "Q", "question": "Q", "answer": "A"}, "Q"),
        ({"instruction": "I", "input": "A"}, "I"),
    ],
)
def test_prompt_in_instruction_joins_the_input(record: Json, prompt: str) -> None:
    row = kept(record, INSTRUCTIONS)

    assert row.report.schema == "prompt_response"
    assert turns(row) == [("user", prompt), ("assistant", "A")]


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({"instruction": [{"role": "user", "content": "I"}], "input": "X", "answer": "A"}, "input"),
        ({"instruction": "I", "question": "Q", "answer": "A"}, "instruction"),
        ({"question": "Q", "answer": "A", "history": "We spoke before."}, "history"),
        ({"instruction": "I", "output": "A", "history": "We spoke before."}, "history"),
        ({"question": "Q", "answer": "A", "choices": ["a", "b"]}, "choices"),
    ],
)
def test_column_that_belongs_to_the_prompt_is_read_or_refused_or_ignored_on_purpose(record: Json, column: str) -> None:
    refused = rejection(record, INSTRUCTIONS)

    assert refused.reason == "unread_prompt"
    assert refused.detail.startswith(f"{column} holds ")
    kept(record, INSTRUCTIONS.model_copy(update={"ignore_columns": [column]}))


@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_system_message_in_a_column_is_read_in_every_shape_and_once(column: str) -> None:
    said = [("system", "Be brief."), ("user", "U"), ("assistant", "A")]
    messages = [{"role": role, "content": text} for role, text in said]

    for record in (
        {"messages": messages[1:]},
        {"messages": messages},
        {"conversations": [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]},
        {"question": "U", "response": "A"},
        {"chat": "USER: U\n\nASSISTANT: A"},
        {"conversation": ["U", "A"]},
    ):
        assert turns(kept({**record, column: "Be brief."})) == said


def test_prompt_in_instruction_is_that_of_a_pair_and_must_be_text() -> None:
    record = {"instruction": "I", "input": {"a": 1}, "answer": "A"}

    assert reason(record, INSTRUCTIONS) == "content_not_text"

    record = {"instruction": "I", "input": "X", "answer": "A"}
    pair = kept(record, Supervised(input_field="instruction", output_field="answer"))

    assert turns(kept(record, INSTRUCTIONS))[0] == ("user", pair.text)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("images", ["cat.jpg"], "<image>\nWhat is it?"),
        ("image", "cat.jpg", "What is it? <image>"),
        ("image", {"bytes": "…"}, "<image>"),
        ("videos", [None, "cat.mp4"], "<video>"),
        ("video", "cat.mp4", "<video>"),
        ("audios", ["cat.wav"], "<audio>"),
        ("audio", "cat.wav", "<audio>"),
    ],
)
def test_placeholder_of_a_media_column_is_rejected(column: str, value: Json, text: str) -> None:
    records = [
        (chat(("user", text), ("assistant", "A")), Chat()),
        (chat(("user", "U"), ("assistant", text)), Chat()),
        (chat(("user", "U"), ("assistant", f"<think>{text}</think>A")), Chat()),
        ({"prompt": text, "response": "A"}, Supervised()),
        ({"prompt": "U", "response": text}, Supervised()),
        ({"text": text}, Text()),
    ]

    for record, options in records:
        row = rejection(record | {column: value}, options)
        assert row.reason == "multimodal_content"
        assert row.detail.endswith(f"the column {column} is not empty")


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("<image>", {}),
        ("<image>", {"images": None}),
        ("<image>", {"images": [], "image": " "}),
        ("<image>", {"images": [None, {}]}),
        ("<image>", {"videos": ["cat.mp4"]}),
        ("no placeholder", {"images": ["cat.jpg"]}),
    ],
)
def test_placeholder_without_its_media_stays_text(text: str, columns: dict[str, Json]) -> None:
    row = kept(chat(("user", text), ("assistant", "A")) | columns, Chat())

    assert turns(row) == [("user", text), ("assistant", "A")]


@pytest.mark.parametrize("blank", [None, "", "  "])
def test_sharegpt_blank_system_is_none(blank: Json) -> None:
    record = {"conversations": [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}], "system": blank}

    assert turns(kept(record)) == [("user", "U"), ("assistant", "A")]
    assert turns(kept({**record, "system": "S"}))[0] == ("system", "S")


# System prompts, single turns


@pytest.mark.parametrize(
    ("existing", "column", "policy", "system"),
    [
        ([], {}, "merge", None),
        ([], {"sys": None}, "merge", None),
        ([], {"sys": "F"}, "merge", "F"),
        ([], {"sys": {"content": "F"}}, "merge", "F"),
        ([("system", "S")], {"sys": "F"}, "merge", "F\n\nS"),
        ([("system", "S")], {"sys": "F"}, "replace", "F"),
        ([("system", "S")], {"sys": "F"}, "keep", "S"),
    ],
)
def test_system_prompt_of_a_column_is_joined_to_an_existing_one_as_the_policy_says(
    existing: list[tuple[str, Json]], column: dict[str, Json], policy: Any, system: str | None
) -> None:
    record = chat(*existing, ("user", "U"), ("assistant", "A")) | column
    said = turns(kept(record, Chat(system_prompt="sys", on_existing_system=policy)))

    assert said == [*([("system", system)] if system else []), ("user", "U"), ("assistant", "A")]


@pytest.mark.parametrize("value", [{"text": "F"}, {"content": None}, 3, ["F"]])
def test_system_prompt_without_text_is_rejected(value: Json) -> None:
    record = {**chat(("user", "U"), ("assistant", "A")), "sys": value}

    assert reason(record, Chat(system_prompt="sys")) == "bad_system_prompt"


def test_system_prompt_is_merged_with_parts_added_once_or_rejected() -> None:
    record = {**chat(("system", "S"), ("user", "U"), ("assistant", "A")), "sys": "F"}

    assert reason(record, Chat(system_prompt="sys", on_existing_system="reject")) == "bad_system_prompt"

    record = {**chat(("system", [{"type": "text", "text": "S"}]), ("user", "U"), ("assistant", "A")), "sys": "F"}

    assert turns(kept(record, Chat(system_prompt="sys")))[0] == ("system", "F\n\nS")

    record = {"conversations": [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}], "system": "S"}

    assert turns(kept(record, Chat(system_prompt="system")))[0] == ("system", "S")


def test_single_turn_keeps_system_first_user_and_next_assistant() -> None:
    contents = [("system", "S"), ("gpt", "hello"), ("user", "U1"), ("user", "U1b"), ("gpt", "A1"), ("user", "U2")]

    row = kept(chat(*contents, ("gpt", "A2")), Chat(single_turn=True))
    assert turns(row) == [("system", "S"), ("user", "U1"), ("assistant", "A1")]


# Roles


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("human", "user"),
        ("gpt", "assistant"),
        ("bot", "assistant"),
        ("model", "assistant"),
        ("chatbot", "assistant"),
        ("observation", "tool"),
        ("function", "tool"),
        ("ipython", "tool"),
    ],
)
def test_role_is_renamed(source: str, role: str) -> None:
    assert kept(chat((source, "x"))).messages[0]["role"] == role


def test_unknown_role_is_listed_or_rejected_and_one_of_the_options_is_known() -> None:
    row = kept(chat(("narrator", "U"), ("gpt", "A")), Chat(role_map={"narrator": "user"}))

    assert [role for role, _ in turns(row)] == ["user", "assistant"]
    assert row.report.unknown_roles == ()

    row = kept(chat(("developer", "D"), ("user", "U"), ("developer", "E"), ("assistant", "A"), ("critic", "C")))

    assert [role for role, _ in turns(row)] == ["developer", "user", "developer", "assistant", "critic"]
    assert row.report.unknown_roles == ("developer", "critic")

    assert kept(chat(("dev", "D"), ("user", "U")), Chat(role_map={"dev": "developer"})).report.unknown_roles == (
        "developer",
    )

    assert reason(chat(("developer", "D"), ("user", "U")), Chat(unknown_roles="reject")) == "unknown_role"

    row = kept(chat(("user", "U"), ("expert", "<think>r</think>A")), Chat(assistant_roles=["expert"]))

    assert row.report.unknown_roles == ()
    assert row.messages[1] == {"role": "expert", "content": "A", "reasoning_content": "r"}


# Content


@pytest.mark.parametrize(
    ("content", "expected"),
    [([], ""), ([{"type": "text", "text": "a"}, {"type": "text", "value": "b"}], "ab"), ([{"text": "a"}], "a")],
)
def test_content_becomes_text(content: Json, expected: str) -> None:
    assert turns(kept(chat(("user", content))))[0] == ("user", expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (3, "content_not_text"),
        (0, "content_not_text"),
        (False, "content_not_text"),
        ({}, "content_not_text"),
        ({"type": "text", "text": "a"}, "content_not_text"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "multimodal_content"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "multimodal_content"),
        ([{"type": "mystery"}], "unknown_content_part"),
        ([{"type": ["text"]}], "unknown_content_part"),
        ([{"type": "text", "text": 3}], "unknown_content_part"),
        (["a"], "unknown_content_part"),
        ([{"type": "reasoning", "text": "r"}], "unknown_content_part"),
    ],
)
def test_content_other_than_text_is_rejected(content: Json, expected: str) -> None:
    assert reason(chat(("user", content))) == expected


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "refusal": "No."},
        {"content": "", "refusal": "No."},
        {"refusal": "No."},
        {"content": "No.", "refusal": "No."},
        {"content": "No.", "refusal": None},
        {"content": "No.", "refusal": ""},
        {"content": [], "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": [{"type": "output_text", "text": "No"}, {"type": "refusal", "refusal": "."}]},
    ],
)
def test_refusal_is_the_answer_where_there_is_no_other(message: dict[str, Json]) -> None:
    """OpenAI's `refusal`, as UKGovernmentBEIS/inspect_ai pull requests 1198 and 1398 report it."""
    row = kept({"messages": [{"role": "user", "content": "U"}, {"role": "assistant", **message}]})

    assert row.messages[1] == {"role": "assistant", "content": "No."}
    assert row.report.notes == (("refusal_as_answer",) if message.get("refusal") else ())


def test_refusal_beside_another_answer_or_of_a_user_is_rejected() -> None:
    both = {"role": "assistant", "content": "Gladly.", "refusal": "No."}

    assert reason({"messages": [{"role": "user", "content": "U"}, both]}) == "bad_messages"
    assert reason(chat(("user", [{"type": "refusal", "refusal": "No."}]))) == "unknown_content_part"


@pytest.mark.parametrize("content", ["", " \n", None, []])
def test_assistant_with_nothing_is_rejected(content: Json) -> None:
    assert reason(chat(("user", "U"), ("assistant", content))) == "empty_assistant"


def test_record_is_left_as_it_was_and_its_text_and_other_keys_are_kept() -> None:
    record = {"messages": [{"role": "gpt", "content": "<think>r</think>A", "weight": 1, "tool_calls": [{"name": "f"}]}]}
    before = repr(record)

    kept(record)
    assert repr(record) == before

    assert turns(kept(chat(("user", "{{ 7 * 7 }}"), ("assistant", "{% x %}")))) == [
        ("user", "{{ 7 * 7 }}"),
        ("assistant", "{% x %}"),
    ]

    message = {"role": "user", "content": "U", "name": None, "tool_calls": None, "mood": "calm"}

    assert kept({"messages": [message]}).messages[0] == {"role": "user", "content": "U", "mood": "calm"}

    record = {"dialog": [{"speaker": "human", "text": "U"}, {"speaker": "bot", "text": "A"}]}
    options = Chat(messages_field="dialog", role_field="speaker", content_field="text")

    assert turns(kept(record, options)) == [("user", "U"), ("assistant", "A")]


# Answers that are numbers

NUMBERS = ["3", "3.10", "1e3", "-0.0", "12345678901234567890123", "0.1", "true", "false", "1E-7"]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("form", "columns"),
    [
        (Supervised(input_field="question", output_field="answer"), ("question", "answer")),
        (Supervised(), ("instruction", "output")),
        (Chat(), ("question", "answer")),
        (Chat(), ("instruction", "output")),
    ],
)
def test_answer_that_is_a_number_is_its_text_as_written(form: Any, columns: tuple[str, str], number: str) -> None:
    """The same as in CSV, whose cells are text; aws/fmeval pull request 168 casts such columns to text."""
    raw = f'{{"{columns[0]}": "How many?", "{columns[1]}": {number}}}'
    value = Canonicalizer(DatasetOptions(format=form)).restore_numbers(from_json(raw), raw.encode())

    row = kept(value, form)

    assert (row.output or row.messages[-1]["content"]) == number


def test_number_in_an_exchange_and_in_a_side_is_its_text_and_other_columns_stay() -> None:
    assert turns(kept({"conversation": [{"question": "How many?", "answer": 3}]}))[1] == ("assistant", "3")
    assert turns(kept({"conversation": [["How many?", 3], ["And now?", True]]}))[1::2] == [
        ("assistant", "3"), ("assistant", "true"),
    ]  # fmt: skip
    sides = kept({"prompt": "How many?", "chosen": 3, "rejected": 4.5}, Preference()).columns
    assert [from_json(sides[name])[0]["content"] for name in ("chosen", "rejected")] == ["3", "4.5"]
    raw = b'{"prompt": "a", "response": 3.10, "score": 3.10}'
    restored = Canonicalizer(DatasetOptions(format=Supervised())).restore_numbers(from_json(raw.decode()), raw)
    assert restored == {"prompt": "a", "response": "3.10", "score": 3.1}


# Forms of a list of messages

SAID = [("user", "It's a? [1]"), ("assistant", "b")]
MESSAGES = [{"role": role, "content": content} for role, content in SAID]
LISTS: dict[str, Json] = {
    "pairs of role and text": [list(pair) for pair in SAID],
    "pairs under other names": [["human", SAID[0][1]], ["AI", "b"]],
    "python": repr(MESSAGES),
    "python tuples": repr(SAID),
    "json of pairs": to_json(SAID),
    # hiyouga/LlamaFactory and others read only `role` and `from`; a role may be the key itself.
    "role as key": [{"user": SAID[0][1]}, {"assistant": "b"}],
    # huggingface/datasets issue 888: a sequence of objects is stored as an object of lists.
    "lists by key": {"role": ["user", "assistant"], "content": [SAID[0][1], "b"]},
    "lists by key of sharegpt": {"from": ["human", "gpt"], "value": [SAID[0][1], "b"]},
    # alibaba/ROLL issue 241 and unslothai/unsloth issue 321: a list in a list.
    "list in a list": [MESSAGES],
    "list of texts": [repr(message) for message in MESSAGES],
    # Azure/azure-sdk-for-python issue 41642: a cell with an object that holds the messages.
    "object": {"messages": MESSAGES},
    "json of an object": to_json({"messages": MESSAGES}),
}


ONLY_COLUMNS = {"json of pairs", "python tuples", "json of an object", "object", "list in a list"}
"""Forms of a column of conversations; elsewhere they may be an answer in JSON, or something else."""


@pytest.mark.parametrize("form", LISTS)
@pytest.mark.parametrize("column", ["messages", "conversations", "conversation", "talk"])
def test_list_of_messages_is_read_in_every_form(form: str, column: str) -> None:
    options = Chat(messages_field="talk") if column == "talk" else Chat()

    assert turns(kept({column: LISTS[form]}, options)) == SAID


@pytest.mark.parametrize("form", sorted(LISTS.keys() - ONLY_COLUMNS))
def test_prompt_history_and_sides_are_read_in_every_form(form: str) -> None:
    given = LISTS[form]
    if type(given) is not dict:
        asked = {"prompt": given, "response": [["user", "c"], ["assistant", "d"]]}

        assert turns(kept(asked)) == [*SAID, ("user", "c"), ("assistant", "d")]
    if type(given) is list:
        assert turns(kept({"instruction": "c", "output": "d", "history": given}))[:2] == SAID


def test_roles_of_pairs_are_those_of_the_options_too() -> None:
    options = Chat(role_map={"Ann": "user", "gpt-4": "assistant"})

    assert turns(kept({"messages": [["Ann", "a"], ["gpt-4", "b"]]}, options)) == [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize(
    "pairs",
    [
        [["user", "a"], ["Bob", "b"], ["assistant", "c"]],
        [["a", "user"], ["b", "assistant"]],
        [["system", "a"], ["Ann", "b"], ["user", "c"]],
        {"role": ["user", "assistant"], "content": ["a"]},
        {"messages": [], "context": "Read this."},
        [[{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]],
        "array([{'role': 'user', 'content': 'a'}], dtype=object)",
        "[{'role': 'user', 'content': 'a'}\n {'role': 'assistant', 'content': 'b'}]",
    ],
)
def test_list_that_may_be_of_roles_or_is_not_whole_is_rejected(pairs: Json) -> None:
    assert reason({"messages": pairs}) == "bad_messages"


def test_text_of_an_array_is_refused_with_what_to_do() -> None:
    """What pandas writes of a column of arrays, as in the reports about `to_csv`."""
    detail = rejection({"messages": "array([{'role': 'user', 'content': 'a'}], dtype=object)"}).detail

    assert "NumPy" in detail and "write it as JSON" in detail


@pytest.mark.parametrize("answer", ['[{"system": "linux"}]', '[["user", "ann"]]', '{"messages": [{"role": "user"}]}'])
def test_answer_in_json_stays_text(answer: str) -> None:
    assert turns(kept({"prompt": "List them.", "response": answer}))[1] == ("assistant", answer)


def test_pairs_of_question_and_answer_stay_pairs() -> None:
    assert turns(kept({"conversation": [["a", "b"], ["user", "d"]]})) == [
        ("user", "a"), ("assistant", "b"), ("user", "user"), ("assistant", "d"),
    ]  # fmt: skip


# Flags and kwargs


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"train": True}, {"train": True}),
        ({"loss": False}, {"train": False}),
        ({"training": False}, {"train": False}),
        ({"weight": 0}, {"train": False, "weight": 0.0}),
        ({"loss_weight": 1.0}, {"train": True, "weight": 1.0}),
        ({"train": True, "weight": 1}, {"train": True, "weight": 1.0}),
        ({"train": None}, {}),
    ],
)
def test_flags_become_train_and_weight(given: dict[str, Json], flags: dict[str, Json]) -> None:
    message = {"role": "assistant", "content": "A", **given}

    assert kept({"messages": [message]}).messages[0] == {"role": "assistant", "content": "A", **flags}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train": True, "weight": 0}, "flag_conflict"),
        ({"train": False, "loss": True}, "flag_conflict"),
        ({"weight": 0, "loss_weight": 1}, "flag_conflict"),
        ({"weight": -1}, "bad_weight"),
        ({"weight": float("nan")}, "bad_weight"),
        ({"weight": float("inf")}, "bad_weight"),
        ({"weight": 0.5}, "bad_weight"),
        ({"weight": 10**400}, "bad_weight"),
        ({"train": "yes"}, "bad_weight"),
    ],
)
def test_ambiguous_flags_are_rejected(given: dict[str, Json], expected: str) -> None:
    assert reason({"messages": [{"role": "assistant", "content": "A", **given}]}) == expected


def test_flags_have_configured_names_and_weights_between_need_the_option() -> None:
    record = {"messages": [{"role": "assistant", "content": "A", "weight": 0.5}]}

    assert kept(record, loss=Loss(weights=True)).messages[0]["weight"] == 0.5

    record = {"messages": [{"role": "user", "content": "U", "learn": False, "weight": "heavy"}]}
    message = kept(record, Chat(message_flags=["learn"])).messages[0]

    assert message == {"role": "user", "content": "U", "train": False}


@pytest.mark.parametrize("weight", [-0.5, float("nan"), float("inf"), 1e39, 1e-46, 10**400])
def test_weights_outside_float32_are_rejected(weight: float) -> None:
    """A weight that rounds to 0 or infinity would change its meaning."""
    record = {"messages": [{"role": "assistant", "content": "A", "weight": weight}]}

    assert reason(record, loss=Loss(weights=True)) == "bad_weight"


@pytest.mark.parametrize("value", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_kwargs_of_the_row(value: Json) -> None:
    row = kept({**chat(("user", "U")), "chat_template_kwargs": value})

    assert row.template_kwargs == {"enable_thinking": False}


def test_kwargs_have_a_configured_column_and_no_generation_prompt() -> None:
    row = kept({**chat(("user", "U")), "chat_template_kwargs": {"add_generation_prompt": True, "x": 1}})

    assert (row.template_kwargs, row.report.notes) == ({"x": 1}, ("ignored_add_generation_prompt",))

    record = {**chat(("user", "U")), "chat_template_kwargs": 3, "vars": {"x": 1}}

    for column, read in (("vars", {"x": 1}), (None, {})):
        assert kept(record, template=Template(chat_template_kwargs=column)).template_kwargs == read


@pytest.mark.parametrize(
    "value",
    [
        "{",
        "3",
        [],
        3,
        {"messages": []},
        {"tools": []},
        {"tokenize": True},
        {"return_dict": True},
        {"chat_template": ""},
    ],
)
def test_reserved_kwargs_are_rejected(value: Json) -> None:
    assert reason({**chat(("user", "U")), "chat_template_kwargs": value}) == "bad_template_kwargs"


# Pairs and documents


@pytest.mark.parametrize(
    ("record", "options", "expected"),
    [
        ({"prompt": "ab", "response": "cd"}, Supervised(), ("ab", "cd")),
        ({"q": "ab", "a": "cd"}, Supervised(input_field="q", output_field="a"), ("ab", "cd")),
        ({"instruction": "I", "input": "X", "output": "O"}, Supervised(), ("I\nX", "O")),
        ({"instruction": "I", "input": "X", "response": "O"}, Supervised(input_field="instruction"), ("I\nX", "O")),
        ({"instruction": "I", "input": None, "output": "O"}, Supervised(), ("I", "O")),
    ],
)
def test_pair_is_read(record: Json, options: Supervised, expected: tuple[str, str]) -> None:
    row = kept(record, options)

    assert (row.kind, row.text, row.output) == ("pair", *expected)


def test_document_is_kept_as_it_is() -> None:
    row = kept({"body": " T\u2028\n", "text": "x"}, Text(text_key="body"))

    assert (row.kind, row.text, row.report.schema) == ("text", " T\u2028\n", "text")


# What people have: conversations of bug reports


@pytest.mark.parametrize("value", [{"temp": 3}, 3, 0, False, [1, 2], [{"temp": 3}]])
def test_result_of_a_tool_that_is_no_text_is_kept_as_json(value: Json) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}

    row = kept({"messages": [{"role": "user", "content": "U"}, called, {"role": "tool", "content": value}]})

    assert row.messages[2]["content"] == to_json(value)
    assert row.report.notes == ("tool_result_as_json",)


@pytest.mark.parametrize("key", ["output", "result", "response", "text"])
@pytest.mark.parametrize("value", ["It rains.", {"rain": 3}])
def test_result_of_a_tool_may_be_under_another_key_than_content(key: str, value: Json) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    result = {"role": "tool", "tool_call_id": "c", key: value}

    row = kept({"messages": [{"role": "user", "content": "U"}, called, result]})

    content = value if isinstance(value, str) else to_json(value)
    assert row.messages[2] == {"role": "tool", "content": content, "tool_call_id": "c"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "c", "outputs": [{"weather": "It rains in Oslo."}]},
        {"role": "system", "text": "Be brief and kind."},
        {"role": "user", "text": "What is the weather?"},
    ],
)
def test_message_whose_content_is_under_an_unknown_key_is_rejected(message: dict[str, Json]) -> None:
    assert reason({"messages": [message, {"role": "user", "content": "U"}]}) == "unread_prompt"


def test_result_of_a_tool_that_is_absent_is_empty() -> None:
    result = {"role": "tool", "tool_call_id": "chatcmpl-tool-0123456789abcdef0123456789abcdef", "name": "find"}

    assert kept({"messages": [result]}).messages[0]["content"] == ""


@pytest.mark.parametrize("role", ["function_call", "function-call", "Function Call", "tool_call", "tool_calls"])
@pytest.mark.parametrize("result", ["function-response", "tool_response", "Tool-Result", "observation"])
def test_roles_of_calls_and_their_results_are_read_however_they_are_written(role: str, result: str) -> None:
    row = kept(chat(("human", "U"), (role, '{"name": "f", "arguments": {"a": 1}}'), (result, "R"), ("gpt", "A")))

    assert turns(row) == [("user", "U"), ("assistant", ""), ("tool", "R"), ("assistant", "A")]
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert row.report.unknown_roles == ()


def test_prompt_that_is_an_open_transcript_is_its_turns() -> None:
    asked = "Human: Why?\nAssistant: So.\nHuman: And then?\nAssistant:\n"

    for record in (
        {"instruction": asked, "input": "", "output": "No more."},
        {"prompt": asked, "response": " No more."},
    ):
        row = kept(record)

        assert turns(row) == [("user", "Why?"), ("assistant", "So."), ("user", "And then?"), ("assistant", "No more.")]


def test_parts_of_other_vendors_are_messages_with_calls_results_and_reasoning() -> None:
    call = {"type": "tool_use", "id": "tu0", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "tu0", "content": [{"type": "text", "text": "1"}]}
    said = {"type": "text", "text": "And now?"}
    record = {
        "messages": [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": [{"type": "text", "text": "I add."}, call]},
            {"role": "user", "content": [result, said]},
            {"role": "assistant", "content": "It is 1."},
        ]
    }

    row = kept(record)

    assert turns(row) == [
        ("user", "Add."), ("assistant", "I add."), ("tool", "1"), ("user", "And now?"), ("assistant", "It is 1."),
    ]  # fmt: skip
    assert row.messages[2]["tool_call_id"] == "tu0" == row.messages[1]["tool_calls"][0]["id"]

    call = {"name": "add", "args": {"a": 1}}
    record = {
        "systemInstruction": {"parts": [{"text": "Be "}, {"text": "brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Add "}, {"text": "1."}]},
            {"role": "model", "parts": [{"text": "First", "thought": True}, {"functionCall": call}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"sum": 1}}}]},
            {"role": "model", "parts": [{"text": "It is 1."}]},
        ],
    }

    row = kept(record)

    assert turns(row) == [
        ("system", "Be brief."),
        ("user", "Add 1."),
        ("assistant", ""),
        ("tool", '{"sum":1}'),
        ("assistant", "It is 1."),
    ]
    assert row.messages[2]["reasoning_content"] == "First"
    assert row.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}

    details = [{"type": "reasoning.text", "text": "because"}, {"type": "reasoning.summary", "summary": " so"}]
    message = {"role": "assistant", "content": "A", "reasoning_details": details}

    [_, answer] = kept({"messages": [{"role": "user", "content": "U"}, message]}).messages

    assert answer == {"role": "assistant", "content": "A", "reasoning_content": "because so"}


@pytest.mark.parametrize("role", ["User", "USER", " user ", "Human"])
def test_role_in_another_case_is_that_role_and_noted(role: str) -> None:
    row = kept(chat((role, "U"), ("Assistant", "A")))

    assert turns(row) == [("user", "U"), ("assistant", "A")]
    assert row.report.notes == ("role_name_case", "role_name_case")
    assert row.report.unknown_roles == ()


def test_user_without_content_and_arguments_that_are_no_json_are_rejected() -> None:
    assert reason(chat(("user", None), ("assistant", "A"))) == "empty_user"
    told = {"role": "system", "content": None, "system_prompt": "Be brief."}
    assert reason({"messages": [told, {"role": "user", "content": "U"}]}) == "unread_prompt"
    assert turns(kept(chat(("user", ""), ("assistant", "A"))))[0] == ("user", "")

    call = {"id": "c", "function": {"name": "find", "arguments": "{city: Oslo"}}
    record = {
        "messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    }

    assert reason(record) == "bad_tool_arguments"
    row = kept(record, Chat(), tools=Tools(arguments="string"))
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == "{city: Oslo"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("USER: U\n\n\nASSISTANT: A <|endoftext|>\n\n\n", [("user", "U"), ("assistant", "A")]),
        ("\n\nHuman: U\n\nAssistant: A\nHuman: is a word", [("user", "U"), ("assistant", "A\nHuman: is a word")]),
        ("Human: U\nAssistant: A\nHuman: V", [("user", "U"), ("assistant", "A"), ("user", "V")]),
        ("### Human: U### Assistant: A", [("user", "U"), ("assistant", "A")]),
        ("SYSTEM: S\nUSER: U\nASSISTANT: A", [("system", "S"), ("user", "U"), ("assistant", "A")]),
        (
            "USER: what does Assistant: mean?\nASSISTANT: A",
            [("user", "what does Assistant: mean?"), ("assistant", "A")],
        ),
    ],
)
def test_transcript_is_parted_at_the_names_of_its_speakers(text: str, said: list[tuple[str, str]]) -> None:
    assert turns(kept({"chat": text})) == said


@pytest.mark.parametrize(
    "text", ["Human: U", "A text. Human: U\nAssistant: A", "human: U\nassistant: A", "USER\nASSISTANT"]
)
def test_text_that_does_not_begin_with_a_speaker_or_has_no_answer_is_no_transcript(text: str) -> None:
    assert reason({"chat": text}) in ("unknown_schema", "bad_messages")
