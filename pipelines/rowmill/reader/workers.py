"""Find the share of the batches that a `DataLoader` worker process delivers.

Every worker has a copy of the reader, and each copy would deliver every batch. So worker w of n delivers batches w,
w + n, w + 2n, … of those that one process would deliver. A `DataLoader` takes from its workers in turn: with
`batch_size=None` its batches come in the order of one process.

    one process   0 1 2 3 4 5 6
    worker 0      0   2   4   6
    worker 1        1   3   5
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """Every `workers`-th batch, starting with batch `worker`."""

    worker: int
    workers: int

    def __str__(self) -> str:
        """Return the share's name in error messages."""
        return f"worker {self.worker} of {self.workers}"


WHOLE_SHARE = WorkerShare(0, 1)
"""All batches: the share of a process without workers, and of the only worker."""


def find_current_worker() -> WorkerShare | None:
    """Return the share of this process if it is a `DataLoader` worker, else None.

    torch is not imported here: a worker process has imported it before it runs a dataset.
    """
    module = sys.modules.get("torch.utils.data")
    info = None if module is None else module.get_worker_info()
    return None if info is None else WorkerShare(int(info.id), int(info.num_workers))
