"""Runs rows through stages and keeps nothing: a few to show them, all of a records dataset to plan its examples.

    source ─► first records ─canonicalize_part─► rows ─tokenize_part─► examples ─► trained | context | template

Copies of earlier rows are shown like the others: duplicates are known only after all rows are made. Examples of
records datasets depend on the whole dataset, so they are those of the last build, or built as a build does.
"""

import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, starmap
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.build import prepare
from rowmill.build.prepare import forecast_steps
from rowmill.build.runner import make_context, open_trial, run_stage, run_stages
from rowmill.build.steps import Project, plan_steps
from rowmill.core import console
from rowmill.core.arrays import find_distinct
from rowmill.core.errors import ConfigError, ContextOverflowError, hint_at_name
from rowmill.core.storage import Store
from rowmill.kinds.joint_rows import DatasetAdvice, ExamplePlan, require_joint_rows
from rowmill.parts.functions import write_table
from rowmill.schema import manifest
from rowmill.schema.examples import SPAN_KINDS, WEIGHT_COLUMN, count_tokens_by_weight
from rowmill.schema.rows import is_row_id, parse_row_id
from rowmill.sources import GeneratedSource, RawRecord, SourcePart
from rowmill.sources.reading import load_scans, number_source_parts
from rowmill.stages import catalog, raw_dataset
from rowmill.stages.base import StageContext, StageDeclaration
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.canonical_rows import text_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.tokenized_examples import text_parts
from rowmill.tokenization import stored_tokenizers
from rowmill.tokenization.reference_sample import MIN_PART_CHARS
from rowmill.tokenization.tokenizer import Encoder

TokenClass = Literal["trained", "context", "template"]

ClassT = TypeVar("ClassT")


@dataclass(frozen=True, slots=True)
class TokenStretch(Generic[ClassT]):
    """Neighbouring tokens of one class, decoded."""

    kind: ClassT
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class InspectedExample:
    """One example of a row: its lengths, what truncation removed by stage, and its text in stretches.

    `weights` counts trained tokens by loss weight; empty if the dataset has no weights.
    """

    example_id: str
    original_tokens: int
    tokens: int
    trained_tokens: int
    removed: dict[str, int]
    stretches: tuple[TokenStretch[TokenClass], ...]
    weights: dict[str, int]


@dataclass(frozen=True, slots=True)
class InspectedRecord:
    """One record: raw bytes, canonical row with its report, examples; or the stage and reason of its rejection.

    In records datasets, several records share an example: `shown_above` names those already shown with an earlier
    record, `not_shown` counts those beyond `MAX_SHOWN_EXAMPLES`.
    """

    dataset: str
    row_id: str
    source: str
    raw: bytes
    row: dict[str, Any] | None
    rejected: tuple[str, str, str] | None
    samples: tuple[InspectedExample, ...]
    shown_above: tuple[str, ...] = ()
    not_shown: int = 0


MAX_SHOWN_EXAMPLES = 3
"""Examples shown of one record; sampling can put a record into thousands."""


# ── Choosing rows ──────────────────────────────────────────────────────────────────────────────────


def inspect_rows(project: Project, *, count: int, dataset: str | None, row_id: str | None) -> Iterator[InspectedRecord]:
    """Yield the first `count` records of a dataset, or of each; with `row_id`, only that row."""
    known = project.recipe.datasets
    if dataset is not None and dataset not in known:
        hint = hint_at_name(dataset, known)
        raise ConfigError(f"--dataset {dataset}: no such dataset; there are {', '.join(known)}; {hint}")
    names = [dataset] if dataset is not None else list(known)
    found = False
    wanted = None if row_id is None else row_id.split("#", 1)[0]
    for name in names if wanted is None or is_row_id(wanted) else ():
        inspect = _inspect_records if known[name].format.get_joint_rows() is None else _inspect_table
        for record in inspect(project, name, count, wanted):
            found = True
            yield record
    if row_id is not None and not found:
        raise ConfigError(
            f"{row_id}: no row of {', '.join(names)} has this id; expected a row_id of the view rows, <part>:<number>; "
            f'see `rowmill sql "from rows select row_id limit 10" {project.recipe.name}`'
        )


@dataclass(slots=True)
class _FirstRecordsStager:
    """Stages only the pieces that hold the first records, so that a large source does not fill memory."""

    stage: sources.StoreStager
    records: int | None

    def __call__(self, name: str, content: bytes) -> str:
        """Stage a piece while records are wanted; a later piece gets a path that is never read."""
        if self.records is None:
            return self.stage(name, content)
        if self.records <= 0:
            return self.stage.store.path(f"{self.stage.folder}/{name}")
        self.records -= sum(1 for line in content.split(b"\n") if line.strip())
        return self.stage(name, content)


def _inspect_records(project: Project, name: str, count: int, row_id: str | None) -> Iterator[InspectedRecord]:
    """Yield the first records of a source, or only those of a row."""
    with open_trial(project) as trial:
        context = make_context(trial, name, tokenized_examples.STAGE, {})
        source = context.dataset.source
        assert not isinstance(source, GeneratedSource), "generated records are inspected as a records dataset"
        # Files that a build scanned and that did not change are not read again.
        known = load_scans(manifest.load_current(project.store, (*context.dataset_key, raw_dataset.STAGE.name)))
        scans = sources.scan_source(
            source,
            project.base,
            _FirstRecordsStager(sources.StoreStager(context.store, "staged"), count if row_id is None else None),
            {scan.url: scan for scan in known},
            keeps_non_finite=context.dataset.keeps_non_finite,
        )
        for part in (part for scan in scans for part in scan.parts):
            if numbers := _choose_records(part, count, row_id):
                count -= len(numbers)
                yield from _inspect_part(context, part, numbers)


def _inspect_part(context: StageContext, part: SourcePart, numbers: range) -> Iterator[InspectedRecord]:
    """Make rows and examples of some records of a part, and yield each record with them."""
    records = [one for one in sources.read_records(part, context.base) if one.number in numbers]
    record_by_id = {f"{part.part_id}:{one.number}": one for one in records}
    chosen = text_rows.CanonicalInputs(
        "inspected", ((part, numbers.stop),), context.dataset, context.dataset_name or "", context.base
    )
    made = text_rows.canonicalize_part.make(chosen, context.store, "rows")
    rows = _filter_records(context.store.table(made.files["rows"]), list(record_by_id))
    rejects = [_filter_records(context.store.table(made.files["rejects"]), list(record_by_id))]
    samples: dict[str, list[InspectedExample]] = {}
    if rows.num_rows:
        loaded, path = stored_tokenizers.open_recipe_tokenizer(context)
        tokenized = text_parts.tokenize_part.make(
            text_parts.TokenizeInputs(
                options=uuid.uuid4().hex,
                tokenizer=path,
                dataset=context.dataset,
                renderer=tokenized_examples.resolve_renderer_spec(context, loaded),
                limit=context.recipe.limit_of(context.dataset_name or ""),
                vocab_size=context.recipe.vocab_size or loaded.card.vocab_size,
                rows=write_table(context.store, "chosen.arrow", rows),
                min_compared_chars=MIN_PART_CHARS,
                base=context.base,
            ),
            context.store,
            "examples",
        )
        rejects.append(context.store.table(tokenized.files["rejects"]))
        examples = context.store.table(tokenized.files["examples"])
        row_ids = examples.column("row_ids").to_pylist()
        for sample, own in zip(_read_examples(examples, Encoder(loaded)), row_ids, strict=True):
            samples.setdefault(own[0], []).append(sample)
    row_by_id = {row["row_id"]: row for row in rows.to_pylist()}
    reject_by_id = {one["row_id"]: one for table in rejects for one in table.to_pylist()}
    names = {*record_by_id, *row_by_id, *reject_by_id}
    for name in sorted(names, key=lambda one: (parse_row_id(one), len(one), one)):
        # A format class may make several rows of a record.
        record = record_by_id[name] if name in record_by_id else record_by_id[name.rpartition(".")[0]]
        own = row_by_id.get(name), reject_by_id.get(name), samples.get(name, [])
        yield _make_inspected_record(context.dataset_name or "", part, name, record, *own)


def _choose_records(part: SourcePart, count: int, row_id: str | None) -> range:
    """Return which records of a part are wanted: at most `count`, or only the one with this row id."""
    if row_id is None:
        return range(min(count, part.records))
    part_id, number = parse_row_id(row_id)
    return range(number, number + 1) if part_id == part.part_id and number < part.records else range(0)


# ── Records datasets: examples as a build makes them ─────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _TableBuild:
    """The outputs of a records dataset up to its examples, and the store that has their files."""

    store: Store
    raw: manifest.Manifest
    rows: manifest.Manifest
    examples: manifest.Manifest
    encoder: Encoder


def _inspect_table(project: Project, name: str, count: int, row_id: str | None) -> Iterator[InspectedRecord]:
    """Yield records with the examples that a build makes of them.

    Which records share an example depends on all of them, so a few records cannot be assembled alone.
    """
    with _open_table_build(project, name) as built:
        shown = set[str]()
        for index, part in number_source_parts(built.raw):
            if numbers := _choose_records(part, count, row_id):
                count -= len(numbers)
                yield from _inspect_table_part(project, name, built, index, part, numbers, shown)


def _inspect_table_part(
    project: Project, name: str, built: _TableBuild, index: int, part: SourcePart, numbers: range, shown: set[str]
) -> Iterator[InspectedRecord]:
    """Yield some records of a part; an example that was shown with an earlier record is only named."""
    records = [one for one in sources.read_records(part, project.base) if one.number in numbers]
    names = [f"{part.part_id}:{one.number}" for one in records]
    rows, rejects = built.rows.parts[index], list[dict[str, Any]]()
    for one in (rows, built.examples.parts[index]):
        rejects += _filter_records(built.store.table(one.files["rejects"]), names).to_pylist()
    row_by_id = {
        row["row_id"]: row for row in _filter_records(built.store.table(rows.files["rows"]), names).to_pylist()
    }
    reject_by_id = {reject["row_id"]: reject for reject in rejects}
    # The examples that contain the rows, by row, in the order of the build.
    samples: dict[str, list[InspectedExample]] = {}
    for file in built.examples.files("examples"):
        row_ids = built.store.table(file, ["row_ids"]).column(0).combine_chunks()
        is_wanted = pc.is_in(row_ids.flatten(), pa.array(names, pa.string())).to_numpy(zero_copy_only=False)
        places = find_distinct(pc.list_parent_indices(row_ids).to_numpy()[is_wanted])
        if len(places):
            table = built.store.table(file).take(pa.array(places))
            of_examples = table.column("row_ids").to_pylist()
            for sample, own in zip(_read_examples(table, built.encoder), of_examples, strict=True):
                for row_id in dict.fromkeys(own):
                    if row_id in names:
                        samples.setdefault(row_id, []).append(sample)
    for row_id, record in zip(names, records, strict=True):
        own = samples.get(row_id, [])
        fresh = [one for one in own if one.example_id not in shown][:MAX_SHOWN_EXAMPLES]
        above = tuple(one.example_id for one in own if one.example_id in shown)
        shown |= {one.example_id for one in fresh}
        inspected = _make_inspected_record(
            name, part, row_id, record, row_by_id.get(row_id), reject_by_id.get(row_id), fresh
        )
        yield replace(inspected, shown_above=above, not_shown=len(own) - len(fresh) - len(above))


@contextmanager
def _open_table_build(project: Project, name: str) -> Generator[_TableBuild, None, None]:
    """Yield the last build's outputs if a build would reuse them; else build them in a temporary folder."""
    steps = [step for step in plan_steps(project) if step.dataset == name and step.name in _STAGES_TO_EXAMPLES]
    with open_trial(project, on_disk=True) as trial:
        scanned = manifest.load_current(project.store, steps[0].key)
        if scanned is not None:
            # Files that did not move since the last build are not read again.
            manifest.save_manifest(trial.store, scanned)
        outputs = {steps[0].key: run_stage(project, trial, steps[0], {})}
        # What a build of this recipe would reuse, if it would reuse all.
        kept = dict(outputs)
        for step in steps[1:]:
            inputs = {key: kept[key] for key in step.inputs}
            output = prepare.find_kept_output(project, step, inputs, scratch=trial.store)
            if output is None:
                break
            kept[step.key] = output
        is_kept = len(kept) == len(steps)
        for step in () if is_kept else steps[1:]:
            outputs[step.key] = run_stage(project, trial, step, outputs)
        context = make_context(trial, name, tokenized_examples.STAGE, {})
        loaded, _ = stored_tokenizers.open_recipe_tokenizer(context)
        raw, rows, examples = ((kept if is_kept else outputs)[step.key] for step in steps)
        yield _TableBuild(project.store if is_kept else trial.store, raw, rows, examples, Encoder(loaded))


_STAGES_TO_EXAMPLES = catalog.list_stages_up_to(tokenized_examples.STAGE)


def _filter_records(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the rows of some records, including further rows that a format class made of one record."""
    records = pc.replace_substring_regex(table.column("row_id"), r"\.\d+$", "")
    return table.filter(pc.is_in(records, pa.array(names, pa.string())))


def _make_inspected_record(
    dataset: str,
    part: SourcePart,
    row_id: str,
    record: RawRecord,
    row: "dict[str, Any] | None",
    refused: "dict[str, Any] | None",
    samples: list[InspectedExample],
) -> InspectedRecord:
    return InspectedRecord(
        dataset=dataset,
        row_id=row_id,
        source=console.format_source_line(part.url, part.reader, record.line),
        raw=record.raw,
        row=row,
        rejected=None if refused is None else (refused["stage"], refused["reason"], refused["detail"]),
        samples=tuple(samples),
    )


# ── Examples as stretches ──────────────────────────────────────────────────────────────────────────


def _read_examples(examples: pa.Table, encoder: Encoder) -> Iterator[InspectedExample]:
    for one in examples.to_pylist():
        removed = {
            "exchanges": one["exchanges_removed"],
            "reasoning": one["reasoning_removed"],
            "tokens": one["tokens_cut"],
        }
        classes = list(starmap(classify_token, list_token_kinds(one)))
        yield InspectedExample(
            example_id=one["example_id"],
            original_tokens=one["original_tokens"],
            tokens=one["tokens"],
            trained_tokens=one["trained_tokens"],
            removed={stage: count for stage, count in removed.items() if count},
            stretches=tuple(split_by_class(one["input_ids"], classes, encoder)),
            weights=count_tokens_by_weight(pa.array(one.get(WEIGHT_COLUMN, []), pa.float32())),
        )


def list_token_kinds(example: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the span kind of every token of a stored example, and whether it is trained."""
    sizes = np.diff([*example["span_starts"], len(example["input_ids"])])
    names = [SPAN_KINDS[kind] for kind in np.repeat(example["span_kinds"], sizes).tolist()]
    return list(zip(names, example["loss_mask"], strict=True))


def classify_token(kind: str, trained: bool) -> TokenClass:
    """Return how a token of a span kind is shown."""
    return "trained" if trained else "template" if kind == "template" else "context"


def split_by_class(ids: Sequence[int], kinds: Sequence[ClassT], encoder: Encoder) -> Iterator[TokenStretch[ClassT]]:
    """Split ids into stretches of one class; their texts concatenate to the decoded text.

    Each boundary is the length of the text decoded so far. Decoding every stretch by itself would lose the leading
    spaces that SentencePiece strips, and split characters that span several tokens.
    """
    text, end, written = encoder.decode(ids), 0, 0
    for kind, own in groupby(kinds):
        count = len(list(own))
        end += count
        # An incomplete character decodes to U+FFFD; it belongs to the stretch that completes it.
        edge = len(text) if end == len(ids) else max(written, len(encoder.decode(ids[:end]).rstrip("\ufffd")))
        yield TokenStretch(kind, text[written:edge], count)
        written = edge


# ── Records datasets: plans and column advice before a build ─────────────────────────────────────────
#
# rows of an earlier build, if the recipe would still make them ─┐
# else rows made now from the sources                            ─┴─► temporary folder ─► lengths ─► plan, advice


@dataclass(frozen=True, slots=True)
class DatasetTablePlan:
    """A dataset's plan, or the overflow message that explains why there is none."""

    dataset: str
    plan: ExamplePlan | None
    overflow: str = ""


def list_table_datasets(project: Project, dataset: str | None = None) -> list[str]:
    """Return the records datasets of a recipe, or only the named one."""
    known = [name for name, one in project.recipe.datasets.items() if one.format.get_joint_rows() is not None]
    if dataset is None:
        return known
    if dataset not in known:
        raise ConfigError(
            f"--dataset {dataset}: no records dataset of this name; there are {', '.join(known) or 'none'}; "
            f"{hint_at_name(dataset, known)}"
        )
    return [dataset]


def plan_tables(project: Project) -> Iterator[DatasetTablePlan]:
    """Yield the plan of every records dataset; a dataset that overflows yields its message instead."""
    for name in list_table_datasets(project):
        with _open_table_trial(project, name, tokenized_examples.STAGE) as context:
            loaded, path = stored_tokenizers.open_recipe_tokenizer(context)
            try:
                plan = require_joint_rows(context.dataset.format).plan_examples(context, loaded, path)
                yield DatasetTablePlan(name, plan)
            except ContextOverflowError as error:
                yield DatasetTablePlan(name, None, str(error))


def advise_on_columns(project: Project, dataset: str | None = None) -> Iterator[DatasetAdvice]:
    """Yield advice on every column that can group records, for each records dataset or only the named one."""
    for name in list_table_datasets(project, dataset):
        with _open_table_trial(project, name, tokenized_examples.STAGE) as context:
            loaded, path = stored_tokenizers.open_recipe_tokenizer(context)
            yield require_joint_rows(context.dataset.format).advise(context, loaded, path)


def propose_contracts(project: Project, dataset: str | None = None) -> Iterator[tuple[str, str | None]]:
    """Yield the table contract proposed from the data of each records dataset, or only of the named one."""
    for name in list_table_datasets(project, dataset):
        with _open_table_trial(project, name, canonical_rows.STAGE) as context:
            taken = canonical_rows.list_taken_parts(context)
            yield name, require_joint_rows(context.dataset.format).propose_contract(context, taken)


@contextmanager
def _open_table_trial(project: Project, name: str, stage: StageDeclaration) -> Generator[StageContext]:
    """Lend a stage's context in a trial, with the output of the stage before it: an earlier build's, or made now."""
    earlier = catalog.STAGES[catalog.STAGES.index(stage) - 1]
    key: manifest.StageKey = (project.recipe.name, name, earlier.name)
    output = next(forecast for forecast in forecast_steps(project) if forecast.step.key == key).manifest
    with open_trial(project, on_disk=True) as copy:
        if output is None:
            output = run_stages(project, copy, name, earlier)[key]
        else:
            for file in output.files("rows"):
                copy.store.write(file.path, project.store.content(file).to_pybytes())
        yield make_context(copy, name, stage, {key: output})
