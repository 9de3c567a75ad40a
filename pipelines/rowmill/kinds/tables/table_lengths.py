"""Lengths of a table's examples: estimated from counts, measured, and planned again for other maximum lengths.

An example of records is complete or not made, and at another maximum length it would contain other records. So instead
of truncation, records that are too large for an example are counted, and a what-if plans all records at each length,
in the partitions of the build.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.core.storage import digest_json, read_tables
from rowmill.kinds.base import DatasetOptions, KindContext
from rowmill.kinds.joint_rows import DatasetAdvice
from rowmill.kinds.tables.counts import OverlongRecordCounts, TableExampleCounts
from rowmill.kinds.tables.options import require_records
from rowmill.kinds.tables.partition_plan import PlanRequest, find_oversized, plan_splits
from rowmill.kinds.tables.partitions import (
    RowPart,
    StoredRecords,
    TablePartition,
    load_observed_table,
    partition_rows,
    read_partition,
    share_sample,
)
from rowmill.kinds.tables.serialization import read_json
from rowmill.kinds.tables.size_estimates import advise_group_column, estimate_example
from rowmill.kinds.tables.table_examples import PartitionInputs, count_fitting, encode_table, make_request
from rowmill.packing.pack_plan import keep_examples_whole, measure_padded_room, plan_slices
from rowmill.parts.accounts import describe_rejects
from rowmill.parts.context import StageOutput
from rowmill.parts.functions import PartPlace, PartResult, part_function
from rowmill.schema import manifest
from rowmill.schema.counts import CountSet
from rowmill.schema.example_counts import ExampleCounts, JoinedExampleDetails
from rowmill.schema.ledger import REJECTED
from rowmill.schema.length_counts import LengthCounts
from rowmill.schema.manifest import DisplayTable, Manifest, Part, add_up_counts
from rowmill.schema.rows import SPLITS
from rowmill.stats.lengths import (
    choose_candidate_seq_lens,
    compute_length_quantiles,
    count_length_buckets,
    make_length_histogram,
    make_lengths_table,
)
from rowmill.tokenization.tokenizer import LoadedTokenizer

LENGTHS_VERSION = 1
"""Increase it when facts of records are counted differently."""

OVERFLOW_REASONS = ("record_overflow", "group_overflow")
"""Reasons of records that are too large for an example."""
HIGH_PROMPT_SHARE = 0.25
"""Share of all tokens from which the prompt is mentioned."""


def identify_lengths(dataset: DatasetOptions, seed: int, seq_len: int) -> dict[str, Any]:
    """Return the options that decide the facts of records, in addition to those of all kinds."""
    format_options = require_records(dataset).model_dump(mode="json", exclude={"generation"})
    return {"records": LENGTHS_VERSION, "format": format_options, "seed": seed, "seq_len": seq_len}


def make_table_lengths(context: KindContext) -> StageOutput:
    """Measure the examples, and plan the records at other lengths."""
    made = context.input(TOKENIZED_EXAMPLES)
    limit = context.limit
    columns = {
        part.files["examples"]: part.get_details(JoinedExampleDetails).split
        for part in made.parts
        if "examples" in part.files
    }
    tables = read_tables(context.store, columns, ["tokens"])
    own = [table.column(0).to_numpy().astype(np.int64) for table in tables]
    lengths = np.concatenate([np.empty(0, np.int64), *own])
    records = sum(count for _, _, count in made.ledger)
    overflows = {
        reason: count for state, reason, count in made.ledger if state == REJECTED and reason in OVERFLOW_REASONS
    }
    over = sum(overflows.values())
    by_split: dict[str, list[Ints]] = {}
    for split, tokens in zip(columns.values(), own, strict=True):
        by_split.setdefault(split, []).append(tokens)
    drawn = {
        split: make_length_histogram(np.concatenate(tokens), limit, title="example length")
        for split, tokens in sorted(by_split.items())
    }
    quantiles = compute_length_quantiles(lengths)
    hints = _advise_assembly(made, records, over, quantiles["p50"], limit)
    what_if = _compare_table_seq_lens(context, made, limit)
    return StageOutput(
        counts=CountSet.of(
            LengthCounts(
                limit=limit,
                examples=len(lengths),
                measured_rows=records,
                overlong_rows=over,
                dropped_for_length=over,
                quantiles=quantiles,
                buckets=count_length_buckets(lengths, limit),
                hints=hints,
            )
        ),
        tables={
            "what_if": what_if,
            "lengths": make_lengths_table(drawn),
            "quantiles": DisplayTable(("quantile", "tokens"), tuple(quantiles.items())),
            "advice": DisplayTable(("hint",), tuple((hint,) for hint in hints)),
        },
        histograms={"lengths": make_length_histogram(lengths, limit, title="example length")},
        samples={"context_overflow": describe_rejects(context, made.parts, overflows)},
    )


def _read_prompt_tokens(output: Manifest) -> int:
    return output.get_counts(TableExampleCounts).prompt_tokens


def _advise_assembly(output: Manifest, records: int, over: int, median: int, limit: int) -> tuple[str, ...]:
    """Return advice for better examples of this table."""
    flushes, counts = output.get_counts(TableExampleCounts).flushes, output.get_counts(ExampleCounts)
    examples, tokens = counts.examples, counts.tokens
    cap, prompt = StoredRecords.load_examples(output).options["cap"], _read_prompt_tokens(output) * examples
    hints: list[str] = []
    if over:
        hints.append(
            f"{over:,} of {records:,} records are in no example: they, or their groups, need more than {limit:,} "
            "tokens; raise seq_len or format.assembly.max_seq_length, or choose a finer group column"
        )
    if cap is not None and flushes.get("max_records", 0) > examples / 2 > 0 and 2 * median < limit:
        hints.append(
            f"most examples end at max_sequences_per_example {cap} and fill less than half of {limit:,} tokens; raise "
            "it, or lower seq_len or format.assembly.max_seq_length"
        )
    if tokens and prompt > HIGH_PROMPT_SHARE * tokens:
        hints.append(
            f"the prompt is {prompt / tokens:.0%} of all tokens; raise max_sequences_per_example, or set "
            "format.prompt.style: names"
        )
    return tuple(hints)


# ── Other lengths ──────────────────────────────────────────────────────────────────────────────────


_LENGTH_SCHEMA = make_required_schema(limit=pa.int32(), split=pa.int8(), tokens=pa.int32())
"""An example at another length; `split` indexes `SPLITS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanInputs(PartitionInputs):
    """A partition to plan at several lengths, with its share of the sample at each."""

    requests: tuple[PlanRequest, ...]


@part_function(version=2)
def replan_partition_part(inputs: ReplanInputs, place: PartPlace) -> PartResult:
    """Plan a partition at each length, and write the lengths of its examples; what does not fit is left out."""
    form, sort_key = inputs.requests[0].form, inputs.requests[0].sort_key
    rows = read_partition(place.store, inputs.partition, form, sort_key)
    pieces = [_LENGTH_SCHEMA.empty_table()]
    overlong: list[OverlongRecordCounts] = []
    for request in inputs.requests:
        oversized, _ = find_oversized(request, rows)
        limit, lost = request.limits.example_tokens, int(rows.tokens[oversized].sum())
        overlong.append(
            OverlongRecordCounts(overlong_records={str(limit): len(oversized)}, lost_tokens={str(limit): lost})
        )
        for number, split in enumerate(plan_splits(request, rows, oversized)):
            columns = [np.full(len(split.example_tokens), value) for value in (limit, number)]
            pieces.append(pa.table([*columns, split.example_tokens], schema=_LENGTH_SCHEMA))
    return PartResult({"lengths": place.write("lengths", pa.concat_tables(pieces))}, counts=overlong)


def _replan_partitions(context: KindContext, output: Manifest, seq_lens: Sequence[int]) -> list[Part]:
    """Plan the table at each length, in the partitions of the build."""
    rows = manifest.load_input(context.store, output, (*context.dataset_key, CANONICAL_ROWS)).files("rows")
    parts = [
        RowPart(*both, digest_json(*(file.digest for file in both)))
        for both in zip(rows, output.files("tokens"), strict=True)
    ]
    partitions = partition_rows(context, parts)
    request = make_request(context, load_observed_table(output), _read_prompt_tokens(output))
    requests = [replace(request, limits=replace(request.limits, example_tokens=seq_len)) for seq_len in seq_lens]
    # Of each length a share for each partition.
    shares: Sequence[Sequence[int | None]] = [[None] * len(partitions)] * len(requests)
    if request.wanted_records is not None:
        shares = [share_sample(request.wanted_records, own) for own in count_fitting(context, requests, partitions)]
    tasks = [
        ReplanInputs(
            partition=partition,
            requests=tuple(
                replace(own, wanted_records=share) for own, share in zip(requests, of_partition, strict=True)
            ),
        )
        for partition, of_partition in zip(partitions, zip(*shares, strict=True), strict=True)
    ]
    return context.map(replan_partition_part, tasks).parts


def _compare_table_seq_lens(context: KindContext, output: Manifest, limit: int) -> DisplayTable:
    """Compare lengths: the examples at each, the records that fit into none, and packed sequences."""
    seq_lens, form = choose_candidate_seq_lens(limit), require_records(context.dataset)
    replanned = _replan_partitions(context, output, seq_lens)
    table = pa.concat_tables([context.store.table(part.files["lengths"]) for part in replanned])
    limits, splits, tokens = (table.column(name).to_numpy() for name in ("limit", "split", "tokens"))
    overlong = add_up_counts(replanned).get(OverlongRecordCounts)
    packing, lines = context.dataset.packing, list[tuple[int, ...]]()
    for other in seq_lens:
        lengths = [tokens[(limits == other) & (splits == split)].astype(np.int64) for split in range(len(SPLITS))]
        # `seq_len` changes with the length unless the dataset sets its own.
        seq_len = other if form.assembly.max_seq_length is None else max(other, context.recipe.seq_len)
        measured = (measure_padded_room(of_split, seq_len, packing.room_multiple) for of_split in lengths)
        packed = [
            plan_slices(
                keep_examples_whole(room),
                limit=capacity,
                strategy=packing.strategy_for(form.ROW_KIND),
                max_segments=packing.segment_limit,
                tail=packing.tail,
            )
            for room, capacity in measured
            if len(room)
        ]
        left_out = (counted.get(str(other), 0) for counted in (overlong.overlong_records, overlong.lost_tokens))
        lines.append((other, sum(map(len, lengths)), *left_out, sum(plan.sequences for plan in packed)))
    return DisplayTable(("seq_len", "examples", "examples_over", "trained_lost", "sequences"), tuple(lines))


# ── Before a build ─────────────────────────────────────────────────────────────────────────────────


def advise_dataset(context: KindContext, tokenizer: LoadedTokenizer, path: str) -> DatasetAdvice:
    """Rate every column that can group the records of a dataset, and estimate its examples."""
    table, form = encode_table(context, tokenizer, path), require_records(context.dataset)
    limits = table.request.limits
    partition = TablePartition(0, tuple(table.parts))
    rows = read_partition(context.store, partition, form, table.observed.sort_key)
    lengths = np.maximum(rows.tokens, 0)
    columns = [
        advise_group_column(
            column,
            np.bincount(codes[codes >= 0]).astype(np.int64),
            np.bincount(codes[codes >= 0], weights=lengths[codes >= 0]).astype(np.int64),
            record_room=limits.record_room,
            mode="sequential" if form.mode == "sequential" else "grouped",
            cap=limits.cap,
            is_ordered=form.order_column is not None,
        )
        for column, codes in _iterate_group_columns(context)
    ]
    columns.sort(key=lambda one: (len(one.unsuitable), len(one.warnings), -one.sizes["count"], one.column))
    records, groups = max(int((rows.tokens >= 0).sum()), 1), max(len(rows.index.keys), 1)
    estimate = estimate_example(
        form.mode,
        limit=limits.example_tokens,
        prompt=limits.prompt_tokens,
        cap=limits.cap,
        record_tokens=float(lengths.sum()) / records,
        records_per_group=records / groups,
    )
    return DatasetAdvice(context.dataset_name or "", tuple(columns), estimate, form.mode, form.group_columns)


def _iterate_group_columns(context: KindContext) -> Iterator[tuple[str, Ints]]:
    """Yield each column in which some rows share a value, with the number of each row's value (−1 for null)."""
    texts: list[str] = []
    for part in context.input(CANONICAL_ROWS).parts:
        texts += context.store.table(part.files["rows"], ["record"]).column(0).to_pylist()
    records: list[dict[str, Any]] = [read_json(text) for text in texts]
    for name in dict.fromkeys(key for record in records for key in record):
        numbers: dict[str, int] = {}
        codes = np.full(len(records), -1, np.int64)
        for row, record in enumerate(records):
            value = record.get(name)
            if value is not None:
                codes[row] = numbers.setdefault(json.dumps(value, default=repr), len(numbers))
        if 1 < len(numbers) < int((codes >= 0).sum()):
            yield name, codes
