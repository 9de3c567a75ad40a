"""Which generated records a source reads: the current version of a stage behind a trained model.

What belongs here: choosing the stage, its gate, its records as lines, lending them to a store that is gone afterwards.
What does not: staging them (`generated.py`).

The version is looked up whenever the source is scanned, as files are: what a model generated is no output of the road,
and may be another recipe's. Nothing is read past a failed check: the version is judged by the gates of the recipe that
reads it, as all that a recipe builds on.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from rowmill import sources
from rowmill.checks import cross_stage, judge
from rowmill.checks.gates import GatesBase, list_thresholds
from rowmill.core.errors import GateError, SourceError
from rowmill.core.stage_names import GENERATED_SERIES, PARSED_RECORDS
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest
from rowmill.sources import ContentStager, FileScan, GeneratedSource, GenerationStage

GENERATION_STAGES: tuple[GenerationStage, ...] = get_args(GenerationStage)
CLI_VERBS: Mapping[GenerationStage, str] = {PARSED_RECORDS: "parse", GENERATED_SERIES: "generate"}
"""The commands that make them."""


def find_generated_version(store: Store, source: GeneratedSource, recipe: str) -> Manifest:
    """Return the version of the stage that a source reads.

    Raises
    ------
    SourceError
        If nothing was generated, or both stages have something and the source names none.

    """
    key = source.dataset_key(recipe)
    wanted = GENERATION_STAGES if source.stage is None else (source.stage,)
    made = {stage: one for stage in wanted if (one := manifest.load_current(store, (*key, stage))) is not None}
    if not made:
        verbs = " or ".join(f"`rowmill {CLI_VERBS[stage]} {key[0]}`" for stage in wanted)
        raise SourceError(
            f"source.generated: {source.generated}: {' and '.join(wanted)} of {'/'.join(key)} were never made in this "
            f"storage; records that a model generated are needed; run {verbs}, or name another dataset"
        )
    if len(made) > 1:
        raise SourceError(
            f"source.generated: {source.generated}: {' and '.join(made)} both have records; one of them is needed; set "
            "source.stage"
        )
    return next(iter(made.values()))


def require_open_gates(store: Store, made: Manifest, gates: GatesBase, recipe: str) -> None:
    """Refuse generated records that fail a blocking check.

    Raises
    ------
    GateError
        Naming each closed check with its number, threshold and remedy.

    """
    # A waiver names a dataset of the recipe that it stands in.
    dataset = made.key[1] if made.key[0] == recipe else None
    thresholds = list_thresholds(gates, made.stage, dataset, is_table=True)
    asked = [one for one in thresholds if one.severity == "error" and one.check not in cross_stage.CROSS_STAGE_FACTS]
    closed = [
        f"{'/'.join(made.key)}, which source.generated reads: {result.sentence}"
        for result in judge.run_checks(store, made, asked)
        if result.blocking
    ]
    if closed:
        raise GateError("\n".join(closed))


def scan_generated(
    store: Store,
    source: GeneratedSource,
    recipe: str,
    base: Path,
    stage: ContentStager,
    known: Mapping[str, FileScan],
    *,
    gates: GatesBase,
) -> list[FileScan]:
    """Return the records as parts, as `sources.scan` does for all other sources.

    Raises
    ------
    SourceError
        If nothing was generated, or both stages have something and the source names none.
    GateError
        If what was generated fails a blocking check.

    """
    made = find_generated_version(store, source, recipe)
    require_open_gates(store, made, gates, recipe)
    url = f"generated:{'/'.join(made.key)}"
    one = sources.scan_records(source, url, made.version, _read_record_lines(store, made), base, stage, known)
    return sources.number_equal_parts([one])


def _read_record_lines(store: Store, made: Manifest) -> Iterator[bytes]:
    for file in made.files("records"):
        for text in store.table(file, ["record"]).column(0).to_pylist():
            yield text.encode()


def copy_generated(store: Store, placed: Store, source: object, recipe: str) -> None:
    """Copy what a source reads into another store, whose build must find it there; other sources need nothing."""
    if not isinstance(source, GeneratedSource):
        return
    made = find_generated_version(store, source, recipe)
    for file in (file for part in made.parts for file in part.files.values()):
        placed.write(file.path, store.read(file.path))
    manifest.save_manifest(placed, made)
