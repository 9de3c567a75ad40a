"""How large the parts of a file are, and what an append makes again."""

import io

import pytest

from rowmill.sources.parts import cut_lines, part_bytes, part_rows

pytestmark = pytest.mark.slow

NO_LIMIT = 1 << 60


def test_part_sizes_grow_with_the_offset() -> None:
    kib, gib = 1 << 10, 1 << 30
    sizes = [512 * kib, 512 * kib, 1024 * kib, 16384 * kib, 16384 * kib]
    assert [part_bytes(at) for at in (0, 25 << 20, 50 << 20, gib, 9 * gib)] == sizes
    assert [part_rows(at) for at in (0, 51200, 100000, 4 << 20, 9 << 20)] == [1024, 1024, 2000, 65536, 65536]


def test_one_percent_appended_to_a_large_file_touches_a_small_share_of_it() -> None:
    """40 MB + 1 %: new or changed bytes are at most the 1 %, one fiftieth, and the line that ends a part."""
    lines = [b'{"n": %d, "text": "%s"}\n' % (number, b"x" * 1000) for number in range(40_400)]
    old, new = (list(cut_lines(io.BytesIO(b"".join(lines[:count])), NO_LIMIT)) for count in (40_000, 40_400))
    old_contents = {part.content for part in old}
    redone = sum(part.length for part in new if part.content not in old_contents)
    assert redone < (0.01 + 1 / 50) * sum(map(len, lines)) + 2 * len(lines[0])
