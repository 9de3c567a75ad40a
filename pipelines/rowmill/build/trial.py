"""A trial: stages of a recipe run on a store of their own, of which nothing is kept.

    project ─► the same on a store in memory, or in a temporary folder ─► its stages, up to the one that is asked for

`plan`, `inspect`, `advise` and the check before a build run the real stages this way, some on the first records only.
Tokenizers that the project has stored are copied, since opening one from its files takes seconds.
"""

import tempfile
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from rowmill.build import runner
from rowmill.build.gate import open_generated_source
from rowmill.build.steps import Project, Step, plan_steps
from rowmill.core.stage_names import RAW_DATASET
from rowmill.core.storage import Store
from rowmill.executors import LocalPool
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.sources.generated import copy_generated
from rowmill.stages import catalog, raw_dataset
from rowmill.stages.base import StageContext, StageDeclaration
from rowmill.tokenization import stored_tokenizers


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
    key = (trial.recipe.name, dataset, stage.name)
    return StageContext(trial.store, trial.base, key, dataset, inputs, LocalPool(1), recipe=trial.recipe)


def run_stages(project: Project, trial: Project, dataset: str, last: StageDeclaration) -> dict[StageKey, Manifest]:
    """Run the stages of a dataset on a trial's store, up to the last one; return their outputs in order."""
    outputs: dict[StageKey, Manifest] = {}
    for step in plan_steps(trial):
        if step.dataset == dataset and step.name in catalog.list_stages_up_to(last):
            outputs[step.key] = run_stage(project, trial, step, outputs)
    return outputs


def run_stage(
    project: Project,
    trial: Project,
    step: Step,
    outputs: dict[StageKey, Manifest],
    *,
    first_records: int | None = None,
) -> Manifest:
    """Run one stage on a trial's store; with `first_records`, a source is read no further."""
    generated = open_generated_source(project, step)
    copy_generated(project.store, trial.store, generated.values())
    if step.name == RAW_DATASET and first_records is not None:
        prepare = partial(raw_dataset.prepare_raw_dataset, first_records=first_records)
        step = replace(step, stage=replace(step.stage, prepare=prepare))
    inputs = {key: outputs[key] for key in step.inputs} | generated
    return runner.run_step(trial, step, inputs, looks_ahead=False).manifest
