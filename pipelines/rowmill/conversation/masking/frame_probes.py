"""Learn a template's frames from renders of probe conversations of every shape.

What belongs here: reading prefixes, inner text and ends from renders in which the position of every own text is proven.
What does not: the conversations (`probe_shapes.py`), or matching rows with the frames (`template_frames.py`).

If the template refuses a shape, nothing is learned from it, and the template refuses rows of that shape too. Template
text that no shape shows is not on the closed list, so a row that shows it is rejected, not trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rowmill.conversation.masking.content_spans import group_by_message, is_tool_missing
from rowmill.conversation.masking.owned_spans import locate_proven_content
from rowmill.conversation.masking.probe_shapes import make_probe_shapes
from rowmill.conversation.masking.template_frames import (
    TemplateFrames,
    TurnPrefix,
    contains_prompt,
    cut_at_last_token,
    find_common_end,
    find_common_start,
    find_opening_token,
    get_call_ids,
    measure_json_closing,
    normalize_inner_text,
    replace_call_ids,
    split_turn_prefix,
)
from rowmill.conversation.template_contract import ChatRenderer, RenderedConversation
from rowmill.core.json import Json, to_json
from rowmill.schema.rows import ContentSpan, Message

# ── what one render shows ──


@dataclass(frozen=True, slots=True)
class _ContentRun:
    """Consecutive own text of one message."""

    message: int
    pieces: list[ContentSpan]
    start: int
    """End of the previous run; 0 for the first one."""
    stop: int
    """Start of the next run; the length of the render for the last one."""
    follower: int
    """The message of the next run; −1 for the last one."""


@dataclass(slots=True)
class _LearnedFrames:
    prefixes: set[TurnPrefix] = field(default_factory=set[TurnPrefix])
    inner: set[tuple[str, str, str]] = field(default_factory=set[tuple[str, str, str]])
    ends: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict[tuple[str, str], "dict[str, int]"])


@dataclass(frozen=True, slots=True)
class _RenderedShape:
    """One rendered probe conversation."""

    messages: Sequence[Message]
    tools: Sequence[Json] | None
    text: str
    runs: list[_ContentRun]
    before: dict[int, str]
    """By message of another role: the template text before its own text."""
    bounds: dict[int, int]
    """By message: the end of its last marked span."""
    ids: list[tuple[str, ...]]
    """By message: the ids of its calls, as rendered."""


def _split_content_runs(pieces: Sequence[ContentSpan], length: int) -> Iterator[_ContentRun]:
    """Yield runs of consecutive pieces of the same message, with the bounds of the template text around each."""
    groups = group_by_message(pieces)
    ends = [0, *(max(p.end for p in group) for group in groups)]
    starts = [*(group[0].start for group in groups), length]
    for i, group in enumerate(groups):
        follower = groups[i + 1][0].message if i + 1 < len(groups) else -1
        yield _ContentRun(group[0].message, group, ends[i], starts[i + 1], follower)


class FrameLearner:
    """Learns the frames of one template for one set of template values.

    More than 250 lines, because prefixes, inner text and ends are learned from the same renders, and each kind needs
    the ones learned before it.
    """

    def __init__(self, renderer: ChatRenderer, roles: frozenset[str], kwargs: Mapping[str, Json]) -> None:
        self._renderer = renderer
        self._roles = roles
        self._kwargs = kwargs
        self._tokens = tuple(renderer.contract.control_tokens)
        self._learned = _LearnedFrames()
        self._headers: dict[str, str] = {}
        self._followed_answer_ends: set[str] = set()
        """Ends of answers without calls that another message follows."""
        self._requires_all_messages = True
        """Whether to skip shapes of which the template drops a message; off if it drops every message of some role."""
        self._rendered_shapes: dict[tuple[bool, str], _RenderedShape | None] = {}
        self._texts: dict[str, str | None] = {}
        self._next_header_ends = False
        """Whether the first token of the user's header is all that ends an answer."""

    def learn(self) -> TemplateFrames:
        """Render all shapes and return the template text around the model's own text."""
        role = "assistant" if "assistant" in self._roles else min(self._roles)
        seen = [one for shape in make_probe_shapes(role) if (one := self._render_shape(*shape)) is not None]
        if not any(one.runs for one in seen):
            self._requires_all_messages = False
            seen = [one for shape in make_probe_shapes(role) if (one := self._render_shape(*shape)) is not None]
        self._headers = self._find_common_headers(seen)
        self._learn_prefixes(seen)
        for one in seen:
            for run in one.runs:
                self._learn_inner(one, run)
        self._learn_ends(seen)
        prefixes = sorted(
            (x for x in self._learned.prefixes if not _quotes_probe(x.header + x.rest)), key=_get_prefix_order
        )
        ends = {
            key: tuple(sorted((end for end in found if not _quotes_probe(end)), key=lambda end: (-len(end), end)))
            for key, found in self._learned.ends.items()
        }
        inner = frozenset(one for one in self._learned.inner if not _quotes_probe(one[2]))
        return TemplateFrames(tuple(prefixes), inner, ends, self._choose_finishes(), self._headers, self._roles)

    def _render_shape(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> _RenderedShape | None:
        """Render a shape, once; None if the template refuses it or drops a message."""
        key = (self._requires_all_messages, to_json([list(messages), bool(tools)]))
        if key not in self._rendered_shapes:
            self._rendered_shapes[key] = self._render_and_locate(messages, tools)
        return self._rendered_shapes[key]

    def _render_and_locate(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> _RenderedShape | None:
        rendered = self._renderer.render(messages, tools, self._kwargs)
        if not isinstance(rendered, RenderedConversation):
            return None
        proof = self._renderer.prove_ownership(messages, tools, self._kwargs, rendered.text, self._roles)
        if proof is None:
            return None
        located = locate_proven_content(proof, messages, rendered.messages, rendered.text, self._roles)
        wanted = (i for i, m in enumerate(messages) if self._requires_all_messages or m["role"] in self._roles)
        if any(i not in located.own for i in wanted):
            # Template text of a message without own text cannot be separated from its neighbors'.
            return None
        runs = list(_split_content_runs(located.pieces(), len(rendered.text)))
        before = {
            run.message: rendered.text[run.start : run.pieces[0].start]
            for run in runs
            if messages[run.message]["role"] not in self._roles
        }
        if tools and is_tool_missing(tools, rendered.text, []):
            tools = None
        model = [run for run in runs if messages[run.message]["role"] in self._roles]
        bounds = {span.message: span.end for span in rendered.spans}
        return _RenderedShape(
            messages, tools, rendered.text, model, before, bounds, [get_call_ids(m) for m in rendered.messages]
        )

    def _find_common_headers(self, seen: Sequence[_RenderedShape]) -> dict[str, str]:
        """Return by role the longest common suffix of all template text before its own text."""
        gaps: dict[str, dict[str, bool]] = {}
        for one in seen:
            first = min(one.before, default=-1)
            for index, gap in one.before.items():
                held = gaps.setdefault(one.messages[index]["role"], {})
                held[gap] = held.get(gap, False) or index == first == 0
        # Text common to all of them may still be the end of the previous turn, unless one of them begins the render.
        known = {role: found for role, found in gaps.items() if len(found) > 1 or any(found.values())}
        return {role: find_common_end(list(found), self._tokens) for role, found in known.items()}

    # ── prefixes ──

    def _learn_prefixes(self, seen: Sequence[_RenderedShape]) -> None:
        """Learn prefixes: first from turns that begin with the exact generation prompt, then from the others."""
        runs = [(one, run) for one in seen for run in one.runs]
        exact = [(run, prefix) for one, run in runs if (prefix := self._find_exact_prefix(one, run)) is not None]
        if not any(self._get_prompt_after(one, "user") for one in seen[:1]):
            exact = self._move_constant_to_header(exact)
        self._learned.prefixes |= {prefix for _, prefix in exact}
        self._learned.prefixes |= {prefix for one, run in runs if (prefix := self._split_prefix(one, run)) is not None}
        for one, run in runs:
            gap = replace_call_ids(one.text[run.start : run.pieces[0].start], one.ids[run.message])
            known = TemplateFrames(tuple(self._learned.prefixes))
            if known.match_prefix(one.text, run.start, run.pieces[0].start, one.ids[run.message]) is None:
                self._learned.prefixes.add(self._infer_prefix(one, run, gap))

    def _move_constant_to_header(
        self, exact: "list[tuple[_ContentRun, TurnPrefix]]"
    ) -> "list[tuple[_ContentRun, TurnPrefix]]":
        """Move the common prefix of all answers into the header, for templates without generation prompt."""
        rests = [prefix.rest for run, prefix in exact if run.pieces[0].kind == "assistant"]
        constant = rests[0] if rests else ""
        for rest in rests[1:]:
            constant = find_common_start(constant, rest, self._tokens)
        found: list[tuple[_ContentRun, TurnPrefix]] = []
        for run, prefix in exact:
            has = bool(constant) and prefix.rest.startswith(constant)
            moved = TurnPrefix(prefix.header + constant, prefix.rest[len(constant) :]) if has else prefix
            found.append((run, moved))
        return found

    def _find_exact_prefix(self, one: _RenderedShape, run: _ContentRun) -> TurnPrefix | None:
        """Return the prefix of a turn that begins with the exact generation prompt, else None."""
        prompted = self._render_with_prompt(one, run.message)
        first = run.pieces[0].start
        if prompted is None or not (run.start <= len(prompted) <= first and one.text.startswith(prompted)):
            return None
        rest = replace_call_ids(one.text[len(prompted) : first], one.ids[run.message])
        prompt = self._get_prompt(one, run.message)
        follows_model = run.message > 0 and one.messages[run.message - 1]["role"] in self._roles
        if follows_model and self._list_prompts(one, run.message):
            return None
        if contains_prompt(rest, self._list_prompts(one, run.message), self._tokens):
            # The rest contains a prompt that the template prints elsewhere, so the model does not write all of it.
            return None
        if prompt:
            return TurnPrefix(prompt, rest) if prompted.endswith(prompt) else None
        return TurnPrefix(cut_at_last_token(prompted[run.start :], self._tokens), rest)

    def _split_prefix(self, one: _RenderedShape, run: _ContentRun) -> TurnPrefix | None:
        gap = one.text[run.start : run.pieces[0].start]
        prefix = split_turn_prefix(gap, self._list_prompts(one, run.message), self._tokens)
        return (
            None if prefix is None else TurnPrefix(prefix.header, replace_call_ids(prefix.rest, one.ids[run.message]))
        )

    def _infer_prefix(self, one: _RenderedShape, run: _ContentRun, gap: str) -> TurnPrefix:
        """Return the prefix of a turn that contains no part of a prompt.

        Before an answer all of it counts as header. Before a call the header is the part that an answer at the same
        position also has; the remainder is the call's frame.
        """
        if run.pieces[0].kind == "tool_call":
            before = self._render_text(one.messages[: run.message], one.tools) if run.message else ""
            answer: Message = {"role": one.messages[run.message]["role"], "content": "qzanswer instead"}
            answered = self._render_text([*one.messages[: run.message], answer], one.tools)
            added = gap
            if before is not None and one.text.startswith(before) and len(before) >= run.start:
                added = one.text[len(before) : run.pieces[0].start]
            if answered is not None and before is not None and answered.startswith(before):
                shared = find_common_start(added, answered[len(before) :].partition("qzanswer")[0], self._tokens)
                before_others = (
                    self._list_gaps_after(one.messages[run.message - 1]["role"]) if run.message else set[str]()
                )
                # Text printed after that message whatever follows closes it, and is not part of the call's frame.
                closing = max((len(find_common_start(added, gap, self._tokens)) for gap in before_others), default=0)
                rest = replace_call_ids(added[max(len(shared), closing) :], one.ids[run.message])
                if rest.strip():
                    header = gap[: len(gap) - len(rest)]
                    return TurnPrefix(cut_at_last_token(header, self._tokens), rest)
        return TurnPrefix(cut_at_last_token(gap, self._tokens), "")

    def _list_gaps_after(self, role: str) -> set[str]:
        """Return the template text between a message of that role and one of another role than the model's."""
        return {
            gap
            for one in self._rendered_shapes.values()
            if one is not None
            for index, gap in one.before.items()
            if index and one.messages[index - 1]["role"] == role
        }

    def _render_text(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, *, with_prompt: bool = False
    ) -> str | None:
        """Render a conversation, optionally with the generation prompt; None if the template refuses it."""
        if not messages:
            return None
        key = to_json([list(messages), bool(tools), with_prompt])
        if key not in self._texts:
            kwargs = {**self._kwargs, "add_generation_prompt": True} if with_prompt else self._kwargs
            rendered = self._renderer.render(messages, tools, kwargs)
            self._texts[key] = rendered.text if isinstance(rendered, RenderedConversation) else None
        return self._texts[key]

    def _render_with_prompt(self, one: _RenderedShape, index: int) -> str | None:
        return self._render_text(one.messages[:index], one.tools, with_prompt=True)

    def _get_prompt(self, one: _RenderedShape, index: int) -> str:
        """Return the generation prompt before a message; empty after the model's own, where templates print a part."""
        before = one.messages[index - 1]["role"] if index else "user"
        return "" if before in self._roles else self._get_prompt_after(one, before)

    def _get_prompt_after(self, one: _RenderedShape, role: str) -> str:
        return self._renderer.generation_prompt(role, has_tools=bool(one.tools), kwargs=self._kwargs)

    def _list_prompts(self, one: _RenderedShape, index: int) -> list[str]:
        found = [self._get_prompt(one, index), *(self._get_prompt_after(one, role) for role in ("user", "tool"))]
        return list(dict.fromkeys(prompt for prompt in found if prompt))

    # ── between own texts ──

    def _learn_inner(self, one: _RenderedShape, run: _ContentRun) -> None:
        for first, second in zip(run.pieces, run.pieces[1:], strict=False):
            text = normalize_inner_text(
                first.kind, second.kind, one.text[first.end : second.start], one.ids[run.message]
            )
            self._learned.inner.add((first.kind, second.kind, text))

    # ── ends ──

    def _learn_ends(self, seen: Sequence[_RenderedShape]) -> None:
        # Answers first, because other turns mostly end like answers; last turns after the ones that others follow.
        runs = [(one, run) for one in seen for run in one.runs]
        for kind in ("assistant", "reasoning", "tool_call"):
            own = [(one, run) for one, run in runs if run.pieces[-1].kind == kind]
            for is_last in (False, True):
                for one, run in own:
                    if (run.follower < 0) is is_last:
                        self._learn_end(one, run, kind)

    def _learn_end(self, one: _RenderedShape, run: _ContentRun, kind: str) -> None:
        after = one.text[max(piece.end for piece in run.pieces) : run.stop]
        role = one.messages[run.follower]["role"] if run.follower >= 0 else ""
        ending = (
            self._find_end_before(one, run, after, role, kind)
            if role
            else self._find_last_end(after, kind, one.ids[run.message])
        )
        if ending is not None:
            ending = replace_call_ids(ending, one.ids[run.message])
            ending = ending[measure_json_closing(ending, 0) :] if kind == "tool_call" else ending
            if kind == "assistant" and role and not one.messages[run.message].get("tool_calls"):
                self._followed_answer_ends.add(ending)
            found = self._learned.ends.setdefault((kind, role), {})
            found[ending] = found.get(ending, 0) + 1

    def _find_end_before(self, one: _RenderedShape, run: _ContentRun, after: str, role: str, kind: str) -> str:
        """Return the end of a turn before a message of `role`: the text printed both there and at the end of a chat."""
        last = self._get_text_after_last(one, run)
        shared = "" if last is None else find_common_start(after, last, self._tokens).rstrip()
        content_end = max(piece.end for piece in run.pieces)
        in_span = one.text[content_end : one.bounds.get(run.message, content_end)].rstrip()
        if in_span and kind == "assistant" and shared.startswith(in_span):
            # Both may continue with the next message's header; the message's own span does not.
            shared = in_span
        if kind == "assistant":
            if shared:
                return shared
            ending = self._strip_header(after, role).rstrip()
            if role in self._roles and not any(ending.endswith(end) for end in self._list_answer_ends()):
                # The template joins two turns of the model: the text between them belongs to the second.
                return ""
        else:
            ending = self._find_answer_end(shared, after, role)
            if ending is not None:
                return ending
            # A call ends with its closing text; the token that opens the result is part of the result's header.
            own = self._strip_header(after, role) if role in self._headers or role in self._roles else after
            ending = find_common_start(own, last, self._tokens).rstrip() if last is not None else ""
            if not self._next_header_ends:
                return ending
        if ending and kind == "assistant":
            return ending
        if role in self._roles:
            return ending
        token = find_opening_token(after[len(ending) :], self._tokens)
        if kind == "assistant" and role == "user" and token and not (last or "").strip():
            self._next_header_ends = True
        return ending + token

    def _find_answer_end(self, shared: str, after: str, role: str) -> str | None:
        """Return the text after a call through an end that answers have too; None if it has none."""
        ends = self._list_answer_ends()
        if self._next_header_ends:
            return None
        places = [at + len(end) for end in ends if (at := shared.find(end)) >= 0]
        if places:
            return shared[: min(places)]
        own = self._strip_header(after, role) if role in self._headers or role in self._roles else ""
        places = [at + len(end) for end in ends if (at := own.find(end)) >= 0]
        return own[: min(places)] if places else None

    def _strip_header(self, after: str, role: str) -> str:
        """Return template text after a turn without the next message's header."""
        if role in self._roles:
            prefixes = (x for x in sorted(self._learned.prefixes, key=_get_prefix_length, reverse=True) if x.header)
            prefix = next((x for x in prefixes if after.endswith(x.header + x.rest)), None)
            return after if prefix is None else after[: len(after) - _get_prefix_length(prefix)]
        header = self._headers.get(role)
        if header is None:
            return ""
        return after[: len(after) - len(header)] if header and after.endswith(header) else after

    def _list_answer_ends(self) -> list[str]:
        """Return the ends of answers that others follow, and the last token of each, longest first."""
        known = self._followed_answer_ends | {
            cut_at_last_token(end, self._tokens) for end in self._followed_answer_ends
        }
        return sorted((end for end in known if end), key=lambda end: (-len(end), end))

    def _get_eos(self) -> str:
        return self._renderer.contract.eos_token

    def _get_text_after_last(self, one: _RenderedShape, run: _ContentRun) -> str | None:
        """Return the text after the same own text in the conversation that ends with this message."""
        shown = self._render_shape(one.messages[: run.message + 1], one.tools)
        own = [r for r in shown.runs if r.message == run.message] if shown is not None else []
        return shown.text[max(p.end for p in own[-1].pieces) :] if shown is not None and own else None

    def _find_last_end(self, after: str, kind: str, ids: Sequence[str]) -> str | None:
        """Return the end of a conversation's last turn; None if it has none."""
        shown = replace_call_ids(after, ids)
        shown = shown[measure_json_closing(shown, 0) :] if kind == "tool_call" else shown
        common_role = "tool" if kind == "tool_call" else "user"
        others = [
            role for one, role in self._learned.ends if one == kind and role not in {common_role, "", *self._roles}
        ]
        for role in (common_role, *others):
            known = (end for end in self._learned.ends.get((kind, role), ()) if end and shown.startswith(end))
            same = max(known, key=len, default=None)
            if same is not None:
                return same
        if not shown.strip():
            return None
        places = [at + len(end) for end in self._list_answer_ends() if (at := shown.find(end)) >= 0]
        if places:
            return shown[: min(places)]
        tokens = [token for token in (*self._tokens, self._get_eos()) if token and not token.startswith("</")]
        tokens += [self._get_eos()] if self._get_eos() else []
        places = [at + len(token) for token in tokens if (at := shown.find(token)) >= 0]
        if places:
            return shown[: min(places)]
        # Closing text without an end of turn: masking appends the end that earlier turns have.
        return None

    def _choose_finishes(self) -> dict[str, str]:
        """Return by kind of last own text the most frequent end of such turns that others follow."""
        finish: dict[str, str] = {}
        for kind, roles in (("assistant", ("user",)), ("reasoning", ("user",)), ("tool_call", ("tool", "user"))):
            for role in roles:
                found = self._learned.ends.get((kind, role), {})
                ending = max(found, key=lambda end: (found[end], end), default="")
                if ending:
                    finish.setdefault(kind, ending)
        return finish


def _quotes_probe(text: str) -> bool:
    """Return whether template text contains own text of a probe, which the template printed a second time."""
    return "qz" in text


def _get_prefix_order(prefix: TurnPrefix) -> tuple[int, str, str]:
    return -_get_prefix_length(prefix), prefix.header, prefix.rest


def _get_prefix_length(prefix: TurnPrefix) -> int:
    return len(prefix.header) + len(prefix.rest)


def learn_frames(renderer: ChatRenderer, roles: frozenset[str], kwargs: Mapping[str, Any]) -> TemplateFrames:
    """Learn the frames of a renderer's template for the given template values."""
    return FrameLearner(renderer, roles, kwargs).learn()
