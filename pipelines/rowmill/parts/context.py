"""What a stage works with: its inputs, the store, the executor, and the map over its parts; and what it puts out."""

import os
import tempfile
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rowmill.core.arrays import format_percent
from rowmill.core.storage import File, Store, digest_json, read_tables
from rowmill.executors import Executor, OtherSharesMissingError, Share
from rowmill.parts.functions import (
    InputsT,
    MappedParts,
    PartFunction,
    PartLists,
    PartPlace,
    batch_tasks,
    identify,
    make_and_keep,
    part_folder,
)
from rowmill.schema.counts import CountSet
from rowmill.schema.manifest import (
    DisplayTable,
    Histogram,
    Manifest,
    Part,
    StageKey,
    add_up_counts,
    get_stage_folder,
    get_stage_name,
)
from rowmill.shards import host_scratch
from rowmill.shards.host_scratch import HostScratch
from rowmill.sources.parts import FileScan

if TYPE_CHECKING:
    import polars as pl


class ProgressCallback(Protocol):
    """Callback that receives a stage's progress."""

    def __call__(
        self, where: str, *, done: int, total: int, rows: int, total_rows: int, tokens: int, seconds: float
    ) -> None:
        """Receive progress: `done` of `total` parts of `where` (`chats/canonical_rows`) are finished.

        The first call comes before any part is made; `rows` of `total_rows` input rows are in finished parts.
        """
        ...


@dataclass(frozen=True, slots=True)
class MadeAhead:
    """What this command made before the step that it belongs to: found like what is kept, and counted as made.

    `scans` are those of source files, by URL; `parts` the fingerprints of finished parts.
    """

    scans: Mapping[str, FileScan] = field(default_factory=dict[str, FileScan])
    parts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class WorkContext:
    """Where and with what work is done: its place, its inputs, and the executor."""

    store: Store
    base: Path
    key: StageKey
    dataset_name: str | None
    inputs: Mapping[StageKey, Manifest]
    pool: Executor
    progress: ProgressCallback | None = None
    share: Share | None = None
    """The only parts to make; the stage ends where it needs parts of other shares."""
    part_lists: PartLists = field(default_factory=PartLists)
    mapped: set[str] = field(default_factory=set[str])
    """Fingerprints of all parts of this run's maps, which garbage collection keeps for the next build."""
    ahead: MadeAhead = field(default_factory=MadeAhead)

    @property
    def stage(self) -> str:
        return get_stage_name(self.key)

    @property
    def folder(self) -> str:
        """The stage's folder, relative to the storage root."""
        return get_stage_folder(self.key)

    @property
    def dataset_key(self) -> tuple[str, str]:
        """Recipe and dataset, the prefix of the keys of this dataset's stages."""
        assert self.dataset_name is not None
        return (self.key[0], self.dataset_name)

    def input(self, stage: str) -> Manifest:
        """Return the manifest of another stage of the same dataset."""
        return self.inputs[(*self.dataset_key, stage)]

    def map(self, function: PartFunction[InputsT], inputs: Sequence[InputsT], *, shared: object = None) -> MappedParts:
        """Return a part for each of the inputs: finished ones are reused, the others are made by the executor.

        Equal inputs give one part, made once. `shared` is handed to the function after the place, and sent once
        per worker; it is no part of the fingerprint, so the inputs must identify what it decides.
        Raises OtherSharesMissingError where a share is made, and parts of others are not finished.
        """
        names = [function.identify(each) for each in inputs]
        self.mapped.update(names)
        finished = self.part_lists.find_parts(self.store, self.folder, function.name, names)
        missing = {name: each for name, each in zip(names, inputs, strict=True) if name not in finished}
        chosen = [name for name in missing if self.share is None or self.share.has(name)]
        threads = 1
        if function.uses_threads and chosen and not self.pool.spans_hosts:
            # More than one thread for each part if there are fewer than two parts per worker.
            # A cluster reserves one core for a task, so there it is one.
            threads = min(self.pool.workers, -(-2 * self.pool.workers // len(chosen)))
        if function.uses_threads:
            chosen = sorted(chosen, key=lambda name: missing[name].input_bytes, reverse=True)
        tasks = [(missing[name], PartPlace(self.store, self.folder, name, threads)) for name in chosen]
        batches = batch_tasks(tasks, self.pool.workers) if function.makes_many else [[task] for task in tasks]
        size = sum(each.input_bytes for each, _ in tasks)
        made = self.pool.map(partial(make_and_keep, function), batches, size_bytes=size, shared=shared)
        for part in self._report_progress(chain.from_iterable(made), [each.input_rows for each, _ in tasks]):
            finished[part.fingerprint] = part
        if len(chosen) < len(missing):
            raise OtherSharesMissingError(len(chosen), len(missing) - len(chosen))
        # Shares run at once, and each would overwrite the others' list.
        if self.share is None:
            reusable = [part for part in finished.values() if function.is_reusable(part)]
            self.part_lists.add_parts(self.store, self.folder, function.name, reusable)
        made_now = missing | {name: each for name, each in zip(names, inputs, strict=True) if name in self.ahead.parts}
        return MappedParts(
            [finished[name] for name in names],
            sum(name not in made_now for name in names),
            sum(each.input_rows for each in made_now.values()),
        )

    def place(self, *identity: object) -> PartPlace:
        """Return the place of a part that the stage itself makes, without a map, from what decides its content."""
        return PartPlace(self.store, self.folder, digest_json(*map(identify, identity)))

    def drop_parts(self, parts: Sequence[Part]) -> None:
        """Remove parts of a map that no later build needs."""
        for part in parts:
            self.store.remove(part_folder(self.folder, part.fingerprint))
            self.mapped.discard(part.fingerprint)

    def _report_progress(self, made: Iterator[Part], rows: Sequence[int]) -> Iterator[Part]:
        """Pass parts through, and report before the first part and after each how far the stage is."""
        begin, rows_done, tokens = time.monotonic(), 0, 0

        def report(done: int) -> None:
            if self.progress is not None and rows:
                self.progress(
                    "/".join(self.key[1:]),
                    done=done,
                    total=len(rows),
                    rows=rows_done,
                    total_rows=sum(rows),
                    tokens=tokens,
                    seconds=time.monotonic() - begin,
                )

        report(0)
        for done, part in enumerate(made, 1):
            rows_done += rows[done - 1]
            tokens += sum(counts.count_tokens() for counts in add_up_counts([part]).by_class.values())
            report(done)
            yield part


@dataclass(slots=True)
class StageOutput:
    """A stage's output before it becomes a manifest; the fields are those of `manifest.Manifest`."""

    counts: CountSet = field(default_factory=CountSet)
    """The sums of the counts of its parts."""
    parts: Sequence[Part] = ()
    ledger: Sequence[tuple[str, str, int]] = ()
    token_ledger: Sequence[tuple[str, str, int]] = ()
    tables: dict[str, DisplayTable] = field(default_factory=dict[str, DisplayTable])
    histograms: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    samples: dict[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])
    schema: Sequence[tuple[str, str]] = ()
    card: dict[str, Any] = field(default_factory=dict[str, Any])
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    parts_reused: int = 0
    rows_made: int = 0


def scan_rows(store: Store, files: Sequence[File], columns: Sequence[str]) -> "pl.LazyFrame":
    """Return some columns of part files as one lazy frame; local files are read in streaming mode."""
    import polars as pl

    if store.is_local:
        for file in files:
            store.content(file)
        return pl.scan_ipc([store.path(file.path) for file in files]).select(columns)
    tables = read_tables(store, files, columns)
    return pl.concat([cast("pl.DataFrame", pl.from_arrow(table)) for table in tables]).lazy()


def format_rejected(rejected: int) -> str:
    """Format the number of rejected records; empty if none."""
    return f"{rejected:,} rejected" if rejected else ""


def format_generated(valid_fraction: float | None, kept: int, rejected: int) -> tuple[str, str]:
    """Format the valid share of generated text, and the number of rejected objects."""
    valid = "" if valid_fraction is None or not kept + rejected else f"{format_percent(valid_fraction)} valid"
    return valid, format_rejected(rejected)


@contextmanager
def open_host_scratch(context: WorkContext) -> Generator[HostScratch]:
    """Lend a folder on each host for what its tasks make of stored files; in the stage's folder if the store is local.

    Nothing in it is the only copy of anything: a task on another host makes it again from the store.
    """
    local_folder = context.store.local(context.folder) if context.store.is_local else None
    name = f"scratch-{uuid.uuid4().hex[:12]}"
    scratch = HostScratch(name, None if local_folder is None else os.path.abspath(local_folder / name))
    try:
        yield scratch
    finally:
        host_scratch.drop_scratch_maps()
        scratch.remove()
        if local_folder is None and context.pool.spans_hosts:
            # A host that cannot be reached any more has taken its files with it.
            with suppress(Exception):
                context.pool.run_on_hosts(scratch.remove)


@contextmanager
def scratch_folder(context: WorkContext) -> Generator[Path]:
    """Yield a local folder for memory-mapped files; in the stage's folder if the store is local."""
    local_folder = Path(context.store.path(context.folder)) if context.store.is_local else None
    if local_folder is not None:
        local_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=local_folder) as name:
        try:
            yield Path(name)
        finally:
            host_scratch.drop_scratch_maps()
