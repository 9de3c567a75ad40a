"""A sealed object is read as it was written, in either form, and no changed or cut one is."""

from typing import Any

import orjson
import pyarrow as pa
import pytest

from rowmill.core import json
from rowmill.core.json import parse_sealed, seal_object

LIST: dict[str, Any] = {"parts": {f"{i:032x}": {"rows": i, "ratio": i / 7} for i in range(40)}, "name": "größe"}


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(json, "COMPRESSED_FROM_BYTES", 1000)
    return seal_object(LIST, compresses=True)


def test_large_list_is_compressed_and_read_back_whole_or_not_at_all(compressed: bytes) -> None:
    assert len(compressed) < len(orjson.dumps(LIST)) / 2
    assert parse_sealed(compressed) == LIST
    assert [parse_sealed(compressed[:end]) for end in (5, 100, -1)] == [None] * 3


def test_small_list_and_what_others_read_stay_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    small = seal_object(LIST, compresses=True)
    monkeypatch.setattr(json, "COMPRESSED_FROM_BYTES", 1)
    plain = seal_object(LIST, compresses=False)

    assert small == plain
    assert plain.startswith(b'{\n  "parts": {\n')
    assert parse_sealed(plain) == LIST


def test_list_of_an_earlier_version_is_read_and_text_that_is_no_object_is_not() -> None:
    """Bytes as they were written before lists were compressed."""
    seal = b"64457a9bf1a7d9c2ba713f9fee6fcc46"
    earlier = b'{\n  "parts": {\n    "a1": {\n      "rows": 3\n    }\n  },\n  "seal": "' + seal + b'"\n}'

    assert parse_sealed(earlier) == {"parts": {"a1": {"rows": 3}}}
    for text in (b"", b"[]", b"{}", b'{"a":1}'):
        assert parse_sealed(pa.Codec("zstd").compress(text, asbytes=True)) is None


@pytest.mark.parametrize(
    ("found", "changed"),
    [(b'"rows":7', b'"rows":8'), (b'"seal":"', b'"soul":"'), (b',"name"', b',"nama"')],
)
def test_changed_list_is_not_read(compressed: bytes, found: bytes, changed: bytes) -> None:
    with pa.CompressedInputStream(pa.BufferReader(compressed), "zstd") as stream:
        text = stream.read()

    assert found in text
    assert parse_sealed(pa.Codec("zstd").compress(text.replace(found, changed, 1), asbytes=True)) is None
    assert parse_sealed(pa.Codec("zstd").compress(text, asbytes=True)) == LIST
