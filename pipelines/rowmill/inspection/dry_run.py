"""Plans and column advice for records datasets before a build; nothing is kept.

rows of an earlier build, if the recipe would still make them ─┐
else rows made now from the sources                            ─┴─► temporary folder ─► lengths ─► plan, advice
"""

import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rowmill.build import runner, steps
from rowmill.build.gate import open_generated_source
from rowmill.build.plan import forecast_steps
from rowmill.build.steps import Project
from rowmill.core.errors import ConfigError, ContextOverflowError, suggest_name
from rowmill.core.storage import Store
from rowmill.executors import LocalPool
from rowmill.kinds.joint_rows import DatasetAdvice, ExamplePlan, require_joint_rows
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.sources.generated import copy_generated
from rowmill.stages import catalog, raw_dataset
from rowmill.stages.base import StageContext
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.tokenization import stored_tokenizers


@dataclass(frozen=True, slots=True)
class DatasetTablePlan:
    """A dataset's plan, or the overflow message that explains why there is none."""

    dataset: str
    plan: ExamplePlan | None
    overflow: str = ""


def list_table_datasets(project: Project, dataset: str | None = None) -> list[str]:
    """Return the records datasets of a recipe, or only the named one.

    Raises
    ------
    ConfigError
        If no records dataset has this name.

    """
    known = [name for name, one in project.recipe.datasets.items() if one.format.get_joint_rows() is not None]
    if dataset is None:
        return known
    if dataset not in known:
        guess = suggest_name(dataset, known)
        hint = f"did you mean {guess}?" if guess else "name one of them"
        raise ConfigError(
            f"--dataset {dataset}: no records dataset of this name; there are {', '.join(known) or 'none'}; {hint}"
        )
    return [dataset]


def plan_tables(project: Project) -> Iterator[DatasetTablePlan]:
    """Yield the plan of every records dataset; a dataset that overflows yields its message instead."""
    for name in list_table_datasets(project):
        with _open_rows_context(project, name) as context:
            loaded, path = stored_tokenizers.open_recipe_tokenizer(context)
            try:
                yield DatasetTablePlan(
                    name, require_joint_rows(context.dataset.format).plan_examples(context, loaded, path)
                )
            except ContextOverflowError as error:
                yield DatasetTablePlan(name, None, str(error))


def advise_on_columns(project: Project, dataset: str | None = None) -> Iterator[DatasetAdvice]:
    """Yield advice on every column that can group records, for each records dataset or only the named one."""
    for name in list_table_datasets(project, dataset):
        with _open_rows_context(project, name) as context:
            loaded, path = stored_tokenizers.open_recipe_tokenizer(context)
            yield require_joint_rows(context.dataset.format).advise(context, loaded, path)


def propose_contracts(project: Project, dataset: str | None = None) -> Iterator[tuple[str, str | None]]:
    """Yield the table contract proposed from the data of each records dataset, or only of the named one."""
    for name in list_table_datasets(project, dataset):
        key: StageKey = (project.recipe.name, name, raw_dataset.STAGE.name)
        found = next(one for one in forecast_steps(project) if one.step.key == key)
        with tempfile.TemporaryDirectory(prefix="rowmill-advise-") as folder:
            scratch = replace(project, store=Store(folder))
            read = {} if found.manifest else open_generated_source(project, found.step)
            copy_generated(project.store, scratch.store, read.values())
            raw = found.manifest or runner.run_step(scratch, found.step, read).manifest
            at: StageKey = (project.recipe.name, name, canonical_rows.STAGE.name)
            context = StageContext(
                scratch.store, project.base, at, name, {key: raw}, LocalPool(1), recipe=project.recipe
            )
            yield (
                name,
                require_joint_rows(context.dataset.format).propose_contract(
                    context, canonical_rows.list_taken_parts(context)
                ),
            )


@contextmanager
def _open_rows_context(project: Project, name: str) -> Generator[StageContext]:
    """Yield a stage context in a temporary folder, with the dataset's rows, built now if no earlier build has them."""
    key: StageKey = (project.recipe.name, name, canonical_rows.STAGE.name)
    found = next(one for one in forecast_steps(project) if one.step.key == key).manifest
    with tempfile.TemporaryDirectory(prefix="rowmill-plan-") as folder:
        scratch = replace(project, store=Store(folder))
        stored_tokenizers.copy_tokenizers(project.store, scratch.store)
        if found is None:
            made: dict[StageKey, Manifest] = {}
            for step in steps.plan_steps(scratch):
                if step.dataset == name and step.name in catalog.list_stages_up_to(canonical_rows.STAGE):
                    read = open_generated_source(project, step)
                    copy_generated(project.store, scratch.store, read.values())
                    inputs = {one: made[one] for one in step.inputs} | read
                    made[step.key] = runner.run_step(scratch, step, inputs).manifest
            found = made[key]
        else:
            for file in found.files("rows"):
                scratch.store.write(file.path, project.store.content(file).to_pybytes())
        at: StageKey = (project.recipe.name, name, tokenized_examples.STAGE.name)
        yield StageContext(scratch.store, project.base, at, name, {key: found}, LocalPool(1), recipe=project.recipe)
