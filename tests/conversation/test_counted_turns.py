"""Templates that count turns: a number, a letter or a date in a header is no part of the end before it."""

from pathlib import Path

import pytest

from rowmill.checks.mask_judge import MaskDefect
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.core.json import Json
from rowmill.schema.rows import Conversation, MaskedConversation, Message
from rowmill.stages.tokenized_examples.conversation_examples import MaskJudge
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer
from tests.support.messages import assistant, draw_mask, system, trained_texts, user
from tests.support.recipes import Workspace, chat

ASK = "{% if add_generation_prompt %}"


def print_rounds(number: str, *, joined: bool = False, ending: str = "'\n\n'") -> str:
    """Return a template like ChatGLM's, which counts the exchanges; `joined`: line breaks between turns alone."""
    if joined:
        return (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ '\n\nA: ' ~ m.content }}{% else %}"
            f"{{{{ '' if loop.first else '\n\n' }}}}[Round {{{{ {number} }}}}]\n\nQ: {{{{ m.content }}}}"
            "{% endif %}{% endfor %}" + ASK + "{{ '\n\nA: ' }}{% endif %}"
        )
    return (
        "{% for m in messages %}{% if m.role == 'user' %}"
        f"{{{{ '[Round ' ~ ({number}) ~ ']\n\nQ: ' ~ m.content ~ '\n\nA: ' }}}}"
        f"{{% else %}}{{{{ m.content ~ {ending} }}}}{{% endif %}}{{% endfor %}}"
    )


def print_headers(header: str, ending: str, asked: str) -> str:
    """Return a template that prints `header` before every message and `ending` after it."""
    return (
        f"{{% for m in messages %}}{{{{ {header} ~ m.content ~ {ending} }}}}{{% endfor %}}{ASK}{{{{ {asked} }}}}"
        "{% endif %}"
    )


ORDINALS = "['one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine', 'ten', 'eleven', 'twelve']"

TEMPLATES: dict[str, tuple[str, list[str]]] = {
    "from-one": (
        print_rounds("loop.index0 // 2 + 1"),
        ["[Round 1]\n\nQ: Why 3?\n\nA: ⟦It is 3.⟧\n\n", "[Round 2]\n\nQ: 2 or 3?\n\nA: ⟦3⟧\n\n"],
    ),
    "from-zero": (
        print_rounds("loop.index0 // 2"),
        ["[Round 0]\n\nQ: Why 3?\n\nA: ⟦It is 3.⟧\n\n", "[Round 1]\n\nQ: 2 or 3?\n\nA: ⟦3⟧\n\n"],
    ),
    "from-nine": (
        print_rounds("loop.index0 // 2 + 9"),
        ["[Round 9]\n\nQ: Why 3?\n\nA: ⟦It is 3.⟧\n\n", "[Round 10]\n\nQ: 2 or 3?\n\nA: ⟦3⟧\n\n"],
    ),
    "joined": (
        print_rounds("loop.index0 // 2 + 1", joined=True),
        ["[Round 1]\n\nQ: Why 3?\n\nA: ⟦It is 3.⟧\n\n", "[Round 2]\n\nQ: 2 or 3?\n\nA: ⟦3⟧\n\n"],
    ),
    "with-end": (
        print_rounds("loop.index0 // 2 + 1", ending="eos_token"),
        ["[Round 1]\n\nQ: Why 3?\n\nA: ⟦It is 3.</s>⟧", "[Round 2]\n\nQ: 2 or 3?\n\nA: ⟦3</s>⟧"],
    ),
    "down": (
        print_rounds("(messages | length - loop.index0) // 2"),
        ["[Round 12]\n\nQ: Why 3?\n\nA: ⟦It is 3.⟧\n\n", "[Round 11]\n\nQ: 2 or 3?\n\nA: ⟦3⟧\n\n"],
    ),
    "words": (
        print_rounds(f"{ORDINALS}[loop.index0 // 2]"),
        ["[Round one]\n\nQ: Why 3?\n\nA: ⟦It is 3.⟧\n\n", "[Round two]\n\nQ: 2 or 3?\n\nA: ⟦3⟧\n\n"],
    ),
    "letters": (
        print_rounds("'abcdefghijklmnop'[loop.index0 // 2]"),
        ["[Round a]\n\nQ: Why 3?\n\nA: ⟦It is 3.⟧\n\n", "[Round b]\n\nQ: 2 or 3?\n\nA: ⟦3⟧\n\n"],
    ),
    "odd-and-even": (
        print_headers("loop.cycle('odd', 'odd', 'even', 'even') ~ ' ' ~ m.role ~ ': '", "'\n'", "'odd assistant: '"),
        ["odd user: Why 3?\nodd assistant: ⟦It is 3.⟧\n", "even user: 2 or 3?\neven assistant: ⟦3⟧\n"],
    ),
    "index-first": (
        print_headers("loop.index ~ '. ' ~ m.role ~ ': '", "'\n'", "(messages | length + 1) ~ '. assistant: '"),
        ["1. user: Why 3?\n2. assistant: ⟦It is 3.⟧\n", "3. user: 2 or 3?\n4. assistant: ⟦3⟧\n"],
    ),
    "index-never-asked": (
        "{% for m in messages %}{{ loop.index ~ '. ' ~ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}",
        ["1. user: Why 3?\n2. assistant: ⟦It is 3.⟧\n", "3. user: 2 or 3?\n4. assistant: ⟦3⟧\n"],
    ),
    "digits-alone": (
        print_headers("(loop.index0 + 8) ~ '9 '", "'\n'", "(messages | length + 8) ~ '9 '"),
        ["89 Why 3?\n99 ⟦It is 3.⟧\n", "109 2 or 3?\n119 ⟦3⟧\n"],
    ),
    "answers-alone": (
        "{% for m in messages %}{{ 'Ask: ' if m.role == 'user' else 'Answer ' ~ (loop.index // 2) ~ ': ' }}"
        "{{ m.content ~ '<e>\n' }}{% endfor %}"
        + ASK
        + "{{ 'Answer ' ~ (messages | length + 1) // 2 ~ ': ' }}{% endif %}",
        ["Ask: Why 3?<e>\nAnswer 1: ⟦It is 3.<e>⟧\n", "Ask: 2 or 3?<e>\nAnswer 2: ⟦3<e>⟧\n"],
    ),
    "tokens": (
        print_headers(
            "'<|' ~ m.role ~ '_' ~ (loop.index0 // 2) ~ '|>'",
            "'<|end|>'",
            "'<|assistant_' ~ messages | length // 2 ~ '|>'",
        ),
        [
            "<|user_0|>Why 3?<|end|><|assistant_0|>⟦It is 3.<|end|>⟧",
            "<|user_1|>2 or 3?<|end|><|assistant_1|>⟦3<|end|>⟧",
        ],
    ),
    "counted-ends": (
        print_headers(
            "'[' ~ m.role ~ ' ' ~ loop.index ~ ']'",
            "'[/' ~ m.role ~ ' ' ~ loop.index ~ ']\n'",
            "'[assistant ' ~ (messages | length + 1) ~ ']'",
        ),
        [
            "[user 1]Why 3?[/user 1]\n[assistant 2]⟦It is 3.[/assistant 2]⟧\n",
            "[user 3]2 or 3?[/user 3]\n[assistant 4]⟦3[/assistant 4]⟧\n",
        ],
    ),
    "dates": (
        print_headers(
            "'[2024-02-' ~ loop.index ~ ' 1:0' ~ loop.index0 ~ '] ' ~ m.role ~ ': '",
            "'\n'",
            "'[2024-02-' ~ (messages | length + 1) ~ ' 1:0' ~ messages | length ~ '] assistant: '",
        ),
        [
            "[2024-02-1 1:00] user: Why 3?\n[2024-02-2 1:01] assistant: ⟦It is 3.⟧\n",
            "[2024-02-3 1:02] user: 2 or 3?\n[2024-02-4 1:03] assistant: ⟦3⟧\n",
        ],
    ),
}
"""By name a template, and its first two exchanges of a long chat with the trained characters in brackets."""

LONG: list[Message] = [user("Why 3?"), assistant("It is 3."), *[user("2 or 3?"), assistant("3")] * 11]
"""So many exchanges that every counter gets to two digits, with texts that are numbers."""


LAST = {
    "from-one": "[Round 12]\n\nQ: 2 or 3?\n\nA: ⟦3\n\n</s>⟧",
    "from-zero": "[Round 11]\n\nQ: 2 or 3?\n\nA: ⟦3\n\n</s>⟧",
    "from-nine": "[Round 20]\n\nQ: 2 or 3?\n\nA: ⟦3\n\n</s>⟧",
    "joined": "[Round 12]\n\nQ: 2 or 3?\n\nA: ⟦3</s>⟧",
    "with-end": "[Round 12]\n\nQ: 2 or 3?\n\nA: ⟦3</s>⟧",
    "down": "[Round 1]\n\nQ: 2 or 3?\n\nA: ⟦3\n\n</s>⟧",
    "words": "[Round twelve]\n\nQ: 2 or 3?\n\nA: ⟦3\n\n</s>⟧",
    "letters": "[Round l]\n\nQ: 2 or 3?\n\nA: ⟦3\n\n</s>⟧",
    "odd-and-even": "even user: 2 or 3?\neven assistant: ⟦3\n</s>⟧",
    "index-first": "23. user: 2 or 3?\n24. assistant: ⟦3\n</s>⟧",
    "index-never-asked": "23. user: 2 or 3?\n24. assistant: ⟦3\n</s>⟧",
    "digits-alone": "309 2 or 3?\n319 ⟦3\n</s>⟧",
    "answers-alone": "Ask: 2 or 3?<e>\nAnswer 12: ⟦3<e>⟧\n",
    "tokens": "<|user_11|>2 or 3?<|end|><|assistant_11|>⟦3<|end|>⟧",
    "counted-ends": "[user 23]2 or 3?[/user 23]\n[assistant 24]⟦3[/assistant 24]⟧\n",
    "dates": "[2024-02-23 1:022] user: 2 or 3?\n[2024-02-24 1:023] assistant: ⟦3\n</s>⟧",
}
"""By name the last exchange of that chat: nothing of a header is put behind an answer that prints no end of turn."""


def make_mask(template: str, messages: list[Message]) -> tuple[MaskedConversation, list[MaskDefect]]:
    """Return the mask of a chat, and its defects as the independent judge sees them."""
    renderer = Renderer(RendererSpec(template, {"bos_token": "<s>", "eos_token": "</s>"}))
    conversation = Conversation(messages)
    masked = Masker(renderer, Loss()).mask(conversation)
    assert isinstance(masked, MaskedConversation), masked
    defects = MaskJudge(renderer).judge(conversation, masked)
    assert defects is not None
    return masked, defects


@pytest.mark.parametrize("name", TEMPLATES)
def test_counted_header_is_no_end_of_the_answer_before_it(name: str) -> None:
    template, expected = TEMPLATES[name]

    masked, defects = make_mask(template, LONG)

    assert draw_mask(masked).startswith("".join(expected))
    assert draw_mask(masked).endswith(LAST[name])
    assert defects == []
    assert len(masked.trained) == 12


@pytest.mark.parametrize("name", ["from-one", "joined", "words", "index-first"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_counted_header_is_no_end_after_a_system_message_or_a_preamble(name: str, count: int) -> None:
    preamble = "<s>Answer the 3 questions.\n\n" + TEMPLATES[name][0]
    talk = LONG[: 2 * count]
    for template, messages in ((TEMPLATES[name][0], [system("Be brief."), *talk]), (preamble, talk)):
        masked, defects = make_mask(template, messages)

        texts = [one.removesuffix("</s>").strip() for one in trained_texts(masked)]
        assert texts == ["It is 3.", "3", "3", "3"][:count]
        assert defects == []


def test_build_with_a_counted_template_keeps_every_row(tmp_path: Path) -> None:
    rows: list[Json] = [chat(i, turns=2, words=3) for i in range(12)]
    template = {"chat_template": TEMPLATES["from-one"][0], "verify_render": 1.0}
    built = Workspace(tmp_path).one("a.jsonl", rows, {"kind": "chat"}, template=template).build()

    assert built.rejects() == []
    assert built.facts("rows", "tokenized_examples")["mask_verified"] == 1
    encoder = Encoder(open_tokenizer(str(tmp_path / "tokenizer"), tmp_path))
    for example in built.examples():
        trained = encoder.decode(
            [i for i, trains in zip(example["input_ids"], example["loss_mask"], strict=True) if trains]
        )
        assert "Round" not in trained
