"""Decide which dataset the next sequence comes from, and which of its sequences that is.

    stream of a dataset       pass    0             1             2              each pass is shuffled with its own key
                                      3 0 4 1 2     1 4 2 0 3     2 …            take(3, 7) ─► 1 2 1 4

    weights a .5  b .3  c .2, blocks of 10     a b a a b a c c a b │ b a a c b a a b a c │ …
                                                                   └ after each block every dataset is less
                                                                     than one sequence from its share

Sizes, weights and a seed determine everything, and a stretch of the order needs no other, so many processes can write
an order that none holds. Rejected: drawing the next dataset at random, which leaves a rare dataset's share to chance;
rounding weights to whole counts once for all blocks, which gives a dataset of 3 in 10,000 no sequence at all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, lcm

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets, find_distinct
from rowmill.core.errors import ConfigError, join_choices
from rowmill.core.permutation import hash_labels, make_permutation, permute_rows
from rowmill.packing.options import BlockShuffle, Mixture, StopStrategy


@dataclass(frozen=True, slots=True, eq=False)
class SampleStream:
    """The endless stream of one dataset: pass after pass over the `kept` of its `size` sequences."""

    mixture: Mixture
    name: str
    size: int
    kept: int
    seed: int
    chosen: Ints | None = None
    """The kept sequences in plan order; None if all are kept, or if all passes are alike."""

    @classmethod
    def of(cls, mixture: Mixture, name: str, size: int, kept: int, seed: int) -> "SampleStream":
        """Return a dataset's stream; the sequences that a budget keeps are the first of its first pass."""
        stream = cls(mixture, name, size, kept, seed)
        if kept == size or not mixture.reshuffle_each_epoch:
            return stream
        return cls(mixture, name, size, kept, seed, np.sort(stream._order_pass(0, size, 0, kept)))

    def take(self, begin: int, end: int) -> Ints:
        """Return the sequence numbers at the places `[begin, end)` of the stream."""
        if begin == end:
            return np.empty(0, np.int64)
        first, last = -(-begin // self.kept), end // self.kept
        if not self.mixture.reshuffle_each_epoch and first < last:
            return self._take_pass(0, 0, self.kept)[np.arange(begin, end) % self.kept]
        if first > last:
            return self._take_pass(last, begin - last * self.kept, end - last * self.kept)
        pieces: list[Ints] = []
        if begin < first * self.kept:
            pieces.append(self._take_pass(first - 1, begin - (first - 1) * self.kept, self.kept))
        pieces.append(self._take_passes(range(first, last)))
        if last * self.kept < end:
            pieces.append(self._take_pass(last, 0, end - last * self.kept))
        return np.concatenate(pieces)

    def _take_passes(self, numbers: range) -> Ints:
        """Return whole passes; many short ones are shuffled together."""
        if self.mixture.shuffle is not True or (self.chosen is not None and 0 in numbers):
            passes = [self._take_pass(number, 0, self.kept) for number in numbers]
            return np.concatenate([np.empty(0, np.int64), *passes])
        keys = [self._derive_key("shuffle", number) for number in numbers]
        places = permute_rows(self.mixture.permutation_type, self.kept, keys).ravel()
        return places if self.chosen is None else self.chosen[places]

    def _take_pass(self, number: int, begin: int, end: int) -> Ints:
        """Return some items of one pass; later passes shuffle the kept sequences as if there were no others."""
        if not self.mixture.reshuffle_each_epoch:
            number = 0
        if number == 0 or self.chosen is None:
            return self._order_pass(number, self.size if number == 0 else self.kept, begin, end)
        return self.chosen[self._order_pass(number, self.kept, begin, end)]

    def _order_pass(self, number: int, size: int, begin: int, end: int) -> Ints:
        """Return the items at `[begin, end)` of one pass over `size` sequences."""
        match self.mixture.shuffle:
            case False:
                return np.arange(begin, end, dtype=np.int64)
            case True:
                return self._shuffle_places(size, self._derive_key("shuffle", number), begin, end)
            case int() as era:
                return self._shuffle_eras(number, size, era, begin, end)
            case BlockShuffle() as by_blocks:
                return self._shuffle_blocks(number, size, by_blocks, begin, end)

    def _shuffle_eras(self, number: int, size: int, era: int, begin: int, end: int) -> Ints:
        whole = size // era
        first, last = min(begin // era, whole), min(-(-end // era), whole)
        keys = [self._derive_key("era", number, e) for e in range(first, last)]
        rows = permute_rows(self.mixture.permutation_type, era, keys)
        order = (rows + np.arange(first, last)[:, None] * era).ravel()
        if end > whole * era:
            rest = size - whole * era
            order = np.append(order, whole * era + self._shuffle_all(rest, self._derive_key("era", number, whole)))
        return order[begin - first * era : end - first * era]

    def _shuffle_blocks(self, number: int, size: int, by_blocks: BlockShuffle, begin: int, end: int) -> Ints:
        length, window = by_blocks.io_block_size, by_blocks.window_blocks
        full = size // length
        blocks = self._shuffle_all(full, self._derive_key("blocks", number))
        first = min(begin // length, full) // window * window
        parts = [np.empty(0, dtype=np.int64)]
        for start in range(first, min(-(-end // length), full), window):
            places = (blocks[start : start + window, None] * length + np.arange(length)).ravel()
            parts.append(places[self._shuffle_all(len(places), self._derive_key("window", number, start // window))])
        if end > full * length:
            parts.append(full * length + self._shuffle_all(size - full * length, self._derive_key("tail", number)))
        return np.concatenate(parts)[begin - first * length : end - first * length]

    def _shuffle_all(self, size: int, k: int) -> Ints:
        return self._shuffle_places(size, k, 0, size)

    def _shuffle_places(self, size: int, k: int, begin: int, end: int) -> Ints:
        places = np.arange(begin, end, dtype=np.int64)
        return make_permutation(self.mixture.permutation_type, size, k)(places) if size else places

    def _derive_key(self, purpose: str, number: int, *part: int) -> int:
        return hash_labels(self.seed, purpose, self.name, number, *part)


# ── The order of all datasets ──


@dataclass(frozen=True, slots=True, eq=False)
class SampleOrder:
    """A stretch of the order: its position p has sequence `items[p]` of the plan of dataset `datasets[p]`.

    datasets int32[N] (number in recipe order) · items int64[N] · passes int32[N] (from 0)
    """

    datasets: NDArray[np.int32]
    items: NDArray[np.int64]
    passes: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class SampleSchedule:
    """What the order follows from: how many sequences of each dataset every block has, and the datasets' streams.

    Any stretch is computed from this alone. Block b has the positions `[block_offsets[b], block_offsets[b + 1])`, and
    the blocks before it hold `given[b, d]` sequences of dataset d; the order ends at `length`, maybe within the last
    block. `epoch_offsets` int64[E + 1] is where epochs begin; a single epoch if weights are given.
    """

    streams: Sequence[SampleStream]
    stages: "Sequence[_WeightStage]"
    block_offsets: NDArray[np.int64]
    given: NDArray[np.int64]
    length: int
    epoch_offsets: NDArray[np.int64]
    block_rounding: str
    block_seed: int | None
    """The seed that permutes the datasets of each block; None if they follow one another."""

    def take(self, begin: int, end: int) -> SampleOrder:
        """Return the positions `[begin, end)` of the order."""
        if not 0 <= begin <= end <= self.length:
            raise IndexError(f"positions {begin} to {end} are not all inside [0, {self.length})")
        first, labels = self._assign_blocks(begin, end)
        skipped = begin - int(self.block_offsets[first])
        counts = len(self.streams)
        starts = self.given[first] + np.bincount(labels[:skipped], minlength=counts)
        labels = labels[skipped : skipped + end - begin]
        # Sixteen bits sort by radix; no recipe has more datasets.
        places = np.argsort(labels.astype(np.uint16), kind="stable")
        of_dataset = np.split(places, np.cumsum(np.bincount(labels, minlength=counts))[:-1])
        items = np.empty(len(labels), dtype=np.int64)
        passes = np.empty(len(labels), dtype=np.int32)
        for stream, start, shown in zip(self.streams, starts.tolist(), of_dataset, strict=True):
            if len(shown):
                items[shown] = stream.take(start, start + len(shown))
                passes[shown] = np.arange(start, start + len(shown)) // stream.kept
        return SampleOrder(labels, items, passes)

    def _assign_blocks(self, begin: int, end: int) -> tuple[int, NDArray[np.int32]]:
        """Return the first block that has one of the positions, and the datasets of all blocks that have some."""
        first = max(0, int(np.searchsorted(self.block_offsets, begin, "right")) - 1)
        last = max(first, int(np.searchsorted(self.block_offsets, end)))
        counts, lengths = np.diff(self.given[first : last + 1], axis=0), np.diff(self.block_offsets[first : last + 1])
        names = np.tile(np.arange(counts.shape[1], dtype=np.int32), len(lengths))
        grouped = np.repeat(names, counts.ravel())
        if self.block_seed is None:
            return first, grouped
        starts = np.cumsum(lengths) - lengths
        labels = np.empty_like(grouped)
        for length in find_distinct(lengths).tolist():
            alike = np.flatnonzero(lengths == length)
            keys = [hash_labels(self.block_seed, "mixture", first + b) for b in alike.tolist()]
            begins = starts[alike][:, None]
            labels[begins + np.arange(length)] = grouped[begins + permute_rows("feistel", length, keys)]
        return first, labels

    def count_datasets(self, begin: int, datasets: NDArray[np.int32]) -> tuple[int, NDArray[np.int64]]:
        """Return the first block of a stretch, and for each of its blocks how many positions each dataset has in it."""
        positions = np.arange(begin, begin + len(datasets))
        blocks = np.searchsorted(self.block_offsets, positions, "right") - 1
        first = int(blocks[0]) if len(blocks) else 0
        width = len(self.streams)
        counts = np.bincount((blocks - first) * width + datasets)
        rows = int(blocks[-1]) - first + 1 if len(blocks) else 0
        return first, np.pad(counts, (0, rows * width - len(counts))).reshape(rows, width)

    def find_item(self, dataset: int, number: int) -> int:
        """Return the position of an item of a dataset's stream."""
        block = int(np.searchsorted(self.given[:, dataset], number, "right")) - 1
        begin, end = self.block_offsets[block : block + 2].tolist()
        _, labels = self._assign_blocks(begin, end)
        return begin + int(np.flatnonzero(labels == dataset)[number - int(self.given[block, dataset])])


def find_step_start(batch_sizes: Sequence[tuple[int, int]], step: int) -> int:
    """Return the position at which a step begins: batches of 10 from step 0 and 20 from step 5 put step 10 at 150."""
    following = [*(at for at, _ in batch_sizes[1:]), step]
    # Without a batch size only step 0 has a position: no pair is left to sum.
    return sum(size * max(0, min(end, step) - at) for (at, size), end in zip(batch_sizes, following, strict=False))


def schedule_sequences(mixture: Mixture, sizes: Mapping[str, int], seed: int) -> SampleSchedule:
    """Order the sequences of all datasets; `sizes` are their numbers of sequences, in recipe order.

    Without weights the order has `epochs` whole epochs, or as many of them as `steps` may need: `rank_assignment.py`
    ends the order at `steps`, because the end of a step depends on the treatment of an epoch's remainder. Raises
    ConfigError if weights, slices or budgets do not fit the sizes.
    """
    kept = _count_kept_sequences(mixture, sizes)
    stages = _make_weight_stages(mixture, kept)
    # The length of each stream; None if the order does not end with the data.
    stop = mixture.resolved_stop if mixture.stages is not None else "restart"
    ends = None if stop == "restart" else [size * mixture.epochs for size in kept.values()]
    counts = np.array(list(_cut_blocks(mixture, stages, list(kept), ends, stop)), np.int64).reshape(-1, len(kept))
    offsets = compute_offsets(counts.sum(axis=1))
    whole = SampleSchedule(
        streams=[SampleStream.of(mixture, name, sizes[name], size, seed) for name, size in kept.items()],
        stages=stages,
        block_offsets=offsets,
        given=np.concatenate((np.zeros((1, len(kept)), np.int64), np.cumsum(counts, axis=0))),
        length=int(offsets[-1]),
        epoch_offsets=np.array([0, *(stage.end or 0 for stage in stages)], np.int64),
        block_rounding=mixture.block_rounding,
        block_seed=seed if mixture.randomize_blocks else None,
    )
    if mixture.stages is None:
        return whole
    length = whole.length
    if ends is not None:
        # The order ends after the first, or the last, of the streams' last items.
        shown = whole.given[-1].tolist()
        ended = [d for d, (end, count) in enumerate(zip(ends, shown, strict=True)) if 0 < end <= count]
        last = [whole.find_item(d, ends[d] - 1) + 1 for d in ended]
        if stop == "first_exhausted":
            length = min(last, default=length)
        elif len(last) == sum(1 for count in shown if count):
            # If `steps` end the order before every stream has ended, all positions are kept.
            length = max(last)
    return replace(whole, length=length, epoch_offsets=np.array([0, length], np.int64))


def measure_share_error(schedule: SampleSchedule, counts: NDArray[np.int64]) -> float:
    """Return the largest distance, in sequences, of a dataset from its share at the end of a block.

    `counts` int64[B, D] are the positions of each dataset in each block of the order that was made. With `carry` the
    distance is measured since the start of the stage, with `fixed` within each block, and it is always below 1. A block
    that the end of the order cuts short is not measured.
    """
    worst = 0.0
    for stage in schedule.stages:
        last = schedule.length if stage.end is None else min(stage.end, schedule.length)
        first, end = np.searchsorted(schedule.block_offsets, (stage.start, last + 1)).tolist()
        ends = schedule.block_offsets[first + 1 : end] - stage.start
        if not len(ends):
            continue
        for number, weight in enumerate(stage.weights):
            off = np.cumsum(counts[first : end - 1, number]) - ends * (weight / sum(stage.weights))
            if schedule.block_rounding == "fixed":
                off = np.diff(off, prepend=0)
            worst = max(worst, float(np.abs(off).max()))
    return worst


def compute_wanted_shares(schedule: SampleSchedule) -> list[float]:
    """Return each dataset's share of an order according to the weights, averaged over stages by their lengths."""
    shares = np.zeros(len(schedule.streams))
    for stage in schedule.stages:
        end = schedule.length if stage.end is None else min(stage.end, schedule.length)
        shares += np.array(stage.weights, float) / (sum(stage.weights) or 1) * max(0, end - stage.start)
    return (shares / (schedule.length or 1)).tolist()


# ── How many of each dataset, block by block ──


@dataclass(frozen=True, slots=True)
class _WeightStage:
    """Positions `[start, end)` of the order to which one set of weights applies; `end` None: no end."""

    start: int
    end: int | None
    weights: list[int]


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
                    f"mixture: dataset {name} has a weight at step {step} and keeps {kept[name]} of its {sizes[name]} "
                    "train sequences; at least 1 is needed; set its weight to 0, or raise experiment_budget"
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
        epochs = mixture.epochs
        largest = max((size for _, size in mixture.batch_sizes), default=0)
        if mixture.steps is not None and total >= largest:
            epochs = min(epochs, ceil(mixture.steps / (total // largest)))
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


def _cut_blocks(
    mixture: Mixture,
    stages: Sequence[_WeightStage],
    names: Sequence[str],
    ends: Sequence[int] | None,
    stop: StopStrategy,
) -> Iterator[list[int]]:
    """Yield how many sequences each dataset has in each block, up to the block in which the order ends."""
    shown = [0] * len(names)
    trained = [d for d in range(len(names)) if any(stage.weights[d] for stage in stages)]
    for number, stage in enumerate(stages):
        if stop == "all_exhausted" and ends is not None:
            for d in trained:
                if shown[d] < ends[d] and not any(later.weights[d] for later in stages[number:]):
                    raise ConfigError(
                        f"mixture.train_weights: {names[d]} has weight 0 from position {stage.start} on and still has "
                        "sequences; with stop_strategy: all_exhausted every stream must end; keep its weight above 0, "
                        "or choose first_exhausted or restart"
                    )
        for counts in _cut_stage_blocks(mixture, stage):
            yield counts
            shown = [a + b for a, b in zip(shown, counts, strict=True)]
            if ends is not None:
                ended = [shown[d] >= ends[d] for d in trained]
                if all(ended) if stop == "all_exhausted" else any(ended):
                    return


def _cut_stage_blocks(mixture: Mixture, stage: _WeightStage) -> Iterator[list[int]]:
    """Yield the counts of one stage's blocks of `mixture_block_size`, the last ending with the stage."""
    size = mixture.mixture_block_size
    position, assigned = stage.start, [0] * len(stage.weights)
    if mixture.block_rounding == "fixed":
        weights = stage.weights
        for weight, count in zip(weights, _round_by_largest_remainder(weights, size), strict=True):
            if weight and not count:
                suffices = ceil(Fraction(sum(weights), min(w for w in weights if w)))
                raise ConfigError(
                    f"mixture.mixture_block_size: {size} leaves a dataset of weight {weight / sum(weights):.3g} "
                    f"without a sequence in its blocks with block_rounding: fixed; at least {suffices} is needed; "
                    "raise it, or choose carry"
                )
    while stage.end is None or position < stage.end:
        length = size if stage.end is None else min(size, stage.end - position)
        position += length
        if mixture.block_rounding == "fixed":
            counts = _round_by_largest_remainder(stage.weights, length)
        else:
            # At the end of a block every dataset is within 1 of its share. Each gets the sequences that it lacks to its
            # share, rounded down. The remaining positions go, one each, to datasets below their share, rounded up, in
            # the order in which their next sequence is due; of those due at the same position, in recipe order.
            weights, end, total = stage.weights, position - stage.start, sum(stage.weights)
            had = [max(before, weight * end // total) for weight, before in zip(weights, assigned, strict=True)]
            wanting = [d for d, weight in enumerate(weights) if had[d] < -(-weight * end // total)]
            due = {d: Fraction(had[d] + 1, weights[d]) for d in wanting}
            for d in sorted(wanting, key=due.__getitem__)[: end - sum(had)]:
                had[d] += 1
            counts = [after - before for after, before in zip(had, assigned, strict=True)]
            assigned = had
        yield counts


def _round_by_largest_remainder(weights: Sequence[int], length: int) -> list[int]:
    total = sum(weights)
    counts = [weight * length // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda d: -(weights[d] * length % total))
    for d in by_remainder[: length - sum(counts)]:
        counts[d] += 1
    return counts
