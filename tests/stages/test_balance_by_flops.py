"""`partitions.balance: flops` in a build: ranks take equally long, the check measures it, and no other order moves."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.schema.manifest import NOT_APPLICABLE
from tests.support.recipes import TEXT, Built, Workspace, document

pytestmark = pytest.mark.slow

WORLD = 4
GATES = {"fill": {"at_least": 0}, "split_share": {"at_most": 1}, "rank_balance": {"at_most": 1}}


def build(folder: Path, *, packing: dict[str, Any] | None = None, **partitions: Any) -> Built:
    """Build documents of very different lengths, all tokens of which are trained."""
    rows = [document(i, words=200 if i % 8 == 0 else 6 + i % 3) for i in range(160)]
    workspace = Workspace(folder)
    dataset = {
        "source": {"train_urls": [workspace.write("rows.jsonl", rows)]},
        "format": TEXT,
        "packing": {"pack": True, **(packing or {})},
    }
    options = {"world_size": WORLD, **partitions}
    return workspace.recipe({"rows": dataset}, partitions=options, mixture={"batch_size": 8}, gates=GATES).build()


def count_flops(built: Built, linear: int) -> int:
    """Return the cost of all segments of all sequences."""
    shards = built.rows_of("rows", "packed_shards", file="shard")
    return sum(n * n + linear * n for sequence in shards for n in sequence["segment_lengths"])


def facts(built: Built) -> dict[str, Any]:
    return built.manifest("training_splits").facts


def test_ranks_get_equal_flops_where_equal_tokens_differ_in_them(tmp_path: Path) -> None:
    by_tokens = facts(build(tmp_path / "tokens"))
    by_flops = facts(build(tmp_path / "flops", balance="flops", flops_linear=10))

    assert by_tokens["flops"] == NOT_APPLICABLE
    assert by_flops["flops"] > by_flops["tokens"] * 10
    assert by_flops["tokens"] == by_tokens["tokens"]


@pytest.mark.parametrize("linear", [10, 49_152])
def test_facts_and_balance_are_those_of_the_spans(tmp_path: Path, linear: int) -> None:
    built = build(tmp_path, balance="flops", flops_linear=linear)

    table = built.rows_of("training_splits", file="rank_steps")
    steps = 1 + max(line["step"] for line in table)
    loads = [[line["flops"] for line in table if line["step"] == step] for step in range(steps)]
    excess = [max(one) / (sum(one) / WORLD) - 1 for one in loads]
    assert facts(built)["rank_balance"] == pytest.approx(sum(excess) / steps, abs=1e-9)
    assert facts(built)["flops"] == sum(map(sum, loads)) == count_flops(built, linear)


def test_open_attention_is_one_span_per_sequence(tmp_path: Path) -> None:
    blocked = facts(build(tmp_path / "blocked", balance="flops", flops_linear=0))
    opened = facts(
        build(tmp_path / "open", packing={"block_cross_document_attention": False}, balance="flops", flops_linear=0)
    )

    assert opened["tokens"] == blocked["tokens"]
    assert opened["flops"] > blocked["flops"]


def test_another_constant_is_another_order(tmp_path: Path) -> None:
    versions = [
        build(tmp_path / str(linear), balance="flops", flops_linear=linear).manifest("training_splits").code_version
        for linear in (10, 11)
    ]

    assert versions[0] != versions[1]
