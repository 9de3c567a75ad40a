"""Counts of stages are typed: checks read declared counts, and an output has exactly those."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rowmill.checks.catalog import CHECKS
from rowmill.checks.cross_stage import CROSS_STAGE_FACTS
from rowmill.schema.checks import Check
from rowmill.schema.counts import Counts
from rowmill.stages import catalog
from rowmill.stages.base import StageDeclaration
from tests.support.recipes import Workspace, chat
from tests.support.tables import as_csv, grouped, purchases, records


def names_of(stage: StageDeclaration) -> set[str]:
    """Return what outputs of a stage may have by name: its counts, what follows from them, and its checks."""
    checks = {check.name for check in CHECKS if stage.name in check.stages}
    beside = [kind for kind in Counts.CLASSES.values() if kind.__module__ == stage.counts.__module__]
    return {*(name for kind in beside for name in list_names(kind)), *checks}


@pytest.mark.parametrize("stage", catalog.STAGES, ids=lambda stage: stage.name)
def test_compared_numbers_are_of_counts_beside_those_of_their_stage(stage: StageDeclaration) -> None:
    for one in stage.compared:
        assert one.of.__module__ == stage.counts.__module__
        assert isinstance(one.value(one.of()), int | float), one.name


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_check_is_named_after_a_fact_of_each_of_its_stages(check: Check) -> None:
    stages = [catalog.find_stage(name) for name in check.stages]

    assert stages
    for stage in stages:
        if check.name not in CROSS_STAGE_FACTS:
            assert check.name in names_of(stage), stage.name


def test_no_name_of_a_count_means_two_numbers_of_an_output() -> None:
    by_module: dict[str, list[str]] = {}
    for kind in Counts.CLASSES.values():
        by_module.setdefault(kind.__module__, []).extend(list_names(kind))
    checks = [check.name for check in CHECKS]

    for module, names in by_module.items():
        assert [name for name, times in Counter(names + checks).items() if times > 1] == [], module


def list_names(kind: type[Counts]) -> list[str]:
    return [*kind().to_json(), *kind().derive()]


@pytest.mark.slow
def test_output_has_exactly_the_declared_facts(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    exports: list[Mapping[str, Any]] = [{"kind": "hf", "name": "hf", "split": "train"}]
    built = workspace.recipe(
        {
            "chats": workspace.dataset("chats.jsonl", [chat(i) for i in range(20)]),
            "table": workspace.dataset("table.csv", as_csv(purchases(60)), records(**grouped())),
        },
        seq_len=1024,
        exports=exports,
    ).build()

    found = [report.manifest for report, _ in built.steps.values()]

    assert {stage.name for stage in catalog.STAGES if not stage.on_demand} == {made.stage for made in found}
    for made in found:
        stage = catalog.find_stage(made.stage)
        assert stage.stats_inputs.rows(made) is not None, "its number of rows is counted"
        assert stage.counts.__name__ in made.counts
        names = [name for own in made.counts.values() for name in own]
        assert len(names) == len({*names, *made.values}) - len(made.values), made.key

    rows, examples = (built.facts("table", stage) for stage in ("canonical_rows", "tokenized_examples"))

    assert not {"messages", "tool_calls", "notes"} & set(rows), "a number that is 0 in every table says nothing"
    assert not {"tool_tokens", "boundary_tokens", "template_warnings"} & set(examples)
    assert {"columns", "table_contract"} <= set(rows)
