"""What a chat template does, observed on probe conversations: its contract.

Everything that a template's report shows and a row's mask relies on beside the frames.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rowmill.conversation.adaptation import ProbeRenderer, probe_argument_forms, shows_text
from rowmill.conversation.character_ownership import locate_own_text
from rowmill.conversation.frame_learning import learn_frames_once
from rowmill.conversation.options import Loss
from rowmill.conversation.probe_conversations import ENDING_SHAPES, SENTINELS, make_call
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_frames import (
    TemplateFrames,
    find_common_end,
    split_turn_prefix,
)
from rowmill.conversation.turn_cutting import TurnCutter
from rowmill.core.json import Json
from rowmill.schema.rows import Message, Rejected, Span


@dataclass(frozen=True, slots=True)
class TemplateBehavior:
    """What a template does, observed on probe conversations.

    Masking uses the strings at the end; `printed_end` and `finish` are ends of turn, right-stripped.
    """

    prefix_preserving: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """For plain, tools and reasoning probes: whether the render of every prefix is a prefix of the whole render."""
    prompt_match: Mapping[str, str] = field(default_factory=dict[str, str])
    """By role of the preceding message: whether the text before an answer begins with what the template prints to ask
    for one, up to white space (full), or at least has a part of the generation prompt (partial, none)."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """By role of the preceding message: the generation prompt; empty if the template prints none."""
    end_of_turn: Literal["own", "next_header", "tail", "missing"] = "missing"
    end_trained: bool = False
    """Whether the end of turn trains; with `{% generation %}` blocks, whether they include it."""
    end_is_one_token: bool = False
    """Whether the end of turn is a single token of the tokenizer; otherwise no stop token ends generation there."""
    last_turn_differs: bool = False
    """Whether the last assistant turn ends differently from the earlier ones."""
    reasoning: Literal["all", "last", "none"] = "none"
    reasoning_key: str | None = None
    inline_tags_stripped: bool = False
    arguments: Literal["object", "string", "either", "dropped", "refused"] = "dropped"
    loses: tuple[str, ...] = ()
    date_dependent: bool = False
    bos: Literal["template", "none", "double"] = "none"
    system: Literal["printed", "folded", "dropped", "refused", "last_user_only"] = "printed"
    alternation: tuple[str, ...] = ()
    """What the template refuses: `two_users`, `leading_assistant`, `tool_role`."""
    tools: Literal["printed", "dropped", "refused"] = "dropped"
    no_tools: Literal["null", "[]"] = "null"
    tool_ids: Literal["any", "nine_alphanumeric"] = "any"
    content_form: Literal["string", "parts"] = "string"
    generation_blocks: Literal["none", "equal", "differs"] = "none"
    generation_differences: tuple[str, ...] = ()
    """Text of the probes that the blocks train and the closed list would not (`adds …`), and the reverse
    (`leaves out …`)."""
    render_path: Literal["fast", "reference"] = "reference"
    fast_path_obstacle: str = ""
    """Why the fast path is not used; empty if it is."""

    printed_end: str = ""
    """Text printed after the own text of an assistant turn that is not the last, right-stripped."""
    finish: str = ""
    """Text that `finish: auto` appends to a render without an end of turn; empty: the EOS token."""
    eos_token: str = ""
    control_tokens: tuple[str, ...] = ()
    reasoning_close: tuple[str, str] = ("", "")
    """Template text between reasoning and answer, and between reasoning and a call."""
    empty_reasoning: tuple[str, ...] = ()
    """Frames that the template prints for an answer without reasoning, longest first."""


def find_mismatched_prompts(contract: TemplateBehavior) -> list[str]:
    """Return the roles after which the generation prompt differs from the header in training rows."""
    return [role for role, prompt in contract.prompts.items() if prompt and contract.prompt_match.get(role) != "full"]


def list_template_warnings(contract: TemplateBehavior, *, finish: str = "auto") -> list[str]:
    """Return properties of a template that can spoil training, each with its remedy; `finish` is `loss.finish`."""
    found: list[str] = []
    if contract.end_of_turn in ("missing", "next_header") and finish == "none":
        found.append("a conversation's last turn has no end, and loss.finish: none appends none; write auto or eos")
    elif contract.end_of_turn == "missing" and not contract.eos_token and finish in ("auto", "eos"):
        found.append("no end of turn is printed and the tokenizer has no EOS; write the end into loss.finish")
    elif contract.generation_blocks != "none" and not contract.end_trained:
        found.append("{% generation %} leaves out the end of turn, so a model would not stop; loss.end_of_turn: train")
    if contract.end_of_turn != "missing" and not contract.end_is_one_token:
        found.append("the end of turn is no single token of the tokenizer; use the template that belongs to it")
    if contract.bos == "double":
        found.append("template and tokenizer both add a BOS; rowmill keeps the template's; at inference add none")
    return found


# ── observing it ──

_MODEL = frozenset({"assistant"})
_TOOLS: Sequence[Json] = (SENTINELS.tool,)
_TOOL_NAME: str = SENTINELS.tool["function"]["name"]
_PLAIN, _CALLED, _REASONED = (SENTINELS.make(shape) for shape in ("uaua", "uctaua", "urur"))
_SHAPES = (("plain", _PLAIN, None), ("tools", _CALLED, _TOOLS), ("reasoning", _REASONED, None))
_REFUSABLE: Mapping[str, tuple[Sequence[Message], Sequence[Json] | None]] = {
    "two_users": (SENTINELS.make("uua"), None),
    "leading_assistant": (SENTINELS.make("aua"), None),
    "tool_role": (_CALLED, _TOOLS),
}
MAX_CACHED_BEHAVIORS = 512
"""Templates whose behavior a process keeps."""

_BEHAVIOR_CACHE: dict[str, TemplateBehavior] = {}
"""Behavior by renderer identity."""


def observe_template_once(renderer: Renderer) -> TemplateBehavior:
    """Return what a template does, observed once per process."""
    known = _BEHAVIOR_CACHE.get(renderer.identity)
    if known is None:
        if len(_BEHAVIOR_CACHE) >= MAX_CACHED_BEHAVIORS:
            _BEHAVIOR_CACHE.clear()
        known = _BEHAVIOR_CACHE[renderer.identity] = observe_template(renderer)
    return known


def observe_template(renderer: Renderer) -> TemplateBehavior:
    """Observe every property of a template on probes."""
    render = renderer.render_probe
    frames = learn_frames_once(renderer, _MODEL, {})
    plain = render(_PLAIN)
    ends = _observe_ends(plain, frames, renderer.eos_token)
    reasoned = render(_REASONED)
    first, last = (shows_text(reasoned, _REASONED[i]["reasoning_content"]) for i in (1, 3))
    kept = "none" if not last else "all" if first else "last"
    question, answer, *rest = _PLAIN
    inline = {**answer, "content": f"<think>\nqzthought\n</think>\n\n{answer['content']}"}
    tagged = render([question, inline, *rest])
    bos = "none"
    if isinstance(plain, str) and renderer.bos_token and plain.startswith(renderer.bos_token):
        bos = "double" if renderer.spec.adds_bos else "template"
    # The text between reasoning and answer, and between reasoning and call, in a last turn.
    answered, called = SENTINELS.make("ur"), SENTINELS.make("ue")
    called[1]["tool_calls"] = [make_call("qzcalled", {"qzplace": "qzvalue one"})]
    close = _get_text_between(render(answered), answered[1]["reasoning_content"], answered[1]["content"])
    before_call = _get_text_between(render(called, _TOOLS), called[1]["reasoning_content"], "qzcalled")
    prompts = {
        role: renderer.generation_prompt(role, has_tools=role == "tool", kwargs={})
        for role in ("user", "tool", "system")
    }
    end = str(ends.get("finish") or renderer.eos_token)
    known_tokens = frozenset((*renderer.spec.control_tokens, *renderer.spec.special_tokens.values()))
    differences = tuple(dict.fromkeys(_find_block_differences(renderer, frames)))
    offered = render(_PLAIN, _TOOLS)
    return TemplateBehavior(
        prefix_preserving={name: _preserves_prefixes(render, probe, tools) for name, probe, tools in _SHAPES},
        prompt_match={role: _match_prompt(renderer, prompt, role) for role, prompt in prompts.items()},
        prompts=prompts,
        end_trained=_do_blocks_hold_end(renderer, ends) if renderer.has_blocks else "finish" in ends,
        end_is_one_token=end in known_tokens,
        generation_blocks="none" if not renderer.has_blocks else "differs" if differences else "equal",
        generation_differences=differences,
        reasoning=kept,
        reasoning_key=renderer.adaptation.reasoning_keys[0] if kept != "none" else None,
        inline_tags_stripped=shows_text(tagged, answer["content"]) and not shows_text(tagged, "qzthought"),
        arguments=probe_argument_forms(render, renderer.adaptation),
        loses=tuple(_list_dropped_content(render)),
        date_dependent=plain != renderer.render_years_later(_PLAIN),
        bos=bos,
        system=_observe_system(render),
        alternation=tuple(name for name, probe in _REFUSABLE.items() if isinstance(render(*probe), Rejected)),
        tools="refused" if isinstance(offered, Rejected) else "printed" if _TOOL_NAME in offered else "dropped",
        no_tools=renderer.adaptation.no_tools,
        tool_ids=renderer.adaptation.tool_ids,
        content_form=renderer.adaptation.content_form,
        render_path=renderer.render_path,
        fast_path_obstacle=renderer.fast_path_obstacle,
        eos_token=renderer.eos_token,
        control_tokens=renderer.control_tokens,
        reasoning_close=(close, os.path.commonprefix([close, before_call]) if close else before_call),
        empty_reasoning=_find_empty_reasoning(renderer),
        **ends,
    )


# ── how a turn begins ──


def _match_prompt(renderer: Renderer, prompt: str, role: str) -> Literal["full", "partial", "none"]:
    asked = SENTINELS.make(ENDING_SHAPES[role][0])
    tools = _TOOLS if role == "tool" else None
    answered = renderer.render_probe([*asked, {"role": "assistant", "content": "qzlast"}], tools)
    prompted = renderer.render_probe(asked, tools, {"add_generation_prompt": True})
    before = "" if isinstance(answered, Rejected) else answered.partition("qzlast")[0]
    asks = "" if isinstance(prompted, Rejected) else prompted
    if prompt and "".join(before.split()).startswith("".join(asks.split())):
        return "full"
    shown = max((before.rfind(message["content"]) for message in asked if message["content"]), default=0)
    found = prompt and split_turn_prefix(before[max(0, shown) :], [prompt], renderer.control_tokens)
    return "partial" if found else "none"


def _preserves_prefixes(render: ProbeRenderer, probe: Sequence[Message], tools: Sequence[Json] | None) -> bool:
    whole = render(probe, tools)
    if isinstance(whole, Rejected):
        return False
    prefixes = (render(probe[:end], tools) for end in range(1, len(probe)))
    return all(isinstance(prefix, Rejected) or whole.startswith(prefix) for prefix in prefixes)


# ── how a turn ends ──


def _observe_ends(plain: str | Rejected, frames: TemplateFrames, eos: str) -> dict[str, Any]:
    if isinstance(plain, Rejected):
        return {}
    end = frames.finish.get("assistant", "")
    last = plain.rpartition(_PLAIN[-1]["content"])[2].rstrip()
    if frames.next_header_ends:
        return {"end_of_turn": "next_header", "finish": end}
    if end:
        differs = not last.startswith(end)
        return {"end_of_turn": "own", "last_turn_differs": differs, "printed_end": end, "finish": end}
    return {"end_of_turn": "tail" if eos and eos in last else "missing"}


def _find_block_differences(renderer: Renderer, frames: TemplateFrames) -> Iterator[str]:
    """Yield text of probes that `{% generation %}` blocks train and the closed list does not, then the reverse."""
    if not renderer.has_blocks:
        return
    for _, probe, tools in _SHAPES:
        rendered = renderer.render(probe, tools, {})
        if isinstance(rendered, Rejected):
            continue
        located = locate_own_text(renderer.prove_ownership(rendered, _MODEL), rendered, probe, _MODEL)
        if located is None:
            continue
        supervised = [index for index, message in enumerate(probe) if message["role"] in _MODEL]
        by_blocks, by_frames = (
            TurnCutter(
                rendered, probe, located.unproven, frames, renderer.eos_token, Loss(finish="none"), _MODEL, blocks
            ).cut(located.pieces(), supervised)
            for blocks in (True, False)
        )
        if not isinstance(by_blocks, Rejected) and not isinstance(by_frames, Rejected):
            held, listed = _list_positions(by_blocks.trained), _list_positions(by_frames.trained)
            yield from (f"adds {text!r}" for text in iterate_text_runs(rendered.text, held - listed))
            yield from (f"leaves out {text!r}" for text in iterate_text_runs(rendered.text, listed - held))


def _list_positions(spans: Sequence[Span]) -> set[int]:
    return {position for span in spans for position in range(span.start, span.end)}


def iterate_text_runs(text: str, positions: set[int]) -> Iterator[str]:
    """Yield the text of each run of adjacent positions."""
    start = previous = -2
    for position in [*sorted(positions), len(text) + 2]:
        if position != previous + 1:
            if start >= 0:
                yield text[start : previous + 1]
            start = position
        previous = position


def _do_blocks_hold_end(renderer: Renderer, ends: Mapping[str, Any]) -> bool:
    rendered = renderer.render(_PLAIN, None, {})
    if isinstance(rendered, Rejected):
        return False
    end, answer = str(ends.get("finish") or ""), _PLAIN[1]["content"]
    at = rendered.text.find(answer) + len(answer)
    return bool(end) and any(start <= at and at + len(end) <= stop for start, stop in rendered.blocks)


# ── what is printed ──


def _list_dropped_content(render: ProbeRenderer) -> Iterator[str]:
    """Yield the kinds of own text that the template does not print."""
    led, beside, named = SENTINELS.make("suaua"), SENTINELS.make("ubta"), SENTINELS.make("ucta")
    named[1]["tool_calls"] = [make_call("qzcalled", {"qzplace": "qzvalue one"})]
    question = SENTINELS.make("u")
    seen: list[tuple[str, str, Sequence[Message], Sequence[Json] | None]] = [
        ("system", led[0]["content"], led, None),
        ("user", _PLAIN[0]["content"], _PLAIN, None),
        ("assistant_text", _PLAIN[1]["content"], _PLAIN, None),
        ("text_beside_call", beside[1]["content"], beside, _TOOLS),
        ("call_name", "qzcalled", named, _TOOLS),
        ("call_arguments", "qzvalue one", _CALLED, _TOOLS),
        ("tool_result", _CALLED[2]["content"], _CALLED, _TOOLS),
        ("tool_list", _TOOL_NAME, _PLAIN, _TOOLS),
        ("reasoning", _REASONED[1]["reasoning_content"], _REASONED, None),
        ("unknown_role", "qzother", [*question, {"role": "qzrole", "content": "qzother"}], None),
    ]
    for kind, text, probe, tools in seen:
        rendered = render(probe, tools)
        if isinstance(rendered, str) and text not in rendered:
            yield kind


def _observe_system(render: ProbeRenderer) -> Literal["printed", "folded", "dropped", "refused", "last_user_only"]:
    led = SENTINELS.make("suaua")
    system, question = (message["content"] for message in led[:2])
    rendered = render(led)
    if isinstance(rendered, Rejected):
        return "refused"
    if system not in rendered:
        return "last_user_only" if shows_text(render(led[:4]), system) else "dropped"
    # Folded into a user's turn, a system message follows that turn's header.
    alone = render(_PLAIN)
    first, answer, second = (message["content"] for message in _PLAIN[:3])
    if isinstance(alone, Rejected):
        return "printed"
    header = find_common_end([alone.partition(first)[0], _get_text_between(alone, answer, second)], ())
    before, after = rendered.partition(system)[0], _get_text_between(rendered, system, question)
    return "folded" if header.strip() and header in before and header not in after else "printed"


# ── reasoning ──

_REASONING_WORD = re.compile(r"think|reason|analysis|thought", re.IGNORECASE)


def _find_empty_reasoning(renderer: Renderer) -> tuple[str, ...]:
    """Return the frames of empty reasoning that the template prints before an answer without reasoning."""
    frames: set[str] = set()
    for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        rendered = renderer.render_probe(_PLAIN, None, kwargs)
        if isinstance(rendered, Rejected):
            continue
        prompt = renderer.generation_prompt("user", has_tools=False, kwargs=kwargs)
        for question, answer in (_PLAIN[:2], _PLAIN[2:]):
            before = _get_text_between(rendered, question["content"], answer["content"])
            before = before[max(0, before.rfind(prompt)) :]
            if found := _REASONING_WORD.search(before):
                start = max(before.rfind("<", 0, found.start()), before.rfind("[", 0, found.start()))
                frames.add(before[start if start >= 0 else found.start() :])
        if (found := _REASONING_WORD.search(prompt)) and "/" in prompt[found.start() - 1 :]:
            start = prompt.rfind("<", 0, found.start())
            frames.add(prompt[start if start >= 0 else found.start() :])
    return tuple(sorted(frames, key=len, reverse=True))


def _get_text_between(rendered: str | Rejected, first: str, second: str) -> str:
    if isinstance(rendered, Rejected):
        return ""
    start = rendered.rfind(first)
    end = rendered.find(second, start)
    return rendered[start + len(first) : end] if 0 <= start < end else ""
