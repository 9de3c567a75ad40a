"""Cells of CSV to typed records, column by column; each distinct cell is read and written once."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.schema.rows import Rejected
from rowmill.stages.canonical_rows.typed_records import (
    DEFAULT_DOMAIN,
    ColumnRoles,
    MismatchLog,
    RefusedRecords,
    TypedColumns,
    format_position,
    join_members,
    reject_absent,
    reject_mismatch,
    reject_unparsable,
    repeat_text,
)
from rowmill.tabular.schema import RecordSchema
from rowmill.tabular.table_contract import TableContract, read_position
from rowmill.tabular.table_contract.cell_columns import CellColumn, are_equal, write_cells, write_strings
from rowmill.tabular.table_contract.cells import NULL
from rowmill.tabular.time_order import SortKey


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
        made = pl.select(
            text=join_members({name: cells[name].spread(written) for name, written in texts.items()}, count),
            group=self._write_group_keys(cells, texts, count, refused),
            order=self._read_positions(cells, texts, count, refused),
            domain=self._read_domains(cells, count),
        )
        return TypedColumns(*made.iter_columns(), refused=refused.found)

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
            refused.add(place, reject_mismatch(name, column, text))
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
                refused.add_all(count, reject_absent("group_missing", name))
                return repeat_text(None, count)
            own = cells[name]
            refused.add_many(own.mark(_mark_absent(own, texts.get(name))), reject_absent("group_missing", name))
            keys.append(own.spread(write_strings(own.texts)))
        return self._roles.join_keys(keys) if keys else repeat_text(None, count)

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
            refused.add_all(count, reject_absent("order_missing", name))
            return repeat_text(None, count)
        own = cells[name]
        written = texts[name].to_pylist() if name in texts else [None] * len(own.texts)
        found = [
            self._read_position(name, cell, text) for cell, text in zip(own.texts.to_pylist(), written, strict=True)
        ]
        is_refused = np.array([isinstance(one, Rejected) for one in found], bool)
        for place in np.flatnonzero(own.mark(is_refused)).tolist():
            refused.add(place, cast("Rejected", found[own.codes[place]]))
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
        position = read_position(column, self._order, cell, text)
        return reject_unparsable(name, cell, self._order) if position is None else format_position(position)

    def _read_domains(self, cells: Mapping[str, CellColumn], count: int) -> pl.Expr:
        name = self._roles.domain
        if name is None:
            return repeat_text(None, count)
        column = self._columns.get(name)
        if name not in cells or column is None or column.type in ("integer", "number", "boolean"):
            return repeat_text(DEFAULT_DOMAIN, count)
        named = [text if text.strip() else DEFAULT_DOMAIN for text in cells[name].texts.to_pylist()]
        return cells[name].spread(pa.array(named, pa.large_string()))


def _mark_absent(cells: CellColumn, written: pa.LargeStringArray | None) -> NDArray[np.bool_]:
    """Mark the distinct cells without a value."""
    is_empty = are_equal(cells.texts, "")
    return is_empty if written is None else is_empty | are_equal(written, NULL)
