"""Reads the raw records of a part, or of a group of small files: verifies bytes, parses lines once, rejects bad ones.

This is the hottest loop of reading: per line one split, one `orjson.loads`, and a count of quotes. Cases that orjson
handles wrongly are searched for: it silently converts integers beyond 64 bits to floats, so lines with a run of 19
digits are parsed again, exactly; and of a key that stands twice it takes the last value, so a line with more quotes
than its value is parsed again, and rejected.

    files    a.json  b.json  c.json | d.json … | large.jsonl part 0 | large.jsonl part 1 | e.json …
    groups   └───────── 0 ────────┘ └── 1 ───┘ └──────── 2 ───────┘ └──────── 3 ───────┘ └── 4 ──

Every part of a later stage costs some 30 ms and a handful of files, however few rows it has. So small files are
grouped, in the order of the recipe. Rows keep the id, the file and the line of their own source part: a group is a unit
of work, and no record depends on its group.

A group ends after a part whose digest decides so, not after a number of parts: a file that is added, removed or changed
affects only the neighbouring group ends. Why, and at what price: `docs/decisions/0002`.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import methodcaller
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import orjson
from numpy.typing import ArrayLike

from rowmill.core.arrays import Ints
from rowmill.core.errors import DamagedFileError, IntegrityError, SourceError
from rowmill.core.json import Json, RepeatedKeyError, is_nested_deeper, require_distinct_keys
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import Rejected
from rowmill.sources import urls
from rowmill.sources.encodings import open_content, open_utf8
from rowmill.sources.files import find_codec, find_file_format, scan_file
from rowmill.sources.parts import BLANKS, BOM, FileFormat, FileScan, SourceFile, SourcePart, explain_too_long

RECORD_DEPTH_LIMIT = 64
"""Nesting levels of objects and lists, counting the record as the first."""

_LONG_INTEGER = re.compile(rb"-\d{19}|\d{20}")
"""Pattern of integers beyond 64 bits; other text that matches is parsed twice, without harm."""

_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
"""A string may also end at the end of the text: otherwise the search would restart inside it, at each quote."""

_NON_FINITE = re.compile(rb"\bNaN\b|\bInfinity\b")
_ESCAPED_QUOTE = b"\\u0022"

_WORD_BYTES = 8
_HIGH_HALVES = np.uint64(0xF0F0F0F0F0F0F0F0)
_DIGIT_HALVES = np.uint64(0x3030303030303030)
"""The high halves of eight digits, and of the six characters that follow 9."""
_ZERO = np.uint8(ord("0"))
_LOWER_CASE = np.uint8(0x20)


class RawRecord(NamedTuple):
    """A record as the source has it. Either `value` or `rejected` is set.

    `number` counts from 0 in the part, without blank lines; `line` from 1 in the file. A named tuple, not a dataclass:
    one is made per record, and a frozen dataclass takes four times as long.
    """

    number: int
    line: int
    raw: bytes
    value: dict[str, Json] | None
    rejected: Rejected | None


def read_records(part: SourcePart, base: Path) -> Iterator[RawRecord]:
    """Verify a part's bytes and yield its records in order; raises what `read_part_bytes` does."""
    reader = find_file_format(part.reader)
    return parse_records(read_part_bytes(part, base), reader, first_line=part.first_line, at_start=part.offset == 0)


def read_first_records(file: SourceFile, base: Path) -> list[RawRecord]:
    """Return the records of a file's first part; the rest of the file is not read."""
    contents: list[bytes] = []

    def keep(name: str, content: bytes) -> str:
        contents.append(content)
        return name

    reader = find_file_format(scan_file(file, base, keep, {}, first_records=sys.maxsize).reader)
    return [record for content in contents for record in parse_records(content, reader)]


def describe_place(part: SourcePart, scan: FileScan, base: Path, row: int, *, reads_lines: bool = True) -> str:
    """Word where a record of a part stands: `data/sales.csv line 20002`, or `record 20000` where no line is known.

    A line takes reading: `reads_lines` says whether it is worth that.
    """
    line = find_part_line(part, scan, base, row) if reads_lines else None
    return f"{part.url} {f'record {part.first_record + row}' if line is None else f'line {line}'}"


def find_part_line(part: SourcePart, scan: FileScan, base: Path, row: int) -> int | None:
    """Return the line of the file on which a record of a part starts, or None if it has no lines or cannot be read.

    The file is read again up to that line, for messages about one record.
    """
    file_format = find_file_format(part.reader)
    try:
        if file_format.is_own_lines:
            return next((raw.line for raw in read_records(part, base) if raw.number == row), None)
        if not file_format.is_text:
            return None
        where, codec = urls.locate_url(part.url, base), find_codec(part.url)
        with open_content(urls.open_raw(where), codec, where.url) as content:
            stream, _ = open_utf8(content, where.url, scan.encoding)
            return file_format.find_line(stream, scan, part.first_record - 1 + row)
    except (SourceError, IntegrityError, OSError):
        return None


def read_part_bytes(part: SourcePart, base: Path) -> bytes:
    """Return a part's records as JSON lines, verified.

    Raises SourceError if the bytes cannot be read. Raises IntegrityError if they differ from the scanned ones; a
    `DamagedFileError` if they are a staged copy's.
    """
    if part.staged is None:
        content = urls.read_range(urls.locate_url(part.url, base), part.offset, part.length)
    else:
        try:
            content = urls.read_whole(urls.locate_url(part.staged, base))
        except SourceError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise _damaged_copy_error(part, part.staged, "missing") from error
            raise
    if hashlib.sha256(content).hexdigest() == part.sha256:
        return content
    if part.staged is not None:
        raise _damaged_copy_error(part, part.staged, "damaged")
    raise IntegrityError(
        f"{part.url}: bytes {part.offset:,} to {part.offset + part.length:,} changed while the build ran; a source "
        "must not change until the build ends; run rowmill build again"
    )


def _damaged_copy_error(part: SourcePart, staged: str, what: str) -> DamagedFileError:
    return DamagedFileError(
        f"{staged}: the staged copy of part {part.part_id} of {part.url} is {what}; staged copies are named by their "
        "content and never change",
        staged,
        "check the disk, delete what is left of it and run rowmill build again",
    )


def parse_records(
    content: bytes, reader: FileFormat, *, first_line: int = 1, at_start: bool = True
) -> Iterator[RawRecord]:
    """Yield the records of a part's content, JSON lines that a reader made or a file has."""
    content = content.removeprefix(BOM) if at_start else content
    inexact, bracketed = _find_long_integer_lines(content), _find_bracket_lines(content)
    # No other format can repeat a key; a document that is only white space is rejected.
    has_documents = reader.has_documents
    is_json, count_quotes = reader.is_json, _make_quote_counter(content)
    loads, dumps, new = orjson.loads, orjson.dumps, tuple.__new__
    number = 0
    for index, raw in enumerate(content.split(b"\n")):
        try:
            value = loads(raw)
        except orjson.JSONDecodeError as error:
            if not raw.strip(BLANKS):
                continue
            value = _parse_again(raw, error, reader)
        else:
            if index in inexact:
                value = _parse_exactly(raw, None, reader)
            if index in bracketed and is_nested_deeper(value, RECORD_DEPTH_LIMIT):
                value = _reject_too_deep()
            elif is_json and index not in inexact and count_quotes(raw) != dumps(value).count(b'"'):
                # An object with fewer quotes than its text had a key twice.
                again = _parse_exactly(raw, None, reader)
                value = again if type(again) is Rejected else value
        if has_documents and type(value) is dict and not value["text"].strip():
            value = Rejected("blank", f"{len(value['text'])} characters of white space")
        if type(value) is dict:
            # As `RawRecord(…)` does, in half the time.
            yield new(RawRecord, (number, first_line + index, raw, value, None))  # pyrefly: ignore[bad-specialization]
        elif type(value) is Rejected:
            yield RawRecord(number, first_line + index, raw, None, value)
        else:
            yield RawRecord(number, first_line + index, raw, None, reader.reject_non_object(value))
        number += 1


def _make_quote_counter(content: bytes) -> Callable[[bytes], int]:
    """Return a function that counts the quotes of a line of the content as orjson writes them."""
    if _ESCAPED_QUOTE not in content:
        return methodcaller("count", b'"')
    return lambda line: line.count(b'"') + line.count(_ESCAPED_QUOTE)


def _find_long_integer_lines(content: bytes) -> frozenset[int]:
    """Return the indices of the lines that may hold an integer beyond 64 bits.

    Such an integer has 19 digits or more, so that all bytes of one of the text's words of eight bytes are digits; the
    text is searched only at such places.
    """
    words = np.frombuffer(content, "<u8", len(content) // _WORD_BYTES)
    begins = np.flatnonzero((words & _HIGH_HALVES) == _DIGIT_HALVES) * _WORD_BYTES
    if len(begins):
        # At most seven digits come before the first such word, so at least four follow.
        text, digits = np.frombuffer(content, np.uint8), _WORD_BYTES + 4
        begins = begins[begins + digits <= len(content)]
        for step in range(digits):
            begins = begins[text[begins + step] - _ZERO < 10]
    reach = 3 * _WORD_BYTES
    long = [at for at in begins.tolist() if _LONG_INTEGER.search(content, max(at - _WORD_BYTES, 0), at + reach)]
    return frozenset(_number_lines(content, long).tolist()) if long else frozenset()


def _find_bracket_lines(content: bytes) -> frozenset[int]:
    """Return the indices of the lines with more opening brackets than a record may have nesting levels."""
    # `[` and `{` differ in the bit of lower case.
    is_opening = (np.frombuffer(content, np.uint8) | _LOWER_CASE) == ord("{")
    if np.count_nonzero(is_opening) <= RECORD_DEPTH_LIMIT:
        return frozenset()
    lines = _number_lines(content, np.flatnonzero(is_opening))
    return frozenset(lines[:-RECORD_DEPTH_LIMIT][lines[:-RECORD_DEPTH_LIMIT] == lines[RECORD_DEPTH_LIMIT:]].tolist())


def _number_lines(content: bytes, places: ArrayLike) -> Ints:
    """Return the indices of the lines of some places."""
    return np.searchsorted(np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n")), places)


def _parse_again(raw: bytes, error: orjson.JSONDecodeError, reader: FileFormat) -> Json:
    """Return the reject for a line that orjson refused, or its value if it is valid JSON."""
    if (too_long := explain_too_long(raw)) is not None:
        return Rejected("too_long_record", too_long)
    try:
        raw.decode()
    except UnicodeDecodeError as problem:
        return Rejected("not_utf8", f"byte 0x{raw[problem.start]:02x} at position {problem.start} of the line")
    if _measure_depth(raw) > RECORD_DEPTH_LIMIT:
        return _reject_too_deep()
    if _LONG_INTEGER.search(raw) or _NON_FINITE.search(raw):
        return _parse_exactly(raw, error, reader)
    return Rejected("invalid_json", f"{error}{reader.syntax_hint}")


def _parse_exactly(raw: bytes, error: orjson.JSONDecodeError | None, reader: FileFormat) -> Json:
    """Parse a line with every integer exact and each key once; `error` is orjson's, if it refused the line.

    NaN and infinity, which are no JSON, are null, as in a typed file: what reads them decides.
    """
    try:
        value = json.loads(raw.decode(), parse_constant=lambda _: None, object_pairs_hook=require_distinct_keys)
        # Lines that orjson refuses for another reason stay refused: numbers that are too large and lone surrogates.
        _ = error and json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except RepeatedKeyError as repeated:
        return Rejected("duplicate_key", str(repeated)[:100])
    except RecursionError:
        return _reject_too_deep()
    except UnicodeEncodeError as problem:
        return Rejected("invalid_json", str(error or problem))
    except ValueError as problem:
        if "integer string conversion" in str(problem):
            return Rejected("invalid_json", "an integer has more than 4,300 digits")
        return Rejected("invalid_json", f"{error}{reader.syntax_hint}")
    return value


def _measure_depth(raw: bytes) -> int:
    """Return the deepest nesting of brackets outside strings, for a text that need not be valid."""
    depth = deepest = 0
    for token in _STRING_OR_BRACKET.findall(raw):
        if token in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in (b"]", b"}"):
            depth -= 1
    return deepest


def _reject_too_deep() -> Rejected:
    return Rejected("too_deep", f"nested in more than {RECORD_DEPTH_LIMIT} levels")


GROUPING_VERSION = 1
"""Increased whenever the same files would be grouped differently."""

PartGroup: TypeAlias = tuple[SourcePart, ...]
"""Source parts whose rows are made together: one part of a large file, or consecutive small files."""

TakenGroup: TypeAlias = tuple[tuple[SourcePart, int | None], ...]
"""A group; each part with the number of its records that are taken (None: all)."""

SMALL_FILE_BYTES = 128 << 10
"""Files below this size are grouped."""

MEAN_GROUP_BYTES = 1 << 20
"""Average size of a group of small files."""

MAX_GROUP_BYTES = 16 << 20
"""Maximum size of a group of small files, the same as of a part of a large file; hardly any group gets near it."""

FILE_OVERHEAD_BYTES = 4 << 10
"""Size that each file counts in addition to its content: opening and checking it takes as long as reading that much."""


def group_parts(scans: Sequence[FileScan]) -> list[PartGroup]:
    """Cut the parts of a source, in its order, into the groups that rows are made of."""
    # Files of one part.
    alone = {scan.url for scan in scans if len(scan.parts) == 1 and scan.reader != "huggingface"}
    groups: list[PartGroup] = []
    group: list[SourcePart] = []
    size = 0
    for part in (part for scan in scans for part in scan.parts):
        is_small = part.content_bytes < SMALL_FILE_BYTES and part.url in alone
        cost = part.content_bytes + FILE_OVERHEAD_BYTES if is_small else 0
        # A group has one split and one file format.
        fits = is_small and size + cost <= MAX_GROUP_BYTES
        if group and not (
            fits
            and (group[-1].split_hint, group[-1].reader, group[-1].arrow) == (part.split_hint, part.reader, part.arrow)
        ):
            groups.append(tuple(group))
            group, size = [], 0
        group.append(part)
        size += cost
        # After a small file, a group ends with a probability that is proportional to the file's size.
        if not is_small or int(part.sha256[:16], 16) * MEAN_GROUP_BYTES < cost << 64:
            groups.append(tuple(group))
            group, size = [], 0
    return [*groups, tuple(group)] if group else groups


def read_taken_records(
    group: TakenGroup, base: Path, not_taken: list[str]
) -> Iterator[tuple[SourcePart, str, RawRecord]]:
    """Yield the taken records, each with its part and row id; append the ids of the others to `not_taken`."""
    for part, take in group:
        for record in read_records(part, base):
            row_id = f"{part.part_id}:{record.number}"
            if take is not None and record.number >= take:
                not_taken.append(row_id)
            else:
                yield part, row_id, record


def count_group_records(group: TakenGroup) -> int:
    """Return the number of records of a group, taken or not."""
    return sum(part.records for part, _ in group)


def load_scans(output: Manifest | None) -> list[FileScan]:
    """Recover the file scans of a manifest; empty if the stage was never built, or scanned nothing."""
    return [] if output is None else [FileScan.from_json(values) for values in output.details.get("scans", ())]


def load_source_parts(scanned: Manifest) -> list[SourcePart]:
    """Recover the source's parts from a `raw_dataset` manifest."""
    return [part for scan in load_scans(scanned) for part in scan.parts]


def number_source_parts(scanned: Manifest) -> Iterator[tuple[int, SourcePart]]:
    """Yield the source's parts, each with its group number: the part of `canonical_rows` that contains its rows."""
    for number, group in enumerate(load_part_groups(scanned)):
        for part in group:
            yield number, part


def load_part_groups(scanned: Manifest) -> list[PartGroup]:
    """Recover the groups of parts whose rows are made together: one per part of `canonical_rows`, in order."""
    parts = load_source_parts(scanned)
    ends = list(accumulate(scanned.details["groups"], initial=0))
    return [tuple(parts[begin:end]) for begin, end in pairwise(ends)]
