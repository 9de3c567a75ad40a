"""Checks that commands search for garbage as rarely as workers do."""

import subprocess
import sys

from rowmill.core import garbage_collection


def test_command_looks_for_garbage_rarely() -> None:
    code = "import gc; from rowmill.cli.main import main; main([]); print(gc.get_threshold()[0])"

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert int(done.stdout.splitlines()[-1]) == garbage_collection.ALLOCATIONS
