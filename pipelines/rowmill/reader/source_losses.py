"""Loss by source: what a trainer's loss per token is on each dataset and each domain of a batch.

    tokens          a b c │ d e │ P P       segment_lengths  3 2      the rest of a row is padding
    segment_dataset   0      1              numbers in `source_names.datasets`; -1: none, as in fillers
    segment_domain    2     -1              numbers in `source_names.domains`

Sums instead of means, because sums of several batches and of several ranks can be added. NumPy arrays and torch tensors
take the same way, on the device where the losses are; torch is not imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rowmill.core.errors import ConfigError
from rowmill.schema.examples import IGNORED_LABEL, WEIGHT_COLUMN
from rowmill.schema.rows import PARENTS_COLUMN


class SourceNames(NamedTuple):
    """The names that numbers of datasets and domains in batches stand for, the same on every rank."""

    datasets: tuple[str, ...]
    domains: tuple[str, ...]


class SourceLoss(NamedTuple):
    """The mean loss of a source's targets, weighted by the size of their loss weights, and their number.

    Without a target, or with weights of 0 only, the mean is NaN.
    """

    loss: float
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class SourceLosses:
    """Sums by source; add those of several batches with `+`, and those of ranks with `dist.all_reduce(losses.sums)`.

    `sums` float64[3, D + M], an array or a tensor, has a column for each dataset, then for each domain, and three rows:
    weight times loss, the size of the weight, and 1, each summed over targets. A target without a domain is in no
    domain's column.
    """

    names: SourceNames
    sums: Any

    def __add__(self, other: "SourceLosses") -> "SourceLosses":
        """Add up two batches of one build."""
        return replace(self, sums=self.sums + other.sums)

    @property
    def datasets(self) -> dict[str, SourceLoss]:
        return self._read(self.names.datasets, 0)

    @property
    def domains(self) -> dict[str, SourceLoss]:
        return self._read(self.names.domains, len(self.names.datasets))

    def _read(self, names: tuple[str, ...], first: int) -> dict[str, SourceLoss]:
        columns = zip(*(row[first : first + len(names)] for row in self.sums.tolist()), strict=True)
        return {
            name: SourceLoss(loss / size if size else float("nan"), int(tokens))
            for name, (loss, size, tokens) in zip(names, columns, strict=True)
        }


def loss_by_source(token_losses: Any, batch: Mapping[str, Any], *, shifted: bool = False) -> SourceLosses:
    """Sum the losses of a batch's targets by dataset and by domain.

    `token_losses` are not weighted and not reduced; their gradient is not followed. Of B × T values, each is the loss
    of the label at its place. Of B × (T − 1) values, as the cross entropy of `logits[:, :-1]` and `labels[:, 1:]` has,
    each is that of the next label; so it is of B × T values with `shifted`, as in transformers' own loss, whose last
    value in each row counts for nothing. Labels of −100 count for nothing either, so no sequence's first token does.
    `batch` is a reader's, of layout `flat` or `padded`, made with `segment_sources=True`.

    Raises
    ------
    ConfigError
        If the batch does not say its sources, the losses have another number, or are shifted though segments share
        prefixes, where the next label is not that of the next token.

    """
    if "source_names" not in batch:
        raise ConfigError(
            "loss_by_source: the batch does not say where its segments come from; segment_dataset and segment_domain "
            "are needed; open the Reader with segment_sources=True"
        )
    names: SourceNames = batch["source_names"]
    labels = batch["labels"]
    rows, width = (int(size) for size in labels.shape)
    losses = _align_losses(token_losses, batch, shifted=shifted)
    is_next = losses.shape[1] < width
    targets = labels[:, 1:] if is_next else labels
    # Rows end with padding that is in no segment: of length 0 in the layout `flat`.
    lengths = batch["segment_lengths"].reshape(rows, -1)
    filled = _make_zeros(lengths, (rows, lengths.shape[1] + 1))
    filled[:, :-1], filled[:, -1] = lengths, width - lengths.sum(1)
    is_target = targets != IGNORED_LABEL
    weights = batch.get(WEIGHT_COLUMN)
    counted = _make_zeros(losses, losses.shape)
    counted[is_target] = 1
    sizes = counted if weights is None else counted * (weights[:, 1:] if is_next else weights)
    # A loss may be NaN where there is no target.
    weighted = _make_zeros(losses, losses.shape)
    weighted[is_target] = (losses * sizes)[is_target]
    totals = _make_zeros(losses, (3, len(names.datasets) + len(names.domains)))
    first = 0
    for name, known in (("segment_dataset", names.datasets), ("segment_domain", names.domains)):
        numbers = _make_zeros(filled, tuple(filled.shape))
        # Number 0 collects what is of no source.
        numbers[:, :-1] = batch[name].reshape(rows, -1) + 1
        of_tokens = _repeat(numbers.reshape(-1), filled.reshape(-1), rows * width).reshape(rows, width)
        of_targets = (of_tokens[:, 1:] if is_next else of_tokens).reshape(-1)
        for row, values in enumerate((weighted, abs(sizes), counted)):
            sums = _sum_by_number(of_targets, values.reshape(-1), len(known) + 1)
            totals[row, first : first + len(known)] = sums[1:]
        first += len(known)
    return SourceLosses(names, totals)


def _align_losses(token_losses: Any, batch: Mapping[str, Any], *, shifted: bool) -> Any:
    """Return the losses as B × T values, each of the label at its place, or as B × (T − 1) of the label after it.

    Raises ConfigError for the reasons of `loss_by_source`.
    """
    losses = token_losses
    if isinstance(losses, np.ndarray):
        losses = losses.astype(np.float64)
    else:
        losses = losses.detach()
        # Apple's GPUs have no float64.
        losses = losses.float() if losses.is_mps else losses.double()
    rows, width = (int(size) for size in batch["labels"].shape)
    count = int(np.prod(losses.shape))
    if count not in (rows * width, rows * (width - 1)):
        raise ConfigError(
            f"loss_by_source: {count} losses for labels of {rows} × {width}; a loss is needed for each label, or for "
            "each but the first of a row; do not reduce the loss, and do not leave out ignored labels"
        )
    is_next = shifted or count < rows * width
    if is_next and PARENTS_COLUMN in batch:
        raise ConfigError(
            "loss_by_source: losses shifted by one for sequences that share prefixes, where a label follows its "
            "predecessor; a loss for each label is needed; compute it from the logits at batch['predecessors']"
        )
    return losses.reshape(rows, count // rows)[:, : width - is_next]


def _make_zeros(like: Any, shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_zeros(shape)


def _repeat(values: Any, counts: Any, total: int) -> Any:
    if isinstance(values, np.ndarray):
        return np.repeat(values, counts)
    # A tensor of known size, for which a GPU need not be waited for.
    return values.repeat_interleave(counts, output_size=total)


def _sum_by_number(numbers: Any, values: Any, count: int) -> Any:
    if isinstance(values, np.ndarray):
        return np.bincount(numbers, values, count)
    return values.new_zeros(count).index_add(0, numbers.to(values.device), values)
