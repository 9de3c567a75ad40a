"""Generated records as the source of a dataset: from a model's texts through a whole build."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dagster_rowmill.definitions import build_definitions
from dagster_rowmill.names import make_asset_key
from rowmill.build import runner, steps
from rowmill.core.errors import GateError, SourceError
from rowmill.inspection import inspect
from rowmill.schema.manifest import StageKey
from tests.support.recipes import LENIENT, TO_ROWS, Built, Workspace
from tests.support.tables import records

pytestmark = pytest.mark.slow

FORM = {"data": {"group_training_examples_by": "shop", "order_training_examples_by": "day"}}
SALES = [{"shop": f"s{shop}", "day": f"2024-01-{day:02d}", "units": day} for shop in range(6) for day in range(1, 6)]
FRESH = [{"shop": f"s{shop}", "day": f"2024-02-{day:02d}", "units": day} for shop in (1, 2) for day in range(1, 4)]
GATES = LENIENT | {"near_duplicate": {"at_most": 1}}


def sales(workspace: Workspace) -> dict[str, Any]:
    return workspace.dataset("rows.jsonl", SALES, records(**FORM, generation={}), splits={"test": 0})


def synthetic(of: str, **source: Any) -> dict[str, Any]:
    return {"source": {"generated": of, **source}, "format": records(**FORM), "splits": {"test": 0}}


def generate(folder: Path, *rows: dict[str, Any], name: str = "a.jsonl") -> None:
    """Write a text for each group, as a model would generate it."""
    target = folder / "generated" / "mini" / "rows"
    target.mkdir(parents=True, exist_ok=True)
    texts = [
        "".join(f"{json.dumps(row)}\n" for row in rows if row["shop"] == shop) for shop in {r["shop"] for r in rows}
    ]
    lines = [json.dumps({"text": text, "finish_reason": "stop"}) for text in texts]
    (target / name).write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture
def trained(tmp_path: Path) -> Workspace:
    """Return a built project of sales without generated texts."""
    workspace = Workspace(tmp_path)
    workspace.recipe({"rows": sales(workspace)}, seq_len=1024, gates=GATES).build()
    return workspace


def made_of(built: Built, dataset: str = "synthetic") -> list[dict[str, Any]]:
    rows = built.rows_of(dataset, "canonical_rows", file="rows")
    return sorted((json.loads(row["record"]) for row in rows), key=lambda row: (row["shop"], row["day"]))


def test_generated_records_are_built_together_with_their_training_records_and_planned_and_shown(
    trained: Workspace,
) -> None:
    generate(trained.folder, *FRESH, {"shop": "s3", "day": "2024-02-01", "units": "many"})
    runner.build(trained.project, only=["parsed_records"])
    both = {"rows": sales(trained), "synthetic": synthetic("rows")}
    built = trained.recipe(both, seq_len=1024, gates=GATES).build()

    # Rejected objects are not records of the source.
    assert made_of(built) == sorted(FRESH, key=lambda row: (row["shop"], row["day"]))
    assert built.facts("synthetic", "tokenized_examples")["accounted"] == 0
    assert built.facts("synthetic", "packed_shards")["conservation"] == 0
    assert {row[0] for row in built.manifest("training_splits").tables["splits"].rows} == {"rows", "synthetic"}

    plans = {one.dataset: one.plan for one in inspect.plan_tables(trained.project)}
    shown = list(inspect.inspect_rows(trained.project, count=6, dataset="synthetic", row_id=None))

    assert plans["synthetic"] is not None
    assert plans["synthetic"].facts["train"]["records"] == 6
    assert len(shown) == 6
    assert all(one.row is not None and one.source.startswith("generated:mini/rows/parsed_records") for one in shown)


def test_another_recipe_reads_generated_records_and_finds_new_ones(trained: Workspace) -> None:
    generate(trained.folder, *FRESH[:3])
    runner.build(trained.project, only=["parsed_records"])
    first_recipe = trained.config.read_text(encoding="utf-8")
    trained.recipe({"synthetic": synthetic("mini/rows")}, seq_len=1024, gates=GATES)
    other = trained.config.rename(trained.config.with_name("second.yaml"))
    trained.config.write_text(first_recipe, encoding="utf-8")
    second = steps.open_project(other)

    def rows() -> tuple[int, bool]:
        done = {step.name: report for step, report, _ in runner.build(second, only=TO_ROWS)}
        return int(done["canonical_rows"].manifest.facts["kept"]), done["raw_dataset"].reused

    first, again = rows(), rows()
    generate(trained.folder, *FRESH[3:], name="b.jsonl")
    runner.build(trained.project, only=["parsed_records"])
    assert (first, again, rows()) == ((3, False), (3, True), (6, False))


def test_failed_check_of_generated_records_blocks_reading_them(trained: Workspace) -> None:
    both = {"rows": sales(trained), "synthetic": synthetic("rows")}
    strict = GATES | {"valid_fraction": {"at_least": 0.9, "severity": "error"}}
    generate(trained.folder, *FRESH[:2], {"shop": "s3", "day": "2024-02-09", "units": "many"})
    runner.build(trained.project, only=["parsed_records"])
    rows = TO_ROWS

    with pytest.raises(
        GateError, match=r"mini/rows/parsed_records, version .*, an ancestor of this input: .*valid_fraction"
    ):
        trained.recipe(both, seq_len=1024, gates=strict).build(only=rows)
    allowed = trained.recipe(both, seq_len=1024, gates=GATES).build(only=rows)
    assert len(made_of(allowed)) == 2
    # Outputs from before the check failed do not get past it, with the source scanned or not.
    for only in (rows, ["canonical_rows"]):
        with pytest.raises(GateError, match="valid_fraction"):
            trained.recipe(both, seq_len=1024, gates=strict).build(only=only)


@pytest.mark.parametrize("only", [["raw_dataset"], ["canonical_rows"]])
def test_inputs_of_generated_records_are_checked_like_every_other_input(trained: Workspace, only: list[str]) -> None:
    content = "".join(f"{json.dumps(row)}\n" for row in SALES) + "no object\n"
    bad = {**sales(trained), "source": {"train_urls": [trained.write("rows.jsonl", content.encode())]}}
    trained.recipe({"rows": bad}, seq_len=1024, gates=GATES).build()
    generate(trained.folder, *FRESH)
    runner.build(trained.project, only=["parsed_records"])
    alone = {"synthetic": synthetic("mini/rows")}
    second = trained.config.with_name("second.yaml")

    def build_second(gates: dict[str, Any], stages: Sequence[str]) -> None:
        trained.recipe(alone, seq_len=1024, gates=gates)
        trained.config.rename(second)
        runner.build(steps.open_project(second), only=stages)

    build_second(GATES, TO_ROWS)
    # The records themselves pass; the training rows of their model do not.
    with pytest.raises(GateError, match=r"mini/rows/canonical_rows, version .*, an ancestor of this input: .*rejects"):
        build_second(GATES | {"rejects": {"at_most": 0, "severity": "error"}}, only)


def test_waiver_of_a_dataset_does_not_cover_another_recipes_dataset(trained: Workspace) -> None:
    strict = GATES | {"valid_fraction": {"at_least": 0.9, "severity": "error"}}
    waived = strict | {
        "waivers": [{"check": "valid_fraction", "dataset": "rows", "at_least": 0.1, "reason": "for rows of our own"}]
    }
    generate(trained.folder, *FRESH[:2], {"shop": "s3", "day": "2024-02-09", "units": "many"})
    runner.build(trained.project, only=["parsed_records"])
    trained.recipe({"rows": synthetic("mini/rows")}, seq_len=1024, gates=waived)
    second = trained.config.rename(trained.config.with_name("second.yaml"))

    with pytest.raises(GateError, match="valid_fraction"):
        runner.build(steps.open_project(second), only=["raw_dataset"])


@pytest.mark.parametrize(
    ("source", "edges"),
    [
        (synthetic("rows"), ("mini", "rows", "parsed_records")),
        (synthetic("rows", stage="parsed_records"), ("mini", "rows", "parsed_records")),
        (synthetic("other/rows", stage="generated_series"), ("other", "rows", "generated_series")),
        (synthetic("other/rows"), None),
    ],
)
def test_asset_graph_has_an_edge_from_the_stage_that_generates_the_records(
    trained: Workspace, source: dict[str, Any], edges: StageKey | None
) -> None:
    trained.recipe({"rows": sales(trained), "synthetic": source}, seq_len=1024, gates=GATES)

    graph = build_definitions([trained.config], str(trained.folder / "store")).resolve_asset_graph()

    deps = graph.get(make_asset_key(("mini", "synthetic", "raw_dataset"))).parent_keys
    assert deps == (set() if edges is None else {make_asset_key(edges)})


def test_source_without_generated_records_says_what_to_run(trained: Workspace) -> None:
    project = trained.recipe({"rows": sales(trained), "synthetic": synthetic("rows")}, seq_len=1024).project

    with pytest.raises(SourceError, match=r"mini/rows were never built in this storage; .* run `rowmill parse mini`"):
        runner.build(project, only=["raw_dataset"])
