"""The plan of a records dataset: a dry run on lengths that says what a build would make, number for number.

What belongs here: overflow, resampling and assembly of every split, the report, the error that names what does not
fit. What does not: the ways of assembling (`assembly/`), encoding and files (`table_examples.py`). A build makes
its examples of this very plan, and makes it before it writes any file of tokens.

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
"""Overflows that an error names; the report has all."""
KEPT, NOT_SAMPLED, FIRST_REJECT_STATE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class TableOverflow:
    """A record or group that no example can hold: `name` is its row or its key, `rows` its rows' numbers."""

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
        """The reason of its reject."""
        return f"{self.kind}_overflow"

    @property
    def sentence(self) -> str:
        """Say what it needs and why."""
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
    """What a build of a records dataset would make."""

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
        rows = [(name, *(told[c] for c in columns[1:])) for name, told in self.facts["splits"].items()]
        return DisplayTable(columns, tuple(rows))


_MEASURED_FACTS = ("record_tokens", "group_tokens", "example_tokens", "example_records", "example_groups")


@dataclass(frozen=True, slots=True)
class TablePlanRequest:
    """What a plan needs beside the lengths; the dataset's name and the seed decide its draws."""

    dataset: str
    seed: int
    form: RecordsFormat
    limits: ExampleLimits


@dataclass(frozen=True, slots=True)
class OverflowNaming:
    """How what does not fit is named; asked once, for all of it."""

    names_of: Callable[[Ints], Sequence[str]]
    """The ids of some rows, by their numbers."""
    widest_of: Callable[[Sequence[Ints]], Sequence[str]]
    """Of each of some sets of rows, the column with the longest text."""


def plan_table(
    asked: TablePlanRequest,
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
        If something does not fit and the recipe says that this is an error, or no record at all can fit.
    ConfigError
        If privacy forbids what is asked for.

    """
    limits, form = asked.limits, asked.form
    if limits.records < 1:
        raise ContextOverflowError(
            f"datasets.{asked.dataset}: the prompt has {limits.prompt} tokens and with BOS/EOS {DELIMITERS_PER_UNIT} "
            "leaves "
            f"{limits.records} of {limits.limit} for records; one token at least is needed; its widest columns are "
            f"{options['widest_names']}; raise seq_len or max_seq_length, shorten these names, or set prompt.style: "
            "names"
        )
    excess = _find_oversized(form, limits, index, lengths)
    overflows = _name_overflows(asked, naming, index, excess)
    # Under `split` only a record above the limits is left, which cutting cannot help.
    if overflows and form.assembly.on_overflow != "reject":
        raise _make_overflow_error(asked, overflows)
    states = np.zeros(len(lengths), np.int8)
    states[excess.rows] = FIRST_REJECT_STATE + (excess.kind == "group")
    fitting = (lengths >= 0) & (states == KEPT)
    splits = tuple(_plan_table_split(asked, index, lengths, fitting, split) for split in SPLITS)
    shown = np.zeros(len(lengths), bool)
    for one in splits:
        shown[one.rows[one.assembled.records]] = True
    states[fitting & ~shown] = NOT_SAMPLED
    made = tuple(one for one in splits if len(one.rows))
    facts = {"splits": {one.split: _summarize_split(one) for one in made}}
    return TablePlan(form.mode, limits, options, made, tuple(overflows), states, changed, facts)


@dataclass(frozen=True, slots=True)
class ReplannedTable:
    """What another length of examples would come to: `lengths` are those of the examples of each split.

    `records_over` are records that no example could hold, `tokens_over` their tokens, of the records that could be
    encoded.
    """

    limit: int
    lengths: tuple[Ints, ...]
    records_over: int
    tokens_over: int


def replan_table(asked: TablePlanRequest, index: RowIndex, lengths: Ints, limit: int) -> ReplannedTable:
    """Plan all splits at another length; what does not fit is counted, whatever the recipe says of it."""
    asked = replace(asked, limits=ExampleLimits(limit, asked.limits.prompt, asked.limits.cap))
    fitting = lengths >= 0
    if asked.limits.records < 1:
        return ReplannedTable(limit, (), int(fitting.sum()), int(lengths[fitting].sum()))
    over = _find_oversized(asked.form, asked.limits, index, lengths).rows
    fitting[over] = False
    splits = tuple(_plan_table_split(asked, index, lengths, fitting, split).lengths for split in SPLITS)
    return ReplannedTable(limit, splits, len(over), int(lengths[over].sum()))


# ── What does not fit ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class _OversizedUnits:
    """Units that no example can hold: unit u is `units[u]`, a row or a group, with `rows[starts[u]:starts[u + 1]]`."""

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
    asked: TablePlanRequest, naming: OverflowNaming, index: RowIndex, excess: _OversizedUnits
) -> list[TableOverflow]:
    """Say of all that does not fit what it is called and which column makes it wide, reading each part once."""
    if not len(excess.units):
        return []
    limits, columns = asked.limits, asked.form.group_columns
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
    """Word a group's key: `customer_id='C-002'`."""
    value = orjson.loads(key) if len(key) < 1 << 16 else key
    values = value if len(columns) > 1 and isinstance(value, list) else [value]
    return ", ".join(f"{name}={one!r}" for name, one in zip(columns, values, strict=False)) or key


def _make_overflow_error(asked: TablePlanRequest, overflows: list[TableOverflow]) -> ContextOverflowError:
    kind = overflows[0].kind
    count = len(overflows)
    worst = sorted(overflows, key=lambda one: (-one.tokens, one.name))[:MAX_NAMED_OVERFLOWS]
    does = f"1 {kind} does" if count == 1 else f"{count} {kind}s do"
    named = "; ".join(one.sentence for one in worst)
    more = f"; and {count - len(worst)} more" if count > len(worst) else ""
    return ContextOverflowError(
        f"datasets.{asked.dataset}: {does} not fit: {named}{more}; {_list_remedies(asked.form, kind)}"
    )


def _list_remedies(form: RecordsFormat, kind: str) -> str:
    ways = ["raise seq_len or format.assembly.max_seq_length"]
    if kind == "group":
        ways.append("choose a finer group column (`rowmill advise` judges them)")
        if not form.privacy.dp_enabled:
            ways.append("set format.assembly.on_overflow: split to cut groups between records")
    else:
        ways.append("shorten or drop the widest column")
    if form.assembly.on_overflow == "error":
        ways.append("set format.assembly.on_overflow: reject to leave them out")
    return ", or ".join(ways)


# ── One split ──────────────────────────────────────────────────────────────────────────────────────


def _plan_table_split(
    asked: TablePlanRequest, index: RowIndex, lengths: Ints, fitting: NDArray[np.bool_], split: str
) -> SplitTablePlan:
    rows, begins = index.sort_rows(np.flatnonzero((index.splits == SPLITS.index(split)) & fitting))
    records = RecordLengths(lengths[rows], begins)
    groups = np.full(len(begins) - 1, -1) if index.groups is None else index.groups[rows[begins[:-1]]]
    is_train = split == "train"
    wanted = asked.form.wanted if is_train else None
    if asked.form.privacy.dp_enabled and wanted is not None and is_train and wanted > len(rows):
        raise ConfigError(
            f"datasets.{asked.dataset}.format.training.num_input_records_to_sample: {wanted} of {len(rows)} train "
            "records "
            "under privacy.dp_enabled; a unit of privacy may be shown once; lower it"
        )
    permute = partial(_permute_pass, asked.seed, asked.dataset, split)
    draw = _make_budget_sampler(asked, index, split, groups) if is_train else None
    assembled = _assemble_split(asked, records, wanted, permute, draw)
    return SplitTablePlan(split, rows, groups, records, assembled, assembled.lengths(records.tokens, asked.limits))


def _assemble_split(
    asked: TablePlanRequest,
    records: RecordLengths,
    wanted: int | None,
    permute: resampling.Permute,
    draw: BudgetSampler | None,
) -> AssembledExamples:
    limits = asked.limits
    match asked.form.mode:
        case "tabular":
            return tabular.assemble_records(records, resampling.resample_records(records, wanted, permute), limits)
        case "grouped":
            passes = resampling.resample_groups(records, wanted, permute)
            if asked.form.assembly.on_overflow == "split":
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
    """Return the order of a pass: a keyed permutation, so that other datasets and passes change nothing."""
    own = permutation.make_feistel(count, permutation.hash_labels(seed, "assembly", dataset, split, number))
    return own(np.arange(count, dtype=np.int64))


def _make_budget_sampler(asked: TablePlanRequest, index: RowIndex, split: str, groups: Ints) -> BudgetSampler:
    """Return the budgets of train examples, uniform from seven tenths of the limits to all of it."""
    low = asked.limits.min_budget
    span = asked.limits.records - low + 1

    def of_group(number: int, group: int) -> Callable[[int], int]:
        key = index.keys[int(groups[group])]
        drawn = permutation.make_label_hasher(asked.seed, "budget", asked.dataset, split, number, key)
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
    """Return minimum, mean, maximum and standard deviation; zeros of nothing."""
    if not len(values):
        return {"min": 0, "mean": 0.0, "max": 0, "std": 0.0}
    mean, std = round(float(values.mean()), 6), round(float(values.std()), 6)
    return {"min": int(values.min()), "mean": mean, "max": int(values.max()), "std": std}
