"""Some records of an unknown file, and how well the options of a kind read them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rowmill.core.config import describe_type
from rowmill.core.json import Json
from rowmill.kinds.shared.messages import CONTEXT_COLUMNS, MORE_CONTEXT_COLUMNS, iterate_texts

_ABSENT = ("", "unknown_schema", "missing_field")
"""Reasons of records that have none of the columns that are looked for."""

IMPLICIT_SCHEMAS = frozenset({"prompt_response", "alpaca", "text"})
"""Shapes that columns of text have by their names alone."""

EXPLICIT_PRECEDENCE = 40
"""Kinds up to this precedence, which is that of chats, are recognized by more than names."""

LEAST_FITTING = 0.95
"""The share of whole records that must fit, since some records of real data are broken."""

BLOCKING_SHARE = 0.5
"""From this share of unread text on, a proposal is not sure: the answer itself may be what is not read."""

WORTH_A_NOTE = 0.1
"""From this share of unread text on, a column is named."""


@dataclass(frozen=True)
class Sample:
    """The first records of a file, as a kind looks at them."""

    records: Sequence[Mapping[str, Json]]
    is_table_file: bool = False
    """Whether the file is a table by its kind: CSV, TSV, or Parquet with columns that are no text."""

    @cached_property
    def whole(self) -> list[Mapping[str, Json]]:
        """The records that have a value in each column in which most have one."""
        present = Counter(name for record in self.records for name, value in record.items() if value is not None)
        expected = [name for name, count in present.items() if count * 2 > len(self.records)]
        return [record for record in self.records if all(record.get(name) is not None for name in expected)]

    @cached_property
    def columns(self) -> list[str]:
        """The names of all columns that have a value, in their order."""
        present = (name for record in self.records for name, value in record.items() if value is not None)
        return list(dict.fromkeys(present))

    def describe_columns(self) -> dict[str, str]:
        """Return the most common type of each column."""
        found: dict[str, Counter[str]] = {}
        for record in self.records:
            for name, value in record.items():
                if value is not None:
                    found.setdefault(name, Counter())[describe_type(value).split(" ", 1)[-1]] += 1
        return {name: types.most_common(1)[0][0] for name, types in found.items()}

    def find_column(self, name: str) -> str | None:
        """Return a column by its name in any case."""
        return next((column for column in self.columns if column.lower() == name), None)

    def is_mostly(self, is_true: Iterable[bool]) -> bool:
        """Return whether something is true of most whole records."""
        found = list(is_true)
        return bool(found) and sum(found) * 2 > len(found)


@dataclass(frozen=True, slots=True)
class Recognition:
    """Options of `format`, with what reading some records with them gave; nothing here quotes a value of the data."""

    options: Mapping[str, Any]
    fits: int
    """Records that became rows."""
    of: int
    """Whole records, without those that were refused for their content."""
    records: int
    """All records looked at."""
    columns: Sequence[str] = ()
    """Columns that were read."""
    unread: Mapping[str, float] = field(default_factory=dict[str, float])
    """Columns of text that nothing reads, and their share of all text."""
    misfit: str = ""
    """Why most of the records that do not fit do not."""
    problem: str = ""
    """Why the proposal is not sure although the records fit."""
    schemas: Sequence[str] = ()
    """The shapes that were found."""
    notes: Sequence[str] = ()
    """What a user should know before the first build."""
    groups: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of other groups that reading the records needs, such as `{"loss": {"weights": True}}`."""
    precedence: int = 100
    """Of several that are sure, the one with the lowest number is proposed."""

    @property
    def kind(self) -> str:
        return self.options["kind"]

    @property
    def is_sure(self) -> bool:
        """Whether the whole records fit, but for one in twenty, and the text that nothing reads is the smaller part.

        A shape that says itself what it is may have more such text: no other column can be the answer.
        """
        is_explicit = self.precedence <= EXPLICIT_PRECEDENCE and not IMPLICIT_SCHEMAS.issuperset(self.schemas)
        return (
            self.fits >= LEAST_FITTING * self.of > 0
            and self.of * 2 >= self.records
            and (is_explicit or sum(self.unread.values()) < BLOCKING_SHARE)
            and not self.problem
        )

    @property
    def evidence(self) -> list[str]:
        """What was found, in sentences."""
        named = ", ".join(f"`{name}`" for name in self.columns)
        verb = "is" if len(self.columns) == 1 else "are"
        found = [f"{self.kind}: {named} {verb} read in {self.fits} of {self.records} records"] if named else []
        large = [f"`{name}` ({share:.0%})" for name, share in self.unread.items() if share >= WORTH_A_NOTE]
        if large:
            found.append(f"nothing reads {', '.join(large)} of the text; format.ignore_columns accepts that")
        return [*found, *self.notes]


def suggest_context(sample: Sample, *read: str) -> dict[str, Any]:
    """Return the option of the columns that hold a prompt's context, if their names are not the known ones.

    `read` are the columns of the prompt and its answer.
    """
    found = [column for name in CONTEXT_COLUMNS if (column := sample.find_column(name)) is not None]
    for name in MORE_CONTEXT_COLUMNS:
        column = sample.find_column(name)
        if column is not None and sample.is_mostly(any(iterate_texts(one.get(column))) for one in sample.whole):
            found.append(column)
    context = [column for column in found if column not in read]
    return {} if set(context) <= set(CONTEXT_COLUMNS) else {"context_fields": context}


def choose_best(found: Iterable[Recognition]) -> Recognition | None:
    """Return the recognition with most fits, then least unread text, then the first.

    One without any is kept if records have its columns: the error about them says why they do not fit.
    """
    return min(
        (one for one in found if one.fits or one.misfit.partition(":")[0] not in _ABSENT),
        key=lambda one: (not one.is_sure, -one.fits, round(sum(one.unread.values()), 2)),
        default=None,
    )
