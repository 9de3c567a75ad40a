"""The files of a source: scanned, with their copies staged in a hidden folder beside them, and read into records."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rowmill.core.storage import Store
from rowmill.sources import Files, FileScan, RawRecord, StoreStager, read_records, scan_source


def stager(folder: Path) -> StoreStager:
    return StoreStager(Store(str(folder / ".stage")), "raw")


def scan_files(folder: Path, *urls: str, known: dict[str, FileScan] | None = None, **options: Any) -> list[FileScan]:
    """Scan files of a folder, all of them if no URL is given; `options` are those of the source."""
    source = Files.model_validate({"train_urls": list(urls or ["."]), **options})
    return scan_source(source, folder, stager(folder), known or {})


def scan_content(folder: Path, name: str, content: bytes | str, **options: Any) -> FileScan:
    """Write one file and scan it."""
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    [scan] = scan_files(folder, name, **options)
    return scan


def records(scans: Iterable[FileScan], folder: Path) -> list[RawRecord]:
    return [record for scan in scans for part in scan.parts for record in read_records(part, folder)]


def values(scans: Iterable[FileScan], folder: Path) -> list[Any]:
    return [record.value for record in records(scans, folder)]


def reasons(found: Iterable[RawRecord]) -> list[str | None]:
    """Return why each record was rejected, None for those that were not."""
    return [record.rejected.reason if record.rejected else None for record in found]
