"""Lengths of a table's examples: estimated from counts, measured, and planned again for other maximum lengths.

tabular      prompt + record · cap
grouped      prompt + group · cap        each group must fit with the prompt, one BOS and one EOS
sequential   prompt + one group          at most the limit: a series continues in the next example

An example of records is complete or not made, and at another maximum length it would contain other records. So instead
of truncation, records that are too large for an example are counted, and a what-if plans all records at each length,
in the partitions of the build.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from rowmill import stats
from rowmill.core.arrays import Ints, find_distinct
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.core.storage import Store, digest_json, read_tables
from rowmill.kinds.joint_rows import DatasetAdvice, ExampleEstimate, GroupAdvice, KindContext
from rowmill.kinds.shared.splits import SPLITS
from rowmill.kinds.tables.assembly import ExampleLimits
from rowmill.kinds.tables.partition_plan import TablePlanRequest, count_sampled_rows, replan_partition
from rowmill.kinds.tables.partitions import (
    IndexOptions,
    RowPart,
    TablePartition,
    choose_borders,
    get_table_options,
    load_observed_table,
    partition_rows,
    read_partition,
    share_sample,
)
from rowmill.kinds.tables.schema import Mode
from rowmill.kinds.tables.table_examples import measure_table
from rowmill.packing.pack_plan import keep_examples_whole, measure_padded_room, plan_slices
from rowmill.parts.accounts import describe_rejects
from rowmill.parts.context import StageOutput, compute_share
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function
from rowmill.schema import manifest
from rowmill.schema.facts import TokenizedExamplesFacts, TruncationStatsFacts, read_facts, require_counted
from rowmill.schema.ledger import REJECTED, sum_counts
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Histogram, Manifest
from rowmill.tokenization.tokenizer import LoadedTokenizer

CHARACTERS_PER_TOKEN = 4
"""Assumed without a tokenizer; records of many numbers have two to three, so such estimates are marked approximate."""
DELIMITERS_PER_UNIT = 2
DOMINANT_SHARE = 0.5
UNBOUNDED_P95 = 200
SKEWED_TIMES = 20
FEW_EXAMPLES = 10


def estimate_example(
    mode: Mode,
    *,
    limit: int,
    prompt: int,
    cap: int | None,
    record_tokens: float,
    records_per_group: float = 1,
    is_approximate: bool = False,
) -> ExampleEstimate:
    """Estimate an example from the average tokens per record and records per group; `cap` None means no cap."""
    unit = round(record_tokens if mode == "tabular" else record_tokens * records_per_group)
    largest = limit - prompt - DELIMITERS_PER_UNIT
    if mode == "grouped":
        most = max((limit - prompt) // (unit + DELIMITERS_PER_UNIT), 0)
    else:
        most = max(largest // max(round(record_tokens), 1), 0)
    wanted = most if cap is None else cap
    if mode == "sequential":
        tokens, fits = min(prompt + unit, limit), round(record_tokens) <= largest
        return ExampleEstimate(
            unit, tokens, fits, min(most, wanted), largest, () if fits else ("overflow",), is_approximate
        )
    tokens = prompt + unit * wanted
    advice: list[str] = []
    if unit > largest:
        advice.append("overflow")
    elif tokens > limit:
        advice.append(f"cap_unreachable (flush at {most})")
    return ExampleEstimate(unit, tokens, tokens <= limit, min(most, wanted), largest, tuple(advice), is_approximate)


def advise_group_column(
    column: str,
    sizes: Ints,
    tokens: Ints,
    *,
    record_budget: int,
    mode: Mode = "grouped",
    cap: int | None = 10,
    is_ordered: bool = True,
    is_approximate: bool = False,
) -> GroupAdvice:
    """Assess a column by the sizes of its groups: `sizes[g]` records and `tokens[g]` tokens each.

    `record_budget` are the tokens that an example has for records.
    """
    total = int(sizes.sum())
    facts = describe_sizes(sizes)
    unsuitable: dict[str, str] = {}
    warnings: dict[str, str] = {}
    largest = int(np.argmax(sizes)) if len(sizes) else 0
    most = int(sizes[largest]) if len(sizes) else 0
    about = "about " if is_approximate else ""
    if mode != "sequential" and len(sizes) and int(tokens.max()) > record_budget:
        over = int((tokens > record_budget).sum())
        unsuitable["overflow"] = (
            f"{over} of {len(sizes)} groups have more than {record_budget} tokens, the largest "
            f"{about}{int(tokens.max())}"
        )
    if mode != "sequential" and len(sizes) > 1 and most > DOMINANT_SHARE * total:
        unsuitable["dominant"] = f"one group has {most} of {total} records; none should have more than half"
    if mode != "sequential" and facts["p95"] > UNBOUNDED_P95:
        unsuitable["unbounded"] = (
            f"one group in twenty has more than {facts['p95']:g} records; up to {UNBOUNDED_P95} are good"
        )
    if most > SKEWED_TIMES * max(facts["p50"], 1):
        warnings["skewed"] = f"the largest group has {most} records, the median one {facts['p50']:g}"
    if not is_ordered:
        warnings["no_order"] = "no order column: records of a group keep the order of the source"
    examples = estimate_example_count(sizes, tokens, record_budget=record_budget, cap=cap, mode=mode)
    if examples < FEW_EXAMPLES:
        warnings["few_examples"] = f"about {examples} examples; lower the cap to 3-5"
    return GroupAdvice(
        column,
        facts,
        f"Largest group: {most} records, {about}{int(tokens[largest]) if len(sizes) else 0} tokens",
        unsuitable,
        warnings,
    )


def estimate_example_count(sizes: Ints, tokens: Ints, *, record_budget: int, cap: int | None, mode: Mode) -> int:
    """Estimate how many examples the groups make, given the cap and the token budget."""
    by_tokens = -(-int(tokens.sum()) // max(record_budget, 1))
    if mode == "sequential":
        by_cap = 0 if cap is None else int((-(-sizes // cap)).sum())
        return max(by_tokens, by_cap, len(sizes))
    return max(by_tokens, 0 if cap is None else -(-len(sizes) // cap))


def describe_sizes(values: Ints) -> dict[str, float]:
    """Return count, mean, standard deviation, minimum, quartiles, p95 and maximum."""
    if not len(values):
        return dict.fromkeys(("count", "mean", "std", "min", "p25", "p50", "p75", "p95", "max"), 0.0)
    p25, p50, p75, p95 = (float(np.percentile(values, p)) for p in (25, 50, 75, 95))
    return {
        "count": len(values), "mean": round(float(values.mean()), 6), "std": round(float(values.std()), 6),
        "min": int(values.min()), "p25": p25, "p50": p50, "p75": p75, "p95": p95, "max": int(values.max()),
    }  # fmt: skip


def size_histogram(sizes: Ints, limit: float | None) -> Histogram:
    """Histogram of records per group, in geometric bins; `limit` is the most records that fit into an example."""
    top = max(int(sizes.max(initial=1)) + 1, 2)
    edges = find_distinct(np.geomspace(1, top, 24).round().astype(np.int64))
    counts, _ = np.histogram(sizes, bins=edges)
    return Histogram(
        "records per group", "records", tuple(float(edge) for edge in edges), tuple(int(count) for count in counts),
        None if limit is None else round(float(limit), 1),
    )  # fmt: skip


def advise_dataset(context: KindContext, tokenizer: LoadedTokenizer, path: str) -> DatasetAdvice:
    """Rate every column that can group the records of a dataset, and estimate its examples."""
    limits, index, measured = measure_table(context, tokenizer, path)
    form, lengths = get_table_options(context), np.maximum(measured, 0)
    columns = [
        advise_group_column(
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
    rows = max(int((measured >= 0).sum()), 1)
    groups = max(len(index.keys), 1)
    estimate = estimate_example(
        form.mode,
        limit=limits.limit,
        prompt=limits.prompt,
        cap=limits.cap,
        record_tokens=float(lengths.sum()) / rows,
        records_per_group=rows / groups,
    )
    return DatasetAdvice(context.dataset_name or "", tuple(columns), estimate, form.mode, form.group_columns)


def _iterate_group_columns(context: KindContext) -> Iterator[tuple[str, Ints]]:
    """Yield each column in which some rows share a value, with the number of each row's value (−1 for null)."""
    texts: list[str] = []
    for part in context.input(CANONICAL_ROWS).parts:
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


_LENGTH_SCHEMA = pa.schema(
    [
        pa.field("limit", pa.int32(), nullable=False),
        pa.field("split", pa.int8(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
    ]
)
"""An example at another length; `split` indexes `SPLITS`."""


@dataclass(frozen=True, slots=True)
class ReplanInputs(PartInputs):
    """A partition to plan at other lengths: a request for each of them."""

    partition: TablePartition
    options: IndexOptions
    requests: tuple[TablePlanRequest, ...]

    @property
    def input_bytes(self) -> int:
        """Size of the partition's files."""
        return self.partition.bytes


def count_partition_samples(store: Store, inputs: ReplanInputs) -> list[int]:
    """Count the train records of a partition that fit at each length."""
    rows = read_partition(store, inputs.partition, inputs.options)
    return [count_sampled_rows(request, rows.index, rows.lengths) for request in inputs.requests]


@part_function(version=1)
def replan_partition_part(inputs: ReplanInputs, place: PartPlace) -> PartResult:
    """Plan a partition at each length, and write the lengths of its examples."""
    rows = read_partition(place.store, inputs.partition, inputs.options)
    replanned = [replan_partition(request, rows.index, rows.lengths) for request in inputs.requests]
    pieces = [
        pa.table([np.full(len(lengths), plan.limit), np.full(len(lengths), split), lengths], schema=_LENGTH_SCHEMA)
        for plan in replanned
        for split, lengths in enumerate(plan.lengths)
    ]
    table = pa.concat_tables([_LENGTH_SCHEMA.empty_table(), *pieces])
    over = [[plan.records_over, plan.tokens_over] for plan in replanned]
    return PartResult({"lengths": place.write("lengths", table)}, {"over": over})


VERSION = 1
"""Increase it when facts of records are counted differently."""

OVERFLOW_REASONS = ("record_overflow", "group_overflow")
"""Reasons of records that are too large for an example."""
HIGH_PROMPT_SHARE = 0.25
"""Share of all tokens from which the prompt is mentioned."""


def make_table_lengths(context: KindContext) -> StageOutput:
    """Measure the examples, and plan the records at other lengths."""
    made = context.input(TOKENIZED_EXAMPLES)
    limit = context.limit
    columns = {part.files["examples"]: str(part.facts["split"]) for part in made.parts if "examples" in part.files}
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
        split: stats.make_length_histogram(np.concatenate(tokens), limit, title="example length")
        for split, tokens in sorted(by_split.items())
    }
    quantiles = stats.compute_length_quantiles(lengths)
    hints = _advise_assembly(made, records, over, quantiles["p50"], limit)
    what_if = _compare_table_seq_lens(context, made, limit)
    return StageOutput(
        facts=TruncationStatsFacts(
            context_overflow=compute_share(over, records),
            limit=limit,
            examples=len(lengths),
            records=records,
            dropped_for_length=over,
            shortened=NOT_APPLICABLE,
            tokens_removed=NOT_APPLICABLE,
            trained_removed=NOT_APPLICABLE,
            quantiles=quantiles,
            buckets=stats.count_length_buckets(lengths, limit),
            hints=list(hints),
        ),
        tables={
            "what_if": what_if,
            "lengths": stats.make_lengths_table(drawn),
            "quantiles": DisplayTable(("quantile", "tokens"), tuple(quantiles.items())),
            "advice": DisplayTable(("hint",), tuple((hint,) for hint in hints)),
        },
        histograms={"lengths": stats.make_length_histogram(lengths, limit, title="example length")},
        samples={"context_overflow": describe_rejects(context, made.parts, overflows)},
    )


def _compare_table_seq_lens(context: KindContext, output: Manifest, limit: int) -> DisplayTable:
    """Plan the table at each length, in the partitions of the build: examples, records in none, packed sequences."""
    limits, form = stats.choose_candidate_seq_lens(limit), get_table_options(context)
    # What is generated later decides nothing.
    trained, prompt = form.model_copy(update={"generation": None}), _read_prompt_tokens(output)
    key = (*context.dataset_key, CANONICAL_ROWS)
    rows = manifest.load_version(context.store, key, output.inputs["/".join(key)]).files("rows")
    options = IndexOptions.of(context, load_observed_table(output.details))
    parts = [
        RowPart(*both, digest_json(*(file.digest for file in both)))
        for both in zip(rows, output.files("tokens"), strict=True)
    ]
    partitions = partition_rows(context, choose_borders(context, rows), parts)
    requests = [
        [
            TablePlanRequest(
                context.dataset_name or "",
                context.seed,
                trained,
                ExampleLimits(other, prompt, form.cap),
                form.wanted,
                partition.name,
            )
            for other in limits
        ]
        for partition in partitions
    ]
    if form.wanted is not None:
        # What fits depends on the length, and with it the share of each partition.
        count, size = partial(count_partition_samples, context.store), sum(part.bytes for part in partitions)
        counted = [
            ReplanInputs(partition, options, tuple(own)) for partition, own in zip(partitions, requests, strict=True)
        ]
        counts = [*context.pool.map(count, counted, size_bytes=size)]
        for at in range(len(limits)):
            shares = share_sample(form.wanted, [of_length[at] for of_length in counts])
            for own, share in zip(requests, shares, strict=True):
                own[at] = replace(own[at], wanted=share)
    plans = [ReplanInputs(partition, options, tuple(own)) for partition, own in zip(partitions, requests, strict=True)]
    replanned = context.map(replan_partition_part, plans).parts
    table = pa.concat_tables([context.store.table(part.files["lengths"]) for part in replanned])
    limited, splits, tokens = (table.column(name).to_numpy() for name in ("limit", "split", "tokens"))
    lines: list[tuple[int, ...]] = []
    for at, other in enumerate(limits):
        lengths = [tokens[(limited == other) & (splits == split)].astype(np.int64) for split in range(len(SPLITS))]
        over = (sum(int(part.facts["over"][at][which]) for part in replanned) for which in (0, 1))
        lines.append((other, sum(map(len, lengths)), *over, _count_sequences(context, other, lengths)))
    columns = ("seq_len", "examples", "examples_over", "trained_lost", "sequences")
    return DisplayTable(columns, tuple(lines))


def _read_prompt_tokens(output: Manifest) -> int:
    return require_counted(read_facts(TokenizedExamplesFacts, output.facts).prompt_tokens)


def _count_sequences(context: KindContext, limit: int, lengths: Sequence[Ints]) -> int:
    """Pack examples of another length; `seq_len` changes with it unless the dataset sets its own length."""
    options = context.dataset.packing
    has_own_limit = get_table_options(context).assembly.max_seq_length is not None
    seq_len = max(limit, context.seq_len) if has_own_limit else limit
    measured = (measure_padded_room(of_split, seq_len, options.room_multiple) for of_split in lengths)
    plans = (
        plan_slices(
            keep_examples_whole(room),
            limit=capacity,
            strategy=options.strategy_for(get_table_options(context).ROW_KIND),
            max_segments=options.segment_limit,
            tail=options.tail,
        )
        for room, capacity in measured
        if len(room)
    )
    return sum(plan.sequences for plan in plans)


def _advise_assembly(output: Manifest, records: int, over: int, median: int, limit: int) -> tuple[str, ...]:
    """Return advice for better examples of this table."""
    flushes = sum_counts(part.facts["flushes"] for part in output.parts if "flushes" in part.facts)
    facts = read_facts(TokenizedExamplesFacts, output.facts)
    examples, tokens = facts.examples, facts.tokens
    cap, prompt = output.details["records"]["options"]["cap"], _read_prompt_tokens(output) * examples
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
