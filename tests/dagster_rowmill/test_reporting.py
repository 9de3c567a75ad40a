"""The report that Dagster's pages link to exists, and shows the state after the last run, whatever it built."""

from pathlib import Path

import pytest

from rowmill.build.steps import find_step
from rowmill.checks.catalog import CHECKS_BY_NAME
from tests.support.tiny_project import RECIPE, Tiny, chat

RAW, ROWS = ("chats", "raw_dataset"), ("chats", "canonical_rows")


def linked(tiny: Tiny, *steps: str) -> str:
    """Return the report to which the newest page of an asset leads."""
    return Path(str(tiny.shown(*steps).metadata["report"].value)).read_text(encoding="utf-8")


@pytest.mark.slow
def test_report_of_a_stage_that_is_run_alone_on_a_new_project_shows_it(tiny: Tiny) -> None:
    tiny.run_asset(*RAW)
    after_raw = linked(tiny, *RAW)
    tiny.run_asset(*ROWS)
    after_rows = linked(tiny, *ROWS)
    thresholds, made = find_step(tiny.project, ("tiny", *ROWS)).shown_thresholds, tiny.current(*ROWS)
    # Checks of rows that could have shrunk against published ones have no fact.
    idle = sum(made.facts.get(one.fact) is None for one in thresholds)
    judged = len(thresholds) - idle
    assert tiny.current(*RAW).version in after_raw
    assert "Not built: chats/canonical_rows" in after_raw
    assert made.version in after_rows
    assert f"{judged} of {judged} checks passed, {idle} not applicable" in after_rows


@pytest.mark.slow
def test_report_shows_what_was_built_alone_or_after_a_dataset_failed(materialized: Tiny) -> None:
    before = materialized.current(*ROWS).version
    materialized.append("chats", chat(1000))
    materialized.run_asset(*RAW)
    materialized.run_asset(*ROWS, without_checks=True)
    report = linked(materialized, *ROWS)
    assert materialized.current(*ROWS).version != before
    assert materialized.current(*ROWS).version in report
    assert before not in report
    (materialized.folder / "data" / "chats.jsonl").unlink()
    materialized.write_rows("tasks", [{"prompt": f"Say {i}.", "answer": f"{i}"} for i in range(50)])
    packed = ("tasks", "packed_shards")
    assert not materialized.run().success
    assert materialized.current(*packed).version in linked(materialized, *packed)


@pytest.mark.campaign
def test_warning_of_a_run_is_printed_in_full_once(tiny: Tiny) -> None:
    tiny.write(gates=RECIPE["gates"] | {"fill": {"at_least": 1}})
    printed = " ".join(tiny.start("-m", "dagster_rowmill.materialize", "tiny").stdout.split())
    assert printed.count("wanted at least 100 %") == printed.count(CHECKS_BY_NAME["fill"].remedy) == 2
    assert " warnings, shown above: chats/packed_shards fill " in printed


@pytest.mark.campaign
def test_report_is_written_once_a_night_and_not_at_all_in_a_quiet_one(tiny: Tiny) -> None:
    # Counted where files get their names, in a process of its own: such a hook cannot be taken off again.
    program = """
import sys
written = []
def watch(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("report.html"):
        written.append(arguments[1])
sys.addaudithook(watch)
from dagster_rowmill import materialize
for night in range(2):
    assert materialize.main(["tiny"]) == 0
    print("written", len(written))
"""
    nights = tiny.start("-c", program)
    assert nights.returncode == 0, nights.stderr
    assert [line for line in nights.stdout.splitlines() if line.startswith("written")] == ["written 1", "written 1"]
