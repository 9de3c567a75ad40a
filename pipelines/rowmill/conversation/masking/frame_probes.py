"""Learning what a template prints around a model's own text, from conversations of every shape.

What belongs here: reading leads, inner text and ends off renders in which every own text's place is proven. What
does not: the conversations (`probe_shapes.py`), or matching rows with what was learned (`template_frames.py`).

A shape that the template refuses teaches nothing, and a row of that shape is refused by the template as well. What
no shape shows is in no list, so a row that shows it is refused, not trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rowmill.conversation.masking.content_spans import by_message, missing_tool
from rowmill.conversation.masking.owned_spans import owned_pieces
from rowmill.conversation.masking.probe_shapes import shapes
from rowmill.conversation.masking.template_frames import (
    Frames,
    Lead,
    closing_length,
    common_end,
    common_start,
    first_token,
    holds_prompt,
    ids_of,
    inner_form,
    last_token,
    split_lead,
    without_ids,
)
from rowmill.conversation.template_contract import Printed, Printer
from rowmill.core.json import Json, to_json
from rowmill.schema.rows import Message, Piece

# ── what one render shows ──


@dataclass(frozen=True, slots=True)
class _Run:
    """Own text of one message of the model that no other message interrupts."""

    message: int
    pieces: list[Piece]
    start: int
    """Where the own text before it ends; 0 at the head of the render."""
    stop: int
    """Where the own text after it begins; the render's end behind the last one."""
    follower: int
    """The message of the own text after it; −1 behind the last one."""


@dataclass(slots=True)
class _Learned:
    leads: set[Lead] = field(default_factory=set[Lead])
    inner: set[tuple[str, str, str]] = field(default_factory=set[tuple[str, str, str]])
    ends: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict[tuple[str, str], "dict[str, int]"])


@dataclass(frozen=True, slots=True)
class _Seen:
    """One shape as printed."""

    messages: Sequence[Message]
    tools: Sequence[Json] | None
    text: str
    runs: list[_Run]
    before: dict[int, str]
    """Per message that the model did not write: the template text before its own text."""
    bounds: dict[int, int]
    """Per message that marks showed: where its last span ends."""
    ids: list[tuple[str, ...]]
    """Per message the identifiers of its calls, as printed."""


def _runs_of(pieces: Sequence[Piece], length: int) -> Iterator[_Run]:
    """Yield pieces of a render grouped by message, with the bounds of the template text around each group."""
    groups = by_message(pieces)
    ends = [0, *(max(p.end for p in group) for group in groups)]
    starts = [*(group[0].start for group in groups), length]
    for i, group in enumerate(groups):
        follower = groups[i + 1][0].message if i + 1 < len(groups) else -1
        yield _Run(group[0].message, group, ends[i], starts[i + 1], follower)


class FrameLearner:
    """Learns the frames of one template for one set of template values."""

    def __init__(self, printer: Printer, roles: frozenset[str], kwargs: Mapping[str, Json]) -> None:
        self._printer = printer
        self._roles = roles
        self._kwargs = kwargs
        self._tokens = tuple(printer.contract.control_tokens)
        self._known = _Learned()
        self._headers: dict[str, str] = {}
        self._ended_answers: set[str] = set()
        """What ends answers, text beside a call left out, that another message follows."""
        self._prints_all = True
        """Whether only shapes count of which every message is printed; a template may leave out all of one role's."""
        self._shown: dict[tuple[bool, str], _Seen | None] = {}
        self._texts: dict[str, str | None] = {}
        self._next_header_ends = False
        """Whether nothing but the first token of the user's header ends an answer."""

    def learn(self) -> Frames:
        """Print all shapes and return what stands around own texts of the model."""
        role = "assistant" if "assistant" in self._roles else min(self._roles)
        seen = [one for shape in shapes(role) if (one := self._see(*shape)) is not None]
        if not any(one.runs for one in seen):
            self._prints_all = False
            seen = [one for shape in shapes(role) if (one := self._see(*shape)) is not None]
        self._headers = self._common_headers(seen)
        self._leads(seen)
        for one in seen:
            for run in one.runs:
                self._inner(one, run)
        self._ends(seen)
        leads = sorted((x for x in self._known.leads if not _quotes_probe(x.header + x.rest)), key=_lead_order)
        ends = {
            key: tuple(sorted((end for end in found if not _quotes_probe(end)), key=lambda end: (-len(end), end)))
            for key, found in self._known.ends.items()
        }
        inner = frozenset(one for one in self._known.inner if not _quotes_probe(one[2]))
        return Frames(tuple(leads), inner, ends, self._finishes(), self._headers, self._roles)

    def _see(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> _Seen | None:
        """Print a shape, once; None if the template refuses it or does not print all of it."""
        key = (self._prints_all, to_json([list(messages), bool(tools)]))
        if key not in self._shown:
            self._shown[key] = self._print(messages, tools)
        return self._shown[key]

    def _print(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> _Seen | None:
        printed = self._printer.render(messages, tools, self._kwargs)
        if not isinstance(printed, Printed):
            return None
        proof = self._printer.ownership(messages, tools, self._kwargs, printed.text, self._roles)
        if proof is None:
            return None
        located = owned_pieces(proof, messages, printed.messages, printed.text, self._roles)
        wanted = (i for i, m in enumerate(messages) if self._prints_all or m["role"] in self._roles)
        if any(i not in located.own for i in wanted):
            # Template text of a message without own text cannot be told from its neighbours'.
            return None
        runs = list(_runs_of(located.pieces(), len(printed.text)))
        before = {
            run.message: printed.text[run.start : run.pieces[0].start]
            for run in runs
            if messages[run.message]["role"] not in self._roles
        }
        if tools and missing_tool(tools, printed.text, []):
            tools = None
        model = [run for run in runs if messages[run.message]["role"] in self._roles]
        bounds = {span.message: span.end for span in printed.spans}
        return _Seen(messages, tools, printed.text, model, before, bounds, [ids_of(m) for m in printed.messages])

    def _common_headers(self, seen: Sequence[_Seen]) -> dict[str, str]:
        """Return per role the whole units that stand before its own text wherever it stands."""
        gaps: dict[str, dict[str, bool]] = {}
        for one in seen:
            first = min(one.before, default=-1)
            for index, gap in one.before.items():
                held = gaps.setdefault(one.messages[index]["role"], {})
                held[gap] = held.get(gap, False) or index == first == 0
        # Text that stands before all of them may still end the turn before, unless it stands at the head as well.
        known = {role: found for role, found in gaps.items() if len(found) > 1 or any(found.values())}
        return {role: common_end(list(found), self._tokens) for role, found in known.items()}

    # ── leads ──

    def _leads(self, seen: Sequence[_Seen]) -> None:
        """Read leads: first where a prompt shows exactly what the model writes, then in the other turns."""
        runs = [(one, run) for one in seen for run in one.runs]
        exact = [(run, lead) for one, run in runs if (lead := self._exact_lead(one, run)) is not None]
        if not any(self._prompt_after(one, "user") for one in seen[:1]):
            exact = self._without_constant(exact)
        self._known.leads |= {lead for _, lead in exact}
        self._known.leads |= {lead for one, run in runs if (lead := self._split_lead(one, run)) is not None}
        for one, run in runs:
            gap = without_ids(one.text[run.start : run.pieces[0].start], one.ids[run.message])
            known = Frames(tuple(self._known.leads))
            if known.lead_before(one.text, run.start, run.pieces[0].start, one.ids[run.message]) is None:
                self._known.leads.add(self._lead_without_prompt(one, run, gap))

    def _without_constant(self, exact: "list[tuple[_Run, Lead]]") -> "list[tuple[_Run, Lead]]":
        """Count what every answer begins with to the header, where the template prints no prompt of its own."""
        rests = [lead.rest for run, lead in exact if run.pieces[0].kind == "assistant"]
        constant = rests[0] if rests else ""
        for rest in rests[1:]:
            constant = common_start(constant, rest, self._tokens)
        found: list[tuple[_Run, Lead]] = []
        for run, lead in exact:
            has = bool(constant) and lead.rest.startswith(constant)
            moved = Lead(lead.header + constant, lead.rest[len(constant) :]) if has else lead
            found.append((run, moved))
        return found

    def _exact_lead(self, one: _Seen, run: _Run) -> Lead | None:
        """Return the lead of a turn before which the template prints its prompt exactly so; None otherwise."""
        asked = self._asked(one, run.message)
        first = run.pieces[0].start
        if asked is None or not (run.start <= len(asked) <= first and one.text.startswith(asked)):
            return None
        rest = without_ids(one.text[len(asked) : first], one.ids[run.message])
        prompt = self._prompt(one, run.message)
        follows_model = run.message > 0 and one.messages[run.message - 1]["role"] in self._roles
        if follows_model and self._prompts(one, run.message):
            return None
        if holds_prompt(rest, self._prompts(one, run.message), self._tokens):
            # What the template prints as a prompt elsewhere is part of it: not all of it is the model's.
            return None
        if prompt:
            return Lead(prompt, rest) if asked.endswith(prompt) else None
        return Lead(last_token(asked[run.start :], self._tokens), rest)

    def _split_lead(self, one: _Seen, run: _Run) -> Lead | None:
        gap = one.text[run.start : run.pieces[0].start]
        lead = split_lead(gap, self._prompts(one, run.message), self._tokens)
        return None if lead is None else Lead(lead.header, without_ids(lead.rest, one.ids[run.message]))

    def _lead_without_prompt(self, one: _Seen, run: _Run, gap: str) -> Lead:
        """Return the lead of a turn in which no part of a prompt is printed.

        Before an answer all of it is taken for the header. Before a call the header is what an answer in the same
        place has as well; what only the call has is its frame.
        """
        if run.pieces[0].kind == "tool_call":
            before = self._text(one.messages[: run.message], one.tools) if run.message else ""
            answer: Message = {"role": one.messages[run.message]["role"], "content": "qzanswer instead"}
            answered = self._text([*one.messages[: run.message], answer], one.tools)
            added = gap
            if before is not None and one.text.startswith(before) and len(before) >= run.start:
                added = one.text[len(before) : run.pieces[0].start]
            if answered is not None and before is not None and answered.startswith(before):
                shared = common_start(added, answered[len(before) :].partition("qzanswer")[0], self._tokens)
                before_others = self._gaps_behind(one.messages[run.message - 1]["role"]) if run.message else set[str]()
                # What is printed behind that message whatever follows closes it, and is not the call's.
                closing = max((len(common_start(added, gap, self._tokens)) for gap in before_others), default=0)
                rest = without_ids(added[max(len(shared), closing) :], one.ids[run.message])
                if rest.strip():
                    header = gap[: len(gap) - len(rest)]
                    return Lead(last_token(header, self._tokens), rest)
        return Lead(last_token(gap, self._tokens), "")

    def _gaps_behind(self, role: str) -> set[str]:
        """Return the template text behind messages of a role that the model does not answer."""
        return {
            gap
            for one in self._shown.values()
            if one is not None
            for index, gap in one.before.items()
            if index and one.messages[index - 1]["role"] == role
        }

    def _text(self, messages: Sequence[Message], tools: Sequence[Json] | None, *, asking: bool = False) -> str | None:
        """Print a conversation, with the generation prompt if it is asked for; None if the template refuses it."""
        if not messages:
            return None
        key = to_json([list(messages), bool(tools), asking])
        if key not in self._texts:
            kwargs = {**self._kwargs, "add_generation_prompt": True} if asking else self._kwargs
            printed = self._printer.render(messages, tools, kwargs)
            self._texts[key] = printed.text if isinstance(printed, Printed) else None
        return self._texts[key]

    def _asked(self, one: _Seen, index: int) -> str | None:
        return self._text(one.messages[:index], one.tools, asking=True)

    def _prompt(self, one: _Seen, index: int) -> str:
        """Return the generation prompt before a message; none after the model's own, where templates print a part."""
        before = one.messages[index - 1]["role"] if index else "user"
        return "" if before in self._roles else self._prompt_after(one, before)

    def _prompt_after(self, one: _Seen, role: str) -> str:
        return self._printer.generation_prompt(role, has_tools=bool(one.tools), kwargs=self._kwargs)

    def _prompts(self, one: _Seen, index: int) -> list[str]:
        found = [self._prompt(one, index), *(self._prompt_after(one, role) for role in ("user", "tool"))]
        return list(dict.fromkeys(prompt for prompt in found if prompt))

    # ── between own texts ──

    def _inner(self, one: _Seen, run: _Run) -> None:
        for first, second in zip(run.pieces, run.pieces[1:], strict=False):
            text = inner_form(first.kind, second.kind, one.text[first.end : second.start], one.ids[run.message])
            self._known.inner.add((first.kind, second.kind, text))

    # ── ends ──

    def _ends(self, seen: Sequence[_Seen]) -> None:
        # Answers first: what ends them tells how this template ends turns at all. Last turns are read when it is
        # known what ends a turn that others follow.
        runs = [(one, run) for one in seen for run in one.runs]
        for kind in ("assistant", "reasoning", "tool_call"):
            own = [(one, run) for one, run in runs if run.pieces[-1].kind == kind]
            for is_last in (False, True):
                for one, run in own:
                    if (run.follower < 0) is is_last:
                        self._end(one, run, kind)

    def _end(self, one: _Seen, run: _Run, kind: str) -> None:
        after = one.text[max(piece.end for piece in run.pieces) : run.stop]
        role = one.messages[run.follower]["role"] if run.follower >= 0 else ""
        ending = (
            self._end_before(one, run, after, role, kind) if role else self._last_end(after, kind, one.ids[run.message])
        )
        if ending is not None:
            ending = without_ids(ending, one.ids[run.message])
            ending = ending[closing_length(ending, 0) :] if kind == "tool_call" else ending
            if kind == "assistant" and role and not one.messages[run.message].get("tool_calls"):
                self._ended_answers.add(ending)
            found = self._known.ends.setdefault((kind, role), {})
            found[ending] = found.get(ending, 0) + 1

    def _end_before(self, one: _Seen, run: _Run, after: str, role: str, kind: str) -> str:
        """Return what ends a turn before a message of `role`: what is printed there and at the end of the talk."""
        last = self._after_last(one, run)
        shared = "" if last is None else common_start(after, last, self._tokens).rstrip()
        own_end = max(piece.end for piece in run.pieces)
        in_span = one.text[own_end : one.bounds.get(run.message, own_end)].rstrip()
        if in_span and kind == "assistant" and shared.startswith(in_span):
            # Both may go on with the header of what follows; the message's own span does not.
            shared = in_span
        if kind == "assistant":
            if shared:
                return shared
            ending = self._before_header(after, role).rstrip()
            if role in self._roles and not any(ending.endswith(end) for end in self._answer_ends()):
                # Two turns of the model that the template runs together: what stands between is the second one's.
                return ""
        else:
            ending = self._end_of_answers_in(shared, after, role)
            if ending is not None:
                return ending
            # A call is ended by what closes it; the token that opens a result is the result's.
            own = self._before_header(after, role) if role in self._headers or role in self._roles else after
            ending = common_start(own, last, self._tokens).rstrip() if last is not None else ""
            if not self._next_header_ends:
                return ending
        if ending and kind == "assistant":
            return ending
        if role in self._roles:
            return ending
        token = first_token(after[len(ending) :], self._tokens)
        if kind == "assistant" and role == "user" and token and not (last or "").strip():
            self._next_header_ends = True
        return ending + token

    def _end_of_answers_in(self, shared: str, after: str, role: str) -> str | None:
        """Return text after a call through what ends answers as well; None if that is not there."""
        ends = self._answer_ends()
        if self._next_header_ends:
            return None
        places = [at + len(end) for end in ends if (at := shared.find(end)) >= 0]
        if places:
            return shared[: min(places)]
        own = self._before_header(after, role) if role in self._headers or role in self._roles else ""
        places = [at + len(end) for end in ends if (at := own.find(end)) >= 0]
        return own[: min(places)] if places else None

    def _before_header(self, after: str, role: str) -> str:
        """Return template text after a turn without the header of the message that follows."""
        if role in self._roles:
            leads = (x for x in sorted(self._known.leads, key=_length, reverse=True) if x.header)
            lead = next((x for x in leads if after.endswith(x.header + x.rest)), None)
            return after if lead is None else after[: len(after) - _length(lead)]
        header = self._headers.get(role)
        if header is None:
            return ""
        return after[: len(after) - len(header)] if header and after.endswith(header) else after

    def _answer_ends(self) -> list[str]:
        """Return what ends answers that others follow, and the last token of each, longest first."""
        known = self._ended_answers | {last_token(end, self._tokens) for end in self._ended_answers}
        return sorted((end for end in known if end), key=lambda end: (-len(end), end))

    def _eos(self) -> str:
        return self._printer.contract.eos_token

    def _after_last(self, one: _Seen, run: _Run) -> str | None:
        """Return what is printed after the same own text where the conversation ends there."""
        shown = self._see(one.messages[: run.message + 1], one.tools)
        own = [r for r in shown.runs if r.message == run.message] if shown is not None else []
        return shown.text[max(p.end for p in own[-1].pieces) :] if shown is not None and own else None

    def _last_end(self, after: str, kind: str, ids: Sequence[str]) -> str | None:
        """Return what ends a conversation's last turn; None if nothing does."""
        shown = without_ids(after, ids)
        shown = shown[closing_length(shown, 0) :] if kind == "tool_call" else shown
        usual = "tool" if kind == "tool_call" else "user"
        others = [role for one, role in self._known.ends if one == kind and role not in {usual, "", *self._roles}]
        for role in (usual, *others):
            known = (end for end in self._known.ends.get((kind, role), ()) if end and shown.startswith(end))
            same = max(known, key=len, default=None)
            if same is not None:
                return same
        if not shown.strip():
            return None
        places = [at + len(end) for end in self._answer_ends() if (at := shown.find(end)) >= 0]
        if places:
            return shown[: min(places)]
        tokens = [token for token in (*self._tokens, self._eos()) if token and not token.startswith("</")]
        tokens += [self._eos()] if self._eos() else []
        places = [at + len(token) for token in tokens if (at := shown.find(token)) >= 0]
        if places:
            return shown[: min(places)]
        # Closing text without an end: what earlier turns show is appended to it.
        return None

    def _finishes(self) -> dict[str, str]:
        """Return per kind of last own text what ends such a turn where something follows."""
        finish: dict[str, str] = {}
        for kind, roles in (("assistant", ("user",)), ("reasoning", ("user",)), ("tool_call", ("tool", "user"))):
            for role in roles:
                found = self._known.ends.get((kind, role), {})
                ending = max(found, key=lambda end: (found[end], end), default="")
                if ending:
                    finish.setdefault(kind, ending)
        return finish


def _quotes_probe(text: str) -> bool:
    """Tell whether template text holds a probe's own text, which a template printed a second time."""
    return "qz" in text


def _lead_order(lead: Lead) -> tuple[int, str, str]:
    return -_length(lead), lead.header, lead.rest


def _length(lead: Lead) -> int:
    return len(lead.header) + len(lead.rest)


def learn_frames(printer: Printer, roles: frozenset[str], kwargs: Mapping[str, Any]) -> Frames:
    """Learn the frames of a printer's template, with a row's own template values."""
    return FrameLearner(printer, roles, kwargs).learn()
