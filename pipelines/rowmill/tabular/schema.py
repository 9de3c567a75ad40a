r"""A record and its schema: what the columns of a table are, in the order in which they are written.

What belongs here: the columns' types, the Python value of each, the schema and its JSON form, which is saved
with the manifest. What does not: a record's text (`serialization/`), the order of records (`time_order.py`), how the
types of a dataset are found (`formats/`).

| type | value in a record | in JSON |
|---|---|---|
| integer | `int`, at most 4,300 digits | `1180591620717411303424` |
| float | `float` | `18.0`, `1e-12`, `"NaN"`, `"-Infinity"` |
| decimal | `Decimal`, digits and scale kept | `42.50` |
| boolean | `bool` | `true` |
| string | `str`, lone surrogates too | `"漢"` |
| datetime | `str`, canonical ISO 8601: `2024-01-15T00:00:00+02:00` | the same, quoted |
| date, time | `str`: `2024-01-15`; `01:02:03` | the same, quoted |
| duration | `Decimal` of seconds, no trailing zeros: `90`, `0.000000001` | a number |
| bytes | `bytes` | base64: `"AAE="` |
| list, struct | `list`, `dict` of the above | nested |
| json | null, `bool`, `int`, `Decimal`, `str`, `list`, `dict` with string keys | nested |

A null is `None`; an absent key is absent from the `dict`. Times are text because `datetime` has no nanoseconds
and sources have them; the canonical text of an instant with its offset is unique, so equal text is equal value.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast, get_args

from rowmill.core.json import Json

ColumnType = Literal[
    "integer", "float", "decimal", "boolean", "string", "datetime", "date", "time", "duration", "bytes", "list",
    "struct", "json",
]  # fmt: skip
TYPES: tuple[ColumnType, ...] = get_args(ColumnType)
Value: TypeAlias = Any
"""A value as the table above says; which type it has is the schema's to know."""
Record: TypeAlias = dict[str, Value]
MAX_DIGITS = 4300
"""Digits that an integer may have, Python's own limit: reading more takes time that grows with their square."""
MAX_DEPTH = 64
"""Objects and lists that may lie in one another, the record itself counted."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, or a field or item inside one.

    `nullable`: null is a value of it. `required`: its key is in every record. `item` is what a list holds (its
    name is not written), `fields` are a struct's.
    """

    name: str
    type: ColumnType
    nullable: bool = False
    required: bool = True
    item: "Column | None" = None
    fields: tuple["Column", ...] = ()

    def __post_init__(self) -> None:
        """Hold the inner columns to the type."""
        assert (self.item is not None) == (self.type == "list"), f"{self.name}: a list, and only a list, has an item"
        assert not self.fields or self.type == "struct", f"{self.name}: only a struct has fields"

    def to_json(self) -> dict[str, Json]:
        """Return the column as a JSON value."""
        told: dict[str, Json] = {
            "name": self.name, "type": self.type, "nullable": self.nullable, "required": self.required,
        }  # fmt: skip
        if self.item is not None:
            told["item"] = self.item.to_json()
        if self.type == "struct":
            told["fields"] = [one.to_json() for one in self.fields]
        return told

    @classmethod
    def from_json(cls, told: Mapping[str, Json]) -> "Column":
        """Read what `to_json` returned."""
        return cls(
            name=told["name"],
            type=told["type"],
            nullable=told["nullable"],
            required=told["required"],
            item=cls.from_json(told["item"]) if "item" in told else None,
            fields=tuple(cls.from_json(one) for one in cast("list[dict[str, Json]]", told.get("fields", []))),
        )


@dataclass(frozen=True)
class RecordSchema:
    """The columns of a dataset's records, in the order in which their keys are written."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        """Refuse two columns of one name."""
        assert len({one.name for one in self.columns}) == len(self.columns), "each column has a name of its own"

    @cached_property
    def by_name(self) -> dict[str, Column]:
        """The columns by their names."""
        return {one.name: one for one in self.columns}

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return tuple(one.name for one in self.columns)

    def with_leading(self, names: Iterable[str]) -> "RecordSchema":
        """Return the schema with these columns first, in the order given, and the others after them as they are."""
        first = list(dict.fromkeys(names))
        rest = [one for one in self.columns if one.name not in first]
        return RecordSchema((*(self.by_name[name] for name in first), *rest))

    def to_json(self) -> dict[str, Json]:
        """Return the schema as a JSON value."""
        return {"columns": [one.to_json() for one in self.columns]}

    @classmethod
    def from_json(cls, told: Mapping[str, Json]) -> "RecordSchema":
        """Read what `to_json` returned."""
        return cls(tuple(Column.from_json(one) for one in cast("list[dict[str, Json]]", told["columns"])))


Mode = Literal["tabular", "grouped", "sequential"]


def choose_mode(*, is_timeseries: bool, is_grouped: bool) -> Mode:
    """Return how records stand together: the one place where this is decided, for assembly, parsing and generation."""
    if is_timeseries:
        return "sequential"
    return "grouped" if is_grouped else "tabular"
