"""The examples of a part as flat columns, and as the table that `tokenized_examples` stores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import (
    Bools,
    Ints,
    Tokens,
    Weights,
    compute_offsets,
    count_true,
    find_distinct,
    make_list_array,
)
from rowmill.schema.examples import make_example_schema
from rowmill.tokenization.encoded_batch import TEMPLATE_KIND, EncodedBatch, Example

# ── Examples as columns ────────────────────────────────────────────────────────────────────────────


_REMOVED_COLUMNS = ("messages_removed", "exchanges_removed", "reasoning_removed", "tokens_cut",
            "exchanges_trained", "reasoning_trained", "cut_trained")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExampleColumns:
    """Examples of a part, flat: example j is example number `ks[j]` of row `rows[j]`.

    `removed` has a column for each name in `_REMOVED_COLUMNS`; absent columns are zero.
    """

    rows: Ints
    ks: Ints
    lengths: Ints
    ids: Tokens
    mask: Bools
    span_counts: Ints
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
    token_fields: Mapping[str, Weights] = field(default_factory=dict[str, Weights])
    """Further numbers of every token by name; an absent field is 0.0."""
    own: "tuple[Mapping[str, Any], ...]" = ()
    """Values of the columns that only examples of one kind of rows have; empty: their builder makes none."""

    @property
    def token_weights(self) -> Weights:
        """The loss weight of every token; 0 for an untrained one."""
        return self.mask.astype(np.float32) if self.weights is None else self.weights

    def table(self, row_ids: pa.Array, splits: pa.Array, domains: pa.Array, *, weighted: bool) -> pa.Table:
        """Return the examples as a table with `make_example_schema`; example k of a row is named `row_id#k`."""
        rows = pa.array(self.rows)
        names = row_ids.take(rows)
        numbers = pa.array(self.ks).cast(pa.string()) if self.ks.any() else pa.scalar("0")
        token_offsets, span_offsets = compute_offsets(self.lengths), compute_offsets(self.span_counts)
        trained = count_true(self.mask, token_offsets)
        # The first span of an example begins at its first token, so every span ends where the next one begins.
        begins = self.span_starts + np.repeat(token_offsets[:-1], self.span_counts)
        in_template = np.repeat(self.span_kinds == TEMPLATE_KIND, np.diff(np.append(begins, len(self.mask))))
        template = count_true(in_template & ~self.mask, token_offsets)
        zeros = pa.array(np.zeros(len(self.rows), np.int32))
        removed = [pa.array(self.removed[name].astype(np.int32)) if name in self.removed else zeros
                   for name in _REMOVED_COLUMNS]  # fmt: skip
        return pa.Table.from_arrays(
            [
                pc.binary_join_element_wise(names, numbers, "#"),
                pa.ListArray.from_arrays(pa.array(np.arange(len(self.rows) + 1, dtype=np.int32)), names),
                splits.take(rows),
                pc.coalesce(pa.array(self.domains, pa.string()), domains.take(rows))
                if self.domains
                else domains.take(rows),
                make_list_array(token_offsets, self.ids),
                make_list_array(token_offsets, self.mask),
                make_list_array(span_offsets, self.span_starts.astype(np.int32)),
                make_list_array(span_offsets, self.span_messages.astype(np.int32)),
                make_list_array(span_offsets, self.span_kinds),
                pa.array(self.original_tokens.astype(np.int32)),
                pa.array(self.lengths.astype(np.int32)),
                pa.array(trained.astype(np.int32)),
                pa.array((self.lengths - trained - template).astype(np.int32)),
                pa.array(template.astype(np.int32)),
                *removed[:4],
                pa.array((self.original_trained - trained).astype(np.int32)),
                *removed[4:],
                *([make_list_array(token_offsets, self.token_weights)] if weighted else []),
            ],
            schema=make_example_schema(weighted=weighted),
        )

    def list_token_field(self, name: str) -> pa.ListArray:
        """Return a field per token as a column of the examples."""
        values = self.token_fields.get(name)
        zeros = np.zeros(len(self.ids), np.float32)
        return make_list_array(compute_offsets(self.lengths), zeros if values is None else values)

    def verified(self) -> int:
        """Count examples whose token mask agrees with the kinds of their tokens.

        The text of a message trains as a whole or not at all, except for an example's first token. A mask that is
        shifted by one token violates this.
        """
        begins = np.repeat(np.cumsum(self.lengths) - self.lengths, self.span_counts)
        starts = self.span_starts + begins
        span_offsets = np.append(starts, len(self.mask))
        sizes, trained = np.diff(span_offsets), count_true(self.mask, span_offsets)
        sizes = sizes - ((self.span_starts == 0) & (sizes > 0))
        partly = (trained > 0) & (trained < sizes) & (self.span_kinds != TEMPLATE_KIND)
        examples = np.repeat(np.arange(len(self.rows)), self.span_counts)
        return len(self.rows) - len(find_distinct(examples[partly]))


def make_columns(parts: "Sequence[tuple[int, int, Example]]") -> ExampleColumns:
    """Return (row index, number among the row's examples, example) triples as columns."""
    rows, ks = np.array([part[:2] for part in parts], np.int64).reshape(-1, 2).T.copy()
    examples: list[Example] = list(map(itemgetter(2), parts))

    def collect(name: str) -> list[Any]:
        return list(map(attrgetter(name), examples))

    ids, masks, starts, weights, domains = map(collect, ("ids", "mask", "span_starts", "weights", "domain"))
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    own, fields = collect("columns"), collect("token_fields")
    return ExampleColumns(
        rows=rows,
        ks=ks,
        lengths=lengths,
        ids=_concat_arrays(ids, np.int32),
        mask=_concat_arrays(masks, np.bool_),
        span_counts=np.fromiter(map(len, starts), np.int64, len(starts)),
        span_starts=_concat_arrays(starts, np.int64),
        span_messages=_concat_arrays(collect("span_messages"), np.int64),
        span_kinds=_concat_arrays(collect("span_kinds"), np.int8),
        original_tokens=np.array(collect("original_tokens"), np.int64),
        original_trained=np.array(collect("original_trained"), np.int64),
        removed={name: np.array(collect(name), np.int64) for name in _REMOVED_COLUMNS},
        domains=tuple(domains) if any(domains) else (),
        weights=_concat_weights(list(zip(masks, weights, strict=True))),
        token_fields=_concat_fields(list(zip(lengths.tolist(), fields, strict=True))) if any(fields) else {},
        own=tuple(own) if any(own) else (),
    )


def make_batch_columns(batch: EncodedBatch, rows: Ints, kept: Bools) -> ExampleColumns:
    """Return the kept texts of a batch as columns; text i is the only example of row `rows[i]`."""
    if not kept.all():
        return make_columns([(int(rows[i]), 0, batch.example(i)) for i in np.flatnonzero(kept).tolist()])
    return ExampleColumns(
        rows=rows,
        ks=np.zeros(len(rows), np.int64),
        lengths=batch.lengths,
        ids=batch.ids,
        mask=batch.mask,
        weights=batch.weights,
        span_counts=np.diff(batch.span_offsets),
        span_starts=batch.span_starts,
        span_messages=batch.span_messages,
        span_kinds=batch.span_kinds,
        original_tokens=batch.lengths,
        original_trained=batch.trained,
        removed={},
    )


def concat_columns(several: Sequence[ExampleColumns]) -> ExampleColumns:
    """Concatenate one or more columns."""
    if len(several) == 1:
        return several[0]
    removed = {name for one in several for name in one.removed}
    none = {id(one): np.zeros(len(one.rows), np.int64) for one in several}
    names = [name for name in ExampleColumns.__slots__ if name not in _OPTIONAL_COLUMNS]
    parts: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in several]) for name in names}
    taken = {name: np.concatenate([one.removed.get(name, none[id(one)]) for one in several]) for name in removed}
    own = any(one.domains for one in several)
    domains = tuple(name for one in several for name in one.domains or [None] * len(one.rows)) if own else ()
    weights = _concat_weights([(one.mask, one.weights) for one in several])
    fields = _concat_fields([(len(one.ids), one.token_fields) for one in several])
    of_kind = tuple(values for one in several for values in one.own)
    return ExampleColumns(**parts, removed=taken, domains=domains, weights=weights, token_fields=fields, own=of_kind)


_OPTIONAL_COLUMNS = ("removed", "domains", "weights", "token_fields", "own")
"""Columns that some examples lack."""


def sort_by_row(table: pa.Table, columns: ExampleColumns) -> pa.Table:
    """Sort the table made of `columns` by row, then by number of the example."""
    order = np.lexsort((columns.ks, columns.rows))
    return table if (np.diff(order) == 1).all() else table.take(pa.array(order))


def _concat_weights(several: "Sequence[tuple[Bools, Weights | None]]") -> Weights | None:
    """Concatenate (mask, weights) pairs; None if no weights are given."""
    if all(weights is None for _, weights in several):
        return None
    return np.concatenate([mask.astype(np.float32) if weights is None else weights for mask, weights in several])


def _concat_fields(several: "Sequence[tuple[int, Mapping[str, Weights]]]") -> dict[str, Weights]:
    """Concatenate fields of so many tokens each; a field that some lack is 0.0 there."""
    names = dict.fromkeys(name for _, fields in several for name in fields)
    return {
        name: np.concatenate([fields.get(name, np.zeros(tokens, np.float32)) for tokens, fields in several])
        for name in names
    }


def _concat_arrays(arrays: "Sequence[NDArray[Any]]", dtype: Any) -> "NDArray[Any]":
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def count_outside_vocabulary(table: pa.Table, vocab_size: int) -> int:
    """Count the token ids of a part's examples outside the vocabulary."""
    ids = table.column("input_ids").combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return int(np.count_nonzero((ids < 0) | (ids >= vocab_size)))
