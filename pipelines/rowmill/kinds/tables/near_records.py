"""Leakage of near-duplicate records from train into evaluation: records that differ in one column only.

Records of one table share their keys and the prompt, so any two share many n-grams of tokens. Cells are compared
instead, without the group columns, which differ between splits by construction.

    record  a=1 b=x c=2024 │ signatures, each without one column:  b+c  a+c  a+b
    train   a=7 b=x c=2024 │ shares b+c: a near duplicate, unless b+c would be expected by chance

In a table of few distinct values, records agree by chance. So a shared signature counts only if independent columns
would not explain it: the expected number of train records with its values is less than 0.01.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import are_among, find_distinct
from rowmill.core.storage import File, Store
from rowmill.kinds.joint_rows import NearRows
from rowmill.kinds.tables.partitions import load_observed_table
from rowmill.kinds.tables.table_comparison import hash_cells, read_cells
from rowmill.parts.context import WorkContext
from rowmill.schema.manifest import Manifest

MAX_CHANCE = 0.01
"""Maximum train records expected to share a signature by chance if it is to count."""
_SALT = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _HeldCells:
    """What is looked for in train: the distinct signatures and cells of the held-out records, sorted."""

    signatures: Hashes
    cells: Hashes


def find_near_records(context: WorkContext, canonical: Manifest, group_columns: Sequence[str]) -> NearRows:
    """Compare the held-out records of a table with its train records; tables of one column are not compared."""
    names = [name for name in load_observed_table(canonical.details).schema.names if name not in group_columns]
    if len(names) < 2:
        return NearRows(0, ())
    files = canonical.files("rows")
    size = sum(file.bytes for file in files)
    parts = list(context.pool.map(partial(hash_held_cells, context.store, names), files, size_bytes=size))
    row_ids = [row_id for ids, _ in parts for row_id in ids]
    held = np.concatenate([np.empty((0, len(names)), np.uint64), *(hashes for _, hashes in parts)])
    if not row_ids:
        return NearRows(0, ())
    looked_for = _HeldCells(find_distinct(_compute_signatures(held)), find_distinct(held))
    seen = np.zeros(len(looked_for.signatures), bool)
    counts = np.zeros(len(looked_for.cells), np.int64)
    total = 0
    search = partial(find_cells_in_train, context.store, names)
    for places, own, rows in context.pool.map(search, files, size_bytes=size, shared=looked_for):
        seen[places] = True
        counts += own
        total += rows
    near = _mark_near_records(held, looked_for.signatures[seen], looked_for.cells, counts, total)
    return NearRows(len(row_ids), tuple(row_ids[place] for place in np.flatnonzero(near).tolist()))


def _mark_near_records(
    held: Hashes, shared: Hashes, cells: Hashes, counts: NDArray[np.int64], total: int
) -> NDArray[np.bool_]:
    """Return which held-out records share a signature with train that chance does not explain: bool[N]."""
    if not total or not len(shared):
        return np.zeros(len(held), bool)
    of_cell = np.log2(np.maximum(counts, 1) / total)[np.searchsorted(cells, held)]
    expected = np.log2(total) + of_cell.sum(axis=1, keepdims=True) - of_cell
    is_shared = are_among(_compute_signatures(held), shared)
    return (is_shared & (expected < np.log2(MAX_CHANCE))).any(axis=1)


def _compute_signatures(hashes: Hashes) -> Hashes:
    """Return uint64[N, K]: the sum of a record's cell hashes without column k, distinct for each k."""
    left_out = np.arange(1, hashes.shape[1] + 1, dtype=np.uint64) * _SALT
    return hashes.sum(axis=1, keepdims=True, dtype=np.uint64) - hashes + left_out


def hash_held_cells(store: Store, columns: Sequence[str], file: File) -> tuple[list[str], Hashes]:
    """Return the ids and cells of a part's held-out rows."""
    rows = store.table(file, ["row_id", "split", "record"])
    held = rows.filter(pc.not_equal(rows.column("split"), "train"))
    return held.column("row_id").to_pylist(), hash_cells(read_cells(held.column("record"), columns))


def find_cells_in_train(
    store: Store, columns: Sequence[str], file: File, held: _HeldCells
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the held-out signatures found in a part's train rows, the count of each held-out cell, and of rows."""
    rows = store.table(file, ["split", "record"])
    train = rows.filter(pc.equal(rows.column("split"), "train"))
    hashes = hash_cells(read_cells(train.column("record"), columns))
    places = _locate_hashes(held.signatures, _compute_signatures(hashes))
    own = np.bincount(_locate_hashes(held.cells, hashes), minlength=len(held.cells))
    return find_distinct(places), own, train.num_rows


def _locate_hashes(known: Hashes, found: Hashes) -> NDArray[np.int64]:
    """Return the indices in the sorted `known` of those elements of `found` that occur there."""
    flat = found.reshape(-1)
    places = np.minimum(np.searchsorted(known, flat), len(known) - 1)
    return places[known[places] == flat]
