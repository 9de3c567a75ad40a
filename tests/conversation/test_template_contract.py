"""The template contract: a template's behaviour, found by probes with sentinels."""

from dataclasses import asdict
from typing import Any

import pytest

from rowmill.conversation.adaptation import make_nine_character_id
from rowmill.conversation.options import RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import (
    TemplateBehavior,
    find_mismatched_prompts,
    list_template_warnings,
    observe_template_once,
)
from rowmill.conversation.template_registry import read_named_template


def contract(text: str, **tokens: str) -> TemplateBehavior:
    return observe_template_once(Renderer(RendererSpec(text, {"eos_token": "</s>", **tokens})))


LOOP = "{% for m in messages %}<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"


def calls(arguments: str) -> str:
    call = "[{{ c.function.name }}(" + arguments + ")]"
    return "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}" + call + "{% endfor %}{% endfor %}"


def calls_with_id(refused: str) -> str:
    return calls(
        f"{{% if {refused} %}}{{{{ raise_exception('id') }}}}{{% endif %}}{{{{ c.function.arguments | tojson }}}}"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOOP + PROMPT, {"end_of_turn": "own", "printed_end": "<|e|>", "finish": "<|e|>", "last_turn_differs": False}),
        (LOOP.replace("<|e|>\n", "") + PROMPT, {"end_of_turn": "next_header", "finish": "<|s|>"}),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}{{ eos_token }}", {"end_of_turn": "tail"}),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", {"end_of_turn": "missing"}),
        (LOOP.replace("<|e|>", "{{ '<|e|>' if not loop.last else '<|r|>' }}"), {"last_turn_differs": True}),
        (LOOP + PROMPT, {"prompt_match": {"user": "full", "tool": "full", "system": "full"}}),
        (LOOP, {"prompt_match": {"user": "none", "tool": "none", "system": "none"}}),
        (LOOP + PROMPT, {"reasoning": "none", "loses": ("call_name", "call_arguments", "tool_list", "reasoning")}),
        (calls("{{ c.function.arguments | tojson }}"), {"arguments": "object"}),
        (calls("{{ c.function.arguments }}"), {"arguments": "string"}),
        (
            calls("{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"),
            {"arguments": "either"},
        ),
        (calls(""), {"arguments": "dropped"}),
        (calls("{{ raise_exception('no') }}"), {"arguments": "refused", "alternation": ("tool_role",)}),
        (calls_with_id("c.id | length != 9"), {"tool_ids": "nine_alphanumeric", "arguments": "object"}),
        (calls_with_id("c.id | length < 9"), {"tool_ids": "nine_alphanumeric"}),
        ("{% for t in tools %}{{ t.function.name }}{% endfor %}" + LOOP, {"no_tools": "[]", "tools": "printed"}),
        (
            "{% for m in messages %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endfor %}",
            {"content_form": "parts"},
        ),
        ("{{ strftime_now('%Y') }}" + LOOP, {"date_dependent": True}),
        (LOOP, {"date_dependent": False, "bos": "none", "system": "printed"}),
        ("{{ bos_token }}" + LOOP, {"bos": "template"}),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", {"system": "dropped"}),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + LOOP, {"system": "refused"}),
        (
            LOOP.replace(
                "{{ m.content }}",
                "{{ raise_exception('x') if not loop.first and m.role == loop.previtem.role else m.content }}",
            ),
            {"alternation": ("two_users",)},
        ),
        ("{% for m in messages %}{{ m.thinking or '' }}/{{ m.content }}{% endfor %}", {"reasoning": "all"}),
        ("{% for m in messages %}{{ m.reasoning or '' }}/{{ m.content }}{% endfor %}", {"reasoning": "all"}),
        (
            LOOP.replace(
                "{{ m.content }}", "{{ m.reasoning_content if loop.last and m.reasoning_content }}/{{ m.content }}"
            ),
            {"reasoning": "last", "prefix_preserving": {"plain": True, "tools": True, "reasoning": False}},
        ),
    ],
)
def test_contract_of_a_template_names_what_it_does(text: str, expected: dict[str, Any]) -> None:
    bos = {"bos_token": "<s>"} if "bos_token" in text else {}
    found = asdict(contract(text, **bos))
    assert {key: found[key] for key in expected} == expected


BLOCKS = (
    "{% for m in messages %}<|s|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|e|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|e|>{% endif %}\n{% endfor %}"
)


END_OUTSIDE = BLOCKS.replace("<|e|>{% endgeneration %}", "{% endgeneration %}<|e|>")
LINE_INSIDE = BLOCKS.replace("{% endgeneration %}", "\n{% endgeneration %}").replace("{% endif %}\n", "{% endif %}")
HEADER_INSIDE = BLOCKS.replace(
    "<|s|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}",
    "{% if m.role == 'assistant' %}{% generation %}<|s|>assistant\n",
)


@pytest.mark.parametrize(
    ("text", "differences", "end_trained"),
    [
        (LOOP + PROMPT, None, True),
        (BLOCKS + PROMPT, (), True),
        (END_OUTSIDE + PROMPT, ("leaves out '<|e|>'",), False),
        (LINE_INSIDE + PROMPT, ("adds '\\n'",), True),
        (HEADER_INSIDE + PROMPT, ("adds '<|s|>assistant\\n'",), True),
    ],
)
def test_contract_reports_how_generation_blocks_differ_from_the_closed_list(
    text: str, differences: tuple[str, ...] | None, end_trained: bool
) -> None:
    found = contract(text)
    assert found.generation_differences == (differences or ())
    assert found.generation_blocks == ("none" if differences is None else "differs" if differences else "equal")
    assert found.end_trained is end_trained


@pytest.mark.parametrize(
    ("observed", "finish", "word"),
    [
        ({"end_of_turn": "own", "end_is_one_token": True}, "auto", None),
        ({"end_of_turn": "next_header", "end_is_one_token": True}, "none", "loss.finish: none"),
        ({"end_of_turn": "next_header", "end_is_one_token": True}, "auto", None),
        ({"end_of_turn": "missing"}, "auto", "no EOS"),
        ({"end_of_turn": "missing", "eos_token": "</s>"}, "auto", None),
        ({"end_of_turn": "missing"}, "<stop>", None),
        ({"end_of_turn": "own", "end_is_one_token": True, "generation_blocks": "differs"}, "auto", "would not stop"),
        ({"end_of_turn": "own"}, "auto", "no single token"),
        ({"end_of_turn": "own", "end_is_one_token": True, "bos": "double"}, "auto", "BOS"),
    ],
)
def test_warning_of_a_contract_names_its_remedy(observed: dict[str, Any], finish: str, word: str | None) -> None:
    found = list_template_warnings(TemplateBehavior(**observed), finish=finish)
    assert len(found) == (word is not None)
    assert (word or "") in "".join(found)


def test_generation_prompt_that_training_does_not_continue_is_named() -> None:
    assert find_mismatched_prompts(contract(LOOP + PROMPT)) == []
    assert find_mismatched_prompts(contract(LOOP)) == []
    continued = LOOP + PROMPT.replace("assistant\n", "assistant\nSure")
    assert find_mismatched_prompts(contract(continued)) == ["user", "tool", "system"]


def test_contract_of_qwen3_is_its_models_behaviour_and_knows_its_end_and_bos() -> None:
    found = contract(read_named_template("qwen3"))
    assert (found.reasoning, found.inline_tags_stripped) == ("last", True)
    assert (found.arguments, found.tools, found.render_path) == ("either", "printed", "fast")
    assert found.reasoning_close[0] == "\n</think>\n\n"
    assert found.empty_reasoning == ("<think>\n\n</think>\n\n",)

    known = RendererSpec(LOOP + PROMPT, {"eos_token": "</s>"}, control_tokens=("<|e|>",))
    assert observe_template_once(Renderer(known)).end_is_one_token
    assert not contract(LOOP + PROMPT).end_is_one_token
    spec = RendererSpec("{{ bos_token }}" + LOOP, {"bos_token": "<s>"}, adds_bos=True)
    assert observe_template_once(Renderer(spec)).bos == "double"


def test_nine_alphanumeric_ids_are_stable_and_kept_where_they_fit() -> None:
    assert make_nine_character_id("abc123XYZ") == "abc123XYZ"
    assert make_nine_character_id("call_1") == make_nine_character_id("call_1") != make_nine_character_id("call_2")
    assert len(make_nine_character_id("call_1")) == 9
    assert make_nine_character_id("call_1").isalnum()
