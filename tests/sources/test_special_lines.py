"""Lines that orjson handles wrongly, searched for in a whole part at once: wherever they are in it."""

from pathlib import Path

import orjson
import pytest

from tests.sources.test_sources_bad_input import read_file
from tests.support.source_files import reasons

WIDTHS = range(17)
"""More places than a word of eight bytes has."""


@pytest.mark.parametrize(
    "number", [10**18, 2**63 - 1, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, -(10**19), 10**40, 10**400]
)
def test_integer_is_exact_at_every_place(tmp_path: Path, number: int) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(f'{{"p":"{"x" * width}:","n":[0.5,{number}]}}' for width in WIDTHS))
    assert [one.value for one in read_file(path)] == [{"p": f"{'x' * width}:", "n": [0.5, number]} for width in WIDTHS]


@pytest.mark.parametrize("end", ["", "\n", " "])
def test_long_integer_at_the_end_of_a_file_is_exact(tmp_path: Path, end: str) -> None:
    path = tmp_path / "rows.jsonl"
    for width in WIDTHS:
        path.write_text(f'{{"p":"{"x" * width}","n":{2**64}}}{end}')
        assert [one.value for one in read_file(path)] == [{"p": "x" * width, "n": 2**64}]


@pytest.mark.parametrize(("depth", "reason"), [(63, None), (64, None), (65, "too_deep"), (66, "too_deep")])
def test_depth_of_a_line_does_not_depend_on_the_lines_around_it(tmp_path: Path, depth: int, reason: str | None) -> None:
    deep = b"[" * (depth - 2) + b'{"b":1}' + b"]" * (depth - 2)
    wide = orjson.dumps({"a": [[{}]] * 50})
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([wide, b'{"a":%s}' % deep, b"", b'{"a":[[1]]}', b'{"a":%s}' % deep]))
    assert reasons(read_file(path)) == [None, reason, None, reason]
