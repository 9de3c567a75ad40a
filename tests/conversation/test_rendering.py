"""Rendering: the same text by both engines, proven owners, generation blocks, misbehaving templates."""

import json
import pickle
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.conversation.character_ownership import RenderedConversation
from rowmill.conversation.options import RendererSpec, Template, make_renderer_spec, resolve_template
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_registry import read_named_template
from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError
from rowmill.schema.rows import Message, Rejected
from tests.support.messages import assistant, call, tool, user
from tests.support.tiers import draw

LETTERS = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
"""The specification's T1."""


TALK = [user("U1"), assistant("A1"), user("U2"), assistant("A2")]


def open_template(text: str, render_path: str = "auto") -> Renderer:
    return Renderer(
        RendererSpec(text, {"eos_token": "</s>"}, render_path="reference" if render_path == "reference" else "auto")
    )


def printed(text: str, messages: list[Message], render_path: str = "auto") -> RenderedConversation:
    result = open_template(text, render_path).render(messages, None, {})
    assert isinstance(result, RenderedConversation), result
    return result


def owned(text: str, messages: list[Message], render_path: str = "auto") -> list[tuple[int, str]]:
    """Return the own texts of a render in its order, each with its message."""
    result = printed(text, messages, render_path)
    proof = open_template(text, render_path).prove_ownership(result, frozenset({"assistant"}))
    assert proof is not None
    return [(one.message, result.text[one.start : one.end]) for one in proof.texts]


# ── owners ──


INNER = [assistant("C1"), {"role": "tool", "content": "R1"}, {"role": "tool", "content": "R2"}]
INNER_LOOPS = {
    "filtered": "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content }}"
    "{% for t in messages if t.role == 'tool' %}[{{ t.content }}]{% endfor %}<e>{% endif %}{% endfor %}",
    "range": "{% for i in range(messages|length) %}{% set m = messages[i] %}{% if m.role == 'assistant' %}"
    "<a>{{ m.content }}"
    "{% for j in range(i + 1, messages|length) %}{% set t = messages[j] %}[{{ t.content }}"
    "]{% endfor %}<e>{% endif %}{% endfor %}",
    "sliced": "{% for m in messages[:1] %}<a>{{ m.content }}{% for t in messages[1:] %}[{{ t.content }}"
    "]{% endfor %}<e>{% endfor %}",
}


@pytest.mark.parametrize("render_path", ["auto", "reference"])
@pytest.mark.parametrize("name", INNER_LOOPS)
def test_owner_of_text_of_an_inner_loop_is_the_message_that_it_prints(name: str, render_path: str) -> None:
    assert owned(INNER_LOOPS[name], INNER, render_path) == [(0, "C1"), (1, "R1"), (2, "R2")]


FLOW = {
    "continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}<{{ m.content }}"
    ">{% endfor %}",
    "break": "{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}<{{ m.content }}"
    ">{% endfor %}tail",
    "users first": "{% for r in ['user', 'assistant'] %}{% for m in messages if m.role == r %}<{{ m.content }}"
    ">{% endfor %}{% endfor %}",
    "scan": "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% set ns.last = loop.index0 %}{% endfor %}"
    "{% for m in messages %}<{{ m.content }}>{% endfor %}",
    "white space": "{% for m in messages -%}\n   {{- '<' + m.content }}  >\n{%- endfor %}"
    "\n\n  {% if add_generation_prompt %}x{% endif %}\n",
    "plus": "  {%+ for m in messages +%}\n<{{ m.content }}>\n  {%+ endfor +%}\n",
}


@pytest.mark.parametrize("render_path", ["auto", "reference"])
@pytest.mark.parametrize("name", FLOW)
def test_owners_under_control_flow_are_the_messages_that_are_printed(name: str, render_path: str) -> None:
    messages = [{"role": "system", "content": "sys"}, user("one"), assistant("two"), user("stop"), assistant("three")]
    left_out = {"continue": {0}, "break": {3, 4}, "users first": {0}}.get(name, set())
    found = owned(FLOW[name], messages, render_path)
    assert sorted(found) == [(i, m["content"]) for i, m in enumerate(messages) if i not in left_out]


COPIES = (
    "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [dict(c=m.content)] %}{% endfor %}"
    "{% for m in ns.l %}{{ m.c }}{% endfor %}"
)


@pytest.mark.parametrize(("template", "render_path"), [(LETTERS, "auto"), (LETTERS, "reference"), (COPIES, "auto")])
def test_owner_of_every_text_of_a_loop_or_of_a_copy_is_its_message(template: str, render_path: str) -> None:
    assert owned(template, TALK, render_path) == [(0, "U1"), (1, "A1"), (2, "U2"), (3, "A2")]


# ── invariants ──

words = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=40)
role = st.sampled_from(["user", "assistant", "system"])
turns = st.lists(st.fixed_dictionaries({"role": role, "content": words}), min_size=1, max_size=6)
LAWFUL_TEXTS = {**FLOW, "letters": LETTERS, **{name: read_named_template(name) for name in ("chatml", "qwen3")}}
LAWFUL = {name: Renderer(RendererSpec(text, {"eos_token": "</s>"})) for name, text in LAWFUL_TEXTS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWFUL)
@given(messages=turns)
@settings(max_examples=draw(40), deadline=None)
def test_render_equals_plain_render(name: str, messages: list[Message]) -> None:
    renderer = LAWFUL[name]
    result, plain = renderer.render(messages, None, {}), renderer.plain(messages, None, {})
    assert (result.text if isinstance(result, RenderedConversation) else result) == plain


def test_private_code_points_and_one_message_given_twice_are_printed_whole() -> None:
    messages = [user("\U000f0000 \U0010ffd0 \U0010fffd"), assistant("A\U000f0001\ufdd0")]
    assert printed(LETTERS, messages).text == f"<u>{messages[0]['content']}<e>\n<a>{messages[1]['content']}<e>\n"
    assert owned(LETTERS, messages) == [(index, one["content"]) for index, one in enumerate(messages)]

    same = user("U")
    assert owned(LETTERS, [same, same], "reference") == [(0, "U"), (1, "U")]


def test_arguments_that_engines_print_differently_take_the_reference_path() -> None:
    renderer = Renderer(
        RendererSpec(
            "{% for m in messages %}{% for c in m.tool_calls or [] %}"
            "{% for k, v in c.function.arguments | items %}{{ v | tojson }};{% endfor %}{% endfor %}"
            "{{ m.content }}{% endfor %}"
        )
    )
    result = renderer.render([assistant("A", tool_calls=[call({"a": 1.0, "b": 2})])], None, {})

    assert renderer.render_path == "fast"
    assert isinstance(result, RenderedConversation)
    assert result.text == "1.0;2;A"


@pytest.mark.parametrize("space", ["\x1c", "\x1f", "\x85", "\u2003", "\u200b"])
def test_white_space_is_trimmed_as_the_reference_trims_it(space: str) -> None:
    """The engines differ on U+001C to U+001F."""
    template = "{% for m in messages %}{{ m.content | trim }}/{{ m.content.strip() }};{% endfor %}"
    messages, trimmed = [user(f"{space}U{space}")], f"{space}U{space}".strip()
    assert open_template(template).render_path == "fast"
    assert printed(template, messages).text == f"{trimmed}/{trimmed};"
    assert open_template(template).plain(messages, None, {}) == f"{trimmed}/{trimmed};"


@pytest.mark.parametrize("render_path", ["auto", "reference"])
@pytest.mark.parametrize("private", ["", "\U0010ffd0", "\U0010ffd1\U0010ffd2"])
def test_ranges_of_generation_blocks_are_their_characters(private: str, render_path: str) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    messages = [*TALK, user(private)]
    result = printed(template, messages, render_path)

    assert result.is_fast is (render_path == "auto")
    assert [result.text[start:end] for start, end in result.blocks] == ["U1", "A1", "U2", "A2", private]


@pytest.mark.parametrize("render_path", ["auto", "reference"])
def test_tools_are_those_of_each_row_whether_it_shares_them_with_the_row_before_or_not(render_path: str) -> None:
    template = "{% for t in tools %}{{ t | tojson }}{{ t | tojson(indent=1) }}{% endfor %}{{ messages[0].content }}"
    renderer = open_template(template, render_path)
    printed: list[str] = []
    expected: list[str] = []
    for number in range(20):
        tools = [tool(f"t{number // 2}_{k}", more=[1.5, "é", None]) for k in range(3)]
        for _ in range(1 + number % 2):
            result = renderer.render(TALK, tools, {})
            assert isinstance(result, RenderedConversation)
            printed.append(result.text)
            dumped = (
                f"{json.dumps(one, ensure_ascii=False)}{json.dumps(one, indent=1, ensure_ascii=False)}" for one in tools
            )
            expected.append("".join(dumped) + "U1")
        del tools

    assert printed == expected


def test_ranges_of_nested_generation_blocks_are_sorted() -> None:
    inner = "{% generation %}{{ m.content }}{% endgeneration %}"
    template = "{% for m in messages %}{% generation %}<" + inner + ">{% endgeneration %}{% endfor %}"
    assert list(printed(template, TALK[:1]).blocks) == [(0, 4), (1, 3)]


def test_templates_see_a_pinned_clock_and_no_inner_keys_and_their_spec_can_be_pickled() -> None:
    text = resolve_template(Template(chat_template="qwen3"), tokenizer_chat_template=None)
    spec = make_renderer_spec(Template(enable_thinking=False), text, special_tokens={})
    assert pickle.loads(pickle.dumps(spec)) == spec

    assert printed("{{ strftime_now('%d %b %Y') }}", TALK).text == "01 Jan 2025"

    messages = [user("U", train=False, weight=0.5), assistant("A")]
    shown = printed("{% for m in messages %}{{ m | tojson }}{% endfor %}", messages).text
    assert shown == '{"role": "user", "content": "U"}{"role": "assistant", "content": "A"}'


# ── finding a template ──


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ("{{ 'own' }}", "{{ 'own' }}"),
        ("chatml", read_named_template("chatml")),
        (None, "{{ 'default' }}"),
        ({"tokenizer": "tool_use"}, "{{ 'tools' }}"),
    ],
)
def test_resolve_finds_the_template_that_the_options_name(chosen: object, text: str) -> None:
    options = validate_options(Template, {"chat_template": chosen}, "template")
    named = {"default": "{{ 'default' }}", "tool_use": "{{ 'tools' }}"}
    assert resolve_template(options, tokenizer_chat_template=named) == text


@pytest.mark.parametrize("chosen", ["chatlm", {"tokenizer": "rag"}, {"file": "/nowhere.jinja"}, None])
def test_resolve_of_a_missing_template_is_a_config_error(chosen: object) -> None:
    options = validate_options(Template, {"chat_template": chosen}, "template")
    with pytest.raises(ConfigError, match=r"template\.chat_template"):
        resolve_template(options, tokenizer_chat_template=None)


@pytest.mark.parametrize(
    "values",
    [
        {"verify_render": 1.5},
        {"template_now": "today"},
        {"chat_template": {"name": "a", "text": "b"}},
        {"on_dropped": {"system_text": "count"}},
    ],
)
def test_invalid_template_options_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        validate_options(Template, values, "template")


# ── templates that misbehave ──

_GROW = "{{% set ns = namespace(x={0}) %}}{{% for i in range(60) %}}{{% set ns.x = {1} %}}{{% endfor %}}{{{{ ns.x }}}}"
BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "prints": "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endfor %}",
    "multiplies": "{{ 'x' * 10**9 }}",
    "powers": "{% set x = 10**8 %}{{ x ** x }}",
    "squares": _GROW.format("7", "ns.x * ns.x"),
    "doubles": _GROW.format("'x'", "ns.x + ns.x"),
    "doubles by tilde": _GROW.format("'x'", "ns.x ~ ns.x"),
    "doubles by join": _GROW.format("'xx'", "[ns.x, ns.x] | join(ns.x)"),
    "doubles a list": _GROW.format("[1]", "ns.x + ns.x"),
    "nests": _GROW.format("[1]", "[ns.x, ns.x]"),
    "sums lists": _GROW.format("[1]", "[ns.x, ns.x] | sum(start=[])"),
    "replaces": "{{ ('x' * 1000) | replace('x', 'x' * 1000) | replace('x', 'x' * 1000) }}",
    "captures": "{% set x %}{% for i in range(99999) %}{{ messages }}{% endfor %}{% endset %}{{ x }}",
    "pads": "{{ 'x'.center(10**9) }}",
    "pads by filter": "{{ 'x' | center(10**9) }}",
    "formats": "{{ '%1000000000d' | format(1) }}",
    "formats by operator": "{{ '%1000000000d' % 1 }}",
    "formats by method": "{{ '{:{}d}'.format(1, 1000000000) }}",
    "indents": "{{ [1] | tojson(indent=10**9) }}",
    "calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% else %}x{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "keeps and doubles": "{% macro f(n) %}{% if n %}{% set y = f(n-1) %}{{ y }}{{ y }}{% else %}x{% endif %}"
    "{% endmacro %}{{ f(60) }}",
}
ONCE = (
    "{%% if 'boom' in messages[0].content %%}%s{%% else %%}{%% for m in messages %%}"
    "{{ m.content }}{%% endfor %%}{%% endif %%}"
)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_template_beyond_its_budget_is_a_config_error_in_seconds(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match="on a conversation of a few words"):
        Renderer(RendererSpec(BOMBS[name]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_template_beyond_its_budget_on_one_row_rejects_that_row(name: str) -> None:
    renderer = Renderer(RendererSpec(ONCE % BOMBS[name]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = renderer.render([user("boom"), assistant("A1")], None, {})

    assert isinstance(result, Rejected)
    assert result.reason == "template_error"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024
    assert isinstance(renderer.render(TALK, None, {}), RenderedConversation)


FORBIDDEN = {
    "class": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ messages.__class__.__base__.__subclasses__() }}",
    "item": "{{ ''['__class__']['__mro__'] }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "clear": "{{ messages.clear() }}",
    "pop": "{{ messages[0].pop('content') }}",
    "update": "{{ messages[0].update({'content': 'x'}) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "private namespace": "{% set ns = namespace(_x=1) %}{{ ns._x }}",
    "random": "{{ messages | random }}",
    "lipsum": "{{ lipsum(5) }}",
    "file": "{% include '/etc/hostname' %}",
}


@pytest.mark.slow
@pytest.mark.parametrize("render_path", ["auto", "reference"])
@pytest.mark.parametrize("name", FORBIDDEN)
def test_template_that_accesses_internals_rejects_the_row_and_changes_nothing(name: str, render_path: str) -> None:
    messages = [user("U1"), assistant("A1")]
    result = open_template(FORBIDDEN[name], render_path).render(messages, None, {})
    assert isinstance(result, Rejected)
    assert result.reason == "template_error"
    assert messages == [user("U1"), assistant("A1")]


PRINT = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOO_DEEP = {
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "plus": "{{ " + " + ".join(["'a'"] * 20_000) + " }}",
    "tilde": "{{ " + " ~ ".join(["'a'"] * 20_000) + " }}",
    "or": "{{ " + " or ".join(["a"] * 20_000) + " }}",
    "comparisons": "{{ " + " < ".join(["a"] * 20_000) + " }}",
    "filters": "{{ a" + "|trim" * 20_000 + " }}",
    "attributes": "{{ a" + ".b" * 20_000 + " }}",
    "not": "{{ " + "not " * 20_000 + "a }}",
    "elif": "{% if a %}" + "{% elif a %}" * 5000 + "{% endif %}",
    "if": "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "inline-if": "{{ " + "a if b else " * 3000 + "c }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOO_DEEP)
def test_template_nested_too_deep_is_a_config_error(name: str) -> None:
    """Chains among them: the fast engine recurses into them and would crash the process."""
    with pytest.raises(ConfigError, match=r"nested more than 100 levels deep; at most 100 are allowed, .*; join texts"):
        Renderer(RendererSpec(TOO_DEEP[name] + PRINT))


def test_template_as_deep_as_allowed_is_compiled_and_an_invalid_one_refused() -> None:
    renderer = Renderer(RendererSpec("{{ " + " ~ ".join(["'a'"] * 97) + " }}" + PRINT))
    assert renderer.plain([user("U1")], None, {}) == "a" * 97 + "U1"

    with pytest.raises(ConfigError, match="line 1"):
        Renderer(RendererSpec("{% for m in messages %}"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x" * 131_073, r"has 131,073 characters; at most 131,072 are allowed"),
        ("{{ " + "9" * 5000 + " }}", r"the template cannot be parsed \(Exceeds the limit"),
    ],
)
def test_template_out_of_bounds_is_a_config_error(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^template\.chat_template: {words}"):
        Renderer(RendererSpec(text))


def test_row_of_ten_megabytes_is_within_the_budget() -> None:
    messages = [user("word " * 2_000_000), assistant("A1")]
    renderer = Renderer(RendererSpec(read_named_template("qwen3")))
    result, plain = renderer.render(messages, None, {}), renderer.plain(messages, None, {})

    assert isinstance(result, RenderedConversation)
    assert result.text == plain
    assert len(result.text) > 10_000_000
