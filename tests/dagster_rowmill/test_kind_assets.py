"""Kinds beside chats, pairs and tables in Dagster: every asset with its checks, gates and pages."""

from typing import Any

import dagster as dg
import pytest

from rowmill.checks import judge
from rowmill.reports import report_page
from tests.support.tiny_project import RECIPE, Tiny, built, refusals

pytestmark = pytest.mark.slow

STAGES = ("raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards")


def _ask(i: int) -> str:
    return f"What is {i} plus {i % 7}, said in words and with an example from the garden?"


def _prompt(i: int) -> dict[str, Any]:
    return {"prompt": _ask(i), "ground_truth": str(i + i % 7)}


def _tokens(i: int) -> dict[str, Any]:
    return {"prompt_ids": [40 + i, 50, 60], "response_ids": [70, 80 + i], "response_mask": [1, 1]}


def _preference(i: int) -> dict[str, Any]:
    sides = [f"{i} plus {i % 7} is {i + i % 7}.", f"I am not certain what {i} and {i % 7} add up to."]
    return {"prompt": _ask(i), "chosen": sides[i % 2], "rejected": sides[1 - i % 2], "margin": 0.5}


KINDS: dict[str, Any] = {"prompts": _prompt, "tokens": _tokens, "preference": _preference}
OWN_CHECKS = {
    "prompts": {"ground_truth_conflicts"},
    "tokens": {"unknown_ids", "same_tokenization"},
    "preference": {"swapped_pairs", "nonpositive_margins", "length_bias", "pair_intact", "prompt_identical"},
}


def _write(tiny: Tiny, kind: str, rows: list[dict[str, Any]], *, gates: Any = None, **groups: Any) -> Tiny:
    tiny.write_rows("rows", rows)
    dataset = {"source": {"train_urls": ["data/rows.jsonl"]}, "format": {"kind": kind}, **groups}
    return tiny.write_recipe(datasets={"rows": dataset}, gates={**RECIPE["gates"], **(gates or {})})


@pytest.mark.parametrize("kind", KINDS)
def test_every_asset_of_the_kind_is_made_checked_and_shown(tiny: Tiny, kind: str) -> None:
    rows = [KINDS[kind](i) for i in range(40)]
    result = _write(tiny, kind, rows, filters={"near_duplicates": {"threshold": 1}}).run()
    assert refusals(result) == {}
    ranks = {("tiny", "training_splits"), ("tiny", "gpu_partitions")}
    assert built(result) == {("tiny", "rows", stage) for stage in STAGES} | ranks
    found = {one.check_name: one for one in result.get_asset_check_evaluations()}
    assert OWN_CHECKS[kind] | {"near_duplicates"} <= set(found)
    failed = {name: one.severity for name, one in found.items() if not one.passed}
    assert set(failed.values()) <= {dg.AssetCheckSeverity.WARN}
    assert not set(failed) & (OWN_CHECKS[kind] - {"same_tokenization"})
    # Filters that are off have no check in Dagster, and one that does not apply everywhere else.
    assert not {"contaminated", "decontamination_items", "padding_share"} & set(found)
    made = tiny.current("rows", "canonical_rows")
    [step] = [one for one in tiny.project.graph.steps if one.key == made.key]
    outcomes = {one.check: one.outcome for one in judge.run_checks(tiny.project.store, made, step.thresholds)}
    assert outcomes["contaminated"] == "not_applicable"
    assert "contaminated" not in _read(tiny, "reports/tiny/expectations/rows-canonical_rows.html")
    assert f"rows/{STAGES[-1]}" in _read(tiny, report_page.report_path("tiny"))
    pages: dict[str, Any] = {stage: tiny.shown("rows", stage).metadata for stage in STAGES}
    assert pages["canonical_rows"]["kept"].value == 40
    assert pages["packed_shards"]["dagster/row_count"].value > 0


def _read(tiny: Tiny, path: str) -> str:
    return tiny.project.store.read(path).decode()


@pytest.mark.parametrize(
    ("kind", "rows", "gate", "stage"),
    [
        ("prompts", [_prompt(1), {**_prompt(1), "ground_truth": "9"}], "ground_truth_conflicts", "canonical_rows"),
        ("tokens", [{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}] * 9, "rejects", "canonical_rows"),
        ("preference", [{**_preference(1), "margin": -1}], "nonpositive_margins", "canonical_rows"),
    ],
)
def test_a_failed_check_of_the_kind_closes_its_gate(
    tiny: Tiny, kind: str, rows: list[dict[str, Any]], gate: str, stage: str
) -> None:
    others = [KINDS[kind](i) for i in range(2, 20)]
    result = _write(tiny, kind, [*rows, *others], gates={gate: {"at_most": 0, "severity": "error"}}).run()
    failed = [one for one in result.get_asset_check_evaluations() if not one.passed]
    assert (tiny.key("rows", stage), gate) in {(one.asset_key, one.check_name) for one in failed}
    assert ("tiny", "rows", "tokenized_examples") not in built(result)
