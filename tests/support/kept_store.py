"""Writes the small project that `test_store_format.py` opens: its store stays as the rowmill of that day wrote it.

    python -m tests.support.kept_store

Once released, a kept store is never written again: a later format gets a file beside it.
"""

import io
import sys
import tarfile
import tempfile
from pathlib import Path

from rowmill.core.json import STORE_FORMAT
from tests.support.recipes import LENIENT, PAIR, Workspace, chat, pair

FOLDER = Path(__file__).parent / "kept_stores"


def write_project(folder: Path) -> Workspace:
    """Write two small datasets and their recipe; the store is in the project."""
    workspace = Workspace(folder)
    datasets = {
        "chats": workspace.dataset("chats.jsonl", [chat(i, turns=2) for i in range(12)]),
        "tasks": workspace.dataset("tasks.jsonl", [pair(i) for i in range(12)], PAIR),
    }
    return workspace.recipe(datasets, gates=LENIENT, partitions={"world_size": 2})


def pack_project(folder: Path) -> bytes:
    """Return a project as an archive without times, owners and locks, so that the same files give the same bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"):
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = path.stat().st_size
            archive.addfile(entry, io.BytesIO(path.read_bytes()))
    return packed.getvalue()


def unpack_project(number: int, folder: Path) -> Workspace:
    """Unpack the project whose store has a format's number."""
    with tarfile.open(FOLDER / f"format-{number}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return Workspace(folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_project(Path(name)).build()
        FOLDER.mkdir(exist_ok=True)
        kept = FOLDER / f"format-{STORE_FORMAT}.tar.xz"
        kept.write_bytes(pack_project(Path(name)))
        print(f"{kept.relative_to(Path.cwd())}  {kept.stat().st_size:,} bytes", file=sys.stderr)
