"""Masking: the specification's vectors, dropped content, reasoning, ends of turn, and what verification rejects."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.conversation.character_ownership import is_tool_missing
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_engines import replace_generation_tags
from rowmill.conversation.template_registry import read_named_template
from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.schema.rows import Conversation, MaskedConversation, Message, Rejected
from tests.support.messages import assistant, call, draw_mask, system, tool, trained_characters, user
from tests.support.tiers import draw

LETTERS = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
"""The specification's T1: one character is one token."""


TALK = [user("U1"), assistant("A1"), user("U2"), assistant("A2")]
REASONED = [user("U1"), assistant("A1", reasoning_content="R1"), user("U2"), assistant("A2", reasoning_content="R2")]


def masker(
    template: str,
    loss: dict[str, Any] | None = None,
    *,
    on_dropped: dict[str, str] | None = None,
    turns: str = "whole",
    **kwargs: Json,
) -> Masker:
    renderer = Renderer(RendererSpec(template, {"eos_token": "</s>"}, kwargs))
    rules: dict[str, Any] = {"on_dropped": on_dropped, "turns": turns}
    return Masker(renderer, validate_options(Loss, loss or {}, "loss"), MaskRules(**rules))


def mask(template: str, messages: Sequence[Message], loss: dict[str, Any] | None = None, **options: Any) -> str:
    return draw_mask(masker(template, loss, **options).mask(Conversation(messages)))


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
    masked = masker(LETTERS, loss).mask(Conversation(messages))
    assert isinstance(masked, MaskedConversation), masked
    # Index 0 never trains; tokenization ensures that, so it is left out here.
    assert sorted(trained_characters(masked) - {0}) == expected


def test_text_that_an_option_trains_is_found_by_its_message_and_position() -> None:
    assert mask(LETTERS, [user("U1", train=True), assistant("A1", train=False)]) == "⟦<u>U1<e>⟧\n<a>A1<e>\n"

    # Qwen2.5 prints it outside every loop.
    messages = [system("Be kind"), user("U1"), assistant("A1")]
    assert mask(read_named_template("qwen2.5"), messages, {"mask": {"system": "train"}}) == (
        "⟦<|im_start|>system\nBe kind<|im_end|>⟧\n<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [([user("U1")], "no_assistant"), ([user("U"), assistant("A", train=False)], "no_loss_tokens")],
)
def test_row_without_supervision_is_rejected_with_its_reason(messages: list[Message], reason: str) -> None:
    assert mask(LETTERS, messages).partition(":")[0] == reason


@pytest.mark.parametrize(("template", "answer"), [("gemma3", "Yes, I will."), ("llama3.1", "Briefly so.")])
def test_messages_of_equal_text_have_distinct_spans(template: str, answer: str) -> None:
    """Gemma prints the system's text in the user's turn: the user's own text is the second one there."""
    messages = [system("Answer briefly."), user("Answer briefly."), assistant(answer)]
    masked = masker(read_named_template(template)).mask(Conversation(messages))

    assert isinstance(masked, MaskedConversation)
    first = masked.text.index("Answer briefly.")
    second = masked.text.index("Answer briefly.", first + 1)
    assert [(piece.message, piece.start) for piece in masked.pieces[:2]] == [(0, first), (1, second)]


@pytest.mark.parametrize("answer", ["\nYes", " \n\n Yes", "\n\n\n\nYes\n", "Yes"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("llama3.1", "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yes<|eot_id|>⟧"),
        ("gemma3", "<start_of_turn>model\n⟦Yes<end_of_turn>⟧\n"),
        (LETTERS.replace("m.content", "m.content | trim").replace("'<' + m.role[0] + '>'", "m.role + '\n\n'"), None),
    ],
)
def test_line_break_that_the_template_strips_from_an_answer_is_not_found_in_the_header(
    template: str, expected: str | None, answer: str
) -> None:
    written = template if expected is None else read_named_template(template)
    found = mask(written, [user("Is it?"), assistant(answer), user("Sure?"), assistant(answer)])

    assert found.endswith("assistant\n\n⟦Yes<e>⟧\n" if expected is None else expected)
    assert found.count("⟦Yes<") == 2


def test_text_of_two_messages_that_is_printed_once_counts_as_dropped() -> None:
    """The template prints the system's text in the first user's turn, and that turn's own text nowhere."""
    template = """{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user
{{ messages[0].content if messages[0].role == 'system' and loop.index0 == 1 else m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% endif %}{% endfor %}"""
    messages = [system("Answer briefly."), user("Answer briefly."), assistant("Yes, I will.")]

    assert mask(template, messages).startswith("content_dropped: ")


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
@pytest.mark.parametrize(
    ("template", "loss", "kwargs", "first"),
    [
        *[(template, {}, {}, f"⟦{EMPTY}A2") for template in BOTH],
        *[(template, {"think_loss": "answer_only"}, {}, f"{EMPTY}⟦A2") for template in BOTH],
        (BOTH[0], {}, {"enable_thinking": False}, f"{EMPTY}⟦A2"),
    ],
    ids=["list", "blocks", "answer only by list", "answer only by blocks", "without thinking"],
)
def test_mask_of_qwen3_is_the_vector(template: str, loss: dict[str, Any], kwargs: dict[str, Json], first: str) -> None:
    assert mask(template, TALK, loss, **kwargs) == f"{U1}⟦A1<|im_end|>⟧\n{U2}{first}<|im_end|>⟧\n"


@pytest.mark.parametrize("template", BOTH, ids=("list", "blocks"))
def test_reasoning_of_history_is_counted_as_dropped(template: str) -> None:
    masked = masker(template).mask(Conversation(REASONED))
    assert isinstance(masked, MaskedConversation)
    assert masked.dropped == {"reasoning": 1}
    assert draw_mask(masked) == f"{U1}⟦A1<|im_end|>⟧\n{U2}⟦<think>\nR2\n</think>\n\nA2<|im_end|>⟧\n"


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
    assert mask(template, REASONED[2:], {"think_loss": think_loss}) == U2 + last


def test_think_loss_is_misled_neither_by_quoted_tags_nor_by_inline_reasoning() -> None:
    messages = [user("U1"), assistant("A1", reasoning_content="they wrote </think>\n\nhere")]
    masked = mask(read_named_template("chatml"), messages, {"think_loss": "answer_only"})
    assert masked.endswith("⟦A1<|im_end|>⟧\n")
    head = "<think>\nR1\n</think>\n\n"
    messages = [user("U1"), assistant(head + "A1", inline_reasoning=len(head))]
    assert mask(LETTERS, messages, {"think_loss": "answer_only"}) == f"<u>U1<e>\n<a>{head}⟦A1<e>⟧\n"


# ── turns ──


def drawn_turns(template: str, messages: Sequence[Message], turns: str) -> list[str]:
    made = masker(template, turns=turns)
    return [draw_mask(made.mask(one, only=only)) for one, only in made.split_turns(Conversation(messages))]


def test_turns_by_message_or_exchange_print_each_as_its_prompt_would() -> None:
    assert drawn_turns(QWEN, REASONED, "message") == [
        f"{U1}⟦<think>\nR1\n</think>\n\nA1<|im_end|>⟧\n",
        f"{U1}A1<|im_end|>\n{U2}⟦<think>\nR2\n</think>\n\nA2<|im_end|>⟧\n",
    ]

    messages = [user("U1"), assistant("A1"), assistant("B1"), user("U2"), user("U3"), assistant("A3")]
    assert drawn_turns(LETTERS, messages, "exchange") == [
        "<u>U1<e>\n<a>⟦A1<e>⟧\n<a>⟦B1<e>⟧\n",
        "<u>U1<e>\n<a>A1<e>\n<a>B1<e>\n<u>U2<e>\n<u>U3<e>\n<a>⟦A3<e>⟧\n",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "messages", "examples"),
    [
        ("qwen3", TALK, 2),
        ("qwen3", TALK[:2], 1),
        ("qwen3", REASONED, 2),
        ("chatml", REASONED, 1),
        ("llama3", TALK, 1),
        ("mistral", [system("Be kind"), *TALK], 2),
        ("mistral", TALK, 1),
    ],
)
def test_turns_auto_is_by_message_if_a_turn_renders_differently_as_the_last(
    name: str, messages: list[Message], examples: int
) -> None:
    """Qwen3 prints a think block only in the last turn, and Mistral system text only before the last question."""
    made = masker(read_named_template(name), turns="auto")
    results = [made.mask(one, only=only) for one, only in made.split_turns(Conversation(messages))]
    assert [isinstance(one, MaskedConversation) for one in results] == [True] * examples


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


@pytest.mark.slow
def test_next_header_or_tail_ends_a_turn_that_nothing_else_ended() -> None:
    renderer = Renderer(RendererSpec(HEADERS, {"eos_token": "</s>"}, control_tokens=("<|user|>", "<|assistant|>")))
    masked = Masker(renderer, Loss(), MaskRules()).mask(Conversation(TALK))
    assert draw_mask(masked) == "<|user|>\nU1<|assistant|>\n⟦A1<|user|>⟧\nU2<|assistant|>\n⟦A2<|user|>⟧"
    assert isinstance(masked, MaskedConversation)
    assert masked.trained[-1].message == 3

    ended = LETTERS.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    assert mask(TAIL, TALK).endswith("assistant: ⟦A2\n</s>⟧")
    assert mask(ended, TALK).endswith("<a>⟦A2<e>⟧\n</s>")


@pytest.mark.parametrize(
    ("finish", "end"), [("auto", "⟦A2<|e|>⟧"), ("none", "⟦A2⟧"), ("eos", "⟦A2</s>⟧"), ("<stop>", "⟦A2<stop>⟧")]
)
def test_appended_end_finishes_a_render_without_one(finish: str, end: str) -> None:
    assert mask(OPEN_END, TALK, {"finish": finish}).endswith(f"<|s|>assistant\n{end}")


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
    drawn = {"user": "<u>{}<e>\n", "assistant": "<a>⟦{}<e>⟧\n"}
    assert mask(COPIES, messages) == "".join(drawn[m["role"]].format(m["content"]) for m in messages)


@pytest.mark.slow
def test_copied_calls_and_texts_of_inner_loops_are_not_guessed() -> None:
    template = COPIES.replace("m.content)]", "m.content + (m.tool_calls or [])|tojson)]")
    messages = [user("U"), assistant("A", tool_calls=[{**call({}, name="f"), "id": "c"}])]
    assert mask(template, messages).startswith("foreign_text_trained")

    # Nothing says whose the end after the results is.
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content }}"
        "{% for t in messages if t.role == 'tool' %}[{{ t.content }}]{% endfor %}<e>{% endif %}{% endfor %}"
    )
    messages = [assistant("C1"), {"role": "tool", "content": "R1"}, {"role": "tool", "content": "R2"}]
    assert mask(template, messages).replace("<a>⟦C1⟧", "⟦<a>C1⟧") == "⟦<a>C1⟧[R1][R2]<e>"


# ── dropped content ──

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "{{ '<' + m.role[0] + '>' + m.content + '<e>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, "content_dropped: system"),
        ({"system": "count"}, "<u>U1<e>\n<a>⟦A1<e>⟧\n<u>U2<e>\n<a>⟦A2<e>⟧\n"),
        ({"system": "untrain"}, "no_loss_tokens: the template dropped text of every supervised message"),
    ],
)
def test_dropped_system_text_follows_the_policy(policy: dict[str, str], expected: str) -> None:
    assert mask(NO_SYSTEM, [system("Be kind"), *TALK], on_dropped=policy) == expected


def test_dropped_calls_untrain_only_their_message_and_trimmed_text_is_not_dropped() -> None:
    messages = [user("U1"), assistant("A1", tool_calls=[call({"at": "this"})]), user("U2"), assistant("A2")]
    maker = masker(LETTERS, on_dropped={"call_name": "untrain", "call_arguments": "untrain"})
    masked = maker.mask(Conversation(messages))

    assert draw_mask(masked) == "<u>U1<e>\n<a>A1<e>\n<u>U2<e>\n<a>⟦A2<e>⟧\n"
    assert isinstance(masked, MaskedConversation)
    assert masked.dropped == {"call_name": 1, "call_arguments": 1}

    assert masker(LETTERS).mask(Conversation(TALK, [tool()])) == Rejected("content_dropped", "tool_list")

    content = "{{ m.content | trim if m.role == 'user' else m.content | tojson }}"
    template = "{% for m in messages %}<{{ m.role }}>" + content + "<e>{% endfor %}"
    messages = [user("  spaced\n"), assistant('say "é"\n')]
    assert mask(template, messages) == '<user>spaced<e><assistant>"⟦say \\"é\\"\\n"<e>⟧'


@pytest.mark.parametrize(
    ("printed", "is_missing"), [("first second third", False), ("third first second", False), ("first third", True)]
)
def test_tool_whose_name_is_only_in_an_answer_is_missing_in_whatever_order_tools_are_printed(
    printed: str, is_missing: bool
) -> None:
    text, tools = f"<tools>{printed}<a>second first<e>", [tool("first"), tool("second"), tool("third")]
    answer = text.index("<a>") + 3, text.index("<e>")

    assert is_tool_missing(tools, text, [answer]) == is_missing


@pytest.mark.parametrize("role", ["planner", "user"])
def test_unprinted_call_of_another_role_is_dropped_content(role: str) -> None:
    planned: Message = {"role": role, "content": "plan", "tool_calls": [call({"at": "this"})]}
    assert mask(LETTERS, [user("U1"), planned, assistant("A1")]) == "content_dropped: call_arguments, call_name"


# ── verification ──


@pytest.mark.parametrize(
    ("body", "messages", "refusal"),
    [
        (
            "<{{ m.role }}>{{ m.content[:4] }}{% generation %}{{ m.content[4:] }}{% endgeneration %}",
            [user("question"), assistant("answers!")],
            "own_text_untrained: message 1",
        ),
        (
            (
                "{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}"
                "{{ messages[0].content + m.content }}{% endgeneration %}{% endif %}"
            ),
            [user("the question"), assistant("the answer")],
            "foreign_text_trained: message 1 holds text of message 0",
        ),
        (
            (
                "{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}"
                "{{ 'Answer to you: ' + (messages[0].content if loop.last else '') + m.content }}"
                "{% endgeneration %}{% endif %}"
            ),
            [user("the question"), assistant("the answer"), user("another one"), assistant("the end")],
            "foreign_text_trained: message 3 holds text of message 0",
        ),
        (
            (
                "{% if m.content == 'A1' %}{{ m.content }}{% else %}{% generation %}"
                "{{ m.content }}{% endgeneration %}{% endif %}"
            ),
            TALK,
            "assistant_untrained: message 1",
        ),
    ],
    ids=["omits own text", "contains another message", "contains another message only at last", "misses a message"],
)
def test_generation_block_that_is_wrong_is_rejected(body: str, messages: list[Message], refusal: str) -> None:
    assert mask("{% for m in messages %}" + body + "{% endfor %}", messages).startswith(refusal)


def test_template_that_counts_its_output_is_masked_and_one_without_blocks_has_no_block_spans() -> None:
    counting = "{% set t %}{% for m in messages %}<{{ m.content }}>{% endfor %}{% endset %}{{ t }}{{ t | length }}"
    assert mask(counting, TALK) == "<U1><⟦A1>⟧<U2><⟦A2>⟧16"

    renderer = Renderer(RendererSpec(LETTERS, {"eos_token": "</s>"}))
    with pytest.raises(ConfigError, match=r"template\.spans"):
        Masker(renderer, Loss(), MaskRules(spans="generation"))


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
TEMPLATES = {"letters": LETTERS, "chatml": read_named_template("chatml"), "qwen3": BOTH[0]}


@cache
def open_masker(name: str) -> Masker:
    return masker(TEMPLATES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=messages_)
@settings(max_examples=draw(150), deadline=None)
def test_trained_spans_are_ordered_disjoint_and_inside_their_messages(name: str, messages: list[Message]) -> None:
    masked = open_masker(name).mask(Conversation(messages))

    if isinstance(masked, MaskedConversation):
        assert all(one.end <= two.start for one, two in pairwise(masked.trained))
        for span in masked.trained:
            assert messages[span.message]["role"] == "assistant"
            inside = [piece for piece in masked.pieces if piece.start < span.end and span.start < piece.end]
            assert {piece.message for piece in inside} == {span.message}
        for piece in masked.pieces:
            assert masked.text[piece.start : piece.end].strip() == messages[piece.message]["content"].strip()


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
