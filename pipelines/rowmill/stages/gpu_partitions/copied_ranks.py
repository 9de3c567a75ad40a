"""Ranks as folders of shards: the sequences of the order, copied in the order of training.

What belongs here: moving sequences to ranks, their conservation. What does not: which place belongs to which rank
(`rank_assignment.py`), the manifest (`stage.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.stage_names import TRAINING_SPLITS
from rowmill.core.storage import Store, digest_bytes
from rowmill.schema.examples import WEIGHT_COLUMN
from rowmill.schema.manifest import File, Manifest, Part
from rowmill.schema.rows import SEGMENT_COLUMNS
from rowmill.shards import gather, native
from rowmill.shards.shard_copies import NumberedShard, ShardCopies
from rowmill.stages import inputs, part_files
from rowmill.stages.base import (
    StageContext,
    open_host_scratch,
)
from rowmill.stages.gpu_partitions.rank_parts import fingerprint_rank
from rowmill.stages.kept_parts import part_folder

SHARD_TOKENS = 2 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _RankSource:
    """What all ranks are made of: row r is in the shard f with `first_rows[f] <= r < first_rows[f + 1]`.

    The last row is the filler, which is in no shard.
    """

    copies: ShardCopies
    first_rows: Ints
    filler: pa.Table


def hash_shard(shard: NumberedShard, source: _RankSource) -> bytes:
    """Return the content hashes of a shard's sequences, 16 bytes each; leave a copy for the ranks of this host."""
    return _hash_sequences(source.copies.read(shard))


def _hash_sequences(segments: native.Segments) -> bytes:
    return b"".join(value.to_bytes(16, "little") for value in native.hash_sequences(segments))


@dataclass(frozen=True, slots=True)
class _RankTask:
    root: str
    at: str
    fingerprint: str
    wanted: Ints
    per_shard: int
    group_rows: int
    card: dict[str, str]
    facts: pa.Table


def write_rank(task: _RankTask, source: _RankSource) -> tuple[Part, int]:
    """Write one rank's shards; return the part and the content hash of the files read back."""
    store = Store(task.root)
    sources = _require_rank_sources(task, source)
    files: dict[str, File] = {}
    found = 0
    counted: dict[str, list[int]] = {}
    for number, begin in enumerate(range(0, len(task.wanted), task.per_shard)):
        table = _restore_shard_types(
            gather.take_rows(sources, source.first_rows, task.wanted[begin : begin + task.per_shard])
        )
        sink = BytesIO()
        native.write_native_shard(table, sink, task.card, group_rows=task.group_rows)
        content = sink.getvalue()
        name = f"data/part-{number:05d}.parquet"
        store.write(f"{task.at}/{name}", content)
        files[name] = File(f"{task.at}/{name}", len(content), digest_bytes(content), table.num_rows)
        back = store.table(files[name]).combine_chunks()
        found += sum(native.hash_sequences(native.recover_segments(back)))
        _count_rank_tokens(back, counted)
    files["facts"] = part_files.write_parquet(store, f"{task.at}/facts.parquet", task.facts)
    fillers = counted.pop(_FILLERS, [0])[0]
    facts = {
        "sequences": len(task.wanted),
        "fillers": fillers,
        "tokens": sum(tokens for _, tokens, _ in counted.values()),
        "trained_tokens": sum(trained for _, _, trained in counted.values()),
        "datasets": dict(sorted(counted.items())),
    }
    return Part(task.fingerprint, files, facts), found % native.HASH_MODULUS


def _require_rank_sources(task: _RankTask, source: _RankSource) -> list[str]:
    """Return this host's copies of all shards, of which those that the rank needs are there, and of the filler."""
    scratch, fillers = source.copies.scratch, len(source.first_rows) - 2
    needed = np.unique(np.searchsorted(source.first_rows, task.wanted, "right") - 1)
    source.copies.require(needed[needed < fillers].tolist())
    scratch.require({"filler.arrow": partial(native.write_shard_scratch, source.filler)})
    return [*source.copies.files, scratch.locate("filler.arrow")]


_FILLERS = ""
"""The dataset name of fillers; no dataset has an empty name."""


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


def write_ranks(work: StageContext, names: Sequence[str]) -> list[Part]:
    """Write some ranks' shards, and compare their content with that of the packed shards."""
    packed = inputs.get_packed_shards(work)
    parts = [part for one in packed.values() for part in one.parts if part.facts["split"] == "train"]
    shards = tuple(NumberedShard(part.files["shard"], int(part.facts["first_sequence"])) for part in parts)
    first_rows = compute_offsets([*(shard.file.rows for shard in shards), 1])
    wanted = _locate_ordered_rows(work, packed)
    ranks = [_make_rank_task(work, name, wanted) for name in names]
    size = 4 * sum(shard.file.bytes for shard in shards)
    with open_host_scratch(work) as scratch:
        copies = ShardCopies(work.store.root, shards, scratch)
        source = _RankSource(copies, first_rows, _make_filler(work))
        hashes = b"".join(work.pool.map(hash_shard, shards, size_bytes=size, shared=source))
        made = list(work.pool.map(write_rank, ranks, size_bytes=size, shared=source))
    hashes += _hash_sequences(native.recover_segments(source.filler.combine_chunks()))
    values = [int.from_bytes(hashes[16 * i : 16 * i + 16], "little") for i in range(len(hashes) // 16)]
    done: list[Part] = []
    for task, (part, found) in zip(ranks, made, strict=True):
        expected = sum(values[i] for i in task.wanted.tolist()) % native.HASH_MODULUS
        facts = part.facts | {"conserved": found == expected, "content_hash": f"{found:032x}"}
        done.append(Part(part.fingerprint, part.files, facts))
    return done


def _make_filler(work: StageContext) -> pa.Table:
    card = next(iter(inputs.get_packed_shards(work).values())).card
    pad = next((card[name] for name in ("pad_id", "eos_id") if card.get(name) is not None), 0)
    return native.make_fillers(
        1,
        pad_id=int(pad),
        dataset="",
        weighted=work.recipe.has_loss_weights,
        columns=_list_segment_columns(work),
    )


def _list_segment_columns(work: StageContext) -> Sequence[pa.Field]:
    """Return the columns of segments that only one kind of rows has; all datasets of such a recipe are of that kind."""
    return SEGMENT_COLUMNS.get(next(iter(work.recipe.datasets.values())).row_kind, ())


def make_rank_schema(work: StageContext) -> pa.Schema:
    """Return the columns of a rank's shards."""
    columns = _list_segment_columns(work)
    return native.make_sequence_schema(weighted=work.recipe.has_loss_weights, columns=columns)


def _locate_ordered_rows(work: StageContext, packed: dict[str, Manifest]) -> Ints:
    """Return for each place of the order the row of its sequence over all shards; fillers are the last row."""
    splits = work.inputs[(work.recipe.name, TRAINING_SPLITS)]
    order = inputs.load_order(work.store, splits, ("dataset", "sequence_id", "filler"))
    rows = [sum(p.files["shard"].rows for p in one.parts if p.facts["split"] == "train") for one in packed.values()]
    firsts = compute_offsets(rows)
    filler = order.column("filler").to_numpy(zero_copy_only=False)
    datasets = np.where(filler, 0, order.column("dataset").to_numpy())
    return np.where(filler, firsts[-1], firsts[datasets] + order.column("sequence_id").to_numpy())


def _make_rank_task(work: StageContext, name: str, wanted: Ints) -> _RankTask:
    world = work.recipe.partitions.world_size
    rank = int(name.split("-")[1])
    fingerprint = fingerprint_rank(work, name)
    splits = work.inputs[(work.recipe.name, TRAINING_SPLITS)]
    steps = inputs.load_rank_steps(work.store, splits)
    shard_card = next(iter(inputs.get_packed_shards(work).values())).card
    own = {"recipe": work.recipe.name, "order": str(splits.card["order"]), "rank": str(rank), "world_size": str(world)}
    return _RankTask(
        root=work.store.root,
        at=f"{part_folder(work.folder, fingerprint)}/{name}",
        fingerprint=fingerprint,
        wanted=wanted[rank::world],
        per_shard=max(1, SHARD_TOKENS // work.recipe.seq_len),
        group_rows=native.count_group_rows(work.recipe.seq_len),
        card={k: str(v) for k, v in shard_card.items() if k != "dataset"} | own,
        facts=steps.filter(pc.equal(steps.column("rank"), rank)),
    )
