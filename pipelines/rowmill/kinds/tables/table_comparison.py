"""How a table of a model compares with the one that it learned.

The cells of records as columns of text, and hashes of them, so that tables are compared fast.

A cell is the text of its JSON value, for a string the string itself; null and an absent key are null. Polars reads all
columns of a batch at once; a batch that it cannot read is read record by record.

Comparison of generated records with the training records: columns and associations.

| compared | measure |
|---|---|
| a column of numbers | Kolmogorov–Smirnov distance: the largest gap between the cumulative distributions |
| a column of other values | total variation: half the sum of the differences of the values' shares |
| a column of names or texts, which rarely repeat | Kolmogorov–Smirnov distance of their lengths |
| two columns | Cramér's V in each table, over at most 20 classes each; numbers by quantiles of train |

All are between 0 (alike) and 1. Rejected: Pearson's coefficient, which takes only numbers and sees only linear
relations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import orjson
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import find_distinct
from rowmill.kinds.tables.schema import RecordSchema
from rowmill.kinds.tables.serialization import read_json
from rowmill.schema.manifest import DisplayTable


def read_cells(records: pa.ChunkedArray, names: Sequence[str]) -> pl.DataFrame:
    """Return the cells of the named columns, String[N] each."""
    texts: list[str] = records.to_pylist()
    schema = dict.fromkeys(names, pl.String())
    if not texts:
        return pl.DataFrame(schema=schema)
    try:
        return pl.read_ndjson("\n".join(texts).encode(), schema=schema)
    except (pl.exceptions.PolarsError, UnicodeEncodeError):
        # A lone surrogate, which JSON can escape but UTF-8 cannot encode.
        read = [read_json(text) for text in texts]
        return pl.DataFrame({name: [_format_cell(one.get(name)) for one in read] for name in names}, schema=schema)


def _format_cell(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return text.encode("utf-8", "backslashreplace").decode()


def hash_cells(cells: pl.DataFrame) -> NDArray[np.uint64]:
    """Return the hash of each cell, uint64[N, K]; seeded by column, so equal texts in two columns differ."""
    columns = [column.hash(seed=number).to_numpy() for number, column in enumerate(cells.iter_columns())]
    return np.stack(columns, axis=1) if columns else np.empty((len(cells), 0), np.uint64)


# ── Comparison of generated records with the training records: columns and associations ──


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


def compare_tables(schema: RecordSchema, train: pl.DataFrame, generated: pl.DataFrame) -> TableComparison:
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


# ── Columns ────────────────────────────────────────────────────────────────────────────────────────


def _compare_column(schema: RecordSchema, name: str, train: pl.Series, generated: pl.Series) -> dict[str, Any]:
    kind = schema.by_name[name].type
    shown = {"column": name, "type": kind}
    if kind in NUMBER_TYPES:
        measure, distance = "values", _ks_distance(_parse_finite_numbers(train), _parse_finite_numbers(generated))
    elif train.n_unique() > max(DISTINCT_TEXT_COUNT, DISTINCT_TEXT_SHARE * len(train)):
        measure, distance = "lengths", _ks_distance(_measure_text_lengths(train), _measure_text_lengths(generated))
    else:
        measure, distance = "shares", _total_variation(train, generated)
    both = {"train": _describe_column(train, kind), "generated": _describe_column(generated, kind)}
    facts = {f"{fact} {which}": both[which][fact] for fact in both["train"] for which in both}
    known = train.drop_nulls().unique()
    present = generated.drop_nulls()
    fresh = 0.0 if not len(present) else float((~present.is_in(known.implode())).mean() or 0.0)  # pyrefly: ignore[bad-argument-type]
    return {**shown, "compared": measure, "distance": round(distance, 4), "new values": round(fresh, 4), **facts}


def _describe_column(column: pl.Series, kind: str) -> Mapping[str, float | int | None]:
    facts: dict[str, float | int | None] = {
        "null": round(column.null_count() / max(len(column), 1), 4),
        "distinct": column.drop_nulls().n_unique(),
    }
    values = _parse_finite_numbers(column) if kind in NUMBER_TYPES else np.empty(0, np.float64)
    for fact, of in (("mean", np.mean), ("std", np.std), ("min", np.min), ("max", np.max)):
        facts[fact] = float(f"{float(of(values)):.6g}") if len(values) else None
    return facts


def _parse_finite_numbers(column: pl.Series) -> Numbers:
    values = column.cast(pl.Float64, strict=False).drop_nulls().to_numpy().astype(np.float64)
    return values[np.isfinite(values)]


def _measure_text_lengths(column: pl.Series) -> Numbers:
    return column.drop_nulls().str.len_chars().to_numpy().astype(np.float64)


def _ks_distance(train: Numbers, generated: Numbers) -> float:
    """Return the Kolmogorov–Smirnov distance; 1 if only one of the two has values."""
    if not len(train) or not len(generated):
        return float(len(train) != len(generated))
    places = np.concatenate((train, generated))
    shares = [np.searchsorted(np.sort(one), places, "right") / len(one) for one in (train, generated)]
    return float(np.abs(shares[0] - shares[1]).max())


def _total_variation(train: pl.Series, generated: pl.Series) -> float:
    """Return the total variation between the value distributions of two columns; null counts as a value."""
    shares = [
        pl.DataFrame({"value": column}).group_by("value").agg((pl.len() / max(len(column), 1)).alias("share"))
        for column in (train, generated)
    ]
    joined = shares[0].join(shares[1], on="value", how="full", nulls_equal=True).fill_null(0)
    return float((joined["share"] - joined["share_right"]).abs().sum()) / 2


# ── Associations ───────────────────────────────────────────────────────────────────────────────────


def _assign_classes(kind: str, train: pl.Series, generated: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the class of each value: for numbers its quantile of train, else one class per common value."""
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
