"""After training, on a real build: generated texts parsed, series generated, as stages, commands and assets."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from rowmill.build import runner
from rowmill.build.steps import plan_steps
from rowmill.checks.judge import CheckResult
from rowmill.cli import main
from rowmill.core.errors import ConfigError, GenerationError, IntegrityError, SourceError
from rowmill.kinds.tables.parsing import REASONS as PARSING_REASONS
from rowmill.reports import report_page
from rowmill.schema.ledger import REJECT_REASONS
from rowmill.schema.manifest import Manifest
from tests.support.completions_server import Reply, serving
from tests.support.recipes import LENIENT, Workspace, current, current_rows
from tests.support.tiny_project import Tiny, built, read_stage_key, refusals

GROUPED = {
    "kind": "records",
    "data": {"group_training_examples_by": "shop", "order_training_examples_by": "day", "max_sequences_per_example": 1},
}
SERIES = {
    "kind": "records",
    "data": {"group_training_examples_by": "shop", "order_training_examples_by": "hour"},
    "time_series": {"is_timeseries": True, "timestamp_interval_seconds": 3600},
}


def sale(shop: str, day: int, units: int = 1) -> dict[str, Any]:
    return {"shop": shop, "day": f"2024-01-{day:02d}", "units": units}


def reading(shop: str, hour: int) -> dict[str, Any]:
    return {"shop": shop, "hour": f"2024-01-01T{hour:02d}:00:00", "level": hour * 2}


def texts(*records: Mapping[str, Any]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


SALES = [sale(f"s{shop}", day) for shop in range(6) for day in range(1, 6)]
READINGS = [reading(shop, hour) for shop in ("a", "b", "c") for hour in range(10)]
GOOD = texts(*[sale("s1", day) for day in range(1, 5)])


def recipe(
    workspace: Workspace, rows: list[dict[str, Any]], form: Mapping[str, Any], generation: Any, **changes: Any
) -> Workspace:
    values = {"seq_len": 1024, **changes}
    return workspace.one("rows.jsonl", rows, {**form, "generation": generation}, **values)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a built project of grouped records without generated texts."""
    workspace = Workspace(tmp_path_factory.mktemp("grouped"))
    recipe(workspace, SALES, GROUPED, {})
    workspace.build()
    return workspace


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a built project of three series of ten hours, without a backend."""
    workspace = Workspace(tmp_path_factory.mktemp("series"))
    recipe(workspace, READINGS, SERIES, {})
    workspace.build()
    return workspace


@pytest.fixture(autouse=True)
def recipes(grouped: Workspace, series: Workspace) -> Iterator[None]:
    """Put back the recipes of the built projects, which tests change."""
    kept = {workspace.config: workspace.config.read_text() for workspace in (grouped, series)}
    yield
    for config, text in kept.items():
        config.write_text(text)


@pytest.fixture
def generated(grouped: Workspace) -> Iterator[Path]:
    """Provide the folder of generated texts, emptied afterwards."""
    folder = grouped.folder / "generated" / "mini" / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    for file in folder.iterdir():
        file.unlink()


def run(workspace: Workspace, stage: str) -> tuple[Manifest, list[CheckResult], bool]:
    [(_, report, results)] = runner.build(workspace.project, only=[stage])
    return report.manifest, results, report.reused


def records_of(workspace: Workspace, output: Manifest) -> list[dict[str, Any]]:
    return [
        json.loads(row["record"])
        for file in output.files("records")
        for row in workspace.project.store.table(file).to_pylist()
    ]


def change_form(workspace: Workspace, **blocks: Mapping[str, Any]) -> Workspace:
    """Change options of the format's blocks in the built recipe; its shards do not change."""
    values = yaml.safe_load(workspace.config.read_text())
    form = values["datasets"]["rows"]["format"]
    form |= {name: {**form.get(name, {}), **options} for name, options in blocks.items()}
    workspace.config.write_text(yaml.safe_dump(values))
    return workspace


def with_backend(workspace: Workspace, base_url: str, *, prompt_as: str = "text", **options: Any) -> Workspace:
    """Add a backend to the built recipe."""
    backend = {"kind": "openai", "base_url": base_url, "model": "m", "retries": 0, "prompt_as": prompt_as}
    return change_form(workspace, generation={"backend": backend, **options})


# ── Stages ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_stages_that_need_a_trained_model_wait_for_a_request_and_a_backend(
    grouped: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = plan_steps(grouped.project)
    asked = [step.name for step in steps if step.on_demand]

    assert asked == ["parsed_records"]
    assert "parsed_records" not in {step.name for step, _, _ in runner.build(grouped.project)}

    main.main(["plan", str(grouped.config)])

    assert "on request" in capsys.readouterr().out

    assert main.main(["generate", str(grouped.config)]) == main.ExitStatus.INVALID
    assert "no dataset has a generation.backend block" in capsys.readouterr().err


def test_generation_changes_no_shard_and_no_code_version(grouped: Workspace) -> None:
    before = {step.name: step.code_version for step in plan_steps(grouped.project)}
    other = Workspace(grouped.folder, str(grouped.store))
    change_form(grouped, generation={"temperature": 0.1, "validation": {"group_by_ignore_invalid_records": True}})
    after = {step.name: step.code_version for step in plan_steps(other.project)}
    again = other.build()

    assert again.made() == set()
    assert {name for name in before if before[name] != after[name]} == {"parsed_records"}


def test_texts_of_every_kind_of_file_are_parsed(grouped: Workspace, generated: Path) -> None:
    answers = [
        {"text": GOOD, "finish_reason": "stop"},
        {"text": GOOD, "finish_reason": "length"},
        {"choices": [{"text": GOOD + "so", "finish_reason": "stop"}, {"text": GOOD, "finish_reason": "stop"}]},
        {"prompt": "no text"},
    ]
    (generated / "answers.jsonl").write_text(texts(*answers))
    (generated / "one.txt").write_text(f"{GOOD}<|im_end|>\nand so on\n")
    made, _, _ = run(grouped, "parsed_records")

    assert {reason or state: count for state, reason, count in made.ledger} == {
        "kept": 12, "group_has_invalid": 4, "group_incomplete": 4, "missing_field": 1,
    }  # fmt: skip
    assert made.facts["texts"] == 5
    assert records_of(grouped, made)[:4] == [sale("s1", day) for day in range(1, 5)]
    assert sum(row[2] for row in made.tables["classes"].rows) == made.facts["characters"]


def test_rejects_keep_reason_column_and_text(grouped: Workspace, generated: Path) -> None:
    bad = {**sale("s1", 2), "colour": "red"}
    (generated / "a.jsonl").write_text(texts({"text": texts(sale("s1", 1), bad), "finish_reason": "stop"}))
    made, results, _ = run(grouped, "parsed_records")
    [part] = made.parts
    rejects = grouped.project.store.table(part.files["rejects"]).to_pylist()

    assert [(one["reason"], one["detail"]) for one in rejects] == [
        ("group_has_invalid", ""),
        ("unknown_column", "colour"),
    ]
    assert json.loads(rejects[1]["raw"]) == bad
    assert [(one.check, one.value, one.passed, one.blocking) for one in results] == [
        ("valid_fraction", 0.0, False, False),
        ("exact_copies", None, False, False),
    ]

    assert set(PARSING_REASONS) <= REJECT_REASONS


def test_texts_are_parsed_once_and_without_any_checks_are_not_applicable(grouped: Workspace, generated: Path) -> None:
    made, results, _ = run(grouped, "parsed_records")

    assert (made.facts["texts"], made.facts["kept"]) == (0, 0)
    assert {one.check: one.outcome for one in results} == {
        "valid_fraction": "not_applicable",
        "exact_copies": "not_applicable",
    }

    (generated / "a.jsonl").write_text(texts({"text": GOOD, "finish_reason": "stop"}))
    first, _, _ = run(grouped, "parsed_records")
    again, _, is_reused = run(grouped, "parsed_records")
    (generated / "b.jsonl").write_text(texts({"text": GOOD * 2}))
    [(_, more, _)] = runner.build(grouped.project, only=["parsed_records"])

    assert is_reused
    assert again.version == first.version
    assert (more.parts, more.parts_reused) == (2, 1)


def test_parsing_without_files_or_a_build_is_an_error(tmp_path: Path, grouped: Workspace) -> None:
    workspace = Workspace(tmp_path, str(grouped.store))
    recipe(workspace, SALES, GROUPED, {"text_urls": ["no/such.jsonl"]})

    with pytest.raises(SourceError, match=r"no/such\.jsonl"):
        runner.build(workspace.project, only=["parsed_records"])

    workspace = recipe(Workspace(tmp_path), SALES, GROUPED, {})

    with pytest.raises(IntegrityError, match=r"/parsed_records: .*tokenized_examples.* not built; "):
        runner.build(workspace.project, only=["parsed_records"])


# ── Comparison with the training table ───────────────────────────────────────────────────────────


@pytest.mark.slow
def test_generated_records_are_compared_with_their_training_table(grouped: Workspace, generated: Path) -> None:
    fresh = [sale("s1", day, units=7) for day in range(10, 13)]
    written = texts(sale("s1", 1), sale("s1", 2), *fresh, fresh[-1])
    (generated / "a.jsonl").write_text(texts({"text": written, "finish_reason": "stop"}))
    made, results, _ = run(grouped, "parsed_records")
    lines = {row[0]: row for row in made.tables["beside train"].rows}
    columns = {row[0]: dict(zip(made.tables["columns beside train"].columns, row, strict=True))
               for row in made.tables["columns beside train"].rows}  # fmt: skip
    rows = current_rows(grouped.project, "rows", "canonical_rows", file="rows")
    shops = {json.loads(row["record"])["shop"] for row in rows if row["split"] == "train"}
    train = [row for row in SALES if row["shop"] in shops]

    copies = sum(one in train for one in (sale("s1", 1), sale("s1", 2))) / 6
    assert made.facts["exact_copies"] == pytest.approx(copies)
    assert lines["train"][1:3] == (len(train), 0)
    assert lines["generated"][1:3] == (6, pytest.approx(1 / 6, abs=1e-6))
    assert columns["units"]["mean train"] == 1
    assert columns["units"]["max generated"] == 7
    assert columns["units"]["distance"] == pytest.approx(4 / 6, abs=1e-4)
    assert columns["units"]["new values"] == pytest.approx(4 / 6, abs=1e-4)
    assert {row[:2] for row in made.tables["associations"].rows} == {("shop", "day")}
    assert [one.check for one in results if one.failed] == ["exact_copies"] * (copies > 0)
    report_page.write_report(grouped.project)
    shown = grouped.project.store.local(report_page.report_path("mini")).read_text("utf-8")
    assert "columns beside train" in shown
    assert "associations" in shown


# ── Generating ─────────────────────────────────────────────────────────────────────────────────────


def following(request: dict[str, Any]) -> Reply:
    """Continue a series by one hour, as a perfect model would."""
    last = json.loads(request["prompt"].rstrip("\n").rsplit("\n", 1)[-1].removeprefix("<|im_start|>"))
    hour = int(last["hour"][11:13]) + 1
    return Reply([texts(reading(last["shop"], hour))] * request["n"], finish_reason="length")


@pytest.mark.slow
def test_series_are_generated_over_http_from_the_training_setup(
    series: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(following) as server:
        made, results, _ = run(with_backend(series, server.base_url, samples_per_prompt=2), "generated_series")
        asked = server.requests

    assert records_of(series, made) == [reading(shop, hour) for shop in ("a", "b", "c") for hour in range(3, 10)]
    assert made.card["status"] == "complete"
    # The model of this test repeats its training data.
    assert [one.check for one in results if one.failed] == ["exact_copies"]
    assert len(asked) == 21
    assert asked[0]["prompt"].startswith("Generate JSON Lines records with these keys: ")
    assert asked[0]["stop"] == ["<|im_end|>"]

    with serving(following) as server:
        status = main.main(["generate", str(with_backend(series, server.base_url).config)])

    assert status == main.ExitStatus.SUCCESS
    assert '{"shop":"a"}' in capsys.readouterr().out


def test_failed_series_are_reported_and_an_unreachable_backend_leaves_nothing_behind(series: Workspace) -> None:
    def failing_b(request: dict[str, Any]) -> Reply:
        return Reply(status=400) if '"shop":"b"' in request["prompt"] else following(request)

    with serving(failing_b) as server:
        made, results, _ = run(
            with_backend(series, server.base_url, samples_per_prompt=1, patience=2), "generated_series"
        )

    assert {row["shop"] for row in records_of(series, made)} == {"a", "c"}
    assert made.tables["series"].rows[0][:4] == ('{"shop":"b"}', "failed", 0, 2)
    assert [one.check for one in results if one.failed] == ["failed_series", "exact_copies"]

    with serving(following) as server:
        gone = server.base_url
    workspace = with_backend(series, gone, patience=1)

    with pytest.raises(GenerationError, match="nothing was generated; the backend's last error"):
        runner.build(workspace.project, only=["generated_series"])


def test_ids_are_sent_if_configured(series: Workspace) -> None:
    prompts: list[Any] = []

    def script(request: dict[str, Any]) -> Reply:
        prompts.append(request["prompt"])
        return Reply([texts(reading("a", 3))] * request["n"])

    with serving(script) as server:
        workspace = with_backend(series, server.base_url, prompt_as="ids", samples_per_prompt=1, patience=1)
        run(workspace, "generated_series")
    examples = current_rows(workspace.project, "rows", "tokenized_examples", file="examples")

    # The prompt begins exactly like the training example.
    trained = {tuple(one["input_ids"][: len(prompts[0])]) for one in examples}
    assert tuple(prompts[0]) in trained


@pytest.mark.slow
def test_private_series_begin_without_a_record(tmp_path: Path) -> None:
    form = {
        **SERIES,
        "privacy": {"dp_enabled": True},
        "time_series": {
            "is_timeseries": True, "timestamp_interval_seconds": 3600, "start_timestamp": "2024-01-01T00:00:00",
            "stop_timestamp": "2024-01-01T02:00:00",
        },
    }  # fmt: skip
    workspace = recipe(Workspace(tmp_path), READINGS, form, {})
    workspace.build()

    def script(request: dict[str, Any]) -> Reply:
        if request["prompt"].endswith("<|im_start|>"):
            return Reply([texts(reading("a", 0))] * request["n"])
        return following(request)

    with serving(script) as server:
        made, _, _ = run(with_backend(workspace, server.base_url, samples_per_prompt=1), "generated_series")
        asked = [one["prompt"].rsplit("<|im_start|>", 1)[1] for one in server.requests]

    # Even if the model writes a key of the data, the output does not contain it.
    assert asked[:3] == ["", "", ""]
    assert not any('"b"' in prompt or '"c"' in prompt for prompt in asked)
    assert records_of(workspace, made) == [reading(f"series-{n}", hour) for n in (1, 2, 3) for hour in range(3)]
    assert [row[0] for row in made.tables["series"].rows] == ["series-1", "series-2", "series-3"]


def test_grouped_records_are_generated_until_there_are_enough(grouped: Workspace) -> None:
    with serving(lambda request: Reply([GOOD] * request["n"])) as server:
        made, _, _ = run(with_backend(grouped, server.base_url, num_records=10), "generated_series")

    assert made.facts["kept"] == 40
    assert made.facts["series"] == 0


# ── Commands ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_parse_writes_the_records_of_its_stage_and_stores_nothing_of_a_file(
    grouped: Workspace, generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (generated / "a.jsonl").write_text(texts({"text": GOOD, "finish_reason": "stop"}))
    status = main.main(["parse", str(grouped.config), "--output", str(tmp_path / "out.jsonl")])

    assert status == main.ExitStatus.SUCCESS
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        sale("s1", day) for day in range(1, 5)
    ]
    assert "4 records" in capsys.readouterr().out

    before = current(grouped.project, "rows", "parsed_records").version
    file = tmp_path / "mine.txt"
    file.write_text(f"{GOOD}<|im_end|>{{}}")
    status = main.main(["parse", str(grouped.config), str(file), "--output", str(tmp_path / "out.jsonl")])
    printed = capsys.readouterr().out

    assert status == main.ExitStatus.SUCCESS
    assert "1 text · 4 records · 80.0 % valid" in printed
    assert "invalid:missing_column" in printed
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4
    assert current(grouped.project, "rows", "parsed_records").version == before


def test_generating_without_a_valid_record_closes_the_gate(
    series: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str], grouped: Workspace
) -> None:
    with serving(lambda request: Reply(["no record"] * request["n"])) as server:
        output = str(tmp_path / "out.jsonl")
        with_backend(series, server.base_url, samples_per_prompt=1, patience=1)
        assert main.main(["generate", str(series.config), "--output", output]) == main.ExitStatus.GATE_CLOSED
        assert "failed_series" in capsys.readouterr().out
        with_backend(grouped, server.base_url, patience=1, num_records=5)
        assert main.main(["generate", str(grouped.config)]) == main.ExitStatus.GATE_CLOSED


def test_interval_set_after_the_build_applies_to_new_records(
    series: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(following) as server:
        workspace = with_backend(series, server.base_url, samples_per_prompt=1, patience=1)
        first, _, _ = run(workspace, "generated_series")
        change_form(workspace, time_series={"timestamp_interval_seconds": 7200})
        again, _, is_reused = run(workspace, "generated_series")
        capsys.readouterr()
        status = main.main(["generate", str(workspace.config)])
        said = capsys.readouterr().err

    assert (first.facts["kept"], is_reused, again.facts["kept"]) == (21, False, 0)
    assert ("invalid:step", 3) in again.tables["classes"].rows
    assert status == main.ExitStatus.GATE_CLOSED
    assert "mini/rows/canonical_rows was built with other options" in " ".join(said.split())


def test_columns_missing_from_the_training_table_are_a_config_error(series: Workspace) -> None:
    text = series.config.read_text()
    series.config.write_text(text.replace("group_training_examples_by: shop", "group_training_examples_by: store"))

    with pytest.raises(ConfigError, match="column 'store' is not in the table that the model was trained on"):
        runner.build(series.project, only=["parsed_records"])


# ── Dagster ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_assets_of_generation_are_materialized_on_request_with_check_and_page(tmp_path: Path) -> None:
    with dg.DagsterInstance.ephemeral() as instance, serving(following) as server:
        tiny = Tiny(tmp_path, instance)
        tiny.write_rows("rows", READINGS)
        backend = {"kind": "openai", "base_url": server.base_url, "model": "m"}
        form = {**SERIES, "generation": {"samples_per_prompt": 1, "backend": backend}}
        source = {"train_urls": ["data/rows.jsonl"]}
        tiny.write_recipe(datasets={"rows": {"source": source, "format": form}}, seq_len=1024, gates=LENIENT)
        whole = built(tiny.run())
        answers = tmp_path / "generated" / "tiny" / "rows"
        answers.mkdir(parents=True)
        (answers / "a.jsonl").write_text(texts({"text": texts(*[reading("z", hour) for hour in range(4)]) + "{}"}))
        keys = [tiny.key("rows", "parsed_records"), tiny.key("rows", "generated_series")]
        result = tiny.run_only(dg.AssetSelection.assets(*keys))
        pages = {
            read_stage_key(event.asset_key)[-1]: event.step_materialization_data.materialization.metadata
            for event in result.get_asset_materialization_events()
            if event.asset_key
        }
        checks = {
            (read_stage_key(one.asset_key)[-1], one.check_name): one.passed
            for one in result.get_asset_check_evaluations()
        }

    assert ("tiny", "rows", "parsed_records") not in whole
    assert refusals(result) == {}
    assert pages["parsed_records"]["dagster/row_count"].value == 4
    assert pages["generated_series"]["dagster/row_count"].value == 21
    assert "table classes" in pages["parsed_records"]
    assert "table columns beside train" in pages["generated_series"]
    assert checks == {
        ("parsed_records", "valid_fraction"): True,
        ("parsed_records", "exact_copies"): True,
        ("generated_series", "valid_fraction"): True,
        ("generated_series", "failed_series"): True,
        ("generated_series", "exact_copies"): False,
    }
