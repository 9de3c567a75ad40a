"""Nothing is built on a failed blocking check: not in its run, not in any other, and not by any bypass."""

from collections.abc import Callable, Iterator, Sequence
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
from tests.support.tiny_project import FOREIGN_WARNINGS, RECIPE, Tiny, built, chat, refusals, reused

# Conditions are beta by name in the pinned release.
pytestmark = [pytest.mark.slow, *FOREIGN_WARNINGS, pytest.mark.filterwarnings("ignore::dagster.BetaWarning")]
ROWS = ("chats", "canonical_rows")
BELOW = {
    ("tiny", "chats", "tokenized_examples"),
    ("tiny", "chats", "truncation_stats"),
    ("tiny", "chats", "packed_shards"),
    ("tiny", "training_splits"),
    ("tiny", "gpu_partitions"),
}
RANKS_STEP = "tiny__gpu_partitions"


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Tiny(tmp_path, instance)


def test_failed_blocking_check_keeps_everything_below_unbuilt(tiny: Tiny) -> None:
    result = tiny.write(unknown_roles=12).run()

    failed = [
        one
        for one in result.get_asset_check_evaluations()
        if not one.passed and one.severity == dg.AssetCheckSeverity.ERROR
    ]
    assert [(one.asset_key, one.check_name) for one in failed] == [(tiny.key(*ROWS), "unknown_roles")]
    assert not result.success
    assert built(result) & BELOW == set()
    assert ("tiny", "tasks", "packed_shards") in built(result)


def test_later_run_of_the_ranks_alone_is_refused_with_name_number_threshold_and_remedy(broken: Tiny) -> None:
    result = broken.run_only(dg.AssetSelection.assets(broken.key("gpu_partitions")))

    said = refusals(result)[RANKS_STEP]
    assert built(result) == set()
    assert "tiny/chats/canonical_rows: unknown_roles: 20 %" in said
    assert "wanted at most 1 %" in said
    assert catalog.CHECKS_BY_NAME["unknown_roles"].remedy in said
    assert "tiny/training_splits: it was never built" in said


def test_refusal_is_never_retried(broken: Tiny) -> None:
    result = broken.run_only(dg.AssetSelection.assets(broken.key("gpu_partitions")))

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
    tiny.run_only(dg.AssetSelection.assets(tiny.key("chats", "raw_dataset")))
    assert tiny.run_only(dg.AssetSelection.assets(tiny.key(*ROWS)).without_checks()).success


def _crashed_check(tiny: Tiny) -> None:
    """Leave the newest rows unjudged: their check dies because it cannot read their manifest."""
    _rebuilt_without_checks(tiny)
    kept = Path(tiny.store, *("tiny", *ROWS), "versions", f"{tiny.version(*ROWS)}.json")
    content = kept.read_bytes()
    kept.unlink()
    assert not tiny.run_only(dg.AssetSelection.checks_for_assets(tiny.key(*ROWS))).success
    kept.write_bytes(content)


def _launched_by_a_condition(tiny: Tiny) -> None:
    """`eager()` knows no gate; what it launches is a run like any other."""
    assets = factory.make_assets(tiny.project, dg.AutomationCondition.eager())
    eager = dg.Definitions(assets, resources={"storage": StorageResource(root=tiny.store), "gates": NO_RUN_WAIVERS})
    dg.evaluate_automation_conditions(eager, instance=tiny.instance)
    assert not tiny.run_only(dg.AssetSelection.assets(tiny.key("chats", "tokenized_examples"))).success


def _posted_pass(tiny: Tiny) -> None:
    for threshold in _thresholds(tiny):
        told = {metadata.VERSION_KEY: tiny.version(*ROWS), metadata.THRESHOLD_KEY: threshold.digest}
        passed = dg.AssetCheckEvaluation(tiny.key(*ROWS), threshold.check, passed=True, metadata=told)
        tiny.instance.report_runless_asset_event(passed)


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

    result = besieged.run_only(dg.AssetSelection.assets(besieged.key("gpu_partitions")))

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
    selection = dg.AssetSelection.assets(broken.key("chats", what))

    result = broken.run_only(selection.without_checks() if without_checks else selection)

    assert built(result) == set()
    assert "Gate closed" in refusals(result)[broken.key("chats", what).to_python_identifier()]


def test_asset_and_downstream_without_checks_stop_at_the_first_gate(tiny: Tiny) -> None:
    tiny.write()
    everything = dg.AssetSelection.assets(*tiny.step_keys()).without_checks()

    result = tiny.run_only(everything)

    # No check ran, so there is neither a failure nor a pass.
    assert built(result) == {("tiny", "chats", "raw_dataset"), ("tiny", "tasks", "raw_dataset")}
    assert "never judged" in refusals(result)["tiny__chats_canonical_rows"]


def test_rebuild_without_checks_closes_the_gate_for_the_new_version(materialized: Tiny) -> None:
    materialized.write(unknown_roles=12)
    raw, rows = materialized.key("chats", "raw_dataset"), materialized.key(*ROWS)

    materialized.run_only(dg.AssetSelection.assets(raw))
    materialized.run_only(dg.AssetSelection.assets(rows).without_checks())
    result = materialized.run_only(dg.AssetSelection.assets(materialized.key("chats", "tokenized_examples")))

    assert "unknown_roles was never judged" in refusals(result)["tiny__chats_tokenized_examples"]


def test_never_built_input_is_refused(tiny: Tiny) -> None:
    result = tiny.write().run_only(dg.AssetSelection.assets(tiny.key(*ROWS)))

    assert "tiny/chats/raw_dataset: it was never built" in refusals(result)["tiny__chats_canonical_rows"]


def test_tightened_bound_closes_until_its_check_has_run(tiny: Tiny) -> None:
    examples = dg.AssetSelection.assets(tiny.key("chats", "tokenized_examples"))
    check = dg.AssetSelection.checks(dg.AssetCheckKey(tiny.key(*ROWS), "unknown_roles"))
    tiny.write(unknown_roles=1, gates={"unknown_roles": {"at_most": 0.1}}).run()

    tiny.write_recipe(gates={"unknown_roles": {"at_most": 0.05}})
    before = tiny.run_only(examples)
    checked = tiny.run_only(check)
    after = tiny.run_only(examples)
    tiny.write_recipe(gates={"unknown_roles": {"at_most": 0.001}})
    tiny.run_only(check)
    tightened = tiny.run_only(examples)

    # The check applied the new bound to the version that was there, without building anything.
    assert "unknown_roles was never judged" in refusals(before)["tiny__chats_tokenized_examples"]
    assert built(checked) == set()
    assert refusals(after) == {}
    assert "wanted at most 0.1 %" in refusals(tightened)["tiny__chats_tokenized_examples"]


def test_waiver_within_its_bound_opens_and_shows_as_a_warning(broken: Tiny) -> None:
    broken.write_recipe(gates={"waivers": [_waiver(at_most=0.25)]})

    result = broken.run()

    evaluation = next(
        one for one in result.get_asset_check_evaluations() if not one.passed and one.check_name == "unknown_roles"
    )
    page = _page(result, broken.key("gpu_partitions"))
    assert refusals(result) == {}
    assert evaluation.severity == dg.AssetCheckSeverity.WARN
    assert "narrators are wanted here" in (evaluation.description or "")
    assert "narrators are wanted here" in str(page["table waivers"].value)


def test_waiver_beyond_its_bound_opens_nothing(broken: Tiny) -> None:
    broken.write_recipe(gates={"waivers": [_waiver(at_most=0.15)]})

    result = broken.run()

    assert built(result) & BELOW == set()
    assert "unknown_roles: 20 %" in str(
        [one.description for one in result.get_asset_check_evaluations() if not one.passed]
    )


def test_manifest_that_is_gone_closes_the_gate(materialized: Tiny) -> None:
    version = materialized.version(*ROWS)
    (Path(materialized.store) / "tiny" / "chats" / "canonical_rows" / "versions" / f"{version}.json").unlink()

    result = materialized.run_only(dg.AssetSelection.assets(materialized.key("gpu_partitions")))

    assert f"version {version} is not kept" in refusals(result)[RANKS_STEP]


def test_forged_pass_in_the_event_log_opens_nothing(broken: Tiny) -> None:
    threshold = next(one for one in _thresholds(broken) if one.check == "unknown_roles")
    version = broken.version(*ROWS)
    forged = dg.AssetCheckEvaluation(
        asset_key=broken.key(*ROWS),
        check_name="unknown_roles",
        passed=True,
        metadata={metadata.VERSION_KEY: version, metadata.THRESHOLD_KEY: threshold.digest},
    )
    broken.instance.report_runless_asset_event(forged)

    result = broken.run_only(dg.AssetSelection.assets(broken.key("chats", "tokenized_examples")))

    # Lock (a) believes it; lock (b) does not.
    believed = _result(broken, threshold, version)
    assert believed is not None
    assert believed.passed
    assert "unknown_roles: 20 %" in refusals(result)["tiny__chats_tokenized_examples"]


def test_forged_materialization_opens_nothing(broken: Tiny) -> None:
    forged = dg.AssetMaterialization(broken.key(*ROWS), tags={"dagster/data_version": "0" * 32})
    broken.instance.report_runless_asset_event(forged)

    result = broken.run_only(dg.AssetSelection.assets(broken.key("chats", "tokenized_examples")))

    assert "is not kept" in refusals(result)["tiny__chats_tokenized_examples"]


def test_wiped_event_log_closes_the_gate_and_loses_no_data(materialized: Tiny) -> None:
    with dg.DagsterInstance.ephemeral() as fresh:
        wiped = Tiny(materialized.folder, fresh)
        examples = dg.AssetSelection.assets(materialized.key("chats", "tokenized_examples"))

        refused = wiped.run_only(examples)
        again = wiped.run()

    assert "never built" in refusals(refused)["tiny__chats_tokenized_examples"]
    assert refusals(again) == {}
    assert set(reused(again).values()) == {True}


def test_planned_or_crashed_check_does_not_hide_an_earlier_result(materialized: Tiny) -> None:
    store = Store(materialized.store)
    version = materialized.version(*ROWS)
    kept = Path(store.path(f"tiny/chats/canonical_rows/versions/{version}.json"))
    content = kept.read_bytes()
    kept.unlink()

    # The check cannot read its manifest, so it is planned, starts and dies without a result.
    crashed = materialized.run_only(dg.AssetSelection.checks_for_assets(materialized.key(*ROWS)))
    kept.write_bytes(content)
    result = materialized.run_only(dg.AssetSelection.assets(materialized.key("chats", "tokenized_examples")))

    assert not crashed.success
    assert refusals(result) == {}


def test_result_of_another_version_does_not_count(materialized: Tiny) -> None:
    threshold = _thresholds(materialized)[0]

    assert _result(materialized, threshold, materialized.version(*ROWS)) is not None
    assert _result(materialized, threshold, "0" * 32) is None


def test_open_gate_hands_over_exactly_the_inputs_in_dagster_s_versions(materialized: Tiny) -> None:
    reading = steps.find_step(materialized.project, ("tiny", "chats", "tokenized_examples"))
    store = Store(materialized.store)

    opened = factory.open_asset_inputs(materialized.instance, materialized.project, reading)

    assert {key: one.version for key, one in opened.items()} == {("tiny", *ROWS): materialized.version(*ROWS)}
    assert opened["tiny", *ROWS] == manifest.load_version(store, ("tiny", *ROWS), materialized.version(*ROWS))


# ── Versions other than the current ones ───────────────────────────────────────────────────────


@pytest.fixture
def outdated(tiny: Tiny) -> Tiny:
    """Return a project whose ranks hold rows that fail today: a tighter bound came, and the rows alone were mended."""
    loose = {"unknown_roles": {"at_most": 0.5}}
    assert tiny.write(unknown_roles=12, gates=RECIPE["gates"] | loose).run().success
    tiny.write(rows=61)
    assert tiny.run_only(_with_checks(tiny, "chats", ("raw_dataset", "canonical_rows"))).success
    everything = [tiny.key(*step.key[1:]) for step in steps.plan_steps(tiny.project)]
    tiny.run_only(dg.AssetSelection.checks_for_assets(*everything))
    return tiny


def test_ranks_of_shards_from_rows_that_fail_today_stay_blocked(outdated: Tiny) -> None:
    result = outdated.run_only(dg.AssetSelection.assets(outdated.key("gpu_partitions")))

    said = refusals(result)[RANKS_STEP]
    assert "tiny/chats/canonical_rows, version" in said
    assert "an ancestor of this input: unknown_roles: 20 %" in said
    with pytest.raises(GateError, match=r"an ancestor of this input: unknown_roles: 20 % .*; wanted at most 1 %"):
        runner.build(outdated.project, only=["gpu_partitions"])


def test_kept_version_made_of_rows_that_fail_today_is_refused(outdated: Tiny) -> None:
    old = outdated.version("chats", "packed_shards")
    assert outdated.run().success
    now = outdated.version("chats", "packed_shards")

    packed = dg.AssetSelection.assets(outdated.key("chats", "packed_shards"))
    result = outdated.run_only(packed, config=_version("tiny__chats_packed_shards", old))

    assert "an ancestor of this input: unknown_roles: 20 %" in refusals(result)["tiny__chats_packed_shards"]
    current = manifest.load_current(Store(outdated.store), ("tiny", "chats", "packed_shards"))
    assert current is not None
    assert current.version == now != old


def test_kept_version_of_the_ranks_is_published_whole_and_read(materialized: Tiny) -> None:
    """Its order, its shards and its ranks, and nothing built since."""
    old, rows = _kept(materialized), _sequences(materialized)
    materialized.write(rows=80).run()
    assert len(_sequences(materialized)) > len(rows)

    ranks = dg.AssetSelection.assets(materialized.key("gpu_partitions"))
    result = materialized.run_only(ranks, config=_version(RANKS_STEP, old))

    assert refusals(result) == {}
    assert _kept(materialized) == old
    assert _sequences(materialized) == rows


@pytest.mark.campaign
def test_kept_version_passes_although_the_current_one_fails(materialized: Tiny) -> None:
    old, rows = _kept(materialized), _sequences(materialized)
    assert materialized.write(rows=80).run().success
    assert not materialized.write(rows=90, unknown_roles=20).run().success

    ranks = dg.AssetSelection.assets(materialized.key("gpu_partitions"))
    result = materialized.run_only(ranks, config=_version(RANKS_STEP, old))

    assert refusals(result) == {}
    assert _sequences(materialized) == rows


def test_waiver_on_what_is_only_waited_for_is_named_by_all_that_is_built_on_it(tiny: Tiny) -> None:
    waiver = {"check": "context_overflow", "dataset": "chats", "at_most": 1, "reason": "only the beginnings matter"}
    tiny.write(seq_len=16, gates=RECIPE["gates"] | {"waivers": [waiver, waiver | {"dataset": "tasks"}]})

    result = tiny.run()

    assert refusals(result) == {}
    published = orjson.loads(Path(tiny.store, "tiny", "gpu_partitions", "current.json").read_bytes())
    assert "context_overflow on chats: only the beginnings matter" in published["waivers"]


def _with_checks(tiny: Tiny, dataset: str, stages: Sequence[str]) -> dg.AssetSelection:
    chosen = dg.AssetSelection.assets(*(tiny.key(dataset, stage) for stage in stages))
    return chosen | dg.AssetSelection.checks_for_assets(*(tiny.key(dataset, stage) for stage in stages))


def _version(step: str, version: str) -> dict[str, Any]:
    return {"ops": {step: {"config": {"version": version}}}}


def _kept(tiny: Tiny) -> str:
    made = manifest.load_current(Store(tiny.store), ("tiny", "gpu_partitions"))
    assert made is not None
    return made.version


def _sequences(tiny: Tiny) -> list[list[int]]:
    reader = Reader(tiny.store, "tiny", rank=0, world_size=2, batch_size=2, verify=True)
    return [reader[i].input_ids.tolist() for i in range(len(reader))]


def _result(tiny: Tiny, threshold: gates.Threshold, version: str) -> dg.AssetCheckEvaluation | None:
    key = ("tiny", *ROWS)
    return history.CheckHistory(tiny.instance, [(key, threshold.check)]).on(key, threshold, version)


def _thresholds(tiny: Tiny) -> tuple[gates.Threshold, ...]:
    return next(step.shown_thresholds for step in steps.plan_steps(tiny.project) if step.key == ("tiny", *ROWS))


def _waiver(**bound: float) -> dict[str, Any]:
    return {"check": "unknown_roles", "dataset": "chats", "reason": "narrators are wanted here"} | bound


def _page(result: dg.ExecuteInProcessResult, key: dg.AssetKey) -> dict[str, Any]:
    events = [one for one in result.get_asset_materialization_events() if one.asset_key == key]
    return dict(events[-1].step_materialization_data.materialization.metadata)
