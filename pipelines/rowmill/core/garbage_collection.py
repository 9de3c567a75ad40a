"""How often Python looks for garbage in reference cycles.

What belongs here: the one setting for commands and workers. What does not: freezing what workers share
(`executors/worker_setup.py`).
"""

import gc

ALLOCATIONS = 100_000
"""New objects before the youngest are searched; Python's own 700 to 2,000 suit programs that make cycles."""


def collect_rarely() -> None:
    """Look for garbage a hundred times less often than Python does by default.

    Imports, tokenizers and rows are millions of small objects, hardly any in cycles: looking for them took 1.0 s of the
    7.8 s that a first build of 10,000 chats took, and two per cent of a part.
    """
    gc.set_threshold(ALLOCATIONS, 20, 20)
