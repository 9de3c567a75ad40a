"""Pages: a summary, numbers under stable keys, plots, and no text from data where it could act."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from dagster_rowmill import metadata
from rowmill.build import runner
from rowmill.build.runner import StepReport
from rowmill.build.steps import Project, Step
from rowmill.checks import judge
from rowmill.checks.judge import CheckResult
from rowmill.core.storage import Store
from rowmill.recipe.recipe import parse_recipe
from rowmill.reports import plots
from rowmill.schema.counts import CountSet
from rowmill.schema.manifest import DisplayTable, Histogram, Manifest, Part
from rowmill.schema.rank_counts import RankCounts, RankDetails
from rowmill.schema.shard_counts import PackingCounts
from rowmill.schema.source_counts import SourceCounts
from tests.support.tiny_project import RECIPE, ROOT, Tiny, chat

STORE = Store("/store")
CALLS_OUT = "![x](http://example.org/x.png)"


PROJECT = Project(parse_recipe(RECIPE, name="r", where="r", base=ROOT), STORE, ROOT)


def make_page(report: StepReport, reports_url: str = "") -> metadata.MetadataPage:
    return metadata.make_stage_page(PROJECT, report, reports_url)


COUNTS = PackingCounts(pack_groups=1, sequences=7, segments=9, tokens=90, trained_tokens=60, capacity=180)
VALUES: dict[str, Any] = {
    "conservation": 0, "shard_digests": 0, "fill": 0.5, "limit_cost": 0, "packing_loss": 0, "padding_share": None,
}  # fmt: skip


def report(**fields: Any) -> StepReport:
    base: dict[str, Any] = {
        "key": ("r", "d", "packed_shards"), "stage": "packed_shards", "fingerprint": "f", "code_version": "c",
        "inputs": {}, "parts": (), "values": {}, "version": "v",
    }  # fmt: skip
    of_packing: dict[str, Any] = {"values": VALUES, "counts": CountSet.of(COUNTS).to_json()}
    return StepReport(
        Manifest(**{**base, **of_packing, **fields}), reused=False, parts=0, parts_reused=0, rows_made=0, seconds=0.0
    )


@pytest.mark.parametrize("bins", [1, 100, 5000])
def test_plot_fits_the_event_log_or_is_left_to_the_report(bins: int) -> None:
    histogram = Histogram("Lengths", "tokens", tuple(map(float, range(bins + 1))), (10**9,) * bins, limit=3.0)
    shown = make_page(report(histograms={"lengths": histogram}))["plot lengths"]
    assert len(shown.value) <= 2 * metadata.MAX_PLOT_BYTES
    assert isinstance(shown, dg.TextMetadataValue) == (bins == 5000)
    empty = Histogram("Lengths", "tokens", (0.0, 1.0), (0,))
    page = make_page(report(histograms={"lengths": empty}))
    assert not any(key.startswith("plot") for key in page)


@pytest.mark.parametrize("shown", [1, 30, 31, 500])
def test_tables_show_thirty_rows_at_most(shown: int) -> None:
    table = DisplayTable(("role", "rows"), tuple((f"role {i}", i) for i in range(shown)))
    page = make_page(report(tables={"roles": table}))
    assert len(page["table roles"].records) == min(shown, 30)


def test_text_from_data_stays_out_of_markdown() -> None:
    counts = CountSet.of(replace(COUNTS, content_hash=CALLS_OUT)).to_json()
    table = DisplayTable(("role", CALLS_OUT), ((CALLS_OUT, {"nested": CALLS_OUT}),))
    histogram = Histogram(CALLS_OUT, CALLS_OUT, (0.0, 1.0), (1,))
    made = report(
        counts=counts, tables={"roles": table}, histograms={"lengths": histogram}, ledger=(("rejected", CALLS_OUT, 1),),
        samples={"rejects": (CALLS_OUT,)},
    )  # fmt: skip
    page = make_page(made) | metadata.make_check_page(_result(samples=(CALLS_OUT,)), STORE)
    markdown = [value.value for value in page.values() if isinstance(value, dg.MarkdownMetadataValue)]
    assert markdown
    # A picture's own text is encoded, so that it ends no link and makes no request.
    assert not any("http" in re.sub(r"\(data:image/svg\+xml[^\s()!]+\)", "", text) for text in markdown)


def test_facts_that_are_no_numbers_are_left_out_and_shares_are_of_what_a_model_sees() -> None:
    page = make_page(report(values={**VALUES, "limit_cost": float("nan"), "shard_digests": True}))
    assert page["fill"].value == pytest.approx(0.5)
    assert page["dagster/row_count"].value == 7
    assert not {"limit_cost", "shard_digests", "reasons", "padding_share", "content_hash"} & set(page)
    counts = {"trained": 30, "context": 60, "template": 10, "truncated": 900}
    ledger = tuple(("train", name, count) for name, count in counts.items())
    page = make_page(report(token_ledger=ledger))
    assert page["trained_share"].value == pytest.approx(0.3)
    assert page["tokens"].value == 100
    counts = CountSet.of(SourceCounts(records=9, files=1, parts=18)).to_json()
    page = make_page(report(key=("r", "d", "raw_dataset"), stage="raw_dataset", values={}, counts=counts))
    assert (page["parts"].value, page["build_parts"].value) == (18, 0)


def test_ledger_stands_beside_tables_that_do_not_repeat_it() -> None:
    ledger = (("rejected", "too_long", 1), ("rejected", "duplicate", 9), ("kept", "", 3))
    page = make_page(report(ledger=ledger))
    assert [record.data["reason"] for record in page["table ledger"].records] == ["", "duplicate", "too_long"]
    table = DisplayTable(("reason", "records"), (("too_long", 1),))
    made = report(
        tables={"lengths": table, "rejects": table, "what_if": table},
        histograms={"lengths": Histogram("Lengths", "tokens", (0.0, 1.0), (1,))},
        ledger=(("kept", "", 1),),
    )
    page = make_page(made)
    assert {key for key in page if key.startswith("table")} == {"table what_if", "table ledger"}
    rejects = DisplayTable(("reason", "records", "for_example"), (("too_long", 1, "a:1"),))
    page = make_page(report(tables={"rejects": rejects}, ledger=(("rejected", "too_long", 1),)))
    assert {"table rejects", "table ledger"} <= set(page)


@pytest.mark.parametrize(("name", "column"), plots.DRAWN_COLUMNS.items())
def test_table_of_files_or_ranks_is_drawn_too(name: str, column: str) -> None:
    table = DisplayTable(("name", column), tuple((f"{i}", 10**9 + i) for i in range(500)))
    page = make_page(report(tables={name: table}))
    assert {f"plot {name}", f"table {name}"} <= set(page)


def test_page_begins_with_its_summary_shows_columns_and_ends_with_bookkeeping() -> None:
    schema = (("input_ids", "list<int32>"), ("labels", "list<int32>"))
    columns = make_page(report(schema=schema))["columns"].schema.columns
    assert tuple((column.name, column.type) for column in columns) == schema
    assert columns[0].description == "Token ids."
    keys = list(make_page(report(schema=(("input_ids", "list<int32>"),))))

    # Dagster shows a schema under its own key above all metadata.
    assert "dagster/column_schema" not in keys
    assert keys[:2] == ["summary", "report"]
    assert keys[-8:] == [
        "build_reused", "build_parts", "build_parts_reused", "build_rows", "build_seconds", "folder", "fingerprint",
        "version",
    ]  # fmt: skip


def test_partition_metadata_has_the_ranks_counts_and_digest() -> None:
    names = ["rank-00000-of-00002", "rank-00001-of-00002"]
    parts = tuple(
        Part(
            name,
            {},
            counts=CountSet.of(RankCounts(ranks=1, sequences=i, tokens=7)).to_json(),
            details={"RankDetails": RankDetails(content_hash=f"{i}f").to_json()},
        )
        for i, name in enumerate(names)
    )
    page = metadata.make_rank_page(report(parts=parts, card={"ranks": names}).manifest, names[1])
    assert {key: value.value for key, value in page.items()} == {
        "rank sequences": 1, "rank fillers": 0, "rank tokens": 7, "rank trained_tokens": 0, "rank padding": 0,
        "rank content": "1f",
    }  # fmt: skip


def test_page_leads_to_the_report_by_address_where_it_is_served_and_by_path_elsewhere() -> None:
    served = make_page(report(), "http://127.0.0.1:3001/")
    check = metadata.make_check_page(_result(), STORE, "http://127.0.0.1:3001")

    assert served["report"].value == "http://127.0.0.1:3001/r/report.html#d/packed_shards"
    assert check["expectations"].value == ("http://127.0.0.1:3001/r/expectations/d-canonical_rows.html#unknown_roles")
    assert isinstance(served["report"], dg.UrlMetadataValue)
    assert make_page(report())["report"].value == "/store/reports/r/report.html"
    page = metadata.make_check_page(_result(value=None), STORE)
    assert "value" not in page
    assert page["threshold"].value == "at most 0.01"


def test_pages_lead_to_lists_and_rows_of_a_viewer_and_only_ids_of_samples_become_links() -> None:
    viewer = "http://127.0.0.1:3001/"
    row_id = f"{'0a' * 8}:12"
    samples = (f"role 'x': 3, the first is a.jsonl line 2 ({row_id})", f"{row_id}#0", CALLS_OUT)
    check = metadata.make_check_page(_result(samples=samples), STORE, viewer_url=viewer)
    stage = metadata.make_stage_page(PROJECT, report(), viewer_url=viewer)

    assert check["viewer"].value == "http://127.0.0.1:3001/r/rows?dataset=d&check=unknown_roles&role=any"
    address = f"http://127.0.0.1:3001/r/rows/{row_id}"
    assert check["sample_rows"].value == f"- [{row_id}]({address})\n- [{row_id}#0]({address})"
    assert stage["viewer"].value == "http://127.0.0.1:3001/r/left_out?dataset=d"
    assert f"[rows]({stage['viewer'].value})" in stage["summary"].value
    alone = metadata.make_check_page(_result(samples=samples), STORE) | make_page(report())
    assert not {"viewer", "sample_rows"} & alone.keys()


def _result(value: float | None = 0.2, samples: tuple[str, ...] = ()) -> CheckResult:
    return CheckResult(
        check="unknown_roles", key=("r", "d", "canonical_rows"), version="v", threshold_digest="t", value=value,
        bound=0.01, wanted="at most 0.01", severity="error", passed=False, blocking=True, what="share",
        remedy="map the role", samples=samples,
    )  # fmt: skip


# ── The summary, from real builds ──────────────────────────────────────────────────────────────────


Builds = tuple[Project, list[tuple[Step, StepReport]]]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    """Yield a project after two builds, the second with one more row, and the reports of the second."""
    with dg.DagsterInstance.ephemeral() as instance:
        tiny = Tiny(tmp_path_factory.mktemp("summary"), instance).write()
        runner.build(tiny.project)
        tiny.append("chats", chat(1000))
        yield tiny.project, [(step, report) for step, report, _ in runner.build(tiny.project)]


def write(project: Project, step: Step, report: StepReport) -> str:
    results = judge.preview_checks(project.store, report.manifest, step.shown_thresholds)
    page = metadata.make_stage_page(project, report, "http://127.0.0.1:3001", results)
    return page[metadata.SUMMARY_KEY].value


@pytest.mark.slow
def test_summary_is_a_verdict_three_numbers_and_what_changed(builds: Builds) -> None:
    project, reports = builds
    for step, report in reports:
        verdict, numbers, _ = (text := write(project, step, report)).split("\n\n")
        assert len(text) < 1000
        assert re.match(r"\*\*Passed\*\* · (\d+ checks?|\d+ of \d+ checks warn\\\n`\w+` )", verdict)
        link = f"http://127.0.0.1:3001/tiny/report.html#{'/'.join(step.key[1:])}"
        assert verdict.endswith(f"[report]({link})")
        assert numbers.count("**") == 6
    news = {"/".join(step.key[1:]): write(project, step, report).rpartition("\n\n")[2] for step, report in reports}
    assert all(len(line) <= metadata.MAX_LINE_CHARS + 1 for one in news.values() for line in one.splitlines())
    assert re.fullmatch(r"Since \d{4}-\d\d-\d\d \d\d:\d\d UTC: rows \+1", news["chats/canonical_rows"])
    assert re.fullmatch(r"Unchanged since \d{4}-\d\d-\d\d \d\d:\d\d UTC", news["tasks/canonical_rows"])


def test_failed_checks_are_named_with_their_values_and_nothing_is_saved(tiny: Tiny) -> None:
    project = tiny.write(unknown_roles=12).project
    raw, rows = project.graph.steps[:2]
    report = runner.build(project, only=["raw_dataset"])[0][1]
    made = runner.run_step(project, rows, {raw.key: report.manifest})
    verdict, failure, *_ = write(project, rows, made).splitlines()
    assert re.fullmatch(r"\*\*Blocked\*\* · 1 of \d+ checks failed\\", verdict)
    assert failure == "`unknown_roles` 20 %\\"
    # A summary that opened a gate would be a way around the checks.
    assert judge.load_check_results(project.store, made.manifest, rows.thresholds) == []
