"""Records compared with the training table: generated ones, and held-out ones that nearly repeat it.

Of generated records are compared: columns and associations, on at most `MAX_SAMPLED_ROWS` rows of each table, and
copies of training rows, among all of them. Held-out records of one table share keys and prompt, so their cells are
compared instead of n-grams of tokens, without the group columns, which differ between splits by construction.

    record  a=1 b=x c=2024 │ signatures, each without one column:  b+c  a+c  a+b
    train   a=7 b=x c=2024 │ shares b+c: a near duplicate, unless b+c would be expected by chance

In a table of few distinct values, records agree by chance. So a shared signature counts only if independent columns
would not explain it: the expected number of train records with its values is less than 0.01.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import are_among, find_distinct
from rowmill.core.json import Json
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.core.storage import File, Store
from rowmill.kinds.base import DatasetOptions, KindContext, NearRows
from rowmill.kinds.tables.counts import TrainComparisonCounts
from rowmill.kinds.tables.options import require_records
from rowmill.kinds.tables.partitions import load_observed_table
from rowmill.kinds.tables.schema import RecordSchema
from rowmill.kinds.tables.serialization import read_json
from rowmill.parts.context import WorkContext
from rowmill.schema import manifest
from rowmill.schema.manifest import DisplayTable, Manifest, Part
from rowmill.schema.row_counts import RowCounts

if TYPE_CHECKING:
    import polars as pl


def read_cells(records: pa.ChunkedArray, names: Sequence[str]) -> "pl.DataFrame":
    """Return the cells of the named columns, String[N] each; equal values have equal texts in every table."""
    import polars as pl

    texts: list[str] = records.to_pylist()
    schema = dict.fromkeys(names, pl.String())
    if not texts:
        return pl.DataFrame(schema=schema)
    try:
        return pl.read_ndjson("\n".join(texts).encode(), schema=schema)
    except pl.exceptions.PolarsError:
        texts = [json.dumps(_make_storable(read_json(text)), ensure_ascii=False) for text in texts]
        return pl.read_ndjson("\n".join(texts).encode(), schema=schema)


def _make_storable(value: Json) -> Json:
    """Return a value with texts for what Polars does not read: numbers beyond float64, and lone surrogates."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case Decimal() | int() if not -sys.float_info.max <= value <= sys.float_info.max:
            return str(value)
        case Decimal():
            return float(value)
        case list():
            return [_make_storable(one) for one in value]
        case dict():
            return {_make_storable(name): _make_storable(one) for name, one in value.items()}
        case _:
            return value


def hash_cells(cells: "pl.DataFrame") -> NDArray[np.uint64]:
    """Return the hash of each cell, uint64[N, K]; seeded by column, so equal texts in two columns differ."""
    columns = [column.hash(seed=number).to_numpy() for number, column in enumerate(cells.iter_columns())]
    return np.stack(columns, axis=1) if columns else np.empty((len(cells), 0), np.uint64)


# ── Generated records beside the training table ────────────────────────────────────────────────────


NUMBER_TYPES = frozenset({"integer", "float", "decimal", "duration"})
MAX_CLASSES = 20
DISTINCT_TEXT_SHARE = 0.5
"""A column with a larger share of distinct values is taken for names or texts, and compared by lengths."""
DISTINCT_TEXT_COUNT = 50
"""A column with at most this many distinct values is compared by values, however small the table."""
MAX_PAIRED_COLUMNS = 40
"""Columns whose associations are measured: the number of pairs is quadratic."""
MAX_TABLE_LINES = 60

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TableComparison:
    """Comparison of two tables: tables for the report, and the largest distances."""

    columns: DisplayTable
    associations: DisplayTable
    column_distance: float
    association_distance: float


def compare_tables(schema: RecordSchema, train: "pl.DataFrame", generated: "pl.DataFrame") -> TableComparison:
    """Compare the columns and the associations of two tables; both have rows."""
    lines = [_compare_column(schema, name, train[name], generated[name]) for name in schema.names]
    # Every pair of columns with its Cramér's V in both tables, largest difference first.
    names = [name for name in schema.names if train[name].n_unique() > 1][:MAX_PAIRED_COLUMNS]
    classes = {name: _assign_classes(schema.by_name[name].type, train[name], generated[name]) for name in names}
    pairs: list[tuple[Any, ...]] = []
    for first, second in combinations(names, 2):
        there, here = (_cramers_v(classes[first][which], classes[second][which]) for which in (0, 1))
        pairs.append((first, second, round(there, 4), round(here, 4), round(abs(there - here), 4)))
    pairs.sort(key=lambda pair: (-pair[4], pair[0], pair[1]))
    return TableComparison(
        DisplayTable(
            tuple(lines[0]) if lines else ("column",), tuple(tuple(line.values()) for line in lines[:MAX_TABLE_LINES])
        ),
        DisplayTable(("first", "second", "train", "generated", "difference"), tuple(pairs[:MAX_TABLE_LINES])),
        max((float(line["distance"]) for line in lines), default=0.0),
        max((float(pair[4]) for pair in pairs), default=0.0),
    )


def _compare_column(schema: RecordSchema, name: str, train: "pl.Series", generated: "pl.Series") -> dict[str, Any]:
    kind = schema.by_name[name].type
    shown = {"column": name, "type": kind}
    if kind in NUMBER_TYPES:
        measure, distance = "values", _ks_distance(_parse_finite_numbers(train), _parse_finite_numbers(generated))
    elif train.n_unique() > max(DISTINCT_TEXT_COUNT, DISTINCT_TEXT_SHARE * len(train)):
        measure, distance = "lengths", _ks_distance(_measure_text_lengths(train), _measure_text_lengths(generated))
    else:
        measure, distance = "shares", _total_variation(train, generated)
    both = {"train": _describe_column(train, kind), "generated": _describe_column(generated, kind)}
    of_both = {f"{measured} {which}": both[which][measured] for measured in both["train"] for which in both}
    known = train.drop_nulls().unique()
    present = generated.drop_nulls()
    fresh = 0.0 if not len(present) else float((~present.is_in(known.implode())).mean() or 0.0)  # pyrefly: ignore[bad-argument-type]
    return {**shown, "compared": measure, "distance": round(distance, 4), "new values": round(fresh, 4), **of_both}


def _describe_column(column: "pl.Series", kind: str) -> Mapping[str, float | int | None]:
    described: dict[str, float | int | None] = {
        "null": round(column.null_count() / max(len(column), 1), 4),
        "distinct": column.drop_nulls().n_unique(),
    }
    values = _parse_finite_numbers(column) if kind in NUMBER_TYPES else np.empty(0, np.float64)
    for name, of in (("mean", np.mean), ("std", np.std), ("min", np.min), ("max", np.max)):
        described[name] = float(f"{float(of(values)):.6g}") if len(values) else None
    return described


def _parse_finite_numbers(column: "pl.Series") -> Numbers:
    import polars as pl

    values = column.cast(pl.Float64, strict=False).drop_nulls().to_numpy().astype(np.float64)
    return values[np.isfinite(values)]


def _measure_text_lengths(column: "pl.Series") -> Numbers:
    return column.drop_nulls().str.len_chars().to_numpy().astype(np.float64)


def _ks_distance(train: Numbers, generated: Numbers) -> float:
    """Return the Kolmogorov–Smirnov distance; 1 if only one of the two has values."""
    if not len(train) or not len(generated):
        return float(len(train) != len(generated))
    places = np.concatenate((train, generated))
    shares = [np.searchsorted(np.sort(one), places, "right") / len(one) for one in (train, generated)]
    return float(np.abs(shares[0] - shares[1]).max())


def _total_variation(train: "pl.Series", generated: "pl.Series") -> float:
    """Return the total variation between the value distributions of two columns; null counts as a value."""
    import polars as pl

    shares = [
        pl.DataFrame({"value": column}).group_by("value").agg((pl.len() / max(len(column), 1)).alias("share"))
        for column in (train, generated)
    ]
    joined = shares[0].join(shares[1], on="value", how="full", nulls_equal=True).fill_null(0)
    return float((joined["share"] - joined["share_right"]).abs().sum()) / 2


def _assign_classes(
    kind: str, train: "pl.Series", generated: "pl.Series"
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the class of each value: for numbers its quantile of train, else one class per common value."""
    import polars as pl

    if kind in NUMBER_TYPES and len(_parse_finite_numbers(train)):
        edges = find_distinct(np.quantile(_parse_finite_numbers(train), np.linspace(0, 1, MAX_CLASSES)[1:-1]))
        values = (one.cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy() for one in (train, generated))
        there, here = (np.where(np.isnan(one), len(edges) + 1, np.searchsorted(edges, one)) for one in values)
        return there.astype(np.int64), here.astype(np.int64)
    counts = train.value_counts(sort=True).drop_nulls().sort(["count", train.name], descending=[True, False])
    common = counts[train.name].head(MAX_CLASSES - 2).to_list()
    number = {value: place + 2 for place, value in enumerate(common)}
    there, here = (
        one.replace_strict(number, default=1, return_dtype=pl.Int64).set(one.is_null(), 0).to_numpy()
        for one in (train, generated)
    )
    return there.astype(np.int64), here.astype(np.int64)


def _cramers_v(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """Return the association of two columns of classes: 0 independent, 1 fully determined."""
    width = int(second.max(initial=0)) + 1
    counts = np.bincount(first * width + second, minlength=(int(first.max(initial=0)) + 1) * width)
    seen = counts.reshape(-1, width).astype(np.float64)
    seen = seen[seen.sum(axis=1) > 0][:, seen.sum(axis=0) > 0]
    degrees = min(seen.shape) - 1
    if degrees < 1:
        return 0.0
    total = seen.sum()
    expected = seen.sum(axis=1, keepdims=True) * seen.sum(axis=0, keepdims=True) / total
    return float(np.sqrt(((seen - expected) ** 2 / expected).sum() / total / degrees))


MAX_CHANCE = 0.01
"""Maximum train records expected to share a signature by chance if it is to count."""
_SALT = np.uint64(0x9E3779B97F4A7C15)

Hashes = NDArray[np.uint64]


def find_near_records(context: WorkContext, dataset: DatasetOptions, rows: Manifest) -> NearRows:
    """Compare the held-out records of a table with its train records; tables of one column are not compared."""
    group_columns = require_records(dataset).group_columns
    names = [name for name in load_observed_table(rows).schema.names if name not in group_columns]
    if len(names) < 2:
        return NearRows(0, ())
    files = rows.files("rows")
    size = sum(file.bytes for file in files)
    parts = list(context.pool.map(partial(hash_held_cells, context.store, names), files, size_bytes=size))
    row_ids = [row_id for ids, _ in parts for row_id in ids]
    held = np.concatenate([np.empty((0, len(names)), np.uint64), *(hashes for _, hashes in parts)])
    if not row_ids:
        return NearRows(0, ())
    signatures, cells = find_distinct(_compute_signatures(held)), find_distinct(held)
    seen, counts = np.zeros(len(signatures), bool), np.zeros(len(cells), np.int64)
    total = 0
    search = partial(find_cells_in_train, context.store, names)
    for places, own, train_rows in context.pool.map(search, files, size_bytes=size, shared=(signatures, cells)):
        seen[places] = True
        counts += own
        total += train_rows
    shared = signatures[seen]
    if not total or not len(shared):
        return NearRows(len(row_ids), ())
    # The train records that would share a signature by chance, as if columns were independent.
    of_cell = np.log2(np.maximum(counts, 1) / total)[np.searchsorted(cells, held)]
    expected = np.log2(total) + of_cell.sum(axis=1, keepdims=True) - of_cell
    is_shared = are_among(_compute_signatures(held), shared)
    near = (is_shared & (expected < np.log2(MAX_CHANCE))).any(axis=1)
    return NearRows(len(row_ids), tuple(row_ids[place] for place in np.flatnonzero(near).tolist()))


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
    store: Store, columns: Sequence[str], file: File, held: tuple[Hashes, Hashes]
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the held-out signatures found in a part's train rows, the count of each held-out cell, and of rows.

    `held` are the distinct signatures and cells of the held-out records, sorted.
    """
    signatures, cells = held
    rows = store.table(file, ["split", "record"])
    train = rows.filter(pc.equal(rows.column("split"), "train"))
    hashes = hash_cells(read_cells(train.column("record"), columns))
    places = _locate_hashes(signatures, _compute_signatures(hashes))
    own = np.bincount(_locate_hashes(cells, hashes), minlength=len(cells))
    return find_distinct(places), own, train.num_rows


def _locate_hashes(known: Hashes, found: Hashes) -> NDArray[np.int64]:
    """Return the indices in the sorted `known` of those elements of `found` that occur there."""
    flat = found.reshape(-1)
    places = np.minimum(np.searchsorted(known, flat), len(known) - 1)
    return places[known[places] == flat]


MAX_SAMPLED_ROWS = 200_000
MAX_NAMED_COPIES = 10


@dataclass(slots=True)
class TrainComparison:
    """Comparison of generated with training records; without counts if either has none."""

    counts: Sequence[TrainComparisonCounts] = ()
    tables: dict[str, DisplayTable] = field(default_factory=dict[str, DisplayTable])
    samples: tuple[str, ...] = ()


def compare_with_train(context: KindContext, parts: Sequence[Part]) -> TrainComparison:
    """Compare the records of some parts with the rows that the model was trained on."""
    import polars as pl

    trained = context.input(TOKENIZED_EXAMPLES)
    key = (*context.dataset_key, CANONICAL_ROWS)
    rows = manifest.load_input(context.store, trained, key)
    schema = load_observed_table(trained).schema
    tables = [context.store.table(part.files["records"], ["text_id", "record"]) for part in parts]
    generated = pa.concat_tables(tables) if tables else pa.table({"text_id": [], "record": []})
    train = rows.get_counts(RowCounts).splits.get("train", 0)
    if not generated.num_rows or not train or not schema.names:
        return TrainComparison()
    # Numbered groups of private series are synthetic; only the other columns are compared.
    form = require_records(context.dataset)
    left_out = form.group_columns if form.privacy.dp_enabled else ()
    compared = tuple(name for name in schema.names if name not in left_out)
    cells = read_cells(generated.column("record"), schema.names)
    hashes = _sum_cell_hashes(cells, compared)
    files, stride = rows.files("rows"), -(-train // MAX_SAMPLED_ROWS)
    search = partial(search_train_part, context.store, schema.names, compared, stride)
    size = sum(file.bytes for file in files)
    made = list(context.pool.map(search, files, size_bytes=size, shared=find_distinct(hashes)))
    copied = are_among(hashes, find_distinct(np.concatenate([one for one, _, _ in made])))
    every = np.concatenate([one for _, one, _ in made])
    taken = pl.concat([one for _, _, one in made])
    found = compare_tables(schema, taken, cells.gather_every(-(-len(cells) // MAX_SAMPLED_ROWS)))
    counts = TrainComparisonCounts(
        compared_records=len(hashes),
        copied_records=int(copied.sum()),
        distinct_records=len(find_distinct(hashes)),
        train_records=len(every),
        distinct_train_records=len(find_distinct(every)),
        column_distance=found.column_distance,
        association_distance=found.association_distance,
    )
    table = DisplayTable(
        ("table", "records", "repeated", "copies of train"),
        (
            ("train", counts.train_records, counts.repeated_train_records, None),
            ("generated", counts.compared_records, counts.repeated_records, counts.share_copied()),
        ),
    )
    text_ids = generated.column("text_id").to_pylist()
    names = dict.fromkeys(text_ids[place] for place in np.flatnonzero(copied).tolist())
    tables = {"beside train": table, "columns beside train": found.columns, "associations": found.associations}
    return TrainComparison([counts], tables, tuple(names)[:MAX_NAMED_COPIES])


def search_train_part(
    store: Store,
    columns: Sequence[str],
    compared: Sequence[str],
    stride: int,
    file: File,
    generated: NDArray[np.uint64],
) -> "tuple[NDArray[np.uint64], NDArray[np.uint64], pl.DataFrame]":
    """Return the generated records that a part's training rows equal, a hash per row, and every `stride`-th's cells."""
    rows = store.table(file, ["split", "record"])
    train = rows.filter(pc.equal(rows.column("split"), "train"))
    cells = read_cells(train.column("record"), columns)
    hashes = _sum_cell_hashes(cells, compared)
    equal = generated[are_among(generated, find_distinct(hashes))]
    return equal, hashes, cells.gather_every(stride)


def _sum_cell_hashes(cells: "pl.DataFrame", names: Sequence[str]) -> NDArray[np.uint64]:
    """Return a hash for each record, the sum of its cells' hashes."""
    return hash_cells(cells.select(names)).sum(axis=1, dtype=np.uint64)
