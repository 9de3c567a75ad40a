"""Generated records as a source: those that `parsed_records` or `generated_series` accepted.

The version is looked up whenever the source is scanned, as for files: it may belong to another recipe. Once found, it
is an input of `raw_dataset` like any other, so the gate judges it and all its ancestors, and its manifest names it.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rowmill.core.config import Config
from rowmill.core.errors import SourceError, join_choices
from rowmill.core.stage_names import GENERATED_SERIES, PARSED_RECORDS
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.sources.files import ContentStager, is_valid_scan, stage_parts
from rowmill.sources.options import Limits
from rowmill.sources.parts import FileScan, cut_rows, number_equal_parts

GenerationStage = Literal["parsed_records", "generated_series"]


class GeneratedSource(Config):
    """Records that a model generated: those that `rowmill parse` or `rowmill generate` last accepted."""

    kind: Literal["generated"] = "generated"
    """May be omitted if `generated` is set."""

    generated: str
    """The records dataset that the model was trained on: a dataset of this recipe, or `recipe/dataset` of another
    recipe in the same storage."""

    stage: GenerationStage | None = None
    """Which of the two stages is read; null: the one that is built."""

    limits: Limits = Limits()
    """Limits on the size of a record."""

    license: str | None = Field(default=None, min_length=1)
    """Licence of the records, which `rowmill card` states: an SPDX identifier such as `apache-2.0`, a name or a URL.
    Does not change the bytes."""

    tags: list[str] = Field(default=[])
    """Names under which the dataset's evaluation is grouped; the dataset's name is always added."""

    @field_validator("generated")
    @classmethod
    def _require_dataset_name(cls, name: str) -> str:
        if not all(name.split("/")) or name.count("/") > 1:
            raise ValueError(f"expected DATASET or RECIPE/DATASET, got {name!r}; correct it")
        return name

    def dataset_key(self, recipe: str) -> tuple[str, str]:
        """Return the recipe and the dataset that the records were generated from."""
        first, slash, second = self.generated.partition("/")
        return (first, second) if slash else (recipe, first)

    def list_validation_options(self) -> tuple[str, ...]:
        """Return nothing: generated records have no rows of their own for validation."""
        return ()

    def check_recipe(self, name: str, recipe: RecipeSummary) -> None:
        """Refuse a source, of the dataset `name`, that no dataset of its recipe makes; another recipe is read later."""
        own_recipe, origin = self.dataset_key(recipe.name)
        able = [other for other, dataset in recipe.datasets.items() if other != name and dataset.makes_records]
        if own_recipe == recipe.name and origin not in able:
            raise ValueError(
                f"datasets.{name}.source.generated: {origin!r} is not another dataset of this recipe with a "
                f"format.generation block; {'there is ' + join_choices(able) if able else 'there is none'}; "
                "name one, or recipe/dataset of another recipe"
            )


CLI_VERBS: Mapping[GenerationStage, str] = {PARSED_RECORDS: "parse", GENERATED_SERIES: "generate"}
"""The command that runs each stage."""


def find_generated_version(store: Store, source: GeneratedSource, recipe: str) -> Manifest:
    """Return the version of the stage that a source reads; there must be one."""
    key = source.dataset_key(recipe)
    stages = tuple(CLI_VERBS) if source.stage is None else (source.stage,)
    built = {stage: output for stage in stages if (output := manifest.load_current(store, (*key, stage))) is not None}
    if not built:
        verbs = " or ".join(f"`rowmill {CLI_VERBS[stage]} {key[0]}`" for stage in stages)
        raise SourceError(
            f"source.generated: {source.generated}: {' and '.join(stages)} of {'/'.join(key)} were never built in this "
            f"storage; expected generated records; run {verbs}, or name another dataset"
        )
    if len(built) > 1:
        raise SourceError(
            f"source.generated: {source.generated}: {' and '.join(built)} both have records; only one can be read; set "
            "source.stage"
        )
    return next(iter(built.values()))


def scan_generated(
    store: Store,
    output: Manifest,
    source: GeneratedSource,
    base: Path,
    stager: ContentStager,
    earlier_scans: Mapping[str, FileScan],
) -> list[FileScan]:
    """Return the records of a version as parts, staged unless this version is, as `scan_source` does for all others."""
    url = f"generated:{'/'.join(output.key)}"
    limit = source.limits.max_record_bytes
    earlier = earlier_scans.get(url)
    if earlier is not None and is_valid_scan(earlier, output.version, source.limits, base):
        return number_equal_parts([earlier])
    lines = (
        text.encode()
        for file in output.files("records")
        for text in store.table(file, ["record"]).column(0).to_pylist()
    )
    scan = FileScan(url, None, "json_lines", output.version, 0, (), max_record_bytes=limit)
    parts = stage_parts(cut_rows(lines, limit), scan, stager, is_staged=True, is_arrow=False)
    return number_equal_parts([replace(scan, parts=parts, records=sum(part.records for part in parts))])
