"""Exports in Dagster: an asset each, behind the gates of the partitions, and no way around them."""

import pytest

from rowmill.exports import open_export
from rowmill.stages.exports import locate_export
from tests.support.tiny_project import Tiny, built, refusals, reused

EXPORTS = [
    {"kind": "hf", "name": "rows"},
    {"kind": "tinker", "name": "held", "split": "validation"},
]
ROWS, HELD = ("exports", "rows"), ("exports", "held")


def test_exports_are_assets_behind_the_order_and_the_shards_with_code_versions_of_their_own(tiny: Tiny) -> None:
    graph = tiny.write(exports=EXPORTS).definitions().resolve_asset_graph()
    for name in (ROWS, HELD):
        parents = {"/".join(key.path[1:]) for key in graph.get(tiny.key(*name)).parent_keys}
        assert parents == {"chats.packed_shards", "tasks.packed_shards", "training_splits"}
    checks = {check.name for check in graph.asset_check_keys if check.asset_key == tiny.key(*ROWS)}
    assert checks == {"conservation"}
    before = tiny.write(exports=EXPORTS).code_versions()
    after = tiny.write_recipe(exports=[{**EXPORTS[0], "shard_sequences": 3}, EXPORTS[1]]).code_versions()
    assert {key for key in before if before[key] != after[key]} == {"tiny/exports.rows"}


@pytest.mark.slow
def test_run_materializes_exports_and_the_next_reuses_them(tiny: Tiny) -> None:
    first = tiny.write(exports=EXPORTS).run()
    second = tiny.run()

    assert first.success
    assert second.success
    assert {("tiny", *ROWS), ("tiny", *HELD)} <= built(first)
    assert reused(second)["exports/rows"]
    made = tiny.current(*ROWS)
    assert open_export(tiny.project.store.local(locate_export(made))).count("tokens") == made.facts["tokens"]


@pytest.mark.slow
def test_failed_check_anywhere_keeps_exports_unbuilt_and_a_later_run_of_one_alone_says_why(tiny: Tiny) -> None:
    result = tiny.write(unknown_roles=12, exports=EXPORTS).run()
    assert not result.success
    assert not {key for key in built(result) if key[1] == "exports"}
    assert not (tiny.folder / ".rowmill/tiny/exports").exists()

    alone = tiny.run_asset(*ROWS)
    [said] = refusals(alone).values()
    assert "Gate closed" in said
    assert "tiny/chats/canonical_rows: unknown_roles: 20 %" in said
    assert built(alone) == set()


@pytest.mark.slow
def test_bound_made_tighter_closes_exports_that_were_open(tiny: Tiny) -> None:
    tiny.write(unknown_roles=1, gates={"unknown_roles": {"at_most": 0.1}}, exports=EXPORTS).run()
    tiny.write_recipe(gates={"unknown_roles": {"at_most": 0.001}}, exports=[{**EXPORTS[0], "shard_sequences": 3}])
    result = tiny.run_asset(*ROWS)
    assert built(result) == set()
    assert "unknown_roles" in next(iter(refusals(result).values()))
