"""A failure accepted in the launchpad: for one run, with a reason, and visible in all that the run published."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import orjson
import pytest
import yaml

from dagster_rowmill.resources import RunWaiver
from rowmill.checks.gates import Waiver
from tests.support.tiny_project import Tiny, refusals

pytestmark = pytest.mark.slow
REASON = "narrators are wanted in this batch"


@pytest.fixture(scope="module")
def broken(run_once: Callable[[int], Tiny], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """Yield a project whose chats have an unknown role in 12 of 60 rows, after one run."""
    with run_once(12).lend_copy(tmp_path_factory.mktemp("broken") / "copy") as copy_of_it:
        yield copy_of_it


def test_a_run_takes_every_option_of_a_waiver() -> None:
    assert RunWaiver.model_fields.keys() == Waiver.model_fields.keys()


def _run(tiny: Tiny, config: dict[str, Any] | None = None) -> dg.ExecuteInProcessResult:
    everything = dg.AssetSelection.assets(*tiny.step_keys())
    return tiny.run_only(everything | dg.AssetSelection.checks_for_assets(*tiny.step_keys()), config=config)


@pytest.fixture(scope="module")
def proposal(broken: Tiny) -> dict[str, Any]:
    """Return the run configuration that the red check's page offers after the first run."""
    check = dg.AssetCheckKey(broken.key("chats", "canonical_rows"), "unknown_roles")
    found = broken.instance.event_log_storage.get_latest_asset_check_execution_by_key([check])[check].evaluation
    assert found is not None
    return yaml.safe_load(str(found.metadata["waive_for_one_run"].value))


def _accept(proposal: dict[str, Any], **changes: Any) -> dict[str, Any]:
    accepted = copy.deepcopy(proposal)
    accepted["resources"]["gates"]["config"]["waivers"][0] |= {"reason": REASON} | changes
    return accepted


def test_accepted_failure_publishes_this_run_and_the_next_one_is_red_again(
    broken: Tiny, proposal: dict[str, Any]
) -> None:
    accepted = _run(broken, _accept(proposal))

    assert refusals(accepted) == {}
    current = Path(broken.store, "tiny", "gpu_partitions", "current.json")
    published = orjson.loads(current.read_bytes())
    assert published["waivers"] == [f"unknown_roles on chats: for one run: {REASON}"]
    rows = broken.key("chats", "canonical_rows")
    judged = {(one.asset_key, one.check_name): one.metadata for one in accepted.get_asset_check_evaluations()}
    assert judged[rows, "unknown_roles"]["waiver"].value == f"for one run: {REASON}"
    summary = broken.shown("chats", "canonical_rows").metadata["summary"].value
    assert "`unknown_roles` 20 % (waived)" in str(summary)
    # Dagster shows that the recipe as it is would not have built this.
    tags = broken.shown("gpu_partitions").tags or {}
    assert tags["dagster/code_version"] != broken.code_versions()["tiny/gpu_partitions"]

    assert not _run(broken).success
    assert "unknown_roles: 20 %" in refusals(broken.run_asset("gpu_partitions"))["tiny__gpu_partitions"]
    assert orjson.loads(current.read_bytes())["version"] == published["version"]


def test_later_run_of_downstream_assets_alone_says_that_the_waiver_was_another_runs(tiny: Tiny) -> None:
    accepted = {"check": "unknown_roles", "dataset": "chats", "at_most": 0.2, "reason": REASON}
    config = {"resources": {"gates": {"config": {"waivers": [accepted]}}}}
    hint = (
        f"; another run accepted it ({REASON}), and a run's waiver covers no other run: give this run the same waiver "
        "in Dagster's launchpad, or write it into gates.waivers\n"
    )
    tiny.write(unknown_roles=12)

    def run(*stages: str, **options: Any) -> str:
        keys = [tiny.key("chats", stage) for stage in stages]
        picked = dg.AssetSelection.assets(*keys) | dg.AssetSelection.checks_for_assets(*keys)
        return "\n".join(refusals(tiny.run_only(picked, **options)).values())

    # The rows were never judged but in the run that accepted them.
    assert run("raw_dataset", "canonical_rows", config=config) == ""
    direct = run("tokenized_examples")
    assert run("tokenized_examples", config=config) == ""
    ancestor = run("truncation_stats")
    assert run("truncation_stats", config=config) == ""
    assert "- tiny/chats/canonical_rows: unknown_roles: 20 % (" in direct
    assert "an ancestor of this input: unknown_roles: 20 % (" in ancestor
    assert hint in direct
    assert hint in ancestor


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reason": ""}, "resources.gates.config.waivers.0: reason"),
        ({"check": "unknown_role"}, "did you mean unknown_roles?"),
        ({"at_most": 0.1}, "unknown_roles: 20 %"),
    ],
    ids=["no_reason", "unknown_check", "bound_too_low"],
)
def test_waiver_that_does_not_cover_the_failure_builds_nothing(
    broken: Tiny, proposal: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    before = broken.instance.get_latest_materialization_event(broken.key("gpu_partitions"))
    result = _run(broken, _accept(proposal, **change))
    failed = [one.description or "" for one in result.get_asset_check_evaluations() if not one.passed]
    assert not result.success
    assert said in "\n".join([*refusals(result).values(), *failed])
    assert broken.instance.get_latest_materialization_event(broken.key("gpu_partitions")) == before
