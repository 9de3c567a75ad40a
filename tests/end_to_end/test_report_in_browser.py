"""The report of the demo in a real browser, opened as a file: three widths, light and dark, search, and tokens.

Needs what `test_browser.py` needs. With ROWMILL_SCREENSHOTS set to a folder, pictures of the report are kept there:

    make screenshots
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import runner
from rowmill.build.steps import open_project
from rowmill.reports import report_page
from tests.reports.conftest import HOSTILE, make_hostile_rows
from tests.support.browser import starting_browser
from tests.support.dagster_server import ROOT
from tests.support.recipes import Workspace
from tests.support.tiers import mark_all_but

pytestmark = [pytest.mark.slow, pytest.mark.browser]

HEIGHT = 844


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with starting_browser() as started:
        yield started


@pytest.fixture(scope="module")
def report(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the demo, and write its report; requested after the browser, which may be missing."""
    del browser
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(ROOT / "configs" / "demo", folder / "configs" / "demo")
    project = open_project(folder / "configs" / "demo" / "demo.yaml")
    runner.build(project)
    return Path(report_page.write_report(project))


class Opened:
    """The report in a window, with every request and every error of the page noted."""

    def __init__(self, browser: Any, report: Path, width: int, scheme: str) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda one: self.requests.append(one.url))
        self.page.on("pageerror", lambda one: self.errors.append(str(one)))
        self.page.on("dialog", lambda one: (self.errors.append(one.message), one.dismiss()))
        self.page.goto(report.as_uri())

    def measure_overflow(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def find_bottom(self, selector: str) -> float:
        box = self.page.locator(selector).first.bounding_box()
        return float(box["y"] + box["height"])


EVERY_WINDOW = [(width, scheme) for scheme in ("light", "dark") for width in (390, 820, 1300)]


@pytest.mark.parametrize(("width", "scheme"), mark_all_but([(390, "dark")], EVERY_WINDOW))
def test_report_fits_its_window_and_begins_with_the_verdict(
    browser: Any, report: Path, width: int, scheme: str
) -> None:
    opened = Opened(browser, report, width, scheme)
    page = opened.page
    assert "Ready to train" in page.locator(".verdict").inner_text()
    assert opened.find_bottom(".verdict") < HEIGHT
    assert opened.find_bottom(".card") < HEIGHT
    assert opened.measure_overflow() == 0
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert opened.measure_overflow() == 0

    page.locator("nav a", has_text="order and ranks").click()
    assert 0 <= page.locator("#order-and-ranks").bounding_box()["y"] < HEIGHT
    assert page.locator("nav a.here").inner_text() == "order and ranks"
    assert page.locator("nav").bounding_box()["y"] == 0
    assert opened.errors == []
    assert opened.requests == [one for one in opened.requests if one.startswith("file:")][:1]
    page.close()


def test_link_to_a_stage_opens_its_folded_section(browser: Any, report: Path) -> None:
    opened = Opened(browser, report, 1300, "light")
    opened.page.goto(f"{report.as_uri()}#chats/packed_shards")
    assert opened.page.locator("[id='chats/packed_shards']").get_attribute("open") is not None
    assert opened.page.locator("details.stage[open]").count() == 1


def test_rows_are_searched_by_text_dataset_reason_and_length(browser: Any, report: Path) -> None:
    opened = Opened(browser, report, 820, "light")
    page = opened.page
    shown = page.locator("#rows-list .row:visible")
    every = shown.count()
    reason, least = page.locator("#search-reason"), page.locator("#search-min")
    reason.select_option("bad_messages")
    chosen = shown.evaluate_all("rows => rows.map(row => row.dataset.reason)")
    assert set(chosen) == {"bad_messages"}
    assert page.locator("#search-count").inner_text() == f"{len(chosen)} of {every}"
    reason.select_option("")

    page.locator("#search-text").fill("SOCIAL SECURITY <SCRIPT>")
    assert shown.count() == 0
    page.locator("#search-text").fill("SATURN. one more question")
    assert shown.count() > 0
    assert all("Saturn. One more question" in text for text in shown.all_text_contents())
    page.locator("#search-text").fill("")

    page.locator("#search-dataset").select_option("documents")
    page.locator("#search-unit").select_option("tokens")
    least.fill("300")
    lengths = shown.evaluate_all("rows => rows.map(row => [row.dataset.dataset, +row.dataset.tokens])")
    assert lengths
    assert all(dataset == "documents" and tokens >= 300 for dataset, tokens in lengths)
    assert opened.errors == []


def test_row_that_tries_to_be_markup_is_found_as_text(browser: Any, tmp_path: Path) -> None:
    built = Workspace(tmp_path).one("rows.jsonl", make_hostile_rows()).build()
    opened = Opened(browser, Path(report_page.write_report(built.project)), 390, "light")
    page = opened.page
    page.locator("#search-text").fill("evil.INVALID")
    shown = page.locator("#rows-list .row:visible")
    page.locator("#search-reason").select_option("bad_messages")

    assert json.dumps(HOSTILE) in shown.text_content()
    assert page.locator("main img, main script").count() == 0
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert opened.measure_overflow() == 0
    assert opened.errors == []
    assert len(opened.requests) == 1


def test_token_shows_its_numbers_when_pointed_at_and_by_keyboard(browser: Any, report: Path) -> None:
    opened = Opened(browser, report, 1300, "light")
    page = opened.page
    sequence = page.locator(".sequence").first
    facts, tokens = sequence.locator(".facts"), sequence.locator(".tokens i")
    ids = str(sequence.get_attribute("data-ids")).split(",")
    trained = [at for at, label in enumerate(str(sequence.get_attribute("data-labels")).split(",")) if label]
    tokens.nth(trained[0]).hover()
    said = facts.inner_text()
    assert said.startswith(f"token {trained[0]} · id {ids[trained[0]]} · ")
    assert f"label {ids[trained[0]]}, trained" in said
    assert "segment 0" in said

    page.keyboard.press("Escape")
    sequence.locator(".tokens").focus()
    page.keyboard.press("Home")
    assert facts.inner_text().startswith(f"token 0 · id {ids[0]} · ")
    assert "label −100, no loss" in facts.inner_text()
    page.keyboard.press("ArrowRight")
    assert facts.inner_text().startswith(f"token 1 · id {ids[1]} · ")
    page.keyboard.press("End")
    assert facts.inner_text().startswith(f"token {len(ids) - 1} · ")

    sequence.locator(".show-ids").check()
    assert tokens.nth(2).get_attribute("data-id") == ids[2]
    assert opened.errors == []


def test_pictures_of_the_report_are_taken(browser: Any, report: Path) -> None:
    opened = Opened(browser, report, 1300, "light")
    page = opened.page
    pictures = os.environ.get("ROWMILL_SCREENSHOTS")
    mask, flow = page.locator(".sequence").first, page.locator("#flow")
    mask.locator(".tokens i").nth(40).hover()

    assert mask.locator(".trained").count() > 0
    assert flow.locator("svg").count() == 2
    if pictures is not None:
        folder = Path(pictures).absolute()
        mask.screenshot(path=folder / "mask.png")
        flow.screenshot(path=folder / "flow.png")
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=folder / "report.png")
        # The same for phones, where the site shows it in place of the wide one.
        page.set_viewport_size({"width": 390, "height": HEIGHT})
        mask.locator(".tokens i").nth(40).hover()
        mask.screenshot(path=folder / "mask-narrow.png")
