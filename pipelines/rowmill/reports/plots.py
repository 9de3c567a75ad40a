"""Plots of counts: SVG for pages, block characters for terminals.

What belongs here: pure functions from counts to text. What does not: counting, and where a plot is shown. There is no
plotting library: a histogram is forty rectangles, and importing a library takes longer than the stage that it draws.

Every plot is self-contained (no script, style sheet or external address) and has a light background, so that it is
readable on dark pages as well. Text from data is escaped.
"""

import base64
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor

from rowmill.schema.manifest import Histogram

INK, PANEL, BAR, OVER, MARK = "#1f2933", "#ffffff", "#4c78a8", "#e45756", "#b3261e"

SPARK_HEIGHT = 24
SPARK_STEP = 5
"""Pixels of a sparkline: integers, so that 48 bars stay near 500 characters once they are base64."""

BLOCKS = " ▏▎▍▌▋▊▉█"
"""Eighths of a character cell, from nothing to all of it."""


def draw_sparkline(counts: Sequence[int]) -> str:
    """Draw counts as one filled outline: `M0 24V12h5V9h5…V24z`.

    A count above zero is at least a pixel high, because rare bins are the ones readers look for.
    """
    highest = max(counts, default=0)
    steps = "".join(f"V{SPARK_HEIGHT - _scale_to_pixels(count, highest)}h{SPARK_STEP}" for count in counts)
    width = SPARK_STEP * max(len(counts), 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{SPARK_HEIGHT}">'
        f'<path fill="{BAR}" d="M0 {SPARK_HEIGHT}{steps}V{SPARK_HEIGHT}z"/></svg>'
    )


def _scale_to_pixels(count: int, highest: int) -> int:
    return max(1, round(SPARK_HEIGHT * count / highest)) if count else 0


def make_data_uri(svg: str) -> str:
    """Return an SVG as a data URI, for an image inside Markdown."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def draw_histogram_svg(histogram: Histogram, *, width: int = 640, height: int = 240) -> str:
    """Draw a histogram with bars of equal width, bars past the limit in another colour, and the limit marked.

    Bins may differ in width (the last one holds the far tail), so the axis counts bins, and each edge is labelled at
    its own bar. A tooltip on every bar gives its range and count.
    """
    left, top, bottom = 8, 34, height - 26
    bars = max(len(histogram.counts), 1)
    step = (width - 2 * left) / bars
    highest = max(histogram.counts, default=0) or 1
    drawn = [
        _draw_bar(histogram, i, left + i * step, step, bottom, (bottom - top) * count / highest)
        for i, count in enumerate(histogram.counts)
    ]
    axis = f'<path stroke="{INK}" d="M{left} {bottom}.5H{width - left}"/>'
    labels = [
        _draw_text(left + i * step, bottom + 15, _format_number(histogram.edges[i]), "middle" if i else "start")
        for i in _choose_labelled_edges(histogram)
    ]
    total = f"{sum(histogram.counts):,} total, tallest bar {max(histogram.counts, default=0):,}"
    title = _draw_text(left, 16, f"{histogram.title} ({histogram.unit}): {total}", "start")
    mark = _draw_limit_mark(histogram, left, step, top, bottom)
    return _wrap_svg(width, height, histogram.title, [title, *drawn, axis, *labels, *mark])


def _draw_bar(histogram: Histogram, i: int, x: float, step: float, bottom: int, tall: float) -> str:
    count = histogram.counts[i]
    if not count:
        return ""
    lower, upper = histogram.edges[i], histogram.edges[i + 1]
    colour = OVER if histogram.limit is not None and lower >= histogram.limit else BAR
    tall = max(tall, 1)
    return (
        f'<rect fill="{colour}" x="{x + 0.5:.1f}" y="{bottom - tall:.1f}" width="{max(step - 1, 0.5):.1f}" '
        f'height="{tall:.1f}"><title>{_format_number(lower)} to {_format_number(upper)}: {count:,}</title></rect>'
    )


def _choose_labelled_edges(histogram: Histogram) -> list[int]:
    """Choose the edges to write below the axis: evenly spaced from the first, about eight."""
    bars = len(histogram.counts)
    return list(range(0, bars, max(ceil(bars / 8), 1)))


def _draw_limit_mark(histogram: Histogram, left: int, step: float, top: int, bottom: int) -> list[str]:
    if histogram.limit is None or not histogram.counts:
        return []
    place = _locate_value(histogram.edges, histogram.limit)
    x = left + place * step
    beyond = " →" if histogram.limit > histogram.edges[-1] else ""
    anchor = "start" if place < len(histogram.counts) / 2 else "end"
    return [
        f'<path stroke="{MARK}" stroke-dasharray="4 3" d="M{x:.1f} {top - 6}V{bottom}"/>',
        _draw_text(
            x + (4 if anchor == "start" else -4), top, f"limit {_format_number(histogram.limit)}{beyond}", anchor
        ),
    ]


def _locate_value(edges: Sequence[float], value: float) -> float:
    """Return a value's position in bins from the left; the right end for values beyond it."""
    for i, (lower, upper) in enumerate(pairwise(edges)):
        if value < upper:
            return i + max(value - lower, 0) / (upper - lower)
    return len(edges) - 1


def draw_bars_svg(title: str, items: Sequence[tuple[str, float]], *, unit: str = "", width: int = 640) -> str:
    """Draw named values as horizontal bars with their numbers at the right."""
    line, top, names, numbers = 20, 30, 190, 110
    highest = max((value for _, value in items), default=0) or 1
    room = width - names - numbers - 16
    parts = [_draw_text(8, 16, f"{title} ({unit})" if unit else title, "start")]
    for i, (name, value) in enumerate(items):
        y = top + i * line
        length = max(room * value / highest, 0)
        parts += [
            _draw_text(names - 6, y + 12, _shorten_label(name, 28), "end"),
            f'<rect fill="{BAR}" x="{names}" y="{y}" width="{length:.1f}" height="{line - 5}"/>',
            _draw_text(names + length + 6, y + 12, _format_number(value), "start"),
        ]
    return _wrap_svg(width, top + line * len(items) + 6, title, parts)


def _wrap_svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="system-ui, sans-serif" font-size="11" '
        f'fill="{INK}"><title>{escape(title)}</title>'
        f'<rect width="{width}" height="{height}" rx="4" fill="{PANEL}"/>{"".join(parts)}</svg>'
    )


def _draw_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def draw_histogram_text(histogram: Histogram, *, width: int = 72, lines: int = 24) -> str:
    """Draw a histogram for a terminal, one bin per line, with a rule at the limit.

    Neighbouring bins are merged until about `lines` remain, but never across the limit.
    """
    joined = _join_bins(histogram, lines)
    head = f"{histogram.title} ({histogram.unit})"
    ranges = [f"{_format_number(lower)} to {_format_number(upper)}" for lower, upper, _ in joined]
    drawn = draw_bars_text([(r, count) for r, (_, _, count) in zip(ranges, joined, strict=True)], width=width)
    body = drawn.splitlines()
    if histogram.limit is not None:
        below = sum(1 for lower, _, _ in joined if lower < histogram.limit)
        body.insert(below, f"── limit {_format_number(histogram.limit)} ".ljust(width, "─"))
    return "\n".join([head, *body])


def _join_bins(histogram: Histogram, lines: int) -> list[tuple[float, float, int]]:
    """Merge runs of bins; a new run starts at the limit."""
    bins = list(zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False))
    run = max(ceil(len(bins) / lines), 1)
    below = sum(1 for lower, _, _ in bins if histogram.limit is not None and lower < histogram.limit)
    starts = sorted({*range(0, below, run), *range(below, len(bins), run)})
    ends = [*starts[1:], len(bins)]
    return [
        (bins[a][0], bins[b - 1][1], sum(count for _, _, count in bins[a:b]))
        for a, b in zip(starts, ends, strict=False)
    ]


def draw_bars_text(items: Sequence[tuple[str, float]], *, width: int = 72) -> str:
    """Draw named values as lines of block characters, to an eighth of a cell."""
    if not items:
        return ""
    names = min(max(len(name) for name, _ in items), width // 2)
    numbers = max(len(_format_number(value)) for _, value in items)
    room = max(width - names - numbers - len(" │ "), 1)
    highest = max(value for _, value in items) or 1
    return "\n".join(
        (
            f"{_shorten_label(name, names):>{names}} │{_draw_blocks(value / highest, room)} {_format_number(value)}"
        ).rstrip()
        for name, value in items
    )


def _draw_blocks(share: float, room: int) -> str:
    eighths = floor(max(share, 0) * room * 8 + 0.5)
    if share > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, 8)
    return BLOCKS[8] * whole + (BLOCKS[rest] if rest else "")


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.3g}"


def _shorten_label(label: str, max_chars: int) -> str:
    # A name from data may hold a line break or an escape sequence for the terminal.
    shown = "".join(character if character.isprintable() else "�" for character in label)
    return shown if len(shown) <= max_chars else f"{shown[: max_chars - 1]}…"
