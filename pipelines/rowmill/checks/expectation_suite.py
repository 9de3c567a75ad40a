"""A stage's thresholds as a Great Expectations suite over its facts, run in addition to our comparison.

`rowmill verify` runs the suites of all stages and reports each check on which the library and the saved result differ.
Two traps of the library are avoided: its range expectations pass on null, NaN and empty columns, so only finite facts
are tested; and an expectation that raised is reported as unsuccessful without a value, so it counts as a separate kind
of difference.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from rowmill.checks.catalog import Severity
from rowmill.checks.gates import Threshold
from rowmill.checks.judge import CheckResult

_GX_SEVERITIES: Mapping[Severity, str] = {"error": "critical", "warn": "warning"}
"""The library's severity for each of ours."""


def find_disagreements(results: Sequence[CheckResult], thresholds: Sequence[Threshold]) -> Iterator[str]:
    """Yield a message for each result that Great Expectations contradicts.

    `results` and `thresholds` are parallel sequences of one stage.
    """
    asked = [
        (threshold, result.value)
        for result, threshold in zip(results, thresholds, strict=True)
        if result.value is not None and not result.note
    ]
    if not asked:
        return
    answers = run_expectation_suite(asked)
    names = {threshold.check for threshold, _ in asked}
    for result in results:
        answer = answers.get(result.check)
        if result.check in names and answer != result.passed:
            outcome = "raised an error" if answer is None else "passes" if answer else "fails"
            yield (
                f"{'/'.join(result.key)}: {result.check} {result.value:g}: Great Expectations {outcome}, the saved "
                f"result {'passes' if result.passed else 'fails'}; both must agree; report this with the recipe's "
                "gates"
            )


def run_expectation_suite(asked: Sequence[tuple[Threshold, float]]) -> dict[str, bool]:
    """Return which checks pass for their values, by one suite over a one-row frame; checks that raised are omitted."""
    import great_expectations as gx
    import pandas as pd

    # The library needs a context before a suite can be made.
    batch = _open_facts_batch()
    suite: Any = gx.ExpectationSuite(name="checks")
    for threshold, _ in asked:
        suite.add_expectation(_make_expectation(threshold))
    frame = pd.DataFrame([{str(threshold.rule[1]["column"]): value for threshold, value in asked}])
    result: Any = batch.get_batch({"dataframe": frame}).validate(suite)
    return {
        one.expectation_config.meta["check"]: bool(one.success)
        for one in result.results
        if not _has_raised(one.exception_info)
    }


@cache
def _open_facts_batch() -> Any:
    """Return the library's handle on a frame of facts; cached, because making it takes a third of a second."""
    import great_expectations as gx

    context: Any = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    source: Any = context.data_sources.add_pandas("facts")
    return source.add_dataframe_asset("facts").add_batch_definition_whole_dataframe("all")


def _make_expectation(threshold: Threshold) -> Any:
    import great_expectations.expectations as gxe

    kind, arguments = threshold.rule
    expectation = getattr(gxe, "".join(word.capitalize() for word in kind.split("_")))
    return expectation(meta={"check": threshold.check}, severity=_GX_SEVERITIES[threshold.severity], **arguments)


def _has_raised(info: Mapping[str, Any]) -> bool:
    """Read the library's exception record, which is flat or one mapping per metric."""
    if "raised_exception" in info:
        return bool(info["raised_exception"])
    return any(bool(one.get("raised_exception")) for one in info.values() if isinstance(one, dict))
