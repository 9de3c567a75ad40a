"""The table contract as a config model: columns with their types and formats, and the dialect of the file."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rowmill.core.config import Config
from rowmill.kinds.tables.table_contract.value_shapes import NUMBERS

CellType = Literal["integer", "number", "boolean", "date", "datetime", "time", "text", "any"]
TIMES = frozenset({"date", "datetime", "time"})
"""Types whose values are text read by a `format`."""
ISO8601 = "iso8601"


def _is_one_character(text: str) -> str:
    if len(text) != 1 or text in "\n\r":
        raise ValueError(f"must be one character, such as ';', but no line end; got {text!r}")
    return text


Texts = Annotated[tuple[str, ...], Field(strict=False)]
"""A list of texts; without this, pydantic accepts only a tuple inside a union of models."""
Delimiter = Annotated[str, AfterValidator(_is_one_character)]


class ColumnContract(Config):
    """Type and format of a column's values, and what happens to a value that does not fit."""

    type: CellType
    """`integer`, `number` (exact decimals), `boolean` (true, false), `date`, `datetime`, `time` (text that `format`
    reads, kept as written), `text`, or `any`: the type that the source or the JSON has."""
    format: str | None = None
    """Format of a date, datetime or time: `iso8601` or a strptime format; only for these types."""
    na: Texts = ()
    """Words that mean a missing value, in addition to the empty cell."""
    decimal: Literal[".", ","] = "."
    """Decimal separator of a number."""
    thousands: Literal["", ",", ".", " ", "'"] = ""
    """Thousands separator; empty: none."""
    required: bool = True
    """Whether every record has the column."""
    on_mismatch: Literal["reject", "na"] = "reject"
    """What happens to a value that does not fit: the record is rejected as `type_mismatch`, or it becomes null."""
    use: bool = True
    """Whether records contain this column."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "ColumnContract":
        if (self.format is not None) != (self.type in TIMES):
            rule = "needs a format" if self.type in TIMES else "takes no format"
            raise ValueError(
                f"format: a column of type {self.type} {rule}; write for example type: date and format: iso8601"
            )
        if self.format is not None and self.format != ISO8601 and "%" not in self.format:
            raise ValueError(
                f"format: {self.format!r} is not a format; write iso8601 or a strptime format such as %d/%m/%Y"
            )
        if (self.decimal, self.thousands) not in NUMBERS and (self.type, self.thousands) != ("integer", "."):
            raise ValueError(
                f"decimal {self.decimal!r} and thousands {self.thousands!r} cannot be combined; they must differ, "
                "and an apostrophe needs a decimal point; write the separators of the data"
            )
        if (self.decimal, self.thousands) != (".", "") and self.type not in ("integer", "number"):
            raise ValueError(f"decimal and thousands: a column of type {self.type} has no separators; delete them")
        return self


class TableContract(Config):
    """Types and formats of a table; `rowmill advise --write` proposes one from the data."""

    delimiter: Delimiter | None = None
    """Delimiter of its CSV files; a file with another one is `table_drift`. Null: not checked."""
    quote: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Quote character of its CSV files; null: not checked."""
    group: Texts | None = None
    """The group columns that it was written for; a different `data.group_training_examples_by` is an error."""
    order: str | None = None
    """The order column that it was written for; a different `data.order_training_examples_by` is an error."""
    columns: dict[str, ColumnContract] = Field(min_length=1)
    """The columns by name, in the order in which records are written."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value, for manifests."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "TableContract":
        """Read what `to_json` returned."""
        # Not strict, so that lists are accepted for tuples.
        return cls.model_validate(stored, strict=False)

    @property
    def used(self) -> dict[str, ColumnContract]:
        """The columns that records contain."""
        return {name: one for name, one in self.columns.items() if one.use}
