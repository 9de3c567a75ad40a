"""Records in Dagster: a group that does not fit fails its asset by name, and its page shows how large groups are."""

from typing import Any

import pytest

from tests.support.tables import as_csv, grouped, purchases, records
from tests.support.tiny_project import Tiny, built, refusals

pytestmark = pytest.mark.slow


def test_group_that_does_not_fit_fails_its_asset_by_name_and_the_page_of_rows_shows_sizes_and_limit(tiny: Tiny) -> None:
    """One customer has far more rows than the others."""
    many = [{**row, "customer": "C-099"} for row in purchases(60)]
    (tiny.folder / "data" / "purchases.csv").write_bytes(as_csv([*purchases(48), *many]))
    source = {"train_urls": ["data/purchases.csv"]}
    dataset = {"source": source, "format": records(**grouped()), "splits": {"test": 0}}
    result = tiny.write_recipe(datasets={"purchases": dataset}, seq_len=1024, defaults={}).run()
    [said] = [text for step, text in refusals(result).items() if "tokenized_examples" in step]
    assert "1 group does not fit: customer='C-099' needs" in said
    assert "limit 1024" in said
    assert built(result) == {("tiny", "purchases", stage) for stage in ("raw_dataset", "canonical_rows")}
    page = tiny.shown("purchases", "canonical_rows").metadata
    assert page["group_size"].value == 60
    assert "plot group_sizes" in page
    assert str(page["plot group_sizes"].value).startswith("![group sizes]")
    largest = lines_of(page["table largest_groups"])
    assert largest[0]["group"] == '"C-099"'
    assert len(largest) == 10
    assert "dominant" in [line["about"] for line in lines_of(page["table group_advice"])]


def lines_of(entry: Any) -> list[dict[str, Any]]:
    return [record.data for record in entry.value.records]
