"""Which errors an asset raises unchanged, to be retried, and which are final; and the materializations of its ranks."""

import errno
from concurrent.futures.process import BrokenProcessPool

import dagster as dg
import pytest

from dagster_rowmill import factory
from dagster_rowmill.factory import RETRY_POLICY, LogProgress, only_infrastructure_errors
from rowmill.build import runner
from rowmill.core.errors import GateError, IntegrityError, SourceError
from tests.core.test_transient_errors import caused
from tests.support.tiny_project import Tiny

PASSING = [OSError(errno.EIO, "input/output error"), caused(IntegrityError("a worker died"), BrokenProcessPool("gone"))]
FINAL = [PermissionError("no"), ValueError("a bug"), GateError("closed"), SourceError("found no data")]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_error_that_may_pass_leaves_unchanged_for_the_retry_policy(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, only_infrastructure_errors():
        raise error
    assert caught.value is error
    assert RETRY_POLICY.max_retries == 2


@pytest.mark.parametrize("error", FINAL, ids=repr)
def test_error_that_stays_becomes_a_failure_that_is_not_retried(error: Exception) -> None:
    with pytest.raises(dg.Failure) as caught, only_infrastructure_errors():
        raise error

    assert not caught.value.allow_retries
    assert str(error) in (caught.value.description or "")
    assert caught.value.__cause__ is error


def test_progress_says_a_line_every_five_seconds_with_speed_and_time_left() -> None:
    lines: list[str] = []
    now = 0.0
    progress = LogProgress(lines.append, clock=lambda: now)
    for second in range(1, 13):
        now = float(second)
        rows = 100 * second
        progress("chats/canonical_rows", done=second, total=20, rows=rows, total_rows=2000, tokens=0, seconds=now)

    assert lines == [
        "chats/canonical_rows: 5 of 20 parts, 100 rows/s, 15.0 s left",
        "chats/canonical_rows: 10 of 20 parts, 100 rows/s, 10.0 s left",
    ]


@pytest.mark.slow
def test_each_rank_that_was_made_is_a_materialization_with_its_own_content(tiny: Tiny) -> None:
    made = {step.name: (step, report.manifest) for step, report, _ in runner.build(tiny.project)}
    shown = list(factory.iterate_materializations(*made["gpu_partitions"]))
    assert [one.partition for one in shown] == ["rank-00000-of-00002", "rank-00001-of-00002"]
    assert {one.asset_key for one in shown} == {dg.AssetKey(["tiny", "ranks"])}
    assert len({(one.tags or {})["dagster/data_version"] for one in shown}) == 2
    sequences = sum(int(str(one.metadata["rank sequences"].value)) for one in shown)
    assert sequences == made["gpu_partitions"][1].facts["sequences"]
    assert list(factory.iterate_materializations(*made["training_splits"])) == []
