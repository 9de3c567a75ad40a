"""Ids of one example cut, prepended to or joined, with all that belongs to them.

Pairs and documents are joined from columns of tokens, each encoded for a whole batch:

    bos      1       1
    input    5 6     -         row 0: 1 5 6 7 2
    output   7       8 9       row 1: 1 8 9 2
    eos      2       2
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rowmill.core.arrays import Bools, Ints, Tokens, compute_offsets
from rowmill.tokenization.encoded_batch import TEMPLATE_KIND, Example
from rowmill.tokenization.tokenizer import EncodedTexts


def split_into_windows(example: Example, limit: int) -> list[Example]:
    """Cut a document into consecutive windows of at most `limit` tokens, without dropping any.

    Each window is a separate example, so its first token is not a target.
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
    """Cut a pair to `limit` tokens: first its input, on `side`, then its output on the right.

    The input has `input_tokens` tokens from `first` on (1 after a BOS). EOS is cut with the output's end, because a
    cut answer must not teach the model to stop there.
    """
    excess = len(example.ids) - limit
    from_input = min(excess, input_tokens)
    begin = first if side == "left" else first + input_tokens - from_input
    keep = np.ones(len(example.ids), bool)
    keep[begin : begin + from_input] = False
    keep[len(keep) - (excess - from_input) :] = False
    return example.keep(keep)


def prepend_bos(example: Example, bos_id: int) -> Example:
    """Prepend an untrained BOS to an example that does not begin with one."""
    if len(example.ids) and int(example.ids[0]) == bos_id:
        return example
    opens = len(example.span_kinds) > 0 and int(example.span_kinds[0]) == TEMPLATE_KIND
    kept = slice(1 if opens else 0, None)
    return replace(
        example,
        ids=np.concatenate((np.array([bos_id], np.int32), example.ids)),
        mask=np.concatenate((np.zeros(1, bool), example.mask)),
        weights=None if example.weights is None else np.concatenate((np.zeros(1, np.float32), example.weights)),
        token_fields={
            name: np.concatenate((np.zeros_like(values, shape=(1, *values.shape[1:])), values))
            for name, values in example.token_fields.items()
        },
        span_starts=np.concatenate((np.zeros(1, np.int64), example.span_starts[kept] + 1)),
        span_messages=np.concatenate((np.full(1, -1, np.int64), example.span_messages[kept])),
        span_kinds=np.concatenate((np.full(1, TEMPLATE_KIND, np.int8), example.span_kinds[kept])),
        original_tokens=example.original_tokens + 1,
    )


def truncate_tokens(example: Example, limit: int, side: Literal["left", "right"], bos_id: int | None) -> Example:
    """Cut an example to `limit` tokens on one side, the last stage of truncation; a BOS is kept."""
    if side == "right":
        return example.cut(0, limit)
    keep, first = np.ones(len(example.ids), bool), 1 if int(example.ids[0]) == bos_id else 0
    keep[first : first + len(example.ids) - limit] = False
    return example.keep(keep)


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """One part of every example of a batch: ids with offsets int64[N + 1], a span kind, and whether it trains."""

    ids: Tokens
    offsets: Ints
    kind: int
    trains: bool


def split_at_byte(
    encoded: EncodedTexts, edges: Ints, *, boundary_tokens_first: bool
) -> tuple[EncodedTexts, EncodedTexts, int]:
    """Part each encoded text at a byte, and count the tokens across the edge: they go to the first or second part."""
    at = np.repeat(edges, np.diff(encoded.offsets))
    is_first = encoded.starts < at if boundary_tokens_first else encoded.ends <= at
    across = int(((encoded.starts < at) & (at < encoded.ends)).sum())
    return _select_tokens(encoded, is_first), _select_tokens(encoded, ~is_first), across


def _select_tokens(encoded: EncodedTexts, keep: Bools) -> EncodedTexts:
    offsets = compute_offsets(keep)[encoded.offsets]
    return EncodedTexts(encoded.ids[keep], offsets, encoded.starts[keep], encoded.ends[keep], 0)


def make_constant_column(token_id: int, count: int, *, kind: int, trains: bool) -> TokenColumn:
    """Return a column with the same single token for each of `count` examples."""
    return TokenColumn(np.full(count, token_id, np.int32), np.arange(count + 1), kind, trains)


def omit_existing_token(edge: TokenColumn, encoded: EncodedTexts, at: Literal[0, -1]) -> TokenColumn:
    """Remove a constant column's token from the examples whose text already begins (0) or ends (−1) with it."""
    lengths = np.diff(encoded.offsets)
    places = encoded.offsets[:-1] if at == 0 else encoded.offsets[1:] - 1
    there = np.zeros(len(lengths), bool)
    there[lengths > 0] = encoded.ids[places[lengths > 0]] == edge.ids[:1]
    if not there.any():
        return edge
    offsets = compute_offsets(~there)
    return replace(edge, ids=edge.ids[: int(offsets[-1])], offsets=offsets)


def concat_token_columns(streams: Sequence[TokenColumn]) -> list[Example]:
    """Concatenate the columns of every example, in order."""
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
    examples: list[Example] = []
    for i, end in enumerate(row_ends.tolist()):
        first, nonempty = int(begins[i, 0]), lengths[i] > 0
        own = mask[first:end]
        own[:1] = False
        examples.append(
            Example(
                ids=ids[first:end],
                mask=own,
                span_starts=begins[i, nonempty] - first,
                span_messages=np.full(int(nonempty.sum()), -1, np.int64),
                span_kinds=kinds[nonempty],
                original_tokens=end - first,
                original_trained=int(own.sum()),
            )
        )
    return examples
