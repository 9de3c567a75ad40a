"""The plan of a table: which records make which examples, computed from lengths alone, and what is counted of it.

    lengths, index ─► what fits ─► passes ─► assembled ─► facts

A build plans all partitions before it writes any examples. Sizes are kept as the number of times that each occurs, so
that the facts of a table are exact, whatever number of partitions they are added up from.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from rowmill.core import permutation
from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError, ContextOverflowError
from rowmill.kinds.shared.splits import SPLITS
from rowmill.kinds.tables.assembly import (
    DELIMITERS_PER_UNIT,
    FLUSHES,
    AssembledExamples,
    BudgetSampler,
    ExampleLimits,
    RecordLengths,
    RecordPass,
    assemble_groups,
    assemble_records,
    assemble_series,
    resample_groups,
    resample_records,
    resample_series,
    split_large_runs,
)
from rowmill.kinds.tables.options import Records as RecordsFormat
from rowmill.kinds.tables.partitions import RowIndex
from rowmill.kinds.tables.schema import Mode
from rowmill.kinds.tables.serialization import read_json
from rowmill.schema.manifest import DisplayTable

MAX_NAMED_OVERFLOWS = 20
"""Overflows named in an error, the largest first."""
MAX_EXAMINED_ROWS = 100
"""Records of a group that are examined to find its widest column."""
MAX_LISTED_OVERFLOWS = 100
"""Overflows listed in the report, in the order of the table; the rejects have all."""
MEASURED_SIZES = ("record_tokens", "group_tokens", "example_tokens", "example_records", "example_groups")


ValueCounts = Mapping[int, int]
"""How many times each value occurs, by value in ascending order."""


def count_values(values: Ints) -> ValueCounts:
    """Count values."""
    return dict(zip(*(part.tolist() for part in np.unique(values, return_counts=True)), strict=True))


def join_counts(several: Iterable[ValueCounts]) -> ValueCounts:
    """Add counts up."""
    sums: Counter[int] = Counter()
    for counts in several:
        sums.update(counts)
    return {value: sums[value] for value in sorted(sums)}


def _measure_spread(sizes: ValueCounts) -> dict[str, float]:
    """Return minimum, mean, maximum and standard deviation; zeros if there is no value."""
    if not sizes:
        return {"min": 0, "mean": 0.0, "max": 0, "std": 0.0}
    values, counts = np.array([*sizes]), np.array([*sizes.values()])
    mean = float((values * counts).sum() / counts.sum())
    deviation = float(np.sqrt((counts * (values - mean) ** 2).sum() / counts.sum()))
    return {"min": int(values[0]), "mean": round(mean, 6), "max": int(values[-1]), "std": round(deviation, 6)}


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
            {name: join_counts(one.sizes[name] for one in several) for name in first.sizes},
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
            counts |= {f"{name}_{what}": value for what, value in _measure_spread(sizes).items()}
        return counts

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON."""
        sizes = {name: [[*one], [*one.values()]] for name, one in self.sizes.items()}
        return {
            "split": self.split, "counts": dict(self.counts), "sizes": sizes, "shown_tokens": self.shown_tokens,
            "longest_group": self.longest_group,
        }  # fmt: skip

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "SplitFacts":
        """Read what `to_json` returned."""
        sizes = {name: dict(zip(*one, strict=True)) for name, one in stored["sizes"].items()}
        return cls(stored["split"], stored["counts"], sizes, stored["shown_tokens"], stored["longest_group"])


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
        return {"longest_example": max(train.sizes["example_tokens"], default=0), "longest_group": train.longest_group}

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


# ── Planning a partition ───────────────────────────────────────────────────────────────────────────


KEPT_STATE, NOT_SAMPLED, FIRST_REJECT_STATE = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class SplitTablePlan:
    """One split's examples: `rows[r]` is the row of the plan's record r, `group_of[r]` its group (−1: none)."""

    split: str
    rows: Ints
    groups: Ints
    records: RecordLengths
    assembled: AssembledExamples
    lengths: Ints


@dataclass(frozen=True, slots=True, eq=False)
class PartitionPlan:
    """The examples of a partition, planned: `states` int8[N] say what becomes of each row.

    Overflow i has the rows `overflow_rows[i]`.
    """

    mode: Mode
    splits: tuple[SplitTablePlan, ...]
    overflows: tuple[TableOverflow, ...]
    overflow_rows: tuple[Ints, ...]
    states: NDArray[np.int8]

    def summarize_splits(self) -> tuple[SplitFacts, ...]:
        """Return the facts of each split."""
        return tuple(_summarize_split(self.mode, split) for split in self.splits)


@dataclass(frozen=True, slots=True)
class TablePlanRequest:
    """Inputs of a plan other than lengths; the dataset's name, the seed and the partition's decide the sampling.

    `wanted` records of train are sampled (None: each once). `partition` names one of several that the hash of keys
    decides.
    """

    dataset: str
    seed: int
    form: RecordsFormat
    limits: ExampleLimits
    wanted: int | None
    partition: str | None = None


ColumnReader = Callable[[Ints, str], Sequence[str]]
"""Reads a column of rows, given their numbers in the index."""


def plan_partition(
    request: TablePlanRequest, index: RowIndex, lengths: Ints, *, read_column: ColumnReader
) -> PartitionPlan:
    """Plan all splits of a partition's rows; units that do not fit are left out, whatever the recipe says.

    `lengths` int64[N] are each row's tokens, −1 for a row that was rejected. Overflows are named by `read_column`.
    """
    excess = _find_oversized(request.form, request.limits, index, lengths)
    states = np.zeros(len(lengths), np.int8)
    states[excess.rows] = FIRST_REJECT_STATE + (excess.kind == "group")
    fitting = (lengths >= 0) & (states == KEPT_STATE)
    splits = tuple(_plan_table_split(request, index, lengths, fitting, split) for split in SPLITS)
    shown = np.zeros(len(lengths), bool)
    for one in splits:
        shown[one.rows[one.assembled.records]] = True
    states[fitting & ~shown] = NOT_SAMPLED
    made = tuple(one for one in splits if len(one.rows))
    rows = tuple(np.split(excess.rows, excess.starts[1:-1])) if len(excess.units) else ()
    overflows = tuple(_name_overflows(request, read_column, index, excess, rows)) if rows else ()
    return PartitionPlan(request.form.mode, made, overflows, rows, states)


def count_sampled_rows(request: TablePlanRequest, index: RowIndex, lengths: Ints) -> int:
    """Count the train records that fit, of which a sample takes its share."""
    fitting = lengths >= 0
    fitting[_find_oversized(request.form, request.limits, index, lengths).rows] = False
    return int((fitting & (index.splits == SPLITS.index("train"))).sum())


def require_record_room(dataset: str, form: RecordsFormat, limits: ExampleLimits, widest_names: str) -> None:
    """Refuse limits under which no record fits.

    Raises
    ------
    ContextOverflowError
        If the prompt and the delimiters take all tokens of an example.

    """
    if limits.records < 1:
        shorter = "" if form.prompt.style == "names" else ", or set format.prompt.style: names"
        raise ContextOverflowError(
            f"datasets.{dataset}: the prompt has {limits.prompt} tokens and with BOS/EOS {DELIMITERS_PER_UNIT} "
            f"leaves {limits.records} of {limits.limit} for records, expected at least 1; its widest columns are "
            f"{widest_names}; {_suggest_longer_examples(form)}, or shorten these names{shorter}"
        )


def require_fitting_units(dataset: str, form: RecordsFormat, overflows: OverflowFacts) -> None:
    """Refuse a plan in which a unit does not fit, unless the recipe leaves such units out.

    Raises
    ------
    ContextOverflowError
        If there is one; it names the largest.

    """
    # With `split`, only single records that are too large remain, which cannot be split.
    if overflows.count and form.assembly.on_overflow != "reject":
        kind, count = overflows.worst[0].kind, overflows.count
        does = f"1 {kind} does" if count == 1 else f"{count} {kind}s do"
        named = "; ".join(overflow.description for overflow in overflows.worst)
        more = f"; and {count - len(overflows.worst)} more" if count > len(overflows.worst) else ""
        raise ContextOverflowError(f"datasets.{dataset}: {does} not fit: {named}{more}; {_list_remedies(form, kind)}")


def require_single_use(dataset: str, form: RecordsFormat, wanted: int | None, records: int) -> None:
    """Refuse to show a record more than once under differential privacy.

    Raises
    ------
    ConfigError
        If more records are wanted than train has.

    """
    if form.privacy.dp_enabled and wanted is not None and wanted > records:
        raise ConfigError(
            f"datasets.{dataset}.format.training.num_input_records_to_sample: {wanted} of {records} train "
            "records under privacy.dp_enabled, where each record may be shown only once; lower it"
        )


@dataclass(frozen=True, slots=True)
class ReplannedTable:
    """The plan of a partition at another maximum length: `lengths` are those of the examples of each split.

    `records_over` counts encoded records that would not fit into an example, `tokens_over` their tokens.
    """

    limit: int
    lengths: tuple[Ints, ...]
    records_over: int
    tokens_over: int


def replan_partition(request: TablePlanRequest, index: RowIndex, lengths: Ints) -> ReplannedTable:
    """Plan all splits at the request's length; what does not fit is counted, whatever the recipe says."""
    limits, fitting = request.limits, lengths >= 0
    if limits.records < 1:
        return ReplannedTable(limits.limit, (), int(fitting.sum()), int(lengths[fitting].sum()))
    over = _find_oversized(request.form, limits, index, lengths).rows
    fitting[over] = False
    splits = tuple(_plan_table_split(request, index, lengths, fitting, split).lengths for split in SPLITS)
    return ReplannedTable(limits.limit, splits, len(over), int(lengths[over].sum()))


@dataclass(frozen=True, slots=True, eq=False)
class _OversizedUnits:
    """Units too large for an example: unit u is `units[u]`, a row or a group, with `rows[starts[u]:starts[u + 1]]`."""

    kind: Literal["record", "group"]
    units: Ints
    tokens: Ints
    rows: Ints
    starts: Ints


def _find_oversized(form: RecordsFormat, limits: ExampleLimits, index: RowIndex, lengths: Ints) -> _OversizedUnits:
    if form.mode != "grouped" or form.assembly.on_overflow == "split":
        rows = np.flatnonzero(lengths > limits.records)
        return _OversizedUnits("record", rows, lengths[rows], rows, np.arange(len(rows) + 1, dtype=np.int64))
    assert index.groups is not None
    tokens = np.bincount(index.groups, weights=np.maximum(lengths, 0), minlength=len(index.keys)).astype(np.int64)
    is_large = tokens > limits.records
    groups = np.flatnonzero(is_large)
    rows = np.flatnonzero(is_large[index.groups] & (lengths >= 0))
    rows = rows[np.argsort(index.groups[rows], kind="stable")]
    starts = np.searchsorted(index.groups[rows], np.append(groups, len(index.keys))).astype(np.int64)
    return _OversizedUnits("group", groups, tokens[groups], rows, starts)


def _name_overflows(
    request: TablePlanRequest, read_column: ColumnReader, index: RowIndex, excess: _OversizedUnits, rows: Sequence[Ints]
) -> Iterator[TableOverflow]:
    """Name all overflows and their widest columns, reading each part once."""
    limits, columns = request.limits, request.form.group_columns
    if excess.kind == "record":
        names = [f"record {name}" for name in read_column(excess.units, "row_id")]
    else:
        names = [format_group_name(columns, index.keys[group]) for group in excess.units.tolist()]
    examined = [of[:MAX_EXAMINED_ROWS] for of in rows]
    records = iter(read_column(np.concatenate(examined), "record"))
    for name, tokens, of, shown in zip(names, excess.tokens.tolist(), rows, examined, strict=True):
        sizes: Counter[str] = Counter()
        for record in islice(records, len(shown)):
            sizes.update({column: len(str(value)) for column, value in read_json(record).items()})
        needed = tokens + limits.prompt + DELIMITERS_PER_UNIT
        widest = max(sizes, key=sizes.__getitem__, default="")
        yield TableOverflow(excess.kind, name, needed, limits.prompt, tokens, limits.limit, len(of), widest)


def format_group_name(columns: Sequence[str], key: str) -> str:
    """Format a group's key: `customer_id='C-002'`."""
    value = orjson.loads(key) if len(key) < 1 << 16 else key
    values = value if len(columns) > 1 and isinstance(value, list) else [value]
    return ", ".join(f"{name}={one!r}" for name, one in zip(columns, values, strict=False)) or key


def _suggest_longer_examples(form: RecordsFormat) -> str:
    if form.assembly.max_seq_length is None:
        return "raise seq_len"
    return "raise format.assembly.max_seq_length (at most seq_len)"


def _list_remedies(form: RecordsFormat, kind: str) -> str:
    remedies = [_suggest_longer_examples(form)]
    if kind == "group":
        remedies.append("choose a finer group column (`rowmill advise` rates them)")
        if not form.privacy.dp_enabled:
            remedies.append("set format.assembly.on_overflow: split to cut groups between records")
    else:
        remedies.append("shorten or drop the widest column")
    if form.assembly.on_overflow == "error":
        remedies.append("set format.assembly.on_overflow: reject to leave them out")
    return ", or ".join(remedies)


def _plan_table_split(
    request: TablePlanRequest, index: RowIndex, lengths: Ints, fitting: NDArray[np.bool_], split: str
) -> SplitTablePlan:
    rows, begins = index.sort_rows(np.flatnonzero((index.splits == SPLITS.index(split)) & fitting))
    records = RecordLengths(lengths[rows], begins)
    groups = np.full(len(begins) - 1, -1) if index.groups is None else index.groups[rows[begins[:-1]]]
    form, limits = request.form, request.limits
    wanted, draw = None, None
    if split == "train":
        wanted, draw = request.wanted, _make_budget_sampler(request, index, split, groups)

    def permute(number: int, count: int) -> Ints:
        """Return the order of a pass: a keyed permutation, independent of other datasets, partitions and passes."""
        of_partition = () if request.partition is None else (request.partition,)
        key = permutation.hash_labels(request.seed, "assembly", request.dataset, split, number, *of_partition)
        return permutation.make_feistel(count, key)(np.arange(count, dtype=np.int64))

    match form.mode:
        case "tabular":
            assembled = assemble_records(records, resample_records(records, wanted, permute), limits)
        case "grouped":
            passes = resample_groups(records, wanted, permute)
            if form.assembly.on_overflow == "split":
                passes = [
                    RecordPass(one.number, *split_large_runs(records, one.firsts, one.lasts, limits)) for one in passes
                ]
            assembled = assemble_groups(records, passes, limits)
        case "sequential":
            assembled = assemble_series(records, resample_series(records, wanted, permute), limits, draw)
    return SplitTablePlan(split, rows, groups, records, assembled, assembled.lengths(records.tokens, limits))


def _make_budget_sampler(request: TablePlanRequest, index: RowIndex, split: str, groups: Ints) -> BudgetSampler:
    """Return the sampler of train examples' budgets, uniform from seven tenths of the record budget to all of it."""
    low = request.limits.min_budget
    span = request.limits.records - low + 1

    def of_group(number: int, group: int) -> Callable[[int], int]:
        key = index.keys[int(groups[group])]
        drawn = permutation.make_label_hasher(request.seed, "budget", request.dataset, split, number, key)
        return lambda ordinal: low + (drawn(ordinal) * span >> 64)

    return of_group


def _summarize_split(mode: Mode, one: SplitTablePlan) -> SplitFacts:
    assembled = one.assembled
    units, examples = np.diff(assembled.units), np.diff(assembled.record_offsets)
    is_grouped = len(one.groups) > 0 and int(one.groups[0]) >= 0
    counts = {
        "records": len(assembled.records),
        "distinct_records": len(one.rows),
        "groups": len(one.groups) if is_grouped else 0,
        "examples": len(one.lengths),
        "tokens": int(one.lengths.sum()),
        **{f"flush_{name}": int((assembled.flushes == at).sum()) for at, name in enumerate(FLUSHES)},
        "units": len(units),
    }
    measured: Mapping[str, Ints] = {
        "record_tokens": one.records.tokens,
        "group_tokens": one.records.group_tokens if is_grouped else units[:0],
        "example_tokens": one.lengths,
        "example_records": examples,
        "example_groups": np.diff(assembled.examples) if is_grouped else units[:0],
    }
    sizes = {name: count_values(values) for name, values in measured.items()}
    shown = int(one.records.tokens[assembled.records].sum())
    longest = 0 if mode == "tabular" else int(one.records.group_sizes.max(initial=0))
    return SplitFacts(one.split, counts, sizes, shown, longest)
