"""The whole product in a real browser, with the real webserver and daemon, from raw files to a schedule tick.

One visit, step by step, and what the browser shows at each; CI makes the first half of it. The same over GraphQL alone
is in `test_dagster_server.py`.

Needs Debian's `chromium` on the PATH and the package `playwright`, and is skipped with one line where either is
missing. With ROWMILL_SCREENSHOTS set to a folder, the pictures of the visit are kept there:

    make screenshots
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from tests.support.browser import starting_browser
from tests.support.dagster_server import ROOT, Server, eventually, serving
from tests.support.ports import take_free_ports

pytestmark = pytest.mark.slow

GRAPH = "/locations/rowmill/asset-groups/demo/lineage"
PATIENCE_MS = 120_000
RIGHT_ENDS_OF_LINES = """one => {
  const range = document.createRange();
  range.selectNodeContents(one);
  return [...range.getClientRects()].filter(box => box.width < one.clientWidth).map(box => box.right);
}"""


class Visit:
    """A browser's page on a server, with every request to another machine noted."""

    def __init__(self, page: Any, server: Server, pictures: Path | None) -> None:
        self.page = page
        self.server = server
        self.foreign: list[str] = []
        self._pictures = pictures
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", self._note)

    def _note(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1", "data:", "blob:", "about:")):
            self.foreign.append(request.url)

    def go(self, path: str, *shows: str) -> None:
        """Open a page and wait until it shows these words."""
        self.page.goto(path if path.startswith("http") else f"{self.server.address}{path}")
        for words in shows:
            self.page.get_by_text(words).first.wait_for()

    def picture(self, name: str, *, height: int | None = None) -> None:
        """Keep a picture of the window, or of its top."""
        if self._pictures is not None:
            window = self.page.viewport_size
            clip = {"x": 0, "y": 0, "width": window["width"], "height": height or window["height"]}
            self.page.screenshot(path=self._pictures / f"{name}.png", clip=clip, animations="disabled")

    def materialize(self, path: str) -> str:
        """Click on the page's one button, and on nothing else; return how the run ended."""
        before = {run["runId"] for run in self.server.runs()}
        self.go(path)
        self.page.get_by_role("button", name="Materialize").first.click()
        self.page.get_by_text("Launched run").wait_for()
        new = eventually(lambda: {run["runId"] for run in self.server.runs()} - before, "the run is known")
        return self.wait_for_run(new.pop())

    def wait_for_run(self, run_id: str) -> str:
        """Wait for a run with no page of the server open; return how it ended."""
        # A graph that follows a run takes more of the machine than the run.
        self.page.goto("about:blank")
        return self.server.ended_run(run_id)


@pytest.fixture
def browser() -> Iterator[Any]:
    """Provide a browser; requested before the server, so that a skip does not wait for the server."""
    with starting_browser() as started:
        yield started


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Serve a copy of the demo."""
    configs = tmp_path / "configs"
    shutil.copytree(ROOT / "configs" / "demo", configs / "demo")
    with serving(configs, tmp_path / ".rowmill", tmp_path / "home") as started:
        yield started


def open_page(browser: Any, server: Any) -> Visit:
    pictures = os.environ.get("ROWMILL_SCREENSHOTS")
    # Dagster's moving signs would be drawn without a graphics card, many times a second.
    page = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    return Visit(page, server, Path(pictures).absolute() if pictures else None)


@pytest.fixture
def visit(browser: Any, server: Server) -> Visit:
    return open_page(browser, server)


@pytest.mark.browser
def test_demo_is_built_looked_at_and_refused_by_a_red_check(visit: Visit) -> None:
    _build_and_look(visit, widths=((1440, 900),))
    ranks = visit.server.materialized("demo", "gpu_partitions")
    _break(visit.server.home.parent / "configs" / "demo" / "data" / "chats-1.jsonl")
    _see_it_refused(visit)

    assert visit.server.materialized("demo", "gpu_partitions") == ranks
    assert visit.foreign == []


@pytest.mark.campaign
@pytest.mark.browser
def test_what_was_built_before_the_pages_is_green_with_its_numbers(browser: Any, tmp_path: Path) -> None:
    """Walk the way of the first day: a file, `init`, `build`, `ui`, and a look."""
    folder = tmp_path / "first"
    folder.mkdir()
    shutil.copy(ROOT / "configs/demo/data/chats-2.jsonl", folder / "chats.jsonl")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ROWMILL_", "DAGSTER_"))}
    for words in (["init", "chats.jsonl", "--tokenizer", str(ROOT / "configs/demo/tokenizer")], ["build", "chats"]):
        command = [sys.executable, "-m", "rowmill.cli.main", *words]
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE)

    with serving(folder / "configs", folder / ".rowmill", folder / ".dagster") as server:
        visit = open_page(browser, server)
        visit.go("/locations/rowmill/asset-groups/chats/lineage", "gpu_partitions")
        visit.picture("first-run")
        assert visit.server.runs() == []
        visit.go("/assets", "chats.canonical_rows")
        assert visit.page.get_by_text("Never materialized").count() == 0
        shown = visit.page.get_by_text(re.compile(r"^Materialized\b"))
        eventually(lambda: shown.count() >= 7, "each output has its time", within_s=60)
        visit.go("/assets/chats/chats.canonical_rows", "592 rows", "Passed")
        visit.go("/assets/chats/chats.tokenized_examples", "590 examples", "Passed")
        visit.go("/assets/chats/chats.canonical_rows?view=checks", "unknown_roles")
        visit.page.get_by_text("Succeeded").first.wait_for()
        assert visit.foreign == []


@pytest.fixture
def mlflow_server(browser: Any, tmp_path: Path) -> Iterator[str]:
    """Serve MLflow from an environment of its own; requested after the browser, which may be missing."""
    del browser
    program = os.environ.get("ROWMILL_MLFLOW")
    if program is None or find_spec("mlflow") is None:
        pytest.skip("no MLflow server; pip install mlflow elsewhere, and set ROWMILL_MLFLOW to its program mlflow")
    address, port = "127.0.0.1", take_free_ports()
    places = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination",
        str(tmp_path / "mlflow"),
    ]
    command = [program, "server", "--host", address, "--port", str(port), "--workers", "1", *places]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (
        (tmp_path / "mlflow.log").open("wb") as log,
        subprocess.Popen(
            command,
            env=environment | {"MLFLOW_DISABLE_TELEMETRY": "true"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            eventually(lambda: _answers(f"http://{address}:{port}/health"), "MLflow answers")
            yield f"http://{address}:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.browser
def test_mlflow_shows_the_datasets_of_a_published_build(browser: Any, mlflow_server: str) -> None:
    # The page shows the folder, and so does its picture, wherever pytest has its own.
    with TemporaryDirectory(prefix="demo-", dir="/tmp") as folder:
        configs = Path(folder, "configs", "demo")
        shutil.copytree(ROOT / "configs" / "demo", configs)
        recipe = yaml.safe_load((configs / "demo.yaml").read_text(encoding="utf-8"))
        recipe.setdefault("execution", {})["log_to"] = [{"kind": "mlflow", "tracking_uri": mlflow_server}]
        (configs / "demo.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "rowmill.cli.main", "build", str(configs / "demo.yaml")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    [address] = re.findall(r"^logged to mlflow: (http\S+)$", said, re.MULTILINE)
    visit = open_page(browser, None)
    visit.go(address, "rowmill.version")
    visit.page.get_by_text(re.compile(r"^demo \([0-9a-f]{32}\)$")).first.click()
    for words in ("input_ids", "trained tokens", re.compile(r"^Path: /tmp/demo-\w+/\.rowmill/demo/gpu_partitions$")):
        visit.page.get_by_text(words).last.wait_for()
    visit.picture("mlflow-dataset")
    assert visit.foreign == []


@pytest.mark.browser
@pytest.mark.campaign
def test_demo_from_materialize_all_through_a_red_check_to_a_scheduled_night(visit: Visit) -> None:
    _build_and_look(visit, widths=((1920, 1080), (1440, 900)))
    chats = visit.server.home.parent / "configs" / "demo" / "data" / "chats-1.jsonl"
    good = chats.read_bytes()
    _break(chats)
    ranks = visit.server.materialized("demo", "gpu_partitions")
    _see_it_refused(visit)
    _see_ranks_alone_refused(visit)
    assert visit.server.materialized("demo", "gpu_partitions") == ranks
    _accept_it_for_one_run(visit)
    chats.write_bytes(good)
    _see_it_green_again(visit)
    _see_a_tick(visit)

    assert visit.foreign == []


def _build_and_look(visit: Visit, widths: Sequence[tuple[int, int]]) -> None:
    assert visit.materialize(GRAPH) == "SUCCESS"
    assert set(visit.server.materialized("demo", "ranks")) == {"rank-00000-of-00002", "rank-00001-of-00002"}
    visit.go(GRAPH, "gpu_partitions")
    _see_each_node_name_its_dataset(visit)
    visit.picture("asset-graph")

    _see_the_answer_on_the_first_screen(visit, widths)
    visit.go("/assets/demo/chats.truncation_stats", "plot lengths")
    visit.page.get_by_text("Show Markdown").first.click()
    plots = "() => [...document.images].filter(one => one.src.startsWith('data:')).map(one => one.naturalWidth)"
    drawn = eventually(lambda: visit.page.evaluate(plots), "the plots are drawn")
    assert min(drawn) > 0
    visit.picture("truncation-stats")

    link = visit.page.locator("a[href*='/demo/report.html']").first.get_attribute("href")
    visit.go(link, "Warnings: nothing is blocked")
    assert visit.page.locator("a[href*='check=end_to_end_loss']").count() > 0
    assert visit.page.locator(".trained").count() > 0
    visit.page.get_by_label("reason").select_option("bad_messages")
    shown = visit.page.locator("#rows-list .row:visible")
    assert {row.get_attribute("data-reason") for row in shown.all()} == {"bad_messages"}


def _see_each_node_name_its_dataset(visit: Visit) -> None:
    """See the graph as it opens: nobody has zoomed in; Dagster may shorten a name in its middle."""
    shown = visit.page.locator("svg foreignObject").all_text_contents()
    for dataset in ("chats", "instructions", "documents"):
        named = [text for text in shown if text.strip().startswith(dataset[:8])]
        assert len(named) == 5, (dataset, shown)


def _see_the_answer_on_the_first_screen(visit: Visit, widths: Sequence[tuple[int, int]]) -> None:
    """See verdict, numbers, news and link without scrolling and uncut, in windows of some sizes."""
    for width, height in widths:
        visit.page.set_viewport_size({"width": width, "height": height})
        for stage, number in (("canonical_rows", "1,303 rows"), ("tokenized_examples", "1,299 examples")):
            visit.go(f"/assets/demo/chats.{stage}", "Passed")
            summary = visit.page.locator(".dagster-markdown").filter(has_text=number).first
            # Dagster cuts a value where the pane of the asset ends, left of its definition.
            edge = visit.page.locator("[class*=AssetNodeOverview_left]").first.bounding_box()
            text = summary.bounding_box()
            assert all(right <= edge["x"] + edge["width"] for right in summary.evaluate(RIGHT_ENDS_OF_LINES))
            assert text["y"] + text["height"] <= height
            assert summary.get_by_text("The first version").count() == 1
            assert "/demo/report.html#chats/" in summary.get_by_role("link", name="report").get_attribute("href")
        if width == 1920:
            visit.picture("asset-page")


def _break(chats: Path) -> None:
    """Give every third conversation of a file a role that no template knows."""
    lines = chats.read_text(encoding="utf-8").splitlines()
    for i in range(0, len(lines), 3):
        try:
            record = json.loads(lines[i])
            record["messages"][0]["role"] = "narrator"
        except (ValueError, KeyError, TypeError, IndexError):
            continue
        lines[i] = json.dumps(record)
    chats.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _see_it_refused(visit: Visit) -> None:
    assert visit.materialize(GRAPH) == "FAILURE"
    visit.go("/assets/demo/chats.canonical_rows?view=checks", "unknown_roles")
    visit.page.get_by_text("unknown_roles", exact=True).first.click()
    visit.page.get_by_text("wanted at most 1 %").first.wait_for()
    visit.page.get_by_text("Failed", exact=True).first.wait_for()
    visit.picture("red-check")
    link = visit.page.locator("a[href*='/demo/expectations/chats-canonical_rows.html#unknown_roles']").first
    visit.go(str(link.get_attribute("href")), "expect_column_max_to_be_between")


def _see_ranks_alone_refused(visit: Visit) -> None:
    """Ask for the ranks only, later: no check runs before them, and the gate is still closed."""
    assert visit.materialize("/assets/demo/gpu_partitions") == "FAILURE"
    run = next(one["runId"] for one in visit.server.runs() if one["status"] == "FAILURE")
    visit.go(f"/runs/{run}", "Gate closed")


def _accept_it_for_one_run(visit: Visit) -> None:
    """Copy what the red check's page offers into the launchpad, add a reason, and see what is published say so."""
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.go("/assets/demo/chats.canonical_rows?view=checks", "unknown_roles")
    visit.page.get_by_text("unknown_roles", exact=True).first.click()
    visit.page.locator("tr").filter(has_text="waive_for_one_run").get_by_text("Show Markdown").click()
    visit.page.get_by_role("button", name="Copy", exact=True).click()

    visit.go(GRAPH)
    materialize = visit.page.get_by_role("button", name="Materialize").first
    materialize.locator("xpath=following::button[1]").click()
    visit.page.get_by_text("Open launchpad").click()
    visit.page.locator(".CodeMirror-lines").filter(has_text="waivers: []").click()
    # Pasted over everything; then back over the end of the line and a quote, to between the two quotes.
    for key in ("Control+a", "Control+v", "ArrowLeft", "ArrowLeft"):
        visit.page.keyboard.press(key)
    visit.page.keyboard.type("narrators are wanted in this batch")
    launch = visit.page.get_by_role("dialog").get_by_role("button", name="Materialize")
    eventually(launch.is_enabled, "Dagster has checked the configuration")
    visit.picture("launchpad")
    before = {run["runId"] for run in visit.server.runs()}
    launch.click()
    new = eventually(lambda: {run["runId"] for run in visit.server.runs()} - before, "the run is known")
    assert visit.wait_for_run(new.pop()) == "SUCCESS"

    visit.go("/assets/demo/chats.canonical_rows?view=checks", "unknown_roles")
    visit.page.get_by_text("unknown_roles", exact=True).first.click()
    visit.page.get_by_text("waived: for one run: narrators are wanted in this batch").first.wait_for()
    # The recipe alone would not have built it.
    visit.go("/assets/demo/gpu_partitions", "Unsynced")
    # What is new, and whether it may be trained on, without scrolling.
    visit.page.set_viewport_size({"width": 1440, "height": 900})
    visit.page.get_by_text("since the last build").first.wait_for()
    summary = visit.page.locator(".dagster-markdown").filter(has_text="Trainers read this version").first
    for words in ("Passed", "Since 20", "files: 1 changed", "rows +"):
        box = summary.get_by_text(words).last.bounding_box()
        assert box["y"] + box["height"] <= 900, words


def _see_it_green_again(visit: Visit) -> None:
    assert visit.materialize(GRAPH) == "SUCCESS"
    visit.go("/assets/demo/chats.canonical_rows?view=checks", "unknown_roles")
    visit.page.get_by_text("Succeeded").first.wait_for()
    assert visit.page.get_by_text("Failed", exact=True).count() == 0


def _see_a_tick(visit: Visit) -> None:
    """Switch the nightly schedule on by its switch; then make it tick every minute, as an edit of the recipe does."""
    visit.go("/locations/rowmill/schedules/nightly_demo", "Schedule has never run")
    visit.page.locator("label").filter(has=visit.page.locator("input[type=checkbox]")).first.click()
    eventually(lambda: _schedule_is_on(visit), "the switch is on")
    visit.page.get_by_text("Next tick").wait_for()
    visit.picture("schedule", height=430)

    recipe = visit.server.home.parent / "configs" / "demo" / "demo.yaml"
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["execution"] |= {"cron": "* * * * *"}
    recipe.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    visit.go(GRAPH)
    visit.page.get_by_role("button", name="Reload definitions").click()
    night = eventually(lambda: _scheduled_run(visit.server), "a night was started")
    assert visit.wait_for_run(night) == "SUCCESS"
    visit.go("/locations/rowmill/schedules/nightly_demo", "Every minute", "1 run requested")


def _schedule_is_on(visit: Visit) -> bool:
    asked = visit.server.ask(
        "query ($s: ScheduleSelector!) { scheduleOrError(scheduleSelector: $s) "
        "{ ... on Schedule { scheduleState { status } } } }",
        s={"repositoryLocationName": "rowmill", "repositoryName": "__repository__", "scheduleName": "nightly_demo"},
    )
    return asked["scheduleOrError"]["scheduleState"]["status"] == "RUNNING"


def _scheduled_run(server: Server) -> str:
    for run in server.runs():
        if any(tag["key"] == "dagster/schedule_name" for tag in run["tags"]):
            return str(run["runId"])
    return ""
