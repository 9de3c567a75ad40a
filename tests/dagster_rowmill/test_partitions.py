"""The partitioned asset that shows the ranks: its materializations, from what the stage made."""

from pathlib import Path

import dagster as dg
import pytest

from dagster_rowmill import partitions
from rowmill.build import runner
from rowmill.build.steps import plan_steps
from tests.support.tiny_project import FOREIGN_WARNINGS, Tiny

pytestmark = FOREIGN_WARNINGS


@pytest.mark.slow
def test_each_rank_that_was_made_is_a_materialization_with_its_own_content(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    project = Tiny(tmp_path, instance).write().project
    steps = {step.name: step for step in plan_steps(project)}
    reports = {step.name: report for step, report, _ in runner.build(project)}

    shown = list(partitions.iterate_materializations(steps["gpu_partitions"], reports["gpu_partitions"].manifest))

    assert [one.partition for one in shown] == ["rank-00000-of-00002", "rank-00001-of-00002"]
    assert {one.asset_key for one in shown} == {dg.AssetKey(["tiny", "ranks"])}
    assert len({(one.tags or {})["dagster/data_version"] for one in shown}) == 2
    sequences = sum(int(str(one.metadata["rank sequences"].value)) for one in shown)
    assert sequences == reports["gpu_partitions"].manifest.facts["sequences"]
    assert (
        list(partitions.iterate_materializations(steps["training_splits"], reports["training_splits"].manifest)) == []
    )
