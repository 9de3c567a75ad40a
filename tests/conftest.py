"""Fixtures that every test may use.

What belongs here: finding real data. What does not: builders of one subject's inputs.
"""

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import dagster as dg

# A busy machine is slow; a check that fails for that would fail for no reason.
settings.register_profile("rowmill", deadline=None)
settings.load_profile("rowmill")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes more than some seconds, as under CI")
    parser.addoption("--campaign", action="store_true", help="run all trials of the campaigns of faults")


FIRST = (
    "test_browser.py",
    "test_real_templates.py",
    "test_ray_cluster.py",
    "test_dagster_server.py",
    "test_gates.py",
    "test_nights.py",
    "test_ray_faults.py",
    "test_object_store.py",
    "test_fault_campaigns.py",
    "test_real_builds.py",
)
"""The files that take a minute or more: begun last, they would leave the other cores idle."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests to CI, unless they are asked for; begin with those that take longest."""
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    if not config.getoption("--campaign"):
        whole = pytest.mark.skip(reason="every case of a matrix: `make campaign` runs it")
        for item in items:
            if item.get_closest_marker("exhaustive") is not None:
                item.add_marker(whole)
    if config.getoption("--slow") or os.environ.get("CI"):
        return
    left_out = pytest.mark.skip(reason="slow: `make test CI=1` runs it")
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(left_out)


IN_CI = 8
"""One trial of so many of a campaign runs in CI."""


@pytest.fixture(scope="session")
def trials(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Return how many of a campaign's trials are run."""
    return lambda count: count if request.config.getoption("--campaign") else max(1, count // IN_CI)


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
