"""Compares the hosts that run a build's tasks with this one, before anything is built.

on every host   the versions that decide bytes are this process's
                a file that this process wrote below the storage root can be read, and another one written
                the first file of each source can be read
                the temporary folder takes a file
"""

import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from rowmill.build.prepare import open_shared_executor
from rowmill.build.steps import Project
from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store
from rowmill.executors import AnyExecutor
from rowmill.executors.base import describe_difference, describe_versions
from rowmill.sources import Files, SourceFile, find_files, read_first_bytes

_CHECKED: set[tuple[AnyExecutor, str]] = set()


@dataclass(frozen=True, slots=True)
class _HostCheck:
    """What a host must be able to do: `probe` is a file below the root that the calling process wrote."""

    root: str
    probe: str
    content: bytes
    base: Path
    sources: tuple[SourceFile, ...]
    versions: tuple[tuple[str, str], ...]

    def __call__(self) -> list[str]:
        """Return what this host lacks."""
        different = describe_difference(dict(self.versions), describe_versions())
        if different:
            return [f"has {different}"]
        return [problem for find in (self._use_store, self._read_sources, self._use_scratch) if (problem := find())]

    def _use_store(self) -> str:
        store = Store(self.root)
        try:
            if store.read(self.probe) != self.content:
                return f"has another {self.root}"
            own = f"{self.probe}-{uuid.uuid4().hex}"
            store.write(own, self.content)
            store.remove(own)
        except FileNotFoundError:
            return f"does not see what this process wrote to {store.address('')}"
        except OSError as error:
            return f"cannot use the storage root {store.address('')}: {error}"
        return ""

    def _read_sources(self) -> str:
        for file in self.sources:
            try:
                read_first_bytes(file, self.base)
            except OSError as error:
                return f"cannot read a source: {error}"
        return ""

    def _use_scratch(self) -> str:
        try:
            with tempfile.TemporaryFile() as file:
                file.write(self.content)
        except OSError as error:
            return f"has no temporary folder to write to: {error}"
        return ""


def require_equal_hosts(project: Project, *, again: bool = False) -> None:
    """Check all hosts of a recipe's executor, once per process, or `again`; what runs on this machine alone passes.

    Raises
    ------
    ConfigError
        With a line per host that differs or lacks something.

    """
    executor = open_shared_executor(project.recipe)
    asked = (project.recipe.execution.executor, project.store.root)
    if not executor.spans_hosts or (asked in _CHECKED and not again):
        return
    probe, content = f".probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
    check = _HostCheck(
        project.store.root, probe, content, project.base, _list_first_files(project), tuple(describe_versions().items())
    )
    project.store.write(probe, content)
    try:
        found = executor.run_on_hosts(check)
    finally:
        project.store.remove(probe)
    problems = [f"{name} {' and '.join(one)}" for name, one in found.items() if one]
    if problems:
        raise ConfigError(
            f"execution.executor: {len(problems)} of {len(found)} hosts cannot take part: {'; '.join(problems)}; every "
            "host must have this process's versions, reach the storage root and the sources under the same names, and "
            "have room for temporary files; a local path is enough only where all hosts share its folder; use an "
            "object store or a shared folder, install the same versions, and give the hosts credentials"
        )
    _CHECKED.add(asked)


def _list_first_files(project: Project) -> tuple[SourceFile, ...]:
    """Return the first file of each source; rows of other kinds of source are in the store."""
    sources = [dataset.source for dataset in project.recipe.datasets.values()]
    return tuple(find_files(one, project.base)[0] for one in sources if isinstance(one, Files))
