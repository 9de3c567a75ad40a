"""pandas is kept out of our processes, and let in before a user's code runs.

What belongs here: what pyarrow takes for a pandas object, each in a process of its own. What does not: builds.
"""

import subprocess
import sys

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
