"""A process that ends quickly: exit functions, output and status as always, and no teardown."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os, sys
from rowmill.core.process_exit import QuickExit

class Torn:
    def __del__(self):
        os.write(1, b"torn down\\n")

end = QuickExit()
atexit.register(print, "exit function")
torn = Torn()
{ends}
"""


def run(ends: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(ends=ends)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_process_runs_its_exit_functions_and_is_not_torn_down() -> None:
    ended = run("end.set_status(3); print('unflushed', end=' '); sys.exit(3)")

    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "unflushed exit function\n", "")


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("sys.exit(2)", 2),
        ("if os.fork() == 0:\n    end.set_status(0)\nelse:\n    os.wait()\n    os._exit(0)", 0),
    ],
    ids=["no status", "forked"],
)
def test_process_without_a_status_and_a_forked_one_end_as_python_does(ends: str, status: int) -> None:
    ended = run(ends)

    assert (ended.returncode, ended.stdout) == (status, "exit function\ntorn down\n")


def test_output_that_cannot_be_written_is_still_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", PROGRAM.format(ends="print('lost'); end.set_status(0)")]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, env=buffered)
    os.close(writer)

    assert ended.returncode == 120
    assert b"BrokenPipeError" in ended.stderr
