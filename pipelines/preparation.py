"""Canonical rows → tokenized examples: rendering, masking, truncation and tokenization in their order.

What belongs here: the order of those rooms for one batch of rows of each kind, and the example that comes
out. What does not: any of the rooms' own work, or files (`parts.py`). This is a hall of the corridor.

    conversation   render ─► mask ─► encode ─► too long? truncate, and again ─► Example
    pair           encode input, encode output as its continuation ─► BOS input sep output EOS
    text           encode ─► BOS text EOS ─► too long? windows, or the first tokens

Batches are columnar where tokens are concerned; a Python object exists per message, never per token.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.contract import Conversation, mismatched_prompts, warnings
from pipelines.errors import ConfigError
from pipelines.examples import EXAMPLES, KINDS
from pipelines.masking import Masker, MaskRules
from pipelines.own_rows import Built, OwnExamples
from pipelines.reasoning import inlined, limited
from pipelines.recipe import Dataset
from pipelines.rendering import Renderer, RendererSpec
from pipelines.rows import Json, Kind, Masked, Message, Rejected, Span, from_json, to_json
from pipelines.tokenization import (
    Bools,
    ControlStrings,
    Encoded,
    Encoder,
    FlatSpans,
    Ints,
    byte_positions,
    degenerate,
    holds_added_token,
    is_changed,
    rejoined,
    reveal,
    token_at,
    trained_tokens,
)
from pipelines.truncation import Overlong, Truncated, Truncater

Tokens = NDArray[np.int32]
TEMPLATE = KINDS.index("template")

BATCH_CHARS = 1 << 20
"""Characters of rows per batch: enough for the columnar steps, little for memory (some 60 MB)."""

SAMPLE_EVERY = 50
"""One text in so many is encoded again by the reference tokenizer, in every batch the first unless it is very long."""

SAMPLE_CHARS = 1 << 18
"""Longer texts are not compared: the reference holds 500 bytes per token, which is 1.4 GB for 10 MB of text."""


@dataclass(slots=True)
class Example:
    """One example of one row: views into its batch's arrays, and what truncation removed.

    `span_starts` int64[J] with `span_messages` and `span_kinds` tell what each token is.
    """

    ids: Tokens
    mask: Bools
    span_starts: Ints
    span_messages: Ints
    span_kinds: NDArray[np.int8]
    original_tokens: int
    original_trained: int
    messages_removed: int = 0
    exchanges_removed: int = 0
    reasoning_removed: int = 0
    tokens_cut: int = 0
    exchanges_trained: int = 0
    reasoning_trained: int = 0
    cut_trained: int = 0
    domain: str | None = None
    """The example's own, where a class of one's own names it; else its row's."""

    def cut(self, start: int, stop: int) -> "Example":
        """Keep tokens `[start, stop)`; what is removed is counted as cut. The new first token is no target."""
        inside = (self.span_starts < stop) & (np.append(self.span_starts[1:], len(self.ids)) > start)
        mask = self.mask[start:stop].copy()
        mask[:1] = False
        return replace(
            self,
            ids=self.ids[start:stop],
            mask=mask,
            span_starts=np.maximum(self.span_starts[inside] - start, 0),
            span_messages=self.span_messages[inside],
            span_kinds=self.span_kinds[inside],
            tokens_cut=self.tokens_cut + len(self.ids) - (stop - start),
            cut_trained=self.cut_trained + int(self.mask.sum()) - int(mask.sum()),
        )


Outcome = list[Example] | Rejected
"""What became of one row: its examples in order, or why there are none."""


@dataclass(slots=True)
class Counts:
    """What is counted while rows are prepared, beside the examples themselves; sums over parts are laws' facts."""

    dropped: dict[str, int] = field(default_factory=dict[str, int])
    control_strings: dict[str, int] = field(default_factory=dict[str, int])
    """Occurrences of control tokens in rows' own text, by role and string: `user <|im_end|>`."""
    controlled_rows: int = 0
    template: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the template's contract says that a trainer should know."""
    usual_way: int = 0
    altered: int = 0
    """Texts whose ids decode to other text, because the tokenizer normalises."""
    lane_differences: int = 0
    straddles: int = 0
    dropped_tokens: int = 0
    """Tokens of rows that were encoded and then rejected: too long, or without a target."""

    def add_control_strings(self, control: ControlStrings, one: Conversation) -> None:
        """Count control tokens in a row's own text, by role and string."""
        self.controlled_rows += 1
        for name, count in control.occurrences(one.messages, one.tools, one.kwargs).items():
            self.control_strings[name] = self.control_strings.get(name, 0) + count

    def add_dropped(self, dropped: dict[str, int]) -> None:
        """Count own text that the template did not print."""
        for kind, count in dropped.items():
            self.dropped[kind] = self.dropped.get(kind, 0) + count


def encode_checked(encoder: Encoder, texts: Sequence[str], counts: Counts) -> Encoded:
    """Encode a batch and compare a sample with the reference; on any difference all of it goes the usual way."""
    encoded = encoder.encode(texts)
    counts.usual_way += encoded.usual
    counts.altered += encoded.altered
    sample = [i for i in range(0, len(texts), SAMPLE_EVERY) if len(texts[i]) <= SAMPLE_CHARS]
    if encoded.usual == len(texts) or encoder.same_as_usual(texts, encoded, sample):
        return encoded
    counts.lane_differences += 1
    return encoder.without_fast_lane().encode(texts)


# ── Text and spans → examples ──────────────────────────────────────────────────────────────────────


def examples_of(
    masked: Sequence[Masked],
    ordinary: Sequence[list[tuple[int, int]]],
    encoder: Encoder,
    counts: Counts,
    *,
    split: bool = False,
) -> "list[Example | Rejected]":
    """Encode masked texts in one batch and find the tokens of their spans.

    `ordinary[i]` are ranges of text i that must not become control tokens. With `split` a text is cut where it
    begins to train, and the pieces are encoded apart, so that a prompt's ids are those of the prompt alone.
    """
    plain = [i for i, ranges in enumerate(ordinary) if not ranges]
    encoded = _encoded_texts([masked[i] for i in plain], encoder, counts, split=split)
    made: dict[int, Example | Rejected] = dict(
        zip(plain, _examples([masked[i] for i in plain], encoded, counts), strict=True)
    )
    for i, ranges in enumerate(ordinary):
        if ranges:
            cuts = _trained_starts(masked[i]) if split else ()
            around = encoder.encode_around(masked[i].text, ranges, cuts)
            made[i] = _examples([masked[i]], around, counts)[0]
            if holds_added_token(encoder.card, around, masked[i].text, ranges):
                made[i] = Rejected("control_token_in_content", "the tokenizer makes a control token of ordinary text")
    return [made[i] for i in range(len(masked))]


def _encoded_texts(masked: Sequence[Masked], encoder: Encoder, counts: Counts, *, split: bool) -> Encoded:
    if not split:
        return encode_checked(encoder, [one.text for one in masked], counts)
    bounds = [[0, *_trained_starts(one), len(one.text)] for one in masked]
    pieces = [one.text[a:b] for one, at in zip(masked, bounds, strict=True) for a, b in pairwise(at)]
    sizes = np.array([len(at) - 1 for at in bounds], np.int64)
    encoded = encode_checked(encoder, pieces, counts)
    later = np.setdiff1d(np.arange(len(pieces)), np.cumsum(sizes) - sizes)
    return rejoined(encoder.as_continuations(encoded, pieces, later), pieces, sizes)


def _trained_starts(one: Masked) -> list[int]:
    """Return the characters, other than the first, at which training begins after text that does not train."""
    ends = {span.end for span in one.trained}
    return [span.start for span in one.trained if span.start and span.start not in ends]


def _examples(masked: Sequence[Masked], encoded: Encoded, counts: Counts) -> "list[Example | Rejected]":
    to_bytes = [None if one.text.isascii() else byte_positions(one.text) for one in masked]
    mask, straddles = trained_tokens(encoded, _trained_spans(masked, to_bytes))
    counts.straddles += straddles
    bad = degenerate(encoded)
    trained = np.concatenate(([0], np.cumsum(mask)))[encoded.offsets]
    spans = _token_spans(masked, to_bytes, encoded)
    made: list[Example | Rejected] = []
    bounds: list[int] = encoded.offsets.tolist()
    cuts: list[int] = spans.offsets.tolist()
    totals: list[int] = np.diff(trained).tolist()
    for i, (left, right) in enumerate(pairwise(bounds)):
        if bad[i]:
            made.append(Rejected("offsets_degenerate", "tokens with empty or backward offsets"))
            continue
        own = slice(cuts[i], cuts[i + 1])
        made.append(
            Example(
                ids=encoded.ids[left:right],
                mask=mask[left:right],
                span_starts=spans.starts[own],
                span_messages=spans.messages[own],
                span_kinds=spans.kinds[own],
                original_tokens=right - left,
                original_trained=totals[i],
            )
        )
    return made


def _trained_spans(masked: Sequence[Masked], to_bytes: "Sequence[Ints | None]") -> FlatSpans:
    rows: list[tuple[int, int, int, int, int]] = []
    for i, one in enumerate(masked):
        at = to_bytes[i]
        for span in one.trained:
            left, right = _owner(one, span)
            if at is None:
                rows.append((i, span.start, span.end, left, right))
            else:
                rows.append((i, int(at[span.start]), int(at[span.end]), int(at[left]), int(at[right])))
    flat = np.array(rows, np.int64).reshape(-1, 5)
    return FlatSpans(*(np.ascontiguousarray(flat[:, column]) for column in range(5)))


def _owner(one: Masked, trained: Span) -> tuple[int, int]:
    """Return the span of the message around a trained span: tokens that straddle may reach so far."""
    for span in one.spans:
        if span.message == trained.message and span.start <= trained.start and trained.end <= span.end:
            return span.start, span.end
    return trained.start, trained.end


@dataclass(frozen=True, slots=True)
class _TokenSpans:
    """Token spans of a batch: `[offsets[i], offsets[i + 1])` are text i's; starts count from its first token."""

    starts: Ints
    messages: Ints
    kinds: NDArray[np.int8]
    offsets: Ints


_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


def _token_spans(masked: Sequence[Masked], to_bytes: "Sequence[Ints | None]", encoded: Encoded) -> _TokenSpans:
    """Return each text's token spans: `template` from 0, then a span per piece and per gap behind it.

    pieces     ···[  u  ]···[ a ]··          two pieces make five spans, empty ones left out
    spans      t  u      t   a    t
    """
    counts = np.fromiter((len(one.pieces) for one in masked), np.int64, len(masked))
    flat = np.array(
        [(p.start, p.end, p.message, _KIND_NUMBERS[p.kind]) for one in masked for p in one.pieces], np.int64
    ).reshape(-1, 4)
    firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    for i, at in enumerate(to_bytes):
        if at is not None:
            flat[firsts[i] : firsts[i + 1], :2] = at[flat[firsts[i] : firsts[i + 1], :2]]
    texts = np.repeat(np.arange(len(masked)), counts)
    tokens = token_at(encoded, np.repeat(texts, 2), flat[:, :2].ravel())
    # Entry 0 of each text is its beginning; every piece adds where it starts and where it ends.
    entry_offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(2 * counts + 1)))
    is_first = np.zeros(int(entry_offsets[-1]), bool)
    is_first[entry_offsets[:-1]] = True
    starts = np.empty(len(is_first), np.int64)
    starts[is_first] = encoded.offsets[:-1]
    starts[~is_first] = tokens
    kinds, messages = np.full(len(is_first), TEMPLATE, np.int64), np.full(len(is_first), -1, np.int64)
    opens = np.flatnonzero(~is_first)[::2]
    kinds[opens], messages[opens] = flat[:, 3], flat[:, 2]
    ends = np.append(starts[1:], 0)
    ends[entry_offsets[1:] - 1] = encoded.offsets[1:]
    kept = ends > starts
    offsets = np.append(0, np.cumsum(kept, dtype=np.int64))[entry_offsets]
    owners = np.repeat(np.arange(len(masked)), 2 * counts + 1)
    relative = starts - encoded.offsets[owners]
    return _TokenSpans(relative[kept], messages[kept], kinds[kept].astype(np.int8), offsets)


# ── Pairs and documents ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Stream:
    """One piece of every example of a batch: its ids, its class, and whether it trains."""

    ids: Tokens
    offsets: Ints
    kind: int
    trains: bool


def constant(token_id: int, count: int, *, kind: int, trains: bool) -> Stream:
    """Return a stream of the same single token for each of `count` examples."""
    return Stream(np.full(count, token_id, np.int32), np.arange(count + 1), kind, trains)


def unless_there(edge: Stream, encoded: Encoded, at: Literal[0, -1]) -> Stream:
    """Leave a constant stream's token out where the text begins (0) or ends (−1) with that token already."""
    lengths = np.diff(encoded.offsets)
    places = encoded.offsets[:-1] if at == 0 else encoded.offsets[1:] - 1
    there = np.zeros(len(lengths), bool)
    there[lengths > 0] = encoded.ids[places[lengths > 0]] == edge.ids[:1]
    if not there.any():
        return edge
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(~there, dtype=np.int64)))
    return replace(edge, ids=edge.ids[: int(offsets[-1])], offsets=offsets)


def interleave(streams: Sequence[Stream]) -> list[Example]:
    """Join the streams example by example: what streams[0], streams[1] … have for it, end to end."""
    count = len(streams[0].offsets) - 1
    lengths = np.stack([np.diff(s.offsets) for s in streams], axis=1)
    ends = np.cumsum(lengths.ravel())
    begins = (ends - lengths.ravel()).reshape(count, len(streams))
    total = int(ends[-1]) if count else 0
    ids, mask = np.empty(total, np.int32), np.empty(total, bool)
    for column, stream in enumerate(streams):
        index = np.repeat(begins[:, column] - stream.offsets[:-1], lengths[:, column]) + np.arange(len(stream.ids))
        ids[index] = stream.ids
        mask[index] = stream.trains
    kinds = np.array([s.kind for s in streams], np.int8)
    row_ends = ends.reshape(count, len(streams))[:, -1] if count else ends
    return [_joined(ids, mask, begins[i], int(row_ends[i]), lengths[i] > 0, kinds) for i in range(count)]


def _joined(ids: Tokens, mask: Bools, begins: Ints, end: int, nonempty: Bools, kinds: NDArray[np.int8]) -> Example:
    first = int(begins[0])
    own = mask[first:end]
    own[:1] = False
    return Example(
        ids=ids[first:end],
        mask=own,
        span_starts=begins[nonempty] - first,
        span_messages=np.full(int(nonempty.sum()), -1, np.int64),
        span_kinds=kinds[nonempty],
        original_tokens=end - first,
        original_trained=int(own.sum()),
    )


def windows(example: Example, limit: int) -> list[Example]:
    """Cut a document into consecutive windows of at most `limit` tokens; nothing is lost.

    Each window is an example of its own, so its first token has nothing before it and is no target.
    """
    pieces: list[Example] = []
    for start in range(0, len(example.ids), limit):
        piece = example.cut(start, min(start + limit, len(example.ids)))
        size, trained = len(piece.ids), int(example.mask[start : start + limit].sum())
        first_target = trained - int(piece.mask.sum())
        pieces.append(
            replace(piece, original_tokens=size, original_trained=trained, tokens_cut=0, cut_trained=first_target)
        )
    return pieces


def cut_pair(example: Example, limit: int, side: Literal["left", "right"], input_tokens: int, first: int) -> Example:
    """Shorten a pair to `limit` tokens: its input on `side` first, then its output on the right.

    `first` is where the input begins (1 after a BOS), `input_tokens` how many it has. EOS goes with the
    output's end: an answer that was cut must not teach the model to stop there.
    """
    excess = len(example.ids) - limit
    from_input = min(excess, input_tokens)
    begin = first if side == "left" else first + input_tokens - from_input
    keep = np.ones(len(example.ids), bool)
    keep[begin : begin + from_input] = False
    keep[len(keep) - (excess - from_input) :] = False
    return drop_tokens(example, keep)


def with_bos(example: Example, bos_id: int) -> Example:
    """Put a BOS, which does not train, before an example that does not begin with one."""
    if len(example.ids) and int(example.ids[0]) == bos_id:
        return example
    opens = len(example.span_kinds) > 0 and int(example.span_kinds[0]) == TEMPLATE
    kept = slice(1 if opens else 0, None)
    return replace(
        example,
        ids=np.concatenate((np.array([bos_id], np.int32), example.ids)),
        mask=np.concatenate((np.zeros(1, bool), example.mask)),
        span_starts=np.concatenate((np.zeros(1, np.int64), example.span_starts[kept] + 1)),
        span_messages=np.concatenate((np.full(1, -1, np.int64), example.span_messages[kept])),
        span_kinds=np.concatenate((np.full(1, TEMPLATE, np.int8), example.span_kinds[kept])),
        original_tokens=example.original_tokens + 1,
    )


def drop_tokens(example: Example, keep: Bools) -> Example:
    """Keep the marked tokens of an example; spans shrink, and what goes is counted as cut."""
    before = np.concatenate(([0], np.cumsum(keep)))
    starts = before[example.span_starts]
    ends = before[np.append(example.span_starts[1:], len(keep))]
    nonempty = ends > starts
    mask = example.mask[keep]
    mask[:1] = False
    return replace(
        example,
        ids=example.ids[keep],
        mask=mask,
        span_starts=starts[nonempty],
        span_messages=example.span_messages[nonempty],
        span_kinds=example.span_kinds[nonempty],
        tokens_cut=example.tokens_cut + int((~keep).sum()),
        cut_trained=example.cut_trained + int(example.mask.sum()) - int(mask.sum()),
    )


def keep_tail(example: Example, limit: int, side: Literal["left", "right"], bos_id: int | None) -> Example:
    """Do the last stage of truncation: keep the last (`left` is cut) or the first `limit` tokens; a BOS stays."""
    keep = np.ones(len(example.ids), bool)
    leads = bos_id is not None and len(example.ids) > 0 and int(example.ids[0]) == bos_id
    excess = len(example.ids) - limit
    if side == "left":
        keep[int(leads) : int(leads) + excess] = False
    else:
        keep[limit:] = False
    return drop_tokens(example, keep)


# ── Examples → columns ─────────────────────────────────────────────────────────────────────────────


def to_table(
    row_ids: Sequence[str], splits: Sequence[str], domains: "Sequence[str | None]", outcomes: Sequence[list[Example]]
) -> pa.Table:
    """Return a part's examples as `examples.EXAMPLES`; example k of a row is called `row_id#k`."""
    flat = [(i, k, one) for i, made in enumerate(outcomes) for k, one in enumerate(made)]
    rows = [i for i, _, _ in flat]
    made = [one for _, _, one in flat]
    lengths = np.array([len(one.ids) for one in made], np.int64)
    span_counts = np.array([len(one.span_starts) for one in made], np.int64)
    mask = _concat([one.mask for one in made], np.bool_)
    trained = _sums(mask, lengths)
    template = _template_tokens(made, mask)
    return pa.table(
        [
            pa.array([f"{row_ids[i]}#{k}" for i, k, _ in flat], pa.string()),
            pa.ListArray.from_arrays(
                pa.array(np.arange(len(flat) + 1, dtype=np.int32)), pa.array([row_ids[i] for i in rows], pa.string())
            ),
            pa.array([splits[i] for i in rows], pa.string()),
            pa.array([one.domain or domains[i] for i, _, one in flat], pa.string()),
            _lists(lengths, _concat([one.ids for one in made], np.int32)),
            _lists(lengths, mask),
            _lists(span_counts, _concat([one.span_starts for one in made], np.int32)),
            _lists(span_counts, _concat([one.span_messages for one in made], np.int32)),
            _lists(span_counts, _concat([one.span_kinds for one in made], np.int8)),
            pa.array([one.original_tokens for one in made], pa.int32()),
            pa.array(lengths.astype(np.int32)),
            pa.array(trained.astype(np.int32)),
            pa.array((lengths - trained - template).astype(np.int32)),
            pa.array(template.astype(np.int32)),
            pa.array([one.messages_removed for one in made], pa.int32()),
            pa.array([one.exchanges_removed for one in made], pa.int32()),
            pa.array([one.reasoning_removed for one in made], pa.int32()),
            pa.array([one.tokens_cut for one in made], pa.int32()),
            pa.array([one.original_trained - int(t) for one, t in zip(made, trained, strict=True)], pa.int32()),
            pa.array([one.exchanges_trained for one in made], pa.int32()),
            pa.array([one.reasoning_trained for one in made], pa.int32()),
            pa.array([one.cut_trained for one in made], pa.int32()),
        ],
        schema=EXAMPLES,
    )


def _concat(arrays: "Sequence[NDArray[Any]]", dtype: Any) -> "NDArray[Any]":
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _lists(lengths: Ints, values: "NDArray[Any]") -> pa.ListArray:
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _sums(flags: Bools, lengths: Ints) -> Ints:
    ends = np.cumsum(lengths)
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(flags)))
    return before[ends] - before[ends - lengths]


def _template_tokens(made: Sequence[Example], mask: Bools) -> Ints:
    """Count per example the untrained tokens that the template wrote."""
    lengths = np.array([len(one.ids) for one in made], np.int64)
    counts = np.array([len(one.span_starts) for one in made], np.int64)
    kinds = _concat([one.span_kinds for one in made], np.int8)
    # Each example's first span begins with it, so over all examples a span ends where the next one begins.
    begins = _concat([one.span_starts for one in made], np.int64) + np.repeat(np.cumsum(lengths) - lengths, counts)
    sizes = np.diff(np.append(begins, len(mask)))
    return _sums(np.repeat(kinds == TEMPLATE, sizes) & ~mask, lengths)


# ── Rows of a part ─────────────────────────────────────────────────────────────────────────────────


def outside_vocabulary(table: pa.Table, vocab_size: int) -> int:
    """Count the token ids of a part's examples that no embedding row would serve."""
    ids = table.column("input_ids").combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return int(((ids < 0) | (ids >= vocab_size)).sum())


def with_control_strings(table: pa.Table, control: ControlStrings) -> Bools:
    """Tell which rows hold a control string anywhere in their JSON: bool[N]."""
    found = np.zeros(table.num_rows, bool)
    if not control.strings:
        return found
    for name in ("messages", "tools", "template_kwargs"):
        hits = pc.match_substring_regex(table.column(name), control.pattern)
        found |= hits.fill_null(fill_value=False).to_numpy(zero_copy_only=False)
    return found


def conversations(table: pa.Table) -> list[Conversation]:
    """Decode the conversations of a table of canonical rows."""
    messages, tools, kwargs = (_decoded(table.column(name)) for name in ("messages", "tools", "template_kwargs"))
    hashes = table.column("content_hash").to_pylist()
    return [
        Conversation(m, t, {} if k is None else k, h)
        for m, t, k, h in zip(messages, tools, kwargs, hashes, strict=True)
    ]


_BEYOND_64_BITS = "-[0-9]{19}|[0-9]{20}"


def _decoded(column: pa.ChunkedArray) -> list[Json]:
    """Decode a column of JSON text; orjson would turn integers beyond 64 bits into floats without a word."""
    inexact = pc.match_substring_regex(column, _BEYOND_64_BITS).to_pylist()
    texts: list[str | None] = column.to_pylist()
    return [
        None if text is None else json.loads(text) if long else orjson.loads(text)
        for text, long in zip(texts, inexact, strict=True)
    ]


def hide_control_strings(one: Conversation, control: ControlStrings) -> "tuple[Conversation, dict[str, str]]":
    """Return the conversation with placeholders for control strings, and what each stands for."""
    value = [one.messages, one.tools, one.kwargs]
    hidden, placeholders = control.hide(value, to_json(value))
    messages, tools, kwargs = cast("list[Any]", hidden)
    return Conversation(messages, tools, kwargs, one.row_hash), placeholders


def show_control_strings(masked: Masked, placeholders: dict[str, str]) -> "tuple[Masked, list[tuple[int, int]]]":
    """Put control strings back into a masked text; return it and where they stand."""
    if not placeholders:
        return masked, []
    text, ranges = reveal(masked.text, placeholders)
    return replace(masked, text=text), ranges


def batches(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Cut rows into consecutive batches of about `limit` characters."""
    begin, held = 0, 0
    for i, size in enumerate(sizes):
        held += size
        if held >= limit:
            yield slice(begin, i + 1)
            begin, held = i + 1, 0
    if begin < len(sizes):
        yield slice(begin, len(sizes))


class Preparer:
    """The rooms that turn one dataset's rows into examples, opened once per process."""

    def __init__(
        self, encoder: Encoder, dataset: Dataset, spec: RendererSpec | None, limit: int, *, base: Path = Path()
    ) -> None:
        """Open the renderer and the masker, if the dataset's kind has a template; `base` is the project's folder."""
        self._base = base
        self._own: OwnExamples | None = None
        self._encoder = encoder
        self._dataset = dataset
        self._limit = limit
        self._printer = None if spec is None else Renderer(spec)
        self._masker = None if self._printer is None else Masker(self._printer, dataset.loss, _rules(dataset))
        self._control = None if spec is None else ControlStrings(encoder.card, spec.text)
        self._cuts_apart = dataset.loss.boundary == "split"
        self._chat_bos = _wanted_bos(encoder, dataset)

    @property
    def raises(self) -> bool:
        """Whether rows over the limit are to stop the build; the corridor gathers them all first."""
        return self._dataset.truncation.overlong == "raise"

    def _noticed(self) -> dict[str, Any]:
        if self._printer is None:
            return {}
        contract = self._printer.contract
        return {
            "warnings": warnings(contract, finish=self._dataset.loss.finish),
            "prompts": mismatched_prompts(contract),
            "dated": contract.date_dependent,
        }

    @property
    def printer(self) -> Renderer | None:
        """The renderer, for whoever wants to see what it prints."""
        return self._printer

    def prepare(self, table: pa.Table, counts: Counts) -> list[Outcome]:
        """Turn canonical rows into examples, one outcome per row, in row order."""
        counts.template = self._noticed()
        outcomes: list[Outcome] = [Rejected("bad_example", "no kind")] * table.num_rows
        kinds = table.column("kind").to_numpy(zero_copy_only=False)
        ways = (("conversation", self._conversations), ("pair", self._pairs), ("text", self._texts))
        for kind, prepare in (*ways, ("record", self._own_examples)):
            places = np.flatnonzero(kinds == kind)
            if not len(places):
                continue
            rows = table if len(places) == table.num_rows else table.take(pa.array(places))
            sizes = _sizes(rows)
            for part in batches(sizes, BATCH_CHARS):
                made = prepare(rows.slice(part.start, part.stop - part.start), counts)
                for place, outcome in zip(places[part], made, strict=True):
                    outcomes[int(place)] = _with_targets(outcome, counts)
        return outcomes

    # ── conversations ──

    def _conversations(self, rows: pa.Table, counts: Counts) -> list[Outcome]:
        if self._masker is None:
            return [
                Rejected("template_error", "neither the tokenizer nor the recipe has a chat template")
            ] * rows.num_rows
        assert self._control is not None
        decoded = conversations(rows)
        controlled = with_control_strings(rows, self._control)
        drafts: list[_Draft] = []
        outcomes: list[Outcome] = [[] for _ in decoded]
        for place, conversation in enumerate(decoded):
            made = self._drafts(place, conversation, bool(controlled[place]), counts)
            if isinstance(made, Rejected):
                outcomes[place] = made
            else:
                drafts.extend(made)
        for draft, example in zip(drafts, self._encoded(drafts, counts), strict=True):
            held = outcomes[draft.place]
            if isinstance(held, Rejected):
                continue
            made = self._fitted(draft, example, counts) if not isinstance(example, Rejected) else example
            outcomes[draft.place] = made if isinstance(made, Rejected) else [*held, *made]
        return outcomes

    def _drafts(
        self, place: int, conversation: Conversation, controlled: bool, counts: Counts
    ) -> "list[_Draft] | Rejected":
        assert self._masker is not None
        assert self._control is not None
        placeholders: dict[str, str] = {}
        before = conversation
        policy = self._dataset.template.control_tokens
        if controlled and policy != "allow":
            if policy == "reject":
                return Rejected("control_token_in_content", "the row's text holds a control string")
            try:
                conversation, placeholders = hide_control_strings(conversation, self._control)
            except ConfigError as error:
                # A control token of one character, and a row that uses every letter and digit: no stand-in is free.
                return Rejected("control_token_in_content", str(error))
        if controlled:
            counts.add_control_strings(self._control, before)
        conversation = self._within_thought_limit(conversation)
        drafts: list[_Draft] = []
        for one, only in self._masker.drafts(conversation):
            masked = self._masker.mask(self._shown(one), only=only)
            if isinstance(masked, Rejected):
                return masked
            if is_changed(masked.text, placeholders):
                return Rejected("control_token_in_content", "the template changes the stand-in of a control string")
            counts.add_dropped(masked.dropped)
            masked, ordinary = show_control_strings(masked, placeholders)
            drafts.append(_Draft(place, one, only, placeholders, masked, ordinary))
        return drafts

    def _within_thought_limit(self, conversation: Conversation) -> Conversation:
        limit = self._dataset.reasoning.think_max_tokens
        if not limit:
            return conversation
        return replace(conversation, messages=limited(conversation.messages, limit, self._cut_reasoning))

    def _shown(self, conversation: Conversation) -> Conversation:
        """Return the conversation as the template gets it: with `think_mode: inline`, reasoning heads the content."""
        options = self._dataset.reasoning
        if options.think_mode != "inline":
            return conversation
        return replace(conversation, messages=inlined(conversation.messages, options.think_tags[0]))

    def _encoded(self, drafts: "Sequence[_Draft]", counts: Counts) -> "list[Example | Rejected]":
        return self._examples_of([d.masked for d in drafts], [d.ordinary for d in drafts], counts)

    def _examples_of(
        self, masked: Sequence[Masked], ordinary: Sequence[list[tuple[int, int]]], counts: Counts
    ) -> "list[Example | Rejected]":
        made = examples_of(masked, ordinary, self._encoder, counts, split=self._cuts_apart)
        bos = self._chat_bos
        return made if bos is None else [one if isinstance(one, Rejected) else with_bos(one, bos) for one in made]

    def _fitted(self, draft: "_Draft", example: Example, counts: Counts) -> Outcome:
        """Apply the policy for what is too long to one example."""
        settled = self._settled(example, "conversation", counts)
        if settled is not None:
            return settled
        splits = self._dataset.truncation.overlong == "split"
        return self._shortened(draft, example, counts, split=splits)

    def _settled(self, example: Example, kind: Kind, counts: Counts) -> Outcome | None:
        """Return what becomes of an example that is not to be shortened; None if it is."""
        policy = self._policy(kind)
        if len(example.ids) <= self._limit or policy in ("keep", "raise"):
            return [example]
        if policy == "drop":
            counts.dropped_tokens += len(example.ids)
            return Rejected("overlong", f"{len(example.ids)} tokens, at most {self._limit}")
        return None

    def _policy(self, kind: Kind) -> Overlong:
        return self._dataset.truncation.policy(kind, sliced=self._dataset.keeps_overlong)

    def _shortened(self, draft: "_Draft", original: Example, counts: Counts, *, split: bool) -> Outcome:
        assert self._masker is not None
        supervised = frozenset(self._masker.supervised(draft.conversation.messages))
        chosen = supervised if draft.only is None else supervised & draft.only
        flags = [i in chosen for i in range(len(draft.conversation.messages))]
        truncater = Truncater(
            limit=self._limit,
            measure=lambda messages, tools: self._measure(draft, messages, tools),
            cut_reasoning=self._cut_reasoning,
            assistant_roles=_rules(self._dataset).assistant_roles,
            token_cut=self._dataset.truncation.token_cut,
        )
        messages, tools = draft.conversation.messages, draft.conversation.tools
        shortened = truncater.split(messages, tools, flags) if split else truncater.truncate(messages, tools, flags)
        if isinstance(shortened, Rejected):
            return shortened
        pieces = shortened if isinstance(shortened, list) else [shortened]
        made: list[Example] = []
        for piece in pieces:
            example = self._remasked(draft, piece, chosen, counts)
            if isinstance(example, Rejected):
                return example
            counts.dropped_tokens += piece.tokens_left_out
            made.append(self._accounted(draft, example, None if split else original, piece, chosen))
        return made

    def _remasked(
        self, draft: "_Draft", piece: Truncated, chosen: frozenset[int], counts: Counts
    ) -> Example | Rejected:
        """Render and mask a shortened conversation, and cut tokens if structure was not enough."""
        example = self._masked_again(draft, piece.messages, piece.kept, chosen, counts, piece.reasoning_context)
        if isinstance(example, Rejected) or len(example.ids) <= self._limit:
            return example
        return keep_tail(example, self._limit, self._dataset.truncation.truncate_side, self._encoder.card.bos_id)

    def _masked_again(
        self,
        draft: "_Draft",
        messages: Sequence[Message],
        kept: Sequence[int],
        chosen: frozenset[int],
        counts: Counts,
        reasoning_context: Sequence[int] = (),
    ) -> Example | Rejected:
        """Render and mask some of a conversation's messages; `kept[i]` is the original index of `messages[i]`."""
        assert self._masker is not None
        conversation = replace(draft.conversation, messages=list(messages))
        only = frozenset(new for new, old in enumerate(kept) if old in chosen)
        masked = self._masker.mask(self._shown(conversation), only=only)
        if isinstance(masked, Rejected):
            return masked
        masked = _without_loss_on_reasoning(masked, frozenset(reasoning_context))
        masked, ordinary = show_control_strings(masked, draft.placeholders)
        return self._examples_of([masked], [ordinary], counts)[0]

    def _accounted(
        self, draft: "_Draft", example: Example, original: Example | None, piece: Truncated, chosen: frozenset[int]
    ) -> Example:
        """Say what structured truncation took, stage by stage, so that original = tokens + removed.

        Without `original` the piece is one of several: its own length before it was shortened counts.
        """
        left = int(example.mask.sum()) + example.cut_trained
        after_exchanges = left
        if piece.reasoning_removed or piece.reasoning_context:
            after_exchanges = self._trained_in(draft, piece.kept, chosen, otherwise=left)
        tokens, trained = piece.original_tokens, after_exchanges
        if original is not None:
            tokens, trained = len(original.ids), original.original_trained
        elif piece.messages_removed:
            trained = self._trained_in(draft, piece.whole, chosen, otherwise=after_exchanges)
        return replace(
            example,
            original_tokens=tokens,
            original_trained=trained,
            messages_removed=piece.messages_removed,
            exchanges_removed=tokens - len(example.ids) - example.tokens_cut - piece.reasoning_removed,
            reasoning_removed=piece.reasoning_removed,
            exchanges_trained=trained - after_exchanges,
            reasoning_trained=after_exchanges - left,
        )

    def _trained_in(self, draft: "_Draft", kept: Sequence[int], chosen: frozenset[int], *, otherwise: int) -> int:
        """Count the trained tokens of some of a conversation's messages, `otherwise` if they have no mask."""
        messages = [draft.conversation.messages[i] for i in kept]
        example = self._masked_again(draft, messages, kept, chosen, Counts())
        return otherwise if isinstance(example, Rejected) else int(example.mask.sum())

    def _measure(self, draft: "_Draft", messages: Sequence[Message], tools: "Sequence[Json] | None") -> int | None:
        assert self._printer is not None
        assert self._masker is not None
        shown = self._shown(replace(draft.conversation, messages=messages, tools=tools))
        if self._cuts_apart:
            # Where a text is cut is known only with its mask.
            masked = self._masker.mask(shown)
            if isinstance(masked, Masked):
                masked, ordinary = show_control_strings(masked, draft.placeholders)
                example = self._examples_of([masked], [ordinary], Counts())[0]
                return None if isinstance(example, Rejected) else len(example.ids)
        printed = self._printer.render(shown.messages, tools, draft.conversation.kwargs)
        if isinstance(printed, Rejected):
            return None
        text, ranges = reveal(printed.text, draft.placeholders)
        encoded = self._encoder.encode_around(text, ranges) if ranges else self._encoder.encode([text])
        has_bos = self._chat_bos is None or (len(encoded.ids) > 0 and int(encoded.ids[0]) == self._chat_bos)
        return len(encoded.ids) + (not has_bos)

    def _cut_reasoning(self, text: str, max_tokens: int) -> str:
        encoded = self._encoder.encode([text])
        if len(encoded.ids) <= max_tokens:
            return text
        if max_tokens <= 0:
            return ""
        return text.encode()[: int(encoded.ends[max_tokens - 1])].decode(errors="ignore")

    # ── pairs and documents ──

    def _pairs(self, rows: pa.Table, counts: Counts) -> list[Outcome]:
        count, card, form = rows.num_rows, self._encoder.card, self._dataset.format
        separator = getattr(form, "separate_with", None)
        joint = separator if isinstance(separator, str) else ""
        inputs = [text + joint for text in rows.column("text").to_pylist()]
        given = encode_checked(self._encoder, inputs, counts)
        answers = self._encoder.encode_continuation(rows.column("output").to_pylist())
        prompt, answer = KINDS.index("prompt"), KINDS.index("assistant")
        trains_input, trains_output = _pair_loss(self._dataset)
        streams = [*self._edge("add_bos", card.bos_id, card.adds_bos, count, trains=False)]
        streams.append(Stream(given.ids, given.offsets, prompt, trains_input))
        if isinstance(separator, int):
            streams.append(constant(separator, count, kind=prompt, trains=trains_input))
        streams.append(Stream(answers.ids, answers.offsets, answer, trains_output))
        streams += self._edge("add_eos", card.eos_id, card.eos_id is not None, count, trains=trains_output)
        first = 1 if streams[0].kind == TEMPLATE else 0
        sizes = np.diff(given.offsets)
        return [self._fitted_pair(one, int(sizes[i]), first, counts) for i, one in enumerate(interleave(streams))]

    def _fitted_pair(self, example: Example, input_tokens: int, first: int, counts: Counts) -> Outcome:
        settled = self._settled(example, "pair", counts)
        if settled is not None:
            return settled
        return [cut_pair(example, self._limit, self._dataset.truncation.truncate_side, input_tokens, first)]

    def _texts(self, rows: pa.Table, counts: Counts) -> list[Outcome]:
        card, texts = self._encoder.card, rows.column("text").to_pylist()
        encoded = encode_checked(self._encoder, texts, counts)
        streams = [
            *self._edge("add_bos", card.bos_id, card.bos_id is not None, len(texts), trains=False),
            Stream(encoded.ids, encoded.offsets, KINDS.index("record"), trains=True),
            *self._edge("add_eos", card.eos_id, card.eos_id is not None, len(texts), trains=True),
        ]
        if streams[0].kind == TEMPLATE:
            streams[0] = unless_there(streams[0], encoded, 0)
        if streams[-1].kind == TEMPLATE:
            streams[-1] = unless_there(streams[-1], encoded, -1)
        return [self._fitted_text(one, counts) for one in interleave(streams)]

    def _fitted_text(self, example: Example, counts: Counts) -> Outcome:
        settled = self._settled(example, "text", counts)
        if settled is not None:
            return settled
        return windows(example, self._limit) if self._policy("text") == "split" else [example.cut(0, self._limit)]

    # ── a class of one's own ──

    def _own_examples(self, rows: pa.Table, counts: Counts) -> list[Outcome]:
        if self._own is None:
            self._own = OwnExamples(
                self._dataset,
                self._base,
                open_tokenizer=self._encoder.as_transformers,
                vocab_size=self._encoder.card.vocab_size,
                max_length=self._limit,
            )
        return [self._fitted_own(self._own(from_json(text)), counts) for text in rows.column("record").to_pylist()]

    def _fitted_own(self, built: Built | Rejected, counts: Counts) -> Outcome:
        """Apply the policy for what is too long to an example that has no structure to shorten by."""
        if isinstance(built, Rejected):
            return built
        example = Example(
            ids=built.ids,
            mask=built.mask,
            span_starts=np.zeros(1, np.int64),
            span_messages=np.full(1, -1, np.int64),
            span_kinds=np.full(1, KINDS.index("record"), np.int8),
            original_tokens=len(built.ids),
            original_trained=int(built.mask.sum()),
            domain=built.domain,
        )
        settled = self._settled(example, "record", counts)
        if settled is not None:
            return settled
        if self._policy("record") == "split":
            return windows(example, self._limit)
        options = self._dataset.truncation
        if options.token_cut == "reject":  # noqa: S105  (tokens of text)
            counts.dropped_tokens += len(example.ids)
            return Rejected("overlong_after_structure", f"{len(example.ids)} tokens, at most {self._limit}")
        return [keep_tail(example, self._limit, options.truncate_side, self._encoder.card.bos_id)]

    def _edge(self, option: str, token_id: int | None, by_itself: bool, count: int, *, trains: bool) -> list[Stream]:
        """Return the stream of a BOS or EOS, or none: `auto` adds what the tokenizer has."""
        wanted = getattr(self._dataset.format, option, "auto")
        if wanted is False or (wanted == "auto" and not by_itself):
            return []
        if token_id is None:
            raise ConfigError(
                f"format.{option}: true, but the tokenizer has no such token; only auto or false can stand; set auto"
            )
        return [constant(token_id, count, kind=TEMPLATE, trains=trains)]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A conversation that becomes one example, with its mask; `place` is its row's in the batch."""

    place: int
    conversation: Conversation
    only: frozenset[int] | None
    placeholders: dict[str, str]
    masked: Masked
    ordinary: list[tuple[int, int]]


def _rules(dataset: Dataset) -> MaskRules:
    roles = getattr(dataset.format, "assistant_roles", ("assistant",))
    template = dataset.template
    return MaskRules(
        assistant_roles=frozenset(roles),
        spans=template.spans,
        on_dropped={str(kind): policy for kind, policy in template.on_dropped.items()},
        verify_render=template.verify_render,
        turns=template.turns,
    )


def _wanted_bos(encoder: Encoder, dataset: Dataset) -> int | None:
    """Return the BOS to put before chats, which the recipe has to ask for: the template decides by itself."""
    if getattr(dataset.format, "add_bos", "auto") is not True:
        return None
    if encoder.card.bos_id is None:
        raise ConfigError("format.add_bos: true, but the tokenizer has no BOS; only auto or false can stand; set auto")
    return encoder.card.bos_id


def _pair_loss(dataset: Dataset) -> tuple[bool, bool]:
    """Tell whether a pair's input and output train."""
    loss = dataset.loss
    if loss.everything:
        return True, True
    if not loss.mask and loss.mask_default == "mask":
        return False, True
    return (
        loss.mask.get("prompt", loss.mask_default) == "train",
        loss.mask.get("response", loss.mask_default) == "train",
    )


def _sizes(rows: pa.Table) -> list[int]:
    lengths = np.zeros(rows.num_rows, np.int64)
    for name in ("messages", "tools", "text", "output", "record"):
        lengths += pc.fill_null(pc.binary_length(rows.column(name)), 0).to_numpy()
    return cast("list[int]", lengths.tolist())


def _with_targets(outcome: Outcome, counts: Counts) -> Outcome:
    """Reject a row none of whose examples has a trained token; drop its examples that have none."""
    if isinstance(outcome, Rejected):
        return outcome
    trained = [one for one in outcome if one.mask.any()]
    if len(trained) < len(outcome):
        counts.dropped_tokens += sum(one.original_tokens for one in outcome if not one.mask.any())
    return trained or Rejected("no_loss_tokens", "no trained token is left")


def _without_loss_on_reasoning(masked: Masked, messages: frozenset[int]) -> Masked:
    """Take the loss off reasoning that was cut: it stays as context, but nobody should learn to stop thinking there."""
    cut = [p for p in masked.pieces if p.kind == "reasoning" and p.message in messages]
    if not cut:
        return masked
    trained = list(masked.trained)
    for piece in cut:
        trained = [part for span in trained for part in _minus(span, piece.start, piece.end)]
    return replace(masked, trained=tuple(trained))


def _minus(span: Span, start: int, end: int) -> Iterator[Span]:
    if end <= span.start or span.end <= start:
        yield span
        return
    if span.start < start:
        yield replace(span, end=start)
    if end < span.end:
        yield replace(span, start=end)
