"""Print to a terminal: a console, formatted values, columns, and escaped data.

Each colour has one meaning: green is good, yellow asks for a look, red blocks, dim is context. A mark (✓ ! ✗) has the
same meaning where there is no colour.
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rowmill.core.arrays import NO_NUMBER

UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that move a terminal's cursor, ring its bell or reverse its text."""

PIPE_WIDTH = 1 << 20
"""Columns when the output is not a terminal: a program that reads it needs whole lines."""

LABEL_CELLS = 11
"""Columns for a fact's name."""

GOOD, LOOK, BAD, DIM, HEAD = "green", "yellow", "red", "dim", "bold"


def make_console(stream: TextIO | None = None) -> Console:
    """Return a console on a stream, standard output by default; colours only on a terminal without NO_COLOR."""
    target = stream or sys.stdout
    width = None if target.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(file=target, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


def render_text(shown: RenderableType) -> str:
    """Return what standard output would show, with its colours if it has any."""
    screen = make_console()
    with screen.capture() as captured:
        screen.print(shown)
    return captured.get().rstrip("\n")


def escape_control_characters(text: str) -> str:
    """Return text from data with its control characters as symbols or escapes; newlines and tabs stay."""
    return UNPRINTABLE.sub(_escape_control_character, text)


def _escape_control_character(found: re.Match[str]) -> str:
    code = ord(found.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"\\u{code:04x}"


# ── Values and layout ──────────────────────────────────────────────────────────────────────────────


def format_value(value: object) -> str:
    """Format a number for people: `1,342`, `0.0547`; other values are unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else escape_control_characters(str(value))
    whole = isinstance(value, int) or (value.is_integer() and abs(value) < 1e15)
    return f"{value:,.0f}" if whole else f"{value:,.4g}"


def join_side_by_side(first: Text, rest: Text, *, cells: int | None = None) -> RenderableType:
    """Put two texts side by side; a long second one wraps below its own beginning."""
    row = Table.grid(padding=(0, 0 if cells else 2, 0, 0), pad_edge=False)
    row.add_column(width=cells, no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(first, rest)
    return row


def label_value(name: str, words: str | Text, style: str = "") -> RenderableType:
    """Put a value next to its name."""
    shown = Text(escape_control_characters(words), style) if isinstance(words, str) else words
    return Padding(join_side_by_side(Text(name, DIM), shown, cells=LABEL_CELLS), (0, 0, 0, 2), expand=False)


def make_grid(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, indent: int = 2, marked: int | None = None
) -> RenderableType:
    """Lay rows out in columns without lines, numbers right-aligned; the row numbered `marked` is highlighted."""
    # With `pad_edge` off, rich measures a table two cells too narrow and folds its widest cell.
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=DIM, show_header=any(columns))
    for i, name in enumerate(columns):
        right = bool(rows) and all(_is_number(row[i]) for row in rows)
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for i, row in enumerate(rows):
        cells = [value if isinstance(value, Text) else Text(format_value(value)) for value in row]
        table.add_row(*cells, style=HEAD if i == marked else "")
    return Padding(table, (0, 0, 0, indent), expand=False)


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return value.endswith(" %") or value == NO_NUMBER
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def format_source_line(url: str, reader: str, line: int) -> str:
    """Name a position in a source: `chats.jsonl:14`, or `tasks.parquet, record 14` if a file has no lines."""
    has_lines = reader in ("json_lines", "json_value", "plain_text")
    return f"{url}:{line}" if has_lines else f"{url}, record {line}"
