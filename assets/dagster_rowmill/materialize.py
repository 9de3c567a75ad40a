"""Materializes a whole recipe with Dagster in one process: every asset, rank and check; for `make demo`.

python -m dagster_rowmill.materialize demo
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rowmill.automation import RECIPE_TAG
from dagster_rowmill.definitions import build_definitions
from dagster_rowmill.history import delete_old_runs, read_days_kept
from dagster_rowmill.names import dagster_name, make_asset_key
from dagster_rowmill.recipe_loading import configs_folder, open_projects, storage_root
from rowmill.build.steps import plan_steps
from rowmill.cli.ui import SERVER_ENVIRONMENT, prepare_home
from rowmill.core import errors
from rowmill.core.errors import ConfigError, PipelineError, join_choices
from rowmill.recipe import recipe
from rowmill.reports import report_page, summary


def materialize_recipe(path: Path, store: str, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    """Run all steps of a recipe in this process; a failed step is in the result, not an exception."""
    [project] = open_projects([path], store)
    definitions = build_definitions([path], store, loggers={"console": stages_only})
    return definitions.resolve_job_def(f"rebuild_{dagster_name(project.recipe.name)}").execute_in_process(
        instance=instance,
        tags={RECIPE_TAG: project.recipe.name},
        run_config={"loggers": {"console": {}}},
        raise_on_error=False,
    )


@dg.logger
def stages_only(_: dg.InitLoggerContext) -> logging.Logger:
    """Print messages of stages and checks, but none of the hundreds of events that Dagster logs about its steps."""
    logger = logging.getLogger("rowmill.stages")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    # Replaced, not added: this is called once for each run of a process.
    logger.handlers = [_StageMessages(sys.stdout)]
    return logger


class _StageMessages(logging.StreamHandler[Any]):
    """Prints only messages: run ids and step names are for the log of a server.

    Errors are Dagster's, one for each step that a failed one holds back; `list_failures` reports each once.
    """

    def emit(self, record: logging.LogRecord) -> None:
        # Dagster adds this attribute to every record that it passes to our logger.
        meta: dict[str, Any] = getattr(record, "dagster_meta", {})
        if meta.get("dagster_event") is None and record.levelno < logging.ERROR:
            print(meta.get("orig_message", record.getMessage()), file=self.stream, flush=True)


def list_failures(result: dg.ExecuteInProcessResult) -> list[str]:
    """Return the message of each failed step, in order of failure; for a bug, with its traceback."""
    failures: list[str] = []
    for event in result.all_events:
        if event.is_step_failure:
            data = event.step_failure_data
            text = data.user_failure_data.description if data.user_failure_data else None
            cause = data.error.cause if data.error else None
            # The messages of our own errors are complete.
            trace = "" if cause is None or hasattr(errors, cause.cls_name or "") else f"\n{cause.to_string()}"
            failures.append(
                f"{event.step_key}: {text or (data.error.message.strip() if data.error else 'failed')}{trace}"
            )
    return failures


def main(arguments: list[str] | None = None) -> int:
    """Materialize one recipe and print its summary; exit status 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="python -m dagster_rowmill.materialize", description=__doc__)
    parser.add_argument("recipe", help="the recipe's name, as in configs/<name>.yaml")
    name = parser.parse_args(arguments).recipe
    try:
        configs = configs_folder()
        recipes = {path.stem: path for path in recipe.find_recipes(configs)}
        if name not in recipes:
            raise ConfigError(
                f"{name!r}: no recipe of this name in {configs}; choose {join_choices(recipes) or 'none, it is empty'}"
            )
        path, store, days = recipes[name], storage_root(configs), read_days_kept()
        # The same home as `rowmill ui`, so that its pages show this run.
        os.environ.update(SERVER_ENVIRONMENT | {"DAGSTER_HOME": str(prepare_home(configs.parent))})
        with dg.DagsterInstance.get() as instance:
            result = materialize_recipe(path, store, instance)
            delete_old_runs(instance, days=days)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 2
    for line in list_failures(result):
        print(line, file=sys.stderr)
    [project] = open_projects([path], store)
    # The log has the failures of these.
    judged = {evaluation.asset_key for evaluation in result.get_asset_check_evaluations()}
    shown = [step.key for step in plan_steps(project) if make_asset_key(step.key) in judged]
    print(summary.summarize_recipe(project, shown=shown))
    print(f"\nreport  {project.store.path(report_page.report_path(project.recipe.name))}")
    return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main())
