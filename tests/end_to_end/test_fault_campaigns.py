"""Many random faults in a row, counted: flipped bits in every file of a store, and kills at every kind of rename.

CI runs a part of the trials; `make campaign` runs all of them and prints what each came to. Seeds are fixed, so a trial
that fails fails again.
"""

import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rowmill.build import steps
from rowmill.core.errors import IntegrityError
from rowmill.inspection import verify
from rowmill.reader import Reader
from rowmill.schema import manifest
from rowmill.stages.gpu_partitions import rank_names
from tests.end_to_end.test_damage import write
from tests.end_to_end.test_robustness import finished, killed, started
from tests.support.recipes import Workspace
from tests.support.shard_layouts import SHARD_LAYOUTS, write_layout
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow

FLIPS, KILLS = 130, 40
TODAY: tuple[dict[str, object], ...] = ({}, {"seq_len": 200}, {"partitions": {"world_size": 3}})
"""What a build after the damage may be asked for: nothing new, other tokens, other ranks."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a project that was built in peace; trials copy it."""
    workspace = write(Workspace(tmp_path_factory.mktemp("whole")))
    workspace.build()
    return workspace


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return the digests of all files after each of the later builds, made in an empty store."""
    return [contents(write(Workspace(tmp_path_factory.mktemp("clean")), **changes)) for changes in TODAY]


def contents(workspace: Workspace) -> dict[str, str]:
    """Build, and return the digest of every file that the outputs name, read from the disk."""
    return workspace.build().digests()


# ── Flipped bits ───────────────────────────────────────────────────────────────────────────────────
def kinds_of_files(store: Path) -> dict[str, list[Path]]:
    """Return all files of a store by kind: what differs in digests and numbers alone is one kind."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(one for one in store.rglob("*") if one.is_file() and one.stat().st_size):
        name = str(path.relative_to(store))
        kinds.setdefault(re.sub(r"[0-9a-f]{8,}|\d+", "#", name), []).append(path)
    return kinds


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def after_flip(
    workspace: Workspace, changes: dict[str, object], clean: dict[str, str], caplog: pytest.LogCaptureFixture
) -> str:
    """Build on a damaged store, set right what `verify` finds, and say when the damage was noticed."""
    caplog.clear()
    try:
        found = contents(write(workspace, **changes))
    except IntegrityError:
        when = "refused by the build"
    else:
        mended = any("made again" in record.getMessage() for record in caplog.records)
        when = "mended by the build" if mended else "harmless" if found == clean else "found by verify --deep"
    checked = verify.verify_recipe(workspace.project, deep=True)
    if when in ("refused by the build", "found by verify --deep"):
        assert any(one.damage for one in checked)
    verify.discard_damage(workspace.project, checked)
    assert contents(workspace) == clean
    assert not any(one.damage for one in verify.verify_recipe(workspace.project, deep=True))
    Reader(str(workspace.store), "mini", rank=0, world_size=len(_ranks(workspace)), verify=True)
    return when


def _ranks(workspace: Workspace) -> tuple[str, ...]:
    return rank_names(workspace.project.recipe.partitions.world_size)


def test_flipped_bit_anywhere_is_noticed_or_harmless_and_the_next_build_is_a_clean_one(
    whole: Workspace,
    clean: list[dict[str, str]],
    tmp_path: Path,
    trials: Callable[[int], int],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcomes: Counter[str] = Counter()
    # More than there are kinds of files.
    count = max(12, trials(FLIPS))
    for trial in range(count):
        chance = random.Random(f"flip {trial}")
        workspace = Workspace(tmp_path / f"{trial}")
        shutil.copytree(whole.folder, workspace.folder)
        kinds = kinds_of_files(workspace.store)
        # Every kind of file has its turn before any has its second.
        kind = sorted(kinds, key=lambda name: random.Random(f"order {name}").random())[trial % len(kinds)]
        flip(chance.choice(kinds[kind]), chance)
        today = trial % len(TODAY)
        outcomes[after_flip(workspace, TODAY[today], clean[today], caplog)] += 1
        shutil.rmtree(workspace.folder)
    with capsys.disabled():
        print(f"\n{count} flipped bits over {len(kinds_of_files(whole.store))} kinds of files: {dict(outcomes)}")

    # A campaign that notices nothing has flipped nothing that matters.
    assert outcomes["harmless"] < count


# ── Kills ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("layout", mark_all_but([None], [None, *SHARD_LAYOUTS]))
def test_build_killed_at_any_rename_is_finished_by_the_next_with_the_same_bytes(
    tmp_path: Path, layout: str | None, trials: Callable[[int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards of another layout are killed at renames of the stages that know it: shards, and ranks."""

    def write_project(name: str) -> Workspace:
        workspace = Workspace(tmp_path / name)
        return write(workspace) if layout is None else write_layout(workspace, layout)

    pattern = "" if layout is None else r"/(packed_shards|gpu_partitions)/"
    peace = write_project("peace")
    assert finished(started(peace, deaths=(pattern, 0))) == 0
    total = int(peace.config.with_name("renames").read_text(encoding="ascii"))
    expected = contents(peace)
    count = max(3, trials(KILLS))
    left: Counter[str] = Counter()
    for trial in range(count):
        workspace = write_project(f"{trial}")
        # Each other one is killed after the rename, which is before the next.
        at = 1 + trial * (total - 2) // (count - 1) + trial % 2
        assert killed(workspace, pattern, at), (trial, at)
        left["ranks"] += (workspace.store / "mini/gpu_partitions/current.json").exists()
        left["shards"] += bool(list(workspace.store.glob("mini/*/packed_shards/parts/*/part.json")))
        left["a temporary file"] += any(".tmp" in path.name for path in workspace.store.rglob("*"))
        project = workspace.project
        for step in steps.plan_steps(project):
            for made in manifest.list_versions(project.store, step.key):
                # If a manifest is there, all that it names is whole.
                manifest.verify_files(project.store, made)
        assert contents(workspace) == expected, (trial, at)
        batches = [*Reader(str(workspace.store), "mini", rank=0, world_size=2, as_torch=False, verify=True)]
        assert ("segment_parents" in batches[0]) == (layout == "trees")
        shutil.rmtree(workspace.folder)
    with capsys.disabled():
        print(f"\n{count} kills at {total} renames of {layout or 'all files'}: 0 wrong; left were {dict(left)}")
    assert 0 < left["shards"] < count
