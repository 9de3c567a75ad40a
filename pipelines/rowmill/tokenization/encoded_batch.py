"""Masked texts into examples: which tokens train, the spans they belong to, and the columns of a part's examples.

pieces   ···[  u  ]···[ a ]··      bytes of own text, per text of the batch
spans    t  u      t   a    t      tokens: `template` from 0, then one span per piece and per gap after it
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import (
    Bools,
    Ints,
    Numbers,
    Tokens,
    Weights,
    compute_offsets,
    count_true,
    expand_ranges,
    make_list_array,
    make_zeros,
)
from rowmill.schema.counts import CountSet
from rowmill.schema.examples import SPAN_KINDS, make_example_schema
from rowmill.schema.rows import ContentSpan, MaskedConversation, Rejected, Span
from rowmill.tokenization.control_tokens import contains_added_token
from rowmill.tokenization.reference_sample import ReferenceSample, Stretch
from rowmill.tokenization.tokenizer import EncodedTexts, Encoder, compute_byte_positions


@dataclass(frozen=True, slots=True)
class FlatSpans:
    """Byte ranges over a batch: range i is `[starts[i], ends[i])` of text `texts[i]`, ascending.

    `before` int64 is where the nearest foreign text ends before each range, 0 without one: own text of another message
    or untrained. `behind` is where the next one begins, the text's length or more without one: such own text, or the
    next message's header. `weights` float32 are the ranges' loss weights (None: all are 1).
    """

    texts: Ints
    starts: Ints
    ends: Ints
    before: Ints
    behind: Ints
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class BatchPositions:
    """The bytes of each token in the concatenation of all texts of a batch, with gaps between the texts.

    Text i begins at `bases[i]`, int64[N]; `starts` and `ends` int64[T] are the tokens' bytes.
    """

    bases: Ints
    starts: Ints
    ends: Ints


def locate_in_batch(encoded: EncodedTexts) -> BatchPositions:
    """Return where the tokens of a batch are in the concatenation of its texts."""
    counts = np.diff(encoded.offsets)
    last = np.zeros(len(counts), np.int64)
    nonempty = counts > 0
    last[nonempty] = np.maximum.reduceat(encoded.ends, encoded.offsets[:-1][nonempty]) if nonempty.any() else 0
    # The gap separates a token at the end of one text from a token at the start of the next.
    bases = np.cumsum(last + 2) - (last + 2)
    per_token = np.repeat(bases, counts)
    return BatchPositions(bases, encoded.starts + per_token, encoded.ends + per_token)


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Which tokens of a batch train.

    `mask` bool[T] with the loss weights `weights` float32[T]; `crossing` counts trained tokens across an edge of a
    span. `withheld` int64 are the tokens with trained text that do not train because they hold foreign text too.
    """

    mask: Bools
    weights: Weights | None
    crossing: int
    withheld: Ints


def find_trained_tokens(encoded: EncodedTexts, positions: BatchPositions, spans: FlatSpans) -> TrainedTokens:
    r"""Find the tokens that train, and their loss weights.

    A token trains if one of its bytes is in a trained span and none belongs to foreign text.

        ASSISTANT: It is 3. USER: And then?      own text and end of turn: `It is 3. `, with the blank
                  ╌╌      ╌  ╌╌╌                 ` It` and `.` train, ` US` does not: it holds the next header

    The first token of a text never trains, because no token precedes it. A token that does not train weighs 0, one in
    two spans as much as the later span says; without weights of spans there are none of tokens.
    """
    if not len(encoded.ids):
        return TrainedTokens(np.zeros(0, bool), None, 0, np.zeros(0, np.int64))
    first, last, crossing, withheld = _find_token_ranges(positions, spans)
    edges = np.zeros(len(encoded.ids) + 1, np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    mask = np.cumsum(edges[:-1]) > 0
    nonempty = np.diff(encoded.offsets) > 0
    mask[encoded.offsets[:-1][nonempty]] = False
    # What one message withholds may train as the start of the next one.
    withheld = withheld[~mask[withheld]]
    if spans.weights is None:
        return TrainedTokens(mask, None, crossing, withheld)
    weights, sizes = np.zeros(len(mask), np.float32), last - first
    weights[expand_ranges(first, sizes)] = np.repeat(spans.weights, sizes)
    weights[~mask] = 0
    return TrainedTokens(mask, weights, crossing, withheld)


def _find_token_ranges(positions: BatchPositions, spans: FlatSpans) -> tuple[Ints, Ints, int, Ints]:
    """Return the first token of every span, the token after its last one, and the last two of `TrainedTokens`."""
    starts, ends = positions.starts, positions.ends
    offset = positions.bases[spans.texts]
    left, right = spans.starts + offset, spans.ends + offset
    # The first token that ends after the span's start, and the first that begins at or after its end.
    first = np.searchsorted(ends, left, "right")
    last = np.searchsorted(starts, right, "left")
    kept = (first < last) & (left < right)
    begins, stops = starts[np.minimum(first, len(starts) - 1)], ends[np.maximum(last - 1, 0)]
    # A token across an edge is withheld if it reaches the neighboring foreign text.
    shares_left = kept & (begins < left) & (begins < spans.before + offset)
    first = first + shares_left
    shares_right = kept & (stops > right) & (stops > spans.behind + offset) & (last > first)
    last = last - shares_right
    is_withheld = np.zeros(len(starts), np.bool_)
    is_withheld[first[shares_left] - 1] = is_withheld[last[shares_right]] = True
    withheld = np.flatnonzero(is_withheld)
    kept &= first < last
    whole_left, whole_right = np.searchsorted(starts, left, "left"), np.searchsorted(ends, right, "right")
    boundary_tokens = int((last - first - np.maximum(whole_right - whole_left, 0))[kept].sum())
    return np.where(kept, first, 0), np.where(kept, last, 0), boundary_tokens, withheld


TEMPLATE_KIND = SPAN_KINDS.index("template")

PROMPT_KINDS = tuple(map(SPAN_KINDS.index, ("system", "user", "tool_result", "prompt")))
"""The kinds of text that `loss.prompt_weight` is for: what a model reads before it answers."""


_KIND_NUMBERS = {kind: number for number, kind in enumerate(SPAN_KINDS)}


# ── Ranges of a batch ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FlatContentSpans:
    """The own text of a batch of rows: piece j is bytes `[starts[j], ends[j])` of its text, ascending in each text.

    `counts` int64[N]: the number of pieces per text; `kinds` index `SPAN_KINDS`.
    """

    counts: Ints
    starts: Ints
    ends: Ints
    messages: Ints
    kinds: Ints


NO_TEXT_BEHIND = 1 << 62
"""The start of the next own text after a range if there is none; added to a text's base it is still an int64."""


def flatten_masks(masked: Sequence[MaskedConversation]) -> tuple[FlatContentSpans, FlatSpans]:
    """Return the pieces of masked texts, and their trained ranges with the bounds of the neighboring foreign text."""
    counts: list[int] = []
    pieces: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int, int, int]] = []
    weights: list[float] = []
    for i, one in enumerate(masked):
        at = None if one.text.isascii() else compute_byte_positions(one.text)
        counts.append(len(one.pieces))
        for start, end, message, kind in one.pieces:
            begin, stop = (start, end) if at is None else (int(at[start]), int(at[end]))
            pieces.append((begin, stop, message, _KIND_NUMBERS[kind]))
        for span in one.trained:
            before, behind = _find_neighbours(one, span)
            begin, stop = span.start, span.end
            if at is not None:
                begin, stop, before = int(at[begin]), int(at[stop]), int(at[before])
                behind = int(at[behind]) if behind < NO_TEXT_BEHIND else behind
            spans.append((i, begin, stop, before, behind))
            weight = one.weights.get(span.message, 1.0)
            for start, end, of_part in one.part_weights:
                weight = of_part if start <= span.start < end else weight
            weights.append(weight)
    own = np.array(pieces, np.int64).reshape(-1, 4)
    flat = np.ascontiguousarray(np.array(spans, np.int64).reshape(-1, 5).T)
    content = FlatContentSpans(np.array(counts, np.int64), own[:, 0], own[:, 1], own[:, 2], own[:, 3])
    is_weighted = weights.count(1.0) < len(weights)
    return content, FlatSpans(*flat, weights=np.array(weights, np.float32) if is_weighted else None)


def _find_neighbours(one: MaskedConversation, trained: Span) -> tuple[int, int]:
    """Return the end of the last foreign text before a trained range, and the start of the next one.

    Foreign is the own text of other messages, text of the same message that does not train, such as reasoning that
    truncation cut, and behind the range everything that follows its message.
    """
    pieces, message_ends = one.pieces, one.message_ends
    first, last = bisect_left(pieces, trained.start, key=itemgetter(0)), len(pieces)
    behind = max(first, bisect_left(pieces, trained.end, key=itemgetter(0)))
    while first > 0 and not _is_foreign(pieces[first - 1], trained, one):
        first -= 1
    while behind < last and not _is_foreign(pieces[behind], trained, one):
        behind += 1
    after = bisect_left(message_ends, trained.end)
    message_end = message_ends[after] if after < len(message_ends) else NO_TEXT_BEHIND
    start = pieces[behind].start if behind < last else NO_TEXT_BEHIND
    return pieces[first - 1].end if first else 0, min(start, message_end)


def _is_foreign(piece: ContentSpan, trained: Span, one: MaskedConversation) -> bool:
    if piece.message != trained.message:
        return True
    return not any(span.start < piece.end and piece.start < span.end for span in one.trained)


# ── Tokens of a batch ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Encoded texts as examples, text i that of row i; `bad` are those whose tokens have empty or backward offsets.

    `withheld` int64[N] counts the tokens of each text that hold trained text and text of another message.
    """

    columns: "ExampleColumns"
    bad: Bools
    boundary_tokens: int
    withheld: Ints

    def example(self, i: int) -> "Example":
        """Return one text as views into the arrays."""
        every = self.columns
        own = slice(int(every.span_offsets[i]), int(every.span_offsets[i + 1]))
        left, right = int(every.offsets[i]), int(every.offsets[i + 1])
        return Example(
            ids=every.ids[left:right],
            mask=every.mask[left:right],
            weights=None if every.weights is None else every.weights[left:right],
            span_starts=every.span_starts[own],
            span_messages=every.span_messages[own],
            span_kinds=every.span_kinds[own],
            original_tokens=right - left,
            original_trained=int(every.original_trained[i]),
            withheld=int(self.withheld[i]),
        )

    def select(self, rows: Ints, kept: Bools) -> "ExampleColumns":
        """Return the kept texts as columns, text i as the only example of row `rows[i]`."""
        if kept.all():
            return replace(self.columns, rows=rows)
        return make_columns([(int(rows[i]), 0, self.example(i)) for i in np.flatnonzero(kept).tolist()])


def make_batch(encoded: EncodedTexts, pieces: FlatContentSpans, trained: FlatSpans) -> EncodedBatch:
    """Find the tokens of byte ranges for all texts of a batch."""
    positions = locate_in_batch(encoded)
    found = find_trained_tokens(encoded, positions, trained)
    counts = pieces.counts
    texts = np.repeat(np.arange(len(counts)), counts)
    places = np.stack((pieces.starts, pieces.ends), axis=1).ravel()
    texts_of_places = np.repeat(texts, 2)
    # The first token, numbered over the batch, that begins at or after each place.
    tokens = np.searchsorted(positions.starts, places + positions.bases[texts_of_places], "left")
    tokens = np.minimum(tokens, encoded.offsets[texts_of_places + 1])
    # A token that reaches from one message's text into another's belongs to neither, so the first piece ends before it.
    follows = (texts[1:] == texts[:-1]) & (pieces.messages[1:] != pieces.messages[:-1])
    last = np.maximum(tokens[1::2] - 1, 0)
    shared, withheld = np.zeros(len(last), bool), np.zeros(len(counts), np.int64)
    if len(found.withheld):
        is_withheld = np.zeros(len(encoded.ids), bool)
        is_withheld[found.withheld] = True
        shared = is_withheld[last] & (tokens[1::2] > tokens[::2])
        withheld = count_true(is_withheld, encoded.offsets)
    last = last[:-1]
    shared[:-1] |= follows & (encoded.ends[last] > pieces.starts[1:]) & (encoded.starts[last] < pieces.ends[:-1])
    tokens[1::2] -= shared
    # Entry 0 of each text is its start; every piece adds its own start and end.
    entry_offsets = compute_offsets(2 * counts + 1)
    is_first = np.zeros(int(entry_offsets[-1]), bool)
    is_first[entry_offsets[:-1]] = True
    starts = np.empty(len(is_first), np.int64)
    starts[is_first] = encoded.offsets[:-1]
    starts[~is_first] = tokens
    kinds, messages = np.full(len(is_first), TEMPLATE_KIND, np.int8), np.full(len(is_first), -1, np.int64)
    opens = np.flatnonzero(~is_first)[::2]
    kinds[opens], messages[opens] = pieces.kinds, pieces.messages
    ends = np.append(starts[1:], 0)
    ends[entry_offsets[1:] - 1] = encoded.offsets[1:]
    kept = ends > starts
    offsets = compute_offsets(kept)[entry_offsets]
    # The spans of a text are not reliable if one of its tokens is empty or begins before the one before it. Byte
    # fallback gives several tokens the same character, so equal starts are valid.
    begins = encoded.offsets[:-1][np.diff(encoded.offsets) > 0]
    backward = np.append(False, encoded.starts[1:] < encoded.starts[:-1])[: len(encoded.ids)]
    backward[begins] = False
    bad = np.zeros(len(counts), bool)
    bad[np.searchsorted(encoded.offsets, np.flatnonzero(backward | (encoded.ends <= encoded.starts)), "right") - 1] = (
        True
    )
    relative = starts - np.repeat(encoded.offsets[:-1], 2 * counts + 1)
    columns = ExampleColumns(
        rows=np.arange(len(counts)),
        ks=np.zeros(len(counts), np.int64),
        offsets=encoded.offsets,
        ids=encoded.ids,
        mask=found.mask,
        span_offsets=offsets,
        span_starts=relative[kept],
        span_messages=messages[kept],
        span_kinds=kinds[kept],
        original_tokens=np.diff(encoded.offsets),
        original_trained=count_true(found.mask, encoded.offsets),
        removed={},
        weights=found.weights,
    )
    return EncodedBatch(columns, bad, found.crossing, withheld)


@dataclass(slots=True)
class Example:
    """One example of one row: views into its batch's arrays, and the counts of what truncation removed.

    `span_starts` int64[J] with `span_messages` and `span_kinds` give the kind of each token. `weights` float32[T] is
    None if every target has weight 1.
    """

    ids: Tokens
    mask: Bools
    span_starts: Ints
    span_messages: Ints
    span_kinds: NDArray[np.int8]
    original_tokens: int
    original_trained: int
    withheld: int = 0
    """Tokens with trained text that do not train, because they hold text of another message too."""
    messages_removed: int = 0
    exchanges_removed: int = 0
    reasoning_removed: int = 0
    tokens_cut: int = 0
    exchanges_trained: int = 0
    reasoning_trained: int = 0
    cut_trained: int = 0
    domain: str | None = None
    """The example's domain, if a custom class sets it; else its row's domain applies."""
    weights: Weights | None = None
    token_fields: Mapping[str, Numbers] = field(default_factory=dict[str, Numbers])
    """Further numbers of each token by name, [T] or [T, size]: what the row's options declare."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of the columns that only examples of its kind of rows have (`rows.ROW_KINDS`)."""

    def cut(self, start: int, stop: int) -> "Example":
        """Keep tokens `[start, stop)`; removed tokens count as cut, and the new first token is not a target."""
        borders = np.append(self.span_starts, len(self.ids))
        return self._select_tokens(slice(start, stop), np.clip(borders, start, stop) - start)

    def keep(self, kept: Bools) -> "Example":
        """Keep the marked tokens; removed tokens count as cut, and the new first token is not a target."""
        return self._select_tokens(kept, compute_offsets(kept)[np.append(self.span_starts, len(kept))])

    def _select_tokens(self, kept: "slice | Bools", borders: Ints) -> "Example":
        """Keep some tokens; among them the spans have these borders, int64[J + 1]."""
        nonempty = borders[1:] > borders[:-1]
        mask = self.mask[kept].copy()
        mask[:1] = False
        return replace(
            self,
            ids=self.ids[kept],
            mask=mask,
            weights=None if self.weights is None else np.where(mask, self.weights[kept], np.float32(0)),
            token_fields={name: values[kept] for name, values in self.token_fields.items()},
            span_starts=borders[:-1][nonempty],
            span_messages=self.span_messages[nonempty],
            span_kinds=self.span_kinds[nonempty],
            tokens_cut=self.tokens_cut + len(self.ids) - len(mask),
            cut_trained=self.cut_trained + int(self.mask.sum()) - int(mask.sum()),
        )


# ── Encoding a batch ───────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class PartTally:
    """What is counted while the examples of one part are made; `Counts` of the part are made from it."""

    dropped: Counter[str] = field(default_factory=Counter[str])
    """Rows' text that the template did not print, by kind."""
    control_strings: Counter[str] = field(default_factory=Counter[str])
    """Occurrences of control tokens in rows' text, by role and string: `user <|im_end|>`."""
    controlled_rows: int = 0
    rows_losing_reasoning: int = 0
    """Rows of which an answer trains without its reasoning, because the template prints none."""
    reference_path_texts: int = 0
    """Texts that took the reference path."""
    altered: int = 0
    """Texts whose ids decode to different text, because the tokenizer normalizes."""
    fast_path_mismatches: int = 0
    """Batches in which the fast path's ids or masks differed from the reference's."""
    engine_differs: bool = False
    """Whether ids in the sample differed: the whole part is then made again on the reference path."""
    sample: ReferenceSample = field(default_factory=ReferenceSample)
    """The stretches of the part's texts that were compared with the reference."""
    boundary_tokens: int = 0
    """Trained tokens that cross an edge of a span."""
    untrained_boundary_tokens: int = 0
    """Tokens of examples with trained text that do not train, because they hold text of another message too."""
    prompts_compared: int = 0
    """Rows whose generation prompt was encoded alone and compared with the row's ids."""
    prompts_that_differ: list[str] = field(default_factory=list[str])
    """Row ids of those rows whose token ids do not begin with the prompt's."""
    dropped_tokens: int = 0
    """Tokens of rows that were encoded and then rejected, as too long or without a target."""
    dropped_trained: int = 0
    """How many of `dropped_tokens` would have trained."""
    of_kind: CountSet = field(default_factory=CountSet)
    """What only rows of one kind are counted by."""


def encode_and_compare(
    encoder: Encoder, texts: Sequence[str], counts: PartTally, *, continuation: bool = False
) -> EncodedTexts:
    """Encode a batch and compare a sample with the reference; on any difference encode it all on the reference path.

    Of `continuation` texts, which are parts of counted ones, only a difference is counted.
    """
    sample, total = counts.sample, sum(map(len, texts))
    # As long as half of a part's first characters would be compared, the engine saves little, and opening it takes as
    # long as the reference takes for a million: 0.3 of the 2.2 s of a build of 100 chats.
    is_begin = not sample.characters and sample.engineless + total <= 2 * sample.minimum
    spares_engine = is_begin and encoder.can_spare_engine
    if spares_engine:
        sample.engineless += total
    encoded = encoder.encode(texts, continuation=continuation, spares_engine=spares_engine)
    if not continuation:
        counts.reference_path_texts += encoded.reference_texts
        counts.altered += encoded.altered
    if spares_engine or encoded.reference_texts == len(texts):
        return encoded
    if sample.characters + total <= sample.minimum:
        sample.characters += total
        stretches = [Stretch(i, 0, len(text)) for i, text in enumerate(texts)]
    else:
        stretches = sample.choose(texts, encoder.find_control_strings(texts, encoded))
    if encoder.matches_reference(texts, encoded, stretches, continuation=continuation):
        return encoded
    counts.fast_path_mismatches += 1
    counts.engine_differs = True
    return encoder.without_fast_path().encode(texts, continuation=continuation)


def encode_texts(
    encoder: Encoder,
    texts: Sequence[str],
    ordinary: Sequence[Sequence[tuple[int, int]]],
    counts: PartTally,
    *,
    cuts: Sequence[Sequence[int]] | None = None,
    continuation: bool = False,
) -> EncodedTexts:
    """Encode texts in one batch and compare a sample with the reference.

    `ordinary[i]` are the ranges of text i that must not become control tokens. A text is cut before the characters
    `cuts[i]`, and the pieces are encoded separately.
    """
    if cuts is None and not any(ordinary):
        return encode_and_compare(encoder, texts, counts, continuation=continuation)
    encode = partial(encode_and_compare, encoder, counts=counts)
    return encoder.encode_pieces(texts, ordinary, cuts, continuation=continuation, encode=encode)


def list_cuts(masked: Sequence[MaskedConversation], *, split: bool) -> list[list[int]] | None:
    """Return the characters before which each text is cut; None if none is.

    They are where the weight changes between parts of a message, and with `split` where training begins after untrained
    text.
    """
    cuts: list[list[int]] = []
    for one in masked:
        found = set[int]()
        for before, after in pairwise(one.part_weights):
            if before[1] == after[0] and before[2] != after[2]:
                found.add(after[0])
        if split:
            found |= {span.start for span in one.trained} - {span.end for span in one.trained}
        cuts.append(sorted(found - {0}))
    return cuts if any(cuts) else None


def make_examples(
    masked: Sequence[MaskedConversation],
    ordinary: Sequence[list[tuple[int, int]]],
    encoder: Encoder,
    counts: PartTally,
    *,
    split: bool = False,
) -> "list[Example | Rejected]":
    """Encode masked texts in one batch and find the tokens of their spans.

    `ordinary[i]` are the ranges of text i that must not become control tokens. With `split` a text is cut where
    training begins, so that a prompt has the same ids as alone.
    """
    texts, cuts = [one.text for one in masked], list_cuts(masked, split=split)
    encoded = encode_texts(encoder, texts, ordinary, counts, cuts=cuts)
    batch = make_batch(encoded, *flatten_masks(masked))
    counts.boundary_tokens += batch.boundary_tokens
    made: list[Example | Rejected] = []
    for i, ranges in enumerate(ordinary):
        if batch.bad[i]:
            made.append(Rejected("offsets_degenerate", "tokens with empty or backward offsets"))
        else:
            made.append(batch.example(i))
        if ranges and contains_added_token(encoder, encoded.get_text(i), masked[i].text, ranges):
            made[i] = Rejected("control_token_in_content", "the tokenizer makes a control token of ordinary text")
    return made


# ── Examples as columns ────────────────────────────────────────────────────────────────────────────


_SCHEMAS = {weighted: make_example_schema(weighted=weighted) for weighted in (False, True)}

_REMOVED_COLUMNS = ("messages_removed", "exchanges_removed", "reasoning_removed", "tokens_cut",
            "exchanges_trained", "reasoning_trained", "cut_trained")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExampleColumns:
    """Examples of a part, flat: example j is example number `ks[j]` of row `rows[j]`.

    `[offsets[j], offsets[j + 1])` are its tokens and `[span_offsets[j], span_offsets[j + 1])` its spans. `removed` has
    a column for each name in `_REMOVED_COLUMNS`; absent columns are zero.
    """

    rows: Ints
    ks: Ints
    offsets: Ints
    ids: Tokens
    mask: Bools
    span_offsets: Ints
    span_starts: Ints
    span_messages: Ints
    span_kinds: NDArray[np.int8]
    original_tokens: Ints
    original_trained: Ints
    removed: "dict[str, Ints]"
    domains: "tuple[str | None, ...]" = ()
    """The examples' domains, if a custom class sets them; empty: the rows' domains apply."""
    weights: Weights | None = None
    """The loss weight of every token; None: every target has weight 1."""
    token_fields: Mapping[str, Numbers] = field(default_factory=dict[str, Numbers])
    """Further numbers of every token by name; an absent field is 0.0."""
    own: "tuple[Mapping[str, Any], ...]" = ()
    """Values of the columns that only examples of one kind of rows have; empty: their builder makes none."""

    @property
    def token_weights(self) -> Weights:
        """The loss weight of every token; 0 for an untrained one."""
        return self.mask.astype(np.float32) if self.weights is None else self.weights

    def locate_spans(self) -> Ints:
        """Return where each span begins in the tokens of all examples, and where the last one ends.

        The first span of an example begins at its first token, so every span ends where the next one begins.
        """
        begins = self.span_starts + np.repeat(self.offsets[:-1], np.diff(self.span_offsets))
        return np.append(begins, len(self.mask))

    def count_verified(self) -> tuple[Ints, Ints, int]:
        """Return each example's trained tokens, those of its template text that do not train, and how many agree.

        That is the number of the check `mask_verified`: the mask of an example agrees with its spans if the text of
        every message trains as a whole or not at all, except for the example's first token. A mask that is shifted by
        one token violates this.
        """
        places, count = self.locate_spans(), len(self.rows)
        sizes, trained = np.diff(places), count_true(self.mask, places)
        examples, in_template = (
            np.repeat(np.arange(count), np.diff(self.span_offsets)),
            self.span_kinds == TEMPLATE_KIND,
        )
        by_example = np.bincount(examples, trained, count).astype(np.int64)
        template = np.bincount(examples, np.where(in_template, sizes - trained, 0), count).astype(np.int64)
        sizes = sizes - ((self.span_starts == 0) & (sizes > 0))
        partly = (trained > 0) & (trained < sizes) & ~in_template
        return by_example, template, count - int(np.count_nonzero(np.bincount(examples[partly])))

    def weigh_prompts(self, weight: float) -> "ExampleColumns":
        """Train the prompts too, with a weight: their text that is not a target, but for an example's first token."""
        added = np.repeat(np.isin(self.span_kinds, PROMPT_KINDS), np.diff(self.locate_spans())) & ~self.mask
        added[self.offsets[:-1]] = False
        # What truncation removed of a prompt is not a target that was lost.
        trained = self.original_trained + count_true(added, self.offsets)
        weights = np.where(added, np.float32(weight), self.token_weights)
        return replace(self, mask=self.mask | added, weights=weights, original_trained=trained)


@dataclass(frozen=True, slots=True)
class ExampleFields:
    """The columns that a dataset's examples have or lack beside those of every dataset.

    `weighted`: loss weights; `of_kind`: what only examples of its kind of rows have; `declared`: those of its options,
    of which `per_token` have a number of that type, or several, for each token.
    """

    weighted: bool = False
    prompt_weight: float = 0.0
    of_kind: Sequence[pa.Field] = ()
    declared: Sequence[pa.Field] = ()
    per_token: Mapping[str, pa.DataType] = field(default_factory=dict[str, pa.DataType])


def tabulate_examples(
    built: Sequence[ExampleColumns], table: pa.Table, fields: ExampleFields
) -> tuple[pa.Table, Ints, int]:
    """Return the examples of a table's rows, in their order, the row of each, and how many agree with their spans.

    Example k of a row is named `row_id#k`.
    """
    columns = built[0] if len(built) == 1 else concat_columns(built or [make_columns([])])
    if fields.prompt_weight:
        columns = columns.weigh_prompts(fields.prompt_weight)
    rows, lengths = pa.array(columns.rows), np.diff(columns.offsets)
    own = table.select(["row_id", "split", "domain"]).take(rows)
    names, splits, domains = map(pa.ChunkedArray.combine_chunks, own.columns)
    numbers = pa.array(columns.ks).cast(pa.string()) if columns.ks.any() else pa.scalar("0")
    trained, template, verified = columns.count_verified()
    of_tokens = pa.array(columns.offsets.astype(np.int32))
    of_spans = pa.array(columns.span_offsets.astype(np.int32))
    make_lists = pa.ListArray.from_arrays
    none = np.zeros(len(rows), np.int32)
    removed = [pa.array(columns.removed.get(name, none).astype(np.int32)) for name in _REMOVED_COLUMNS]
    examples = pa.Table.from_arrays(
        [
            pc.binary_join_element_wise(names, numbers, "#"),
            make_lists(pa.array(np.arange(len(rows) + 1, dtype=np.int32)), names),
            splits,
            pc.coalesce(pa.array(columns.domains, pa.string()), domains) if columns.domains else domains,
            make_lists(of_tokens, pa.array(columns.ids)),
            make_lists(of_tokens, pa.array(columns.mask)),
            make_lists(of_spans, pa.array(columns.span_starts.astype(np.int32))),
            make_lists(of_spans, pa.array(columns.span_messages.astype(np.int32))),
            make_lists(of_spans, pa.array(columns.span_kinds)),
            pa.array(columns.original_tokens.astype(np.int32)),
            pa.array(lengths.astype(np.int32)),
            pa.array(trained.astype(np.int32)),
            pa.array((lengths - trained - template).astype(np.int32)),
            pa.array(template.astype(np.int32)),
            *removed[:4],
            pa.array((columns.original_trained - trained).astype(np.int32)),
            *removed[4:],
            *([make_lists(of_tokens, pa.array(columns.token_weights))] if fields.weighted else []),
        ],
        schema=_SCHEMAS[fields.weighted],
    )
    for one in (*fields.of_kind, *fields.declared):
        if one.name in fields.per_token:
            zeros = make_zeros(len(columns.ids), fields.per_token[one.name])
            values = make_list_array(columns.offsets, columns.token_fields.get(one.name, zeros))
        elif one in fields.of_kind and (columns.own or not len(rows)):
            # What the builder of this kind of rows made, else the row's.
            values = pa.array([of_row[one.name] for of_row in columns.own], one.type)
        else:
            values = table.column(one.name).take(rows)
        examples = examples.append_column(one, values)
    order = np.lexsort((columns.ks, columns.rows))
    if not (np.diff(order) == 1).all():
        examples = examples.take(pa.array(order))
    return examples, np.sort(columns.rows), verified


_FLAT_TYPES: Mapping[str, Any] = {
    "ids": np.int32, "mask": np.bool_, "span_starts": np.int64, "span_messages": np.int64, "span_kinds": np.int8,
}  # fmt: skip
"""The arrays of an example that are joined, and the types of the joined ones."""


def make_columns(parts: "Sequence[tuple[int, int, Example]]") -> ExampleColumns:
    """Return (row index, number among the row's examples, example) triples as columns."""
    rows, ks, examples = zip(*parts, strict=True) if parts else ((), (), ())
    names = Example.__slots__
    values = [*zip(*map(attrgetter(*names), examples), strict=True)] or [()] * len(names)
    held: dict[str, Sequence[Any]] = dict(zip(names, values, strict=True))
    lengths, fields = [*map(len, held["ids"])], held["token_fields"]
    return ExampleColumns(
        rows=np.array(rows, np.int64),
        ks=np.array(ks, np.int64),
        offsets=compute_offsets(lengths),
        span_offsets=compute_offsets([*map(len, held["span_starts"])]),
        original_tokens=np.array(held["original_tokens"], np.int64),
        original_trained=np.array(held["original_trained"], np.int64),
        removed={name: np.array(held[name], np.int64) for name in _REMOVED_COLUMNS},
        domains=tuple(held["domain"]) if any(held["domain"]) else (),
        weights=_concat_weights(held["mask"], held["weights"]),
        token_fields=_concat_fields(lengths, fields) if any(fields) else {},
        own=tuple(held["columns"]) if any(held["columns"]) else (),
        **{
            name: np.concatenate((np.empty(0, kind), *held[name]), dtype=kind, casting="unsafe")
            for name, kind in _FLAT_TYPES.items()
        },
    )


def concat_columns(several: Sequence[ExampleColumns]) -> ExampleColumns:
    """Concatenate one or more columns."""
    removed = {name for one in several for name in one.removed}
    none = {id(one): np.zeros(len(one.rows), np.int64) for one in several}
    names = ("rows", "ks", *_FLAT_TYPES, "original_tokens", "original_trained")
    parts: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in several]) for name in names}
    for name in ("offsets", "span_offsets"):
        parts[name] = compute_offsets(np.concatenate([np.diff(getattr(one, name)) for one in several]))
    taken = {name: np.concatenate([one.removed.get(name, none[id(one)]) for one in several]) for name in removed}
    own = any(one.domains for one in several)
    domains = tuple(name for one in several for name in one.domains or [None] * len(one.rows)) if own else ()
    weights = _concat_weights([one.mask for one in several], [one.weights for one in several])
    fields = _concat_fields([len(one.ids) for one in several], [one.token_fields for one in several])
    of_kind = tuple(values for one in several for values in one.own)
    return ExampleColumns(**parts, removed=taken, domains=domains, weights=weights, token_fields=fields, own=of_kind)


def _concat_weights(masks: Sequence[Bools], several: "Sequence[Weights | None]") -> Weights | None:
    """Concatenate weights, which are the masks where there are none; None if there are none at all."""
    if all(weights is None for weights in several):
        return None
    pairs = zip(masks, several, strict=True)
    return np.concatenate([mask.astype(np.float32) if weights is None else weights for mask, weights in pairs])


def _concat_fields(lengths: Sequence[int], several: "Sequence[Mapping[str, Numbers]]") -> dict[str, Numbers]:
    """Concatenate fields of so many tokens each; a field that some lack is 0 there."""
    like = {name: values for fields in several for name, values in fields.items()}
    return {
        name: np.concatenate(
            [
                fields.get(name, np.zeros((tokens, *one.shape[1:]), one.dtype))
                for tokens, fields in zip(lengths, several, strict=True)
            ]
        )
        for name, one in like.items()
    }


def count_outside_vocabulary(table: pa.Table, vocab_size: int) -> int:
    """Count the token ids of a part's examples outside the vocabulary."""
    ids = table.column("input_ids").combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return int(np.count_nonzero((ids < 0) | (ids >= vocab_size)))
