"""Projects that were materialized before a test begins.

Each takes seconds, so one is made per process, and every test gets a copy of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import pytest

from tests.support.tiny_project import Tiny


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Tiny]]:
    """Lend a function that returns the project with a number of unknown roles after one run; it is only read."""
    with ExitStack() as lent:
        projects: dict[int, Tiny] = {}

        def lend(unknown_roles: int) -> Tiny:
            if unknown_roles not in projects:
                instance = lent.enter_context(dg.DagsterInstance.ephemeral())
                project = Tiny(tmp_path_factory.mktemp("run_once"), instance).write(unknown_roles=unknown_roles)
                assert project.run().success == (unknown_roles == 0)
                projects[unknown_roles] = project
            return projects[unknown_roles]

        yield lend


@pytest.fixture
def tiny(tmp_path: Path, instance: dg.DagsterInstance) -> Tiny:
    """Return a project of two datasets that nothing was built of."""
    return Tiny(tmp_path, instance).write()


@pytest.fixture
def materialized(run_once: Callable[[int], Tiny], tmp_path: Path) -> Iterator[Tiny]:
    """Lend a project of two datasets after one run, which built everything and passed every check."""
    with run_once(0).lend_copy(tmp_path / "materialized") as copy:
        yield copy


@pytest.fixture
def broken(run_once: Callable[[int], Tiny], tmp_path: Path) -> Iterator[Tiny]:
    """Lend a project whose chats have an unknown role in 12 of 60 rows, after one run."""
    with run_once(12).lend_copy(tmp_path / "broken") as copy:
        yield copy
