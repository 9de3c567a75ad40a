"""JSON objects with a digest of themselves, their seal, by which a change is detected.

    for people    {"version": "…", …, "seal": "…"}            indented
    compressed    zstd of {"parts":{…},…,"seal":"…"}          lists of parts from 1 MiB on

The seal of an indented object is that of its values, however they are laid out; the seal of a compressed one is that of
the text before it, so that a list of 100,000 parts need not be encoded again to be read. Rejected: such lists as
Parquet (decision 34).
"""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SEAL_KEY = "seal"
"""The key of a sealed object's digest of all its other keys."""

COMPRESSED_FROM_BYTES = 1 << 20
"""The size from which an object that may be compressed is; smaller ones stay readable."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SEAL_BEGIN, _SEAL_END = f',"{SEAL_KEY}":"'.encode(), b'"}'
_SEAL_DIGITS = 32


def seal_object(value: "Mapping[str, Any] | DataclassInstance", *, compresses: bool) -> bytes:
    """Return a JSON object with its seal; a large one compressed if that is allowed.

    `orjson` writes a dataclass itself; `dataclasses.asdict` took a millisecond for the facts of a part.
    """
    content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    if compresses and len(content) >= COMPRESSED_FROM_BYTES:
        whole = b"".join((content[:-1], _SEAL_BEGIN, _compute_seal(content).encode(), _SEAL_END))
        return pa.Codec("zstd", 1).compress(whole, asbytes=True)
    plain = orjson.loads(content)
    return orjson.dumps({**plain, SEAL_KEY: _compute_seal(orjson.dumps(plain))}, option=orjson.OPT_INDENT_2)


def parse_sealed(content: bytes) -> dict[str, Any] | None:
    """Return the JSON object that `seal_object` wrote as these bytes; None if they are cut, empty or changed."""
    if content.startswith(_ZSTD_MAGIC):
        return _parse_compressed(content)
    found = _parse_object(content)
    seal = None if found is None else found.pop(SEAL_KEY, None)
    return found if found is not None and seal == _compute_seal(orjson.dumps(found)) else None


def _parse_compressed(content: bytes) -> dict[str, Any] | None:
    try:
        with pa.CompressedInputStream(pa.BufferReader(content), "zstd") as stream:
            whole = stream.read()
    except (pa.ArrowException, OSError):
        return None
    end = max(0, len(whole) - len(_SEAL_BEGIN) - _SEAL_DIGITS - len(_SEAL_END))
    # A view: the text of many parts is not copied.
    if whole[end:] != _SEAL_BEGIN + _compute_seal(memoryview(whole)[:end], b"}").encode() + _SEAL_END:
        return None
    found = _parse_object(whole)
    if found is not None:
        found.pop(SEAL_KEY, None)
    return found


def _parse_object(content: bytes) -> dict[str, Any] | None:
    try:
        value: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _compute_seal(*pieces: bytes | memoryview) -> str:
    hasher = hashlib.blake2b(digest_size=_SEAL_DIGITS // 2)
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()
