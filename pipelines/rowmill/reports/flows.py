"""Flows of rows and tokens through the stages, from read records to the sequences of the order, and their drawing.

    1,343 records read
      - 10 duplicate, - 5 bad_messages …      branches: the ledger of the stage
    1,304 rows                                the next level: what the stage counted by itself

Between two levels of one unit, count - branches out + branches in is the next level's count. Both are counted
separately, so a difference is shown as a branch of its own, `unaccounted`. Where the unit changes (rows to examples to
sequences), a level begins anew.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby, pairwise
from typing import Literal

from rowmill.core.arrays import format_percent
from rowmill.core.console import escape_control_characters
from rowmill.core.html import choose_role, link_text
from rowmill.core.stage_names import PACKED_SHARDS, TOKENIZED_EXAMPLES, TRAINING_SPLITS
from rowmill.inspection.trace import DATASET_CHAIN
from rowmill.schema.example_counts import ExampleCounts
from rowmill.schema.ledger import KEPT, REJECTED
from rowmill.schema.manifest import Manifest
from rowmill.schema.row_counts import RowCounts
from rowmill.schema.shard_counts import PackingCounts
from rowmill.schema.source_counts import SourceCounts

BranchKind = Literal["rejected", "left_out", "evaluation", "added", "trained", "context", "padding", "unaccounted"]
"""What a branch is: lost for a reason, left out on purpose, for evaluation, added, or a class of the last level."""

LAST_CLASSES: tuple[BranchKind, ...] = ("trained", "context", "padding")
"""The classes into which the last level is divided."""

SHOWN_BRANCHES = 8
"""Branches between two levels; further ones are summed."""

REPEATED = "repeated"
"""The state of the table `schedule` that adds to what is kept."""


@dataclass(frozen=True, slots=True)
class FlowBranch:
    """What leaves the flow below a level, or joins it."""

    name: str
    count: int
    kind: BranchKind
    joins: bool = False


@dataclass(frozen=True, slots=True)
class FlowLevel:
    """What reaches a stage, in one unit, and its branches before the next level."""

    label: str
    unit: str
    count: int
    branches: tuple[FlowBranch, ...] = ()

    @property
    def remaining(self) -> int:
        """What is left behind the branches."""
        return self.count + sum(branch.count if branch.joins else -branch.count for branch in self.branches)


Flow = tuple[FlowLevel, ...]


# ── Rows ───────────────────────────────────────────────────────────────────────────────────────────


def iterate_row_levels(chain: Mapping[str, Manifest], dataset: str) -> Iterator[FlowLevel]:
    """Yield the levels of a dataset's rows, then examples, then sequences."""
    raw, rows, examples, packed = (chain.get(stage) for stage in DATASET_CHAIN)
    if raw is None:
        return
    records = raw.get_counts(SourceCounts).records
    if rows is None:
        yield FlowLevel("records read", "rows", records)
        return
    # A custom format may make several rows of one record; each has its own line in the ledger.
    further = rows.get_counts(RowCounts).further_rows
    joined = (FlowBranch("further rows of a record", further, "added", joins=True),) if further else ()
    yield FlowLevel("records read", "rows", records, (*_list_ledger_branches(rows), *joined))
    if examples is None:
        yield FlowLevel("rows", "rows", _count_kept(rows))
        return
    yield FlowLevel("rows", "rows", _count_kept(rows), _list_ledger_branches(examples))
    yield FlowLevel("rows in examples", "rows", _count_kept(examples))
    example_count = examples.get_counts(ExampleCounts).examples
    if packed is None:
        yield FlowLevel("examples", "examples", example_count)
        return
    yield FlowLevel("examples", "examples", example_count, _list_ledger_branches(packed))
    yield FlowLevel("examples packed", "examples", _count_kept(packed))
    yield from _iterate_order_levels(chain, dataset, "sequences")


def _list_ledger_branches(output: Manifest) -> tuple[FlowBranch, ...]:
    """Return what a stage did not keep, the most frequent first."""
    lines = sorted((line for line in output.ledger if line[0] != KEPT and line[2]), key=lambda line: (-line[2], line))
    return tuple(
        FlowBranch(reason or state.replace("_", " "), count, "rejected" if state == REJECTED else "left_out")
        for state, reason, count in lines
    )


def _count_kept(output: Manifest) -> int:
    return sum(count for state, _, count in output.ledger if state == KEPT)


# ── Tokens ─────────────────────────────────────────────────────────────────────────────────────────


def iterate_token_levels(chain: Mapping[str, Manifest], dataset: str, *, seq_len: int) -> Iterator[FlowLevel]:
    """Yield the levels of a dataset's tokens, from those of its rendered rows to the positions that a trainer reads."""
    examples, packed = chain.get(TOKENIZED_EXAMPLES), chain.get(PACKED_SHARDS)
    if examples is None:
        return
    classes: dict[str, int] = {}
    for _, name, count in examples.token_ledger:
        classes[name] = classes.get(name, 0) + count
    lost = tuple(
        FlowBranch(shown, classes[name], "rejected") for name, shown in _LOST_CLASSES.items() if classes.get(name)
    )
    yield FlowLevel("tokens rendered", "tokens", sum(classes.values()), lost)
    token_count = examples.get_counts(ExampleCounts).tokens
    if packed is None:
        yield FlowLevel("tokens in examples", "tokens", token_count)
        return
    dropped, shared = (
        sum(count for _, name, count in packed.token_ledger if name == wanted) for wanted in ("dropped", "shared")
    )
    branches: tuple[tuple[str, int, BranchKind], ...] = (
        ("dropped by packing", dropped, "rejected"),
        ("shared with other examples", shared, "left_out"),
    )
    lost = tuple(FlowBranch(*branch) for branch in branches if branch[1])
    yield FlowLevel("tokens in examples", "tokens", token_count, lost)
    yield from _iterate_order_levels(chain, dataset, "tokens")
    # What a trainer reads: every token as often as it is scheduled, and the padding of its sequences.
    schedule = _read_schedule(chain, dataset)
    if schedule is None:
        return
    sequences, tokens, trained = (
        schedule[KEPT][column] + schedule[REPEATED][column] for column in ("sequences", "tokens", "trained_tokens")
    )
    padding = sequences * seq_len - tokens
    joined = (FlowBranch("padding", padding, "padding", joins=True),) if padding else ()
    yield FlowLevel("tokens in all passes", "tokens", tokens, joined)
    read: tuple[tuple[str, int, BranchKind], ...] = (
        ("trained", trained, "trained"),
        ("not trained", tokens - trained, "context"),
        ("padding", padding, "padding"),
    )
    yield FlowLevel(
        "positions read",
        "tokens",
        sequences * seq_len,
        tuple(FlowBranch(name, count, kind) for name, count, kind in read if count),
    )


_LOST_CLASSES = {"truncated": "truncated", "dropped": "of rows too long to cut"}
"""Classes of tokens that are in no example, and how they are named."""


# ── Sequences and their tokens in the order ────────────────────────────────────────────────────────


def _iterate_order_levels(
    chain: Mapping[str, Manifest], dataset: str, unit: Literal["sequences", "tokens"]
) -> Iterator[FlowLevel]:
    """Yield what is packed, what of it is for training, and what the order schedules."""
    packed = chain[PACKED_SHARDS]
    counts = packed.get_counts(PackingCounts)
    content = packed.tables["packing"]
    of, at = content.columns.index("split"), content.columns.index(unit)
    splits = {str(row[of]): int(row[at]) for row in content.rows}
    branches = tuple(
        FlowBranch(f"{split} split", count, "evaluation")
        for split, count in splits.items()
        if split != "train" and count
    )
    yield FlowLevel(f"{unit} packed", unit, counts.sequences if unit == "sequences" else counts.tokens, branches)
    schedule = _read_schedule(chain, dataset)
    if schedule is None:
        yield FlowLevel(f"{unit} to train on", unit, splits.get("train", 0))
        return
    not_scheduled = tuple(
        FlowBranch(state.replace("_", " "), counts[unit], "left_out")
        for state, counts in schedule.items()
        if state not in (KEPT, REPEATED) and counts[unit]
    )
    yield FlowLevel(f"{unit} to train on", unit, splits.get("train", 0), not_scheduled)
    again = schedule[REPEATED][unit]
    joined = (FlowBranch("in later passes", again, "added", joins=True),) if again else ()
    yield FlowLevel(f"{unit} scheduled", unit, schedule[KEPT][unit], joined)
    if unit == "sequences":
        yield FlowLevel("sequences in all passes", unit, schedule[KEPT][unit] + again)


def _read_schedule(chain: Mapping[str, Manifest], dataset: str) -> dict[str, dict[str, int]] | None:
    """Return a dataset's counts in the order by state; None if it is not built."""
    order = chain.get(TRAINING_SPLITS)
    if order is None:
        return None
    table = order.tables["schedule"]
    lines = [dict(zip(table.columns, row, strict=True)) for row in table.rows if row[0] == dataset]
    return {str(row["state"]): {name: int(row[name]) for name in table.columns[2:]} for row in lines} or None


# ── Levels that add up ─────────────────────────────────────────────────────────────────────────────


def balance_levels(levels: Iterable[FlowLevel]) -> Flow:
    """Return levels in which what a level leaves is what the next one has, with any difference as a branch."""
    balanced = list(levels)
    for at, (level, following) in enumerate(pairwise(balanced)):
        difference = level.remaining - following.count
        if level.unit == following.unit and difference:
            unknown = FlowBranch("unaccounted", abs(difference), "unaccounted", joins=difference < 0)
            balanced[at] = replace(level, branches=(*level.branches, unknown))
    return tuple(balanced)


def sum_flows(flows: Sequence[Flow]) -> Flow:
    """Return the flow of all datasets together, down to the last level that every one of them has reached."""
    shared = min((len(flow) for flow in flows), default=0)
    levels: list[FlowLevel] = []
    for row in zip(*(flow[:shared] for flow in flows), strict=True):
        counts: dict[tuple[str, BranchKind, bool], int] = {}
        for branch in (branch for level in row for branch in level.branches):
            key = branch.name, branch.kind, branch.joins
            counts[key] = counts.get(key, 0) + branch.count
        joined = [FlowBranch(name, n, kind, joins=joins) for (name, kind, joins), n in counts.items()]
        # Those that leave, the largest first, then those that join.
        joined.sort(key=lambda branch: (branch.joins, branch.kind in LAST_CLASSES, -branch.count, branch.name))
        # What every dataset still has ends here where one of them has no further level.
        last = len(levels) == shared - 1 and any(len(flow) > shared for flow in flows)
        total = sum(level.count for level in row)
        levels.append(replace(row[0], count=total, branches=() if last else tuple(joined)))
    return tuple(levels)


def _merge_small(branches: tuple[FlowBranch, ...]) -> tuple[FlowBranch, ...]:
    rejected = [branch for branch in branches if branch.kind == "rejected" and not branch.joins]
    other_count = len(branches) - len(rejected)
    room = max(SHOWN_BRANCHES - other_count - 1, 1)
    if len(rejected) <= room + 1:
        return branches
    small = sorted(rejected, key=lambda branch: (-branch.count, branch.name))[room:]
    merged = FlowBranch(f"for {len(small)} other reasons", sum(branch.count for branch in small), "rejected")
    kept = [branch for branch in branches if branch not in small]
    at = next((i for i, branch in enumerate(kept) if branch.kind != "rejected" or branch.joins), len(kept))
    return (*kept[:at], merged, *kept[at:])


# ── Drawing ────────────────────────────────────────────────────────────────────────────────────────

# A flow is drawn as a Sankey diagram:
#
#     ▇▇▇▇▇▇▇▇▇▇  1,343 records read
#     ██████████
#     ████████╰─▬ − 39 rejected · 2.9 %
#     ▇▇▇▇▇▇▇▇    1,304 rows
#
# A stream that runs downwards leaves a column for labels at its right, so that the same drawing is readable on a phone.
# Widths are proportional to counts within a unit; what would be invisible is drawn a pixel wide. Every number that is
# drawn is also in a `data-count`.


WIDTH = 420
STREAM = 120
"""Width of the largest level of a unit."""
LEFT, LABELS, BRANCH_END = 2, 152, 145
LINE = 19
"""Height of a line of text."""
BAR = 5
TURN = 7
"""Radius of a branch's inner turn."""
MAX_LABEL_CHARS = 32

COLOURS: dict[BranchKind, str] = {
    "rejected": "var(--flow-rejected, #d1495b)",
    "left_out": "var(--flow-left-out, #d99a2b)",
    "evaluation": "var(--flow-evaluation, #4a9aa8)",
    "added": "var(--flow-added, #8a96a3)",
    "trained": "var(--flow-trained, #4c9a52)",
    "context": "var(--flow-context, #8b9dc3)",
    "padding": "var(--flow-padding, #b8c1ca)",
    "unaccounted": "var(--bad, #b3261e)",
}
KEPT_COLOUR = "var(--flow-kept, #4c78a8)"


def draw_flow_svg(
    flow: Flow, title: str, link: Callable[[FlowLevel, FlowBranch | None], str] = lambda _, __: ""
) -> str:
    """Draw a flow; an empty one is an empty text. `link` returns the address of a level, or of one of its branches."""
    if not flow:
        return ""
    # The smaller branches of a level are summed, so that `SHOWN_BRANCHES` remain.
    shortened = (replace(level, branches=_merge_small(level.branches)) for level in flow)
    drawn: list[str] = []
    y = 6.0
    for number, (_, group) in enumerate(groupby(shortened, key=lambda level: level.unit)):
        levels = list(group)
        if number:
            drawn.append(
                f'<path fill="none" stroke="{KEPT_COLOUR}" stroke-width="2" d="M{LEFT + STREAM / 2 - 7} '
                f'{y + 3:.1f}l7 7l7 -7"/><text x="{LABELS}" y="{y + 11:.1f}" opacity=".7">made into</text>'
            )
            y += LINE + 4
        largest = max(level.count + sum(branch.count for branch in level.branches if branch.joins) for level in levels)
        for at, level in enumerate(levels):
            width = _measure_width(level.count, largest)
            label = f'<text x="{LABELS}" y="{y + 9:.1f}" font-weight="600">{level.count:,} {escape(level.label)}</text>'
            drawn.append(
                f'<g class="level" data-unit="{escape(level.unit)}" data-count="{level.count}">'
                f'<rect fill="{KEPT_COLOUR}" x="{LEFT}" y="{y:.1f}" width="{width:.1f}" height="{BAR}"/>'
                f"{link_text(label, link(level, None))}</g>"
            )
            y = _draw_branches(level, y + BAR, y + LINE, largest, drawn, link, goes_on=at + 1 < len(levels))
    height, markup = round(y + 4), "".join(drawn)
    return (
        f'<svg class="flow" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="{choose_role(markup)}" font-family="system-ui, sans-serif" '
        f'font-size="13" fill="currentColor"><title>{escape(title)}</title>{markup}</svg>'
    )


def _measure_width(count: int, largest: int) -> float:
    """Return the pixels of a count in a unit."""
    return max(STREAM * count / largest, 1.0) if count and largest else 0.0


def _draw_branches(
    level: FlowLevel,
    top: float,
    y: float,
    largest: int,
    drawn: list[str],
    link: Callable[[FlowLevel, FlowBranch | None], str],
    *,
    goes_on: bool,
) -> float:
    """Draw what leaves and joins below a level, and the stream to the next one; return the next level's height."""
    whole = LEFT + _measure_width(level.count, largest)
    leaving, joining = ([branch for branch in level.branches if branch.joins == joins] for joins in (False, True))
    right = whole
    lines: list[tuple[float, float, float, FlowBranch]] = []
    for branch in (*leaving, *joining):
        width = _measure_width(branch.count, largest)
        if not branch.joins:
            right -= width
        else:
            right = max(right, LEFT)
        tall = max(LINE, width + 4)
        lines.append((max(right, LEFT), width, y + tall / 2, branch))
        right += width if branch.joins else 0
        y += tall
    bottom = y + 6 if lines else y
    if goes_on:
        stays = min(LEFT + _measure_width(level.remaining, largest), whole)
        drawn.append(
            f'<rect fill="{KEPT_COLOUR}" opacity=".35" x="{LEFT}" y="{top:.1f}" width="{stays - LEFT:.1f}" '
            f'height="{bottom - top:.1f}"/>'
        )
    for x, width, middle, branch in lines:
        # A ribbon along x that turns to the right: one that leaves begins at the edge above, one that joins ends at the
        # edge below.
        sign, edge = ("+ ", bottom) if branch.joins else ("" if branch.kind in LAST_CLASSES else "− ", top)
        label = f"{sign}{branch.count:,} {escape_control_characters(branch.name)}"
        percent = format_percent(branch.count, level.count) if 2000 * branch.count >= level.count else "< 0.1 %"
        share = f" · {percent}" if level.count else ""
        shown = label if len(label) <= MAX_LABEL_CHARS else f"{label[: MAX_LABEL_CHARS - 1]}…"
        down = 1 if edge < middle else -1
        inner, outer = middle - down * width / 2, middle + down * width / 2
        right = x + width
        turn = min(TURN, abs(inner - edge), max(BRANCH_END - right, 0))
        wide = turn + width
        ribbon = (
            f"M{x:.1f} {edge:.1f}V{outer - down * wide:.1f}Q{x:.1f} {outer:.1f} {x + wide:.1f} {outer:.1f}H{BRANCH_END}"
            f"V{inner:.1f}H{right + turn:.1f}Q{right:.1f} {inner:.1f} {right:.1f} {inner - down * turn:.1f}V{edge:.1f}z"
        )
        count = branch.count if branch.joins else -branch.count
        tail = f'<tspan opacity=".65">{escape(share)}</tspan>'
        text = f'<text x="{LABELS}" y="{middle + 4.5:.1f}">{escape(shown)}{tail}</text>'
        drawn.append(
            f'<g class="branch" data-kind="{branch.kind}" data-count="{count}"><title>{escape(label + share)}</title>'
            f'<path fill="{COLOURS[branch.kind]}" opacity=".8" d="{ribbon}"/>{link_text(text, link(level, branch))}</g>'
        )
    return bottom
