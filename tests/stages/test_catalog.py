"""A stage is its module and its line in the catalog: a new one is planned, built, shown and counted like the others."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from rowmill.checks.catalog import CHECKS, CHECKS_BY_NAME
from rowmill.checks.cross_stage import SHRINKING_COUNTS
from rowmill.core import stage_names, storage
from rowmill.core.errors import IntegrityError
from rowmill.sources import GenerationStage
from rowmill.stages import catalog, truncation_stats
from rowmill.stages.base import StageDeclaration
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.packed_shards import stage as packed_shards
from rowmill.stats import SCHEMAS
from tests.support.extended_engine import ExtendedEngine
from tests.support.recipes import Workspace, chat

ROOT = Path(__file__).resolve().parents[2]

NEW_STAGE = '''
"""How many rows a dataset has: a stage that exists in this test only."""

from dataclasses import dataclass

from rowmill.core.arrays import format_count
from rowmill.schema.facts import CanonicalRowsFacts, read_facts
from rowmill.stages.base import ComparedFact, PreparedStage, StageContext, StageDeclaration, StageOutput
from rowmill.stats import StatsInputs, count_rows_by_fact


@dataclass(frozen=True)
class CensusFacts:
    seen: int
    datasets: int


def make(work: StageContext) -> StageOutput:
    rows = read_facts(CanonicalRowsFacts, work.input("canonical_rows").facts)
    return StageOutput(CensusFacts(seen=rows.kept, datasets=1))


STAGE = StageDeclaration(
    name="row_census",
    facts=CensusFacts,
    description="The rows of a dataset, counted once more.",
    identity=lambda recipe, name: {"versions": [1]},
    prepare=lambda work: PreparedStage((), lambda: make(work)),
    inputs=("canonical_rows",),
    stats_inputs=StatsInputs(count_rows_by_fact("seen", "row")),
    summarize=lambda facts, rows: (rows, format_count(facts.datasets, "dataset")),
    compared=(ComparedFact("rows seen", "seen"),),
)
'''

QUESTIONS = """
graph = load_asset_graph()
nodes = {"/".join(key.path): graph.get(key) for key in graph.get_all_asset_keys()}
found["builds"] = query("SELECT stage, rows, parts FROM builds")
found["gates"] = [
    "/".join(key) for step in steps.plan_steps(project) if step.name == "gpu_partitions" for key in step.gates
]
found["assets"] = {
    name: [node.description, sorted("/".join(key.path) for key in node.parent_keys)] for name, node in nodes.items()
}
"""


@pytest.mark.campaign
def test_stage_in_one_file_is_planned_built_shown_and_counted(tmp_path: Path) -> None:
    engine = ExtendedEngine(tmp_path / "engine")
    engine.write("pipelines/rowmill/stages/row_census.py", NEW_STAGE)
    listed = "pipelines/rowmill/stages/catalog.py"
    engine.replace(listed, "    canonical_rows.STAGE,\n", "    canonical_rows.STAGE,\n    row_census.STAGE,\n")
    engine.replace(listed, "parsed_records, raw_dataset\n", "parsed_records, raw_dataset, row_census\n")
    workspace = Workspace(tmp_path / "project").one("rows.jsonl", [chat(i) for i in range(12)])

    commands = (("plan",), ("build",), ("verify", "--all"))
    made = engine.build(workspace.config, tmp_path / "built", QUESTIONS, commands)

    for command in ("plan", "build", "verify"):
        assert "row_census" in made[command], command
    assert "12 rows · 1 dataset" in made["build"]
    assert ["row_census", 12, 0] in made["builds"]
    assert "mini/rows/row_census" in made["gates"], "nothing reaches a rank past a failed check of any stage"
    description, parents = made["assets"]["mini/rows.row_census"]
    assert parents == ["mini/rows.canonical_rows"]
    assert "counted once more" in description


@pytest.mark.parametrize("stage", catalog.STAGES, ids=lambda stage: stage.name)
def test_stage_names_existing_earlier_stages_and_tables(stage: StageDeclaration) -> None:
    earlier = [one.name for one in catalog.STAGES[: catalog.STAGES.index(stage)]]

    assert stage.name not in earlier
    assert set(stage.inputs) | set(stage.gates) <= set(earlier)
    assert not set(stage.inputs) & set(stage.gates), "what is read is a gate already"
    assert {*stage.stats_inputs.files.values(), *stage.stats_inputs.tables} <= set(SCHEMAS)
    assert stage.description.endswith(".")


def test_names_of_stages_in_lower_layers_are_those_of_the_stages() -> None:
    names = {stage.name for stage in catalog.STAGES}
    of_recipe = {stage.name for stage in catalog.STAGES if stage.scope != "dataset"}

    assert of_recipe <= storage.RESERVED_NAMES, "no dataset may have the name of such a stage: both are folders"
    assert {stage for check in CHECKS for stage in check.stages} <= names
    of_records = {stage.name for stage in catalog.STAGES if stage.on_demand and "records" in stage.stats_inputs.files}
    assert set(get_args(GenerationStage)) == of_records

    names = {value for name, value in vars(stage_names).items() if name.isupper()}

    assert names == {stage.name for stage in catalog.STAGES}

    assert set(SHRINKING_COUNTS) == set(CHECKS_BY_NAME["shrunk"].stages)


def test_stages_up_to_a_stage_are_its_ancestors_and_an_unknown_one_is_an_error() -> None:
    assert catalog.list_stages_up_to(canonical_rows.STAGE) == ("raw_dataset", "canonical_rows")
    everything = tuple(stage.name for stage in catalog.list_stages("dataset"))
    assert catalog.list_stages_up_to(truncation_stats.STAGE) == everything[:-1]
    assert catalog.list_stages_up_to(packed_shards.STAGE) == everything

    with pytest.raises(IntegrityError, match=r"row_census: no such stage; this version of rowmill has raw_dataset, "):
        catalog.find_stage("row_census")


def spelled_names(path: Path) -> Iterator[str]:
    """Yield the stages that a module names in string literals, alone or in a path; docstrings are exempt."""
    names = {stage.name for stage in catalog.STAGES}
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from names.intersection(node.value.split("/"))


SPELLED = {
    "core/stage_names.py": 11,
    # The type of an option: `Literal` accepts no constants.
    "sources/generated.py": 2,
}
"""The modules that spell names of stages, and how often."""


@pytest.mark.slow
def test_stage_is_named_by_its_constant() -> None:
    paths = [path for package in ("pipelines", "assets") for path in (ROOT / package).rglob("*.py")]
    found = Counter("/".join(path.relative_to(ROOT).parts[2:]) for path in paths for _ in spelled_names(path))

    assert found == SPELLED, "import the name of the stage from core/stage_names.py, or ask its STAGE"
