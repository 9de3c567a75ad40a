r"""A record and its schema: the columns of a table, in the order in which they are written.

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
| json | `None`, `bool`, `int`, `Decimal`, `str`, `list`, `dict` with string keys | nested |

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
"""A value of the types in the table above."""
Record: TypeAlias = dict[str, Value]
MAX_DIGITS = 4300
"""Maximum digits of an integer, Python's own limit: parsing takes time quadratic in them."""
MAX_DEPTH = 64
"""Maximum nesting of objects and lists, counting the record itself."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, or a field or item inside one.

    `nullable`: its value may be `None`. `required`: every record has its key. `item` is the column of a list's items
    (its name is not written), `fields` are the columns of a struct.
    """

    name: str
    type: ColumnType
    nullable: bool = False
    required: bool = True
    item: "Column | None" = None
    fields: tuple["Column", ...] = ()

    def __post_init__(self) -> None:
        """Check that the inner columns fit the type."""
        assert (self.item is not None) == (self.type == "list"), (
            f"{self.name}: an item belongs to a list, and only to a list"
        )
        assert not self.fields or self.type == "struct", f"{self.name}: only a struct has fields"

    def to_json(self) -> dict[str, Json]:
        """Return the column as a JSON value."""
        result: dict[str, Json] = {
            "name": self.name, "type": self.type, "nullable": self.nullable, "required": self.required,
        }  # fmt: skip
        if self.item is not None:
            result["item"] = self.item.to_json()
        if self.type == "struct":
            result["fields"] = [field.to_json() for field in self.fields]
        return result

    @classmethod
    def from_json(cls, stored: Mapping[str, Json]) -> "Column":
        """Read what `to_json` returned."""
        return cls(
            name=stored["name"],
            type=stored["type"],
            nullable=stored["nullable"],
            required=stored["required"],
            item=cls.from_json(stored["item"]) if "item" in stored else None,
            fields=tuple(cls.from_json(one) for one in cast("list[dict[str, Json]]", stored.get("fields", []))),
        )


@dataclass(frozen=True)
class RecordSchema:
    """The columns of a dataset's records, in the order in which their keys are written."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        """Check that names are unique."""
        assert len({column.name for column in self.columns}) == len(self.columns), "two columns have the same name"

    @cached_property
    def by_name(self) -> dict[str, Column]:
        """The columns by their names."""
        return {column.name: column for column in self.columns}

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return tuple(column.name for column in self.columns)

    def with_leading(self, names: Iterable[str]) -> "RecordSchema":
        """Return the schema with these columns first, in the given order, then the others in theirs."""
        first = list(dict.fromkeys(names))
        rest = [column for column in self.columns if column.name not in first]
        return RecordSchema((*(self.by_name[name] for name in first), *rest))

    def to_json(self) -> dict[str, Json]:
        """Return the schema as a JSON value."""
        return {"columns": [column.to_json() for column in self.columns]}

    @classmethod
    def from_json(cls, stored: Mapping[str, Json]) -> "RecordSchema":
        """Read what `to_json` returned."""
        return cls(tuple(Column.from_json(one) for one in cast("list[dict[str, Json]]", stored["columns"])))


Mode = Literal["tabular", "grouped", "sequential"]


def choose_mode(*, is_timeseries: bool, is_grouped: bool) -> Mode:
    """Return how records are grouped into examples, for assembly, parsing and generation alike."""
    if is_timeseries:
        return "sequential"
    return "grouped" if is_grouped else "tabular"
