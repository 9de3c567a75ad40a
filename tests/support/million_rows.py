"""A store of a million short texts, built twice as on two nights, with a row for each question that a person asks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.recipes import LENIENT, TEXT, Built, Workspace, sentence

FILES = 10
ROWS_PER_FILE = 100_000
WORLD_SIZE = 4
LONG_EVERY = 1_000
"""One row in so many is longer than `max_length`, the more so the later it comes."""
BROKEN_FILE, BROKEN_LINE = "texts-03.jsonl", 78
"""The line that is cut off, so that nothing reads it."""
NEW_ROWS = 500
"""Rows of the file that came in between the two builds."""

OPTIONS: dict[str, Any] = {
    "seq_len": 128,
    "mixture": {"batch_size": 64},
    "partitions": {"world_size": WORLD_SIZE, "layout": "index"},
    # Warns of what truncation removes of the long rows.
    "gates": LENIENT | {"end_to_end_loss": {"at_most": 0.004, "severity": "warn"}},
}


def write_lines(first: int, count: int) -> Iterator[bytes]:
    """Yield lines of short texts that are all different; one in `LONG_EVERY` is long."""
    for i in range(first, first + count):
        words = 6 if i % LONG_EVERY else 120 + i // 20_000
        yield b'{"text": "%s"}\n' % sentence(i, words).encode()


def build_million_rows(folder: Path, root: str | None = None, *, files: int = FILES) -> tuple[Built, Built]:
    """Build a store of `files` files and another one with a further file; return both builds."""
    workspace = Workspace(folder, root)
    names: list[str] = []
    for number in range(files):
        name = f"texts-{number:02}.jsonl"
        lines = list(write_lines(number * ROWS_PER_FILE, ROWS_PER_FILE))
        if name == BROKEN_FILE:
            lines[BROKEN_LINE - 1] = b'{"text": "cut off\n'
        names.append(workspace.write(name, b"".join(lines)))
    group = {"format": TEXT, "truncation": {"max_length": 96, "overlong": "truncate"}}
    group |= {"filters": {"deduplicate": "off"}}

    def build(urls: list[str]) -> Built:
        return workspace.recipe({"texts": {"source": {"train_urls": urls}, **group}}, **OPTIONS).build()

    before = build(names)
    new = workspace.write("texts-99.jsonl", b"".join(write_lines(files * ROWS_PER_FILE, NEW_ROWS)))
    return before, build([*names, new])
