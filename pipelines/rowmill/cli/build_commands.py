"""`rowmill plan`, `build`, `advise`, `export`, `stats`: what builds, and what says beforehand what a build would do.

What belongs here: their options, one call of the engine each, its report printed. What does not: any stage's work.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rowmill.cli.arguments import add_command, parse_positive
from rowmill.cli.error_boundary import BLOCKED, DONE, FOUND, WRONG
from rowmill.cli.projects import open_project, recipe_path
from rowmill.core.errors import ConfigError, GateError, suggest_name

if TYPE_CHECKING:
    from rowmill.build.runner import Project, Step
    from rowmill.cli.arguments import Commands
    from rowmill.recipe.recipe import Recipe


def add_build_commands(commands: "Commands") -> None:
    """Add the commands that build, and `stats`, which builds as far as lengths are known."""
    add_command(
        commands,
        "plan",
        _run_plan,
        "say what a build would make, what it would reuse, and why",
        takes_overrides=True,
    )
    build = add_command(
        commands, "build", _run_build, "build what is missing or changed, stage by stage", takes_overrides=True
    )
    build.add_argument(
        "--only", action="append", metavar="STAGE", default=[], help="only stages of this name; may be repeated"
    )
    build.add_argument(
        "--workers", type=parse_positive, metavar="N", help="worker processes, instead of execution.workers"
    )

    advise = add_command(
        commands,
        "advise",
        _run_advise,
        "propose the table contract of records, judge their columns as groups, and say how long examples become",
        takes_overrides=True,
    )
    advise.add_argument("--dataset", metavar="D", help="only this dataset")
    advise.add_argument(
        "--write", action="store_true", help="write each table contract to RECIPE/DATASET.table.yaml, which pins it"
    )

    export = add_command(
        commands, "export", _run_export, "write the recipe's exports, and say how to point their trainers at them"
    )
    export.add_argument(
        "--name", action="append", metavar="N", default=[], help="only the export of this name; may be repeated"
    )
    export.add_argument("--to", metavar="FOLDER", help="put a copy of one export into a new folder")
    export.add_argument(
        "--workers", type=parse_positive, metavar="N", help="worker processes, instead of execution.workers"
    )

    stats = add_command(
        commands, "stats", _run_stats, "lengths, truncation, rejects, and what another limit would do; packs nothing"
    )
    stats.add_argument("--strict", action="store_true", help="exit with 4 if there is a hint")
    stats.add_argument(
        "--workers", type=parse_positive, metavar="N", help="worker processes, instead of execution.workers"
    )


def _run_plan(given: argparse.Namespace) -> int:
    from rowmill.build import plan
    from rowmill.core import console as terminal
    from rowmill.inspection import dry_run
    from rowmill.reports import table_plans
    from rowmill.reports.console import render_plan

    project, screen = open_project(given), terminal.make_console()
    screen.print(render_plan(project, plan.forecast_steps(project)))
    if not dry_run.list_table_datasets(project):
        return DONE
    planned = list(dry_run.plan_tables(project))
    screen.print(table_plans.render_table_plans(planned))
    return WRONG if any(one.plan is None for one in planned) else DONE


def _run_advise(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection import dry_run
    from rowmill.reports import table_plans

    project, screen = open_project(given), terminal.make_console()
    if not dry_run.list_table_datasets(project, given.dataset):
        raise ConfigError(f"{project.recipe.name}: no records dataset; advice is on their columns; name another recipe")
    for name, proposal in dry_run.propose_contracts(project, given.dataset):
        if proposal is None:
            continue
        if given.write:
            print(_write_table_contract(recipe_path(given.recipe), project.recipe, name, proposal.document))
        else:
            print(proposal.document)
    if not given.write:
        screen.print(table_plans.render_advice(dry_run.advise_on_columns(project, given.dataset)))
    return DONE


def _write_table_contract(recipe_path: Path, loaded: "Recipe", dataset: str, document: str) -> str:
    """Write a table contract beside its recipe; return what is to be said of it."""
    from rowmill.recipe.recipe import table_contract_file

    path = table_contract_file(recipe_path, dataset)
    form = loaded.datasets[dataset].format
    if form.kind == "records" and form.table is not None and not path.exists():
        raise ConfigError(
            f"datasets.{dataset}.format.table: the contract stands in the recipe; a file would be a second one; "
            "correct it there, or delete it and ask again"
        )
    path.parent.mkdir(exist_ok=True)
    path.write_text(document, encoding="utf-8")
    return f"{path}  written; look through it: the next build follows it"


def _run_build(given: argparse.Namespace) -> int:
    from rowmill.build import runner
    from rowmill.reports import report_page
    from rowmill.reports.summary import summarize_recipe

    project = open_project(given)
    steps = [step for step in runner.plan_steps(project) if _is_selected_step(step, given.only)]
    _require_known_stages(given.only, {name for step in runner.plan_steps(project) for name in (step.name, step.label)})
    blocked = build_stages(project, steps, given.only)
    if not given.only:
        print(f"\n{summarize_recipe(project)}\n\nreport  {report_page.write_report(project)}")
    return BLOCKED if blocked else DONE


def _is_selected_step(step: "Step", only: Sequence[str]) -> bool:
    return bool({step.name, step.label} & set(only)) if only else not step.on_demand


def _require_known_stages(only: Sequence[str], known: set[str]) -> None:
    for name in only:
        if name not in known:
            guess = suggest_name(name, known)
            hint = f"did you mean {guess}?" if guess else "name one of them"
            raise ConfigError(f"--only {name}: no such stage; there are {', '.join(sorted(known))}; {hint}")


def build_stages(
    project: "Project", steps: "Sequence[Step]", only: Sequence[str], datasets: Sequence[str] | None = None
) -> bool:
    """Build some stages with their progress shown; return whether a blocking check failed."""
    from rowmill.build import runner
    from rowmill.core import console as terminal
    from rowmill.reports.progress import BuildProgress

    # First of all, so that it answers while the build runs.
    runner.publish_statistics(project)
    with BuildProgress(project, steps, terminal.make_console(), terminal.make_console(sys.stderr)) as watch:
        done = runner.build(project, progress=watch, tell=watch.tell, only=only, datasets=datasets)
    return any(result.blocking for _, _, results in done for result in results)


def _run_export(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.reports.summary import render_export_pointers

    project = open_project(given)
    known = [one.name for one in project.recipe.exports]
    for name in given.name or known or [""]:
        if name not in known:
            guess = suggest_name(name, known)
            hint = f"did you mean {guess}?" if guess else "add one under exports: in the recipe"
            raise ConfigError(f"--name {name}: no such export; there are {', '.join(known) or 'none'}; {hint}")
    if given.to is not None and len(given.name) != 1:
        raise ConfigError(f"--to {given.to}: a folder takes one export; name it with --name; run once per export")
    from rowmill.build import runner
    from rowmill.stages import exports

    labels = [f"{exports.STAGE.name}/{name}" for name in given.name or known]
    steps = [step for step in runner.plan_steps(project) if step.label in labels]
    if build_stages(project, steps, labels):
        return BLOCKED
    if given.to is not None:
        runner.copy_export(project, given.name[0], Path(given.to))
    terminal.make_console().print(render_export_pointers(project, given.name, given.to))
    return DONE


def _run_stats(given: argparse.Namespace) -> int:
    from rowmill.build import runner
    from rowmill.core import console as terminal
    from rowmill.reports.statistics import list_hints, render_statistics
    from rowmill.stages import catalog
    from rowmill.stages.truncation_stats import stage as truncation_stats

    project = open_project(given)
    stages = catalog.list_stages_up_to(truncation_stats.STAGE)
    steps = [step for step in runner.plan_steps(project) if step.name in stages]
    try:
        blocked = build_stages(project, steps, stages)
    except GateError:
        # A shut gate is a reason to look at the numbers, not to hide them.
        terminal.make_console().print(render_statistics(project))
        raise
    terminal.make_console().print(render_statistics(project))
    if blocked:
        return BLOCKED
    return FOUND if given.strict and list_hints(project) else DONE
