"""The gate before a step: which checks close it, the versions that `rowmill use` holds, and the waivers of one run.

    training_splits ──► gpu_partitions @ 4f2a     held: the order goes forward, the ranks stay as they were published

A held version is one small file beside the stage's pointer, so that a night sees it wherever it runs.

A run's waivers are failures that a person accepts where it is started, in addition to the recipe's. The next run has
only those again: what this run published stays published, and the check is red again.
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from rowmill.build.steps import Project, Step, find_upstream_steps, plan_steps
from rowmill.checks import cross_stage, judge
from rowmill.checks.catalog import CHECKS_BY_NAME
from rowmill.checks.gates import RUN_WAIVER_PREFIX, Threshold, Waiver, find_unknown_dataset, list_output_thresholds
from rowmill.checks.judge import CheckResult
from rowmill.core import config
from rowmill.core.errors import (
    ConfigError,
    DamagedFileError,
    IntegrityError,
    PipelineError,
    SchemaError,
    SourceError,
)
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey, get_stage_folder, parse_stage_key
from rowmill.sources import GeneratedSource
from rowmill.sources.generated import find_generated_version
from rowmill.stages import catalog

SHOWN_DIGITS: Final = 2


def add_run_waivers(project: Project, waivers: Sequence[Mapping[str, Any]], where: str) -> Project:
    """Return the project with these waivers before its recipe's own; the project itself without any."""
    if not waivers:
        return project
    added: list[Waiver] = []
    for number, values in enumerate(waivers):
        one = config.validate_options(Waiver, values, f"{where}.{number}")
        if problem := find_unknown_dataset(one, project.recipe.datasets):
            raise ConfigError(f"{where}.{number}: dataset: {problem}")
        added.append(one.model_copy(update={"reason": RUN_WAIVER_PREFIX + one.reason}))
    gates = project.recipe.gates
    widened = gates.model_copy(update={"waivers": (*added, *gates.waivers)})
    return replace(project, recipe=project.recipe.model_copy(update={"gates": widened}))


def propose_run_waivers(
    results: Iterable[CheckResult], given: Sequence[Mapping[str, Any]] = ()
) -> list[Mapping[str, Any]]:
    """Return the waivers of a run that gets past these results: those that the run was given, and one per failure.

    A given one is left out if its check failed nevertheless: its bound was too low.
    """
    proposed = [one for one in map(propose_run_waiver, results) if one is not None]
    names = {_name_waived(one) for one in proposed}
    return [*(one for one in given if _name_waived(one) not in names), *proposed]


def _name_waived(waiver: Mapping[str, Any]) -> tuple[object, object]:
    return waiver.get("check"), waiver.get("dataset")


def propose_run_waiver(result: CheckResult) -> dict[str, Any] | None:
    """Return the waiver that would let a failed check pass as it is now, without a reason; None if none would."""
    check = CHECKS_BY_NAME.get(result.check)
    if not result.blocking or result.value is None or check is None or not check.waivable:
        return None
    is_dataset = catalog.find_stage(result.key[-1]).scope == "dataset" if len(result.key) == 3 else False
    dataset = {"dataset": result.key[1]} if is_dataset else {}
    return {
        "check": check.name,
        **dataset,
        check.direction: _round_outwards(result.value, check.direction),
        "reason": "",
    }


def _round_outwards(value: float, direction: str) -> float | int:
    """Return a short number that the value does not exceed: 0.33412 at most 0.34."""
    # The shortest text of the number, since 0.2 is not exactly 0.2.
    exact = Decimal(repr(value))
    if exact == exact.to_integral_value():
        return int(exact)
    step = Decimal(1).scaleb(exact.adjusted() - SHOWN_DIGITS + 1)
    return float(exact.quantize(step, rounding=ROUND_CEILING if direction == "at_most" else ROUND_FLOOR))


def find_unused_waivers(project: Project, results: Iterable[CheckResult]) -> list[str]:
    """Return a sentence for each waiver that excuses no failure of the results.

    A waiver is left out if some stage that it applies to has no result, and if its check fails although it is there.
    """
    judged: dict[str, dict[StageKey, CheckResult]] = {}
    for result in results:
        judged.setdefault(result.check, {})[result.key] = result
    planned = [step for step in plan_steps(project) if not step.on_demand]
    unused: list[str] = []
    for waiver in project.recipe.gates.waivers:
        keys = [
            step.key
            for step in planned
            if waiver.dataset in (None, step.dataset)
            and any(threshold.check == waiver.check for threshold in step.thresholds)
        ]
        known = judged.get(waiver.check, {})
        covered = [known[key] for key in keys if key in known]
        if len(covered) < len(keys) or any(one.failed and one.waiver in ("", waiver.reason) for one in covered):
            continue
        name = f"gates.waivers: {waiver.check}{f' on {waiver.dataset}' if waiver.dataset else ''}"
        outcomes = ", ".join(
            f"{'/'.join(one.key[1:])} {one.outcome.replace('_', ' ')}"
            + (f" with {one.shown}" if one.value is not None else "")
            for one in covered
        )
        why = (
            f"excuses no failure: {outcomes}"
            if covered
            else "matches no check result: this check is not made there (`rowmill verify --all` lists those that are)"
        )
        unused.append(f"{project.recipe.name}: {name} {why}; remove it, so that it excuses no later failure")
    return unused


# ── Versions that `rowmill use` holds ──


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A stage's chosen version, the fingerprint of the output that was chosen, and the time of the choice."""

    key: StageKey
    version: str
    fingerprint: str
    since: str

    def load(self, store: Store) -> Manifest:
        """Return the output; IntegrityError if it is damaged."""
        return manifest.load_output(store, self.key, self.version, self.fingerprint)

    @property
    def sentence(self) -> str:
        """Where it is held, since when, and how builds go forward again."""
        stage = "/".join(self.key[1:])
        return (
            f"held at version {self.version[:12]} since {self.since[:16].replace('T', ' ')} UTC by `rowmill use`; "
            f"`rowmill use {self.key[0]} {stage} --release` lets builds go forward"
        )


def hold_version(store: Store, output: Manifest) -> HeldVersion:
    """Keep a version current in every build until it is released."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    held = HeldVersion(output.key, output.version, output.fingerprint, since)
    store.write_sealed(
        _held_file(output.key), {"version": held.version, "fingerprint": held.fingerprint, "since": held.since}
    )
    return held


def release_version(store: Store, key: StageKey) -> HeldVersion | None:
    """Let builds make a stage again; return what was held, or None."""
    held = find_held_version(store, key)
    store.remove(_held_file(key))
    return held


def find_held_version(store: Store, key: StageKey) -> HeldVersion | None:
    """Return the version at which a stage is held, or None."""
    found = store.recall_sealed(_held_file(key))
    return None if found is None else HeldVersion(key, **found)


def follow_held_versions(store: Store, inputs: Mapping[StageKey, Manifest]) -> dict[StageKey, Manifest]:
    """Return a step's inputs with those that a held one, or one made of a held one, was made of: one history.

    Held canonical rows have shards made of the source as it was then, although the source is read anew.
    """
    followed = dict(inputs)
    for key, made in inputs.items():
        # Only a held version is worth a look at the ancestors.
        held = [stage for stage in _list_chain(key) if find_held_version(store, stage) is not None]
        if held:
            history = {one.key: one for one in cross_stage.iterate_history(store, made)}
            if any(stage in history for stage in held):
                followed |= {origin: one for origin, one in history.items() if origin in followed}
    return followed


@contextmanager
def explain_held_inputs(store: Store, inputs: Mapping[StageKey, Manifest]) -> Generator[None]:
    """Let an error of a step that reads held versions name them: what they need may have gone, or be of other options.

    The rows of a held dataset are read from its files as they were then; held shards have the length that was set then.
    """
    try:
        yield
    except DamagedFileError:
        # The stage that wrote the file makes it again.
        raise
    except (ConfigError, SourceError, SchemaError, IntegrityError) as error:
        held = [one for key in _list_chains(inputs) if (one := find_held_version(store, key)) is not None]
        if held:
            error.args = ("; ".join([str(error), *(f"{'/'.join(one.key[1:])} is {one.sentence}" for one in held)]),)
        raise


def _list_chains(keys: Iterable[StageKey]) -> list[StageKey]:
    """Return the stages that some outputs and their ancestors are of, each once."""
    return list(dict.fromkeys(stage for key in keys for stage in _list_chain(key)))


def _list_chain(key: StageKey) -> list[StageKey]:
    """Return the stages that an output of a stage and its ancestors are of: those of its dataset, or itself."""
    stage = catalog.find_stage(manifest.get_stage_name(key))
    if stage.scope != "dataset":
        return [key]
    before = (_list_chain((*key[:-1], name)) for name in stage.inputs)
    return list(dict.fromkeys([key, *(one for chain in before for one in chain)]))


def _held_file(key: StageKey) -> str:
    return f"{get_stage_folder(key)}/held.json"


# ── The inputs of a step ──


def open_inputs(project: Project, step: Step) -> dict[StageKey, Manifest]:
    """Return the current manifest of every input whose gates are open.

    The inputs of a step that is held at a version are those it was made of, and those of a step that reads a held
    one agree with it. Raises GateError with each closed check, or IntegrityError with all stages before it that are not
    built and the command that builds them.
    """
    held = find_held_version(project.store, step.key)
    if held is not None:
        return open_held_inputs(project, held)
    thresholds = project.graph.thresholds
    closed: list[PipelineError] = []
    current: dict[StageKey, Manifest] = {}
    for key in dict.fromkeys((*step.inputs, *step.gates)):
        try:
            pointed = manifest.load_current(project.store, key)
        except PipelineError as error:
            closed.append(error)
            continue
        if pointed is None:
            raise _make_unbuilt_error(project, step)
        current[key] = pointed
    found = follow_held_versions(project.store, current)
    for key in (key for key in step.gates if key in found):
        try:
            judge.require_passing_checks(project.store, found[key], thresholds[key])
        except PipelineError as error:
            closed.append(error)
    if len(closed) == 1:
        raise closed[0]
    if closed:
        kind = IntegrityError if isinstance(closed[0], IntegrityError) else type(closed[0])
        raise kind("\n".join(str(error) for error in closed))
    inputs = {key: found[key] for key in step.inputs}
    require_open_ancestry(project, inputs.values(), gated=[found[key] for key in step.gates])
    return inputs | open_generated_source(project, step)


def _make_unbuilt_error(project: Project, step: Step) -> IntegrityError:
    """Return the error of a step some of whose inputs are not built, with all stages before it that are not."""
    upstream = find_upstream_steps(project, [step])
    unbuilt = [one for one in upstream if manifest.load_current_if_intact(project.store, one.key) is None]
    names = ["/".join(one.key[1:]) for one in unbuilt]
    if len(names) > MAX_NAMED_STEPS:
        names[MAX_NAMED_STEPS:] = [f"{len(names) - MAX_NAMED_STEPS:,} more"]
    named = f"{', '.join(names[:-1])} and {names[-1]} are" if len(names) > 1 else f"{names[0]} is"
    recipe = judge.format_recipe_argument(step.recipe, project.store.root)
    # A build has no step on demand.
    until = (unbuilt[-1] if step.on_demand else step).label
    return IntegrityError(
        f"{'/'.join(step.key)}: {named} not built; a stage reads what the stages before it made; "
        f"run `rowmill build {recipe} --until {until}`"
    )


MAX_NAMED_STEPS: Final = 12
"""Steps that an error names; a recipe may have hundreds of datasets."""


def open_held_inputs(project: Project, held: HeldVersion) -> dict[StageKey, Manifest]:
    """Return what a held version was made of; all its ancestors must pass under the present thresholds."""
    made = held.load(project.store)
    inputs = manifest.load_inputs(project.store, made)
    require_open_ancestry(project, inputs.values())
    return inputs


def open_generated_source(project: Project, step: Step) -> dict[StageKey, Manifest]:
    """Return the generated records that a step reads as its source; empty for every other step.

    They and all that they were made of are judged, as all other inputs are.
    """
    source = None if step.inputs or step.dataset is None else project.recipe.datasets[step.dataset].source
    if not isinstance(source, GeneratedSource):
        return {}
    made = find_generated_version(project.store, source, project.recipe.name)
    require_open_ancestry(project, [made])
    return {made.key: made}


def require_open_ancestry(project: Project, inputs: Iterable[Manifest], *, gated: Iterable[Manifest] = ()) -> None:
    """Refuse inputs with an ancestor that fails its checks under the current thresholds; see `checks/judge.py`."""
    graph = project.graph

    def thresholds(output: Manifest) -> Sequence[Threshold]:
        # A kept version may belong to a dataset that the recipe removed or renamed: the same checks apply. A waiver
        # names a dataset of its own recipe, and generated records may belong to another recipe's dataset.
        is_own = output.key[0] == project.recipe.name and catalog.find_stage(output.stage).scope == "dataset"
        dataset = output.key[1] if is_own else None
        return graph.thresholds.get(output.key) or list_output_thresholds(project.recipe.gates, output, dataset)

    def beside(output: Manifest) -> list[StageKey]:
        # The stages whose checks a dataset's output waits for without reading them.
        return [(*output.key[:-1], name) for name in sorted(catalog.find_stage(output.stage).gates)]

    judge.require_passing_ancestors(project.store, inputs, thresholds=thresholds, beside=beside, gated=gated)


def require_one_history(store: Store, inputs: Mapping[StageKey, Manifest]) -> None:
    """Refuse inputs if one was made of another version of the other, directly or through others.

    That happens if a stage was built, or an older version of it made current, and the later stages were not rebuilt.
    """
    for key, made in sorted(inputs.items()):
        for other, of in _iterate_origins(store, made, {other for other in inputs if other != key}):
            if of != inputs[other].version:
                raise IntegrityError(
                    f"{'/'.join(key)}: built from version {of[:12]} of {'/'.join(other)}, but "
                    f"{inputs[other].version[:12]} is current; inputs must belong to one history; build {key[-1]} "
                    "again, or use the other version"
                )


def _iterate_origins(store: Store, made: Manifest, wanted: Collection[StageKey]) -> Iterator[tuple[StageKey, str]]:
    """Yield the versions of some stages that an output was made of; only outputs between them are read."""
    waiting, missing = [made], set(wanted)
    while waiting:
        one = waiting.pop()
        for origin in map(parse_stage_key, one.inputs):
            if origin in missing:
                missing.discard(origin)
                yield origin, one.inputs["/".join(origin)]
            # What is made of one dataset has its ancestors there.
            if any(origin[:-1] == other[:-1] for other in missing):
                waiting.append(manifest.load_input(store, one, origin))
