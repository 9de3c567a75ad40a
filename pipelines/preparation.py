"""Canonical rows → tokenized examples: rendering, masking, truncation and tokenization in their order.

What belongs here: the order of those rooms for one batch of rows of each kind, and the example that comes
out. What does not: any of the rooms' own work, or files (`parts.py`). This is a hall of the corridor.

    conversation   render ─► mask ─► encode ─► too long? truncate, and again ─► Example
    pair           encode input, encode output as its continuation ─► BOS input sep output EOS
    text           encode ─► BOS text EOS ─► too long? windows, or the first tokens

Batches are columnar where tokens are concerned; a Python object exists per message, never per token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.contract import Conversation
from pipelines.errors import ContextOverflowError
from pipelines.examples import EXAMPLES, KINDS
from pipelines.rows import Json, Masked, Rejected, Span, to_json
from pipelines.tokenization import (
    Bools,
    ControlStrings,
    Encoded,
    Encoder,
    FlatSpans,
    Ints,
    byte_positions,
    degenerate,
    reveal,
    trained_tokens,
)

Tokens = NDArray[np.int32]
TEMPLATE = KINDS.index("template")
Overlong = Literal["truncate", "drop", "split", "raise", "keep"]


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
        )


Outcome = list[Example] | Rejected
"""What became of one row: its examples in order, or why there are none."""


@dataclass(slots=True)
class Counts:
    """What is counted while rows are prepared, beside the examples themselves; sums over parts are laws' facts."""

    dropped: dict[str, int] = field(default_factory=dict[str, int])
    control_strings: int = 0
    usual_way: int = 0
    lane_differences: int = 0
    render_sampled: int = 0
    truncated_rows: int = 0

    def add_dropped(self, dropped: dict[str, int]) -> None:
        """Count own text that the template did not print."""
        for kind, count in dropped.items():
            self.dropped[kind] = self.dropped.get(kind, 0) + count


# ── Text and spans → examples ──────────────────────────────────────────────────────────────────────


def examples_of(masked: Sequence[Masked], ordinary: Sequence[list[tuple[int, int]]], encoder: Encoder, counts: Counts) -> "list[Example | Rejected]":
    """Encode masked texts in one batch and find the tokens of their spans.

    `ordinary[i]` are ranges of text i that must not become control tokens.
    """
    plain = [i for i, ranges in enumerate(ordinary) if not ranges]
    encoded = encoder.encode([masked[i].text for i in plain])
    counts.usual_way += encoded.usual
    made: dict[int, Example | Rejected] = dict(zip(plain, _examples([masked[i] for i in plain], encoded), strict=True))
    for i, ranges in enumerate(ordinary):
        if ranges:
            around = encoder.encode_around(masked[i].text, ranges)
            made[i] = _examples([masked[i]], around)[0]
    return [made[i] for i in range(len(masked))]


def _examples(masked: Sequence[Masked], encoded: Encoded) -> "list[Example | Rejected]":
    to_bytes = [None if one.text.isascii() else byte_positions(one.text) for one in masked]
    mask = trained_tokens(encoded, _trained_spans(masked, to_bytes))
    bad = degenerate(encoded)
    trained = np.concatenate(([0], np.cumsum(mask)))[encoded.offsets]
    starts = encoded.starts
    made: list[Example | Rejected] = []
    for i, one in enumerate(masked):
        left, right = int(encoded.offsets[i]), int(encoded.offsets[i + 1])
        if bad[i]:
            made.append(Rejected("offsets_degenerate", "tokens with empty or backward offsets"))
            continue
        bounds, messages, kinds = _token_spans(one, to_bytes[i], starts[left:right])
        made.append(
            Example(
                ids=encoded.ids[left:right],
                mask=mask[left:right],
                span_starts=bounds,
                span_messages=messages,
                span_kinds=kinds,
                original_tokens=right - left,
                original_trained=int(trained[i + 1] - trained[i]),
            )
        )
    return made


def _trained_spans(masked: Sequence[Masked], to_bytes: "Sequence[Ints | None]") -> FlatSpans:
    rows: list[tuple[int, int, int, int, int]] = []
    for i, one in enumerate(masked):
        at = to_bytes[i]
        for span in one.trained:
            owner = _owner(one, span)
            edges = (span.start, span.end, owner[0], owner[1])
            rows.append((i, *edges) if at is None else (i, *(int(at[edge]) for edge in edges)))
    flat = np.array(rows, np.int64).reshape(-1, 5)
    return FlatSpans(*(np.ascontiguousarray(flat[:, column]) for column in range(5)))


def _owner(one: Masked, trained: Span) -> tuple[int, int]:
    """Return the span of the message around a trained span: tokens that straddle may reach so far."""
    for span in one.spans:
        if span.message == trained.message and span.start <= trained.start and trained.end <= span.end:
            return span.start, span.end
    return trained.start, trained.end


def _token_spans(one: Masked, at: "Ints | None", starts: Ints) -> "tuple[Ints, Ints, NDArray[np.int8]]":
    """Return the token spans of a text: `template` from 0, and a span per piece and per gap behind it."""
    pieces = one.pieces
    edges = np.array([[p.start, p.end] for p in pieces], np.int64).reshape(-1)
    tokens = np.searchsorted(starts, edges if at is None else at[edges], "left")
    bounds = np.concatenate((np.zeros(1, np.int64), tokens))
    kinds = np.full(len(bounds), TEMPLATE, np.int8)
    messages = np.full(len(bounds), -1, np.int64)
    kinds[1::2] = [KINDS.index(p.kind) for p in pieces]
    messages[1::2] = [p.message for p in pieces]
    nonempty = np.append(bounds[1:], len(starts)) > bounds
    return bounds[nonempty], messages[nonempty], kinds[nonempty]


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


def interleave(streams: Sequence[Stream]) -> list[Example]:
    """Join the streams example by example: example i is streams[0][i] + streams[1][i] + …"""
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
        pieces.append(replace(piece, original_tokens=size, original_trained=trained, tokens_cut=0))
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
    )


def keep_tail(example: Example, limit: int, side: Literal["left", "right"], bos_id: int | None) -> Example:
    """The last stage of truncation: keep the last (`left` is cut) or the first `limit` tokens; a BOS stays."""
    keep = np.ones(len(example.ids), bool)
    leads = bos_id is not None and len(example.ids) > 0 and int(example.ids[0]) == bos_id
    excess = len(example.ids) - limit
    if side == "left":
        keep[int(leads) : int(leads) + excess] = False
    else:
        keep[limit:] = False
    return drop_tokens(example, keep)


# ── Examples → columns ─────────────────────────────────────────────────────────────────────────────


def to_table(row_ids: Sequence[str], splits: Sequence[str], domains: "Sequence[str | None]", outcomes: Sequence[list[Example]]) -> pa.Table:
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
            pa.ListArray.from_arrays(pa.array(np.arange(len(flat) + 1, dtype=np.int32)), pa.array([row_ids[i] for i in rows], pa.string())),
            pa.array([splits[i] for i in rows], pa.string()),
            pa.array([domains[i] for i in rows], pa.string()),
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
    kinds = _concat([one.span_kinds for one in made], np.int8)
    sizes = _concat([np.diff(np.append(one.span_starts, len(one.ids))) for one in made], np.int64)
    written = np.repeat(kinds == TEMPLATE, sizes) & ~mask
    return _sums(written, lengths)


# ── Rows of a part ─────────────────────────────────────────────────────────────────────────────────


def outside_vocabulary(outcomes: Sequence[list[Example]], vocab_size: int) -> int:
    """Count token ids that no embedding row would serve."""
    return sum(int(((one.ids < 0) | (one.ids >= vocab_size)).sum()) for made in outcomes for one in made)


def with_control_strings(table: pa.Table, control: ControlStrings) -> Bools:
    """Tell which rows hold a control string anywhere in their JSON: bool[N]."""
    found = np.zeros(table.num_rows, bool)
    if not control.strings:
        return found
    for name in ("messages", "tools", "template_kwargs"):
        hits = pc.match_substring_regex(table.column(name), control.pattern)
        found |= hits.fill_null(False).to_numpy(zero_copy_only=False)
    return found


def conversations(table: pa.Table) -> list[Conversation]:
    """Decode the conversations of a table of canonical rows."""
    loads: Callable[[str], Json] = orjson.loads
    messages, tools = table.column("messages").to_pylist(), table.column("tools").to_pylist()
    kwargs, hashes = table.column("template_kwargs").to_pylist(), table.column("content_hash").to_pylist()
    return [
        Conversation(loads(m), None if t is None else loads(t), {} if k is None else loads(k), h)
        for m, t, k, h in zip(messages, tools, kwargs, hashes, strict=True)
    ]


def hide_control_strings(one: Conversation, control: ControlStrings) -> "tuple[Conversation, dict[str, str]]":
    """Return the conversation with placeholders for control strings, and what each stands for."""
    value = [one.messages, one.tools, one.kwargs]
    hidden, placeholders = control.hide(value, to_json(value))
    messages, tools, kwargs = cast("list[Any]", hidden)
    return Conversation(messages, tools, kwargs, one.row_hash), placeholders


def show_control_strings(masked: Masked, placeholders: dict[str, str]) -> "tuple[Masked, list[tuple[int, int]]]":
    """Put control strings back into a masked text; return it and where they stand."""
    text, ranges = reveal(masked.text, placeholders)
    return replace(masked, text=text), ranges


def too_long(limit: int, found: Sequence[tuple[str, int]]) -> ContextOverflowError:
    """Word the error of `overlong: raise`: how many, the longest, and up to twenty of them."""
    longest = max(length for _, length in found)
    names = ", ".join(row_id for row_id, _ in found[:20])
    return ContextOverflowError(
        f"{len(found)} rows are longer than {limit} tokens, the longest {longest}: {names}; at most {limit} fit; raise "
        "seq_len, or choose truncation.overlong truncate, drop or split"
    )


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
