"""Columns of CSV cells, dictionary-encoded: each distinct text once, and a code per cell.

    cells   north  south  north  north        texts  north south        codes  0 1 0 0

Most columns repeat their texts, so each distinct text is interpreted once. The most common shapes are found by patterns
over all texts at once; only the rest goes through the function for one cell.

Not imported by the package's `__init__`: loading a recipe needs contracts, and importing Polars takes 0.13 s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from json.encoder import encode_basestring

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.kinds.tables.inference import MAX_EXAMPLE_CHARS, MAX_EXAMPLES, ColumnEvidence, ShapeTally, TableEvidence
from rowmill.kinds.tables.table_contract import LONGEST_NA_WORD, NULL, ColumnContract, make_cell_writer, shape_of

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
    shaped = {name: _ShapedColumn.from_cells(one) for name, one in columns.items()}
    return [
        TableEvidence(
            end - begin, {name: one.observe(begin, rows[begin:end]) for name, one in shaped.items() if begin < end}
        )
        for begin, end in pairwise(borders)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _ShapedColumn:
    """A column of cells with the shape of each text: an index of `names`, 0 if the text is empty."""

    cells: CellColumn
    names: list[str]
    shapes: NDArray[np.int32]

    @classmethod
    def from_cells(cls, cells: CellColumn) -> "_ShapedColumn":
        """Find the shapes of the texts."""
        is_given = ~are_equal(cells.texts, "")
        found = name_shapes(cells.texts.filter(pa.array(is_given)))
        names = ["", *dict.fromkeys(found)]
        numbers = {name: number for number, name in enumerate(names)}
        shapes = np.zeros(len(cells.texts), np.int32)
        shapes[is_given] = [numbers[name] for name in found]
        return cls(cells, names, shapes)

    def observe(self, begin: int, rows: Sequence[int]) -> ColumnEvidence:
        """Return the evidence of a part, whose cells are those from `begin` on, one for each of `rows`."""
        codes = self.cells.codes[begin : begin + len(rows)]
        counts = np.bincount(self.shapes[codes], minlength=len(self.names)).tolist()
        firsts = _find_first_places(codes)
        shapes = self.shapes[codes[firsts]]
        tallies: dict[str, ShapeTally] = {}
        for number in shapes[_find_first_places(shapes)].tolist():
            shown = [
                (self.cells.texts[int(codes[place])].as_py()[:MAX_EXAMPLE_CHARS], (0, rows[place]))
                for place in firsts[shapes == number][:MAX_EXAMPLES].tolist()
            ]
            tallies[self.names[number]] = ShapeTally(counts[number], tuple(shown))
        tallies.pop("", None)
        return ColumnEvidence((0, rows[0]), len(rows), counts[0], tallies)


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
    for name, find in _COMMON_SHAPES.items():
        if not len(left):
            break
        found = find(texts.take(pa.array(left)))
        names[left[found]] = name
        left = left[~found]
    names[left] = [shape_of(text) for text in texts.take(pa.array(left)).to_pylist()]
    return names.tolist()


def _find_integers(texts: pa.LargeStringArray) -> NDArray[np.bool_]:
    return _matches(texts, _INTEGER) & (_measure_bytes(texts) <= QUICK_DIGITS)


def _find_points(texts: pa.LargeStringArray) -> NDArray[np.bool_]:
    is_short = _measure_bytes(texts) <= QUICK_DIGITS
    return is_short & _matches(texts, _POINT) & ~_matches(texts, _POINT_GROUP)


def _find_texts(texts: pa.LargeStringArray) -> NDArray[np.bool_]:
    """Find codes and words: mixed letters and digits, or letters first, if not an NA word or a date.

    Time formats that begin with a letter begin with the name of a month.
    """
    has_digit = _matches(texts, "[0-9]")
    is_code = _matches(texts, r"\A[0-9][^ \t./:-]*\z") & _matches(texts, "[A-DF-Za-df-z]")
    is_word = _matches(texts, r"(?s)\A[A-Za-z].*[^ \t]\z") & (has_digit | (_measure_bytes(texts) > LONGEST_NA_WORD))
    return is_code | (is_word & ~_matches(texts, r"\A[A-Za-z]{3} [0-9]"))


_INTEGER = r"\A(?:0|-?[1-9][0-9]*)\z"
_POINT = r"\A[+-]?(?:0|[1-9][0-9]*)\.[0-9]+\z"
_POINT_GROUP = r"\A[+-]?[1-9][0-9]{0,2}\.[0-9]{3}\z"
_COMMON_SHAPES = {"integer": _find_integers, "point": _find_points, "text": _find_texts}
"""Finders of the most common shapes, each applied to the texts that the ones before left; they may miss some."""


# ── JSON texts of cells ───────────────────────────────────────────────────────────────────────


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
