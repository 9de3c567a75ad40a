"""Exports of a build, opened with all checks and read with `datasets`."""

from typing import Any

from rowmill.exports import Exported, open_export
from rowmill.stages.exports import locate_export
from tests.support.recipes import Built


def open_built_export(built: Built, name: str) -> Exported:
    """Return an export of a build, whose content was conserved and whose counts are those of its card."""
    made = built.manifest("exports", name)
    exported = open_export(built.project.store.local(locate_export(made)), verify=True)
    assert made.facts["conservation"] == 0
    assert exported.count("trained_tokens") == exported.card["counts"]["trained_tokens"]
    return exported


def load_rows(built: Built, name: str) -> Any:
    """Return the rows of an export of Parquet files, as `datasets` loads them."""
    import datasets

    exported = open_built_export(built, name)
    files = sorted(map(str, exported.data.glob("*.parquet")))
    cache = str(built.project.store.local("cache"))
    return datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
