"""Plots of a few hundred characters, for pages that show short Markdown only: one outline, or a handful of bars.

They are as wide as Dagster shows of a value beside the longest key in a window of 1440 pixels: 784 for its table, less
260 for the keys, 150 for the times and 24 for the edges. A wider picture is cut at its right; a narrower window still
shows names and numbers, which are at the left.

Colours are readable on light and dark pages. Text from data is escaped, and percent-encoded with everything else.
"""

import math
from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from rowmill.schema.manifest import Histogram

WIDTH, HEIGHT = 340, 150
BARS_LEFT = 190
FONT_SIZE = 13
BAR, OVER, INK = "#4c78a8", "#e45756", "#789"
SAFE_CHARACTERS = "'=/:,;+-._"
"""Characters that stand for themselves in a data URI and in the address of a Markdown image."""


def join_counts(counts: Sequence[int], max_bars: int) -> list[int]:
    """Merge neighbouring counts until at most `max_bars` remain; the sum is preserved."""
    run = max(1, math.ceil(len(counts) / max_bars))
    return [sum(counts[i : i + run]) for i in range(0, len(counts), run)]


def make_inline_uri(svg: str) -> str:
    """Return an SVG as a data URI; percent-encoded, it is shorter than in base64."""
    return f"data:image/svg+xml,{quote(svg, safe=SAFE_CHARACTERS)}"


def draw_inline_histogram(histogram: Histogram, *, max_bars: int = 40) -> str:
    """Draw a histogram as one outline, with its title and its outer edges; bars past the limit in another colour."""
    counts = join_counts(histogram.counts, max_bars)
    run = math.ceil(len(histogram.counts) / len(counts))
    step, base, top = WIDTH // len(counts), HEIGHT - 20, 24
    highest = max(counts, default=0) or 1
    heights = [max(2, round((base - top) * count / highest)) if count else 0 for count in counts]
    split = len(counts)
    if histogram.limit is not None:
        limit = histogram.limit
        split = next((i for i in range(len(counts)) if histogram.edges[i * run] >= limit), len(counts))
    below = _draw_outline(heights[:split], 0, step, base, BAR)
    above = _draw_outline(heights[split:], split * step, step, base, OVER)
    limit_text = "" if histogram.limit is None else f", limit {_format_edge(histogram.limit)}"
    title = _draw_label(0, 15, f"{histogram.title}, {histogram.unit}{limit_text}")
    first, last = _draw_label(0, HEIGHT - 4, _format_edge(histogram.edges[0])), _format_edge(histogram.edges[-1])
    return _wrap(HEIGHT, title + below + above + first + _draw_label(WIDTH, HEIGHT - 4, last, end=True))


def draw_inline_bars(items: Sequence[tuple[str, float]], *, max_bars: int = 5) -> str:
    """Draw named values as horizontal bars with their numbers; the smaller ones beyond `max_bars` are one bar."""
    shown = list(items)
    if len(shown) > max_bars:
        shown = [*shown[: max_bars - 1], ("others", sum(value for _, value in shown[max_bars - 1 :]))]
    highest = max((value for _, value in shown), default=0) or 1
    names = numbers = bars = ""
    for i, (name, value) in enumerate(shown):
        y = 24 * i
        wide = max(2 if value else 0, round((WIDTH - BARS_LEFT) * value / highest))
        names += _draw_label(0, y + 15, name[:20])
        numbers += _draw_label(BARS_LEFT - 8, y + 15, f"{value:,.12g}")
        bars += f"M{BARS_LEFT} {y + 2}h{wide}v17h-{wide}z"
    # One group and one path for all lines: each attribute said again would cost a line.
    drawn = f"{names}<g text-anchor='end'>{numbers}</g><path fill='{BAR}' d='{bars}'/>"
    return _wrap(24 * max(len(shown), 1), drawn)


def _draw_outline(heights: Sequence[int], left: int, step: int, base: int, colour: str) -> str:
    if not any(heights):
        return ""
    path, last = f"M{left} {base}", None
    for height in heights:
        path += f"h{step}" if height == last else f"V{base - height}h{step}"
        last = height
    return f"<path fill='{colour}' d='{path}V{base}z'/>"


def _draw_label(x: int, y: int, text: str, *, end: bool = False) -> str:
    anchor = " text-anchor='end'" if end else ""
    place = f" x='{x}'" if x else ""
    return f"<text{place} y='{y}'{anchor}>{escape(text)}</text>"


def _wrap(height: int, drawn: str) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' font-family='Arial' "
        f"font-size='{FONT_SIZE}' fill='{INK}'>{drawn}</svg>"
    )


def _format_edge(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"
