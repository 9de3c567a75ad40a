"""Records generated with a dataset's trained model: continued series, or new groups and records."""

from collections import Counter
from decimal import Decimal

import pyarrow.compute as pc

from rowmill.core.errors import GenerationError
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.core.storage import read_tables
from rowmill.kinds.joint_rows import KindContext
from rowmill.kinds.tables import generated_comparison, generated_texts, generation
from rowmill.kinds.tables.backends import PromptText, open_backend
from rowmill.kinds.tables.generated_texts import (
    PARSED,
    AcceptedRecords,
    GeneratedTextSpec,
    expected_texts,
    get_generation_options,
)
from rowmill.kinds.tables.generation import GenerationResult, Prefill, TrainedModel
from rowmill.kinds.tables.row_index import NO_KEY, group_sort_key
from rowmill.kinds.tables.schema import RecordSchema, Value
from rowmill.kinds.tables.serialization import RecordDecoder, RecordProblem, Serialiser, read_json
from rowmill.parts.accounts import RejectLog
from rowmill.parts.context import StageOutput, compute_share
from rowmill.schema.facts import GeneratedSeriesFacts
from rowmill.schema.ledger import KEPT, REJECTED
from rowmill.schema.manifest import DisplayTable, Part
from rowmill.schema.rows import Rejected
from rowmill.tokenization import stored_tokenizers
from rowmill.tokenization.encoder import Encoder

VERSION = 3
"""Increase it when requests to the same model, or the parsing of its answers, change."""

UNUSED_REASONS = frozenset({"not_chosen", "past_stop", "past_bound", "series_incomplete"})
"""Reasons that do not mean an invalid object: another sample was chosen, or the series had ended or failed."""


def load_trained_model(context: KindContext) -> TrainedModel:
    """Return the model's training setup."""
    meant = expected_texts(context)
    recorded = context.input(TOKENIZED_EXAMPLES).details["records"]
    frame = recorded["frame"]
    encoder = Encoder(stored_tokenizers.open_recipe_tokenizer(context)[0])
    return TrainedModel(
        mode=meant.mode,
        schema=meant.record_schema,
        place=meant.place,
        prompt=PromptText(frame["prompt_text"] + frame["bos_text"], (*frame["prompt_ids"], frame["bos_id"])),
        bos=meant.bos,
        eos=meant.eos,
        special_tokens=tuple(frame["special_tokens"]),
        wire=meant.wire,
        max_seq_length=context.limit,
        longest_example=recorded["longest_example"],
        longest_group=recorded["longest_group"],
        encode=lambda text: encoder.encode_continuation_ids([text])[0].tolist(),
    )


def make_generated_series(context: KindContext) -> StageOutput:
    """Generate with the backend, and store the results.

    Raises
    ------
    GenerationError
        If nothing was generated because the backend failed.

    """
    form, options = get_generation_options(context)
    assert options.backend is not None
    trained = load_trained_model(context)
    completer = open_backend(options.backend)
    if trained.mode == "sequential":
        result = generation.generate_series(
            completer, load_prefills(context, trained), model=trained, options=options,
            start=form.time_series.start_timestamp, stop=form.time_series.stop_timestamp, seed=context.seed,
            is_private=form.privacy.dp_enabled, where=f"datasets.{context.dataset_name}.format.time_series",
        )  # fmt: skip
    else:
        result = generation.generate_records(
            completer, model=trained, options=options, num_records=options.num_records, seed=context.seed
        )
    error = result.error or next((series.error for series in result.series if series.error), "")
    if result.status == "failed" and error:
        raise GenerationError(
            f"{'/'.join(context.key)}: nothing was generated; the backend's last error: {error}; check that it runs, "
            "and run the command again"
        )
    return _build_series_output(context, expected_texts(context), result)


# ── Where series begin ─────────────────────────────────────────────────────────────────────────────


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


# ── What is kept ───────────────────────────────────────────────────────────────────────────────────


def _build_series_output(context: KindContext, meant: GeneratedTextSpec, result: GenerationResult) -> StageOutput:
    accepted, log = AcceptedRecords(), RejectLog(context.stage)
    accepted.add("generated", result.records, Serialiser(meant.record_schema, special_tokens=()))
    for number, item in enumerate(result.rejected):
        raw = item.text.encode("utf-8", "surrogatepass")
        log.add(f"{item.source}#{number}", Rejected(item.reason, item.column), raw)
    statuses = Counter(series.status for series in result.series)
    place = context.place(accepted.texts, log.row_ids, log.reasons)
    content = generated_texts.save_records(place, accepted, log, {"kept": len(result.records)})
    part = Part(place.fingerprint, content.files, content.facts)
    reasons = {name.removeprefix("invalid:"): n for name, n in result.counts.items() if name.startswith("invalid:")}
    bad = sum(count for reason, count in reasons.items() if reason not in UNUSED_REASONS)
    beside = generated_comparison.compare_with_train(context, [part])
    return StageOutput(
        parts=[part],
        facts=GeneratedSeriesFacts(
            valid_fraction=compute_share(len(result.records), len(result.records) + bad),
            # Without series, 1 if nothing was generated.
            failed_series=compute_share(statuses["failed"], len(result.series))
            if result.series
            else float(result.status == "failed"),
            series=len(result.series),
            kept=len(result.records),
            rejected=sum(reasons.values()),
            rounds=sum(series.rounds for series in result.series),
            **beside.facts,
        ),
        ledger=[(KEPT, "", len(result.records)), *((REJECTED, reason, count) for reason, count in reasons.items())],
        tables=_build_series_tables(result) | beside.tables,
        samples={
            "failed_series": tuple(series.source for series in result.series if series.status == "failed")[:10],
            "exact_copies": beside.samples,
        },
        schema=tuple((field.name, str(field.type)) for field in PARSED),
        card={"status": result.status},
        rows_made=len(result.records),
    )


def _build_series_tables(result: GenerationResult) -> dict[str, DisplayTable]:
    classes = DisplayTable(("class", "items"), tuple(sorted(result.counts.items(), key=lambda one: (-one[1], one[0]))))
    if not result.series:
        return {"classes": classes}
    worst = sorted(result.series, key=lambda one: (one.status != "failed", one.source))
    lines = tuple((one.source, one.status, one.records, one.rounds, one.error[:200]) for one in worst[:30])
    return {"classes": classes, "series": DisplayTable(("series", "status", "records", "rounds", "last_error"), lines)}
