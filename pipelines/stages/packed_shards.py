"""Examples → packed shards: one integer plan per split, then every token moves once.

What belongs here: gathering lengths, planning, dealing output shards to workers, conservation. What does
not: the plan (`packing.py`), the files (`shards/`).

    lengths of all examples ─► slices ─► plan ─► shard borders
    examples' parts ─► scratch (mapped, not held) ─► each worker gathers one shard, writes it, reads it back

Conservation: each example part adds up the content hashes of its own segments; each shard adds up those of
what it reads back from disk. The two sums must be equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines import packing
from pipelines.ledger import KEPT, REJECTED
from pipelines.manifest import File, Histogram, Part, Table
from pipelines.packing import Plan
from pipelines.rows import place_of
from pipelines.shards import gather, native
from pipelines.sources import Part as SourcePart
from pipelines.stages import Draft, Work, part_folder, raw_dataset, scratch_folder, share
from pipelines.storage import Store, digest, digest_bytes

VERSION = 1
"""Raise it when any shard may hold other bytes."""

Ints = NDArray[np.int64]
SPLITS = ("train", "validation", "test")
SHARD_TOKENS = 2 << 20
"""Tokens per shard at most: some 60 MB while a worker gathers and writes it."""

SEGMENTS = pa.schema(
    [
        pa.field("sequence_id", pa.int64(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
    ]
)
"""Lineage beside each shard: which record of which file stands in which segment. `record` counts from 1 in the file."""


def fingerprint_of(work: Work) -> str:
    """Identify the options that decide shards."""
    return digest(
        "packed_shards", VERSION, work.dataset.packing.model_dump(mode="json"), work.recipe.seq_len, work.dataset_name
    )


@dataclass(frozen=True, slots=True)
class _Lengths:
    """The columns of all examples that planning sees, and where each part's examples begin."""

    tokens: Ints
    splits: NDArray[np.int8]
    first_rows: Ints
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _SplitPlan:
    """A split's plan; `plan.examples` number examples over all splits."""

    split: str
    plan: Plan
    dropped: Ints


def make(work: Work) -> Draft:
    """Plan each split, write its shards, check that nothing was lost or copied."""
    lengths = _lengths(work)
    plans = [plan for split in SPLITS if (plan := _plan(work, lengths, split)) is not None]
    with scratch_folder(work) as scratch:
        files, expected = _to_scratch(work, lengths, plans, scratch)
        made = _write_shards(work, lengths, plans, files)
    return _draft(work, lengths, plans, made, expected)


def _lengths(work: Work) -> _Lengths:
    files = work.input("tokenized_examples").files("examples")
    paths = tuple(file.path for file in files)
    tables = [work.store.table(path, ["tokens", "split"]) for path in paths]
    counts = [table.num_rows for table in tables]
    if not tables:
        return _Lengths(np.empty(0, np.int64), np.empty(0, np.int8), np.zeros(1, np.int64), ())
    joined = pa.concat_tables(tables)
    return _Lengths(
        tokens=joined.column("tokens").to_numpy().astype(np.int64),
        splits=pc.index_in(joined.column("split"), pa.array(SPLITS)).to_numpy().astype(np.int8),
        first_rows=np.concatenate((np.zeros(1, np.int64), np.cumsum(counts))),
        paths=paths,
    )


def _plan(work: Work, lengths: _Lengths, split: str) -> _SplitPlan | None:
    numbers = np.flatnonzero(lengths.splits == SPLITS.index(split))
    if not len(numbers):
        return None
    options, kind = work.dataset.packing, work.dataset.row_kind
    strategy = options.strategy_for(kind)
    own = lengths.tokens[numbers]
    pieces = (
        packing.whole(own)
        if strategy == "concat"
        else packing.slice_too_long(
            own,
            work.recipe.seq_len,
            options.slice_strategy_for(kind),
            name_of=lambda i: _name(work, lengths, int(numbers[i])),
        )
    )
    plan = packing.plan_slices(
        pieces, limit=work.recipe.seq_len, strategy=strategy, max_segments=options.segment_limit, tail=options.tail
    )
    return _SplitPlan(split, Plan(plan.sequence_offsets, numbers[plan.examples], plan.ranges), numbers[pieces.dropped])


def _name(work: Work, lengths: _Lengths, number: int) -> str:
    which = int(np.searchsorted(lengths.first_rows, number, "right")) - 1
    column = work.store.table(lengths.paths[which], ["example_id"]).column(0)
    return str(column[number - int(lengths.first_rows[which])].as_py())


# ── Examples to scratch, with the hashes of their own segments ─────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _ScratchTask:
    """A part of examples to lay out for gathering; segments of it as `(row in the part, start, length, span start)`."""

    root: str
    source: str
    target: str
    rows: Ints
    starts: Ints
    lengths: Ints
    span_begins: NDArray[np.bool_]
    ignore_token_id: int | None


def to_scratch(task: _ScratchTask) -> int:
    """Write a part as a mapped file; return the sum of the content hashes of its segments."""
    table = Store(task.root).table(task.source, ("input_ids", "loss_mask", "example_id"))
    gather.to_scratch(table, task.target)
    return _expected_hash(table, task)


def _expected_hash(table: pa.Table, task: _ScratchTask) -> int:
    if not len(task.rows):
        return 0
    ids, mask, offsets = _flat(table)
    cut_ids, cut_mask = native.cut(ids, mask, offsets, task.rows, task.starts, task.lengths)
    bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(task.lengths)))
    targets = cut_mask.copy()
    # Whether a segment's first token is a target depends on the attention spans, which the plan knows.
    targets[bounds[:-1][task.span_begins]] = False
    if task.ignore_token_id is not None:
        targets &= cut_ids != task.ignore_token_id
    names = table.column("example_id").combine_chunks().take(pa.array(task.rows))
    segments = native.Segments(
        cut_ids, cut_mask, bounds, np.array([0, len(task.rows)]), names, task.starts.astype(np.int32)
    )
    return sum(native.segment_hashes(segments, targets)) % native.MODULUS


def _flat(table: pa.Table) -> "tuple[NDArray[np.int32], NDArray[np.bool_], Ints]":
    ids = table.column("input_ids").combine_chunks()
    mask = table.column("loss_mask").combine_chunks()
    offsets = np.asarray(ids.offsets, np.int64)
    values = ids.flatten().to_numpy(zero_copy_only=False)
    return values, mask.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0]


def _to_scratch(work: Work, lengths: _Lengths, plans: Sequence[_SplitPlan], scratch: Path) -> tuple[list[str], int]:
    examples, starts, sizes, begins = _all_segments(work, plans)
    order = np.argsort(examples, kind="stable")
    examples, starts, sizes, begins = examples[order], starts[order], sizes[order], begins[order]
    cuts = np.searchsorted(examples, lengths.first_rows)
    targets = [str(scratch / f"{i:06d}.arrow") for i in range(len(lengths.paths))]
    tasks = [
        _ScratchTask(
            root=work.store.root,
            source=path,
            target=targets[i],
            rows=examples[cuts[i] : cuts[i + 1]] - lengths.first_rows[i],
            starts=starts[cuts[i] : cuts[i + 1]],
            lengths=sizes[cuts[i] : cuts[i + 1]],
            span_begins=begins[cuts[i] : cuts[i + 1]],
            ignore_token_id=work.dataset.packing.ignore_token_id,
        )
        for i, path in enumerate(lengths.paths)
    ]
    sums = work.pool.map(to_scratch, tasks, size_bytes=int(lengths.tokens.sum()))
    return targets, sum(sums) % native.MODULUS


def _all_segments(work: Work, plans: Sequence[_SplitPlan]) -> "tuple[Ints, Ints, Ints, NDArray[np.bool_]]":
    examples = [p.plan.examples for p in plans] or [np.empty(0, np.int64)]
    ranges = [p.plan.ranges for p in plans] or [np.empty((0, 2), np.int32)]
    begins: list[NDArray[np.bool_]] = [np.empty(0, bool)]
    for one in plans:
        first = np.ones(len(one.plan.examples), bool)
        if not work.dataset.packing.block_cross_document_attention:
            first[:] = False
            first[one.plan.sequence_offsets[:-1]] = True
        begins.append(first)
    both = np.concatenate(ranges).astype(np.int64)
    return np.concatenate(examples), both[:, 0], both[:, 1], np.concatenate(begins)


# ── Shards ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _ShardTask:
    """One shard: which examples' tokens, in which sequences, and where it is written."""

    root: str
    at: str
    name: str
    split: str
    dataset: str
    files: tuple[str, ...]
    first_rows: Ints
    examples: Ints
    ranges: NDArray[np.int32]
    sequence_offsets: Ints
    first_sequence: int
    blocked: bool
    ignore_token_id: int | None
    sources: dict[str, tuple[str, int]]
    card: dict[str, str]


def write_shard(task: _ShardTask) -> tuple[Part, int]:
    """Gather one shard's tokens, write it and its segments, read it back; return the part and its content hash."""
    table = _shard_table(task)
    store = Store(task.root)
    sink = BytesIO()
    native.write(table, sink, task.card)
    shard = _save(store, f"{task.at}/data/{task.split}/{task.name}.parquet", sink.getvalue(), table.num_rows)
    lineage = BytesIO()
    pq.write_table(_lineage(table, task), lineage, compression="zstd")
    segments = _save(
        store, f"{task.at}/segments/{task.split}-{task.name}.parquet", lineage.getvalue(), len(task.examples)
    )
    with store.open(shard.path) as handle:
        back = native.read(handle)
    found = sum(native.sequence_hashes(native.segments_of(back))) % native.MODULUS
    facts = {
        "split": task.split,
        "first_sequence": task.first_sequence,
        "sequences": table.num_rows,
        "segments": len(task.examples),
        "tokens": int(task.ranges[:, 1].sum()),
        "trained_tokens": int(back.column("trained_tokens").to_numpy().sum()),
        "digest_holds": digest_bytes(store.read(shard.path)) == shard.digest,
    }
    return Part(shard.digest, {"shard": shard, "segments": segments}, facts), found


def _shard_table(task: _ShardTask) -> pa.Table:
    wanted, inverse = np.unique(task.examples, return_inverse=True)
    rows = gather.take(task.files, task.first_rows, wanted)
    ids, mask, offsets = _flat(rows)
    starts, lengths = task.ranges[:, 0].astype(np.int64), task.ranges[:, 1].astype(np.int64)
    cut_ids, cut_mask = native.cut(ids, mask, offsets, inverse, starts, lengths)
    segments = native.Segments(
        ids=cut_ids,
        mask=cut_mask,
        offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))),
        sequence_offsets=task.sequence_offsets,
        example_ids=rows.column("example_id").combine_chunks().take(pa.array(inverse)),
        starts=task.ranges[:, 0],
    )
    plan = Plan(task.sequence_offsets, task.examples, task.ranges)
    span_lengths, span_offsets = packing.attention_spans(plan, block_cross_document_attention=task.blocked)
    spans = native.Spans(
        labels=packing.labels(cut_ids, cut_mask, span_lengths, ignore_token_id=task.ignore_token_id),
        position_ids=packing.position_ids(span_lengths),
        lengths=span_lengths,
        offsets=span_offsets,
    )
    return native.to_table(segments, spans, dataset=task.dataset, first_sequence=task.first_sequence)


def _lineage(table: pa.Table, task: _ShardTask) -> pa.Table:
    example_ids = table.column("example_ids").combine_chunks().flatten()
    row_ids = [name.rsplit("#", 1)[0] for name in example_ids.to_pylist()]
    places = [place_of(row_id) for row_id in row_ids]
    counts = np.diff(task.sequence_offsets)
    numbers = np.arange(len(task.examples)) - np.repeat(task.sequence_offsets[:-1], counts)
    sequences = np.repeat(np.arange(len(counts)) + task.first_sequence, counts)
    return pa.table(
        [
            sequences, numbers.astype(np.int32), example_ids, row_ids,
            [task.sources[part][0] for part, _ in places],
            [task.sources[part][1] + number for part, number in places],
            task.ranges[:, 0], task.ranges[:, 1], [task.split] * len(row_ids),
        ],
        schema=SEGMENTS,
    )  # fmt: skip


def _save(store: Store, path: str, content: bytes, rows: int) -> File:
    store.write(path, content)
    return File(path=path, bytes=len(content), digest=digest_bytes(content), rows=rows)


def _write_shards(
    work: Work, lengths: _Lengths, plans: Sequence[_SplitPlan], files: list[str]
) -> list[tuple[Part, int]]:
    scanned = raw_dataset.parts_of(work.input("raw_dataset").details)
    at = part_folder(work.folder, _plan_digest(work, lengths, plans))
    card = {k: str(v) for k, v in _card(work).items()}
    tasks = [task for one in plans for task in _shard_tasks(work, lengths, one, files, scanned, at, card)]
    return list(work.pool.map(write_shard, tasks, size_bytes=4 * int(lengths.tokens.sum())))


def _plan_digest(work: Work, lengths: _Lengths, plans: Sequence[_SplitPlan]) -> str:
    examples = [file.digest for file in work.input("tokenized_examples").files("examples")]
    arrays = [[p.split, digest_bytes(p.plan.examples.tobytes()), digest_bytes(p.plan.ranges.tobytes())] for p in plans]
    return digest(fingerprint_of(work), examples, arrays)


def _card(work: Work) -> dict[str, Any]:
    blocked = work.dataset.packing.block_cross_document_attention
    own = {
        "format": "native",
        "format_version": VERSION,
        "seq_len": work.recipe.seq_len,
        "attention": "blocked" if blocked else "open",
        "recipe": work.recipe.name,
        "dataset": work.dataset_name or "",
    }
    return work.input("tokenized_examples").card | own


def _shard_tasks(
    work: Work,
    lengths: _Lengths,
    one: _SplitPlan,
    files: list[str],
    scanned: list[SourcePart],
    at: str,
    card: dict[str, str],
) -> list[_ShardTask]:
    per_shard = max(1, SHARD_TOKENS // work.recipe.seq_len)
    options, plan = work.dataset.packing, one.plan
    sources = {p.part_id: (p.url, p.first_record) for p in scanned}
    tasks: list[_ShardTask] = []
    for number, first in enumerate(range(0, plan.sequences, per_shard)):
        last = min(first + per_shard, plan.sequences)
        begin, end = int(plan.sequence_offsets[first]), int(plan.sequence_offsets[last])
        tasks.append(
            _ShardTask(
                root=work.store.root,
                at=at,
                name=f"part-{number:05d}",
                split=one.split,
                dataset=work.dataset_name or "",
                files=tuple(files),
                first_rows=lengths.first_rows,
                examples=plan.examples[begin:end],
                ranges=plan.ranges[begin:end],
                sequence_offsets=plan.sequence_offsets[first : last + 1] - begin,
                first_sequence=first,
                blocked=options.block_cross_document_attention,
                ignore_token_id=options.ignore_token_id,
                sources=sources,
                card=card,
            )
        )
    return tasks


def _draft(
    work: Work, lengths: _Lengths, plans: list[_SplitPlan], made: list[tuple[Part, int]], expected: int
) -> Draft:
    shards = [part for part, _ in made]
    found = sum(value for _, value in made) % native.MODULUS
    planned = sum(int(p.plan.ranges[:, 1].sum()) for p in plans)
    written = sum(int(p.facts["tokens"]) for p in shards)
    sequences = sum(p.plan.sequences for p in plans)
    dropped = sum(len(p.dropped) for p in plans)
    total = int(lengths.tokens.sum())
    fills = np.concatenate([p.plan.tokens for p in plans] or [np.empty(0, np.int64)]) / work.recipe.seq_len
    counts, edges = np.histogram(fills, bins=20, range=(0.0, 1.0))
    kept = len(lengths.tokens) - dropped
    ledger = [(KEPT, "", kept), *([(REJECTED, "overlong", dropped)] if dropped else [])]
    return Draft(
        parts=shards,
        facts={
            "conservation": 0 if found == expected and planned == written else 1,
            "shard_digests": sum(not p.facts["digest_holds"] for p in shards),
            "fill": share(planned, sequences * work.recipe.seq_len) if sequences else 1,
            "sequences": sequences,
            "segments": sum(len(p.plan.examples) for p in plans),
            "tokens": planned,
            "trained_tokens": sum(int(p.facts["trained_tokens"]) for p in shards),
            "tokens_left_out": total - planned,
            "content_hash": f"{found:032x}",
        },
        ledger=ledger,
        token_ledger=[("all", "dropped", total - planned)] if total > planned else [],
        tables={"splits": _splits_table(work, lengths, plans, shards)},
        histograms={
            "fill": Histogram(
                "fill", "share of seq_len", tuple(round(float(e), 2) for e in edges), tuple(int(c) for c in counts)
            )
        },
        schema=tuple((f.name, str(f.type)) for f in native.SEQUENCES),
        card=_card(work),
        rows_made=len(lengths.tokens),
    )


def _splits_table(work: Work, lengths: _Lengths, plans: list[_SplitPlan], shards: list[Part]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for one in plans:
        own = [p.facts for p in shards if p.facts["split"] == one.split]
        examples = int((lengths.splits == SPLITS.index(one.split)).sum())
        rows.append(
            (work.dataset_name, one.split, examples, one.plan.sequences, sum(int(f["trained_tokens"]) for f in own))
        )
    return Table(("dataset", "split", "rows", "sequences", "trained_tokens"), tuple(rows))
