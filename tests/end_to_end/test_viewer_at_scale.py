"""The viewer over a million rows, and while builds and `rowmill gc` go on."""

import re
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from time import perf_counter
from urllib.request import urlopen

import pytest

from rowmill.build.gc import collect_garbage
from rowmill.viewer.builds import Builds
from tests.support.browser import Visitor, starting_browser
from tests.support.million_rows import BROKEN_FILE, BROKEN_LINE, FILES, NEW_ROWS, WORLD_SIZE, build_million_rows
from tests.support.recipes import Workspace, chat
from tests.support.viewer import ask, serving

STEP = 1_204
MAX_PEAK_MB = 500
READERS = 20


def list_rows(page: str) -> list[str]:
    return re.findall(r'<tr data-row="([^"]+)"', page)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a million rows, and once more with another file."""
    made = tmp_path_factory.mktemp("million")
    build_million_rows(made)
    return made


def measure_peak_mb(address: str) -> int:
    """Return the most memory that the process which listens at an address has had."""
    port = int(address.rpartition(":")[2])
    [pid] = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"--port\0{port}\0".encode() in path.read_bytes()
    ]
    return int(re.findall(r"VmHWM:\s+(\d+) kB", (Path("/proc") / pid / "status").read_text())[0]) // 1_000


@pytest.mark.campaign
@pytest.mark.timeout(1_800)
def test_five_questions_are_answered_over_a_million_rows(folder: Path) -> None:
    with serving(folder, "mini") as address:

        def get(path: str) -> str:
            with urlopen(f"{address}{path}", timeout=120) as answer:
                return answer.read().decode()

        rows = get("/mini/rows")
        cut = get("/mini/rows?check=end_to_end_loss&removed=any&order=-removed")
        most = get(f"/mini/rows/{list_rows(cut)[0]}")
        line = get(f"/mini/search?q={BROKEN_FILE}:{BROKEN_LINE}")
        step = get(f"/mini/search?q=step%20{STEP}")
        since = get("/mini/compare")
        found = get(f"/mini/rows?q={'thirteen%20the'}")
        peak = measure_peak_mb(address)

    # Which rows did this check fail on, and what do they look like? Which did truncation hurt most?
    assert f'<span class="dim total">{FILES * 100_000 + NEW_ROWS - 1:,}</span>' in rows
    removed = [int(text.replace(",", "")) for text in re.findall(r'data-label="removed">([\d,]+)</td>', cut)]
    assert len(removed) == len(list_rows(cut)) == 50
    assert removed == sorted(removed, reverse=True)
    assert f"which removed {removed[0]} by tokens" in most
    # Why is this line not in the training data?
    assert "Not in the training data" in line
    assert "invalid_json" in line
    assert "cut off" in line
    # What did this step train on, rank by rank?
    assert re.findall(r'<h2 id="rank-(\d)">', step) == [str(rank) for rank in range(WORLD_SIZE)]
    assert len(list_rows(step)) > WORLD_SIZE
    # What came in since last night?
    assert re.findall(r"<h2>texts: ([^<]+)</h2>", since) == [f"{NEW_ROWS} rows came"]
    assert len(list_rows(found)) > 0
    print(f"{peak} MB at most")
    assert peak < MAX_PEAK_MB


MAX_QUESTION_S = 10.0


@pytest.mark.campaign
@pytest.mark.browser
@pytest.mark.timeout(1_800)
def test_five_questions_are_answered_by_clicking_over_a_million_rows(folder: Path) -> None:
    seconds: dict[str, float] = {}
    with starting_browser() as browser, serving(folder, "mini") as address:
        visitor = Visitor(browser, address, timeout_s=120)
        page = visitor.page

        @contextmanager
        def asking(question: str) -> Generator[None]:
            visitor.go("/")
            began = perf_counter()
            yield
            seconds[question] = perf_counter() - began

        with asking("Which rows did this check fail on, and what do they look like?"):
            visitor.follow(page.get_by_role("link", name="end_to_end_loss"))
            failed = visitor.read_rows()
            visitor.follow(page.locator("tr[data-row] a").first)
            assert page.locator("article.row-view").get_attribute("data-row") == failed[0]
            assert page.locator(".lost").count() > 0
        with asking("Why is line 78 of this file not in the training data?"):
            visitor.follow(page.get_by_role("link", name="mini", exact=True))
            visitor.search(f"{BROKEN_FILE}:{BROKEN_LINE}")
            said = page.locator("main").inner_text()
            assert "Not in the training data" in said
            assert "invalid_json" in said
        with asking("What did step 1,204 train on, rank 3?"):
            visitor.follow(page.get_by_role("link", name="mini", exact=True))
            visitor.search(f"step {STEP:,} rank 3")
            assert page.url.endswith("#rank-3")
            assert page.locator("#rank-3").is_visible()
            visitor.follow(page.locator("section", has=page.locator("#rank-3")).locator("tr[data-row] a").last)
            assert page.get_by_role("link", name=f"step {STEP}, rank 3").count() > 0
        with asking("Which rows did truncation hurt most, and what did they lose?"):
            visitor.follow(page.get_by_role("link", name="mini", exact=True))
            visitor.follow(page.locator("#flow svg a", has_text="truncated").first)
            removed = [int(text) for text in page.locator("td[data-label=removed]").all_inner_texts()]
            assert removed == sorted(removed, reverse=True)
            visitor.follow(page.locator("tr[data-row] a").first)
            assert f"truncation removed {removed[0]}" in page.locator(".verdict-line").inner_text()
            assert page.locator(".lost").count() > 0
        with asking("What came in since last night?"):
            visitor.follow(page.get_by_role("link", name="mini", exact=True))
            visitor.follow(page.get_by_role("link", name="Since the last build", exact=True))
            assert f"texts: {NEW_ROWS} rows came" in page.locator("main").inner_text()
            visitor.follow(page.locator("tr[data-row] a").first)
            assert "texts-99.jsonl:1" in page.locator("main").inner_text()
        assert visitor.errors == []

    print({question: round(taken, 2) for question, taken in seconds.items()})
    assert max(seconds.values()) < MAX_QUESTION_S


@pytest.mark.slow
def test_readers_see_one_build_while_another_is_made_and_gc_removes_it(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(i) for i in range(30)])
    workspace.build()
    builds = Builds.of_folder(tmp_path / "configs", None)
    [version] = set(re.findall(r"version=(\w+)", ask(builds, "/mini").text))
    row = list_rows(ask(builds, "/mini/rows").text)[3]
    pages = ("", "/rows", f"/rows/{row}", "/rejects", "/left_out", "/steps/0", "/sequences/rows/train/0", "/rows?q=why")
    is_over = Event()

    def read(reader: int) -> Iterator[tuple[str, int, str]]:
        at = reader
        while True:
            is_last = is_over.is_set()
            path = pages[at % len(pages)]
            address = f"/mini{path}{'&' if '?' in path else '?'}version={version}"
            answer = ask(builds, address)
            yield address, answer.status, answer.text
            if is_last:
                return
            at += 1

    with ThreadPoolExecutor(READERS) as readers:
        reading = [readers.submit(lambda reader=reader: list(read(reader))) for reader in range(READERS)]
        for rows in (35, 40):
            workspace.write("rows.jsonl", [chat(i) for i in range(rows)])
            collected = workspace.build().project
        collect_garbage(collected, keep=1, dry_run=False)
        is_over.set()
        answers = [answer for future in reading for answer in future.result()]

    gone = [text for _, status, text in answers if status == 404]
    totals = {
        total
        for address, status, text in answers
        if status == 200 and "/rows?version" in address
        for total in re.findall(r'class="dim total">(\d+)<', text)
    }
    assert {status for _, status, _ in answers} == {200, 404}
    assert [text for text in gone if "rowmill gc" not in text] == []
    # gc removes the build before its statistics, so no list is empty.
    assert totals == {"30"}
    assert ask(builds, f"/mini/rows?version={version}").status == 404
    assert '<span class="dim total">40</span>' in ask(builds, "/mini/rows").text
