"""Raw files as a source: which ones, what each of them is, and one pass over each.

What belongs here: the options of `kind: files`, the decision which parts
are staged. What does not: the formats (`file_formats.py`), finding (`urls.py`).

A part of plain JSON Lines is read from the file itself, by its byte range. Everything else is staged once
as JSON lines, one file per part named by its sha256: a compressed file has no byte ranges, a CSV's part no
header, and a second parse of either would cost more than the disk.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import AfterValidator, Field, field_serializer, field_validator, model_validator

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, SourceError, join_choices
from rowmill.core.json import Json, from_json
from rowmill.core.public_urls import public_url
from rowmill.core.storage import Store
from rowmill.sources import delimited, urls
from rowmill.sources.compression import CODECS, open_content
from rowmill.sources.file_format import FileFormat, FileOptions
from rowmill.sources.file_formats import FORMATS_BY_SUFFIX, SUFFIXES, choose_file_format, find_file_format
from rowmill.sources.limits import Limits, require_files
from rowmill.sources.parts import SCAN_VERSION, FileScan, PartContent, SampleBy, SourcePart, SplitHint, name_part
from rowmill.sources.reading import read_records

ContentStager = Callable[[str, bytes], str]
"""Keeps a staged copy under the name given and returns its path or URL; the same name is the same bytes."""


def _require_one_character(text: str) -> str:
    if len(text) != 1 or text in "\r\n":
        raise ValueError(f"must be one character that ends no line; got {text!r}; write such as ';'")
    return text


class Files(Config):
    """Raw files: JSON Lines, JSON, Parquet, CSV, TSV or text, compressed or not, on any storage."""

    kind: Literal["files"] = "files"
    """May be left out where `train_urls` or `validation_urls` is given."""

    train_urls: list[str] = Field(default=[])
    """fsspec URLs of the rows to train on: braces, then globs; a folder means its data files. A relative
    path starts at the recipe's folder."""

    validation_urls: list[str] = Field(default=[])
    """URLs of rows that are only evaluated."""

    sample_by: SampleBy = "document"
    """What one record of a `.txt` file is: a `line`, a `paragraph` (the lines up to a blank line) or a `document` (the
    whole file, of at most 64 MiB). Blank ones are left out as `blank`. Files of other kinds have records of their
    own."""

    delimiter: Annotated[str, AfterValidator(_require_one_character)] | None = None
    """What separates the cells of CSV and TSV files; null: what their first records show, a comma or tab if it may be
    that. The one found is recorded."""

    quote: Annotated[str, AfterValidator(_require_one_character)] | None = None
    """What encloses a cell of CSV and TSV files that holds the delimiter or a line end; null: a double quote."""

    limits: Limits = Limits()
    """How much a file, or the source, may hold."""

    tags: list[str] = Field(default=[])
    """Names under which the dataset's evaluation is grouped; the dataset's own is always added."""

    @field_validator("train_urls", "validation_urls")
    @classmethod
    def _require_known_suffixes(cls, values: list[str]) -> list[str]:
        for url in values:
            for one in urls.expand_braces(url):
                _require_known_suffix(one)
        return values

    @field_serializer("train_urls", "validation_urls")
    def _serialize_public_urls(self, values: list[str]) -> list[str]:
        """Write addresses as they may be recorded, so that no digest or dump of a recipe depends on a signature."""
        return [public_url(url) for url in values]

    @model_validator(mode="after")
    def _require_urls(self) -> "Files":
        if not self.train_urls and not self.validation_urls:
            raise ValueError(
                "names no data; a source needs train_urls, validation_urls or id; add train_urls: [path or URL, …]"
            )
        return self

    @model_validator(mode="after")
    def _require_applicable_options(self) -> "Files":
        """Refuse what no file can have, such as `sample_by` without text files: it would silently do nothing."""
        given = [one for url in (*self.train_urls, *self.validation_urls) for one in urls.expand_braces(url)]
        for option in ("delimiter", "quote"):
            if getattr(self, option) is not None and all(_lacks_option(url, option) for url in given):
                raise ValueError(
                    f"{option}: is of CSV and TSV files, and no URL names one; other files have none; delete it"
                )
        if self.sample_by != "document" and all(_lacks_option(url, "sample_by") for url in given):
            raise ValueError(
                f"sample_by: {self.sample_by} cuts .txt files, and no URL names one; records of other files are their "
                "own; delete it"
            )
        return self


def _lacks_option(url: str, option: str) -> bool:
    """Tell whether a URL's suffix says that its files have no such option."""
    asked = choose_file_format(url)
    return asked is not None and option not in asked[0].options


def _require_known_suffix(url: str) -> None:
    """Refuse a URL whose own suffix can be told and is none of ours; a folder may be called anything."""
    text = urls.extract_suffix_text(url)
    name = text.rpartition("/")[2]
    suffix = name[name.find(".") :] if "." in name.lstrip(".") else ""
    if suffix and not urls.is_pattern(suffix) and choose_file_format(name) is None:
        raise ValueError(_explain_unknown_suffix(url))


def _explain_unknown_suffix(url: str) -> str:
    return (
        f"{public_url(url)!r} has no suffix that names a reader; allowed are {join_choices(FORMATS_BY_SUFFIX)}, also "
        f"under {join_choices(codec for codec in CODECS if codec)}; rename the file, narrow the glob, or write a "
        "folder with '/' at its end"
    )


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source, not read yet; `url` is the address as the recipe has it, with its secrets."""

    url: str
    split_hint: SplitHint | None
    sample_by: SampleBy
    limits: Limits
    delimiter: str | None = None
    quote: str | None = None
    keeps_non_finite: bool = False


@dataclass(frozen=True, slots=True)
class StoreStager:
    """A `ContentStager` in a folder of a store; a copy that is already there is not written again."""

    store: Store
    folder: str

    def __call__(self, name: str, content: bytes) -> str:
        """Keep the bytes; the copy appears whole or not at all. Return its absolute path or URL."""
        relative = f"{self.folder}/{name}"
        if not self.store.exists(relative):
            self.store.write(relative, content)
        path = self.store.path(relative)
        return os.path.abspath(path) if self.store.is_local else path


def find_files(source: Files, base: Path, *, keeps_non_finite: bool = False) -> list[SourceFile]:
    """Return the files of a source: training ones first, URLs as written, globs by code point.

    Where there are validation files, each file knows its split; else the rows' hashes decide.

    Raises
    ------
    SourceError
        Naming every URL that stands for no file.
    ConfigError
        When a file is reached twice, or its suffix is unknown.

    """
    misses: list[str] = []
    hints: tuple[SplitHint | None, SplitHint] = ("train" if source.validation_urls else None, "validation")
    found = [
        SourceFile(url, hint, source.sample_by, source.limits, source.delimiter, source.quote, keeps_non_finite)
        for patterns, hint in zip((source.train_urls, source.validation_urls), hints, strict=True)
        for url in _expand_patterns(patterns, base, misses)
    ]
    if misses:
        raise SourceError(
            f"found no data at {', '.join(misses)} (relative paths start at {base}); a source may not be missing, or "
            "its share would go to the others; correct the URLs or fetch the files"
        )
    require_files(len(found), source.limits.max_files)
    _require_distinct_files(found, base)
    return found


def _expand_patterns(patterns: Iterable[str], base: Path, misses: list[str]) -> Iterator[str]:
    for pattern in patterns:
        for url in urls.expand_braces(pattern):
            matches = urls.find_urls(url, base, SUFFIXES)
            if not matches:
                misses.append(public_url(url))
            yield from matches


def _require_distinct_files(found: list[SourceFile], base: Path) -> None:
    seen: dict[str, str] = {}
    for file in found:
        if choose_file_format(file.url) is None:
            raise ConfigError(_explain_unknown_suffix(file.url))
        where = urls.locate_url(file.url, base)
        identity = where.identity
        if identity in seen:
            raise ConfigError(
                f"{where.url}: this file is already named, as {seen[identity]}; its rows would count twice; a file may "
                "stand in a source once; take it out of one of the URLs (to repeat a dataset, raise its weight)"
            )
        seen[identity] = where.url


def scan_file(file: SourceFile, base: Path, stage: ContentStager, known: Mapping[str, FileScan]) -> FileScan:
    """Read a file once and return its parts; an unmoved file's known scan is returned unread.

    Equal parts have equal ids here; `number_equal_parts` over a dataset's scans tells them apart.
    """
    where = urls.locate_url(file.url, base)
    # Taken before the bytes: a file that moves meanwhile will not match it the next time.
    stamp = urls.stamp_file(where)
    earlier = known.get(where.url)
    if earlier is not None and _still_holds(earlier, file, stamp, base):
        parts = tuple(replace(part, split_hint=file.split_hint) for part in earlier.parts)
        return replace(earlier, split_hint=file.split_hint, parts=parts)
    return _FileScanner(file, where, stamp, stage).scan()


def read_first_records(file: SourceFile, base: Path) -> list[dict[str, Json]]:
    """Return the records of a file's first part, bad ones left out; the rest of the file is not read.

    Raises
    ------
    SourceError
        When the file is missing or unreadable.

    """
    part = _FileScanner(file, urls.locate_url(file.url, base), "", lambda _, __: "").read_first_part()
    if part is None:
        return []
    found: list[dict[str, Json]] = []
    for line in part.content.splitlines():
        try:
            value = from_json(line.decode())
        except ValueError:
            continue
        if type(value) is dict:
            found.append(value)
    return found


def _still_holds(scan: FileScan, file: SourceFile, stamp: str, base: Path) -> bool:
    if scan.version != SCAN_VERSION or not stamp or scan.stamp != stamp:
        return False
    if scan.sample_by not in (None, file.sample_by) or scan.max_record_bytes != file.limits.max_record_bytes:
        return False
    if len(scan.parts) == 1 and scan.parts[0].content_bytes is None:
        # Whether it shares a group depends on it.
        return False
    if not find_file_format(scan.reader).is_current(scan, _make_file_options(file)[0]):
        return False
    return all(part.staged is None or urls.file_exists(urls.locate_url(part.staged, base)) for part in scan.parts)


def _make_file_options(file: SourceFile) -> tuple[FileOptions, FileFormat, str]:
    """Return what is said of a file, the format that its name asks for, and the codec that it is under."""
    asked = choose_file_format(file.url)
    assert asked is not None
    file_format, suffix, codec = asked
    is_seekable = file_format.is_seekable and codec == ""
    options = FileOptions(
        suffix, file.limits, is_seekable, file.sample_by, file.delimiter, file.quote, file.keeps_non_finite
    )
    return options, file_format, codec


class _FileScanner:
    """One file's pass: what reads it, and where its parts go."""

    def __init__(self, file: SourceFile, where: urls.Location, stamp: str, stage: ContentStager) -> None:
        self._options, self._format, self._codec = _make_file_options(file)
        self._file = file
        self._where = where
        self._stamp = stamp
        self._stage = stage

    def read_first_part(self) -> PartContent | None:
        """Return the file's first part, reading no further; None if the file is empty."""
        scan = self._begin_scan()
        with self._open_content() as stream:
            return next(iter(self._format.cut_parts(stream, scan, self._options)), None)

    def scan(self) -> FileScan:
        scan = self._begin_scan()
        with self._open_content() as stream:
            cut = self._format.cut_parts(stream, scan, self._options)
            parts = stage_parts(cut, scan, self._stage, is_staged=self._is_staged(), is_arrow=self._format.is_arrow)
        scan = replace(scan, parts=parts, records=sum(part.records for part in parts))
        return replace(scan, columns=self._format.read_columns(scan, self._options, self._open_content))

    def _begin_scan(self) -> FileScan:
        """Return a scan without parts: which format the file has, and the options that its parts are cut with."""
        self._format = self._format.detect(self._open_content, self._file.limits)
        scan = FileScan(
            self._where.url, self._file.split_hint, self._format.name, self._stamp, records=0, parts=(),
            max_record_bytes=self._file.limits.max_record_bytes,
        )  # fmt: skip
        return self._format.note_options(scan, self._options, self._open_content)

    def _is_staged(self) -> bool:
        # An address of which a part is secret is recorded without it, and cannot be opened again by what is recorded.
        is_whole = self._where.url == self._file.url and not urls.is_web(self._where.url)
        return not self._format.is_own_lines or self._codec != "" or not is_whole

    def _open_content(self) -> BinaryIO:
        raw = urls.open_raw(self._where)
        return (
            raw
            if self._options.is_seekable
            else open_content(raw, self._codec, self._where.url, max_expansion=self._file.limits.max_expansion)
        )


def stage_parts(
    slices: Iterable[PartContent], scan: FileScan, stage: ContentStager, *, is_staged: bool, is_arrow: bool
) -> tuple[SourcePart, ...]:
    """Name the slices of a file and keep their content: all of it, or that which is not the file's own bytes."""
    parts: list[SourcePart] = []
    for index, piece in enumerate(slices):
        part = name_part(piece, scan=scan, index=index, arrow=is_arrow, staged=None)
        if is_staged or not piece.is_whole:
            part = replace(part, staged=stage(f"{part.sha256}.jsonl", piece.content))
        parts.append(part)
    return tuple(parts)


def find_unusual_dialect(scan: FileScan) -> tuple[str, str] | None:
    """Return the delimiter and quote of a CSV file that its suffix does not say; None for all other files."""
    asked = choose_file_format(scan.url)
    if scan.delimiter is None or scan.quote is None or asked is None:
        return None
    is_usual = scan.delimiter == delimited.USUAL_DELIMITERS[asked[1]] and scan.quote == delimited.QUOTE
    return None if is_usual else (scan.delimiter, scan.quote)


def describe_place(part: SourcePart, scan: FileScan, base: Path, row: int, *, reads_lines: bool = True) -> str:
    """Word where a record of a part stands: `data/sales.csv line 20002`, or `record 20000` where no line is known.

    A line takes reading: `reads_lines` says whether it is worth that.
    """
    line = find_part_line(part, scan, base, row) if reads_lines else None
    return f"{part.url} {f'line {line}' if line is not None else f'record {part.first_record + row}'}"


def find_part_line(part: SourcePart, scan: FileScan, base: Path, row: int) -> int | None:
    """Return the line of its file on which a record of a part begins; None where files have no lines, or not now.

    The file is read again up to there, for messages about one record.
    """
    file_format = find_file_format(part.reader)
    if file_format.is_own_lines:
        return next((raw.line for raw in read_records(part, base) if raw.number == row), None)
    asked = choose_file_format(part.url)
    if asked is None:
        return None
    try:
        where = urls.locate_url(part.url, base)
        with open_content(urls.open_raw(where), asked[2], where.url, max_expansion=Limits().max_expansion) as stream:
            return file_format.find_line(stream, scan, part.first_record - 1 + row)
    except (SourceError, OSError):
        return None
