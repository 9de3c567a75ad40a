"""Tasks that wait for each other, so that each of several workers has one however busy the machine is."""

import os
import time
from pathlib import Path

PATIENCE_S = 60.0
MEETING_VARIABLE = "ROWMILL_TEST_MEETING"
"""`<processes>:<folder>`, for tasks of scripts that a test runs in a process of their own."""


def meet(folder: str | Path, processes: int) -> None:
    """Leave this process's number in a folder, and wait until so many have left theirs; a minute at most."""
    Path(folder, str(os.getpid())).touch()
    deadline = time.monotonic() + PATIENCE_S
    while len(os.listdir(folder)) < processes and time.monotonic() < deadline:
        time.sleep(0.002)


def meet_as_told() -> None:
    """Meet as the environment says."""
    processes, _, folder = os.environ[MEETING_VARIABLE].partition(":")
    meet(folder, int(processes))
