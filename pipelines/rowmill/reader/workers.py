"""Which share of the batches a `DataLoader` worker process delivers.

What belongs here: finding out whether this process is such a worker, and of how many. What does not: batches.

Every worker has a copy of the reader, and each copy would deliver every batch. So of the batches that one process
would deliver, worker w of n delivers w, w + n, w + 2n, … A `DataLoader` takes from its workers in turn: with
`batch_size=None` its batches come in the order of one process.

    one process   0 1 2 3 4 5 6
    worker 0      0   2   4   6
    worker 1        1   3   5
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """Every `workers`-th batch, from batch `worker` on."""

    worker: int
    workers: int

    def __str__(self) -> str:
        """Return how an error names it."""
        return f"worker {self.worker} of {self.workers}"


WHOLE_SHARE = WorkerShare(0, 1)
"""All batches: the share of a process without workers, and of the only worker."""


def find_current_worker() -> WorkerShare | None:
    """Return the share of the `DataLoader` worker that this process is; None if it is none.

    torch is not imported: a worker process has done that before it runs a dataset.
    """
    module = sys.modules.get("torch.utils.data")
    info = None if module is None else module.get_worker_info()
    return None if info is None else WorkerShare(int(info.id), int(info.num_workers))
