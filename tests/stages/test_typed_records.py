"""Rows of records: the column path equals the reference path, and the fast reading of lines is exact."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import orjson
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rowmill.kinds.tables import part_rows
from rowmill.kinds.tables.inference import EVIDENCE, build_record_schema, infer_contract, merge_evidence
from rowmill.kinds.tables.schema import SortKey
from rowmill.kinds.tables.serialization import read_json
from rowmill.kinds.tables.table_contract import TableContract, shape_of
from rowmill.kinds.tables.typed_cells import (
    ColumnRoles,
    Mismatches,
    RowBuilder,
    SourceColumn,
    SourceRecords,
    observe_records,
)
from rowmill.schema.rows import Rejected
from tests.support.tiers import draw
from tests.support.typed_records import TypedRecord, ValueRowBuilder

pytestmark = pytest.mark.slow

BEYOND_64_BITS = "1180591620717411303424"
NUMBERS = st.sampled_from(
    ["0", "-0", "0.0", "-0.0", "1", "1.0", "1.5", "1.50", "15e-1", "1E2", "1e-07", "0.1", "-3", "12345678901234567890",
     BEYOND_64_BITS, "1e300", "0.30000000000000004", "99999999999999999999.5", "1e400", "true", "null", '"1.5"']
)  # fmt: skip
TEXTS = st.sampled_from(
    ["NA", "", " ", "north", "2024-01-15", "2024-02-30", "15/01/2024", "\u00e9", "a\u2028b", '"', "\\", "x" * 70]
).map(json.dumps)
NESTED = st.sampled_from(['{"a":1.50}', "[1,2.0]", "{}", "[]", '{"a":{"b":null}}'])
VALUES = st.one_of(NUMBERS, TEXTS, NESTED)
NAMES = st.sampled_from(["id", "price", "where", "when", 'a"b', "z\u00e9", "a.b"])
HOSTILE = [
    "",
    "  ",
    "[1]",
    "{",
    '{"a":1,"a":2}',
    '{"a":{"b":1,"b":2}}',
    '{"id":1}\r',
    ' {"id": 1.50 }',
    '{"id":1e999999}',
]


@st.composite
def lines(draw: st.DrawFn) -> str:
    """Draw a line of JSON: mostly an object, with or without blanks, its keys in any order and some twice."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(HOSTILE))
    pairs = draw(st.lists(st.tuples(NAMES, VALUES), max_size=7))
    if draw(st.integers(0, 5)):
        pairs = list(dict(pairs).items())
    comma, colon = draw(st.sampled_from([(",", ":"), (", ", ": "), (",", " : ")]))
    return "{" + comma.join(f"{json.dumps(name)}{colon}{value}" for name, value in pairs) + "}"


def decoded(line: str) -> dict[str, Any] | Rejected | None:
    """Decode a line that orjson accepts as an object."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    # Integers beyond 64 bits are decoded exactly before (`sources/reading.py`).
    value = json.loads(line) if BEYOND_64_BITS in line else value
    return READ(line.encode(), value) if type(value) is dict else None


READ = part_rows.make_exact_line_reader()


@given(lines())
def test_line_keeps_its_digits_and_a_repeated_key_is_rejected(line: str) -> None:
    found = decoded(line)
    if found is None:
        return
    try:
        expected = read_json(line)
    except ValueError:
        assert isinstance(found, Rejected)
    else:
        assert repr(found) == repr(expected)


def roles_with(group: tuple[str, ...], order: str | None, time_key: str | None, domain: str | None) -> ColumnRoles:
    return ColumnRoles(group, len(group) > 1, order=order, time_key=time_key, domain=domain)


ROLES = st.builds(
    roles_with,
    st.sampled_from([(), ("where",), ("where", "id"), ("a.b",), ("absent",)]),
    st.sampled_from([None, "when", "id", "absent"]),
    st.sampled_from([None, None, "when", "a.b", "id"]),
    st.sampled_from([None, "where", "id", "absent"]),
)


@given(st.data(), st.lists(lines(), min_size=1, max_size=30), ROLES)
def test_rows_made_by_column_equal_those_made_one_by_one(
    data: st.DataObject, content: list[str], roles: ColumnRoles
) -> None:
    records = [one for one in map(decoded, content) if isinstance(one, dict)]
    evidence = merge_evidence(observe_records(SourceRecords.of_objects(records[: data.draw(st.integers(1, 30))])))
    assume(evidence.columns)
    inferred = infer_contract(evidence, {}, order=roles.order if roles.order in evidence.columns else None)
    contract = tightened(data, inferred)
    schema = build_record_schema(contract, evidence, {}, ())
    order = data.draw(st.sampled_from([None, SortKey("iso8601"), SortKey("elapsed_seconds"), SortKey("text")]))
    many, one_by_one = (
        RowBuilder(contract, schema, order, roles),
        ValueRowBuilder(contract, schema, order, roles),
    )
    numbers = range(7, 7 + len(records))

    for _ in range(2):
        held = SourceRecords.of_objects(records, numbers)
        found, expected = Mismatches(), Mismatches()
        assert rows_of(*many(held, [found])) == [
            one_by_one(one, number, expected) for number, one in zip(numbers, records, strict=True)
        ]
        assert found == expected


def rows_of(rows: pl.DataFrame, refused: Mapping[int, Rejected]) -> list[TypedRecord | Rejected]:
    made = rows.select("record", "group_key", "order_key", "domain").rows()
    return [refused.get(place) or TypedRecord(*one) for place, one in enumerate(made)]


def tightened(data: st.DataObject, contract: TableContract) -> TableContract:
    """Return a contract that some values may not fit, and in which some columns have NA words."""
    mismatches, words = st.sampled_from(["reject", "na"]), st.sampled_from([[], ["NA", ""]])
    changed = {
        name: one.model_copy(update={"on_mismatch": data.draw(mismatches), "na": data.draw(words)})
        for name, one in contract.columns.items()
    }
    return contract.model_copy(update={"columns": changed})


# ── Cells ──────────────────────────────────────────────────────────────────────────────────────────

WRITTEN = st.sampled_from(
    ["0", "1", "12", "-", "+", ".", ",", "e", "E", "A", "Jan", "jan ", "2024", "01", "/", ":", " ", "\t", "T", "Z",
     "NA", "true", "null", "x", "\u00e9", "\n", '"', "\\", "#", "missing", "1.234", "12:30", "2024-01-02", "C5",
     "\x01", "9" * 401]
)  # fmt: skip
CELLS = st.lists(WRITTEN, max_size=4).map("".join)


def cells_of(cells: list[str], numbers: Sequence[int], borders: Sequence[int]) -> SourceRecords:
    return SourceRecords({"a": SourceColumn.of_cells(cells)}, numbers, borders)


@settings(max_examples=draw(300))
@given(st.lists(CELLS, min_size=1, max_size=40))
def test_shapes_of_a_column_are_those_of_its_cells(cells: list[str]) -> None:
    shapes = Counter(shape_of(cell) for cell in cells if cell)

    found = observe_records(cells_of(cells, range(5, 5 + len(cells)), (0, len(cells))))[0].columns["a"]

    assert {name: one.count for name, one in found.cells.items()} == shapes
    assert (found.present, found.nulls) == (len(cells), cells.count(""))
    for name, one in found.cells.items():
        distinct = list(dict.fromkeys(cell for cell in cells if cell and shape_of(cell) == name))[:3]
        assert one.examples == tuple((cell[:100], (0, 5 + cells.index(cell))) for cell in distinct)


@given(st.lists(st.lists(CELLS, max_size=12), min_size=1, max_size=5))
def test_evidence_of_parts_is_the_same_together_and_alone(parts: list[list[str]]) -> None:
    together = [cell for part in parts for cell in part]
    numbers = [number for part in parts for number in range(len(part))]
    borders = [0, *accumulate(map(len, parts))]

    found = observe_records(cells_of(together, numbers, borders))

    for part, one in zip(parts, found, strict=True):
        [alone] = observe_records(cells_of(part, range(len(part)), (0, len(part))))
        assert EVIDENCE.dump_json(one) == EVIDENCE.dump_json(alone)


@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), min_size=1, max_size=20))
def test_records_of_cells_are_read_as_they_were_decoded(rows: list[list[str]]) -> None:
    names = ['b"\u00e9', "a"]
    records = [dict(zip(names, row, strict=True)) for row in rows]
    columns = {name: SourceColumn.of_cells([one[name] for one in records]) for name in records[0]}
    held = SourceRecords(columns, range(len(rows)), (0, len(rows)))

    assert held.read_objects() == records
