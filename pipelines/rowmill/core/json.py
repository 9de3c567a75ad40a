"""JSON: values, and objects that carry a digest of themselves, their seal, by which a change is detected.

    for people    {"version": "…", …, "store_format": 1, "seal": "…"}     indented
    compressed    zstd of {"parts":{…},…,"store_format":1,"seal":"…"}     lists of parts from 1 MiB on

Whatever is read of a store is found through such an object, so its format's number is that of the files that it names.
The seal of an indented object is that of its values, however they are laid out; the seal of a compressed one is that of
the text before it, so that a list of 100,000 parts need not be encoded again to be read. Rejected: such lists as
Parquet (decision 36).
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson
import pyarrow as pa

from rowmill.core.errors import NewerStoreError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Json: TypeAlias = Any
"""A decoded JSON value. `Any` is right here: the source decides its shape."""

_BEYOND_64_BITS = "-[0-9]{19}|[0-9]{20}"
_LONG_NUMBER = re.compile("[0-9][0-9]{18}")
"""Digits that may be an integer beyond 64 bits, which the fast parser silently turns into a float.

A pattern that begins with one character is searched for in a third of the time."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def iterate_strings(value: Json) -> Iterator[str]:
    """Yield the strings inside a value, and the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from iterate_strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from iterate_strings(item)


def from_json(text: str) -> Json:
    """Decode JSON text exactly, integers of any size included.

    Raises ValueError if it is not JSON, or nested too deeply to be read.
    """
    if _LONG_NUMBER.search(text) is None:
        return orjson.loads(text)
    try:
        value = json.loads(text)
        # Refuse what the fast parser refuses: infinite numbers and lone surrogates, which cannot be stored.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    return value


def from_json_without_repeats(text: str) -> Json:
    """Decode JSON text as `from_json` does, but refuse a key that is repeated: one of its values would be lost."""
    value = from_json(text)
    # Each key has a colon: a flat object with as many colons as keys repeats none and needs no slow second parse.
    if text.count(":") > (len(value) if type(value) is dict else 0):
        json.loads(text, object_pairs_hook=require_distinct_keys)
    return value


def is_nested_deeper(value: Json, limit: int) -> bool:
    """Return whether lists, tuples and objects are nested in more than `limit` levels."""
    level = [value]
    for _ in range(limit):
        inner = [one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer)]
        level = [one for one in inner if isinstance(one, (dict, list, tuple))]
        if not level:
            return False
    return True


class RepeatedKeyError(ValueError):
    """An object has a key twice: one of its values would be lost."""


def require_distinct_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Return an object from its members, for the standard library's decoder."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise RepeatedKeyError(f"the key {next(key for key in counts if counts[key] > 1)!r} is repeated")
    return found


def find_lone_surrogate(value: Json) -> str | None:
    """Return the path of text that UTF-8 cannot encode, such as `messages[1].content`; None if there is none."""
    try:
        orjson.dumps(value)
    except TypeError:
        pass
    else:
        return None
    pending: list[tuple[str, Json]] = [("", value)]
    while pending:
        path, here = pending.pop()
        if isinstance(here, str):
            if _SURROGATE.search(here):
                return path
        elif isinstance(here, Mapping):
            mapping: Mapping[Any, Json] = here
            if any(isinstance(key, str) and _SURROGATE.search(key) for key in mapping):
                return f"a key of {path or 'the record'}"
            pending += [(f"{path}.{key}" if path else f"{key}", one) for key, one in [*mapping.items()][::-1]]
        elif isinstance(here, (list, tuple)):
            items: Sequence[Json] = here
            pending += [(f"{path}[{i}]", items[i]) for i in range(len(items) - 1, -1, -1)]
    return None


def from_json_columns(table: pa.Table, *names: str, shared: Collection[str] = ()) -> list[list[Json]]:
    """Decode columns of JSON text as `from_json` does, searching a whole column for long integers at once.

    In the `shared` columns equal texts are decoded once, to one object, which must not be changed.
    """
    import pyarrow.compute as pc

    decoded: list[list[Json]] = []
    for name, column in zip(names, table.select(names).columns, strict=True):
        texts, places = column, None
        if name in shared:
            encoded = column.combine_chunks().dictionary_encode()
            texts, places = encoded.dictionary, encoded.indices.to_pylist()
        inexact = pc.match_substring_regex(texts, _BEYOND_64_BITS).to_pylist()
        pairs = zip(texts.to_pylist(), inexact, strict=True)
        values = [None if text is None else json.loads(text) if long else orjson.loads(text) for text, long in pairs]
        decoded.append(values if places is None else [None if place is None else values[place] for place in places])
    return decoded


def to_json(value: Json) -> str:
    """Encode a canonical value as JSON text: UTF-8, key order kept, absent keys absent."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        # Integers beyond 64 bits are rare, but they are the row's content.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def canonical_json(value: Json) -> bytes:
    """Encode a value so that equal values give equal bytes: keys sorted at every level."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


# ── JSON objects with a digest of themselves, their seal, by which a change is detected ──


STORE_FORMAT = 1
"""Number of the format of a store's files. Raise it when rowmill can no longer read what an earlier release wrote."""

FORMAT_KEY = "store_format"
"""The key of the number of the format that a sealed object was written in; without it, it is older than all numbers."""

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
        text = content[:-1] + f',"{FORMAT_KEY}":{STORE_FORMAT}'.encode()
        whole = b"".join((text, _SEAL_BEGIN, _compute_seal(text, b"}").encode(), _SEAL_END))
        return pa.Codec("zstd", 1).compress(whole, asbytes=True)
    plain = orjson.loads(content) | {FORMAT_KEY: STORE_FORMAT}
    return orjson.dumps({**plain, SEAL_KEY: _compute_seal(orjson.dumps(plain))}, option=orjson.OPT_INDENT_2)


def parse_sealed(content: bytes) -> dict[str, Any] | None:
    """Return the JSON object that `seal_object` wrote as these bytes; None if they are cut, empty or changed.

    Raises NewerStoreError if a newer rowmill wrote them.
    """
    found = _unseal(content)
    if found is not None and (written := found.pop(FORMAT_KEY, 0)) > STORE_FORMAT:
        raise NewerStoreError(
            f"written by a newer rowmill, in format {written} of a store; this rowmill reads up to format "
            f"{STORE_FORMAT}; install the newer one, or name another storage root"
        )
    return found


def _unseal(content: bytes) -> dict[str, Any] | None:
    if not content.startswith(_ZSTD_MAGIC):
        found = _parse_object(content)
        seal = None if found is None else found.pop(SEAL_KEY, None)
        return found if found is not None and seal == _compute_seal(orjson.dumps(found)) else None
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
