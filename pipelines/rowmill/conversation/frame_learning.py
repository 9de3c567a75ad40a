"""Learn a template's frames from renders of probe conversations of every shape.

Every probe is rendered and proven as a row is, so the template text around each own text is known. From it are learned,
in this order: the headers of other roles, the prefixes of turns, the text inside turns, and the ends. If the template
refuses a shape, nothing is learned from it, and the template refuses rows of that shape too. Template text that no
shape shows is not on the closed list, so a row that shows it is rejected, not trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rowmill.conversation.character_ownership import group_by_message, is_tool_missing, locate_own_text
from rowmill.conversation.probe_conversations import make_learning_probes
from rowmill.conversation.template_frames import (
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
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json, to_json
from rowmill.schema.rows import ContentSpan, Message, Rejected

if TYPE_CHECKING:
    from rowmill.conversation.renderer import Renderer

MAX_CACHED_FRAMES = 512
"""Pairs of template and template values whose frames a process keeps."""

_FRAME_CACHE: dict[str, TemplateFrames] = {}
"""Frames by renderer identity, roles and template values, shared by all datasets and maskers of a process."""


# ── renders of the probes ──


@frozen_dataclass
class ContentRun:
    """Consecutive own text of one message."""

    message: int
    pieces: list[ContentSpan]
    start: int
    """End of the previous run; 0 for the first one."""
    stop: int
    """Start of the next run; the length of the render for the last one."""
    follower: int
    """The message of the next run; −1 for the last one."""


@frozen_dataclass
class RenderedShape:
    """One rendered probe conversation."""

    messages: Sequence[Message]
    tools: Sequence[Json] | None
    text: str
    every_run: list[ContentRun]
    runs: list[ContentRun]
    """The runs of the model's messages."""
    before: dict[int, str]
    """By message of another role: the template text before its own text."""
    ids: list[tuple[str, ...]]
    """By message: the ids of its calls, as rendered."""


def _split_content_runs(pieces: Sequence[ContentSpan], length: int) -> Iterator[ContentRun]:
    """Yield runs of consecutive pieces of the same message, with the bounds of the template text around each."""
    groups = group_by_message(pieces)
    ends = [0, *(max(p.end for p in group) for group in groups)]
    starts = [*(group[0].start for group in groups), length]
    for i, group in enumerate(groups):
        follower = groups[i + 1][0].message if i + 1 < len(groups) else -1
        yield ContentRun(group[0].message, group, ends[i], starts[i + 1], follower)


class RenderedProbes:
    """Renders the probes of one template with one set of template values, each once."""

    def __init__(self, renderer: "Renderer", roles: frozenset[str], kwargs: Mapping[str, Json]) -> None:
        self.roles = roles
        self.tokens = renderer.control_tokens
        self.eos, self.bos = renderer.eos_token, renderer.bos_token
        self._renderer = renderer
        self._kwargs = kwargs
        self._requires_all_messages = True
        """Whether to skip shapes of which the template drops a message; off if it drops every message of some role."""
        self._rendered_shapes: dict[tuple[bool, str], RenderedShape | None] = {}
        self._texts: dict[str, str | None] = {}

    def render_shapes(self) -> list[RenderedShape]:
        """Render all shapes that the template accepts."""
        role = "assistant" if "assistant" in self.roles else min(self.roles)
        seen = [one for shape in make_learning_probes(role) if (one := self.render_shape(*shape)) is not None]
        if not any(one.runs for one in seen):
            self._requires_all_messages = False
            seen = [one for shape in make_learning_probes(role) if (one := self.render_shape(*shape)) is not None]
        return seen

    def render_shape(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> RenderedShape | None:
        """Render a shape, once; None if the template refuses it or drops a message."""
        key = (self._requires_all_messages, to_json([list(messages), bool(tools)]))
        if key not in self._rendered_shapes:
            self._rendered_shapes[key] = self._render_and_locate(messages, tools)
        return self._rendered_shapes[key]

    def _render_and_locate(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> RenderedShape | None:
        rendered = self._renderer.render(messages, tools, self._kwargs)
        if isinstance(rendered, Rejected):
            return None
        located = locate_own_text(self._renderer, rendered, messages, self.roles)
        if located is None:
            return None
        wanted = (i for i, m in enumerate(messages) if self._requires_all_messages or m["role"] in self.roles)
        if any(i not in located.own for i in wanted):
            # Template text of a message without own text cannot be separated from its neighbors'.
            return None
        runs = list(_split_content_runs(located.pieces(), len(rendered.text)))
        before = {
            run.message: rendered.text[run.start : run.pieces[0].start]
            for run in runs
            if messages[run.message]["role"] not in self.roles
        }
        if tools and is_tool_missing(tools, rendered.text, []):
            tools = None
        model = [run for run in runs if messages[run.message]["role"] in self.roles]
        ids = [get_call_ids(message) for message in rendered.messages]
        return RenderedShape(messages, tools, rendered.text, runs, model, before, ids)

    def list_gaps_after(self, role: str) -> set[str]:
        """Return the template text between a message of that role and one of another role than the model's."""
        return {
            gap
            for one in self._rendered_shapes.values()
            if one is not None
            for index, gap in one.before.items()
            if index and one.messages[index - 1]["role"] == role
        }

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, *, with_prompt: bool = False
    ) -> str | None:
        """Render a conversation, optionally with the generation prompt; None if the template refuses it."""
        if not messages:
            return None
        key = to_json([list(messages), bool(tools), with_prompt])
        if key not in self._texts:
            kwargs = {**self._kwargs, "add_generation_prompt": True} if with_prompt else self._kwargs
            rendered = self._renderer.render(messages, tools, kwargs)
            self._texts[key] = None if isinstance(rendered, Rejected) else rendered.text
        return self._texts[key]

    def render_with_prompt(self, rendered_shape: RenderedShape, index: int) -> str | None:
        """Render the messages before one, with the generation prompt."""
        return self.render_text(rendered_shape.messages[:index], rendered_shape.tools, with_prompt=True)

    def get_prompt(self, rendered_shape: RenderedShape, index: int) -> str:
        """Return the generation prompt before a message; empty after the model's own, where templates print a part."""
        before = rendered_shape.messages[index - 1]["role"] if index else "user"
        return "" if before in self.roles else self.get_prompt_after(rendered_shape, before)

    def get_prompt_after(self, rendered_shape: RenderedShape, role: str) -> str:
        """Return the generation prompt after a message of a role."""
        return self._renderer.generation_prompt(role, has_tools=bool(rendered_shape.tools), kwargs=self._kwargs)

    def list_prompts(self, rendered_shape: RenderedShape, index: int) -> list[str]:
        """Return the generation prompts that the template may print before a message."""
        found = [
            self.get_prompt(rendered_shape, index),
            *(self.get_prompt_after(rendered_shape, role) for role in ("user", "tool")),
        ]
        return list(dict.fromkeys(prompt for prompt in found if prompt))


def find_common_headers(seen: Sequence[RenderedShape], tokens: tuple[str, ...]) -> dict[str, str]:
    """Return by role the longest common suffix of all template text before its own text."""
    gaps: dict[str, dict[str, bool]] = {}
    for one in seen:
        first = min(one.before, default=-1)
        for index, gap in one.before.items():
            held = gaps.setdefault(one.messages[index]["role"], {})
            held[gap] = held.get(gap, False) or index == first == 0
    # Text common to all of them may still be the end of the previous turn, unless one of them begins the render.
    known = {role: found for role, found in gaps.items() if len(found) > 1 or any(found.values())}
    return {role: find_common_end(list(found), tokens) for role, found in known.items()}


# ── the text before a turn ──


class PrefixLearner:
    """Learns the prefixes of one template's turns."""

    def __init__(self, probes: RenderedProbes) -> None:
        self._probes = probes
        self._prefixes: set[TurnPrefix] = set()
        self._gaps_after_users: set[str] = set()

    def learn(self, seen: Sequence[RenderedShape]) -> set[TurnPrefix]:
        """Learn prefixes: first from turns that begin with the exact generation prompt, then from the others."""
        runs = [(one, run) for one in seen for run in one.runs]
        self._gaps_after_users = {
            one.text[run.start : run.pieces[0].start]
            for one, run in runs
            if run.message and one.messages[run.message - 1]["role"] == "user"
        }
        exact = [(run, prefix) for one, run in runs if (prefix := self._find_exact_prefix(one, run)) is not None]
        if not any(self._probes.get_prompt_after(one, "user") for one in seen[:1]):
            exact = self._move_constant_to_header(exact)
        self._prefixes |= {prefix for _, prefix in exact}
        self._prefixes |= {prefix for one, run in runs if (prefix := self._split_prefix(one, run)) is not None}
        for one, run in runs:
            gap = replace_call_ids(one.text[run.start : run.pieces[0].start], one.ids[run.message])
            known = TemplateFrames(tuple(self._prefixes))
            if known.match_prefix(one.text, run.start, run.pieces[0].start, one.ids[run.message]) is None:
                self._prefixes.add(self._infer_prefix(one, run, gap))
        return self._prefixes

    def _move_constant_to_header(
        self, exact: "list[tuple[ContentRun, TurnPrefix]]"
    ) -> "list[tuple[ContentRun, TurnPrefix]]":
        """Move the common prefix of all answers into the header, for templates without generation prompt."""
        rests = [prefix.rest for run, prefix in exact if run.pieces[0].kind == "assistant"]
        constant = rests[0] if rests else ""
        for rest in rests[1:]:
            constant = find_common_start(constant, rest, self._probes.tokens)
        found: list[tuple[ContentRun, TurnPrefix]] = []
        for run, prefix in exact:
            has = bool(constant) and prefix.rest.startswith(constant)
            moved = TurnPrefix(prefix.header + constant, prefix.rest[len(constant) :]) if has else prefix
            found.append((run, moved))
        return found

    def _find_exact_prefix(self, rendered_shape: RenderedShape, run: ContentRun) -> TurnPrefix | None:
        """Return the prefix of a turn that begins with the exact generation prompt, else None."""
        prompted = self._probes.render_with_prompt(rendered_shape, run.message)
        first = run.pieces[0].start
        if prompted is None or not (run.start <= len(prompted) <= first and rendered_shape.text.startswith(prompted)):
            return None
        rest = replace_call_ids(rendered_shape.text[len(prompted) : first], rendered_shape.ids[run.message])
        prompt = self._probes.get_prompt(rendered_shape, run.message)
        follows_model = run.message > 0 and rendered_shape.messages[run.message - 1]["role"] in self._probes.roles
        if follows_model and self._probes.list_prompts(rendered_shape, run.message):
            return None
        header = prompt or cut_at_last_token(prompted[run.start :], self._probes.tokens)
        if contains_prompt(rest, self._probes.list_prompts(rendered_shape, run.message), self._probes.tokens) and (
            prompt or any(gap.endswith(header + rest) for gap in self._gaps_after_users)
        ):
            # The rest contains a prompt that the template prints elsewhere, so the model does not write all of it.
            return None
        return TurnPrefix(header, rest) if prompted.endswith(header) else None

    def _split_prefix(self, rendered_shape: RenderedShape, run: ContentRun) -> TurnPrefix | None:
        gap = rendered_shape.text[run.start : run.pieces[0].start]
        prefix = split_turn_prefix(gap, self._probes.list_prompts(rendered_shape, run.message), self._probes.tokens)
        return (
            None
            if prefix is None
            else TurnPrefix(prefix.header, replace_call_ids(prefix.rest, rendered_shape.ids[run.message]))
        )

    def _infer_prefix(self, rendered_shape: RenderedShape, run: ContentRun, gap: str) -> TurnPrefix:
        """Return the prefix of a turn that contains no part of a prompt.

        Before an answer all of it counts as header. Before a call the header is the part that an answer at the same
        position also has; the remainder is the call's frame.
        """
        if run.pieces[0].kind == "tool_call":
            before = (
                self._probes.render_text(rendered_shape.messages[: run.message], rendered_shape.tools)
                if run.message
                else ""
            )
            answer: Message = {"role": rendered_shape.messages[run.message]["role"], "content": "qzanswer instead"}
            answered = self._probes.render_text([*rendered_shape.messages[: run.message], answer], rendered_shape.tools)
            added = gap
            if before is not None and rendered_shape.text.startswith(before) and len(before) >= run.start:
                added = rendered_shape.text[len(before) : run.pieces[0].start]
            if answered is not None and before is not None and answered.startswith(before):
                shared = find_common_start(added, answered[len(before) :].partition("qzanswer")[0], self._probes.tokens)
                before_others = (
                    self._probes.list_gaps_after(rendered_shape.messages[run.message - 1]["role"])
                    if run.message
                    else set[str]()
                )
                # Text printed after that message whatever follows closes it, and is not part of the call's frame.
                closing = max(
                    (len(find_common_start(added, gap, self._probes.tokens)) for gap in before_others), default=0
                )
                rest = replace_call_ids(added[max(len(shared), closing) :], rendered_shape.ids[run.message])
                if rest.strip():
                    header = gap[: len(gap) - len(rest)]
                    return TurnPrefix(cut_at_last_token(header, self._probes.tokens), rest)
        return TurnPrefix(cut_at_last_token(gap, self._probes.tokens), "")


# ── the frames ──


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
