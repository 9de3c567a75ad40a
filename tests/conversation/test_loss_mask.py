"""Masking: the specification's vectors, dropped content, reasoning, ends of turn, and what verification rejects."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_engines import replace_generation_tags
from rowmill.conversation.template_registry import read_named_template
from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.schema.rows import Conversation, MaskedConversation, Message, Rejected
from tests.support.tiers import draw

LETTERS = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
"""The specification's T1: one character is one token."""


def user(text: str, **more: Json) -> Message:
    return {"role": "user", "content": text, **more}


def assistant(text: str, **more: Json) -> Message:
    return {"role": "assistant", "content": text, **more}


TALK = [user("U1"), assistant("A1"), user("U2"), assistant("A2")]
REASONED = [user("U1"), assistant("A1", reasoning_content="R1"), user("U2"), assistant("A2", reasoning_content="R2")]


def masker(template: str, loss: dict[str, Any] | None = None, rules: MaskRules | None = None, **kwargs: Json) -> Masker:
    renderer = Renderer(RendererSpec(template, {"eos_token": "</s>"}, kwargs))
    return Masker(renderer, validate_options(Loss, loss or {}, "loss"), rules or MaskRules())


def shown(result: MaskedConversation | Rejected) -> str:
    """Draw a mask: trained characters are in brackets."""
    if isinstance(result, Rejected):
        return f"{result.reason}: {result.detail}"
    pieces: list[str] = []
    position = 0
    for span in result.trained:
        pieces += [result.text[position : span.start], "⟦", result.text[span.start : span.end], "⟧"]
        position = span.end
    return "".join([*pieces, result.text[position:]]).replace("⟧⟦", "")


def mask(template: str, messages: Sequence[Message], loss: dict[str, Any] | None = None, **kwargs: Json) -> str:
    return shown(masker(template, loss, **kwargs).mask(Conversation(messages)))


def trained(template: str, messages: Sequence[Message], loss: dict[str, Any]) -> list[int]:
    result = masker(template, loss).mask(Conversation(messages))
    assert isinstance(result, MaskedConversation), result
    # Index 0 never trains; tokenization ensures that, so it is left out here.
    return [i for span in result.trained for i in range(span.start, span.end) if i > 0]


# ── T1 ──


@pytest.mark.parametrize(
    ("loss", "weights", "expected"),
    [
        ({}, {}, [*range(12, 17), *range(30, 35)]),
        ({"supervise": "last_assistant"}, {}, [*range(30, 35)]),
        ({"supervise": "last_turn"}, {}, [*range(30, 35)]),
        ({}, {1: 0}, [*range(30, 35)]),
        ({"mask": {"user": "train"}}, {}, [*range(1, 8), *range(18, 26)]),
        ({"end_of_turn": "mask"}, {}, [12, 13, 30, 31]),
        ({"trailing": "train"}, {}, [*range(12, 18), *range(30, 36)]),
        ({"lead": "train"}, {}, [*range(9, 17), *range(27, 35)]),
        ({"mask_user_turns": False}, {}, [*range(1, 36)]),
    ],
)
def test_mask_of_the_toy_template_is_the_vector(
    loss: dict[str, Any], weights: dict[int, float], expected: list[int]
) -> None:
    messages = [{**m, "weight": weights[i]} if i in weights else m for i, m in enumerate(TALK)]

    assert trained(LETTERS, messages, loss) == expected


def test_train_flag_on_a_user_message_trains_all_of_it() -> None:
    assert mask(LETTERS, [user("U1", train=True), assistant("A1", train=False)]) == "⟦<u>U1<e>⟧\n<a>A1<e>\n"


def test_system_text_printed_outside_the_loop_trains_by_its_position() -> None:
    """Qwen2.5 prints it outside every loop."""
    messages = [{"role": "system", "content": "Be kind"}, user("U1"), assistant("A1")]

    maker = masker(read_named_template("qwen2.5"), {"mask": {"system": "train"}}, MaskRules())

    assert shown(maker.mask(Conversation(messages))) == (
        "⟦<|im_start|>system\nBe kind<|im_end|>⟧\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [([user("U1")], "no_assistant"), ([user("U"), assistant("A", train=False)], "no_loss_tokens")],
)
def test_row_without_supervision_is_rejected_with_its_reason(messages: list[Message], reason: str) -> None:
    result = masker(LETTERS).mask(Conversation(messages))

    assert isinstance(result, Rejected)
    assert result.reason == reason


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (
            "gemma3",
            [{"role": "system", "content": "Answer briefly."}, user("Answer briefly."), assistant("Yes, I will.")],
        ),
        (
            "llama3.1",
            [{"role": "system", "content": "Answer briefly."}, user("Answer briefly."), assistant("Briefly so.")],
        ),
    ],
)
def test_messages_of_equal_text_have_distinct_spans(template: str, messages: list[Message]) -> None:
    """Gemma prints the system's text in the user's turn: the user's own text is the second one there."""
    result = masker(read_named_template(template)).mask(Conversation(messages))

    assert isinstance(result, MaskedConversation)
    first = result.text.index("Answer briefly.")
    second = result.text.index("Answer briefly.", first + 1)
    assert [(piece.message, piece.start) for piece in result.pieces[:2]] == [(0, first), (1, second)]


def test_text_of_two_messages_that_is_printed_once_counts_as_dropped() -> None:
    """The template prints the system's text in the first user's turn, and that turn's own text nowhere."""
    template = """{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user
{{ messages[0].content if messages[0].role == 'system' and loop.index0 == 1 else m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% endif %}{% endfor %}"""
    messages = [{"role": "system", "content": "Answer briefly."}, user("Answer briefly."), assistant("Yes, I will.")]

    result = masker(template).mask(Conversation(messages))

    assert isinstance(result, Rejected)
    assert result.reason == "content_dropped"


# ── the Qwen3 format, our own template ──

QWEN = read_named_template("qwen3")
U1, U2 = (
    "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n",
)
EMPTY = "<think>\n\n</think>\n\n"
BOTH = (replace_generation_tags(QWEN), QWEN)
"""The closed list decides what of the first trains, the blocks what of the second."""


@pytest.mark.slow
@pytest.mark.parametrize("template", BOTH, ids=("list", "blocks"))
@pytest.mark.parametrize(
    ("loss", "kwargs", "expected"),
    [
        ({}, {}, f"{U1}⟦A1<|im_end|>⟧\n{U2}⟦{EMPTY}A2<|im_end|>⟧\n"),
        ({"think_loss": "answer_only"}, {}, f"{U1}⟦A1<|im_end|>⟧\n{U2}{EMPTY}⟦A2<|im_end|>⟧\n"),
    ],
)
def test_mask_of_qwen3_is_the_vector(
    loss: dict[str, Any], kwargs: dict[str, Json], expected: str, template: str
) -> None:
    maker = masker(template, loss, MaskRules(), **kwargs)

    assert shown(maker.mask(Conversation(TALK))) == expected


@pytest.mark.slow
def test_mask_of_qwen3_without_thinking_starts_after_the_empty_block() -> None:
    maker = masker(BOTH[0], {}, MaskRules(), enable_thinking=False)

    assert shown(maker.mask(Conversation(TALK))) == f"{U1}⟦A1<|im_end|>⟧\n{U2}{EMPTY}⟦A2<|im_end|>⟧\n"


@pytest.mark.parametrize("template", BOTH, ids=("list", "blocks"))
def test_reasoning_of_history_is_counted_as_dropped(template: str) -> None:
    result = masker(template, {}, MaskRules()).mask(Conversation(REASONED))

    assert isinstance(result, MaskedConversation)
    assert result.dropped == {"reasoning": 1}
    assert shown(result) == f"{U1}⟦A1<|im_end|>⟧\n{U2}⟦<think>\nR2\n</think>\n\nA2<|im_end|>⟧\n"


@pytest.mark.parametrize("template", BOTH, ids=("list", "blocks"))
@pytest.mark.parametrize(
    ("think_loss", "last"),
    [
        ("all", "⟦<think>\nR2\n</think>\n\nA2<|im_end|>⟧\n"),
        ("answer_only", "<think>\nR2\n</think>\n\n⟦A2<|im_end|>⟧\n"),
        ("answer_plus_think", "<think>\n⟦R2⟧\n</think>\n\n⟦A2<|im_end|>⟧\n"),
    ],
)
def test_think_loss_trains_the_documented_part(think_loss: str, last: str, template: str) -> None:
    result = masker(template, {"think_loss": think_loss}).mask(Conversation(REASONED[2:]))

    assert shown(result) == U2 + last


def test_think_loss_is_not_misled_by_quoted_tags() -> None:
    reasoning = "they wrote </think>\n\nhere"
    result = masker(read_named_template("chatml"), {"think_loss": "answer_only"}).mask(
        Conversation([user("U1"), assistant("A1", reasoning_content=reasoning)])
    )

    assert shown(result).endswith("⟦A1<|im_end|>⟧\n")


def test_inline_reasoning_is_a_separate_region() -> None:
    head = "<think>\nR1\n</think>\n\n"
    message = assistant(head + "A1", inline_reasoning=len(head))

    result = masker(LETTERS, {"think_loss": "answer_only"}).mask(Conversation([user("U1"), message]))

    assert shown(result) == f"<u>U1<e>\n<a>{head}⟦A1<e>⟧\n"


# ── turns ──


def test_turns_by_message_print_each_turn_as_its_prompt_would() -> None:
    results = masker(QWEN, {}, MaskRules(turns="message")).examples(Conversation(REASONED))

    assert [shown(one) for one in results] == [
        f"{U1}⟦<think>\nR1\n</think>\n\nA1<|im_end|>⟧\n",
        f"{U1}A1<|im_end|>\n{U2}⟦<think>\nR2\n</think>\n\nA2<|im_end|>⟧\n",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "messages", "examples"),
    [
        (QWEN, TALK, 2),
        (QWEN, TALK[:2], 1),
        (QWEN, REASONED, 2),
        (read_named_template("chatml"), REASONED, 1),
        (read_named_template("llama3"), TALK, 1),
        (read_named_template("mistral"), [{"role": "system", "content": "Be kind"}, *TALK], 2),
        (read_named_template("mistral"), TALK, 1),
    ],
)
def test_turns_auto_is_by_message_if_a_turn_renders_differently_as_the_last(
    template: str, messages: list[Message], examples: int
) -> None:
    """Qwen3 prints a think block only in the last turn, and Mistral system text only before the last question."""
    results = masker(template, {}, MaskRules(turns="auto")).examples(Conversation(messages))

    assert [isinstance(one, MaskedConversation) for one in results] == [True] * examples


def test_turns_by_exchange_split_after_each_exchange() -> None:
    messages = [user("U1"), assistant("A1"), assistant("B1"), user("U2"), user("U3"), assistant("A3")]

    results = masker(LETTERS, {}, MaskRules(turns="exchange")).examples(Conversation(messages))

    assert [shown(one) for one in results] == [
        "<u>U1<e>\n<a>⟦A1<e>⟧\n<a>⟦B1<e>⟧\n",
        "<u>U1<e>\n<a>A1<e>\n<a>B1<e>\n<u>U2<e>\n<u>U3<e>\n<a>⟦A3<e>⟧\n",
    ]


# ── ends of turn ──

HEADERS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}{# <|user|> <|tool|> #}"
)
OPEN_END = (
    "{% for m in messages %}<|s|>{{ m.role }}\n{{ m.content }}"
    "{% if not loop.last or add_generation_prompt %}<|e|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
TAIL = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% else %}{{ eos_token }}{% endif %}"
)


def test_next_header_ends_a_turn_without_an_end_token() -> None:
    renderer = Renderer(RendererSpec(HEADERS, {"eos_token": "</s>"}, control_tokens=("<|user|>", "<|assistant|>")))

    result = Masker(renderer, Loss(), MaskRules()).mask(Conversation(TALK))

    assert shown(result) == "<|user|>\nU1<|assistant|>\n⟦A1<|user|>⟧\nU2<|assistant|>\n⟦A2<|user|>⟧"
    assert isinstance(result, MaskedConversation)
    assert result.trained[-1].message == 3


@pytest.mark.parametrize(
    ("finish", "end"), [("auto", "⟦A2<|e|>⟧"), ("none", "⟦A2⟧"), ("eos", "⟦A2</s>⟧"), ("<stop>", "⟦A2<stop>⟧")]
)
def test_appended_end_finishes_a_render_without_one(finish: str, end: str) -> None:
    assert mask(OPEN_END, TALK, {"finish": finish}).endswith(f"<|s|>assistant\n{end}")


@pytest.mark.slow
def test_tail_trains_only_if_nothing_else_ended_the_turn() -> None:
    assert mask(TAIL, TALK).endswith("assistant: ⟦A2\n</s>⟧")
    assert mask(LETTERS.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}"), TALK).endswith(
        "<a>⟦A2<e>⟧\n</s>"
    )


# ── spans by other means ──

COPIES = (
    "{% set ns = namespace(l=[]) %}{% for m in messages %}"
    "{% set ns.l = ns.l + [dict(role=m.role, content=m.content)] %}{% endfor %}"
    "{% for m in ns.l %}{{ '<' + m.role[0] + '>' + m.content + '<e>\n' }}{% endfor %}"
)


@pytest.mark.parametrize(
    "messages", [TALK, [user("A"), assistant("A"), user("A"), assistant("A")], [user("ab"), assistant("ba")]]
)
def test_copied_messages_have_proven_spans(messages: list[Message]) -> None:
    expected = "".join(
        f"<u>{m['content']}<e>\n" if m["role"] == "user" else f"<a>⟦{m['content']}<e>⟧\n" for m in messages
    )

    assert mask(COPIES, messages) == expected


@pytest.mark.slow
def test_copied_message_with_calls_is_rejected_not_guessed() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]

    assert mask(
        COPIES.replace("m.content)]", "m.content + (m.tool_calls or [])|tojson)]"),
        [user("U"), assistant("A", tool_calls=calls)],
    ).startswith("foreign_text_trained")


def test_text_of_an_inner_loop_does_not_train_with_the_message_around_it() -> None:
    """Nothing says whose the end after the results is."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content }}"
        "{% for t in messages if t.role == 'tool' %}[{{ t.content }}]{% endfor %}<e>{% endif %}"
        "{% endfor %}"
    )
    messages = [assistant("C1"), {"role": "tool", "content": "R1"}, {"role": "tool", "content": "R2"}]

    assert mask(template, messages).replace("<a>⟦C1⟧", "⟦<a>C1⟧") == "⟦<a>C1⟧[R1][R2]<e>"


# ── dropped content ──

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "{{ '<' + m.role[0] + '>' + m.content + '<e>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
SYSTEM_TALK = [{"role": "system", "content": "Be kind"}, *TALK]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, "content_dropped: system"),
        ({"system": "count"}, "<u>U1<e>\n<a>⟦A1<e>⟧\n<u>U2<e>\n<a>⟦A2<e>⟧\n"),
        ({"system": "untrain"}, "no_loss_tokens: the template dropped text of every supervised message"),
    ],
)
def test_dropped_system_text_follows_the_policy(policy: dict[str, str], expected: str) -> None:
    result = masker(NO_SYSTEM, rules=MaskRules(on_dropped=policy)).mask(Conversation(SYSTEM_TALK))

    assert shown(result) == expected


def test_dropped_call_untrains_only_its_message() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "this"}}}]
    messages = [user("U1"), assistant("A1", tool_calls=calls), user("U2"), assistant("A2")]

    result = masker(LETTERS, rules=MaskRules(on_dropped={"call_name": "untrain", "call_arguments": "untrain"})).mask(
        Conversation(messages)
    )

    assert shown(result) == "<u>U1<e>\n<a>A1<e>\n<u>U2<e>\n<a>⟦A2<e>⟧\n"
    assert isinstance(result, MaskedConversation)
    assert result.dropped == {"call_name": 1, "call_arguments": 1}


@pytest.mark.parametrize("role", ["planner", "user"])
def test_unprinted_call_of_another_role_is_dropped_content(role: str) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": {"at": "this"}}}]
    messages = [user("U1"), {"role": role, "content": "plan", "tool_calls": calls}, assistant("A1")]

    result = masker(LETTERS).mask(Conversation(messages))

    assert result == Rejected("content_dropped", "call_arguments, call_name")


def test_tools_not_printed_are_dropped_content() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    result = masker(LETTERS).mask(Conversation(TALK, tools))

    assert result == Rejected("content_dropped", "tool_list")


def test_text_printed_trimmed_or_escaped_is_not_dropped() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}"
        ">{{ m.content | trim if m.role == 'user' else m.content | tojson }}<e>{% endfor %}"
    )
    messages = [user("  spaced\n"), assistant('say "é"\n')]

    assert mask(template, messages) == '<user>spaced<e><assistant>"⟦say \\"é\\"\\n"<e>⟧'


# ── verification ──


def test_generation_block_that_omits_own_text_is_rejected() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content[:4] }}{% generation %}{{ m.content[4:] }}"
        "{% endgeneration %}{% endfor %}"
    )

    assert mask(template, [user("question"), assistant("answers!")]).startswith("own_text_untrained: message 1")


def test_generation_block_that_contains_another_message_is_rejected() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}"
        "{{ messages[0].content + m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )

    assert mask(template, [user("the question"), assistant("the answer")]).startswith(
        "foreign_text_trained: message 1 holds text of message 0"
    )


def test_generation_block_that_misses_a_message_is_rejected() -> None:
    template = (
        "{% for m in messages %}{% if m.content == 'A1' %}{{ m.content }}{% else %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )

    assert mask(template, TALK).startswith("assistant_untrained: message 1")


def test_template_that_counts_its_own_output_is_masked() -> None:
    counting = "{% set t %}{% for m in messages %}<{{ m.content }}>{% endfor %}{% endset %}{{ t }}{{ t | length }}"

    assert mask(counting, TALK) == "<U1><⟦A1>⟧<U2><⟦A2>⟧16"


# ── invariants ──

content = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=30),
    st.sampled_from(
        ["user", "assistant\n", "<|im_end|>", "end", "<think>", "</think>", "a", "U1 and more words", "   "]
    ),
)
messages_ = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "assistant", "system"]), content).map(
        lambda one: {"role": one[0], "content": one[1]}
    ),
    min_size=1,
    max_size=6,
)
MAKERS = {
    name: masker(text, rules=MaskRules())
    for name, text in (("letters", LETTERS), ("chatml", read_named_template("chatml")), ("qwen3", BOTH[0]))
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
@given(messages=messages_)
@settings(max_examples=draw(150), deadline=None)
def test_trained_spans_are_ordered_disjoint_and_inside_their_messages(name: str, messages: list[Message]) -> None:
    result = MAKERS[name].mask(Conversation(messages))

    if isinstance(result, MaskedConversation):
        assert all(one.end <= two.start for one, two in zip(result.trained, result.trained[1:], strict=False))
        for span in result.trained:
            assert messages[span.message]["role"] == "assistant"
            held = [piece for piece in result.pieces if piece.start < span.end and span.start < piece.end]
            assert {piece.message for piece in held} == {span.message}
        for piece in result.pieces:
            assert result.text[piece.start : piece.end].strip() == messages[piece.message]["content"].strip()


@pytest.mark.slow
@given(messages=messages_, other=content)
@settings(max_examples=draw(100), deadline=None)
def test_changing_a_user_text_changes_no_other_mask(messages: list[Message], other: str) -> None:
    changed = [{**m, "content": other} if m["role"] == "user" else m for m in messages]

    results = [MAKERS["letters"].mask(Conversation(one)) for one in (messages, changed)]

    if all(isinstance(one, MaskedConversation) for one in results):
        texts = [
            [one.text[s.start : s.end] for s in one.trained] for one in results if isinstance(one, MaskedConversation)
        ]
        assert texts[0] == texts[1]


@pytest.mark.slow
@given(messages=messages_)
@settings(max_examples=draw(100), deadline=None)
def test_last_assistant_trains_a_subset_of_all(messages: list[Message]) -> None:
    every = masker_cached("all_assistant").mask(Conversation(messages))
    last = masker_cached("last_assistant").mask(Conversation(messages))

    if isinstance(every, MaskedConversation) and isinstance(last, MaskedConversation):
        assert set(last.trained) <= set(every.trained)


_CACHED: dict[str, Masker] = {}


def masker_cached(supervise: str) -> Masker:
    if supervise not in _CACHED:
        _CACHED[supervise] = masker(LETTERS, {"supervise": supervise})
    return _CACHED[supervise]


# ── options ──


@pytest.mark.parametrize(
    "values",
    [
        {"mask_user_turns": False, "supervise": "last_turn"},
        {"mask_inputs": False, "mask": {"user": "train"}},
        {"supervise": "first"},
        {"finish_with": "auto"},
    ],
)
def test_invalid_loss_options_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        validate_options(Loss, values, "loss")


def test_generation_spans_of_a_template_without_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"template\.spans"):
        masker(LETTERS, rules=MaskRules(spans="generation"))
