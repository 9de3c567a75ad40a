"""The reader of one rank: its place in the order, its state, and the sets for evaluation.

The reader is the loader: one core lays out some 40 million tokens per second, many times what a GPU trains on, so it
needs no worker processes and no `DataLoader` around it. Inside a `DataLoader`, each worker's copy delivers its own
share of the batches and counts only these. Rejected: counting what a prefetching worker has read, which makes a resumed
run skip batches that were never delivered.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError, IntegrityError, join_choices
from rowmill.core.storage import Store
from rowmill.reader import layouts, published, stored_rows
from rowmill.reader.layouts import Batch, LayoutName
from rowmill.reader.schedule import (
    WHOLE_SHARE,
    BatchesBetweenPasses,
    PlannedBatch,
    RankSchedule,
    WorkerShare,
    find_current_worker,
    read_ahead,
)
from rowmill.reader.sequences import PackedSequence
from rowmill.reader.source_losses import SourceNames
from rowmill.reader.stored_rows import SequenceSource
from rowmill.reader.views import AsyncDataset, View


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """The step that the last delivered batch belongs to.

    `trained_tokens` are the targets of the whole step, all ranks together: what a summed loss is divided by.
    `is_complete` is true on the step's last batch, after which the optimizer steps.
    """

    number: int
    trained_tokens: int
    is_complete: bool


class Reader(AsyncDataset):
    """One rank's sequences in training order.

    `root` is the storage root (a folder or fsspec URL) and `recipe` the recipe's name. `batch_size` counts
    sequences of this rank; a batch never crosses a step, so a step's last batch may be smaller; None is the
    rank's share of a whole step (of a recipe without `batch_size`: one sequence). `layout` and `pad_to` are
    described in `layouts.py`. `as_torch` None gives tensors where torch is installed.
    `tokenizer` is a folder whose tokenizer.json must be the build's. `verify` reads every file once and compares
    digests. `segment_sources` adds the dataset and the domain of each segment to batches, for `loss_by_source`.

    `len(reader)` and `reader[i]` are this rank's sequences; iteration yields batches.

    Raises
    ------
    IntegrityError
        If the build is missing, incomplete, or made with another tokenizer.
    ConfigError
        If the rank, layout or batch size is impossible, or the rank has no sequence.

    """

    def __init__(
        self,
        root: str | Path,
        recipe: str,
        *,
        rank: int,
        world_size: int,
        batch_size: int | None = None,
        layout: LayoutName = "flat",
        pad_to: int | None = None,
        as_torch: bool | None = None,
        tokenizer: str | Path | None = None,
        verify: bool = False,
        segment_sources: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size}; ranks are 0 to {world_size - 1}; correct the rank")
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size: {batch_size}; a batch has at least one sequence; raise it, or omit it")
        self._published = published.open_published(Store(str(root)), recipe)
        if tokenizer is not None:
            published.check_tokenizer(self._published, tokenizer)
        self._rank, self._world_size, self._batch_size, self._verify = rank, world_size, batch_size, verify
        self._schedule = RankSchedule(
            rank, world_size, self._published.step_offsets, self._published.has_steps, batch_size
        )
        is_waived = any(waiver.startswith("order_nonempty:") for waiver in self._published.waivers)
        if not len(self._schedule) and not is_waived:
            # A loop over it would end immediately, without an error.
            raise ConfigError(
                f"{self._published.where}: rank {rank} has no sequence: the order has {self._published.places} places; "
                "every rank needs at least one; build with a smaller mixture.batch_size or more data, open fewer "
                "ranks, or waive order_nonempty to read only held-out sets"
            )
        self._names = self._published.source_names if segment_sources else None
        self._source = stored_rows.open_order(self._published, rank, world_size, verify=verify, names=self._names)
        self.view = View(
            length=len(self._schedule),
            fetch=partial(_fetch_rank_sequences, self._source, rank, world_size),
            layout=layouts.make_layout(
                layout, pad_id=self._published.pad_id, pad_to=pad_to, as_torch=as_torch, names=self._names
            ),
            batch_size=batch_size or 1,
        )
        self._next = 0
        self._origin = 0
        self._step: TrainingStep | None = None
        self._share: WorkerShare | None = None
        """The share whose next batch is `_next`; None: `_next` counts for the whole rank and is not divided yet."""
        self._is_begun_in_worker = False
        self._between_passes: BatchesBetweenPasses[tuple[RankSchedule, WorkerShare], Batch] = BatchesBetweenPasses()

    # ── Batches in training order ───────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from where deliveries stopped to the end of the order, which holds all epochs.

        In a `DataLoader` worker: this worker's share of them (`schedule.py`).

        Raises
        ------
        ConfigError
            If the ranks' shares of a step are unequal, or if a worker that delivered a part of its share would restart.

        """
        self._schedule.require_equal_shares(self._find_position())
        share = self._begin_share()
        while self._schedule.find_kept(self._next) < len(self):
            yield from self._deliver(share)

    def _deliver(self, share: WorkerShare) -> Iterator[Batch]:
        """Yield batches until the caller moves the reader, or to the end of the order."""
        schedule, plan, is_over = self._schedule, (self._schedule, share), False
        passes = schedule.plan_passes(self._next, share.worker, share.workers)
        batches = self._between_passes.take(plan) or read_ahead(passes, self._read_batches, seq_len=self.seq_len)
        try:
            for planned, batch in batches:
                if self._schedule is not schedule or planned.begin != schedule.find_kept(self._next):
                    # The caller has moved the reader: what was read ahead does not come next any more.
                    return
                # Counted before the yield: a state taken inside the loop includes the batch just delivered.
                self._next, self._step = planned.following, self._make_step(planned)
                if is_over := planned.following >= len(self):
                    self._between_passes.keep(plan, batches)
                yield batch
                if is_over:
                    return
        finally:
            if not is_over:
                batches.close()

    def _read_batches(self, planned: Sequence[PlannedBatch]) -> list[Batch]:
        """Read several batches at once, so that each row group that they share is decoded once."""
        rows = iter(self.view.fetch(np.concatenate([np.arange(plan.begin, plan.end) for plan in planned])))
        return [self.view.layout.make_batch(list(islice(rows, plan.end - plan.begin))) for plan in planned]

    def _begin_share(self) -> WorkerShare:
        """Move on to the first batch of this process's share, and return that share."""
        worker = find_current_worker()
        if worker is None:
            return WHOLE_SHARE
        if self._is_begun_in_worker and self._next < len(self):
            raise ConfigError(
                f"{self._published.where}: DataLoader {worker} would restart a reader after delivering a part of it; "
                "batches that it had read ahead would be lost; set persistent_workers=False, call rewind() first, or "
                "iterate the reader itself"
            )
        self._is_begun_in_worker = True
        if self._share is None:
            self._next = self._schedule.skip_batches(self._next, worker.worker)
            self._share = worker
        return worker

    @property
    def step(self) -> TrainingStep | None:
        """The step of the last delivered batch; None before the first, and where the recipe has no `batch_size`."""
        return self._step

    @property
    def rank(self) -> int:
        """The rank whose sequences these are."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks that the order is dealt to."""
        return self._world_size

    def example_ids(self, step: int) -> list[list[str]]:
        """Return the examples that a step shows, over all ranks: a list per place of the step, empty for a filler.

        Raises
        ------
        ConfigError
            If there is no such step.

        """
        self._schedule.require_steps([step])
        begin, end = self._published.step_offsets[step : step + 2]
        return self._source.list_example_ids(np.arange(begin, end))

    def skip_steps(self, steps: Iterable[int]) -> None:
        """Leave out some steps from now on, besides those that are left out already; states keep them.

        Every rank must leave out the same ones.

        Raises
        ------
        ConfigError
            If there is no such step, or in a `DataLoader` worker that has begun, whose share would overlap with others.

        """
        requested = frozenset(int(step) for step in steps)
        self._schedule.require_steps(requested)
        if self._share is not None:
            raise ConfigError(
                f"{self._published.where}: skip_steps in DataLoader {self._share}; shares would overlap; every worker "
                "must leave out the same steps from the start; call it before the DataLoader is made"
            )
        self._schedule = replace(self._schedule, skipped=self._schedule.skipped | requested)

    def rewind(self) -> None:
        """Restart at the first batch of the order."""
        self._move_to(0, origin=0, share=None)

    def _move_to(self, number: int, *, origin: int, share: WorkerShare | None) -> None:
        self._next, self._origin, self._step = number, origin, None
        self._share, self._is_begun_in_worker = share, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run, counting delivered batches: plain strings, integers and a list of integers.

        `position` is the place at which the current step starts, the same on every rank; `taken` is the number of its
        sequences that this rank delivered. In one of several `DataLoader` workers both give the next batch of this
        worker's share.
        """
        position = self._find_position()
        share = self._share or WHOLE_SHARE
        return {
            "version": published.STATE_VERSION,
            "order": self._published.order,
            "content": self._published.content,
            "position": position,
            "taken": self._next - self._schedule.find_number(position),
            "world_size": self._world_size,
            "batch_size": self._batch_size,
            "worker": share.worker,
            "workers": share.workers,
            "skip_steps": sorted(self._schedule.skipped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume a run: inside a step with the same world size, between steps with any world size that divides them.

        The state of one of several `DataLoader` workers resumes the same worker of the same number of workers. Steps to
        leave out are those of the state's `skip_steps`, to which steps may be added by hand between runs.

        Raises
        ------
        IntegrityError
            If the state is of another build.
        ConfigError
            If the world size does not divide the remaining steps, or differs inside a step; or if the state belongs
            to another `DataLoader` worker.

        """
        build = self._published
        for name, value in (("version", published.STATE_VERSION), ("order", build.order), ("content", build.content)):
            if state.get(name) != value:
                raise IntegrityError(
                    f"{build.where}: the state's {name} is {state.get(name)!r}, the build's is {value!r}; resume with "
                    "the build that the run began with (make it current again), or restart"
                )
        share = self._require_own_share(state)
        position, taken, before = int(state["position"]), int(state["taken"]), int(state["world_size"])
        if taken and before != self._world_size:
            raise ConfigError(
                f"world_size: {self._world_size}, but the state is inside a step that {before} ranks began; the world "
                f"size must not change inside a step; continue with {before} ranks, or from a state between steps"
            )
        self._schedule.require_equal_shares(position)
        skipped = frozenset(int(step) for step in state["skip_steps"])
        self._schedule.require_steps(skipped)
        self._schedule = replace(self._schedule, skipped=skipped)
        self._move_to(self._schedule.find_number(position) + taken, origin=position, share=share)

    def _require_own_share(self, state: Mapping[str, Any]) -> WorkerShare | None:
        """Return the share that a state belongs to, None for the whole rank; refuse another worker's."""
        share = WorkerShare(int(state["worker"]), int(state["workers"]))
        if share == WHOLE_SHARE:
            return None
        where, worker = self._published.where, find_current_worker()
        if worker != share:
            raise ConfigError(
                f"{where}: the state belongs to DataLoader {share}, and this is {worker or 'a process without workers'}"
                f"; each worker resumes from its own state; continue with {share.workers} workers of torchdata's "
                "StatefulDataLoader, or from the state of a reader outside workers"
            )
        # Workers are at different batches: divided again, their shares would overlap.
        expected: dict[str, Any] = {"world_size": self._world_size, "batch_size": self._batch_size}
        expected["skip_steps"] = sorted(self._schedule.skipped)
        for name, value in expected.items():
            if state.get(name, []) != value:
                raise ConfigError(
                    f"{name}: {value}, but the state belongs to DataLoader {share} with {state[name]}; for workers "
                    f"the batches must stay the same; continue with {state[name]}, or from the state of a reader "
                    "outside workers"
                )
        return share

    # ── Sequences by number ────────────────────────────────────────────────────────────────────────

    def preference_batch(self, indices: Sequence[int] | Ints) -> Batch:
        """Return this rank's sequences of these numbers as a batch of pairs, whatever layout the reader has.

        All chosen sides come first, then all rejected ones (`layouts.py`).

        Raises
        ------
        ConfigError
            If the recipe is not one of preferences with `objective: paired`.

        """
        return replace(self.view, layout=replace(self.view.layout, name="preference")).get_batch(indices)

    # ── Sets: the order, and each dataset by itself ────────────────────────────────────────────────

    def train_set(self) -> View:
        """View this rank's sequences in training order, from the first on."""
        return self.view

    def train_sets(self) -> dict[str, View]:
        """View each dataset's train sequences in the order of its plan: not mixed, shuffled or divided among ranks."""
        return self._open_sets("train")

    def validation_sets(self, split: Literal["validation", "test"] = "validation") -> dict[str, View]:
        """View the held-out sequences of each dataset that has some, in recipe order; all of them on every rank."""
        return self._open_sets(split)

    def validation_set(self, dataset: str, split: Literal["validation", "test"] = "validation") -> View:
        """View one dataset's held-out sequences.

        Raises
        ------
        ConfigError
            If it has none.

        """
        available = [name for name, entry in self._published.sets.items() if entry.shards.get(split)]
        if dataset not in available:
            raise ConfigError(
                f"{split} set of {dataset!r}: this build has none; the datasets with one are "
                f"{join_choices(available) or 'no dataset'}; choose one, or set datasets.{dataset}.splits"
            )
        return self._open_set(dataset, split)

    def tagged_eval_sets(self, split: Literal["validation", "test"] = "validation") -> list[tuple[View, list[str]]]:
        """Return the held-out set and the tags of each dataset that has one, in recipe order.

        They include datasets of weight 0, which are evaluated and not trained. A dataset's own name is always a tag.
        """
        return [(view, list(self._published.sets[name].tags)) for name, view in self._open_sets(split).items()]

    def _open_sets(self, split: str) -> dict[str, View]:
        return {
            name: self._open_set(name, split) for name, entry in self._published.sets.items() if entry.shards.get(split)
        }

    def _open_set(self, dataset: str, split: str) -> View:
        source = stored_rows.open_split(self._published, dataset, split, verify=self._verify, names=self._names)
        length = sum(shard.rows for shard in self._published.sets[dataset].shards.get(split, ()))
        return replace(self.view, length=length, fetch=source.at)

    # ── The build ──────────────────────────────────────────────────────────────────────────────────

    @property
    def identity(self) -> dict[str, Any]:
        """What a training run logs, so that its model can be traced to its data: JSON values, the same on every rank.

        `recipe`, `version` of the ranks, `digest` of the packed tokens and `order` of the sequences; digests of the
        `tokenizer`, of its `tokenizer.json` (SHA-256) and of each dataset's chat template (`templates`); `seq_len`;
        how ranks are stored (`layout`, `stored_ranks`) and the run's `world_size`; `waivers` of checks.
        """
        return self._published.describe_identity() | {"world_size": self._world_size}

    @property
    def seq_len(self) -> int:
        """The maximum number of tokens of a sequence."""
        return self._published.seq_len

    @property
    def vocab_size(self) -> int:
        """The number of ids that a model's embedding needs."""
        return int(self._published.card["vocab_size"])

    @property
    def source_names(self) -> SourceNames:
        """The names of datasets, and of domains if the recipe stores them (`packing.store_domains`), by number."""
        return self._published.source_names

    @property
    def steps(self) -> int | None:
        """The number of steps; None where the recipe has no `batch_size`."""
        return len(self._published.step_trained_tokens) if self._published.has_steps else None

    @property
    def data_files(self) -> dict[str, list[str]]:
        """The shards of each stored rank, in order, as `load_dataset("parquet", data_files=…)` takes them.

        Raises
        ------
        ConfigError
            If ranks are indexes, which have no sequences of their own, or examples share prefixes.

        """
        if self._published.card["attention"] == "tree":
            raise ConfigError(
                f"{self._published.where}: data_files of a build with packing.share_prefixes: true; a trainer that "
                "reads files does not know which tokens attend to each other; read it with this reader, or build with "
                "share_prefixes: false"
            )
        if self._published.layout == "index":
            raise ConfigError(
                f"{self._published.where}: data_files of a build with partitions.layout: index; its ranks name rows of "
                "shards that they share, and files of a rank's own are needed; build with partitions.layout: copied, "
                "export the recipe, or read it with this reader"
            )
        return {
            name: [self._published.store.path(shard.path) for shard in shards]
            for name, shards in self._published.ranks.items()
        }

    # ── The position ───────────────────────────────────────────────────────────────────────────────

    def _make_step(self, batch: PlannedBatch) -> TrainingStep | None:
        if not self._published.has_steps:
            return None
        step = self._schedule.find_step(batch.begin)
        is_complete = batch.end == self._schedule.find_step_end(batch.begin)
        return TrainingStep(step, int(self._published.step_trained_tokens[step]), is_complete)

    def _find_position(self) -> int:
        if self._published.has_steps:
            return int(self._published.step_offsets[self._schedule.find_step(self._next)])
        # Without steps all ranks together take `world_size` places at a time.
        return self._origin + (self._next - self._schedule.find_number(self._origin)) * self._world_size


def _fetch_rank_sequences(source: SequenceSource, rank: int, world_size: int, numbers: Ints) -> list[PackedSequence]:
    return source.at(rank + numbers * world_size)
