"""What is left out before any token is made: documents too short or too long, and rows seen before.

What belongs here: the limits, the hashes by which rows are equal, which of equal rows stays. What does
not: near-duplicates across splits, which a check counts and which need tokens.

    content     BLAKE2b-128 of a row's canonical content; the row's identity in splits, too
    prefix200   MD5 of the first 200 characters of the record's key-sorted JSON
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from rowmill.core.config import Config
from rowmill.core.json import Json, canonical_json
from rowmill.schema.rows import Message, Rejected, Row

HASH_BYTES = 16
PREFIX_CHARACTERS = 200

CONTENT_KEYS = (
    "role",
    "content",
    "reasoning_content",
    "tool_calls",
    "tool_call_id",
    "name",
    "train",
    "weight",
)
"""What of a message makes rows equal or different; other keys of a source (ids, times) do not."""
_PLAIN_MESSAGE_KEYS = 2


class Filters(Config):
    """Which rows are taken."""

    min_chars: Annotated[int, Field(ge=0)] = 0
    """Characters that a document must have, inclusive; text only."""
    max_chars: Annotated[int, Field(ge=0)] | None = None
    """Characters that a document may have, inclusive; null: any number; text only."""
    deduplicate: Literal["exact", "prefix200", "off"] = "exact"
    """exact (true): of rows with equal canonical content the first stays; prefix200: of records whose key-sorted JSON
    begins with the same 200 characters; off (false): all stay."""
    max_items: Annotated[int, Field(ge=1)] | None = None
    """Records that are taken, from the first; null: all. The others are `not_taken`."""

    @field_validator("deduplicate", mode="before")
    @classmethod
    def _read_boolean(cls, value: Json) -> Json:
        # YAML reads a bare `off` as false, too.
        return {True: "exact", False: "off"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_lengths(self) -> "Filters":
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(
                f"min_chars {self.min_chars} is more than max_chars {self.max_chars}; no document has such a length; "
                "raise max_chars or lower min_chars"
            )
        return self


def check_length(text: str, filters: Filters) -> Rejected | None:
    """Say why a document is not taken for its length in characters; null: it is taken."""
    if len(text) < filters.min_chars:
        return Rejected("too_short", f"{len(text)} characters, at least {filters.min_chars}")
    if filters.max_chars is not None and len(text) > filters.max_chars:
        return Rejected("too_long", f"{len(text)} characters, at most {filters.max_chars}")
    return None


def hash_row_content(row: Row) -> bytes:
    """Return 16 bytes that are equal for rows of equal kind, roles, text, reasoning, calls, tools, flags and kwargs.

    The order of keys does not count, nor do keys of the source that no field above names.
    """
    content = [
        row.kind,
        [message if len(message) == _PLAIN_MESSAGE_KEYS else _select_content_keys(message) for message in row.messages],
        row.tools,
        row.template_kwargs,
        row.text,
        row.output,
        row.record,
    ]
    return hashlib.blake2b(canonical_json(content), digest_size=HASH_BYTES).digest()


def _select_content_keys(message: Message) -> Message:
    return {key: message[key] for key in CONTENT_KEYS if key in message}


def hash_record_prefix(record: Mapping[str, Json]) -> bytes:
    """Return 16 bytes that are equal for records whose key-sorted JSON begins with the same 200 characters."""
    # No character takes more than four bytes, so the prefix is cut before it is decoded.
    start = canonical_json(record)[: 4 * PREFIX_CHARACTERS].decode(errors="ignore")[:PREFIX_CHARACTERS]
    return hashlib.md5(start.encode(), usedforsecurity=False).digest()


def mark_first_occurrences(hashes: NDArray[np.void] | NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mark, in the order given, each hash that did not occur before.

    `hashes` are n values of 16 bytes: an array of `V16`, or of shape (n, 2) and dtype uint64. The first
    halves are sorted, which is most of the time: two to three seconds for 10 million.
    """
    halves = np.ascontiguousarray(hashes).view(np.uint64).reshape(-1, 2)
    firsts = halves[:, 0].copy()
    order = np.argsort(firsts)
    ordered = firsts[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(order)])
    if len(starts) == len(order):
        return np.ones(len(order), dtype=np.bool_)
    # The sort need not be stable: within a run of equal halves the lowest index is looked up.
    earliest = np.minimum.reduceat(order, starts)
    keep = np.zeros(len(order), dtype=np.bool_)
    keep[earliest] = True
    lengths = np.diff(np.append(starts, len(order)))
    differs = halves[order, 1] != np.repeat(halves[earliest, 1], lengths)
    for run in np.unique(np.repeat(np.arange(len(starts)), lengths)[differs]):
        _mark_firsts_of_run(halves[:, 1], np.sort(order[starts[run] : starts[run] + lengths[run]]), keep)
    return keep


def _mark_firsts_of_run(seconds: NDArray[np.uint64], run: NDArray[np.intp], keep: NDArray[np.bool_]) -> None:
    """Decide, in `keep`, a run of hashes that share their first half but not all their second."""
    _, earliest = np.unique(seconds[run], return_index=True)
    keep[run[earliest]] = True
