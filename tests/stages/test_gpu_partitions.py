"""Ranks depend on the content of sequences, not only on their numbers, and account for every token."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from rowmill.schema.examples import IGNORED_LABEL
from rowmill.schema.manifest import Manifest
from rowmill.stages import gpu_partitions
from tests.support.recipes import Workspace, chat

pytestmark = pytest.mark.slow


def test_changed_word_of_the_source_reaches_the_ranks(tmp_path: Path) -> None:
    rows = [chat(i) for i in range(30)]
    workspace = Workspace(tmp_path).one("a.jsonl", rows)
    before = workspace.build()
    changed = [chat(i) for i in range(30)]
    content = changed[7]["messages"][1]["content"]
    # A different word of equally many tokens: no count, length or order changes.
    changed[7]["messages"][1]["content"] = (
        content.replace(" river", " stone", 1) if " river" in content else content.replace(" stone", " river", 1)
    )
    assert changed != rows
    workspace.write("a.jsonl", changed)

    after = workspace.build()

    same_shape = [after.facts("rows", "packed_shards")[name] for name in ("tokens", "trained_tokens", "sequences")]
    assert same_shape == [
        before.facts("rows", "packed_shards")[name] for name in ("tokens", "trained_tokens", "sequences")
    ]
    for key in (("rows", "packed_shards"), ("training_splits",), ("gpu_partitions",)):
        assert after.versions()["/".join(key)] != before.versions()["/".join(key)]
    ids = [row["input_ids"] for row in after.rank_rows()]
    new = next(one["input_ids"] for one in after.examples() if one["row_ids"][0].endswith(":7"))
    assert any(row[i : i + len(new)] == new for row in ids for i in range(len(row)))


def test_token_ledgers_of_ranks_and_exports_count_every_token_of_their_files(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    options = {"seq_len": 64, "mixture": {"batch_size": 8}}
    made = workspace.one(
        "a.jsonl", [chat(i) for i in range(31)], exports=[{"kind": "native", "name": "own"}], **options
    ).build()
    ranks, export = made.manifest("gpu_partitions"), made.manifest("exports", "own")
    held = made.rank_rows(["labels", "filler"])
    exported = [row["labels"] for row in made.rows_of("exports", "own", file="data/part-00000.parquet")]

    assert counted(ranks) == classes(row["labels"] for row in held if not row["filler"]) | {
        "padding": sum(len(row["labels"]) for row in held if row["filler"])
    }
    assert counted(ranks)["padding"] > 0
    assert sum(counted(ranks).values()) - counted(ranks)["padding"] == ranks.facts["tokens"]
    assert counted(export) == classes(exported)
    assert sum(counted(export).values()) == export.facts["tokens"]


def test_ranks_are_equal_however_many_tasks_copy_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task writes a few shards of a rank; which ones decides nothing about their bytes."""
    monkeypatch.setattr(gpu_partitions, "SHARD_TOKENS", 256)
    workspace = Workspace(tmp_path).one("a.jsonl", [chat(i) for i in range(60)])
    found: list[tuple[str, dict[str, str]]] = []
    for shards in (1, 3, 1000):
        monkeypatch.setattr(gpu_partitions, "TASK_SHARDS", shards)
        made = workspace.build()
        ranks = made.manifest("gpu_partitions")
        found.append((ranks.version, {path: digest for path, digest in made.digests().items() if "/data/" in path}))
        shutil.rmtree(workspace.store / "mini" / "gpu_partitions")

    assert len([name for name in ranks.parts[0].files if name.startswith("data/")]) > 3
    assert found[0] == found[1] == found[2]


def counted(output: Manifest) -> dict[str, int]:
    return {name: tokens for _, name, tokens in output.token_ledger}


def classes(labels: Iterable[list[int]]) -> dict[str, int]:
    flat = [label != IGNORED_LABEL for one in labels for label in one]
    return {"trained": sum(flat), "context": len(flat) - sum(flat)}
