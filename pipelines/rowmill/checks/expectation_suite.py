"""A stage's thresholds as a suite of Great Expectations over its facts, and a page that shows expectations and results.

`rowmill verify` runs the suites of all stages, and reports each check on which the library and the saved result differ.
Two traps of the library are avoided: its range expectations pass on null, NaN and empty columns, so only finite facts
are tested; and an expectation that raised is reported as unsuccessful without a value, so it counts as a separate kind
of difference. Rejected: the library's own pages, each of which loads fourteen external resources and omits the observed
value if it is a NumPy number.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from rowmill.checks.catalog import format_measure
from rowmill.checks.gates import Threshold
from rowmill.checks.judge import CheckResult
from rowmill.core import arrays, html
from rowmill.core.html import escape_text
from rowmill.core.storage import Store
from rowmill.core.telemetry import silence_libraries
from rowmill.schema.checks import Severity
from rowmill.schema.manifest import Manifest, StageKey

_GX_SEVERITIES: Mapping[Severity, str] = {"error": "critical", "warn": "warning"}
"""The library's severity for each of ours."""


def find_disagreements(results: Sequence[CheckResult], thresholds: Sequence[Threshold]) -> Iterator[str]:
    """Yield a message for each result that Great Expectations contradicts.

    `results` and `thresholds` are parallel sequences of one stage.
    """
    measured = [
        (threshold, result.value)
        for result, threshold in zip(results, thresholds, strict=True)
        if result.value is not None and not result.note
    ]
    if not measured:
        return
    answers = run_expectation_suite(measured)
    names = {threshold.check for threshold, _ in measured}
    for result in results:
        answer = answers.get(result.check)
        if result.check in names and answer != result.passed:
            outcome = "raised an error" if answer is None else "passes" if answer else "fails"
            yield (
                f"{'/'.join(result.key)}: {result.check} {result.value:g}: Great Expectations {outcome}, the saved "
                f"result {'passes' if result.passed else 'fails'}; both must agree; report this with the recipe's gates"
            )


def run_expectation_suite(measured: Sequence[tuple[Threshold, float]]) -> dict[str, bool]:
    """Return which checks pass for their values, by one suite over a one-row frame; checks that raised are omitted."""
    silence_libraries()
    import great_expectations as gx
    import great_expectations.expectations as gxe
    import pandas as pd

    # The library needs a context before a suite can be made.
    batch = _open_facts_batch()
    suite: Any = gx.ExpectationSuite(name="checks")
    for threshold, _ in measured:
        kind, arguments = threshold.rule
        expectation = getattr(gxe, "".join(word.capitalize() for word in kind.split("_")))
        severity = _GX_SEVERITIES[threshold.severity]
        suite.add_expectation(expectation(meta={"check": threshold.check}, severity=severity, **arguments))
    frame = pd.DataFrame([{str(threshold.rule[1]["column"]): value for threshold, value in measured}])
    result: Any = batch.get_batch({"dataframe": frame}).validate(suite)
    answers: dict[str, bool] = {}
    for outcome in result.results:
        # The library's exception record is flat, or one mapping per metric.
        records = [outcome.exception_info, *outcome.exception_info.values()]
        if not any(isinstance(record, dict) and record.get("raised_exception") for record in records):
            answers[outcome.expectation_config.meta["check"]] = bool(outcome.success)
    return answers


@cache
def _open_facts_batch() -> Any:
    """Return the library's handle on a frame of facts; cached, because making it takes a third of a second."""
    import great_expectations as gx

    with warnings.catch_warnings():
        # Before version 1.24 it drops a temporary folder without removing it first.
        warnings.simplefilter("ignore", ResourceWarning)
        context: Any = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    source: Any = context.data_sources.add_pandas("facts")
    return source.add_dataframe_asset("facts").add_batch_definition_whole_dataframe("all")


# ── The page ──


def expectations_page_path(key: StageKey) -> str:
    """Return the path of a stage's page, relative to the storage root; `#<check>` links to a check."""
    return f"reports/{key[0]}/expectations/{'-'.join(key[1:])}.html"


def write_expectations_page(
    store: Store, manifest: Manifest, thresholds: Sequence[Threshold], results: Sequence[CheckResult]
) -> None:
    """Write a stage's page, unless it is unchanged."""
    path, content = (
        expectations_page_path(manifest.key),
        render_expectations_page(manifest, thresholds, results).encode(),
    )
    if not store.exists(path) or store.read(path) != content:
        store.write(path, content)


def render_expectations_page(
    manifest: Manifest, thresholds: Sequence[Threshold], results: Sequence[CheckResult]
) -> str:
    """Return a stage's page: each of its thresholds with the result on this version, if there is one."""
    judged = {result.check: result for result in results}
    outcomes = [result.outcome for result in judged.values()]
    counts = f"{len(judged)} of {len(thresholds)} judged, {outcomes.count('failed')} failed"
    if "not_applicable" in outcomes:
        counts += f", {outcomes.count('not_applicable')} not applicable"
    about = (
        f'<p class="dim">{escape_text(manifest.key[0])} · suite of {len(thresholds)} expectations over the facts · '
        f"{counts} · version <code>{escape_text(manifest.version)}</code> of "
        f"{escape_text(manifest.built_at[:19])} UTC</p>"
    )
    body = [f"<h1>{escape_text('/'.join(manifest.key[1:]))}</h1>", about]
    for threshold in thresholds:
        result, (kind, arguments) = judged.get(threshold.check), threshold.rule
        name, what = escape_text(threshold.check), threshold.what[0].upper() + threshold.what[1:]
        shown = ", ".join(f"{argument}={value!r}" for argument, value in arguments.items())
        lines: list[tuple[str, str]] = [("severity", threshold.severity)]
        if threshold.applies_to:
            lines.append(("applies to", threshold.applies_to))
        if result is not None and result.outcome == "not_applicable":
            lines.append(("observed", "not applicable"))
        elif result is not None:
            # This page shows the rules as Great Expectations has them, so the numbers are those of the facts.
            observed = "not measured" if result.value is None else f"{result.value:.9g}"
            lines += [("observed", observed), ("success", "yes" if result.passed else "no")]
            lines += [("note", result.note)] if result.note else []
            if not result.passed:
                lines.append(("waived", result.waiver) if result.waiver else ("what to do", result.remedy))
            lines += [("cause", cause) for cause in result.causes]
            lines += [("samples", ", ".join(result.samples))] if result.samples and not result.causes else []
        if threshold.waiver_bound is not None:
            bound = format_measure(threshold.fact, threshold.waiver_bound)
            lines.append(("waiver", f"up to {bound}: {threshold.waiver_reason}"))
        body += [
            f'<h2 id="{name}">{render_result_mark(result)} {name}</h2>',
            f"<p>{escape_text(what)}; wanted {escape_text(threshold.wanted)}.</p>",
            f"<p><code>{escape_text(kind)}({escape_text(shown)})</code></p>",
            html.render_table(["", ""], lines),
        ]
    return html.render_page(f"{'/'.join(manifest.key)}: expectations", body)


def render_result_mark(result: CheckResult | None) -> str:
    """Return the mark of a result: passed, failed and waived or warned, failed and blocking, or no result."""
    if result is None or result.outcome == "not_applicable":
        return f'<span class="dim">{arrays.NO_NUMBER}</span>'
    if result.passed:
        return '<span class="good">✓</span>'
    return '<span class="bad">✗</span>' if result.blocking else '<span class="look">!</span>'
