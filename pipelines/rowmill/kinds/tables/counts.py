"""What only tables are counted by, and the checks of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from rowmill.core.stage_names import CANONICAL_ROWS, GENERATED_SERIES, PARSED_RECORDS
from rowmill.schema.checks import Check
from rowmill.schema.counts import Counts, Details, compute_share, keep_largest, keep_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class TableExampleCounts(Counts):
    """What the examples of a table are counted by; the limits are those of all examples."""

    changed_by_wire: int = 0
    """Records whose text does not say all that they hold."""
    flushes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Examples by the reason that they ended."""
    prompt_tokens: int = keep_largest()
    """Tokens of the prompt that begins each example."""
    limit: int = keep_largest()
    """Tokens that an example may have."""
    record_room: int = keep_largest()
    """Tokens of an example that records may take."""
    longest_example: int = keep_largest()
    longest_group: int = keep_largest()
    """Records of the largest group."""
    samples_of_altered: Mapping[str, tuple[str, ...]] = keep_samples()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRecordDetails(Details):
    """The records of a part that could not be encoded."""

    rejects: tuple[tuple[int, str, str], ...]
    """Row in the part, reason and detail of each."""


class PlanSlice(NamedTuple):
    """A slice of the plan of a split, which becomes a part of examples."""

    fingerprint: str
    split: str
    records: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlanDetails(Details):
    """What the plan of one partition names."""

    plan: tuple[Any, ...]
    """`PLAN_FACTS` as JSON."""
    slices: tuple[tuple[str, str, int, int], ...]
    """The fields of each `PlanSlice`."""
    states: Mapping[str, str]
    """A digest of the states of the rows of each part that are not kept, by the part's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRowCounts(Counts):
    """What the rows of a table are counted by."""

    columns: int = keep_largest()
    characters: int = 0
    """Characters of the records as JSON."""
    non_finite: int = 0
    """Floats that are NaN or infinite."""
    contract_differences: int = 0
    """Differences between the table and its pinned contract, or between files that declare types."""
    mismatched_values: int = 0
    """Values that do not fit the type of their column."""


def count_table_rows(rows: pa.Table) -> TableRowCounts:
    """Count the characters of a part's records, each with the end of its line."""
    import pyarrow.compute as pc

    characters = pc.sum(pc.utf8_length(rows.column("record"))).as_py() or 0
    return TableRowCounts(characters=characters + rows.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdviceCounts(Counts):
    """The chosen group column, assessed."""

    group_objections: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeStepCounts(Counts):
    """Steps of time series whose interval the recipe names."""

    steps: int = 0
    deviating_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedTimeCounts(Counts):
    """Records of a table with an order column, and those whose time may be meant in two ways.

    Of several problems, the one that most of its records have.
    """

    ordered_records: int = 0
    ambiguous_records: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePartDetails(Details):
    """What one part of rows noticed of its cells."""

    mismatches: Mapping[str, tuple[int, str, int]]
    """By column, how many values do not fit its type, with the first text and its row."""
    zones: Mapping[str, tuple[int, str, int]]
    """Rows whose time is `with` a zone, or `without`, with the first cell and its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongRecordCounts(Counts):
    """Encoded records that fit into no example of some length, by that length."""

    overlong_records: Mapping[str, int] = field(default_factory=dict[str, int])
    lost_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tokens of these records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainComparisonCounts(Counts):
    """Generated records compared with those of train, where there are both."""

    compared_records: int = 0
    """Generated records."""
    copied_records: int = 0
    """Those of them that equal a record of train."""
    distinct_records: int = 0
    train_records: int = 0
    distinct_train_records: int = 0
    column_distance: float = keep_largest()
    """The largest distance between the values of a column."""
    association_distance: float = keep_largest()
    """The largest distance between the associations of two columns."""

    @property
    def repeated_records(self) -> float:
        """Share of the generated records that repeat another one."""
        return compute_share(self.compared_records - self.distinct_records, self.compared_records)

    @property
    def repeated_train_records(self) -> float:
        """Share of the train records that repeat another one."""
        return compute_share(self.train_records - self.distinct_train_records, self.train_records)

    def share_copied(self) -> float:
        """Return the share of the generated records that equal a train record."""
        return compute_share(self.copied_records, self.compared_records)


CHECKS = (
    Check("group_advice", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "objections to the chosen group column",
        "read the objections, and try other columns, with `rowmill advise {recipe}`",
        applies_to="records in groups, and time series",
        of=(GroupAdviceCounts,), value=lambda c: c.group_objections),
    Check("interval_mismatch", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "share of time steps that differ from timestamp_interval_seconds",
        "set the interval of the data, or omit it: a constant interval is detected",
        applies_to="time series with timestamp_interval_seconds", is_share=True,
        of=(TimeStepCounts,), value=lambda c: compute_share(c.deviating_steps, c.steps)),
    Check("table_contract", (CANONICAL_ROWS,), "at_most", 0, "error",
        "differences between the table and its pinned contract, or, without one, columns of which two files declare "
        "different types", "correct the data at the named cell; or accept the difference: write the contract of the "
        "current data with `rowmill advise {recipe} --write`, review it, and build again", applies_to="records",
        only_for="record", names_samples=True,
        of=(TableRowCounts,), value=lambda c: c.contract_differences),
    Check("table_drift", (CANONICAL_ROWS,), "at_most", 0, "error",
        "changes of the table since the published build: columns, types, formats, values that do not fit; only a "
        "warning if options changed as well",
        "correct the data at the named cell; or accept the change: write the contract of the current data with "
        "`rowmill advise {recipe} --write`, review it, and build again; or waive the check for one build",
        applies_to="records without a pinned contract, once a build is published", only_for="record",
        names_samples=True),
    Check("type_mismatch", (CANONICAL_ROWS,), "at_most", 0, "warn",
        "values that do not fit the type of their column; depending on the table contract, their records are rejected "
        "or the values become null",
        "read the table type_mismatch; correct the values, add them to the column's na words, or give the column "
        "another type in the table contract (`rowmill advise {recipe} --write`)", applies_to="records",
        only_for="record", names_samples=True,
        of=(TableRowCounts,), value=lambda c: c.mismatched_values),
    Check("ambiguous_times", (CANONICAL_ROWS,), "at_most", 0.01, "error",
        "share of records that the order column does not order: an hour that repeats without a zone, a time without a "
        "zone among others, seconds among milliseconds, a time that repeats in a series; of several, the most frequent",
        "correct the named cells in the source (the asset's page in Dagster has more, in the table ambiguous_times); "
        "if such times belong to the data, waive the check", warn_from=0, applies_to="records with an order column",
        only_for="record", requested_by=("format.data.order_training_examples_by",
        "format.time_series.timestamp_column"), is_share=True, names_samples=True,
        before_build="correct the cells in the source; if such times belong to the data, waive the check",
        of=(OrderedTimeCounts,), value=lambda c: compute_share(c.ambiguous_records, c.ordered_records)),
    Check("exact_copies", (PARSED_RECORDS, GENERATED_SERIES), "at_most", 0.01, "warn",
        "share of generated records that equal a training row",
        "compare with what repeats in train (table `beside train`): rows of few values agree by chance; a model that "
        "has memorized rows needs fewer epochs, more data, or differential privacy",
        applies_to="generated records of a table that is kept", is_share=True,
        of=(TrainComparisonCounts,), value=lambda c: c.share_copied()),
)  # fmt: skip
"""The checks of what only tables count."""
