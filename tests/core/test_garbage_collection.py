"""Checks that commands search for garbage as rarely as workers do, and that a pause ends."""

import gc
import subprocess
import sys

import pytest

from rowmill.core import garbage_collection


def test_command_looks_for_garbage_rarely() -> None:
    code = "import gc; from rowmill.cli.main import main; main([]); print(gc.get_threshold()[0])"

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert int(done.stdout.splitlines()[-1]) == garbage_collection.ALLOCATIONS


def test_pause_ends_as_it_began() -> None:
    with garbage_collection.pause_collection():
        with garbage_collection.pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_pause_ends_after_an_error() -> None:
    with pytest.raises(KeyError), garbage_collection.pause_collection():
        raise KeyError

    assert gc.isenabled()
