"""pandas is kept out of our processes, and let in before a user's code runs."""

import subprocess
import sys

import orjson
import pytest

pytestmark = pytest.mark.slow

KEPT_OUT = """
import sys
import pyarrow as pa
from rowmill.core import arrow_import
arrow_import.keep_pandas_out()
pa.array(["a list"]); pa.table({"a": [1, 2]})
print("pandas" in sys.modules)
"""

LET_IN = """
import os, sys
import pyarrow as pa
from rowmill.core import arrow_import, code_permission
arrow_import.keep_pandas_out()
import pandas as pd
series = pd.Series([1.0, float("nan")])
before = pa.array(series).null_count
code_permission.require_code_permission("mine.Rows", "format.target")
print(before, pa.array(series).null_count)
"""

NANOSECONDS = """
import pyarrow as pa
from rowmill.core import arrow_import
from rowmill.sources.arrow_rows import encode_batch
arrow_import.keep_pandas_out()
values = [1, 1_700_000_000_123_456_000, 1_700_000_000_123_456_789, None]
listed = pa.array([[one] for one in values], pa.list_(pa.timestamp("ns")))
columns = {"at": pa.array(values, pa.timestamp("ns")), "zoned": pa.array(values, pa.timestamp("ns", "Europe/Berlin"))}
columns["listed"] = listed
columns["lasted"] = pa.array([5, 10**9, 10**9 + 1, None], pa.duration("ns"))
columns["clock"] = pa.array([1, 3600 * 10**9, 10**9 + 1000, None], pa.time64("ns"))
print(b"|".join(encode_batch(pa.table(columns))).decode())
"""

BUILD = """
import sys
from rowmill.cli import main
status = main.main(["plan", sys.argv[1]])
print(status, "pandas" in sys.modules)
"""


def run(program: str, *arguments: str) -> str:
    made = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return made.stdout.strip().splitlines()[-1]


def test_lists_become_arrays_without_pandas() -> None:
    assert run(KEPT_OUT) == "False"


def test_users_code_meets_a_pyarrow_that_knows_pandas() -> None:
    pytest.importorskip("pandas")

    assert run(LET_IN) == "0 1"


def test_a_plan_from_the_command_line_imports_no_pandas() -> None:
    assert run(BUILD, "demo") == "0 False"


def test_times_with_nanoseconds_are_read_as_they_are_written() -> None:
    first, second, third, last = map(orjson.loads, run(NANOSECONDS).split("|"))

    assert first == {
        "at": "1970-01-01T00:00:00.000000001",
        "zoned": "1970-01-01T01:00:00.000000001+01:00",
        "listed": ["1970-01-01T00:00:00.000000001"],
        "lasted": 0.000000005,
        "clock": "00:00:00.000000001",
    }
    assert [second["at"], second["lasted"], second["clock"]] == ["2023-11-14T22:13:20.123456", 1, "01:00:00"]
    assert [third["at"], third["clock"]] == ["2023-11-14T22:13:20.123456789", "00:00:01.000001"]
    assert last == {"at": None, "zoned": None, "listed": [None], "lasted": None, "clock": None}
