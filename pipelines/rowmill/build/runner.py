"""The corridor: which stage comes after which, what each is made of, and whether it must be made again.

What belongs here: the order of the stages, their fingerprints, reuse, gates, one `run` per stage. What does
not: any stage's work (`stages/`). No room imports another; the corridor hands each room what it needs.

    road(project) ─► steps ─► open_inputs (the gate) ─► run ─► manifest ─► findings.judge ─► next step

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

from rowmill.checks import expectations_page, judge as findings, upstream
from rowmill.schema import manifest
from rowmill.recipe import recipe
from rowmill import stats
from rowmill.tokenization import tokenizer_source
from rowmill.core.errors import ConfigError, DamagedFileError, IntegrityError, PipelineError
from rowmill.executors import LocalPool
from rowmill.checks.judge import Terms, Verdict
from rowmill.schema.manifest import Key, Manifest
from rowmill.recipe.recipe import Recipe
from rowmill.sources import Generated
from rowmill.stages.base import Draft, Progress, Publish, StageDeclaration, Work
from rowmill.stages import catalog, exports, gpu_partitions
from rowmill.core.storage import Store, full_disk_named

_LOG = logging.getLogger("rowmill.build")


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of one dataset, or of the whole recipe: a node of the asset graph.

    `inputs` are read; `gates` are the stages whose findings must be open (a superset of `inputs`).
    """

    stage: StageDeclaration = field(compare=False, repr=False)
    recipe: str
    dataset: str | None
    key: Key
    inputs: tuple[Key, ...]
    gates: tuple[Key, ...]
    code_version: str
    terms: tuple[Terms, ...]
    generated_by: Key | None = None
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
class Graph:
    """The steps of a recipe, and what a gate asks about them; each is computed once, when it is first asked for."""

    recipe: Recipe

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps in the order in which they can run."""
        return tuple(_steps(self.recipe))

    @cached_property
    def terms(self) -> Mapping[Key, tuple[Terms, ...]]:
        """What the output of each step is held against."""
        return {step.key: step.terms for step in self.steps}


@dataclass(frozen=True, slots=True)
class Project:
    """A recipe and where its work is done. `base` resolves the recipe's relative paths."""

    recipe: Recipe
    store: Store
    base: Path
    graph: Graph = field(default=cast("Graph", None), compare=False, repr=False)
    """The recipe's steps; `replace` hands them on as long as the recipe is the same."""

    def __post_init__(self) -> None:
        """Make the graph of the recipe, unless this one is already of it."""
        if cast("Graph | None", self.graph) is None or self.graph.recipe is not self.recipe:
            object.__setattr__(self, "graph", Graph(self.recipe))


@dataclass(frozen=True, slots=True)
class Report:
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


def open_project(path: Path, root: str | None = None, overrides: Mapping[str, str] | None = None) -> Project:
    """Load a recipe and say where its work is done; `overrides` as `recipe.overridden` takes them.

    Relative paths in a recipe count from the project: the folder that holds `configs/`, or the recipe's own
    folder where there is none. `root` defaults to `.rowmill` there.
    """
    base = recipe.project_folder(path)
    return Project(recipe.load(path, overrides), Store(root or str(base / ".rowmill")), base)


# ── The order ──────────────────────────────────────────────────────────────────────────────────────


def road(project: Project) -> tuple[Step, ...]:
    """Return the steps of a recipe in the order in which they can run."""
    return project.graph.steps


def _steps(loaded: Recipe) -> Iterator[Step]:
    """Yield the steps of every dataset, those of the recipe, its exports, and last what runs on demand."""
    for dataset in loaded.datasets:
        yield from _dataset_steps(loaded, dataset, on_demand=False)
    for stage in catalog.stages_of("recipe"):
        yield _step(loaded, stage, (loaded.name, stage.name))
    for stage in catalog.stages_of("export"):
        for one in loaded.exports:
            yield _step(loaded, stage, (loaded.name, stage.name, one.name))
    for dataset in loaded.datasets:
        yield from _dataset_steps(loaded, dataset, on_demand=True)


def _dataset_steps(loaded: Recipe, dataset: str, *, on_demand: bool) -> Iterator[Step]:
    for stage in catalog.stages_of("dataset", on_demand=on_demand):
        if stage.applies(loaded.datasets[dataset]):
            yield _step(loaded, stage, (loaded.name, dataset, stage.name), dataset)


def _step(loaded: Recipe, stage: StageDeclaration, key: Key, dataset: str | None = None) -> Step:
    inputs = tuple(one for name in stage.inputs for one in _keys_of(loaded, name, dataset))
    gates = tuple(_gates_of(loaded, stage, inputs, dataset))
    kind = None if dataset is None else loaded.datasets[dataset].row_kind
    identity = "" if stage.scope == "recipe" else key[-1] if dataset is None else dataset
    return Step(
        stage=stage,
        recipe=loaded.name,
        dataset=dataset,
        key=key,
        inputs=inputs,
        gates=gates,
        code_version=stage.code_version(loaded, identity, sorted(set(_waivers_on(loaded, gates)))),
        terms=findings.terms_of(loaded.gates, stage.name, dataset, kind),
        generated_by=_generated_by(loaded, dataset) if dataset is not None and not inputs else None,
    )


def _keys_of(loaded: Recipe, name: str, dataset: str | None) -> Iterator[Key]:
    """Yield the keys of a stage that another one names: of its dataset, or of every dataset if it has none."""
    stage = catalog.find_stage(name)
    if stage.scope == "recipe":
        yield (loaded.name, name)
        return
    for one in loaded.datasets if dataset is None else (dataset,):
        if stage.applies(loaded.datasets[one]):
            yield (loaded.name, one, name)


def _gates_of(loaded: Recipe, stage: StageDeclaration, inputs: Iterable[Key], dataset: str | None) -> list[Key]:
    """Return the stages whose checks must have passed before a stage: all that it reads, and what it names."""
    named = [key for name in stage.gates for key in _keys_of(loaded, name, dataset)]
    every = [
        key
        for one in (loaded.datasets if stage.gates_on_every_dataset else ())
        for gate in catalog.stages_of("dataset")
        for key in _keys_of(loaded, gate.name, one)
    ]
    return list(dict.fromkeys((*every, *inputs, *named)))


def _generated_by(loaded: Recipe, dataset: str) -> Key | None:
    """Return the stage that a source of generated records reads; of two that may have made some, one is found later."""
    source = loaded.datasets[dataset].source
    if not isinstance(source, Generated):
        return None
    recipe_name, origin = source.dataset_key(loaded.name)
    own = loaded.datasets.get(origin) if recipe_name == loaded.name else None
    made = [stage.name for stage in catalog.STAGES if stage.on_demand and own is not None and stage.applies(own)]
    name = source.stage or (made[0] if len(made) == 1 else None)
    return None if name is None else (recipe_name, origin, name)


def ranks_of(project: Project) -> tuple[str, ...]:
    """Return the folder names of a recipe's ranks, in order; the number of ranks is part of each name."""
    return gpu_partitions.rank_names(project.recipe.partitions.world_size)


def find_step(project: Project, key: Key) -> Step:
    """Return the step of a key; ConfigError names those there are."""
    steps = road(project)
    for step in steps:
        if step.key == key:
            return step
    names = ", ".join("/".join(step.key) for step in steps)
    raise ConfigError(f"{'/'.join(key)}: no such asset; there are {names}; choose one")


def followers(project: Project, key: Key) -> tuple[Step, ...]:
    """Return the steps that read a step's output, or that of one that does, in order."""
    reached = {key}
    found: list[Step] = []
    for step in road(project):
        if reached & set(step.inputs):
            reached.add(step.key)
            found.append(step)
    return tuple(found)


# ── The gate ───────────────────────────────────────────────────────────────────────────────────────


def open_inputs(project: Project, step: Step) -> dict[Key, Manifest]:
    """Return the current manifest of every input whose gates are open.

    Raises
    ------
    GateError
        Naming each closed check with its number, threshold and remedy.
    IntegrityError
        If an input was never built.

    """
    terms = project.graph.terms
    closed: list[PipelineError] = []
    found: dict[Key, Manifest] = {}
    for key in dict.fromkeys((*step.inputs, *step.gates)):
        try:
            pointed = manifest.current(project.store, key)
            found[key] = pointed if pointed is not None else manifest.by_version(project.store, key, None)
            if key in step.gates:
                findings.require_open(project.store, found[key], terms[key])
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

    def terms(made: Manifest) -> Sequence[Terms]:
        # A kept version may be of a dataset that the recipe no longer has, or calls otherwise: it is judged alike.
        dataset = made.key[1] if catalog.find_stage(made.stage).scope == "dataset" else None
        return graph.terms.get(made.key) or findings.terms_of_output(project.recipe.gates, made, dataset)

    upstream.require_open(project.store, inputs, terms=terms, beside=_gates_beside, gated=gated)


def _gates_beside(made: Manifest) -> list[Key]:
    """Return what an output of a dataset waits for without reading it; what a recipe's waits for are its ancestors."""
    return [(*made.key[:-1], name) for name in sorted(catalog.find_stage(made.stage).gates)]


# ── Running ────────────────────────────────────────────────────────────────────────────────────────


_POOLS: dict[int, LocalPool] = {}


def _pool(workers: int) -> LocalPool:
    """Keep workers from stage to stage: opening a tokenizer in each costs a second."""
    return _POOLS.setdefault(workers, LocalPool(workers))


def close_workers() -> None:
    """Stop the worker processes that stages share; the next stage that needs them starts them again."""
    for pool in _POOLS.values():
        pool.close()


def run(
    project: Project,
    step: Step,
    inputs: Mapping[Key, Manifest],
    *,
    ranks: Sequence[str] = (),
    version: str | None = None,
    progress: Progress | None = None,
    run_id: str = "",
) -> Report:
    """Make one step's output, or find that it is there already; `ranks` are folder names such as `rank-00003-of-00008`.

    With `version`, return that kept version instead, verified whole and gated, and make it the current one; `inputs`
    are then those that it was made of, whatever is handed in.
    """
    _require_one_history(inputs)
    asked = _Asked(project, step, tuple(ranks), version, progress, run_id)
    for _ in range(MOST_MENDED):
        try:
            return _run(asked, inputs)
        except DamagedFileError as damage:
            if version is not None:
                raise
            _mend(asked, inputs, damage)
    return _run(asked, inputs)


MOST_MENDED = 100
"""Damaged files that one run makes again before it gives up: a disk that loses more is to be replaced."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `run` was asked for, beside the inputs."""

    project: Project
    step: Step
    ranks: tuple[str, ...]
    version: str | None
    progress: Progress | None
    run_id: str


def _mend(asked: _Asked, inputs: Mapping[Key, Manifest], damage: DamagedFileError) -> None:
    """Remove a damaged file and run the stage that made it again: all else of that stage is kept.

    Raises
    ------
    IntegrityError
        If what is made now is not what was damaged, so that the inputs at hand are not those of this step.

    """
    project, step = asked.project, asked.step
    project.store.remove(damage.path)
    owner = next((one for one in road(project) if damage.path.startswith(f"{manifest.folder(one.key)}/")), None)
    _LOG.warning("%s; it is made again", damage)
    if owner is None or owner.key == step.key:
        return
    made = run(project, owner, open_inputs(project, owner), progress=asked.progress, run_id=asked.run_id).manifest
    if owner.key in inputs and made.version != inputs[owner.key].version:
        raise IntegrityError(
            f"{damage}; made again, {'/'.join(owner.key)} has version {made.version[:12]} instead of "
            f"{inputs[owner.key].version[:12]}; a step needs the inputs that it was given; build from there on"
        )


def _run(asked: _Asked, inputs: Mapping[Key, Manifest]) -> Report:
    started = time.monotonic()
    project, step = asked.project, asked.step
    work = Work(
        recipe=project.recipe,
        store=project.store,
        base=project.base,
        key=step.key,
        dataset_name=step.dataset,
        inputs=inputs,
        pool=_pool(project.recipe.total_workers),
        progress=asked.progress,
        ranks=asked.ranks,
    )
    name = "/".join(step.key)
    with full_disk_named(project.store, name), project.store.lock(f"{manifest.folder(step.key)}/.lock", what=name):
        if asked.version is not None:
            return _restore(project, step, work, asked.version, started)
        fingerprint, make = _prepare(work, step)
        kept = manifest.by_fingerprint(work.store, step.key, fingerprint)
        if kept is not None:
            manifest.make_current(work.store, kept)
            return _reported(project, step, work, _nothing_new(kept, started))
        # Whoever runs one stage after another, as Dagster does, hears of it before the stage ahead of it is made.
        require_ready(project, [one for one in road(project) if step.key in one.inputs])
        _warn_of_outside_change(project, step, work)
        draft = make()
        made = manifest.save(work.store, _manifest(work, step, draft, fingerprint, started, asked.run_id))
        report = Report(
            made,
            reused=False,
            parts=stats.parts_of(made),
            parts_reused=draft.parts_reused,
            rows_made=draft.rows_made,
            seconds=time.monotonic() - started,
        )
        return _reported(project, step, work, report)


def _warn_of_outside_change(project: Project, step: Step, work: Work) -> None:
    """Say what changed though the recipe did not, and what is made again for it."""
    changed = _find_outside_change(step, work, manifest.earlier(work.store, step.key))
    if changed is not None:
        behind = ", ".join("/".join(one.key[1:]) for one in followers(project, step.key))
        _LOG.warning("%s: %s; it is made again, and so is what is made of it: %s", "/".join(step.key), changed, behind)


def _find_outside_change(step: Step, work: Work, earlier: Manifest | None) -> str | None:
    find = step.stage.find_outside_change
    return None if find is None or earlier is None else find(work, earlier)


def _nothing_new(kept: Manifest, started: float) -> Report:
    parts = stats.parts_of(kept)
    return Report(kept, reused=True, parts=parts, parts_reused=parts, rows_made=0, seconds=time.monotonic() - started)


def _require_one_history(inputs: Mapping[Key, Manifest]) -> None:
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


def _reported(project: Project, step: Step, work: Work, report: Report) -> Report:
    if step.stage.publish is not None:
        _publish(project, step, work, report.manifest, step.stage.publish)
    made, feeds = report.manifest, step.stage.feeds
    stats.record(work.store, made, feeds, reused=report.reused, parts_reused=report.parts_reused)
    return report


def _publish(project: Project, step: Step, work: Work, made: Manifest, publish: Publish) -> None:
    """Judge an output, and give it to trainers if no check blocks; what was given before stays otherwise."""
    verdicts = findings.judge(project.store, made, step.terms)
    if not any(verdict.blocking for verdict in verdicts):
        loosened = [line for one in road(project) for line in findings.loosened(one.key, one.terms)]
        publish(work, made, verdicts, loosened)


def _restore(project: Project, step: Step, work: Work, version: str, started: float) -> Report:
    kept = manifest.by_version(work.store, work.key, version)
    inputs = manifest.inputs_of(work.store, kept)
    require_open_ancestry(project, inputs.values())
    manifest.verify_files(work.store, kept)
    manifest.make_current(work.store, kept)
    return _reported(project, step, replace(work, inputs=inputs), _nothing_new(kept, started))


def _prepare(work: Work, step: Step) -> tuple[str, Callable[[], Draft]]:
    """Return a step's fingerprint and the function that makes its output."""
    versions = {"/".join(key): one.version for key, one in sorted(work.inputs.items())}
    prepared = step.stage.prepare(work)
    return step.stage.fingerprint(step.code_version, versions, _waivers(work, step), prepared.outside), prepared.make


def fingerprint_of(project: Project, step: Step, inputs: Mapping[Key, Manifest]) -> str:
    """Identify what a step would make of some inputs, making nothing."""
    return _prepare(_work_of(project, step, inputs), step)[0]


def _work_of(project: Project, step: Step, inputs: Mapping[Key, Manifest]) -> Work:
    """Return what a stage is handed to look at, not to work with: it has one worker."""
    return Work(project.recipe, project.store, project.base, step.key, step.dataset, inputs, _pool(1))


def find_kept(project: Project, step: Step, inputs: Mapping[Key, Manifest], *, scratch: Store) -> Manifest | None:
    """Return the output that a build would reuse for these inputs; what is read on the way is kept in `scratch`."""
    fingerprint = fingerprint_of(replace(project, store=scratch), step, inputs)
    return manifest.by_fingerprint(project.store, step.key, fingerprint)


def _waivers(work: Work, step: Step) -> list[str]:
    """Name the waivers on all that a step waits for, and those below its inputs; they are part of what is built."""
    return sorted(
        {waiver for one in work.inputs.values() for waiver in one.waivers} | set(_waivers_on(work.recipe, step.gates))
    )


def _waivers_on(loaded: Recipe, gates: Sequence[Key]) -> Iterator[str]:
    """Name the waivers on what a step waits for."""
    for waiver in loaded.gates.waivers:
        law = findings.BY_NAME[waiver.law]
        if any(key[-1] in law.stages and waiver.dataset in (None, key[1] if len(key) == 3 else None) for key in gates):
            yield f"{waiver.law}{f' on {waiver.dataset}' if waiver.dataset else ''}: {waiver.reason}"


def _manifest(work: Work, step: Step, draft: Draft, fingerprint: str, started: float, run_id: str) -> Manifest:
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
        waivers=tuple(_waivers(work, step)),
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
            require(_work_of(project, step, {}))
        except ConfigError as error:
            problems[f"{step.recipe}: {error}"] = None
    if problems:
        raise ConfigError("\n".join(problems))


def _has_these_options(project: Project, step: Step) -> bool:
    made = manifest.earlier(project.store, step.key)
    return made is not None and made.code_version == step.code_version


def publish_statistics(project: Project) -> None:
    """Bring `stats.duckdb` up to date, so that it answers while what follows is built."""
    with full_disk_named(project.store, "stats.duckdb"):
        stats.publish_views(project.store)


def judge(project: Project, step: Step, made: Manifest, *, only: Collection[str] | None = None) -> list[Verdict]:
    """Judge a step's output under the recipe's terms, or some laws of them; save the verdicts and show them."""
    chosen = [one for one in step.terms if only is None or one.law in only]
    with full_disk_named(project.store, "/".join(step.key)):
        verdicts = findings.judge(project.store, made, chosen)
        # A law that is judged alone must not hide what is known of the others.
        known = verdicts if only is None else findings.judged(project.store, made, step.terms)
        stats.write_findings(project.store, made, known)
        expectations_page.write(project.store, made, step.terms, known)
    return verdicts


def build(
    project: Project,
    *,
    progress: Progress | None = None,
    tell: Callable[[Step, Report, list[Verdict]], None] | None = None,
    only: Sequence[str] = (),
    datasets: Collection[str] | None = None,
) -> list[tuple[Step, Report, list[Verdict]]]:
    """Run a recipe's steps in order, judging each; stop at the first gate that stays shut.

    `only` limits the build to stages of these names or labels; without it, stages behind a trained model are left
    out. `datasets` limits it to steps of these. `tell` hears of each step as it is done.

    Raises
    ------
    ConfigError
        When a tokenizer or template is not there, before anything is built.
    GateError
        When a step's input has a failed blocking finding; what was built before it is kept.

    """
    chosen = [
        step
        for step in road(project)
        if ({step.name, step.label} & set(only) if only else not step.on_demand)
        and (datasets is None or step.dataset in datasets)
    ]
    tokenizer_source.forget_commits()
    require_ready(project, chosen)
    done: list[tuple[Step, Report, list[Verdict]]] = []
    run_id = f"build-{uuid.uuid4().hex[:12]}"
    for step in chosen:
        report = run(project, step, open_inputs(project, step), progress=progress, run_id=run_id)
        verdicts = judge(project, step, report.manifest)
        done.append((step, report, verdicts))
        if tell is not None:
            tell(step, report, verdicts)
    return done


def copy_export(project: Project, name: str, target: Path) -> None:
    """Put a copy of a built export into a new folder."""
    key = (project.recipe.name, exports.STAGE.name, name)
    made = manifest.current(project.store, key) or manifest.by_version(project.store, key, None)
    exports.copy_out(project.store, made, target)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a build would do with a step: reuse it, or make it, and why."""

    step: Step
    action: str
    why: str
    manifest: Manifest | None = None
    """What would be reused."""


def plan(project: Project) -> list[Forecast]:
    """Say for each step what would be built and why, writing nothing but scans of sources that changed.

    A step below one that must be made is forecast as `make if changed`: its input's content is not known yet.
    """
    tokenizer_source.forget_commits()
    require_ready(project, road(project))
    known: dict[Key, Manifest] = {}
    return [_forecast(project, step, known) for step in road(project)]


def _forecast(project: Project, step: Step, known: dict[Key, Manifest]) -> Forecast:
    """Forecast one step from the manifests `known` above it; one that would be reused joins them."""
    if step.on_demand:
        command = f"rowmill {step.stage.command} {step.recipe}"
        return Forecast(step, "on request", f"`{command}` makes it, once there is a trained model")
    waiting = [key for key in step.inputs if key not in known]
    if waiting:
        return Forecast(step, "make if changed", f"{'/'.join(waiting[0][1:])} is to be made first")
    inputs = {k: known[k] for k in step.inputs}
    work = _work_of(project, step, inputs)
    fingerprint, _ = _prepare(work, step)
    kept = manifest.by_fingerprint(project.store, step.key, fingerprint)
    if kept is not None:
        known[step.key] = kept
        moved = _find_outside_change(step, work, kept)
        same = f"; {moved}, with the same tokenizer" if moved else ""
        return Forecast(step, "reuse", f"version {kept.version[:12]} of {kept.built_at[:19]}{same}", kept)
    earlier = manifest.earlier(project.store, step.key)
    return Forecast(step, "make", _find_outside_change(step, work, earlier) or _why(step, earlier, inputs))


def _why(step: Step, earlier: Manifest | None, inputs: Mapping[Key, Manifest]) -> str:
    if earlier is None:
        return "never built"
    if earlier.code_version != step.code_version:
        return "its options changed"
    moved = [key for key, one in inputs.items() if earlier.inputs.get("/".join(key)) != one.version]
    if moved:
        return f"{'/'.join(moved[0][1:])} changed"
    return "its template or kept files changed" if step.inputs else "its source files changed"
