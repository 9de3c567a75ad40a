"""Lay the pairs of sequences out as one batch: all chosen sides, then all rejected ones.

    sequences        chosen a b c · rejected a b d e        another pair: chosen f g · rejected f h

    input_ids        [[a b c P] [f g P P] [a b d e] [f h P P]]      2n rows: pair i is rows i and n + i
    attention_mask   [[1 1 1 0] [1 1 0 0] [1 1 1 1] [1 1 0 0]]
    completion_mask  [[0 0 1 0] [0 1 0 0] [0 0 1 1] [0 1 0 0]]      1 where a token is a target
    margin           [0.5 0]                                        if a pair of the batch has one

These are the names and shapes of TRL's `DataCollatorForPreference`, and the `margin` of its reward trainer. A pair
without a margin has 0 there, which changes no loss. A filler is a pair of equal sides without a target, so that every
rank has the same number of batches. Loss weights, if the recipe has them, are laid out as in the padded layout.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from rowmill.core.errors import ConfigError
from rowmill.reader.layouts import stack_padded
from rowmill.reader.sequences import PackedSequence
from rowmill.schema.examples import IGNORED_LABEL, WEIGHT_COLUMN


def stack_pairs(rows: Sequence[PackedSequence], *, pad_id: int, length: int | None) -> dict[str, Any]:
    """Stack the n pairs of sequences into 2n rows, chosen sides first.

    Raises
    ------
    ConfigError
        If a sequence does not hold pairs.

    """
    pairs = [pair for row in rows for pair in _part_pairs(row)]
    sides = [pair[side] for side in (0, 1) for pair in pairs]
    padded = stack_padded(sides, pad_id=pad_id, length=length)
    batch = {name: padded[name] for name in ("input_ids", "attention_mask", WEIGHT_COLUMN) if name in padded}
    batch["completion_mask"] = (padded["labels"] != IGNORED_LABEL).astype(np.int64)
    margins = np.array([_get_margin(chosen) for chosen, _ in pairs], np.float32)
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
    here, span = slice(first, end), slice(number, number + 1)
    return PackedSequence(
        input_ids=row.input_ids[here],
        labels=row.labels[here],
        seq_lengths=np.array([end - first], np.int32),
        loss_weights=None if row.loss_weights is None else row.loss_weights[here],
        margins=None if row.margins is None else row.margins[span],
    )


def _get_margin(side: PackedSequence) -> float:
    return float("nan") if side.margins is None else float(side.margins[0])


def _raise_not_paired(what: str) -> NoReturn:
    raise ConfigError(
        f"preference batch: {what}; a recipe of kind preference with objective: paired is needed; build such a recipe, "
        "or choose layout='flat' or 'padded'"
    )
