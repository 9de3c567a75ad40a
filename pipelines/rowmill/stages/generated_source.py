"""Finds the generated records that a source reads: the current version of an on-demand stage.

The version is looked up whenever the source is scanned, as for files: it may belong to another recipe. Once found, it
is an input of `raw_dataset` like any other, so the gate judges it and all its ancestors, and its manifest names it.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_args

from rowmill import sources
from rowmill.core.errors import SourceError
from rowmill.core.stage_names import GENERATED_SERIES, PARSED_RECORDS
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest
from rowmill.sources import ContentStager, FileScan, GeneratedSource, GenerationStage

GENERATION_STAGES: tuple[GenerationStage, ...] = get_args(GenerationStage)
CLI_VERBS: Mapping[GenerationStage, str] = {PARSED_RECORDS: "parse", GENERATED_SERIES: "generate"}
"""The command that runs each stage."""


def find_generated_version(store: Store, source: GeneratedSource, recipe: str) -> Manifest:
    """Return the version of the stage that a source reads.

    Raises
    ------
    SourceError
        If nothing was generated, or both stages have records and the source names none.

    """
    key = source.dataset_key(recipe)
    wanted = GENERATION_STAGES if source.stage is None else (source.stage,)
    made = {stage: one for stage in wanted if (one := manifest.load_current(store, (*key, stage))) is not None}
    if not made:
        verbs = " or ".join(f"`rowmill {CLI_VERBS[stage]} {key[0]}`" for stage in wanted)
        raise SourceError(
            f"source.generated: {source.generated}: {' and '.join(wanted)} of {'/'.join(key)} were never built in this "
            f"storage; expected generated records; run {verbs}, or name another dataset"
        )
    if len(made) > 1:
        raise SourceError(
            f"source.generated: {source.generated}: {' and '.join(made)} both have records; only one can be read; set "
            "source.stage"
        )
    return next(iter(made.values()))


def scan_generated(
    store: Store,
    output: Manifest,
    source: GeneratedSource,
    base: Path,
    stager: ContentStager,
    known: Mapping[str, FileScan],
) -> list[FileScan]:
    """Return the records of a version as parts, as `sources.scan_source` does for all other sources."""
    url = f"generated:{'/'.join(output.key)}"
    one = sources.scan_records(source, url, output.version, _read_record_lines(store, output), base, stager, known)
    return sources.number_equal_parts([one])


def _read_record_lines(store: Store, output: Manifest) -> Iterator[bytes]:
    for file in output.files("records"):
        for text in store.table(file, ["record"]).column(0).to_pylist():
            yield text.encode()


def copy_generated(store: Store, placed: Store, read: Iterable[Manifest]) -> None:
    """Copy the files of the versions that a source reads into another store, for a build there."""
    for file in (file for made in read for part in made.parts for file in part.files.values()):
        placed.write(file.path, store.content(file).to_pybytes())
