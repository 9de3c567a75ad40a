"""Folders for files that a stage makes and removes again, on this host or on all hosts of an executor."""

import os
import tempfile
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from rowmill.shards import gather
from rowmill.shards.host_scratch import HostScratch
from rowmill.stages.base import StageContext


@contextmanager
def open_host_scratch(context: StageContext) -> Generator[HostScratch]:
    """Lend a folder on each host for what its tasks make of stored files; in the stage's folder if the store is local.

    Nothing in it is the only copy of anything: a task on another host makes it again from the store.
    """
    local_folder = context.store.local(context.folder) if context.store.is_local else None
    name = f"scratch-{uuid.uuid4().hex[:12]}"
    scratch = HostScratch(name, None if local_folder is None else os.path.abspath(local_folder / name))
    try:
        yield scratch
    finally:
        gather.drop_scratch_maps()
        scratch.remove()
        if local_folder is None and context.pool.spans_hosts:
            # A host that cannot be reached any more has taken its files with it.
            with suppress(Exception):
                context.pool.run_on_hosts(scratch.remove)


@contextmanager
def scratch_folder(context: StageContext) -> Generator[Path]:
    """Yield a local folder for memory-mapped files; in the stage's folder if the store is local."""
    local_folder = Path(context.store.path(context.folder)) if context.store.is_local else None
    if local_folder is not None:
        local_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=local_folder) as name:
        try:
            yield Path(name)
        finally:
            gather.drop_scratch_maps()
