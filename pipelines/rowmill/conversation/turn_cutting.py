r"""Cut turns into their parts and choose the trained ones, by the closed list or by `{% generation %}` blocks.

    <|im_start|>assistant\n <think>\n\n</think>\n\n Hello<tool_call>get</tool_call> <|im_end|> \n
    └───── header ───────┘ └─────────────── body ──────────────────────────────────┘└─ end ─┘└ trailing

    part       without     with {% generation %}    option
    header     mask        as the block             loss.lead
    body       train       as the block
    end        train       as the block             loss.end_of_turn
    trailing   mask        as the block             loss.trailing

An option that is set overrides both columns.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from operator import itemgetter
from typing import NamedTuple

from rowmill.conversation.character_ownership import RenderedConversation, group_by_message
from rowmill.conversation.options import Loss
from rowmill.conversation.template_frames import (
    TemplateFrames,
    get_call_ids,
    measure_json_closing,
    remove_ending,
)
from rowmill.schema.rows import ContentSpan, Message, Rejected, Span


class TurnBounds(NamedTuple):
    """The positions at which the parts of one turn begin and end.

    `[header, start)` is the header, `[start, stop)` the body, `[stop, end)` the end of turn, `[end, trailing)` white
    space; `content_end` is the end of the last own text.
    """

    message: int
    kind: str
    header: int
    start: int
    content_end: int
    stop: int
    end: int
    trailing: int


@dataclass(frozen=True, slots=True)
class TrainedText:
    """The trained spans of a render, its text, with an end of turn if one had to be appended, and the message ends."""

    trained: list[Span]
    text: str
    message_ends: tuple[int, ...]


class _ContentGroup(NamedTuple):
    """Consecutive pieces of one message; with the template text around them they fill `[before, after)`."""

    message: int
    pieces: list[ContentSpan]
    before: int
    after: int
    follower: int
    """The message of the next group; −1 for the last group."""


@dataclass(frozen=True, slots=True)
class TurnCutter:
    """Cuts the turns of one render; `unproven` are the pieces of texts that could not be covered."""

    rendered: RenderedConversation
    messages: Sequence[Message]
    unproven: Sequence[ContentSpan]
    frames: TemplateFrames
    eos_token: str
    loss: Loss
    roles: frozenset[str]
    by_blocks: bool

    def cut(self, pieces: Sequence[ContentSpan], supervised: Sequence[int]) -> TrainedText | Rejected:
        """Return the trained spans of the supervised messages; `pieces` are all own texts in the order of the text.

        Rejects with `foreign_text_trained` if template text would train that is not on the closed list.
        """
        wanted, loss = set(supervised), self.loss
        overrides_blocks = (loss.lead, loss.end_of_turn, loss.trailing, loss.finish) != (None, None, None, "auto")
        trained = self._select_blocks(pieces, wanted) if self.by_blocks else []
        block_ends: dict[int, list[int]] = {}
        for span in trained:
            block_ends.setdefault(span.message, []).append(span.end)
        text = self.rendered.text
        message_ends: list[int] = []
        for group in _make_content_groups(pieces, self.rendered.text, wanted):
            if self.messages[group.message]["role"] not in self.roles:
                span, end = self._cut_other_role(group)
                trained.append(span)
                message_ends.append(self._skip_space(end, group))
                continue
            if self.by_blocks and not overrides_blocks:
                # The blocks alone decide what trains: text that nothing else explains may be in one.
                own_end = message_end = group.pieces[-1].end
                for end in block_ends.get(group.message, ()):
                    if message_end < end <= group.after:
                        message_end = end
                # A block that goes on after the own text has the end of the turn in it.
                bounds = self._find_turn_bounds(group) if message_end == own_end else None
                message_end = bounds.end if isinstance(bounds, TurnBounds) else message_end
                message_ends.append(self._skip_space(message_end, group))
                continue
            turn = self._find_turn_bounds(group)
            if isinstance(turn, Rejected):
                return turn
            message_ends.append(self._skip_space(turn.end, group))
            # Each part trains as its option says, else by the table above.
            parts = (
                (turn.header, turn.start, self.loss.lead, "mask"),
                (turn.start, turn.stop, None, "train"),
                (turn.stop, turn.end, self.loss.end_of_turn, "train"),
                (turn.end, turn.trailing, self.loss.trailing, "mask"),
            )
            for start, end, option, default in parts:
                if self.by_blocks and option is None:
                    continue
                if self.by_blocks:
                    trained = [part for span in trained for part in _cut_out_range(span, start, end)]
                if (option or default) == "train" and start < end:
                    trained.append(Span(start, end, turn.message))
            if group.follower < 0 and group.message == len(self.messages) - 1 and turn.end == turn.stop:
                span, text = self._append_end(turn)
                trained += [] if span is None else [span]
        ordered: list[Span] = []
        for span in sorted(trained, key=itemgetter(0)):
            start = max(span.start, ordered[-1].end) if ordered else span.start
            if span.end > start:
                ordered.append(span if start == span.start else Span(start, span.end, span.message))
        return TrainedText(ordered, text, tuple(message_ends))

    def _skip_space(self, position: int, group: _ContentGroup) -> int:
        """Return where the white space at a position ends, which is still the message's, before the next own text."""
        space = self.rendered.text[position : group.after]
        return position + len(space) - len(space.lstrip())

    # ── generation blocks ──

    def _select_blocks(self, pieces: Sequence[ContentSpan], wanted: set[int]) -> list[Span]:
        """Return the generation blocks of supervised messages.

        A block belongs to the message whose proven own text is in it; where it has texts of several, each takes it from
        the end of the previous one's. A block around an end of turn belongs to the message before it, if only white
        space and blocks separate them. Nothing says whose any other block without own text is, so it does not train.
        """
        blocks = self.rendered.blocks
        unproven = set(self.unproven)
        starts, ends = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
        trained: list[Span] = []
        for start, end in blocks:
            if start == end:
                continue
            first, last = bisect_right(ends, start), bisect_left(starts, end)
            inside = pieces[first:last]
            groups = group_by_message([piece for piece in inside if piece not in unproven] if unproven else inside)
            owners = [group[0].message for group in groups]
            if not inside and first and self._is_end(self.rendered.text[start:end].strip()):
                owners = [pieces[first - 1].message]
                owners = owners if self._is_blank_between(pieces[first - 1].end, start, blocks) else []
            cuts = [start, *(group[-1].end for group in groups[:-1]), end]
            for number, index in enumerate(owners):
                if index in wanted and self.messages[index]["role"] in self.roles:
                    trained.append(Span(cuts[number], cuts[number + 1], index))
        return trained

    def _is_end(self, text: str) -> bool:
        return bool(text) and (
            text in self.frames.end_tokens
            or text == self.eos_token
            or any(text == end.strip() for ends in self.frames.ends.values() for end in ends)
        )

    def _is_blank_between(self, start: int, end: int, blocks: Sequence[tuple[int, int]]) -> bool:
        """Return whether a range of the render contains only white space and generation blocks."""
        for block_start, block_end in blocks:
            if block_end > start and block_start < end:
                if self.rendered.text[start:block_start].strip():
                    return False
                start = max(start, block_end)
        return not self.rendered.text[start:end].strip()

    # ── the parts of a turn ──

    def _find_turn_bounds(self, group: _ContentGroup) -> TurnBounds | Rejected:
        text, frames, index = self.rendered.text, self.frames, group.message
        first, last = group.pieces[0], group.pieces[-1]
        message = self.rendered.messages[index]
        ids = get_call_ids(message) if "tool_calls" in message else ()
        start = first.start
        prefix = frames.match_prefix(text, group.before, start, ids)
        if prefix is None and text[start : start + 1].isspace():
            # The template may have printed the white space with which own text begins.
            own = text[start : first.end]
            start += len(own) - len(own.lstrip())
            prefix = frames.match_prefix(text, group.before, start, ids)
        if prefix is None:
            unknown = text[max(group.before, first.start - 40) : first.start]
            return Rejected("foreign_text_trained", f"message {index}: unknown template text {unknown!r} before it")
        start -= len(prefix.rest)
        content_end = last.end
        for one, following in pairwise(group.pieces):
            content_end = max(content_end, one.end)
            between = text[one.end : following.start]
            if not frames.allows_inner(one.kind, following.kind, between, ids):
                return Rejected(
                    "foreign_text_trained", f"message {index}: unknown template text {between[:40]!r} in it"
                )
        roles = [self.messages[i]["role"] for i in (index + 1, group.follower) if 0 < i < len(self.messages)]
        # An empty message after the last own text still prints its header.
        roles = tuple(dict.fromkeys(roles)) or ("",)
        ending = frames.match_end(text, content_end, last.kind, roles, ids)
        if not ending and text[content_end - 1].isspace():
            stripped = last.start + len(text[last.start : content_end].rstrip())
            other = frames.match_end(text, stripped, last.kind, roles, ids)
            content_end, ending = (stripped, other) if other else (content_end, ending)
        if not ending:
            after = text[content_end : group.after]
            if not self._is_partial_end(last.kind, after, ids) if roles == ("",) else ending is None:
                why = f"message {index}: unknown template text {after[:40]!r} after it"
                return Rejected("foreign_text_trained", why)
        ending = ending or ""
        end = content_end + len(ending)
        stop = end - len(frames.find_end_token(last.kind, ending))
        trailing = self._skip_space(end, group) if ending else end
        return TurnBounds(index, last.kind, start - len(prefix.header), start, content_end, stop, end, trailing)

    def _is_partial_end(self, kind: str, after: str, ids: Sequence[str]) -> bool:
        """Return whether the text after a last turn is empty or a part of the end of turn."""
        shown = after[measure_json_closing(after, 0) :] if kind == "tool_call" else after
        return not shown.strip() or shown.rstrip() in self.frames.get_finish(kind, ids)

    # ── what trains ──

    def _append_end(self, turn: TurnBounds) -> tuple[Span | None, str]:
        """Append the part of the end of turn that a conversation lacks; white space before it trains as part of it."""
        text, finish = self.rendered.text, self.loss.finish
        if self.loss.end_of_turn == "mask" or (self.by_blocks and finish == "auto"):
            return None, text
        after = text[turn.end :]
        ids = get_call_ids(self.rendered.messages[turn.message])
        if after.strip() and not self._is_partial_end(turn.kind, after, ids):
            return None, text
        known = self.frames.get_finish(turn.kind, ids) or self.frames.get_finish("assistant", ids)
        default = known or self.eos_token
        ending = {"auto": default, "none": "", "eos": self.eos_token}.get(finish, finish)
        if finish == "auto":
            # Of the end only what is not rendered yet.
            rendered = after[measure_json_closing(after, 0) :] if turn.kind == "tool_call" else after
            shown = next((one for one in (rendered, rendered.rstrip()) if one and one in ending), "")
            ending = ending[ending.rfind(shown) + len(shown) :] if shown else ending
        if not ending:
            return None, text
        return Span(turn.content_end, len(text) + len(ending), turn.message), text + ending

    # ── messages of other roles ──

    def _cut_other_role(self, group: _ContentGroup) -> tuple[Span, int]:
        """Return the span of a message of another role: its header, its own text, and its end; and where it ends."""
        text, index = self.rendered.text, group.message
        role = self.messages[index]["role"]
        start, content_end = group.pieces[0].start, max(piece.end for piece in group.pieces)
        gap, header = text[group.before : start], self.frames.headers.get(role, "")
        own = remove_ending(gap, header) if header.strip() else gap
        start -= len(gap) - len(own) if own != gap else len(self.frames.find_header(gap))
        known = self.frames.closings.get(role, ())
        message_end = content_end + next((len(one) for one in known if text.startswith(one, content_end)), 0)
        end = content_end if self.loss.end_of_turn == "mask" else message_end
        if self.loss.trailing == "train":
            end = self._skip_space(end, group)
        return Span(start, end, index), message_end


def _make_content_groups(pieces: Sequence[ContentSpan], text: str, wanted: set[int]) -> list[_ContentGroup]:
    """Group consecutive pieces of each wanted message, with the bounds of the template text around each group."""
    groups = group_by_message(pieces)
    found: list[_ContentGroup] = []
    before = 0
    for group, following in zip_longest(groups, groups[1:]):
        after, follower = (len(text), -1) if following is None else (following[0].start, following[0].message)
        if group[0].message in wanted:
            found.append(_ContentGroup(group[0].message, group, before, after, follower))
        last = group[0] if len(group) == 1 else max(group, key=itemgetter(1))
        end = last.end
        if text[end - 1 : end].isspace():
            end = last.start + len(text[last.start : end].rstrip())
        before = max(before, end)
    return found


def _cut_out_range(span: Span, start: int, end: int) -> list[Span]:
    if end <= span.start or span.end <= start:
        return [span]
    parts = [Span(span.start, start, span.message), Span(end, span.end, span.message)]
    return [part for part in parts if part.start < part.end]
