"""Fixtures of the tests of the reader: builds that several modules read, and a process that is a worker."""

import sys
from pathlib import Path

import pytest

from tests.support.reader_builds import BUILDS, Workers, make


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the storage roots of three builds, by name."""
    return {name: make(tmp_path_factory.mktemp(name) / "project", **one) for name, one in BUILDS.items()}


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Put the stand-in where a process that has imported torch has torch."""
    workers = Workers()
    monkeypatch.setitem(sys.modules, "torch.utils.data", workers)
    return workers
