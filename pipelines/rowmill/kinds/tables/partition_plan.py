"""The plan of a table: which records make which examples, computed from lengths alone, and what is counted of it.

    lengths, index ─► what fits ─► passes ─► assembled ─► facts

A build plans all partitions before it writes any examples. Sizes are kept as the number of times that each occurs, so
that the facts of a table are exact, whatever number of partitions they are added up from.

Records are assembled into examples on token counts alone:

    lengths 85 80 79 80, prompt 36, at most 282 tokens, cap 3

    tabular      prompt BOS r0 r1 r2 EOS      36 + 2 + 244 = 282, then 36 + 2 + 80
    grouped      prompt (BOS group EOS)+      a group is never split
    sequential   as tabular, one group, in order; each example draws its token budget

Records are numbered 0 … n−1, sorted by group key and then by position; callers map the numbers to rows. Loops run per
example, never per record, so planning is linear in the records whatever the cap.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, count, islice, pairwise, repeat
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from rowmill.core import permutation
from rowmill.core.arrays import Ints, compute_offsets, expand_ranges
from rowmill.core.errors import ContextOverflowError
from rowmill.kinds.tables.options import RecordOptions as RecordsFormat
from rowmill.kinds.tables.partitions import RowIndex
from rowmill.kinds.tables.schema import Mode
from rowmill.kinds.tables.serialization import read_json
from rowmill.schema.ledger import sum_counts
from rowmill.schema.manifest import DisplayTable
from rowmill.schema.rows import SPLITS

FLUSHES = ("restart", "group_change", "max_records", "budget", "end")
"""Why an example ended: a new pass, another group, the cap, the budget, no more records. Stored as an index."""

DELIMITERS_PER_UNIT = 2
"""One BOS before and one EOS after every unit."""


@dataclass(frozen=True, slots=True)
class ExampleLimits:
    """Limits of an example: `limit` tokens in all, `prompt` of them for the prompt, at most `cap` units."""

    limit: int
    prompt: int
    cap: int | None

    @property
    def records(self) -> int:
        """Tokens left for records after the prompt, one BOS and one EOS; may be negative."""
        return self.limit - self.prompt - DELIMITERS_PER_UNIT

    @property
    def min_budget(self) -> int:
        """The smallest budget that an example of a series may draw: seven tenths of `records`, rounded up."""
        return -(-7 * self.records // 10)


@dataclass(frozen=True, slots=True, eq=False)
class RecordLengths:
    """Token counts of the records of one split; group g owns records `[groups[g], groups[g + 1])`."""

    tokens: Ints
    groups: Ints

    @property
    def group_tokens(self) -> Ints:
        """Tokens of each group's records."""
        ends = compute_offsets(self.tokens)
        return ends[self.groups[1:]] - ends[self.groups[:-1]]

    @property
    def group_sizes(self) -> Ints:
        return np.diff(self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class RecordPass:
    """A full or partial pass: the records in their order, and the sizes of the runs that stay together.

    In tabular mode a run is one record, otherwise a group (a partial pass may cut a series to a prefix).
    """

    records: Ints
    sizes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class AssembledExamples:
    """The examples of one split, as three levels of offsets.

    Unit u is records `[units[u], units[u + 1])` of `records` between a BOS and an EOS; example e is units
    `[examples[e], examples[e + 1])` after one prompt. `budgets` are tokens of records, `flushes` index `FLUSHES`.
    """

    records: Ints
    units: Ints
    examples: Ints
    passes: Ints
    budgets: Ints
    flushes: NDArray[np.int8]

    @property
    def record_offsets(self) -> Ints:
        """Offsets of the examples in `records`, the end included."""
        return self.units[self.examples]

    def lengths(self, tokens: Ints, limits: ExampleLimits) -> Ints:
        """Return the tokens of every example: the prompt, and per unit its records, BOS and EOS."""
        ends = compute_offsets(tokens[self.records])
        own = ends[self.record_offsets]
        return limits.prompt + np.diff(own) + DELIMITERS_PER_UNIT * np.diff(self.examples)


BudgetSampler = Callable[[int, int], Callable[[int], int]]
"""Samples the budgets of a series' examples: (pass, group) → index of the example in the group → tokens of records."""


_RESTART, _GROUP, _CAP, _BUDGET, _END = range(len(FLUSHES))


def cut_runs(
    sums: Sequence[int], borders: Sequence[int], cap: int | None, budgets: Iterable[Iterator[int]]
) -> tuple[list[int], list[int]]:
    """Cut elements into the longest runs that fit into one example each; return their offsets, and their budgets.

    `sums` are the cumulated costs. A run also ends after `cap` elements and at the next of `borders`, which begin with
    0 and end with the elements; `budgets` are those of the runs between two borders. One element always fits.
    """
    offsets, used = [0], list[int]()
    for (begin, end), own in zip(pairwise(borders), budgets, strict=False):
        here = begin
        while here < end:
            budget, most = next(own), end if cap is None else min(here + cap, end)
            here = most if most == here + 1 else bisect_right(sums, sums[here] + budget, here + 2, most + 1) - 1
            offsets.append(here)
            used.append(budget)
    return offsets, used


def assemble_examples(
    records: RecordLengths,
    passes: Sequence[RecordPass],
    limits: ExampleLimits,
    mode: Mode,
    draw: BudgetSampler | None = None,
) -> AssembledExamples:
    """Assemble the runs of the passes, each of which fits into an example; `draw` is None for full budgets.

    Examples are cut from records, in grouped mode from runs, each a unit of its own. No example goes on in another
    pass, or of a series in another run.
    """
    none = np.empty(0, np.int64)
    order = np.concatenate([none, *(one.records for one in passes)])
    runs = compute_offsets(np.concatenate([none, *(one.sizes for one in passes)]))
    # Where passes end: of runs, and of what examples are cut from.
    pass_runs = compute_offsets([len(one.sizes) for one in passes])
    tokens, ends, costs = records.tokens[order], runs[pass_runs], 0
    sums = compute_offsets(tokens)
    if mode == "grouped":
        sums, ends, costs = sums[runs] + DELIMITERS_PER_UNIT * np.arange(len(runs)), pass_runs, DELIMITERS_PER_UNIT
    borders = runs if mode == "sequential" else ends
    budgets: Iterable[Iterator[int]] = repeat(repeat(limits.records + costs))
    if draw is not None:
        numbers = np.repeat(np.arange(len(passes)), np.diff(pass_runs)).tolist()
        groups = (np.searchsorted(records.groups, order[runs[:-1]], "right") - 1).tolist()
        budgets = (map(draw(*of_run), count()) for of_run in zip(numbers, groups, strict=True))
    cuts, used = cut_runs(sums.tolist(), borders.tolist(), limits.cap, budgets)
    offsets, own_budgets = np.array(cuts, np.int64), np.array(used, np.int64) - costs
    flushes = np.full(len(used), _BUDGET, np.int8)
    if limits.cap is not None:
        flushes[np.diff(offsets) == limits.cap] = _CAP
    if mode == "sequential":
        flushes[np.isin(offsets[1:], borders)] = _GROUP
    flushes[np.isin(offsets[1:], ends)] = _RESTART
    flushes[-1:] = _END
    is_grouped = mode == "grouped"
    return AssembledExamples(
        records=order,
        units=runs if is_grouped else offsets,
        examples=offsets if is_grouped else np.arange(len(offsets), dtype=np.int64),
        passes=np.searchsorted(ends, offsets[:-1], "right") - 1,
        budgets=own_budgets if is_grouped else np.maximum(own_budgets, tokens[offsets[:-1]]),
        flushes=flushes,
    )


def split_large_runs(records: RecordLengths, one: RecordPass, limits: ExampleLimits) -> RecordPass:
    """Split the runs of a pass that are too large for an example between records, each piece as long as fits.

    Every record fits `limits.records`.
    """
    sums, borders = compute_offsets(records.tokens[one.records]), compute_offsets(one.sizes)
    cuts, _ = cut_runs(sums.tolist(), borders.tolist(), None, repeat(repeat(limits.records)))
    return RecordPass(one.records, np.diff(cuts))


# ── Passes over records ────────────────────────────────────────────────────────────────────────────


Permute = Callable[[int, int], Ints]
"""(pass, n) → a permutation of 0 … n−1."""


def resample(records: RecordLengths, wanted: int | None, permute: Permute, *, is_series: bool) -> list[RecordPass]:
    """Return passes over the groups of records (alone, each is one): each once, or `wanted` records in all.

    The last pass adds groups until its share is reached; the last series is truncated to a prefix. Passes permute the
    groups, never their records; a full first pass over series is in key order.
    """
    count, sizes = len(records.tokens), records.group_sizes
    if not count:
        return []
    full, rest = (1, 0) if wanted is None else divmod(wanted, count)
    passes: list[RecordPass] = []
    for number, size in enumerate([*[count] * full, *([rest] if rest else [])]):
        is_in_order = is_series and number == 0 and size == count
        order = np.arange(len(sizes)) if is_in_order else permute(number, len(sizes))
        ends = np.cumsum(sizes[order])
        kept = order[: int(np.searchsorted(ends, size)) + 1]
        own = sizes[kept]
        if is_series:
            own[-1:] -= ends[len(kept) - 1] - size
        passes.append(RecordPass(expand_ranges(records.groups[kept], own), own))
    return passes


# ── Facts of a plan ────────────────────────────────────────────────────────────────────────────────


MAX_NAMED_OVERFLOWS = 20
"""Overflows named in an error, the largest first."""
MAX_EXAMINED_ROWS = 100
"""Records of a group that are examined to find its widest column."""
MAX_LISTED_OVERFLOWS = 100
"""Overflows listed in the report, in the order of the table; the rejects have all."""
SPREAD = ("min", "mean", "max", "std")
MEASURED_SIZES = ("record_tokens", "group_tokens", "example_tokens", "example_records", "example_groups")


ValueCounts = Mapping[int, int]
"""How many times each value occurs, by value in ascending order."""


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
            {name: sum_counts(one.sizes[name] for one in several) for name in first.sizes},
            sum(one.shown_tokens for one in several),
            max(one.longest_group for one in several),
        )

    def list_facts(self) -> dict[str, Any]:
        """Return the numbers of the report, by name."""
        counts: dict[str, Any] = {name: count for name, count in self.counts.items() if name != "units"}
        for name, sizes in self.sizes.items():
            least, mean, most, deviation = 0, 0.0, 0, 0.0
            if sizes:
                values, times = np.array([*sizes]), np.array([*sizes.values()])
                mean = float((values * times).sum() / times.sum())
                deviation = float(np.sqrt((times * (values - mean) ** 2).sum() / times.sum()))
                least, most = int(values[0]), int(values[-1])
            spread = (least, round(mean, 6), most, round(deviation, 6))
            counts |= {f"{name}_{what}": value for what, value in zip(SPREAD, spread, strict=True)}
        return counts


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


PLAN_FACTS = TypeAdapter(tuple[tuple[SplitFacts, ...], OverflowFacts])
"""The facts of a partition, as its part stores them: of each split with rows, and of what does not fit."""


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
        columns += tuple(f"{of}_{what}" for of in MEASURED_SIZES for what in SPREAD)
        rows = [(name, *(counts[c] for c in columns[1:])) for name, counts in self.facts.items()]
        return DisplayTable(columns, tuple(rows))


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
    """Refuse limits under which no record fits: the prompt and the delimiters take all tokens of an example."""
    if limits.records < 1:
        shorter = "" if form.prompt.style == "names" else ", or set format.prompt.style: names"
        raise ContextOverflowError(
            f"datasets.{dataset}: the prompt has {limits.prompt} tokens and with BOS/EOS {DELIMITERS_PER_UNIT} "
            f"leaves {limits.records} of {limits.limit} for records, expected at least 1; its widest columns are "
            f"{widest_names}; {_suggest_longer_examples(form)}, or shorten these names{shorter}"
        )


def require_fitting_units(dataset: str, form: RecordsFormat, overflows: OverflowFacts) -> None:
    """Refuse a plan in which a unit does not fit, unless the recipe leaves such units out."""
    # With `split`, only single records that are too large remain, which cannot be split.
    if not overflows.count or form.assembly.on_overflow == "reject":
        return
    kind, count = overflows.worst[0].kind, overflows.count
    remedies = [_suggest_longer_examples(form)]
    if kind == "group":
        remedies.append("choose a finer group column (`rowmill advise` rates them)")
        if not form.privacy.dp_enabled:
            remedies.append("set format.assembly.on_overflow: split to cut groups between records")
    else:
        remedies.append("shorten or drop the widest column")
    if form.assembly.on_overflow == "error":
        remedies.append("set format.assembly.on_overflow: reject to leave them out")
    does = f"1 {kind} does" if count == 1 else f"{count} {kind}s do"
    named = "; ".join(overflow.description for overflow in overflows.worst)
    more = f"; and {count - len(overflows.worst)} more" if count > len(overflows.worst) else ""
    raise ContextOverflowError(f"datasets.{dataset}: {does} not fit: {named}{more}; {', or '.join(remedies)}")


def replan_partition(request: TablePlanRequest, index: RowIndex, lengths: Ints) -> tuple[list[Ints], int, int]:
    """Plan all splits at the request's length; what does not fit is left out, whatever the recipe says.

    Return the lengths of the examples of each split, and how many encoded records fit into no example, and their
    tokens.
    """
    limits, fitting = request.limits, lengths >= 0
    if limits.records < 1:
        return [], int(fitting.sum()), int(lengths[fitting].sum())
    over = _find_oversized(request.form, limits, index, lengths).rows
    fitting[over] = False
    splits = [_plan_table_split(request, index, lengths, fitting, split).lengths for split in SPLITS]
    return splits, len(over), int(lengths[over].sum())


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
    names: list[str] = []
    if excess.kind == "record":
        names = [f"record {name}" for name in read_column(excess.units, "row_id")]
    else:
        for key in (index.keys[group] for group in excess.units.tolist()):
            value = read_json(key) if len(key) < 1 << 16 else key
            values = value if len(columns) > 1 and isinstance(value, list) else [value]
            shown = [str(one) if type(one) is Decimal else repr(one) for one in values]
            named = [f"{name}={one}" for name, one in zip(columns, shown, strict=False)]
            names.append(", ".join(named) or key)
    examined = [of[:MAX_EXAMINED_ROWS] for of in rows]
    records = iter(read_column(np.concatenate(examined), "record"))
    for name, tokens, of, shown in zip(names, excess.tokens.tolist(), rows, examined, strict=True):
        sizes: Counter[str] = Counter()
        for record in islice(records, len(shown)):
            sizes.update({column: len(str(value)) for column, value in read_json(record).items()})
        needed = tokens + limits.prompt + DELIMITERS_PER_UNIT
        widest = max(sizes, key=sizes.__getitem__, default="")
        yield TableOverflow(excess.kind, name, needed, limits.prompt, tokens, limits.limit, len(of), widest)


def _suggest_longer_examples(form: RecordsFormat) -> str:
    if form.assembly.max_seq_length is None:
        return "raise seq_len"
    return "raise format.assembly.max_seq_length (at most seq_len)"


def _plan_table_split(
    request: TablePlanRequest, index: RowIndex, lengths: Ints, fitting: NDArray[np.bool_], split: str
) -> SplitTablePlan:
    rows, begins = index.sort_rows(np.flatnonzero((index.splits == SPLITS.index(split)) & fitting))
    records = RecordLengths(lengths[rows], begins)
    groups = np.full(len(begins) - 1, -1) if index.groups is None else index.groups[rows[begins[:-1]]]
    form, limits = request.form, request.limits

    low = limits.min_budget
    span = limits.records - low + 1

    def draw_budgets(number: int, group: int) -> Callable[[int], int]:
        """Return the sampler of a series' budgets, uniform from seven tenths of the record budget to all of it."""
        key = index.keys[int(groups[group])]
        drawn = permutation.make_label_hasher(request.seed, "budget", request.dataset, split, number, key)
        return lambda ordinal: low + (drawn(ordinal) * span >> 64)

    def permute(number: int, count: int) -> Ints:
        """Return the order of a pass: a keyed permutation, independent of other datasets, partitions and passes."""
        of_partition = () if request.partition is None else (request.partition,)
        key = permutation.hash_labels(request.seed, "assembly", request.dataset, split, number, *of_partition)
        return permutation.make_feistel(count, key)(np.arange(count, dtype=np.int64))

    # Held-out records are shown once, in examples of full budgets.
    wanted, draw = (request.wanted, draw_budgets) if split == "train" else (None, None)
    passes = resample(records, wanted, permute, is_series=form.mode == "sequential")
    if form.assembly.on_overflow == "split":
        passes = [split_large_runs(records, one, limits) for one in passes]
    assembled = assemble_examples(records, passes, limits, form.mode, draw if form.mode == "sequential" else None)
    return SplitTablePlan(split, rows, groups, records, assembled, assembled.lengths(records.tokens, limits))


def summarize_split(mode: Mode, one: SplitTablePlan) -> SplitFacts:
    """Return the facts of a split's examples."""
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
    counted = {name: np.unique(values, return_counts=True) for name, values in measured.items()}
    sizes = {name: dict(zip(*(part.tolist() for part in both), strict=True)) for name, both in counted.items()}
    shown = int(one.records.tokens[assembled.records].sum())
    longest = 0 if mode == "tabular" else int(one.records.group_sizes.max(initial=0))
    return SplitFacts(one.split, counts, sizes, shown, longest)
