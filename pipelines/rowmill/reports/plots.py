"""Plots of counts: SVG for pages, block characters for terminals.

There is no plotting library: a histogram is forty rectangles, and importing a library takes longer than the stage that
it draws.

Every plot is self-contained (no script, style sheet or external address). Its colours are a page's own variables where
a page has them, and else those of a light background, which is readable on dark pages as well. Text from data is
escaped.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from rowmill.core.html import choose_role, link_text
from rowmill.reports.build_view import sum_token_classes
from rowmill.schema.manifest import Histogram, Manifest

INK, PANEL, BAR, OVER, MARK, GRID = (
    "var(--ink, #1f2933)",
    "var(--panel, #ffffff)",
    "#4c78a8",
    "#e45756",
    "var(--bad, #b3261e)",
    "var(--line, #dde3e8)",
)

BLOCKS = " ▏▎▍▌▋▊▉█"
"""Eighths of a character cell, from nothing to all of it."""

DRAWN_COLUMNS = {"files": "records", "ranks": "trained_tokens"}
"""Tables that are drawn as well, one bar for each row, and the column that gives its length."""

MAX_PLOTTED_BARS = 30


def draw_plots(
    output: Manifest,
    *,
    width: int = 640,
    link: Callable[[str, float, float], str] = lambda _, __, ___: "",
    link_bar: Callable[[str, str], str] = lambda _, __: "",
) -> dict[str, str]:
    """Draw what an output has to draw as SVG, by name: its tokens by class, its histograms, and some of its tables.

    `link` returns the address of a histogram's bar, given the histogram's name and the bar's range; `link_bar` that of
    a bar with a name, given the plot's.
    """
    drawn: dict[str, str] = {}
    classes = sum_token_classes(output)
    if any(classes.values()):
        name = "token_classes"
        drawn[name] = draw_bars_svg("Tokens by class", list(classes.items()), width=width, link=partial(link_bar, name))
    for name, histogram in output.histograms.items():
        if sum(histogram.counts):
            drawn[name] = draw_histogram_svg(histogram, width=width, link=partial(link, name))
    for name, column in DRAWN_COLUMNS.items():
        table = output.tables.get(name)
        if table is not None and column in table.columns and table.rows:
            at = table.columns.index(column)
            bars = [(str(row[0]), float(row[at])) for row in table.rows[:MAX_PLOTTED_BARS]]
            title = f"{column.replace('_', ' ')} of {name}"
            drawn[name] = draw_bars_svg(title, bars, width=width, link=partial(link_bar, name))
    return drawn


def draw_histogram_svg(
    histogram: Histogram, *, width: int = 640, height: int = 240, link: Callable[[float, float], str] = lambda _, __: ""
) -> str:
    """Draw a histogram with bars of equal width, bars past the limit in another colour, and the limit marked.

    Bins may differ in width (the last one holds the far tail), so the axis counts bins, and a round number is placed
    where its bin has it. A tooltip on every bar gives its range and count, and `link` returns its address.
    """
    highest = max(histogram.counts, default=0) or 1
    levels = [at for at in choose_round_ticks(0, highest, 4)[1:] if at == round(at)]
    left, top, bottom = 8 + 7 * max((len(_format_number(at)) for at in levels), default=0), 34, height - 26
    step = (width - left - 8) / max(len(histogram.counts), 1)
    scale = (bottom - top) / highest
    grid = [
        f'<path stroke="{GRID}" d="M{left} {(y := bottom - scale * at):.1f}H{width - 8}"/>'
        + _draw_text(left - 5, y + 4, _format_number(at), "end")
        for at in levels
    ]
    drawn: list[str] = []
    for i, count in enumerate(histogram.counts):
        if count:
            lower, upper, tall = histogram.edges[i], histogram.edges[i + 1], max(scale * count, 1)
            colour = OVER if histogram.limit is not None and lower >= histogram.limit else BAR
            bar = (
                f'<rect fill="{colour}" x="{left + i * step + 0.5:.1f}" y="{bottom - tall:.1f}" '
                f'width="{max(step - 1, 0.5):.1f}" height="{tall:.1f}"><title>{_format_number(lower)} to '
                f"{_format_number(upper)}: {count:,}</title></rect>"
            )
            drawn.append(link_text(bar, link(lower, upper)))
    drawn.append(f'<path stroke="{INK}" d="M{left} {bottom}.5H{width - 8}"/>')
    edges, ticks = histogram.edges, list[float]()
    if len(edges) > 1:
        # A last bin that holds a far tail gets no tick.
        has_tail = len(edges) > 2 and edges[-1] - edges[-2] > 1.5 * (edges[1] - edges[0])
        ticks = choose_round_ticks(edges[0], edges[-2] if has_tail else edges[-1], max(2, (width - left) // 48))
    is_counted = all(edge == round(edge) for edge in edges)
    for at in (at for at in ticks if not is_counted or at == round(at)):
        x, label = left + _locate_value(histogram.edges, at) * step, _format_number(at)
        # The number below the tick stays inside the picture.
        half = 3.5 * len(label)
        drawn.append(f'<path stroke="{INK}" d="M{x:.1f} {bottom}v4"/>')
        drawn.append(_draw_text(max(half, min(x, width - half)), bottom + 15, label, "middle"))
    if histogram.limit is not None and histogram.counts:
        place = _locate_value(histogram.edges, histogram.limit)
        x, is_left = left + place * step, place < len(histogram.counts) / 2
        label = f"limit {_format_number(histogram.limit)}{' →' if histogram.limit > histogram.edges[-1] else ''}"
        drawn += [
            f'<path stroke="{MARK}" stroke-dasharray="4 3" d="M{x:.1f} {top - 6}V{bottom}"/>',
            _draw_text(x + (4 if is_left else -4), top, label, "start" if is_left else "end"),
        ]
    heading = f"{histogram.title} ({histogram.unit}): {sum(histogram.counts):,} total"
    return _wrap_svg(width, height, histogram.title, [_draw_text(8, 16, heading, "start"), *grid, *drawn])


def choose_round_ticks(lowest: float, highest: float, most: int) -> list[float]:
    """Return at most `most` + 1 multiples of 1, 2 or 5 times a power of ten within a range, evenly spaced."""
    if highest <= lowest or most < 1:
        return []
    step = 10.0 ** floor(log10((highest - lowest) / most))
    step = next(step * factor for factor in (1, 2, 5, 10, 20) if (highest - lowest) / (step * factor) <= most)
    first, last = ceil(lowest / step - 1e-9), floor(highest / step + 1e-9)
    return [round(at * step, 12) for at in range(first, last + 1)]


def _locate_value(edges: Sequence[float], value: float) -> float:
    """Return a value's position in bins from the left; the right end for values beyond it."""
    for i, (lower, upper) in enumerate(pairwise(edges)):
        if value < upper:
            return i + max(value - lower, 0) / (upper - lower)
    return len(edges) - 1


def draw_bars_svg(
    title: str,
    items: Sequence[tuple[str, float]],
    *,
    unit: str = "",
    width: int = 640,
    link: Callable[[str], str] = lambda _: "",
) -> str:
    """Draw named values as horizontal bars with their numbers at the right; `link` returns the address of a bar."""
    line, top, names, numbers = 20, 30, 190, 110
    highest = max((value for _, value in items), default=0) or 1
    room = width - names - numbers - 16
    parts = [_draw_text(8, 16, f"{title} ({unit})" if unit else title, "start")]
    for i, (name, value) in enumerate(items):
        y = top + i * line
        length = max(room * value / highest, 0)
        bar = (
            _draw_text(names - 6, y + 12, _shorten_label(name, 28), "end"),
            f'<rect fill="{BAR}" x="{names}" y="{y}" width="{length:.1f}" height="{line - 5}"/>',
            _draw_text(names + length + 6, y + 12, _format_number(value), "start"),
        )
        parts.append(link_text("".join(bar), link(name)))
    return _wrap_svg(width, top + line * len(items) + 6, title, parts)


def draw_lines_svg(
    title: str,
    lines: Mapping[str, Sequence[tuple[int, float]]],
    *,
    dashed: Collection[str] = (),
    link: Callable[[int], str] = lambda _: "",
    width: int = 640,
    height: int = 200,
) -> str:
    """Draw values over whole numbers such as steps: a line for each name, with a point for each value.

    `dashed` names the lines that others are compared with; they have no points. `link` returns the address of a point.
    """
    places = [place for of_name in lines.values() for place in of_name]
    xs, ys = [x for x, _ in places] or [0], [y for _, y in places] or [0.0]
    low, high = min(0.0, *ys), max(*ys, 0.0) or 1.0
    levels = choose_round_ticks(low, high, 4)
    left, top, bottom = 8 + 7 * max((len(_format_number(at)) for at in levels), default=0), 34, height - 26
    span = max(xs) - min(xs)

    def locate(x: int, y: float) -> tuple[float, float]:
        across = left + 8 + (width - left - 24) * ((x - min(xs)) / span if span else 0.5)
        return across, bottom - (bottom - top) * (y - low) / (high - low)

    drawn = [_draw_text(8, 16, title, "start")]
    for at in levels:
        y = locate(min(xs), at)[1]
        drawn += [f'<path stroke="{GRID}" d="M{left} {y:.1f}H{width - 8}"/>']
        drawn += [_draw_text(left - 5, y + 4, _format_number(at), "end")]
    ticks = [at for at in choose_round_ticks(min(xs), max(xs), 8) if at == round(at)] or [min(xs)]
    drawn += [_draw_text(locate(int(at), low)[0], bottom + 15, _format_number(at), "middle") for at in ticks]
    for name, of_name in lines.items():
        is_dashed = name in dashed
        style = f'stroke="{INK}" stroke-dasharray="4 3" opacity=".6"' if is_dashed else f'stroke="{BAR}"'
        points = [(x, y, *locate(x, y)) for x, y in of_name]
        path = "L".join(f"{across:.1f} {down:.1f}" for _, _, across, down in points)
        drawn.append(f'<path fill="none" {style} d="M{path}"><title>{escape(name)}</title></path>' if points else "")
        for x, y, across, down in () if is_dashed else points:
            point = f'<circle fill="{BAR}" cx="{across:.1f}" cy="{down:.1f}" r="4"><title>{escape(name)}, {x}: {y:.4g}'
            drawn.append(link_text(f"{point}</title></circle>", link(x)))
    return _wrap_svg(width, height, title, drawn)


def _wrap_svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    markup = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="{choose_role(markup)}" font-family="system-ui, sans-serif" '
        f'font-size="11" fill="{INK}"><title>{escape(title)}</title>'
        f'<rect width="{width}" height="{height}" rx="4" fill="{PANEL}"/>{markup}</svg>'
    )


def _draw_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def draw_histogram_text(histogram: Histogram, *, width: int = 72, lines: int = 24) -> str:
    """Draw a histogram for a terminal, one bin per line, with a rule at the limit.

    Neighbouring bins are merged until about `lines` remain, but never across the limit.
    """
    bins = list(zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False))
    run = max(ceil(len(bins) / lines), 1)
    below = sum(1 for lower, _, _ in bins if histogram.limit is not None and lower < histogram.limit)
    starts = sorted({*range(0, below, run), *range(below, len(bins), run)})
    bars = [
        (
            f"{_format_number(bins[first][0])} to {_format_number(bins[end - 1][1])}",
            sum(count for _, _, count in bins[first:end]),
        )
        for first, end in zip(starts, [*starts[1:], len(bins)], strict=False)
    ]
    body = draw_bars_text(bars, width=width).splitlines()
    if histogram.limit is not None:
        rule = f"── limit {_format_number(histogram.limit)} ".ljust(width, "─")
        body.insert(sum(start < below for start in starts), rule)
    return "\n".join([f"{histogram.title} ({histogram.unit})", *body])


def draw_bars_text(items: Sequence[tuple[str, float]], *, width: int = 72) -> str:
    """Draw named values as lines of block characters, to an eighth of a cell."""
    if not items:
        return ""
    names = min(max(len(name) for name, _ in items), width // 2)
    numbers = max(len(_format_number(value)) for _, value in items)
    room = max(width - names - numbers - len(" │ "), 1)
    highest = max(value for _, value in items) or 1
    lines: list[str] = []
    for name, value in items:
        eighths = floor(max(value / highest, 0) * room * 8 + 0.5)
        whole, rest = divmod(max(eighths, 1) if value / highest > 0 else eighths, 8)
        bar = BLOCKS[8] * whole + (BLOCKS[rest] if rest else "")
        lines.append(f"{_shorten_label(name, names):>{names}} │{bar} {_format_number(value)}".rstrip())
    return "\n".join(lines)


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.3g}"


def _shorten_label(label: str, max_chars: int) -> str:
    # A name from data may hold a line break or an escape sequence for the terminal.
    shown = "".join(character if character.isprintable() else "�" for character in label)
    return shown if len(shown) <= max_chars else f"{shown[: max_chars - 1]}…"
