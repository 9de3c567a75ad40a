"""What truncation removed, and the effect of other context lengths, computed from lengths; no token is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Integers, format_percent
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES, TRUNCATION_STATS
from rowmill.core.storage import File, Store, read_tables
from rowmill.executors import Executor
from rowmill.packing.pack_plan import count_sequences, measure_padded_room, round_up, slice_too_long
from rowmill.parts.accounts import RowLocator, describe_rejects
from rowmill.parts.context import StageOutput
from rowmill.parts.functions import cut_blocks
from rowmill.recipe.recipe import Recipe
from rowmill.schema.counts import CountSet
from rowmill.schema.length_counts import LengthCounts, TruncationCounts
from rowmill.schema.manifest import DisplayTable, Histogram, Manifest
from rowmill.schema.rows import ROW_KINDS, SPLITS
from rowmill.stages.base import ComparedNumber, PreparedStage, StageContext, StageDeclaration
from rowmill.stats.lengths import (
    choose_candidate_seq_lens,
    compute_length_quantiles,
    count_length_buckets,
    estimate_seq_len_effects,
    make_length_histogram,
    make_lengths_table,
    suggest_limits,
)
from rowmill.stats.tables import StatsInputs, count_rows_of

COLUMNS = ("split", "original_tokens", "tokens", "trained_tokens", "messages_removed", "exchanges_removed",
           "reasoning_removed", "tokens_cut", "trained_removed", "exchanges_trained", "reasoning_trained",
           "cut_trained", "domain")  # fmt: skip

STAGES = (
    ("exchanges", "exchanges_removed", "exchanges_trained"),
    ("reasoning", "reasoning_removed", "reasoning_trained"),
    ("tokens", "tokens_cut", "cut_trained"),
)
"""The stages of truncation, with the columns of the tokens and of the trained tokens that each removed."""

SHARE_BINS = 20

_DOMAIN_SCHEMA = pa.schema(
    [
        ("domain", pa.string()),
        ("examples", pa.int64()),
        ("shortened", pa.int64()),
        ("tokens_removed", pa.int64()),
        ("trained_removed", pa.int64()),
        ("original_tokens", pa.int64()),
    ]
)
"""Sums over the examples of a domain, or a line per example."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredExamples:
    """The examples of a part, or of all parts.

    `original` int32[E] are tokens before truncation, `trained` int32[E] the trained ones among them, `splits` uint8[E]
    places in `SPLITS`. The rest are sums: of examples that lost tokens, and of what each stage of truncation removed
    (examples, messages, tokens, trained tokens); `trained_shares` counts examples by the share of trained tokens.
    """

    original: NDArray[np.int32]
    trained: NDArray[np.int32]
    splits: NDArray[np.uint8]
    shortened: int
    longest_shortened: int
    tokens_removed: int
    trained_removed: int
    stages: NDArray[np.int64]
    trained_shares: NDArray[np.int64]
    domains: pa.Table
    """What was removed by domain, as `_DOMAIN_SCHEMA`."""

    def list_splits(self) -> list[str]:
        """Return the splits that have examples, by name."""
        return sorted(SPLITS[place] for place in np.flatnonzero(np.bincount(self.splits)).tolist())

    def select_split(self, name: str) -> NDArray[np.int32]:
        """Return the tokens of each example of a split before truncation."""
        return self.original[self.splits == [str(split) for split in SPLITS].index(name)]


RUNS_PER_WORKER = 4
"""Runs of files that a worker measures: a task for each file would cost more than reading it."""


def measure_examples(
    store: Store, files: Sequence[File], pool: Executor, *, runs_per_worker: int = RUNS_PER_WORKER
) -> MeasuredExamples:
    """Measure the examples of some files, in runs that the workers share."""
    each = -(-len(files) // (pool.workers * runs_per_worker)) or 1
    runs = [tuple(files[first : first + each]) for first in range(0, len(files), each)]
    return _join(list(pool.map(partial(measure_files, store), runs, size_bytes=sum(file.bytes for file in files))))


MEASURED_ROWS = 1 << 18
"""Examples that are measured at once: a part has a few hundred, and each step costs more than that takes."""


def measure_files(store: Store, files: Sequence[File], *, rows_at_once: int = MEASURED_ROWS) -> MeasuredExamples:
    """Measure the examples of some files, a few files at once."""
    runs = [files[block.start : block.stop] for block in cut_blocks([file.rows for file in files], rows_at_once)]
    return _join([_measure(pa.concat_tables(read_tables(store, run, COLUMNS))) for run in runs if run])


def _join(parts: Sequence[MeasuredExamples]) -> MeasuredExamples:
    nothing = np.empty(0, np.int32)
    return MeasuredExamples(
        np.concatenate([nothing, *(part.original for part in parts)]),
        np.concatenate([nothing, *(part.trained for part in parts)]),
        np.concatenate([np.empty(0, np.uint8), *(part.splits for part in parts)]),
        sum(part.shortened for part in parts),
        max((part.longest_shortened for part in parts), default=0),
        sum(part.tokens_removed for part in parts),
        sum(part.trained_removed for part in parts),
        sum((part.stages for part in parts), np.zeros((len(STAGES), 4), np.int64)),
        sum((part.trained_shares for part in parts), np.zeros(SHARE_BINS, np.int64)),
        _sum_by_domain(pa.concat_tables([_DOMAIN_SCHEMA.empty_table(), *(part.domains for part in parts)])),
    )


def _sum_by_domain(lines: pa.Table) -> pa.Table:
    """Add up the lines of each domain; those without one are a group, too."""
    encoded = lines.column("domain").combine_chunks().dictionary_encode("encode")
    columns: list[Any] = [encoded.dictionary]
    for name in _DOMAIN_SCHEMA.names[1:]:
        total = np.zeros(len(encoded.dictionary), np.int64)
        np.add.at(total, encoded.indices.to_numpy(), _read_ints(lines, name))
        columns.append(total)
    return pa.table(columns, schema=_DOMAIN_SCHEMA)


def _measure(columns: pa.Table) -> MeasuredExamples:
    original, tokens, trained = (_read_ints(columns, name) for name in ("original_tokens", "tokens", "trained_tokens"))
    removed, trained_removed = original - tokens, _read_ints(columns, "trained_removed")
    shares = trained / np.maximum(tokens, 1)
    # Of each stage the examples that it changed, and the messages and tokens that it removed.
    stages: list[tuple[int, int, int, int]] = []
    for stage, of_tokens, of_trained in STAGES:
        taken = _read_ints(columns, of_tokens)
        messages = _read_ints(columns, "messages_removed") if stage == "exchanges" else np.zeros_like(taken)
        touched = int(((taken > 0) | (messages > 0)).sum())
        stages.append((touched, int(messages.sum()), int(taken.sum()), int(_read_ints(columns, of_trained).sum())))
    numbers = np.ones_like(removed), (removed > 0).astype(np.int64), removed, trained_removed, original
    domains = _sum_by_domain(pa.table([columns.column("domain"), *numbers], schema=_DOMAIN_SCHEMA))
    return MeasuredExamples(
        original.astype(np.int32),
        (trained + trained_removed).astype(np.int32),
        pc.index_in(columns.column("split"), pa.array(SPLITS)).to_numpy().astype(np.uint8),
        int((removed > 0).sum()),
        int(original[removed > 0].max(initial=0)),
        int(removed.sum()),
        int(trained_removed.sum()),
        np.array(stages, np.int64),
        np.histogram(shares, bins=SHARE_BINS, range=(0.0, 1.0))[0],
        domains,
    )


def _read_ints(table: pa.Table, name: str) -> NDArray[np.int64]:
    return table.column(name).to_numpy(zero_copy_only=False).astype(np.int64)


VERSION = 2

DROPPED = ("overlong", "overlong_after_structure")
"""Reject reasons about length."""

DOMAINS_SHOWN = 30


def identify_truncation_stats(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide the facts; the effect of other limits also depends on truncation and packing."""
    dataset = recipe.datasets[name]
    return {
        "versions": [VERSION],
        "limit": recipe.limit_of(name),
        "row_kind": dataset.row_kind,
        **dataset.format.identify_lengths(recipe, dataset),
        "truncation": dataset.truncation.model_dump(mode="json"),
        "packing": dataset.packing.model_dump(mode="json", exclude={"layout", "store_domains"}),
    }


def make_truncation_stats(context: StageContext) -> StageOutput:
    """Measure the dataset's lengths."""
    return context.dataset.format.measure_lengths(context, partial(_measure_dataset, context))


def _measure_dataset(context: StageContext) -> StageOutput:
    """Measure examples that are made of one row each, and estimate what other limits would cut off."""
    manifest = context.input(TOKENIZED_EXAMPLES)
    limit = _limit_examples(context)
    measured = measure_examples(context.store, manifest.files("examples"), context.pool)
    original = measured.original
    dropped = sum(n for _, r, n in manifest.ledger if r in DROPPED)
    buckets = count_length_buckets(original, limit)
    hints = suggest_limits(buckets)
    by_split = {name: make_length_histogram(measured.select_split(name), limit) for name in measured.list_splits()}
    whole = make_length_histogram(original, limit)
    what_if = _compare_seq_lens(context, measured, limit)
    # The examples that lost tokens, by their lengths before, and the rows dropped for their length.
    shortened = (_describe_shortened(context, manifest, measured),) if measured.shortened else ()
    dropped_rows = {reason: count for _, reason, count in manifest.ledger if reason in DROPPED}
    share_edges = np.linspace(0, 1, SHARE_BINS + 1)
    share_counts = tuple(measured.trained_shares.tolist())
    stage_rows = [(stage, *sums) for (stage, _, _), sums in zip(STAGES, measured.stages.tolist(), strict=True)]
    return StageOutput(
        counts=CountSet.of(
            LengthCounts(
                limit=limit,
                examples=len(original),
                measured_rows=len(original) + dropped,
                overlong_rows=measured.shortened + dropped,
                dropped_for_length=dropped,
                quantiles=compute_length_quantiles(original),
                buckets=buckets,
                hints=tuple(hints),
            ),
            TruncationCounts(
                shortened=measured.shortened,
                tokens_removed=measured.tokens_removed,
                trained_removed=measured.trained_removed,
            ),
        ),
        tables={
            "what_if": what_if,
            "lengths": make_lengths_table(by_split),
            "quantiles": DisplayTable(("quantile", "tokens"), tuple(compute_length_quantiles(original).items())),
            "stages": DisplayTable(
                ("stage", "examples", "messages_removed", "tokens_removed", "trained_removed"), tuple(stage_rows)
            ),
            **_tabulate_domains(measured),
            "advice": DisplayTable(("hint",), tuple((hint,) for hint in hints)),
        },
        histograms={
            "lengths": whole,
            "trained_share": Histogram(
                "trained share", "share of tokens", tuple(round(float(e), 2) for e in share_edges), share_counts
            ),
        },
        samples={"context_overflow": (*shortened, *describe_rejects(context, manifest.parts, dropped_rows))},
    )


def _limit_examples(context: StageContext) -> int:
    """Return the most tokens of an example; that of a pair is shared by its sides."""
    return context.recipe.limit_of(context.dataset_name or "") * context.dataset.format.count_sides()


def _describe_shortened(context: StageContext, manifest: Manifest, measured: MeasuredExamples) -> str:
    """Describe the first example that lost tokens, read from as few parts as possible, and the longest one."""
    limit = _limit_examples(context)
    for file in manifest.files("examples"):
        table = context.store.table(file, ("example_id", "original_tokens", "tokens"))
        over = table.filter(pc.greater(table.column("original_tokens"), table.column("tokens")))
        if over.num_rows:
            first = over.slice(0, 1).to_pylist()[0]
            place = RowLocator(context).locate(first["example_id"], reads_lines=True)
            tokens = f"{first['original_tokens']:,} tokens, at most {limit:,}"
            longest = measured.longest_shortened
            longer = f"; the longest has {longest:,}" if longest > first["original_tokens"] else ""
            return f"truncated: {measured.shortened:,}, the first is {place}: {tokens}{longer}"
    raise AssertionError(context.key)


def _compare_seq_lens(context: StageContext, measured: MeasuredExamples, limit: int) -> DisplayTable:
    """Tabulate the effect of other limits; documents that are cut into pieces lose nothing at any limit."""
    original = measured.original
    candidates = choose_candidate_seq_lens(limit)
    if not _cuts_into_pieces(context):
        return estimate_seq_len_effects(original, measured.trained, candidates, plan=_make_sequence_counter(context))
    joined = context.dataset.packing.strategy_for(context.dataset.row_kind) == "concat"
    rows: list[tuple[int, int, int, int]] = []
    for seq_len in candidates:
        pieces = original
        if len(original):
            pieces = slice_too_long(original, seq_len, "split", name_of=str, remedies="").lengths
        room = int(round_up(original, context.dataset.packing.room_multiple).sum())
        sequences = -(-room // seq_len) if joined else _make_sequence_counter(context)(pieces, seq_len)
        rows.append((seq_len, int((original > seq_len).sum()), 0, sequences))
    return DisplayTable(("seq_len", "examples_over", "trained_lost", "sequences"), tuple(rows))


def _cuts_into_pieces(context: StageContext) -> bool:
    dataset = context.dataset
    policy = dataset.truncation.policy(dataset.row_kind, sliced=dataset.keeps_overlong)
    if policy == "keep":
        joined = dataset.packing.strategy_for(dataset.row_kind) == "concat"
        return joined or dataset.packing.slice_strategy_for(dataset.row_kind) == "split"
    return policy == "split" and ROW_KINDS[dataset.row_kind].is_running_text


def _make_sequence_counter(context: StageContext) -> Any:
    options = context.dataset.packing

    def count(lengths: Integers, limit: int) -> int:
        if options.segment_limit == 1:
            return len(lengths)
        room, capacity = measure_padded_room(lengths, limit, options.room_multiple)
        return count_sequences(room, capacity, options.segment_limit)

    return count


def _tabulate_domains(measured: MeasuredExamples) -> dict[str, DisplayTable]:
    """Tabulate what truncation removed per domain, most first; nothing if no row has a domain."""
    domains = measured.domains
    if domains.column("domain").null_count == len(domains):
        return {}
    removed, original = _read_ints(domains, "tokens_removed"), _read_ints(domains, "original_tokens")
    share = np.round(removed / np.maximum(original, 1), 6)
    shown = domains.drop_columns("original_tokens").append_column("share_removed", pa.array(share))
    lines = sorted(
        shown.to_pylist(), key=lambda line: (-line["tokens_removed"], line["domain"] is None, line["domain"] or "")
    )
    values = (tuple(line.values()) for line in lines[:DOMAINS_SHOWN])
    return {"domains": DisplayTable(tuple(shown.column_names), tuple(values))}


def _summarize_truncation_stats(counts: CountSet, rows: str) -> Sequence[str]:
    del rows
    lengths = counts.get(LengthCounts)
    quantiles = [f"{name} {lengths.quantiles[name]:,}" for name in ("p50", "p95", "max")]
    if lengths.quantiles["max"] > lengths.limit and not lengths.overlong_rows:
        return *quantiles, f"longer than {lengths.limit:,} is cut by packing, not truncated"
    return *quantiles, f"{format_percent(lengths.share_overlong())} over {lengths.limit:,}"


STAGE = StageDeclaration(
    name=TRUNCATION_STATS,
    counts=LengthCounts,
    description="Length distribution, what truncation removed, and the effect of other context lengths.",
    identity=identify_truncation_stats,
    prepare=lambda context: PreparedStage((), lambda: make_truncation_stats(context)),
    inputs=(TOKENIZED_EXAMPLES,),
    origins=(CANONICAL_ROWS,),
    # It writes no rows; these are the measured ones.
    stats_inputs=StatsInputs(
        count_rows_of(LengthCounts, lambda counts: counts.examples, "example"), tables=("lengths", "what_if")
    ),
    summarize=_summarize_truncation_stats,
    compared=(
        ComparedNumber("longer than the context", LengthCounts, lambda counts: counts.share_overlong(), is_share=True),
        ComparedNumber("tokens truncated", TruncationCounts, lambda counts: counts.tokens_removed),
    ),
)
