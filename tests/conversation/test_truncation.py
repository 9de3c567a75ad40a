r"""Truncation: the stages in their order, on a toy template with one token per character.

T1    <s>S<e>\n<u>U1<e>\n<a>A1<e>\n          reasoning, where there is some, as <k>…</k> before the content
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rowmill.conversation.truncation import ConversationTruncator, TruncatedConversation, Truncation
from rowmill.core.json import Json
from rowmill.schema.rows import Message, Rejected, RowKind

KEY = "reasoning_content"


def t1(messages: Sequence[Message]) -> str:
    def body(message: Message) -> str:
        thought = f"<k>{message[KEY]}</k>" if message.get(KEY) else ""
        calls = "".join(call["id"] for call in message.get("tool_calls", ()))
        return f"<{message['role'][0]}>{thought}{message['content']}{calls}<e>\n"

    return "".join(map(body, messages))


def measure(messages: Sequence[Message], tools: Sequence[Json] | None) -> int:
    return len(t1(messages)) + len(tools or ())


def truncater(limit: int, **more: Any) -> ConversationTruncator:
    options: dict[str, Any] = {"measure": measure, "cut_reasoning": lambda text, tokens: text[:tokens], **more}
    return ConversationTruncator(limit, **options)


def dialogue(words: str) -> list[Message]:
    """Write a conversation in short: `S U1 A1`; `C1` calls, `T1` answers that call."""
    roles = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}
    out: list[Message] = []
    for word in words.split():
        if word[0] == "C":
            out.append({"role": "assistant", "content": "", "tool_calls": [{"id": word}]})
        elif word[0] == "T":
            out.append({"role": "tool", "content": word, "tool_call_id": f"C{word[1:]}"})
        else:
            out.append({"role": roles[word[0]], "content": word})
    return out


def words(messages: Sequence[Message]) -> str:
    return " ".join(m["tool_calls"][0]["id"] if "tool_calls" in m else m["content"] for m in messages)


def trained(messages: Sequence[Message]) -> list[bool]:
    return [message["role"] == "assistant" for message in messages]


def cut(messages: Sequence[Message], limit: int, **more: Any) -> TruncatedConversation:
    found = truncater(limit, **more).truncate(messages, None, trained(messages))
    assert isinstance(found, TruncatedConversation), found
    return found


# The specification's vectors


@pytest.mark.parametrize(
    ("limit", "expected", "cuts_tokens"),
    [
        (45, "S U1 A1 U2 A2", False),
        (44, "S U1 A1 U2 A2", False),
        (43, "S U2 A2", False),
        (26, "S U2 A2", False),
        (25, "S U2 A2", True),
    ],
)
def test_oldest_exchange_is_removed_first(limit: int, expected: str, cuts_tokens: bool) -> None:
    found = cut(dialogue("S U1 A1 U2 A2"), limit)

    assert (words(found.messages), found.needs_token_cut) == (expected, cuts_tokens)
    assert (found.original_tokens, found.tokens) == (44, 44 if limit > 43 else 26)
    assert found.exchanges_removed == 44 - found.tokens
    assert found.messages_removed == 5 - len(found.messages)


def thinking(conversation: str, **thoughts: str) -> list[Message]:
    """Write a conversation in short, with the reasoning of some answers."""
    return [{**m, KEY: thoughts[m["content"]]} if m["content"] in thoughts else m for m in dialogue(conversation)]


def test_reasoning_is_truncated_at_a_token_as_context_or_removed_if_none_of_it_fits() -> None:
    found = cut(thinking("U A", A="r" * 20), 36)
    assert (found.original_tokens, found.tokens, found.reasoning_removed) == (43, 36, 7)
    assert (found.messages[1][KEY], found.reasoning_context) == ("r" * 13, (1,))
    found = cut(thinking("U A", A="r" * 20), 16)
    assert found.messages == tuple(dialogue("U A"))
    assert (found.reasoning_context, found.needs_token_cut) == ((), False)


@pytest.mark.parametrize(
    ("conversation", "flags", "limit", "expected"),
    [
        # What follows the last supervised message is removed first.
        ("U1 A1 U2 A2 U3", "01010", 36, "U1 A1 U2 A2"),
        ("U1 A1 U2 A2 U3 A3", "010100", 36, "U1 A1 U2 A2"),
        # The greeting before the first user is older than any exchange.
        ("S A0 U1 A1 U2 A2", "010101", 44, "S U1 A1 U2 A2"),
        # Then tool rounds of the last exchange, never its user message or its answer.
        ("U1 A1 U2 C1 T1 C2 T2 A2", "01010101", 36, "U2 C2 T2 A2"),
        ("U1 A1 U2 C1 T1 C2 T2 A2", "01010101", 35, "U2 A2"),
        # Two parallel calls keep their results.
        ("U1 C1 C2 T1 T2 A1", "011001", 36, "U1 C2 T2 A1"),
        # A supervised call at the end keeps its result.
        ("U1 A1 U2 C1 T1 U3", "0101000", 27, "U2 C1 T1"),
        # Only the first answer trains: the rest is what follows.
        ("U1 A1 U2 A2", "0100", 20, "U1 A1"),
    ],
)
def test_stages_in_their_order(conversation: str, flags: str, limit: int, expected: str) -> None:
    messages = dialogue(conversation)
    found = truncater(limit).truncate(messages, None, [flag == "1" for flag in flags[: len(messages)]])

    assert isinstance(found, TruncatedConversation)
    assert words(found.messages) == expected
    assert [messages[index] for index in found.kept] == list(found.messages)


def test_oldest_reasoning_is_removed_first_and_unprinted_reasoning_and_tools_stay() -> None:
    messages = thinking("U A1 A2", A1="a" * 10, A2="b" * 10)
    found = cut(messages, len(t1(messages)) - 20)
    assert list(found.messages) == thinking("U A1 A2", A2="b" * 7)
    assert found.reasoning_context == (2,)

    def last_only(messages: Sequence[Message], _: Sequence[Json] | None) -> int:
        return len(t1([{k: v for k, v in m.items() if k != KEY} for m in messages[:-1]] + list(messages[-1:])))

    found = cut(thinking("U A1 A2", A1="r" * 20, A2="r" * 20), 40, measure=last_only)

    assert (found.messages[1][KEY], found.tokens) == ("r" * 20, 40)

    messages = dialogue("U1 A1 U2 A2")
    found = truncater(36).truncate(messages, ["tool"], trained(messages))
    assert isinstance(found, TruncatedConversation)
    assert (words(found.messages), found.tokens) == ("U2 A2", 19)


@pytest.mark.parametrize(
    ("options", "flags", "reason"),
    [
        ({"token_cut": "reject"}, [False, True], "overlong_after_structure"),
        ({}, [False, False], "no_assistant"),
        ({"measure": lambda _messages, _tools: None}, [False, True], "template_error"),
    ],
    ids=["the recipe cuts at no token", "nothing is supervised", "the template raises on everything"],
)
def test_row_that_cannot_be_truncated_is_rejected(options: dict[str, Any], flags: list[bool], reason: str) -> None:
    found = truncater(10, **options).truncate(dialogue("U1 A1"), None, flags)
    assert isinstance(found, Rejected)
    assert found.reason == reason


def test_search_skips_what_the_template_refuses_and_renders_few_times() -> None:
    """The template wants an even number of exchanges."""

    def even(messages: Sequence[Message], _: Sequence[Json] | None) -> int | None:
        users = sum(message["role"] == "user" for message in messages)
        return None if users % 2 else len(t1(messages))

    messages = dialogue("U1 A1 U2 A2 U3 A3 U4 A4")

    assert words(cut(messages, 54, measure=even).messages) == "U3 A3 U4 A4"
    assert words(cut(messages, 30, measure=even).messages) == "U3 A3 U4 A4"
    assert cut(messages, 30, measure=even).needs_token_cut

    renders = 0

    def counted(messages: Sequence[Message], tools: Sequence[Json] | None) -> int:
        nonlocal renders
        renders += 1
        return measure(messages, tools)

    messages = dialogue(" ".join(f"U{i} A{i}" for i in range(10, 90)))
    messages[-1][KEY] = "r" * 3000
    cut(messages, 1000, measure=counted)

    assert renders <= 12


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Message], list[bool]]:
    messages: list[Message] = dialogue(draw(st.sampled_from(["", "S", "S S"])))
    open_calls: list[str] = []
    for number in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from("UUAACCTTS"))
        if kind == "T" and open_calls:
            messages += dialogue(f"T{open_calls.pop(0)[1:]}")
        elif kind != "T":
            messages += dialogue(f"{kind}{number}")
        if kind == "C":
            open_calls.append(f"C{number}")
        if kind == "U":
            open_calls.clear()
        if kind in "AC" and draw(st.booleans()):
            messages[-1][KEY] = "r" * draw(st.integers(1, 12))
    flags = [draw(st.booleans()) and message["role"] != "system" for message in messages]
    return messages, flags


@pytest.mark.slow
@given(conversations(), st.integers(2, 120))
def test_truncated_conversation_keeps_the_invariants(given_: tuple[list[Message], list[bool]], limit: int) -> None:
    messages, flags = given_
    found = truncater(limit).truncate(messages, None, flags)

    if isinstance(found, Rejected):
        assert found.reason == "no_assistant"
        assert not any(flags)
        return
    kept = set(found.kept)
    assert found.tokens == len(t1(found.messages))
    assert found.original_tokens == found.tokens + found.exchanges_removed + found.reasoning_removed
    assert (found.tokens > limit) == found.needs_token_cut
    assert found.messages_removed == len(messages) - len(kept)
    if found.original_tokens <= limit:
        assert list(found.messages) == messages
    else:
        assert any(flags[index] for index in kept)
    leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    assert set(range(leading)) <= kept
    calls = {c["id"] for m in found.messages for c in m.get("tool_calls", ())}
    results = [m["tool_call_id"] for m in found.messages if m["role"] == "tool"]
    assert results == [m["tool_call_id"] for m in messages if m["role"] == "tool" and m["tool_call_id"] in calls]


@given(conversations(), st.integers(2, 120))
def test_truncating_twice_is_truncating_once(given_: tuple[list[Message], list[bool]], limit: int) -> None:
    messages, flags = given_
    once = truncater(limit).truncate(messages, None, flags)
    if isinstance(once, Rejected):
        return

    twice = truncater(limit).truncate(once.messages, None, [flags[index] for index in once.kept])
    assert isinstance(twice, TruncatedConversation)
    assert (twice.messages, twice.messages_removed) == (once.messages, 0)


@pytest.mark.slow
@given(conversations(), st.integers(2, 120), st.integers(0, 30))
def test_larger_limit_never_keeps_fewer_messages(
    given_: tuple[list[Message], list[bool]], limit: int, more: int
) -> None:
    messages, flags = given_
    small = truncater(limit).truncate(messages, None, flags)
    large = truncater(limit + more).truncate(messages, None, flags)

    if isinstance(small, TruncatedConversation) and isinstance(large, TruncatedConversation):
        assert set(small.kept) <= set(large.kept)
        assert small.tokens <= large.tokens


@pytest.mark.parametrize(
    ("conversation", "limit", "expected", "kept"),
    [
        ("S U1 A1 U2 A2 U3 A3", 44, ["S U1 A1 U2 A2", "S U3 A3"], [(0, 1, 2, 3, 4), (0, 5, 6)]),
        ("S U1 A1 U2 C1 T1 A2", 26, ["S U1 A1", "S U2 A2"], [(0, 1, 2), (0, 3, 6)]),
    ],
    ids=["puts as many exchanges in a piece as fit", "truncates an exchange that is too long alone"],
)
def test_split(conversation: str, limit: int, expected: list[str], kept: list[tuple[int, ...]]) -> None:
    messages = dialogue(conversation)
    pieces = truncater(limit).split(messages, None, trained(messages))
    assert isinstance(pieces, list)
    assert [words(piece.messages) for piece in pieces] == expected
    assert [piece.kept for piece in pieces] == kept


def test_split_of_a_fitting_row_is_one_piece() -> None:
    messages = dialogue("S U1 A1")
    whole = TruncatedConversation(tuple(messages), (0, 1, 2), len(t1(messages)), len(t1(messages)))
    assert truncater(99).split(messages, None, trained(messages)) == [whole]


@given(conversations(), st.integers(20, 120))
def test_split_pieces_do_not_overlap(given_: tuple[list[Message], list[bool]], limit: int) -> None:
    messages, flags = given_
    pieces = truncater(limit).split(messages, None, flags)
    if isinstance(pieces, Rejected):
        return

    leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    kept = [index for piece in pieces for index in piece.kept if index >= leading]
    assert kept == sorted(set(kept))


@pytest.mark.parametrize(
    ("options", "kind", "sliced", "expected"),
    [
        ({}, "conversation", False, "truncate"),
        ({}, "pair", False, "truncate"),
        ({}, "text", False, "split"),
        ({}, "conversation", True, "keep"),
        ({"overlong": "drop"}, "text", True, "drop"),
    ],
)
def test_policy_by_kind(options: dict[str, Any], kind: RowKind, sliced: bool, expected: str) -> None:
    assert Truncation(**options).policy(kind, sliced=sliced) == expected


def test_alias_max_seq_len() -> None:
    assert Truncation.model_validate({"max_seq_len": 8}) == Truncation(max_length=8)


@pytest.mark.parametrize(
    "wrong",
    [{"max_length": 1}, {"max_length": True}, {"overlong": "cut"}, {"max_length": 8, "max_seq_len": 8}, {"max_len": 8}],
)
def test_wrong_option_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Truncation.model_validate(wrong)
