"""Executors: map a function over parts, results in task order. Choose one; none may change a byte.

| kind | where the work runs |
|---|---|
| `local` | a pool of processes on this machine |
"""

from rowmill.executors.base import Executor
from rowmill.executors.local import LocalPool, open_in_workers

__all__ = ["Executor", "LocalPool", "open_in_workers"]
