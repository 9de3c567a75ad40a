"""A step before it is made: its inputs, its identity, its executor, and the hosts that will run its tasks.

A step's code version is a digest of the options it reads, the stage's VERSION and the waivers it is built under;
Dagster compares code versions. Its fingerprint is a digest of the code version, its inputs' versions (content, not
time), tokenizer files and template text. If a manifest with that fingerprint is kept, the step is done without reading
data.
"""

import tempfile
import uuid
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rowmill import sources
from rowmill.build.steps import Project, Step, iterate_gate_waivers
from rowmill.checks import expectation_suite, judge
from rowmill.core.errors import (
    ConfigError,
    MissingPackageError,
    PipelineError,
    SourceError,
    join_errors,
    place_error,
)
from rowmill.core.storage import Store, explain_disk_full
from rowmill.executors import AnyExecutor, Executor, LocalPool
from rowmill.executors.base import describe_difference, describe_versions
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.sources import Files, SourceFile, find_files, read_first_bytes
from rowmill.stages.base import PreparedStage, StageContext
from rowmill.tokenization import stored_tokenizers

_EXECUTORS: dict[tuple[AnyExecutor, int], Executor] = {}


def open_shared_executor(recipe: Recipe) -> Executor:
    """Return the executor of a recipe, which its stages share: opening a tokenizer in each worker takes a second."""
    chosen = (recipe.execution.executor, recipe.total_workers)
    if chosen not in _EXECUTORS:
        _EXECUTORS[chosen] = recipe.execution.executor.open(recipe.total_workers)
    return _EXECUTORS[chosen]


def start_workers(project: Project, datasets: Iterable[str]) -> None:
    """Start the workers that making some datasets' rows will need, while the caller does something else first."""
    size = sum(sources.sum_local_bytes(project.recipe.datasets[name].source, project.base) for name in datasets)
    open_shared_executor(project.recipe).start(size)


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


def prepare_step(context: StageContext, step: Step) -> tuple[str, PreparedStage]:
    """Return a step's fingerprint and the stage ready to run."""
    versions = {"/".join(key): one.version for key, one in sorted(context.inputs.items())}
    prepared = step.stage.prepare(context)
    return step.stage.fingerprint(step.code_version, versions, list_waivers(context, step), prepared.outside), prepared


def find_reusable_output(store: Store, step: Step, fingerprint: str, prepared: PreparedStage) -> Manifest | None:
    """Return the kept output of a fingerprint, if the stage would make the same one now."""
    kept = manifest.find_by_fingerprint(store, step.key, fingerprint)
    return kept if kept is not None and prepared.accepts(kept) else None


def make_stage_context(project: Project, step: Step, inputs: Mapping[StageKey, Manifest]) -> StageContext:
    """Return a stage's context with one worker, for inspection; a build gives it its executor."""
    return StageContext(
        project.store,
        project.base,
        step.key,
        step.dataset,
        inputs,
        LocalPool(1),
        recipe=project.recipe,
    )


def find_kept_output(
    project: Project, step: Step, inputs: Mapping[StageKey, Manifest], *, scratch: Store
) -> Manifest | None:
    """Return the output that a build would reuse for these inputs; what is read on the way is kept in `scratch`."""
    fingerprint, prepared = prepare_step(make_stage_context(replace(project, store=scratch), step, inputs), step)
    return find_reusable_output(project.store, step, fingerprint, prepared)


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
            problems[step.key] = place_error(step.recipe, error)
    return problems


def has_current_options(project: Project, step: Step) -> bool:
    """Return whether a step's current output was made with the recipe's options and this code."""
    made = manifest.load_current_if_intact(project.store, step.key)
    return made is not None and made.code_version == step.code_version


_CHECKED: set[tuple[AnyExecutor, str]] = set()


@dataclass(frozen=True, slots=True)
class _HostCheck:
    """What a host must be able to do: `probe` is a file below the root that the calling process wrote."""

    root: str
    probe: str
    content: bytes
    base: Path
    sources: tuple[SourceFile, ...]
    versions: tuple[tuple[str, str], ...]

    def __call__(self) -> list[str]:
        """Return what this host lacks."""
        different = describe_difference(dict(self.versions), describe_versions())
        if different:
            return [f"has {different}"]
        problems, store = list[str](), Store(self.root)
        try:
            if store.read(self.probe) == self.content:
                own = f"{self.probe}-{uuid.uuid4().hex}"
                store.write(own, self.content)
                store.remove(own)
            else:
                problems.append(f"has another {self.root}")
        except FileNotFoundError:
            problems.append(f"does not see what this process wrote to {store.address('')}")
        except OSError as error:
            problems.append(f"cannot use the storage root {store.address('')}: {error}")
        try:
            for file in self.sources:
                read_first_bytes(file, self.base)
        except OSError as error:
            problems.append(f"cannot read a source: {error}")
        try:
            with tempfile.TemporaryFile() as scratch:
                scratch.write(self.content)
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
    first_files = tuple(find_files(source, project.base)[0] for source in sources if isinstance(source, Files))
    versions = tuple(describe_versions().items())
    check = _HostCheck(project.store.root, probe, content, project.base, first_files, versions)
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
