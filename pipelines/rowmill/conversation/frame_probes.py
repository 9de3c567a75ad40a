"""Learn a template's frames from renders of probe conversations of every shape.

What belongs here: inner text and ends of turns, and the frames as a whole. What does not: the conversations
(`probe_shapes.py`), their renders (`rendered_probes.py`), prefixes (`prefix_probes.py`), or matching rows with the
frames (`template_frames.py`).

If the template refuses a shape, nothing is learned from it, and the template refuses rows of that shape too. Template
text that no shape shows is not on the closed list, so a row that shows it is rejected, not trained.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rowmill.conversation.prefix_probes import PrefixLearner
from rowmill.conversation.rendered_probes import (
    ContentRun,
    RenderedProbes,
    RenderedShape,
    find_common_headers,
)
from rowmill.conversation.template_frames import (
    TemplateFrames,
    TurnPrefix,
    cut_at_last_token,
    find_common_start,
    find_opening_token,
    measure_json_closing,
    normalize_inner_text,
    replace_call_ids,
)
from rowmill.core.json import to_json

if TYPE_CHECKING:
    from rowmill.conversation.renderer import Renderer

MAX_CACHED_FRAMES = 512
"""Pairs of template and template values whose frames a process keeps."""

_FRAME_CACHE: dict[str, TemplateFrames] = {}
"""Frames by renderer identity, roles and template values, shared by all datasets and maskers of a process."""


class FrameLearner:
    """Learns the frames of one template for one set of template values; ends need the prefixes learned before."""

    def __init__(self, probes: RenderedProbes) -> None:
        self._probes = probes
        self._prefixes: set[TurnPrefix] = set()
        self._closings: dict[str, set[str]] = {}
        """By role other than the model's: the texts that end its messages."""
        self._inner: set[tuple[str, str, str]] = set()
        self._ends: dict[tuple[str, str], dict[str, int]] = {}
        """By kind of last own text and role of the next message: each end, and how often it was seen."""
        self._headers: dict[str, str] = {}
        self._followed_answer_ends: set[str] = set()
        """Ends of answers without calls that another message follows."""
        self._next_header_ends = False
        """Whether the first token of the user's header is all that ends an answer."""

    def learn(self) -> TemplateFrames:
        """Render all shapes and return the template text around the model's own text."""
        seen = self._probes.render_shapes()
        self._headers = find_common_headers(seen, self._probes.tokens)
        self._prefixes = PrefixLearner(self._probes).learn(seen)
        for one in seen:
            for run in one.runs:
                self._learn_inner(one, run)
        self._learn_ends(seen)
        prefixes = sorted((x for x in self._prefixes if not _quotes_probe(x.header + x.rest)), key=_get_prefix_order)
        ends = {
            key: tuple(sorted((end for end in found if not _quotes_probe(end)), key=lambda end: (-len(end), end)))
            for key, found in self._ends.items()
        }
        inner = frozenset(one for one in self._inner if not _quotes_probe(one[2]))
        known = TemplateFrames(tuple(prefixes), ends=ends, bos_token=self._probes.bos)
        headers = {role: known.find_header(header) or header for role, header in self._headers.items()}
        self._learn_closings(seen, headers, known)
        closings = {
            role: tuple(
                sorted((one for one in found if one and not _quotes_probe(one)), key=lambda one: (-len(one), one))
            )
            for role, found in self._closings.items()
        }
        return TemplateFrames(
            tuple(prefixes),
            inner,
            ends,
            self._choose_finishes(),
            headers,
            closings,
            self._probes.roles,
            next_header_ends=self._next_header_ends,
            bos_token=self._probes.bos,
        )

    # ── between own texts ──

    def _learn_inner(self, rendered_shape: RenderedShape, run: ContentRun) -> None:
        for first, second in zip(run.pieces, run.pieces[1:], strict=False):
            text = normalize_inner_text(
                first.kind, second.kind, rendered_shape.text[first.end : second.start], rendered_shape.ids[run.message]
            )
            self._inner.add((first.kind, second.kind, text))

    # ── ends of messages of other roles ──

    def _learn_closings(self, seen: Sequence[RenderedShape], headers: Mapping[str, str], known: TemplateFrames) -> None:
        """Learn what is printed between such a message and the header of the next one."""
        for one in seen:
            for run, following in zip(one.every_run, one.every_run[1:], strict=False):
                role, next_role = (one.messages[i]["role"] for i in (run.message, following.message))
                if role in self._probes.roles:
                    continue
                start = following.pieces[0].start
                gap = one.text[following.start : start]
                header = headers.get(next_role)
                if next_role in self._probes.roles:
                    prefix = known.match_prefix(one.text, following.start, start, one.ids[following.message])
                    header = None if prefix is None else prefix.header + prefix.rest
                if header is not None and gap.endswith(header):
                    closing = gap[: len(gap) - len(header)].rstrip()
                    ends = [at + len(end) for end in self._list_answer_ends() if (at := closing.find(end)) >= 0]
                    self._closings.setdefault(role, set()).add(closing[: min(ends, default=len(closing))])

    # ── ends ──

    def _learn_ends(self, seen: Sequence[RenderedShape]) -> None:
        # Answers first, and those that the user follows, because other turns mostly end like them; last turns after the
        # ones that others follow.
        runs = [(one, run) for one in seen for run in one.runs]
        runs.sort(key=lambda pair: self._get_next_role(*pair) != "user")
        for kind in ("assistant", "reasoning", "tool_call"):
            own = [(one, run) for one, run in runs if run.pieces[-1].kind == kind]
            for is_last in (False, True):
                for one, run in own:
                    if (run.follower < 0) is is_last:
                        self._learn_end(one, run, kind)

    @staticmethod
    def _get_next_role(rendered_shape: RenderedShape, run: ContentRun) -> str:
        return rendered_shape.messages[run.follower]["role"] if run.follower >= 0 else ""

    def _learn_end(self, rendered_shape: RenderedShape, run: ContentRun, kind: str) -> None:
        after = rendered_shape.text[max(piece.end for piece in run.pieces) : run.stop]
        role = self._get_next_role(rendered_shape, run)
        ending = (
            self._find_end_before(rendered_shape, run, after, role, kind)
            if role
            else self._find_last_end(after, kind, rendered_shape.ids[run.message])
        )
        if ending is not None:
            ending = replace_call_ids(ending, rendered_shape.ids[run.message])
            ending = ending[measure_json_closing(ending, 0) :] if kind == "tool_call" else ending
            if kind == "assistant" and role and not rendered_shape.messages[run.message].get("tool_calls"):
                self._followed_answer_ends.add(ending)
            found = self._ends.setdefault((kind, role), {})
            found[ending] = found.get(ending, 0) + 1

    def _find_end_before(self, rendered_shape: RenderedShape, run: ContentRun, after: str, role: str, kind: str) -> str:
        """Return the end of a turn before a message of `role`: the text printed both there and at the end of a chat."""
        last = self._get_text_after_last(rendered_shape, run)
        shared = "" if last is None else find_common_start(after, last, self._probes.tokens).rstrip()
        own = self._strip_header(after, role).rstrip()
        if own and kind == "assistant" and shared.startswith(own):
            # Both continue with the start of a header, which may be that of another role.
            shared = own
        if kind == "assistant":
            if shared:
                known = (end for end in self._ends.get((kind, "user"), ()) if role != "user" and shared.startswith(end))
                return max(known, key=len, default="") or shared
            ending = self._strip_header(after, role).rstrip()
            if role in self._probes.roles and not any(ending.endswith(end) for end in self._list_answer_ends()):
                # The template joins two turns of the model: the text between them belongs to the second.
                return ""
        else:
            ending = self._find_answer_end(shared, after, role)
            if ending is not None:
                return ending
            # A call ends with its closing text; the token that opens the result is part of the result's header.
            own = self._strip_header(after, role) if role in self._headers or role in self._probes.roles else after
            ending = find_common_start(own, last, self._probes.tokens).rstrip() if last is not None else ""
            if not self._next_header_ends:
                return ending
        if ending and kind == "assistant":
            return ending
        if role in self._probes.roles:
            return ending
        token = find_opening_token(after[len(ending) :], self._probes.tokens)
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
        own = self._strip_header(after, role) if role in self._headers or role in self._probes.roles else ""
        places = [at + len(end) for end in ends if (at := own.find(end)) >= 0]
        return own[: min(places)] if places else None

    def _strip_header(self, after: str, role: str) -> str:
        """Return template text after a turn without the next message's header."""
        if role in self._probes.roles:
            prefixes = (x for x in sorted(self._prefixes, key=_get_prefix_length, reverse=True) if x.header)
            prefix = next((x for x in prefixes if after.endswith(x.header + x.rest)), None)
            return after if prefix is None else after[: len(after) - _get_prefix_length(prefix)]
        header = self._headers.get(role)
        if header is None:
            return ""
        return after[: len(after) - len(header)] if header and after.endswith(header) else after

    def _list_answer_ends(self) -> list[str]:
        """Return the ends of answers that others follow, and the last token of each, longest first."""
        known = self._followed_answer_ends | {
            cut_at_last_token(end, self._probes.tokens) for end in self._followed_answer_ends
        }
        return sorted((end for end in known if end), key=lambda end: (-len(end), end))

    def _get_text_after_last(self, rendered_shape: RenderedShape, run: ContentRun) -> str | None:
        """Return the text after the same own text in the conversation that ends with this message."""
        shown = self._probes.render_shape(rendered_shape.messages[: run.message + 1], rendered_shape.tools)
        own = [r for r in shown.runs if r.message == run.message] if shown is not None else []
        return shown.text[max(p.end for p in own[-1].pieces) :] if shown is not None and own else None

    def _find_last_end(self, after: str, kind: str, ids: Sequence[str]) -> str | None:
        """Return the end of a conversation's last turn; None if it has none."""
        shown = replace_call_ids(after, ids)
        shown = shown[measure_json_closing(shown, 0) :] if kind == "tool_call" else shown
        common_role = "tool" if kind == "tool_call" else "user"
        others = [
            role for one, role in self._ends if one == kind and role not in {common_role, "", *self._probes.roles}
        ]
        for role in (common_role, *others):
            known = (end for end in self._ends.get((kind, role), ()) if end and shown.startswith(end))
            same = max(known, key=len, default=None)
            if same is not None:
                return same
        if not shown.strip():
            return None
        places = [at + len(end) for end in self._list_answer_ends() if (at := shown.find(end)) >= 0]
        if places:
            return shown[: min(places)]
        tokens = [token for token in (*self._probes.tokens, self._probes.eos) if token and not token.startswith("</")]
        tokens += [self._probes.eos] if self._probes.eos else []
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
                found = self._ends.get((kind, role), {})
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


def learn_frames(renderer: "Renderer", roles: frozenset[str], kwargs: Mapping[str, Any]) -> TemplateFrames:
    """Learn the frames of a renderer's template for the given template values."""
    return FrameLearner(RenderedProbes(renderer, roles, kwargs)).learn()


def learn_frames_once(renderer: "Renderer", roles: frozenset[str], kwargs: Mapping[str, Any]) -> TemplateFrames:
    """Return the frames of a template for some template values, learned once per process."""
    key = f"{renderer.identity} {sorted(roles)} {to_json(dict(kwargs)) if kwargs else ''}"
    known = _FRAME_CACHE.get(key)
    if known is None:
        if len(_FRAME_CACHE) >= MAX_CACHED_FRAMES:
            _FRAME_CACHE.clear()
        known = _FRAME_CACHE[key] = learn_frames(renderer, roles, kwargs)
    return known
