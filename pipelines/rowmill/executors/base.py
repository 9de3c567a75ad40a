"""What executors have in common: the protocol, shared values, versions on hosts, shares, and the setup of workers.

calling process ── pickle without arrays, a file for each array ──► folder ◄── map ── worker 1, worker 2 …

--share 1/3   parts whose fingerprint modulo 3 is 0       a fingerprint depends on a part's own input alone,
--share 2/3   parts whose fingerprint modulo 3 is 1       so appended data moves no part to another share
--share 3/3   parts whose fingerprint modulo 3 is 2

Nothing here may start a thread that workers need: a fork does not copy threads.
"""

import contextlib
import hashlib
import importlib
import mmap
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, TypeVar

from rowmill.core.errors import ConfigError

ResultT = TypeVar("ResultT")


class Executor(Protocol):
    """Maps a module-level function over tasks.

    A task is one part, or a few small ones, and holds only what belongs to it. Tasks, shared values and results can be
    pickled, and results are small: content goes through the store. A task may run more than once, so running it again
    must write the same.
    """

    @property
    def workers(self) -> int:
        """How many tasks run at once, as far as is known now."""

    @property
    def spans_hosts(self) -> bool:
        """Whether tasks may run on other hosts than the calling process."""

    def start(self, size_bytes: int) -> Future[None] | None:
        """Start what tasks on so much input will need, and return at once, so that the caller goes on meanwhile.

        The future is done when workers take tasks; there is none where nothing is started.
        """

    def map(
        self, function: Callable[..., ResultT], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[ResultT]:
        """Yield `function(task)`, or `function(task, shared)`, for each task, in task order, few of them in flight.

        `size_bytes` is how much input there is. `shared` is sent once per worker, not with each task; its arrays are
        read-only.
        """

    def run_on_hosts(self, function: Callable[[], ResultT]) -> dict[str, ResultT]:
        """Run a function once on each host of an executor that spans hosts; return the results by the hosts' names."""

    def close(self) -> None:
        """Stop what the executor started."""


# ── Values that all tasks of a map share ──


def call_with_file(function: Callable[..., ResultT], folder: str, task: object) -> ResultT:
    """Call a function of a task with the value that `write_shared` put into a folder."""
    return function(task, _read_shared(folder))


@contextmanager
def write_shared(value: object) -> Generator[str]:
    """Write a value to a folder, arrays apart, so that workers map them and share their pages."""
    with tempfile.TemporaryDirectory(prefix="rowmill-shared-") as folder:
        buffers: list[pickle.PickleBuffer] = []
        content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        Path(folder, "value").write_bytes(content)
        for number, buffer in enumerate(buffers):
            Path(folder, str(number)).write_bytes(buffer.raw())
        yield folder


@lru_cache(maxsize=1)
def _read_shared(folder: str) -> object:
    count = len(os.listdir(folder)) - 1
    buffers: list[mmap.mmap | bytes] = []
    for path in (Path(folder, str(number)) for number in range(count)):
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
            buffers.append(content)
    return pickle.loads(Path(folder, "value").read_bytes(), buffers=buffers)  # noqa: S301  (written by our own parent)


# ── Versions, which all hosts of a build must have alike ──


_PACKAGES = (
    "fastokens", "gigatoken", "jinja2", "minijinja", "numpy", "orjson", "polars", "pyarrow", "tokenizers",
    "transformers", "zstandard",
)  # fmt: skip


@cache
def describe_versions() -> dict[str, str]:
    """Return the version of each package that decides bytes, and of our own code its digest."""
    # Our own modules and templates: an installed version says nothing of a working copy.
    root, hasher = Path(__file__).parents[1], hashlib.blake2b(digest_size=6)
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.jinja"))):
        hasher.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    found = {"the code of rowmill": hasher.hexdigest()} | dict.fromkeys(_PACKAGES, "absent")
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def describe_difference(expected: Mapping[str, str], actual: Mapping[str, str]) -> str:
    """Return what one host has instead of what another has; empty if they agree."""
    return ", ".join(
        f"{name} {actual.get(name, 'absent')} instead of {other}"
        for name, other in expected.items()
        if actual.get(name) != other
    )


# ── Shares of a job array ──


@dataclass(frozen=True, slots=True)
class Share:
    """One of `total` shares of the parts; `number` counts from 1."""

    number: int
    total: int

    def __str__(self) -> str:
        """Return the share as the command line takes it."""
        return f"{self.number}/{self.total}"

    def has(self, fingerprint: str) -> bool:
        """Return whether the share makes the part of a fingerprint, which is hexadecimal."""
        return int(fingerprint, 16) % self.total == self.number - 1


class OtherSharesMissingError(Exception):
    """Ends the run of a stage whose next pass needs parts of other shares: `made` were made now, `missing` are left."""

    def __init__(self, made: int, missing: int) -> None:
        super().__init__(f"{made} parts made, {missing} of other shares are missing")
        self.made = made
        self.missing = missing


def parse_share(text: str) -> Share:
    """Parse `I/N`."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    share = Share(int(match[1]), int(match[2])) if match else None
    if share is None or not 1 <= share.number <= share.total:
        raise ConfigError(
            f"--share {text}: not one of N shares; allowed is I/N with I from 1 to N, such as 1/8; number the jobs of "
            "an array from 1, or add 1 to an index that begins at 0"
        )
    return share


# ── Worker setup ─────────────────────────────────────────────────────────────────────────────────────


VARIABLE = "ROWMILL_WORKER_SETUP"
"""Environment variable of a fork server: `sys.path` and the calls to make, as JSON."""

THREAD_LIMITS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def limit_to_one_thread() -> None:
    """Give every library one thread: the processes are the parallelism."""
    os.environ.update(THREAD_LIMITS)
    import pyarrow as pa

    pa.set_cpu_count(1)
    if "polars" in sys.modules:
        import polars as pl

        # Polars read its variables when it was imported; loading no option reads them again, before its first use.
        pl.Config.load('{"environment": {}}')


def encode_in_own_thread() -> None:
    """Have `tokenizers` encode in a thread, whose memory is not in pieces as that of a process full of modules is.

    The reference takes 0.5 s for a million characters there instead of 0.8. Call it in a process that forks no others:
    they would wait for a thread that they do not have.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"


def call_all(calls: list[tuple[str, str, list[str]]]) -> None:
    """Call module-level functions by their names, to have what they cache."""
    for module, function, arguments in calls:
        # A worker opens again what cannot be opened here, and says what is wrong.
        with contextlib.suppress(Exception):
            getattr(importlib.import_module(module), function)(*arguments)
