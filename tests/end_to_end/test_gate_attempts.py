"""Attempts to get refused rows to a trainer with the command line, the recipe and an editor on the store.

lenient    a fifth of the rows have an unknown role, which the recipe allowed then     published, replaced since
good       clean rows, default bounds                                                  what trainers have
today      a fifth of the rows have an unknown role                                    refused
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from rowmill.cli import main
from rowmill.core.errors import PipelineError
from rowmill.reader import Reader
from rowmill.schema import manifest
from tests.support.recipes import LENIENT, Workspace, chat, flip_bit
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow

STRICT: dict[str, Any] = {check: bound for check, bound in LENIENT.items() if check != "unknown_roles"}
STAGES = ("tokenized_examples", "truncation_stats", "packed_shards", "training_splits", "gpu_partitions")


def rows(odd: int) -> list[dict[str, Any]]:
    scenes = [{"role": "narrator", "content": f"Scene {i}."} for i in range(odd)]
    narrated = [{"messages": [scene, *chat(i)["messages"]]} for i, scene in enumerate(scenes)]
    return [*narrated, *(chat(100 + i) for i in range(40 - odd))]


def write(workspace: Workspace, odd: int, *, dataset: str = "chats", **changes: Any) -> Workspace:
    chats = workspace.dataset("rows.jsonl", rows(odd), template={"chat_template": "chatml"})
    export = {"kind": "hf", "name": "flat"}
    return workspace.recipe({dataset: chats}, **({"gates": STRICT, "exports": [export]} | changes))


def rowmill(workspace: Workspace, verb: str, *words: str) -> int:
    return main.main([verb, str(workspace.config), *words])


def only(*stages: str) -> list[str]:
    return [word for stage in stages for word in ("--only", stage)]


def published(workspace: Workspace) -> str:
    return str(json.loads((workspace.store / "mini/gpu_partitions/current.json").read_bytes())["version"])


class Besieged:
    """A project with the three builds of this page behind it; `lenient` and `good` are versions of its ranks."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        write(workspace, 8, gates=STRICT | {"unknown_roles": {"at_most": 0.25}})
        assert rowmill(workspace, "build") == 0
        self.lenient = published(workspace)
        assert rowmill(write(workspace, 0), "build") == 0
        self.good = published(workspace)
        assert rowmill(write(workspace, 8), "build") == 1

    def in_copy(self, folder: Path) -> "Besieged":
        shutil.copytree(self.workspace.folder, folder)
        copy = object.__new__(Besieged)
        copy.workspace, copy.lenient, copy.good = Workspace(folder), self.lenient, self.good
        return copy

    def files(self, pattern: str) -> list[Path]:
        found = sorted(self.workspace.store.glob(pattern))
        assert found
        return found


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Besieged:
    return Besieged(Workspace(tmp_path_factory.mktemp("besieged")))


# ── Attempts ───────────────────────────────────────────────────────────────────────────────────────
def _one_stage(stage: str) -> Callable[[Besieged], None]:
    def attempt(project: Besieged) -> None:
        rowmill(project.workspace, "build", *only(stage))

    return attempt


def _all_later_stages(project: Besieged) -> None:
    assert rowmill(project.workspace, "build", *only(*STAGES)) == 1


def _with_gates(gates: dict[str, Any], expected: int) -> Callable[[Besieged], None]:
    def attempt(project: Besieged) -> None:
        write(project.workspace, 8, gates=STRICT | gates)
        assert rowmill(project.workspace, "build") == expected
        assert rowmill(project.workspace, "build", *only(*STAGES)) == expected

    return attempt


def _waiver(**fields: Any) -> dict[str, Any]:
    return {"waivers": [{"check": "unknown_roles", "reason": "somebody looked at them"} | fields]}


def _use_the_lenient_ranks(project: Besieged) -> None:
    assert rowmill(project.workspace, "use", "gpu_partitions", project.lenient) == 1


def _use_the_lenient_ranks_of_a_renamed_dataset(project: Besieged) -> None:
    write(project.workspace, 0, dataset="talks")
    _use_the_lenient_ranks(project)


def _use_the_lenient_ranks_without_the_dataset(project: Besieged) -> None:
    others = project.workspace.dataset("others.jsonl", [chat(i) for i in range(900, 930)])
    project.workspace.recipe({"others": others}, gates=STRICT)
    _use_the_lenient_ranks(project)


def _use_lenient_inputs_and_go_on(project: Besieged) -> None:
    store = project.workspace.project.store
    ranks = manifest.load_version(store, ("mini", "gpu_partitions"), project.lenient)
    packed = ranks.inputs["mini/chats/packed_shards"]
    tokenized = manifest.load_version(store, ("mini", "chats", "packed_shards"), packed).inputs
    rowmill(project.workspace, "use", "chats/tokenized_examples", tokenized["mini/chats/tokenized_examples"])
    rowmill(project.workspace, "build", *only("truncation_stats", "packed_shards", "training_splits", "gpu_partitions"))
    rowmill(project.workspace, "use", "chats/packed_shards", packed)
    rowmill(project.workspace, "build", *only("training_splits", "gpu_partitions"))


def _delete_results(project: Besieged) -> None:
    shutil.rmtree(project.workspace.store / "mini/chats/canonical_rows/check_results")
    _all_later_stages(project)


def _edited(pattern: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Besieged], None]:
    """Return an attempt that edits JSON files of the store, and goes on as if nothing had happened."""

    def attempt(project: Besieged) -> None:
        for path in project.files(pattern):
            value = orjson.loads(path.read_bytes())
            change(value)
            path.write_bytes(orjson.dumps(value))
        rowmill(project.workspace, "build", *only(*STAGES))
        rowmill(project.workspace, "use", "gpu_partitions", project.lenient)

    return attempt


def _believe(saved: dict[str, Any]) -> None:
    for result in saved["results"].values():
        result |= {"passed": True, "blocking": False, "value": 0.0}


def _nothing_unknown(made: dict[str, Any]) -> None:
    made["values"]["unknown_roles"] = 0.0
    made["counts"]["MessageCounts"]["rows_with_unknown_roles"] = 0


def _pointer_to_lenient_rows(project: Besieged) -> None:
    store = project.workspace.store / "mini/chats"
    for stage in ("canonical_rows", "tokenized_examples", "packed_shards"):
        versions = sorted((store / stage / "versions").iterdir(), key=lambda path: path.stat().st_mtime)
        pointer = orjson.loads((store / stage / "pointer.json").read_bytes())
        pointer["version"] = versions[0].stem
        (store / stage / "pointer.json").write_bytes(orjson.dumps(pointer))
    rowmill(project.workspace, "build", *only("training_splits", "gpu_partitions"))


def _manifests_deleted(project: Besieged) -> None:
    shutil.rmtree(project.workspace.store / "mini/chats/canonical_rows/manifests")
    rowmill(project.workspace, "build", *only("canonical_rows"))
    rowmill(project.workspace, "build", *only(*STAGES))


def _history_deleted(project: Besieged) -> None:
    (project.workspace.store / "mini/gpu_partitions/published.json").unlink()
    shutil.rmtree(project.workspace.store / "stats")
    rowmill(project.workspace, "build", *only(*STAGES))


def _collected_and_discarded(project: Besieged) -> None:
    rowmill(project.workspace, "gc")
    rowmill(project.workspace, "verify", "--deep", "--discard")
    rowmill(project.workspace, "build", *only(*STAGES))


def _overridden(project: Besieged) -> None:
    for words in (("--gates.unknown_roles.at_most", "1"), ("--gates__unknown_roles__at_most=1",)):
        try:
            status = rowmill(project.workspace, "build", *words)
        except SystemExit as refusal:
            status = refusal.code
        assert status == 2


def _by_environment(project: Besieged) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROWMILL_GATES", "unknown_roles=1")
        patch.setenv("ROWMILL_GATES__UNKNOWN_ROLES__AT_MOST", "1")
        assert rowmill(project.workspace, "build") == 1


def _exported(project: Besieged) -> None:
    before = {path for path in project.workspace.store.rglob("*") if "exports" in path.parts}
    assert rowmill(project.workspace, "build", *only("exports/flat")) == 1
    assert {path for path in project.workspace.store.rglob("*") if "exports" in path.parts and path.is_file()} <= before


def _store_of_another_recipe(project: Besieged) -> None:
    """Put the lenient versions under another recipe's name, whose gates have never seen them."""
    other = project.workspace.folder / "configs/other.yaml"
    other.write_text(project.workspace.config.read_text(encoding="utf-8"), encoding="utf-8")
    shutil.copytree(project.workspace.store / "mini", project.workspace.store / "other")
    (project.workspace.store / "other/gpu_partitions/current.json").unlink()
    assert main.main(["use", str(other), "gpu_partitions", project.lenient]) != 0
    assert not (project.workspace.store / "other/gpu_partitions/current.json").exists()


def _lenient_recipe_beside(project: Besieged) -> None:
    """Let a recipe of the same name in another folder, with wide bounds, make the results."""
    beside = project.workspace.folder / "beside/configs/mini.yaml"
    beside.parent.mkdir(parents=True)
    values = yaml.safe_load(project.workspace.config.read_text(encoding="utf-8"))
    values["gates"] = LENIENT
    beside.write_text(yaml.safe_dump(values), encoding="utf-8")
    for name in ("data", "tokenizer"):
        shutil.copytree(project.workspace.folder / name, beside.parent.parent / name)
    main.main(["verify", str(beside), "--root", str(project.workspace.store)])
    _all_later_stages(project)


ATTEMPTS: dict[str, Callable[[Besieged], None]] = {
    **{f"only {stage}": _one_stage(stage) for stage in STAGES},
    "all later stages": _all_later_stages,
    "use the lenient ranks": _use_the_lenient_ranks,
    "use them, dataset renamed": _use_the_lenient_ranks_of_a_renamed_dataset,
    "use them, dataset removed": _use_the_lenient_ranks_without_the_dataset,
    "use lenient inputs": _use_lenient_inputs_and_go_on,
    "waiver of no check": _with_gates(_waiver(check="unknown_role", at_most=1), 2),
    "waiver too small": _with_gates(_waiver(at_most=0.1), 1),
    "waiver in the wrong direction": _with_gates(_waiver(at_least=0), 2),
    "waiver for another dataset": _with_gates(_waiver(dataset="talks", at_most=1), 2),
    "waiver without a reason": _with_gates(_waiver(at_most=1, reason=""), 2),
    "waiver of what guards correctness": _with_gates(_waiver(check="mask_verified", at_least=0), 2),
    "infinite bound": _with_gates({"unknown_roles": {"at_most": float("inf")}}, 2),
    "bound that is no number": _with_gates({"unknown_roles": {"at_most": float("nan")}}, 2),
    "bound in the wrong direction": _with_gates({"unknown_roles": {"at_least": 0}}, 2),
    "correctness only warns": _with_gates({"conservation": {"severity": "warn"}}, 2),
    "own rule in the check's place": _with_gates(
        {"expectations": {"canonical_rows": [{"name": "unknown_roles", "column": "kept", "min_value": 0}]}}, 2
    ),
    "results deleted": _delete_results,
    "results edited": _edited("mini/chats/canonical_rows/check_results/*.json", _believe),
    "versions edited": _edited("mini/chats/canonical_rows/versions/*.json", _nothing_unknown),
    "manifests edited": _edited("mini/chats/canonical_rows/manifests/*.json", _nothing_unknown),
    "pointers to lenient rows": _pointer_to_lenient_rows,
    "manifests deleted": _manifests_deleted,
    "history deleted": _history_deleted,
    "collected and discarded": _collected_and_discarded,
    "overridden": _overridden,
    "by environment": _by_environment,
    "exported": _exported,
    "store of another recipe": _store_of_another_recipe,
    "lenient recipe of the same name": _lenient_recipe_beside,
}


@pytest.mark.parametrize("attempt", mark_all_but(list(ATTEMPTS)[::3], ATTEMPTS))
def test_refused_rows_reach_no_trainer(besieged: Besieged, tmp_path: Path, attempt: str) -> None:
    project = besieged.in_copy(tmp_path / "copy")
    ATTEMPTS[attempt](project)
    assert published(project.workspace) == project.good
    Reader(str(project.workspace.store), "mini", rank=0, world_size=2, verify=True)


# ── What trainers open ─────────────────────────────────────────────────────────────────────────────
def _ranks_swapped(store: Path, current: dict[str, Any]) -> None:
    first, second = sorted(current["ranks"])
    current["ranks"][first], current["ranks"][second] = current["ranks"][second], current["ranks"][first]


def _version_edited(store: Path, current: dict[str, Any]) -> None:
    current["version"] = "0" * 32


def _other_rank_s_file(store: Path, current: dict[str, Any]) -> None:
    first, second = (store / current["ranks"][name]["files"][0][0] for name in sorted(current["ranks"]))
    first.write_bytes(second.read_bytes())


def _file_edited(store: Path, current: dict[str, Any]) -> None:
    flip_bit(store / current["ranks"][min(current["ranks"])]["files"][0][0])


@pytest.mark.parametrize("change", [_ranks_swapped, _version_edited, _other_rank_s_file, _file_edited])
def test_ranks_that_were_changed_by_hand_do_not_open(
    besieged: Besieged, tmp_path: Path, change: Callable[[Path, dict[str, Any]], None]
) -> None:
    workspace = besieged.in_copy(tmp_path / "copy").workspace
    path = workspace.store / "mini/gpu_partitions/current.json"
    current = json.loads(path.read_bytes())
    change(workspace.store, current)
    path.write_text(json.dumps(current), encoding="utf-8")

    with pytest.raises(PipelineError):
        Reader(str(workspace.store), "mini", rank=0, world_size=2, verify=True)
