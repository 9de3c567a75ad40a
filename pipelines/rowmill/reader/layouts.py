"""Lay sequences out as one batch, NumPy or torch: joined (`flat`), padded, or as pairs of sides (`preference`).

    sequences          3 tokens in spans of 2 and 1, and 2 tokens in one span

    flat               input_ids      [[a b c d e]]           one row, no padding
                       labels         [[. b . . e]]           (. is -100)
                       position_ids   [[0 1 0 0 1]]
                       seq_idx        [[0 0 1 2 2]]
                       cu_seq_lens_q  [0 2 3 5]               and _k, the same
                       max_length_q   2                       and _k, the same

    padded             input_ids      [[a b c] [d e P]]       one row per sequence
                       labels         [[. b .] [. e .]]
                       position_ids   [[0 1 0] [0 1 0]]
                       segment_ids    [[0 0 1] [0 0 -1]]
                       attention_mask [[1 1 1] [1 1 0]]

    preference         chosen a b c, rejected a b d e; another pair: chosen f g, rejected f h

    input_ids          [[a b c P] [f g P P] [a b d e] [f h P P]]      2n rows: pair i is rows i and n + i
    attention_mask     [[1 1 1 0] [1 1 0 0] [1 1 1 1] [1 1 0 0]]
    completion_mask    [[0 0 1 0] [0 1 0 0] [0 0 1 1] [0 1 0 0]]      1 where a token is a target
    margin             [0.5 0]                                        if a pair of the batch has one

`flat` has the names, shapes and dtypes of transformers' `DataCollatorWithFlattening`, and `preference` those of TRL's
`DataCollatorForPreference` with the `margin` of its reward trainer, so a model takes them unchanged. All arrays are
int64, except `cu_seq_lens_*` and `seq_idx`, which kernels take as int32.

    padded segments    cu_seqlens, the borders of spans without their padding, and cu_seqlens_padded, where they are
    loss weights       loss_weights float32 in the shape of labels, 0 where there is no label
    token fields       by each field's name, in the shape of labels, or [batch, seq, size], not shifted, 0 on padding
    row fields         a value per span: reward float32 [K], NaN where there is none; group_id K texts or None
    shared prefixes    segment_parents [K]: the span of the batch that each span continues, -1 for none; and in the
                       shape of labels predecessors, where in its row the token before each one is (a first token and
                       padding have themselves), and subtree_ends: query q attends to key k if k <= q < subtree_ends[k].
                       `flat` has no seq_idx, cu_seq_lens_* and max_length_*, in which kernels would see no prefix
    segment sources    segment_lengths, segment_dataset, segment_domain: [K] for the segments of `flat`, the last being
                       its padding; [B, S] in `padded`, with length 0 and -1 after a row's last; source_names, the names
                       of these numbers (`source_losses.py`)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints, Numbers, Tokens, Weights, compute_offsets, expand_ranges
from rowmill.core.errors import ConfigError, join_choices
from rowmill.core.segment_trees import find_predecessors, find_token_subtree_ends, make_tree_positions, mask_tree
from rowmill.reader.sequences import PackedSequence
from rowmill.reader.source_losses import SourceNames
from rowmill.schema.examples import IGNORED_LABEL, ROW_FIELDS, WEIGHT_COLUMN
from rowmill.schema.rows import PARENTS_COLUMN

Batch: TypeAlias = dict[str, Any]
"""NumPy arrays or torch tensors by name; `max_length_*` are plain integers."""


def join_flat(rows: Sequence[PackedSequence], *, pad_id: int, length: int | None) -> Batch:
    """Join sequences into one row [1, T]; `cu_seq_lens_*` int32[K + 1] separate the spans.

    With `length` the row is filled up to it, for kernels that need a fixed shape: the padding is one more span, without
    a target, and has −1 in `seq_idx`; for `cu_seqlens` it is empty.
    """
    tokens = sum(len(row.input_ids) for row in rows)
    gap = _count_padding(tokens, length)
    if gap:
        filler = np.full(gap, pad_id, np.int32)
        rows = [*rows, PackedSequence(filler, np.full(gap, IGNORED_LABEL, np.int32), np.array([gap], np.int32))]
    lengths = np.concatenate([row.seq_lengths for row in rows])
    weights = _collect_weights(rows)
    batch: Batch = {
        "input_ids": np.concatenate([row.input_ids for row in rows], dtype=np.int64)[None],
        "labels": np.concatenate([row.labels for row in rows], dtype=np.int64)[None],
        **({} if weights is None else {WEIGHT_COLUMN: np.concatenate(weights)[None]}),
        **{name: np.concatenate(values)[None] for name, values in _collect_token_fields(rows).items()},
        **_join_row_fields(rows),
        **{name: np.concatenate(values) for name, values in _collect_sources(rows).items()},
    }
    parents = _join_parents(rows)
    if parents is not None:
        return batch | {
            "position_ids": make_tree_positions(parents, lengths)[None],
            PARENTS_COLUMN: parents,
            "predecessors": find_predecessors(parents, lengths)[None],
            "subtree_ends": find_token_subtree_ends(parents, lengths)[None],
        }
    bounds = _cumulate_lengths(lengths)
    longest = int(lengths.max(initial=0))
    numbers = np.arange(len(lengths), dtype=np.int32)
    if gap:
        numbers[-1] = -1
    # The borders of spans without and with their padding, if segments are padded.
    if any(row.padding is not None for row in rows):
        real_lengths = np.concatenate([row.real_lengths for row in rows])
        if gap:
            real_lengths[-1] = 0
        batch |= {"cu_seqlens": _cumulate_lengths(real_lengths), "cu_seqlens_padded": bounds}
    return batch | {
        "position_ids": expand_ranges(np.zeros_like(lengths), lengths)[None],
        "seq_idx": np.repeat(numbers, lengths)[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _join_parents(rows: Sequence[PackedSequence]) -> Ints | None:
    """Return the parent of every span among those of all rows; None if none of them shares prefixes."""
    if all(row.segment_parents is None for row in rows):
        return None
    # A row that fills up a batch, or that a mapped function returned, continues nothing.
    parents = [
        np.full(len(row.seq_lengths), -1) if row.segment_parents is None else row.segment_parents for row in rows
    ]
    firsts = compute_offsets([len(of_row) for of_row in parents])[:-1].tolist()
    return np.concatenate(
        [np.where(of_row < 0, -1, of_row + first) for of_row, first in zip(parents, firsts, strict=True)],
        dtype=np.int64,
    )


def _cumulate_lengths(lengths: Tokens) -> Tokens:
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _count_padding(tokens: int, length: int | None) -> int:
    """Return how many tokens a length lacks; 0 if no length is given."""
    wide = tokens if length is None else length
    if tokens > wide:
        raise ConfigError(
            f"pad_to: {wide}, but a row has {tokens} tokens; at least that many are needed; raise pad_to, or lower "
            "batch_size"
        )
    return wide - tokens


def stack_padded(rows: Sequence[PackedSequence], *, pad_id: int, length: int | None) -> Batch:
    """Stack sequences into [B, L], padded at the right; `segment_ids` are -1 on padding.

    `attention_mask` marks only padding: `segment_ids` or `position_ids` separate the segments of one row.
    """
    longest = max(len(row.input_ids) for row in rows)
    wide = longest + _count_padding(longest, length)
    fills = {"input_ids": pad_id, "labels": IGNORED_LABEL, "position_ids": 0, "segment_ids": -1, "attention_mask": 0}
    batch: Batch = {name: np.full((len(rows), wide), fill, np.int64) for name, fill in fills.items()}
    for i, row in enumerate(rows):
        end = len(row.input_ids)
        batch["input_ids"][i, :end] = row.input_ids
        batch["labels"][i, :end] = row.labels
        batch["position_ids"][i, :end] = row.position_ids
        batch["segment_ids"][i, :end] = np.repeat(np.arange(len(row.seq_lengths)), row.seq_lengths)
        batch["attention_mask"][i, :end] = 1
        if row.padding is not None:
            added = np.flatnonzero(row.position_ids >= np.repeat(row.real_lengths, row.seq_lengths))
            batch["attention_mask"][i, added] = 0
            batch["segment_ids"][i, added] = -1
    parents = _join_parents(rows)
    if parents is not None:
        # Padding continues nothing, and attends to itself alone.
        places = np.arange(wide)
        batch["predecessors"], batch["subtree_ends"] = (np.tile(of, (len(rows), 1)) for of in (places, places + 1))
        for i, row in enumerate(rows):
            if row.segment_parents is not None:
                end = len(row.input_ids)
                batch["predecessors"][i, :end] = find_predecessors(row.segment_parents, row.seq_lengths)
                batch["subtree_ends"][i, :end] = find_token_subtree_ends(row.segment_parents, row.seq_lengths)
        batch[PARENTS_COLUMN] = parents
    weights = _collect_weights(rows)
    numbers = _collect_token_fields(rows) | ({} if weights is None else {WEIGHT_COLUMN: weights})
    for name, of_rows in numbers.items():
        batch[name] = np.zeros((len(rows), wide, *of_rows[0].shape[1:]), of_rows[0].dtype)
        for i, values in enumerate(of_rows):
            batch[name][i, : len(values)] = values
    for name, of_rows in _collect_sources(rows).items():
        fill = 0 if name == "segment_lengths" else -1
        batch[name] = np.full((len(rows), max(map(len, of_rows))), fill, np.int64)
        for i, values in enumerate(of_rows):
            batch[name][i, : len(values)] = values
    return batch | _join_row_fields(rows)


def _collect_sources(rows: Sequence[PackedSequence]) -> dict[str, list[Ints]]:
    """Return the sources of every sequence's segments; one without is a single segment of no source."""
    if all(row.segment_lengths is None for row in rows):
        return {}
    found: dict[str, list[Ints]] = {"segment_lengths": [], "segment_dataset": [], "segment_domain": []}
    for row in rows:
        unknown = (np.array([len(row.input_ids)]), np.array([-1]), np.array([-1]))
        known = (row.segment_lengths, row.segment_datasets, row.segment_domains)
        for values, of_row, missing in zip(found.values(), known, unknown, strict=True):
            values.append(missing if of_row is None else of_row)
    return found


def _collect_token_fields(rows: Sequence[PackedSequence]) -> dict[str, list[Numbers]]:
    """Return each field of every sequence; one that a sequence lacks is 0 there."""
    like = {name: values for row in rows for name, values in row.token_fields.items()}
    return {
        name: [
            row.token_fields.get(name, np.zeros((len(row.input_ids), *values.shape[1:]), values.dtype)) for row in rows
        ]
        for name, values in like.items()
    }


def _join_row_fields(rows: Sequence[PackedSequence]) -> Batch:
    """Return the value of each span by field: numbers as one array, names as a list."""
    joined: Batch = {}
    for name in dict.fromkeys(name for row in rows for name in row.row_fields):
        is_text = pa.types.is_string(ROW_FIELDS[name].type)
        none = None if is_text else np.nan
        values = [row.row_fields.get(name, np.full(len(row.seq_lengths), none)) for row in rows]
        joined[name] = np.concatenate(values).tolist() if is_text else np.concatenate(values, dtype=np.float32)
    return joined


def _collect_weights(rows: Sequence[PackedSequence]) -> list[Weights] | None:
    """Return the loss weights of every sequence; None if no sequence has any."""
    if all(row.loss_weights is None for row in rows):
        return None
    # A sequence that a mapped function returned without weights has the default weight.
    return [
        (row.labels != IGNORED_LABEL).astype(np.float32) if row.loss_weights is None else row.loss_weights
        for row in rows
    ]


# ── Pairs ──


def stack_pairs(rows: Sequence[PackedSequence], *, pad_id: int, length: int | None) -> dict[str, Any]:
    """Stack the n pairs of sequences into 2n rows, chosen sides first.

    Raises ConfigError if a sequence does not hold pairs.
    """
    pairs = [pair for row in rows for pair in _part_pairs(row)]
    sides = [pair[side] for side in (0, 1) for pair in pairs]
    padded = stack_padded(sides, pad_id=pad_id, length=length)
    batch = {name: padded[name] for name in ("input_ids", "attention_mask", WEIGHT_COLUMN) if name in padded}
    batch["completion_mask"] = (padded["labels"] != IGNORED_LABEL).astype(np.int64)
    margins = np.array([np.nan if chosen.margins is None else chosen.margins[0] for chosen, _ in pairs], np.float32)
    if not np.isnan(margins).all():
        batch["margin"] = np.nan_to_num(margins, nan=0.0)
    return batch


def _part_pairs(row: PackedSequence) -> Iterator[tuple[PackedSequence, PackedSequence]]:
    """Yield the chosen and the rejected side of each pair of a sequence."""
    if row.sides is None:
        _raise_not_paired("these sequences have no sides")
    if (row.sides < 0).all():
        filler = _take_span(row, 0, 0, int(row.real_lengths[0]))
        yield filler, filler
        return
    if row.sides.tolist() != [1, 0] * (len(row.seq_lengths) // 2):
        _raise_not_paired("these sequences hold single answers with a label")
    ends = np.cumsum(row.seq_lengths)
    edges = zip((ends - row.seq_lengths).tolist(), row.real_lengths.tolist(), strict=True)
    spans = [_take_span(row, i, first, first + length) for i, (first, length) in enumerate(edges)]
    yield from zip(spans[::2], spans[1::2], strict=True)


def _take_span(row: PackedSequence, number: int, first: int, end: int) -> PackedSequence:
    tokens, span = slice(first, end), slice(number, number + 1)
    return PackedSequence(
        input_ids=row.input_ids[tokens],
        labels=row.labels[tokens],
        seq_lengths=np.array([end - first], np.int32),
        loss_weights=None if row.loss_weights is None else row.loss_weights[tokens],
        margins=None if row.margins is None else row.margins[span],
    )


def _raise_not_paired(what: str) -> NoReturn:
    raise ConfigError(
        f"preference batch: {what}; a recipe of kind preference with objective: paired is needed; build such a recipe, "
        "or choose layout='flat' or 'padded'"
    )


# ── The layout of a reader ──


LayoutName: TypeAlias = Literal["flat", "padded", "preference"]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How batches are laid out; `pad_to` is the length of a batch's rows, None: that of the longest."""

    name: LayoutName
    pad_id: int
    pad_to: int | None
    as_torch: bool
    names: SourceNames | None = None

    def make_batch(self, rows: Sequence[PackedSequence]) -> Batch:
        """Make a batch of one or more sequences."""
        match self.name:
            case "flat":
                batch = join_flat(rows, pad_id=self.pad_id, length=self.pad_to)
            case "padded":
                batch = stack_padded(rows, pad_id=self.pad_id, length=self.pad_to)
            case "preference":
                batch = stack_pairs(rows, pad_id=self.pad_id, length=self.pad_to)
        if self.names is not None and self.name != "preference":
            batch["source_names"] = self.names
        if not self.as_torch:
            return batch
        torch: Any = import_module("torch")
        return {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in batch.items()
        }


def make_layout(
    name: LayoutName, *, pad_id: int, pad_to: int | None, as_torch: bool | None, names: SourceNames | None = None
) -> BatchLayout:
    """Validate a layout and return it; `as_torch` None: tensors if torch is installed."""
    choices = get_args(LayoutName)
    if name not in choices:
        raise ConfigError(f"layout: {name!r}; known are {join_choices(choices)}; choose one")
    installed = find_spec("torch") is not None
    if as_torch and not installed:
        raise ConfigError(
            "as_torch: torch is not installed here; it is needed for tensors; install it, or omit as_torch"
        )
    if name == "preference" and names is not None:
        raise ConfigError(
            "segment_sources with layout='preference'; sources are those of the segments of layout='flat' or 'padded'; "
            "choose one of these, or omit segment_sources"
        )
    return BatchLayout(name, pad_id, pad_to, installed if as_torch is None else as_torch, names)


def tree_mask(batch: Mapping[str, Any], *, as_block_mask: bool | None = None) -> Any:
    """Return which keys each query of a batch attends to.

    As an array, bool[B, L, L] for rows of L tokens, true where query q, of the second dimension, attends to key k, of
    the third; for small cases, as it takes L² bytes. As a block mask, a `BlockMask` of torch for `flex_attention` on
    the device of the batch, the same for all heads. `as_block_mask` None: a block mask of a batch of tensors, an array
    of arrays. Padding attends to itself.

    Raises
    ------
    ConfigError
        If the batch is of a recipe without `packing.share_prefixes`, or a block mask is asked for and the batch has no
        tensors.

    """
    if "subtree_ends" not in batch:
        raise ConfigError(
            "tree_mask: the batch has no subtree_ends; a recipe with packing.share_prefixes: true is needed, read with "
            "layout flat or padded; build one, or use the mask that your model makes of position_ids"
        )
    ends = batch["subtree_ends"]
    is_array = isinstance(ends, np.ndarray)
    if as_block_mask is None:
        as_block_mask = not is_array
    if not as_block_mask:
        return mask_tree(ends if is_array else ends.cpu().numpy())
    if is_array:
        raise ConfigError(
            "tree_mask: as_block_mask of a batch of NumPy arrays; FlexAttention takes tensors of torch; open the "
            "reader with as_torch=True, or omit as_block_mask"
        )
    flex_attention: Any = import_module("torch.nn.attention.flex_attention")

    def attends(row: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < ends[row, key])

    rows, length = ends.shape
    return flex_attention.create_block_mask(attends, rows, None, length, length, device=ends.device)
