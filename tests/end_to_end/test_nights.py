"""What a night may meet, through Dagster: a bad file, a full disk, a kill; yesterday's ranks stay readable in each."""

import gzip
import json
import re
import resource
import signal
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rowmill import materialize
from tests.support.recipes import CHAT, Workspace
from tests.support.recipes import chat as row
from tests.support.tiers import mark_all_but
from tests.support.tiny_project import RECIPE, Tiny, chat

pytestmark = pytest.mark.slow


@pytest.fixture
def tiny(tmp_path: Path, instance: dg.DagsterInstance) -> Tiny:
    return Tiny(tmp_path, instance).write()


def said(result: dg.ExecuteInProcessResult) -> str:
    return "\n".join(materialize.list_failures(result))


def test_bad_file_leaves_yesterday_readable_says_which_and_the_next_night_is_whole(tiny: Tiny) -> None:
    tiny.run()
    yesterday = tiny.sequences()
    packed = gzip.compress(b"".join(json.dumps(chat(i)).encode() + b"\n" for i in range(1000, 1200)))
    new = tiny.folder / "data" / "chats-2.jsonl.gz"
    new.write_bytes(packed[: len(packed) // 2])
    both = {"train_urls": ["data/chats.jsonl", "data/chats-2.jsonl.gz"]}
    chats = RECIPE["datasets"]["chats"] | {"source": both}
    tiny.write_recipe(datasets=RECIPE["datasets"] | {"chats": chats})
    bad = tiny.run()
    after_bad = tiny.sequences()
    new.write_bytes(packed)
    good = tiny.run()

    assert not bad.success
    assert re.search(r"tiny__chats_raw_dataset: .*chats-2\.jsonl\.gz", said(bad))
    assert "Traceback" not in said(bad)
    assert after_bad == yesterday
    assert good.success
    assert len(tiny.sequences()) > len(yesterday)


@pytest.mark.campaign
def test_full_disk_leaves_yesterday_readable_says_whose_and_is_made_up_for_once_there_is_room(tiny: Tiny) -> None:
    tiny.write(rows=600).run()
    yesterday = tiny.sequences()
    tiny.write(rows=700)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, hard))
    try:
        full = tiny.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    after_full = tiny.sequences()
    roomy = tiny.run()

    assert not full.success
    assert "no space left under" in said(full)
    assert "free space there" in said(full)
    assert after_full == yesterday
    assert roomy.success
    assert tiny.sequences() != yesterday


@pytest.mark.campaign
@pytest.mark.parametrize(
    "at", mark_all_but(["packed_shards/parts"], ["packed_shards/parts", "gpu_partitions/current.json"])
)
def test_night_that_is_killed_leaves_yesterday_readable_and_the_next_makes_up_for_it(tiny: Tiny, at: str) -> None:
    tiny.run()
    yesterday = tiny.sequences()
    tiny.append("chats", chat(1000))
    # Killed by itself when it is about to put a file of that place under its name.
    program = f"""
import os, signal, sys
def watch(event, arguments):
    if event == "os.rename" and {at!r} in str(arguments[1]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
from dagster_rowmill import materialize
materialize.main(["tiny"])
"""
    killed = tiny.start("-c", program)
    after_kill = tiny.sequences()
    next_night = tiny.run()

    assert killed.returncode == -signal.SIGKILL
    assert after_kill == yesterday
    assert next_night.success
    assert tiny.sequences() != yesterday


def test_night_without_changes_runs_no_check_and_imports_no_library_for_them(tiny: Tiny) -> None:
    tiny.run()
    program = """
import sys
from dagster_rowmill import materialize
assert materialize.main(["tiny"]) == 0
print([name for name in ("great_expectations", "transformers", "torch", "ray") if name in sys.modules])
"""
    quiet = tiny.start("-c", program)
    assert (quiet.returncode, quiet.stdout.split()[-1]) == (0, "[]"), quiet.stderr


@pytest.mark.campaign
def test_nights_of_thirty_datasets_write_little_about_what_changed_and_a_quiet_one_nothing(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    datasets: dict[str, dict[str, Any]] = {
        f"d{number}": {"source": {"train_urls": [f"data/{number}.jsonl"]}, "format": CHAT} for number in range(30)
    }
    sizes: list[int] = []
    for night in (0, 1, 2, 2):
        for number in range(30):
            workspace.write(f"{number}.jsonl", [row(100 * number + i) for i in range(20 + night)])
        workspace.recipe(datasets).build()
        kept = [path for name in ("profiles", "changes") for path in workspace.store.rglob(f"{name}/*.json")]
        sizes.append(sum(path.stat().st_size for path in kept))
    first, second, third, quiet = sizes
    assert 0 < first < second < third == quiet
    # Ten nights may write a megabyte a night.
    assert max(second - first, third - second) < 100_000
