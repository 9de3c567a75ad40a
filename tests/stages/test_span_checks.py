"""Spans and positions of a written shard: those that do not follow from its segments are found."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rowmill.core.arrays import make_list_array
from rowmill.core.storage import File, Store, digest_bytes
from rowmill.shards import native
from rowmill.stages.packed_shards.pack_group import has_whole_spans, read_back

SEQUENCES = np.array([0, 2, 3])


def shard_of(
    *, spans: Sequence[int] = (3, 2, 4), offsets: Sequence[int] = (0, 2, 3), positions: list[int] | None = None
) -> pa.Table:
    """Return two sequences, of the segments 3 2 and 4."""
    ids = np.arange(9, dtype=np.int32)
    names = pa.array([f"p:{i}#0" for i in range(3)])
    segments = native.Segments(ids, np.ones(9, bool), np.array([0, 3, 5, 9]), SEQUENCES, names, np.zeros(3, np.int32))
    table = native.make_shard_table(segments, np.array(spans, np.int32), np.array(offsets), dataset="d")
    if positions is None:
        return table
    place = table.schema.get_field_index("position_ids")
    lists = make_list_array(np.array([0, 5, 9]), np.array(positions, np.int32))
    return table.set_column(place, table.schema.field(place), lists)


def test_spans_that_are_segments_or_sequences_are_whole() -> None:
    assert has_whole_spans(shard_of())
    assert has_whole_spans(shard_of(spans=[5, 4], offsets=[0, 1, 2]))


@pytest.mark.parametrize(
    "shard",
    [
        shard_of(positions=[0, 1, 2, 3, 4, 0, 1, 2, 3]),
        shard_of(positions=[0, 1, 2, 0, 2, 0, 1, 2, 3]),
        shard_of(spans=[2, 3, 4]),
        shard_of(spans=[3, 2, 3, 1], offsets=[0, 2, 4]),
    ],
)
def test_shard_with_wrong_spans_has_no_content(tmp_path: Path, shard: pa.Table) -> None:
    """Its segments are whole, so that its content hash alone would not show it."""
    store = Store(str(tmp_path))
    files: list[File] = []
    for name, content in (("shard", native.encode_native_shard(shard, {}, group_rows=1)), ("segments", b"lineage")):
        store.write(name, content)
        files.append(File(name, len(content), digest_bytes(content), 2))

    damaged, hashes = read_back(store, files[0], files[1])

    assert (damaged, hashes.num_rows) == (1, 0)
