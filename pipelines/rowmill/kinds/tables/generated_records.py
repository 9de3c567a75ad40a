"""Records that a trained model generates: parsed from files of text, or from the answers of a backend.

| file | a text is |
|---|---|
| `.txt` | the whole file (`sample_by: document`) |
| `.jsonl`, `.json`, `.parquet`, … | the `text` of a record, with `finish_reason` if the server reported one |
| the same | each of a record's `choices`, as a completions server answers |

A text continues the generation prompt, after BOS. It is closed by EOS, or by the `finish_reason` `stop`, with which
servers report that they removed the EOS.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.errors import ConfigError, GenerationError, join_choices
from rowmill.core.json import Json
from rowmill.core.stage_names import CANONICAL_ROWS, PARSED_RECORDS, TOKENIZED_EXAMPLES
from rowmill.core.storage import read_tables
from rowmill.kinds.base import DatasetOptions, KindContext
from rowmill.kinds.joint_rows import ParsedFiles
from rowmill.kinds.tables import generation
from rowmill.kinds.tables.comparison import compare_with_train
from rowmill.kinds.tables.generation import Generation, GenerationResult, Prefill, PromptText, TrainedModel
from rowmill.kinds.tables.options import RecordOptions, require_records
from rowmill.kinds.tables.parsing import (
    GeneratedTextSpec,
    Parser,
    PlacementColumns,
)
from rowmill.kinds.tables.partitions import NO_KEY, StoredRecords, group_sort_key
from rowmill.kinds.tables.schema import Record, RecordSchema, Value
from rowmill.kinds.tables.serialization import RecordDecoder, RecordProblem, Serialiser, read_json
from rowmill.parts.accounts import RejectLog, sort_by_count
from rowmill.parts.context import StageOutput
from rowmill.parts.functions import MappedParts, PartInputs, PartPlace, PartResult, part_function
from rowmill.schema import manifest
from rowmill.schema.counts import CountSet
from rowmill.schema.generated_counts import (
    GeneratedCounts,
    GenerationCounts,
    ParsedTextCounts,
    SpanCounts,
    merge_span_counts,
)
from rowmill.schema.manifest import DisplayTable, File, Part, add_up_counts
from rowmill.schema.rows import Rejected
from rowmill.sources import Files, FileScan
from rowmill.sources.files import choose_file_format
from rowmill.sources.reading import load_scans
from rowmill.tokenization import stored_tokenizers
from rowmill.tokenization.tokenizer import Encoder

PARSING_VERSION = 6
"""Increase it when any text may give other records, or they are counted differently."""

PARSED = make_required_schema(stage=pa.string(), text_id=pa.string(), number=pa.int32(), record=pa.string())
"""A part of `parsed_records`, or of `generated_series`: records in the order of their text, as lossless JSON."""


@dataclass(frozen=True, slots=True)
class ParseInputs(PartInputs):
    """A part of a file to parse."""

    scan_version: int
    part: sources.SourcePart
    meant: GeneratedTextSpec
    base: Path = field(compare=False)

    @property
    def input_rows(self) -> int:
        """Texts of the part."""
        return self.part.records

    @property
    def input_bytes(self) -> int:
        return self.part.length


@lru_cache(maxsize=2)
def _open_parser(meant: GeneratedTextSpec) -> tuple[Parser, Serialiser]:
    """Open parser and serializer, once per worker."""
    return Parser(meant), Serialiser(meant.schema, special_tokens=())


def read_texts(part: sources.SourcePart, base: Path, log: RejectLog) -> Iterator[tuple[str, str, bool]]:
    """Yield the id of each text of a part, the text, and whether EOS closed it; reject records that hold none."""
    if sources.find_file_format(part.reader).has_documents:
        # Invalid characters are replaced, so that they do not lose the other records.
        [line] = sources.read_part_bytes(part, base).split(b"\n")[:1]
        yield f"{part.part_id}:0", json.loads(line.decode("utf-8", "replace"))["text"], False
        return
    for record in sources.read_records(part, base):
        name = f"{part.part_id}:{record.number}"
        if record.value is None:
            assert record.rejected is not None
            log.add(name, record.rejected, record.raw)
            continue
        choices = record.value.get("choices")
        entries: list[Json] = choices if isinstance(choices, list) else [record.value]
        for number, entry in enumerate(entries):
            text_id = f"{name}.{number}" if isinstance(choices, list) else name
            text = entry.get("text") if type(entry) is dict else None
            if isinstance(text, str):
                yield text_id, text, entry.get("finish_reason") == "stop"
            else:
                log.add(text_id, Rejected("missing_field", "neither text nor choices with a text each"), record.raw)


@part_function(version=2)
def parse_texts(inputs: ParseInputs, place: PartPlace) -> PartResult:
    """Parse the texts of a part, and write records and rejects."""
    parser, write = _open_parser(inputs.meant)
    log = RejectLog(PARSED_RECORDS)
    ids, numbers, lines = list[str](), list[int](), list[str]()
    reports: list[SpanCounts] = []
    for text_id, text, is_closed in read_texts(inputs.part, inputs.base, log):
        parsed = parser(text, open_at_start=True, closed_at_end=is_closed)
        reports.append(parsed.report)
        ids += [text_id] * len(parsed.records)
        numbers += range(len(parsed.records))
        lines += write_records(parsed.records, write)
        for number, span in enumerate(one for one in parsed.spans if one.kind == "invalid"):
            raw = text[span.start : span.end].encode("utf-8", "surrogatepass")
            log.add(f"{text_id}#{number}", Rejected(span.reason, span.column), raw)
    report = merge_span_counts(reports)
    counts = (
        GeneratedCounts(kept=report.valid, reasons=log.counts(), samples_of_rejects=log.find_samples()),
        ParsedTextCounts(texts=len(reports), items_by_class=report.items, characters_by_class=report.characters),
    )
    return PartResult(save_records(place, log, ids, numbers, lines), counts=counts)


def write_records(records: Sequence[Record], write: Serialiser) -> list[str]:
    """Return accepted records as lossless JSON."""
    lines: list[str] = []
    for record in records:
        line = write(record)
        assert isinstance(line, str), "a decoded record can be serialized"
        lines.append(line.removesuffix("\n"))
    return lines


def save_records(
    place: PartPlace, log: RejectLog, ids: list[str], numbers: Sequence[int], lines: list[str]
) -> dict[str, File]:
    """Write a part's records, each with its text's id and its number there, and the rejects."""
    table = pa.table([[log.stage] * len(ids), ids, pa.array(numbers, pa.int32()), lines], schema=PARSED)
    return {"records": place.write("records", table), "rejects": place.write("rejects", log.table())}


def get_generation_options(context: KindContext) -> tuple[RecordOptions, Generation]:
    """Return the dataset's records options and generation options."""
    form = require_records(context.dataset)
    assert form.generation is not None
    return form, form.generation


def expected_texts(context: KindContext) -> GeneratedTextSpec:
    """Return the expected form of the dataset's generated texts, as its `tokenized_examples` recorded it."""
    form, generation = get_generation_options(context)
    made = context.input(TOKENIZED_EXAMPLES)
    table, examples = StoredRecords.load(made), StoredRecords.load_examples(made)
    known = table.schema.names
    for name in (*form.group_columns, *([] if form.order_column is None else [form.order_column])):
        if name not in known:
            raise ConfigError(
                f"datasets.{context.dataset_name}.format: column {name!r} is not in the table that the model was "
                f"trained on; it has {join_choices(known)}; name one of them, or build and train again"
            )
    # The recipe's interval, else that of the data.
    seconds = form.time_series.timestamp_interval_seconds
    interval = table.interval_seconds if seconds is None else str(seconds)
    exact = None if interval is None else Decimal(interval)
    return GeneratedTextSpec(
        schema=table.schema,
        mode=table.mode,
        wire=examples.wire,
        bos=examples.frame["bos_text"],
        eos=examples.frame["eos_text"],
        place=PlacementColumns(
            form.group_columns,
            form.order_column,
            table.sort_key,
            int(exact) if exact is not None and exact % 1 == 0 else exact,
        ),
        validation=generation.validation,
    )


# ── All texts of a dataset ─────────────────────────────────────────────────────────────────────────


FOLDER = "generated"
"""Default folder of generated texts in the project; `generation.text_urls` replaces it."""


def scan_generated_texts(context: KindContext) -> list[FileScan]:
    """Scan the files of generated text; there may be none in the default folder."""
    _, generation = get_generation_options(context)
    chosen = generation.text_urls
    if chosen is None:
        folder = f"{FOLDER}/{context.key[0]}/{context.dataset_name}/"
        at = context.base / folder
        if not (at.is_dir() and any(choose_file_format(path.name) for path in at.rglob("*") if path.is_file())):
            return []
        chosen = [folder]
    earlier = load_scans(manifest.load_current_if_intact(context.store, context.key))
    stage = sources.StoreStager(context.store, f"{context.folder}/staged")
    return scan_text_urls(chosen, context.base, stage, earlier)


def scan_text_urls(
    chosen: Sequence[str], base: Path, stage: sources.ContentStager, known: Sequence[FileScan]
) -> list[FileScan]:
    """Read files of generated text once."""
    try:
        files = Files(train_urls=list(chosen), sample_by="document")
    except ValueError as error:
        raise ConfigError(f"generation.text_urls: {error}") from None
    return sources.scan_source(files, base, stage, {one.url: one for one in known})


def parse_parts(context: KindContext, scans: Sequence[FileScan]) -> MappedParts:
    """Parse the texts of files, a part per part of them; a text file has one part."""
    meant = expected_texts(context)
    parts = [part for scan in scans for part in scan.parts]
    return context.map(parse_texts, [ParseInputs(sources.SCAN_VERSION, part, meant, context.base) for part in parts])


def make_parsed_records(context: KindContext, scans: Sequence[FileScan]) -> StageOutput:
    """Parse all texts."""
    parsed = parse_parts(context, scans)
    made = parsed.parts
    beside = compare_with_train(context, made)
    counts = add_up_counts(made, GeneratedCounts(), ParsedTextCounts(files=len(scans)), *beside.counts)
    generated = counts.get(GeneratedCounts)
    return StageOutput(
        parts=made,
        counts=counts,
        ledger=generated.list_ledger(),
        tables={"classes": tabulate_classes(counts.get(ParsedTextCounts).report())} | beside.tables,
        samples={
            "exact_copies": beside.samples,
            "valid_fraction": tuple(chain.from_iterable(generated.samples_of_rejects.values()))[:10],
        },
        schema=tuple((field.name, str(field.type)) for field in PARSED),
        details={"scans": [scan.to_json() for scan in scans]},
        parts_reused=parsed.reused,
        rows_made=parsed.rows_made,
    )


def tabulate_classes(report: SpanCounts) -> DisplayTable:
    """Return the table of a page: items and characters by class, in descending order."""
    lines = [(name, count, report.characters.get(name, 0)) for name, count in report.items.items()]
    return DisplayTable(("class", "items", "characters"), tuple(sorted(lines, key=lambda one: (-one[1], one[0]))))


def parse_files(context: KindContext, urls: Sequence[str]) -> ParsedFiles:
    """Parse the texts of some files as `parsed_records` does."""
    parts = parse_parts(
        context, scan_text_urls(urls, context.base, sources.StoreStager(context.store, "staged"), ())
    ).parts
    records = [
        str(text)
        for part in parts
        for text in context.store.table(part.files["records"], ["record"]).column(0).to_pylist()
    ]
    counts = add_up_counts(parts)
    texts = counts.get(ParsedTextCounts)
    report = texts.report()
    return ParsedFiles(
        report=report,
        texts=texts.texts,
        unreadable=counts.get(GeneratedCounts).rejected - report.invalid,
        records=records,
        table=tabulate_classes(report),
    )


GENERATION_VERSION = 4
"""Increase it when requests to the same model, the parsing of its answers, or what is counted of them, change."""

UNUSED_REASONS = frozenset({"not_chosen", "past_stop", "past_bound", "series_incomplete"})
"""Reasons that do not mean an invalid object: another sample was chosen, or the series had ended or failed."""


def load_trained_model(context: KindContext) -> TrainedModel:
    """Return the model's training setup."""
    meant = expected_texts(context)
    examples = StoredRecords.load_examples(context.input(TOKENIZED_EXAMPLES))
    frame = examples.frame
    encoder = Encoder(stored_tokenizers.open_recipe_tokenizer(context)[0])
    return TrainedModel(
        **{one.name: getattr(meant, one.name) for one in fields(meant)},
        prompt=PromptText(frame["prompt_text"] + frame["bos_text"], (*frame["prompt_ids"], frame["bos_id"])),
        special_tokens=tuple(frame["special_tokens"]),
        max_seq_length=context.limit,
        longest_example=examples.longest_example,
        longest_group=examples.longest_group,
        encode=lambda text: encoder.encode_continuation_ids([text])[0].tolist(),
    )


def make_generated_series(context: KindContext) -> StageOutput:
    """Generate with the backend, and store the results."""
    trained = load_trained_model(context)
    result = _generate(context, trained)
    lines, count = write_records(result.records, Serialiser(trained.schema, special_tokens=())), len(result.records)
    log = RejectLog(context.stage)
    for number, item in enumerate(result.rejected):
        raw = item.text.encode("utf-8", "surrogatepass")
        log.add(f"{item.source}#{number}", Rejected(item.reason, item.column), raw)
    place = context.place(lines, log.row_ids, log.reasons)
    files = save_records(place, log, ["generated"] * count, range(count), lines)
    counted = _count_generated(result)
    part = Part(place.fingerprint, files, counts=counted.to_json())
    beside = compare_with_train(context, [part])
    tables = {"classes": DisplayTable(("class", "items"), tuple(sort_by_count(result.counts)))}
    if result.series:
        worst = sorted(result.series, key=lambda one: (one.status != "failed", one.source))[:30]
        shown = tuple((one.source, one.status, len(one.records), one.rounds, one.error[:200]) for one in worst)
        tables["series"] = DisplayTable(("series", "status", "records", "rounds", "last_error"), shown)
    return StageOutput(
        parts=[part],
        counts=add_up_counts([part], *beside.counts),
        ledger=counted.get(GeneratedCounts).list_ledger(),
        tables=tables | beside.tables,
        samples={
            "failed_series": tuple(series.source for series in result.series if series.status == "failed")[:10],
            "exact_copies": beside.samples,
        },
        schema=tuple((field.name, str(field.type)) for field in PARSED),
        card={"status": result.status},
        rows_made=count,
    )


def _generate(context: KindContext, trained: TrainedModel) -> GenerationResult:
    """Generate with the backend; raises GenerationError if nothing came of it."""
    form, options = get_generation_options(context)
    assert options.backend is not None
    completer = options.backend.open()
    if trained.mode == "sequential":
        result = generation.generate_series(
            completer, load_prefills(context, trained), model=trained, options=options,
            start=form.time_series.start_timestamp, stop=form.time_series.stop_timestamp, seed=context.recipe.seed,
            is_private=form.privacy.dp_enabled, where=f"datasets.{context.dataset_name}.format.time_series",
        )  # fmt: skip
    else:
        result = generation.generate_records(
            completer, model=trained, options=options, num_records=options.num_records, seed=context.recipe.seed
        )
    error = result.error or next((series.error for series in result.series if series.error), "")
    if result.status == "failed" and error:
        raise GenerationError(
            f"{'/'.join(context.key)}: nothing was generated; the backend's last error: {error}; check that it runs, "
            "and run the command again"
        )
    return result


def _count_generated(result: GenerationResult) -> CountSet:
    """Count the records, the rejected objects by reason, and the series."""
    count = len(result.records)
    reasons = {name.removeprefix("invalid:"): n for name, n in result.counts.items() if name.startswith("invalid:")}
    return CountSet.of(
        GeneratedCounts(kept=count, reasons=reasons),
        GenerationCounts(
            valid_objects=count,
            invalid_objects=sum(number for reason, number in reasons.items() if reason not in UNUSED_REASONS),
            series=len(result.series),
            unfinished_series=sum(series.status == "failed" for series in result.series),
            rounds=sum(series.rounds for series in result.series),
            is_empty=not result.series and result.status == "failed",
        ),
    )


def load_prefills(context: KindContext, model: TrainedModel) -> list[Prefill]:
    """Return the initial prefill of each training series.

    Under differential privacy, no prefills are stored, and only the number of series is taken from the data.
    """
    kept = context.input(TOKENIZED_EXAMPLES).files("prefill")
    if not kept:
        # By columns or by files; without groups there is one series.
        keys: set[str] = set()
        for part in context.inputs[(*context.dataset_key, CANONICAL_ROWS)].parts:
            table = context.store.table(part.files["rows"], ["group_key", "split"])
            groups = table.filter(pc.equal(table.column("split"), "train")).column("group_key")
            keys |= {key for key in groups.unique().to_pylist() if key is not None}
        return [Prefill({}, ())] * max(1, len(keys))
    order = model.place.order_column
    read = RecordDecoder(model.schema, wire=model.wire)
    found: list[Prefill] = []
    lines = [line for table in read_tables(context.store, kept) for line in table.to_pylist()]
    # A large table has a file per partition, each in the order of keys.
    for line in sorted(lines, key=lambda line: group_sort_key(line["group_key"])):
        record = read(read_json(line["records"][0]))
        assert not isinstance(record, RecordProblem), record
        key = {name: record[name] for name in model.place.group_columns}
        start, stop = (_parse_time(line[name], model.schema, order) for name in ("start", "stop"))
        # A group by columns is named by its key.
        name = "" if key or line["group_key"] == NO_KEY else line["group_key"]
        found.append(Prefill(key, tuple(line["records"]), start, stop, line["length"], name))
    return found


def _parse_time(text: str | None, schema: RecordSchema, column: str | None) -> Value:
    """Return a time of the training data as a value of its column."""
    if text is None or column is None:
        return None
    value = read_json(text)
    kind = schema.by_name[column].type
    if isinstance(value, str) and kind in {"integer", "float", "decimal", "duration"}:
        value = Decimal(value)
    read = RecordDecoder(RecordSchema((schema.by_name[column],)))({column: value})
    return None if isinstance(read, RecordProblem) else read[column]


# ── What decides these records ─────────────────────────────────────────────────────────────────────


def identify_parsed(dataset: DatasetOptions) -> dict[str, Any]:
    """Return the options of files and validation; the expected form of texts comes from the input."""
    form = require_records(dataset)
    assert form.generation is not None
    return {
        "versions": [PARSING_VERSION, sources.SCAN_VERSION],
        "text_urls": form.generation.text_urls,
        "validation": form.generation.validation.model_dump(mode="json"),
        "group_columns": form.group_columns,
        "order_column": form.order_column,
        "interval_seconds": form.time_series.timestamp_interval_seconds,
        "is_private": form.privacy.dp_enabled,
    }


def identify_generated(dataset: DatasetOptions, limit: int, seed: int) -> dict[str, Any]:
    """Return the options of generation; the backend's API key does not affect its answers."""
    form = require_records(dataset)
    assert form.generation is not None
    options = form.generation
    backend = None if options.backend is None else options.backend.model_dump(mode="json", exclude={"api_key_env"})
    return {
        "versions": [GENERATION_VERSION],
        "generation": options.model_dump(mode="json", exclude={"text_urls", "backend"}),
        "backend": backend,
        "time_series": form.time_series.model_dump(
            mode="json", include={"start_timestamp", "stop_timestamp", "timestamp_interval_seconds"}
        ),
        "group_columns": form.group_columns,
        "order_column": form.order_column,
        "is_private": form.privacy.dp_enabled,
        "limit": limit,
        "seed": seed,
    }
