"""Verify a mask: own text trains, other messages' text does not, and every supervised message has trained text.

What belongs here: the checks that need only the mask; a row that fails one is rejected. What does not: making the mask
(`loss_mask.py`), or comparing the render with a plain one, which needs the renderer.
"""

from collections.abc import Mapping, Sequence

from rowmill.conversation.owned_spans import LocatedContent
from rowmill.schema.rows import ContentSpan, Rejected, Span

MIN_FOREIGN_CHARS = 8
"""Texts of another message at least this long do not occur in a trained span by chance."""


def verify_mask(
    text: str,
    trained: Sequence[Span],
    supervised: Sequence[int],
    located: LocatedContent,
    excluded: set[int],
    blocks: Mapping[int, frozenset[str]],
) -> Rejected | None:
    """Return the reject of a mask that fails a check, else None.

    `blocks`: the messages whose spans come from `{% generation %}` blocks, each with the template text that such blocks
    contain in every message. The template text of other spans was already matched with the closed list.
    """
    by_message: dict[int, list[Span]] = {}
    for span in trained:
        if span.message in by_message:
            by_message[span.message].append(span)
        else:
            by_message[span.message] = [span]
    for index in supervised:
        spans = by_message.get(index)
        if spans is None:
            return Rejected("assistant_untrained", f"message {index}")
        own = located.own.get(index)
        if not own:
            # Only template text would train: an empty answer that the row does not have.
            return Rejected("assistant_untrained", f"message {index}: nothing of it is printed")
        for piece in own:
            if piece.kind == "reasoning" and index in excluded:
                continue
            start, end = piece.start, piece.end
            if not (spans[0].start <= start and end <= spans[0].end) and not any(
                span.start <= start and end <= span.end for span in spans
            ):
                return Rejected("own_text_untrained", f"message {index}: {piece.kind}")
        constants = blocks.get(index)
        problem = None if constants is None else _find_foreign_text(text, index, spans, own, located, constants)
        if problem is not None:
            return problem
    return None


def _find_foreign_text(
    text: str,
    index: int,
    spans: Sequence[Span],
    own: Sequence[ContentSpan],
    located: LocatedContent,
    constants: frozenset[str],
) -> Rejected | None:
    """Reject a message whose trained spans contain text of another message."""
    ranges = sorted([(piece.start, piece.end) for piece in own]) if len(own) > 1 else [(p.start, p.end) for p in own]
    for span in spans:
        for start, end in _find_uncovered_parts(span, ranges):
            if end - start < MIN_FOREIGN_CHARS or text[start:end].strip() in constants:
                continue
            for other, pieces in located.own.items():
                for piece in pieces:
                    if other != index and MIN_FOREIGN_CHARS <= piece.end - piece.start <= end - start:
                        found = text[piece.start : piece.end]
                        # Text that both messages have, such as a value that two calls share, is not foreign.
                        if text.find(found, start, end) >= 0 and all(text[a:b] != found for a, b in ranges):
                            return Rejected("foreign_text_trained", f"message {index} holds text of message {other}")
    return None


def _find_uncovered_parts(span: Span, own: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of a span that no own text covers."""
    parts: list[tuple[int, int]] = []
    position = span.start
    for start, end in own:
        if start > position:
            parts.append((position, min(start, span.end)))
        position = max(position, end)
    if position < span.end:
        parts.append((position, span.end))
    return parts
