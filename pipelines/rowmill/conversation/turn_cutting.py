r"""Cut turns into their parts and choose the trained ones: the same rules for marks and generation blocks.

What belongs here: the parts of a model's turn, which of them the options train, and the reject of template text that
is not on the closed list. What does not: locating own text (`owned_spans.py`), the closed list
(`template_frames.py`), or the choice of messages (`supervision.py`).

    <|im_start|>assistant\n <think>\n\n</think>\n\n Hello<tool_call>get</tool_call> <|im_end|> \n
    └───── header ───────┘ └─────────────── body ──────────────────────────────────┘└─ end ─┘└ trailing

    part       with marks  with {% generation %}    option
    header     mask        as the block             loss.lead
    body       train       as the block
    end        train       as the block             loss.end_of_turn
    trailing   mask        as the block             loss.trailing

An option that is set overrides both columns.
"""

from collections.abc import Sequence
from functools import lru_cache

from rowmill.conversation.loss_options import Loss
from rowmill.conversation.owned_spans import LocatedContent, group_by_message
from rowmill.conversation.template_contract import RenderedConversation, TemplateBehavior
from rowmill.conversation.template_frames import TemplateFrames, TurnPrefix, get_call_ids, measure_json_closing
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.schema.rows import ContentSpan, Message, Rejected, Span


@frozen_dataclass
class TurnBounds:
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


@frozen_dataclass
class TrainedText:
    """The trained spans of a render, and its text, with an end of turn if one had to be appended."""

    trained: list[Span]
    text: str


@frozen_dataclass
class _ContentGroup:
    """Consecutive pieces of one message; with the template text around them they fill `[before, after)`."""

    message: int
    pieces: list[ContentSpan]
    before: int
    after: int
    follower: int
    """The message of the next group; −1 for the last group."""


class TurnCutter:
    """Cuts the turns of one render."""

    def __init__(
        self,
        rendered: RenderedConversation,
        messages: Sequence[Message],
        frames: TemplateFrames,
        contract: TemplateBehavior,
        loss: Loss,
        roles: frozenset[str],
        *,
        by_blocks: bool,
    ) -> None:
        self._rendered = rendered
        self._text = rendered.text
        self._messages = messages
        self._frames = frames
        self._contract = contract
        self._loss = loss
        self._roles = roles
        self._by_blocks = by_blocks
        options = (loss.lead, loss.end_of_turn, loss.trailing, None if loss.finish == "auto" else loss.finish)
        self._overrides_blocks = any(option is not None for option in options)

    def cut(self, located: LocatedContent, supervised: Sequence[int]) -> TrainedText | Rejected:
        """Return the trained spans of the supervised messages.

        Rejects with `foreign_text_trained` if template text would train that is not on the closed list.
        """
        wanted = set(supervised)
        trained = self._select_block_spans(wanted) if self._by_blocks else []
        text = self._text
        for group in _make_content_groups(located.pieces(), self._text):
            if group.message not in wanted:
                continue
            if self._messages[group.message]["role"] not in self._roles:
                trained.append(self._cut_other_role(group))
                continue
            if self._by_blocks and not self._overrides_blocks:
                continue
            turn = self._find_turn_bounds(group)
            if isinstance(turn, Rejected):
                return turn
            trained = self._add_turn(trained, turn)
            if group.follower < 0 and group.message == len(self._messages) - 1 and turn.end == turn.stop:
                span, text = self._append_end(turn)
                trained += [] if span is None else [span]
        trained += [] if self._by_blocks else self._find_late_ends(located, wanted, trained)
        return TrainedText(_sort_trained_spans(trained), text)

    def _select_block_spans(self, wanted: set[int]) -> list[Span]:
        """Return the parts of generation blocks that are in supervised messages."""
        trained: list[Span] = []
        last = len(self._messages) - 1
        for block in self._rendered.generation:
            if block.message < 0:
                # A block outside every message, such as an EOS after the loop, belongs to the last message.
                if last in wanted and block.end > block.start:
                    trained.append(Span(block.start, block.end, last))
                continue
            for span in self._rendered.spans:
                start, end = max(span.start, block.start), min(span.end, block.end)
                if start < end and span.message in wanted and self._messages[span.message]["role"] in self._roles:
                    trained.append(Span(start, end, span.message))
        return trained

    # ── the parts of a turn ──

    def _find_turn_bounds(self, group: _ContentGroup) -> TurnBounds | Rejected:
        text, index = self._text, group.message
        first, last = group.pieces[0], group.pieces[-1]
        content_end = last.end if len(group.pieces) == 1 else max(map(_get_content_end, group.pieces))
        message = self._rendered.messages[index]
        ids = get_call_ids(message) if "tool_calls" in message else ()
        found = self._find_prefix(group, ids)
        if found is None:
            return self._reject_unknown_text(
                index, text[max(group.before, first.start - 40) : first.start], "before it"
            )
        prefix, start = found
        for one, following in zip(group.pieces, group.pieces[1:], strict=False):
            between = text[one.end : following.start]
            if not self._frames.allows_inner(one.kind, following.kind, between, ids):
                return Rejected(
                    "foreign_text_trained", f"message {index}: unknown template text {between[:40]!r} in it"
                )
        roles = self._find_following_roles(group)
        ending = self._frames.match_end(text, content_end, last.kind, roles, ids)
        if not ending and text[content_end - 1].isspace():
            stripped = content_end - _measure_trailing_blank(text, last.start, content_end)
            other = self._frames.match_end(text, stripped, last.kind, roles, ids)
            content_end, ending = (stripped, other) if other else (content_end, ending)
        is_known = (
            self._is_partial_end(last.kind, text[content_end : group.after], ids)
            if roles == ("",)
            else ending is not None
        )
        if not ending and not is_known:
            return self._reject_unknown_text(index, text[content_end : min(group.after, content_end + 40)], "after it")
        ending = ending or ""
        stop = content_end + self._measure_frame_close(ending, last.kind)
        end = content_end + len(ending)
        space = text[end : group.after]
        trailing = end + len(space) - len(space.lstrip()) if ending else end
        return TurnBounds(index, last.kind, start - len(prefix.header), start, content_end, stop, end, trailing)

    def _find_following_roles(self, group: _ContentGroup) -> tuple[str, ...]:
        """Return the role of the next message, and that of the next rendered message if it differs."""
        following = [i for i in (group.message + 1, group.follower) if 0 < i < len(self._messages)]
        found = dict.fromkeys(self._messages[i]["role"] for i in following)
        # An empty message after the last own text still prints its header.
        return tuple(found) or ("",)

    def _find_prefix(self, group: _ContentGroup, ids: Sequence[str]) -> tuple[TurnPrefix, int] | None:
        """Return the prefix of a turn, and where its rest begins.

        Tried also after the white space with which own text begins, since the template may have printed it.
        """
        text, first = self._text, group.pieces[0]
        for position in dict.fromkeys(
            (first.start, first.start + _measure_leading_blank(text, first.start, first.end))
        ):
            prefix = self._frames.match_prefix(text, group.before, position, ids)
            if prefix is not None:
                return prefix, position - len(prefix.rest)
        return None

    @staticmethod
    def _reject_unknown_text(index: int, shown: str, where: str) -> Rejected:
        return Rejected("foreign_text_trained", f"message {index}: unknown template text {shown!r} {where}")

    def _measure_frame_close(self, ending: str, kind: str) -> int:
        """Return how many characters of a turn's end close the frame of its last own text, as `</tool_call>` does."""
        if kind == "assistant":
            token = next((end for end in self._get_end_tokens() if ending.endswith(end)), "")
            return len(ending) - len(token) if token else 0
        if not ending:
            return 0
        ends = (*self._frames.list_ends("assistant"), *self._get_end_tokens())
        found = max((end for end in ends if ending.endswith(end)), key=len, default="")
        return len(ending) - len(found)

    def _get_end_tokens(self) -> tuple[str, ...]:
        return _list_end_tokens(self._contract.eos_token, self._contract.control_tokens)

    def _is_partial_end(self, kind: str, after: str, ids: Sequence[str]) -> bool:
        """Return whether the text after a last turn is empty or a part of the end of turn."""
        shown = after[measure_json_closing(after, 0) :] if kind == "tool_call" else after
        return not shown.strip() or shown.rstrip() in self._frames.get_finish(kind, ids)

    # ── what trains ──

    def _add_turn(self, trained: list[Span], turn: TurnBounds) -> list[Span]:
        """Add a turn's trained parts: each as its option says, else by the table above."""
        parts = (
            (turn.header, turn.start, self._loss.lead, "mask"),
            (turn.start, turn.stop, None, "train"),
            (turn.stop, turn.end, self._loss.end_of_turn, "train"),
            (turn.end, turn.trailing, self._loss.trailing, "mask"),
        )
        for start, end, option, default in parts:
            if self._by_blocks and option is None:
                continue
            if self._by_blocks:
                trained = [part for span in trained for part in _cut_out_range(span, start, end)]
            if (option or default) == "train" and start < end:
                trained.append(Span(start, end, turn.message))
        return trained

    def _append_end(self, turn: TurnBounds) -> tuple[Span | None, str]:
        """Append the part of the end of turn that a conversation lacks; white space before it trains as part of it."""
        text, finish = self._text, self._loss.finish
        if self._loss.end_of_turn == "mask" or (self._by_blocks and finish == "auto"):
            return None, text
        after = text[turn.end :]
        ids = get_call_ids(self._rendered.messages[turn.message])
        if after.strip() and not self._is_partial_end(turn.kind, after, ids):
            return None, text
        known = self._frames.get_finish(turn.kind, ids) or self._frames.get_finish("assistant", ids)
        default = known or self._contract.eos_token
        ending = {"auto": default, "none": "", "eos": self._contract.eos_token}.get(finish, finish)
        if finish == "auto":
            ending = _find_missing_end(
                ending, after[measure_json_closing(after, 0) :] if turn.kind == "tool_call" else after
            )
        if not ending:
            return None, text
        return Span(turn.content_end, len(text) + len(ending), turn.message), text + ending

    def _find_late_ends(self, located: LocatedContent, wanted: set[int], trained: Sequence[Span]) -> list[Span]:
        """Return ends of turn that a template prints after text of other messages, in a later span of the message."""
        spans = self._rendered.spans
        if self._loss.end_of_turn == "mask" or len({span.message for span in spans}) == len(spans):
            return []
        found: list[Span] = []
        enders = set(self._get_end_tokens()) | {end for ends in self._frames.ends.values() for end in ends}
        last_own = {index: max(p.end for p in pieces) for index, pieces in located.own.items() if pieces}
        covered = {span.message: max(s.end for s in trained if s.message == span.message) for span in trained}
        for span in spans:
            index = span.message
            if index not in wanted or index not in last_own or span.start < last_own[index]:
                continue
            ending = self._text[span.start : span.end].rstrip()
            if ending and ending in enders and span.start >= covered.get(index, 0):
                found.append(Span(span.start, span.start + len(ending), index))
        return found

    # ── messages of other roles ──

    def _cut_other_role(self, group: _ContentGroup) -> Span:
        """Return the span of a message of another role, with its header and without the white space after it."""
        text, index = self._text, group.message
        header = self._frames.headers.get(self._messages[index]["role"], "")
        first, content_end = group.pieces[0].start, max(piece.end for piece in group.pieces)
        own = [s for s in self._rendered.spans if s.message == index and s.start <= first < s.end]
        if own:
            has_header = bool(header) and text.endswith(header, group.before, first)
            start = max(own[0].start, first - len(header)) if has_header else own[0].start
            end = max(own[0].end, content_end)
            if self._loss.trailing != "train":
                end = content_end + len(text[content_end:end].rstrip())
            return Span(start, end, index)
        end = content_end
        if self._loss.end_of_turn != "mask":
            ends = self._frames.ends.get(("assistant", "user"), ())
            end += next((len(one) for one in ends if text.startswith(one, content_end)), 0)
        return Span(first, end, index)


def _make_content_groups(pieces: Sequence[ContentSpan], text: str) -> list[_ContentGroup]:
    """Group consecutive pieces of the same message, with the bounds of the template text around each group."""
    groups = group_by_message(pieces)
    found: list[_ContentGroup] = []
    before = 0
    for i, group in enumerate(groups):
        after = groups[i + 1][0].start if i + 1 < len(groups) else len(text)
        follower = groups[i + 1][0].message if i + 1 < len(groups) else -1
        found.append(_ContentGroup(group[0].message, group, before, after, follower))
        last = max(group, key=_get_content_end)
        before = max(before, last.end - _measure_trailing_blank(text, last.start, last.end))
    return found


@lru_cache(maxsize=64)
def _list_end_tokens(eos: str, control_tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tokens that may end a turn: all but closing tags."""
    return tuple(token for token in (eos, *control_tokens) if token and not token.startswith("</"))


def _find_missing_end(ending: str, rendered: str) -> str:
    """Return the part of an end that is not rendered yet."""
    for shown in (rendered, rendered.rstrip()):
        if shown and shown in ending:
            return ending[ending.rfind(shown) + len(shown) :]
    return ending


def _measure_leading_blank(text: str, start: int, end: int) -> int:
    own = text[start:end]
    return len(own) - len(own.lstrip())


def _measure_trailing_blank(text: str, start: int, end: int) -> int:
    own = text[start:end]
    return len(own) - len(own.rstrip())


def _cut_out_range(span: Span, start: int, end: int) -> list[Span]:
    """Return the parts of a span outside a range."""
    if end <= span.start or span.end <= start:
        return [span]
    parts = [Span(span.start, start, span.message), Span(end, span.end, span.message)]
    return [part for part in parts if part.start < part.end]


def _sort_trained_spans(trained: Sequence[Span]) -> list[Span]:
    """Sort spans by their start and remove overlaps."""
    found: list[Span] = []
    for span in sorted(trained, key=_get_span_start):
        start = max(span.start, found[-1].end) if found else span.start
        if span.end > start:
            found.append(Span(start, span.end, span.message))
    return found


def _get_content_end(piece: ContentSpan) -> int:
    return piece.end


def _get_span_start(span: Span) -> int:
    return span.start
