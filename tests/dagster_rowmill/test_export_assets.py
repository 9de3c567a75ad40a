"""Exports in Dagster: an asset each, behind the gates of the partitions, and no way around them."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from rowmill.exports import open_export
from rowmill.schema import manifest
from rowmill.stages.exports.stage import locate_export
from tests.support.tiny_project import FOREIGN_WARNINGS, Tiny, built, refusals, reused

pytestmark = FOREIGN_WARNINGS
EXPORTS = [
    {"kind": "hf", "name": "rows"},
    {"kind": "tinker", "name": "held", "split": "validation"},
]
ROWS, HELD = ("exports", "rows"), ("exports", "held")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Tiny(tmp_path, instance)


def test_exports_are_assets_behind_the_order_and_the_shards(tiny: Tiny) -> None:
    graph = tiny.write(exports=EXPORTS).definitions().resolve_asset_graph()

    for name in (ROWS, HELD):
        parents = {"/".join(key.path[1:]) for key in graph.get(tiny.key(*name)).parent_keys}
        assert parents == {"chats.packed_shards", "tasks.packed_shards", "training_splits"}
    checks = {check.name for check in graph.asset_check_keys if check.asset_key == tiny.key(*ROWS)}
    assert checks == {"conservation"}


@pytest.mark.slow
def test_run_materializes_exports_and_the_next_reuses_them(tiny: Tiny) -> None:
    first = tiny.write(exports=EXPORTS).run()
    second = tiny.run()

    assert first.success
    assert second.success
    assert {("tiny", *ROWS), ("tiny", *HELD)} <= built(first)
    assert reused(second)["exports/rows"]
    made = manifest.load_current(tiny.project.store, ("tiny", *ROWS))
    assert made is not None
    assert open_export(tiny.project.store.local(locate_export(made))).count("tokens") == made.facts["tokens"]


def test_code_version_moves_with_the_options_of_its_own_export_alone(tiny: Tiny) -> None:
    before = versions(tiny.write(exports=EXPORTS))
    after = versions(tiny.write_recipe(exports=[{**EXPORTS[0], "shard_sequences": 3}, EXPORTS[1]]))

    assert {key for key in before if before[key] != after[key]} == {"tiny/exports.rows"}


def versions(tiny: Tiny) -> dict[str, str | None]:
    graph = tiny.definitions().resolve_asset_graph()
    return {key.to_user_string(): graph.get(key).code_version for key in graph.get_all_asset_keys()}


@pytest.mark.slow
def test_failed_check_anywhere_keeps_exports_unbuilt(tiny: Tiny) -> None:
    result = tiny.write(unknown_roles=12, exports=EXPORTS).run()

    assert not result.success
    assert not {key for key in built(result) if key[1] == "exports"}
    assert not (tiny.folder / ".rowmill/tiny/exports").exists()


@pytest.mark.slow
def test_later_run_of_an_export_alone_is_refused_with_name_number_and_remedy(tiny: Tiny) -> None:
    tiny.write(unknown_roles=12, exports=EXPORTS).run()

    result = tiny.run_only(dg.AssetSelection.assets(tiny.key(*ROWS)))

    [said] = refusals(result).values()
    assert "Gate closed" in said
    assert "tiny/chats/canonical_rows: unknown_roles: 20 %" in said
    assert built(result) == set()


@pytest.mark.slow
def test_bound_made_tighter_closes_exports_that_were_open(tiny: Tiny) -> None:
    tiny.write(unknown_roles=1, gates={"unknown_roles": {"at_most": 0.1}}, exports=EXPORTS).run()

    tiny.write_recipe(gates={"unknown_roles": {"at_most": 0.001}}, exports=[{**EXPORTS[0], "shard_sequences": 3}])
    result = tiny.run_only(dg.AssetSelection.assets(tiny.key(*ROWS)))

    assert built(result) == set()
    assert "unknown_roles" in next(iter(refusals(result).values()))
