"""Makes assets and asset checks of a recipe's steps: one factory, and the gate before every asset with inputs.

    step ──► open_inputs ──► build.run ──► MaterializeResult(data version = content digest, page)
              │  (a) Dagster's event log holds a passing result on this version under these thresholds
              └  (b) so do the engine's own saved results, which no posted event can forge,
                     for this version and for all its ancestors

Dagster's blocking checks hold back only later steps of the same run. Materializing a downstream asset alone,
deselecting the checks, a backfill, a crashed check or a tightened threshold all bypass them; the gate cannot be
bypassed.

A check never reads data: the stage counted while it wrote, and the engine judges the count. So a check that runs alone
applies a changed threshold to the existing version, without building anything. Pages are made in `metadata.py`, and
Dagster's log is read in `history.py`.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import dagster as dg

from dagster_rowmill import history, metadata
from dagster_rowmill.names import dagster_name, list_upstream_assets, make_asset_key
from dagster_rowmill.resources import RunGatesResource, StorageResource
from rowmill.build import gate, runner, steps
from rowmill.build.gate import find_held_version, follow_held_versions, propose_run_waivers
from rowmill.build.steps import Project, Step, find_step, plan_steps
from rowmill.checks import judge
from rowmill.checks.judge import CheckResult
from rowmill.core import arrays
from rowmill.core.errors import PipelineError, is_transient
from rowmill.core.stage_names import CANONICAL_ROWS, TOKENIZED_EXAMPLES
from rowmill.recipe.recipe import Freshness
from rowmill.reports import build_record, console, report_page
from rowmill.reports.progress import RateMeter
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.tracking.delivery import find_tracker_problems

RETRY_POLICY: Final = dg.RetryPolicy(max_retries=2, delay=10, backoff=dg.Backoff.EXPONENTIAL)
"""For disks, networks and lost workers; everything else becomes a Failure that forbids retries."""

CORES_POOL: Final = "cores"
"""Pool of the stages that use every core of the machine."""

CODE_VERSION_TAG: Final = "dagster/code_version"
"""Dagster's tag of a materialization by which it tells that the code changed since."""

LOG_INTERVAL_S: Final = 5.0
"""A progress line in Dagster's log is an event in its database, so there is not one per part."""

BLOCKED_BY: Final = "blocked_by"
"""Metadata key of a step's failure that says which gates are closed."""

PARTITIONED_ASSET: Final = "ranks"
"""The last part of the partitioned asset's key; no stage has this name."""


class StageRunConfig(dg.Config):
    """Configuration of one run, set in the launchpad."""

    version: str | None = None
    """A kept version to use instead of building; verified and gated like a build."""


def make_assets(
    project: Project, condition: dg.AutomationCondition[Any] | None
) -> list[dg.AssetsDefinition | dg.AssetSpec]:
    """Return the assets of a recipe: one per step, and the partitions of those that have some.

    `condition` is the automation condition of the steps.
    """
    steps = plan_steps(project)
    before = find_asset_deps(steps)
    stages = [
        make_stage_asset(
            project,
            step,
            deps=[*map(make_asset_key, before[step.key]), *find_upstream_assets(project, step)],
            condition=None if step.on_demand else condition,
        )
        for step in steps
    ]
    partitions = [
        dg.AssetSpec(
            make_partitions_key(step),
            deps=[make_asset_key(step.key)],
            group_name=dagster_name(step.recipe),
            partitions_def=dg.StaticPartitionsDefinition(list(step.stage.partitions(project.recipe))),
            kinds={"parquet"},
            owners=list(project.recipe.execution.owners),
            tags={"rowmill/stage": step.name},
            description="One partition per data-parallel rank, with its counts. All of them are made, checked and "
            f"published together by {step.name}.",
        )
        for step in steps
        if step.stage.partitions is not None
    ]
    return [*stages, *partitions]


def find_asset_deps(steps: Sequence[Step]) -> dict[StageKey, tuple[StageKey, ...]]:
    """Return the edges of the asset graph: what a step reads, and what it only waits for.

    A step waits for every stage whose checks it needs; a stage that comes before its inputs anyway gets no edge, or the
    last asset would have one to every other. Source files that are read in addition to rows get none either: the rows'
    ids contain the digests of their parts, so a change of the files changes the rows.
    """
    edges: dict[StageKey, tuple[StageKey, ...]] = {}
    before: dict[StageKey, set[StageKey]] = {}
    sources = {step.key for step in steps if not step.inputs}
    for step in steps:
        reached = {key for upstream in step.inputs for key in before[upstream] | {upstream}}
        read = [key for key in step.inputs if key not in sources or len(step.inputs) == 1]
        generated = () if step.generated_by is None else (step.generated_by,)
        edges[step.key] = (*generated, *read, *(key for key in step.gates if key not in reached))
        before[step.key] = reached | set(step.gates)
    return edges


def find_upstream_assets(project: Project, step: Step) -> list[dg.AssetKey]:
    """Return the user's own assets that write what a stage reads; only stages that read a source have any."""
    if step.dataset is None or step.inputs:
        return []
    return list_upstream_assets(project.recipe.datasets[step.dataset].source)


def make_stage_asset(
    project: Project, step: Step, *, deps: Sequence[dg.AssetKey], condition: dg.AutomationCondition[Any] | None
) -> dg.AssetsDefinition:
    """Return a step's asset."""
    freshness = make_freshness_policy(project.recipe.execution.freshness)
    technology = "arrow" if step.name in (CANONICAL_ROWS, TOKENIZED_EXAMPLES) else "parquet"

    @dg.asset(
        key=make_asset_key(step.key),
        deps=deps,
        group_name=dagster_name(step.recipe),
        code_version=step.code_version,
        pool=CORES_POOL if step.stage.uses_all_cores else None,
        retry_policy=RETRY_POLICY,
        automation_condition=condition,
        kinds={"export" if step.stage.scope == "export" else technology},
        owners=list(project.recipe.execution.owners),
        # `tag:"rowmill/dataset"="chats"` selects assets. A tag's value has at most 63 characters; a name may have 64.
        tags={"rowmill/stage": step.name} | ({"rowmill/dataset": step.dataset[:63]} if step.dataset else {}),
        freshness_policy=freshness if step.stage.shows_overdue else None,
        description=step.description,
    )
    def body(
        context: dg.AssetExecutionContext, config: StageRunConfig, storage: StorageResource, gates: RunGatesResource
    ) -> dg.MaterializeResult[Any]:
        with only_infrastructure_errors():
            # The waivers of this run are part of what it builds, as the recipe's are.
            placed = gates.apply(replace(project, store=storage.store()))
        with only_infrastructure_errors(), write_report_after_stage(context, placed, step):
            chosen = find_step(placed, step.key)
            runner.publish_statistics(placed)
            if step == plan_steps(placed)[0]:
                for problem in filter(None, find_tracker_problems(placed.recipe.execution.log_to)):
                    context.log.warning(problem)
            report = run_asset_step(context, placed, chosen, config.version)
            how = "reused" if report.reused else f"made in {arrays.format_seconds(report.seconds)}"
            context.log.info("%s: %s, %s", "/".join(step.key[1:]), how, console.summarize_output(report.manifest))
            for event in iterate_materializations(step, report.manifest):
                context.log_event(event)
            for result in build_record.log_outputs(placed, [report.manifest], begin=context.log.info):
                (context.log.warning if result.problem else context.log.info)(result.sentence)
            return dg.MaterializeResult(
                data_version=dg.DataVersion(report.version),
                metadata=metadata.make_stage_page(
                    placed,
                    report,
                    storage.served(project.recipe.execution.reports_url),
                    # Judged without saving: a page that shows a result opens no gate.
                    judge.preview_checks(placed.store, report.manifest, chosen.shown_thresholds),
                    storage.viewer_url,
                ),
                # Otherwise Dagster takes an output of other waivers for one of the recipe as it is.
                tags={CODE_VERSION_TAG: chosen.code_version},
            )

    return body


def run_asset_step(
    context: dg.AssetExecutionContext, project: Project, step: Step, version: str | None
) -> runner.StepReport:
    """Run a step with the inputs that its asset is to read; with `version`, take that kept version instead."""
    held_version = None if version else find_held_version(project.store, step.key)
    # A kept version is gated by its own inputs, whatever is current now.
    if version:
        inputs = {}
    elif held_version is not None:
        context.log.warning("%s is %s", "/".join(step.key[1:]), held_version.sentence)
        inputs = gate.open_held_inputs(project, held_version)
    else:
        inputs = open_asset_inputs(context.instance, project, step)
    progress = LogProgress(context.log.info)
    return runner.run_step(project, step, inputs, version=version, progress=progress, run_id=context.run.run_id)


def make_freshness_policy(chosen: Freshness | None) -> dg.FreshnessPolicy | None:
    """Return the policy by which Dagster shows that a recipe was not built in time; None without one."""
    if chosen is None:
        return None
    hours = timedelta(hours=chosen.hours)
    try:
        if chosen.deadline is None:
            return dg.FreshnessPolicy.time_window(fail_window=hours)
        return dg.FreshnessPolicy.cron(chosen.deadline, lower_bound_delta=hours)
    except Exception as error:  # its class is not public
        raise dg.DagsterInvalidDefinitionError(f"freshness {chosen.model_dump()}: {error}") from error


# ── Partitions: the ranks of `gpu_partitions` ──────────────────────────────────────────────────────
#
#     gpu_partitions (makes and publishes all ranks) ──► ranks [rank-00000-of-00008, …]
#
# The stage's asset has no partitions: Dagster asks for a choice of partitions before it starts a run that contains a
# partitioned asset, so a first click on "Materialize all" would end in a dialog (docs/decisions/0030). The partitioned
# asset cannot be materialized by itself, so it is in no run's way; the stage's asset materializes it.


def make_partitions_key(step: Step) -> dg.AssetKey:
    """Return the key of the asset that shows a step's partitions."""
    return make_asset_key((*step.key[:-1], PARTITIONED_ASSET))


def iterate_materializations(step: Step, output: Manifest) -> Iterator[dg.AssetMaterialization]:
    """Yield a materialization of each partition of an output; none for a stage without partitions."""
    if step.stage.partitions is not None:
        for rank in output.card.get("ranks", ()):
            page = metadata.make_rank_page(output, rank)
            tags = {"dagster/data_version": str(page["rank content"].value)} if page else None
            yield dg.AssetMaterialization(make_partitions_key(step), partition=rank, metadata=page, tags=tags)


# ── Progress, and the gate ─────────────────────────────────────────────────────────────────────────


class LogProgress:
    """Logs a stage's progress, at most a line every few seconds."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._rates = RateMeter()
        # Counted from the start, so that a short stage logs nothing.
        self._last_s = clock()

    def __call__(
        self, where: str, *, done: int, total: int, rows: int, total_rows: int, tokens: int, seconds: float
    ) -> None:
        """Log a line if the last one is old enough."""
        rates = self._rates.describe(where, rows=rows, total_rows=total_rows, tokens=tokens, seconds=seconds)
        now_s = self._clock()
        if now_s - self._last_s < LOG_INTERVAL_S:
            return
        self._last_s = now_s
        self._log(f"{where}: {done:,} of {total:,} parts, {rates}")


def open_asset_inputs(instance: dg.DagsterInstance, project: Project, step: Step) -> dict[StageKey, Manifest]:
    """Return the manifest of every input of a step whose gates are open, or fail with every closed check.

    A check is closed by the engine's saved result, then by Dagster's record. Raises dg.Failure, which is never retried,
    if one is closed; the message gives each one's value, threshold and remedy.
    """
    manifests: dict[StageKey, Manifest] = {}
    closed: list[str] = []
    store = project.store
    needs = {gated.key: gated.shown_thresholds for gated in plan_steps(project) if gated.key in step.gates}
    versions = history.find_current_versions(instance, needs)
    results = history.CheckHistory(
        instance, [(key, threshold.check) for key, thresholds in needs.items() for threshold in thresholds]
    )
    for key, thresholds in needs.items():
        try:
            manifests[key] = manifest.load_version(store, key, versions[key])
        except PipelineError as missing:
            closed.append(str(missing))
            continue
        where = "/".join(key)
        for threshold in thresholds:
            try:
                judge.require_passing_checks(store, manifests[key], [threshold])
            except PipelineError as refusal:
                closed.append(str(refusal))
                continue
            result = results.on(key, threshold, manifests[key].version) if threshold.severity == "error" else None
            if threshold.severity == "error" and result is None:
                closed.append(
                    f"{where}: {threshold.check}: Dagster has no result for this version; expected {threshold.wanted}; "
                    "run this check"
                )
            elif result is not None and not result.passed and result.severity != dg.AssetCheckSeverity.WARN:
                closed.append(f"{where}: {result.description or threshold.check}")
    if not closed:
        manifests = follow_held_versions(store, manifests)
        try:
            gate.require_open_ancestry(project, [manifests[key] for key in step.inputs], gated=manifests.values())
        except PipelineError as refusal:
            closed.append(str(refusal))
    if closed:
        lines = "\n".join(f"- {line}" for line in closed)
        raise dg.Failure(
            f"Gate closed; nothing was built.\n{lines}",
            allow_retries=False,
            metadata={BLOCKED_BY: dg.MetadataValue.md(lines)},
        )
    return {key: manifests[key] for key in step.inputs}


@contextmanager
def only_infrastructure_errors() -> Generator[None, None, None]:
    """Re-raise transient errors unchanged; turn every other error into a Failure that is not retried."""
    try:
        yield
    except dg.Failure:
        raise
    except Exception as error:
        if is_transient(error):
            raise
        message = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        raise dg.Failure(message, allow_retries=False) from error


# ── The report ───────────────────────────────────────────────────────────────────────────────────────
#
#     run of …            steps                                          report
#     canonical_rows      rows ─► checks                                 after checks
#     the same, no check  rows                                           after rows
#     all                 rows ─► checks ─► examples ─► … ─► checks      after the last checks
#     all, rows fail      rows ─► checks ✗                               after these checks, and after all later ones
#
# Writing the report of three datasets takes 0.25 s, finding that it is up to date 0.02 s. So a step that other steps of
# its run wait for leaves it to them.


_HELD_BACK_RUNS: set[str] = set()
"""Runs of this process in which a step will not run: no step can leave the report to a later one."""


def name_check_step(asset: dg.AssetKey) -> str:
    """Return the name of the step that runs an asset's checks."""
    return f"{asset.to_python_identifier()}__checks"


@contextmanager
def write_report_after_stage(
    context: dg.AssetExecutionContext, project: Project, step: Step
) -> Generator[None, None, None]:
    """Write the report after a stage's work if it is due: its checks will not run, or the work failed."""
    try:
        yield
    except Exception:
        _HELD_BACK_RUNS.add(context.run.run_id)
        # The stage's failure may also prevent the report; only the failure must be reported.
        with suppress(PipelineError, OSError):
            report_page.write_report(project)
        raise
    running = list_run_steps(context)
    if name_check_step(make_asset_key(step.key)) not in running and _is_report_due(context, project, step, running):
        context.log.info("report: %s", report_page.write_build_report(project))


def list_run_steps(context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext) -> set[str]:
    """Return the names of all steps of a run; a run repeated from a failure has fewer than its job."""
    names = {node.name for node in context.job_def.nodes}
    return names & set(context.run.step_keys_to_execute or names)


def _is_report_due(
    context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext, project: Project, step: Step, running: set[str]
) -> bool:
    """Return whether no step of the run reads this step's output or waits for it, directly or through other steps."""
    if context.run.run_id in _HELD_BACK_RUNS:
        return True
    reached, later = {step.key}, set[str]()
    for candidate in plan_steps(project):
        if not reached.isdisjoint((*candidate.inputs, *candidate.gates)):
            reached.add(candidate.key)
            asset = make_asset_key(candidate.key)
            later |= {asset.to_python_identifier(), name_check_step(asset)}
    return running.isdisjoint(later)


# ── Checks ───────────────────────────────────────────────────────────────────────────────────────────


def make_stage_checks(project: Project, step: Step) -> dg.AssetChecksDefinition:
    """Return the checks of one stage: one step in a run, each check selectable by itself."""
    asset = make_asset_key(step.key)
    specs: list[dg.AssetCheckSpec] = []
    for threshold in step.shown_thresholds:
        description = f"{threshold.what[0].upper()}{threshold.what[1:]}: {threshold.wanted}."
        if threshold.waiver_bound is not None:
            description += f" A failure is waived within {threshold.waiver_bound:g}: {threshold.waiver_reason}"
        is_blocking = threshold.severity == "error"
        specs.append(dg.AssetCheckSpec(threshold.check, asset=asset, blocking=is_blocking, description=description))

    @dg.multi_asset_check(
        name=name_check_step(asset),
        specs=specs,
        can_subset=True,
    )
    def body(
        context: dg.AssetCheckExecutionContext, storage: StorageResource, gates: RunGatesResource
    ) -> Iterator[dg.AssetCheckResult]:
        chosen = {check.name for check in context.selected_asset_check_keys}
        served = storage.served(project.recipe.execution.reports_url)
        with only_infrastructure_errors():
            placed = gates.apply(replace(project, store=storage.store()))
            judged = steps.find_step(placed, step.key)
            built = manifest.load_version(placed.store, step.key, find_checked_version(context.instance, step.key))
            results = runner.check_step(placed, judged, built, only=chosen | step.off_checks)
        waivers = propose_run_waivers(results, gates.list_given())
        for result in [result for result in results if result.check in chosen]:
            if result.failed:
                context.log.warning("%s: %s", "/".join(step.key[1:]), result.sentence)
            yield make_asset_check_result(
                result, asset, metadata.make_check_page(result, placed.store, served, waivers, storage.viewer_url)
            )
        if any(result.blocking for result in results):
            _HELD_BACK_RUNS.add(context.run.run_id)
        # Dagster does not wait for checks that cannot block the later steps.
        blocks = any(threshold.severity == "error" for threshold in step.thresholds)
        if not blocks or _is_report_due(context, placed, step, list_run_steps(context)):
            context.log.info("report: %s", report_page.write_build_report(placed))

    return body


def find_checked_version(instance: dg.DagsterInstance, key: StageKey) -> str | None:
    """Return the manifest version of the newest materialization, or None.

    It is read from the metadata, not from the data version: in a run with partitions, a check cannot know which
    materialization it belongs to.
    """
    event = instance.get_latest_materialization_event(make_asset_key(key))
    entry = (
        event.asset_materialization.metadata.get(metadata.VERSION_KEY)
        if event and event.asset_materialization
        else None
    )
    return str(entry.value) if entry else None


def make_asset_check_result(
    result: CheckResult, asset: dg.AssetKey, page: metadata.MetadataPage
) -> dg.AssetCheckResult:
    """Convert a result for Dagster: a blocking failure is an ERROR, every other failure a WARN.

    Dagster has no third outcome. A check that is not applicable passes there; its description and its metadata
    `outcome` show that nothing was judged.
    """
    return dg.AssetCheckResult(
        asset_key=asset,
        check_name=result.check,
        passed=not result.failed,
        severity=dg.AssetCheckSeverity.ERROR if result.blocking else dg.AssetCheckSeverity.WARN,
        description=result.sentence,
        metadata=page,
    )
