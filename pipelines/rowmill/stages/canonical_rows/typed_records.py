"""Typed records: a record's JSON text, group key, order key and domain, and what its makers share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rowmill.formats import Records
from rowmill.formats.splits import Splits
from rowmill.schema.rows import Rejected
from rowmill.tabular.table_contract import ColumnContract
from rowmill.tabular.table_contract.drift import describe_column_contract
from rowmill.tabular.time_order import Position, SortKey

DEFAULT_DOMAIN = "__default__"


def reject_absent(reason: str, column: str) -> Rejected:
    """Reject a record whose column is absent or null."""
    return Rejected(reason, f"{column} is absent or null")


class TypedRecord(NamedTuple):
    """A valid record: its text, its group and order keys, and its domain.

    A named tuple, not a dataclass: one is made per record, and a frozen dataclass takes three times as long.
    """

    text: str
    group: str | None
    order: str | None
    domain: str | None


@dataclass(frozen=True, slots=True, eq=False)
class TypedColumns:
    """The records of a part column by column, in the form of `TypedRecord`, and the rejects."""

    texts: pl.Series
    groups: pl.Series
    orders: pl.Series
    domains: pl.Series
    refused: Mapping[int, Rejected]


@dataclass(slots=True)
class RefusedRecords:
    """Rejects by place; the first reason of a record counts."""

    found: dict[int, Rejected] = field(default_factory=dict[int, Rejected])

    def add(self, place: int, rejected: Rejected) -> None:
        """Reject one record."""
        self.found.setdefault(place, rejected)

    def add_many(self, places: NDArray[np.bool_], rejected: Rejected) -> None:
        """Reject the marked records."""
        for place in np.flatnonzero(places).tolist():
            self.found.setdefault(place, rejected)

    def add_all(self, count: int, rejected: Rejected) -> None:
        """Reject all records of a part."""
        for place in range(count):
            self.found.setdefault(place, rejected)


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

    def key_of(self, texts: Sequence[str]) -> str:
        """Return a group's key from the JSON texts of its values."""
        return f"[{','.join(texts)}]" if self.is_list else texts[0]

    def join_keys(self, columns: Sequence[pl.Expr]) -> pl.Expr:
        """Return each record's group key, from columns of JSON texts."""
        joined = pl.concat_str(columns, separator=",")
        return pl.concat_str(pl.lit("["), joined, pl.lit("]")) if self.is_list else joined


def resolve_column_roles(form: Records, splits: Splits) -> ColumnRoles:
    """Return the columns that the options name."""
    given = (splits.group_key,) if isinstance(splits.group_key, str) else tuple(splits.group_key or ())
    is_list = not isinstance(form.data.group_training_examples_by or splits.group_key, str)
    groups = form.group_columns or given
    return ColumnRoles(groups, is_list, form.is_grouped_by_file, form.order_column, splits.time_key, form.domain_key)


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
