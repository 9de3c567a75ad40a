"""Log a build to trackers: all at once, each in a process of its own, tried again where that may help, limited in time.

A client that hangs is ended with every process that it started; one that is not installed is never imported.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from rowmill.core.installation import format_install_command
from rowmill.tracking import AnyTracker
from rowmill.tracking.client import BuildRecord

TIME_LIMIT_S = 60.0
"""Seconds that all tries of a tracker may take together."""

PAUSES_S = (1.0, 5.0)
"""Seconds before the second and the third try."""

_NO_ANSWER = "no answer within"

_CLIENTS = {
    "mlflow": (("mlflow", "mlflow-skinny"), (3, 0), (4, 0)),
    "wandb": (("wandb",), (0, 21), (1, 0)),
    "openlineage": (("openlineage-python",), (1, 48), (2, 0)),
}
"""By kind: the distributions that bring the client, the first version that is supported, and the first that is not."""


@dataclass(frozen=True, slots=True)
class LogResult:
    """What became of logging to one tracker: where the build can be seen, or in one line why it was not logged."""

    kind: str
    address: str = ""
    problem: str = ""

    @property
    def is_silent(self) -> bool:
        """Whether the tracker did not answer, and was waited for."""
        return self.problem.startswith(_NO_ANSWER)

    @property
    def shown(self) -> str:
        """Where the build can be seen, or that it is not logged and why."""
        return f"not logged: {self.problem}" if self.problem else self.address

    @property
    def sentence(self) -> str:
        """The result in one line."""
        return f"{'not ' if self.problem else ''}logged to {self.kind}: {self.problem or self.address}"


def find_tracker_problems(trackers: Sequence[AnyTracker]) -> list[str | None]:
    """Return for each tracker why nothing can be logged to it: no secret, no client, or one of another version."""
    return [_find_problem(tracker) for tracker in trackers]


def _find_problem(tracker: AnyTracker) -> str | None:
    where = f"execution.log_to, {tracker.kind}"
    for name in type(tracker).model_fields:
        variable = getattr(tracker, name) if name.endswith("_env") else None
        if variable is not None and not os.environ.get(variable):
            return (
                f"{where}: {name}: the environment variable {variable} is not set; it holds the secret of this "
                "tracker, which gets nothing without it; set it"
            )
    distributions, lowest, below = _CLIENTS[tracker.kind]
    first, last = (".".join(map(str, version)) for version in (lowest, below))
    remedy = f"supported are versions from {first} to before {last}; run {format_install_command(tracker.kind)}"
    for name in distributions:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not lowest <= tuple(int(part) for part in installed.split(".")[:2] if part.isdecimal()) < below:
            return f"{where}: {name} {installed} is installed; {remedy}"
        return None
    return f"{where}: the package {distributions[-1]} is not installed; {remedy}"


def log_build(
    trackers: Sequence[AnyTracker],
    record: BuildRecord,
    folder: Path,
    *,
    limit_s: float = TIME_LIMIT_S,
    pauses_s: Sequence[float] = PAUSES_S,
) -> list[LogResult]:
    """Log a build to trackers, at the same time; return a result for each. Relative paths start at `folder`."""
    log = partial(_log_to_one, record=record, folder=folder, limit_s=limit_s, pauses_s=pauses_s)
    with ThreadPoolExecutor(len(trackers) or 1) as threads:
        return list(threads.map(log, trackers, find_tracker_problems(trackers)))


def _log_to_one(
    tracker: AnyTracker,
    problem: str | None,
    *,
    record: BuildRecord,
    folder: Path,
    limit_s: float,
    pauses_s: Sequence[float],
) -> LogResult:
    until = time.monotonic() + limit_s
    for pause in (*pauses_s, None):
        if problem is not None:
            break
        answer = _call_client(tracker, record, folder, until - time.monotonic())
        if "address" in answer:
            return LogResult(tracker.kind, address=answer["address"])
        if pause is None or not answer["may_pass"] or time.monotonic() + pause >= until:
            problem = str(answer["problem"])
        else:
            time.sleep(pause)
    return LogResult(tracker.kind, problem=problem or "")


def _call_client(tracker: AnyTracker, record: BuildRecord, folder: Path, limit_s: float) -> dict[str, Any]:
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
    # -P: a folder `wandb` of the project is not the package.
    command = [sys.executable, "-P", "-c", "from rowmill.tracking.client import main; main()"]
    with (
        tempfile.TemporaryDirectory(prefix="rowmill-tracking-") as scratch,
        subprocess.Popen(  # noqa: S603  (our own)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            said, errors = process.communicate(pickle.dumps((tracker, record, scratch)), timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"problem": f"{_NO_ANSWER} {limit_s:.0f} s", "may_pass": False}
        finally:
            # Also what the client started and left running.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    try:
        return dict(json.loads(said))
    except ValueError:
        last = errors.decode("utf-8", "replace").strip().splitlines()[-1:]
        return {"problem": f"its client ended with status {process.returncode} {' '.join(last)}", "may_pass": True}
