"""The plan of a records dataset: computed from lengths alone, it states exactly what a build makes.

What belongs here: overflow, resampling and assembly of every split, the report, the error that names what does not fit.
What does not: the assembly modes (`tabular/assembly/`), encoding and files (`table_examples.py`). A build makes its
examples from this plan, before it writes any examples.

    lengths, index ─► what fits ─► passes ─► assembled ─► report
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from rowmill.core import permutation
from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError, ContextOverflowError
from rowmill.formats import Records as RecordsFormat
from rowmill.schema.manifest import DisplayTable
from rowmill.tabular.assembly import (
    DELIMITERS_PER_UNIT,
    FLUSHES,
    AssembledExamples,
    BudgetSampler,
    ExampleLimits,
    RecordLengths,
    RecordPass,
    grouped,
    resampling,
    sequential,
    tabular,
)
from rowmill.tabular.row_index import SPLITS, RowIndex
from rowmill.tabular.schema import Mode

MAX_NAMED_OVERFLOWS = 20
"""Overflows named in an error; the report has all."""
KEPT, NOT_SAMPLED, FIRST_REJECT_STATE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class TableOverflow:
    """A record or group that is too large for an example: `name` is its row or its key, `rows` its rows' numbers."""

    kind: str
    name: str
    tokens: int
    prompt: int
    record_tokens: int
    limit: int
    rows: tuple[int, ...]
    widest: str = ""

    @property
    def reason(self) -> str:
        """Its reject reason."""
        return f"{self.kind}_overflow"

    @property
    def description(self) -> str:
        """Its size and where it comes from."""
        records = f"{len(self.rows)} {'record' if len(self.rows) == 1 else 'records'} {self.record_tokens}"
        widest = f", widest column {self.widest}" if self.widest else ""
        parts = f"prompt {self.prompt}, BOS/EOS {DELIMITERS_PER_UNIT}, {records}"
        return f"{self.name} needs {self.tokens} tokens ({parts}), limit {self.limit}{widest}"


@dataclass(frozen=True, slots=True, eq=False)
class SplitTablePlan:
    """One split's examples: `rows[r]` is the row of the plan's record r, `group_of[r]` its group (−1: none)."""

    split: str
    rows: Ints
    groups: Ints
    records: RecordLengths
    assembled: AssembledExamples
    lengths: Ints


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The examples of a records dataset, planned."""

    mode: Mode
    limits: ExampleLimits
    options: dict[str, Any]
    splits: tuple[SplitTablePlan, ...]
    overflows: tuple[TableOverflow, ...]
    states: NDArray[np.int8]
    changed: int
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def table(self) -> DisplayTable:
        """Return the numbers of each split: counts, tokens, why examples ended, sizes."""
        columns = ("split", "records", "groups", "examples", "tokens", *(f"flush_{name}" for name in FLUSHES))
        columns += tuple(f"{of}_{what}" for of in _MEASURED_FACTS for what in ("min", "mean", "max", "std"))
        rows = [(name, *(counts[c] for c in columns[1:])) for name, counts in self.facts["splits"].items()]
        return DisplayTable(columns, tuple(rows))


_MEASURED_FACTS = ("record_tokens", "group_tokens", "example_tokens", "example_records", "example_groups")


@dataclass(frozen=True, slots=True)
class TablePlanRequest:
    """Inputs of a plan other than lengths; the dataset's name and the seed decide the sampling."""

    dataset: str
    seed: int
    form: RecordsFormat
    limits: ExampleLimits


@dataclass(frozen=True, slots=True)
class OverflowNaming:
    """Lookups that name overflows; each is called once, for all of them."""

    names_of: Callable[[Ints], Sequence[str]]
    """Row numbers to row ids."""
    widest_of: Callable[[Sequence[Ints]], Sequence[str]]
    """Sets of rows to the column with the longest text in each."""


def plan_table(
    request: TablePlanRequest,
    index: RowIndex,
    lengths: Ints,
    *,
    naming: OverflowNaming,
    changed: int,
    options: dict[str, Any],
) -> TablePlan:
    """Plan all splits.

    `lengths` int64[N] are each row's tokens, −1 for a row that was rejected.

    Raises
    ------
    ContextOverflowError
        If a unit does not fit and the recipe makes this an error, or if no record can fit.
    ConfigError
        If privacy forbids the requested number of records.

    """
    limits, form = request.limits, request.form
    if limits.records < 1:
        raise ContextOverflowError(
            f"datasets.{request.dataset}: the prompt has {limits.prompt} tokens and with BOS/EOS {DELIMITERS_PER_UNIT} "
            f"leaves {limits.records} of {limits.limit} for records, expected at least 1; its widest columns are "
            f"{options['widest_names']}; raise seq_len or max_seq_length, shorten these names, or set "
            "prompt.style: names"
        )
    excess = _find_oversized(form, limits, index, lengths)
    overflows = _name_overflows(request, naming, index, excess)
    # With `split`, only single records that are too large remain, which cannot be split.
    if overflows and form.assembly.on_overflow != "reject":
        raise _make_overflow_error(request, overflows)
    states = np.zeros(len(lengths), np.int8)
    states[excess.rows] = FIRST_REJECT_STATE + (excess.kind == "group")
    fitting = (lengths >= 0) & (states == KEPT)
    splits = tuple(_plan_table_split(request, index, lengths, fitting, split) for split in SPLITS)
    shown = np.zeros(len(lengths), bool)
    for one in splits:
        shown[one.rows[one.assembled.records]] = True
    states[fitting & ~shown] = NOT_SAMPLED
    made = tuple(one for one in splits if len(one.rows))
    facts = {"splits": {one.split: _summarize_split(one) for one in made}}
    return TablePlan(form.mode, limits, options, made, tuple(overflows), states, changed, facts)


@dataclass(frozen=True, slots=True)
class ReplannedTable:
    """The plan at another maximum length: `lengths` are those of the examples of each split.

    `records_over` counts encoded records that would not fit into an example, `tokens_over` their tokens.
    """

    limit: int
    lengths: tuple[Ints, ...]
    records_over: int
    tokens_over: int


def replan_table(request: TablePlanRequest, index: RowIndex, lengths: Ints, limit: int) -> ReplannedTable:
    """Plan all splits at another length; what does not fit is counted, whatever the recipe says."""
    request = replace(request, limits=ExampleLimits(limit, request.limits.prompt, request.limits.cap))
    fitting = lengths >= 0
    if request.limits.records < 1:
        return ReplannedTable(limit, (), int(fitting.sum()), int(lengths[fitting].sum()))
    over = _find_oversized(request.form, request.limits, index, lengths).rows
    fitting[over] = False
    splits = tuple(_plan_table_split(request, index, lengths, fitting, split).lengths for split in SPLITS)
    return ReplannedTable(limit, splits, len(over), int(lengths[over].sum()))


# ── Overflow ──────────────────────────────────────────────────────────────────────────────


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
    request: TablePlanRequest, naming: OverflowNaming, index: RowIndex, excess: _OversizedUnits
) -> list[TableOverflow]:
    """Name all overflows and their widest columns, reading each part once."""
    if not len(excess.units):
        return []
    limits, columns = request.limits, request.form.group_columns
    rows = np.split(excess.rows, excess.starts[1:-1])
    if excess.kind == "record":
        names = [f"record {name}" for name in naming.names_of(excess.units)]
    else:
        names = [format_group_name(columns, index.keys[group]) for group in excess.units.tolist()]
    return [
        TableOverflow(
            excess.kind,
            name,
            own + limits.prompt + DELIMITERS_PER_UNIT,
            limits.prompt,
            own,
            limits.limit,
            tuple(of.tolist()),
            widest,
        )
        for name, own, of, widest in zip(names, excess.tokens.tolist(), rows, naming.widest_of(rows), strict=True)
    ]


def format_group_name(columns: Sequence[str], key: str) -> str:
    """Format a group's key: `customer_id='C-002'`."""
    value = orjson.loads(key) if len(key) < 1 << 16 else key
    values = value if len(columns) > 1 and isinstance(value, list) else [value]
    return ", ".join(f"{name}={one!r}" for name, one in zip(columns, values, strict=False)) or key


def _make_overflow_error(request: TablePlanRequest, overflows: list[TableOverflow]) -> ContextOverflowError:
    kind = overflows[0].kind
    count = len(overflows)
    worst = sorted(overflows, key=lambda one: (-one.tokens, one.name))[:MAX_NAMED_OVERFLOWS]
    does = f"1 {kind} does" if count == 1 else f"{count} {kind}s do"
    named = "; ".join(one.description for one in worst)
    more = f"; and {count - len(worst)} more" if count > len(worst) else ""
    return ContextOverflowError(
        f"datasets.{request.dataset}: {does} not fit: {named}{more}; {_list_remedies(request.form, kind)}"
    )


def _list_remedies(form: RecordsFormat, kind: str) -> str:
    remedies = ["raise seq_len or format.assembly.max_seq_length"]
    if kind == "group":
        remedies.append("choose a finer group column (`rowmill advise` rates them)")
        if not form.privacy.dp_enabled:
            remedies.append("set format.assembly.on_overflow: split to cut groups between records")
    else:
        remedies.append("shorten or drop the widest column")
    if form.assembly.on_overflow == "error":
        remedies.append("set format.assembly.on_overflow: reject to leave them out")
    return ", or ".join(remedies)


# ── One split ──────────────────────────────────────────────────────────────────────────────────────


def _plan_table_split(
    request: TablePlanRequest, index: RowIndex, lengths: Ints, fitting: NDArray[np.bool_], split: str
) -> SplitTablePlan:
    rows, begins = index.sort_rows(np.flatnonzero((index.splits == SPLITS.index(split)) & fitting))
    records = RecordLengths(lengths[rows], begins)
    groups = np.full(len(begins) - 1, -1) if index.groups is None else index.groups[rows[begins[:-1]]]
    is_train = split == "train"
    wanted = request.form.wanted if is_train else None
    if request.form.privacy.dp_enabled and wanted is not None and is_train and wanted > len(rows):
        raise ConfigError(
            f"datasets.{request.dataset}.format.training.num_input_records_to_sample: {wanted} of {len(rows)} train "
            "records under privacy.dp_enabled, where each record may be shown only once; lower it"
        )
    permute = partial(_permute_pass, request.seed, request.dataset, split)
    draw = _make_budget_sampler(request, index, split, groups) if is_train else None
    assembled = _assemble_split(request, records, wanted, permute, draw)
    return SplitTablePlan(split, rows, groups, records, assembled, assembled.lengths(records.tokens, request.limits))


def _assemble_split(
    request: TablePlanRequest,
    records: RecordLengths,
    wanted: int | None,
    permute: resampling.Permute,
    draw: BudgetSampler | None,
) -> AssembledExamples:
    limits = request.limits
    match request.form.mode:
        case "tabular":
            return tabular.assemble_records(records, resampling.resample_records(records, wanted, permute), limits)
        case "grouped":
            passes = resampling.resample_groups(records, wanted, permute)
            if request.form.assembly.on_overflow == "split":
                passes = [
                    RecordPass(one.number, *grouped.split_large_runs(records, one.firsts, one.lasts, limits))
                    for one in passes
                ]
            return grouped.assemble_groups(records, passes, limits)
        case "sequential":
            return sequential.assemble_series(
                records, resampling.resample_series(records, wanted, permute), limits, draw
            )


def _permute_pass(seed: int, dataset: str, split: str, number: int, count: int) -> Ints:
    """Return the order of a pass: a keyed permutation, independent of other datasets and passes."""
    own = permutation.make_feistel(count, permutation.hash_labels(seed, "assembly", dataset, split, number))
    return own(np.arange(count, dtype=np.int64))


def _make_budget_sampler(request: TablePlanRequest, index: RowIndex, split: str, groups: Ints) -> BudgetSampler:
    """Return the sampler of train examples' budgets, uniform from seven tenths of the record budget to all of it."""
    low = request.limits.min_budget
    span = request.limits.records - low + 1

    def of_group(number: int, group: int) -> Callable[[int], int]:
        key = index.keys[int(groups[group])]
        drawn = permutation.make_label_hasher(request.seed, "budget", request.dataset, split, number, key)
        return lambda ordinal: low + (drawn(ordinal) * span >> 64)

    return of_group


# ── The report ─────────────────────────────────────────────────────────────────────────────────────


def _summarize_split(one: SplitTablePlan) -> dict[str, Any]:
    assembled = one.assembled
    units, examples = np.diff(assembled.units), np.diff(assembled.record_offsets)
    told: dict[str, Any] = {
        "records": len(assembled.records),
        "distinct_records": len(one.rows),
        "groups": 0 if len(one.groups) and one.groups[0] < 0 else len(one.groups),
        "examples": len(one.lengths),
        "tokens": int(one.lengths.sum()),
        **{f"flush_{name}": int((assembled.flushes == at).sum()) for at, name in enumerate(FLUSHES)},
    }
    is_grouped = bool(told["groups"])
    measured: Mapping[str, Ints] = {
        "record_tokens": one.records.tokens,
        "group_tokens": one.records.group_tokens if is_grouped else units[:0],
        "example_tokens": one.lengths,
        "example_records": examples,
        "example_groups": np.diff(assembled.examples) if is_grouped else units[:0],
    }
    for name, values in measured.items():
        told |= {f"{name}_{what}": value for what, value in measure_spread(values).items()}
    return told


def measure_spread(values: Ints) -> dict[str, float]:
    """Return minimum, mean, maximum and standard deviation; zeros for an empty array."""
    if not len(values):
        return {"min": 0, "mean": 0.0, "max": 0, "std": 0.0}
    mean, std = round(float(values.mean()), 6), round(float(values.std()), 6)
    return {"min": int(values.min()), "mean": mean, "max": int(values.max()), "std": std}
