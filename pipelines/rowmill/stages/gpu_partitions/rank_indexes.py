"""Ranks as indexes: which row of which packed shard comes when, in the order of training.

    rank-00003-of-00008/
    ├── index.parquet     place 3 11 19 … · step · pass · dataset · sequence_id · shard · row
    ├── filler.parquet    the sequence of places with shard −1
    └── facts.parquet     per step, as in ranks that are copied

`shard` counts the train shards of all datasets, in recipe order. An index is integers: no token is read to write one,
another world size costs no second copy of the tokens, and the packed shards must stay where they are.
"""

from collections.abc import Iterator, Sequence
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.storage import Store, digest_bytes
from rowmill.schema.manifest import File, Manifest, Part
from rowmill.shards import native
from rowmill.shards.sequence_hashes import join_hashes, read_hashes, tabulate_hashes
from rowmill.stages.base import StageContext
from rowmill.stages.gpu_partitions.rank_parts import fingerprint_rank
from rowmill.stages.gpu_partitions.rank_sources import (
    FILLERS,
    RankSources,
    list_train_shards,
    load_packed_inputs,
    make_rank_card,
    open_rank_sources,
    summarize_rank,
    write_step_facts,
)
from rowmill.stages.kept_parts import part_folder

FILLER_SHARD = -1

INDEX_GROUP = 1 << 16
"""Lines of a row group: what a reader decodes at once."""

RANK_INDEX_SCHEMA = pa.schema(
    [
        pa.field("place", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("pass", pa.int32(), nullable=False),
        pa.field("dataset", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("sequence_id", pa.int64(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("row", pa.int32(), nullable=False),
    ]
)
"""One line per sequence of a rank, in the order of training. A filler has no dataset's name, sequence and shard −1."""


def write_rank_indexes(context: StageContext, names: Sequence[str]) -> Iterator[Part]:
    """Write the indexes of some ranks, and yield each rank once its index was read back."""
    sources = open_rank_sources(context)
    yield from (_write_rank_index(context, sources, name) for name in names)


def _write_rank_index(context: StageContext, sources: RankSources, name: str) -> Part:
    rank = int(name.split("-")[1])
    fingerprint, card = fingerprint_rank(context, name), make_rank_card(context, rank)
    folder = f"{part_folder(context.folder, fingerprint)}/{name}"
    own = sources.select_rank(rank)
    files = {
        "index": _save_index(context.store, f"{folder}/index.parquet", _tabulate_index(sources, own), card),
        "filler": _save_filler(context.store, f"{folder}/filler.parquet", sources.filler, card),
        "facts": write_step_facts(sources, folder, rank),
    }
    found = sources.hashes.sum_content(_locate_lines(context.store, files["index"], sources.first_rows))
    facts = summarize_rank(
        len(sources.rows[own]), _count_tokens(sources, own), int(sources.padding[sources.rows[own]].sum())
    ) | {
        "conserved": found == sources.hashes.sum_content(sources.rows[own]),
        "content_hash": native.format_content_hash(found),
    }
    return Part(fingerprint, files, facts)


def _tabulate_index(sources: RankSources, own: slice) -> pa.Table:
    rows = sources.rows[own]
    shards = np.searchsorted(sources.first_rows, rows, "right") - 1
    is_filler = shards == len(sources.shards)
    numbers = sources.order.column("dataset").to_numpy()[own]
    columns = [
        np.arange(len(sources.rows))[own],
        sources.order.column("step").to_numpy()[own],
        sources.order.column("pass").to_numpy()[own],
        pa.DictionaryArray.from_arrays(
            pa.array(np.where(is_filler, len(sources.packed), numbers).astype(np.int32)),
            pa.array([*sources.packed, FILLERS], pa.string()),
        ),
        sources.order.column("sequence_id").to_numpy()[own],
        np.where(is_filler, FILLER_SHARD, shards).astype(np.int32),
        (rows - sources.first_rows[shards]).astype(np.int32),
    ]
    return pa.Table.from_arrays([pa.array(one) for one in columns], schema=RANK_INDEX_SCHEMA)


def _save_index(store: Store, path: str, table: pa.Table, card: dict[str, str]) -> File:
    sink = BytesIO()
    metadata = {f"rowmill.{name}": value for name, value in sorted(card.items())}
    pq.write_table(
        table.replace_schema_metadata(metadata),
        sink,
        compression="zstd",
        row_group_size=INDEX_GROUP,
        use_dictionary=["dataset", "pass"],
    )
    return _save(store, path, sink.getvalue(), table.num_rows)


def _save_filler(store: Store, path: str, filler: pa.Table, card: dict[str, str]) -> File:
    return _save(store, path, native.encode_native_shard(filler, card, group_rows=1), filler.num_rows)


def _save(store: Store, path: str, content: bytes, rows: int) -> File:
    store.write(path, content)
    return File(path, len(content), digest_bytes(content), rows)


def _count_tokens(sources: RankSources, own: slice) -> dict[str, list[int]]:
    """Count each dataset's sequences, tokens and trained tokens of a rank; fillers are counted separately."""
    numbers = sources.order.column("dataset").to_numpy()[own]
    rows, hashes = sources.rows[own], sources.hashes
    counted: dict[str, list[int]] = {}
    for number, name in [*enumerate(sources.packed), (FILLER_SHARD, FILLERS)]:
        some = rows[numbers == number]
        if len(some):
            counted[name] = [len(some), int(hashes.tokens[some].sum()), int(hashes.trained_tokens[some].sum())]
    return counted


def _locate_lines(store: Store, index: File, first_rows: Ints) -> Ints:
    """Return the row over all shards that each line of an index names, as it was written."""
    table = store.table(index, ("shard", "row"))
    # The filler is the last of all rows.
    shards = np.where(table.column("shard").to_numpy() == FILLER_SHARD, len(first_rows) - 2, table.column("shard"))
    return first_rows[shards] + table.column("row").to_numpy()


def find_index_damage(store: Store, output: Manifest) -> Iterator[str]:
    """Yield an error for each rank whose index names other content than the rank must have."""
    shards = list_train_shards(load_packed_inputs(store, output))
    tables = [read_hashes(store, part) for part in shards]
    for part in output.parts:
        filler = store.table(part.files["filler"]).combine_chunks()
        hashes = join_hashes([*tables, tabulate_hashes(filler)])
        first_rows = compute_offsets([*(shard.files["shard"].rows for shard in shards), 1])
        found = native.format_content_hash(hashes.sum_content(_locate_lines(store, part.files["index"], first_rows)))
        expected = str(part.facts["content_hash"])
        if found != expected:
            rank = part.files["facts"].path.rsplit("/", 1)[0]
            yield (
                f"{rank}: the sequences that its index names hash to {found}, expected {expected} by "
                "its manifest; remove the stage's folder and build again"
            )
