"""The report and the pages of expectations: complete, harmless, small, right in every number, and leading somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.build import runner, steps
from rowmill.checks import expectation_suite
from rowmill.core import html
from rowmill.core.errors import GateError
from rowmill.inspection import inspect
from rowmill.inspection.trace import SegmentLocation, SequenceTrace
from rowmill.reports import plots, report_page
from rowmill.reports.build_view import load_build_view
from rowmill.schema.manifest import DisplayTable
from rowmill.schema.shard_counts import select_shards
from rowmill.stats.views import query_views
from tests.reports.conftest import make_hostile_rows, with_hostile_rows
from tests.support.markup import Page
from tests.support.recipes import Built, Workspace, chat


@pytest.fixture(scope="session")
def pages(folder: Path) -> dict[Path, Page]:
    """Return every page of the report's folder."""
    return {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}


# ── Alone ──────────────────────────────────────────────────────────────────────────────────────────
def test_pages_ask_for_nothing_outside_and_every_link_leads_to_an_anchor_of_one(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert html.CONTENT_POLICY in page.values("content", "meta")
        assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags), path
        assert page.values("src") == []
    for path, page in pages.items():
        for target in page.values("href", "a"):
            file, anchor = urldefrag(target)
            found = (path.parent / file).resolve() if file else path
            assert found in pages, target
            assert not anchor or anchor in pages[found].values("id"), target


def test_text_from_data_is_shown_and_is_never_markup(page: Page) -> None:
    assert page.tags.count("script") == page.markup.count("<script") == 1
    assert page.tags.count("style") == page.markup.count("<style") == 1
    assert page.markup.count("</script>") == page.markup.count("</style>") == 1
    assert "alert(1)" in page.words
    assert "{{ 7 * 7 }}" in page.words
    assert [name for _, name, _ in page.attributes if name.startswith("on")] == []


@given(st.text())
def test_words_of_any_kind_come_back_as_text(words: str) -> None:
    shown = Page(f"<p>{html.escape_text(words)}</p>")
    assert shown.tags == ["p"]
    assert len(shown.words) >= len(words)


@given(st.text(max_size=200), st.integers(8, 200))
def test_clipped_text_fits_and_is_a_beginning(words: str, most: int) -> None:
    shown = html.clip_text(words, most)
    kept = shown.rsplit(" … (", 1)[0] if shown != words else words
    assert words.startswith(kept)
    assert len(html.escape_text(kept).encode()) <= most


# ── Complete ───────────────────────────────────────────────────────────────────────────────────────
def test_report_shows_every_stage_and_picture_and_names_each_section(reported: Built, page: Page) -> None:
    ids = page.values("id")
    drawn = sum(len(plots.draw_plots(report.manifest)) for report, _ in reported.steps.values())
    cards, flows = 2, 2 * 3

    assert {"/".join(step.key[1:]) for step in steps.plan_steps(reported.project)} <= set(ids)
    assert page.tags.count("svg") == drawn + cards + flows
    links = [target for target in page.values("href", "a") if target.startswith("#")]
    assert links[:6] == ["#summary", "#flow", "#chats", "#pairs", "#order-and-ranks", "#rows"]
    assert "nav { position: sticky" in page.markup


def test_failed_gate_is_named_with_what_was_not_built(tmp_path: Path) -> None:
    workspace = with_hostile_rows(tmp_path, gates={"rejects": {"at_most": 0.01}})
    with pytest.raises(GateError):
        workspace.build()

    page = Page(Path(report_page.write_report(workspace.project)).read_text(encoding="utf-8"))
    assert "Not built: rows/tokenized_examples" in page.words
    assert "rejects: 6.977 %" in page.words
    assert "expectations/rows-canonical_rows.html#rejects" in page.values("href")


@pytest.mark.slow
def test_waiver_is_shown_in_report_and_expectations(tmp_path: Path) -> None:
    reason = "three bad rows are what this test is about"
    waiver = {"check": "rejects", "at_most": 0.2, "reason": reason}
    bounds = {check: {"at_most": 1} for check in ("split_share", "filler_share", "rank_balance")}
    gates = bounds | {"fill": {"at_least": 0}, "rejects": {"at_most": 0.01}, "waivers": [waiver]}
    workspace = with_hostile_rows(tmp_path, gates=gates)
    built = workspace.build()
    report = Path(report_page.write_report(workspace.project))
    docs = report.parent / "expectations" / "rows-canonical_rows.html"

    assert report.read_text(encoding="utf-8").count(reason) >= 2
    assert reason in docs.read_text(encoding="utf-8")
    assert any(reason in waiver for waiver in built.manifest("gpu_partitions").waivers)


# ── Right ──────────────────────────────────────────────────────────────────────────────────────────
def test_header_has_verdict_numbers_and_dates_of_the_build_alone(reported: Built, page: Page) -> None:
    header = Page(page.markup[: page.markup.index("</header>")].partition("<header")[2])
    order = reported.manifest("training_splits")

    assert "✓ Ready to train" in header.words
    assert f"{order.facts['tokens']:,}tokens to train on" in header.words
    assert f"{order.facts['steps']:,}step" in header.words
    assert reported.manifest("gpu_partitions").version[:12] in header.words
    dates = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d", header.words)
    built_at = {one.manifest.built_at[:16].replace("T", " ") for one, _ in reported.steps.values()}
    assert len(dates) == 2
    assert set(dates) <= built_at
    assert report_page.render_report(load_build_view(reported.project)).startswith(page.markup[:-50])


def test_cards_and_rows_of_each_dataset_have_its_counts_lengths_and_reasons(reported: Built, page: Page) -> None:
    cards = [Page(text) for text in re.findall(r'<article class="card">.*?</article>', page.markup, re.DOTALL)]
    for name, card in zip(("chats", "pairs"), cards, strict=True):
        examples, packed = reported.manifest(name, "tokenized_examples"), reported.manifest(name, "packed_shards")
        assert f"{reported.manifest(name, 'canonical_rows').facts['kept']:,}rows" in card.words
        assert f"{examples.facts['tokens']:,}tokens" in card.words
        assert f"{100 * examples.facts['trained_share']:.1f} %trained" in card.words
        assert f"{100 * packed.facts['fill']:.1f} %fill" in card.words
        assert card.tags.count("svg") == 1
        assert "checks passed" in card.words
    rejected = sorted(reason for _, reason in reported.rejects("chats"))
    options = [value for value in page.values("value", "option") if value]
    assert options == ["chats", "pairs", "kept", *sorted(set(rejected)), "characters", "tokens"]
    reasons = page.values("data-reason", "details")
    assert sorted(reason for reason in reasons if reason != "kept") == rejected
    assert len(page.values("data-characters", "details")) == len(reasons)
    assert len(page.values("data-tokens", "details")) == reasons.count("kept")


def test_table_of_zeros_is_left_out_and_one_of_words_is_not(reported: Built, page: Page) -> None:
    columns, says_something = ("stage", "examples", "tokens_removed"), report_page.says_something
    assert not says_something(DisplayTable(columns, (("exchanges", 0, 0), ("tokens", 0, 0))))
    assert not says_something(DisplayTable(columns, ()))
    assert says_something(DisplayTable(columns, (("exchanges", 0, 0), ("tokens", 0, 3))))
    assert says_something(DisplayTable(("column", "distance"), (("units", 0.0),)))
    assert says_something(DisplayTable(("hint",), (("raise seq_len",),)))
    tables = [reported.manifest(name, "truncation_stats").tables["stages"] for name in ("chats", "pairs")]
    assert [says_something(table) for table in tables] == [True, False]
    assert page.markup.count('<p class="dim">stages</p>') == 1
    assert page.values("open", "details") == []


SEQUENCE_COLUMNS = ("ids", "labels", "positions", "segments")


def read_sequences(page: Page) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield what each sequence of a page is called, and its numbers by column."""
    names = re.findall(r"packed sequence (\w+/\w+/\d+)", page.words)
    columns = [page.values(f"data-{name}", "figure") for name in SEQUENCE_COLUMNS]
    for name, *values in zip(names, *columns, strict=True):
        yield name, {column: value.split(",") for column, value in zip(SEQUENCE_COLUMNS, values, strict=True)}


def test_each_token_is_an_element_of_its_segment_with_the_numbers_of_the_shard(reported: Built, page: Page) -> None:
    found = dict(read_sequences(page))

    assert {name.split("/")[0] for name in found} == {"chats", "pairs"}
    assert page.tags.count("i") == sum(len(columns["ids"]) for columns in found.values())
    segments = sum(len(set(columns["segments"])) for columns in found.values())
    assert page.values("class", "div").count("segment") == segments > 2
    for name, columns in found.items():
        dataset, split, number = name.split("/")
        parts = select_shards(reported.manifest(dataset, "packed_shards").parts, split)
        shards = [reported.project.store.table(part.files["shard"]) for part in parts]
        row = [row for shard in shards for row in shard.to_pylist()][int(number)]
        assert columns == {
            "ids": [str(one) for one in row["input_ids"]],
            "labels": ["" if one == -100 else str(one) for one in row["labels"]],
            "positions": [str(one) for one in row["position_ids"]],
            "segments": [str(i) for i, length in enumerate(row["segment_lengths"]) for _ in range(length)],
        }


def test_token_of_markup_is_text_and_a_token_without_text_is_a_square() -> None:
    place = SegmentLocation("train", 0, 0, "<b>#0", "<b>", 5, 4, 0, "shard", 0)
    row = {"input_ids": [*range(1, 10)], "labels": [-100, *range(2, 10)], "position_ids": [*range(9)],
           "loss_weights": [0.0, 1.0, 0.5, *[1.0] * 6]}  # fmt: skip
    one = SequenceTrace(
        dataset="d", split="train", sequence=0, row=row, places=(place,), shown=range(4),
        texts=["</i><script>", "", "\n", "x"], kinds=["template", *["assistant"] * 3], messages=[-1, 0, 0, 0],
    )  # fmt: skip
    macros: Any = report_page.open_templates().get_template("sequence.html.jinja").module
    page = Page(str(macros.sequence(report_page.describe_sequence(one), report_page.ReportLinks())))
    assert page.tags.count("i") == 4
    assert "script" not in page.tags
    assert "</i><script>▫↵\nx" in page.words
    assert page.values("data-weights") == ["0,1,0.5,1"]
    assert page.values("data-labels") == [",2,3,4"]
    assert "9 tokens · the first 4 of them · 1 segment" in page.words
    assert "from its token 5" in page.words


@pytest.mark.slow
def test_samples_colour_every_token_and_underline_those_that_train(reported: Built, page: Page) -> None:
    examples = {one["example_id"]: one for name in ("chats", "pairs") for one in reported.examples(name)}
    titles = [title for title in page.values("title", "span") if " tokens, " in title]
    shown = re.findall(r"([0-9a-f]{16}:\d+#\d+) · (?:train|validation)", page.words)

    assert len(shown) == 2 * report_page.SAMPLES_PER_DATASET
    assert len(set(shown)) == len(shown)
    assert sum(int(title.split()[0]) for title in titles) == sum(examples[name]["tokens"] for name in shown)
    trained = sum(int(title.split()[0]) for title in titles if title.endswith(", trained"))
    assert trained == sum(examples[name]["trained_tokens"] for name in shown)


def test_kinds_of_an_example_are_those_of_its_spans() -> None:
    example = {
        "input_ids": [1, 2, 3, 4], "loss_mask": [False, False, True, False],
        "span_starts": [0, 1, 3], "span_kinds": [6, 2, 6],
    }  # fmt: skip

    assert inspect.list_token_kinds(example) == [
        ("template", False), ("assistant", False), ("assistant", True), ("template", False),
    ]  # fmt: skip


# ── Small, and written when something changed ──────────────────────────────────────────────────────
@pytest.mark.slow
def test_report_of_huge_rows_and_rejects_stays_small(tmp_path: Path) -> None:
    long = [chat(i, turns=3, words=1200) for i in range(12)]
    bad = [{"messages": f"{i} " + "<&>" * 60_000} for i in range(60)]
    built = Workspace(tmp_path).one("rows.jsonl", [*long, *bad], packing={"slice_strategy": "split"}).build()
    size = Path(report_page.write_report(built.project)).stat().st_size
    budgets = (report_page.MAX_REJECT_BYTES, report_page.MAX_SAMPLE_BYTES, report_page.MAX_SEQUENCE_BYTES)
    assert sum(budgets) < 1_200_000
    assert size < report_page.MAX_PAGE_BYTES


def test_report_of_the_same_build_is_the_same_text_whenever_it_is_written(reported: Built) -> None:
    path = Path(report_page.write_report(reported.project))
    first = path.read_text(encoding="utf-8")
    path.unlink()
    assert Path(report_page.write_report(reported.project)).read_text(encoding="utf-8") == first


@pytest.mark.slow
def test_report_is_written_again_only_when_it_says_something_else(tmp_path: Path) -> None:
    workspace = with_hostile_rows(tmp_path)
    path = Path(report_page.write_report(workspace.build().project))
    first = path.read_text(encoding="utf-8")
    path.write_text(first.replace("<h1>", "<h1>the same "), encoding="utf-8")
    report_page.write_report(workspace.build().project)
    unchanged = path.read_text(encoding="utf-8")
    workspace.write("chats.jsonl", make_hostile_rows()[:-1])
    report_page.write_report(workspace.build().project)

    assert "<h1>the same " in unchanged
    assert "<h1>the same " not in path.read_text(encoding="utf-8")


# ── Expectations ───────────────────────────────────────────────────────────────────────────────────
def test_expectations_of_a_stage_are_one_each_with_what_was_asked_and_observed(reported: Built, folder: Path) -> None:
    step = steps.find_step(reported.project, ("mini", "chats", "canonical_rows"))
    made = reported.manifest("chats", "canonical_rows")
    page = Page((folder / "expectations" / "chats-canonical_rows.html").read_text(encoding="utf-8"))

    assert page.values("id") == [one.check for one in step.shown_thresholds]
    assert "expect_column_max_to_be_between(column='rejects', max_value=1" in page.words
    assert f"{made.facts['rejects']:.9g}" in page.words


@pytest.mark.slow
def test_check_that_runs_alone_hides_no_other_result(tmp_path: Path) -> None:
    built = with_hostile_rows(tmp_path).build()
    project, made = built.project, built.manifest("rows", "canonical_rows")
    step = steps.find_step(project, made.key)
    [alone] = runner.check_step(project, step, made, only={"rejects"})
    query = "SELECT check_name FROM check_results WHERE stage = 'canonical_rows' ORDER BY 1"
    _, shown = query_views(project.store, query)
    docs = project.store.read(expectation_suite.expectations_page_path(step.key)).decode()
    assert alone.check == "rejects"
    assert [check for (check,) in shown] == sorted(one.check for one in step.thresholds)
    assert f"{len(step.shown_thresholds)} of {len(step.shown_thresholds)} judged" in docs
