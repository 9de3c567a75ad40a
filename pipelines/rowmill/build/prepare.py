"""A step before it is made: its inputs, its identity, its executor, the hosts that will run its tasks, and a forecast.

A step's code version is a digest of the options it reads, the stage's VERSION and the waivers it is built under;
Dagster compares code versions. Its fingerprint is a digest of the code version, its inputs' versions (content, not
time), tokenizer files and template text. If a manifest with that fingerprint is kept, the step is done without reading
data.
"""

import tempfile
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rowmill import sources
from rowmill.build.gate import find_held_version, follow_held_versions, open_generated_source
from rowmill.build.steps import Project, Step, iterate_gate_waivers, plan_steps
from rowmill.checks import expectation_suite, judge
from rowmill.checks.judge import CheckResult
from rowmill.core import remote_index
from rowmill.core.errors import ConfigError, MissingPackageError, PipelineError, SourceError, join_errors
from rowmill.core.storage import Store, digest_json, explain_disk_full
from rowmill.executors import AnyExecutor, Executor, LocalPool, Share
from rowmill.executors.base import describe_difference, describe_versions
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey, get_stage_folder
from rowmill.sources import Files, SourceFile, find_files, urls
from rowmill.stages.base import PreparedStage, StageContext
from rowmill.stages.inputs import list_input_versions
from rowmill.tokenization import stored_tokenizers, tokenizer_source

_EXECUTORS: dict[tuple[AnyExecutor, int], Executor] = {}


def open_shared_executor(recipe: Recipe) -> Executor:
    """Return the executor of a recipe, which its stages share: opening a tokenizer in each worker takes a second."""
    chosen = (recipe.execution.executor, recipe.total_workers)
    if chosen not in _EXECUTORS:
        _EXECUTORS[chosen] = recipe.execution.executor.open(recipe.total_workers)
    return _EXECUTORS[chosen]


def start_workers(project: Project, datasets: Iterable[str]) -> None:
    """Start the workers that making some datasets' rows will need, while the caller does something else first."""
    open_shared_executor(project.recipe).start(sum_source_bytes(project, datasets))


def sum_source_bytes(project: Project, datasets: Iterable[str]) -> int:
    """Return the bytes of the local files of some datasets, an estimate of the work ahead."""
    return sum(sources.sum_local_bytes(project.recipe.datasets[name].source, project.base) for name in datasets)


def close_workers() -> None:
    """Stop the workers that stages share; the next stage that needs them starts them again."""
    for executor in _EXECUTORS.values():
        executor.close()


@contextmanager
def index_outputs(project: Project, steps: Iterable[Step], *, is_whole: bool = False) -> Generator[None]:
    """Ask a remote storage at once what it has of some steps and their inputs, and answer from that in the block.

    A build of the whole recipe (`is_whole`) finds its small files in one, and leaves them there for the next.
    """
    keys = dict.fromkeys(key for step in steps for key in (step.key, *step.inputs, *step.gates))
    pages = sorted({expectation_suite.expectations_page_path(key) for key in keys})
    tokenizers = {stored_tokenizers.TOKENIZER_FOLDER, stored_tokenizers.COMMIT_FOLDER}
    own = {"stats", *tokenizers, *(page.rpartition("/")[0] for page in pages)}
    copy_path = f"{project.recipe.name}/small_files.json" if is_whole else ""
    folders = map(manifest.get_stage_folder, keys)
    with project.store.indexed(folders, own=own, copy_path=copy_path) as is_first:
        if is_first:
            judge.prefetch_check_results(project.store, manifest.prefetch_current(project.store, keys))
            project.store.prefetch(pages)
        yield


def find_outside_change(step: Step, context: StageContext, earlier: Manifest | None) -> str | None:
    """Describe what changed outside the storage root since an earlier output, or return None."""
    find = step.stage.find_outside_change
    return None if find is None or earlier is None else find(context, earlier)


def prepare_step(context: StageContext, step: Step, *, store: Store | None = None) -> tuple[str, PreparedStage]:
    """Return a step's fingerprint and the stage ready to run; `store` has the inputs' ancestors, if another has."""
    versions = list_input_versions(store or context.store, context.inputs, step.stage)
    prepared = step.stage.prepare(context)
    return step.stage.fingerprint(step.code_version, versions, list_waivers(context, step), prepared.outside), prepared


def find_reusable_output(store: Store, step: Step, fingerprint: str) -> Manifest | None:
    """Return the kept output of a fingerprint, if it is final."""
    kept = manifest.find_by_fingerprint(store, step.key, fingerprint)
    return kept if kept is not None and step.stage.is_final(kept) else None


def make_stage_context(project: Project, step: Step, inputs: Mapping[StageKey, Manifest]) -> StageContext:
    """Return a stage's context with one worker, for inspection; a build gives it its executor."""
    return StageContext(
        project.store,
        project.base,
        step.key,
        step.dataset,
        inputs,
        LocalPool(1),
        ahead=project.ahead,
        recipe=project.recipe,
    )


def find_kept_output(
    project: Project, step: Step, inputs: Mapping[StageKey, Manifest], *, scratch: Store
) -> Manifest | None:
    """Return the output that a build would reuse for these inputs; what is read on the way is kept in `scratch`."""
    context = make_stage_context(replace(project, store=scratch), step, inputs)
    fingerprint, _ = prepare_step(context, step, store=project.store)
    return find_reusable_output(project.store, step, fingerprint)


def list_waivers(context: StageContext, step: Step) -> list[str]:
    """Return the waivers of a step's gates and of its inputs; they are part of the output's identity."""
    return sorted(
        {waiver for one in context.inputs.values() for waiver in one.waivers}
        | set(iterate_gate_waivers(context.recipe, step.gates))
    )


def require_ready(project: Project, steps: Iterable[Step]) -> None:
    """Check that other requirements of some steps, such as tokenizer and template, are met before any step runs."""
    problems = find_unmet_requirements(project, steps)
    if problems:
        raise join_errors(list(problems.values()), "\n".join(dict.fromkeys(map(str, problems.values()))))


def find_unmet_requirements(project: Project, steps: Iterable[Step]) -> dict[StageKey, PipelineError]:
    """Return an error for each step with a missing requirement.

    A step whose current output has the same options was checked before, so a build in which nothing changed checks
    nothing.
    """
    problems: dict[StageKey, PipelineError] = {}
    for step in steps:
        require = step.stage.require_ready
        if require is None or has_current_options(project, step):
            continue
        try:
            # A tokenizer that is opened for the first time is kept in the store.
            with explain_disk_full(project.store, "/".join(step.key)):
                require(make_stage_context(project, step, {}))
        # Not damage to the store, which is repaired where the step runs.
        except (ConfigError, SourceError, MissingPackageError) as error:
            problems[step.key] = type(error)(f"{step.recipe}: {error}")
            problems[step.key].__cause__ = error.__cause__
    return problems


def has_current_options(project: Project, step: Step) -> bool:
    """Return whether a step's current output was made with the recipe's options and this code."""
    made = manifest.load_current_if_intact(project.store, step.key)
    return made is not None and made.code_version == step.code_version


_CHECKED: set[tuple[AnyExecutor, str]] = set()


def _check_host(
    root: str, probe: str, content: bytes, base: Path, sources: Sequence[SourceFile], versions: Mapping[str, str]
) -> list[str]:
    """Return what this host lacks; `probe` is a file below the root that the calling process wrote."""
    different = describe_difference(versions, describe_versions())
    if different:
        return [f"has {different}"]
    problems, store = list[str](), Store(root)
    try:
        if store.read(probe) == content:
            own = f"{probe}-{uuid.uuid4().hex}"
            store.write(own, content)
            store.remove(own)
        else:
            problems.append(f"has another {root}")
    except FileNotFoundError:
        problems.append(f"does not see what this process wrote to {store.address('')}")
    except OSError as error:
        problems.append(f"cannot use the storage root {store.address('')}: {error}")
    try:
        for file in sources:
            with urls.open_raw(urls.locate_url(file.url, base)) as raw:
                raw.read(1024)
    except OSError as error:
        problems.append(f"cannot read a source: {error}")
    try:
        with tempfile.TemporaryFile() as scratch:
            scratch.write(content)
    except OSError as error:
        problems.append(f"has no temporary folder to write to: {error}")
    return problems


def require_equal_hosts(project: Project, *, again: bool = False) -> None:
    """Check all hosts of a recipe's executor, once per process, or `again`; what runs on this machine alone passes."""
    executor = open_shared_executor(project.recipe)
    asked = (project.recipe.execution.executor, project.store.root)
    if not executor.spans_hosts or (asked in _CHECKED and not again):
        return
    probe, content = f".probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
    # The first file of each source; rows of other kinds of source are in the store.
    sources = [dataset.source for dataset in project.recipe.datasets.values()]
    first_files = [find_files(source, project.base)[0] for source in sources if isinstance(source, Files)]
    root = project.store.root
    check = partial(_check_host, root, probe, content, project.base, first_files, describe_versions())
    project.store.write(probe, content)
    try:
        found = executor.run_on_hosts(check)
    finally:
        project.store.remove(probe)
    problems = [f"{name} {' and '.join(faults)}" for name, faults in found.items() if faults]
    if problems:
        raise ConfigError(
            f"execution.executor: {len(problems)} of {len(found)} hosts cannot take part: {'; '.join(problems)}; every "
            "host must have this process's versions, reach the storage root and the sources under the same names, and "
            "have room for temporary files; a local path is enough only where all hosts share its folder; use an "
            "object store or a shared folder, install the same versions, and give the hosts credentials"
        )
    _CHECKED.add(asked)


# ── The versions of the packages that shares ran with ──


SHARE_VERSIONS_FOLDER = "share_versions"
"""Folder of a stage's records `<digest of the versions>-<share>.json`. A share writes its own before it makes a part,
and then reads those of the others: of two that start at once with different versions, at least one sees the other. A
build compares them with its own before it takes parts of shares."""


def claim_versions(store: Store, key: StageKey, share: Share) -> None:
    """Record the versions of this process for a share of a stage."""
    record = f"{_folder(key)}/{_own_digest()}-{share.number}-of-{share.total}.json"
    is_new = not store.exists(record)
    if is_new:
        store.write_sealed(record, {"share": str(share), "versions": describe_versions()})
        remote_index.forget_absences()
    try:
        require_own_versions(store, key)
    except ConfigError:
        if is_new:
            # It has made nothing.
            store.remove(record)
        raise


def require_own_versions(store: Store, key: StageKey) -> None:
    """Check that the shares of a stage, if any were made since its last build, had the versions of this process."""
    names = store.list(_folder(key))
    if not names:
        return
    other = next((name for name in names if not name.startswith(f"{_own_digest()}-")), None)
    if other is None:
        return
    record = store.read_sealed(f"{_folder(key)}/{other}") or {"share": "?", "versions": {}}
    raise ConfigError(
        f"{'/'.join(key)}: share {record['share']} was made with "
        f"{describe_difference(describe_versions(), record['versions'])}; the same versions give the same bytes; "
        "install those of the share here, or remove the parts of shares with rowmill gc and make all shares with one "
        "set of versions"
    )


def forget_versions(store: Store, key: StageKey) -> None:
    """Remove the records of a stage whose output was made of the parts."""
    if store.list(_folder(key)):
        store.remove(_folder(key))


def _folder(key: StageKey) -> str:
    return f"{get_stage_folder(key)}/{SHARE_VERSIONS_FOLDER}"


def _own_digest() -> str:
    return digest_json(describe_versions())


# ── What a build would do with each step, and why, for `rowmill plan` ──


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The forecast of one step: the action, and the reason."""

    step: Step
    action: str
    why: str
    manifest: Manifest | None = None
    """The output that there is for these inputs."""
    results: Sequence[CheckResult] = ()
    """What its checks would say of it."""


@tokenizer_source.hold_commits()
def forecast_steps(project: Project) -> list[StepForecast]:
    """Forecast each step; writes nothing except scans of changed sources.

    A step after one that must be made is forecast as `make if changed`: its input's content is not known yet. One
    behind an output that is there and fails a check is forecast as `leave out`, which is what a build does with it.
    """
    require_ready(project, plan_steps(project))
    known: dict[StageKey, Manifest] = {}
    closed: dict[StageKey, str] = {}
    return [_judge_forecast(project, _forecast_step(project, step, known), closed) for step in plan_steps(project)]


def _judge_forecast(project: Project, forecast: StepForecast, closed: dict[StageKey, str]) -> StepForecast:
    """Return a forecast with its output's check results, or as left out behind one of `closed`; adds to those."""
    step = forecast.step
    if forecast.action == "on request":
        return forecast
    cause = next((closed[key] for key in step.gates if key in closed), None)
    if cause is not None and forecast.action != "held":
        closed[step.key] = cause
        return replace(forecast, action="leave out", why=cause)
    if forecast.manifest is None:
        return forecast
    results = judge.preview_checks(project.store, forecast.manifest, step.thresholds)
    blocking = [result for result in results if result.blocking]
    if not blocking:
        return replace(forecast, results=results)
    failed = f"{blocking[0].check} is {blocking[0].shown}, wanted {blocking[0].wanted}"
    closed[step.key] = f"{'/'.join(step.key[1:])} fails the check {blocking[0].check}"
    return replace(forecast, why=f"{forecast.why}; fails a check: {failed}", results=results)


def _forecast_step(project: Project, step: Step, known: dict[StageKey, Manifest]) -> StepForecast:
    """Forecast one step from the manifests `known` before it; adds the step's manifest if it would be reused."""
    if step.on_demand:
        command = f"rowmill {step.stage.command} {step.recipe}"
        return StepForecast(step, "on request", f"`{command}` makes it from a trained model")
    held = find_held_version(project.store, step.key)
    if held is not None:
        known[step.key] = held.load(project.store)
        return StepForecast(step, "held", held.sentence, known[step.key])
    waiting = [key for key in step.inputs if key not in known]
    if waiting:
        return StepForecast(step, "make if changed", f"{'/'.join(waiting[0][1:])} must be made first")
    inputs = follow_held_versions(project.store, {key: known[key] for key in step.inputs})
    inputs |= open_generated_source(project, step)
    context = make_stage_context(project, step, inputs)
    fingerprint, _ = prepare_step(context, step)
    kept = find_reusable_output(project.store, step, fingerprint)
    if kept is not None:
        known[step.key] = kept
        moved = find_outside_change(step, context, kept)
        same = f"; {moved}, with the same tokenizer" if moved else ""
        return StepForecast(step, "reuse", f"version {kept.version[:12]} of {kept.built_at[:19]}{same}", kept)
    earlier = manifest.load_current_if_intact(project.store, step.key)
    return StepForecast(
        step, "make", find_outside_change(step, context, earlier) or _explain_rebuild(step, earlier, inputs)
    )


def _explain_rebuild(step: Step, earlier: Manifest | None, inputs: Mapping[StageKey, Manifest]) -> str:
    if earlier is None:
        return "never built"
    if earlier.code_version != step.code_version:
        return "its options changed"
    moved = [key for key, one in inputs.items() if earlier.inputs.get("/".join(key)) != one.version]
    if moved:
        return f"{'/'.join(moved[0][1:])} changed"
    return "its template or kept files changed" if step.inputs else "its source files changed"
