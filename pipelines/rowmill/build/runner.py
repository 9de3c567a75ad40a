"""Run the steps of a build: reuse or make each output, write its manifest, run its checks, record and publish it.

    plan_steps (`steps.py`) ─► open_inputs (`gate.py`) ─► run_step ─► manifest ─► run_checks ─► next step

No stage imports another; the runner passes each stage its inputs. Statistics are copies of columns of an output for SQL
queries. No step reads them, and a build with workers would wait for them with all workers idle: a thread writes them
while the next steps run (decision 39).
"""

import logging
import re
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar

from rowmill.build.gate import (
    HeldVersion,
    explain_held_inputs,
    find_held_version,
    open_generated_source,
    open_inputs,
    require_one_history,
    require_open_ancestry,
)
from rowmill.build.prepare import (
    find_outside_change,
    find_reusable_output,
    forget_versions,
    index_outputs,
    list_waivers,
    make_stage_context,
    open_shared_executor,
    prepare_step,
    require_equal_hosts,
    require_own_versions,
    require_ready,
)
from rowmill.build.steps import Project, Step, choose_steps, find_downstream_steps, find_step, plan_steps
from rowmill.checks import expectation_suite, judge
from rowmill.checks.catalog import compute_values
from rowmill.checks.gates import list_loosened_checks
from rowmill.checks.judge import CheckResult
from rowmill.core.errors import DamagedFileError, GateError, PipelineError
from rowmill.core.stage_names import CANONICAL_ROWS, GPU_PARTITIONS, RAW_DATASET
from rowmill.core.storage import Store, explain_disk_full
from rowmill.kinds.reading.canonicalization import read_domain
from rowmill.parts.context import ProgressCallback, StageOutput
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.stages import catalog, exports, raw_dataset
from rowmill.stages.base import PreparedStage, Publish, StageContext, StageDeclaration
from rowmill.stats.tables import count_parts, record_manifest, write_check_results
from rowmill.stats.views import publish_views
from rowmill.tokenization import stored_tokenizers, tokenizer_source


class BackgroundStatistics:
    """Writes the statistics of steps, on some threads; leaving its block stops what has not begun."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "write-statistics")
        self._pending: deque[tuple[Step, Future[None]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for what is being written; the next build writes what is left."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def submit(self, step: Step, write: Callable[[], None]) -> None:
        """Have the statistics of a step written."""
        self._pending.append((step, self._threads.submit(write)))

    def collect(self, *, waits: bool = False) -> Iterator[Step]:
        """Yield the steps whose files turned out to be damaged, of those written so far, or, with `waits`, of all."""
        while self._pending and (waits or self._pending[0][1].done()):
            step, written = self._pending.popleft()
            try:
                written.result()
            except DamagedFileError:
                yield step


_LOG = logging.getLogger("rowmill.build")

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of running a step: its manifest, and how much of it was new.

    `rows_made` counts the rows, examples or records read to make what was not reused.
    """

    manifest: Manifest
    reused: bool
    parts: int
    parts_reused: int
    rows_made: int
    seconds: float
    held: HeldVersion | None = None
    """Set if `rowmill use` holds the output at a version, which was then kept instead of a newer one."""

    @property
    def version(self) -> str:
        """The content version, which Dagster shows as the data version."""
        return self.manifest.version


def run_step(
    project: Project,
    step: Step,
    inputs: Mapping[StageKey, Manifest],
    *,
    ranks: Sequence[str] = (),
    version: str | None = None,
    progress: ProgressCallback | None = None,
    run_id: str = "",
    is_trial: bool = False,
    statistics: BackgroundStatistics | None = None,
) -> StepReport:
    """Make one step's output, or reuse it if it exists; `ranks` are folder names such as `rank-00003-of-00008`.

    With `version`, return that kept version instead, verified and gated, and make it the current one; its own inputs
    then replace `inputs`. So it is with a version at which `rowmill use` holds the step. The requirements of the steps
    that read the output must be met. `statistics` writes the tables for SQL queries meanwhile; without it they are
    written before this returns. A trial (`is_trial`), whose store nobody queries, has no tables, and requires nothing
    of later steps.
    """
    one = _StepRun(project, step, inputs, tuple(ranks), progress, run_id, is_trial=is_trial, statistics=statistics)
    # What is in this process's memory needs no listing.
    with nullcontext() if is_trial else index_outputs(project, [step]):
        # Another version than the one asked for is no repair.
        if version is not None:
            return one.take_version(version)
        return read_and_repair(project, one.run, reader=step, inputs=inputs, progress=progress, run_id=run_id)


def read_and_repair(
    project: Project,
    read: Callable[[], ResultT],
    *,
    reader: Step | None = None,
    inputs: Mapping[StageKey, Manifest] = MappingProxyType({}),
    progress: ProgressCallback | None = None,
    run_id: str = "",
) -> ResultT:
    """Call a function that reads stored files, again after each damaged one was made again by its stage.

    Whatever a build reads, it reads through this: a step or a share of it (`reader`, with its inputs), and what is
    read of finished steps, such as the report. Raises DamagedFileError if a file cannot be made again: its stage is
    held at a version, or makes another one now.
    """
    for _ in range(MAX_REPAIRS):
        try:
            return read()
        except DamagedFileError as damage:
            owner = _discard_damaged_file(project, damage, reader)
            if owner is None or owner == reader:
                continue
            made = run_step(project, owner, open_inputs(project, owner), progress=progress, run_id=run_id).manifest
            if owner.key in inputs and made.version != inputs[owner.key].version:
                raise DamagedFileError(
                    f"{damage.damage}; made again, {'/'.join(owner.key)} has version {made.version[:12]} instead of "
                    f"{inputs[owner.key].version[:12]}; a step needs the version it was given",
                    damage.path,
                    "build from that stage on",
                ) from damage
    return read()


MAX_REPAIRS = 100
"""Maximum number of damaged files that one run makes again: a disk that loses more should be replaced."""


def _discard_damaged_file(project: Project, damage: DamagedFileError, reader: Step | None) -> Step | None:
    """Remove a damaged file, so that the step that wrote it makes it again; return that step, None if it is no step's.

    The rest of the step's output is kept. Only the step that is running now may have other options than the file.
    """
    path = project.store.relative_path(damage.path)
    owner = next(
        (one for one in plan_steps(project) if path.startswith(f"{manifest.get_stage_folder(one.key)}/")), None
    )
    if owner is not None:
        name = "/".join(owner.key)
        if (held := find_held_version(project.store, owner.key)) is not None:
            why = f"{damage.damage}; it cannot be made again: {name} is {held.sentence}"
            raise DamagedFileError(why, damage.path, "check the disk") from damage
        made = manifest.load_current_if_intact(project.store, owner.key)
        if owner != reader and made is not None and made.code_version != owner.code_version:
            why = f"{damage.damage}; it cannot be made again: the options of {name} changed since"
            raise DamagedFileError(why, damage.path, "build from that stage on") from damage
    project.store.remove(path)
    _LOG.warning("%s; it is made again", damage.damage)
    return owner


@dataclass(frozen=True, slots=True)
class _StepRun:
    """One run of a step: what it is given, and its ends, each of which leaves a current output with its statistics.

    take_version   a kept version that somebody asks for
    run            the version at which the step is held, or the kept output of these inputs, or a new one
    """

    project: Project
    step: Step
    inputs: Mapping[StageKey, Manifest]
    ranks: tuple[str, ...]
    progress: ProgressCallback | None
    run_id: str
    is_trial: bool
    statistics: BackgroundStatistics | None

    @property
    def store(self) -> Store:
        return self.project.store

    def take_version(self, version: str) -> StepReport:
        """Make a kept version current, after its ancestors' checks and its files' digests."""
        started = time.monotonic()
        with self._lock():
            kept = manifest.load_version(self.store, self.step.key, version)
            require_open_ancestry(self.project, manifest.load_inputs(self.store, kept).values())
            for one in _list_opened_outputs(self.store, kept):
                manifest.verify_files(self.store, one)
            return self._keep(kept, started)

    def run(self) -> StepReport:
        """Keep a held version, reuse a kept output, or make a new one."""
        started = time.monotonic()
        context = self._open_context(self.inputs)
        with self._lock(), explain_held_inputs(self.store, self.inputs):
            held = find_held_version(self.store, self.step.key)
            if held is not None:
                # Current again, in case a run of Dagster chose another version, without reading its files.
                return replace(self._keep(held.load(self.store), started), held=held)
            # What is held was of one history when it was made; equal examples may have been made again of another.
            require_one_history(self.store, self.inputs)
            fingerprint, prepared = prepare_step(context, self.step)
            kept = find_reusable_output(self.store, self.step, fingerprint)
            if kept is None:
                return self._make(context, prepared, fingerprint, started)
            before = manifest.load_current_if_intact(self.store, self.step.key)
            kept = manifest.make_current(self.store, kept, self.inputs)
            is_unchanged = before is not None and before.origin == kept.origin
            return self._record(context, report_kept_version(kept, started), is_unchanged=is_unchanged)

    @contextmanager
    def _lock(self) -> Generator[None]:
        name, folder = "/".join(self.step.key), manifest.get_stage_folder(self.step.key)
        with explain_disk_full(self.store, name), self.store.lock(f"{folder}/.lock", what=name):
            yield

    def _open_context(self, inputs: Mapping[StageKey, Manifest]) -> StageContext:
        pool = open_shared_executor(self.project.recipe)
        context = make_stage_context(self.project, self.step, inputs)
        return replace(context, pool=pool, progress=self.progress, ranks=self.ranks)

    def _keep(self, kept: Manifest, started: float) -> StepReport:
        """Make an output that somebody chose current; its inputs are its own."""
        manifest.make_current(self.store, kept)
        context = self._open_context(manifest.load_inputs(self.store, kept))
        return self._record(context, report_kept_version(kept, started))

    def _make(self, context: StageContext, prepared: PreparedStage, fingerprint: str, started: float) -> StepReport:
        store, step, name = self.store, self.step, "/".join(self.step.key)
        if not self.is_trial:
            # In Dagster, which runs single stages, an unmet requirement is then reported before its input is made.
            require_ready(self.project, [reader for reader in plan_steps(self.project) if step.key in reader.inputs])
        require_equal_hosts(self.project)
        require_own_versions(store, step.key)
        changed = find_outside_change(step, context, manifest.load_current_if_intact(store, step.key))
        if changed is not None:
            later = ", ".join("/".join(one.key[1:]) for one in find_downstream_steps(self.project, step.key))
            _LOG.warning("%s: %s; it is made again, and so are the stages after it: %s", name, changed, later)
        draft = prepared.make()
        made = make_manifest(context, step, draft, fingerprint, started, self.run_id)
        output = manifest.save_manifest(store, made)
        forget_versions(store, step.key)
        report = StepReport(
            output,
            reused=False,
            parts=count_parts(output),
            parts_reused=draft.parts_reused,
            rows_made=draft.rows_made,
            seconds=time.monotonic() - started,
        )
        return self._record(context, report)

    def _record(self, context: StageContext, report: StepReport, *, is_unchanged: bool = False) -> StepReport:
        """Publish an output and write its statistics."""
        project, step, store, output = self.project, self.step, self.store, report.manifest
        if step.stage.publish is not None:
            _publish_output(project, step, context, output, step.stage.publish)
        if self.is_trial:
            return report
        # Only canonical rows are made of a source's records, whose domain can be read.
        domain_key = None
        if step.name == CANONICAL_ROWS:
            domain_key = project.recipe.datasets[step.key[1]].format.domain_key
        record = partial(
            record_manifest,
            store,
            output,
            step.stage.stats_inputs,
            reused=report.reused,
            parts_reused=report.parts_reused,
            is_unchanged=is_unchanged,
            read_domain=None if domain_key is None else partial(read_domain, domain_key),
        )

        def record_if_current() -> None:
            # Another build may have made another version current since, which it records itself.
            with self._lock():
                if manifest.is_current(store, output):
                    record()

        # A remote store's tables are copied from what the step has just read, which is not kept for long.
        if self.statistics is None or not (store.is_local or report.reused):
            record()
        else:
            self.statistics.submit(step, record_if_current)
        return report


def report_kept_version(kept: Manifest, started: float | None = None) -> StepReport:
    """Return the report of a version that is used as it is, `started` a monotonic time."""
    parts = count_parts(kept)
    seconds = 0.0 if started is None else time.monotonic() - started
    return StepReport(kept, reused=True, parts=parts, parts_reused=parts, rows_made=0, seconds=seconds)


def _publish_output(project: Project, step: Step, context: StageContext, output: Manifest, publish: Publish) -> None:
    """Run an output's checks, and publish it if none blocks; otherwise the earlier publication stays."""
    results = judge.run_checks(context.store, output, step.thresholds)
    if not any(result.blocking for result in results):
        loosened = [line for one in plan_steps(project) for line in list_loosened_checks(one.key, one.thresholds)]
        if step.name == GPU_PARTITIONS:
            from rowmill.build import comparison

            comparison.note_changes(project, output)
        publish(context, output, results, loosened)


def _list_opened_outputs(store: Store, output: Manifest) -> Iterator[Manifest]:
    """Yield an output and all those whose files its readers open: indexes of ranks name shards, and these examples."""
    yield output
    shared = catalog.find_stage(output.stage).list_shared_inputs(output)
    for made in manifest.load_inputs(store, output).values():
        if made.stage in shared:
            yield from _list_opened_outputs(store, made)


def make_manifest(
    context: StageContext, step: Step, draft: StageOutput, fingerprint: str, started: float, run_id: str
) -> Manifest:
    """Return the manifest of a step's output, which is not written."""
    return Manifest(
        key=step.key,
        stage=step.name,
        fingerprint=fingerprint,
        code_version=step.code_version,
        inputs={"/".join(key): one.version for key, one in context.inputs.items()},
        input_fingerprints={"/".join(key): one.fingerprint for key, one in context.inputs.items()},
        parts=tuple(draft.parts),
        counts=draft.counts.to_json(with_samples=False),
        values=draft.counts.derive() | compute_values((threshold.check for threshold in step.thresholds), draft.counts),
        ledger=tuple(draft.ledger),
        token_ledger=tuple(draft.token_ledger),
        tables=draft.tables,
        histograms=draft.histograms,
        samples=draft.samples,
        schema=tuple(draft.schema),
        card=draft.card,
        waivers=tuple(list_waivers(context, step)),
        details=draft.details
        | {
            "made_of": sorted(context.mapped - {part.fingerprint for part in draft.parts}),
            "options_version": step.options_version,
        },
        built_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        run_id=run_id,
        seconds=round(time.monotonic() - started, 3),
    )


def publish_statistics(project: Project) -> None:
    """Update `stats.duckdb`, so that it can be queried during the build; remove what killed builds left unfinished."""
    with explain_disk_full(project.store, "stats.duckdb"):
        publish_views(project.store)
    project.store.remove_unfinished()


def check_step(
    project: Project, step: Step, output: Manifest, *, only: Collection[str] | None = None
) -> list[CheckResult]:
    """Run a step's checks under the recipe's thresholds, or only the named ones; save the results and their page."""
    chosen = [threshold for threshold in step.thresholds if only is None or threshold.check in only]
    with explain_disk_full(project.store, "/".join(step.key)):
        results = judge.run_checks(project.store, output, chosen)
        # A check that runs alone must not hide the results of the others.
        known = results if only is None else judge.load_check_results(project.store, output, step.thresholds)
        write_check_results(project.store, output, known)
        shown = [one for one in known if one.check not in step.off_checks]
        expectation_suite.write_expectations_page(project.store, output, step.shown_thresholds, shown)
    return results


@tokenizer_source.hold_commits()
def build(
    project: Project,
    *,
    progress: ProgressCallback | None = None,
    begin: Callable[[Step], None] | None = None,
    finish: Callable[[Step, StepReport, list[CheckResult]], None] | None = None,
    only: Sequence[str] = (),
    datasets: Collection[str] | None = None,
) -> list[tuple[Step, StepReport, list[CheckResult]]]:
    """Run a recipe's steps in order, with their checks; leave out steps behind a closed gate, and build all others.

    `only` limits the build to stages of these names or labels; without it, on-demand stages are left out. `datasets`
    limits it to steps of these datasets. `begin` is called before each step that is run, `finish` after it.

    Raises
    ------
    ConfigError
        If a tokenizer or template is missing, or a host cannot take part, before anything is built.
    GateError
        If steps were left out, at the end: each failed check that blocks one, and the steps left out because of it.

    """
    chosen = choose_steps(project, only, datasets)
    require_equal_hosts(project, again=True)
    # A reused output adds at most a small file for each step, which is a request where the store is remote.
    threads = 1 if project.store.is_local else 4
    is_whole = not only and datasets is None
    done: list[tuple[Step, StepReport, list[CheckResult]]] = []
    run_id = f"build-{uuid.uuid4().hex[:12]}"
    closed: dict[str, None] = {}
    left_out: dict[StageKey, None] = {}
    with index_outputs(project, chosen, is_whole=is_whole), BackgroundStatistics(threads) as statistics:
        require_ready(project, chosen)

        def mend(*, waits: bool = False) -> None:
            for damaged in statistics.collect(waits=waits):
                run_step(project, damaged, open_inputs(project, damaged), progress=progress, run_id=run_id)

        for step in chosen:
            mend()
            if left_out.keys() & {*step.inputs, *step.gates} and find_held_version(project.store, step.key) is None:
                left_out[step.key] = None
                continue
            try:
                inputs = open_inputs(project, step)
            except GateError as error:
                # One message per closed check; the causes of a check are indented below it.
                closed |= dict.fromkeys(re.split(r"\n(?=\S)", str(error)))
                left_out[step.key] = None
                continue
            if begin is not None:
                begin(step)
            try:
                report = run_step(project, step, inputs, progress=progress, run_id=run_id, statistics=statistics)
                results = check_step(project, step, report.manifest)
            except PipelineError as error:
                error.place = error.place or "/".join(step.key[1:])
                raise
            done.append((step, report, results))
            if finish is not None:
                finish(step, report, results)
        mend(waits=True)
    if closed:
        names = ", ".join("/".join(key[1:]) for key in left_out)
        raise GateError("\n".join([*closed, f"not built because of that: {names}"]))
    return done


def copy_export(project: Project, name: str, target: Path) -> None:
    """Copy a built export to a new folder, after comparing its files with their digests."""
    key = (project.recipe.name, exports.STAGE.name, name)
    made = manifest.load_current(project.store, key) or manifest.load_version(project.store, key, None)
    read_and_repair(project, partial(manifest.verify_files, project.store, made))
    exports.copy_export_files(project.store, made, target)


# ── A trial: stages of a recipe run on a store of their own, of which nothing is kept ──
#
#     project ─► the same on a store in memory, or in a temporary folder ─► its stages, up to the one that is asked for
#
# `plan`, `inspect`, `advise` and the check before a build run the real stages this way, some on the first records only.
# Tokenizers that the project has stored are copied, since opening one from its files takes seconds.


@contextmanager
def open_trial(project: Project, *, on_disk: bool = False) -> Generator[Project]:
    """Lend the project on a store in this process's memory; or on disk, for outputs that may be large."""
    if on_disk:
        with tempfile.TemporaryDirectory(prefix="rowmill-trial-") as folder:
            yield _copy_project(project, Store(folder))
        return
    store = Store(f"memory://rowmill-{uuid.uuid4().hex}")
    try:
        yield _copy_project(project, store)
    finally:
        if store.exists(""):
            store.remove("")


def _copy_project(project: Project, store: Store) -> Project:
    stored_tokenizers.copy_tokenizers(project.store, store)
    # What is in this process's memory no other process sees.
    execution = project.recipe.execution
    if not store.is_local:
        execution = execution.limit_to_this_machine(workers=1)
    return replace(project, recipe=project.recipe.model_copy(update={"execution": execution}), store=store)


def make_context(
    trial: Project, dataset: str, stage: StageDeclaration, inputs: dict[StageKey, Manifest]
) -> StageContext:
    """Return the context of a stage of a dataset, for steps of its work that are done in this process."""
    return make_stage_context(trial, find_step(trial, (trial.recipe.name, dataset, stage.name)), inputs)


def run_stages(project: Project, trial: Project, dataset: str, last: StageDeclaration) -> dict[StageKey, Manifest]:
    """Run the stages of a dataset on a trial's store, up to the last one; return their outputs in order."""
    outputs: dict[StageKey, Manifest] = {}
    for step in plan_steps(trial):
        if step.dataset == dataset and step.name in catalog.list_stages_up_to(last):
            outputs[step.key] = run_stage(project, trial, step, outputs)
    return outputs


def run_stage(
    project: Project, trial: Project, step: Step, outputs: dict[StageKey, Manifest], *, first_records: int | None = None
) -> Manifest:
    """Run one stage on a trial's store; with `first_records`, a source is read no further."""
    generated = open_generated_source(project, step)
    # The trial's store has a copy of what a model generated.
    for file in (file for output in generated.values() for part in output.parts for file in part.files.values()):
        trial.store.write(file.path, project.store.content(file).to_pybytes())
    if step.name == RAW_DATASET and first_records is not None:
        prepare = partial(raw_dataset.prepare_raw_dataset, first_records=first_records)
        step = replace(step, stage=replace(step.stage, prepare=prepare))
    inputs = {key: outputs[key] for key in step.inputs} | generated
    return run_step(trial, step, inputs, is_trial=True).manifest
