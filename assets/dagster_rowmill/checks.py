"""The checks of every stage as Dagster asset checks.

A check never reads data: the stage counted while it wrote, and the engine judges the count. So a check that runs alone
applies a changed threshold to the existing version, without building anything.
"""

from collections.abc import Iterator
from dataclasses import replace

import dagster as dg

from dagster_rowmill import metadata, reporting
from dagster_rowmill.factory import only_infrastructure_errors
from dagster_rowmill.names import make_asset_key
from dagster_rowmill.resources import RunGatesResource, StorageResource
from rowmill.build import runner, steps
from rowmill.build.gate import propose_run_waivers
from rowmill.build.steps import Project, Step
from rowmill.checks.gates import Threshold
from rowmill.checks.judge import CheckResult
from rowmill.schema import manifest
from rowmill.schema.manifest import StageKey


def make_checks(project: Project) -> list[dg.AssetChecksDefinition]:
    """Return the checks of every step of the recipe that has checks."""
    return [make_stage_checks(project, step) for step in steps.plan_steps(project) if step.shown_thresholds]


def make_stage_checks(project: Project, step: Step) -> dg.AssetChecksDefinition:
    """Return the checks of one stage: one step in a run, each check selectable by itself."""
    asset = make_asset_key(step.key)

    @dg.multi_asset_check(
        name=reporting.name_check_step(asset),
        specs=[_make_check_spec(threshold, asset) for threshold in step.shown_thresholds],
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
                result, asset, metadata.make_check_page(result, placed.store, served, waivers)
            )
        reporting.write_report_after_checks(context, placed, step, shut=any(result.blocking for result in results))

    return body


def _make_check_spec(threshold: Threshold, asset: dg.AssetKey) -> dg.AssetCheckSpec:
    waived = (
        f" A failure is waived within {threshold.waiver_bound:g}: {threshold.waiver_reason}"
        if threshold.waiver_bound is not None
        else ""
    )
    return dg.AssetCheckSpec(
        name=threshold.check,
        asset=asset,
        blocking=threshold.severity == "error",
        description=f"{threshold.what[0].upper()}{threshold.what[1:]}: {threshold.wanted}.{waived}",
    )


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
