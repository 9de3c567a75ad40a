"""Plans and column advice for records datasets before a build; nothing is kept.

rows of an earlier build, if the recipe would still make them       ─┐
else sources ─► rows in a temporary folder                         ─┴─► lengths ─► plan, advice
"""

import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from rowmill.build import runner, steps
from rowmill.build.gate import open_generated_source
from rowmill.build.plan import forecast_steps
from rowmill.build.steps import Project
from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError, ContextOverflowError, suggest_name
from rowmill.core.storage import Store
from rowmill.executors import LocalPool
from rowmill.kinds.tables import sizing, table_examples, table_rows
from rowmill.kinds.tables.partition_plan import TablePlan
from rowmill.kinds.tables.sizing import ExampleEstimate, GroupAdvice
from rowmill.kinds.tables.table_examples import MeasuredTable
from rowmill.kinds.tables.table_rows import ContractProposal
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
    plan: TablePlan | None
    overflow: str = ""


@dataclass(frozen=True, slots=True)
class DatasetAdvice:
    """Advice on a dataset's columns for grouping, best first, and the estimated examples of the current options."""

    dataset: str
    columns: tuple[GroupAdvice, ...]
    estimate: ExampleEstimate
    mode: str
    chosen: tuple[str, ...]


def list_table_datasets(project: Project, dataset: str | None = None) -> list[str]:
    """Return the records datasets of a recipe, or only the named one.

    Raises
    ------
    ConfigError
        If no records dataset has this name.

    """
    known = [name for name, one in project.recipe.datasets.items() if one.format.IS_TABLE]
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
                yield DatasetTablePlan(name, table_examples.dry_run_table(context, loaded, path))
            except ContextOverflowError as error:
                yield DatasetTablePlan(name, None, str(error))


def advise_on_columns(project: Project, dataset: str | None = None) -> Iterator[DatasetAdvice]:
    """Yield advice on every column that can group records, for each records dataset or only the named one."""
    for name in list_table_datasets(project, dataset):
        with _open_rows_context(project, name) as context:
            loaded, path = stored_tokenizers.open_recipe_tokenizer(context)
            yield _advise_dataset(context, table_examples.measure_table(context, loaded, path))


def propose_contracts(project: Project, dataset: str | None = None) -> Iterator[tuple[str, ContractProposal | None]]:
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
            yield name, table_rows.propose_contract(context, canonical_rows.list_taken_parts(context))


@contextmanager
def _open_rows_context(project: Project, name: str) -> Generator[StageContext]:
    """Yield a stage context whose input is the dataset's rows, built now if no earlier build has them."""
    key: StageKey = (project.recipe.name, name, canonical_rows.STAGE.name)
    found = next(one for one in forecast_steps(project) if one.step.key == key)
    if found.manifest is not None:
        yield _make_tokenize_context(project, name, key, found.manifest)
        return
    with tempfile.TemporaryDirectory(prefix="rowmill-plan-") as folder:
        scratch = replace(project, store=Store(folder))
        stored_tokenizers.copy_tokenizers(project.store, scratch.store)
        made: dict[StageKey, Manifest] = {}
        for step in steps.plan_steps(scratch):
            if step.dataset == name and step.name in catalog.list_stages_up_to(canonical_rows.STAGE):
                read = open_generated_source(project, step)
                copy_generated(project.store, scratch.store, read.values())
                inputs = {one: made[one] for one in step.inputs} | read
                made[step.key] = runner.run_step(scratch, step, inputs).manifest
        yield _make_tokenize_context(scratch, name, key, made[key])


def _make_tokenize_context(project: Project, name: str, key: StageKey, rows: Manifest) -> StageContext:
    at: StageKey = (project.recipe.name, name, tokenized_examples.STAGE.name)
    return StageContext(project.store, project.base, at, name, {key: rows}, LocalPool(1), recipe=project.recipe)


# ── Advice ─────────────────────────────────────────────────────────────────────────────────────────


def _advise_dataset(context: StageContext, measured: MeasuredTable) -> DatasetAdvice:
    limits, form = measured.limits, measured.form
    lengths = np.maximum(measured.lengths, 0)
    columns = [
        sizing.advise_group_column(
            column,
            np.bincount(codes[codes >= 0]).astype(np.int64),
            np.bincount(codes[codes >= 0], weights=lengths[codes >= 0]).astype(np.int64),
            record_budget=limits.records,
            mode="sequential" if form.mode == "sequential" else "grouped",
            cap=limits.cap,
            is_ordered=form.order_column is not None,
        )
        for column, codes in _iterate_group_columns(context)
    ]
    columns.sort(key=lambda one: (len(one.unsuitable), len(one.warnings), -one.sizes["count"], one.column))
    rows = max(int((measured.lengths >= 0).sum()), 1)
    groups = max(len(measured.index.keys), 1)
    estimate = sizing.estimate_example(
        form.mode,
        limit=limits.limit,
        prompt=limits.prompt,
        cap=limits.cap,
        record_tokens=float(lengths.sum()) / rows,
        records_per_group=rows / groups,
    )
    return DatasetAdvice(context.dataset_name or "", tuple(columns), estimate, form.mode, form.group_columns)


def _iterate_group_columns(context: StageContext) -> Iterator[tuple[str, Ints]]:
    """Yield each column in which some rows share a value, with the number of each row's value (−1 for null)."""
    texts: list[str] = []
    for part in context.input(canonical_rows.STAGE.name).parts:
        texts += context.store.table(part.files["rows"], ["record"]).column(0).to_pylist()
    records: list[dict[str, Any]] = [orjson.loads(text) for text in texts]
    for name in dict.fromkeys(key for record in records for key in record):
        numbers: dict[bytes, int] = {}
        codes = np.full(len(records), -1, np.int64)
        for row, record in enumerate(records):
            value = record.get(name)
            if value is not None:
                codes[row] = numbers.setdefault(orjson.dumps(value), len(numbers))
        if 1 < len(numbers) < int((codes >= 0).sum()):
            yield name, codes
