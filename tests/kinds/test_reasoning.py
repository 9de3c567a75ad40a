"""Reasoning: found under keys, in tags, parts and messages; dropped, limited, or inlined as tags."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rowmill.core.json import Json
from rowmill.kinds.shared.reasoning import (
    ExtractedReasoning,
    Reasoning,
    ThinkTagReader,
    inline_reasoning,
    join_reasoning,
    limit_reasoning,
)
from rowmill.schema.rows import Row
from tests.support.canonical_rows import kept, rejection
from tests.support.tiers import mark_all_but

TAGS = ThinkTagReader([["<think>", "</think>"]])


def canonical_message(message: dict[str, Json], **options: Any) -> dict[str, Json]:
    return row_of([{"role": "user", "content": "U"}, {"role": "assistant", **message}], **options).messages[1]


def row_of(messages: list[Json], **options: Any) -> Row:
    return kept({"messages": messages}, reasoning=Reasoning(**options))


def reason(messages: list[Json], **options: Any) -> str:
    return rejection({"messages": messages}, reasoning=Reasoning(**options)).reason


# Tags


@pytest.mark.parametrize(
    ("content", "said", "thought", "literal"),
    [
        ("pre <think>r1</think> mid <think>r2</think> end", "pre mid end", ["r1", "r2"], 0),
        ("<think>\nr\n</think>\n\nA", "A", ["r"], 0),
        ("<think></think>A", "A", [""], 0),
        ("use <think> here", "use <think> here", [], 1),
        ("r\n</think>\n\nA", "A", ["r"], 0),
        ("r</think>", "", ["r"], 0),
        ("r</think>  \nA", "A", ["r"], 0),
        ("r</think>A", "A", ["r"], 0),
        ("It is 4.\nSure.</think>Four.\n\nDone", "Four.\n\nDone", ["It is 4.\nSure."], 0),
        ("</think>A", "A", [""], 0),
        ("r `x` s</think>A `y`", "A `y`", ["r `x` s"], 0),
        ("one ` only.</think>A", "A", ["one ` only."], 0),
        ("```\nx</think>y\n```\nr</think>A", "A", ["```\nx</think>y\n```\nr"], 0),
        ("the </think> tag", "the </think> tag", [], 1),
        ("Use </think> to close it", "Use </think> to close it", [], 1),
        ("`</think>`", "`</think>`", [], 1),
        ("Write `r</think>A` so", "Write `r</think>A` so", [], 1),
        ("Write ``a ` r</think>A`` so", "Write ``a ` r</think>A`` so", [], 1),
        ('the tag "</think>" ends it', 'the tag "</think>" ends it', [], 1),
        ("the tag (</think>) ends it", "the tag (</think>) ends it", [], 1),
        ("the tag **</think>** ends it", "the tag **</think>** ends it", [], 1),
        ("the tag</think> ends it", "the tag</think> ends it", [], 1),
        ("r</think>A, not <think>", "r</think>A, not <think>", [], 2),
        ("the </think> tag <think>r</think> A", "the </think> tag A", ["r"], 1),
        ("<think>a<think>b</think>c</think>d", "c</think>d", ["a<think>b"], 1),
        ("r\n</think>\n<think>s</think>A", "A", ["r", "s"], 0),
        ("```\n<think>r</think>\n```\nA", "```\n<think>r</think>\n```\nA", [], 0),
        ("~~~html\n<think>\n~~~\n<think>r</think>A", "~~~html\n<think>\n~~~\nA", ["r"], 0),
        ("inline ``` <think>r</think>A", "inline ``` A", ["r"], 0),
        ("<think>x\n```\n</think>\n```\ny</think>A", "A", ["x\n```\n</think>\n```\ny"], 0),
        ("<think>x\n```py\ncode</think>\n\nA\n```\nend\n```", "A\n```\nend\n```", ["x\n```py\ncode"], 0),
        ("```\n<think>never closed, never a tag", "```\n<think>never closed, never a tag", [], 0),
        ("no tags", "no tags", [], 0),
    ],
)
def test_tagged_reasoning_is_split_from_the_answer(content: str, said: str, thought: list[str], literal: int) -> None:
    assert TAGS.extract(content) == ExtractedReasoning(said, thought, literal)


@pytest.mark.parametrize(
    "content", ["<think>abc", "  <think>abc", "<think>a</think>\n<think>b", "r\n</think>\n<think>b"]
)
def test_unclosed_tags_at_the_start_mean_truncated_text(content: str) -> None:
    assert TAGS.extract(content) is None
    assert reason([{"role": "assistant", "content": content}]) == "unclosed_think"


def test_two_pairs_of_tags_are_matched_separately() -> None:
    reader = ThinkTagReader([["<think>", "</think>"], ["[T]", "[/T]"]])

    assert reader.extract("[T]a</think>[/T]b<think>c[/T]</think>d") == ExtractedReasoning(
        "bd", ["a</think>", "c[/T]"], 0
    )


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n", "```", "~~~~", "`"]), max_size=14).map(
    "".join
)


@given(PIECES)
def test_splitting_tags_loses_no_character(content: str) -> None:
    found = TAGS.extract(content)

    if found is not None:
        assert sorted(found.content + "".join(found.blocks)).count("a") == content.count("a")
        assert found.blocks or found.content == content


@given(PIECES)
def test_tags_hint_finds_every_tag(content: str) -> None:
    found = TAGS.extract(content)

    assert any(hint in content for hint in TAGS.hints) or found == ExtractedReasoning(content, [], 0)


@given(st.text(alphabet="ab \n", min_size=1).filter(str.strip), st.text(alphabet="cd \n").map(str.strip))
def test_tags_round_trip(thought: str, said: str) -> None:
    found = TAGS.extract(f"<think>\n{thought}\n</think>\n\n{said}")

    assert found == ExtractedReasoning(said, [thought.strip()], 0)


@pytest.mark.slow
@pytest.mark.parametrize("tags", mark_all_but([50_000], [50_000, 200_000]))
def test_many_open_tags_take_linear_time(tags: int) -> None:
    """Quadratic work on this would take longer than the limit of a test; on the campaign's, days."""
    content = "x" + "<think>" * tags

    assert TAGS.extract(content) == ExtractedReasoning(content, [], tags)


# Keys


@pytest.mark.parametrize("key", ["reasoning", "thinking", "reason"])
def test_key_moves_and_is_counted(key: str) -> None:
    row = row_of([{"role": "assistant", "content": "A", key: "r"}])

    assert row.messages[0] == {"role": "assistant", "content": "A", "reasoning_content": "r"}
    assert row.report.moved_reasoning_keys == 1


def test_first_key_with_text_moves_and_no_other_is_lost() -> None:
    row = row_of([{"role": "assistant", "content": "A", "reasoning_content": " r\n"}])

    assert row.messages[0]["reasoning_content"] == " r\n"
    assert row.report.moved_reasoning_keys == 0

    row = row_of([{"role": "assistant", "content": "A", "reasoning": " ", "thinking": "t", "reason": "s"}])

    assert row.messages[0] == {"role": "assistant", "content": "A", "reasoning_content": "t", "reason": "s"}
    assert row.report.notes == ("extra_reasoning_key",)

    message = canonical_message({"content": "A", "reasoning": "one", "reasoning_content": "two"})

    assert (message["reasoning_content"], message["reasoning"]) == ("one", "two")

    message = canonical_message({"content": "A", "reasoning": "one", "reasoning_content": "one"})

    assert message == {"role": "assistant", "content": "A", "reasoning_content": "one"}

    row = row_of([{"role": "user", "content": "U", "reason": "curious"}])

    assert row.messages[0] == {"role": "user", "content": "U", "reason": "curious"}

    assert reason([{"role": "assistant", "content": "A", "reasoning_content": {"a": 1}}]) == "content_not_text"


def test_reasoning_of_keys_tags_and_parts_is_joined_without_repetition() -> None:
    assert canonical_message({"content": "<think>s</think>A", "reasoning": "r"})["reasoning_content"] == "r\n\ns"
    assert canonical_message({"content": "<think> r </think>A", "reasoning": "r"})["reasoning_content"] == "r"

    assert join_reasoning(["a", " ", "b", "a\n"]) == "a\n\nb"

    message = canonical_message({"content": "2 and 2 is 4.</think>Four."})

    assert message == {"role": "assistant", "content": "Four.", "reasoning_content": "2 and 2 is 4."}

    assert (
        canonical_message({"content": "<think>r</think>A"}, extract_think_tags=False)["content"] == "<think>r</think>A"
    )

    row = row_of([{"role": "assistant", "content": "<think>\n\n</think>\n\nA"}])

    assert row.messages[0] == {"role": "assistant", "content": "A"}
    assert row.report.extracted_think_from_content == 1

    parts = [
        {"type": "thinking", "thinking": "r1"},
        {"type": "reasoning", "value": "r2"},
        {"type": "text", "text": "A"},
    ]

    assert canonical_message({"content": parts}) == {
        "role": "assistant",
        "content": "A",
        "reasoning_content": "r1\n\nr2",
    }

    assert canonical_message({"content": "", "reasoning": "r"})["reasoning_content"] == "r"


@pytest.mark.parametrize(
    ("part", "thought"),
    [
        # Mistral's ThinkChunk; agentjido/req_llm issue 742.
        ({"type": "thinking", "thinking": [{"type": "text", "text": "r1 "}, {"type": "text", "text": "r2"}]}, "r1 r2"),
        ({"type": "thinking", "thinking": {"type": "text", "text": "r1 r2"}}, "r1 r2"),
        ({"type": "think", "think": "r1 r2"}, "r1 r2"),
        ({"type": "reasoning", "reasoning": "r1 r2", "signature": "c2ln"}, "r1 r2"),
        ({"type": "thought", "content": "r1 r2"}, "r1 r2"),
        ({"text": "r1 r2", "thought": True}, "r1 r2"),
        # OpenAI's items of reasoning; openai/openai-agents-python issue 1616.
        ({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r1 r2"}]}, "r1 r2"),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": one} for one in ("r1", "r2")]},
            "r1\n\nr2",
        ),
    ],
)
def test_reasoning_in_a_part_is_read_whatever_its_form(part: Json, thought: str) -> None:
    message = canonical_message({"content": [part, {"type": "text", "text": "A"}]})

    assert message == {"role": "assistant", "content": "A", "reasoning_content": thought}


@pytest.mark.parametrize("key", ["thinking", "reasoning", "reasoning_content", "think", "thought", "thinking_blocks"])
@pytest.mark.parametrize(
    "value",
    [
        "r",
        [{"type": "text", "text": "r"}],
        [{"type": "thinking", "thinking": "r", "signature": "c2ln"}, {"type": "redacted_thinking", "data": "c2ln"}],
        {"type": "thinking", "thinking": "r"},
    ],
)
def test_reasoning_under_a_key_is_read_whatever_its_form(key: str, value: Json) -> None:
    message = canonical_message({"content": "A", key: value})

    assert message == {"role": "assistant", "content": "A", "reasoning_content": "r"}


def test_same_reasoning_as_text_and_as_blocks_is_read_once() -> None:
    """LiteLLM sends both; OpenHands/software-agent-sdk issue 172."""
    blocks = [{"type": "thinking", "thinking": "r", "signature": "c2ln"}]

    message = canonical_message({"content": "A", "reasoning_content": "r", "thinking_blocks": blocks})

    assert message == {"role": "assistant", "content": "A", "reasoning_content": "r"}


def test_redacted_reasoning_is_left_out_and_counted() -> None:
    parts = [{"type": "redacted_thinking", "data": "c2ln"}, {"type": "text", "text": "A"}]

    row = row_of([{"role": "user", "content": "U"}, {"role": "assistant", "content": parts}])

    assert row.messages[1] == {"role": "assistant", "content": "A"}
    assert row.report.notes == ("redacted_reasoning",)
    assert reason([{"role": "assistant", "content": [{"type": "thinking", "mood": 1}]}]) == "unknown_content_part"
    assert reason([{"role": "user", "content": parts}]) == "unknown_content_part"


def test_message_of_the_analysis_channel_is_the_reasoning_of_the_next() -> None:
    """The channels of openai/harmony's README, where `analysis` is not for the user's eyes."""
    said = [("user", None, "U"), ("assistant", "analysis", "r"), ("assistant", "final", "A")]
    messages = [{"role": role, "content": text, **({"channel": at} if at else {})} for role, at, text in said]

    row = row_of(messages)

    assert [(one["content"], one.get("reasoning_content")) for one in row.messages] == [("U", None), ("A", "r")]
    assert reason(messages[:2]) == "orphan_think"


# Think messages and modes


def test_think_message_joins_the_next_assistant_unless_it_has_no_such_role() -> None:
    messages = [("user", "U"), ("think", "r1"), ("think", "r2"), ("assistant", "A"), ("assistant", "B")]
    row = row_of([{"role": role, "content": content} for role, content in messages])

    assert [message.get("reasoning_content") for message in row.messages] == [None, "r1\n\nr2", None]

    row = row_of([{"role": "think", "content": "r"}, {"role": "assistant", "content": "A"}], think_role=None)

    assert row.report.unknown_roles == ("think",)


@pytest.mark.parametrize("after", [[], [{"role": "user", "content": "U2"}]])
def test_think_message_with_no_assistant_after_is_rejected(after: list[Json]) -> None:
    assert reason([{"role": "user", "content": "U"}, {"role": "think", "content": "r"}, *after]) == "orphan_think"


def test_mode_drop_removes_all_reasoning_and_rejects_what_is_then_empty() -> None:
    messages: list[Json] = [
        {"role": "think", "content": "r0"},
        {"role": "assistant", "content": "<think>r1</think>A", "reasoning": "r2", "thinking": "r3"},
        {"role": "think", "content": "r4"},
    ]
    row = row_of(messages, think_mode="drop")

    assert row.messages == ({"role": "assistant", "content": "A"},)
    assert row.report.dropped_think_messages == 2
    assert row.report.notes.count("dropped_reasoning") == 1

    assert reason([{"role": "assistant", "content": "", "reasoning": "r"}], think_mode="drop") == "empty_assistant"
    assert reason([{"role": "think", "content": "r"}], think_mode="drop") == "empty_conversation"


def test_reasoning_is_inlined_so_that_reading_undoes_it_or_cut_to_its_first_tokens() -> None:
    message = {"role": "assistant", "content": "A", "reasoning_content": "r1\n\nr2"}
    (written,) = inline_reasoning([message], ["<think>", "</think>"])

    assert written["content"] == "<think>\nr1\n\nr2\n</think>\n\nA"
    assert written["content"][written["inline_reasoning"] :] == "A"
    assert canonical_message({"content": written["content"]}) == message

    message = {"role": "assistant", "content": "A", "reasoning_content": "a b c d"}

    def first_words(text: str, number: int) -> str:
        return " ".join(text.split()[:number])

    assert limit_reasoning([message], 2, first_words)[0]["reasoning_content"] == "a b"
    assert limit_reasoning([message], 0, first_words) == limit_reasoning([message], None, first_words) == (message,)


@pytest.mark.parametrize(
    "pairs", [[], [["<t>", "<t>"]], [["", "</t>"]], [["<t>"]], [["<a>", "<b>"], ["<b>", "<c>"]], "<t>"]
)
def test_ambiguous_tags_are_refused(pairs: Json) -> None:
    with pytest.raises(ValidationError):
        Reasoning(think_tags=pairs)
