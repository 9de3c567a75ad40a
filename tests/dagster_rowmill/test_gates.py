"""Nothing is built on a failed blocking check: not in its run, not in any other, and not by any bypass."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import orjson
import pytest

from dagster_rowmill import factory, history, metadata
from dagster_rowmill.resources import NO_RUN_WAIVERS, StorageResource
from rowmill.build import runner, steps
from rowmill.checks import catalog, gates
from rowmill.core.errors import GateError
from rowmill.core.storage import Store
from rowmill.reader import Reader
from rowmill.schema import manifest
from tests.support.tiny_project import RECIPE, Tiny, built, chat, refusals, reused

# Conditions are beta by name in the pinned release.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::dagster.BetaWarning")]
ROWS, EXAMPLES = ("chats", "canonical_rows"), ("chats", "tokenized_examples")
BELOW = {
    *(("tiny", "chats", stage) for stage in ("tokenized_examples", "truncation_stats", "packed_shards")),
    ("tiny", "training_splits"),
    ("tiny", "gpu_partitions"),
}
RANKS_STEP, EXAMPLES_STEP = "tiny__gpu_partitions", "tiny__chats_tokenized_examples"


def test_failed_blocking_check_keeps_everything_below_unbuilt(tiny: Tiny) -> None:
    result = tiny.write(unknown_roles=12).run()
    failed = [one for one in result.get_asset_check_evaluations() if not one.passed]
    blocking = [one for one in failed if one.severity == dg.AssetCheckSeverity.ERROR]
    assert [(one.asset_key, one.check_name) for one in blocking] == [(tiny.key(*ROWS), "unknown_roles")]
    assert not result.success
    assert built(result) & BELOW == set()
    assert ("tiny", "tasks", "packed_shards") in built(result)


def test_later_run_of_the_ranks_alone_is_refused_with_name_number_threshold_and_remedy_and_never_retried(
    broken: Tiny,
) -> None:
    result = broken.run_asset("gpu_partitions")
    said = refusals(result)[RANKS_STEP]
    assert built(result) == set()
    assert "tiny/chats/canonical_rows: unknown_roles: 20 %" in said
    assert "wanted at most 1 %" in said
    assert catalog.CHECKS_BY_NAME["unknown_roles"].remedy in said
    assert "tiny/training_splits: it was never built" in said
    assert [event for event in result.all_events if event.is_step_up_for_retry] == []


# ── Bypasses ────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def besieged(run_once: Callable[[int], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """Yield a project with a good build, and then a run that found broken rows."""
    with run_once(0).lend_copy(tmp_path_factory.mktemp("besieged") / "copy") as tiny:
        tiny.write(unknown_roles=12).run()
        yield tiny


def _alone(_: Tiny) -> None:
    """Try nothing before: the ranks are materialized by themselves."""


def _without_checks(tiny: Tiny) -> None:
    everything = dg.AssetSelection.assets(*tiny.step_keys())
    assert not tiny.run_only(everything.without_checks()).success


def _without_the_middle(tiny: Tiny) -> None:
    ends = [tiny.key("chats", "raw_dataset"), tiny.key(*ROWS), tiny.key("gpu_partitions")]
    assert not tiny.run_only(dg.AssetSelection.assets(*ends)).success


def _rebuilt_without_checks(tiny: Tiny) -> None:
    tiny.append("chats", chat(5000))
    tiny.run_asset("chats", "raw_dataset")
    assert tiny.run_asset(*ROWS, without_checks=True).success


def _crashed_check(tiny: Tiny) -> None:
    """Leave the newest rows unjudged: their check dies because it cannot read their manifest."""
    _rebuilt_without_checks(tiny)
    _crash_check(tiny)


def _launched_by_a_condition(tiny: Tiny) -> None:
    """`eager()` knows no gate; what it launches is a run like any other."""
    assets = factory.make_assets(tiny.project, dg.AutomationCondition.eager())
    eager = dg.Definitions(assets, resources={"storage": StorageResource(root=tiny.store), "gates": NO_RUN_WAIVERS})
    dg.evaluate_automation_conditions(eager, instance=tiny.instance)
    assert not tiny.run_asset(*EXAMPLES).success


def _posted_pass(tiny: Tiny) -> None:
    for threshold in _thresholds(tiny):
        _forge_pass(tiny, threshold)


def _posted_materializations(tiny: Tiny) -> None:
    for key in tiny.step_keys():
        if key.path[-1] != "gpu_partitions":
            tiny.instance.report_runless_asset_event(dg.AssetMaterialization(key))


def _outside_dagster(tiny: Tiny) -> None:
    with pytest.raises(GateError, match="unknown_roles"):
        runner.build(tiny.project)


SIDE_DOORS = (
    _alone, _without_checks, _without_the_middle, _rebuilt_without_checks, _crashed_check, _launched_by_a_condition,
    _posted_pass, _outside_dagster, _posted_materializations,
)  # fmt: skip


@pytest.mark.parametrize("door", SIDE_DOORS, ids=lambda door: door.__name__.strip("_"))
def test_ranks_stay_blocked_for_every_bypass_and_yesterdays_stay_readable(
    besieged: Tiny, door: Callable[[Tiny], None]
) -> None:
    published = Path(besieged.store, "tiny", "gpu_partitions", "current.json")
    yesterday = published.read_bytes()
    built_before = besieged.version("gpu_partitions")
    door(besieged)
    result = besieged.run_asset("gpu_partitions")
    assert refusals(result)[RANKS_STEP].startswith("Gate closed; nothing was built.")
    assert besieged.version("gpu_partitions") == built_before
    assert published.read_bytes() == yesterday
    assert len(Reader(besieged.store, "tiny", rank=0, world_size=2, batch_size=2, verify=True)) > 0


# ── Case by case ───────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("what", "without_checks"),
    [("tokenized_examples", False), ("tokenized_examples", True), ("packed_shards", False)],
    ids=["alone", "checks deselected", "middle left out"],
)
def test_downstream_is_refused_however_it_is_selected(broken: Tiny, what: str, without_checks: bool) -> None:
    result = broken.run_asset("chats", what, without_checks=without_checks)
    assert built(result) == set()
    assert "Gate closed" in refusals(result)[broken.key("chats", what).to_python_identifier()]


def test_rebuild_without_checks_closes_the_gate_for_the_new_version(materialized: Tiny) -> None:
    materialized.write(unknown_roles=12)
    materialized.run_asset("chats", "raw_dataset")
    materialized.run_asset(*ROWS, without_checks=True)
    assert "unknown_roles was never judged" in refusals(materialized.run_asset(*EXAMPLES))[EXAMPLES_STEP]


def test_inputs_never_built_or_never_judged_are_refused(tiny: Tiny) -> None:
    said = refusals(tiny.run_asset(*ROWS))["tiny__chats_canonical_rows"]
    assert "tiny/chats/raw_dataset: it was never built" in said
    result = tiny.run_only(dg.AssetSelection.assets(*tiny.step_keys()).without_checks())
    # No check ran, so there is neither a failure nor a pass.
    assert built(result) == {("tiny", "chats", "raw_dataset"), ("tiny", "tasks", "raw_dataset")}
    assert "never judged" in refusals(result)["tiny__chats_canonical_rows"]


def test_tightened_bound_closes_until_its_check_has_run(tiny: Tiny) -> None:
    check = dg.AssetSelection.checks(dg.AssetCheckKey(tiny.key(*ROWS), "unknown_roles"))
    tiny.write(unknown_roles=1, gates={"unknown_roles": {"at_most": 0.1}}).run()
    tiny.write_recipe(gates={"unknown_roles": {"at_most": 0.05}})
    assert "unknown_roles was never judged" in refusals(tiny.run_asset(*EXAMPLES))[EXAMPLES_STEP]
    # The check applies the new bound to the version that is there, without building anything.
    assert built(tiny.run_only(check)) == set()
    assert refusals(tiny.run_asset(*EXAMPLES)) == {}
    tiny.write_recipe(gates={"unknown_roles": {"at_most": 0.001}})
    tiny.run_only(check)
    assert "wanted at most 0.1 %" in refusals(tiny.run_asset(*EXAMPLES))[EXAMPLES_STEP]


def test_waiver_opens_within_its_bound_and_shows_as_a_warning(broken: Tiny) -> None:
    result = broken.write_recipe(gates={"waivers": [_waiver(at_most=0.15)]}).run()
    failed = [one.description for one in result.get_asset_check_evaluations() if not one.passed]
    assert built(result) & BELOW == set()
    assert "unknown_roles: 20 %" in str(failed)
    result = broken.write_recipe(gates={"waivers": [_waiver(at_most=0.25)]}).run()
    failed = [one for one in result.get_asset_check_evaluations() if not one.passed]
    evaluation = next(one for one in failed if one.check_name == "unknown_roles")
    assert refusals(result) == {}
    assert evaluation.severity == dg.AssetCheckSeverity.WARN
    assert "narrators are wanted here" in (evaluation.description or "")
    assert "narrators are wanted here" in str(broken.shown("gpu_partitions").metadata["table waivers"].value)


def _kept_manifests(tiny: Tiny) -> list[Path]:
    """Return both copies of the manifest of the current rows."""
    pointer = orjson.loads(Path(tiny.store, "tiny", *ROWS, "pointer.json").read_bytes())
    return sorted(Path(tiny.store, "tiny", *ROWS).glob(f"*/*{pointer['fingerprint']}.json"))


def _crash_check(tiny: Tiny) -> None:
    """Let the rows' checks be planned, start and die without a result: they cannot read their manifest."""
    contents = {path: path.read_bytes() for path in _kept_manifests(tiny)}
    for path in contents:
        path.unlink()
    assert not tiny.run_only(dg.AssetSelection.checks_for_assets(tiny.key(*ROWS))).success
    for path, content in contents.items():
        path.write_bytes(content)


def _forge_pass(tiny: Tiny, threshold: gates.Threshold) -> None:
    told = {metadata.VERSION_KEY: tiny.version(*ROWS), metadata.THRESHOLD_KEY: threshold.digest}
    passed = dg.AssetCheckEvaluation(tiny.key(*ROWS), threshold.check, passed=True, metadata=told)
    tiny.instance.report_runless_asset_event(passed)


def test_forged_events_open_nothing(broken: Tiny) -> None:
    threshold = next(one for one in _thresholds(broken) if one.check == "unknown_roles")
    _forge_pass(broken, threshold)
    said = refusals(broken.run_asset(*EXAMPLES))[EXAMPLES_STEP]
    # Lock (a) believes it; lock (b) does not.
    believed = _result(broken, threshold, broken.version(*ROWS))
    assert believed is not None
    assert believed.passed
    assert "unknown_roles: 20 %" in said
    forged = dg.AssetMaterialization(broken.key(*ROWS), tags={"dagster/data_version": "0" * 32})
    broken.instance.report_runless_asset_event(forged)
    assert "is not kept" in refusals(broken.run_asset(*EXAMPLES))[EXAMPLES_STEP]


def test_wiped_event_log_closes_the_gate_and_loses_no_data(materialized: Tiny) -> None:
    with dg.DagsterInstance.ephemeral() as fresh:
        wiped = Tiny(materialized.folder, fresh)
        refused, again = wiped.run_asset(*EXAMPLES), wiped.run()

    assert "never built" in refusals(refused)[EXAMPLES_STEP]
    assert refusals(again) == {}
    assert set(reused(again).values()) == {True}


def test_planned_or_crashed_check_does_not_hide_an_earlier_result(materialized: Tiny) -> None:
    _crash_check(materialized)
    assert refusals(materialized.run_asset(*EXAMPLES)) == {}


def test_kept_manifest_and_result_of_this_version_open_the_gate_and_no_others(materialized: Tiny) -> None:
    threshold = _thresholds(materialized)[0]
    assert _result(materialized, threshold, materialized.version(*ROWS)) is not None
    assert _result(materialized, threshold, "0" * 32) is None
    reading, version = steps.find_step(materialized.project, ("tiny", *EXAMPLES)), materialized.version(*ROWS)
    opened = factory.open_asset_inputs(materialized.instance, materialized.project, reading)
    assert {key: one.version for key, one in opened.items()} == {("tiny", *ROWS): version}
    assert opened["tiny", *ROWS] == manifest.load_version(Store(materialized.store), ("tiny", *ROWS), version)
    for path in _kept_manifests(materialized):
        path.unlink()
    said = refusals(materialized.run_asset("gpu_partitions"))[RANKS_STEP]
    assert f"version {materialized.version(*ROWS)} is not kept" in said


# ── Versions other than the current ones ───────────────────────────────────────────────────────


def test_ranks_and_kept_versions_made_of_rows_that_fail_today_are_refused(tiny: Tiny) -> None:
    # A tighter bound came, and the rows alone were mended.
    loose = {"unknown_roles": {"at_most": 0.5}}
    assert tiny.write(unknown_roles=12, gates=RECIPE["gates"] | loose).run().success
    tiny.write(rows=61)
    rows = [tiny.key("chats", stage) for stage in ("raw_dataset", "canonical_rows")]
    assert tiny.run_only(dg.AssetSelection.assets(*rows) | dg.AssetSelection.checks_for_assets(*rows)).success
    tiny.run_only(dg.AssetSelection.checks_for_assets(*tiny.step_keys()))
    said = refusals(tiny.run_asset("gpu_partitions"))[RANKS_STEP]
    assert "tiny/chats/canonical_rows, version" in said
    assert "an ancestor of this input: unknown_roles: 20 %" in said
    with pytest.raises(GateError, match=r"an ancestor of this input: unknown_roles: 20 % .*; wanted at most 1 %"):
        runner.build(tiny.project, only=["gpu_partitions"])
    old = tiny.version("chats", "packed_shards")
    assert tiny.run().success
    now = tiny.version("chats", "packed_shards")
    result = tiny.run_asset("chats", "packed_shards", config=_version("tiny__chats_packed_shards", old))
    assert "an ancestor of this input: unknown_roles: 20 %" in refusals(result)["tiny__chats_packed_shards"]
    assert tiny.current("chats", "packed_shards").version == now != old


def test_kept_version_of_the_ranks_is_published_whole_and_read_although_the_current_one_fails(
    materialized: Tiny,
) -> None:
    """Its order, its shards and its ranks, and nothing built since."""
    old, rows = materialized.current("gpu_partitions").version, materialized.sequences()
    materialized.write(rows=80).run()
    assert len(materialized.sequences()) > len(rows)

    assert refusals(materialized.run_asset("gpu_partitions", config=_version(RANKS_STEP, old))) == {}
    assert materialized.current("gpu_partitions").version == old
    assert materialized.sequences() == rows
    assert materialized.write(rows=80).run().success
    assert not materialized.write(rows=90, unknown_roles=20).run().success
    assert refusals(materialized.run_asset("gpu_partitions", config=_version(RANKS_STEP, old))) == {}
    assert materialized.sequences() == rows


def test_waiver_on_what_is_only_waited_for_is_named_by_all_that_is_built_on_it(tiny: Tiny) -> None:
    waiver = {"check": "context_overflow", "dataset": "chats", "at_most": 1, "reason": "only the beginnings matter"}
    tiny.write(seq_len=16, gates=RECIPE["gates"] | {"waivers": [waiver, waiver | {"dataset": "tasks"}]})
    assert refusals(tiny.run()) == {}
    published = orjson.loads(Path(tiny.store, "tiny", "gpu_partitions", "current.json").read_bytes())
    assert "context_overflow on chats: only the beginnings matter" in published["waivers"]


def _version(step: str, version: str) -> dict[str, Any]:
    return {"ops": {step: {"config": {"version": version}}}}


def _result(tiny: Tiny, threshold: gates.Threshold, version: str) -> dg.AssetCheckEvaluation | None:
    key = ("tiny", *ROWS)
    return history.CheckHistory(tiny.instance, [(key, threshold.check)]).on(key, threshold, version)


def _thresholds(tiny: Tiny) -> tuple[gates.Threshold, ...]:
    return next(step.shown_thresholds for step in steps.plan_steps(tiny.project) if step.key == ("tiny", *ROWS))


def _waiver(**bound: float) -> dict[str, Any]:
    return {"check": "unknown_roles", "dataset": "chats", "reason": "narrators are wanted here"} | bound
