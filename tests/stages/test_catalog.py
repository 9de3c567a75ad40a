"""A stage is its module and its line in the catalog; `tests/docs/test_extend_the_engine.py` builds with one more."""

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
from rowmill.stats.tables import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]


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
