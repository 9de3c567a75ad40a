"""Ranks as folders of shards: the sequences of the order, copied in the order of training.

    rank-00003-of-00008/
    ├── data/part-00000.parquet …   that rank's sequences, in training order
    └── facts.parquet               per step: sequences, fillers, tokens, trained tokens, longest segment

    tasks    rank 0, steps 0–99 · rank 0, steps 100–199 · rank 1, steps 0–99 · …

A task writes `TASK_SHARDS` shards of one rank, whatever that rank's size is. Rows come from copies of the packed shards
on the task's host, which the first task that needs one makes. Rejected: taking rows out of the packed shards
themselves. In a shuffled order each sequence of 4,096 tokens comes from another row group, so that every token would be
decoded some fifteen times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints, find_distinct
from rowmill.core.storage import Store, digest_bytes
from rowmill.schema.examples import WEIGHT_COLUMN
from rowmill.schema.manifest import File, Part
from rowmill.shards import gather, native
from rowmill.shards.segment_padding import count_padding_tokens
from rowmill.shards.shard_copies import NumberedShard, ShardCopies
from rowmill.stages import inputs
from rowmill.stages.base import StageContext
from rowmill.stages.gpu_partitions.rank_parts import fingerprint_rank
from rowmill.stages.gpu_partitions.rank_sources import (
    RankSources,
    get_row_kind,
    make_rank_card,
    open_rank_sources,
    summarize_rank,
    write_step_facts,
)
from rowmill.stages.kept_parts import part_folder
from rowmill.stages.scratch_folders import open_host_scratch

SHARD_TOKENS = 2 << 20
"""Maximum tokens of a shard: some 60 MB while a worker gathers and writes it."""

TASK_SHARDS = 8
"""Shards that one task writes: a dozen seconds of work."""


@dataclass(frozen=True, slots=True, eq=False)
class _RankSource:
    """What all ranks are made of: row r is in the shard f with `first_rows[f] <= r < first_rows[f + 1]`.

    The last row is the filler, which is in no shard.
    """

    copies: ShardCopies
    first_rows: Ints
    filler: pa.Table


@dataclass(frozen=True, slots=True, eq=False)
class _RankTask:
    """Shards of one rank, the first of them number `first`; `wanted` are the rows of their sequences."""

    root: str
    folder: str
    first: int
    wanted: Ints
    per_shard: int
    group_rows: int
    card: dict[str, str]


@dataclass(frozen=True, slots=True)
class _WrittenShards:
    """The files of a task by name, their content hash, each dataset's counts, and pad tokens, from files read back."""

    files: dict[str, File]
    found: int
    counted: dict[str, list[int]]
    padding: int


def write_copied_ranks(context: StageContext, names: Sequence[str]) -> Iterator[Part]:
    """Write some ranks' shards, and yield each rank once its content was compared with that of the packed shards."""
    sources = open_rank_sources(context)
    rows = {name: sources.rows[sources.select_rank(_parse_rank(name))] for name in names}
    shards = tuple(NumberedShard(part.files["shard"], int(part.facts["first_sequence"])) for part in sources.shards)
    tasks = {name: _plan_tasks(context, name, rows[name]) for name in names}
    size = 4 * sum(shard.file.bytes for shard in shards)
    with open_host_scratch(context) as scratch:
        copies = ShardCopies(context.store.root, shards, scratch, keeps_padding=True)
        source = _RankSource(copies, sources.first_rows, sources.filler)
        every = [task for own in tasks.values() for task in own]
        made = context.pool.map(write_rank_shards, every, size_bytes=size, shared=source)
        for name, own in tasks.items():
            written = [next(made) for _ in own]
            yield _make_rank_part(sources, name, rows[name], written)


def make_rank_schema(context: StageContext) -> pa.Schema:
    """Return the columns of a rank's shards."""
    columns = inputs.list_segment_columns(context.recipe, get_row_kind(context.recipe))
    return native.make_sequence_schema(
        weighted=context.recipe.has_loss_weights, token_fields=context.recipe.rollout_fields.per_token, columns=columns
    )


def _parse_rank(name: str) -> int:
    return int(name.split("-")[1])


def _locate_rank(context: StageContext, name: str) -> str:
    return f"{part_folder(context.folder, fingerprint_rank(context, name))}/{name}"


def _plan_tasks(context: StageContext, name: str, wanted: Ints) -> list[_RankTask]:
    per_shard = max(1, SHARD_TOKENS // context.recipe.seq_len)
    per_task = TASK_SHARDS * per_shard
    return [
        _RankTask(
            root=context.store.root,
            folder=_locate_rank(context, name),
            first=begin // per_shard,
            wanted=wanted[begin : begin + per_task],
            per_shard=per_shard,
            group_rows=native.count_group_rows(context.recipe.seq_len),
            card=make_rank_card(context, _parse_rank(name)),
        )
        for begin in range(0, len(wanted), per_task)
    ]


def _make_rank_part(sources: RankSources, name: str, rows: Ints, written: Sequence[_WrittenShards]) -> Part:
    context, expected = sources.context, sources.hashes.sum_content(rows)
    counted: dict[str, list[int]] = {}
    for one in written:
        for dataset, counts in one.counted.items():
            before = counted.get(dataset, [0, 0, 0])
            counted[dataset] = [a + b for a, b in zip(before, counts, strict=True)]
    found = sum(one.found for one in written) % native.HASH_MODULUS
    files = {file: value for one in written for file, value in one.files.items()}
    sequences = sum(file.rows for file in files.values())
    files["facts"] = write_step_facts(sources, _locate_rank(context, name), _parse_rank(name))
    padding = sum(one.padding for one in written)
    facts = summarize_rank(sequences, counted, padding) | {
        "conserved": found == expected,
        "content_hash": native.format_content_hash(found),
    }
    return Part(fingerprint_rank(context, name), files, facts)


# ── One task ───────────────────────────────────────────────────────────────────────────────────────


def write_rank_shards(task: _RankTask, source: _RankSource) -> _WrittenShards:
    """Write some shards of a rank, and read them back."""
    store = Store(task.root)
    sources = _require_rank_sources(task, source)
    files: dict[str, File] = {}
    found = padding = 0
    counted: dict[str, list[int]] = {}
    for number, begin in enumerate(range(0, len(task.wanted), task.per_shard), task.first):
        table = _restore_shard_types(
            gather.take_rows(sources, source.first_rows, task.wanted[begin : begin + task.per_shard])
        )
        content = native.encode_native_shard(table, task.card, group_rows=task.group_rows)
        name = f"data/part-{number:05d}.parquet"
        store.write(f"{task.folder}/{name}", content)
        files[name] = File(f"{task.folder}/{name}", len(content), digest_bytes(content), table.num_rows)
        back = store.table(files[name]).combine_chunks()
        found += sum(native.hash_sequences(native.recover_segments(back)))
        _count_rank_tokens(back, counted)
        padding += count_padding_tokens(back)
    return _WrittenShards(files, found % native.HASH_MODULUS, counted, padding)


def _require_rank_sources(task: _RankTask, source: _RankSource) -> list[str]:
    """Return this host's copies of all shards, of which those that the task needs are there, and of the filler."""
    scratch, fillers = source.copies.scratch, len(source.first_rows) - 2
    needed = find_distinct(np.searchsorted(source.first_rows, task.wanted, "right") - 1)
    source.copies.require(needed[needed < fillers].tolist())
    scratch.require({"filler.arrow": partial(native.write_shard_scratch, source.filler)})
    return [*source.copies.files, scratch.locate("filler.arrow")]


def _count_rank_tokens(shard: pa.Table, counted: dict[str, list[int]]) -> None:
    """Add a shard's sequences, tokens and trained tokens to each dataset's counts; fillers are counted separately."""
    plain = shard.select(["tokens", "trained_tokens"]).append_column(
        "dataset", shard.column("dataset").cast(pa.string())
    )
    sums = plain.group_by("dataset").aggregate([("tokens", "count"), ("tokens", "sum"), ("trained_tokens", "sum")])
    names = ("dataset", "tokens_count", "tokens_sum", "trained_tokens_sum")
    for name, *values in zip(*(sums.column(one).to_pylist() for one in names), strict=True):
        before = counted.get(name, [0, 0, 0])
        counted[name] = [a + int(b) for a, b in zip(before, values, strict=True)]


def _restore_shard_types(table: pa.Table) -> pa.Table:
    column = table.column("dataset").combine_chunks().dictionary_encode()
    typed = table.set_column(table.schema.get_field_index("dataset"), native.SEQUENCE_SCHEMA.field("dataset"), column)
    weighted = WEIGHT_COLUMN in table.column_names
    own = typed.schema.names[len(native.make_sequence_schema(weighted=weighted)) :]
    columns = [pa.field(name, typed.schema.field(name).type.value_type) for name in own]
    return typed.cast(native.make_sequence_schema(weighted=weighted, columns=columns))
