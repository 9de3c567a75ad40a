"""Processes of our own: pandas is kept out and let in before a user's code runs, and they end without teardown."""

import os
import subprocess
import sys

import orjson
import pytest

from tests.support.cli_project import CliProject
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow

KEPT_OUT = """
import sys
import pyarrow as pa
from rowmill.core import own_process
own_process.keep_pandas_out()
pa.array(["a list"]); pa.table({"a": [1, 2]})
print("pandas" in sys.modules)
"""

LET_IN = """
import pyarrow as pa
from rowmill.core import errors, own_process
own_process.keep_pandas_out()
import pandas as pd
series = pd.Series([1.0, float("nan")])
before = pa.array(series).null_count
errors.require_code_permission("mine.Rows", "format.target")
print(before, pa.array(series).null_count)
"""

NANOSECONDS = """
import pyarrow as pa
from rowmill.core import own_process
from rowmill.sources.arrow_files import encode_batch
own_process.keep_pandas_out()
values = [1, 1_700_000_000_123_456_000, 1_700_000_000_123_456_789, None]
listed = pa.array([[one] for one in values], pa.list_(pa.timestamp("ns")))
columns = {"at": pa.array(values, pa.timestamp("ns")), "zoned": pa.array(values, pa.timestamp("ns", "Europe/Berlin"))}
columns["listed"] = listed
columns["lasted"] = pa.array([5, 10**9, 10**9 + 1, None], pa.duration("ns"))
print(b"|".join(encode_batch(pa.table(columns))).decode())
"""

ENDS = """
import atexit, os, sys
from rowmill.core.own_process import QuickExit

class Torn:
    def __del__(self):
        os.write(1, b"torn down\\n")

end = QuickExit()
atexit.register(print, "exit function")
torn = Torn()
{ends}
"""


def run(program: str) -> str:
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return made.stdout.strip().splitlines()[-1]


def test_lists_become_arrays_without_pandas() -> None:
    assert run(KEPT_OUT) == "False"


def test_users_code_meets_a_pyarrow_that_knows_pandas() -> None:
    pytest.importorskip("pandas")

    assert run(LET_IN) == "0 1"


def test_times_with_nanoseconds_are_read_as_they_are_written() -> None:
    pytest.importorskip("pandas")
    first, second, third, last = map(orjson.loads, run(NANOSECONDS).split("|"))

    assert first == {
        "at": "1970-01-01T00:00:00.000000001",
        "zoned": "1970-01-01T01:00:00.000000001+01:00",
        "listed": ["1970-01-01T00:00:00.000000001"],
        "lasted": 0.000000005,
    }
    assert [second["at"], second["lasted"]] == ["2023-11-14T22:13:20.123456", 1]
    assert third["at"] == "2023-11-14T22:13:20.123456789"
    assert last == {"at": None, "zoned": None, "listed": [None], "lasted": None}


@pytest.mark.parametrize("start", mark_all_but(["fork"], ["fork", "forkserver", "spawn"]))
def test_build_imports_pandas_in_no_process(start: str, small: CliProject) -> None:
    """Each process prints the modules that it imports; those that fork later inherit that."""
    program = f"""
import sys
from rowmill.cli import main
from rowmill.executors import local
if {start!r} != "fork":
    local.START_METHOD, local.prepare_fork = {start!r}, lambda: False
sys.exit(main.main(["build", {str(small.recipe)!r}, "--root", sys.argv[1], "--workers", "2"]))
"""
    made = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program, str(small.folder / f"store-{start}")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert made.returncode == 0, made.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in made.stderr.splitlines() if line.startswith("import time:")}
    assert "pyarrow" in imported
    assert "pandas.core" not in imported


def end(ends: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ENDS.format(ends=ends)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_process_runs_its_exit_functions_and_is_not_torn_down() -> None:
    ended = end("end.set_status(3); print('unflushed', end=' '); sys.exit(3)")

    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "unflushed exit function\n", "")


@pytest.mark.parametrize(
    ("ends", "status"),
    [("sys.exit(2)", 2), ("if os.fork() == 0:\n    end.set_status(0)\nelse:\n    os.wait()\n    os._exit(0)", 0)],
    ids=["no status", "forked"],
)
def test_process_without_a_status_and_a_forked_one_end_as_python_does(ends: str, status: int) -> None:
    ended = end(ends)

    assert (ended.returncode, ended.stdout) == (status, "exit function\ntorn down\n")


def test_output_that_cannot_be_written_is_still_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", ENDS.format(ends="print('lost'); end.set_status(0)")]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, env=buffered)
    os.close(writer)

    assert ended.returncode == 120
    assert b"BrokenPipeError" in ended.stderr
