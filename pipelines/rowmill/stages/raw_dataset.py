"""Source files → parts: every file is read once and cut into parts with digests; columns are untouched.

What belongs here: scanning, and what a person wants to know about the files. What does not: records.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rowmill import sources
from rowmill.core.number_text import counted
from rowmill.core.storage import digest
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.manifest import Table
from rowmill.sources import FileScan, Generated, Group, sharing
from rowmill.stages import generated_source
from rowmill.stages.base import Draft, Prepared, StageDeclaration, Work
from rowmill.stats import Feeds, by_fact

VERSION = 2


def scans_of(work: Work) -> list[FileScan]:
    """Scan a dataset's source; files whose stamp did not move since the last build are not read again."""
    stage, source = sources.StageIn(work.store, f"{work.folder}/staged"), work.dataset.source
    if isinstance(source, Generated):
        recipe = work.recipe
        return generated_source.scan(
            work.store, source, recipe.name, work.base, stage, _earlier(work), gates=recipe.gates
        )
    return sources.scan(source, work.base, stage, _earlier(work), keeps_non_finite=work.dataset.keeps_non_finite)


def _earlier(work: Work) -> dict[str, FileScan]:
    """Return what the last build knew of each file."""
    earlier = manifest.earlier(work.store, work.key)
    known = [FileScan.from_json(one) for one in earlier.details["scans"]] if earlier else []
    return {scan.url: scan for scan in known}


def identity_of(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return what decides how sources are read; tags are for whoever evaluates."""
    source = recipe.datasets[name].source.model_dump(mode="json", exclude={"tags"})
    for option in ("delimiter", "quote"):
        # Said only where it is set: sources without tables keep their versions.
        if source.get(option) is None:
            source.pop(option, None)
    return {"versions": [VERSION, sources.VERSION], "source": source}


def prepare(work: Work) -> Prepared:
    """Scan the source: what it holds is the parts' digests and places."""
    scans = scans_of(work)
    parts = [[p.part_id, p.sha256, p.split_hint, p.reader, p.arrow] for scan in scans for p in scan.parts]
    groups = sources.group_parts(scans)
    outside = ([[scan.url, scan.records] for scan in scans], parts, *_shared(groups).values(), *_dialects(scans))
    return Prepared(outside, lambda: make(work, scans, groups))


def _shared(groups: list[Group]) -> dict[str, str]:
    """Identify which files share a group; where none does, nothing says so, and what was built without groups holds."""
    if all(len(group) == 1 for group in groups):
        return {}
    return {"groups": digest(sharing.VERSION, [len(group) for group in groups])}


def _dialects(scans: list[FileScan]) -> list[list[Any]]:
    """Name the files whose dialect is not that of their suffix: equal cells written otherwise are another version."""
    return [[scan.url, *found] for scan in scans if (found := sources.unusual_dialect(scan)) is not None]


def _summarize(facts: Mapping[str, Any], rows: str) -> Sequence[str]:
    return rows, counted(facts["files"], "file"), counted(facts["parts"], "part")


STAGE = StageDeclaration(
    name="raw_dataset",
    description="Source files read once and cut into parts with digests; columns untouched.",
    identity=identity_of,
    prepare=prepare,
    feeds=Feeds(by_fact("records", "record"), files={"rejects": "rejects"}),
    summarize=_summarize,
)


def make(work: Work, scans: list[FileScan], groups: list[Group]) -> Draft:
    """Report what a scan found."""
    parts = [part for scan in scans for part in scan.parts]
    columns = next((scan.columns for scan in scans if scan.columns), None) or {}
    return Draft(
        facts={
            "nonempty": sum(scan.records for scan in scans),
            "records": sum(scan.records for scan in scans),
            "files": len(scans),
            "empty_files": sum(1 for scan in scans if not scan.records),
            "parts": len(groups),
        },
        tables={"files": _files_table(scans, _earlier(work))},
        schema=tuple(columns.items()),
        card={"parts": digest([[p.part_id, p.sha256] for p in parts])}
        | _shared(groups)
        | ({"dialects": digest(dialects)} if (dialects := _dialects(scans)) else {}),
        details={"scans": [scan.to_json() for scan in scans], "groups": [len(group) for group in groups]},
        parts_reused=0,
        rows_made=sum(scan.records for scan in scans),
    )


FILES_SHOWN = 30


def _files_table(scans: list[FileScan], earlier: dict[str, FileScan]) -> Table:
    """List the files, those that this version brought or that moved in it first."""
    news = {scan.url: _news(scan, earlier.get(scan.url)) for scan in scans}
    order = sorted(scans, key=lambda scan: (news[scan.url] == AS_BEFORE, scan.url))
    rows = [
        (scan.url.rsplit("/", 1)[-1], news[scan.url], _kind(scan), scan.records, len(scan.parts), _digest(scan)[:12])
        for scan in order[:FILES_SHOWN]
    ]
    return Table(("file", "in_this_version", "reader", "records", "parts", "digest"), tuple(rows))


def _kind(scan: FileScan) -> str:
    """Name what reads a file, and what separates its cells where that is not a comma."""
    return scan.reader if scan.delimiter in (None, ",") else f"{scan.reader} by {scan.delimiter!r}"


AS_BEFORE = "as before"


def _news(scan: FileScan, earlier: FileScan | None) -> str:
    if earlier is None:
        return "new"
    if _digest(scan) == _digest(earlier):
        return AS_BEFORE
    added = scan.records - earlier.records
    return f"changed, {added:+,} records" if added else "changed"


def _digest(scan: FileScan) -> str:
    return digest([part.sha256 for part in scan.parts])
