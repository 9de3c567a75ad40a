"""Files that the tasks of one stage make once per host, such as shards in a form of which rows can be taken.

A task must not depend on a file that another task made: that task may have run on another host. It asks for the file,
and the first task on a host that asks for one makes it from what the store has.

    host A   task 1 asks for a, b ─► makes a, b        host B   task 3 asks for b, c ─► makes b, c
             task 2 asks for b, c ─► makes c
"""

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostScratch:
    """A folder that every host has for itself; or, with `folder`, that all hosts of the stage share."""

    name: str
    folder: str | None = None

    @property
    def path(self) -> str:
        """Path of the folder on this host."""
        return self.folder or os.path.join(tempfile.gettempdir(), f"rowmill-{self.name}")

    def locate(self, name: str) -> str:
        """Return the path that a file has on this host, whether it was made or not."""
        return os.path.join(self.path, name)

    def require(self, makers: Mapping[str, Callable[[str], object]]) -> None:
        """Make the files that this host lacks; each function is given the path to write to."""
        os.makedirs(self.path, exist_ok=True)
        # What another process is making comes last: several that need the same files share the work.
        for waits in (False, True):
            for name in [name for name in makers if not os.path.exists(self.locate(name))]:
                with _try_lock(f"{self.locate(name)}.lock", waits=waits) as is_mine:
                    if is_mine and not os.path.exists(self.locate(name)):
                        self._make(name, makers[name])

    def _make(self, name: str, make: Callable[[str], object]) -> None:
        temporary = f"{self.locate(name)}.{uuid.uuid4().hex}"
        try:
            make(temporary)
            os.replace(temporary, self.locate(name))
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)

    @contextmanager
    def open_folder(self) -> Generator[Path]:
        """Yield a folder for the files of one task, removed at the end."""
        os.makedirs(self.path, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path) as folder:
            yield Path(folder)

    def remove(self) -> None:
        """Remove this host's files."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def _try_lock(path: str, *, waits: bool) -> Generator[bool]:
    with open(path, "ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
