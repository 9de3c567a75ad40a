"""The table contract as options: columns with their types and ways of writing, and the dialect of the file.

What belongs here: the model, and what of it cannot be. What does not: where a contract comes from (`inference.py`),
what it does to cells (`cells.py`).
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rowmill.core.config import Config
from rowmill.tabular.table_contract.value_shapes import NUMBERS

CellType = Literal["integer", "number", "boolean", "date", "datetime", "time", "text", "any"]
TIMES = frozenset({"date", "datetime", "time"})
"""Types whose values are text that a format reads."""
ISO8601 = "iso8601"


def _is_one_character(text: str) -> str:
    if len(text) != 1 or text in '\n\r"':
        raise ValueError(f"must be one character, neither a line end nor a double quote; got {text!r}; write such as ;")
    return text


Texts = Annotated[tuple[str, ...], Field(strict=False)]
"""A list of texts; inside a union of models pydantic would take nothing but a tuple."""
Delimiter = Annotated[str, AfterValidator(_is_one_character)]


class ColumnContract(Config):
    """What a column's values are, and what becomes of one that is not."""

    type: CellType
    """`integer`, `number` (exact decimals), `boolean` (true, false), `date`, `datetime`, `time` (text that `format`
    reads, kept as written), `text`, or `any`: whatever the source's own types or JSON say."""
    format: str | None = None
    """How a date, datetime or time is written: `iso8601`, or a strptime text; of these types alone."""
    na: Texts = ()
    """Words that mean no value, beside the empty cell."""
    decimal: Literal[".", ","] = "."
    """Sign before the fraction of a number."""
    thousands: Literal["", ",", ".", " ", "'"] = ""
    """Sign between groups of three digits; empty: none."""
    required: bool = True
    """Whether every record has the column."""
    on_mismatch: Literal["reject", "na"] = "reject"
    """What becomes of a value that does not fit: the record is rejected as `type_mismatch`, or the value is null."""
    use: bool = True
    """Whether records are written with this column; false leaves it out."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "ColumnContract":
        if (self.format is not None) != (self.type in TIMES):
            wanted = "needs a format" if self.type in TIMES else "has no format"
            raise ValueError(f"format: a column of type {self.type} {wanted}; write type: date and format: iso8601")
        if self.format is not None and self.format != ISO8601 and "%" not in self.format:
            raise ValueError(
                f"format: {self.format!r} is no format; iso8601 or a strptime text such as %d/%m/%Y is; write one"
            )
        if (self.decimal, self.thousands) not in NUMBERS and (self.type, self.thousands) != ("integer", "."):
            raise ValueError(
                f"decimal {self.decimal!r} and thousands {self.thousands!r} do not go together; the sign of thousands "
                "is another one, an apostrophe with a decimal point alone; write the signs of the data"
            )
        if (self.decimal, self.thousands) != (".", "") and self.type not in ("integer", "number"):
            raise ValueError(f"decimal and thousands: a column of type {self.type} has no such signs; delete them")
        return self


class TableContract(Config):
    """What a table is: decided by whoever writes it, proposed from the data by `rowmill advise --write`."""

    delimiter: Delimiter | None = None
    """What separates the cells of its CSV files; a file separated otherwise is `table_drift`. Null: not judged."""
    quote: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """What encloses cells of its CSV files; null: not judged."""
    group: Texts | None = None
    """The group columns that it was written for; another `data.group_training_examples_by` is an error."""
    order: str | None = None
    """The order column that it was written for; another `data.order_training_examples_by` is an error."""
    columns: dict[str, ColumnContract] = Field(min_length=1)
    """The columns by name, in the order in which records are written."""

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value, for manifests."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "TableContract":
        """Read what `to_json` returned."""
        # By way of JSON mode, so that lists may fill tuples.
        return cls.model_validate(told, strict=False)

    @property
    def used(self) -> dict[str, ColumnContract]:
        """The columns that records are written with."""
        return {name: one for name, one in self.columns.items() if one.use}
