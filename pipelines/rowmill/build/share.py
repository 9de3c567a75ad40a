"""Make one share of the parts of stages, without their outputs, and list the jobs of a build in shares.

    build raw_dataset ─► shares of canonical_rows ─► build it ─► shares of tokenized_examples ─► build it ─► …

A share writes parts, and nothing that names them: no manifest, no pointer, no statistics. So any number of shares may
run at once, twice, or beside a build; what two of them make has the same bytes, because they have the same versions
(`prepare.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from rowmill.build.gate import find_held_version, open_inputs, require_one_history
from rowmill.build.prepare import (
    claim_versions,
    find_reusable_output,
    has_current_options,
    index_outputs,
    make_stage_context,
    open_shared_executor,
    prepare_step,
    require_ready,
)
from rowmill.build.runner import read_and_repair
from rowmill.build.steps import Project, Step, find_step, plan_steps
from rowmill.core.errors import ConfigError, GateError
from rowmill.core.storage import explain_disk_full
from rowmill.executors import OtherSharesMissingError, Share
from rowmill.parts.context import ProgressCallback
from rowmill.schema import manifest
from rowmill.schema.manifest import StageKey
from rowmill.tokenization import tokenizer_source

LOCK_NAME = ".shares.lock"
"""Held in common by the shares of a stage, and alone by garbage collection, which would remove what they write."""


class ShareOutcome(StrEnum):
    """How far a stage is after a share of it."""

    BUILT = "built"
    """Its output is there: nothing was to be made."""
    FINISHED = "finished"
    """All of its parts are finished, those of other shares too."""
    MADE = "made"
    """The parts of the share are finished; others are missing."""
    WAITING = "waiting"
    """It reads, or waits for the checks of, a stage that is not built."""


@dataclass(frozen=True, slots=True)
class ShareReport:
    """The result of making a share of a step: the parts that were made, and those of other shares that are missing."""

    step: Step
    outcome: ShareOutcome
    made: int = 0
    missing: int = 0
    waits_for: StageKey | None = None


@tokenizer_source.hold_commits()
def make_share(
    project: Project, share: Share, *, only: Sequence[str] = (), progress: ProgressCallback | None = None
) -> list[ShareReport]:
    """Make a share's parts of all stages whose inputs are built; `only` names stages. GateErrors come at the end."""
    divided = dict.fromkeys(step.name for step in list_divided_steps(project))
    for name in only:
        if name not in divided:
            raise ConfigError(
                f"--only {name}: not a stage that is made in shares; there are {', '.join(divided)}; name one of them, "
                "or make any other stage with rowmill build"
            )
    # The batch service has chosen this machine: a share runs here, whatever executor the recipe names for builds.
    execution = project.recipe.execution.limit_to_this_machine()
    project = replace(project, recipe=project.recipe.model_copy(update={"execution": execution}))
    chosen = list_divided_steps(project, only)
    reports: list[ShareReport] = []
    closed: dict[str, None] = {}
    with index_outputs(project, chosen):
        require_ready(project, chosen)
        for step in chosen:
            try:
                make = partial(_make_share_of_step, project, step, share, progress)
                reports.append(read_and_repair(project, make, reader=step, progress=progress))
            except GateError as error:
                closed[str(error)] = None
    if closed:
        raise GateError("\n".join(closed))
    return reports


def _make_share_of_step(project: Project, step: Step, share: Share, progress: ProgressCallback | None) -> ShareReport:
    if find_held_version(project.store, step.key) is not None:
        return ShareReport(step, ShareOutcome.BUILT)
    waits_for = find_missing_input(project, step)
    if waits_for is not None:
        return ShareReport(step, ShareOutcome.WAITING, waits_for=waits_for)
    inputs = open_inputs(project, step)
    require_one_history(project.store, inputs)
    pool = open_shared_executor(project.recipe)
    context = replace(make_stage_context(project, step, inputs), pool=pool, progress=progress, share=share)
    name = "/".join(step.key)
    lock = f"{manifest.get_stage_folder(step.key)}/{LOCK_NAME}"
    with explain_disk_full(project.store, name), project.store.lock(lock, what=name, shared=True):
        fingerprint, prepared = prepare_step(context, step)
        if find_reusable_output(context.store, step, fingerprint) is not None:
            return ShareReport(step, ShareOutcome.BUILT)
        claim_versions(context.store, step.key, share)
        try:
            prepared.make()
        except OtherSharesMissingError as stopped:
            return ShareReport(step, ShareOutcome.MADE, stopped.made, stopped.missing)
    return ShareReport(step, ShareOutcome.FINISHED)


def find_missing_input(project: Project, step: Step) -> StageKey | None:
    """Return the first stage before a step that is not built, or was built of other options or another input.

    Sources are not read: whether they changed since they were scanned is for the next build to see.
    """
    for before in (find_step(project, key) for key in dict.fromkeys((*step.inputs, *step.gates))):
        if find_held_version(project.store, before.key) is not None:
            continue
        if (earlier := find_missing_input(project, before)) is not None:
            return earlier
        made = manifest.load_current_if_intact(project.store, before.key)
        if made is None or not has_current_options(project, before):
            return before.key
        for key in (key for key in before.inputs if find_held_version(project.store, key) is None):
            current = manifest.load_current_if_intact(project.store, key)
            if current is None or made.inputs.get("/".join(key)) != current.version:
                return before.key
    return None


def list_divided_steps(project: Project, only: Sequence[str] = ()) -> list[Step]:
    """Return the steps that are made in shares; `only` names stages."""
    divided = [step for step in plan_steps(project) if step.stage.divides_into_shares and not step.on_demand]
    return [step for step in divided if not only or step.name in only]


# ── The jobs of a build in shares ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a build in shares: `work` is an array of shares of one stage, `build` makes outputs of finished parts.

    A `build` without stages makes everything that is left.
    """

    command: str
    stages: tuple[str, ...]


def list_jobs(project: Project) -> list[Job]:
    """Return the jobs of a build in shares, each to be started after the one before it has ended."""
    jobs: list[Job] = []
    pending: list[str] = []
    divided = {step.name for step in list_divided_steps(project)}
    for name in dict.fromkeys(step.name for step in plan_steps(project) if not step.on_demand):
        if name in divided:
            jobs += [Job("build", tuple(pending)), Job("work", (name,))]
            pending.clear()
        pending.append(name)
    return [*jobs, Job("build", ())]
