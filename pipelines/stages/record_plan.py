"""The plan of a records dataset: a dry run on lengths that says what a build would make, number for number.

What belongs here: overflow, resampling and assembly of every split, the report, the error that names what does not
fit. What does not: the ways of assembling (`assembly/`), encoding and files (`record_examples.py`). A build makes
its examples of this very plan, and makes it before it writes any file of tokens.

    lengths, index ─► what fits ─► passes ─► assembled ─► report
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pipelines import permutation
from pipelines.assembly import (
    EDGES,
    FLUSHES,
    Assembled,
    Draw,
    Ints,
    Pass,
    Records,
    Room,
    grouped,
    resampling,
    sequential,
    tabular,
)
from pipelines.errors import ConfigError, ContextOverflowError
from pipelines.formats import Records as RecordsFormat
from pipelines.manifest import Table
from pipelines.record_index import SPLITS, Index
from pipelines.records import Mode

WORST = 20
"""Overflows that an error names; the report has all."""
KEPT, NOT_SAMPLED, FIRST_REASON = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Overflow:
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
        parts = f"prompt {self.prompt}, BOS/EOS {EDGES}, {records}"
        return f"{self.name} needs {self.tokens} tokens ({parts}), limit {self.limit}{widest}"


@dataclass(frozen=True, slots=True, eq=False)
class SplitPlan:
    """One split's examples: `rows[r]` is the row of the plan's record r, `group_of[r]` its group (−1: none)."""

    split: str
    rows: Ints
    groups: Ints
    records: Records
    assembled: Assembled
    lengths: Ints


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """What a build of a records dataset would make."""

    mode: Mode
    room: Room
    options: dict[str, Any]
    splits: tuple[SplitPlan, ...]
    overflows: tuple[Overflow, ...]
    states: NDArray[np.int8]
    changed: int
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def table(self) -> Table:
        """Return the numbers of each split: counts, tokens, why examples ended, sizes."""
        columns = ("split", "records", "groups", "examples", "tokens", *(f"flush_{name}" for name in FLUSHES))
        columns += tuple(f"{of}_{what}" for of in _MEASURED for what in ("min", "mean", "max", "std"))
        rows = [(name, *(told[c] for c in columns[1:])) for name, told in self.facts["splits"].items()]
        return Table(columns, tuple(rows))


_MEASURED = ("record_tokens", "group_tokens", "example_tokens", "example_records", "example_groups")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a plan needs beside the lengths: names for its draws and messages."""

    dataset: str
    seed: int
    form: RecordsFormat
    room: Room
    name_of: Callable[[int], str]
    """A row's id by its number."""
    widest_of: Callable[[Sequence[int]], str]
    """The column with the longest text in some rows."""


def plan(asked: Asked, index: Index, lengths: Ints, *, changed: int, options: dict[str, Any]) -> RecordPlan:
    """Plan all splits.

    `lengths` int64[N] are each row's tokens, −1 for a row that was rejected.

    Raises
    ------
    ContextOverflowError
        If something does not fit and the recipe says that this is an error, or no record at all can fit.
    ConfigError
        If privacy forbids what is asked for.

    """
    room, form = asked.room, asked.form
    if room.records < 1:
        raise ContextOverflowError(
            f"datasets.{asked.dataset}: the prompt has {room.prompt} tokens and with BOS/EOS {EDGES} leaves "
            f"{room.records} of {room.limit} for records; one token at least is needed; its widest columns are "
            f"{options['widest_names']}; raise seq_len or max_seq_length, shorten these names, or set prompt.style: "
            "names"
        )
    overflows = _overflows(asked, index, lengths)
    # Under `split` only a record above the room is left, which cutting cannot help.
    if overflows and form.assembly.on_overflow != "reject":
        raise _too_large(asked, overflows)
    states = np.zeros(len(lengths), np.int8)
    for one in overflows:
        states[list(one.rows)] = FIRST_REASON + (one.kind == "group")
    fitting = (lengths >= 0) & (states == KEPT)
    splits = tuple(_split(asked, index, lengths, fitting, split) for split in SPLITS)
    shown = np.zeros(len(lengths), bool)
    for one in splits:
        shown[one.rows[one.assembled.records]] = True
    states[fitting & ~shown] = NOT_SAMPLED
    made = tuple(one for one in splits if len(one.rows))
    facts = {"splits": {one.split: _told(one) for one in made}}
    return RecordPlan(form.mode, room, options, made, tuple(overflows), states, changed, facts)


# ── What does not fit ──────────────────────────────────────────────────────────────────────────────


def _overflows(asked: Asked, index: Index, lengths: Ints) -> list[Overflow]:
    room, form = asked.room, asked.form
    if form.mode == "grouped" and form.assembly.on_overflow != "split":
        return _large_groups(asked, index, lengths)
    found: list[Overflow] = []
    for row in np.flatnonzero(lengths > room.records).tolist():
        own = int(lengths[row])
        name = f"record {asked.name_of(row)}"
        needed = own + room.prompt + EDGES
        found.append(Overflow("record", name, needed, room.prompt, own, room.limit, (row,), asked.widest_of([row])))
    return found


def _large_groups(asked: Asked, index: Index, lengths: Ints) -> list[Overflow]:
    room, columns = asked.room, asked.form.group_columns
    assert index.groups is not None
    tokens = np.bincount(index.groups, weights=np.maximum(lengths, 0), minlength=len(index.keys)).astype(np.int64)
    found: list[Overflow] = []
    for group in np.flatnonzero(tokens > room.records).tolist():
        rows = np.flatnonzero((index.groups == group) & (lengths >= 0)).tolist()
        own = int(tokens[group])
        name = group_name(columns, index.keys[group])
        needed = own + room.prompt + EDGES
        found.append(Overflow("group", name, needed, room.prompt, own, room.limit, tuple(rows), asked.widest_of(rows)))
    return found


def group_name(columns: Sequence[str], key: str) -> str:
    """Word a group's key: `customer_id='C-002'`."""
    value = orjson.loads(key) if len(key) < 1 << 16 else key
    values = value if len(columns) > 1 and isinstance(value, list) else [value]
    return ", ".join(f"{name}={one!r}" for name, one in zip(columns, values, strict=False)) or key


def _too_large(asked: Asked, overflows: list[Overflow]) -> ContextOverflowError:
    kind = overflows[0].kind
    count = len(overflows)
    worst = sorted(overflows, key=lambda one: (-one.tokens, one.name))[:WORST]
    does = f"1 {kind} does" if count == 1 else f"{count} {kind}s do"
    named = "; ".join(one.sentence for one in worst)
    more = f"; and {count - len(worst)} more" if count > len(worst) else ""
    return ContextOverflowError(
        f"datasets.{asked.dataset}: {does} not fit: {named}{more}; {_remedies(asked.form, kind)}"
    )


def _remedies(form: RecordsFormat, kind: str) -> str:
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


def _split(asked: Asked, index: Index, lengths: Ints, fitting: NDArray[np.bool_], split: str) -> SplitPlan:
    rows, begins = index.sorted(np.flatnonzero((index.splits == SPLITS.index(split)) & fitting))
    records = Records(lengths[rows], begins)
    groups = np.full(len(begins) - 1, -1) if index.groups is None else index.groups[rows[begins[:-1]]]
    is_train = split == "train"
    wanted = asked.form.wanted if is_train else None
    if asked.form.privacy.dp_enabled and wanted is not None and is_train and wanted > len(rows):
        raise ConfigError(
            f"datasets.{asked.dataset}.format.training.num_input_records_to_sample: {wanted} of {len(rows)} train "
            "records "
            "under privacy.dp_enabled; a unit of privacy may be shown once; lower it"
        )
    permute = partial(_permuted, asked.seed, asked.dataset, split)
    draw = _draw(asked, index, split, groups) if is_train else None
    assembled = _assembled(asked, records, wanted, permute, draw)
    return SplitPlan(split, rows, groups, records, assembled, assembled.lengths(records.tokens, asked.room))


def _assembled(
    asked: Asked, records: Records, wanted: int | None, permute: resampling.Permute, draw: Draw | None
) -> Assembled:
    room = asked.room
    match asked.form.mode:
        case "tabular":
            return tabular.assemble(records, resampling.tabular(records, wanted, permute), room)
        case "grouped":
            passes = resampling.grouped(records, wanted, permute)
            if asked.form.assembly.on_overflow == "split":
                passes = [
                    Pass(one.number, *grouped.cut_too_large(records, one.firsts, one.lasts, room)) for one in passes
                ]
            return grouped.assemble(records, passes, room)
        case "sequential":
            return sequential.assemble(records, resampling.sequential(records, wanted, permute), room, draw)


def _permuted(seed: int, dataset: str, split: str, number: int, count: int) -> Ints:
    """Return the order of a pass: a keyed permutation, so that other datasets and passes change nothing."""
    own = permutation.feistel(count, permutation.key(seed, "assembly", dataset, split, number))
    return own(np.arange(count, dtype=np.int64))


def _draw(asked: Asked, index: Index, split: str, groups: Ints) -> Draw:
    """Return the budgets of train examples, uniform from seven tenths of the room to all of it."""
    low = asked.room.least_budget
    span = asked.room.records - low + 1

    def of_group(number: int, group: int) -> Callable[[int], int]:
        key = index.keys[int(groups[group])]
        drawn = permutation.keys_after(asked.seed, "budget", asked.dataset, split, number, key)
        return lambda ordinal: low + (drawn(ordinal) * span >> 64)

    return of_group


# ── The report ─────────────────────────────────────────────────────────────────────────────────────


def _told(one: SplitPlan) -> dict[str, Any]:
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
        told |= {f"{name}_{what}": value for what, value in spread(values).items()}
    return told


def spread(values: Ints) -> dict[str, float]:
    """Return minimum, mean, maximum and standard deviation; zeros of nothing."""
    if not len(values):
        return {"min": 0, "mean": 0.0, "max": 0, "std": 0.0}
    mean, std = round(float(values.mean()), 6), round(float(values.std()), 6)
    return {"min": int(values.min()), "mean": mean, "max": int(values.max()), "std": std}
