"""Draw a flow as a Sankey diagram: a stream from top to bottom whose branches leave to the right, each with its count.

    ▇▇▇▇▇▇▇▇▇▇  1,343 records read
    ██████████
    ████████╰─▬ − 39 rejected · 2.9 %
    ▇▇▇▇▇▇▇▇    1,304 rows

A stream that runs downwards leaves a column for labels at its right, so that the same drawing is readable on a phone.
Widths are proportional to counts within a unit; what would be invisible is drawn a pixel wide. Every number that is
drawn is also in a `data-count`.
"""

from html import escape
from itertools import groupby

from rowmill.core.console import escape_control_characters
from rowmill.core.number_text import format_percent
from rowmill.reports.flows import LAST_CLASSES, BranchKind, Flow, FlowBranch, FlowLevel, shorten_branches

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


def draw_flow_svg(flow: Flow, title: str) -> str:
    """Draw a flow; an empty one is an empty text."""
    if not flow:
        return ""
    drawn: list[str] = []
    y = 6.0
    for number, (_, own) in enumerate(groupby(shorten_branches(flow), key=lambda level: level.unit)):
        levels = list(own)
        if number:
            drawn.append(
                f'<path fill="none" stroke="{KEPT_COLOUR}" stroke-width="2" d="M{LEFT + STREAM / 2 - 7} '
                f'{y + 3:.1f}l7 7l7 -7"/><text x="{LABELS}" y="{y + 11:.1f}" opacity=".7">made into</text>'
            )
            y += LINE + 4
        largest = max(one.count + sum(branch.count for branch in one.branches if branch.joins) for one in levels)
        for at, level in enumerate(levels):
            width = _measure_width(level.count, largest)
            drawn.append(
                f'<g class="level" data-unit="{escape(level.unit)}" data-count="{level.count}">'
                f'<rect fill="{KEPT_COLOUR}" x="{LEFT}" y="{y:.1f}" width="{width:.1f}" height="{BAR}"/>'
                f'<text x="{LABELS}" y="{y + 9:.1f}" font-weight="600">{level.count:,} {escape(level.label)}</text></g>'
            )
            y = _draw_branches(level, y + BAR, y + LINE, largest, drawn, goes_on=at + 1 < len(levels))
    height = round(y + 4)
    return (
        f'<svg class="flow" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="currentColor"><title>{escape(title)}</title>{"".join(drawn)}</svg>'
    )


def _measure_width(count: int, largest: int) -> float:
    """Return the pixels of a count in a unit."""
    return max(STREAM * count / largest, 1.0) if count and largest else 0.0


def _draw_branches(level: FlowLevel, top: float, y: float, largest: int, drawn: list[str], *, goes_on: bool) -> float:
    """Draw what leaves and joins below a level, and the stream to the next one; return the next level's height."""
    right = LEFT + _measure_width(level.count, largest)
    kept = LEFT + (_measure_width(level.remaining, largest) if goes_on else 0)
    ribbons: list[str] = []
    lines: list[tuple[float, float, FlowBranch]] = []
    for branch in level.branches:
        if not branch.joins:
            width = _measure_width(branch.count, largest)
            lines.append((right - width, width, branch))
            right -= width
    right = max(right, LEFT)
    for branch in level.branches:
        if branch.joins:
            width = _measure_width(branch.count, largest)
            lines.append((right, width, branch))
            right += width
    middles: list[float] = []
    for _, width, _ in lines:
        tall = max(LINE, width + 4)
        middles.append(y + tall / 2)
        y += tall
    bottom = y + 6 if lines else y
    for (x, width, one), middle in zip(lines, middles, strict=True):
        ribbons.append(_draw_branch(one, level, max(x, LEFT), width, middle, top=top, bottom=bottom))
    if goes_on:
        stays = min(kept, LEFT + _measure_width(level.count, largest))
        drawn.append(
            f'<rect fill="{KEPT_COLOUR}" opacity=".35" x="{LEFT}" y="{top:.1f}" width="{stays - LEFT:.1f}" '
            f'height="{bottom - top:.1f}"/>'
        )
    drawn += ribbons
    return bottom


def _draw_branch(
    one: FlowBranch, level: FlowLevel, x: float, width: float, middle: float, *, top: float, bottom: float
) -> str:
    sign, edge = ("+ ", bottom) if one.joins else ("" if one.kind in LAST_CLASSES else "− ", top)
    label = f"{sign}{one.count:,} {escape_control_characters(one.name)}"
    percent = format_percent(one.count, level.count) if 2000 * one.count >= level.count else "< 0.1 %"
    share = f" · {percent}" if level.count else ""
    shown = label if len(label) <= MAX_LABEL_CHARS else f"{label[: MAX_LABEL_CHARS - 1]}…"
    return (
        f'<g class="branch" data-kind="{one.kind}" data-count="{one.count if one.joins else -one.count}">'
        f"<title>{escape(label + share)}</title>"
        f'<path fill="{COLOURS[one.kind]}" opacity=".8" d="{_trace_ribbon(x, width, middle, edge)}"/>'
        f'<text x="{LABELS}" y="{middle + 4.5:.1f}">{escape(shown)}'
        f'<tspan opacity=".65">{escape(share)}</tspan></text></g>'
    )


def _trace_ribbon(x: float, width: float, middle: float, edge: float) -> str:
    """Return the outline of a ribbon that runs along x from an edge, and turns to the right at a height.

    A branch that leaves begins at the edge above; one that joins ends at the edge below.
    """
    down = 1 if edge < middle else -1
    inner, outer = middle - down * width / 2, middle + down * width / 2
    right = x + width
    turn = min(TURN, abs(inner - edge), max(BRANCH_END - right, 0))
    wide = turn + width
    return (
        f"M{x:.1f} {edge:.1f}V{outer - down * wide:.1f}Q{x:.1f} {outer:.1f} {x + wide:.1f} {outer:.1f}H{BRANCH_END}"
        f"V{inner:.1f}H{right + turn:.1f}Q{right:.1f} {inner:.1f} {right:.1f} {inner - down * turn:.1f}V{edge:.1f}z"
    )
