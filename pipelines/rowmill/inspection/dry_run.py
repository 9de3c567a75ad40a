"""Plans and column advice for records datasets before a build; nothing is kept.

rows of an earlier build, if the recipe would still make them ─┐
else rows made now from the sources                            ─┴─► temporary folder ─► lengths ─► plan, advice
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rowmill.build import runner
from rowmill.build.prepare import forecast_steps
from rowmill.build.steps import Project
from rowmill.core.errors import ConfigError, ContextOverflowError, suggest_name
from rowmill.kinds.joint_rows import DatasetAdvice, ExamplePlan, require_joint_rows
from rowmill.schema.manifest import StageKey
from rowmill.stages import catalog
from rowmill.stages.base import StageContext, StageDeclaration
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.tokenization.stored_tokenizers import open_recipe_tokenizer


@dataclass(frozen=True, slots=True)
class DatasetTablePlan:
    """A dataset's plan, or the overflow message that explains why there is none."""

    dataset: str
    plan: ExamplePlan | None
    overflow: str = ""


def list_table_datasets(project: Project, dataset: str | None = None) -> list[str]:
    """Return the records datasets of a recipe, or only the named one.

    Raises ConfigError if no records dataset has this name.
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
        with _open_trial(project, name, tokenized_examples.STAGE) as context:
            loaded, path = open_recipe_tokenizer(context)
            try:
                plan = require_joint_rows(context.dataset.format).plan_examples(context, loaded, path)
                yield DatasetTablePlan(name, plan)
            except ContextOverflowError as error:
                yield DatasetTablePlan(name, None, str(error))


def advise_on_columns(project: Project, dataset: str | None = None) -> Iterator[DatasetAdvice]:
    """Yield advice on every column that can group records, for each records dataset or only the named one."""
    for name in list_table_datasets(project, dataset):
        with _open_trial(project, name, tokenized_examples.STAGE) as context:
            loaded, path = open_recipe_tokenizer(context)
            yield require_joint_rows(context.dataset.format).advise(context, loaded, path)


def propose_contracts(project: Project, dataset: str | None = None) -> Iterator[tuple[str, str | None]]:
    """Yield the table contract proposed from the data of each records dataset, or only of the named one."""
    for name in list_table_datasets(project, dataset):
        with _open_trial(project, name, canonical_rows.STAGE) as context:
            taken = canonical_rows.list_taken_parts(context)
            yield name, require_joint_rows(context.dataset.format).propose_contract(context, taken)


@contextmanager
def _open_trial(project: Project, name: str, stage: StageDeclaration) -> Generator[StageContext]:
    """Lend a stage's context in a trial, with the output of the stage before it: an earlier build's, or made now."""
    earlier = catalog.STAGES[catalog.STAGES.index(stage) - 1]
    key: StageKey = (project.recipe.name, name, earlier.name)
    output = next(forecast for forecast in forecast_steps(project) if forecast.step.key == key).manifest
    with runner.open_trial(project, on_disk=True) as copy:
        if output is None:
            output = runner.run_stages(project, copy, name, earlier)[key]
        else:
            for file in output.files("rows"):
                copy.store.write(file.path, project.store.content(file).to_pybytes())
        yield runner.make_context(copy, name, stage, {key: output})
