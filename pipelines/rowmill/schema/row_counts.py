"""What canonical rows are counted by, whatever kind of data they are of.

The checks of these counts are in `checks/catalog.py`. What only one kind of data counts stands with the kind.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Protocol

import pyarrow as pa

from rowmill.schema.counts import Counts, compute_share, keep_any, keep_largest, keep_samples
from rowmill.schema.ledger import INTENDED_REASONS, KEPT, NO_RECORD_REASONS, REJECTED, count_unaccounted
from rowmill.schema.rows import Message


class RowCounter(Protocol):
    """A kind of data, as what it counts of its rows."""

    def count_rows(self, rows: pa.Table) -> Sequence[Counts]:
        """Return what only this kind counts of the rows of a part, as they are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts(Counts):
    """What rows of all kinds of data are counted by.

    A part counts them where its rows are made: `stages/canonical_rows/text_rows.py`, `kinds/tables/part_rows.py`. A
    filter that removes rows counts its part again, and adds its reason (`parts/accounts.py`).
    """

    records: int = 0
    """Records read, those that were not taken among them; set once, by `stages/canonical_rows/stage.py`."""
    further_rows: int = 0
    """Rows beside the first that were made of one record."""
    kept: int = 0
    splits: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rows kept by split."""
    schemas: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rows kept by the schema that their record was read as."""
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rejected records by reason."""
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """Records left out on purpose, by state."""
    is_text_file: bool = keep_any()
    """Whether rows are documents of a text file, which may be lines of longer ones."""
    validation_source: bool = keep_any()
    """Whether a source says of itself that it is for validation, so that no share of the others is held out."""
    samples_of_rejects: Mapping[str, tuple[str, ...]] = keep_samples()

    @property
    def rejected(self) -> int:
        return sum(self.reasons.values())

    def count_output(self) -> int:
        """Return how many rows came out."""
        return self.kept

    def count_unaccounted(self) -> int:
        """Return how many records the ledger misses, or counts twice; each row of a record has its own line."""
        return count_unaccounted(self.records + self.further_rows, self.list_ledger())

    def share_rejected(self) -> float:
        """Return the share of records rejected by reasons that the recipe did not ask for.

        Without `INTENDED_REASONS` above the line, and without `NO_RECORD_REASONS` and what was left out below it.
        """
        return compute_share(sum(self.count_unintended().values()), self.count_taken())

    def count_taken(self) -> int:
        """Return the records of which shares are computed: what is no record must not reduce the share of rejects."""
        no_records = sum(self.reasons.get(reason, 0) for reason in NO_RECORD_REASONS)
        return self.records - sum(self.left_out.values()) - no_records

    def count_unintended(self) -> dict[str, int]:
        """Return the rejects by those reasons that the recipe did not ask for."""
        return {reason: count for reason, count in self.reasons.items() if reason not in INTENDED_REASONS}

    def list_ledger(self) -> list[tuple[str, str, int]]:
        """Return the lines of the ledger."""
        return [
            (KEPT, "", self.kept),
            *((REJECTED, reason, count) for reason, count in self.reasons.items()),
            *((state, "", count) for state, count in self.left_out.items()),
        ]


def count_written_rows(rows: pa.Table) -> RowCounts:
    """Count what the rows of a part show, as they are written.

    Rows that other rows decide about are removed later, and what is left is counted again: a number that was counted on
    the way would describe rows that are gone.
    """
    return RowCounts(
        kept=rows.num_rows, splits=_count_values(rows.column("split")), schemas=_count_values(rows.column("schema"))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCounts(Counts):
    """What rows are counted by whose records are read by their columns: messages, and what was noticed in them."""

    rows_of_messages: int = 0
    """Rows kept of a dataset whose rows hold messages."""
    rows_with_unknown_roles: int = 0
    rows_by_unknown_role: Mapping[str, int] = field(default_factory=dict[str, int])
    messages_by_role: Mapping[str, int] = field(default_factory=dict[str, int])
    reasoning_messages: int = 0
    tool_call_messages: int = 0
    tool_calls: int = 0
    extracted_think_from_content: int = 0
    moved_reasoning_keys: int = 0
    dropped_think_messages: int = 0
    tools_present: int = 0
    tools_parsed_from_string: int = 0
    notes: Mapping[str, int] = field(default_factory=dict[str, int])
    """What was noticed in records and changed nothing, by name."""

    @property
    def messages(self) -> int:
        return sum(self.messages_by_role.values())

    @property
    def system_messages(self) -> int:
        return self.messages_by_role.get("system", 0)

    @property
    def user_messages(self) -> int:
        return self.messages_by_role.get("user", 0)

    @property
    def assistant_messages(self) -> int:
        return self.messages_by_role.get("assistant", 0)

    @property
    def tool_messages(self) -> int:
        return self.messages_by_role.get("tool", 0)

    @property
    def other_messages(self) -> int:
        """Messages of all other roles, which only some data names."""
        named = (self.system_messages, self.user_messages, self.assistant_messages, self.tool_messages)
        return self.messages - sum(named)


def count_written_messages(rows: pa.Table, *, holds_messages: bool) -> MessageCounts:
    """Count what the columns of a part's rows show of their messages."""
    import pyarrow.compute as pc

    roles = rows.column("unknown_roles")

    def total(column: str) -> int:
        return int(pc.sum(rows.column(column)).as_py() or 0)

    return MessageCounts(
        rows_of_messages=rows.num_rows if holds_messages else 0,
        rows_with_unknown_roles=int(pc.sum(pc.greater(pc.list_value_length(roles), 0)).as_py() or 0),
        rows_by_unknown_role=_count_values(pc.list_flatten(roles)),
        extracted_think_from_content=total("extracted_think_from_content"),
        moved_reasoning_keys=total("moved_reasoning_keys"),
        dropped_think_messages=total("dropped_think_messages"),
        tools_present=total("tools_present"),
        tools_parsed_from_string=total("tools_parsed_from_string"),
        notes=_count_values(pc.list_flatten(rows.column("notes"))),
    )


def count_messages(conversations: Iterable[Sequence[Message]]) -> MessageCounts:
    """Count messages by role, those that hold reasoning or calls, and the calls."""
    messages = list(chain.from_iterable(conversations))
    # Most messages have only role and content, so only the few others are examined.
    others = [message for message in messages if len(message) > 2]
    calls = [len(other["tool_calls"]) for other in others if other.get("tool_calls")]
    return MessageCounts(
        messages_by_role=dict(sorted(Counter(map(itemgetter("role"), messages)).items())),
        reasoning_messages=sum(bool(other.get("reasoning_content")) for other in others),
        tool_call_messages=len(calls),
        tool_calls=sum(calls),
    )


def count_left_messages(before: MessageCounts, rows: pa.Table, removed: Iterable[Sequence[Message]]) -> MessageCounts:
    """Count the messages of a part of which some rows are removed; roles with a count of zero are dropped."""
    gone = count_messages(removed)
    roles = {role: count - gone.messages_by_role.get(role, 0) for role, count in before.messages_by_role.items()}
    return replace(
        count_written_messages(rows, holds_messages=before.rows_of_messages > 0),
        messages_by_role={role: count for role, count in roles.items() if count},
        reasoning_messages=before.reasoning_messages - gone.reasoning_messages,
        tool_call_messages=before.tool_call_messages - gone.tool_call_messages,
        tool_calls=before.tool_calls - gone.tool_calls,
    )


def _count_values(column: pa.ChunkedArray) -> dict[str, int]:
    counted = column.value_counts()
    return dict(sorted(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadCounts(Counts):
    """What is in records, and the recipe does not read."""

    answer_records: int = 0
    """Records of kinds with answers, among whose columns those of preference data are searched."""
    records_with_preferences: int = 0
    preference_columns: Mapping[str, int] = field(default_factory=dict[str, int])
    rows_with_unread_flags: int = 0
    """Rows with a key or column that looks as if it said what trains, and that nothing reads."""
    rows_searched: int = 0
    """Rows that are searched for text that nothing reads."""
    unread_millionths: Mapping[str, int] = field(default_factory=dict[str, int])
    """By column, the sum over rows of the share of its text that nothing reads, in millionths."""
    samples_of_preferences: Mapping[str, tuple[str, ...]] = keep_samples()
    samples_of_unread_flags: Mapping[str, tuple[str, ...]] = keep_samples(2)
    """The first row with each flag, and the flag's value, by the row's note."""

    def share_unread_text(self) -> dict[str, float]:
        """Return the share of a record's text, on average, in each column that nothing reads, the largest first."""
        largest = sorted(self.unread_millionths.items(), key=lambda found: (-found[1], found[0]))
        return {name: compute_share(size / 1e6, self.rows_searched) for name, size in largest}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts(Counts):
    """Groups that stay in one split."""

    groups: int = 0
    rows_of_largest_group: int = keep_largest()
    is_group_cut: bool = keep_any()
    """Whether a large group may be cut, so that its size does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplitCounts(Counts):
    """Splits by time."""

    boundaries: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where splits begin that were computed from shares: split → time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContaminationCounts(Counts):
    """Records compared with items of benchmarks."""

    records_beside_benchmarks: int = 0
    contaminated_records: int = 0
    items_of_smallest_benchmark: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NearDuplicateCounts(Counts):
    """Records compared with one another."""

    records_compared: int = 0
    near_duplicate_records: int = 0
    displaced: int = 0
    """Near duplicates that go in favour of a row after them in the source: an appended row may take the place of one
    that an earlier build kept."""
