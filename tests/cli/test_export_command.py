"""`rowmill export` as a user types it, and what a killed export leaves behind."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rowmill.cli.error_boundary import ExitStatus
from rowmill.core.errors import IntegrityError
from rowmill.exports import open_export
from tests.end_to_end.test_robustness import killed
from tests.exports.test_exports import digests, with_exports
from tests.support.cli_project import RECIPE, CliProject
from tests.support.recipes import Workspace, flip_bit
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow
EXPORTS: list[dict[str, Any]] = [
    {"kind": "hf", "name": "rows"},
    {"kind": "axolotl", "name": "stanza", "sequence_len": 128},
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> CliProject:
    """Return a project whose partitions and exports are built, and that no test changes."""
    project = CliProject(tmp_path_factory.mktemp("built")).write(exports=EXPORTS)
    project.run("build")
    return project


@pytest.fixture
def copied(built: CliProject, tmp_path: Path) -> CliProject:
    shutil.copytree(built.folder, tmp_path / "copied")
    return CliProject(tmp_path / "copied")


def test_build_makes_exports_last_and_export_says_how_to_point_each_trainer_at_them(copied: CliProject) -> None:
    out = copied.run("build").out
    assert re.search(r"= exports/rows|✓ exports/rows +reused", out)
    assert out.index("gpu_partitions") < out.index("exports/rows") < out.index("exports/stanza")
    assert "rows: " in out
    out = copied.run("export").out
    assert "load_dataset" in out
    stanza = out[out.index("datasets:") :]
    [path] = re.findall(r"- path: (\S+)", stanza)
    assert (Path(path) / "part-00000.parquet").is_file()
    assert "sequence_len: 128" in stanza
    assert "sample_packing: true" in stanza


def test_export_by_name_leaves_the_others(copied: CliProject) -> None:
    copied.write_recipe(exports=[*EXPORTS, {"kind": "tinker", "name": "datums"}])
    out = copied.run("export", "--name", "datums").out
    assert "exports/datums" in out
    assert "rows" not in out.replace("rowmill", "")


def test_export_to_a_folder_is_a_copy_that_stays(copied: CliProject, tmp_path: Path) -> None:
    copied.run("export", "--name", "rows", "--to", str(tmp_path / "mine"))
    shutil.rmtree(copied.folder / ".rowmill")
    assert open_export(tmp_path / "mine", verify=True).count("tokens") > 0


def test_the_only_export_is_copied_without_its_name(copied: CliProject, tmp_path: Path) -> None:
    copied.write_recipe(exports=EXPORTS[:1]).run("export", "--to", str(tmp_path / "mine"))
    assert open_export(tmp_path / "mine").count("tokens") > 0


@pytest.mark.parametrize(
    ("exports", "options", "said"),
    [
        (EXPORTS, ["--name", "row"], "did you mean rows?"),
        (EXPORTS, ["--to", "somewhere"], "these are 2: rows, stanza; choose one with --name"),
        ([], [], "add one under exports: in the recipe"),
    ],
    ids=["unknown name", "copy of several exports", "recipe without exports"],
)
def test_export_that_cannot_be_is_refused_with_what_to_do(
    copied: CliProject, exports: list[dict[str, Any]], options: list[str], said: str
) -> None:
    assert said in copied.write_recipe(exports=exports).run("export", *options, status=ExitStatus.INVALID).err


def test_export_after_a_failed_check_is_blocked(copied: CliProject) -> None:
    copied.write_recipe(
        exports=[{**EXPORTS[0], "shard_sequences": 3}],
        gates=RECIPE["gates"] | {"fill": {"at_least": 1, "severity": "error"}},
    )
    copied.run("verify", status=ExitStatus.GATE_CLOSED)
    said = copied.run("export", status=ExitStatus.GATE_CLOSED).err
    assert "packed_shards: fill: " in said
    assert "wanted at least 1" in said


def test_export_before_anything_is_built_says_so(tmp_path: Path) -> None:
    said = CliProject(tmp_path).write(exports=EXPORTS).run("export", status=ExitStatus.INVALID).err
    assert re.search(r"^small/exports/\w+: chats/raw_dataset, chats/canonical_rows, .* are not built; ", said)
    assert "run `rowmill build small --until exports/" in said


def test_damaged_export_is_found_by_verify_and_made_again_before_it_is_copied(
    copied: CliProject, tmp_path: Path
) -> None:
    [part] = (copied.folder / ".rowmill/small/exports/rows").rglob("part-00000.parquet")
    whole = part.read_bytes()
    flip_bit(part)
    damaged = copied.run("verify", "--deep", status=ExitStatus.DAMAGED)
    assert "part-00000.parquet: digest" in damaged.out.replace("\n", "")
    part.write_bytes(bytes(len(whole)))
    copied.run("export", "--name", "rows", "--to", str(tmp_path / "left"))
    assert part.read_bytes() == whole
    assert open_export(tmp_path / "left", verify=True).count("sequences") > 0


def test_collecting_keeps_current_exports_and_removes_older_ones(copied: CliProject) -> None:
    copied.write_recipe(exports=[{**EXPORTS[0], "shard_sequences": 3}, EXPORTS[1]]).run("export", "--name", "rows")
    parts = copied.folder / ".rowmill/small/exports/rows/parts"
    assert len(list(parts.iterdir())) == 2

    copied.run("gc", "--keep", "1")
    [left] = parts.iterdir()
    assert open_export(left / "rows", verify=True).count("sequences") > 0


# ── kill -9 ──
@pytest.mark.campaign
@pytest.mark.parametrize("moved", mark_all_but(["data/part-00001"], ["data/part-00001", "manifest.json"]))
def test_killed_export_leaves_nothing_that_a_reader_accepts_and_the_next_is_whole(tmp_path: Path, moved: str) -> None:
    workspace = with_exports(Workspace(tmp_path), {"rows": {"kind": "hf", "shard_sequences": 7}})

    assert killed(workspace, f"exports/rows/parts/.*/{moved}"), f"never got to {moved}"
    stage = workspace.store / "mini/exports/rows"
    assert not (stage / "pointer.json").exists()
    [left] = (stage / "parts").glob("*/rows")
    with pytest.raises(IntegrityError, match=r"no manifest\.json"):
        open_export(left)
    before = {name: digest for name, digest in digests(left).items() if not name.endswith(".tmp")}
    built = workspace.build()
    whole = digests(left)
    assert open_export(left, verify=True).count("segments") == built.manifest("exports", "rows").facts["segments"]
    assert before.items() <= whole.items()
    assert not [name for name in whole if name.endswith(".tmp")]
