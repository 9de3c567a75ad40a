"""Observe a template's behavior from its renders of the probes: one function per property of `TemplateBehavior`."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rowmill.conversation.frame_probes import learn_frames_once
from rowmill.conversation.loss_options import Loss
from rowmill.conversation.owned_spans import locate_own_text
from rowmill.conversation.probes import (
    ENDING_PROBES,
    PLAIN_PROBE,
    REASONING_PROBE,
    SENTINEL_TOOL,
    TOOL_PROBE,
    ProbeRenderer,
    make_assistant_message,
    make_system_message,
    make_tool_call,
    make_tool_result,
    make_user_message,
    probe_argument_forms,
    shows_text,
)
from rowmill.conversation.template_contract import TemplateBehavior
from rowmill.conversation.template_frames import TemplateFrames, find_common_end, split_turn_prefix
from rowmill.conversation.turn_cutting import TurnCutter, list_end_tokens
from rowmill.core.json import Json
from rowmill.schema.rows import Message, Rejected, Span

if TYPE_CHECKING:
    from rowmill.conversation.renderer import Renderer

_MODEL = frozenset({"assistant"})


def observe_template(renderer: "Renderer") -> TemplateBehavior:
    """Observe every property of a template on probes."""
    render = renderer.render_probe
    frames = learn_frames_once(renderer, _MODEL, {})
    ends = _observe_ends(render(PLAIN_PROBE), frames, renderer.eos_token)
    kept = _observe_reasoning(render)
    prompts = {
        role: renderer.generation_prompt(role, has_tools=role == "tool", kwargs={})
        for role in ("user", "tool", "system")
    }
    end = str(ends.get("finish") or renderer.eos_token)
    known_tokens = frozenset((*renderer.spec.control_tokens, *renderer.spec.special_tokens.values()))
    differences = tuple(dict.fromkeys(_find_block_differences(renderer, frames)))
    return TemplateBehavior(
        prefix_preserving={
            name: _preserves_prefixes(render, probe, tools)
            for name, probe, tools in (
                ("plain", PLAIN_PROBE, None),
                ("tools", TOOL_PROBE, [SENTINEL_TOOL]),
                ("reasoning", REASONING_PROBE, None),
            )
        },
        prompt_match={role: _match_prompt(renderer, prompt, role) for role, prompt in prompts.items()},
        prompts=prompts,
        end_trained=_do_blocks_hold_end(renderer, ends) if renderer.has_blocks else "finish" in ends,
        end_is_one_token=end in known_tokens,
        generation_blocks="none" if not renderer.has_blocks else "differs" if differences else "equal",
        generation_differences=differences,
        reasoning=kept,
        reasoning_key=renderer.adaptation.reasoning_keys[0] if kept != "none" else None,
        inline_tags_stripped=_strips_tags(render),
        arguments=probe_argument_forms(render, renderer.adaptation),
        loses=tuple(_list_dropped_content(render)),
        date_dependent=render(PLAIN_PROBE) != renderer.render_years_later(PLAIN_PROBE),
        bos=_observe_bos(render(PLAIN_PROBE), renderer.bos_token, renderer.spec.adds_bos),
        system=_observe_system(render),
        alternation=tuple(_list_refusals(render)),
        tools=_observe_tools(render),
        no_tools=renderer.adaptation.no_tools,
        tool_ids=renderer.adaptation.tool_ids,
        content_form=renderer.adaptation.content_form,
        render_path=renderer.render_path,
        fast_path_obstacle=renderer.fast_path_obstacle,
        eos_token=renderer.eos_token,
        control_tokens=renderer.control_tokens,
        reasoning_close=_find_reasoning_close(render),
        empty_reasoning=_find_empty_reasoning(renderer),
        **ends,
    )


# ── ends of turns ──


def _observe_ends(plain: str | Rejected, frames: TemplateFrames, eos: str) -> dict[str, Any]:
    if isinstance(plain, Rejected):
        return {}
    end = frames.finish.get("assistant", "")
    last = plain.rpartition("Qzatwo")[2].rstrip()
    if frames.next_header_ends:
        return {"end_of_turn": "next_header", "finish": end}
    if end:
        differs = not last.startswith(end)
        return {"end_of_turn": "own", "last_turn_differs": differs, "printed_end": end, "finish": end}
    return {"end_of_turn": "tail" if eos and eos in last else "missing"}


def _find_block_differences(renderer: "Renderer", frames: TemplateFrames) -> Iterator[str]:
    """Yield text of probes that `{% generation %}` blocks train and the closed list does not, then the reverse."""
    if not renderer.has_blocks:
        return
    ends = list_end_tokens(renderer.eos_token, renderer.control_tokens)
    for probe, tools in ((PLAIN_PROBE, None), (TOOL_PROBE, [SENTINEL_TOOL]), (REASONING_PROBE, None)):
        rendered = renderer.render(probe, tools, {})
        located = None if isinstance(rendered, Rejected) else locate_own_text(renderer, rendered, probe, _MODEL)
        if isinstance(rendered, Rejected) or located is None:
            continue
        supervised = [index for index, message in enumerate(probe) if message["role"] in _MODEL]
        by_blocks, by_frames = (
            TurnCutter(
                rendered,
                probe,
                located,
                frames,
                ends,
                renderer.eos_token,
                Loss(finish="none"),
                _MODEL,
                by_blocks=blocks,
            ).cut(supervised)
            for blocks in (True, False)
        )
        if not isinstance(by_blocks, Rejected) and not isinstance(by_frames, Rejected):
            held, listed = _list_positions(by_blocks.trained), _list_positions(by_frames.trained)
            yield from (f"adds {text!r}" for text in iterate_text_runs(rendered.text, held - listed))
            yield from (f"leaves out {text!r}" for text in iterate_text_runs(rendered.text, listed - held))


def _list_positions(spans: Sequence[Span]) -> set[int]:
    return {position for span in spans for position in range(span.start, span.end)}


def _do_blocks_hold_end(renderer: "Renderer", ends: Mapping[str, Any]) -> bool:
    """Return whether the end of an earlier turn is inside its block."""
    rendered = renderer.render(PLAIN_PROBE, None, {})
    if isinstance(rendered, Rejected):
        return False
    end = str(ends.get("finish") or "")
    at = rendered.text.find("Qzaone") + len("Qzaone")
    return bool(end) and any(start <= at and at + len(end) <= stop for start, stop in rendered.blocks)


def iterate_text_runs(text: str, positions: set[int]) -> Iterator[str]:
    """Yield the text of each run of adjacent positions."""
    start = previous = -2
    for position in [*sorted(positions), len(text) + 2]:
        if position != previous + 1:
            if start >= 0:
                yield text[start : previous + 1]
            start = position
        previous = position


def _preserves_prefixes(render: ProbeRenderer, probe: Sequence[Message], tools: Sequence[Json] | None) -> bool:
    whole = render(probe, tools)
    if isinstance(whole, Rejected):
        return False
    for end in range(1, len(probe)):
        prefix = render(probe[:end], tools)
        if isinstance(prefix, str) and not whole.startswith(prefix):
            return False
    return True


def _match_prompt(renderer: "Renderer", prompt: str, role: str) -> Literal["full", "partial", "none"]:
    asked = ENDING_PROBES[role][0]
    tools = [SENTINEL_TOOL] if role == "tool" else None
    answered = renderer.render_probe([*asked, make_assistant_message("Qzlast")], tools)
    prompted = renderer.render_probe(asked, tools, {"add_generation_prompt": True})
    before = "" if isinstance(answered, Rejected) else answered.partition("Qzlast")[0]
    asks = "" if isinstance(prompted, Rejected) else prompted
    if prompt and "".join(before.split()).startswith("".join(asks.split())):
        return "full"
    shown = max((before.rfind(str(message["content"])) for message in asked if message["content"]), default=0)
    return (
        "partial"
        if prompt and split_turn_prefix(before[max(0, shown) :], [prompt], renderer.control_tokens)
        else "none"
    )


def _observe_reasoning(render: ProbeRenderer) -> Literal["all", "last", "none"]:
    rendered = render(REASONING_PROBE)
    if shows_text(rendered, "Qzrone") and shows_text(rendered, "Qzrtwo"):
        return "all"
    return "last" if shows_text(rendered, "Qzrtwo") else "none"


def _strips_tags(render: ProbeRenderer) -> bool:
    inline = make_assistant_message("<think>\nQzrone\n</think>\n\nQzaone")
    rendered = render(
        [make_user_message("Qzuone"), inline, make_user_message("Qzutwo"), make_assistant_message("Qzatwo")]
    )
    return isinstance(rendered, str) and "Qzaone" in rendered and "Qzrone" not in rendered


def _list_dropped_content(render: ProbeRenderer) -> Iterator[str]:
    """Yield the kinds of own text that the template does not print."""
    seen: list[tuple[str, str, Sequence[Message], Sequence[Json] | None]] = [
        ("system", "Qzsystem", [make_system_message("Qzsystem"), *PLAIN_PROBE], None),
        ("user", "Qzuone", PLAIN_PROBE, None),
        ("assistant_text", "Qzaone", PLAIN_PROBE, None),
        ("text_beside_call", "Qzbeside", _make_text_beside_call("Qzbeside"), [SENTINEL_TOOL]),
        ("call_name", "qzcalled", _make_text_beside_call("", "qzcalled"), [SENTINEL_TOOL]),
        ("call_arguments", "Qzvalue", TOOL_PROBE, [SENTINEL_TOOL]),
        ("tool_result", "Qzresult", TOOL_PROBE, [SENTINEL_TOOL]),
        ("tool_list", "qztool", PLAIN_PROBE, [SENTINEL_TOOL]),
        ("reasoning", "Qzrone", REASONING_PROBE, None),
        ("unknown_role", "Qzother", [make_user_message("Qzuone"), {"role": "qzrole", "content": "Qzother"}], None),
    ]
    for kind, text, probe, tools in seen:
        rendered = render(probe, tools)
        if isinstance(rendered, str) and text not in rendered:
            yield kind


def _make_text_beside_call(text: str, name: str = "qztool") -> Sequence[Message]:
    calling = make_assistant_message(text, tool_calls=[make_tool_call(name, {"qzkey": "Qzvalue"})])
    return [make_user_message("Qzuone"), calling, make_tool_result("Qzresult"), make_assistant_message("Qzaone")]


def _observe_bos(plain: str | Rejected, bos: str, adds_bos: bool) -> Literal["template", "none", "double"]:
    if isinstance(plain, Rejected) or not bos or not plain.startswith(bos):
        return "none"
    return "double" if adds_bos else "template"


def _observe_system(
    render: ProbeRenderer,
) -> Literal["printed", "folded", "dropped", "refused", "last_user_only"]:
    rendered = render([make_system_message("Qzsystem"), *PLAIN_PROBE])
    if isinstance(rendered, Rejected):
        return "refused"
    if "Qzsystem" not in rendered:
        ending = render([make_system_message("Qzsystem"), *PLAIN_PROBE[:3]])
        return "last_user_only" if shows_text(ending, "Qzsystem") else "dropped"
    # Folded into a user's turn, a system message follows that turn's header.
    alone = render(PLAIN_PROBE)
    header = (
        ""
        if isinstance(alone, Rejected)
        else find_common_end([alone.partition("Qzuone")[0], _get_text_between(alone, "Qzaone", "Qzutwo")], ())
    )
    before, after = rendered.partition("Qzsystem")[0], _get_text_between(rendered, "Qzsystem", "Qzuone")
    return "folded" if header.strip() and header in before and header not in after else "printed"


def _list_refusals(render: ProbeRenderer) -> Iterator[str]:
    if isinstance(
        render([make_user_message("Qzuone"), make_user_message("Qzutwo"), make_assistant_message("Qzaone")]), Rejected
    ):
        yield "two_users"
    if isinstance(
        render([make_assistant_message("Qzaone"), make_user_message("Qzuone"), make_assistant_message("Qzatwo")]),
        Rejected,
    ):
        yield "leading_assistant"
    if isinstance(render(TOOL_PROBE, [SENTINEL_TOOL]), Rejected):
        yield "tool_role"


def _observe_tools(render: ProbeRenderer) -> Literal["printed", "dropped", "refused"]:
    rendered = render(PLAIN_PROBE, [SENTINEL_TOOL])
    if isinstance(rendered, Rejected):
        return "refused"
    return "printed" if "qztool" in rendered else "dropped"


def _find_reasoning_close(render: ProbeRenderer) -> tuple[str, str]:
    """Return the text between reasoning and answer, and between reasoning and call, in a last turn."""
    answered = render([make_user_message("Qzuone"), make_assistant_message("Qzaone", reasoning_content="Qzrone")])
    calling = make_assistant_message(
        "", tool_calls=[make_tool_call("qzcalled", {"qzkey": "Qzvalue"})], reasoning_content="Qzrone"
    )
    called = render([make_user_message("Qzuone"), calling], [SENTINEL_TOOL])
    answer = _get_text_between(answered, "Qzrone", "Qzaone")
    before_call = _get_text_between(called, "Qzrone", "qzcalled")
    return answer, os.path.commonprefix([answer, before_call]) if answer else before_call


def _get_text_between(rendered: str | Rejected, first: str, second: str) -> str:
    if isinstance(rendered, Rejected):
        return ""
    start = rendered.rfind(first)
    end = rendered.find(second, start)
    return rendered[start + len(first) : end] if 0 <= start < end else ""


_REASONING_WORD = re.compile(r"think|reason|analysis|thought", re.IGNORECASE)


def _find_empty_reasoning(renderer: "Renderer") -> tuple[str, ...]:
    """Return the frames of empty reasoning that the template prints before an answer without reasoning."""
    frames: set[str] = set()
    for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        rendered = renderer.render_probe(PLAIN_PROBE, None, kwargs)
        if isinstance(rendered, Rejected):
            continue
        prompt = renderer.generation_prompt("user", has_tools=False, kwargs=kwargs)
        for question, answer in (("Qzuone", "Qzaone"), ("Qzutwo", "Qzatwo")):
            before = _get_text_between(rendered, question, answer)
            before = before[max(0, before.rfind(prompt)) :]
            if found := _REASONING_WORD.search(before):
                start = max(before.rfind("<", 0, found.start()), before.rfind("[", 0, found.start()))
                frames.add(before[start if start >= 0 else found.start() :])
        if (found := _REASONING_WORD.search(prompt)) and "/" in prompt[found.start() - 1 :]:
            start = prompt.rfind("<", 0, found.start())
            frames.add(prompt[start if start >= 0 else found.start() :])
    return tuple(sorted(frames, key=len, reverse=True))
