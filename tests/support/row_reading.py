"""Reads single records by the options of a recipe, as a build reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rowmill.kinds.reading.canonicalization import open_dataset_reader
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Recipe
from rowmill.schema.rows import Rejected, Row


def load(form: Mapping[str, Any], *, groups: Mapping[str, Any] | None = None, **values: Any) -> Recipe:
    """Return a recipe of one dataset, `rows`, of a format; `groups` are the dataset's options."""
    dataset = {"source": {"train_urls": ["a.jsonl"]}, "format": form, **(groups or {})}
    values = {"tokenizer": "t", "seq_len": 64, "datasets": {"rows": dataset}} | values
    return recipe.parse_recipe(values, name="demo", where="configs/demo.yaml")


def read(record: Any, form: Mapping[str, Any], **groups: Any) -> Row | Rejected:
    """Read a record of which a format makes one row or one reject."""
    dataset = load(form, groups=groups).datasets["rows"]
    [row] = open_dataset_reader(dataset, Path(), "rows").read(record, arrow=False)
    return row
