"""Examples of a table: each part of rows is encoded once, then all partitions are planned, then examples are written.

    parts of rows ─encode─► ids, lengths ─► partition ─plan─┬─► a file per slice of examples    for a part of examples
                                                            ├─► prefills of series              for generation
                                                            ├─► states of rows not kept         for a part's ledger
                                                            └─► counts, sizes, overflows        added up: stop if any

Of the whole table are decided: the schema and with it assembly and limits, the number of partitions, whether everything
fits, the size of a sample and each partition's share of it. Of a partition alone: the order of its groups or records,
the examples that these form, and the parts that these are written in. The calling process holds no number per row: of a
part of examples it knows the fingerprint and the size.

The ids of a part are stored under the digest of its texts and tokenizer, so a part is encoded only once. A part of
examples is stored under the digest of its content; one new row changes the shuffle of its own partition and most of the
examples of this, which are then assembled from the stored ids.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.errors import ConfigError
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.core.storage import File, Store
from rowmill.kinds.base import DatasetOptions, KindContext
from rowmill.kinds.tables import record_tokens
from rowmill.kinds.tables.counts import EncodedRecordDetails, PartitionPlanDetails, PlanSlice, TableExampleCounts
from rowmill.kinds.tables.options import require_records
from rowmill.kinds.tables.partition_plan import (
    DELIMITERS_PER_UNIT,
    PLAN_FACTS,
    ExampleLimits,
    OverflowFacts,
    PlannedSplit,
    PlanRequest,
    SplitFacts,
    TablePlan,
    count_train_records,
    find_oversized,
    name_overflows,
    plan_splits,
    require_fitting_entries,
    require_record_room,
    summarize_split,
)
from rowmill.kinds.tables.partitions import (
    ObservedTable,
    PartitionRows,
    RowPart,
    StoredExamples,
    StoredRecords,
    TablePartition,
    load_observed_table,
    partition_rows,
    read_partition,
    read_row_column,
    share_sample,
    split_block_keys,
)
from rowmill.kinds.tables.prompt import PromptFrame, build_prompt_frame
from rowmill.kinds.tables.record_tokens import (
    RECORD_EXAMPLES,
    VERSION,
    BuildExamplesInputs,
    EncodeInputs,
    cut_slices,
    list_prefills,
)
from rowmill.kinds.tables.schema import RecordSchema
from rowmill.parts.accounts import RejectLog, describe_rejects, row_as_bytes, sort_by_count, write_accounts
from rowmill.parts.context import StageOutput, open_host_scratch
from rowmill.parts.functions import (
    MappedParts,
    PartInputs,
    PartPlace,
    PartResult,
    RowFileInputs,
    identify,
    part_function,
)
from rowmill.schema.counts import CountSet
from rowmill.schema.example_counts import ExampleCounts, PromptCounts
from rowmill.schema.ledger import sum_counts
from rowmill.schema.manifest import DisplayTable, Histogram, Part, add_up_counts
from rowmill.schema.rows import SPLITS, Rejected
from rowmill.tokenization.reference_sample import divide_minimum
from rowmill.tokenization.stored_tokenizers import open_encoder
from rowmill.tokenization.tokenizer import TOKENIZATION_VERSION, LoadedTokenizer

ROW_STATES = ("kept", "not_sampled", "record_overflow", "group_overflow", "unserialisable", "control_token_in_content")
"""States of rows, indexed by plans and ledger tasks; from the third on, reject reasons."""
_KEPT, _NOT_SAMPLED = 0, 1

_STATE_SCHEMA = make_required_schema(part=pa.int32(), place=pa.int32(), state=pa.int8(), detail=pa.string())
"""A row that is not kept: row `place` (a stored name) of part `part` of its partition. In the order of the source."""


@dataclass(frozen=True, slots=True)
class PartStates:
    """States of a part's rows that are not kept: a digest of them, their file, and the part's number in this file."""

    digest: str
    file: File = field(compare=False)
    number: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class LedgerInputs(RowFileInputs):
    """A part of rows and of their ids after planning, with the states of those rows that are not kept."""

    encoded: Part
    partitions: tuple[PartStates, ...]


@part_function(version=2)
def account_part(inputs: LedgerInputs, place: PartPlace) -> PartResult:
    """Write a part's ledger and rejects."""
    store = place.store
    # Indexes of `ROW_STATES`: kept, left out, or a reject reason, whose details are by row.
    states, details = np.zeros(inputs.rows.rows, np.int8), dict[int, str]()
    for partition in inputs.partitions:
        table = store.table(partition.file)
        begin, end = np.searchsorted(table.column("part").to_numpy(), (partition.number, partition.number + 1)).tolist()
        of_part = table.slice(begin, end - begin)
        row_in_part = of_part.column("place").to_numpy()
        states[row_in_part] = of_part.column("state").to_numpy()
        texts = zip(row_in_part.tolist(), of_part.column("detail").to_pylist(), strict=True)
        details |= {at: text for at, text in texts if text}
    for at, reason, detail in inputs.encoded.get_details(EncodedRecordDetails).rejects:
        states[at] = ROW_STATES.index(reason)
        details[at] = detail
    row_ids: list[str] = store.table(inputs.rows, ["row_id"]).column(0).to_pylist()
    log = RejectLog(TOKENIZED_EXAMPLES)
    refused = np.flatnonzero(states > _NOT_SAMPLED).tolist()
    raw = store.table(inputs.rows).take(pa.array(refused, pa.int64())).to_pylist() if refused else []
    for at, row in zip(refused, raw, strict=True):
        reason = ROW_STATES[int(states[at])]
        log.add(row_ids[at], Rejected(reason, details.get(at, "")), row_as_bytes(row))
    shown = [row_ids[at] for at in np.flatnonzero(states == _KEPT).tolist()]
    left_out = [row_ids[at] for at in np.flatnonzero(states == _NOT_SAMPLED).tolist()]
    kept = pa.chunked_array([shown], pa.string())
    files = {
        "tokens": inputs.encoded.files["tokens"],
        **write_accounts(place, kept, log, left_out, ROW_STATES[_NOT_SAMPLED]),
    }
    of_rows = ExampleCounts(
        rows=len(row_ids),
        kept=len(shown),
        reasons=log.counts(),
        left_out={ROW_STATES[_NOT_SAMPLED]: len(left_out)} if left_out else {},
        samples_of_rejects=log.find_samples(),
    )
    return PartResult(files, counts=(of_rows, *CountSet.parse(inputs.encoded.counts).by_class.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInputs(PartInputs):
    """A partition to plan."""

    partition: TablePartition

    @property
    def input_bytes(self) -> int:
        return self.partition.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlanInputs(PartitionInputs):
    """A partition to plan with its share of the sample, and what its prefills are written with."""

    request: PlanRequest
    schema: RecordSchema
    frame: PromptFrame


@part_function(version=3)
def plan_partition_part(inputs: PartitionPlanInputs, place: PartPlace) -> PartResult:
    """Plan a partition, and write its slices, the states of its rows, and the prefills of its series."""
    parts, request = inputs.partition.parts, inputs.request
    rows = read_partition(place.store, inputs.partition, request.form, request.sort_key)
    read_column = partial(read_row_column, place.store, [part.rows for part in parts], rows.index)
    oversized_rows, entry_first_row = find_oversized(request, rows)
    overflows = tuple(name_overflows(request, rows, oversized_rows, entry_first_row, read_column))
    splits = [split for split in plan_splits(request, rows, oversized_rows) if len(split.records.rows)]
    files: dict[str, File] = {}
    slices: list[PlanSlice] = []
    cut = cut_slices(splits, request.form.mode, rows.index, parts, inputs.frame)
    for number, (described, planned) in enumerate(cut):
        files[described.fingerprint] = place.write(f"slice-{number:05d}", planned)
        slices.append(described)
    texts = np.repeat(np.array([one.description for one in overflows], object), np.diff(entry_first_row))
    states = _list_states(request, rows, splits, oversized_rows, texts)
    files["states"] = place.write("states", states)
    prefills = list_prefills(request.form, inputs.schema, inputs.frame, splits, rows.index, read_column)
    if prefills is not None:
        files["prefill"] = place.write("prefill", prefills)
    facts = tuple(summarize_split(request.form.mode, split) for split in splits), OverflowFacts.of(overflows)
    details = PartitionPlanDetails(
        plan=PLAN_FACTS.dump_python(facts, mode="json"), slices=tuple(slices), states=_identify_states(states)
    )
    return PartResult(files, details=(details,))


def _list_states(
    request: PlanRequest, rows: PartitionRows, splits: Sequence[PlannedSplit], oversized_rows: Ints, texts: NDArray[Any]
) -> pa.Table:
    """Return the states of the rows that the plan leaves out, and `texts` of those that are too large.

    Parts are numbered as in the index, so that the file does not depend on other partitions.
    """
    # Rows without tokens were rejected as they were encoded, and have their state from there.
    is_left_out = rows.tokens >= 0
    for split in splits:
        is_left_out[split.records.rows[split.order.records]] = False
    left_out = np.flatnonzero(is_left_out)
    states, details = np.full(len(left_out), _NOT_SAMPLED, np.int8), np.full(len(left_out), "", object)
    oversized = np.searchsorted(left_out, oversized_rows)
    states[oversized] = ROW_STATES.index(f"{request.oversized_kind}_overflow")
    details[oversized] = texts
    parts, row_in_part = rows.index.locate_rows(left_out)
    return pa.table([parts, row_in_part, states, details], schema=_STATE_SCHEMA)


def _identify_states(states: pa.Table) -> dict[str, str]:
    """Return a digest of the states of each part, by the part's number."""
    parts, begins = np.unique(states.column("part").to_numpy(), return_index=True)
    borders = pairwise([*begins.tolist(), len(states)])
    return {
        str(part): str(identify(states.slice(begin, end - begin).drop_columns("part")))
        for part, (begin, end) in zip(parts.tolist(), borders, strict=True)
    }


@dataclass(frozen=True, slots=True)
class EncodedTable:
    """A table with the ids of its records, and what its examples are planned with."""

    observed: ObservedTable
    frame: PromptFrame
    request: PlanRequest
    encoded: MappedParts
    parts: list[RowPart]


def encode_table(context: KindContext, tokenizer: LoadedTokenizer, path: str) -> EncodedTable:
    """Choose the prompt of a table, and encode the records of each part of its rows."""
    observed = load_observed_table(context.input(CANONICAL_ROWS))
    form, card = require_records(context.dataset), tokenizer.card
    encoder = open_encoder(context.store.root, path)
    frame = build_prompt_frame(
        observed.schema,
        replace(card, vocab_size=context.recipe.vocab_size or card.vocab_size),
        lambda text: encoder.reference.encode(text, add_special_tokens=False).ids,
        form,
        tokenizer=context.tokenizer_choice.name,
        where=f"datasets.{context.dataset_name}.format",
    )
    rows = context.input(CANONICAL_ROWS).files("rows")
    encoded = context.map(
        record_tokens.encode_part,
        [
            EncodeInputs(
                versions=(VERSION, TOKENIZATION_VERSION),
                tokenizer_digest=card.digest,
                rows=file,
                schema=orjson.dumps(observed.schema.to_json()).decode(),
                wire=form.codec.wire,
                special_tokens=frame.special_tokens,
                tokenizer=path,
                min_compared_chars=divide_minimum(len(rows)),
            )
            for file in rows
        ],
    )
    parts = [RowPart(file, ids.files["tokens"], ids.fingerprint) for file, ids in zip(rows, encoded.parts, strict=True)]
    return EncodedTable(observed, frame, make_request(context, observed, len(frame.prompt_ids)), encoded, parts)


def make_request(context: KindContext, observed: ObservedTable, prompt_tokens: int) -> PlanRequest:
    """Return what decides the plan of a dataset; what is generated later decides nothing."""
    form = require_records(context.dataset).model_copy(update={"generation": None})
    limits = ExampleLimits(context.limit, prompt_tokens, form.cap)
    return PlanRequest(context.dataset_name or "", context.recipe.seed, form, observed.sort_key, limits, form.wanted)


def count_fitting(
    context: KindContext, requests: Sequence[PlanRequest], partitions: Sequence[TablePartition]
) -> list[tuple[int, ...]]:
    """Return for each request, which differ in their limits, the train records of every partition that fit."""
    count, size = partial(_count_partition, context.store, requests), sum(own.bytes for own in partitions)
    return [*zip(*context.pool.map(count, partitions, size_bytes=size), strict=True)]


def _count_partition(store: Store, requests: Sequence[PlanRequest], partition: TablePartition) -> list[int]:
    rows = read_partition(store, partition, requests[0].form, requests[0].sort_key)
    return [count_train_records(request, rows) for request in requests]


def _plan_partitions(context: KindContext, table: EncodedTable, partitions: Sequence[TablePartition]) -> list[Part]:
    """Plan the partitions of a table, each in a task of its own."""
    request = table.request
    require_record_room(request.dataset, request.form, request.limits, _name_widest(table.observed.schema))
    shares: Sequence[int | None] = [None] * len(partitions)
    if request.wanted_records is not None:
        [fitting] = count_fitting(context, [request], partitions)
        shares = share_sample(request.wanted_records, fitting)
        if request.form.privacy.dp_enabled and request.wanted_records > sum(fitting):
            raise ConfigError(
                f"datasets.{request.dataset}.format.training.num_input_records_to_sample: {request.wanted_records} of "
                f"{sum(fitting)} train records under privacy.dp_enabled, where each record may be shown only once; "
                "lower it"
            )
    tasks = [
        PartitionPlanInputs(
            partition=partition,
            request=replace(request, wanted_records=share),
            schema=table.observed.schema,
            frame=table.frame,
        )
        for partition, share in zip(partitions, shares, strict=True)
    ]
    return context.map(plan_partition_part, tasks).parts


def _add_up_plans(table: EncodedTable, planned: Sequence[Part]) -> TablePlan:
    """Add up the plans of partitions, and refuse a table of which something does not fit."""
    form, limits, frame, sort_key = table.request.form, table.request.limits, table.frame, table.observed.sort_key
    counted = [PLAN_FACTS.validate_python(part.get_details(PartitionPlanDetails).plan) for part in planned]
    overflows = OverflowFacts.join([own for _, own in counted])
    require_fitting_entries(table.request.dataset, form, overflows)
    by_split = [[own for splits, _ in counted for own in splits if own.split == split] for split in SPLITS]
    described = {
        "mode": form.mode, "bos_id": frame.bos_id, "bos": frame.bos_text, "eos_id": frame.eos_id, "eos": frame.eos_text,
        "prompt": limits.prompt_tokens, "limit": limits.example_tokens, "records": limits.record_room,
        "cap": limits.cap, "wanted": form.wanted, "prompt_text": frame.prompt_text,
        "order": None if sort_key is None else sort_key.name,
        "privacy_unit": ("group" if form.mode == "grouped" else "record") if form.privacy.dp_enabled else None,
        "widest_names": _name_widest(table.observed.schema),
    }  # fmt: skip
    joined = tuple(SplitFacts.join(own) for own in by_split if own)
    changed = add_up_counts(table.encoded.parts).get(TableExampleCounts).changed_by_wire
    return TablePlan(form.mode, limits, described, joined, overflows, changed)


def _name_widest(schema: RecordSchema) -> str:
    return ", ".join(sorted(schema.names, key=lambda name: -len(name))[:5])


def _list_ledgers(
    table: EncodedTable, partitions: Sequence[TablePartition], planned: Sequence[Part]
) -> list[LedgerInputs]:
    """Return the tasks that write the ledger of each part, with its rows' states in the partitions that have some."""
    states: defaultdict[int, list[PartStates]] = defaultdict(list)
    for partition, part in zip(partitions, planned, strict=True):
        for number, digest in part.get_details(PartitionPlanDetails).states.items():
            states[partition.first + int(number)].append(PartStates(digest, part.files["states"], int(number)))
    return [
        LedgerInputs(rows=part.rows, encoded=ids, partitions=tuple(states.get(number, ())))
        for number, (part, ids) in enumerate(zip(table.parts, table.encoded.parts, strict=True))
    ]


def identify_examples(dataset: DatasetOptions, limit: int, seed: int, vocab_size: int | None) -> dict[str, Any]:
    """Return the options that decide examples; those of generation do not."""
    return {
        "versions": [VERSION, TOKENIZATION_VERSION, split_block_keys.version],
        "format": require_records(dataset).model_dump(mode="json", exclude={"generation"}),
        "limit": limit,
        "seed": seed,
        "vocab_size": vocab_size,
    }


def plan_table(context: KindContext, tokenizer: LoadedTokenizer, path: str) -> TablePlan:
    """Plan the examples without making them."""
    table = encode_table(context, tokenizer, path)
    return _add_up_plans(table, _plan_partitions(context, table, partition_rows(context, table.parts)))


def make_table_examples(context: KindContext, tokenizer: LoadedTokenizer, path: str) -> StageOutput:
    """Encode, plan, and write examples; if planning fails, no examples are written."""
    table = encode_table(context, tokenizer, path)
    partitions = partition_rows(context, table.parts)
    planned = _plan_partitions(context, table, partitions)
    plan = _add_up_plans(table, planned)
    vocab_size = context.recipe.vocab_size or tokenizer.card.vocab_size
    with open_host_scratch(context) as scratch:
        accounts = context.map(account_part, _list_ledgers(table, partitions, planned)).parts
        tasks = [
            BuildExamplesInputs(
                slice_fingerprint=own.fingerprint,
                split=own.split,
                vocab_size=vocab_size,
                records=own.records,
                tokens=own.tokens,
                sources=partition.parts,
                plan_file=part.files[own.fingerprint],
                frame=table.frame,
                scratch=scratch,
            )
            for partition, part in zip(partitions, planned, strict=True)
            for own in (PlanSlice(*fields) for fields in part.get_details(PartitionPlanDetails).slices)
        ]
        built = context.map(record_tokens.build_part, tasks)
    prefills = [
        Part(part.fingerprint, {"prefill": part.files["prefill"]}) for part in planned if "prefill" in part.files
    ]
    output = _build_output(context, table, plan, accounts, built.parts)
    return replace(
        output,
        parts=[*output.parts, *prefills],
        card={**tokenizer.card.describe(), "template_digest": None},
        parts_reused=built.reused,
        rows_made=table.encoded.rows_made,
    )


def _build_output(
    context: KindContext, table: EncodedTable, plan: TablePlan, accounts: list[Part], examples: list[Part]
) -> StageOutput:
    """Return the output of a table's rows (`accounts`) and examples, without what is known of the maps alone."""
    counts = _count_output(table, plan, [*accounts, *examples])
    of_rows = counts.get(ExampleCounts)
    options = [(name, value) for name, value in plan.options.items() if value is not None and name != "widest_names"]
    tables = {
        "plan": plan.table(),
        "options": DisplayTable(("option", "value"), tuple((name, str(value)) for name, value in options)),
        "rejects": DisplayTable(("reason", "rows"), tuple(sort_by_count(of_rows.reasons)[:30])),
    }
    overflow = [(one.kind, one.name, one.tokens, one.limit, one.widest) for one in plan.overflows.first]
    if overflow:
        tables["overflow"] = DisplayTable(("kind", "name", "tokens", "limit", "widest_column"), tuple(overflow))
    stored = StoredExamples(table.frame.to_json(), table.request.form.codec.wire, plan.options, **plan.longest)
    return StageOutput(
        parts=[*accounts, *examples],
        counts=counts,
        ledger=of_rows.list_ledger(),
        token_ledger=of_rows.list_token_ledger(),
        tables=tables,
        histograms=_draw_length_histograms(plan),
        samples={
            "rejects": describe_rejects(context, accounts, of_rows.count_refused()),
            "text_roundtrip": counts.get(TableExampleCounts).samples_of_altered.get("", ()),
        },
        schema=tuple((f.name, str(f.type)) for f in RECORD_EXAMPLES),
        details={
            "records": replace(StoredRecords.load(context.input(CANONICAL_ROWS)), examples=stored).to_json(),
        },
    )


def _count_output(table: EncodedTable, plan: TablePlan, parts: Sequence[Part]) -> CountSet:
    """Add up the counts of all parts, with the tokens of examples that the plan does not account for."""
    limits = plan.limits
    counts = add_up_counts(
        parts,
        PromptCounts(prompts_compared=1, prompts_that_differ=0 if table.frame.is_parity else 1),
        TableExampleCounts(
            prompt_tokens=limits.prompt_tokens,
            limit=limits.example_tokens,
            record_room=limits.record_room,
            longest_example=plan.longest["longest_example"],
            longest_group=plan.longest["longest_group"],
        ),
    )
    tokens, planned = counts.get(ExampleCounts).tokens, sum(split.counts["tokens"] for split in plan.splits)
    # Prompts, delimiters, and records as often as they are shown.
    expected = sum(
        split.counts["examples"] * limits.prompt_tokens
        + split.counts["units"] * DELIMITERS_PER_UNIT
        + split.shown_tokens
        for split in plan.splits
    )
    return counts + CountSet.of(ExampleCounts(unaccounted_tokens=abs(tokens - planned) + abs(tokens - expected)))


def _draw_length_histograms(plan: TablePlan) -> dict[str, Histogram]:
    """Return histograms of the tokens of examples and of whole groups, with the limits of an example."""
    drawn: dict[str, Histogram] = {}
    of_example = ("example_tokens", "tokens per example", plan.limits.example_tokens)
    of_group = ("group_tokens", "tokens per group", plan.limits.record_room)
    for name, title, limit in (of_example, of_group) if plan.mode == "grouped" else (of_example,):
        sizes = sum_counts(split.sizes[name] for split in plan.splits)
        if sizes:
            top = max(*sizes, limit) + 1
            counts, edges = np.histogram([*sizes], bins=24, range=(0, top), weights=[*sizes.values()])
            bins = tuple(round(float(edge), 1) for edge in edges)
            drawn[name] = Histogram(title, "tokens", bins, tuple(int(count) for count in counts), float(limit))
    return drawn
