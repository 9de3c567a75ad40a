"""A record of a table as typed values, from cells of text, JSON or Arrow columns.

    cells   north  south  north  north        values  north south        codes  0 1 0 0

Most columns repeat their values, so each distinct value is read once, and its text, its key and its position are spread
over the records that have it. The most common shapes of cells are found by patterns over all texts at once; only the
rest goes through the function for one cell.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.json import Json
from rowmill.kinds.reading.canonicalization import DEFAULT_DOMAIN
from rowmill.kinds.shared.messages import get_at_path
from rowmill.kinds.shared.splits import Splits
from rowmill.kinds.tables.inference import (
    MAX_EXAMPLE_CHARS,
    MAX_EXAMPLES,
    ColumnEvidence,
    ShapeTally,
    TableEvidence,
    describe_column_contract,
)
from rowmill.kinds.tables.options import RecordOptions
from rowmill.kinds.tables.schema import MAX_DIGITS, Column, RecordSchema, SortKey, Value
from rowmill.kinds.tables.serialization import RecordDecoder, RecordProblem, Serialiser
from rowmill.kinds.tables.table_contract import (
    LONGEST_NA_WORD,
    NULL,
    TIMES,
    ColumnContract,
    TableContract,
    is_infinite,
    make_cell_writer,
    shape_of,
    time_shape_of,
)
from rowmill.schema.rows import Rejected

if TYPE_CHECKING:
    import polars as pl

QUICK_DIGITS = 400
"""Maximum length of the numbers that patterns over whole columns match."""


ABSENT = object()
"""Placeholder in a column for records that lack it."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceColumn:
    """Distinct values of a column in order of first occurrence, and `codes` int32[N] of the records, which index them.

    Cells of CSV are texts of Arrow, none of which is null; values of JSON are a list, with `ABSENT` for records that
    lack the key.
    """

    values: pa.LargeStringArray | list[Any]
    codes: NDArray[np.int32]

    @classmethod
    def of_cells(cls, cells: pa.LargeStringArray | Sequence[str]) -> "SourceColumn":
        """Return the column of some cells."""
        encoded = pa.array(cells, pa.large_string()).dictionary_encode()
        return cls(encoded.dictionary, encoded.indices.to_numpy())

    @classmethod
    def of_values(cls, values: Sequence[Any]) -> "SourceColumn":
        """Return the column of some decoded values; those are equal whose type and text are, since 1 == True."""
        types = set(map(type, values)) - {type(None), type(ABSENT)}
        keys = values if types in ({str}, {int}, {bool}) else list(map(id, values))
        distinct = dict(zip(keys, values, strict=True))
        numbers = {key: number for number, key in enumerate(distinct)}
        return cls(list(distinct.values()), np.fromiter(map(numbers.__getitem__, keys), np.int32, len(keys)))

    @property
    def distinct(self) -> list[Any]:
        """The distinct values as Python's own."""
        return self.values if isinstance(self.values, list) else self.values.to_pylist()

    def find_places(self, codes: Sequence[int]) -> Ints:
        """Return the records whose value is one of some distinct ones."""
        return np.flatnonzero(np.isin(self.codes, codes))

    def read_values(self, places: Sequence[int]) -> list[Any]:
        """Return the values of some records."""
        codes = self.codes[list(places)]
        if isinstance(self.values, list):
            return [self.values[code] for code in codes.tolist()]
        return self.values.take(pa.array(codes)).to_pylist()

    def spread(self, texts: pa.LargeStringArray | Sequence[str | None]) -> "pl.Expr":
        """Return the text of each record, given one per distinct value.

        An expression, so that all columns of a part are evaluated at once: each evaluation has a fixed cost.
        """
        import polars as pl

        try:
            held = pl.Series("", texts, None if isinstance(texts, pa.LargeStringArray) else pl.String)
        except UnicodeEncodeError:
            # A lone surrogate, which JSON can escape but UTF-8 cannot hold, in a value outside the record's text.
            held = pl.Series("", [one and one.encode("utf-8", "backslashreplace").decode() for one in texts], pl.String)
        return pl.lit(held).gather(pl.lit(pl.Series("", self.codes)))


@dataclass(frozen=True, slots=True, eq=False)
class SourceRecords:
    """Records of one or more parts of a file, by column.

    `numbers` are record numbers in a part, from 0, and `borders` the first record of each part, and the end. `objects`
    are those of JSON, of a single part; None if the columns are cells of CSV, of which each record has all.
    """

    columns: Mapping[str, SourceColumn]
    numbers: Sequence[int]
    borders: Sequence[int]
    objects: Sequence[Mapping[str, Json]] | None = None

    @classmethod
    def of_objects(cls, objects: Sequence[Mapping[str, Json]], numbers: Sequence[int] | None = None) -> "SourceRecords":
        """Return the records of a part's decoded objects; they are numbered from 0 unless `numbers` are given."""
        first = objects[0].keys() if objects else {}
        if all(record.keys() == first for record in objects):
            values: dict[str, list[Any]] = {name: [record[name] for record in objects] for name in first}
        else:
            names = dict.fromkeys(name for one in objects for name in one)
            values = {name: [record.get(name, ABSENT) for record in objects] for name in names}
        columns = {name: SourceColumn.of_values(own) for name, own in values.items()}
        return cls(columns, range(len(objects)) if numbers is None else numbers, (0, len(objects)), objects)

    def read_objects(self) -> Sequence[Mapping[str, Json]]:
        """Return the records one by one, as they were decoded."""
        import polars as pl

        if self.objects is not None:
            return self.objects
        return pl.select(one.spread(one.values).alias(name) for name, one in self.columns.items()).to_dicts()


def _matches(texts: pa.LargeStringArray, pattern: str) -> NDArray[np.bool_]:
    return pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)


def _measure_bytes(texts: pa.LargeStringArray) -> Ints:
    return pc.binary_length(texts).to_numpy(zero_copy_only=False)


# ── Evidence of values ───────────────────────────────────────────────────────────────────────────────


_KINDS: dict[type, str | None] = {
    int: "integer", Decimal: "decimal", float: "decimal", bool: "boolean", str: "string",
    list: "container", dict: "container", type(None): "", type(ABSENT): None,
}  # fmt: skip


def observe_records(records: SourceRecords) -> list[TableEvidence]:
    """Return the evidence of each part of some records."""
    spans = [slice(begin, end) for begin, end in pairwise(records.borders)]
    found: list[dict[str, ColumnEvidence]] = [{} for _ in spans]
    for name, column in records.columns.items():
        # The shapes of each distinct value: empty if it is not counted, as null is not, and None if it is absent.
        shapes: dict[str, Sequence[str | None]]
        if records.objects is None:
            shapes = {"cells": name_shapes(column.values)}
        else:
            texts = (value if type(value) is str else "" for value in column.values)
            shapes = {
                "kinds": [_KINDS[type(value)] for value in column.values],
                "times": [time_shape_of(text) if text else "" for text in texts],
            }
        numbered = {what: _number_shapes(names) for what, names in shapes.items()}
        for evidence, span in zip(found, spans, strict=True):
            if span.start < span.stop:
                own = SourceColumn(column.values, column.codes[span])
                evidence[name] = _observe_column(own, numbered, records.numbers[span])
    return [TableEvidence(span.stop - span.start, own) for span, own in zip(spans, found, strict=True)]


_NumberedShapes = tuple[list[str | None], NDArray[np.int32]]
"""The distinct shapes of values, and the number of each value's shape."""


def _number_shapes(shapes: Sequence[str | None]) -> _NumberedShapes:
    numbers = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
    return [*numbers], np.fromiter(map(numbers.__getitem__, shapes), np.int32, len(shapes))


def _observe_column(
    column: SourceColumn, shapes: Mapping[str, _NumberedShapes], records: Sequence[int]
) -> ColumnEvidence:
    """Return the evidence of a part's column; `records` are the numbers of its records."""
    codes, firsts = column.codes, _find_first_places(column.codes)
    tallies: dict[str, dict[str, ShapeTally]] = {what: {} for what in shapes}
    present, nulls, first, gap = len(codes), 0, 0, None
    for what, (names, of_value) in shapes.items():
        own = of_value[codes]
        counts, met = np.bincount(own, minlength=len(names)).tolist(), own[firsts]
        for number in met[_find_first_places(met)].tolist():
            name, places = names[number], firsts[met == number][:MAX_EXAMPLES].tolist()
            if name:
                texts = [str(value)[:MAX_EXAMPLE_CHARS] for value in column.read_values(places)]
                shown = tuple((text, (0, records[at])) for text, at in zip(texts, places, strict=True))
                tallies[what][name] = ShapeTally(counts[number], shown)
            elif name is None:
                present -= counts[number]
                first, gap = int(np.argmax(own != number)), (0, records[places[0]])
            elif what != "times":
                nulls = counts[number]
    return ColumnEvidence((0, records[first]), present, nulls, gap=gap, **tallies)


def _find_first_places(codes: NDArray[np.int32]) -> Ints:
    """Return where each distinct code occurs first, in order."""
    places = np.arange(len(codes))
    # The last assignment to an index counts.
    first = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    first[codes[::-1]] = places[::-1]
    return np.flatnonzero(first[codes] == places)


def name_shapes(texts: pa.LargeStringArray) -> list[str]:
    """Return the shape of each text, as `shape_of` does, and none for an empty one.

    289,000 distinct cells of numbers, codes, words and times take 0.23 s, with `shape_of` alone 0.60 s.
    """
    names = np.full(len(texts), "", object)
    left = np.flatnonzero(_measure_bytes(texts))
    # The most common shapes by patterns, each among the texts that the ones before left; they may miss some.
    for name in ("integer", "point", "text"):
        if not len(left):
            break
        found = _find_common_shape(name, texts.take(pa.array(left)))
        names[left[found]] = name
        left = left[~found]
    names[left] = [shape_of(text) for text in texts.take(pa.array(left)).to_pylist()]
    return names.tolist()


def _find_common_shape(name: str, texts: pa.LargeStringArray) -> NDArray[np.bool_]:
    is_short = _measure_bytes(texts) <= QUICK_DIGITS
    if name == "integer":
        return _matches(texts, _INTEGER) & is_short
    if name == "point":
        return is_short & _matches(texts, _POINT) & ~_matches(texts, _POINT_GROUP)
    # Codes and words: mixed letters and digits, or letters first, if not an NA word or a date. Time formats that begin
    # with a letter begin with the name of a month.
    has_digit = _matches(texts, "[0-9]")
    is_code = _matches(texts, r"\A[0-9][^ \t./:-]*\z") & _matches(texts, "[A-DF-Za-df-z]")
    is_word = _matches(texts, r"(?s)\A[A-Za-z].*[^ \t]\z") & (has_digit | (_measure_bytes(texts) > LONGEST_NA_WORD))
    return is_code | (is_word & ~_matches(texts, r"\A[A-Za-z]{3} [0-9]"))


_INTEGER = r"\A(?:0|-?[1-9][0-9]*)\z"
_POINT = r"\A[+-]?(?:0|[1-9][0-9]*)\.[0-9]+\z"
_POINT_GROUP = r"\A[+-]?[1-9][0-9]{0,2}\.[0-9]{3}\z"


def reject_absent(reason: str, column: str) -> Rejected:
    """Reject a record whose column is absent or null."""
    return Rejected(reason, f"{column} is absent or null")


RefusedRecords = dict[int, Rejected]
"""Rejects by place; the first reason of a record counts."""


Mismatches = dict[str, tuple[int, str, int]]
"""Values that do not fit their columns: by column, their count, and the first with its record's number."""


def log_mismatches(log: Mismatches, column: str, text: str, row: int, count: int = 1) -> None:
    """Count values of a column that do not fit; `text` is the first of them, `row` its record's number."""
    known, first, place = log.get(column, (0, text, row))
    log[column] = (known + count, *((first, place) if place <= row else (text, row)))


@dataclass(frozen=True, slots=True)
class ColumnRoles:
    """The columns that hold a record's group, order, time and domain."""

    group: tuple[str, ...]
    is_list: bool
    order: str | None
    time_key: str | None
    domain: str | None

    @classmethod
    def of(cls, form: RecordOptions, splits: Splits) -> "ColumnRoles":
        """Return the columns that the options name."""
        given = (splits.group_key,) if isinstance(splits.group_key, str) else tuple(splits.group_key or ())
        is_list = not isinstance(form.data.group_training_examples_by or splits.group_key, str)
        groups = form.group_columns or given
        return cls(groups, is_list, form.order_column, splits.time_key, form.domain_key)


def format_position(position: Any) -> str:
    """Return the order key of a position in the order column, without an exponent unless that took very many zeros."""
    is_plain = isinstance(position, Decimal) and abs(position.adjusted()) <= MAX_DIGITS
    return format(position, "f") if is_plain else str(position)


def reject_unparsable(column: str, value: object, order: SortKey) -> Rejected:
    """Reject a record whose value the format of the order column does not read."""
    return Rejected("order_unparsable", f"{column} is {value!r:.80}, not in {order.name}")


def reject_mismatch(name: str, column: ColumnContract, value: object) -> Rejected:
    """Reject a record with a value that does not fit its column's contract."""
    return Rejected("type_mismatch", f"{name}: {value!r:.80} does not fit {describe_column_contract(column)}")


class ReadValue(NamedTuple):
    """A value as its column reads it: its member of the record's text, None if there is none, and its typed value.

    `reason` says why it does not fit: one of `RecordProblem`, `time` if the column's format does not read it, `text` if
    it cannot be written, as `detail` says; empty for a value that fits.
    """

    member: str | None
    value: Value
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ReadColumn:
    """The distinct values of `source` as its column reads them: members, and typed values (of cells: JSON texts).

    `misfits` are those that do not fit, by their codes.
    """

    source: SourceColumn
    members: pa.LargeStringArray | list[str | None]
    values: pa.LargeStringArray | list[Value]
    misfits: Mapping[int, ReadValue]


class ValueReader:
    """Reads values of JSON by a contract."""

    _CACHED_TYPES = frozenset({str, int, bool})
    _MAX_CACHED_CHARS = 64
    _MAX_CACHED_VALUES = 1 << 16
    """Short values of a column that are cached across parts: a part of a small file has few rows."""

    def __init__(self, contract: TableContract, schema: RecordSchema) -> None:
        self._contract = contract
        alone = {column.name: RecordSchema((column,)) for column in schema.columns}
        self._columns = {name: (RecordDecoder(one), Serialiser(one, special_tokens=())) for name, one in alone.items()}
        self._words = {name: frozenset(one.na) for name, one in contract.used.items() if one.na}
        self.times = {
            name: SortKey(one.format)
            for name, one in contract.used.items()
            if one.type in TIMES and one.format is not None and schema.by_name[name].type == "string"
        }
        self._write_key = Serialiser(RecordSchema((Column("k", "json"),)), special_tokens=())
        self._known = defaultdict[tuple[str, type], dict[Any, ReadValue]](dict)

    def read_column(self, name: str, column: SourceColumn) -> ReadColumn:
        """Read the distinct values of a column."""
        read = [self._read_value(name, value) for value in column.values]
        misfits = {code: one for code, one in enumerate(read) if one.reason}
        return ReadColumn(column, [one.member for one in read], [one.value for one in read], misfits)

    def write_key(self, value: Any) -> str:
        """Return a value of a group column as JSON by its type, since 1 is not "1"."""
        line = self._write_key({"k": value})
        assert isinstance(line, str), line
        return line[len('{"k":') : -len("}\n")]

    def _read_value(self, name: str, value: Any) -> ReadValue:
        kind = type(value)
        key = str(value) if kind is Decimal else value if kind in self._CACHED_TYPES else None
        if key is None or (kind is str and len(value) > self._MAX_CACHED_CHARS):
            return self._convert_value(name, value)
        known = self._known[name, kind]
        found = known.get(key)
        if found is None:
            if len(known) >= self._MAX_CACHED_VALUES:
                known.clear()
            found = known[key] = self._convert_value(name, value)
        return found

    def _convert_value(self, name: str, value: Any) -> ReadValue:
        read, write = self._columns[name]
        record = read({} if value is ABSENT else {name: None if self._is_absent(name, value) else value})
        if isinstance(record, RecordProblem):
            reason = record.reason
        else:
            time, order = record.get(name), self.times.get(name)
            reason = "time" if order is not None and time is not None and order.read(time) is None else ""
        if reason in ("type", "time") and self._contract.columns[name].on_mismatch == "na":
            record = read({name: None})
        elif reason:
            return ReadValue(None, None, reason)
        assert not isinstance(record, RecordProblem), "a column whose mismatches become null is nullable"
        text = write(record)
        if isinstance(text, Rejected):
            return ReadValue(None, record.get(name), "text", text.detail)
        return ReadValue(text[1:-2] if record else None, record.get(name), reason)

    def _is_absent(self, name: str, value: Json) -> bool:
        return type(value) is str and value in self._words.get(name, ())


_UNSERIALISABLE = ("number_too_large", "missing_column", "null")
"""Reasons for which a record is not written, in the decoder's order."""


class RowBuilder:
    """Makes rows of records, column by column."""

    def __init__(
        self, contract: TableContract, schema: RecordSchema, order: SortKey | None, roles: ColumnRoles
    ) -> None:
        self._columns = contract.columns
        self._names = schema.names
        self._order = order
        self._roles = roles
        self._reader = ValueReader(contract, schema)

    def __call__(
        self, records: SourceRecords, mismatches: Sequence[Mismatches]
    ) -> "tuple[pl.DataFrame, RefusedRecords]":
        """Return those columns of the rows of some parts that are read from records, and the rejects.

        `mismatches` has a log for each part.
        """
        import polars as pl

        count, refused, are_cells = len(records.numbers), RefusedRecords(), records.objects is None
        absent = SourceColumn([ABSENT], np.zeros(count, np.int32))
        read: dict[str, ReadColumn] = {}
        # In schema order, so that a row's first mismatch is that of its first column.
        for name in self._names:
            if not are_cells:
                read[name] = self._reader.read_column(name, records.columns.get(name, absent))
            elif name in records.columns:
                read[name] = self._read_cells(name, records.columns[name])
        self._refuse_misfits(records, read, refused, mismatches)
        groups = self._write_group_keys(records, read, refused)
        orders = self._read_positions(records, read, refused)
        for one in read.values():
            unwritable = {code: one.detail for code, one in one.misfits.items() if one.reason == "text"}
            for place in one.source.find_places([*unwritable]).tolist() if unwritable else ():
                refused.setdefault(place, Rejected("unserialisable", unwritable[one.source.codes[place]]))
        rows = pl.select(
            record=join_members([one.source.spread(one.members) for one in read.values()], count),
            group_key=groups,
            order_key=orders,
            domain=self._name_domains(records, read),
        )
        return rows, refused

    def _read_cells(self, name: str, column: SourceColumn) -> ReadColumn:
        contract = self._columns[name]
        write = make_cell_writer(contract.model_copy(update={"on_mismatch": "reject"}))
        texts = pa.array(map(write, column.distinct), pa.large_string())
        unread = np.flatnonzero(texts.is_null().to_numpy(zero_copy_only=False)).tolist()
        texts = texts.fill_null(NULL) if unread and contract.on_mismatch == "na" else texts
        misfits = dict.fromkeys(unread, ReadValue(None, None, "type"))
        return ReadColumn(column, write_members(name, texts), texts, misfits)

    def _refuse_misfits(
        self,
        records: SourceRecords,
        read: Mapping[str, ReadColumn],
        refused: RefusedRecords,
        mismatches: Sequence[Mismatches],
    ) -> None:
        """Log the values that do not fit, and refuse their records, each for its first reason in the decoder's order.

        Of a JSON object those before its first reason are logged, of a line of cells all.
        """
        found = defaultdict[tuple[str, str], list[int]](list)
        for name, one in read.items():
            for code, misfit in one.misfits.items():
                found[misfit.reason, name].append(code)
        for reason, names in (*((one, read) for one in _UNSERIALISABLE), ("type", read), ("time", self._reader.times)):
            for name in (one for one in names if (reason, one) in found):
                column, contract = read[name].source, self._columns[name]
                places = column.find_places(found[reason, name]).tolist()
                if reason in _UNSERIALISABLE:
                    _refuse(refused, places, Rejected("unserialisable", f"{name}: {reason}"))
                    continue
                if records.objects is not None:
                    places = [place for place in places if place not in refused]
                values = column.read_values(places)
                cuts = np.searchsorted(places, records.borders).tolist()
                for log, (begin, end) in zip(mismatches, pairwise(cuts), strict=True):
                    if begin < end:
                        row = records.numbers[places[begin]]
                        log_mismatches(log, name, str(values[begin])[:80], row, end - begin)
                for place, value in zip(places, values, strict=True) if contract.on_mismatch == "reject" else ():
                    refused.setdefault(place, reject_mismatch(name, contract, value))

    def _write_group_keys(
        self, records: SourceRecords, read: Mapping[str, ReadColumn], refused: RefusedRecords
    ) -> "pl.Expr":
        """Return the group keys: the values as in the source, whatever the types of their columns."""
        import polars as pl

        count, keys = len(records.numbers), list[pl.Expr]()
        for name in self._roles.group:
            absent = reject_absent("group_missing", name)
            if records.objects is not None:
                if name in read:
                    column, kept = read[name].source, read[name].values
                else:
                    column = SourceColumn.of_values([get_at_path(record, name) for record in records.objects])
                    kept = column.values
                # What the column reads as null is no key.
                found = [
                    absent if own is None else self._reader.write_key(value)
                    for value, own in zip(column.values, kept, strict=True)
                ]
            elif name in records.columns:
                column = records.columns[name]
                texts = _list_values(read[name].values) if name in read else [None] * len(column.values)
                found = [
                    encode_basestring(cell) if cell and text != NULL else absent
                    for cell, text in zip(column.distinct, texts, strict=True)
                ]
            else:
                _refuse(refused, range(count), absent)
                return repeat_text(None, count)
            keys.append(_spread_accepted(column, found, refused))
        if not keys:
            return repeat_text(None, count)
        joined = pl.concat_str(keys, separator=",")
        return pl.concat_str(pl.lit("["), joined, pl.lit("]")) if self._roles.is_list else joined

    def _read_positions(
        self, records: SourceRecords, read: Mapping[str, ReadColumn], refused: RefusedRecords
    ) -> "pl.Expr":
        time_key, order, count = self._roles.time_key, self._order, len(records.numbers)
        name = time_key or self._roles.order
        if name is None or (time_key is None and order is None):
            return repeat_text(None, count)
        column = read[name].source if name in read else None
        if records.objects is None:
            column = records.columns.get(name)
            values = [] if column is None else self._read_cell_positions(name, column, read.get(name))
        elif time_key is not None and "." in time_key:
            # A column of this name, or a value inside another column.
            held = [one for one in (name, name.partition(".")[0]) if one in read]
            typed = {one: [read[one].values[code] for code in read[one].source.codes.tolist()] for one in held}
            column = SourceColumn.of_values(
                [get_at_path({one: typed[one][place] for one in held}, name) for place in range(count)]
            )
            values = column.distinct
        else:
            values = _list_values(read[name].values) if name in read else []
        if column is None:
            _refuse(refused, range(count), reject_absent("order_missing", name))
            return repeat_text(None, count)
        shown = column.distinct if records.objects is None else values
        found: list[str | Rejected | None] = []
        for value, cell in zip(values, shown, strict=True):
            if value is None:
                found.append(reject_absent("order_missing", name))
            elif time_key is not None or order is None:
                found.append(str(value))
            else:
                position = order.read(value)
                is_read = position is not None
                found.append(format_position(position) if is_read else reject_unparsable(name, cell, order))
        return _spread_accepted(column, found, refused)

    def _read_cell_positions(self, name: str, column: SourceColumn, read: ReadColumn | None) -> list[Value]:
        """Return what distinct cells are ordered by: a number's value, a time's or text's cell, None if absent."""
        values: list[Value] = []
        is_number = name in self._columns and self._columns[name].type in ("integer", "number")
        is_text = name in self._columns and self._columns[name].type == "text"
        texts = [None] * len(column.values) if read is None else _list_values(read.values)
        for cell, text in zip(column.distinct, texts, strict=True):
            if is_infinite(cell):
                # Null in a column of numbers, yet not a missing time.
                values.append(cell)
            elif text == NULL or not cell:
                values.append(None)
            elif self._roles.time_key is not None:
                values.append(cell if text is None or text.startswith('"') else text)
            elif is_number and text is not None:
                values.append(Decimal(text) if any(sign in text for sign in ".eE") else int(text))
            else:
                values.append(cell if is_text else cell.strip(" \t"))
        return values

    def _name_domains(self, records: SourceRecords, read: Mapping[str, ReadColumn]) -> "pl.Expr":
        named, count = self._roles.domain, len(records.numbers)
        if named is None:
            return repeat_text(None, count)
        column = records.columns.get(named)
        contract = self._columns.get(named)
        if records.objects is None:
            is_text = contract is not None and contract.type not in ("integer", "number", "boolean")
            values = column.distinct if column is not None and is_text else None
        else:
            values = _list_values(read[named].values) if named in read else None
        if column is None or values is None:
            return repeat_text(DEFAULT_DOMAIN, count)
        return column.spread([one if type(one) is str and one.strip() else DEFAULT_DOMAIN for one in values])


def _list_values(values: pa.LargeStringArray | list[Value]) -> list[Value]:
    return values if isinstance(values, list) else values.to_pylist()


def _refuse(refused: RefusedRecords, places: Iterable[int], rejected: Rejected) -> None:
    for place in places:
        refused.setdefault(place, rejected)


def _spread_accepted(
    column: SourceColumn, found: Sequence[str | Rejected | None], refused: RefusedRecords
) -> "pl.Expr":
    """Return the text of each record, given one or a reject per distinct value; refuse the records of rejects."""
    rejected = {code: one for code, one in enumerate(found) if isinstance(one, Rejected)}
    for place in column.find_places([*rejected]).tolist() if rejected else ():
        refused.setdefault(place, rejected[column.codes[place]])
    return column.spread([None if isinstance(one, Rejected) else one for one in found])


def join_members(members: "Iterable[pl.Expr]", count: int) -> "pl.Expr":
    """Join members of columns to the texts of `count` objects, without those that are null."""
    import polars as pl

    joined = pl.concat_str([*members] or [repeat_text("", count)], separator=",", ignore_nulls=True)
    return pl.concat_str(pl.lit("{"), joined, pl.lit("}"))


def repeat_text(text: str | None, count: int) -> "pl.Expr":
    """Return a column of `count` equal texts, or of nulls."""
    import polars as pl

    return pl.repeat(text, count, dtype=pl.String)


def write_members(name: str, texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return members of objects, given the JSON texts of their values."""
    key, nothing = (pa.scalar(text, pa.large_string()) for text in (f"{encode_basestring(name)}:", ""))
    return pc.binary_join_element_wise(key, texts, nothing)
