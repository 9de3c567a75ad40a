"""The fast path of plain chats gives the examples of the reference path, for real templates and hostile contents."""

from datetime import datetime
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.conversation.content_tracing import TracingRenderer, find_tracing_obstacle
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_registry import read_named_template
from rowmill.schema.rows import Conversation, MaskedConversation
from tests.support.recipes import CHAT, Workspace
from tests.support.tiers import mark_all_but

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ON_FAST_PATH = ("axolotl__deepseek_v3", "llamacpp__Qwen-Qwen2.5-7B-Instruct", "llamacpp__Qwen-Qwen3-0.6B",
         "llamacpp__HuggingFaceTB-SmolLM3-3B", "llamacpp__meta-llama-Llama-3.2-3B-Instruct",
         "llamacpp__microsoft-Phi-3.5-mini-instruct")  # fmt: skip
"""Real templates that print contents as they are."""

CONTENTS = st.one_of(
    st.text(min_size=1, max_size=40),
    st.sampled_from(
        ["assistant", "user\n", "</think>", "a</think>b", "<think>x</think>\n\ny", "<tool_response>r</tool_response>",
         " edge ", "\nedge\n", "%s", "{{ m }}", "é漢", "<|im_end|>", "0", "None", "x" * 300]
    ),
)  # fmt: skip


def _renderer(template: str) -> Renderer:
    return Renderer(RendererSpec(text=template, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}))


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_all_but(list(ON_FAST_PATH)[:2], ON_FAST_PATH))
def test_shape_of_a_real_template_gives_the_mask_of_the_reference_path(real_data: Path, name: str) -> None:
    _hold_the_check((real_data / f"templates/{name}.jinja").read_text(encoding="utf-8"), Loss())


@pytest.mark.parametrize("of_prompts", [pytest.param(False, marks=pytest.mark.slow), True], ids=["rows", "prompts"])
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3.1", "gemma3"])
def test_shape_of_a_bundled_template_gives_text_and_mask_of_the_reference_path(name: str, of_prompts: bool) -> None:
    _hold_the_check(read_named_template(name), Loss(), of_prompts=of_prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [Loss(supervise="last_assistant"), Loss(mask={"user": "train"}, mask_default="mask"), Loss(end_of_turn="mask"),
     Loss(lead="train"), Loss(trailing="train")],
    ids=["last", "user", "no-end", "lead", "trailing"],
)  # fmt: skip
def test_shape_holds_for_every_choice_of_trained_messages(loss: Loss) -> None:
    _hold_the_check(CHATML, loss)


def _hold_the_check(template: str, loss: Loss, *, of_prompts: bool = False) -> None:
    """Compare rows, or prompts, whose shape holds with those of the reference path."""
    masker = Masker(_renderer(template), loss, MaskRules())
    find = masker.find_prompt_layout if of_prompts else masker.find_layout
    make = masker.render_prompt if of_prompts else masker.mask
    taken = 0

    @settings(max_examples=60)
    @given(contents=st.lists(CONTENTS, min_size=1 if of_prompts else 2, max_size=5), system=st.booleans())
    def check(contents: list[str], system: bool) -> None:
        nonlocal taken
        roles = [*(["system"] if system else []), *["user", "assistant"] * len(contents)][: len(contents)]
        shape = find(tuple(roles))
        if shape is None or not shape.holds(contents):
            return
        if any(one in text for one in shape.literals for text in contents):
            return
        taken += 1
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        alone, fast = make(Conversation(messages)), shape.mask(contents)
        assert isinstance(alone, MaskedConversation)
        assert (alone.text, alone.trained) == (fast.text, fast.trained)
        assert not (of_prompts and alone.trained)
        assert alone == fast

    check()

    assert taken > 10


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{% for m in messages %}{{ m.content | upper }}{% endfor %}", id="changes-letters"),
        pytest.param("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", id="escapes"),
        pytest.param("{% for m in messages %}{{ m.content[:3] }}{{ m.content[3:] }}{% endfor %}", id="slices"),
        pytest.param("{% for m in messages %}{% if m.content | length > 90 %}L{% endif %}{{ m.content }}{% endfor %}",
                     id="measures"),
        pytest.param("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", id="prints-twice"),
        pytest.param("{% for m in messages %}{{ m.content.split() | length }}{{ m.content }}{% endfor %}", id="words"),
        pytest.param("{% for m in messages %}{{ m.content }}{{ m.content < 'm' }}{% endfor %}", id="orders"),
        pytest.param("{% for m in messages %}{{ m.content }}{{ {'a': 1}[m.content] }}{% endfor %}", id="looks-up"),
        pytest.param("{% for m in messages %}{{ '%5s' % m.content }}{% endfor %}", id="formats"),
        pytest.param("{% for m in messages %}{{ m.content in 'abc' }}{{ m.content }}{% endfor %}", id="is-looked-for"),
        pytest.param("{% for m in messages %}{{ 'abc'.find(m.content) }}{{ m.content }}{% endfor %}", id="is-found"),
        pytest.param("{% set t = '' %}{% for m in messages %}{% set t = t ~ m.content %}{{ 'x' in t }}{{ m.content }}"
                     "{% endfor %}", id="joins-and-reads"),
        pytest.param("{% for m in messages %}{% set t %}{{ m.content }}{% endset %}{{ 'x' in t }}{{ t }}{% endfor %}",
                     id="captures"),
        pytest.param("{% macro f(t) %}{{ t }}{% endmacro %}{% for m in messages %}{{ 'x' in f(m.content) }}"
                     "{{ m.content }}{% endfor %}", id="macro"),
        pytest.param("{% for m in messages %}{{ (m.content + 'b') == 'ab' }}{{ m.content }}{% endfor %}", id="built"),
        pytest.param("{% for m in messages %}{{ m.content == messages[0].content }}{{ m.content }}{% endfor %}",
                     id="compares-contents"),
        pytest.param("{% for m in messages %}{{ 'x' in ([m.content] | join) }}{{ m.content }}{% endfor %}", id="join"),
        pytest.param("{% macro f(t) %}{{ t }}{% endmacro %}{% for m in messages %}{% set t = f(m.content) %}"
                     "{{ 'x' in t }}{{ t }}{% endfor %}", id="keeps-what-a-macro-printed"),
        pytest.param("{{ messages | selectattr('content', 'in', 'abc') | list | length }}{% for m in messages %}"
                     "{{ m.content }}{% endfor %}", id="test-by-name"),
        pytest.param("{{ messages | map(attribute='content') | map('wordcount') | list | first }}"
                     "{% for m in messages %}{{ m.content }}{% endfor %}", id="filter-by-name"),
        pytest.param("{{ messages }}", id="prints-all"),
    ],
)  # fmt: skip
def test_template_that_does_more_than_print_contents_is_not_proven(template: str) -> None:
    assert _renderer(template).render_placeholders(("user", "assistant"), {}) is None


def test_notes_record_what_decided_a_step() -> None:
    template = (
        "{% for m in messages %}{% if '</think>' in m.content %}T{% endif %}{{ m.content.strip('\n') }}{% endfor %}"
    )

    printed = _renderer(template).render_placeholders(("user", "assistant"), {})

    assert printed is not None
    assert printed.literals == {"</think>"}
    assert printed.edges == {0: {"\n"}, 1: {"\n"}}


QUESTIONS = (
    "{{ c is string }}{{ c is mapping }}{{ c is none }}{{ 'ab' in c }}{{ c.startswith('w') }}{{ c.endswith('y') }}"
    "{{ c == 'zz' }}{{ c in ['u', 'v'] }}{{ 1 if c else 0 }}{{ c.split('cd') | length }}"
)
"""All that a template may ask of a content."""


@pytest.mark.slow
@given(text=st.text(min_size=1))
def test_text_that_keeps_the_notes_renders_like_the_placeholder(text: str) -> None:
    source = (
        "{% for m in messages %}{% set c = m.content %}" + QUESTIONS + "{{ (c | trim).replace('ef', '') }}{% endfor %}"
    )
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    assert find_tracing_obstacle(environment.parse(source)) == ""

    printed = TracingRenderer(source, datetime(2025, 1, 1), {}).render(("user",), {})  # noqa: DTZ001

    assert printed is not None
    if any(one in text for one in printed.literals) or text != text.strip():
        return
    shown = environment.from_string(source).render(messages=[{"role": "user", "content": text}])
    assert shown == printed.text.replace(printed.contents[0], text)


def _rows(count: int) -> list[dict[str, object]]:
    """Return conversations of every kind that the fast path takes, and some that it must leave."""
    texts = [
        "Hello there",
        "naïve café 漢字 🎉",
        "user",
        "x",
        "tail ",
        "</think> quoted",
        "<|im_end|> quoted",
        "word " * 900,
    ]
    rows: list[dict[str, object]] = []
    for i in range(count):
        turns = [
            {"role": "user", "content": f"{texts[i % len(texts)]} {i}"},
            {"role": "assistant", "content": f"{i} {texts[(i * 3 + 1) % len(texts)]}"},
        ] * (1 + i % 3)
        rows.append({"messages": [{"role": "system", "content": f"Be brief. {i}"}, *turns] if i % 2 else turns})
    return rows


@pytest.mark.slow
def test_fast_and_reference_path_give_equal_examples(tmp_path: Path) -> None:
    """A key that no template reads sends a row to the reference path; nothing else may change."""
    plain = _rows(120)
    marked = [{"messages": [{**m, "note": "x"} for m in row["messages"]]} for row in plain]  # pyrefly: ignore[not-iterable]

    by_fast_path = Workspace(tmp_path / "fast").one("a.jsonl", plain, CHAT).build()
    one_by_one = Workspace(tmp_path / "long").one("a.jsonl", marked, CHAT).build()

    assert [_own(e) for e in by_fast_path.examples()] == [_own(e) for e in one_by_one.examples()]
    assert by_fast_path.facts("rows", "tokenized_examples")["fast_path_mismatches"] == 0
    assert by_fast_path.facts("rows", "tokenized_examples")["mask_verified"] == 1


def _own(example: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in example.items() if name not in ("example_id", "row_ids")}
