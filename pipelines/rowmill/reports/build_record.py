"""The record of a published build for trackers, and the note of what was logged, so that nothing is logged twice.

    <stage>/logged/<version>.json    {"<tracker>": {"kind": "mlflow", "address": "http://…", "problem": ""}}

Trackers hear of the ranks once trainers read them, with every stage that they were made of; OpenLineage hears of each
export as well. A night without a new version reads the note and does nothing else.

A build waits for its trackers, since its page says where it is on record, but for one that does not answer only once.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

import rowmill
from rowmill.build.steps import Project, find_step, find_upstream_steps
from rowmill.checks import cross_stage, judge
from rowmill.core.console import escape_control_characters
from rowmill.core.stage_names import EXPORTS, GPU_PARTITIONS
from rowmill.core.storage import digest_json
from rowmill.reader.published import find_published_version
from rowmill.reports.links import PageLinks
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, get_stage_folder
from rowmill.sources import GeneratedSource, HuggingFaceSource, public_url
from rowmill.stages import catalog
from rowmill.tracking import AnyTracker, OpenLineageTracker
from rowmill.tracking.client import BuildRecord, LoggedCheck, LoggedStage
from rowmill.tracking.delivery import TIME_LIMIT_S, LogResult, log_build

SILENCE_S = 600.0
"""Seconds for which this process leaves a tracker alone that did not answer: a build with ten exports waits once."""
MAX_LOGGED_COLUMNS = 500
"""Columns of a stage that trackers are told of: they refuse long schemas, and nobody reads them."""
MAX_NAME_CHARS = 200

_NOTES_FOLDER = "logged"
_LOG = logging.getLogger("rowmill.tracking")
_SILENT_SINCE: dict[str, float] = {}
"""When a tracker did not answer this process, by its name."""


def log_outputs(
    project: Project, outputs: Iterable[Manifest], *, begin: Callable[[str], object] = _LOG.info
) -> list[LogResult]:
    """Log those of some outputs that are published to `execution.log_to`; return what became of it, by tracker.

    `begin` is told in a line before trackers are waited for.

    Nothing that goes wrong here is raised: the build is what it is, and the next one tries again.
    """
    logged: list[LogResult] = []
    # By the digest of their options: a build is logged again to another project of the same service.
    trackers = {digest_json(tracker.model_dump())[:12]: tracker for tracker in project.recipe.execution.log_to}
    events = {name: tracker for name, tracker in trackers.items() if isinstance(tracker, OpenLineageTracker)}
    for output in outputs:
        wanted = {GPU_PARTITIONS: trackers, EXPORTS: events}.get(output.stage, {})
        if not wanted:
            continue
        # Of two builds at once, the second finds what the first has logged.
        name = "/".join(output.key)
        lock_path = f"{get_stage_folder(output.key)}/{_NOTES_FOLDER}/.lock"
        try:
            with project.store.lock(lock_path, what=f"{name}: its record"):
                logged += _log_output(project, output, wanted, begin)
        except Exception as failure:  # noqa: BLE001  (a tracker never changes what a build ends with)
            logged.append(LogResult("trackers", problem=f"{type(failure).__name__}: {failure}"))
    for result in logged:
        _LOG.log(logging.WARNING if result.problem else logging.INFO, "%s", result.sentence)
    return logged


def _log_output(
    project: Project, output: Manifest, trackers: Mapping[str, AnyTracker], begin: Callable[[str], object]
) -> list[LogResult]:
    """Log an output to those of its trackers that do not have it, if it is published; note what became of it."""
    known = load_log_results(project, output)
    wanted = {name: trackers[name] for name in trackers if name not in known or known[name].problem}
    if not wanted:
        return []
    published = find_published_version(project.store, project.recipe.name)
    if output.stage == GPU_PARTITIONS and output.version != published:
        return []
    now = time.monotonic()
    silent = {name for name in wanted if now - _SILENT_SINCE.get(name, -SILENCE_S) < SILENCE_S}
    asked = {name: tracker for name, tracker in wanted.items() if name not in silent}
    if asked:
        kinds = ", ".join(tracker.kind for tracker in asked.values())
        begin(f"logging {'/'.join(output.key[1:])} to {kinds}, for {TIME_LIMIT_S:.0f} s at most")
    answers = dict(zip(asked, log_build([*asked.values()], describe_build(project, output), project.base), strict=True))
    _SILENT_SINCE.update((name, now) for name, result in answers.items() if result.is_silent)
    waits = "it did not answer before; the next build tries again"
    answers |= {name: LogResult(wanted[name].kind, problem=waits) for name in silent}
    known |= answers
    project.store.write_sealed(_note_path(output), {name: asdict(result) for name, result in known.items()})
    return [answers[name] for name in wanted]


def load_log_results(project: Project, output: Manifest) -> dict[str, LogResult]:
    """Return what became of logging an output, by tracker; empty if the recipe has none, or was not logged."""
    if not project.recipe.execution.log_to or output.stage not in (GPU_PARTITIONS, EXPORTS):
        return {}
    note = project.store.read_sealed(_note_path(output)) or {}
    return {name: LogResult(**result) for name, result in note.items()}


def _note_path(output: Manifest) -> str:
    return f"{get_stage_folder(output.key)}/{_NOTES_FOLDER}/{output.version}.json"


def describe_build(project: Project, output: Manifest) -> BuildRecord:
    """Return the record of an output and of every stage behind it, at the versions that its manifest names."""
    store = project.store
    outputs = {made.key: made for made in cross_stage.iterate_history(store, output)}
    # Stages whose checks it waited for, and that it did not read.
    for step in find_upstream_steps(project, [find_step(project, output.key)]):
        if step.key not in outputs and (gated := manifest.load_current_if_intact(store, step.key)) is not None:
            outputs[step.key] = gated
    stages = {"/".join(key): _describe_stage(project, made) for key, made in outputs.items()}
    ordered = dict(sorted(stages.items(), key=lambda item: (item[1].built_at, item[0])))
    name = "/".join(output.key)
    return BuildRecord(
        recipe=project.recipe.name,
        output=name,
        rowmill=rowmill.__version__,
        waivers=output.waivers,
        steps=_locate_steps(project, output),
        stages=ordered,
        new=(name,) if output.stage == EXPORTS else tuple(ordered),
        manifest=store.read(f"{get_stage_folder(output.key)}/manifests/{output.fingerprint}.json"),
    )


def _locate_steps(project: Project, output: Manifest) -> str:
    """Return the address of the page of steps where $ROWMILL_VIEWER_URL says that a viewer runs, else the command."""
    recipe = project.recipe.name
    if base := os.environ.get("ROWMILL_VIEWER_URL"):
        version = output.version if output.stage == GPU_PARTITIONS else ""
        return PageLinks(recipe, base=base, version=version).of("steps", 0)
    return f"rowmill view {judge.format_recipe_argument(recipe, project.store.root)} 'step 0'"


def _describe_stage(project: Project, output: Manifest) -> LoggedStage:
    step = find_step(project, output.key)
    rows = catalog.count_output_rows(output)
    files = [file for part in output.parts for file in part.files.values()]
    address = project.store.path(get_stage_folder(output.key))
    checks = judge.preview_checks(project.store, output, step.shown_thresholds)
    more = len(output.schema) - MAX_LOGGED_COLUMNS
    # The addresses of raw data, without secrets.
    sources: Sequence[str] = ()
    if not output.inputs:
        match project.recipe.datasets[output.key[1]].source:
            case HuggingFaceSource() as source:
                sources = (f"hf://datasets/{source.id}",)
            case GeneratedSource() as source:
                sources = (project.store.path("/".join(source.dataset_key(project.recipe.name))),)
            case source:
                urls = map(public_url, source.all_urls)
                sources = [url if "://" in url else os.path.join(project.base, url) for url in urls]
    return LoggedStage(
        name="/".join(output.key),
        stage=output.stage,
        description=step.description,
        version=output.version,
        fingerprint=output.fingerprint,
        built_at=output.built_at,
        address=os.path.abspath(address) if project.store.is_local else address,
        rows=None if rows is None else rows.count,
        bytes=sum(file.bytes for file in files),
        files=len(files),
        facts={
            name: value
            for name, value in output.facts.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        },
        # Names of source columns are data, of any length, number and letters.
        schema=(
            *((_bound_name(name), _bound_name(kind)) for name, kind in output.schema[:MAX_LOGGED_COLUMNS]),
            *([(f"and {more:,} more columns", "null")] if more > 0 else []),
        ),
        inputs=tuple(output.inputs),
        sources=tuple(sources),
        checks=tuple(
            LoggedCheck(
                result.check,
                result.outcome,
                result.severity,
                "" if result.outcome == "not_applicable" else result.shown,
                result.wanted,
                result.what,
            )
            for result in checks
        ),
    )


def _bound_name(name: str) -> str:
    shown = escape_control_characters(name).replace("\n", "␊").replace("\t", "␉")
    # The digest keeps two names apart that begin alike.
    return shown if len(shown) <= MAX_NAME_CHARS else f"{shown[: MAX_NAME_CHARS - 14]}… {digest_json(name)[:12]}"
