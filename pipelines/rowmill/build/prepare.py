"""What a step needs before it runs: its context, its fingerprint, and what must be there outside the storage root.

What belongs here: identifying an output before it is made, finding one that was made already, the worker pools that
steps share. What does not: making an output (`runner.py`), forecasting a build (`plan.py`).

A step's code version is a digest of the options it reads, the stage's VERSION and the waivers it is built under:
what Dagster compares. Its fingerprint is a digest of that, its inputs' versions (content, not time), tokenizer
files and template text. If a manifest with that fingerprint is kept, the step is done: nothing is read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rowmill.build.steps import Project, Step, iterate_gate_waivers
from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store
from rowmill.executors import LocalPool
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.stages.base import PreparedStage, StageContext

_WORKER_POOLS: dict[int, LocalPool] = {}


def open_worker_pool(workers: int) -> LocalPool:
    """Return worker processes that stages share: opening a tokenizer in each costs a second."""
    return _WORKER_POOLS.setdefault(workers, LocalPool(workers))


def close_workers() -> None:
    """Stop the worker processes that stages share; the next stage that needs them starts them again."""
    for pool in _WORKER_POOLS.values():
        pool.close()


def find_outside_change(step: Step, work: StageContext, earlier: Manifest | None) -> str | None:
    """Word what changed outside the storage root since an earlier output; None if nothing did."""
    find = step.stage.find_outside_change
    return None if find is None or earlier is None else find(work, earlier)


def prepare_step(work: StageContext, step: Step) -> tuple[str, PreparedStage]:
    """Return a step's fingerprint and the stage ready to run."""
    versions = {"/".join(key): one.version for key, one in sorted(work.inputs.items())}
    prepared = step.stage.prepare(work)
    return step.stage.fingerprint(step.code_version, versions, list_waivers(work, step), prepared.outside), prepared


def find_reusable_output(store: Store, step: Step, fingerprint: str, prepared: PreparedStage) -> Manifest | None:
    """Return the kept output of a fingerprint, if the stage would make the same one now."""
    kept = manifest.find_by_fingerprint(store, step.key, fingerprint)
    return kept if kept is not None and prepared.accepts(kept) else None


def compute_fingerprint(project: Project, step: Step, inputs: Mapping[StageKey, Manifest]) -> str:
    """Identify what a step would make of some inputs, making nothing."""
    return prepare_step(make_stage_context(project, step, inputs), step)[0]


def make_stage_context(project: Project, step: Step, inputs: Mapping[StageKey, Manifest]) -> StageContext:
    """Return what a stage is handed to look at, not to work with: it has one worker."""
    return StageContext(
        project.recipe, project.store, project.base, step.key, step.dataset, inputs, open_worker_pool(1)
    )


def find_kept_output(
    project: Project, step: Step, inputs: Mapping[StageKey, Manifest], *, scratch: Store
) -> Manifest | None:
    """Return the output that a build would reuse for these inputs; what is read on the way is kept in `scratch`."""
    fingerprint, prepared = prepare_step(make_stage_context(replace(project, store=scratch), step, inputs), step)
    return find_reusable_output(project.store, step, fingerprint, prepared)


def list_waivers(work: StageContext, step: Step) -> list[str]:
    """Name the waivers on all that a step waits for, and those below its inputs; they are part of what is built."""
    return sorted(
        {waiver for one in work.inputs.values() for waiver in one.waivers}
        | set(iterate_gate_waivers(work.recipe, step.gates))
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
            require(make_stage_context(project, step, {}))
        except ConfigError as error:
            problems[f"{step.recipe}: {error}"] = None
    if problems:
        raise ConfigError("\n".join(problems))


def _has_these_options(project: Project, step: Step) -> bool:
    made = manifest.load_current_if_intact(project.store, step.key)
    return made is not None and made.code_version == step.code_version
