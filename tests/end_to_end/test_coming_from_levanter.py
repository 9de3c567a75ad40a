"""The page for people who come from Levanter: each recipe that it links builds, and does what the page says."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import runner, steps
from rowmill.build.steps import Project
from rowmill.reader import Reader
from tests.support.recipes import current

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs/examples/levanter"
PAGE = ROOT / "docs/coming-from/levanter.md"
NAMES = ("text", "chat", "supervised", "mixture", "budget")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Project]:
    """Build every recipe of the page."""
    root = str(tmp_path_factory.mktemp("levanter"))
    projects = {name: steps.open_project(FOLDER / f"{name}.yaml", root) for name in NAMES}
    for project in projects.values():
        runner.build(project)
    return projects


def sequences(project: Project, dataset: str) -> dict[str, int]:
    return {row[1]: row[3] for row in current(project, dataset, "packed_shards").tables["splits"].rows}


def order_of(project: Project) -> list[dict[str, Any]]:
    file = current(project, "training_splits").parts[0].files["order"]
    return project.store.table(file).to_pylist()


def test_page_links_every_recipe() -> None:
    linked = set(
        re.findall(r"\]\(\.\./\.\./configs/examples/levanter/([a-z]+)\.yaml\)", PAGE.read_text(encoding="utf-8"))
    )

    assert linked == {path.stem for path in FOLDER.glob("*.yaml")} == {*NAMES}


@pytest.mark.slow
def test_texts_and_chats_are_cut_packed_and_shuffled(built: dict[str, Project]) -> None:
    project = built["text"]
    tokens = [row for part in current(project, "web", "packed_shards").parts if "shard" in part.files
              for row in project.store.table(part.files["shard"], ["tokens"]).column(0).to_pylist()]  # fmt: skip
    first = [row["sequence_id"] for row in order_of(project) if row["pass"] == 0 and not row["filler"]]

    assert set(tokens) == {256}
    assert sorted(first) == list(range(len(tokens)))
    # Dealing moves sequences inside a step of 8, which an era of 64 holds whole.
    assert all(place // 64 == item // 64 for place, item in enumerate(first))
    project = built["chat"]
    files = current(project, "dialogues", "packed_shards").files("shard")
    segments = [len(row["seq_lengths"]) for file in files for row in project.store.table(file).to_pylist()]
    reader = Reader(project.store.root, "chat", rank=0, world_size=1, as_torch=False)
    assert max(segments) <= 16
    assert current(project, "training_splits").facts["same_group"] == 0
    assert reader.tagged_eval_sets()[0][1] == ["dialogue", "dialogues"]


def test_held_out_sequences_stages_and_budgets_are_kept(built: dict[str, Project]) -> None:
    project = built["supervised"]
    files = current(project, "tasks", "packed_shards").files("shard")
    rows = [row for file in files for row in project.store.table(file, ["labels"]).to_pylist()]
    labels = {one for row in rows for one in row["labels"]}

    assert sequences(project, "tasks")["validation"] == 4
    assert 0 not in labels
    project = built["mixture"]
    order = order_of(project)
    counts = [Counter(row["dataset"] for row in order if (row["step"] < 20) is first) for first in (True, False)]
    web = {row["sequence_id"] for row in order if row["dataset"] == 0}
    assert counts == [Counter({0: 144, 1: 16}), Counter({0: 128, 1: 192})]
    assert len(web) == 6 * 8
    reader = Reader(project.store.root, "mixture", rank=0, world_size=4, as_torch=False)
    assert [tags for _, tags in reader.tagged_eval_sets()][-1] == ["dialogue", "held"]
    project = built["budget"]
    order = order_of(project)
    for number, name in enumerate(project.recipe.datasets):
        shown = {row["sequence_id"] for row in order if row["dataset"] == number}
        assert len(shown) == sequences(project, name)["train"] * 100 // 1000
