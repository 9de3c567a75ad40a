"""Imported by the fork server alone, which runs no other code of ours: sets up what its workers share.

Nothing else may import this module, the package's `__init__` least of all: the engine that it imports would be imported
from its middle.
"""

import contextlib
import gc
import importlib
import json
import os
import sys

from rowmill.core.own_process import keep_pandas_out
from rowmill.executors.base import VARIABLE, call_all, limit_to_one_thread

if VARIABLE in os.environ:
    given = json.loads(os.environ.pop(VARIABLE))
    limit_to_one_thread()
    keep_pandas_out()
    # A fork server of Python 3.11 starts without the path of the process that starts it.
    sys.path[:] = given["path"]
    # A worker imports again what cannot be imported here, and says what is wrong; the fork server would only be gone.
    with contextlib.suppress(Exception):
        importlib.import_module("rowmill.stages.catalog")
    call_all(given["calls"])
    # What was opened stays: walking it at every collection cost ten per cent of a part, and would unshare it.
    gc.collect()
    gc.freeze()
