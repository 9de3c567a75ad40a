"""Observe a template's behavior from its renders of the probes.

What belongs here: one function per property of `TemplateBehavior`. What does not: the probe conversations and the form
of messages that the template reads (`probes.py`), masking.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rowmill.conversation.adaptation import Adaptation
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
from rowmill.conversation.template_contract import RenderedConversation, TemplateBehavior, find_first_control_token
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json
from rowmill.schema.rows import Message, Rejected, Span

# ── the contract ──


def observe_template(
    renderer: ProbeRenderer,
    prompt: Callable[..., str],
    *,
    eos_token: str,
    bos_token: str,
    adds_bos: bool,
    control_tokens: Sequence[str],
    known_tokens: frozenset[str],
    has_blocks: bool,
    adaptation: Adaptation,
    other_clock: Callable[[Sequence[Message], Sequence[Json] | None], str | Rejected],
) -> TemplateBehavior:
    """Observe every property of a template on probes; `Renderer` fills in those that depend on its engine."""
    plain = renderer(PLAIN_PROBE)
    ends = _observe_ends(plain, eos_token, control_tokens)
    kept = _observe_reasoning(renderer)
    prompts = {role: prompt(role, has_tools=role == "tool", kwargs={}) for role in ("user", "tool", "system")}
    constant = _find_constant_prefix(renderer)
    blocks = GenerationBlocks(renderer, prompts, constant, ends, control_tokens) if has_blocks else None
    differences = tuple(dict.fromkeys(blocks.find_differences())) if blocks else ()
    return TemplateBehavior(
        prefix_preserving={
            name: _preserves_prefixes(renderer, probe, tools)
            for name, probe, tools in (
                ("plain", PLAIN_PROBE, None),
                ("tools", TOOL_PROBE, [SENTINEL_TOOL]),
                ("reasoning", REASONING_PROBE, None),
            )
        },
        prompt_match={role: _match_prompt(renderer, prompt_text, role) for role, prompt_text in prompts.items()},
        prompts=prompts,
        end_trained=blocks.hold_turn_end() if blocks else ends.get("end_of_turn", "missing") != "missing",
        end_is_one_token=_choose_end(ends, eos_token) in known_tokens,
        generation_blocks="none" if blocks is None else "differs" if differences else "equal",
        generation_differences=differences,
        reasoning=kept,
        reasoning_key=adaptation.reasoning_keys[0] if kept != "none" else None,
        inline_tags_stripped=_strips_tags(renderer),
        arguments=probe_argument_forms(renderer, adaptation),
        loses=tuple(_list_dropped_content(renderer)),
        date_dependent=_depends_on_date(renderer, other_clock),
        bos=_observe_bos(plain, bos_token, adds_bos),
        system=_observe_system(renderer),
        alternation=tuple(_list_refusals(renderer)),
        tools=_observe_tools(renderer),
        no_tools=adaptation.no_tools,
        tool_ids=adaptation.tool_ids,
        content_form=adaptation.content_form,
        spans="marks" if isinstance(plain, RenderedConversation) and plain.spans else "proof",
        eos_token=eos_token,
        control_tokens=tuple(sorted(control_tokens, key=len, reverse=True)),
        headers=_collect_message_headers(renderer),
        constant_prefix=constant,
        reasoning_close=_find_reasoning_close(renderer),
        empty_reasoning=_find_empty_reasoning(renderer, prompt),
        **ends,
    )


def _find_message_span(rendered: RenderedConversation, message: int) -> Span | None:
    own = [span for span in rendered.spans if span.message == message]
    return own[0] if len(own) == 1 else None


def _get_text_after(rendered: RenderedConversation, message: int, text: str) -> str | None:
    """Return the text of a message's span after its own text."""
    span = _find_message_span(rendered, message)
    if span is None:
        return None
    found = rendered.text.rfind(text, span.start, span.end)
    return None if found < 0 else rendered.text[found + len(text) : span.end]


def _get_text_before(rendered: RenderedConversation, message: int, text: str) -> str | None:
    span = _find_message_span(rendered, message)
    if span is None:
        return None
    found = rendered.text.find(text, span.start, span.end)
    return None if found < 0 else rendered.text[span.start : found]


def _observe_ends(plain: RenderedConversation | Rejected, eos: str, control_tokens: Sequence[str]) -> dict[str, Any]:
    if isinstance(plain, Rejected):
        return {}
    own, last = _get_text_after(plain, 1, "Qzaone"), _get_text_after(plain, 3, "Qzatwo")
    if own is None or last is None:
        shared = os.path.commonprefix(
            [_get_text_between(plain, "Qzaone", "Qzutwo"), plain.text.rpartition("Qzatwo")[2]]
        )
        own = last = shared
    own, last = own.rstrip(), last.rstrip()
    differs = own != last
    if own:
        return {"end_of_turn": "own", "last_turn_differs": differs, "printed_end": own, "finish": own}
    following = _find_message_span(plain, 2)
    header = find_first_control_token(plain.text[following.start : following.end], control_tokens) if following else ""
    if header:
        return {"end_of_turn": "next_header", "last_turn_differs": differs, "finish": header}
    tail = plain.text[plain.loop_end :]
    if eos and eos in tail:
        return {"end_of_turn": "tail", "last_turn_differs": differs}
    return {"end_of_turn": "missing", "last_turn_differs": differs}


def _choose_end(ends: Mapping[str, Any], eos: str) -> str:
    """Return the end of an assistant's turn, printed or appended."""
    return str(ends.get("finish") or eos)


@frozen_dataclass
class GenerationBlocks:
    """Compares the text that `{% generation %}` blocks train on probes with the text that marks would train."""

    observe: ProbeRenderer
    prompts: Mapping[str, str]
    constant_prefix: str
    ends: Mapping[str, Any]
    control_tokens: Sequence[str]

    def find_differences(self) -> Iterator[str]:
        """Yield text that the blocks train and marks do not, then the reverse."""
        for probe, tools in ((PLAIN_PROBE, None), (TOOL_PROBE, [SENTINEL_TOOL]), (REASONING_PROBE, None)):
            rendered = self.observe(probe, tools)
            if isinstance(rendered, RenderedConversation):
                held = {i for block in rendered.generation for i in range(block.start, block.end)}
                marked = set(self._list_marked_positions(rendered, probe))
                yield from (f"adds {text!r}" for text in iterate_text_runs(rendered.text, held - marked))
                yield from (f"leaves out {text!r}" for text in iterate_text_runs(rendered.text, marked - held))

    def hold_turn_end(self) -> bool:
        """Return whether the end of an earlier turn is inside its block."""
        rendered = self.observe(PLAIN_PROBE)
        if isinstance(rendered, Rejected):
            return False
        end = str(self.ends.get("printed_end") or self.ends.get("finish") or "")
        at = rendered.text.find("Qzaone") + len("Qzaone")
        return any(block.start <= at and at + len(end) <= block.end for block in rendered.generation) and bool(end)

    def _list_marked_positions(self, rendered: RenderedConversation, probe: Sequence[Message]) -> Iterator[int]:
        text = rendered.text
        for number, span in enumerate(rendered.spans):
            if probe[span.message]["role"] != "assistant":
                continue
            is_first = all(other.message != span.message for other in rendered.spans[:number])
            start = span.start + (self._measure_prefix(text, span, probe) if is_first else 0)
            yield from range(start, span.start + len(text[span.start : span.end].rstrip()))
            following = rendered.spans[number + 1 : number + 2]
            if self.ends.get("end_of_turn") == "next_header" and following:
                header = find_first_control_token(text[following[0].start : following[0].end], self.control_tokens)
                at = text.find(header, following[0].start)
                yield from range(at, at + len(header))

    def _measure_prefix(self, text: str, span: Span, probe: Sequence[Message]) -> int:
        before = probe[span.message - 1]["role"] if span.message else "user"
        for prefix in (self.prompts.get(before, ""), self.prompts.get("user", ""), self.constant_prefix):
            if prefix and text.startswith(prefix, span.start, span.end):
                return len(prefix)
        return 0


def iterate_text_runs(text: str, positions: set[int]) -> Iterator[str]:
    """Yield the text of each run of adjacent positions."""
    start = previous = -2
    for position in [*sorted(positions), len(text) + 2]:
        if position != previous + 1:
            if start >= 0:
                yield text[start : previous + 1]
            start = position
        previous = position


def _preserves_prefixes(renderer: ProbeRenderer, probe: Sequence[Message], tools: Sequence[Json] | None) -> bool:
    whole = renderer(probe, tools)
    if isinstance(whole, Rejected):
        return False
    for end in range(1, len(probe)):
        prefix = renderer(probe[:end], tools)
        if isinstance(prefix, RenderedConversation) and not whole.text.startswith(prefix.text):
            return False
    return True


def _match_prompt(renderer: ProbeRenderer, prompt_text: str, role: str) -> Literal["full", "partial", "none"]:
    probe = [*ENDING_PROBES[role][0], make_assistant_message("Qzlast")]
    rendered = renderer(probe, [SENTINEL_TOOL] if role == "tool" else None)
    if isinstance(rendered, Rejected) or not prompt_text:
        return "none"
    span = _find_message_span(rendered, len(probe) - 1)
    text = rendered.text[span.start : span.end] if span else ""
    if text.startswith(prompt_text):
        return "full"
    return "partial" if os.path.commonprefix([text, prompt_text]) else "none"


def _observe_reasoning(renderer: ProbeRenderer) -> Literal["all", "last", "none"]:
    rendered = renderer(REASONING_PROBE)
    if shows_text(rendered, "Qzrone") and shows_text(rendered, "Qzrtwo"):
        return "all"
    return "last" if shows_text(rendered, "Qzrtwo") else "none"


def _strips_tags(renderer: ProbeRenderer) -> bool:
    inline = make_assistant_message("<think>\nQzrone\n</think>\n\nQzaone")
    rendered = renderer(
        [make_user_message("Qzuone"), inline, make_user_message("Qzutwo"), make_assistant_message("Qzatwo")]
    )
    return isinstance(rendered, RenderedConversation) and "Qzaone" in rendered.text and "Qzrone" not in rendered.text


def _list_dropped_content(renderer: ProbeRenderer) -> Iterator[str]:
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
        rendered = renderer(probe, tools)
        if isinstance(rendered, RenderedConversation) and text not in rendered.text:
            yield kind


def _make_text_beside_call(text: str, name: str = "qztool") -> Sequence[Message]:
    calling = make_assistant_message(text, tool_calls=[make_tool_call(name, {"qzkey": "Qzvalue"})])
    return [make_user_message("Qzuone"), calling, make_tool_result("Qzresult"), make_assistant_message("Qzaone")]


def _depends_on_date(renderer: ProbeRenderer, other_clock: Callable[..., str | Rejected]) -> bool:
    rendered = renderer(PLAIN_PROBE)
    return isinstance(rendered, RenderedConversation) and other_clock(PLAIN_PROBE, None) != rendered.text


def _observe_bos(
    plain: RenderedConversation | Rejected, bos: str, adds_bos: bool
) -> Literal["template", "none", "double"]:
    if isinstance(plain, Rejected) or not bos or not plain.text.startswith(bos):
        return "none"
    return "double" if adds_bos else "template"


def _observe_system(renderer: ProbeRenderer) -> Literal["printed", "folded", "dropped", "refused", "last_user_only"]:
    rendered = renderer([make_system_message("Qzsystem"), *PLAIN_PROBE])
    if isinstance(rendered, Rejected):
        return "refused"
    at = rendered.text.find("Qzsystem")
    if at >= 0:
        folded = any(span.start <= at < span.end and span.message > 0 for span in rendered.spans)
        return "folded" if folded else "printed"
    ending = renderer([make_system_message("Qzsystem"), *PLAIN_PROBE[:3]])
    return "last_user_only" if shows_text(ending, "Qzsystem") else "dropped"


def _list_refusals(renderer: ProbeRenderer) -> Iterator[str]:
    if isinstance(
        renderer([make_user_message("Qzuone"), make_user_message("Qzutwo"), make_assistant_message("Qzaone")]), Rejected
    ):
        yield "two_users"
    if isinstance(
        renderer([make_assistant_message("Qzaone"), make_user_message("Qzuone"), make_assistant_message("Qzatwo")]),
        Rejected,
    ):
        yield "leading_assistant"
    if isinstance(renderer(TOOL_PROBE, [SENTINEL_TOOL]), Rejected):
        yield "tool_role"


def _observe_tools(renderer: ProbeRenderer) -> Literal["printed", "dropped", "refused"]:
    rendered = renderer(PLAIN_PROBE, [SENTINEL_TOOL])
    if isinstance(rendered, Rejected):
        return "refused"
    return "printed" if "qztool" in rendered.text else "dropped"


def _collect_message_headers(renderer: ProbeRenderer) -> dict[str, tuple[str, ...]]:
    """Return by role (user, system, tool) all texts printed before a message's own text, in any position of a chat."""
    headers: dict[str, set[str]] = {}
    probed: list[tuple[Sequence[Message], Sequence[Json] | None]] = [
        (PLAIN_PROBE, None),
        ([make_system_message("Qzsystem"), *PLAIN_PROBE], None),
        ([*PLAIN_PROBE, make_system_message("Qzsystem"), *PLAIN_PROBE], None),
        (TOOL_PROBE, [SENTINEL_TOOL]),
        (
            [
                *_make_text_beside_call("")[:3],
                make_tool_result("Qzsecond", "call_00000002"),
                make_assistant_message("Qzaone"),
            ],
            [SENTINEL_TOOL],
        ),
    ]
    for probe, tools in probed:
        rendered = renderer(probe, tools)
        if isinstance(rendered, RenderedConversation):
            for index, message in enumerate(probe):
                header = _get_text_before(rendered, index, message["content"]) if message["content"] else None
                if header and message["role"] != "assistant":
                    headers.setdefault(message["role"], set()).add(header)
    return {role: tuple(sorted(found, key=lambda one: (-len(one), one))) for role, found in headers.items()}


def _find_constant_prefix(renderer: ProbeRenderer) -> str:
    headers: list[str] = []
    for texts in (("Qzaone", "Qzatwo"), ("Xqaone", "Wqatwo")):
        rendered = renderer(
            [
                make_user_message("Qzuone"),
                make_assistant_message(texts[0]),
                make_user_message("Qzutwo"),
                make_assistant_message(texts[1]),
            ]
        )
        if isinstance(rendered, RenderedConversation):
            headers += [
                header
                for i, text in ((1, texts[0]), (3, texts[1]))
                if (header := _get_text_before(rendered, i, text)) is not None
            ]
    return os.path.commonprefix(headers)


def _find_reasoning_close(renderer: ProbeRenderer) -> tuple[str, str]:
    """Return the text between reasoning and answer, and between reasoning and call, in a last turn."""
    answered = renderer([make_user_message("Qzuone"), make_assistant_message("Qzaone", reasoning_content="Qzrone")])
    calling = make_assistant_message(
        "", tool_calls=[make_tool_call("qzcalled", {"qzkey": "Qzvalue"})], reasoning_content="Qzrone"
    )
    called = renderer([make_user_message("Qzuone"), calling], [SENTINEL_TOOL])
    answer = _get_text_between(answered, "Qzrone", "Qzaone")
    before_call = _get_text_between(called, "Qzrone", "qzcalled")
    return answer, os.path.commonprefix([answer, before_call]) if answer else before_call


def _get_text_between(rendered: RenderedConversation | Rejected, first: str, second: str) -> str:
    if isinstance(rendered, Rejected):
        return ""
    start = rendered.text.rfind(first)
    end = rendered.text.find(second, start)
    return rendered.text[start + len(first) : end] if 0 <= start < end else ""


_REASONING_WORD = re.compile(r"think|reason|analysis|thought", re.IGNORECASE)


def _find_empty_reasoning(renderer: ProbeRenderer, prompt: Callable[..., str]) -> tuple[str, ...]:
    """Return the frames of empty reasoning that the template prints before an answer without reasoning."""
    frames: set[str] = set()
    for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        rendered = renderer(PLAIN_PROBE, None, kwargs)
        if isinstance(rendered, Rejected):
            continue
        for index, text in ((1, "Qzaone"), (3, "Qzatwo")):
            header = _get_text_before(rendered, index, text)
            found = header and _REASONING_WORD.search(header)
            if header and found:
                start = max(header.rfind("<", 0, found.start()), header.rfind("[", 0, found.start()))
                frames.add(header[start if start >= 0 else found.start() :])
        prompt_text = prompt("user", has_tools=False, kwargs=kwargs)
        if (found := _REASONING_WORD.search(prompt_text)) and "/" in prompt_text[found.start() - 1 :]:
            start = prompt_text.rfind("<", 0, found.start())
            frames.add(prompt_text[start if start >= 0 else found.start() :])
    return tuple(sorted(frames, key=len, reverse=True))
