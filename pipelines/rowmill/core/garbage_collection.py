"""How often Python looks for garbage in reference cycles."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

ALLOCATIONS = 100_000
"""New objects before the youngest are searched; Python's own 700 to 2,000 suit programs that make cycles."""


def collect_rarely() -> None:
    """Look for garbage a hundred times less often than Python does by default.

    Imports, tokenizers and rows are millions of small objects, hardly any in cycles: looking for them took 1.0 s of the
    7.8 s that a first build of 10,000 chats took, and two per cent of a part.
    """
    gc.set_threshold(ALLOCATIONS, 20, 20)


@contextmanager
def pause_collection() -> Generator[None]:
    """Look for no garbage meanwhile: for code that makes many objects at once, all of which stay.

    Opening a build of 20,000 shards took 0.1 s longer without it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
