"""Records as `rowmill inspect` shows them: in the examples that a build makes, built or not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import ConfigError
from rowmill.inspection import inspect
from rowmill.inspection.inspect import MAX_SHOWN_EXAMPLES, InspectedRecord
from tests.support.cli_project import list_files, run
from tests.support.recipes import Workspace
from tests.support.tables import as_csv, grouped, purchases, records

pytestmark = pytest.mark.slow

TO_EXAMPLES = ("raw_dataset", "canonical_rows", "tokenized_examples")
FORMS: Mapping[str, dict[str, Any]] = {
    "tabular": {"data": {"max_sequences_per_example": 10}, "training": {"num_input_records_to_sample": 150}},
    "grouped": grouped(),
    "sequential": {**grouped(), "time_series": {"is_timeseries": True}},
}


def workspace_of(folder: Path, mode: str) -> Workspace:
    workspace = Workspace(folder)
    source = {"train_urls": [workspace.write("table.csv", as_csv(purchases(60)))]}
    return workspace.recipe({"rows": {"source": source, "format": records(**FORMS[mode])}}, seq_len=1024)


def looked_at(workspace: Workspace, count: int = 3, row: str | None = None) -> list[InspectedRecord]:
    return list(inspect.inspect_rows(workspace.project, count=count, dataset=None, row_id=row))


def text_of(one: inspect.InspectedExample) -> str:
    return "".join(stretch.text for stretch in one.stretches)


def shown(rows: list[InspectedRecord]) -> dict[str, tuple[int, int]]:
    return {sample.example_id: (sample.tokens, sample.trained_tokens) for one in rows for sample in one.samples}


@pytest.mark.parametrize("mode", FORMS)
def test_examples_shown_are_those_of_the_build_whether_it_was_made_or_not(tmp_path: Path, mode: str) -> None:
    workspace = workspace_of(tmp_path, mode)
    before = list_files(tmp_path)
    unbuilt = looked_at(workspace, 60)
    assert list_files(tmp_path) == before
    built = workspace.build(only=TO_EXAMPLES).examples()

    after = looked_at(workspace, 60)
    assert after == unbuilt
    stored = {one["example_id"]: (one["tokens"], one["trained_tokens"]) for one in built}
    assert shown(after).items() <= stored.items()
    assert max(len(one["row_ids"]) for one in built) > 1
    # Each record names all examples that it is in: shown under it, above it, or counted.
    for one in after:
        own = [example["example_id"] for example in built if one.row_id in example["row_ids"]]
        named = [sample.example_id for sample in one.samples] + list(one.shown_above)
        assert set(named) <= set(own)
        assert len(named) + one.not_shown == len(own)
        assert len(one.samples) <= MAX_SHOWN_EXAMPLES
    if mode != "tabular":
        assert shown(after) == stored


def test_few_records_are_shown_as_in_the_whole(tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path, "tabular")
    whole = {one.row_id: one for one in looked_at(workspace, 60)}

    [first] = looked_at(workspace, 1)
    [by_id] = looked_at(workspace, 1, first.row_id)

    assert first.samples == whole[first.row_id].samples
    assert by_id == first
    for sample in first.samples:
        assert text_of(sample).count('"customer":') > 1
    with pytest.raises(ConfigError, match="no row of rows has this id"):
        looked_at(workspace, 1, "0000000000000000:7")


def test_examples_are_made_anew_once_the_recipe_or_the_source_has_changed(tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path, "grouped")
    workspace.build(only=TO_EXAMPLES)
    source = {"train_urls": [workspace.write("table.csv", as_csv(purchases(90)))]}
    kept = list_files(workspace.store)
    more = looked_at(workspace, 60)
    form = records(**grouped(max_sequences_per_example=1))
    workspace.recipe({"rows": {"source": source, "format": form}}, seq_len=1024)
    single = looked_at(workspace, 60)

    assert list_files(workspace.store) == kept
    for looked in (more, single):
        assert shown(looked)
    assert all(text_of(sample).count("<|im_start|>") == 1 for one in single for sample in one.samples)
    built = workspace.build(only=TO_EXAMPLES).examples()
    stored = {one["example_id"]: (one["tokens"], one["trained_tokens"]) for one in built}
    assert shown(single).items() <= stored.items()


def test_terminal_names_an_example_that_stands_above(tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path, "sequential")
    out = run("inspect", str(workspace.config), "-n", "20").out
    assert out.count("  example ") == len(shown(looked_at(workspace, 20)))
    assert ", above" in out
