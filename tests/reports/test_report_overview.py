"""The first screen says the verdict, what was built, and each dataset's numbers, lengths and worst finding."""

import re

from rowmill.reports import report_overview
from rowmill.reports.current_build import load_current_build
from tests.support.markup import Page
from tests.support.recipes import Built


def test_header_has_verdict_numbers_and_dates_of_the_build_alone(reported: Built) -> None:
    build = load_current_build(reported.project)
    order = reported.manifest("training_splits")

    page = Page("".join(report_overview.render_header(build)))

    assert page.words.startswith("mini✓ Ready to train")
    assert f"{order.facts['tokens']:,}tokens to train on" in page.words
    assert f"{order.facts['steps']:,}step" in page.words
    assert reported.manifest("gpu_partitions").version[:12] in page.words
    dates = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d", page.words)
    built_at = {one.manifest.built_at[:16].replace("T", " ") for one, _ in reported.steps.values()}
    assert len(dates) == 2
    assert set(dates) <= built_at


def test_each_dataset_has_a_card_with_its_counts_and_lengths(reported: Built) -> None:
    build = load_current_build(reported.project)

    pages = {name: Page("".join(report_overview.render_card(build, name, drawn=True))) for name in ("chats", "pairs")}

    for name, page in pages.items():
        examples, packed = reported.manifest(name, "tokenized_examples"), reported.manifest(name, "packed_shards")
        assert f"{reported.manifest(name, 'canonical_rows').facts['kept']:,}rows" in page.words
        assert f"{examples.facts['tokens']:,}tokens" in page.words
        assert f"{100 * examples.facts['trained_share']:.1f} %trained" in page.words
        assert f"{100 * packed.facts['fill']:.1f} %fill" in page.words
        assert page.tags.count("svg") == 1
        assert "checks passed" in page.words


def test_report_of_the_same_build_is_the_same_text_whenever_it_is_written(reported: Built) -> None:
    first, second = ("".join(report_overview.render_header(load_current_build(reported.project))) for _ in range(2))

    assert first == second
