"""Source files → parts: every file is read once and cut into parts with digests; columns are untouched.

What belongs here: scanning, and what a person wants to know about the files. What does not: records.
"""

from pipelines import sources
from pipelines.manifest import Table
from pipelines.sources import FileScan
from pipelines.stages import Draft, Work
from pipelines.storage import digest

VERSION = 1


def scans_of(work: Work) -> list[FileScan]:
    """Scan a dataset's source; files whose stamp did not move since the last build are not read again."""
    from pipelines import manifest

    earlier = manifest.current(work.store, work.key)
    known = [FileScan.from_json(one) for one in earlier.details["scans"]] if earlier else []
    stage = sources.StageIn(work.store, f"{work.folder}/staged")
    return sources.scan(work.dataset.source, work.base, stage, {scan.url: scan for scan in known})


def fingerprint(scans: list[FileScan]) -> str:
    """Identify what the source holds: the parts' digests and places, not where the files lie."""
    parts = [[p.part_id, p.sha256, p.split_hint, p.reader, p.arrow] for scan in scans for p in scan.parts]
    return digest("raw_dataset", VERSION, sources.VERSION, [[scan.url, scan.records] for scan in scans], parts)


def make(work: Work, scans: list[FileScan]) -> Draft:
    """Report what a scan found."""
    parts = [part for scan in scans for part in scan.parts]
    sizes = [sum(p.length for p in scan.parts) for scan in scans]
    files = [
        (scan.url.rsplit("/", 1)[-1], scan.reader, scan.records, len(scan.parts), size)
        for scan, size in zip(scans, sizes, strict=True)
    ]
    columns = next((scan.columns for scan in scans if scan.columns), None) or {}
    return Draft(
        facts={
            "nonempty": sum(scan.records for scan in scans),
            "records": sum(scan.records for scan in scans),
            "files": len(scans),
            "empty_files": sum(1 for scan in scans if not scan.records),
            "parts": len(parts),
        },
        tables={"files": Table(("file", "reader", "records", "parts", "size"), tuple(files[:30]))},
        schema=tuple(columns.items()),
        card={"parts": digest([[p.part_id, p.sha256] for p in parts])},
        details={"scans": [scan.to_json() for scan in scans]},
        parts_reused=0,
        rows_made=sum(scan.records for scan in scans),
    )


def parts_of(details: dict[str, object]) -> list[sources.Part]:
    """Recover the parts from a `raw_dataset` manifest's details."""
    scans = details["scans"]
    assert isinstance(scans, list)
    return [part for one in scans for part in FileScan.from_json(one).parts]
