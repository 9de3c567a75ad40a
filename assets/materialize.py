"""A whole recipe through Dagster in one process: every asset, every rank, every check; for `make demo`.

What belongs here: the run itself and what a terminal shows of it. What does not: definitions, or building
without Dagster (`rowmill build`).

    python -m assets.materialize demo
"""

import argparse
import os
import sys
from pathlib import Path

import dagster as dg

from assets.automation import RECIPE_TAG, all_ranks
from assets.definitions import build_definitions, configs_folder, open_projects, storage_root
from assets.factory import dagster_name
from pipelines import recipe
from pipelines.build import Project
from pipelines.errors import ConfigError, PipelineError, one_of
from pipelines.ui import prepare_home


def materialize_recipe(path: Path, store: str, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    """Run a recipe's whole road in this process; a failed step is in the result, not an exception."""
    [project] = open_projects([path], store)
    job = build_definitions([path], store).resolve_job_def(f"rebuild_{dagster_name(project.recipe.name)}")
    return job.execute_in_process(
        instance=instance,
        tags={**all_ranks(project), RECIPE_TAG: project.recipe.name},
        # Progress and errors; Dagster's own steps are logged as DEBUG.
        run_config={"loggers": {"console": {"config": {"log_level": "INFO"}}}},
        raise_on_error=False,
    )


def failures(result: dg.ExecuteInProcessResult) -> list[str]:
    """Return what each failed step said, in the order in which they failed."""
    said: list[str] = []
    for event in result.all_events:
        if event.is_step_failure:
            data = event.step_failure_data
            text = data.user_failure_data.description if data.user_failure_data else None
            said.append(f"{event.step_key}: {text or (data.error.message if data.error else 'failed')}")
    return said


def find_recipe(name: str, configs: Path) -> Path:
    """Return the file of a recipe by its name.

    Raises
    ------
    ConfigError
        Naming the recipes there are.

    """
    known = {path.stem: path for path in recipe.find(configs)}
    if name not in known:
        raise ConfigError(
            f"{name!r}: no recipe of this name in {configs}; choose {one_of(known) or 'none, it is empty'}"
        )
    return known[name]


def main(arguments: list[str] | None = None) -> int:
    """Materialize one recipe and print the short report; exit status 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="python -m assets.materialize", description=__doc__)
    parser.add_argument("recipe", help="the recipe's name, as in configs/<name>.yaml")
    name = parser.parse_args(arguments).recipe
    try:
        configs = configs_folder()
        path, store = find_recipe(name, configs), storage_root(configs)
        # The same home as `rowmill ui`, so that its pages show this run.
        os.environ["DAGSTER_HOME"] = str(prepare_home(configs.parent))
        with dg.DagsterInstance.get() as instance:
            result = materialize_recipe(path, store, instance)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 2
    for line in failures(result):
        print(line, file=sys.stderr)
    [project] = open_projects([path], store)
    print(summary(project))
    return 0 if result.success else 1


def summary(project: Project) -> str:
    """Return the engine's short report."""
    from pipelines import reports

    return reports.summary(project)


if __name__ == "__main__":
    sys.exit(main())
