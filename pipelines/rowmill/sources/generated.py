"""Generated records as a source: those that `parsed_records` or `generated_series` accepted."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rowmill.core.config import Config
from rowmill.sources import urls
from rowmill.sources.files import ContentStager, stage_parts
from rowmill.sources.limits import RecordLimits
from rowmill.sources.parts import SCAN_VERSION, FileScan, cut_rows

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

    limits: RecordLimits = RecordLimits()
    """Limits on the size of a record."""

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


def scan_records(
    source: GeneratedSource,
    url: str,
    version: str,
    records: Iterable[bytes],
    base: Path,
    stager: ContentStager,
    known: Mapping[str, FileScan],
) -> FileScan:
    """Stage records, each one JSON line without its line end, unless this version is staged already."""
    limit = source.limits.max_record_bytes
    earlier = known.get(url)
    if (
        earlier is not None
        and (earlier.version, earlier.stamp, earlier.max_record_bytes) == (SCAN_VERSION, version, limit)
        and all(part.staged and urls.file_exists(urls.locate_url(part.staged, base)) for part in earlier.parts)
    ):
        return earlier
    scan = FileScan(url, None, "json_lines", version, 0, (), max_record_bytes=limit)
    parts = stage_parts(cut_rows(records, limit), scan, stager, is_staged=True, is_arrow=False)
    return replace(scan, parts=parts, records=sum(part.records for part in parts))
