"""The laws of every stage as Dagster asset checks; no thresholds of its own.

What belongs here: one check per law, blocking exactly where the recipe calls it an error. What does not:
numbers, bounds and judging (`judge.py`), refusing an input (`factory.py`).

A check never looks at data: the stage's writer counted, the engine judges the count. So a check that is run
alone applies a changed threshold to the version that is there, without building anything.
"""

from collections.abc import Iterator
from dataclasses import replace

import dagster as dg

from dagster_rowmill import metadata, reporting
from dagster_rowmill.factory import only_infrastructure_errors
from dagster_rowmill.resources import Storage
from rowmill.build import runner
from rowmill.build.runner import Project, Step
from rowmill.checks.judge import Terms, Verdict
from rowmill.schema import manifest
from rowmill.schema.manifest import Key


def checks_of(project: Project) -> list[dg.AssetChecksDefinition]:
    """Return the checks of every step of the recipe's road that has laws."""
    return [stage_checks(project, step) for step in runner.road(project) if step.terms]


def stage_checks(project: Project, step: Step) -> dg.AssetChecksDefinition:
    """Return the checks of one stage: one step in a run, each law selectable by itself."""
    asset = dg.AssetKey(list(step.key))

    @dg.multi_asset_check(
        name=reporting.check_name(asset),
        specs=[_spec(one, asset) for one in step.terms],
        can_subset=True,
    )
    def body(context: dg.AssetCheckExecutionContext, storage: Storage) -> Iterator[dg.AssetCheckResult]:
        chosen = {check.name for check in context.selected_asset_check_keys}
        served = storage.served(project.recipe.execution.reports_url)
        with only_infrastructure_errors():
            placed = replace(project, store=storage.store())
            built = manifest.by_version(placed.store, step.key, judged_version(context.instance, step.key))
            verdicts = runner.judge(placed, step, built, only=chosen)
        for verdict in verdicts:
            if verdict.failed:
                context.log.warning("%s: %s", "/".join(step.key[1:]), verdict.sentence)
            yield result_of(verdict, asset, metadata.of_verdict(verdict, placed.store, served))
        reporting.write_behind_checks(context, placed, step, shut=any(verdict.blocking for verdict in verdicts))

    return body


def _spec(terms: Terms, asset: dg.AssetKey) -> dg.AssetCheckSpec:
    waived = (
        f" A failure is waived within {terms.waiver_bound:g}: {terms.waiver_reason}"
        if terms.waiver_bound is not None
        else ""
    )
    return dg.AssetCheckSpec(
        name=terms.law,
        asset=asset,
        blocking=terms.severity == "error",
        description=f"{terms.what[0].upper()}{terms.what[1:]}: {terms.wanted}.{waived}",
    )


def judged_version(instance: dg.DagsterInstance, key: Key) -> str | None:
    """Return the version of the manifest that the newest materialization wrote or reused; None if there is none.

    Its metadata is asked, not its data version: a check has no way to be told which materialization it is
    for when a run has partitions.
    """
    event = instance.get_latest_materialization_event(dg.AssetKey(list(key)))
    entry = (
        event.asset_materialization.metadata.get(metadata.VERSION) if event and event.asset_materialization else None
    )
    return str(entry.value) if entry else None


def result_of(verdict: Verdict, asset: dg.AssetKey, page: metadata.Page) -> dg.AssetCheckResult:
    """Word a verdict for Dagster: what blocks is an ERROR, everything else that failed is a WARN.

    Dagster knows no third outcome. What is not applicable raises no alarm there; its description and its metadata
    `outcome` say that nothing was judged.
    """
    return dg.AssetCheckResult(
        asset_key=asset,
        check_name=verdict.law,
        passed=not verdict.failed,
        severity=dg.AssetCheckSeverity.ERROR if verdict.blocking else dg.AssetCheckSeverity.WARN,
        description=verdict.sentence,
        metadata=page,
    )
