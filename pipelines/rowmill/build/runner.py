"""The corridor: which stage comes after which, what each is made of, and whether it must be made again.

What belongs here: the order of the stages, their fingerprints, reuse, gates, one `run` per stage. What does
not: any stage's work (`stages/`). No room imports another; the corridor hands each room what it needs.

    road(project) ─► steps ─► open_inputs (the gate) ─► run ─► manifest ─► judge.run_checks ─► next step

A step's code version is a digest of the options it reads, the stage's VERSION and the waivers it is built under:
what Dagster compares. Its fingerprint is a digest of that, its inputs' versions (content, not time), tokenizer
files and template text. If a manifest with that fingerprint is kept, the step is done: nothing is read.
"""

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import cast

from rowmill import stats
from rowmill.checks import expectations_page, judge, upstream
from rowmill.checks.catalog import CHECKS_BY_NAME
from rowmill.checks.gates import Threshold, list_loosened_checks, list_output_thresholds, list_thresholds
from rowmill.checks.judge import CheckResult
from rowmill.core.errors import ConfigError, DamagedFileError, IntegrityError, PipelineError
from rowmill.core.storage import Store, explain_disk_full
from rowmill.executors import LocalPool
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.sources import GeneratedSource
from rowmill.stages import catalog, exports, gpu_partitions
from rowmill.stages.base import ProgressCallback, Publish, StageContext, StageDeclaration, StageOutput
from rowmill.tokenization import tokenizer_source

_LOG = logging.getLogger("rowmill.build")


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of one dataset, or of the whole recipe: a node of the asset graph.

    `inputs` are read; `gates` are the stages whose checks must have passed (a superset of `inputs`).
    """

    stage: StageDeclaration = field(compare=False, repr=False)
    recipe: str
    dataset: str | None
    key: StageKey
    inputs: tuple[StageKey, ...]
    gates: tuple[StageKey, ...]
    code_version: str
    thresholds: tuple[Threshold, ...]
    generated_by: StageKey | None = None
    """The stage that generates the records that it reads as a source, where the recipe says which one it is."""

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name

    @property
    def description(self) -> str:
        """What an output of the stage holds."""
        return self.stage.description

    @property
    def on_demand(self) -> bool:
        """Whether a build leaves it out unless it is named: it needs a trained model."""
        return self.stage.on_demand

    @property
    def label(self) -> str:
        """The stage's name; an export's with its own, since a recipe may have several."""
        return f"{self.name}/{self.key[-1]}" if self.stage.scope == "export" else self.name


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The steps of a recipe, and what a gate asks about them; each is computed once, when it is first asked for."""

    recipe: Recipe

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps in the order in which they can run."""
        return tuple(_iterate_steps(self.recipe))

    @cached_property
    def thresholds(self) -> Mapping[StageKey, tuple[Threshold, ...]]:
        """What the output of each step is held against."""
        return {step.key: step.thresholds for step in self.steps}


@dataclass(frozen=True, slots=True)
class Project:
    """A recipe and where its work is done. `base` resolves the recipe's relative paths."""

    recipe: Recipe
    store: Store
    base: Path
    graph: StepGraph = field(default=cast("StepGraph", None), compare=False, repr=False)
    """The recipe's steps; `replace` hands them on as long as the recipe is the same."""

    def __post_init__(self) -> None:
        """Make the graph of the recipe, unless this one is already of it."""
        if cast("StepGraph | None", self.graph) is None or self.graph.recipe is not self.recipe:
            object.__setattr__(self, "graph", StepGraph(self.recipe))


@dataclass(frozen=True, slots=True)
class StepReport:
    """What running a step came to: its manifest, and how much of it was new.

    `rows_made` is how many rows, examples or records were read to make what was not reused.
    """

    manifest: Manifest
    reused: bool
    parts: int
    parts_reused: int
    rows_made: int
    seconds: float

    @property
    def version(self) -> str:
        """The content version, which Dagster shows as the data version."""
        return self.manifest.version


def open_project(path: str | Path, root: str | None = None, overrides: Mapping[str, str] | None = None) -> Project:
    """Load a recipe and say where its work is done; `overrides` as `recipe.overridden` takes them.

    Relative paths in a recipe count from the project: the folder that holds `configs/`, or the recipe's own
    folder where there is none. `root` defaults to `.rowmill` there.
    """
    file = Path(path)
    base = recipe.project_folder(file)
    return Project(recipe.load_recipe(file, overrides), Store(root or str(base / ".rowmill")), base)


# ── The order ──────────────────────────────────────────────────────────────────────────────────────


def plan_steps(project: Project) -> tuple[Step, ...]:
    """Return the steps of a recipe in the order in which they can run."""
    return project.graph.steps


def _iterate_steps(loaded: Recipe) -> Iterator[Step]:
    """Yield the steps of every dataset, those of the recipe, its exports, and last what runs on demand."""
    for dataset in loaded.datasets:
        yield from _iterate_dataset_steps(loaded, dataset, on_demand=False)
    for stage in catalog.list_stages("recipe"):
        yield _make_step(loaded, stage, (loaded.name, stage.name))
    for stage in catalog.list_stages("export"):
        for one in loaded.exports:
            yield _make_step(loaded, stage, (loaded.name, stage.name, one.name))
    for dataset in loaded.datasets:
        yield from _iterate_dataset_steps(loaded, dataset, on_demand=True)


def _iterate_dataset_steps(loaded: Recipe, dataset: str, *, on_demand: bool) -> Iterator[Step]:
    for stage in catalog.list_stages("dataset", on_demand=on_demand):
        if stage.applies(loaded.datasets[dataset]):
            yield _make_step(loaded, stage, (loaded.name, dataset, stage.name), dataset)


def _make_step(loaded: Recipe, stage: StageDeclaration, key: StageKey, dataset: str | None = None) -> Step:
    inputs = tuple(one for name in stage.inputs for one in _find_stage_keys(loaded, name, dataset))
    gates = tuple(_find_gates(loaded, stage, inputs, dataset))
    kind = None if dataset is None else loaded.datasets[dataset].row_kind
    identity = "" if stage.scope == "recipe" else key[-1] if dataset is None else dataset
    return Step(
        stage=stage,
        recipe=loaded.name,
        dataset=dataset,
        key=key,
        inputs=inputs,
        gates=gates,
        code_version=stage.code_version(loaded, identity, sorted(set(_iterate_gate_waivers(loaded, gates)))),
        thresholds=list_thresholds(loaded.gates, stage.name, dataset, kind),
        generated_by=_find_generating_stage(loaded, dataset) if dataset is not None and not inputs else None,
    )


def _find_stage_keys(loaded: Recipe, name: str, dataset: str | None) -> Iterator[StageKey]:
    """Yield the keys of a stage that another one names: of its dataset, or of every dataset if it has none."""
    stage = catalog.find_stage(name)
    if stage.scope == "recipe":
        yield (loaded.name, name)
        return
    for one in loaded.datasets if dataset is None else (dataset,):
        if stage.applies(loaded.datasets[one]):
            yield (loaded.name, one, name)


def _find_gates(
    loaded: Recipe, stage: StageDeclaration, inputs: Iterable[StageKey], dataset: str | None
) -> list[StageKey]:
    """Return the stages whose checks must have passed before a stage: all that it reads, and what it names."""
    named = [key for name in stage.gates for key in _find_stage_keys(loaded, name, dataset)]
    every = [
        key
        for one in (loaded.datasets if stage.gates_on_every_dataset else ())
        for gate in catalog.list_stages("dataset")
        for key in _find_stage_keys(loaded, gate.name, one)
    ]
    return list(dict.fromkeys((*every, *inputs, *named)))


def _find_generating_stage(loaded: Recipe, dataset: str) -> StageKey | None:
    """Return the stage that a source of generated records reads; of two that may have made some, one is found later."""
    source = loaded.datasets[dataset].source
    if not isinstance(source, GeneratedSource):
        return None
    recipe_name, origin = source.dataset_key(loaded.name)
    own = loaded.datasets.get(origin) if recipe_name == loaded.name else None
    made = [stage.name for stage in catalog.STAGES if stage.on_demand and own is not None and stage.applies(own)]
    name = source.stage or (made[0] if len(made) == 1 else None)
    return None if name is None else (recipe_name, origin, name)


def list_rank_names(project: Project) -> tuple[str, ...]:
    """Return the folder names of a recipe's ranks, in order; the number of ranks is part of each name."""
    return gpu_partitions.rank_names(project.recipe.partitions.world_size)


def find_step(project: Project, key: StageKey) -> Step:
    """Return the step of a key; ConfigError names those there are."""
    steps = plan_steps(project)
    for step in steps:
        if step.key == key:
            return step
    names = ", ".join("/".join(step.key) for step in steps)
    raise ConfigError(f"{'/'.join(key)}: no such asset; there are {names}; choose one")


def find_downstream_steps(project: Project, key: StageKey) -> tuple[Step, ...]:
    """Return the steps that read a step's output, or that of one that does, in order."""
    reached = {key}
    found: list[Step] = []
    for step in plan_steps(project):
        if reached & set(step.inputs):
            reached.add(step.key)
            found.append(step)
    return tuple(found)


# ── The gate ───────────────────────────────────────────────────────────────────────────────────────


def open_inputs(project: Project, step: Step) -> dict[StageKey, Manifest]:
    """Return the current manifest of every input whose gates are open.

    Raises
    ------
    GateError
        Naming each closed check with its number, threshold and remedy.
    IntegrityError
        If an input was never built.

    """
    thresholds = project.graph.thresholds
    closed: list[PipelineError] = []
    found: dict[StageKey, Manifest] = {}
    for key in dict.fromkeys((*step.inputs, *step.gates)):
        try:
            pointed = manifest.load_current(project.store, key)
            found[key] = pointed if pointed is not None else manifest.load_version(project.store, key, None)
            if key in step.gates:
                judge.require_passing_checks(project.store, found[key], thresholds[key])
        except PipelineError as error:
            closed.append(error)
    if closed:
        raise type(closed[0])("\n".join(str(error) for error in closed))
    inputs = {key: found[key] for key in step.inputs}
    require_open_ancestry(project, inputs.values(), gated=[found[key] for key in step.gates])
    return inputs


def require_open_ancestry(project: Project, inputs: Iterable[Manifest], *, gated: Iterable[Manifest] = ()) -> None:
    """Refuse inputs that were made, however far up, of a version that fails today; see `ancestry`.

    Raises
    ------
    GateError
        Naming each closed check with its number, threshold and remedy.

    """
    graph = project.graph

    def thresholds(made: Manifest) -> Sequence[Threshold]:
        # A kept version may be of a dataset that the recipe no longer has, or calls otherwise: it is judged alike.
        dataset = made.key[1] if catalog.find_stage(made.stage).scope == "dataset" else None
        return graph.thresholds.get(made.key) or list_output_thresholds(project.recipe.gates, made, dataset)

    upstream.require_passing_ancestors(
        project.store, inputs, thresholds=thresholds, beside=_find_sibling_gates, gated=gated
    )


def _find_sibling_gates(made: Manifest) -> list[StageKey]:
    """Return what an output of a dataset waits for without reading it; what a recipe's waits for are its ancestors."""
    return [(*made.key[:-1], name) for name in sorted(catalog.find_stage(made.stage).gates)]


# ── Running ────────────────────────────────────────────────────────────────────────────────────────


_WORKER_POOLS: dict[int, LocalPool] = {}


def _open_worker_pool(workers: int) -> LocalPool:
    """Keep workers from stage to stage: opening a tokenizer in each costs a second."""
    return _WORKER_POOLS.setdefault(workers, LocalPool(workers))


def close_workers() -> None:
    """Stop the worker processes that stages share; the next stage that needs them starts them again."""
    for pool in _WORKER_POOLS.values():
        pool.close()


def run_step(
    project: Project,
    step: Step,
    inputs: Mapping[StageKey, Manifest],
    *,
    ranks: Sequence[str] = (),
    version: str | None = None,
    progress: ProgressCallback | None = None,
    run_id: str = "",
) -> StepReport:
    """Make one step's output, or find that it is there already; `ranks` are folder names such as `rank-00003-of-00008`.

    With `version`, return that kept version instead, verified whole and gated, and make it the current one; `inputs`
    are then those that it was made of, whatever is handed in.
    """
    _require_one_history(inputs)
    asked = _RunRequest(project, step, tuple(ranks), version, progress, run_id)
    for _ in range(MAX_REPAIRS):
        try:
            return _run_or_reuse(asked, inputs)
        except DamagedFileError as damage:
            if version is not None:
                raise
            _rebuild_damaged_file(asked, inputs, damage)
    return _run_or_reuse(asked, inputs)


MAX_REPAIRS = 100
"""Damaged files that one run makes again before it gives up: a disk that loses more is to be replaced."""


@dataclass(frozen=True, slots=True)
class _RunRequest:
    """What `run` was asked for, beside the inputs."""

    project: Project
    step: Step
    ranks: tuple[str, ...]
    version: str | None
    progress: ProgressCallback | None
    run_id: str


def _rebuild_damaged_file(asked: _RunRequest, inputs: Mapping[StageKey, Manifest], damage: DamagedFileError) -> None:
    """Remove a damaged file and run the stage that made it again: all else of that stage is kept.

    Raises
    ------
    IntegrityError
        If what is made now is not what was damaged, so that the inputs at hand are not those of this step.

    """
    project, step = asked.project, asked.step
    project.store.remove(damage.path)
    owner = next(
        (one for one in plan_steps(project) if damage.path.startswith(f"{manifest.get_stage_folder(one.key)}/")), None
    )
    _LOG.warning("%s; it is made again", damage)
    if owner is None or owner.key == step.key:
        return
    made = run_step(project, owner, open_inputs(project, owner), progress=asked.progress, run_id=asked.run_id).manifest
    if owner.key in inputs and made.version != inputs[owner.key].version:
        raise IntegrityError(
            f"{damage}; made again, {'/'.join(owner.key)} has version {made.version[:12]} instead of "
            f"{inputs[owner.key].version[:12]}; a step needs the inputs that it was given; build from there on"
        )


def _run_or_reuse(asked: _RunRequest, inputs: Mapping[StageKey, Manifest]) -> StepReport:
    started = time.monotonic()
    project, step = asked.project, asked.step
    work = StageContext(
        recipe=project.recipe,
        store=project.store,
        base=project.base,
        key=step.key,
        dataset_name=step.dataset,
        inputs=inputs,
        pool=_open_worker_pool(project.recipe.total_workers),
        progress=asked.progress,
        ranks=asked.ranks,
    )
    name = "/".join(step.key)
    with (
        explain_disk_full(project.store, name),
        project.store.lock(f"{manifest.get_stage_folder(step.key)}/.lock", what=name),
    ):
        if asked.version is not None:
            return _restore_version(project, step, work, asked.version, started)
        fingerprint, make = _prepare_step(work, step)
        kept = manifest.find_by_fingerprint(work.store, step.key, fingerprint)
        if kept is not None:
            manifest.make_current(work.store, kept)
            return _record_report(project, step, work, _report_reuse(kept, started))
        # Whoever runs one stage after another, as Dagster does, hears of it before the stage ahead of it is made.
        require_ready(project, [one for one in plan_steps(project) if step.key in one.inputs])
        _warn_of_outside_change(project, step, work)
        draft = make()
        made = manifest.save_manifest(work.store, _make_manifest(work, step, draft, fingerprint, started, asked.run_id))
        report = StepReport(
            made,
            reused=False,
            parts=stats.count_parts(made),
            parts_reused=draft.parts_reused,
            rows_made=draft.rows_made,
            seconds=time.monotonic() - started,
        )
        return _record_report(project, step, work, report)


def _warn_of_outside_change(project: Project, step: Step, work: StageContext) -> None:
    """Say what changed though the recipe did not, and what is made again for it."""
    changed = _find_outside_change(step, work, manifest.load_current_if_intact(work.store, step.key))
    if changed is not None:
        behind = ", ".join("/".join(one.key[1:]) for one in find_downstream_steps(project, step.key))
        _LOG.warning("%s: %s; it is made again, and so is what is made of it: %s", "/".join(step.key), changed, behind)


def _find_outside_change(step: Step, work: StageContext, earlier: Manifest | None) -> str | None:
    find = step.stage.find_outside_change
    return None if find is None or earlier is None else find(work, earlier)


def _report_reuse(kept: Manifest, started: float) -> StepReport:
    parts = stats.count_parts(kept)
    return StepReport(
        kept, reused=True, parts=parts, parts_reused=parts, rows_made=0, seconds=time.monotonic() - started
    )


def _require_one_history(inputs: Mapping[StageKey, Manifest]) -> None:
    """Refuse inputs of which one was made of another version of the other.

    That happens when an older version of one stage was made current and what follows was not built again.

    Raises
    ------
    IntegrityError
        Naming the input that must be built again.

    """
    for key, made in sorted(inputs.items()):
        for other, found in inputs.items():
            of = made.inputs.get("/".join(other))
            if of is not None and of != found.version:
                raise IntegrityError(
                    f"{'/'.join(key)}: made of version {of[:12]} of {'/'.join(other)}, but {found.version[:12]} is "
                    f"current; inputs must be of one history; build {key[-1]} again, or use the other version"
                )


def _record_report(project: Project, step: Step, work: StageContext, report: StepReport) -> StepReport:
    if step.stage.publish is not None:
        _publish_output(project, step, work, report.manifest, step.stage.publish)
    made, feeds = report.manifest, step.stage.feeds
    stats.record_manifest(work.store, made, feeds, reused=report.reused, parts_reused=report.parts_reused)
    return report


def _publish_output(project: Project, step: Step, work: StageContext, made: Manifest, publish: Publish) -> None:
    """Judge an output, and give it to trainers if no check blocks; what was given before stays otherwise."""
    results = judge.run_checks(project.store, made, step.thresholds)
    if not any(result.blocking for result in results):
        loosened = [line for one in plan_steps(project) for line in list_loosened_checks(one.key, one.thresholds)]
        publish(work, made, results, loosened)


def _restore_version(project: Project, step: Step, work: StageContext, version: str, started: float) -> StepReport:
    kept = manifest.load_version(work.store, work.key, version)
    inputs = manifest.load_inputs(work.store, kept)
    require_open_ancestry(project, inputs.values())
    manifest.verify_files(work.store, kept)
    manifest.make_current(work.store, kept)
    return _record_report(project, step, replace(work, inputs=inputs), _report_reuse(kept, started))


def _prepare_step(work: StageContext, step: Step) -> tuple[str, Callable[[], StageOutput]]:
    """Return a step's fingerprint and the function that makes its output."""
    versions = {"/".join(key): one.version for key, one in sorted(work.inputs.items())}
    prepared = step.stage.prepare(work)
    return step.stage.fingerprint(
        step.code_version, versions, _list_waivers(work, step), prepared.outside
    ), prepared.make


def compute_fingerprint(project: Project, step: Step, inputs: Mapping[StageKey, Manifest]) -> str:
    """Identify what a step would make of some inputs, making nothing."""
    return _prepare_step(_make_stage_context(project, step, inputs), step)[0]


def _make_stage_context(project: Project, step: Step, inputs: Mapping[StageKey, Manifest]) -> StageContext:
    """Return what a stage is handed to look at, not to work with: it has one worker."""
    return StageContext(
        project.recipe, project.store, project.base, step.key, step.dataset, inputs, _open_worker_pool(1)
    )


def find_kept_output(
    project: Project, step: Step, inputs: Mapping[StageKey, Manifest], *, scratch: Store
) -> Manifest | None:
    """Return the output that a build would reuse for these inputs; what is read on the way is kept in `scratch`."""
    fingerprint = compute_fingerprint(replace(project, store=scratch), step, inputs)
    return manifest.find_by_fingerprint(project.store, step.key, fingerprint)


def _list_waivers(work: StageContext, step: Step) -> list[str]:
    """Name the waivers on all that a step waits for, and those below its inputs; they are part of what is built."""
    return sorted(
        {waiver for one in work.inputs.values() for waiver in one.waivers}
        | set(_iterate_gate_waivers(work.recipe, step.gates))
    )


def _iterate_gate_waivers(loaded: Recipe, gates: Sequence[StageKey]) -> Iterator[str]:
    """Name the waivers on what a step waits for."""
    for waiver in loaded.gates.waivers:
        check = CHECKS_BY_NAME[waiver.check]
        if any(
            key[-1] in check.stages and waiver.dataset in (None, key[1] if len(key) == 3 else None) for key in gates
        ):
            yield f"{waiver.check}{f' on {waiver.dataset}' if waiver.dataset else ''}: {waiver.reason}"


def _make_manifest(
    work: StageContext, step: Step, draft: StageOutput, fingerprint: str, started: float, run_id: str
) -> Manifest:
    return Manifest(
        key=step.key,
        stage=step.name,
        fingerprint=fingerprint,
        code_version=step.code_version,
        inputs={"/".join(key): one.version for key, one in work.inputs.items()},
        parts=tuple(draft.parts),
        facts=draft.facts,
        ledger=tuple(draft.ledger),
        token_ledger=tuple(draft.token_ledger),
        tables=draft.tables,
        histograms=draft.histograms,
        samples=draft.samples,
        schema=tuple(draft.schema),
        card=draft.card,
        waivers=tuple(_list_waivers(work, step)),
        details=draft.details,
        built_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        run_id=run_id,
        seconds=round(time.monotonic() - started, 3),
    )


def require_ready(project: Project, steps: Iterable[Step]) -> None:
    """Look for what some steps need beside their inputs, such as a tokenizer and a template, before any is made.

    Where a step's current output is of the same options this was done, and a build in which nothing changed looks for
    nothing.

    Raises
    ------
    ConfigError
        One line for each thing that is not there, with the recipe and the dataset.

    """
    problems: dict[str, None] = {}
    for step in steps:
        require = step.stage.require_ready
        if require is None or _has_these_options(project, step):
            continue
        try:
            require(_make_stage_context(project, step, {}))
        except ConfigError as error:
            problems[f"{step.recipe}: {error}"] = None
    if problems:
        raise ConfigError("\n".join(problems))


def _has_these_options(project: Project, step: Step) -> bool:
    made = manifest.load_current_if_intact(project.store, step.key)
    return made is not None and made.code_version == step.code_version


def publish_statistics(project: Project) -> None:
    """Bring `stats.duckdb` up to date, so that it answers while what follows is built."""
    with explain_disk_full(project.store, "stats.duckdb"):
        stats.publish_views(project.store)


def check_step(
    project: Project, step: Step, made: Manifest, *, only: Collection[str] | None = None
) -> list[CheckResult]:
    """Run a step's checks under the recipe's thresholds, or those of some names; save the results and show them."""
    chosen = [one for one in step.thresholds if only is None or one.check in only]
    with explain_disk_full(project.store, "/".join(step.key)):
        results = judge.run_checks(project.store, made, chosen)
        # A check that runs alone must not hide what is known of the others.
        known = results if only is None else judge.load_check_results(project.store, made, step.thresholds)
        stats.write_check_results(project.store, made, known)
        expectations_page.write_expectations_page(project.store, made, step.thresholds, known)
    return results


def build(
    project: Project,
    *,
    progress: ProgressCallback | None = None,
    tell: Callable[[Step, StepReport, list[CheckResult]], None] | None = None,
    only: Sequence[str] = (),
    datasets: Collection[str] | None = None,
) -> list[tuple[Step, StepReport, list[CheckResult]]]:
    """Run a recipe's steps in order, judging each; stop at the first gate that stays shut.

    `only` limits the build to stages of these names or labels; without it, stages behind a trained model are left
    out. `datasets` limits it to steps of these. `tell` hears of each step as it is done.

    Raises
    ------
    ConfigError
        When a tokenizer or template is not there, before anything is built.
    GateError
        When a step's input has a failed blocking check; what was built before it is kept.

    """
    chosen = [
        step
        for step in plan_steps(project)
        if ({step.name, step.label} & set(only) if only else not step.on_demand)
        and (datasets is None or step.dataset in datasets)
    ]
    tokenizer_source.forget_commits()
    require_ready(project, chosen)
    done: list[tuple[Step, StepReport, list[CheckResult]]] = []
    run_id = f"build-{uuid.uuid4().hex[:12]}"
    for step in chosen:
        report = run_step(project, step, open_inputs(project, step), progress=progress, run_id=run_id)
        results = check_step(project, step, report.manifest)
        done.append((step, report, results))
        if tell is not None:
            tell(step, report, results)
    return done


def copy_export(project: Project, name: str, target: Path) -> None:
    """Put a copy of a built export into a new folder."""
    key = (project.recipe.name, exports.STAGE.name, name)
    made = manifest.load_current(project.store, key) or manifest.load_version(project.store, key, None)
    exports.copy_export_files(project.store, made, target)


@dataclass(frozen=True, slots=True)
class StepForecast:
    """What a build would do with a step: reuse it, or make it, and why."""

    step: Step
    action: str
    why: str
    manifest: Manifest | None = None
    """What would be reused."""


def forecast_steps(project: Project) -> list[StepForecast]:
    """Say for each step what would be built and why, writing nothing but scans of sources that changed.

    A step below one that must be made is forecast as `make if changed`: its input's content is not known yet.
    """
    tokenizer_source.forget_commits()
    require_ready(project, plan_steps(project))
    known: dict[StageKey, Manifest] = {}
    return [_forecast_step(project, step, known) for step in plan_steps(project)]


def _forecast_step(project: Project, step: Step, known: dict[StageKey, Manifest]) -> StepForecast:
    """Forecast one step from the manifests `known` above it; one that would be reused joins them."""
    if step.on_demand:
        command = f"rowmill {step.stage.command} {step.recipe}"
        return StepForecast(step, "on request", f"`{command}` makes it, once there is a trained model")
    waiting = [key for key in step.inputs if key not in known]
    if waiting:
        return StepForecast(step, "make if changed", f"{'/'.join(waiting[0][1:])} is to be made first")
    inputs = {k: known[k] for k in step.inputs}
    work = _make_stage_context(project, step, inputs)
    fingerprint, _ = _prepare_step(work, step)
    kept = manifest.find_by_fingerprint(project.store, step.key, fingerprint)
    if kept is not None:
        known[step.key] = kept
        moved = _find_outside_change(step, work, kept)
        same = f"; {moved}, with the same tokenizer" if moved else ""
        return StepForecast(step, "reuse", f"version {kept.version[:12]} of {kept.built_at[:19]}{same}", kept)
    earlier = manifest.load_current_if_intact(project.store, step.key)
    return StepForecast(
        step, "make", _find_outside_change(step, work, earlier) or _explain_rebuild(step, earlier, inputs)
    )


def _explain_rebuild(step: Step, earlier: Manifest | None, inputs: Mapping[StageKey, Manifest]) -> str:
    if earlier is None:
        return "never built"
    if earlier.code_version != step.code_version:
        return "its options changed"
    moved = [key for key, one in inputs.items() if earlier.inputs.get("/".join(key)) != one.version]
    if moved:
        return f"{'/'.join(moved[0][1:])} changed"
    return "its template or kept files changed" if step.inputs else "its source files changed"
