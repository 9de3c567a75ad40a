"""Builds over several hosts: no task needs another's temporary folder, and hosts that cannot take part are refused."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowmill.core.errors import ConfigError
from rowmill.executors import LocalExecutor
from tests.support.hosts_apart import HostsApart
from tests.support.recipes import PAIR, Workspace, chat, pair
from tests.support.tables import grouped, records

PURCHASES = records(**grouped())


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostsApart]:
    found = HostsApart(tmp_path / "hosts")
    monkeypatch.setattr(LocalExecutor, "open", lambda *_: found)
    yield found
    found.close()


def with_data(folder: Path, root: str | None, workers: int) -> Workspace:
    workspace = Workspace(folder, root)
    rows = [{"customer": f"c{i % 100}", "day": f"2024-01-{i % 28 + 1:02d}", "item": f"i{i % 7}"} for i in range(400)]
    return workspace.recipe(
        {
            "chats": workspace.dataset("chats.jsonl", [chat(i, words=40) for i in range(600)]),
            "tasks": workspace.dataset("tasks.jsonl", [pair(i) for i in range(50)], PAIR),
            "purchases": workspace.dataset("purchases.jsonl", rows, PURCHASES),
        },
        defaults={"splits": {"validation": 0.1}},
        execution={"workers": workers},
        exports=[{"kind": kind, "name": kind} for kind in ("axolotl", "megatron_bridge", "tinker")],
    )


def test_no_task_needs_the_temporary_folder_of_another(
    tmp_path: Path, apart: HostsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = with_data(tmp_path / "apart", "memory://apart", workers=701).build()
    monkeypatch.undo()
    alone = with_data(tmp_path / "alone", None, workers=1).build()

    assert built.versions() == alone.versions()
    stages = {name.split(".")[2] for name in apart.ran if name.startswith("rowmill.stages.")}
    assert stages >= {
        "canonical_rows", "tokenized_examples", "packed_shards", "training_splits", "gpu_partitions", "exports",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (None, r"1 of 1 hosts cannot take part: host does not see what this process wrote to .* and cannot read"),
        ("memory://unseen", r"1 of 1 hosts cannot take part: host cannot read a source: .*chats\.jsonl.*; use an obj"),
    ],
)
def test_a_path_of_the_calling_host_alone_is_refused_before_anything_is_written(
    root: str | None, message: str, apart: HostsApart
) -> None:
    workspace = with_data(Path(tempfile.gettempdir()) / "project", root, workers=702 + (root is None))
    with pytest.raises(ConfigError, match=message):
        workspace.build()
    assert not workspace.project.store.list("")
    assert not list(workspace.store.glob("*"))
