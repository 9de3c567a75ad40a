"""Runs rows through stages and keeps nothing: a few to show them, all of a records dataset to plan its examples.

    source ─► first records ─canonicalize_part─► rows ─tokenize_part─► examples ─► trained | context | template

Copies of earlier rows are shown like the others: duplicates are known only after all rows are made. Examples of
records datasets depend on the whole dataset, so they are those of the last build, or built as a build does.
"""

import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.build import prepare
from rowmill.build.prepare import forecast_steps
from rowmill.build.runner import make_context, open_trial, run_stage, run_stages
from rowmill.build.steps import Project, plan_steps
from rowmill.conversation.truncation import find_kept_messages
from rowmill.core import console
from rowmill.core.arrays import make_array
from rowmill.core.errors import ConfigError, ContextOverflowError, IntegrityError, SourceError, hint_at_name
from rowmill.core.json import from_json
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.inspection.trace import Lineage, find_lists_with, open_encoder
from rowmill.kinds.joint_rows import DatasetAdvice, ExamplePlan, require_joint_kind
from rowmill.kinds.reading.canonicalization import open_dataset_reader
from rowmill.parts.functions import write_table
from rowmill.schema import manifest
from rowmill.schema.examples import SPAN_KINDS, WEIGHT_COLUMN, count_tokens_by_weight
from rowmill.schema.rows import ROW_KINDS, Message, Row, is_row_id, parse_row_id
from rowmill.sources import GeneratedSource, RawRecord, SourcePart
from rowmill.sources.reading import load_scans
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

SpanClass: TypeAlias = tuple[str, bool]
"""The span kind of a token, and whether it is trained."""


@dataclass(frozen=True, slots=True)
class TokenStretch(Generic[ClassT]):
    """Neighbouring tokens of one class, decoded."""

    kind: ClassT
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class InspectedSide:
    """An answer of a pair in its example: the row's column, its tokens with the prompt's, and what is left of its text.

    `kept_texts` has text by message of the answer, from 0, and by span kind.
    """

    column: str
    tokens: int
    kept_texts: Mapping[int, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class InspectedExample:
    """One example of a row: its lengths, what truncation removed by stage, and its text in stretches.

    `weights` counts trained tokens by loss weight; empty if the dataset has no weights. `removed_messages` are the
    messages of the row that truncation removed; None if they are not known, as of the pieces of a split. `kept_texts`
    has what a conversation that lost reasoning, or was cut at a token, still has: text by message and span kind.
    `sides` are the answers of a pair, whose spans follow each other; no span is of two sides.
    """

    example_id: str
    original_tokens: int
    tokens: int
    trained_tokens: int
    removed: dict[str, int]
    spans: tuple[TokenStretch[SpanClass], ...]
    weights: dict[str, int]
    row_ids: tuple[str, ...] = ()
    removed_messages: tuple[int, ...] | None = ()
    kept_texts: Mapping[int, Mapping[str, str]] = field(default_factory=dict[int, Mapping[str, str]])
    sides: tuple[InspectedSide, ...] = ()

    @property
    def stretches(self) -> tuple[TokenStretch[TokenClass], ...]:
        return tuple(
            TokenStretch(kind, "".join(one.text for one in own), sum(one.tokens for one in own))
            for kind, run in groupby(self.spans, key=lambda span: classify_token(*span.kind))
            for own in [list(run)]
        )


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
    unread: tuple[str, ...] = ()
    """Columns of the record that nothing reads; empty if it is no row, or the dataset's class is the user's."""
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
        kept = None if wanted is None else _find_kept_lineage(project, name)
        if known[name].format.count_read_records(count) is None:
            records = _inspect_dataset(project, name, count, wanted)
        elif kept is None or wanted is None:
            records = _inspect_records(project, name, count, wanted)
        else:
            records = inspect_row(kept, wanted)
        for record in records:
            found = True
            yield record
    if row_id is not None and not found:
        raise ConfigError(
            f"{row_id}: no row of {', '.join(names)} has this id; expected a row_id of the view rows, <part>:<number>; "
            f'see `rowmill sql "from rows select row_id limit 10" {project.recipe.name}`, or, if its file has changed '
            f"since, find the new id by its line with `rowmill trace {project.recipe.name} --source FILE:LINE`"
        )


def inspect_row(lineage: Lineage, row_id: str) -> Iterator[InspectedRecord]:
    """Yield what a build made of the record of a row, in each of its rows; nothing if it has no such record."""
    part_id, number = parse_row_id(row_id)
    if part_id in lineage.parts and number < lineage.parts[part_id][1].records:
        encoder = open_encoder(lineage) if TOKENIZED_EXAMPLES in lineage.made else None
        yield from inspect_built_rows(lineage, part_id, range(number, number + 1), encoder, set())


def _find_kept_lineage(project: Project, name: str) -> Lineage | None:
    """Return what was built of a dataset up to its examples, if a build would reuse all of it; else None."""
    made: dict[str, manifest.Manifest] = {}
    for forecast in forecast_steps(project):
        if forecast.step.dataset == name and forecast.step.name in _STAGES_TO_EXAMPLES:
            if forecast.manifest is None:
                return None
            made[forecast.step.name] = forecast.manifest
    return Lineage(project, name, made)


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
                is_text_file=False,
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
        encoder = Encoder(loaded)
        for one in examples.to_pylist():
            samples.setdefault(one["row_ids"][0], []).append(_read_example(one, encoder))
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


def _inspect_dataset(project: Project, name: str, count: int, row_id: str | None) -> Iterator[InspectedRecord]:
    """Yield records with the examples that a build makes of them.

    Which records share an example depends on all of them, so a few records cannot be assembled alone.
    """
    with _open_dataset_build(project, name) as (lineage, encoder):
        shown = set[str]()
        for part_id, (_, part) in lineage.parts.items():
            if numbers := _choose_records(part, count, row_id):
                count -= len(numbers)
                yield from inspect_built_rows(lineage, part_id, numbers, encoder, shown)


def inspect_built_rows(
    lineage: Lineage, part_id: str, numbers: range, encoder: Encoder | None, shown: set[str]
) -> Iterator[InspectedRecord]:
    """Yield some records of a source part with what a build made of them; without examples there is no encoder.

    An example that is in `shown` is only named. A source that changed since the build leaves the raw records empty.
    """
    project, dataset, (_, part) = lineage.project, lineage.dataset, lineage.parts[part_id]
    names = [f"{part_id}:{number}" for number in numbers]
    try:
        records = {f"{part_id}:{one.number}": one for one in _read_numbered(part, project.base, numbers)}
    except (SourceError, IntegrityError):
        records = {}
    row_by_id, reject_by_id = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    for stage, file, found in (
        (CANONICAL_ROWS, "rows", row_by_id),
        (CANONICAL_ROWS, "rejects", reject_by_id),
        (TOKENIZED_EXAMPLES, "rejects", reject_by_id),
    ):
        files = lineage.find_files(stage, part_id)
        if file in files and files[file].rows:
            found |= {
                one["row_id"]: one for one in _filter_records(project.store.table(files[file]), names).to_pylist()
            }
    every = sorted({*names, *row_by_id, *reject_by_id}, key=lambda one: (parse_row_id(one)[1], len(one), one))
    # The examples that contain the rows, by row, in the order of the build.
    samples: dict[str, list[InspectedExample]] = {}
    for file in lineage.find_example_files(part_id) if encoder is not None else ():
        row_ids = project.store.table(file, ["row_ids"]).column(0).combine_chunks()
        places = find_lists_with(row_ids, every)
        if len(places):
            for one in project.store.table(file).take(make_array(places)).to_pylist():
                assert encoder is not None
                sample = _read_example(one, encoder)
                row = row_by_id.get(one["row_ids"][0])
                removed = _find_removed_messages(row, one, encoder)
                kept_texts = _read_kept_texts(row, one, removed, encoder)
                sides = tuple(_read_sides(row, one, encoder))
                for row_id in dict.fromkeys(one["row_ids"]):
                    if row_id in every:
                        samples.setdefault(row_id, []).append(
                            replace(sample, removed_messages=removed, kept_texts=kept_texts, sides=sides)
                        )
    unread_of = _open_unread_finder(project, dataset, part)
    for row_id in every:
        # A format class may make several rows of a record.
        record = records.get(row_id) or records.get(row_id.rpartition(".")[0])
        row, own = row_by_id.get(row_id), samples.get(row_id, [])
        fresh = [one for one in own if one.example_id not in shown][:MAX_SHOWN_EXAMPLES]
        above = tuple(one.example_id for one in own if one.example_id in shown)
        shown |= {one.example_id for one in fresh}
        inspected = _make_inspected_record(dataset, part, row_id, record, row, reject_by_id.get(row_id), fresh)
        unread = () if record is None or row is None else unread_of(record)
        yield replace(inspected, shown_above=above, not_shown=len(own) - len(fresh) - len(above), unread=unread)


def _read_numbered(part: SourcePart, base: Path, numbers: range) -> Iterator[RawRecord]:
    for record in sources.read_records(part, base):
        if record.number >= numbers.stop:
            return
        if record.number in numbers:
            yield record


def _open_unread_finder(project: Project, dataset: str, part: SourcePart) -> Callable[[RawRecord], tuple[str, ...]]:
    """Return the function that lists the columns of a record that have a value and that nothing reads."""
    options = project.recipe.datasets[dataset]
    if options.format.WRITES_ALL_COLUMNS:
        return lambda _: ()
    reader = open_dataset_reader(options, project.base, dataset)
    read_elsewhere = reader.read_elsewhere
    if read_elsewhere is None or ROW_KINDS[options.row_kind].is_token_ids:
        return lambda _: ()

    def find(record: RawRecord) -> tuple[str, ...]:
        if record.value is None:
            return ()
        (row,) = reader.read(record.value, arrow=part.arrow)
        if not isinstance(row, Row):
            return ()
        read = {*row.read_columns, *read_elsewhere}
        return tuple(name for name, value in record.value.items() if value is not None and name not in read)

    return find


def _find_removed_messages(
    row: Mapping[str, Any] | None, example: Mapping[str, Any], encoder: Encoder
) -> tuple[int, ...] | None:
    """Return the messages of a row that truncation removed: with the others, the example's texts are theirs."""
    if not example["messages_removed"]:
        return ()
    if row is None or row["messages"] is None:
        return None
    messages: list[Message] = from_json(row["messages"])
    # The answers of a pair, which follow its prompt, are not among the row's messages.
    texts = [
        (message, text.strip("\ufffd \t\n"))
        for message, kind, text in _decode_messages(example, encoder)
        if kind != "tool_call" and message < len(messages) - example["messages_removed"]
    ]
    contents = [" ".join(value for value in message.values() if isinstance(value, str)) for message in messages]

    def agrees(kept: Sequence[int]) -> bool:
        return all(message < len(kept) and text in contents[kept[message]] for message, text in texts)

    kept = find_kept_messages(messages, example["messages_removed"], agrees)
    return None if kept is None else tuple(sorted(set(range(len(messages))) - set(kept)))


def _read_kept_texts(
    row: Mapping[str, Any] | None, example: Mapping[str, Any], removed: Sequence[int] | None, encoder: Encoder
) -> dict[int, dict[str, str]]:
    """Return what a conversation that lost reasoning, or was cut at a token, still has: text by message and kind."""
    is_cut = example["reasoning_removed"] or example["tokens_cut"]
    if not is_cut or row is None or not ROW_KINDS[row["kind"]].answers_in_messages or removed is None:
        return {}
    kept = [number for number in range(len(from_json(row["messages"]))) if number not in removed]
    texts: dict[int, dict[str, str]] = {}
    for message, kind, text in _decode_messages(example, encoder):
        of_message = texts.setdefault(kept[message], {})
        of_message[kind] = of_message.get(kind, "") + text
    return texts


def _read_sides(row: Mapping[str, Any] | None, example: Mapping[str, Any], encoder: Encoder) -> Iterator[InspectedSide]:
    """Yield the sides of a pair's example, each with what is left of its answer."""
    if row is None or row["messages"] is None or "side_lengths" not in example:
        return
    prompt = len(from_json(row["messages"])) - example["messages_removed"]
    edges = pairwise(accumulate(example["side_lengths"], initial=0))
    for is_chosen, (begin, end) in zip(example["sides"], edges, strict=True):
        texts: dict[int, dict[str, str]] = {}
        for message, kind, text in _decode_messages(example, encoder, within=range(begin, end)):
            if message >= prompt:
                of_message = texts.setdefault(message - prompt, {})
                of_message[kind] = of_message.get(kind, "") + text
        yield InspectedSide("chosen" if is_chosen else "rejected", end - begin, texts)


def _decode_messages(
    example: Mapping[str, Any], encoder: Encoder, *, within: range | None = None
) -> Iterator[tuple[int, str, str]]:
    """Yield the message, kind and text of each span of an example, or of some of its tokens, but the template's."""
    ends = [*example["span_starts"][1:], len(example["input_ids"])]
    spans = zip(example["span_starts"], ends, example["span_messages"], example["span_kinds"], strict=True)
    for start, end, message, kind in spans:
        if message >= 0 and SPAN_KINDS[kind] != "template" and (within is None or start in within):
            yield message, SPAN_KINDS[kind], encoder.decode(example["input_ids"][start:end])


@contextmanager
def _open_dataset_build(project: Project, name: str) -> Generator[tuple[Lineage, Encoder], None, None]:
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
        made = {step.name: (kept if is_kept else outputs)[step.key] for step in steps}
        yield Lineage(project if is_kept else replace(project, store=trial.store), name, made), Encoder(loaded)


_STAGES_TO_EXAMPLES = catalog.list_stages_up_to(tokenized_examples.STAGE)


def _filter_records(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the rows of some records, including further rows that a format class made of one record."""
    records = pc.replace_substring_regex(table.column("row_id"), r"\.\d+$", "")
    return table.filter(pc.is_in(records, make_array(names)))


def _make_inspected_record(
    dataset: str,
    part: SourcePart,
    row_id: str,
    record: RawRecord | None,
    row: "dict[str, Any] | None",
    refused: "dict[str, Any] | None",
    samples: list[InspectedExample],
) -> InspectedRecord:
    number = part.first_record + parse_row_id(row_id)[1]
    where = f"{part.url}, record {number}" if record is None else ""
    return InspectedRecord(
        dataset=dataset,
        row_id=row_id,
        source=where if record is None else console.format_source_line(part.url, part.reader, record.line),
        raw=b"" if record is None else record.raw,
        row=row,
        rejected=None if refused is None else (refused["stage"], refused["reason"], refused["detail"]),
        samples=tuple(samples),
    )


# ── Examples as stretches ──────────────────────────────────────────────────────────────────────────


def _read_example(example: Mapping[str, Any], encoder: Encoder) -> InspectedExample:
    removed = {
        "exchanges": example["exchanges_removed"],
        "reasoning": example["reasoning_removed"],
        "tokens": example["tokens_cut"],
    }
    weights, kinds = example.get(WEIGHT_COLUMN, ()), list_token_kinds(example)
    return InspectedExample(
        example_id=example["example_id"],
        original_tokens=example["original_tokens"],
        tokens=example["tokens"],
        trained_tokens=example["trained_tokens"],
        removed={stage: count for stage, count in removed.items() if count},
        spans=tuple(
            span
            for begin, end in pairwise(accumulate(example.get("side_lengths", [example["tokens"]]), initial=0))
            for span in split_by_class(example["input_ids"][begin:end], kinds[begin:end], encoder)
        ),
        weights=count_tokens_by_weight(pa.array(weights, pa.float32())) if weights else {},
        row_ids=tuple(example["row_ids"]),
        removed_messages=None if example["messages_removed"] else (),
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
    """Return the records datasets of a recipe, whose examples are planned, or only the named one."""
    known = [name for name, one in project.recipe.datasets.items() if one.format.PLANS_EXAMPLES]
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
                plan = require_joint_kind(context.dataset.format).plan_examples(context, loaded, path)
                yield DatasetTablePlan(name, plan)
            except ContextOverflowError as error:
                yield DatasetTablePlan(name, None, str(error))


def advise_on_columns(project: Project, dataset: str | None = None) -> Iterator[DatasetAdvice]:
    """Yield advice on every column that can group records, for each records dataset or only the named one."""
    for name in list_table_datasets(project, dataset):
        with _open_table_trial(project, name, tokenized_examples.STAGE) as context:
            loaded, path = stored_tokenizers.open_recipe_tokenizer(context)
            yield require_joint_kind(context.dataset.format).advise(context, loaded, path)


def propose_contracts(project: Project, dataset: str | None = None) -> Iterator[tuple[str, str | None]]:
    """Yield the table contract proposed from the data of each records dataset, or only of the named one."""
    for name in list_table_datasets(project, dataset):
        with _open_table_trial(project, name, canonical_rows.STAGE) as context:
            taken = canonical_rows.list_taken_parts(context)
            yield name, require_joint_kind(context.dataset.format).propose_contract(context, taken)


@contextmanager
def _open_table_trial(project: Project, name: str, stage: StageDeclaration) -> Generator[StageContext]:
    """Lend a stage's context in a trial, with the output of its first input: an earlier build's, or made now."""
    earlier = catalog.find_stage(stage.inputs[0])
    key: manifest.StageKey = (project.recipe.name, name, earlier.name)
    output = next(forecast for forecast in forecast_steps(project) if forecast.step.key == key).manifest
    with open_trial(project, on_disk=True) as copy:
        if output is None:
            output = run_stages(project, copy, name, earlier)[key]
        else:
            for file in output.files("rows"):
                copy.store.write(file.path, project.store.content(file).to_pybytes())
        yield make_context(copy, name, stage, {key: output})
