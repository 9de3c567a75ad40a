"""Read raw records from files on any storage, from a Hugging Face dataset, or from records that a model generated.

scan   every file is read once: parts with digests and counts; unchanged files are not read (`files.py`)
group  small files whose rows are made together (`reading.py`)
read   a part's bytes, verified, as raw records; bad lines as rejects (`reading.py`)
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Discriminator, Tag

from rowmill.core.errors import PipelineError
from rowmill.core.remote import public_url
from rowmill.sources import urls
from rowmill.sources.files import (
    ContentStager,
    Files,
    StoreStager,
    describe_reading,
    find_file_format,
    find_files,
    scan_file,
)
from rowmill.sources.generated import GeneratedSource, GenerationStage
from rowmill.sources.huggingface import HuggingFaceSource, scan_dataset
from rowmill.sources.parts import SCAN_VERSION, FileScan, SourceFile, SourcePart, number_equal_parts
from rowmill.sources.reading import (
    PartGroup,
    RawRecord,
    describe_place,
    find_part_line,
    group_parts,
    read_part_bytes,
    read_records,
)

__all__ = [
    "SCAN_VERSION",
    "ContentStager",
    "FileScan",
    "Files",
    "GeneratedSource",
    "GenerationStage",
    "HuggingFaceSource",
    "PartGroup",
    "RawRecord",
    "Source",
    "SourceFile",
    "SourcePart",
    "StoreStager",
    "describe_place",
    "describe_reading",
    "find_file_format",
    "find_files",
    "find_part_line",
    "group_parts",
    "public_url",
    "read_part_bytes",
    "read_records",
    "scan_source",
    "sum_local_bytes",
]


def _choose_source_kind(value: Any) -> str:
    if isinstance(value, Files | HuggingFaceSource | GeneratedSource):
        return value.kind
    options: dict[str, object] = dict(value) if isinstance(value, dict) else {}
    inferred = "generated" if "generated" in options else "huggingface" if "id" in options else "files"
    return str(options.get("kind", inferred))


Source: TypeAlias = Annotated[
    Annotated[Files, Tag("files")]
    | Annotated[HuggingFaceSource, Tag("huggingface")]
    | Annotated[GeneratedSource, Tag("generated")],
    Discriminator(_choose_source_kind),
]
"""A dataset's `source`; `kind` may be omitted: `train_urls`, `id` or `generated` implies it."""


def sum_local_bytes(source: Source, base: Path) -> int:
    """Return the bytes of a source's local files, an estimate of the work ahead; 0 if it takes requests or fails."""
    if not isinstance(source, Files):
        return 0
    if any(map(urls.is_remote, source.all_urls)):
        return 0
    try:
        return sum(os.path.getsize(urls.locate_url(file.url, base).path) for file in find_files(source, base))
    except (PipelineError, OSError):
        # Whoever reads the source says so.
        return 0


def scan_source(
    source: Files | HuggingFaceSource,
    base: Path,
    stager: ContentStager,
    earlier_scans: Mapping[str, FileScan],
    *,
    keeps_non_finite: bool = False,
    first_records: int | None = None,
) -> list[FileScan]:
    """Read each file of a source once and return its parts, in recipe order, training files first.

    `earlier_scans` are by URL: a file whose stamp is unchanged is not read again. With `first_records`, only so many
    records of one file per format and split are read. With `keeps_non_finite`, NaN and infinity of typed sources become
    the texts that records datasets have for them; otherwise null.
    """
    match source:
        case Files():
            files = find_files(source, base, keeps_non_finite=keeps_non_finite)
            if first_records is not None:
                # One of each format and split shows every way in which the files are read.
                first = {(file.split_hint, file.format, file.suffix, file.codec): file for file in files[::-1]}
                files = [file for file in files if any(file is one for one in first.values())]
            scans = [scan_file(file, base, stager, earlier_scans, first_records=first_records) for file in files]
        case HuggingFaceSource():
            scans = scan_dataset(
                source, base, stager, earlier_scans, keeps_non_finite=keeps_non_finite, first_records=first_records
            )
    return number_equal_parts(scans)
