"""What Great Expectations was asked about a stage's facts and what it answered, as a page for each stage.

What belongs here: wording expectations and verdicts. What does not: judging (`judge.py`), the report of a
whole recipe (`report_page.py`).

The library's own pages were tried: each calls fourteen foreign addresses for its style and scripts, and leaves
the observed value out wherever it is a NumPy number. These hold the same (expectation, arguments, observed
value, success) and stand alone.
"""

from collections.abc import Iterator, Mapping, Sequence

from rowmill.checks.judge import CheckResult, Threshold
from rowmill.core import html, number_text
from rowmill.core.html import escape_text
from rowmill.core.storage import Store
from rowmill.schema.manifest import Manifest, StageKey


def expectations_page_path(key: StageKey) -> str:
    """Return where a stage's page lies, relative to the storage root; `#<law>` leads to a law."""
    return f"reports/{key[0]}/expectations/{'-'.join(key[1:])}.html"


def write_expectations_page(
    store: Store, manifest: Manifest, terms: Sequence[Threshold], verdicts: Sequence[CheckResult]
) -> None:
    """Write a stage's page, unless it says the same already."""
    path, content = expectations_page_path(manifest.key), render_expectations_page(manifest, terms, verdicts).encode()
    if not store.exists(path) or store.read(path) != content:
        store.write(path, content)


def render_expectations_page(manifest: Manifest, terms: Sequence[Threshold], verdicts: Sequence[CheckResult]) -> str:
    """Return a stage's page: each of its terms with the verdict on this version, if there is one."""
    judged = {verdict.law: verdict for verdict in verdicts}
    return html.render_page(f"{'/'.join(manifest.key)}: expectations", _render_body(manifest, terms, judged))


def _render_body(manifest: Manifest, terms: Sequence[Threshold], judged: Mapping[str, CheckResult]) -> Iterator[str]:
    outcomes = [verdict.outcome for verdict in judged.values()]
    counts = f"{len(judged)} of {len(terms)} judged, {outcomes.count('failed')} failed"
    if "not_applicable" in outcomes:
        counts += f", {outcomes.count('not_applicable')} not applicable"
    yield f"<h1>{escape_text('/'.join(manifest.key[1:]))}</h1>"
    yield (
        f'<p class="dim">{escape_text(manifest.key[0])} · suite of {len(terms)} expectations over the facts · '
        f"{counts} · version <code>{escape_text(manifest.version)}</code> of "
        f"{escape_text(manifest.built_at[:19])} UTC</p>"
    )
    for one in terms:
        yield from _render_check(one, judged.get(one.law))


def _render_check(terms: Threshold, verdict: CheckResult | None) -> Iterator[str]:
    kind, arguments = terms.rule
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    yield f'<h2 id="{escape_text(terms.law)}">{render_result_mark(verdict)} {escape_text(terms.law)}</h2>'
    yield f"<p>{escape_text(terms.what[0].upper() + terms.what[1:])}; wanted {escape_text(terms.wanted)}.</p>"
    yield f"<p><code>{escape_text(kind)}({escape_text(shown)})</code></p>"
    lines = [("severity", terms.severity)]
    if terms.applies_to:
        lines.append(("applies to", terms.applies_to))
    if verdict is not None and verdict.outcome == "not_applicable":
        lines.append(("observed", "not applicable"))
    elif verdict is not None:
        observed = "not measured" if verdict.value is None else f"{verdict.value:.9g}"
        lines += [("observed", observed), ("success", "yes" if verdict.passed else "no")]
        lines += [("note", verdict.note)] if verdict.note else []
        if not verdict.passed:
            lines.append(("waived", verdict.waiver) if verdict.waiver else ("what to do", verdict.remedy))
        lines += [("look at", ", ".join(verdict.samples))] if verdict.samples else []
    if terms.waiver_bound is not None:
        lines.append(("waiver", f"up to {terms.waiver_bound:g}: {terms.waiver_reason}"))
    yield html.render_table(["", ""], lines)


def render_result_mark(verdict: CheckResult | None) -> str:
    """Return the mark of a verdict: passed, failed and waived or warned, failed and blocking, or none of these."""
    if verdict is None or verdict.outcome == "not_applicable":
        return f'<span class="dim">{number_text.NO_NUMBER}</span>'
    if verdict.passed:
        return '<span class="good">✓</span>'
    return '<span class="bad">✗</span>' if verdict.blocking else '<span class="look">!</span>'
