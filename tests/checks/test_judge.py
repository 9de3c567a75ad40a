"""Checks, bounds, waivers, results, and the gate that a failure closes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from rowmill.checks import judge
from rowmill.checks.catalog import CHECKS
from rowmill.checks.cross_stage import CROSS_STAGE_FACTS
from rowmill.checks.gates import ExpectationType, Gates, Threshold, list_thresholds
from rowmill.checks.judge import CheckResult
from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError, GateError
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.checks import Check
from rowmill.schema.manifest import Manifest
from rowmill.schema.rows import RowKind

KEY = ("demo", "chats", "canonical_rows")
GOOD = {
    "nonempty": 10, "accounted": 0, "unknown_roles": 0.0, "group_size": 2, "rejects": 0.0, "duplicates": 0.0,
    "preference_data": 0.0, "unread_flags": 0,
    "unread_text": 0.0, "unpinned_boundaries": 0, "group_advice": 0, "interval_mismatch": 0,
    "decontamination_items": 9, "contaminated": 0.0, "near_duplicates": 0.0,
}  # fmt: skip
REASON = "looked at each of them"
ONLY_FOR: dict[str, RowKind] = {check.name: check.only_for for check in CHECKS if check.only_for is not None}


def _judged(store: Store, facts: dict[str, Any], **gates: Any) -> tuple[Manifest, dict[str, CheckResult]]:
    made = Manifest(
        key=KEY, stage="canonical_rows", fingerprint="f", code_version="1", inputs={}, parts=(), values=facts,
        samples={"unknown_roles": ("a:1", "a:2")},
    )  # fmt: skip
    saved = manifest.save_manifest(store, made)
    # Of the checks of one kind of rows those are judged whose facts are there.
    row_kinds: list[RowKind] = [ONLY_FOR[name] for name in facts if name in ONLY_FOR]
    options = validate_options(Gates, gates, "gates")
    thresholds = list_thresholds(options, "canonical_rows", "chats", row_kind=row_kinds[0] if row_kinds else None)
    thresholds = tuple(one for one in thresholds if one.check in facts or one.check not in ONLY_FOR)
    return saved, {result.check: result for result in judge.run_checks(store, saved, thresholds)}


def _terms(**gates: Any) -> tuple[Threshold, ...]:
    return list_thresholds(validate_options(Gates, gates, "gates"), "canonical_rows", "chats", row_kind=None)


def test_judge_good_facts_passes_every_check(tmp_path: Path) -> None:
    saved, results = _judged(Store(str(tmp_path)), GOOD)

    assert {check for check, result in results.items() if not result.passed} == {"shrunk"}
    assert results["shrunk"].outcome == "not_applicable"
    judge.require_passing_checks(Store(str(tmp_path)), saved, _terms())


@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if "canonical_rows" in check.stages and check.name not in CROSS_STAGE_FACTS],
    ids=lambda check: check.name,
)
def test_judge_fact_just_beyond_its_bound_fails_and_at_it_passes(tmp_path: Path, check: Check) -> None:
    beyond = check.bound + 0.001 if check.direction == "at_most" else check.bound - 0.001
    at = check.bound if check.warn_from is None else check.warn_from
    _, at_bound = _judged(Store(str(tmp_path / "at")), {**GOOD, check.name: at})
    _, failed = _judged(Store(str(tmp_path / "beyond")), {**GOOD, check.name: beyond})

    assert at_bound[check.name].passed
    assert not failed[check.name].passed
    assert failed[check.name].blocking is (check.severity == "error")


def test_checks_of_one_kind_of_rows_are_not_run_on_others() -> None:
    gates = validate_options(Gates, {}, "gates")
    of_chats, of_tables = (
        {one.check for one in list_thresholds(gates, "canonical_rows", "a", row_kind=row_kind)}
        for row_kind in ("conversation", "record")
    )

    assert of_tables - of_chats == {"table_contract", "table_drift", "type_mismatch", "ambiguous_times"}
    assert of_chats <= of_tables


def judged_order(store: Store, value: float, **gates: Any) -> CheckResult:
    made = Manifest(
        key=("demo", "training_splits"), stage="training_splits", fingerprint="f", code_version="1", inputs={},
        parts=(), values={"dropped_share": value},
    )  # fmt: skip
    thresholds = list_thresholds(validate_options(Gates, gates, "gates"), "training_splits", None, row_kind=None)
    own = [one for one in thresholds if one.check == "dropped_share"]
    return judge.run_checks(store, manifest.save_manifest(store, made), own)[0]


@pytest.mark.parametrize(
    ("value", "passed", "severity", "blocking"),
    [(0.01, True, "error", False), (0.011, False, "warn", False), (0.1, False, "warn", False),
     (0.101, False, "error", True)],
)  # fmt: skip
def test_judge_check_that_warns_first_blocks_only_beyond_its_bound(
    tmp_path: Path, value: float, passed: bool, severity: str, blocking: bool
) -> None:
    result = judged_order(Store(str(tmp_path)), value)

    assert (result.passed, result.blocking) == (passed, blocking)
    assert passed or result.severity == severity
    assert "wanted at most 1 %, and 10 % before it blocks" in result.sentence


def test_judge_check_that_warns_first_under_a_recipe_s_own_bound(tmp_path: Path) -> None:
    stricter = judged_order(Store(str(tmp_path / "stricter")), 0.006, dropped_share={"at_most": 0.005})
    looser = judged_order(Store(str(tmp_path / "looser")), 0.4, dropped_share={"at_most": 0.5})

    assert stricter.blocking
    assert (looser.passed, looser.blocking, looser.severity) == (False, False, "warn")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0", True])
def test_judge_fact_that_is_no_number_fails_as_not_measured(tmp_path: Path, value: object) -> None:
    _, results = _judged(Store(str(tmp_path)), {**GOOD, "unknown_roles": value})

    assert results["unknown_roles"].note == "not_measured"
    assert results["unknown_roles"].blocking


def test_fact_that_is_not_applicable_neither_passes_nor_fails_and_shuts_no_gate(tmp_path: Path) -> None:
    own = {"canonical_rows": [{"name": "roles", "column": "unknown_roles", "max_value": 0.5}]}
    store = Store(str(tmp_path))
    saved, results = _judged(store, {**GOOD, "unknown_roles": None}, expectations=own)
    for check in ("unknown_roles", "roles"):
        one = results[check]
        assert (one.outcome, one.passed, one.failed, one.blocking) == ("not_applicable", False, False, False)
    judge.require_passing_checks(store, saved, _terms(expectations=own))
    assert judge.run_checks(store, saved, _terms())[2] == results["unknown_roles"]


@pytest.mark.parametrize(
    "check", [check.name for check in CHECKS if "canonical_rows" in check.stages and not check.applies_to]
)
def test_check_for_all_data_cannot_be_called_not_applicable(tmp_path: Path, check: str) -> None:
    _, results = _judged(Store(str(tmp_path)), {**GOOD, check: None})

    assert (results[check].outcome, results[check].note) == ("failed", "not_measured")


def test_gate_stays_shut_after_a_failed_check_and_under_terms_never_judged(tmp_path: Path) -> None:
    saved, _ = _judged(Store(str(tmp_path)), {**GOOD, "unknown_roles": 0.2})

    with pytest.raises(GateError) as refusal:
        judge.require_passing_checks(Store(str(tmp_path)), saved, _terms())

    text = str(refusal.value)
    assert "demo/chats/canonical_rows: unknown_roles: 20 %" in text
    assert "wanted at most 1 %" in text
    assert "format.role_map" in text
    saved, _ = _judged(Store(str(tmp_path)), GOOD)
    with pytest.raises(GateError, match="unknown_roles was never judged"):
        judge.require_passing_checks(Store(str(tmp_path)), saved, _terms(unknown_roles={"at_most": 0.001}))


def test_waiver_covers_a_failure_of_its_dataset_within_its_bound(tmp_path: Path) -> None:
    waivers = [{"check": "unknown_roles", "dataset": "chats", "at_most": 0.3, "reason": REASON}]
    _, within = _judged(Store(str(tmp_path / "within")), {**GOOD, "unknown_roles": 0.2}, waivers=waivers)
    _, beyond = _judged(Store(str(tmp_path / "beyond")), {**GOOD, "unknown_roles": 0.4}, waivers=waivers)

    assert not within["unknown_roles"].passed
    assert not within["unknown_roles"].blocking
    assert within["unknown_roles"].waiver == REASON
    assert beyond["unknown_roles"].blocking
    other = [{"check": "unknown_roles", "dataset": "other", "at_most": 0.3, "reason": REASON}]
    _, results = _judged(Store(str(tmp_path / "other")), {**GOOD, "unknown_roles": 0.2}, waivers=other)
    assert results["unknown_roles"].blocking
    everywhere = {"check": "unknown_roles", "at_most": 0.05, "reason": REASON}
    here = everywhere | {"dataset": "chats", "at_most": 0.3}
    for waivers in ([everywhere, here], [here, everywhere]):
        _, results = _judged(Store(str(tmp_path)), {**GOOD, "unknown_roles": 0.2}, waivers=waivers)
        assert not results["unknown_roles"].blocking


@pytest.mark.parametrize("check", [check for check in CHECKS if not check.waivable], ids=lambda check: check.name)
def test_bound_of_a_check_that_guards_correctness_can_only_be_tightened_and_not_waived(check: Check) -> None:
    looser, stricter = (1, -1) if check.direction == "at_most" else (-1, 1)
    for bound in ({"severity": "warn"}, {check.direction: check.bound + looser}):
        with pytest.raises(ConfigError, match=f"{check.name} guards correctness"):
            validate_options(Gates, {check.name: bound}, "gates")
    assert validate_options(
        Gates, {check.name: {check.direction: check.bound + stricter, "severity": "error"}}, "gates"
    )
    with pytest.raises(ConfigError, match="cannot be waived"):
        validate_options(Gates, {"waivers": [{"check": check.name, "at_most": 1, "reason": REASON}]}, "gates")


def test_severity_warn_shows_and_does_not_block(tmp_path: Path) -> None:
    _, results = _judged(Store(str(tmp_path)), {**GOOD, "unknown_roles": 0.2}, unknown_roles={"severity": "warn"})

    assert not results["unknown_roles"].passed
    assert not results["unknown_roles"].blocking


def test_unknown_check_or_bound_of_the_wrong_direction_is_refused() -> None:
    with pytest.raises(ConfigError, match="rejects has an at_most bound"):
        validate_options(Gates, {"rejects": {"at_least": 1}}, "gates")
    with pytest.raises(ConfigError, match="did you mean unknown_roles"):
        validate_options(Gates, {"unknown_role": {"at_most": 1}}, "gates")


def test_own_expectation_is_judged_beside_the_checks(tmp_path: Path) -> None:
    own = {
        "canonical_rows": [
            {"name": "enough_rows", "column": "kept", "min_value": 100, "type": "expect_column_min_to_be_between"}
        ]
    }
    _, few = _judged(Store(str(tmp_path / "few")), {**GOOD, "kept": 10}, expectations=own)
    _, enough = _judged(Store(str(tmp_path / "enough")), {**GOOD, "kept": 100}, expectations=own)

    assert few["enough_rows"].blocking
    assert enough["enough_rows"].passed


def test_judge_twice_reads_the_saved_result(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    saved, first = _judged(store, {**GOOD, "unknown_roles": 0.2})
    again = judge.run_checks(store, saved, _terms())

    assert {result.check: result for result in again} == first
    assert first["unknown_roles"].samples == ("a:1", "a:2")


@pytest.mark.parametrize("bound", [0.123456789, 10_000_001, 1e-9])
def test_result_has_its_exact_bound_and_its_message_may_round(tmp_path: Path, bound: float) -> None:
    saved, results = _judged(Store(str(tmp_path)), GOOD, rejects={"at_most": bound})
    again = judge.run_checks(Store(str(tmp_path)), saved, _terms(rejects={"at_most": bound}))

    assert results["rejects"].bound == bound
    assert {one.check: one.bound for one in again}["rejects"] == bound


@pytest.mark.parametrize(
    ("rule", "why"),
    [({"name": "rows"}, "has no bound"), ({"name": "rejects", "max_value": 1}, "is the name of a check")],
)
def test_rule_without_bound_or_named_like_a_check_or_another_rule_is_refused(rule: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validate_options(Gates, {"expectations": {"canonical_rows": [{"column": "kept", **rule}]}}, "gates")
    rules = [{"name": "enough", "column": "kept", "min_value": value} for value in (1, 1000)]
    with pytest.raises(ConfigError, match=r"canonical_rows: 2 rules are called enough"):
        validate_options(Gates, {"expectations": {"canonical_rows": rules}}, "gates")
    validate_options(Gates, {"expectations": {"canonical_rows": rules[:1], "packed_shards": rules[1:]}}, "gates")


OWN = {"name": "enough", "column": "kept", "min_value": 1}


@pytest.mark.parametrize(
    ("stage", "rule", "words"),
    [
        (
            "canonical_rows",
            {"type": "expect_column_maximum_to_be_between"},
            r"\.0\.type: 'expect_column_maximum_to_be_between' is not .*; did you mean expect_column_max_to_be_between",
        ),
        (
            "canonical_rows",
            {"type": "expect_table_row_count_to_be_between"},
            r"'expect_table_row_count_to_be_between' is not an expectation",
        ),
        ("canonical_rows", {"type": "ColumnMapExpectation"}, r"; use min_value and max_value$"),
        ("canonical_rows", {"type": 3}, r"\.type: must be .*; got 3; choose one of them$"),
        ("canonical_rows", {"mostly": 1}, r"\.mostly: unknown key; allowed here: .*; delete it$"),
        ("canonical_rows", {"min_vale": 1}, r"\.min_vale: unknown key; .*; did you mean min_value\?$"),
        ("canonical_rows", {"column": None}, r"\.column: must be a string"),
        ("canonical_rows", {"max_value": 0}, r"enough: min_value 1 is above max_value 0, so that nothing passes"),
        ("canonical_row", {}, r"expectations\.canonical_row: no such stage; choose .*; did you mean canonical_rows\?$"),
        (
            "packed_shards",
            {"column": "unknown_roles"},
            r"rule enough tests unknown_roles, which this stage does not measure; canonical_rows does; move",
        ),
    ],
)
def test_own_expectation_that_cannot_be_judged_is_one_error_at_load(
    stage: str, rule: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        validate_options(Gates, {"expectations": {stage: [{**OWN, **rule}]}}, "gates")

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rule", [{}, *({"type": kind} for kind in get_args(ExpectationType))])
def test_rule_of_every_type_is_judged_by_its_bounds(tmp_path: Path, rule: dict[str, Any]) -> None:
    own = {"canonical_rows": [{"name": "rows", "column": "kept", "min_value": 10, "max_value": 20, **rule}]}
    passed = {
        kept: _judged(Store(str(tmp_path / str(kept))), {**GOOD, "kept": kept}, expectations=own)[1]["rows"].passed
        for kept in (9, 10, 20, 21)
    }

    assert passed == {9: False, 10: True, 20: True, 21: False}


@pytest.mark.slow
def test_recipe_with_a_rule_is_checked_without_the_library() -> None:
    code = (
        "import sys; from rowmill.recipe import recipe; "
        "recipe.parse_recipe({'tokenizer': 't', 'seq_len': 8, "
        "'datasets': {'a': {'source': {'train_urls': ['x.jsonl']}}}, "
        f"'gates': {{'expectations': {{'canonical_rows': [{OWN!r}]}}}}}}, name='r', where='r'); "
        "sys.exit('great_expectations' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0


def test_reworded_check_keeps_its_saved_result_and_shows_the_new_sentence(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    saved, _ = _judged(store, GOOD | {"unknown_roles": 0.5})
    [threshold] = [one for one in _terms() if one.check == "unknown_roles"]
    reworded = replace(threshold, what="rows that speak in new words", remedy="ask again", applies_to="other words")
    [found] = judge.load_check_results(store, saved, [reworded])

    assert (found.value, found.blocking) == (0.5, True)
    assert found.sentence == "unknown_roles: 50 % (rows that speak in new words); wanted at most 1 %; ask again"
    assert found.applies_to == "other words"


@pytest.mark.parametrize(
    "change",
    [
        {"check": "rejects"}, {"direction": "at_least"}, {"bound": 0.02}, {"severity": "warn"}, {"applies_to": ""},
        {"warn_from": 0.001}, {"waiver_bound": 0.5}, {"waiver_reason": REASON},
        {"expectation": {"type": "expect_column_max_to_be_between", "column": "a", "min_value": None, "max_value": 1}},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_value_that_decides_a_result_has_results_of_its_own(change: dict[str, Any]) -> None:
    [threshold] = [one for one in _terms() if one.check == "unknown_roles"]

    assert replace(threshold, **change).digest != threshold.digest


def test_results_name_the_samples_of_their_output_and_not_of_another_of_equal_content(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    first, _ = _judged(store, GOOD | {"unknown_roles": 0.5})
    other = manifest.save_manifest(store, replace(first, fingerprint="g", samples={"unknown_roles": ("b:7",)}))
    shown = {
        one.fingerprint: judge.run_checks(store, one, _terms(unknown_roles={"at_most": 1})) for one in (first, other)
    }
    loaded = judge.load_check_results(store, other, _terms(unknown_roles={"at_most": 1}))
    samples = {
        name: next(result.samples for result in results if result.check == "unknown_roles")
        for name, results in {**shown, "loaded": loaded}.items()
    }

    assert other.version == first.version
    assert samples == {"f": ("a:1", "a:2"), "g": ("b:7",), "loaded": ("b:7",)}
