"""The message about a build: what happened, which check and why, what trainers read, where to look, what to do.

demo: blocked on the third night
chats/canonical_rows: rejects is 3.3 % (share of records that became no row); wanted at most 1 %
missing_field: 54, the first is data/chats.jsonl line 20
Trainers read version 1f2e3d4c, of 2026-11-26 02:03 UTC. Held back since then: files: 1 changed; rows +10 -54.
https://reports.example.org/demo/report.html
Correct the records, or raise gates.rejects.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from urllib.parse import quote

from rowmill.alerts import AlertEvent
from rowmill.alerts.delivery import AlertMessage, deliver
from rowmill.alerts.history import end_causes, identify_target, load_causes, save_causes
from rowmill.build.steps import Project
from rowmill.checks import cross_stage
from rowmill.checks.judge import CheckResult
from rowmill.core.arrays import format_time
from rowmill.core.console import escape_control_characters
from rowmill.core.errors import GateError, PipelineError
from rowmill.core.remote import public_text
from rowmill.core.stage_names import GPU_PARTITIONS
from rowmill.reports.build_view import BuildView, describe_changes, list_counts, load_build_view
from rowmill.reports.report_page import report_path
from rowmill.schema import manifest

MAX_LINE_CHARS = 400
"""Longer lines are cut: services cut or refuse long messages."""

_NIGHTS = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh"}

_CHANGING_NUMBER = re.compile(r"0x[0-9a-f]+|(?<![^\s(=:,])\d[\d.,:]{3,}(?![^\s):;,%])")
"""Sizes, times and addresses in the text of an error, which differ each time that it is raised."""


@dataclass(frozen=True, slots=True)
class News:
    """What a message is about: its cause by name, what happened, why, and what to do; a message may have several."""

    cause: str
    happened: str
    reasons: tuple[str, ...] = ()
    remedy: str = ""


def announce(project: Project, *, errors: Sequence[BaseException] = (), overdue: str = "") -> list[str]:
    """Tell what became of a build to everybody who is to hear of it; return the problems of delivery, one line each.

    `errors` ended the build, `overdue` says how long there was none. That trainers read another build is told once,
    whichever run published it: it may have been killed since, or have published a version that was built before.

    Nothing that goes wrong here is raised: the build is what it is.
    """
    recipe, store = project.recipe, project.store
    if not recipe.execution.alerts:
        return []
    problems: list[str] = []
    try:
        # Of two builds at once, the second finds whom the first has told.
        with store.lock(f"{recipe.name}/.alerts.lock", what=f"{recipe.name}: its alerts"):
            view = load_build_view(project)
            today = datetime.now(UTC).date()
            # Of the build that trainers read, notes are kept from the night on which it was told.
            published = {version for version in [find_published_version(project)] if version is not None}
            noted = load_causes(store, recipe.name, "published", published, today)
            is_new = any(cause.nights == 1 for cause in noted.values())
            events = _list_news(view, errors, published=is_new, overdue=overdue)
            for event, several in events.items():
                news = {one.cause: one for one in several}
                causes = load_causes(store, recipe.name, event, news, today)
                targets = {identify_target(alert): alert for alert in recipe.execution.alerts if event in alert.on}
                untold = [target for target in targets if any(target not in cause.told for cause in causes.values())]
                if not untold:
                    continue
                # First what nobody was told, then what has lasted longest.
                ranked = sorted(
                    zip(causes.values(), news.values(), strict=True),
                    key=lambda pair: (targets.keys() <= {*pair[0].told}, -pair[0].nights),
                )
                message = compose_message(view, event, [one for _, one in ranked], ranked[0][0].nights)
                # At once: one that hangs must neither hold up the others nor outlast the time that a sensor has.
                with ThreadPoolExecutor(len(untold)) as threads:
                    answers = list(threads.map(lambda target: deliver(targets[target], message), untold))  # noqa: B023
                told = tuple(target for target, problem in zip(untold, answers, strict=True) if problem is None)
                problems += [problem for problem in answers if problem is not None]
                causes = {name: replace(cause, told=(*cause.told, *told)) for name, cause in causes.items()}
                save_causes(store, recipe.name, causes, problems)
            if not events.keys() & {"overdue", "failed", "blocked"} and (is_new or not view.missing):
                end_causes(store, recipe.name, noted, today)
    except Exception as failure:  # noqa: BLE001  (an alert never changes what a build ends with)
        problems.append(f"{type(failure).__name__}: {failure}")
    return [f"an alert was not delivered: {problem}" for problem in problems]


def _list_news(
    view: BuildView, errors: Sequence[BaseException], *, published: bool, overdue: str
) -> dict[AlertEvent, list[News]]:
    """Return what is told of each event that came about; a closed gate is told with the checks that failed."""
    if overdue:
        remedy = "See whether a run is queued or failed, the schedule is on, and Dagster's daemon runs."
        return {"overdue": [News("", overdue, remedy=remedy)]}
    blocking = [_describe_result(result) for result in view.failed if result.blocking]
    warning = [_describe_result(result) for result in view.failed if not result.blocking and not result.waiver]
    closed = [_describe_error(error) for error in errors if isinstance(error, GateError)]
    events: dict[AlertEvent, list[News]] = {
        "failed": [_describe_error(error) for error in errors if not isinstance(error, GateError)],
        "blocked": [] if errors and not closed else blocking or closed,
    }
    if not any(events.values()):
        lines = [view.verdict[2]] if view.changes is None else describe_changes(view.changes)
        version = find_published_version(view.project) or ""
        events = {"published": [News(version, lines[0], tuple(lines[1:]))] if published else [], "warned": warning}
    return {event: news for event, news in events.items() if news}


def _describe_result(result: CheckResult) -> News:
    place = "/".join(result.key[1:])
    happened = f"{place}: {result.check} is {result.shown} ({result.what}); wanted {result.wanted}"
    return News(f"{result.check} {place}", happened, tuple(result.causes[:3]), result.remedy)


def _describe_error(error: BaseException) -> News:
    head, *rest = public_text(str(error)).splitlines() or [""]
    # Dagster keeps the text of an error of ours without its class, and a cause has one name wherever it is met.
    name = "" if isinstance(error, PipelineError) else type(error).__name__
    if isinstance(error, PipelineError) and error.place:
        head = f"{error.place}: {head}"
    remedy = "The log of the run has the full message; finished parts are kept, and the next build uses them."
    cause = f"{name} {_CHANGING_NUMBER.sub('#', head)[:MAX_LINE_CHARS]}".strip()
    return News(cause, head or type(error).__name__, tuple(rest[:3]), remedy)


def compose_message(view: BuildView, event: AlertEvent, news: Sequence[News], nights: int) -> AlertMessage:
    """Return the message about an event, in seven lines; `nights` is how many the first of the news has lasted."""
    recipe = view.project.recipe.name
    repeated = f" on the {_NIGHTS.get(nights, f'{nights}th')} night" if nights > 1 else ""
    first, *others = news
    more = f" (and {len(others)} more)" if others else ""
    also = [f"also {other.happened}" for other in others[:3]]
    version, changes = find_published_version(view.project), view.changes
    readers = "Trainers have no build of this recipe yet."
    if version is not None:
        ranks = manifest.load_version(view.project.store, (recipe, GPU_PARTITIONS), version)
        readers = f"Trainers read version {version[:12]}, of {format_time(ranks.built_at)}."
    if event != "published" and changes is not None and changes.version == version:
        # What is built now is compared with what trainers read, and is not published.
        counts = list_counts(changes)
        readers += f" Held back since then: {'; '.join(counts)}." if counts else ""
    base = view.project.recipe.execution.reports_url
    link = "" if base is None else f"{base.rstrip('/')}/{quote(report_path(recipe).removeprefix('reports/'))}"
    where = link or f"rowmill report {recipe}"
    lines = [first.happened + more, "; ".join(first.reasons), "; ".join(also), readers, where, first.remedy]
    # A name or a record in a line must not begin another.
    shown = tuple(escape_control_characters(" ".join(line.splitlines()))[:MAX_LINE_CHARS] for line in lines if line)
    return AlertMessage(recipe, event, f"{recipe}: {event}{repeated}", shown, link)


def find_published_version(project: Project) -> str | None:
    """Return the version of the ranks that trainers read; None if none was ever published."""
    current = project.store.read_sealed(cross_stage.published_path(project.recipe.name))
    return None if current is None else str(current["version"])
