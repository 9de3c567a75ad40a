r"""Masks of plain chats, a batch at a time: what stands around contents, learned once per sequence of roles.

What belongs here: learning a shape from one verified mask, and the rows that have it. What does not: the
proof that contents are only printed (`Printer.opaque`), tokens (`tokenizer.py`).

    roles     user, assistant                     one shape
    text      <|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n%s<|im_end|>\n
    place      0: 17 bytes before, context           1: 33 bytes before, trains itself and 10 bytes after

A row has a shape if its messages are roles and contents and nothing else, and if its contents keep what the
template's print rests on. Its text and its mask then follow by addition.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from rowmill.conversation.masking.verification import MIN_FOREIGN_CHARS
from rowmill.conversation.template_contract import PlaceholderRendering
from rowmill.core.arrays import Ints
from rowmill.schema.rows import ContentSpan, MaskedConversation, Span

BEFORE, KIND, MESSAGE, TRAINS, TRAINED_BEFORE, TRAINED_AFTER = range(6)
"""The columns of `TurnLayout.places`. In bytes: constant text before a content; how much of the text around it trains
with it."""

MAX_CACHED_LAYOUTS = 4096
"""Shapes that a worker keeps; conversations of very many turns are nearly all different."""


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """What a template prints around the contents of a sequence of roles.

    `pattern` is the text with `%s` for each content; `places` int64[contents, 6] as the columns above say.
    """

    roles: tuple[str, ...]
    pattern: str
    places: Ints
    masked: MaskedConversation
    lengths: tuple[int, ...]
    """Characters of the placeholders from which the shape was learned."""
    frame: str
    """All that the template prints itself; a content that stands in it could be taken for it, so its row goes alone."""
    literals: frozenset[str]
    """Texts that no content may hold."""
    edges: tuple[tuple[int, str | None], ...]
    """Messages whose contents must not begin or end with the characters; None: with white space."""

    def text(self, contents: Sequence[str]) -> str:
        """Return the print of a row."""
        return self.pattern % tuple(contents)

    def holds(self, contents: Sequence[str]) -> bool:
        """Tell whether contents keep what the print rests on, literals left out."""
        if not all(contents) or any(map(str.isspace, contents)):
            return False
        if any(len(content) >= MIN_FOREIGN_CHARS and content.strip() in self.frame for content in contents):
            return False
        return all(contents[index].strip(characters) == contents[index] for index, characters in self.edges)

    def mask(self, contents: Sequence[str]) -> MaskedConversation:
        """Return the mask of one row: what the batch's arrays say, as objects; for comparing both ways."""
        moved = [0]
        for content, length in zip(contents, self.lengths, strict=True):
            moved.append(moved[-1] + len(content) - length)
        starts = [piece.start for piece in self.masked.pieces]

        def to(position: int) -> int:
            return position + moved[sum(start < position for start in starts)]

        return MaskedConversation(
            text=self.text(contents),
            spans=tuple(Span(to(s.start), to(s.end), s.message) for s in self.masked.spans),
            trained=tuple(Span(to(s.start), to(s.end), s.message) for s in self.masked.trained),
            pieces=tuple(ContentSpan(to(p.start), to(p.end), p.message, p.kind) for p in self.masked.pieces),
        )


def learn_layout(
    roles: Sequence[str], placeholders: PlaceholderRendering, masked: MaskedConversation, kinds: Sequence[str]
) -> TurnLayout | None:
    """Return the shape that a verified mask of placeholders shows; null if its parts do not lie as plain chats' do."""
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
        tuple(roles), pattern, np.array(places, np.int64), masked, lengths, frame, placeholders.literals, edges
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

    def size(start: int, end: int) -> int:
        return len(text[start:end].encode())

    return [
        size(before, piece.start), kinds.index(piece.kind), number, int(bool(trained)),
        size(span.start, piece.start), size(piece.end, span.end),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ContentPositions:
    """Rows of known shapes as arrays: `counts` int64[N] contents each, and for every content of every row its place.

    `starts` and `ends` are the bytes of contents in their row's text; `places` int64[contents, 6] as in `TurnLayout`.
    """

    counts: Ints
    starts: Ints
    ends: Ints
    places: Ints


def compute_content_positions(shapes: Sequence[TurnLayout], sizes: Sequence[int]) -> ContentPositions:
    """Say where contents stand in the texts of rows, given each row's shape and the bytes of all their contents."""
    counts = np.array([len(shape.places) for shape in shapes], np.int64)
    places = np.concatenate([shape.places for shape in shapes])
    lengths = np.array(sizes, np.int64)
    ends = np.cumsum(places[:, BEFORE] + lengths)
    firsts = np.cumsum(counts) - counts
    # Ends run over all rows; what the rows before have is taken off again.
    ends -= np.repeat(ends[firsts] - places[firsts, BEFORE] - lengths[firsts], counts)
    return ContentPositions(counts, ends - lengths, ends, places)


def make_literal_pattern(literals: frozenset[str]) -> str:
    """Return a pattern that finds any of the texts in JSON text, escaped or not."""
    forms = {form for one in literals for form in (one, orjson.dumps(one)[1:-1].decode())}
    return "|".join(re.escape(form) for form in sorted(forms, key=lambda form: (-len(form), form)))
