"""A record of a table as typed values, from cells of text, JSON or Arrow columns.

    cells   north  south  north  north        texts  north south        codes  0 1 0 0

Most columns repeat their texts, so each distinct text is interpreted once. The most common shapes are found by patterns
over all texts at once; only the rest goes through the function for one cell.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property, partial
from itertools import pairwise, repeat
from json.encoder import encode_basestring
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.json import Json
from rowmill.kinds.shared.canonicalization import DEFAULT_DOMAIN
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
from rowmill.kinds.tables.options import Records
from rowmill.kinds.tables.schema import Column, Position, RecordSchema, SortKey, Value
from rowmill.kinds.tables.serialization import RecordDecoder, RecordProblem, Serialiser
from rowmill.kinds.tables.table_contract import (
    LONGEST_NA_WORD,
    NULL,
    TIMES,
    ColumnContract,
    TableContract,
    make_cell_writer,
    shape_of,
)
from rowmill.schema.rows import Rejected

QUICK_DIGITS = 400
"""Maximum length of the numbers that patterns over whole columns match."""


@dataclass(frozen=True, slots=True, eq=False)
class CellColumn:
    """Distinct texts in order of first occurrence, and `codes` int32[N] of the cells, which index them."""

    texts: pa.LargeStringArray
    codes: NDArray[np.int32]

    @classmethod
    def from_cells(cls, cells: pa.LargeStringArray | Sequence[str]) -> "CellColumn":
        """Encode cells, none of which is null."""
        encoded = pa.array(cells, pa.large_string()).dictionary_encode()
        return cls(encoded.dictionary, encoded.indices.to_numpy())

    def spread(self, values: pa.LargeStringArray) -> pl.Expr:
        """Return the value of each cell, given one per text.

        An expression, so that all columns of a part are evaluated at once: each evaluation has a fixed cost.
        """
        return pl.lit(pl.Series("", values)).gather(pl.lit(pl.Series("", self.codes)))

    def mark(self, texts: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the flag of each cell, given one per text: bool[N]."""
        return texts[self.codes]


def _matches(texts: pa.LargeStringArray, pattern: str) -> NDArray[np.bool_]:
    return pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)


def _measure_bytes(texts: pa.LargeStringArray) -> Ints:
    return pc.binary_length(texts).to_numpy(zero_copy_only=False)


def _replace(texts: pa.LargeStringArray, mask: NDArray[np.bool_], new: Sequence[str | None]) -> pa.LargeStringArray:
    return pc.replace_with_mask(texts, pa.array(mask), pa.array(new, pa.large_string()))


def are_equal(texts: pa.LargeStringArray, text: str) -> NDArray[np.bool_]:
    """Return which texts equal `text`; null does not."""
    return pc.fill_null(pc.equal(texts, text), fill_value=False).to_numpy(zero_copy_only=False)


# ── Evidence of cells ────────────────────────────────────────────────────────────────────────────────


def observe_cells(
    columns: Mapping[str, CellColumn], rows: Sequence[int], borders: Sequence[int]
) -> list[TableEvidence]:
    """Return the evidence of each of some parts, whose cells are in the same columns.

    `rows` are the records' numbers in their parts, and `borders` the first record of each part, and the end. Each
    record has all columns.
    """
    parts = [(begin, rows[begin:end]) for begin, end in pairwise(borders)]
    found: list[dict[str, ColumnEvidence]] = [{} for _ in parts]
    for name, cells in columns.items():
        # The shape of each text, an index of `names`: 0 if the text is empty.
        is_given = ~are_equal(cells.texts, "")
        given = name_shapes(cells.texts.filter(pa.array(is_given)))
        names = ["", *dict.fromkeys(given)]
        numbers = {shape: number for number, shape in enumerate(names)}
        shapes = np.zeros(len(cells.texts), np.int32)
        shapes[is_given] = [numbers[shape] for shape in given]
        for evidence, (begin, records) in zip(found, parts, strict=True):
            if records:
                codes = cells.codes[begin : begin + len(records)]
                evidence[name] = _observe_shapes(cells.texts, codes, shapes, names, records)
    return [TableEvidence(len(records), evidence) for evidence, (_, records) in zip(found, parts, strict=True)]


def _observe_shapes(
    texts: pa.LargeStringArray,
    codes: NDArray[np.int32],
    shapes: NDArray[np.int32],
    names: Sequence[str],
    records: Sequence[int],
) -> ColumnEvidence:
    """Return the evidence of the cells of a part, whose texts are `codes` of the column's."""
    counts = np.bincount(shapes[codes], minlength=len(names)).tolist()
    firsts = _find_first_places(codes)
    met = shapes[codes[firsts]]
    tallies: dict[str, ShapeTally] = {}
    for number in met[_find_first_places(met)].tolist():
        shown = [
            (texts[int(codes[place])].as_py()[:MAX_EXAMPLE_CHARS], (0, records[place]))
            for place in firsts[met == number][:MAX_EXAMPLES].tolist()
        ]
        tallies[names[number]] = ShapeTally(counts[number], tuple(shown))
    tallies.pop("", None)
    return ColumnEvidence((0, records[0]), len(records), counts[0], tallies)


def _find_first_places(codes: NDArray[np.int32]) -> Ints:
    """Return where each distinct code occurs first, in order."""
    places = np.arange(len(codes))
    # The last assignment to an index counts.
    first = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    first[codes[::-1]] = places[::-1]
    return np.flatnonzero(first[codes] == places)


def name_shapes(texts: pa.LargeStringArray) -> list[str]:
    """Return the shape of each text, as `shape_of` does; no text is empty."""
    names = np.full(len(texts), "", object)
    left = np.arange(len(texts))
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
_PLAIN_NUMBERS = {
    "integer": _INTEGER,
    "number": r"\A(?:0|-?[1-9][0-9]*|-?(?:0|[1-9][0-9]*)\.[0-9]+)\z",
}
_SMALL_NUMBER = r"\A-?0\.0000[0-9]*[1-9]"
"""Numbers that are their own JSON text, unless they are below 0.0001."""
_NEEDS_ESCAPE = r'["\\\x00-\x1f]'


def write_cells(column: ColumnContract, texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return the JSON texts of distinct cells, null for those that do not fit the contract.

    Equal to what `make_cell_writer` returns for each.
    """
    is_absent = pc.is_in(texts, pa.array(["", *column.na], pa.large_string())).to_numpy(zero_copy_only=False)
    if column.type in ("text", "any"):
        return _replace(write_strings(texts), is_absent, [NULL] * int(is_absent.sum()))
    is_other = np.ones(len(texts), bool)
    pattern = _PLAIN_NUMBERS.get(column.type)
    if pattern is not None and (column.type != "number" or column.decimal == "."):
        is_plain = _matches(texts, pattern) & (_measure_bytes(texts) <= QUICK_DIGITS)
        is_other = ~is_plain | _matches(texts, _SMALL_NUMBER) | is_absent
    write = make_cell_writer(column.model_copy(update={"on_mismatch": "reject"}))
    return _replace(texts, is_other, [write(text) for text in texts.filter(pa.array(is_other)).to_pylist()])


def write_strings(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return distinct texts as JSON strings."""
    quote, nothing = pa.scalar('"', pa.large_string()), pa.scalar("", pa.large_string())
    written = pc.binary_join_element_wise(quote, texts, quote, nothing)
    is_other = _matches(texts, _NEEDS_ESCAPE)
    others = texts.filter(pa.array(is_other)).to_pylist()
    return _replace(written, is_other, [encode_basestring(text) for text in others]) if others else written


def reject_absent(reason: str, column: str) -> Rejected:
    """Reject a record whose column is absent or null."""
    return Rejected(reason, f"{column} is absent or null")


@dataclass(frozen=True, slots=True, eq=False)
class TypedColumns:
    """The records of a part column by column: their texts, group and order keys, and domains; and the rejects."""

    texts: pl.Series
    groups: pl.Series
    orders: pl.Series
    domains: pl.Series
    refused: Mapping[int, Rejected]


RefusedRecords = dict[int, Rejected]
"""Rejects by place; the first reason of a record counts."""


def refuse(refused: RefusedRecords, places: Iterable[int], rejected: Rejected) -> None:
    """Reject the records at some places."""
    for place in places:
        refused.setdefault(place, rejected)


@dataclass(slots=True)
class MismatchLog:
    """Values that do not fit their columns: by column, their count, and the first with its record's number."""

    found: dict[str, tuple[int, str, int]] = field(default_factory=dict[str, tuple[int, str, int]])

    def add(self, column: str, text: str, row: int, count: int = 1) -> None:
        """Count values of a column that do not fit; `text` is one of them, `row` its record's number."""
        known, first, place = self.found.get(column, (0, text, row))
        self.found[column] = (known + count, *((first, place) if place <= row else (text, row)))

    def to_json(self) -> dict[str, Any]:
        """Return them as a JSON object, columns by name."""
        return {name: list(self.found[name]) for name in sorted(self.found)}


@dataclass(frozen=True, slots=True)
class ColumnRoles:
    """The columns that hold a record's group, order, time and domain."""

    group: tuple[str, ...]
    is_list: bool
    by_file: bool
    order: str | None
    time_key: str | None
    domain: str | None

    @classmethod
    def of(cls, form: Records, splits: Splits) -> "ColumnRoles":
        """Return the columns that the options name."""
        given = (splits.group_key,) if isinstance(splits.group_key, str) else tuple(splits.group_key or ())
        is_list = not isinstance(form.data.group_training_examples_by or splits.group_key, str)
        groups = form.group_columns or given
        return cls(groups, is_list, form.is_grouped_by_file, form.order_column, splits.time_key, form.domain_key)

    def key_of(self, texts: Sequence[str]) -> str:
        """Return a group's key from the JSON texts of its values."""
        return f"[{','.join(texts)}]" if self.is_list else texts[0]


def format_position(position: Position) -> str:
    """Return the order key of a position in the order column."""
    return format(position, "f") if isinstance(position, Decimal) else str(position)


def reject_unparsable(column: str, value: object, order: SortKey) -> Rejected:
    """Reject a record whose value the format of the order column does not read."""
    return Rejected("order_unparsable", f"{column} is {value!r:.80}, not in {order.name}")


def reject_mismatch(name: str, column: ColumnContract, value: object) -> Rejected:
    """Reject a record with a value that does not fit its column's contract."""
    return Rejected("type_mismatch", f"{name}: {value!r:.80} does not fit {describe_column_contract(column)}")


def join_members(columns: Mapping[str, pl.Expr], count: int) -> pl.Expr:
    """Join the JSON texts of columns to the texts of `count` objects; null if one of them is null."""
    if not columns:
        return repeat_text("{}", count)
    pieces: list[pl.Expr] = []
    for number, (name, texts) in enumerate(columns.items()):
        pieces += [pl.lit(f"{',' if number else '{'}{encode_basestring(name)}:"), texts]
    return pl.concat_str(*pieces, pl.lit("}"))


def repeat_text(text: str | None, count: int) -> pl.Expr:
    """Return a column of `count` equal texts, or of nulls."""
    return pl.repeat(text, count, dtype=pl.String)


# ── Cells of CSV ───────────────────────────────────────────────────────────────────────────────────


class CellRowBuilder:
    """Makes rows of cells of CSV, column by column."""

    def __init__(
        self, contract: TableContract, schema: RecordSchema, order: SortKey | None, roles: ColumnRoles
    ) -> None:
        self._columns = contract.columns
        self._names = schema.names
        self._order = order
        self._roles = roles

    def __call__(
        self,
        cells: Mapping[str, CellColumn],
        rows: Sequence[int],
        borders: Sequence[int],
        mismatches: Sequence[MismatchLog],
    ) -> TypedColumns:
        """Return the typed columns of the records of some parts, which all have the same columns.

        `rows` are the records' numbers in their parts, and `borders` the first record of each part, and the end.
        `mismatches` has a log for each part.
        """
        count, refused = len(rows), RefusedRecords()
        # In schema order, so that a row's first mismatch is that of its first column.
        texts = {
            name: self._write_column(name, cells[name], rows, refused, borders, mismatches)
            for name in self._names
            if name in cells
        }
        domain, named = repeat_text(None, count), self._roles.domain
        if named is not None:
            column = self._columns.get(named)
            domain = repeat_text(DEFAULT_DOMAIN, count)
            if named in cells and column is not None and column.type not in ("integer", "number", "boolean"):
                domains = [text if text.strip() else DEFAULT_DOMAIN for text in cells[named].texts.to_pylist()]
                domain = cells[named].spread(pa.array(domains, pa.large_string()))
        selected = pl.select(
            text=join_members({name: cells[name].spread(written) for name, written in texts.items()}, count),
            group=self._write_group_keys(cells, texts, count, refused),
            order=self._read_positions(cells, texts, count, refused),
            domain=domain,
        )
        return TypedColumns(*selected.iter_columns(), refused=refused)

    def _write_column(
        self,
        name: str,
        cells: CellColumn,
        rows: Sequence[int],
        refused: RefusedRecords,
        borders: Sequence[int],
        mismatches: Sequence[MismatchLog],
    ) -> pa.LargeStringArray:
        """Return the JSON text of each distinct cell of a column."""
        column = self._columns[name]
        written = write_cells(column, cells.texts)
        if not written.null_count:
            return written
        places = np.flatnonzero(cells.mark(written.is_null().to_numpy(zero_copy_only=False)))
        texts: list[str] = cells.texts.take(pa.array(cells.codes[places])).to_pylist()
        cuts = np.searchsorted(places, borders).tolist()
        for log, (begin, end) in zip(mismatches, pairwise(cuts), strict=True):
            if begin < end:
                log.add(name, texts[begin][:80], rows[int(places[begin])], end - begin)
        if column.on_mismatch == "na":
            return written.fill_null(NULL)
        for place, text in zip(places.tolist(), texts, strict=True):
            refused.setdefault(place, reject_mismatch(name, column, text))
        return written

    def _write_group_keys(
        self,
        cells: Mapping[str, CellColumn],
        texts: Mapping[str, pa.LargeStringArray],
        count: int,
        refused: RefusedRecords,
    ) -> pl.Expr:
        """Return the group keys: the cells as written, whatever the types of their columns."""
        keys: list[pl.Expr] = []
        for name in self._roles.group:
            if name not in cells:
                refuse(refused, range(count), reject_absent("group_missing", name))
                return repeat_text(None, count)
            group_cells = cells[name]
            written = texts.get(name)
            is_empty = are_equal(group_cells.texts, "")
            is_absent = group_cells.mark(is_empty if written is None else is_empty | are_equal(written, NULL))
            refuse(refused, np.flatnonzero(is_absent).tolist(), reject_absent("group_missing", name))
            keys.append(group_cells.spread(write_strings(group_cells.texts)))
        if not keys:
            return repeat_text(None, count)
        joined = pl.concat_str(keys, separator=",")
        return pl.concat_str(pl.lit("["), joined, pl.lit("]")) if self._roles.is_list else joined

    def _read_positions(
        self,
        cells: Mapping[str, CellColumn],
        texts: Mapping[str, pa.LargeStringArray],
        count: int,
        refused: RefusedRecords,
    ) -> pl.Expr:
        name = self._roles.time_key or self._roles.order
        if name is None or (self._roles.time_key is None and self._order is None):
            return repeat_text(None, count)
        if name not in cells:
            refuse(refused, range(count), reject_absent("order_missing", name))
            return repeat_text(None, count)
        own = cells[name]
        written = texts[name].to_pylist() if name in texts else [None] * len(own.texts)
        found = [
            self._read_position(name, cell, text) for cell, text in zip(own.texts.to_pylist(), written, strict=True)
        ]
        is_refused = np.array([isinstance(one, Rejected) for one in found], bool)
        for place in np.flatnonzero(own.mark(is_refused)).tolist():
            refused.setdefault(place, cast("Rejected", found[own.codes[place]]))
        return own.spread(pa.array([None if isinstance(one, Rejected) else one for one in found], pa.large_string()))

    def _read_position(self, name: str, cell: str, text: str | None) -> str | Rejected | None:
        if text == NULL or not cell:
            return reject_absent("order_missing", name)
        if self._roles.time_key is not None:
            return cell if text is None or text.startswith('"') else text
        if text is None:
            return None
        column = self._columns[name]
        assert self._order is not None
        # A number's position is that of its value, a time's or text's that of the cell itself.
        if column.type in ("integer", "number"):
            position = self._order.read(Decimal(text) if any(sign in text for sign in ".eE") else int(text))
        else:
            position = self._order.read(cell.strip(" \t") if column.type != "text" else cell)
        return reject_unparsable(name, cell, self._order) if position is None else format_position(position)


# ── JSON objects ───────────────────────────────────────────────────────────────────────────────────


ABSENT = object()
"""Placeholder in a column for records that lack it."""
_ResultT = TypeVar("_ResultT")


class ColumnValues:
    """The values of one key of many records; `ABSENT` if a record lacks it."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    @cached_property
    def _identity_keys(self) -> Sequence[Any]:
        """Keys that are equal only for equal type and text, since 1 == True and 1.5 == 1.50."""
        types = set(map(type, self._values)) - {type(None), type(ABSENT)}
        return self._values if types in ({str}, {int}, {bool}) else list(map(id, self._values))

    @cached_property
    def _distinct_values(self) -> dict[Any, Any]:
        return dict(zip(self._identity_keys, self._values, strict=True))

    def map(self, make: Callable[[Any], _ResultT]) -> list[_ResultT]:
        """Apply a function to each value; it is called once for equal values."""
        made = {key: make(value) for key, value in self._distinct_values.items()}
        return [made[key] for key in self._identity_keys]


def split_columns(records: Sequence[Mapping[str, Json]]) -> dict[str, ColumnValues]:
    """Return the values of each key that some record has."""
    if not records:
        return {}
    first = records[0].keys()
    if all(record.keys() == first for record in records):
        return {name: ColumnValues([record[name] for record in records]) for name in first}
    names = dict.fromkeys(name for one in records for name in one)
    return {name: ColumnValues([record.get(name, ABSENT) for record in records]) for name in names}


_CACHED_TYPES = frozenset({str, int, bool})
_MAX_CACHED_CHARS = 64
_MAX_CACHED_VALUES = 1 << 16
"""Short values of a column that are cached across parts: a part of a small file has few rows."""


class _ReadValue(NamedTuple):
    """A value as its column reads it: its piece of the record's text, with a comma before it, and its typed value.

    `reason` says why it does not fit: one of `RecordProblem`, `time` if the column's format does not read it, `text` if
    it cannot be written, as `detail` says; empty for a value that fits.
    """

    piece: str
    value: Value
    reason: str = ""
    detail: str = ""


class ValueColumnBuilder:
    """Makes rows of decoded JSON objects, column by column."""

    def __init__(
        self, contract: TableContract, schema: RecordSchema, order: SortKey | None, roles: ColumnRoles
    ) -> None:
        self._contract = contract
        self._order = order
        self._roles = roles
        alone = {column.name: RecordSchema((column,)) for column in schema.columns}
        self._columns = {name: (RecordDecoder(one), Serialiser(one, special_tokens=())) for name, one in alone.items()}
        self._words = {name: frozenset(one.na) for name, one in contract.used.items() if one.na}
        self._times = {
            name: SortKey(one.format)
            for name, one in contract.used.items()
            if one.type in TIMES and one.format is not None and schema.by_name[name].type == "string"
        }
        self._write_key = Serialiser(RecordSchema((Column("k", "json"),)), special_tokens=())
        self._known = defaultdict[tuple[str, type], dict[Any, _ReadValue]](dict)

    def __call__(
        self,
        records: Sequence[Mapping[str, Json]],
        columns: Mapping[str, ColumnValues],
        rows: Sequence[int],
        mismatches: MismatchLog,
    ) -> TypedColumns:
        """Return the typed columns of a part's records; `rows` are record numbers."""
        absent = ColumnValues([ABSENT] * len(records))
        by_name = {name: columns.get(name, absent) for name in self._columns}
        pieces = [column.map(partial(self._write_piece, name)) for name, column in by_name.items()]
        unfit = sorted({place for piece in pieces if None in piece for place, text in enumerate(piece) if text is None})
        refused, unwritable = RefusedRecords(), RefusedRecords()
        for place in unfit:
            read = {name: self._read_value(name, records[place].get(name, ABSENT)) for name in self._columns}
            rejected = self._reject_misfits(read, records[place], rows[place], mismatches)
            if rejected is not None:
                refused[place] = rejected
            for piece, one in zip(pieces, read.values(), strict=True):
                piece[place] = one.piece
                if one.reason == "text":
                    unwritable.setdefault(place, Rejected("unserialisable", one.detail))
        groups = self._write_group_keys(records, by_name, refused)
        orders = self._read_positions(records, by_name, refused)
        domains: Sequence[str | None] = [None] * len(records)
        if self._roles.domain is not None:
            domains = by_name.get(self._roles.domain, absent).map(partial(self._read_domain, self._roles.domain))
        texts = [
            f"{{{''.join(members)[1:]}}}"
            for members in (zip(*pieces, strict=True) if pieces else repeat((), len(records)))
        ]
        return TypedColumns(*map(_make_text_column, (texts, groups, orders, domains)), refused=unwritable | refused)

    def _write_piece(self, name: str, value: Any) -> str | None:
        read = self._read_value(name, value)
        return None if read.reason else read.piece

    def _read_value(self, name: str, value: Any) -> _ReadValue:
        kind = type(value)
        key = str(value) if kind is Decimal else value if kind in _CACHED_TYPES else None
        if key is None or (kind is str and len(value) > _MAX_CACHED_CHARS):
            return self._convert_value(name, value)
        known = self._known[name, kind]
        found = known.get(key)
        if found is None:
            if len(known) >= _MAX_CACHED_VALUES:
                known.clear()
            found = known[key] = self._convert_value(name, value)
        return found

    def _convert_value(self, name: str, value: Any) -> _ReadValue:
        read, write = self._columns[name]
        record = read({} if value is ABSENT else {name: None if self._is_absent(name, value) else value})
        if isinstance(record, RecordProblem):
            reason = record.reason
        else:
            time, order = record.get(name), self._times.get(name)
            reason = "time" if order is not None and time is not None and order.read(time) is None else ""
        if reason in ("type", "time") and self._contract.columns[name].on_mismatch == "na":
            record = read({name: None})
        elif reason:
            return _ReadValue("", None, reason)
        assert not isinstance(record, RecordProblem), "a column whose mismatches become null is nullable"
        text = write(record)
        if isinstance(text, Rejected):
            return _ReadValue("", record.get(name), "text", text.detail)
        return _ReadValue(f",{text[1:-2]}" if record else "", record.get(name), reason)

    def _is_absent(self, name: str, value: Json) -> bool:
        return type(value) is str and value in self._words.get(name, ())

    def _reject_misfits(
        self, read: Mapping[str, _ReadValue], record: Mapping[str, Json], row: int, mismatches: MismatchLog
    ) -> Rejected | None:
        """Log the values of a record that do not fit; return the first reason to reject it in the decoder's order."""
        for reason in ("number_too_large", "missing_column", "null"):
            for name, one in read.items():
                if one.reason == reason:
                    return Rejected("unserialisable", f"{name}: {reason}")
        misfits = [name for name, one in read.items() if one.reason == "type"]
        misfits += [name for name in self._times if read[name].reason == "time"]
        for name in misfits:
            column = self._contract.columns[name]
            mismatches.add(name, str(record[name])[:80], row)
            if column.on_mismatch == "reject":
                return reject_mismatch(name, column, record[name])
        return None

    def _write_group_keys(
        self, records: Sequence[Mapping[str, Json]], by_name: Mapping[str, ColumnValues], refused: RefusedRecords
    ) -> Sequence[str | None]:
        """Return the group keys: the values as in the source, written as JSON by their types, since 1 is not "1"."""

        def write_key(name: str, value: Any) -> str | Rejected:
            if value is None or value is ABSENT or self._is_absent(name, value):
                return reject_absent("group_missing", name)
            line = self._write_key({"k": value})
            assert isinstance(line, str), line
            return line[len('{"k":') : -len("}\n")]

        keys: list[Sequence[str]] = []
        for name in self._roles.group:
            column = by_name.get(name) or ColumnValues([get_at_path(record, name) for record in records])
            keys.append([text or "" for text in _collect_rejected(column.map(partial(write_key, name)), refused)])
        return [self._roles.key_of(texts) for texts in zip(*keys, strict=True)] if keys else [None] * len(records)

    def _read_positions(
        self, records: Sequence[Mapping[str, Json]], by_name: Mapping[str, ColumnValues], refused: RefusedRecords
    ) -> Sequence[str | None]:
        time_key, order = self._roles.time_key, self._order
        name = time_key or self._roles.order
        if name is None or (time_key is None and order is None):
            return [None] * len(records)

        def position_of(value: Value) -> str | Rejected:
            if value is None:
                return reject_absent("order_missing", name)
            if time_key is not None or order is None:
                return str(value)
            position = order.read(value)
            return reject_unparsable(name, value, order) if position is None else format_position(position)

        if time_key is not None and "." in time_key:
            # A column of this name, or a value inside another column.
            held = [one for one in (name, name.partition(".")[0]) if one in self._columns]
            values = [
                get_at_path({one: self._read_value(one, record[one]).value for one in held if one in record}, name)
                for record in records
            ]
            return _collect_rejected(ColumnValues(values).map(position_of), refused)
        if name not in by_name:
            refuse(refused, range(len(records)), reject_absent("order_missing", name))
            return [None] * len(records)
        found = by_name[name].map(lambda value: position_of(self._read_value(name, value).value))
        return _collect_rejected(found, refused)

    def _read_domain(self, name: str, value: Any) -> str:
        typed = self._read_value(name, value).value if name in self._columns else None
        return typed if type(typed) is str and typed.strip() else DEFAULT_DOMAIN


def _collect_rejected(found: Sequence[str | Rejected], refused: RefusedRecords) -> list[str | None]:
    """Return the texts, None for rejects; a record's first reason is kept."""
    for place, one in enumerate(found):
        if type(one) is Rejected:
            refused.setdefault(place, one)
    return [one if isinstance(one, str) else None for one in found]


def _make_text_column(texts: Sequence[str | None]) -> pl.Series:
    try:
        return pl.Series(texts, dtype=pl.String)
    except UnicodeEncodeError:
        # A lone surrogate, which JSON can escape but UTF-8 cannot hold, in a value outside the record's text.
        held = [None if text is None else text.encode("utf-8", "backslashreplace").decode() for text in texts]
        return pl.Series(held, dtype=pl.String)
