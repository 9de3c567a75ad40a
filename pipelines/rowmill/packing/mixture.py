"""Order the sequences of several datasets for training, by weights, block by block.

What belongs here: the order that follows from the options of mixing and shuffling. What does not: these options
(`mixture_options.py`), reading a sequence, or assigning the order to ranks (`rank_assignment.py`).

    weights a .5  b .3  c .2, blocks of 10     a b a a b a c c a b │ b a a c b a a b a c │ …
                                                                   └ after each block every dataset is less
                                                                     than one sequence from its share

A dataset's stream is its sequences, pass after pass, each pass shuffled with a separate key; at each position of the
order, the next item of the stream of that position's dataset is taken. Sizes, weights and a seed determine everything.
Rejected: drawing the next dataset at random, which leaves a rare dataset's share to chance; rounding weights to whole
counts once for all blocks, which gives a dataset of 3 in 10,000 no sequence at all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm

import numpy as np
from numpy.typing import NDArray

from rowmill.core.errors import ConfigError, join_choices
from rowmill.core.permutation import hash_labels, make_permutation, permute_rows
from rowmill.packing.mixture_options import BlockShuffle, Mixture, StopStrategy


@dataclass(frozen=True, slots=True, eq=False)
class SampleOrder:
    """The order of all sequences: position p has sequence `items[p]` of the plan of dataset `datasets[p]`.

    datasets int32[N] (number in recipe order) · items int64[N] · passes int32[N] (from 0) ·
    epoch_offsets int64[E + 1] (where epochs begin; a single epoch if weights are given)
    """

    datasets: NDArray[np.int32]
    items: NDArray[np.int64]
    passes: NDArray[np.int32]
    epoch_offsets: NDArray[np.int64]


def find_step_start(batch_sizes: Sequence[tuple[int, int]], step: int) -> int:
    """Return the position at which a step begins: batches of 10 from step 0 and 20 from step 5 put step 10 at 150."""
    following = [*(at for at, _ in batch_sizes[1:]), step]
    # Without a batch size only step 0 has a position: no pair is left to sum.
    return sum(size * max(0, min(end, step) - at) for (at, size), end in zip(batch_sizes, following, strict=False))


def schedule_sequences(mixture: Mixture, sizes: Mapping[str, int], seed: int) -> SampleOrder:
    """Order the sequences of all datasets; `sizes` are their numbers of sequences, in recipe order.

    Without weights the order has `epochs` whole epochs, or as many of them as `steps` may need: `rank_assignment.py`
    ends the order at `steps`, because the end of a step depends on the treatment of an epoch's remainder.

    Raises
    ------
    ConfigError
        If weights, slices or budgets do not fit the sizes.

    """
    kept = _count_kept_sequences(mixture, sizes)
    stages = _make_weight_stages(mixture, kept)
    # The length of each stream; None if the order does not end with the data.
    stop = mixture.resolved_stop if mixture.stages is not None else "restart"
    ends = None if stop == "restart" else [size * mixture.epochs for size in kept.values()]
    blocks = list(_cut_blocks(mixture, stages, list(kept), ends, stop))
    labels = _assign_datasets(blocks, len(kept), seed if mixture.randomize_blocks else None)
    # Sixteen bits sort by radix; no recipe has more datasets.
    places = np.argsort(labels.astype(np.uint16), kind="stable")
    of_dataset = np.split(places, np.cumsum(np.bincount(labels, minlength=len(kept)))[:-1])
    length = len(labels) if ends is None else _find_order_end(of_dataset, ends, stop, len(labels))
    items = np.empty(len(labels), dtype=np.int64)
    passes = np.empty(len(labels), dtype=np.int32)
    for (name, size), shown in zip(kept.items(), of_dataset, strict=True):
        if len(shown):
            items[shown] = _SampleStream(mixture, name, sizes[name], size, seed).items(len(shown))
            passes[shown] = np.arange(len(shown)) // size
    epochs = [0, length] if mixture.stages is not None else [0, *(stage.end for stage in stages)]
    return SampleOrder(labels[:length], items[:length], passes[:length], np.array(epochs, dtype=np.int64))


def measure_share_error(mixture: Mixture, sizes: Mapping[str, int], order: SampleOrder) -> float:
    """Return the largest distance, in sequences, of a dataset from its share at the end of a block.

    With `carry` it is measured since the start of the stage, with `fixed` within each block, and it is always below 1.
    A block that the end of the order cuts short is not measured.
    """
    worst = 0.0
    for stage in _make_weight_stages(mixture, _count_kept_sequences(mixture, sizes)):
        ends = _find_block_ends(mixture, stage, len(order.datasets))
        if not len(ends):
            continue
        labels = order.datasets[stage.start : stage.start + int(ends[-1])]
        for number, weight in enumerate(stage.weights):
            off = np.cumsum(labels == number)[ends - 1] - ends * (weight / sum(stage.weights))
            if mixture.block_rounding == "fixed":
                off = np.diff(off, prepend=0)
            worst = max(worst, float(np.abs(off).max()))
    return worst


def compute_wanted_shares(mixture: Mixture, sizes: Mapping[str, int], order: SampleOrder) -> list[float]:
    """Return each dataset's share of an order according to the weights, averaged over stages by their lengths."""
    shares = np.zeros(len(sizes))
    for stage in _make_weight_stages(mixture, _count_kept_sequences(mixture, sizes)):
        end = len(order.datasets) if stage.end is None else min(stage.end, len(order.datasets))
        shares += np.array(stage.weights, float) / (sum(stage.weights) or 1) * max(0, end - stage.start)
    return (shares / (len(order.datasets) or 1)).tolist()


def _find_block_ends(mixture: Mixture, stage: "_WeightStage", length: int) -> NDArray[np.int64]:
    """Return the ends of a stage's whole blocks, relative to its start, in an order of the given length."""
    shown = max(0, min(length, length if stage.end is None else stage.end) - stage.start)
    ends = np.arange(mixture.mixture_block_size, shown + 1, mixture.mixture_block_size, dtype=np.int64)
    last = None if stage.end is None else stage.end - stage.start
    return np.append(ends, last) if last is not None and last == shown and shown % mixture.mixture_block_size else ends


# --- how many of each dataset, block by block ---


@dataclass(frozen=True, slots=True)
class _WeightStage:
    """Positions `[start, end)` of the order to which one set of weights applies; `end` None: no end."""

    start: int
    end: int | None
    weights: list[int]


@dataclass(frozen=True, slots=True)
class _MixtureBlock:
    """Consecutive positions with a fixed number of sequences of each dataset."""

    length: int
    counts: list[int]


def _count_kept_sequences(mixture: Mixture, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return how many sequences of each dataset the limits and budgets keep."""
    limits = mixture.max_train_batches or {}
    _require_known_datasets(limits, sizes, "max_train_batches")
    kept = dict(sizes)
    for name, batches in limits.items():
        kept[name] = batches * mixture.batch_sizes[0][1]
        if kept[name] > sizes[name]:
            raise ConfigError(
                f"mixture.max_train_batches.{name}: {batches} batches are {kept[name]} sequences; the dataset has "
                f"{sizes[name]}; lower it to {sizes[name] // mixture.batch_sizes[0][1]} or less"
            )
    if mixture.target_budget is not None and mixture.experiment_budget is not None:
        kept = {name: size * mixture.experiment_budget // mixture.target_budget for name, size in sizes.items()}
    for step, weights in mixture.stages or [(0, {name: Fraction(size) for name, size in sizes.items()})]:
        _require_known_datasets(weights, sizes, "train_weights")
        for name, weight in weights.items():
            if weight > 0 and not kept[name]:
                raise ConfigError(
                    f"mixture: dataset {name} has a weight at step {step} and keeps {kept[name]} of its "
                    f"{sizes[name]} train sequences; at least 1 is needed; set its weight to 0, or raise "
                    "experiment_budget"
                )
    return kept


def _require_known_datasets(names: Iterable[str], sizes: Mapping[str, int], option: str) -> None:
    for name in names:
        if name not in sizes:
            raise ConfigError(
                f"mixture.{option}: {name!r} is not a dataset; choose {join_choices(sizes)}; correct the name"
            )


def _make_weight_stages(mixture: Mixture, kept: Mapping[str, int]) -> list[_WeightStage]:
    """Return the stages up to `steps`; without weights each epoch is a stage, so that blocks end with it."""
    if mixture.stages is None:
        total = sum(kept.values())
        epochs = _count_needed_epochs(mixture, total)
        return [_WeightStage(e * total, (e + 1) * total, list(kept.values())) for e in range(epochs)]
    horizon = None if mixture.steps is None else find_step_start(mixture.batch_sizes, mixture.steps)
    starts = [find_step_start(mixture.batch_sizes, step) for step, _ in mixture.stages]
    stages: list[_WeightStage] = []
    for start, end, (_, weights) in zip(starts, [*starts[1:], None], mixture.stages, strict=True):
        if horizon is not None and start >= horizon:
            break
        last = min(end, horizon) if end is not None and horizon is not None else end or horizon
        exact = [weights.get(name, Fraction(0)) for name in kept]
        scale = lcm(*(weight.denominator for weight in exact))
        stages.append(_WeightStage(start, last, [int(weight * scale) for weight in exact]))
    return stages


def _count_needed_epochs(mixture: Mixture, total: int) -> int:
    largest = max((size for _, size in mixture.batch_sizes), default=0)
    if mixture.steps is None or total < largest:
        return mixture.epochs
    return min(mixture.epochs, ceil(mixture.steps / (total // largest)))


def _cut_blocks(
    mixture: Mixture,
    stages: Sequence[_WeightStage],
    names: Sequence[str],
    ends: Sequence[int] | None,
    stop: StopStrategy,
) -> Iterator[_MixtureBlock]:
    """Cut the stages into blocks, up to the block in which the order ends."""
    shown = [0] * len(names)
    trained = [d for d in range(len(names)) if any(stage.weights[d] for stage in stages)]
    for number, stage in enumerate(stages):
        if stop == "all_exhausted" and ends is not None:
            _require_stream_ends(stages[number:], names, [d for d in trained if shown[d] < ends[d]])
        for block in _cut_stage_blocks(mixture, stage):
            yield block
            shown = [a + b for a, b in zip(shown, block.counts, strict=True)]
            if ends is not None:
                ended = [shown[d] >= ends[d] for d in trained]
                if all(ended) if stop == "all_exhausted" else any(ended):
                    return


def _require_stream_ends(stages: Sequence[_WeightStage], names: Sequence[str], open_streams: Sequence[int]) -> None:
    for d in open_streams:
        if not any(stage.weights[d] for stage in stages):
            raise ConfigError(
                f"mixture.train_weights: {names[d]} has weight 0 from position {stages[0].start} on and still has "
                "sequences; with stop_strategy: all_exhausted every stream must end; keep its weight above 0, or "
                "choose first_exhausted or restart"
            )


def _cut_stage_blocks(mixture: Mixture, stage: _WeightStage) -> Iterator[_MixtureBlock]:
    """Cut one stage into blocks of `mixture_block_size`, the last ending with the stage."""
    size = mixture.mixture_block_size
    position, given = stage.start, [0] * len(stage.weights)
    if mixture.block_rounding == "fixed":
        _require_shares(stage.weights, size)
    while stage.end is None or position < stage.end:
        length = size if stage.end is None else min(size, stage.end - position)
        position += length
        if mixture.block_rounding == "fixed":
            counts = _round_by_largest_remainder(stage.weights, length)
        else:
            counts = _round_with_carry(stage.weights, position - stage.start, given)
            given = [a + b for a, b in zip(given, counts, strict=True)]
        yield _MixtureBlock(length, counts)


def _round_with_carry(weights: Sequence[int], end: int, given: Sequence[int]) -> list[int]:
    """Return the counts of the block that ends at position `end`, where every dataset is within 1 of its share.

    Each dataset gets the sequences that it lacks to its share, rounded down. The remaining positions go, one each, to
    datasets below their share, rounded up, in the order in which their next sequence is due.
    """
    total = sum(weights)
    counts = [max(0, weight * end // total - had) for weight, had in zip(weights, given, strict=True)]
    left = end - sum(given) - sum(counts)
    had = [a + b for a, b in zip(given, counts, strict=True)]
    wanting = [d for d, weight in enumerate(weights) if had[d] < -(-weight * end // total)]
    # Stable: of datasets due at the same position the first in recipe order comes first.
    for d in sorted(wanting, key=lambda d: Fraction(had[d] + 1, weights[d]))[:left]:
        counts[d] += 1
    return counts


def _round_by_largest_remainder(weights: Sequence[int], length: int) -> list[int]:
    total = sum(weights)
    counts = [weight * length // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda d: -(weights[d] * length % total))
    for d in by_remainder[: length - sum(counts)]:
        counts[d] += 1
    return counts


def _require_shares(weights: Sequence[int], size: int) -> None:
    for weight, count in zip(weights, _round_by_largest_remainder(weights, size), strict=True):
        if weight and not count:
            suffices = ceil(Fraction(sum(weights), min(w for w in weights if w)))
            raise ConfigError(
                f"mixture.mixture_block_size: {size} leaves a dataset of weight {weight / sum(weights):.3g} "
                f"without a sequence in its blocks with block_rounding: fixed; at least {suffices} is needed; raise "
                "it, or choose carry"
            )


# --- which position in a block, which item of a stream ---


def _assign_datasets(blocks: Sequence[_MixtureBlock], datasets: int, seed: int | None) -> NDArray[np.int32]:
    """Return the dataset of each position: the blocks' datasets, permuted within each block with `seed`."""
    counts = np.array([block.counts for block in blocks], dtype=np.int64).reshape(-1, datasets)
    names = np.tile(np.arange(datasets, dtype=np.int32), len(blocks))
    grouped = np.repeat(names, counts.ravel())
    if seed is None:
        return grouped
    lengths = np.array([block.length for block in blocks], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    labels = np.empty_like(grouped)
    for length in np.unique(lengths).tolist():
        alike = np.flatnonzero(lengths == length)
        moved = permute_rows("feistel", length, [hash_labels(seed, "mixture", b) for b in alike.tolist()])
        begin = starts[alike][:, None]
        labels[begin + np.arange(length)] = grouped[begin + moved]
    return labels


def _find_order_end(
    of_dataset: Sequence[NDArray[np.int64]], ends: Sequence[int], stop: StopStrategy, length: int
) -> int:
    """Return where the order ends: after the first, or the last, of the streams' last items."""
    last = [int(places[end - 1]) + 1 for places, end in zip(of_dataset, ends, strict=True) if 0 < end <= len(places)]
    if stop == "first_exhausted":
        return min(last, default=length)
    streams = sum(1 for places in of_dataset if len(places))
    # If `steps` end the order before every stream has ended, all positions are kept.
    return max(last) if len(last) == streams else length


@dataclass(frozen=True, slots=True)
class _SampleStream:
    """The endless stream of one dataset: pass after pass over the `kept` of its `size` sequences."""

    mixture: Mixture
    name: str
    size: int
    kept: int
    seed: int

    def items(self, count: int) -> NDArray[np.int64]:
        """Return the first `count` sequence numbers of the stream."""
        full, rest = divmod(count, self.kept)
        if not self.mixture.reshuffle_each_epoch:
            first = self._order_first_pass()
            return np.concatenate([np.tile(first, full), first[:rest]])
        if self.kept == self.size:
            return self._order_passes(range(full), full, rest)
        # Later passes shuffle the kept sequences in plan order, as if the dataset had no others.
        first = self._order_first_pass()
        later = max(0, count - self.kept)
        full, rest = divmod(later, self.kept)
        order = self._order_passes(range(1, full + 1), full + 1, rest)
        return np.concatenate([first, np.sort(first)[order]])[:count]

    def _order_first_pass(self) -> NDArray[np.int64]:
        return self._order_pass(0, self.size, self.kept)

    def _order_passes(self, full: range, last: int, rest: int) -> NDArray[np.int64]:
        if self.mixture.shuffle is True:
            keys = [self._derive_key("shuffle", number) for number in full]
            rows = permute_rows(self.mixture.permutation_type, self.kept, keys).ravel()
        else:
            orders = [self._order_pass(number, self.kept, self.kept) for number in full]
            rows = np.concatenate([np.empty(0, dtype=np.int64), *orders])
        return np.concatenate([rows, self._order_pass(last, self.kept, rest)])

    def _order_pass(self, number: int, size: int, count: int) -> NDArray[np.int64]:
        """Return the first `count` items of one pass over `size` sequences."""
        match self.mixture.shuffle:
            case False:
                return np.arange(count, dtype=np.int64)
            case True:
                return self._shuffle_places(size, self._derive_key("shuffle", number), count)
            case int() as era:
                return self._shuffle_eras(number, size, era, count)
            case BlockShuffle() as by_blocks:
                return self._shuffle_blocks(number, size, by_blocks)[:count]

    def _shuffle_eras(self, number: int, size: int, era: int, count: int) -> NDArray[np.int64]:
        needed = min(size // era, -(-count // era))
        keys = [self._derive_key("era", number, e) for e in range(needed)]
        rows = permute_rows(self.mixture.permutation_type, era, keys)
        order = (rows + np.arange(needed)[:, None] * era).ravel()
        if len(order) < count:
            begin = needed * era
            last = self._shuffle_places(size - begin, self._derive_key("era", number, needed), size - begin)
            order = np.concatenate([order, begin + last])
        return order[:count]

    def _shuffle_blocks(self, number: int, size: int, by_blocks: BlockShuffle) -> NDArray[np.int64]:
        length, window = by_blocks.io_block_size, by_blocks.window_blocks
        full = size // length
        parts = [np.empty(0, dtype=np.int64)]
        blocks = self._shuffle_places(full, self._derive_key("blocks", number), full)
        for w, start in enumerate(range(0, full, window)):
            places = (blocks[start : start + window, None] * length + np.arange(length)).ravel()
            parts.append(places[self._shuffle_places(len(places), self._derive_key("window", number, w), len(places))])
        tail = size - full * length
        parts.append(full * length + self._shuffle_places(tail, self._derive_key("tail", number), tail))
        return np.concatenate(parts)

    def _shuffle_places(self, size: int, k: int, count: int) -> NDArray[np.int64]:
        places = np.arange(count, dtype=np.int64)
        return make_permutation(self.mixture.permutation_type, size, k)(places) if size else places

    def _derive_key(self, purpose: str, number: int, *part: int) -> int:
        return hash_labels(self.seed, purpose, self.name, number, *part)
