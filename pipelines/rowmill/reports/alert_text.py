"""The message about a build: what happened, which check and why, what trainers read, where to look, what to do.

demo: blocked on the third night
chats/canonical_rows: rejects is 3.3 % (share of records that became no row); wanted at most 1 %
missing_field: 54, the first is data/chats.jsonl line 20
Trainers read version 1f2e3d4c, of 2026-11-26 02:03 UTC. Held back since then: files: 1 changed; rows +10 -54.
https://reports.example.org/demo/report.html
Correct the records, or raise gates.rejects.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import quote

from rowmill.alerts import AlertEvent
from rowmill.alerts.delivery import AlertMessage, deliver, find_missing_secrets
from rowmill.alerts.history import end_causes, identify_target, load_causes, save_causes
from rowmill.build.steps import Project
from rowmill.checks import cross_stage
from rowmill.checks.judge import CheckResult
from rowmill.core.errors import GateError
from rowmill.core.public_urls import public_text
from rowmill.core.stage_names import GPU_PARTITIONS
from rowmill.reports.build_changes import count_changes, describe_changes
from rowmill.reports.build_view import BuildView, load_build_view
from rowmill.reports.report_page import report_path
from rowmill.schema import manifest

MAX_LINE_CHARS = 400
"""Longer lines are cut: services cut or refuse long messages."""

_NIGHTS = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh"}


def announce(
    project: Project, *, error: BaseException | None = None, published: bool = False, overdue: str = ""
) -> list[str]:
    """Tell what became of a build to everybody who is to hear of it; return the problems of delivery, one line each.

    `error` ended the build, `published` is whether trainers read a new one, `overdue` says how long there was none.

    Nothing that goes wrong here is raised: the build is what it is.
    """
    recipe, store = project.recipe, project.store
    if not recipe.execution.alerts:
        return []
    problems: list[str] = []
    try:
        view = load_build_view(project)
        today = datetime.now(UTC).date()
        events: list[AlertEvent] = ["overdue"] if overdue else _choose_events(view, error, published=published)
        for event in events:
            results = _select_results(view, event)
            names = {f"{result.check} {'/'.join(result.key[1:])}" for result in results} or {
                find_published_version(project) or "" if event == "published" else type(error).__name__ if error else ""
            }
            causes = load_causes(store, recipe.name, event, names, today)
            targets = {identify_target(alert): alert for alert in recipe.execution.alerts if event in alert.on}
            untold = [target for target in targets if any(target not in cause.told for cause in causes.values())]
            if not untold:
                continue
            nights = max(cause.nights for cause in causes.values())
            message = compose_message(view, event, results, overdue or error, nights)
            # At once: one that hangs must neither hold up the others nor outlast the time that Dagster gives a sensor.
            with ThreadPoolExecutor(len(untold)) as threads:
                answers = list(threads.map(lambda target: deliver(targets[target], message), untold))  # noqa: B023
            told = tuple(target for target, problem in zip(untold, answers, strict=True) if problem is None)
            problems += [problem for problem in answers if problem is not None]
            causes = {name: replace(cause, told=(*cause.told, *told)) for name, cause in causes.items()}
            save_causes(store, recipe.name, causes, problems)
        if published or not (overdue or error or view.missing or _select_results(view, "blocked")):
            end_causes(store, recipe.name, today)
    except Exception as failure:  # noqa: BLE001  (an alert never changes what a build ends with)
        problems.append(f"{type(failure).__name__}: {failure}")
    return [f"an alert was not delivered: {problem}" for problem in problems]


def list_missing_secrets(project: Project) -> list[str]:
    """Return a line per secret of an alert that is not set, to be shown before a build."""
    return find_missing_secrets(project.recipe.execution.alerts)


def _choose_events(view: BuildView, error: BaseException | None, *, published: bool) -> list[AlertEvent]:
    if error is not None and not isinstance(error, GateError):
        return ["failed"]
    if error is not None or _select_results(view, "blocked"):
        return ["blocked"]
    return [*(["published"] if published else []), *(["warned"] if _select_results(view, "warned") else [])]


def _select_results(view: BuildView, event: AlertEvent) -> list[CheckResult]:
    if event == "blocked":
        return [result for result in view.failed if result.blocking]
    if event == "warned":
        return [result for result in view.failed if not result.blocking and not result.waiver]
    return []


def compose_message(
    view: BuildView, event: AlertEvent, results: Sequence[CheckResult], error: BaseException | str | None, nights: int
) -> AlertMessage:
    """Return the message about an event, in six lines."""
    recipe = view.project.recipe.name
    repeated = f" on the {_NIGHTS.get(nights, f'{nights}th')} night" if nights > 1 else ""
    verdict = view.verdict[2]
    first, why, remedy = verdict, "", ""
    if results:
        result = results[0]
        others = f" (and {len(results) - 1} more)" if len(results) > 1 else ""
        measured = f"{result.check} is {result.shown} ({result.what}); wanted {result.wanted}"
        first = f"{'/'.join(result.key[1:])}: {measured}{others}"
        why, remedy = "; ".join(result.causes[:3]), result.remedy
    elif error is not None:
        head, *rest = public_text(str(error)).splitlines() or [type(error).__name__]
        first, why = head, "; ".join(rest[:3])
        remedy = "The log of the run has the full message; finished parts are kept, and the next build uses them."
    readers, changes = _describe_published(view), view.changes
    if changes is not None and event == "published":
        first, *others = describe_changes(changes)
        why = "; ".join(others)
    elif changes is not None and changes.version == find_published_version(view.project):
        # What is built now is compared with what trainers read, and is not published.
        counts = count_changes(changes)
        readers += f" Held back since then: {counts}." if counts else ""
    base = view.project.recipe.execution.reports_url
    link = "" if base is None else f"{base.rstrip('/')}/{quote(report_path(recipe).removeprefix('reports/'))}"
    lines = [first, why, readers, link or f"rowmill report {recipe}", remedy]
    return AlertMessage(
        recipe, event, f"{recipe}: {event}{repeated}", tuple(line[:MAX_LINE_CHARS] for line in lines if line), link
    )


def _describe_published(view: BuildView) -> str:
    store, recipe = view.project.store, view.project.recipe.name
    version = find_published_version(view.project)
    if version is None:
        return "Trainers have no build of this recipe yet."
    built_at = manifest.load_version(store, (recipe, GPU_PARTITIONS), version).built_at
    return f"Trainers read version {version[:12]}, of {built_at[:16].replace('T', ' ')} UTC."


def find_published_version(project: Project) -> str | None:
    """Return the version of the ranks that trainers read; None if none was ever published."""
    current = project.store.read_sealed(cross_stage.published_path(project.recipe.name))
    return None if current is None else str(current["version"])
