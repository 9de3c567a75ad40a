"""Rows and parts of an output: the view `builds`, the page and the terminal show the numbers of the files."""

import json
from collections import Counter
from itertools import chain
from typing import Any

import pytest

from dagster_rowmill import metadata
from rowmill.build import runner
from rowmill.core import arrays
from rowmill.core.stage_names import EXPORTS
from rowmill.reports import console
from rowmill.stages import catalog
from rowmill.stats.views import query_views
from tests.support.recipes import CHAT, TEXT, Built, Workspace, chat, document

pytestmark = pytest.mark.slow

RECORDS: dict[str, Any] = {
    "kind": "records",
    "data": {"group_training_examples_by": "shop", "order_training_examples_by": "day", "max_sequences_per_example": 1},
    "generation": {},
}
DATASETS = ("chats", "texts", "sales")


def sale(shop: int, day: int) -> dict[str, Any]:
    return {"shop": f"s{shop}", "day": f"2024-01-{day:02d}", "units": 1}


CONTENT: dict[str, list[dict[str, Any]]] = {
    # Twice the same, one flaw, and one that is cut: rejects, a part written again, a tail in left_out.
    "chats": [*(chat(i, turns=1 + i % 3) for i in range(40)), chat(3), chat(6), {"x": 1}, chat(90, words=400)],
    "texts": [document(i, words=30 + 10 * i) for i in range(12)],
    "sales": [sale(shop, day) for shop in range(6) for day in range(1, 5)],
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build each kind of row to ranks and two exports, and parse a generated text."""
    workspace = Workspace(tmp_path_factory.mktemp("counted"))
    formats = {"chats": CHAT, "texts": TEXT, "sales": RECORDS}
    datasets = {name: workspace.dataset(f"{name}.jsonl", CONTENT[name], formats[name]) for name in DATASETS}
    datasets["texts"]["packing"] = {"pack_strategy": "concat", "tail": "drop"}
    workspace.recipe(
        datasets,
        defaults={"splits": {"validation": 0.2}},
        mixture={"batch_size": 4},
        exports=[{"kind": "native", "name": "packed", "shard_sequences": 5}, {"kind": "hf", "name": "single"}],
    )
    made = workspace.build()
    texts = workspace.folder / "generated" / "mini" / "sales"
    texts.mkdir(parents=True)
    records = "".join(f"{json.dumps(sale(1, day))}\n" for day in range(1, 4))
    (texts / "a.jsonl").write_text(
        "".join(f"{json.dumps({'text': text, 'finish_reason': 'stop'})}\n" for text in (records, "{}"))
    )
    parsed = workspace.build(only=["parsed_records"])
    return Built(made.project, {**made.steps, **parsed.steps})


OUTPUT = {
    "canonical_rows": "rows",
    "tokenized_examples": "examples",
    "truncation_stats": "examples",
    "packed_shards": "shard",
    "training_splits": "order",
    "gpu_partitions": "data/",
    EXPORTS: "data/",
    "parsed_records": "records",
}
"""Stage → how the names of the files begin that hold its output."""


def truth(built: Built, *key: str) -> int:
    """Count the rows of an output in its files; those of a source in its lines."""
    stage = EXPORTS if key[0] == EXPORTS else key[-1]
    if stage == "raw_dataset":
        return len((built.project.base / "data" / f"{key[0]}.jsonl").read_bytes().splitlines())
    # Statistics describe the examples before them.
    made = built.manifest(key[0], "tokenized_examples") if stage == "truncation_stats" else built.manifest(*key)
    named = chain.from_iterable(part.files.items() for part in made.parts)
    files = [file for name, file in named if name.startswith(OUTPUT[stage])]
    tables = [file for file in files if file.path.endswith((".arrow", ".parquet"))]
    return sum(built.project.store.table(file).num_rows for file in tables)


def lines_of_builds(built: Built, where: str = "not reused") -> dict[tuple[str, ...], tuple[int, int, int]]:
    """Return rows, parts and reused parts of each stage from the view `builds`."""
    sql = f"SELECT dataset, stage, rows, parts, parts_reused FROM builds WHERE {where}"
    _, lines = query_views(built.project.store, sql)
    assert len({line[:2] for line in lines}) == len(lines)

    def key(dataset: str, stage: str) -> tuple[str, ...]:
        if stage == EXPORTS:
            return (stage, dataset)
        return (stage,) if dataset == "_recipe" else (dataset, stage)

    return {key(dataset, stage): (rows, parts, reused) for dataset, stage, rows, parts, reused in lines}


def test_rows_and_parts_of_every_stage_are_those_in_its_files_and_on_every_page(built: Built) -> None:
    told = {key: rows for key, (rows, _, _) in lines_of_builds(built).items()}

    assert set(told) == set(built.steps)
    assert told == {key: truth(built, *key) for key in told}
    # Other files next to an output must not be counted.
    files = {name for report, _ in built.steps.values() for part in report.manifest.parts for name in part.files}
    assert {"rejects", "ledger", "segments", "left_out", "rank_steps", "facts"} <= files
    assert truth(built, "chats", "canonical_rows") == len(CONTENT["chats"]) - 3
    assert truth(built, "sales", "parsed_records") == 3

    told = lines_of_builds(built)

    for key, (report, _) in built.steps.items():
        page = metadata.make_stage_page(built.project, report)
        rows, parts, _ = told[key]
        assert (page["dagster/row_count"].value, page["build_parts"].value) == (rows, parts)
        if key[-1] != "truncation_stats":  # its line shows quantiles
            found = catalog.count_output_rows(report.manifest)
            assert found is not None
            assert arrays.format_count(rows, found.noun) in console.summarize_output(report.manifest).split(" · ")

    for name in DATASETS:
        files = [f for kind in ("rows", "rejects") for f in built.manifest(name, "canonical_rows").files(kind)]
        rows = chain.from_iterable(built.project.store.table(f, ["row_id"]).column(0).to_pylist() for f in files)
        parts = {str(row_id).split(":", 1)[0] for row_id in rows}

        assert lines_of_builds(built)[(name, "raw_dataset")][1] == len(parts) > 0


def test_run_that_built_nothing_is_no_run_and_counts_all_parts_as_reused(built: Built) -> None:
    store = built.project.store
    # Without seconds: DuckDB adds floats up in any order.
    runs = "SELECT COLUMNS(* EXCLUDE seconds) FROM runs ORDER BY run_id"
    before = query_views(store, runs)
    made = {report.manifest.run_id for report, _ in built.steps.values()}

    runner.build(built.project)

    assert query_views(store, runs) == before
    _, lines = query_views(store, "SELECT run_id, stages FROM runs")
    assert dict(lines) == Counter(report.manifest.run_id for report, _ in built.steps.values())
    assert {run_id for (run_id,) in query_views(store, "SELECT DISTINCT run_id FROM builds WHERE reused")[1]} <= made
    _, [(said,)] = query_views(store, "SELECT comment FROM duckdb_views() WHERE view_name = 'runs'")
    assert "reused everything has no row" in said

    reused = [report for _, report, _ in runner.build(built.project)]

    assert all(report.reused and report.parts == report.parts_reused for report in reused)
    told = lines_of_builds(built, "reused")
    assert len(told) == len(reused)
    for key, (rows, parts, parts_reused) in told.items():
        assert (rows, parts) == lines_of_builds(built)[key][:2]
        assert parts_reused == parts
