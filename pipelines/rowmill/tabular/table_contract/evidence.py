"""Evidence about columns: the shapes of their values, with counts and first locations.

A type is decided over all data, so evidence is collected per part and merged in part order; a part that was observed
before is not read again.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TypeAlias

from rowmill.core.json import Json
from rowmill.tabular.table_contract.value_shapes import time_shape_of

CellLocation: TypeAlias = tuple[int, int]
"""A part, and a record in it, both counted from 0."""

MAX_EXAMPLES = 3
"""Distinct texts kept of each shape."""
MAX_EXAMPLE_CHARS = 100
"""Characters kept of such a text."""
_KINDS: dict[type, str] = {
    int: "integer", Decimal: "decimal", float: "decimal", bool: "boolean", str: "string",
    list: "container", dict: "container",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShapeTally:
    """Number of values of a shape, and the first distinct ones with their locations."""

    count: int
    examples: tuple[tuple[str, CellLocation], ...]

    def plus(self, other: "ShapeTally") -> "ShapeTally":
        """Add what a later part says."""
        known = {text for text, _ in self.examples}
        news = tuple(example for example in other.examples if example[0] not in known)
        return ShapeTally(self.count + other.count, (*self.examples, *news)[:MAX_EXAMPLES])


@dataclass(frozen=True, slots=True)
class ColumnEvidence:
    """Evidence about one column.

    `present` records have it, of which `nulls` have null or an empty cell. `cells` counts the other cells of CSV by
    shape; for JSON values, `kinds` counts the types and `times` the texts that are times. `gap` is the first record
    without the column.
    """

    first: CellLocation
    present: int = 0
    nulls: int = 0
    cells: Mapping[str, ShapeTally] = field(default_factory=dict[str, ShapeTally])
    kinds: Mapping[str, ShapeTally] = field(default_factory=dict[str, ShapeTally])
    times: Mapping[str, ShapeTally] = field(default_factory=dict[str, ShapeTally])
    gap: CellLocation | None = None

    def plus(self, other: "ColumnEvidence") -> "ColumnEvidence":
        """Add what a later part says."""
        return ColumnEvidence(
            self.first,
            self.present + other.present,
            self.nulls + other.nulls,
            _merge_tallies(self.cells, other.cells),
            _merge_tallies(self.kinds, other.kinds),
            _merge_tallies(self.times, other.times),
            other.gap if self.gap is None else self.gap,
        )

    @property
    def values(self) -> int:
        """Number of values that are neither null nor an empty cell."""
        return self.present - self.nulls


def _merge_tallies(one: Mapping[str, ShapeTally], other: Mapping[str, ShapeTally]) -> dict[str, ShapeTally]:
    return {
        name: one[name].plus(other[name]) if name in one and name in other else one.get(name) or other[name]
        for name in dict.fromkeys((*one, *other))
    }


@dataclass(frozen=True, slots=True)
class TableEvidence:
    """Evidence about all columns, in order of first occurrence."""

    records: int
    columns: Mapping[str, ColumnEvidence]

    def to_json(self) -> dict[str, Json]:
        """Return it as a JSON value."""
        return {"records": self.records, "columns": {name: _column_to_json(one) for name, one in self.columns.items()}}

    @classmethod
    def from_json(cls, stored: Mapping[str, Json]) -> "TableEvidence":
        """Read what `to_json` returned."""
        columns: dict[str, Json] = stored["columns"]
        return cls(stored["records"], {name: _column_from_json(one) for name, one in columns.items()})


def _column_to_json(column: ColumnEvidence) -> Json:
    tallies = [
        {name: [one.count, [[text, *place] for text, place in one.examples]] for name, one in counted.items()}
        for counted in (column.cells, column.kinds, column.times)
    ]
    return [column.first, column.present, column.nulls, *tallies, column.gap]


def _column_from_json(stored: Json) -> ColumnEvidence:
    first, present, nulls, cells, kinds, times, gap = stored
    counted = [
        {
            name: ShapeTally(count, tuple((text, (part, row)) for text, part, row in examples))
            for name, (count, examples) in one.items()
        }
        for one in (cells, kinds, times)
    ]
    return ColumnEvidence(tuple(first), present, nulls, *counted, gap=None if gap is None else tuple(gap))


# ── One part ───────────────────────────────────────────────────────────────────────────────────────


def observe_records(records: Sequence[Mapping[str, Json]], rows: Sequence[int] | None = None) -> TableEvidence:
    """Return the evidence of a part's JSON values; `rows` are the record numbers in the part."""
    numbers = range(len(records)) if rows is None else rows
    values: dict[str, list[Json]] = {}
    having: dict[str, list[int]] = {}
    whole: dict[str, None] = dict.fromkeys(records[0]) if records else {}
    if all(one.keys() == whole.keys() for one in records):
        values = {name: [one[name] for one in records] for name in whole}
        having = {name: list(numbers) for name in whole}
    else:
        for number, record in zip(numbers, records, strict=True):
            for name, value in record.items():
                values.setdefault(name, []).append(value)
                having.setdefault(name, []).append(number)
    return TableEvidence(
        len(records), {name: _observe_values(column, having[name], numbers) for name, column in values.items()}
    )


def _find_gap(having: Sequence[int], numbers: Sequence[int]) -> CellLocation | None:
    if len(having) == len(numbers):
        return None
    known = set(having)
    return (0, next(number for number in numbers if number not in known))


def _tally_time_shapes(
    counted: Mapping[str, int], texts: Sequence[Json], having: Sequence[int]
) -> dict[str, ShapeTally]:
    """Count JSON texts by shape; `counted` has them in order of first occurrence."""
    counts: Counter[str] = Counter()
    first: dict[str, list[str]] = {}
    for text, count in counted.items():
        shape = time_shape_of(text)
        counts[shape] += count
        held = first.setdefault(shape, [])
        if len(held) < MAX_EXAMPLES:
            held.append(text)
    return {
        shape: ShapeTally(
            count, tuple((text[:MAX_EXAMPLE_CHARS], (0, having[texts.index(text)])) for text in first[shape])
        )
        for shape, count in counts.items()
    }


def _observe_values(values: Sequence[Json], having: Sequence[int], numbers: Sequence[int]) -> ColumnEvidence:
    types = list(map(type, values))
    kinds: dict[str, ShapeTally] = {}
    for own, count in Counter(types).items():
        if own is not type(None):
            tally = ShapeTally(count, _find_first_values(own, types, values, having))
            kind = _KINDS[own]
            kinds[kind] = kinds[kind].plus(tally) if kind in kinds else tally
    texts = [value for value in values if type(value) is str] if "string" in kinds else []
    times = _tally_time_shapes(Counter(text for text in texts if text), values, having) if texts else {}
    return ColumnEvidence((0, having[0]), len(values), values.count(None), {}, kinds, times, _find_gap(having, numbers))


def _find_first_values(
    wanted: type, types: Sequence[type], values: Sequence[Json], having: Sequence[int]
) -> tuple[tuple[str, CellLocation], ...]:
    """Return the first values of a type with their locations."""
    found: list[tuple[str, CellLocation]] = []
    at = -1
    for _ in range(min(MAX_EXAMPLES, types.count(wanted))):
        at = types.index(wanted, at + 1)
        found.append((str(values[at])[:MAX_EXAMPLE_CHARS], (0, having[at])))
    return tuple(found)


# ── All parts ──────────────────────────────────────────────────────────────────────────────────────


def merge_evidence(parts: Iterable[TableEvidence]) -> TableEvidence:
    """Merge the evidence of parts; columns are in order of first occurrence."""
    records, columns = 0, dict[str, ColumnEvidence]()
    seen: list[tuple[int, TableEvidence]] = []
    for number, part in enumerate(parts):
        if not part.records:
            continue
        records += part.records
        seen.append((number, part))
        for name, column in part.columns.items():
            own = _assign_part(column, number)
            columns[name] = columns[name].plus(own) if name in columns else own
    return TableEvidence(records, {name: _locate_gap(name, one, records, seen) for name, one in columns.items()})


def _locate_gap(
    name: str, column: ColumnEvidence, records: int, seen: Sequence[tuple[int, TableEvidence]]
) -> ColumnEvidence:
    """Find the first record without a column that is missing from some parts."""
    if column.present == records:
        return column
    for number, part in seen:
        own = part.columns.get(name)
        if own is None:
            return replace(
                column, gap=(number, min(one.first[1] for one in part.columns.values()) if part.columns else 0)
            )
        if own.gap is not None:
            return replace(column, gap=(number, own.gap[1]))
    return column


def _assign_part(column: ColumnEvidence, number: int) -> ColumnEvidence:
    tallies = [
        {
            name: ShapeTally(one.count, tuple((text, (number, row)) for text, (_, row) in one.examples))
            for name, one in counted.items()
        }
        for counted in (column.cells, column.kinds, column.times)
    ]
    gap = None if column.gap is None else (number, column.gap[1])
    return ColumnEvidence((number, column.first[1]), column.present, column.nulls, *tallies, gap=gap)
