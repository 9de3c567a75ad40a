"""Records in Dagster: a group that does not fit fails its asset by name, and its page shows how large groups are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tests.support.tables import as_csv, grouped, purchases, records
from tests.support.tiny_project import FOREIGN_WARNINGS, Tiny, built, refusals

pytestmark = [*FOREIGN_WARNINGS, pytest.mark.slow]


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Tiny]:
    """Lend a project of one grouped table, of which one customer has far more rows than the others."""
    with dg.DagsterInstance.ephemeral() as instance:
        tiny = Tiny(tmp_path, instance)
        (tmp_path / "data").mkdir()
        many = [{**row, "customer": "C-099"} for row in purchases(60)]
        (tmp_path / "data" / "purchases.csv").write_bytes(as_csv([*purchases(48), *many]))
        source = {"train_urls": ["data/purchases.csv"]}
        dataset = {"source": source, "format": records(**grouped()), "splits": {"test": 0}}
        yield tiny.write_recipe(datasets={"purchases": dataset}, seq_len=1024, defaults={})


def test_group_that_does_not_fit_fails_its_asset_by_name_and_nothing_follows(tables: Tiny) -> None:
    result = tables.run()

    [said] = [text for step, text in refusals(result).items() if "tokenized_examples" in step]
    assert "1 group does not fit: customer='C-099' needs" in said
    assert "limit 1024" in said
    assert built(result) == {("tiny", "purchases", stage) for stage in ("raw_dataset", "canonical_rows")}


def test_page_of_rows_shows_group_sizes_their_limit_and_the_largest_by_name(tables: Tiny) -> None:
    tables.run()

    event = tables.instance.get_latest_materialization_event(tables.key("purchases", "canonical_rows"))
    assert event is not None
    assert event.asset_materialization is not None
    page = event.asset_materialization.metadata
    assert page["group_size"].value == 60
    assert "plot group_sizes" in page
    assert str(page["plot group_sizes"].value).startswith("![group sizes]")
    largest = lines_of(page["table largest_groups"])
    assert largest[0]["group"] == '"C-099"'
    assert len(largest) == 10
    assert "dominant" in [line["about"] for line in lines_of(page["table group_advice"])]


def lines_of(entry: Any) -> list[dict[str, Any]]:
    return [record.data for record in entry.value.records]
