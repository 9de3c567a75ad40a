"""Source files → parts: every file is read once and cut into parts with digests; columns are not changed."""

from collections.abc import Sequence
from typing import Any

from rowmill import sources
from rowmill.core.arrays import format_count
from rowmill.core.stage_names import RAW_DATASET
from rowmill.core.storage import digest_json
from rowmill.parts.context import StageOutput
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.counts import CountSet
from rowmill.schema.manifest import DisplayTable
from rowmill.schema.source_counts import SourceCounts
from rowmill.sources import FileScan, GeneratedSource, PartGroup, reading
from rowmill.sources.generated import scan_generated
from rowmill.sources.reading import load_scans
from rowmill.stages.base import PreparedStage, StageContext, StageDeclaration
from rowmill.stats.tables import StatsInputs, count_rows_of

VERSION = 2


def _load_earlier_scans(context: StageContext) -> dict[str, FileScan]:
    """Return the last build's scan of each file."""
    known = load_scans(manifest.load_current_if_intact(context.store, context.key))
    return {scan.url: scan for scan in known}


def identify_raw_dataset(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide how sources are read: not tags of evaluation, nor when it is read."""
    source = recipe.datasets[name].source.model_dump(mode="json", exclude={"license", "tags", "after"})
    # What decides rows is part of their identity: files are read without it.
    source["limits"].pop("max_run_chars")
    return {"versions": [VERSION, sources.SCAN_VERSION], "source": source}


def prepare_raw_dataset(context: StageContext, *, first_records: int | None = None) -> PreparedStage:
    """Scan the source; its content is identified by the digests and places of its parts.

    Files whose stamp did not change since the last build are not read again. With `first_records`, scan that many
    records of one file per format and split; generated records are read whole.
    """
    stage, source = sources.StoreStager(context.store, f"{context.folder}/staged"), context.dataset.source
    if isinstance(source, GeneratedSource):
        [made] = context.inputs.values()
        scans = scan_generated(context.store, made, source, context.base, stage, _load_earlier_scans(context))
    else:
        keeps = context.dataset.keeps_non_finite
        earlier = _load_earlier_scans(context) | dict(context.ahead.scans) if first_records is None else {}
        scans = sources.scan_source(
            source, context.base, stage, earlier, keeps_non_finite=keeps, first_records=first_records
        )
    parts = [[p.part_id, p.sha256, p.split_hint, p.reader, p.arrow] for scan in scans for p in scan.parts]
    groups = sources.group_parts(scans)
    # Which files share a group, and the delimiter and quote of each CSV file, are part of the version.
    shared = digest_json(reading.GROUPING_VERSION, [len(group) for group in groups])
    dialects = [[scan.url, scan.dialect.delimiter, scan.dialect.quote] for scan in scans if scan.dialect is not None]
    outside = [[scan.url, scan.records] for scan in scans], parts, shared, dialects
    identity = {"groups": shared, "dialects": digest_json(dialects)}
    return PreparedStage(outside, lambda: make_raw_dataset(context, scans, groups, identity))


def _summarize_source(counts: CountSet, rows: str) -> Sequence[str]:
    source = counts.get(SourceCounts)
    return rows, format_count(source.files, "file"), format_count(source.parts, "part")


STAGE = StageDeclaration(
    name=RAW_DATASET,
    counts=SourceCounts,
    description="Source files, read once and cut into parts with digests; columns are not changed.",
    identity=identify_raw_dataset,
    prepare=prepare_raw_dataset,
    stats_inputs=StatsInputs(
        count_rows_of(SourceCounts, lambda counts: counts.records, "record"), files={"rejects": "rejects"}
    ),
    summarize=_summarize_source,
)


def make_raw_dataset(
    context: StageContext, scans: list[FileScan], groups: list[PartGroup], identity: dict[str, str]
) -> StageOutput:
    """Build the output from the scans; `identity` is what its card says beside their parts."""
    columns = next((scan.columns for scan in scans if scan.columns), None) or {}
    doubtful = [scan for scan in scans if scan.dialect is not None and scan.dialect.looks_headless]
    earlier = _load_earlier_scans(context)
    news = {scan.url: _describe_file_change(scan, earlier.get(scan.url)) for scan in scans}
    order = sorted(scans, key=lambda scan: (news[scan.url] == UNCHANGED, scan.url))
    rows = [
        (
            scan.url.rsplit("/", 1)[-1],
            news[scan.url],
            # With the delimiter if that is not a comma, and what else is unusual.
            ", ".join(
                [
                    f"{scan.reader} by {scan.dialect.delimiter!r}"
                    if scan.dialect is not None and scan.dialect.delimiter != ","
                    else scan.reader,
                    *sources.describe_reading(scan),
                ]
            ),
            scan.records,
            len(scan.parts),
            _digest_scan(scan)[:12],
        )
        for scan in order[:FILES_SHOWN]
    ]
    return StageOutput(
        counts=CountSet.of(
            SourceCounts(
                records=sum(scan.records for scan in scans),
                files=len(scans),
                files_without_records=sum(1 for scan in scans if not scan.records),
                parts=len(groups),
            )
        ),
        tables={
            "files": DisplayTable(("file", "in_this_version", "reader", "records", "parts", "digest"), tuple(rows))
        },
        samples={"doubtful_header": tuple(f"{scan.url} line 1" for scan in doubtful[:10])} if doubtful else {},
        schema=tuple(columns.items()),
        # Names and places are in the lineage of shards, so a renamed file is another version.
        card={
            "parts": digest_json([[p.part_id, p.sha256, p.url, p.first_record] for s in scans for p in s.parts]),
            **identity,
        },
        details={"scans": [scan.to_json() for scan in scans], "groups": [len(group) for group in groups]},
        parts_reused=0,
        rows_made=sum(scan.records for scan in scans),
    )


FILES_SHOWN = 30


UNCHANGED = "as before"


def _describe_file_change(scan: FileScan, earlier: FileScan | None) -> str:
    if earlier is None:
        return "new"
    if _digest_scan(scan) == _digest_scan(earlier):
        return UNCHANGED
    added = scan.records - earlier.records
    return f"changed, {added:+,} records" if added else "changed"


def _digest_scan(scan: FileScan) -> str:
    return digest_json([part.sha256 for part in scan.parts])
