"""Facts of a table's plan, which add up over its partitions.

Sizes are kept as the number of times that each occurs, of which there are at most as many as an example has tokens. So
minimum, mean, deviation and histograms of a table are exact, whatever number of partitions they are added up from.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.schema.manifest import DisplayTable
from rowmill.tabular.assembly import DELIMITERS_PER_UNIT, FLUSHES, ExampleLimits
from rowmill.tabular.schema import Mode

MAX_NAMED_OVERFLOWS = 20
"""Overflows named in an error, the largest first."""
MAX_LISTED_OVERFLOWS = 100
"""Overflows listed in the report, in the order of the table; the rejects have all."""
MEASURED_SIZES = ("record_tokens", "group_tokens", "example_tokens", "example_records", "example_groups")


# ── Sizes ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class ValueCounts:
    """How many times each value occurs: `values` ascend."""

    values: Ints
    counts: Ints

    @classmethod
    def of(cls, values: Ints) -> "ValueCounts":
        """Count values."""
        return cls(*np.unique(values, return_counts=True))

    @classmethod
    def join(cls, several: Sequence["ValueCounts"]) -> "ValueCounts":
        """Add counts up."""
        none = np.empty(0, np.int64)
        values = np.concatenate([none, *(one.values for one in several)])
        counts = np.concatenate([none, *(one.counts for one in several)])
        distinct, back = np.unique(values, return_inverse=True)
        sums = np.zeros(len(distinct), np.int64)
        np.add.at(sums, back, counts)
        return cls(distinct, sums)

    @property
    def largest(self) -> int:
        """The largest value; 0 if there is none."""
        return int(self.values.max(initial=0))

    def measure_spread(self) -> dict[str, float]:
        """Return minimum, mean, maximum and standard deviation; zeros if there is no value."""
        total = int(self.counts.sum())
        if not total:
            return {"min": 0, "mean": 0.0, "max": 0, "std": 0.0}
        mean = float((self.values * self.counts).sum() / total)
        deviation = float(np.sqrt((self.counts * (self.values - mean) ** 2).sum() / total))
        return {
            "min": int(self.values[0]),
            "mean": round(mean, 6),
            "max": self.largest,
            "std": round(deviation, 6),
        }

    def to_json(self) -> list[list[int]]:
        """Return values and counts as JSON."""
        return [self.values.tolist(), self.counts.tolist()]

    @classmethod
    def from_json(cls, stored: Sequence[Sequence[int]]) -> "ValueCounts":
        """Read what `to_json` returned."""
        values, counts = (np.array(one, np.int64) for one in stored)
        return cls(values, counts)


@dataclass(frozen=True, slots=True, eq=False)
class SplitFacts:
    """Counts and sizes of a split's examples; `longest_group` are the records of the largest group."""

    split: str
    counts: Mapping[str, int]
    sizes: Mapping[str, ValueCounts]
    shown_tokens: int
    longest_group: int

    @classmethod
    def join(cls, several: Sequence["SplitFacts"]) -> "SplitFacts":
        """Add up the facts of one split in several partitions."""
        first = several[0]
        return cls(
            first.split,
            {name: sum(one.counts[name] for one in several) for name in first.counts},
            {name: ValueCounts.join([one.sizes[name] for one in several]) for name in first.sizes},
            sum(one.shown_tokens for one in several),
            max(one.longest_group for one in several),
        )

    def count_expected_tokens(self, limits: ExampleLimits) -> int:
        """Compute the tokens of all examples: prompts, delimiters, and records as often as they are shown."""
        delimiters = DELIMITERS_PER_UNIT * self.counts["units"]
        return self.counts["examples"] * limits.prompt + delimiters + self.shown_tokens

    def list_facts(self) -> dict[str, Any]:
        """Return the numbers of the report, by name."""
        counts: dict[str, Any] = {name: count for name, count in self.counts.items() if name != "units"}
        for name, sizes in self.sizes.items():
            counts |= {f"{name}_{what}": value for what, value in sizes.measure_spread().items()}
        return counts

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON."""
        sizes = {name: one.to_json() for name, one in self.sizes.items()}
        return {
            "split": self.split, "counts": dict(self.counts), "sizes": sizes, "shown_tokens": self.shown_tokens,
            "longest_group": self.longest_group,
        }  # fmt: skip

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "SplitFacts":
        """Read what `to_json` returned."""
        sizes = {name: ValueCounts.from_json(one) for name, one in stored["sizes"].items()}
        return cls(stored["split"], stored["counts"], sizes, stored["shown_tokens"], stored["longest_group"])


# ── Overflows ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TableOverflow:
    """A record or group that is too large for an example: `name` is its row or its key, `records` how many it has."""

    kind: str
    name: str
    tokens: int
    prompt: int
    record_tokens: int
    limit: int
    records: int
    widest: str = ""

    @property
    def reason(self) -> str:
        """Its reject reason."""
        return f"{self.kind}_overflow"

    @property
    def description(self) -> str:
        """Its size and where it comes from."""
        records = f"{self.records} {'record' if self.records == 1 else 'records'} {self.record_tokens}"
        widest = f", widest column {self.widest}" if self.widest else ""
        parts = f"prompt {self.prompt}, BOS/EOS {DELIMITERS_PER_UNIT}, {records}"
        return f"{self.name} needs {self.tokens} tokens ({parts}), limit {self.limit}{widest}"


@dataclass(frozen=True, slots=True)
class OverflowFacts:
    """How many units do not fit, the `first` of them in the order of the table, and the `worst`, largest first."""

    count: int = 0
    first: tuple[TableOverflow, ...] = ()
    worst: tuple[TableOverflow, ...] = ()

    @classmethod
    def of(cls, overflows: Sequence[TableOverflow]) -> "OverflowFacts":
        """Count overflows."""
        return cls(len(overflows), tuple(overflows[:MAX_LISTED_OVERFLOWS]), _select_worst(overflows))

    @classmethod
    def join(cls, several: Sequence["OverflowFacts"]) -> "OverflowFacts":
        """Add up the overflows of partitions."""
        first = tuple(chain.from_iterable(one.first for one in several))[:MAX_LISTED_OVERFLOWS]
        worst = _select_worst([overflow for one in several for overflow in one.worst])
        return cls(sum(one.count for one in several), first, worst)

    def to_json(self) -> list[Any]:
        """Return the facts as JSON."""
        return [self.count, *([[*astuple(one)] for one in some] for some in (self.first, self.worst))]

    @classmethod
    def from_json(cls, stored: Sequence[Any]) -> "OverflowFacts":
        """Read what `to_json` returned."""
        count, *lists = stored
        first, worst = (tuple(TableOverflow(*one) for one in some) for some in lists)
        return cls(count, first, worst)


def _select_worst(overflows: Iterable[TableOverflow]) -> tuple[TableOverflow, ...]:
    return tuple(sorted(overflows, key=lambda one: (-one.tokens, one.name))[:MAX_NAMED_OVERFLOWS])


# ── The plan of a table ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The plan of a table in numbers: its splits in the order of `SPLITS`, without those that have no rows."""

    mode: Mode
    limits: ExampleLimits
    options: dict[str, Any]
    splits: tuple[SplitFacts, ...]
    overflows: OverflowFacts
    changed: int

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """The numbers of each split, by name."""
        return {one.split: one.list_facts() for one in self.splits}

    @property
    def longest(self) -> dict[str, int]:
        """The bounds of generation: the longest example and the longest series of train."""
        train = next((one for one in self.splits if one.split == "train"), None)
        if train is None:
            return {"longest_example": 0, "longest_group": 0}
        return {"longest_example": train.sizes["example_tokens"].largest, "longest_group": train.longest_group}

    def table(self) -> DisplayTable:
        """Return the numbers of each split: counts, tokens, why examples ended, sizes."""
        columns = ("split", "records", "groups", "examples", "tokens", *(f"flush_{name}" for name in FLUSHES))
        columns += tuple(f"{of}_{what}" for of in MEASURED_SIZES for what in ("min", "mean", "max", "std"))
        rows = [(name, *(counts[c] for c in columns[1:])) for name, counts in self.facts.items()]
        return DisplayTable(columns, tuple(rows))


def join_split_facts(several: Iterable[Sequence[SplitFacts]], splits: Sequence[str]) -> tuple[SplitFacts, ...]:
    """Add up the facts of partitions, split by split."""
    held = list(chain.from_iterable(several))
    by_split = {split: [one for one in held if one.split == split] for split in splits}
    return tuple(SplitFacts.join(own) for own in by_split.values() if own)
