"""Templates that once had wrong masks, one shape each, and ten hostile ones; all written for these tests."""

from collections.abc import Sequence
from typing import Any

import pytest

from rowmill.conversation.character_ownership import RenderedConversation
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_registry import read_named_template
from rowmill.core.config import validate_options
from rowmill.core.json import Json
from rowmill.schema.rows import Conversation, Message
from tests.support.messages import assistant, call, draw_mask, result, user

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT


def calling(*arguments: Json) -> Message:
    return assistant("", tool_calls=[call(one, number=number) for number, one in enumerate(arguments)])


def mask(template: str, messages: Sequence[Message], loss: dict[str, Any] | None = None) -> str:
    """Mask a conversation, every row checked by proof, and draw it with trained characters in brackets."""
    renderer = Renderer(RendererSpec(template, {"bos_token": "<s>", "eos_token": "</s>"}))
    masker = Masker(renderer, validate_options(Loss, loss or {}, "loss"), MaskRules())
    return draw_mask(masker.mask(Conversation(messages)))


TALK = [user("Hello there"), assistant("Good day")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({}, "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nGood day<|im_end|>⟧\n"),
        ({"end_of_turn": "mask"}, "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nGood day⟧<|im_end|>\n"),
        ({"trailing": "train"}, "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nGood day<|im_end|>\n⟧"),
        ({"lead": "train"}, "⟦<|im_start|>assistant\n<think>\n\n</think>\n\nGood day<|im_end|>⟧\n"),
    ],
)
def test_loss_options_are_obeyed_where_spans_come_from_generation_blocks(loss: dict[str, str], expected: str) -> None:
    assert mask(read_named_template("qwen3"), TALK, loss).endswith(expected)


def test_blocks_decide_where_no_option_does() -> None:
    blocks = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<a>{{ m.content }}<e>\n"
        "{% endgeneration %}{% else %}<u>{{ m.content }}<e>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )

    assert mask(blocks, TALK) == "<u>Hello there<e>\n⟦<a>Good day<e>\n⟧"
    assert mask(blocks, TALK, {"lead": "mask", "trailing": "mask"}) == "<u>Hello there<e>\n<a>⟦Good day<e>⟧\n"


def test_header_other_than_the_prompts_or_before_it_does_not_train() -> None:
    template = (
        "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% if m.role != 'system' %}"
        "<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
    )

    assert mask(template, [assistant("How may I help?"), user("Hi there"), assistant("Gladly")]) == (
        "<s><|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>assistant\n⟦How may I help?<|im_end|>⟧\n"
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n⟦Gladly<|im_end|>⟧\n"
    )

    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}"
        "      <｜Assistant｜>        </think>      {{ m.content }}<｜end｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}  <｜Assistant｜>\n    </think>\n{% endif %}"
    )

    expected = "<｜User｜>Hello there      <｜Assistant｜>        </think>      ⟦Good day<｜end｜>⟧"
    assert mask(template, TALK) == expected

    template = (
        "{% for m in messages %}{% if m.role == 'user' %}Ask: {{ m.content }}{% else %}{{ '\nReply: ' + m.content }}"
        "{% if not loop.last %}{{ '\n' }}{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}{{ '\nReply: ' }}{% endif %}"
    )

    expected = "Ask: Hello there\nReply: ⟦Good day⟧\n\nReply: ⟦And more</s>⟧"
    assert mask(template, [*TALK, assistant("And more")]) == expected


def test_end_printed_later_or_appended_trains_whole_with_white_space_before_it() -> None:
    template = (
        "{% for m in messages %}{% if not loop.first %}<|eom|>{% endif %}<|bom|><|{{ m.role }}|> {{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<|eom|><|bom|><|assistant|>{% else %}<|eom|>{% endif %}"
    )

    exchange = "<|bom|><|user|> Hello there<|eom|><|bom|><|assistant|>⟦ Good day<|eom|>⟧"
    assert mask(template, [*TALK, *TALK]) == exchange + exchange

    template = (
        "{% for m in messages %}<|begin_{{ m.role }}|>\n{{ m.content }}"
        "{% if not loop.last %}{{ '\n<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n<|end|>\n<|begin_assistant|>\n' }}{% endif %}"
    )

    assert mask(template, [*TALK, *TALK]).endswith("<|begin_assistant|>\n⟦Good day\n<|end|>⟧")

    template = (
        "{% for m in messages %}{{ '### Human: ' if m.role == 'user' else '### Assistant: ' }}{{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}### Assistant: {% endif %}"
    )

    assert mask(template, TALK) == "### Human: Hello there\n### Assistant: ⟦Good day\n</s>⟧"

    # Gemma 4: the token is printed there, and is one of those at which generation stops.
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.previtem.role == 'tool' %}<|response>{% endif %}"
        "{{ m.content }}<response|>{% else %}{% if not (loop.previtem is defined and loop.previtem.role == 'tool') %}"
        "<|turn>{{ m.role }}\n{% endif %}{% for c in m.tool_calls or [] %}<|call>{{ c.function | tojson }}<call|>"
        "{% endfor %}{{ m.content }}{% if m.tool_calls %}<|response>{% else %}<turn|>\n{% endif %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>assistant\n{% endif %}"
    )

    shown = mask(template, [user("Where is it"), calling({"at": "home"})])
    assert shown.endswith('{"at": "home"}}<call|><|response>⟧')


HEADERS = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.slow
def test_appended_ends_of_calls_and_answers_are_the_templates_own() -> None:
    called = [user("Where is it"), calling({"at": "home"})]
    assert mask(HEADERS, called).endswith('"arguments": {"at": "home"}}</tool_call><|observation|>⟧')
    assert mask(HEADERS, [*called, result("found"), assistant("There")]).endswith("<|assistant|>\n⟦There<|user|>⟧")
    assert "</tool_call><|observation|>⟧\nfound" in mask(HEADERS, [*called, result("found"), assistant("There")])


@pytest.mark.parametrize(
    ("tail", "shown"),
    [("", ""), ("<|TURN|><|BOT|>", "<|TURN|><|BOT|>")],
    ids=["header-in-the-prompt", "header-always-printed"],
)
def test_end_that_also_closes_a_preamble_belongs_to_the_answer(tail: str, shown: str) -> None:
    opened = "<|SAY|>" if tail else "<|TURN|><|BOT|><|SAY|>"
    template = (
        "<|TURN|><|SYS|>Be brief.<|TURN_END|>{% for m in messages %}{% if m.role == 'user' %}<|TURN|><|ASK|>"
        "{{ m.content }}{% else %}<|TURN|><|BOT|><|SAY|>{{ m.content }}<|SAY_END|>{% endif %}<|TURN_END|>{% endfor %}"
        f"{tail}{{% if add_generation_prompt %}}{opened}{{% endif %}}"
    )

    assert mask(template, [*TALK, user("And then"), assistant("No")]) == (
        "<|TURN|><|SYS|>Be brief.<|TURN_END|><|TURN|><|ASK|>Hello there<|TURN_END|><|TURN|><|BOT|><|SAY|>"
        "⟦Good day<|SAY_END|><|TURN_END|>⟧<|TURN|><|ASK|>And then<|TURN_END|><|TURN|><|BOT|><|SAY|>"
        f"⟦No<|SAY_END|><|TURN_END|>⟧{shown}"
    )


@pytest.mark.slow
def test_calls_with_ids_of_a_common_prefix_train_and_an_index_in_a_result_does_not() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<|sys|>[{% for o in messages %}{% if o.tool_calls %}"
        '{% for c in o.tool_calls %}{% if c.id == m.tool_call_id %}"{{ loop.index0 }}"{% endif %}{% endfor %}'
        "{% endif %}{% endfor %}: {{ m.content }}]<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )

    assert mask(template, [user("Where is it"), calling({"at": "home"}), result("found"), assistant("There")]) == (
        '<|user|>Where is it<|end|><|assistant|>⟦<call>{"name": "look", "arguments": {"at": "home"}}</call><|end|>⟧'
        '<|sys|>["0": found]<|end|><|assistant|>⟦There<|end|>⟧'
    )

    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<call {{ c.id }}>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    calls = [{**call({"at": i}), "id": f"call_{i}"} for i in range(1, 11)]

    printed = "".join(f'<call call_{i}>look{{"at": {i}}}' for i in range(1, 11))
    expected = f"<|user|>Where are they<|end|><|assistant|>⟦{printed}<|end|>⟧"
    assert mask(template, [user("Where are they"), assistant("", tool_calls=calls)]) == expected


def test_fast_and_reference_path_agree_if_a_template_compares_messages() -> None:
    template = (
        "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% if m == users[-1] %}[TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% else %}"
        "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    renderer = Renderer(RendererSpec(template, {"eos_token": "</s>"}))
    again = [user("Go on, please."), assistant("One thing"), user("Go on, please."), assistant("Another")]

    printed = renderer.render(again, None, {})

    assert renderer.render_path == "fast"
    assert isinstance(printed, RenderedConversation)
    assert printed.is_fast
    assert printed.text == renderer.plain(again, None, {})
    assert (printed.text.count("[TOOLS]"), mask(template, again).count("⟦")) == (2, 2)


REBUILT = (
    "{% set ns = namespace(all=[]) %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.all = ns.all + [dict(role='user', content='(' + m.content + ')')] %}{% else %}"
    "{% set ns.all = ns.all + [dict(role=m.role, content=m.content | trim)] %}{% endif %}{% endfor %}"
    "{% for m in ns.all %}<|{{ m.role }}|>{{ m.content }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MERGED = (
    "{% set ns = namespace(text='') %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.text = ns.text + '[U]' + m.content + '[/U]' %}{% else %}"
    "{% set ns.text = ns.text + m.content + eos_token %}{% endif %}{% endfor %}{{ ns.text }}"
)
MACRO = (
    "{% macro turn(m, last) %}<|{{ m.role }}|>{{ m.content }}{% if last %}<|final|>{% else %}<|e|>{% endif %}"
    "{% endmacro %}{% for m in messages %}{{ turn(m, loop.last) }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COUNTED = (
    "{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index }}] {{ m.content }}<|e|>{% else %}"
    "<|assistant|>{{ m.content }}<|e|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REVERSED_LOOKUP = (
    "{% for i in range(messages | length) %}{% set m = messages[i] %}{% for o in messages %}"
    "{% if o.role == 'user' and loop.last %}!{% endif %}{% endfor %}<|{{ m.role }}|>{{ m.content }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUOTING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.index0 %}"
    "(to: {{ messages[loop.index0 - 1].content }}) {% endif %}{{ m.content }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NAMED_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ '<|go|>' if loop.last else '<|to_' + messages[loop.index].role + '|>' }}"
    "{% else %}<|e|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
INDENTED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | replace('\n', '\n    ') }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPLIT_THOUGHT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "<|assistant|>{{ parts[-1] | trim }}<|e|>{% else %}<|{{ m.role }}|>{{ m.content }}<|e|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
SORTED_ARGUMENTS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments | dictsort %}{{ k }}={{ v }};{% endfor %}){% endfor %}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (REBUILT, [{"role": "system", "content": "Be kind"}, *TALK],
         "<|user|>(Be kind)<|e|><|user|>Hello there<|e|><|assistant|>⟦Good day<|e|>⟧"),
        (MERGED, [*TALK, user("More?"), assistant("No.")],
         "[U]Hello there[/U]⟦Good day</s>⟧[U]More?[/U]⟦No.</s>⟧"),
        (MACRO, [*TALK, *TALK],
         ("<|user|>Hello there<|e|><|assistant|>⟦Good day<|e|>⟧<|user|>Hello there<|e|>"
         "<|assistant|>⟦Good day<|final|>⟧")),
        (COUNTED, [*TALK, *TALK],
         ("[Round 1] Hello there<|e|><|assistant|>⟦Good day<|e|>⟧[Round 3] Hello there<|e|>"
         "<|assistant|>⟦Good day<|e|>⟧")),
        (REVERSED_LOOKUP, [assistant("Welcome"), user("Hello there"), assistant("Good day"), user("Bye now")],
         "!<|assistant|>⟦Welcome<|e|>⟧!<|user|>Hello there<|e|>!<|assistant|>⟦Good day<|e|>⟧!<|user|>Bye now<|e|>"),
        (NAMED_END, [*TALK, user("More?"), assistant("No.")],
         "<|user|>Hello there<|e|><|assistant|>⟦Good day<|to_user|>⟧<|user|>More?<|e|><|assistant|>⟦No.<|go|>⟧"),
        (INDENTED, [user("a"), assistant("b")], "<|user|>a<|e|><|assistant|>⟦b<|e|>⟧"),
        (SPLIT_THOUGHT, TALK, "<|user|>Hello there<|e|><|assistant|>⟦Good day<|e|>⟧"),
        (SORTED_ARGUMENTS, [user("Where is it"), calling({"to": "b c", "at": "home", "n": 3}), result("found"),
                            assistant("There")],
         ("<|user|>Where is it<|e|><|assistant|>⟦look(at=home;n=3;to=b c;)<|e|>⟧<|tool|>found<|e|>"
         "<|assistant|>⟦There<|e|>⟧")),
    ],
    ids=["rebuilt", "merged", "macro", "counted", "lookup", "named-end", "indented", "split-thought", "sorted"],
)  # fmt: skip
def test_hostile_template_has_exact_masks(template: str, messages: list[Message], expected: str) -> None:
    assert mask(template, messages).replace("⟦!", "!⟦") == expected


@pytest.mark.slow
def test_text_that_is_quoted_rewritten_or_unprinted_rejects_the_row() -> None:
    assert mask(QUOTING, TALK).startswith("foreign_text_trained: message 1")

    shown = mask(INDENTED, [user("a"), assistant("first line\nsecond line")])
    assert shown.partition(":")[0] in {"content_dropped", "span_not_found", "foreign_text_trained"}

    rows = [user("Hello there"), assistant("", reasoning_content="only a thought")]
    assert mask(CHATML, rows) == "assistant_untrained: message 1: nothing of it is printed"
    assert mask(read_named_template("zephyr"), rows) == "assistant_untrained: message 1: nothing of it is printed"


@pytest.mark.parametrize(("messages", "characters"), [(2, 200_000), (600, 400)])
def test_row_with_more_characters_than_private_code_points_is_masked(messages: int, characters: int) -> None:
    texts = [f"{number} " + "word " * (characters // 5) for number in range(messages)]
    talk = [(assistant if number % 2 else user)(one) for number, one in enumerate(texts)]
    masked = mask(read_named_template("chatml"), talk)

    assert masked.count("⟦") == messages // 2
    assert all(f"⟦{one}<|im_end|>⟧" in masked for one in texts[1::2])
