"""The report that Dagster's pages link to exists, and shows the state after the last run, whatever it built."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from rowmill.build.steps import find_step
from rowmill.checks.catalog import CHECKS_BY_NAME
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import NOT_APPLICABLE, Manifest
from tests.support.tiny_project import FOREIGN_WARNINGS, RECIPE, Tiny, chat

pytestmark = FOREIGN_WARNINGS
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Tiny]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield Tiny(tmp_path, instance).write()


def current(tiny: Tiny, *steps: str) -> Manifest:
    made = manifest.load_current(Store(tiny.store), ("tiny", *steps))
    assert made is not None
    return made


def linked(tiny: Tiny, *steps: str) -> str:
    """Return the report to which the newest page of an asset leads."""
    event = tiny.instance.get_latest_materialization_event(tiny.key(*steps))
    assert event is not None
    assert event.asset_materialization is not None
    return Path(str(event.asset_materialization.metadata["report"].value)).read_text(encoding="utf-8")


@pytest.mark.slow
def test_report_of_a_stage_that_is_run_alone_on_a_new_project_shows_it(tiny: Tiny) -> None:
    raw, rows = (tiny.key("chats", name) for name in ("raw_dataset", "canonical_rows"))

    tiny.run_only(dg.AssetSelection.assets(raw))
    after_raw = linked(tiny, "chats", "raw_dataset")
    tiny.run_only(dg.AssetSelection.assets(rows))
    after_rows = linked(tiny, "chats", "canonical_rows")

    thresholds = find_step(tiny.project, ("tiny", "chats", "canonical_rows")).shown_thresholds
    facts = current(tiny, "chats", "canonical_rows").facts
    # Checks of rows that could have shrunk against published ones have no fact.
    idle = sum(facts.get(one.fact, NOT_APPLICABLE) == NOT_APPLICABLE for one in thresholds)
    assert current(tiny, "chats", "raw_dataset").version in after_raw
    assert "Not built: chats/canonical_rows" in after_raw
    assert current(tiny, "chats", "canonical_rows").version in after_rows
    judged = len(thresholds) - idle
    assert f"{judged} of {judged} checks passed, {idle} not applicable" in after_rows


@pytest.mark.slow
def test_report_shows_the_new_version_of_a_stage_that_is_built_again_alone(materialized: Tiny) -> None:
    before = current(materialized, "chats", "canonical_rows").version
    materialized.append("chats", chat(1000))
    keys = [materialized.key("chats", name) for name in ("raw_dataset", "canonical_rows")]

    materialized.run_only(dg.AssetSelection.assets(keys[0]))
    materialized.run_only(dg.AssetSelection.assets(keys[1]).without_checks())

    after = linked(materialized, "chats", "canonical_rows")
    assert current(materialized, "chats", "canonical_rows").version != before
    assert current(materialized, "chats", "canonical_rows").version in after
    assert before not in after


@pytest.mark.slow
def test_report_of_a_night_in_which_a_dataset_failed_shows_what_was_built_after_it(materialized: Tiny) -> None:
    (materialized.folder / "data" / "chats.jsonl").unlink()
    materialized.write_rows("tasks", [{"prompt": f"Say {i}.", "answer": f"{i}"} for i in range(50)])

    night = materialized.run()

    assert not night.success
    assert current(materialized, "tasks", "packed_shards").version in linked(materialized, "tasks", "packed_shards")


@pytest.mark.campaign
def test_warning_of_a_run_is_printed_in_full_once(tiny: Tiny) -> None:
    tiny.write(gates=RECIPE["gates"] | {"fill": {"at_least": 1}})
    places = {
        "ROWMILL_CONFIGS": str(tiny.path.parent),
        "ROWMILL_STORE": tiny.store,
        "DAGSTER_HOME": str(tiny.folder / "home"),
    }

    run = subprocess.run(
        [sys.executable, "-m", "dagster_rowmill.materialize", "tiny"],
        cwd=ROOT, env=os.environ | places, capture_output=True, text=True, check=True,
    )  # fmt: skip

    printed = " ".join(run.stdout.split())
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
    home = str(tiny.folder / "home")
    places = {"ROWMILL_CONFIGS": str(tiny.path.parent), "ROWMILL_STORE": tiny.store, "DAGSTER_HOME": home}

    nights = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | places, capture_output=True, text=True, check=True
    )

    assert [line for line in nights.stdout.splitlines() if line.startswith("written")] == ["written 1", "written 1"]
