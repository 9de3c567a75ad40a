"""Comparison of two tables: distances are 0 for equal tables, 1 for disjoint ones, and grow with the difference."""

import random
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.kinds.tables.comparison import TableComparison, compare_tables, read_cells
from rowmill.kinds.tables.schema import Column, RecordSchema

SCHEMA = RecordSchema((Column("n", "integer"), Column("kind", "string", nullable=True), Column("name", "string")))


def table(count: int, seed: int = 0) -> pl.DataFrame:
    """Return rows whose kind follows from their number, and whose names rarely repeat."""
    drawn = random.Random(seed)
    numbers = [drawn.randrange(100) for _ in range(count)]
    kinds = [None if n < 5 else "low" if n < 50 else "high" for n in numbers]
    names = ["x" * drawn.randrange(1, 9) + str(drawn.random()) for _ in numbers]
    return pl.DataFrame({"n": [str(n) for n in numbers], "kind": kinds, "name": names})


def column(found: TableComparison, name: str) -> dict[str, Any]:
    return next(dict(zip(found.columns.columns, row, strict=True)) for row in found.columns.rows if row[0] == name)


def association(found: TableComparison, first: str, second: str) -> tuple[float, float]:
    return next((row[2], row[3]) for row in found.associations.rows if row[:2] == (first, second))


def test_table_has_no_distance_from_itself_and_columns_are_compared_by_their_values() -> None:
    found = compare_tables(SCHEMA, table(300), table(300))
    assert (found.column_distance, found.association_distance) == (0, 0)
    assert column(found, "n")["distinct train"] == column(found, "n")["distinct generated"]

    found = compare_tables(SCHEMA, table(300), table(300, seed=1))
    assert [column(found, name)["compared"] for name in SCHEMA.names] == ["values", "shares", "lengths"]
    assert found.column_distance < 0.15


def test_distance_of_a_column_is_the_share_that_moved() -> None:
    train, moved = (pl.DataFrame({"n": [str(n if n < kept else 1000) for n in range(100)]}) for kept in (100, 75))
    line = column(compare_tables(RecordSchema((Column("n", "integer"),)), train, moved), "n")
    assert (line["distance"], line["new values"]) == (0.25, 0.25)
    assert (line["max train"], line["max generated"], line["mean train"]) == (99, 1000, 49.5)

    schema = RecordSchema((Column("kind", "string", nullable=True),))
    train = pl.DataFrame({"kind": ["a"] * 50 + ["b"] * 50})
    made = pl.DataFrame({"kind": ["a"] * 50 + ["c"] * 20 + [None] * 30})
    line = column(compare_tables(schema, train, made), "kind")

    assert (line["distance"], line["null train"], line["null generated"]) == (0.5, 0, 0.3)
    assert line["new values"] == pytest.approx(20 / 70, abs=1e-4)


def test_columns_that_lost_their_association_are_first_in_the_table() -> None:
    train = table(2000)
    shuffled = train.with_columns(pl.col("kind").shuffle(seed=1))
    found = compare_tables(SCHEMA, train, shuffled)

    there, here = association(found, "n", "kind")
    assert there > 0.9
    assert here < 0.2
    assert found.associations.rows[0][:2] == ("n", "kind")
    assert column(found, "kind")["distance"] == column(found, "n")["distance"] == 0


ROWS = st.lists(st.tuples(st.integers(-5, 5), st.sampled_from(["a", "b", None])), min_size=1, max_size=30)


@pytest.mark.slow
@given(ROWS, ROWS)
def test_distances_are_between_0_and_1(left: list[tuple[int, Any]], right: list[tuple[int, Any]]) -> None:
    schema = RecordSchema((Column("n", "integer"), Column("kind", "string", nullable=True)))
    frames = [
        pl.DataFrame({"n": [str(n) for n, _ in rows], "kind": pl.Series([kind for _, kind in rows], dtype=pl.String)})
        for rows in (left, right)
    ]
    found = compare_tables(schema, *frames)
    assert 0 <= found.column_distance <= 1
    assert 0 <= found.association_distance <= 1


def test_cells_are_the_same_texts_beside_a_record_that_polars_does_not_read() -> None:
    value = '[1.50,true,null,"\u00e9",{"k":[-0.0,1e5,1180591620717411303424,1e-400]}]'
    plain = [f'{{"a":{one},"b":{value}}}' for one in ("1.50", "-0.0", "1e22", "0.30000000000000004", "true", '"x"')]
    odd = ['{"a":1e999}', '{"a":-1e999999999}', f'{{"a":{"9" * 400}}}', '{"a":"\\ud83d"}']

    expected = read_cells(pa.chunked_array([plain]), ("a", "b"))
    for one in odd:
        found = read_cells(pa.chunked_array([[*plain, one]]), ("a", "b"))
        assert found.head(len(plain)).equals(expected)
        assert found.row(-1)[0] is not None
