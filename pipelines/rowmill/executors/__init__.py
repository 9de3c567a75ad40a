"""Executors: map a function over parts, results in task order. Choose one; none may change a byte.

| kind | where the work runs |
|---|---|
| `local` | a pool of processes on this machine |
| `ray` | tasks on the nodes of a Ray cluster |

Only this package knows which one a build uses. `rowmill work` makes a share of the parts instead (`base.py`).
"""

from typing import Annotated, TypeAlias

from pydantic import Field

from rowmill.executors.base import Executor, OtherSharesMissingError, Share, parse_share
from rowmill.executors.local import LocalExecutor, LocalPool, open_in_workers
from rowmill.executors.ray_cluster import RayExecutor
from rowmill.executors.side_process import Note, SideProcess, fork_beside

__all__ = [
    "AnyExecutor",
    "Executor",
    "LocalExecutor",
    "LocalPool",
    "Note",
    "OtherSharesMissingError",
    "RayExecutor",
    "Share",
    "SideProcess",
    "fork_beside",
    "open_in_workers",
    "parse_share",
]

AnyExecutor: TypeAlias = Annotated[
    LocalExecutor  # processes on this machine
    | RayExecutor,  # tasks on a Ray cluster
    Field(discriminator="kind"),
]
