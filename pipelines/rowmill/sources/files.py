"""Raw files as a source: finding them, choosing their formats, and one pass over each.

A part of plain JSON Lines is read from the file itself, by its byte range. Everything else is staged once as JSON
lines, one file per part named by its sha256: a compressed file has no byte ranges, a part of a CSV file no header, and
parsing either a second time would cost more than the disk space.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar, Literal

from pydantic import AfterValidator, Field, field_serializer, model_validator

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError, SourceError, join_choices
from rowmill.core.remote import public_url
from rowmill.core.storage import Store
from rowmill.schema.rows import Split
from rowmill.sources import arrow_files, delimited, json_files, plain_text, split_names, urls
from rowmill.sources.dialect import DIALECT_OPTIONS, QUOTE
from rowmill.sources.encodings import CODECS, open_content, open_utf8
from rowmill.sources.options import FileOptions, Limits
from rowmill.sources.parts import (
    SCAN_VERSION,
    FileFormat,
    FileScan,
    PartContent,
    SourceFile,
    SourcePart,
    assign_split_hint,
    take_first_records,
)

FILE_FORMATS: tuple[FileFormat, ...] = (
    json_files.LINES_FORMAT,
    json_files.ARRAY_FORMAT,
    json_files.VALUE_FORMAT,
    json_files.STREAM_FORMAT,
    arrow_files.PARQUET,
    arrow_files.ARROW,
    delimited.FORMAT,
    plain_text.FORMAT,
)
"""All formats; a format without a suffix is detected by content."""

FORMATS_BY_SUFFIX = {suffix: file_format for file_format in FILE_FORMATS for suffix in file_format.suffixes}
"""Format by suffix; the content of a file of JSON decides between four."""

SUFFIXES = tuple(suffix + codec for suffix in FORMATS_BY_SUFFIX for codec in CODECS)

_BY_NAME = {file_format.name: file_format for file_format in FILE_FORMATS}


def find_file_format(name: str) -> FileFormat:
    """Return the format that a scan or part records; the base class for records that never were a file."""
    return _BY_NAME.get(name) or FileFormat(name)


def choose_file_format(url: str, named: str | None = None) -> tuple[FileFormat, str, str] | None:
    """Return the format, the suffix and the codec that a file's name selects; None if it selects none.

    `named` is a suffix without its point, which the recipe gives all its files.
    """
    name, codec = urls.extract_suffix_text(url).lower(), find_codec(url)
    stem = name.removesuffix(codec) if named is None else f".{named}"
    suffix = next((suffix for suffix in FORMATS_BY_SUFFIX if stem.endswith(suffix)), None)
    return (FORMATS_BY_SUFFIX[suffix], suffix, codec) if suffix else None


def find_codec(url: str) -> str:
    """Return the suffix of the codec that a file's name ends in, or an empty text."""
    name = urls.extract_suffix_text(url).lower()
    return next((codec for codec in CODECS if codec and name.endswith(codec)), "")


ContentStager = Callable[[str, bytes], str]
"""Stores a staged copy under a name and returns its path or URL; equal names mean equal bytes."""


def _require_asset_keys(keys: list[str]) -> list[str]:
    for key in keys:
        if not all(part and part == part.strip() for part in key.split("/")):
            raise ValueError(f"expected an asset's key such as raw/conversations, got {key!r}; correct it")
    return keys


AssetKeys = Annotated[list[str], AfterValidator(_require_asset_keys)]
"""Keys of assets of a Dagster project that write a source, as Dagster prints them: parts joined by slashes."""


class FileUrls(Config):
    """Which files there are, by split."""

    train_urls: list[str] = Field(default=[])
    """fsspec URLs of the training rows: braces are expanded first, then globs; a folder means its data files. Relative
    paths are resolved against the project's folder."""

    validation_urls: list[str] = Field(default=[])
    """URLs of rows used for validation only."""

    test_urls: list[str] = Field(default=[])
    """URLs of rows used for test only; they replace the share `splits.test`."""

    named_splits: Literal["refuse", "ignore"] = "refuse"
    """What happens to a file of a folder or glob that is named for another split than the list that holds it, such as
    `test-00000.jsonl` or `dev/a.jsonl` in `train_urls`: refuse the source, or ignore the name."""

    @property
    def urls_by_split(self) -> Mapping[Split, list[str]]:
        """The URLs of each split, training rows first."""
        return {"train": self.train_urls, "validation": self.validation_urls, "test": self.test_urls}

    @property
    def all_urls(self) -> list[str]:
        """The URLs of all splits, training rows first."""
        return [url for own in self.urls_by_split.values() for url in own]

    def list_validation_options(self) -> tuple[str, ...]:
        """Return the option that names rows for validation, if it is set."""
        return ("validation_urls",) if self.validation_urls else ()

    @field_serializer("train_urls", "validation_urls", "test_urls")
    def _serialize_public_urls(self, values: list[str]) -> list[str]:
        """Serialize URLs without their secrets, so that no digest or dump of a recipe depends on a signature."""
        return [public_url(url) for url in values]


# The last base gives the first options of the reference.
class Files(FileOptions, FileUrls):
    """Raw files: JSON Lines, JSON, Parquet, Arrow, CSV, TSV or text, compressed or not, on any storage."""

    MEANT_BY: ClassVar = ("local", "json", "jsonl", "csv", "parquet", "path")

    kind: Literal["files"] = "files"
    """May be omitted if `train_urls`, `validation_urls` or `test_urls` is set."""

    license: str | None = Field(default=None, min_length=1)
    """Licence of the records, which `rowmill card` states: an SPDX identifier such as `apache-2.0`, a name or a URL.
    Does not change the bytes."""

    tags: list[str] = Field(default=[])
    """Names under which the dataset's evaluation is grouped; the dataset's name is always added."""

    after: AssetKeys = Field(default=[])
    """Keys of assets in your own Dagster project that write this source, such as `raw/conversations`: the dataset then
    depends on them, and its sensor follows them instead of the files. Does not change the bytes."""

    @model_validator(mode="after")
    def _check_options(self) -> "Files":
        """Refuse missing URLs, an option that applies to none of the files, equal signs, and unknown suffixes."""
        if not self.all_urls:
            raise ValueError(
                "names no data; expected train_urls, validation_urls, test_urls or id; add train_urls: [path or URL, …]"
            )
        # None where a suffix does not show the format, as that of a folder.
        formats = [
            choose_file_format(url, self.file_format)
            for pattern in self.all_urls
            for url in urls.expand_braces(pattern)
        ]
        for option, kinds in _FORMAT_OPTIONS.items():
            if getattr(self, option) != Files.model_fields[option].default and all(
                choice is not None and option not in choice[0].options for choice in formats
            ):
                raise ValueError(
                    f"{option}: {getattr(self, option)} applies to {kinds} files only, and no URL names one; delete it"
                )
        signs = {"delimiter": self.delimiter, "quote": self.quote or QUOTE, "escape": self.escape}
        for one, other in combinations(signs, 2):
            if signs[one] is not None and signs[one] == signs[other]:
                raise ValueError(f"{one} and {other} are both {signs[one]}; they must differ; write the file's own")
        if self.file_format is None:
            require_known_suffixes(self.all_urls)
        return self


_FORMAT_OPTIONS = {
    "sample_by": ".txt",
    "encoding": "text",
    "field": "JSON",
    **dict.fromkeys(DIALECT_OPTIONS, "CSV and TSV"),
}
"""Options that apply to the files of some formats only."""


def require_known_suffixes(values: list[str]) -> list[str]:
    """Return the URLs if each names a folder or a kind of file that can be read."""
    # A folder may have any name.
    for pattern in values:
        for url in urls.expand_braces(pattern):
            text = urls.extract_suffix_text(url)
            name = text.rpartition("/")[2]
            suffix = name[name.find(".") :] if "." in name.lstrip(".") else ""
            if suffix and not urls.is_pattern(suffix) and choose_file_format(name) is None:
                raise ValueError(_explain_unknown_suffix(url))
    return values


def _explain_unknown_suffix(url: str) -> str:
    return (
        f"{public_url(url)!r} has no known suffix; allowed are {join_choices(FORMATS_BY_SUFFIX)}, also followed by "
        f"{join_choices(codec for codec in CODECS if codec)}; rename the file, narrow the glob, end a folder's URL "
        "with '/', or name the format of all files in source.file_format"
    )


@dataclass(frozen=True, slots=True)
class StoreStager:
    """A `ContentStager` in a folder of a store; an existing copy is not written again."""

    store: Store
    folder: str

    def __call__(self, name: str, content: bytes) -> str:
        """Store the bytes atomically; return the copy's absolute path or URL."""
        relative = f"{self.folder}/{name}"
        if not self.store.exists(relative):
            self.store.write(relative, content)
        path = self.store.path(relative)
        return os.path.abspath(path) if self.store.is_local else path


def find_files(source: Files, base: Path, *, keeps_non_finite: bool = False) -> list[SourceFile]:
    """Return the files of a source: training ones first, URLs as written, globs by code point.

    Held-out files have their split as a hint, and so have training files beside validation ones; otherwise row hashes
    decide the split.
    """
    misses: list[str] = []
    suffixes = SUFFIXES if source.file_format is None else ("",)
    found: list[tuple[str, Split | None]] = []
    for split, patterns in source.urls_by_split.items():
        hint = None if split == "train" and not source.validation_urls else split
        for pattern in itertools.chain.from_iterable(map(urls.expand_braces, patterns)):
            matches = urls.find_urls(pattern, base, suffixes)
            if not matches:
                misses.append(public_url(pattern))
            if source.named_splits == "refuse":
                _require_own_split(pattern, split, matches)
            found += ((url, hint) for url in matches)
    if misses:
        raise SourceError(
            f"found no data at {', '.join(misses)} (relative paths start at {base}); a source must not be missing, "
            "since its share would go to the others; correct the URLs or fetch the files"
        )
    seen: dict[str, str] = {}
    files: list[SourceFile] = []
    for url, hint in found:
        chosen = choose_file_format(url, source.file_format)
        if chosen is None:
            raise ConfigError(_explain_unknown_suffix(url))
        files.append(SourceFile(url, hint, source, *chosen, keeps_non_finite=keeps_non_finite))
        where = urls.locate_url(url, base)
        identity = where.identity
        if identity in seen:
            raise ConfigError(
                f"{where.url}: this file is already named, as {seen[identity]}; its rows would count twice; a source "
                "may name a file once; remove it from one of the URLs (to repeat a dataset, raise its weight)"
            )
        seen[identity] = where.url
    return files


def _require_own_split(pattern: str, split: Split, found: list[str]) -> None:
    """Refuse a folder or glob with files that are named for another split than the one that it is given for."""
    others = [
        (url, named) for url in found if (named := split_names.find_split_name(pattern, url)) not in (None, split)
    ]
    if not others:
        return
    shown = ", ".join(f"{public_url(url)} ({named})" for url, named in others[:3])
    more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
    splits = {split, *(named for _, named in others)}
    lists = ", ".join(f"{name}_urls" for name in split_names.SPLIT_WORDS if name in splits)
    are = "is" if len(others) == 1 else "are"
    raise ConfigError(
        f"{public_url(pattern)}: {len(others):,} of its {len(found):,} files {are} named for another split than "
        f"source.{split}_urls, which holds it: {shown}{more}; allowed are files of that split, or named for none; name "
        f"the files of each split apart ({lists}), as rowmill init does, or set source.named_splits: ignore if their "
        "names mean something else"
    )


def scan_file(
    file: SourceFile,
    base: Path,
    stager: ContentStager,
    earlier_scans: Mapping[str, FileScan],
    *,
    first_records: int | None = None,
) -> FileScan:
    """Read a file once and return its parts; for an unchanged file, return its known scan without reading.

    With `first_records`, scan it as if it ended after them. Equal parts still have equal ids; `number_equal_parts` over
    a dataset's scans makes them distinct.
    """
    where = urls.locate_url(file.url, base)
    if first_records is not None:
        return _read_file(file, where, "", stager, first_records)
    # Taken before reading: a file that changes meanwhile will not match the stamp the next time.
    stamp = urls.stamp_file(where)
    earlier = earlier_scans.get(where.url)
    if earlier is not None and is_valid_scan(earlier, stamp, file.limits, base):
        actual = find_file_format(earlier.reader)
        if (earlier.reader_version, earlier.asked) == (actual.version, file.list_asked(actual)):
            return assign_split_hint(earlier, file.split_hint)
    return _read_file(file, where, stamp, stager, None)


def is_valid_scan(scan: FileScan, stamp: str, limits: Limits, base: Path) -> bool:
    """Return whether an earlier scan is of the same content and limit, and its staged copies are still there."""
    expected = (SCAN_VERSION, stamp, limits.max_record_bytes)
    return (
        bool(stamp)
        and (scan.version, scan.stamp, scan.max_record_bytes) == expected
        and all(part.staged is None or urls.file_exists(urls.locate_url(part.staged, base)) for part in scan.parts)
    )


def _read_file(
    file: SourceFile, where: urls.Location, stamp: str, stager: ContentStager, first_records: int | None
) -> FileScan:
    encoding: str | None = None

    def open_decoded() -> BinaryIO:
        nonlocal encoding
        raw = urls.open_raw(where)
        if file.is_seekable:
            return raw
        content = open_content(raw, file.codec, where.url)
        if not file.format.is_text:
            return content
        stream, encoding = open_utf8(content, where.url, file.options.encoding)
        return stream

    actual = file.format.detect(open_decoded, file)
    scan = FileScan(
        where.url, file.split_hint, actual.name, stamp, records=0, parts=(),
        max_record_bytes=file.limits.max_record_bytes, asked=file.list_asked(actual), reader_version=actual.version,
    )  # fmt: skip
    scan = actual.note_options(scan, file, open_decoded)
    with open_decoded() as stream:
        cut = actual.cut_parts(stream, scan, file)
        # A URL with a secret is recorded without the secret, so the recorded URL cannot be opened again.
        can_reopen = where.url == file.url and not urls.is_web(where.url)
        is_staged = not actual.is_own_lines or file.codec != "" or not can_reopen or encoding is not None
        cut = cut if first_records is None else take_first_records(cut, first_records)
        parts = stage_parts(cut, scan, stager, is_staged=is_staged, is_arrow=actual.is_arrow)
    scan = replace(scan, parts=parts, records=sum(part.records for part in parts), encoding=encoding)
    return replace(scan, columns=actual.read_columns(scan, file, open_decoded))


def stage_parts(
    slices: Iterable[PartContent], scan: FileScan, stager: ContentStager, *, is_staged: bool, is_arrow: bool
) -> tuple[SourcePart, ...]:
    """Name the slices of a file, and stage all of them, or only those whose content differs from the file's bytes.

    Equal parts still have equal ids; `number_equal_parts` makes them distinct.
    """
    parts: list[SourcePart] = []
    for index, piece in enumerate(slices):
        sha256 = hashlib.sha256(piece.content).hexdigest()
        staged = stager(f"{sha256}.jsonl", piece.content) if is_staged or not piece.is_whole else None
        parts.append(SourcePart(
            scan.url, scan.split_hint, index, piece.offset, piece.length, piece.first_line, piece.first_record,
            piece.records, sha256, part_id=sha256[:16], reader=scan.reader, arrow=is_arrow, stamp=scan.stamp,
            staged=staged, content_bytes=len(piece.content), lines=piece.lines,
        ))  # fmt: skip
    return tuple(parts)


def describe_reading(scan: FileScan) -> list[str]:
    """Describe how a file is read that is not laid out as its name says: what follows `is read`."""
    chosen = choose_file_format(scan.url)
    is_named_lines = chosen is not None and chosen[0] is json_files.LINES_FORMAT
    notes: list[str] = []
    if scan.reader == json_files.STREAM_FORMAT.name:
        notes.append("as JSON objects one after another, not one per line")
    if scan.reader == json_files.ARRAY_FORMAT.name and is_named_lines:
        notes.append("as one JSON list, not as JSON Lines")
    if scan.encoding is not None and "encoding" not in scan.asked:
        notes.append(f"as {scan.encoding.upper()}, not as UTF-8")
    return notes + (scan.dialect.describe(scan.asked) if scan.dialect is not None else [])
