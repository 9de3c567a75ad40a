"""The recipes in `configs/examples` are what the how-tos say: each loads, builds and gives what its page promises.

What belongs here: one build per recipe, on data of the repository. What does not: the rooms' own laws.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelines import build, recipe
from pipelines.build import Project
from pipelines.manifest import current

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "configs/examples/rows"


class Example:
    """A recipe of the folder, built as far as its tokens."""

    def __init__(self, project: Project) -> None:
        self.project = project

    def rows_of(self, dataset: str, stage: str, file: str) -> list[dict[str, Any]]:
        made = current(self.project.store, (self.project.recipe.name, dataset, stage))
        assert made is not None
        return [row for one in made.files(file) for row in self.project.store.table(one.path).to_pylist()]

    def examples(self, dataset: str) -> list[dict[str, Any]]:
        return self.rows_of(dataset, "tokenized_examples", "examples")

    def rejects(self, dataset: str) -> Counter[str]:
        stages = ("canonical_rows", "tokenized_examples")
        return Counter(row["reason"] for stage in stages for row in self.rows_of(dataset, stage, "rejects"))


@pytest.fixture
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Example:
    """Build the recipe that the test is named for."""
    marker = request.node.get_closest_marker("example")
    project = build.open_project(FOLDER / f"{marker.args[0]}.yaml", str(tmp_path))
    build.build(project, only=("raw_dataset", "canonical_rows", "tokenized_examples"))
    return Example(project)


def test_examples_are_no_part_of_the_demo() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")}.isdisjoint(path.stem for path in recipe.find(ROOT / "configs"))


def test_every_example_has_a_test_and_a_page() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/how-to").glob("*.md"))

    for path in FOLDER.glob("*.yaml"):
        assert f'mark.example("{path.stem}")' in here
        assert path.stem in pages or path.stem.startswith("own-")


@pytest.mark.example("own-rows")
def test_own_rows_are_conversations_and_pairs(built: Example) -> None:
    rows = built.rows_of("exercises", "canonical_rows", "rows")

    assert {row["kind"] for row in rows} == {"conversation", "pair"}
    assert {row["domain"] for row in rows} == {"quoted", "bare", "pairs"}
    assert built.rejects("exercises").keys() <= {"skipped_by_format", "duplicate", "overlong"}
    assert len(built.examples("exercises")) == len(rows)


@pytest.mark.example("own-tokens")
def test_own_tokens_train_the_first_words(built: Example) -> None:
    for one in built.examples("documents"):
        assert one["loss_mask"] == [0 < i < 64 for i in range(one["tokens"])]
    assert len(built.examples("documents")) > 50
