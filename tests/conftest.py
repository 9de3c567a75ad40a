"""The three tiers of tests, what a run prints, and the fixtures that every test may use.

    make test       what a person runs before a commit                 unmarked tests
    .ci/run         what a change must pass                            and those marked `slow` (CI=1)
    make campaign   everything: whole matrices, faults by the dozen    and those marked `campaign` (--campaign)

A campaign of faults runs one trial in twenty in CI. Property tests draw the same examples in every run, except in the
campaign, which draws others each time and prints its seed.
"""

import atexit
import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.tiers import CAMPAIGN_VARIABLE, draw

if TYPE_CHECKING:
    import dagster as dg

    from tests.support.cli_project import CliProject

ROOT = Path(__file__).resolve().parent.parent

# A busy machine is slow; a check that fails for that would fail for no reason.
settings.register_profile("rowmill", deadline=None, derandomize=True, database=None, max_examples=draw(100))
settings.register_profile("campaign", deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes more than a second or two, as under CI")
    parser.addoption("--campaign", action="store_true", help="run everything, and every trial of the campaigns")


MEMORY_DISK = Path("/dev/shm")
MEMORY_DISK_BYTES = 6 << 30
"""What the tests of CI write is 1 GB; the rest is for what else the machine does."""


def write_to_memory() -> None:
    """Let the tests' folders be in memory where there is room: a third of a run is spent on waiting for a disk.

    Folders of tests that passed are removed as soon as the test ends. A TMPDIR that is set is kept.
    """
    if "TMPDIR" in os.environ or not MEMORY_DISK.is_dir():
        return
    if shutil.disk_usage(MEMORY_DISK).free >= MEMORY_DISK_BYTES and os.access(MEMORY_DISK, os.W_OK):
        os.environ["TMPDIR"] = str(MEMORY_DISK)
        tempfile.tempdir = None


def pytest_configure(config: pytest.Config) -> None:
    write_to_memory()
    is_campaign = config.getoption("--campaign")
    settings.load_profile("campaign" if is_campaign else "rowmill")
    if is_campaign:
        os.environ[CAMPAIGN_VARIABLE] = "1"
    if is_campaign and config.option.hypothesis_seed is None:
        # Chosen before the workers start, so that all of them draw by it.
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))
    if not hasattr(config, "workerinput") and config.option.verbose < 0:
        config.pluginmanager.register(Progress(config), "rowmill-progress")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what is collected: modules and tests live as long as the process.

    Half a million objects, which each full collection looked at again: half a second, and an eighth of the processor
    time of tests that open real tokenizers.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        # Else bindings report as leaked what the interpreter does not collect when it ends.
        atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the tiers that were not asked for; begin with the files that take longest."""
    is_campaign = config.getoption("--campaign")
    with_slow = is_campaign or config.getoption("--slow") or bool(os.environ.get("CI"))
    left_out = [
        item
        for item in items
        if (item.get_closest_marker("campaign") is not None and not is_campaign)
        or (item.get_closest_marker("slow") is not None and not with_slow)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


FIRST = (
    "test_tracking.py",
    "test_options_of_kinds.py",
    "test_going_back.py",
    "test_object_store.py",
    "test_ray_cluster.py",
    "test_browser.py",
    "test_viewer_in_browser.py",
    "test_main.py",
    "test_site_in_browser.py",
    "test_gates.py",
    "test_indexed_shards.py",
    "test_alerts.py",
    "test_dagster_server.py",
    "test_teacher_scores.py",
    "test_robustness.py",
    "test_remote.py",
    "test_fault_campaigns.py",
    "test_tokenizer_source.py",
    "test_bad_input.py",
    "test_outside_builds.py",
    "test_tokenizer.py",
    "test_table_partitions.py",
    "test_views.py",
    "test_recorded_versions.py",
    "test_real_templates.py",
    "test_worker_processes.py",
    "test_damage.py",
    "test_real_tables.py",
    "test_forked_workers.py",
    "test_trackers.py",
    "test_ray_faults.py",
)
"""The files that take longer than 20 s, the longest first: one that begins last leaves the other workers idle."""


class Progress:
    """Prints one line per tenth of the tests in place of a dot per test, and how to run again what failed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._start = time.monotonic()
        self._ended: set[str] = set()
        self._tenths = 0
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Remember the session, which will know how many tests there are."""
        self._session = session

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letter for what passed or was skipped."""
        if report.failed:
            return None
        if report.skipped:
            return "skipped", "", "SKIPPED"
        return ("passed" if report.when == "call" else ""), "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the share of tests that have ended, at each tenth."""
        if report.when != "teardown" or self._session is None:
            return
        self._ended.add(report.nodeid)
        tenths = 10 * len(self._ended) // max(self._session.testscollected, 1)
        if tenths > self._tenths:
            self._tenths = tenths
            print(
                f"{10 * tenths:4} %  {len(self._ended):6,} tests  {time.monotonic() - self._start:5.0f} s", flush=True
            )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the command that runs each failed test alone."""
        failed = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
        if not failed:
            return
        campaign, seed = self._config.getoption("--campaign"), self._config.option.hypothesis_seed
        options = f" --campaign --hypothesis-seed={seed}" if campaign else " --slow"
        terminalreporter.section("run one alone")
        for name in dict.fromkeys(failed):
            terminalreporter.write_line(f".venv/bin/python -m pytest{options} '{name}'")


TRIALS_IN_CI = 20
"""One trial of so many of a campaign runs in CI."""


@pytest.fixture(scope="session")
def trials(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Return how many of a campaign's trials are run."""
    return lambda count: count if request.config.getoption("--campaign") else max(1, count // TRIALS_IN_CI)


@pytest.fixture(scope="module")
def small_parts() -> Generator[None]:
    """Let parts of files begin at 128 KiB, so that files of a test have several."""
    from rowmill.sources import parts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "SMALLEST_PART_BYTES", 128 << 10)
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real datasets, tokenizers and templates, or skip with one clear line."""
    folder = Path(os.environ.get("ROWMILL_REAL_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "SOURCES.md").is_file():
        pytest.skip(f"no real data at {folder}; set ROWMILL_REAL_DATA to a folder that has it")
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> "CliProject":
    """Return the small project of the command line's tests, built; no test changes it."""
    from tests.support.cli_project import CliProject

    project = CliProject(tmp_path_factory.mktemp("small")).write()
    project.run("build")
    return project


@pytest.fixture
def instance() -> Iterator["dg.DagsterInstance"]:
    """Lend an instance of Dagster in memory; one that is not closed leaves its folder to the garbage collector."""
    import dagster as dg

    with dg.DagsterInstance.ephemeral() as lent:
        yield lent


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the width of whatever terminal the tests were started from; parallel runners set one, too."""
    monkeypatch.delenv("COLUMNS", raising=False)
