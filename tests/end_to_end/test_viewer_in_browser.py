"""`rowmill view` in a real browser, on the demo: five questions as a person asks them, keys, widths and colours.

Needs what `test_browser.py` needs. With ROWMILL_SCREENSHOTS set to a folder, pictures of the pages are kept there:

    make screenshots
"""

import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import runner
from rowmill.build.steps import Project, open_project
from rowmill.stats.views import query_views
from tests.reports.conftest import make_hostile_rows
from tests.support.browser import Visitor, starting_browser
from tests.support.dagster_server import ROOT
from tests.support.recipes import Workspace, chat, current
from tests.support.tiers import mark_all_but
from tests.support.viewer import serving

pytestmark = [pytest.mark.slow, pytest.mark.browser]

PAGES = ("/", "/demo", "/demo/rows", "/demo/rejects", "/demo/left_out", "/demo/steps/3", "/demo/sql",
         "/demo/sequences/chats/train/0")  # fmt: skip
DETAILS = ("/demo/rows?removed=any&order=-removed&dataset=chats", "/demo/rejects?reason=bad_tool_call")
"""Lists whose first row is opened: one with messages that truncation removed, and a reject."""


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    with starting_browser() as started:
        yield started


@pytest.fixture(scope="module")
def demo(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Build the demo; requested after the browser, which may be missing."""
    del browser
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(ROOT / "configs" / "demo", folder / "configs" / "demo")
    project = open_project(folder / "configs" / "demo" / "demo.yaml")
    runner.build(project)
    return project


@pytest.fixture(scope="module")
def address(demo: Project) -> Generator[str]:
    with serving(demo.base, "demo") as served:
        yield served


@pytest.fixture
def visitor(browser: Any, address: str) -> Generator[Visitor]:
    one = Visitor(browser, address)
    yield one
    one.page.close()
    assert one.errors == []


# ── Five questions ─────────────────────────────────────────────────────────────────────────────────
def test_rows_on_which_a_check_failed_are_two_clicks_away(visitor: Visitor, demo: Project) -> None:
    page = visitor.go("/")
    visitor.follow(page.get_by_role("link", name="end_to_end_loss"))
    shown = visitor.read_rows()
    visitor.follow(page.locator("tr[data-row] a").first)

    _, lost = query_views(
        demo.store,
        "from examples select row_ids[1] where dataset = 'chats' and removed_tokens > 0 "
        "order by removed_tokens desc, source, record limit 50",
        recipe="demo",
    )
    assert shown == [row_id for (row_id,) in lost]
    assert page.locator("article.row-view").get_attribute("data-row") == shown[0]
    assert page.get_by_text("removed by truncation").count() > 0
    assert page.locator(".text.model .trained").count() > 0


def test_line_of_a_file_that_is_not_in_the_data_says_why(visitor: Visitor, demo: Project) -> None:
    _, [(source, line, reason)] = query_views(
        demo.store, "from rejects select source, line, reason where reason = 'bad_tool_call'", recipe="demo"
    )
    visitor.go("/demo")
    visitor.search(f"{Path(source).name}:{line}")

    text = visitor.page.locator("main").inner_text()
    assert "Not in the training data" in text
    assert reason in text
    assert "What to do:" in text
    assert (demo.base / source).read_text("utf-8").split("\n")[line - 1] in visitor.page.locator(
        ".text.raw"
    ).inner_text()


def test_what_a_step_trained_on_is_found_by_its_number(visitor: Visitor, demo: Project) -> None:
    visitor.go("/demo")
    visitor.search("step 12")
    page = visitor.page

    _, wanted = query_views(demo.store, "from rank_steps select tokens where step = 12 order by rank", recipe="demo")
    headings = page.locator("h2[id^=rank-]").all_inner_texts()
    assert [f"{tokens:,} tokens" in heading for (tokens,), heading in zip(wanted, headings, strict=True)] == [
        True,
        True,
    ]
    first = visitor.read_rows()[0]
    visitor.follow(page.locator("tr[data-row] td:nth-child(4) a").first)
    assert page.locator("article").get_attribute("data-row") == first
    visitor.follow(page.get_by_role("link", name="step 12, rank 0").first)
    assert page.locator("h1").inner_text().startswith("Step 12")


def test_rows_that_lost_most_are_found_from_the_flow_and_show_what_they_lost(visitor: Visitor, demo: Project) -> None:
    page = visitor.go("/demo")
    visitor.follow(page.locator("#flow svg a", has_text="truncated").first)
    removed = page.locator("table.list td:nth-child(9)").all_inner_texts()

    numbers = [int(text.replace(",", "")) for text in removed]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > 0
    visitor.follow(page.locator("tr[data-row] a").first)
    assert "before truncation, which removed" in page.locator("main").inner_text()
    assert demo.recipe.name == "demo"


def test_what_came_in_since_the_last_build_is_linked_from_the_report(browser: Any, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(i) for i in range(30)])
    workspace.build()
    workspace.write("rows.jsonl", [chat(i) for i in range(34)])
    built = workspace.build()
    with serving(tmp_path, "mini") as served:
        one = Visitor(browser, served)
        page = one.go("/mini")
        one.follow(page.get_by_role("link", name="Since the last build", exact=True))
        came = one.read_rows()
        one.follow(page.locator("tr[data-row] a").first)
        shown = page.locator("article.row-view").get_attribute("data-row")
        page.close()

    every = [row["row_id"] for row in built.rows_of("rows", "canonical_rows", file="rows")]
    assert came == every[30:]
    assert shown == came[0]
    assert one.errors == []


# ── Pages ──────────────────────────────────────────────────────────────────────────────────────────
def test_numbers_bars_reasons_and_samples_lead_to_their_rows_and_back(visitor: Visitor, demo: Project) -> None:
    facts = current(demo, "chats", "canonical_rows").facts
    page = visitor.go("/demo")
    visitor.follow(page.locator("article.card", has_text="chats").locator("dd a").first)
    assert page.locator("h1 .total").inner_text() == f"{facts['kept']:,}"
    page.go_back()

    bar = page.locator("article.card", has_text="chats").locator("svg a").first
    counted = int(bar.locator("title").text_content().rpartition(": ")[2].replace(",", ""))
    visitor.follow(bar)
    assert page.locator("h1 .total").inner_text() == f"{counted:,}"
    page.go_back()

    visitor.follow(page.locator("#flow svg a", has_text="duplicate").first)
    assert page.locator("h1").inner_text().startswith("Rejects")
    assert "an earlier row has the same content" in page.locator("main").inner_text()
    page.go_back()

    page.locator("#rows-list summary").first.click()
    visitor.follow(page.locator("#rows-list details[open] a").first)
    assert page.locator("article.row-view").count() == 1


def test_rows_are_walked_by_keys_alone(visitor: Visitor) -> None:
    page = visitor.go("/demo/rows?dataset=chats")
    rows = visitor.read_rows()
    for key in ("j", "j", "j", "k"):
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    page.wait_for_url("**/demo/rows/*")
    assert page.locator("article").get_attribute("data-row") == rows[1]
    with page.expect_navigation():
        page.keyboard.press("j")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()


def test_text_is_found_while_the_data_is_read(visitor: Visitor, demo: Project) -> None:
    _, wanted = query_views(demo.store, "from rows select row_id where preview ilike '%crème brûlée%'", recipe="demo")
    page = visitor.go("/demo/rows")
    page.get_by_label("search in the text").fill("CRÈME BRÛLÉE")
    visitor.follow(page.get_by_role("button", name="show"))

    assert {row_id for (row_id,) in wanted} <= set(visitor.read_rows())
    assert "found" in page.locator("tr.progress").last.inner_text()


def test_rows_that_a_person_leaves_out_are_gone_from_the_next_build(browser: Any, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(i) for i in range(12)])
    workspace.build()
    with serving(tmp_path, "mini") as served:
        one = Visitor(browser, served)
        page = one.go("/mini/rows")
        rows = one.read_rows()
        panel = page.locator("#selection")
        page.locator("tr[data-row] .leave-out").nth(2).check()
        panel.get_by_text("1 row to leave out").wait_for()
        page.get_by_label("note").fill("wrong answer")
        page.keyboard.press("Tab")
        one.go(f"/mini/rows/{rows[5]}")
        page.keyboard.press("e")
        panel.get_by_text("2 rows to leave out").wait_for()
        with page.expect_download() as handed_over:
            page.locator("#hand-over").click()
        workspace.write("../review/left-out.jsonl", Path(handed_over.value.path()).read_bytes())
        page.close()
        assert one.errors == []

    filters = {"leave_out": ["review/left-out.jsonl"]}
    built = workspace.one("rows.jsonl", [chat(i) for i in range(12)], filters=filters).build()
    assert [(row["row_id"], row["reason"], row["detail"]) for row in built.rejected_rows()] == [
        (rows[2], "left_out_by_hand", "wrong answer"), (rows[5], "left_out_by_hand", ""),
    ]  # fmt: skip
    with serving(tmp_path, "mini") as served:
        one = Visitor(browser, served)
        page = one.go("/mini")
        one.follow(page.locator("#flow svg a", has_text="left_out_by_hand").first)
        assert one.read_rows() == [rows[2], rows[5]]
        page.close()


EVERY_WINDOW = [(width, scheme) for scheme in ("light", "dark") for width in (390, 1024, 1440)]


@pytest.mark.parametrize(("width", "scheme"), mark_all_but([(390, "dark")], EVERY_WINDOW))
def test_pages_fit_their_window(browser: Any, address: str, width: int, scheme: str) -> None:
    one = Visitor(browser, address, width, scheme)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    wide = {path: one.go(path).evaluate(overflow) for path in PAGES}
    one.follow(one.go("/demo/rows").locator("tr[data-row] a").first)
    wide["row"] = one.page.evaluate(overflow)
    one.page.close()

    assert wide == dict.fromkeys(wide, 0)
    assert one.errors == []


def test_numbers_of_a_list_are_seen_on_a_narrow_screen_without_scrolling(browser: Any, address: str) -> None:
    one = Visitor(browser, address, 390)
    page = one.go(DETAILS[0])
    first = page.locator("tr[data-row]").first
    cells = [first.locator("td.number").nth(number).bounding_box() for number in range(3)]
    begins = first.locator(".text-cell").bounding_box()
    one.go("/demo/steps/3")
    of_step = page.locator("tr[data-row] .text-cell").first.bounding_box()
    one.go("/demo/rejects")
    scrolled = "box => box.scrollWidth - box.clientWidth"
    overflow = [page.locator(".scroll", has=page.locator("table.wraps")).evaluate(scrolled)]
    one.follow(one.go(DETAILS[0]).locator("tr[data-row] a").first)
    overflow.append(page.locator(".scroll", has=page.locator("table.wraps")).evaluate(scrolled))
    page.close()

    assert overflow == [0, 0]
    ends = [round(box["x"] + box["width"]) for box in (*cells, begins, of_step)]
    assert [end for end in ends if end > 390] == []
    assert min(begins["width"], of_step["width"]) > 250
    assert one.errors == []


@pytest.mark.parametrize("scheme", mark_all_but(["light"], ["light", "dark"]))
def test_pages_violate_no_rule_of_axe(browser: Any, address: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe; pip install 'rowmill[browser]'")
    one = Visitor(browser, address, scheme=scheme)
    violations: list[str] = []
    for path in (*PAGES, "/demo/compare", "/demo/rows?q=river", "/demo/rows/nothing", *DETAILS):
        page = one.go(path)
        if path in DETAILS:
            one.follow(page.locator("tr[data-row] a").first)
        found = axe.Axe().run(page).response["violations"]
        violations += [f"{path}: {rule['id']}: {node['html'][:120]}" for rule in found for node in rule["nodes"]]
    one.page.close()

    assert violations == []


def test_hostile_rows_are_text(browser: Any, tmp_path: Path) -> None:
    odd = [
        "a" * 1_000_000,
        "left \u202e thgir",
        "nul \u0000 and bell \u0007",
        "\U0001f9ff\u0301 zalgo",
        "</script><script>x",
    ]
    rows = [
        *make_hostile_rows(),
        *(
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[:50]}]}
            for text in odd
        ),
    ]
    project = Workspace(tmp_path).one("rows.jsonl", [*rows, chat(1)]).build().project
    with serving(project.base, "mini") as served:
        one = Visitor(browser, served, 390)
        page = one.go("/mini/rows")
        ids = [row_id for name in ("rows", "rejects") for row_id in (one.go(f"/mini/{name}"), one.read_rows())[1]]
        for row_id in ids:
            one.go(f"/mini/rows/{row_id}")
            assert page.locator("article.row-view").count() == 1
            assert page.locator("main script, main img").count() == 0
            assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        page.close()
        assert one.errors == []


def test_pictures_of_pages_are_taken(visitor: Visitor) -> None:
    page = visitor.go("/demo/rows?removed=any&order=-removed&dataset=chats")
    pictures = os.environ.get("ROWMILL_SCREENSHOTS")
    page.set_viewport_size({"width": 1360, "height": 500})
    if pictures is not None:
        page.screenshot(path=Path(pictures).absolute() / "view-rows.png")
    visitor.follow(page.locator("tr[data-row] a").nth(3))
    page.set_viewport_size({"width": 1040, "height": 560})
    seen = page.locator(".text.model")
    assert seen.count() == 1
    # Its heading is above it.
    seen.evaluate("text => scrollTo(0, text.getBoundingClientRect().top + scrollY - 160)")
    if pictures is not None:
        page.screenshot(path=Path(pictures).absolute() / "view-row.png")
