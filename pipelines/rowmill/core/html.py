"""Render self-contained HTML pages: one file with its style inside, readable offline, in dark mode and on paper.

A page's content security policy forbids all requests, and text from data is never markup: it only enters a page
through `escape`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from rowmill.core import console

CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --paper: #fff; --dim: #667380; --line: #dde3e8; --soft: #f5f7f9;
  --good: #1a7f37; --look: #8a5a00; --bad: #b3261e; --link: #2b5f9e }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #dfe5ea; --paper: #14191e; --dim: #94a1ad;
  --line: #2d363e; --soft: #1c2329; --good: #57c273; --look: #e0a53b; --bad: #ff8a80; --link: #8fbcf0 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .75rem;
  border-top: 1px solid var(--line) } h3 { font-size: 1rem; margin: 1.5rem 0 .4rem }
a { color: var(--link) } code, pre, .text { font: 13px/1.55 ui-monospace, monospace }
.dim { color: var(--dim) } .good { color: var(--good) } .look { color: var(--look) } .bad { color: var(--bad) }
.scroll { overflow-x: auto } table { border-collapse: collapse; margin: .4rem 0 1rem; font-size: 14px }
th, td { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line) }
th { color: var(--dim); font-weight: 500 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.plots { display: flex; flex-wrap: wrap; gap: .75rem; margin: .5rem 0 1rem }
.plots svg { max-width: 100%; height: auto }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .6rem .8rem;
  margin: .3rem 0 1rem; border-radius: 4px } nav a { margin-right: 1rem }
@media print { :root { color-scheme: light } .scroll { overflow: visible }
  body { max-width: none; padding: 0; font-size: 10pt }
  nav, .tools { display: none }
  h2, h3, tr, .plots svg { break-inside: avoid } h2, h3 { break-after: avoid }
  a { color: inherit; text-decoration: none } }
"""


def render_page(title: str, body: Iterable[str], *, style: str = "", script: str = "") -> str:
    """Return a complete page; `body` is markup, `title` is plain text."""
    run = f"<script>{script}</script>" if script else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body>\n"
        + "\n".join(body)
        + f"\n{run}</body></html>\n"
    )


def escape_text(value: object) -> str:
    """Escape text for markup, with control characters as visible symbols."""
    return escape(console.escape_control_characters(str(value)))


def mark_code(text: str) -> str:
    """Escape a sentence for markup; what it has between backticks is code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", escape_text(text))


def link_text(markup: str, address: str) -> str:
    """Return markup as a link; without an address, as it is."""
    return f'<a href="{escape(address)}">{markup}</a>' if address else markup


def choose_role(drawing: str) -> str:
    """Return the role of a drawing: with links it is a group, since a screen reader finds nothing inside an image."""
    return "group" if "<a " in drawing else "img"


def render_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    link: Callable[[str, Mapping[str, object]], str] = lambda _, __: "",
    show: Callable[[str], str] = escape_text,
) -> str:
    """Return a table; columns of numbers are right-aligned.

    `link` returns the address of a cell, given its column and its row, and `show` the markup of a cell's text.
    """

    def render_cell(name: str, cell: object, row: Sequence[object]) -> str:
        address = "" if cell is None else link(name, dict(zip(columns, row, strict=True)))
        text = console.format_value(cell)
        return link_text(escape_text(text), address) if address else show(text)

    held = [list(row) for row in rows]
    right = [bool(held) and all(isinstance(row[i], int | float) for row in held) for i in range(len(columns))]
    kinds = [' class="number"' if one else "" for one in right]
    head = "".join(
        f"<th{kind}>{escape_text(name.replace('_', ' '))}</th>" for name, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}>{render_cell(name, cell, row)}</td>"
            for name, cell, kind in zip(columns, row, kinds, strict=True)
        )
        + "</tr>"
        for row in held
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def clip_text(text: str, max_bytes: int) -> str:
    """Truncate a text to at most `max_bytes` of markup, and append its length."""
    if len(text) * 6 <= max_bytes or len(escape_text(text).encode()) <= max_bytes:
        return text
    low, high = 0, min(len(text), max_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(escape_text(text[:middle]).encode()) <= max_bytes else (low, middle - 1)
    return f"{text[:low]} … ({len(text):,} characters)"
