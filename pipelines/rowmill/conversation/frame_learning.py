"""Learn a template's frames from renders of probe conversations of every shape.

Every probe is rendered and proven as a row is, so the template text around each own text is known. From it are learned,
in this order: the headers of other roles, the prefixes of turns, the text inside turns, and the ends. If the template
refuses a shape, nothing is learned from it, and the template refuses rows of that shape too. Template text that no
shape shows is not on the closed list, so a row that shows it is rejected, not trained.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from rowmill.conversation.character_ownership import group_by_message, is_tool_missing, locate_own_text
from rowmill.conversation.probe_conversations import make_learning_probes
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_frames import (
    TemplateFrames,
    TurnPrefix,
    contains_prompt,
    cut_at_last_token,
    find_common_end,
    find_common_start,
    find_ending,
    find_first_control_token,
    find_opening_token,
    get_call_ids,
    is_token,
    list_end_tokens,
    measure_json_closing,
    normalize_inner_text,
    remove_ending,
    replace_call_ids,
    split_into_units,
    split_turn_prefix,
)
from rowmill.core.json import Json, to_json
from rowmill.schema.rows import ContentSpan, Message, Rejected

MAX_CACHED_FRAMES = 512
"""Pairs of template and template values whose frames a process keeps."""

_FRAME_CACHE: dict[str, TemplateFrames] = {}
"""Frames by renderer identity, roles and template values, shared by all datasets and maskers of a process."""

_END_NAME = re.compile(r"end|eo[tm]", re.IGNORECASE)
"""Names of control tokens that end a turn."""


@dataclass(frozen=True, slots=True)
class ProbeTurn:
    """Consecutive own text of one message in one rendered probe, and the template text around it."""

    messages: Sequence[Message]
    tools: Sequence[Json] | None
    text: str
    """The render of the whole probe."""
    message: int
    pieces: list[ContentSpan]
    before: int
    """Where the template text before it begins: the end of the previous turn's own text."""
    after: int
    """Where the template text after it ends: the start of the next turn's own text, or the end of the render."""
    follower: int
    """The message of the next turn; −1 for the last one."""
    ids: tuple[str, ...]
    """The ids of its calls, as rendered."""

    @property
    def role(self) -> str:
        return self.messages[self.message]["role"]

    @property
    def previous_role(self) -> str:
        """The role of the message before; empty for the first."""
        return self.messages[self.message - 1]["role"] if self.message else ""

    @property
    def next_role(self) -> str:
        """The role of the next turn; empty for the last."""
        return self.messages[self.follower]["role"] if self.follower >= 0 else ""

    @property
    def last_kind(self) -> str:
        """The kind of its last own text."""
        return self.pieces[-1].kind

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def end(self) -> int:
        return max(piece.end for piece in self.pieces)

    @property
    def gap(self) -> str:
        """The template text before it."""
        return self.text[self.before : self.start]

    @property
    def ending(self) -> str:
        """The template text after it."""
        return self.text[self.end : self.after]


@dataclass(frozen=True, slots=True)
class MessageStarts:
    """Template text before messages, which the ends of the turns before them are told from."""

    prefixes: frozenset[TurnPrefix]
    """Before the model's turns."""
    headers: Mapping[str, str]
    """By other role the text with which its messages always begin."""
    first_gaps: Mapping[str, Sequence[str]]
    """By other role all template text before messages that begin a render."""


@dataclass(slots=True)
class LearnedEnds:
    """Ends of turns, added a group of turns at a time: what earlier groups show serves the next ones."""

    control_tokens: tuple[str, ...]
    counts: dict[tuple[str, str], Counter[str]] = field(default_factory=dict[tuple[str, str], Counter[str]])
    """By kind of last own text and role of the next message: each end, and how often it was seen."""
    of_answers: set[str] = field(default_factory=set[str])
    """Ends of answers without calls that another message follows."""
    next_header_ends: bool = False
    """Whether the first token of the user's header is all that ends an answer."""

    def add(self, found: Sequence[tuple[ProbeTurn, str]]) -> None:
        """Add the ends of a group of turns."""
        for turn, ending in found:
            own = replace_call_ids(ending, turn.ids)
            own = own[measure_json_closing(own, 0) :] if turn.last_kind == "tool_call" else own
            self.counts.setdefault((turn.last_kind, turn.next_role), Counter())[own] += 1
            # Gemma 4 prints the text of a message behind its calls, and then the token that opens their results.
            if turn.last_kind == "assistant" and turn.next_role and not turn.messages[turn.message].get("tool_calls"):
                self.of_answers.add(own)

    def list_answer_ends(self) -> list[str]:
        """Return the ends of answers that others follow, and the last token of each, longest first."""
        known = self.of_answers | {cut_at_last_token(end, self.control_tokens) for end in self.of_answers}
        return sorted((end for end in known if end), key=lambda end: (-len(end), end))

    def cut_at_answer_end(self, text: str) -> str | None:
        """Return a text up to the end of an answer in it; None if there is none."""
        places = [at + len(end) for end in self.list_answer_ends() if (at := text.find(end)) >= 0]
        return text[: min(places)] if places else None

    def choose_finishes(self) -> dict[str, str]:
        """Return by kind of last own text the most frequent end of such turns that others follow.

        Rarer ones are the same end after more of a call's frame (calls without arguments, as of Qwen3 and GLM-4.6), or
        with the number of another turn, or, for Gemma 4, that of answers with calls.
        """
        finish: dict[str, str] = {}
        for kind, roles in (("assistant", ("user",)), ("reasoning", ("user",)), ("tool_call", ("tool", "user"))):
            for role in roles:
                found = self.counts.get((kind, role), {})
                ending = max(found, key=lambda end: (found[end], end), default="")
                if ending:
                    finish.setdefault(kind, ending)
        return finish


class FrameLearner:
    """Learns the frames of one template for one set of template values; each probe is rendered once."""

    def __init__(self, renderer: Renderer, roles: frozenset[str], kwargs: Mapping[str, Json]) -> None:
        self._renderer = renderer
        self._roles = roles
        self._kwargs = kwargs
        self._tokens = renderer.control_tokens
        self._requires_all_messages = True
        """Whether to skip probes of which a message is dropped; off if otherwise no turn of the model is seen."""
        self._shapes: dict[tuple[bool, str], list[ProbeTurn]] = {}
        self._texts: dict[str, str | None] = {}

    def learn(self) -> TemplateFrames:
        """Render all shapes and return the template text around the model's own text."""
        seen = self._render_probes()
        turns = [turn for turn in seen if turn.role in self._roles]
        others = [turn for turn in seen if turn.role not in self._roles]
        prompt = self._renderer.generation_prompt("user", has_tools=False, kwargs=self._kwargs)
        headers, first_gaps = self._learn_headers(others, prompt)
        prefixes = self._learn_prefixes(turns, others, has_prompt=bool(prompt))
        ends = self._learn_ends(turns, MessageStarts(prefixes, headers, first_gaps))
        inner = {
            (
                first.kind,
                second.kind,
                normalize_inner_text(
                    first.kind, second.kind, replace_call_ids(turn.text[first.end : second.start], turn.ids)
                ),
            )
            for turn in turns
            for first, second in pairwise(turn.pieces)
        }
        own_prefixes = [prefix for prefix in prefixes if not _quotes_probe(prefix.header + prefix.rest)]
        known = TemplateFrames(
            prefixes=tuple(sorted(own_prefixes, key=lambda x: (-len(x.header) - len(x.rest), x.header, x.rest))),
            inner=frozenset(one for one in inner if not _quotes_probe(one[2])),
            ends={key: _sort_texts(found) for key, found in ends.counts.items()},
            finish=ends.choose_finishes(),
            model_roles=self._roles,
            next_header_ends=ends.next_header_ends,
            bos_token=self._renderer.bos_token,
            end_tokens=list_end_tokens(self._renderer.eos_token, self._tokens),
        )
        headers = {role: known.find_header(header) or header for role, header in headers.items()}
        return replace(known, headers=headers, closings=self._learn_closings(seen, headers, known, ends))

    def _learn_headers(self, others: Sequence[ProbeTurn], prompt: str) -> tuple[dict[str, str], dict[str, list[str]]]:
        """Return by role, from turns of other roles than the model's, the `headers` and `first_gaps`."""
        # By role all template text before its own text, and whether it begins a render.
        gaps: dict[str, dict[str, bool]] = {}
        for turn in others:
            held = gaps.setdefault(turn.role, {})
            held[turn.gap] = held.get(turn.gap, False) or turn.message == 0
        # Text common to all of them may still be the end of the previous turn, unless one of them begins the render.
        known_gaps = {role: found for role, found in gaps.items() if len(found) > 1 or any(found.values())}
        common = {role: find_common_end(list(found), self._tokens) for role, found in known_gaps.items()}
        opening = find_first_control_token(prompt, self._tokens)
        headers = {role: self._remove_previous_end(header, opening) for role, header in common.items()}
        return headers, {role: [gap for gap, begins in held.items() if begins] for role, held in gaps.items()}

    def _remove_previous_end(self, header: str, opening: str) -> str:
        """Return a role's header without the end of the turn before it.

        Where a template prints a preamble, even the first message follows the end of a turn, so that this end is common
        to all places. The header begins where the generation prompt's first token stands, or behind tokens that are
        called ends if another token follows them.
        """
        # The template of test_mask_regressions.py with a preamble, of which every render ends with the model's header.
        if opening and opening in header:
            return header[header.rfind(opening) :]
        # That template too, and `OPEN_TAIL` and `NO_TAIL` of test_turn_borders.py.
        while (token := find_first_control_token(header, self._tokens)) and _END_NAME.search(token):
            rest = header.lstrip()[len(token) :]
            if not find_first_control_token(rest, self._tokens):
                break
            header = rest
        return header

    # ── renders of the probes ──

    def _render_probes(self) -> list[ProbeTurn]:
        role = "assistant" if "assistant" in self._roles else min(self._roles)
        for requires_all in (True, False):
            self._requires_all_messages = requires_all
            seen = [turn for probe in make_learning_probes(role) for turn in self._render_probe(*probe)]
            if any(turn.role in self._roles for turn in seen):
                return seen
        return []

    def _render_probe(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> list[ProbeTurn]:
        """Render a probe, once; no turns if the template refuses it or drops a message."""
        key = (self._requires_all_messages, to_json([list(messages), bool(tools)]))
        if key not in self._shapes:
            self._shapes[key] = list(self._locate_turns(messages, tools))
        return self._shapes[key]

    def _locate_turns(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> Iterator[ProbeTurn]:
        rendered = self._renderer.render(messages, tools, self._kwargs)
        located = None
        if not isinstance(rendered, Rejected):
            ownership = self._renderer.prove_ownership(rendered, self._roles)
            located = locate_own_text(ownership, rendered, messages, self._roles)
        wanted = (i for i, m in enumerate(messages) if self._requires_all_messages or m["role"] in self._roles)
        # Template text of a message without own text cannot be separated from its neighbors'.
        if isinstance(rendered, Rejected) or located is None or any(i not in located.own for i in wanted):
            return
        text = rendered.text
        # A template that prints no tools does not differ with them: its turns count as turns without.
        printed_tools = None if tools and is_tool_missing(tools, text, []) else tools
        groups = group_by_message(located.pieces())
        ends = [0, *(max(piece.end for piece in group) for group in groups)]
        for i, group in enumerate(groups):
            following = groups[i + 1][0] if i + 1 < len(groups) else ContentSpan(len(text), len(text), -1, "")
            ids = get_call_ids(rendered.messages[group[0].message])
            first, before = group[0].message, ends[i]
            yield ProbeTurn(
                messages, printed_tools, text, first, group, before, following.start, following.message, ids
            )

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
            self._texts[key] = None if isinstance(rendered, Rejected) else rendered.text
        return self._texts[key]

    def _get_prompt_after(self, turn: ProbeTurn, role: str) -> str:
        return self._renderer.generation_prompt(role, has_tools=bool(turn.tools), kwargs=self._kwargs)

    def _get_prompt(self, turn: ProbeTurn) -> str:
        """Return the generation prompt before a turn; empty after the model's own, where templates print a part."""
        before = turn.previous_role or "user"
        return "" if before in self._roles else self._get_prompt_after(turn, before)

    def _list_prompts(self, turn: ProbeTurn) -> list[str]:
        found = (self._get_prompt(turn), *(self._get_prompt_after(turn, role) for role in ("user", "tool")))
        return list(dict.fromkeys(prompt for prompt in found if prompt))

    # ── the text before a turn ──

    def _learn_prefixes(
        self, turns: Sequence[ProbeTurn], others: Sequence[ProbeTurn], *, has_prompt: bool
    ) -> frozenset[TurnPrefix]:
        """Return the prefixes: first of turns that begin with the exact generation prompt, then of the others."""
        gaps_after_users = {turn.gap for turn in turns if turn.previous_role == "user"}
        found = [(turn, prefix) for turn in turns if (prefix := self._find_exact_prefix(turn, gaps_after_users))]
        if not has_prompt and not self._opens_turn_at_end(turns, gaps_after_users):
            found = self._move_constant_to_header(found)
        prefixes = {prefix for _, prefix in found}
        for turn in turns:
            prefix = split_turn_prefix(turn.gap, self._list_prompts(turn), self._tokens)
            if prefix is not None:
                prefixes.add(TurnPrefix(prefix.header, replace_call_ids(prefix.rest, turn.ids)))
        known = TemplateFrames(tuple(prefixes))
        unmatched = (turn for turn in turns if known.match_prefix(turn.text, turn.before, turn.start, turn.ids) is None)
        return frozenset(prefixes | {self._infer_prefix(turn, others) for turn in unmatched})

    def _opens_turn_at_end(self, turns: Sequence[ProbeTurn], gaps_after_users: AbstractSet[str]) -> bool:
        """Return whether every render ends with the header of the model's next turn, without being asked for it.

        answer<end><start>user…      followed by a user
        answer<end><start>model      at the end: what the model writes begins behind it, as behind a prompt
        """
        answers = [turn for turn in turns if turn.last_kind == "assistant"]
        followed = {turn.ending for turn in answers if turn.next_role == "user"}
        tails = {turn.ending for turn in answers if not turn.next_role}
        opened = {tail[len(find_common_start(tail, ending, self._tokens)) :] for tail in tails for ending in followed}
        return any(text.strip() and text in gap for text in opened for gap in gaps_after_users)

    def _move_constant_to_header(
        self, exact: Sequence[tuple[ProbeTurn, TurnPrefix]]
    ) -> list[tuple[ProbeTurn, TurnPrefix]]:
        """Move the common prefix of all answers into the header, for templates without generation prompt.

        Mistral and Llama 2 have no prompt. Only of answers, since Mistral prints `[TOOL_CALLS]` before calls; and only
        where it is whole, since `NO_TAIL` of test_turn_borders.py begins answers and calls in two ways.
        """
        rests = [prefix.rest for turn, prefix in exact if turn.pieces[0].kind == "assistant"]
        constant = rests[0] if rests else ""
        for rest in rests[1:]:
            constant = find_common_start(constant, rest, self._tokens, any_numbers=True)
        size = len(split_into_units(constant, self._tokens))
        moved: list[tuple[ProbeTurn, TurnPrefix]] = []
        for turn, prefix in exact:
            own = find_common_start(prefix.rest, constant, self._tokens, any_numbers=True)
            is_whole = len(split_into_units(own, self._tokens)) == size
            moved.append((turn, TurnPrefix(prefix.header + own, prefix.rest[len(own) :]) if is_whole else prefix))
        return moved

    def _find_exact_prefix(self, turn: ProbeTurn, gaps_after_users: AbstractSet[str]) -> TurnPrefix | None:
        """Return the prefix of a turn before which the conversation, rendered with the prompt, is the same text."""
        prompted = self._render_text(turn.messages[: turn.message], turn.tools, with_prompt=True)
        if prompted is None or not (turn.before <= len(prompted) <= turn.start and turn.text.startswith(prompted)):
            return None
        prompt, prompts = self._get_prompt(turn), self._list_prompts(turn)
        # Llama 3.1, Qwen3 and others print a part of the prompt between two turns of the model.
        if turn.previous_role in self._roles and prompts:
            return None
        rest = replace_call_ids(turn.text[len(prompted) : turn.start], turn.ids)
        # Mistral and Phi-3: where there is no prompt, the header is the last token that is printed, as `[/INST]`.
        header = prompt or cut_at_last_token(prompted[turn.before :], self._tokens)
        header_start = find_ending(prompted, header, turn.before, len(prompted))
        header = header if header_start is None else prompted[header_start:]
        is_elsewhere = prompt or any(gap.endswith(header + rest) for gap in gaps_after_users)
        if is_elsewhere and contains_prompt(rest, prompts, self._tokens):
            # The rest contains a prompt that the template prints elsewhere, so the model does not write all of it:
            # Granite 3.3. DeepSeek V3 of axolotl prints one there and nowhere else, so it does.
            return None
        return None if header_start is None else TurnPrefix(header, rest)

    def _infer_prefix(self, turn: ProbeTurn, others: Sequence[ProbeTurn]) -> TurnPrefix:
        """Return the prefix of a turn that contains no part of a prompt.

        Before an answer all of it counts as header. Before a call the header is the part that an answer at the same
        position also has; the remainder is the call's frame. Answers of Phi-3 need it, and calls of DeepSeek.
        """
        gap, earlier = replace_call_ids(turn.gap, turn.ids), turn.messages[: turn.message]
        before = self._render_text(earlier, turn.tools) if earlier else ""
        answered = self._render_text([*earlier, {"role": turn.role, "content": "qzanswer instead"}], turn.tools)
        if turn.pieces[0].kind == "tool_call" and before is not None and answered and answered.startswith(before):
            added = gap
            if turn.text.startswith(before) and len(before) >= turn.before:
                added = turn.text[len(before) : turn.start]
            shared = find_common_start(added, answered[len(before) :].partition("qzanswer")[0], self._tokens)
            # Text printed after that message whatever follows closes it, and is not part of the call's frame:
            # DeepSeek R1. DeepSeek V3.1 shares more with an answer.
            follow = (other.gap for other in others if turn.message and other.previous_role == turn.previous_role)
            closing = max((len(find_common_start(added, other, self._tokens)) for other in follow), default=0)
            rest = replace_call_ids(added[max(len(shared), closing) :], turn.ids)
            if rest.strip():
                return TurnPrefix(cut_at_last_token(gap[: len(gap) - len(rest)], self._tokens), rest)
        return TurnPrefix(cut_at_last_token(gap, self._tokens), "")

    # ── ends of turns ──

    def _learn_ends(self, turns: Sequence[ProbeTurn], starts: MessageStarts) -> LearnedEnds:
        """Return the ends of turns, learned a group at a time.

        answers before the user ─► answers before others ─► other turns ─► turns that end a chat
        """
        ends = LearnedEnds(self._tokens)
        answers = [turn for turn in turns if turn.last_kind == "assistant" and turn.next_role]
        found = [(turn, *self._find_answer_end(turn, starts, ends)) for turn in answers if turn.next_role == "user"]
        ends.next_header_ends = any(is_header for _, _, is_header in found)
        ends.add([(turn, ending) for turn, ending, _ in found])
        before_others = [turn for turn in answers if turn.next_role != "user"]
        ends.add([(turn, self._find_answer_end(turn, starts, ends)[0]) for turn in before_others])
        others = [turn for turn in turns if turn.last_kind != "assistant" and turn.next_role]
        ends.add([(turn, self._find_end_behind_answers(turn, starts, ends)) for turn in others])
        last = [(turn, self._find_last_end(turn, ends)) for turn in turns if not turn.next_role]
        ends.add([(turn, ending) for turn, ending in last if ending is not None])
        return ends

    def _find_text_after(self, turn: ProbeTurn) -> tuple[str, str]:
        """Return the text behind a turn where a chat ends with its message, and what of it is also there before others.

        Both are empty if the template refuses such a chat.
        """
        alone = self._render_probe(turn.messages[: turn.message + 1], turn.tools)
        last = next((one.ending for one in reversed(alone) if one.message == turn.message), "")
        return last, find_common_start(turn.ending, last, self._tokens).rstrip()

    def _find_answer_end(self, turn: ProbeTurn, starts: MessageStarts, ends: LearnedEnds) -> tuple[str, bool]:
        """Return the end of an answer before another message: the text printed both there and at the end of a chat.

        Also return whether it is the first token of the next header, because nothing else ends the answer. The comments
        name a template that needs each case.
        """
        role, after = turn.next_role, turn.ending
        last, shared = self._find_text_after(turn)
        own = self._strip_header(after, role, starts).rstrip()
        if own and shared.startswith(own):
            # Command R+ opens the model's next turn at the end, with the token that opens the header of any role.
            shared = own
        if shared:
            # Command R+: before a tool's result, too, the answer ends as before the user.
            known = (end for end in ends.counts.get(("assistant", "user"), ()) if shared.startswith(end))
            return max(known, key=len, default="") or shared, False
        if role in self._roles:
            # gpt-oss ends the last answer of a chat with another token. If no other answer ends like that, the template
            # joins two turns (`NAMED_END` of the tests): the text between them belongs to the second.
            return own if any(own.endswith(end) for end in ends.list_answer_ends()) else "", False
        if own and (ending := self._keep_constant_end(turn, own, starts)):
            # ChatML of vLLM prints nothing at the end of a chat, so there is no more to compare with.
            return ending, False
        # GLM-4.6 ends no answer, so the model writes the token that opens the next message, and stops. So it does for
        # Metharme, which prints EOS at the end of a chat, so that its calls need no such token.
        token = find_opening_token(after, self._tokens)
        return token, bool(token) and not last.strip()

    def _find_end_behind_answers(self, turn: ProbeTurn, starts: MessageStarts, ends: LearnedEnds) -> str:
        """Return the end of reasoning or a call before another message, which mostly is an end of answers.

        A call ends with its closing text; the token that opens the result is part of the result's header.
        """
        role, after = turn.next_role, turn.ending
        last, shared = self._find_text_after(turn)
        own = self._strip_header(after, role, starts)
        # Mistral Nemo prints the end of an answer in both places, Qwen3.5 only before another message.
        for text in (shared, own):
            found = ends.cut_at_answer_end(text)
            if found is not None:
                return found
        # Gemma 4 ends a chat behind a call with the token that opens the result: the model writes it, and stops.
        stops = role not in self._roles and shared == last.rstrip()
        ending = shared if stops else find_common_start(own, last, self._tokens).rstrip()
        if not ends.next_header_ends or role in self._roles:
            return ending
        # GLM-4.6 ends a call, as an answer, by the token that opens the next message.
        return ending + find_opening_token(after[len(ending) :], self._tokens)

    def _keep_constant_end(self, turn: ProbeTurn, ending: str, starts: MessageStarts) -> str:
        r"""Return the part of an ending that is the same in three places, after further exchanges; numbers may differ.

            answer\n\n[Round two]\n\nQ: …      what follows counts without digits, so that the header's common end
            answer\n\n[Round three]\n\nQ: …    is `]\n\nQ: `, and `\n\n[Round two` is left in front of it

        What a constant part ends with is still the header's if it also stands before a message that begins a render.
        """
        constant = ending
        leading = next((i for i, message in enumerate(turn.messages) if message["role"] != "system"), 0)
        for exchanges in (1, 2):
            added: list[Message] = [
                {"role": role, "content": f"qzearlier {role} {number}"}
                for number in range(exchanges)
                for role in ("user", turn.role)
            ]
            longer = [*turn.messages[:leading], *added, *turn.messages[leading : turn.follower + 1]]
            moved = turn.message + len(added)
            again = self._render_probe(longer, turn.tools)
            after = next((one.ending for one in reversed(again) if one.message == moved), None)
            if after is not None:
                constant = find_common_start(constant, after, self._tokens, any_numbers=True)
        if constant == ending:
            return ending
        # A control token, which ends turns elsewhere too, is no part of the header that counts.
        units = split_into_units(constant, self._tokens)
        begin = max((i + 1 for i, unit in enumerate(units) if is_token(unit, self._tokens)), default=0)
        heads = ("".join(units[i:]) for i in range(begin, len(units)))
        head = next((one for one in heads if any(one in gap for gap in starts.first_gaps.get(turn.next_role, ()))), "")
        return constant[: len(constant) - len(head)].rstrip()

    def _strip_header(self, after: str, role: str, starts: MessageStarts) -> str:
        """Return the text behind a turn without the header of the next message; empty if that is not known."""
        if role in self._roles:
            known = sorted((x.header + x.rest for x in starts.prefixes if x.header), key=len, reverse=True)
            return next((own for one in known if (own := remove_ending(after, one)) != after), after)
        header = starts.headers.get(role)
        return "" if header is None else remove_ending(after, header)

    def _find_last_end(self, turn: ProbeTurn, ends: LearnedEnds) -> str | None:
        """Return the end of a turn that ends a chat; None if the template prints none there."""
        kind, shown = turn.last_kind, replace_call_ids(turn.ending, turn.ids)
        shown = shown[measure_json_closing(shown, 0) :] if kind == "tool_call" else shown
        common_role = "tool" if kind == "tool_call" else "user"
        others = sorted(
            role for one, role in ends.counts if one == kind and role not in {common_role, "", *self._roles}
        )
        # Command R+ and gpt-oss print a known end; the header of a result ends calls of GLM-4.
        for role in (common_role, *others):
            known = (end for end in ends.counts.get((kind, role), ()) if end and shown.startswith(end))
            same = max(known, key=len, default=None)
            if same is not None:
                return same
        if not shown.strip():
            return None
        found = ends.cut_at_answer_end(shown)
        if found is not None:
            return found
        # gpt-oss, `MACRO` and `NAMED_END` of test_mask_regressions.py print an end of their own there.
        eos = self._renderer.eos_token
        tokens = [*(token for token in self._tokens if not token.startswith("</")), eos]
        places = [at + len(token) for token in tokens if token and (at := shown.find(token)) >= 0]
        # Closing text without an end of turn: masking appends the end that earlier turns have.
        return shown[: min(places)] if places else None

    # ── ends of messages of other roles ──

    def _learn_closings(
        self, seen: Sequence[ProbeTurn], headers: Mapping[str, str], known: TemplateFrames, ends: LearnedEnds
    ) -> dict[str, tuple[str, ...]]:
        """Return by role what is printed between such a message and the header of the next one."""
        found: dict[str, set[str]] = {}
        for turn, following in pairwise(seen):
            if turn.role in self._roles or following.text is not turn.text or turn.follower != following.message:
                continue
            header = headers.get(following.role)
            if following.role in self._roles:
                prefix = known.match_prefix(following.text, following.before, following.start, following.ids)
                header = None if prefix is None else prefix.header + prefix.rest
            header_start = None if header is None else find_ending(following.gap, header, 0, len(following.gap))
            if header_start is not None:
                closing = following.gap[:header_start].rstrip()
                # Phi-3, Llama 3.1 and Command R+ print more than the end there.
                found.setdefault(turn.role, set()).add(ends.cut_at_answer_end(closing) or closing)
        return {role: tuple(one for one in _sort_texts(texts) if one) for role, texts in found.items()}


def _sort_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """Return learned texts without those that quote a probe, longest first."""
    return tuple(sorted((one for one in texts if not _quotes_probe(one)), key=lambda one: (-len(one), one)))


def _quotes_probe(text: str) -> bool:
    """Return whether template text contains own text of a probe, which the template printed a second time."""
    return "qz" in text


def learn_frames(renderer: Renderer, roles: frozenset[str], kwargs: Mapping[str, Any]) -> TemplateFrames:
    """Learn the frames of a renderer's template for the given template values."""
    return FrameLearner(renderer, roles, kwargs).learn()


def learn_frames_once(renderer: Renderer, roles: frozenset[str], kwargs: Mapping[str, Any]) -> TemplateFrames:
    """Return the frames of a template for some template values, learned once per process."""
    key = f"{renderer.identity} {sorted(roles)} {to_json(dict(kwargs)) if kwargs else ''}"
    known = _FRAME_CACHE.get(key)
    if known is None:
        if len(_FRAME_CACHE) >= MAX_CACHED_FRAMES:
            _FRAME_CACHE.clear()
        known = _FRAME_CACHE[key] = learn_frames(renderer, roles, kwargs)
    return known
