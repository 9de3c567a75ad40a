"""Draws the pipeline from the engine's own list of stages: docs/images/pipeline.svg, and a narrow one for phones.

    python -m docs.generate.reference      writes both, with the other generated files

A stage is a row: its node on a rail, its name, and the sentence that describes its output. Solid lines lead from a
stage to those that read it, dashed ones to a stage that waits for its checks. An input behind another input has no line
of its own. A picture follows the colour scheme of its page, and brings its own ground where a host does not pass it on.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rowmill.stages.base import StageDeclaration
from rowmill.stages.catalog import STAGES

LANES = (30, 52, 74)
"""Pixels from the left of the rails: every build's stages up to the last, stages beside them, stages on demand."""
LINE, PADDING, BAND_HEAD, BAND_GAP = 17, 12, 30, 10
"""Heights in pixels: a line of text, the space below a row, a band's title, the space between bands."""
STYLE = """
:root { color-scheme: light dark }
.ground { fill: #ffffff } .band { fill: #f3f5f8 } .name, .title { fill: #1b1f27 } .text, .side { fill: #4d5666 }
.rail { fill: none; stroke: #3f7a4f; stroke-width: 2 } .waits { stroke-dasharray: 3 3 }
.rail.beside, .rail.demand { stroke: #8a94a6 } .rail.demand { stroke-dasharray: 1 4; stroke-linecap: round }
.node { fill: #3f7a4f } .node.beside { fill: #8a94a6 } .node.demand { fill: #f3f5f8; stroke: #8a94a6; stroke-width: 2 }
.end { fill: #ffffff; stroke: #3f7a4f; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
.ground { fill: #14171d } .band { fill: #1e232c } .name, .title { fill: #e8ebf0 } .text, .side { fill: #a9b2c1 }
.rail { stroke: #6fb583 } .node { fill: #6fb583 } .node.demand { fill: #1e232c } .end { fill: #14171d; stroke: #6fb583 }
}
"""
SOURCE = ("your data", "Files in a folder, on object storage or on Hugging Face.")
TRAINER = ("your trainer", "Reads its partition with Reader, or an export with its own loader.")


@dataclass(frozen=True, slots=True)
class Layout:
    """Widths in pixels of a picture; `text_left` is None where sentences are below the names."""

    width: int
    name_left: int
    text_left: int | None
    line_length: int
    """Characters of a line of text."""

    @property
    def text_x(self) -> int:
        """Where sentences begin."""
        return self.name_left if self.text_left is None else self.text_left


LAYOUTS = {
    "docs/images/pipeline.svg": Layout(760, 96, 262, 68),
    "docs/images/pipeline-narrow.svg": Layout(380, 92, None, 38),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the picture; `stage` is None for what is outside of the engine."""

    name: str
    lines: Sequence[str]
    lane: int
    top: int
    stage: StageDeclaration | None = None

    @property
    def center(self) -> int:
        """The height of its node."""
        return self.top + 8


def find_direct_inputs(stage: StageDeclaration) -> list[str]:
    """Return the inputs of a stage that none of its other inputs is made of."""
    behind = {name for other in stage.inputs for name in list_ancestors(other)}
    return [name for name in stage.inputs if name not in behind]


def list_ancestors(name: str) -> set[str]:
    """Return the names of all stages that a stage is made of."""
    inputs = next(stage.inputs for stage in STAGES if stage.name == name)
    return {*inputs, *(ancestor for one in inputs for ancestor in list_ancestors(one))}


def wrap_evenly(text: str, limit: int) -> list[str]:
    """Return the fewest lines of at most so many characters, as equal in length as they can be."""
    lines = textwrap.wrap(text, limit, break_on_hyphens=False)
    while limit > 1 and len(shorter := textwrap.wrap(text, limit - 1, break_on_hyphens=False)) == len(lines):
        lines, limit = shorter, limit - 1
    return lines


def render_pictures() -> dict[str, str]:
    """Return both pictures by their path in the project."""
    return {path: draw(layout) for path, layout in LAYOUTS.items()}


def draw(layout: Layout) -> str:
    """Return the picture as SVG."""
    rows: dict[str, Row] = {}
    bands: list[tuple[str, int, int]] = []
    last = next(stage for stage in STAGES if stage.name == "gpu_partitions")
    trunk = {last.name, *list_ancestors(last.name)}
    top = PADDING

    def add_row(name: str, text: str, lane: int, stage: StageDeclaration | None = None) -> None:
        nonlocal top
        lines = wrap_evenly(text, layout.line_length)
        rows[name] = Row(name, lines, lane, top, stage)
        top += (len(lines) + (layout.text_left is None)) * LINE + PADDING

    def add_band(title: str, stages: Sequence[StageDeclaration]) -> None:
        nonlocal top
        begin = top
        top += BAND_HEAD
        for stage in stages:
            text = f"{stage.description} Run by rowmill {stage.command}." if stage.command else stage.description
            add_row(stage.name, text, 2 if stage.on_demand else int(stage.name not in trunk), stage)
        bands.append((title, begin, top))
        top += BAND_GAP

    add_row(*SOURCE, 0)
    add_band("for each dataset", [stage for stage in STAGES if stage.scope == "dataset" and not stage.on_demand])
    add_band("for the recipe", [stage for stage in STAGES if stage.scope != "dataset" and not stage.on_demand])
    top += BAND_GAP
    add_row(*TRAINER, 0)
    add_band("on demand, with a model", [stage for stage in STAGES if stage.on_demand])
    return "\n".join(_render(layout, rows, bands, top)) + "\n"


def _render(layout: Layout, rows: dict[str, Row], bands: Sequence[tuple[str, int, int]], height: int) -> Iterator[str]:
    """Yield the lines of the SVG: ground, bands, rails, nodes, and texts above them all."""
    label = "The pipeline: " + ", ".join(stage.name for stage in STAGES)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{layout.width}" height="{height}" '
        f'viewBox="0 0 {layout.width} {height}" role="img" aria-label="{escape(label)}" '
        'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="13">'
    )
    yield f"<style>{STYLE}</style>"
    yield f'<rect class="ground" width="{layout.width}" height="{height}" rx="8"/>'
    for title, begin, end in bands:
        yield f'<rect class="band" x="8" y="{begin}" width="{layout.width - 16}" height="{end - begin}" rx="6"/>'
        right = layout.width - 18
        yield f'<text class="side" x="{right}" y="{begin + 19}" text-anchor="end" font-size="12">{title}</text>'
    yield from _render_rails(rows)
    for row in rows.values():
        kind = ("end" if row.stage is None else "node") + ("", " beside", " demand")[row.lane]
        yield f'<circle class="{kind}" cx="{LANES[row.lane]}" cy="{row.center}" r="5"/>'
        font = ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"' if row.stage else ""
        yield f'<text class="name" x="{layout.name_left}" y="{row.top + 13}" font-weight="600"{font}>{row.name}</text>'
        first = row.top + 13 + (LINE if layout.text_left is None else 0)
        for number, line in enumerate(row.lines):
            yield f'<text class="text" x="{layout.text_x}" y="{first + number * LINE}">{escape(line)}</text>'
    yield "</svg>"


def _render_rails(rows: dict[str, Row]) -> Iterator[str]:
    """Yield a line from each stage to those that read it, and to those that wait for its checks."""
    for row in rows.values():
        if row.stage is None:
            continue
        names = find_direct_inputs(row.stage) or [SOURCE[0]]
        for origin in (rows[name] for name in names):
            yield _connect(origin, row, ("", " beside", " demand")[max(origin.lane, row.lane)])
        for origin in (rows[name] for name in row.stage.gates):
            yield _connect(origin, row, " beside waits")
    yield _connect(rows["gpu_partitions"], rows[TRAINER[0]], "")
    yield _connect(rows["exports"], rows[TRAINER[0]], " beside")


def _connect(origin: Row, target: Row, kind: str) -> str:
    """Return a rail that leaves its lane just below the origin, or reaches the other just above the target."""
    start, end = LANES[origin.lane], LANES[target.lane]
    begin, stop = origin.center + 5, target.center - 5
    if target.lane >= origin.lane:
        path = f"M{start} {begin} C{start} {begin + 14} {end} {begin + 4} {end} {begin + 20} V{stop}"
    else:
        path = f"M{start} {begin} V{stop - 20} C{start} {stop - 4} {end} {stop - 14} {end} {stop}"
    if start == end:
        path = f"M{start} {begin} V{stop}"
    return f'<path class="rail{kind}" d="{path}"/>'
