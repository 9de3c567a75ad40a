"""What Dagster loads: every recipe of the configs folder as assets, checks, a job, a schedule and a sensor.

A code location in which one recipe is wrong loads all others: their schedules tick, and one typing error is not an
outage for everyone who shares the location. The wrong one is an asset group of its own, with its error.
"""

# Before every library: it decides where they come from.
import dagster_rowmill.import_order  # isort: skip  # noqa: F401

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rowmill.automation import (
    make_alert_sensors,
    make_change_condition,
    make_job,
    make_nightly_schedule,
    make_source_sensor,
)
from dagster_rowmill.factory import make_assets, make_stage_checks
from dagster_rowmill.history import daily_prune_history, prune_history
from dagster_rowmill.names import dagster_name
from dagster_rowmill.outside_builds import make_outside_builds_sensor
from dagster_rowmill.recipe_loading import (
    RecipeLoadError,
    configs_folder,
    raise_together,
    storage_root,
    try_open_projects,
)
from dagster_rowmill.resources import GATES_RESOURCE, NO_RUN_WAIVERS, StorageResource
from rowmill.build.steps import Project, plan_steps
from rowmill.core.installation import explain_old_package
from rowmill.core.telemetry import silence_libraries
from rowmill.recipe import recipe

_LOG = logging.getLogger("dagster_rowmill")
BROKEN_PART = "cannot_be_loaded"
"""The last part of the asset's key, which is its name in the graph."""


def make_broken_asset(error: RecipeLoadError) -> dg.AssetsDefinition:
    """Return the only asset of a recipe that cannot be loaded: its page shows the error, and so does a run of it."""
    text = error.message.replace("```", "'''")

    @dg.asset(
        key=[error.group, BROKEN_PART],
        group_name=error.group,
        kinds={"error"},
        description=f"This recipe cannot be loaded, so it has no other assets and no schedule.\n\n```\n{text}\n```\n\n"
        "Correct it, and reload the code location.",
    )
    def body() -> None:
        raise dg.Failure(error.message, allow_retries=False)

    return body


@dg.definitions
def defs() -> dg.Definitions:
    """Load every recipe of this project."""
    configs = configs_folder()
    store = storage_root(configs)
    reports_url, viewer_url = (os.environ.get(name, "") for name in ("ROWMILL_REPORTS_URL", "ROWMILL_VIEWER_URL"))
    storage = StorageResource(root=store, reports_url=reports_url, viewer_url=viewer_url)
    return build_definitions(recipe.find_recipes(configs), store, resources={"storage": storage})


def build_definitions(
    recipes: Sequence[Path],
    store: str,
    *,
    resources: Mapping[str, Any] | None = None,
    loggers: Mapping[str, dg.LoggerDefinition] | None = None,
    strict: bool = False,
) -> dg.Definitions:
    """Return the definitions of some recipe files over a storage root; `resources` replaces resources by name.

    A recipe that cannot be loaded becomes one asset that shows its error, beside all other recipes. Raises ConfigError
    if `strict`: with the problems of every invalid recipe.
    """
    silence_libraries()
    projects, broken = try_open_projects(recipes, store)
    shared = {"storage": StorageResource(root=store), GATES_RESOURCE: NO_RUN_WAIVERS, **(resources or {})}
    defined: list[dg.Definitions] = []
    shown: list[Project] = []
    for project in projects:
        try:
            defined.append(define_recipe(project, shared))
            shown.append(project)
        except RecipeLoadError as error:
            broken.append(error)
    if strict:
        raise_together(broken)
    # An asset per group, since two recipes may have the same name in Dagster; the code server logs each.
    messages: dict[str, list[str]] = {}
    for error in broken:
        _LOG.error("a recipe cannot be loaded, and all others are: %s", error)
        messages.setdefault(error.group, []).append(error.message)
    of_location = dg.Definitions(
        assets=[make_broken_asset(RecipeLoadError(group, "\n".join(lines))) for group, lines in messages.items()],
        loggers=loggers,
        resources=shared,
        # Also for runs of selected assets: a process per step would cost two seconds of imports each.
        executor=dg.in_process_executor,
        jobs=[prune_history],
        schedules=[daily_prune_history],
        sensors=[make_outside_builds_sensor(shown)],
    )
    return dg.Definitions.merge(*defined, of_location)


def define_recipe(project: Project, resources: Mapping[str, Any]) -> dg.Definitions:
    """Return the definitions of one recipe, which can be merged with others that have the same `resources`.

    Raises RecipeLoadError if Dagster refuses one of its options.
    """
    # Automation conditions are beta in the pinned release.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        try:
            job = make_job(project)
            checked = [step for step in plan_steps(project) if step.shown_thresholds]
            return dg.Definitions(
                assets=make_assets(project, make_change_condition(project)),
                asset_checks=[make_stage_checks(project, step) for step in checked],
                resources=resources,
                jobs=[job],
                schedules=[make_nightly_schedule(project, job)],
                sensors=[make_source_sensor(project, job), *make_alert_sensors(project, job)],
            )
        except dg.DagsterInvalidDefinitionError as error:
            name, reason = project.recipe.name, " ".join(str(error).split())
            # An older Dagster refuses what is valid in ours.
            old = explain_old_package(name)
            message = str(old) if old else f"{name}: execution: Dagster refuses it: {reason}; correct that option"
            raise RecipeLoadError(dagster_name(name), message) from error
