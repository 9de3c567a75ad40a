r"""Masks of plain chats, a batch at a time: the template text around contents, learned once per sequence of roles.

    roles     user, assistant                     one layout
    text      <|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n%s<|im_end|>\n
    place      0: 17 bytes before, context           1: 33 bytes before, trains itself and 10 bytes after, ends at 11

A row has a layout if its messages have only a role and a content, and its contents satisfy the conditions of
`PlaceholderRendering`. Text and mask then follow by addition.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rowmill.conversation.content_tracing import PlaceholderRendering
from rowmill.core.arrays import Ints
from rowmill.schema.rows import ContentSpan, MaskedConversation, Span

BEFORE, KIND, MESSAGE, TRAINS, TRAINED_BEFORE, TRAINED_AFTER, MESSAGE_AFTER = range(7)
"""The columns of `TurnLayout.places`. In bytes: the constant text before a content, how much of the text before and
after it trains with it, and how much of the text after it is still its message's."""

MIN_FOREIGN_CHARS = 8
"""Texts of another message at least this long do not occur in a trained span by chance."""

MAX_CACHED_LAYOUTS = 4096
"""Layouts that a worker keeps; nearly every long conversation has a different sequence of roles."""


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """The template text around the contents of one sequence of roles.

    `pattern` is the text with `%s` for each content; `places` is int64[contents, 7] with the columns above.
    """

    roles: tuple[str, ...]
    pattern: str
    places: Ints
    masked: MaskedConversation
    lengths: tuple[int, ...]
    """Characters of each placeholder from which the layout was learned."""
    frame: str
    """All template text; a content that occurs in it could be mistaken for it, so such a row is masked by itself."""
    literals: frozenset[str]
    """Texts that no content may contain."""
    edges: tuple[tuple[int, str | None], ...]
    """(message, characters with which its content must not begin or end; None: white space)."""
    hidden: "re.Pattern[str]"
    """Matches contents that cannot be covered, so that their positions would not be proven."""

    def text(self, contents: Sequence[str]) -> str:
        """Return the rendered text of a row."""
        return self.pattern % tuple(contents)

    def holds(self, contents: Sequence[str]) -> bool:
        """Return whether contents satisfy the layout's conditions, except `literals`, which the caller checks."""
        frame, is_hidden = self.frame, self.hidden.fullmatch
        for content in contents:
            own = content.strip()
            if not own or (len(content) >= MIN_FOREIGN_CHARS and own in frame) or is_hidden(own):
                return False
        for index, characters in self.edges:
            content = contents[index]
            if content.strip(characters) != content:
                return False
        return True

    def mask(self, contents: Sequence[str]) -> MaskedConversation:
        """Return the mask of one row as objects, for comparison with the reference path."""
        moved = [0]
        for content, length in zip(contents, self.lengths, strict=True):
            moved.append(moved[-1] + len(content) - length)
        starts = [piece.start for piece in self.masked.pieces]

        def to(position: int) -> int:
            return position + moved[sum(start < position for start in starts)]

        return MaskedConversation(
            text=self.text(contents),
            trained=tuple(Span(to(s.start), to(s.end), s.message) for s in self.masked.trained),
            pieces=tuple(ContentSpan(to(p.start), to(p.end), p.message, p.kind) for p in self.masked.pieces),
            message_ends=tuple(map(to, self.masked.message_ends)),
        )


def learn_layout(
    roles: Sequence[str], placeholders: PlaceholderRendering, masked: MaskedConversation, kinds: Sequence[str]
) -> TurnLayout | None:
    """Return the layout that a verified mask of placeholders shows; None if it is not laid out like a plain chat."""
    text = placeholders.text
    if masked.text != text or len(masked.pieces) != len(placeholders.contents):
        return None
    if any(text[p.start : p.end] != content for p, content in zip(masked.pieces, placeholders.contents, strict=True)):
        return None
    places = [_measure_content_place(text, masked, number, kinds) for number in range(len(masked.pieces))]
    if any(position is None for position in places) or len(masked.trained) != sum(p[TRAINS] for p in places if p):
        return None
    pattern = text.replace("%", "%%")
    for content in placeholders.contents:
        pattern = pattern.replace(content.replace("%", "%%"), "%s")
    lengths = tuple(map(len, placeholders.contents))
    edges = tuple((index, one) for index, found in placeholders.edges.items() for one in sorted(found, key=str))
    frame = pattern.replace("%s", "\0").replace("%%", "%")
    return TurnLayout(
        tuple(roles),
        pattern,
        np.array(places, np.int64),
        masked,
        lengths,
        frame,
        placeholders.literals,
        edges,
        placeholders.hidden,
    )


def _measure_content_place(
    text: str, masked: MaskedConversation, number: int, kinds: Sequence[str]
) -> list[int] | None:
    piece = masked.pieces[number]
    before = masked.pieces[number - 1].end if number else 0
    trained = [s for s in masked.trained if s.start <= piece.start and piece.end <= s.end]
    span = trained[0] if trained else Span(piece.start, piece.end, piece.message)
    if piece.message != number or len(trained) > 1 or span.message != number or span.start < before:
        return None
    message_end = next((end for end in masked.message_ends if end >= span.end), span.end)

    def size(start: int, end: int) -> int:
        return len(text[start:end].encode())

    return [
        size(before, piece.start), kinds.index(piece.kind), number, int(bool(trained)),
        size(span.start, piece.start), size(piece.end, span.end), size(piece.end, message_end),
    ]  # fmt: skip
