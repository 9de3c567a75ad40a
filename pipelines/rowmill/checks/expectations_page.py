"""Renders a page per stage with the expectations on its facts and their results.

The library's own pages were tried: each loads fourteen external resources for style and scripts, and omits the observed
value if it is a NumPy number. These pages hold the same content (expectation, arguments, observed value, success) and
are self-contained.
"""

from collections.abc import Iterator, Mapping, Sequence

from rowmill.checks.catalog import format_measure
from rowmill.checks.gates import Threshold
from rowmill.checks.judge import CheckResult
from rowmill.core import arrays, html
from rowmill.core.html import escape_text
from rowmill.core.storage import Store
from rowmill.schema.manifest import Manifest, StageKey


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
    return html.render_page(f"{'/'.join(manifest.key)}: expectations", _render_body(manifest, thresholds, judged))


def _render_body(
    manifest: Manifest, thresholds: Sequence[Threshold], judged: Mapping[str, CheckResult]
) -> Iterator[str]:
    outcomes = [result.outcome for result in judged.values()]
    counts = f"{len(judged)} of {len(thresholds)} judged, {outcomes.count('failed')} failed"
    if "not_applicable" in outcomes:
        counts += f", {outcomes.count('not_applicable')} not applicable"
    yield f"<h1>{escape_text('/'.join(manifest.key[1:]))}</h1>"
    yield (
        f'<p class="dim">{escape_text(manifest.key[0])} · suite of {len(thresholds)} expectations over the facts · '
        f"{counts} · version <code>{escape_text(manifest.version)}</code> of "
        f"{escape_text(manifest.built_at[:19])} UTC</p>"
    )
    for threshold in thresholds:
        yield from _render_check(threshold, judged.get(threshold.check))


def _render_check(threshold: Threshold, result: CheckResult | None) -> Iterator[str]:
    kind, arguments = threshold.rule
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    yield f'<h2 id="{escape_text(threshold.check)}">{render_result_mark(result)} {escape_text(threshold.check)}</h2>'
    what = threshold.what[0].upper() + threshold.what[1:]
    yield f"<p>{escape_text(what)}; wanted {escape_text(threshold.wanted)}.</p>"
    yield f"<p><code>{escape_text(kind)}({escape_text(shown)})</code></p>"
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
        lines.append(
            ("waiver", f"up to {format_measure(threshold.fact, threshold.waiver_bound)}: {threshold.waiver_reason}")
        )
    yield html.render_table(["", ""], lines)


def render_result_mark(result: CheckResult | None) -> str:
    """Return the mark of a result: passed, failed and waived or warned, failed and blocking, or no result."""
    if result is None or result.outcome == "not_applicable":
        return f'<span class="dim">{arrays.NO_NUMBER}</span>'
    if result.passed:
        return '<span class="good">✓</span>'
    return '<span class="bad">✗</span>' if result.blocking else '<span class="look">!</span>'
