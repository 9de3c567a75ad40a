"""The plan of a table: its records in order, cut into examples by a mode, from their numbers of tokens alone.

    order       ‖ r4 │ r0 r1 r2 │ r3 ‖ r0 r1 r2 │ …        ‖ a pass begins   │ a run begins
    places        0    1  2  3    4    5  6  7             a record has one place in each pass that shows it

    tabular       prompt BOS r0 r1 r2 EOS                  a run is one record
    grouped       prompt BOS r4 EOS BOS r0 r1 r2 EOS       a run is a group, or a part of one that is too large
    sequential    prompt BOS r0 r1 EOS, prompt BOS r2 EOS  a run is a series, or the beginning of one

    mode          an example is      each piece          it ends at     its budget, in tokens       a unit, from BOS
                  cut from pieces    costs, in tokens    the latest     of records, is              to EOS, is
    tabular       record             record              with a pass    full                        all its pieces
    grouped       run                run + BOS + EOS     with a pass    full                        one piece
    sequential    record             record              with a run     drawn in train, else full   all its pieces

So an example has as many consecutive pieces as its budget and the cap allow. Planning loops per example, never per
record, so it is linear in the records whatever the cap.

A unit is what one BOS and one EOS enclose, nothing else. The record or group that must fit into one example is an
entry: in a group that may be split, and in a series, each record.

Offsets are named after what begins and what is counted: `run_first_place[k]` is the first place of run k, and the last
number, `run_first_place[K]`, is that of all places. The records of a split are numbered 0 … R−1, by group key and then
by position.

A build plans all partitions before it writes any examples. Sizes are kept as the number of times that each occurs, so
that the facts of a table are exact, whatever number of partitions they are added up from.
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
from rowmill.core.arrays import Bools, Ints, are_among, compute_offsets, expand_ranges, mark_changes
from rowmill.core.errors import ContextOverflowError
from rowmill.kinds.tables.options import RecordOptions
from rowmill.kinds.tables.partitions import PartitionRows
from rowmill.kinds.tables.schema import Mode, SortKey
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
    """Limits of an example: its tokens in all, those of its prompt, and the number of its pieces."""

    example_tokens: int
    prompt_tokens: int
    cap: int | None

    @property
    def record_room(self) -> int:
        """Tokens left for records after the prompt, one BOS and one EOS; may be negative."""
        return self.example_tokens - self.prompt_tokens - DELIMITERS_PER_UNIT

    @property
    def min_budget_tokens(self) -> int:
        """The smallest budget that an example of a train series may draw: seven tenths of `record_room`, rounded up.

        Budgets are drawn anew in each pass, so that passes cut a series at different records.
        """
        return -(-7 * self.record_room // 10)


@dataclass(frozen=True, slots=True, eq=False)
class SplitRecords:
    """The records of a split of a partition: R records in G groups, a record alone being its own group.

    Of each record, `rows` int64[R] has its row in the partition's index, and `tokens` int64[R] its tokens. Of each
    group, `group_first_record` int64[G + 1] has its first record, and `group_keys` int64[G] the index's number of its
    key (−1: none).
    """

    split: str
    rows: Ints
    tokens: Ints
    group_first_record: Ints
    group_keys: Ints

    @property
    def group_tokens(self) -> Ints:
        """Tokens of each group's records."""
        return np.diff(compute_offsets(self.tokens)[self.group_first_record])

    @property
    def group_records(self) -> Ints:
        return np.diff(self.group_first_record)

    def find_groups(self, records: Ints) -> Ints:
        """Return the group of each record."""
        return np.searchsorted(self.group_first_record, records, "right") - 1


# ── Records in order ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class RecordOrder:
    """Records in the order in which examples show them: passes of runs, whose records stay together.

    `records` int64[N] has the record at each place, `run_first_place` int64[K + 1] where runs begin, `pass_first_run`
    int64[P + 1] the first run of each pass.
    """

    records: Ints
    run_first_place: Ints
    pass_first_run: Ints

    @property
    def pass_first_place(self) -> Ints:
        return self.run_first_place[self.pass_first_run]


Permute = Callable[[int, int], Ints]
"""(pass, n) → a permutation of 0 … n−1."""


def order_records(
    records: SplitRecords, wanted_records: int | None, permute: Permute, *, is_series: bool
) -> RecordOrder:
    """Put groups of records in order (alone, each record is one): each once, or until `wanted_records` are shown.

    The last pass adds groups until its share is reached; the last series is truncated to a prefix. Passes permute the
    groups, never their records; a full first pass over series is in key order.
    """
    available, group_records = len(records.tokens), records.group_records
    total = available if wanted_records is None or not available else wanted_records
    pass_records = [min(available, total - before) for before in range(0, total, max(available, 1))]
    run_groups: list[Ints] = []
    run_records: list[Ints] = []
    for number, wanted in enumerate(pass_records):
        is_in_order = is_series and number == 0 and wanted == available
        groups = np.arange(len(group_records)) if is_in_order else permute(number, len(group_records))
        ends = np.cumsum(group_records[groups])
        groups = groups[: int(np.searchsorted(ends, wanted)) + 1]
        sizes = group_records[groups]
        if is_series:
            sizes[-1:] -= ends[len(groups) - 1] - wanted
        run_groups.append(groups)
        run_records.append(sizes)
    none = np.empty(0, np.int64)
    groups, sizes = np.concatenate([none, *run_groups]), np.concatenate([none, *run_records])
    return RecordOrder(
        records=expand_ranges(records.group_first_record[groups], sizes),
        run_first_place=compute_offsets(sizes),
        pass_first_run=compute_offsets([len(groups) for groups in run_groups]),
    )


def split_large_runs(records: SplitRecords, order: RecordOrder, limits: ExampleLimits) -> RecordOrder:
    """Split the runs that are too large for an example between records, each piece as long as fits.

    Every record fits `limits.record_room`.
    """
    place_first_token = compute_offsets(records.tokens[order.records])
    room_tokens = repeat(repeat(limits.record_room), len(order.run_first_place) - 1)
    first_places, _ = cut_pieces(place_first_token.tolist(), order.run_first_place.tolist(), None, room_tokens)
    run_first_place = np.array(first_places, np.int64)
    return RecordOrder(order.records, run_first_place, np.searchsorted(run_first_place, order.pass_first_place))


# ── Cut into examples ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSplit:
    """The examples of a split: its records in order, cut into units, and these into examples.

    A unit has one BOS and one EOS, an example one prompt: `unit_first_place` int64[U + 1] says where units begin,
    `example_first_unit` int64[E + 1] which unit is an example's first. Of each example there are all its tokens, its
    pass, its budget in tokens of records, and why it ended, an index of `FLUSHES`.
    """

    records: SplitRecords
    order: RecordOrder
    unit_first_place: Ints
    example_first_unit: Ints
    example_tokens: Ints
    passes: Ints
    budget_tokens: Ints
    flushes: NDArray[np.int8]

    @property
    def example_first_place(self) -> Ints:
        return self.unit_first_place[self.example_first_unit]


BudgetSampler = Callable[[int, int], Callable[[int], int]]
"""Samples the budgets of a series' examples: (pass, group) → index of the example in the group → tokens of records."""


_RESTART, _GROUP, _CAP, _BUDGET, _END = range(len(FLUSHES))


@dataclass(frozen=True, slots=True, eq=False)
class OrderPieces:
    """The Q pieces of an order that examples are cut from, in the terms of the drawing above.

    `first_place` int64[Q + 1] and `first_token` int64[Q + 1] say where pieces begin, in places and in the tokens that
    they cost, of which `delimiters` are each piece's own BOS and EOS. An example ends at the latest at the next of
    `borders`, and a pass begins at each of `pass_first_piece`, both from 0 to Q.
    """

    first_place: Ints
    first_token: Ints
    delimiters: int
    borders: Ints
    pass_first_piece: Ints


def list_pieces(records: SplitRecords, order: RecordOrder, mode: Mode) -> OrderPieces:
    """List the pieces of an order: its runs if they are groups, else its records."""
    place_first_token = compute_offsets(records.tokens[order.records])
    if mode == "grouped":
        first_token = place_first_token[order.run_first_place]
        first_token += DELIMITERS_PER_UNIT * np.arange(len(first_token))
        pass_first_run = order.pass_first_run
        return OrderPieces(order.run_first_place, first_token, DELIMITERS_PER_UNIT, pass_first_run, pass_first_run)
    # A record is a piece, so that pieces are counted as places are.
    first_place = np.arange(len(place_first_token), dtype=np.int64)
    borders = order.run_first_place if mode == "sequential" else order.pass_first_place
    return OrderPieces(first_place, place_first_token, 0, borders, order.pass_first_place)


def cut_examples(
    records: SplitRecords, order: RecordOrder, limits: ExampleLimits, mode: Mode, draw: BudgetSampler | None = None
) -> PlannedSplit:
    """Cut an order into examples, as the drawing above says; each run fits into one, or in a series each record.

    `draw` samples the budgets of series, and is None for full budgets, as all other modes have.
    """
    assert draw is None or mode == "sequential"
    pieces = list_pieces(records, order, mode)
    # The BOS and EOS of one unit are no part of a budget, but of the cost of a piece with its own.
    room = limits.record_room + pieces.delimiters
    room_tokens: Iterable[Iterator[int]] = repeat(repeat(room), len(pieces.borders) - 1)
    if draw is not None:
        run_pass = np.repeat(np.arange(len(order.pass_first_run) - 1), np.diff(order.pass_first_run))
        run_group = records.find_groups(order.records[order.run_first_place[:-1]])
        room_tokens = (map(draw(*run), count()) for run in zip(run_pass.tolist(), run_group.tolist(), strict=True))
    first_pieces, rooms = cut_pieces(pieces.first_token.tolist(), pieces.borders.tolist(), limits.cap, room_tokens)
    example_first_piece = np.array(first_pieces, np.int64)
    begins, ends = example_first_piece[:-1], example_first_piece[1:]
    flushes = np.full(len(ends), _BUDGET, np.int8)
    if limits.cap is not None:
        flushes[ends - begins == limits.cap] = _CAP
    flushes[are_among(ends, pieces.borders)] = _GROUP
    flushes[are_among(ends, pieces.pass_first_piece)] = _RESTART
    flushes[-1:] = _END
    if mode == "grouped":
        unit_first_place, example_first_unit = pieces.first_place, example_first_piece
    else:
        unit_first_place = pieces.first_place[example_first_piece]
        example_first_unit = np.arange(len(example_first_piece), dtype=np.int64)
    piece_tokens = np.diff(pieces.first_token[example_first_piece])
    first_piece_tokens = pieces.first_token[begins + 1] - pieces.first_token[begins]
    return PlannedSplit(
        records=records,
        order=order,
        unit_first_place=unit_first_place,
        example_first_unit=example_first_unit,
        example_tokens=limits.prompt_tokens + piece_tokens + (DELIMITERS_PER_UNIT - pieces.delimiters),
        passes=np.searchsorted(pieces.pass_first_piece, begins, "right") - 1,
        # A record may be larger than a budget that was drawn.
        budget_tokens=np.maximum(np.array(rooms, np.int64), first_piece_tokens) - pieces.delimiters,
        flushes=flushes,
    )


def cut_pieces(
    piece_first_token: Sequence[int],
    border_pieces: Sequence[int],
    cap: int | None,
    room_tokens: Iterable[Iterator[int]],
) -> tuple[list[int], list[int]]:
    """Cut pieces into examples, each of as many as fit; return the first piece of each (end included), and its room.

    Piece p costs `piece_first_token[p + 1] - piece_first_token[p]` tokens, and one always fits. An example also ends
    after `cap` pieces, and at the next of `border_pieces` (from 0 to the number of pieces). `room_tokens` has an
    iterator for every two borders, which yields the room of each example between them.
    """
    first_pieces, rooms = [0], list[int]()
    for (border, next_border), own_rooms in zip(pairwise(border_pieces), room_tokens, strict=True):
        piece = border
        while piece < next_border:
            room, latest = next(own_rooms), next_border if cap is None else min(piece + cap, next_border)
            if latest == piece + 1:
                piece = latest
            else:
                piece = bisect_right(piece_first_token, piece_first_token[piece] + room, piece + 2, latest + 1) - 1
            first_pieces.append(piece)
            rooms.append(room)
    return first_pieces, rooms


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
    """A record or group that is too large for an example: `name` is its row or its key, `records` how many it has.

    `record_tokens`, a stored name, are those of all its records.
    """

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
    """How many entries do not fit, the `first` of them in the order of the table, and the `worst`, largest first."""

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


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What decides the plan of a partition beside its rows; the dataset's name and the seed decide what is drawn.

    `wanted_records` of train are sampled (None: each is shown once).
    """

    dataset: str
    seed: int
    form: RecordOptions
    sort_key: SortKey | None
    limits: ExampleLimits
    wanted_records: int | None

    @property
    def oversized_kind(self) -> Literal["record", "group"]:
        """What must fit into an example: a group, unless the recipe lets it be split, or else a record."""
        return "group" if self.form.mode == "grouped" and self.form.assembly.on_overflow != "split" else "record"


def find_oversized(request: PlanRequest, partition: PartitionRows) -> tuple[Ints, Ints]:
    """Return the encoded rows of the entries that are too large for an example, and where each entry begins.

    A group's rows follow one another; the second array, int64[X + 1], ends with the number of rows.
    """
    index, tokens = partition.index, partition.tokens
    if request.oversized_kind == "record":
        rows = np.flatnonzero((tokens >= 0) & (tokens > request.limits.record_room))
        return rows, np.arange(len(rows) + 1, dtype=np.int64)
    assert index.groups is not None
    group_tokens = np.bincount(index.groups, weights=np.maximum(tokens, 0), minlength=len(index.keys))
    rows = np.flatnonzero((group_tokens > request.limits.record_room)[index.groups] & (tokens >= 0))
    rows = rows[np.argsort(index.groups[rows], kind="stable")]
    return rows, np.append(np.flatnonzero(mark_changes(index.groups[rows])), len(rows)).astype(np.int64)


def count_train_records(request: PlanRequest, partition: PartitionRows) -> int:
    """Count the train records that fit, of which a sample takes its share."""
    fitting = partition.tokens >= 0
    fitting[find_oversized(request, partition)[0]] = False
    return int((fitting & (partition.index.splits == SPLITS.index("train"))).sum())


def plan_splits(request: PlanRequest, partition: PartitionRows, oversized_rows: Ints) -> list[PlannedSplit]:
    """Plan the examples of each of `SPLITS`; entries that do not fit are left out, whatever the recipe says."""
    fitting = partition.tokens >= 0
    fitting[oversized_rows] = False
    return [_plan_split(request, partition, fitting, split) for split in SPLITS]


def _plan_split(request: PlanRequest, partition: PartitionRows, fitting: Bools, split: str) -> PlannedSplit:
    index, form, limits = partition.index, request.form, request.limits
    rows, group_first_record = index.sort_rows(np.flatnonzero((index.splits == SPLITS.index(split)) & fitting))
    first_rows = rows[group_first_record[:-1]]
    group_keys = np.full(len(first_rows), -1) if index.groups is None else index.groups[first_rows]
    records = SplitRecords(split, rows, partition.tokens[rows], group_first_record, group_keys)

    low = limits.min_budget_tokens
    span = limits.record_room - low + 1

    def draw_budgets(number: int, group: int) -> Callable[[int], int]:
        """Return the sampler of a series' budgets, uniform from seven tenths of the record room to all of it."""
        key = index.keys[int(group_keys[group])]
        drawn = permutation.make_label_hasher(request.seed, "budget", request.dataset, split, number, key)
        return lambda ordinal: low + (drawn(ordinal) * span >> 64)

    def permute(number: int, count: int) -> Ints:
        """Return the order of a pass: a keyed permutation, independent of other datasets, partitions and passes."""
        of_partition = () if partition.name is None else (partition.name,)
        key = permutation.hash_labels(request.seed, "assembly", request.dataset, split, number, *of_partition)
        return permutation.make_feistel(count, key)(np.arange(count, dtype=np.int64))

    # Held-out records are shown once, in examples of full budgets.
    is_train, is_series = split == "train", form.mode == "sequential"
    order = order_records(records, request.wanted_records if is_train else None, permute, is_series=is_series)
    if form.assembly.on_overflow == "split":
        order = split_large_runs(records, order, limits)
    return cut_examples(records, order, limits, form.mode, draw_budgets if is_train and is_series else None)


def summarize_split(mode: Mode, plan: PlannedSplit) -> SplitFacts:
    """Return the facts of a split's examples."""
    records, shown = plan.records, plan.order.records
    has_groups = len(records.group_keys) > 0 and int(records.group_keys[0]) >= 0
    none = np.empty(0, np.int64)
    counts = {
        "records": len(shown),
        "distinct_records": len(records.rows),
        "groups": len(records.group_keys) if has_groups else 0,
        "examples": len(plan.example_tokens),
        "tokens": int(plan.example_tokens.sum()),
        **{f"flush_{name}": int((plan.flushes == at).sum()) for at, name in enumerate(FLUSHES)},
        "units": len(plan.unit_first_place) - 1,
    }
    measured: Mapping[str, Ints] = {
        "record_tokens": records.tokens,
        "group_tokens": records.group_tokens if has_groups else none,
        "example_tokens": plan.example_tokens,
        "example_records": np.diff(plan.example_first_place),
        "example_groups": np.diff(plan.example_first_unit) if has_groups else none,
    }
    counted = {name: np.unique(values, return_counts=True) for name, values in measured.items()}
    sizes = {name: dict(zip(*(part.tolist() for part in both), strict=True)) for name, both in counted.items()}
    shown_tokens = int(records.tokens[shown].sum())
    longest_group = 0 if mode == "tabular" else int(records.group_records.max(initial=0))
    return SplitFacts(records.split, counts, sizes, shown_tokens, longest_group)


# ── What does not fit ──────────────────────────────────────────────────────────────────────────────


ColumnReader = Callable[[Ints, str], Sequence[str]]
"""Reads a column of rows, given their numbers in the index."""


def name_overflows(
    request: PlanRequest, partition: PartitionRows, rows: Ints, entry_first_row: Ints, read_column: ColumnReader
) -> Iterator[TableOverflow]:
    """Name what `find_oversized` found, and the widest column of each, reading each part once."""
    if not len(rows):
        return
    index, limits = partition.index, request.limits
    if request.oversized_kind == "record":
        names = [f"record {name}" for name in read_column(rows, "row_id")]
    else:
        assert index.groups is not None
        keys = (index.keys[group] for group in index.groups[rows[entry_first_row[:-1]]].tolist())
        names = [_name_group(key, request.form.group_columns) for key in keys]
    entry_rows = np.split(rows, entry_first_row[1:-1])
    examined = [own[:MAX_EXAMINED_ROWS] for own in entry_rows]
    records = iter(read_column(np.concatenate(examined), "record"))
    for name, own, shown in zip(names, entry_rows, examined, strict=True):
        sizes: Counter[str] = Counter()
        for record in islice(records, len(shown)):
            sizes.update({column: len(str(value)) for column, value in read_json(record).items()})
        entry_tokens = int(partition.tokens[own].sum())
        yield TableOverflow(
            kind=request.oversized_kind,
            name=name,
            tokens=limits.prompt_tokens + DELIMITERS_PER_UNIT + entry_tokens,
            prompt=limits.prompt_tokens,
            record_tokens=entry_tokens,
            limit=limits.example_tokens,
            records=len(own),
            widest=max(sizes, key=sizes.__getitem__, default=""),
        )


def _name_group(key: str, columns: Sequence[str]) -> str:
    """Name a group by its columns and their values."""
    value = read_json(key) if len(key) < 1 << 16 else key
    values = value if len(columns) > 1 and isinstance(value, list) else [value]
    shown = [str(one) if type(one) is Decimal else repr(one) for one in values]
    return ", ".join(f"{name}={one}" for name, one in zip(columns, shown, strict=False)) or key


def require_record_room(dataset: str, form: RecordOptions, limits: ExampleLimits, widest_names: str) -> None:
    """Refuse limits under which no record fits: the prompt and the delimiters take all tokens of an example."""
    if limits.record_room < 1:
        shorter = "" if form.prompt.style == "names" else ", or set format.prompt.style: names"
        raise ContextOverflowError(
            f"datasets.{dataset}: the prompt has {limits.prompt_tokens} tokens and with BOS/EOS {DELIMITERS_PER_UNIT} "
            f"leaves {limits.record_room} of {limits.example_tokens} for records, expected at least 1; its widest "
            f"columns are {widest_names}; {_suggest_longer_examples(form)}, or shorten these names{shorter}"
        )


def require_fitting_entries(dataset: str, form: RecordOptions, overflows: OverflowFacts) -> None:
    """Refuse a plan in which an entry does not fit, unless the recipe leaves such entries out."""
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


def _suggest_longer_examples(form: RecordOptions) -> str:
    if form.assembly.max_seq_length is None:
        return "raise seq_len"
    return "raise format.assembly.max_seq_length (at most seq_len)"
