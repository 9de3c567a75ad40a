"""`partitions.balance: flops` in a build: ranks take equally long, the check measures it, and no other order moves."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.recipes import TEXT, Built, Workspace, document

pytestmark = pytest.mark.slow

WORLD = 4
GATES = {"fill": {"at_least": 0}, "split_share": {"at_most": 1}, "rank_balance": {"at_most": 1}}


def build(folder: Path, *, packing: dict[str, Any] | None = None, **partitions: Any) -> Built:
    """Build documents of very different lengths, all tokens of which are trained."""
    rows = [document(i, words=200 if i % 8 == 0 else 6 + i % 3) for i in range(160)]
    workspace = Workspace(folder)
    options = {"world_size": WORLD, **partitions}
    return workspace.one(
        "rows.jsonl",
        rows,
        TEXT,
        packing={"pack": True, **(packing or {})},
        partitions=options,
        mixture={"batch_size": 8},
        gates=GATES,
    ).build()


def count_flops(built: Built, linear: int) -> int:
    """Return the cost of all segments of all sequences."""
    shards = built.rows_of("rows", "packed_shards", file="shard")
    return sum(n * n + linear * n for sequence in shards for n in sequence["segment_lengths"])


def test_ranks_get_equal_flops_where_equal_tokens_differ_in_them(tmp_path: Path) -> None:
    by_tokens = build(tmp_path / "tokens").facts("training_splits")
    by_flops = {
        linear: build(tmp_path / str(linear), balance="flops", flops_linear=linear) for linear in (10, 11, 49_152)
    }
    versions = {built.manifest("training_splits").code_version for built in by_flops.values()}

    assert len(versions) == 3, "another constant is another order"
    assert "flops" not in by_tokens
    for linear, built in by_flops.items():
        facts = built.facts("training_splits")
        table = built.rows_of("training_splits", file="rank_steps")
        steps = 1 + max(line["step"] for line in table)
        loads = [[line["flops"] for line in table if line["step"] == step] for step in range(steps)]
        excess = [max(one) / (sum(one) / WORLD) - 1 for one in loads]
        assert facts["rank_balance"] == pytest.approx(sum(excess) / steps, abs=1e-9)
        assert facts["flops"] == sum(map(sum, loads)) == count_flops(built, linear)
        assert facts["flops"] > facts["tokens"] * 10
        assert facts["tokens"] == by_tokens["tokens"]


def test_open_attention_is_one_span_per_sequence(tmp_path: Path) -> None:
    packing = {"block_cross_document_attention": False}
    blocked = build(tmp_path / "blocked", balance="flops", flops_linear=0).facts("training_splits")
    opened = build(tmp_path / "open", packing=packing, balance="flops", flops_linear=0).facts("training_splits")

    assert opened["tokens"] == blocked["tokens"]
    assert opened["flops"] > blocked["flops"]
