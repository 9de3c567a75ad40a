"""Commands that build: `build`, `plan`, `advise`, `work`, and those of generated records."""

import argparse
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias

from rowmill.cli.error_boundary import ExitStatus
from rowmill.cli.projects import (
    add_command,
    add_json_option,
    add_workers_option,
    open_project,
    recipe_path,
    report_to_dagster,
    show,
)
from rowmill.cli.version_commands import print_jobs
from rowmill.core.errors import ConfigError, GateError, PipelineError, hint_at_name
from rowmill.core.stage_names import GENERATED_SERIES, PARSED_RECORDS

if TYPE_CHECKING:
    from rich.status import Status

    from rowmill.build.preflight import Finding
    from rowmill.build.runner import Project, Step, StepReport
    from rowmill.checks.judge import CheckResult
    from rowmill.cli.projects import Commands
    from rowmill.executors import SideProcess
    from rowmill.schema.manifest import Manifest

    FinishedStep: TypeAlias = tuple[Step, StepReport, list[CheckResult]]


def add_build_commands(commands: "Commands") -> None:
    """Add the commands that build or forecast a build; `stats` builds the stages up to `truncation_stats`."""
    plan = add_command(
        commands,
        "plan",
        _run_plan,
        "find mistakes on the first records; show what a build would make or reuse, and why",
        takes_overrides=True,
    )
    plan.add_argument(
        "--stages",
        action="store_true",
        help="print the commands of a build in shares, in the order to submit them, the `array` ones once per share",
    )
    add_json_option(plan)
    build = add_command(
        commands, "build", _run_build, "build what is missing or changed, stage by stage", takes_overrides=True
    )
    chosen = build.add_mutually_exclusive_group()
    chosen.add_argument(
        "--only", action="append", metavar="STAGE", default=[], help="build only this stage; repeatable"
    )
    chosen.add_argument("--until", metavar="STAGE", help="build this stage and all stages before it")
    build.add_argument(
        "--skip-preflight", action="store_true", help="do not try the first records of changed datasets before building"
    )
    build.add_argument(
        "--alert", action="store_true", help="tell the execution.alerts of the recipe what became of the build"
    )
    add_json_option(build)
    add_workers_option(build)

    advise = add_command(
        commands,
        "advise",
        _run_advise,
        "for records datasets: propose a table contract, rate columns for grouping, estimate example lengths",
        takes_overrides=True,
    )
    advise.add_argument("--dataset", metavar="D", help="only this dataset")
    advise.add_argument(
        "--write", action="store_true", help="pin each table contract: write it to RECIPE/DATASET.table.yaml"
    )

    export = add_command(
        commands, "export", _run_export, "write the recipe's exports, and print how a trainer loads each"
    )
    export.add_argument("--name", action="append", metavar="N", default=[], help="write only this export; repeatable")
    export.add_argument("--to", metavar="FOLDER", help="copy the export (of several, that of --name) to a new folder")
    add_workers_option(export)

    stats = add_command(
        commands, "stats", _run_stats, "show lengths, truncation, rejects and the effect of other limits; packs nothing"
    )
    stats.add_argument("--strict", action="store_true", help="exit with status 4 if there is a hint")
    add_json_option(stats)
    add_workers_option(stats)


def _run_plan(args: argparse.Namespace) -> int:
    if args.stages:
        return print_jobs(args)
    from rowmill.build import preflight, prepare
    from rowmill.inspection import inspect
    from rowmill.reports.console import describe_plan, format_object, render_plan, render_remarks, render_table_plans
    from rowmill.tokenization import tokenizer_source

    # The hub is asked once, for the first records and for the forecast.
    with tokenizer_source.hold_commits():
        project = open_project(args)
        with _show_trial():
            remarks = preflight.require_no_mistakes(project)
        forecasts = prepare.forecast_steps(project)
        remarks += _note_unused_waivers(project, (one for forecast in forecasts for one in forecast.results))
        if args.json:
            print(format_object(project, describe_plan(forecasts, remarks)))
            return ExitStatus.SUCCESS
        show(render_plan(project, forecasts))
        if remarks:
            show("", render_remarks(remarks), sep="\n")
        if not inspect.list_table_datasets(project):
            return ExitStatus.SUCCESS
        plans = list(inspect.plan_tables(project))
        show(render_table_plans(plans))
        return ExitStatus.INVALID if any(dataset.plan is None for dataset in plans) else ExitStatus.SUCCESS


def _run_advise(args: argparse.Namespace) -> int:
    from rowmill.inspection import inspect
    from rowmill.kinds.joint_rows import require_joint_kind
    from rowmill.recipe.recipe import table_contract_file
    from rowmill.reports.console import render_advice

    project = open_project(args)
    if not inspect.list_table_datasets(project, args.dataset):
        raise ConfigError(
            f"{project.recipe.name}: no records dataset; advise rates the columns of records datasets; choose a recipe "
            "that has one"
        )
    for name, proposal in inspect.propose_contracts(project, args.dataset):
        if proposal is None:
            continue
        if args.write:
            path = table_contract_file(recipe_path(args.recipe), name)
            kind = require_joint_kind(project.recipe.datasets[name].format)
            if kind.has_contract() and not path.exists():
                raise ConfigError(
                    f"datasets.{name}.format.table: the recipe already holds the contract; a file would be a second "
                    "one; edit it in the recipe, or delete it there and run rowmill advise --write again"
                )
            path.parent.mkdir(exist_ok=True)
            path.write_text(proposal, encoding="utf-8")
            print(f"{path}  written; review it: the next build follows it")
        else:
            print(proposal)
    if not args.write:
        show(render_advice(inspect.advise_on_columns(project, args.dataset)))
    return ExitStatus.SUCCESS


def _run_build(args: argparse.Namespace) -> int:
    # OpenBLAS would start a thread per core when NumPy is imported; no stage multiplies matrices, and from a process
    # without threads workers can be forked.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Arrow reads it once. From an allocator of its own, its pages are not those that Python and NumPy gave back: five
    # per cent of a build were spent on clearing new ones.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from rowmill.tokenization import tokenizer_source

    # The hub is asked once, for the first records and for the build.
    with tokenizer_source.hold_commits():
        if not args.alert:
            return _try_and_build(args)
        from rowmill.alerts.delivery import find_missing_secrets
        from rowmill.reports import alert_text

        project = open_project(args)
        for missing in find_missing_secrets(project.recipe.execution.alerts):
            print(f"! {missing}", file=sys.stderr)

        def announce(*errors: Exception) -> None:
            for problem in alert_text.announce(project, errors=errors):
                print(f"! {problem}", file=sys.stderr)

        # A build that somebody interrupted is told nobody.
        try:
            status = _try_and_build(args)
        except Exception as error:
            announce(error)
            raise
        announce()
        return status


def _try_and_build(args: argparse.Namespace) -> int:
    from rowmill.build import prepare
    from rowmill.build.steps import choose_steps

    project = open_project(args)
    only = _choose_stages(project, args.only, args.until)
    steps = choose_steps(project, only)
    with prepare.index_outputs(project, steps, is_whole=not only):
        if not args.skip_preflight:
            project, remarks = _try_first_records_and_begin(project, steps)
            if remarks:
                from rowmill.reports.console import render_remarks

                show(render_remarks(remarks), stream=sys.stderr)
        if args.json:
            return _print_build_as_json(project, steps, only)
        finished: list[FinishedStep] = []
        try:
            blocked = build_stages(project, steps, only, finished=finished)
        except GateError:
            if not only and (report := _write_report(project, closed=True)) is not None:
                print(f"\nreport  {report}")
            raise
        _show_unused_waivers(project, finished)
        if not only:
            from rowmill.reports.summary import summarize_recipe

            summary = summarize_recipe(project, shown=[step.key for step in steps])
            print(f"\n{summary}\n\nreport  {_write_report(project)}")
        return ExitStatus.GATE_CLOSED if blocked else ExitStatus.SUCCESS


def _note_unused_waivers(project: "Project", results: "Iterable[CheckResult]") -> "list[Finding]":
    from rowmill.build.gate import find_unused_waivers
    from rowmill.build.preflight import Finding

    return [Finding(sentence) for sentence in find_unused_waivers(project, results)]


def _show_unused_waivers(project: "Project", finished: "Sequence[FinishedStep]") -> None:
    from rowmill.reports.console import render_remarks

    if unused := _note_unused_waivers(project, (one for _, _, results in finished for one in results)):
        show(render_remarks(unused), stream=sys.stderr)


def _try_first_records_and_begin(project: "Project", steps: "Sequence[Step]") -> "tuple[Project, list[Finding]]":
    """Run the pre-flight while workers start and rows are made; return the project, which knows these, and remarks."""
    from rowmill.build import ahead, preflight, prepare

    status = _show_trial()
    side: SideProcess | None = None

    def start(datasets: "Sequence[str]") -> None:
        nonlocal side
        # Its thread would keep processes from being forked.
        status.stop()
        side = ahead.begin_rows(project, datasets)
        prepare.start_workers(project, datasets)
        status.start()

    try:
        with status:
            remarks = preflight.require_no_mistakes(project, steps, before_trial=start)
    finally:
        begun = ahead.collect_rows(project, side)
    return begun, remarks


def _show_trial() -> "Status":
    from rowmill.core import console as terminal

    return terminal.make_console(sys.stderr).status("trying the first records of every dataset", spinner_style="cyan")


def _print_build_as_json(project: "Project", steps: "Sequence[Step]", only: Sequence[str]) -> int:
    """Build, and print the steps that ran as JSON, past a closed gate too, whose message then goes to stderr."""
    from rowmill.reports import console as reports

    finished: list[FinishedStep] = []

    def print_object(*, closed: bool) -> None:
        report = None if only else _write_report(project, closed=closed)
        fields = {"closed": closed, "report": report, "steps": reports.describe_steps(finished)}
        print(reports.format_object(project, fields))

    try:
        blocked = build_stages(project, steps, only, screen=sys.stderr, finished=finished)
    except GateError:
        print_object(closed=True)
        raise
    print_object(closed=blocked)
    _show_unused_waivers(project, finished)
    return ExitStatus.GATE_CLOSED if blocked else ExitStatus.SUCCESS


def _write_report(project: "Project", *, closed: bool = False) -> str | None:
    """Write the report; if a gate is closed, what prevents the report is not reported, since the gate must be."""
    from rowmill.reports import report_page

    with suppress(*((PipelineError, OSError) if closed else ())):
        return report_page.write_build_report(project)
    return None


def _choose_stages(project: "Project", only: Sequence[str], until: str | None) -> Sequence[str]:
    """Return the labels of the stages to build, with those before `until`; empty for all."""
    from rowmill.build.steps import find_upstream_steps, plan_steps

    planned = plan_steps(project)
    stage_names = {name for step in planned for name in (step.name, step.label)}
    for name in only if until is None else [until]:
        if name not in stage_names:
            raise ConfigError(
                f"{'--only' if until is None else '--until'} {name}: no such stage; there are "
                f"{', '.join(sorted(stage_names))}; {hint_at_name(name, stage_names)}"
            )
    if until is None:
        return only
    last = [step for step in planned if until in (step.name, step.label)]
    return list(dict.fromkeys(step.label for step in (*find_upstream_steps(project, last), *last)))


def build_stages(
    project: "Project",
    steps: "Sequence[Step]",
    only: Sequence[str],
    datasets: Sequence[str] | None = None,
    *,
    screen: TextIO | None = None,
    finished: "list[FinishedStep] | None" = None,
) -> bool:
    """Build some stages while showing progress on `screen`, stdout by default; return whether a blocking check failed.

    Steps are added to `finished` as they end, also those before a gate that is closed.
    """
    from concurrent.futures import ThreadPoolExecutor

    from rowmill.build import runner
    from rowmill.core import console as terminal
    from rowmill.reports.progress import BuildProgress

    ended = [] if finished is None else finished
    trackers = project.recipe.execution.log_to
    if trackers:
        from rowmill.tracking.delivery import find_tracker_problems

        for sentence in filter(None, find_tracker_problems(trackers)):
            print(f"! {sentence}", file=sys.stderr)
    with (
        ThreadPoolExecutor(1, "publish-statistics") as background,
        BuildProgress(project, steps, terminal.make_console(screen), terminal.make_console(sys.stderr)) as progress,
    ):
        # Views over files that need not exist yet, so that `rowmill sql` answers while the build runs.
        published = background.submit(runner.publish_statistics, project)

        def finish(step: "Step", report: "StepReport", results: "list[CheckResult]") -> None:
            ended.append((step, report, results))
            progress.finish(step, report, results)
            if published.done():
                published.result()

        try:
            runner.build(project, progress=progress, begin=progress.begin, finish=finish, only=only, datasets=datasets)
            published.result()
        finally:
            if trackers:
                from rowmill.reports import build_record

                outputs = [report.manifest for _, report, _ in ended]
                for result in build_record.log_outputs(project, outputs, begin=partial(print, file=sys.stderr)):
                    print(f"{'! ' if result.problem else ''}{result.sentence}", file=sys.stderr)
            problem = report_to_dagster(project, ended)
    if problem is not None:
        print(f"! {problem}", file=sys.stderr)
    return any(result.blocking for _, _, results in ended for result in results)


def _run_export(args: argparse.Namespace) -> int:
    from rowmill.reports.summary import render_export_pointers

    project = open_project(args)
    available = [export.name for export in project.recipe.exports]
    chosen: list[str] = args.name or available
    for name in chosen or [""]:
        if name not in available:
            hint = hint_at_name(name, available, "add one under exports: in the recipe")
            raise ConfigError(f"--name {name}: no such export; there are {', '.join(available) or 'none'}; {hint}")
    if args.to is not None and len(chosen) != 1:
        raise ConfigError(
            f"--to {args.to}: a folder holds one export, and these are {len(chosen)}: {', '.join(chosen)}; "
            "choose one with --name, and run once per export"
        )
    from rowmill.build import runner
    from rowmill.stages import exports

    labels = [f"{exports.STAGE.name}/{name}" for name in chosen]
    steps = [step for step in runner.plan_steps(project) if step.label in labels]
    if build_stages(project, steps, labels):
        return ExitStatus.GATE_CLOSED
    if args.to is not None:
        runner.copy_export(project, chosen[0], Path(args.to))
    show(render_export_pointers(project, chosen, args.to))
    return ExitStatus.SUCCESS


def _run_stats(args: argparse.Namespace) -> int:
    from rowmill.build import runner
    from rowmill.reports import console as reports
    from rowmill.reports.build_view import BuildView, load_build_view
    from rowmill.reports.summary import render_statistics
    from rowmill.stages import catalog, truncation_stats

    project = open_project(args)
    stages = catalog.list_stages_up_to(truncation_stats.STAGE)
    steps = [step for step in runner.plan_steps(project) if step.name in stages]

    def print_statistics() -> BuildView:
        build = load_build_view(project)
        if args.json:
            print(reports.format_object(project, reports.describe_statistics(build)))
        else:
            show(render_statistics(build))
        return build

    try:
        blocked = build_stages(project, steps, stages, screen=sys.stderr if args.json else None)
    except GateError:
        # A closed gate is a reason to show the numbers, not to hide them.
        print_statistics()
        raise
    build = print_statistics()
    if blocked:
        return ExitStatus.GATE_CLOSED
    has_hints = any(build.list_hints(name) for name in project.recipe.datasets)
    return ExitStatus.PROBLEM_FOUND if args.strict and has_hints else ExitStatus.SUCCESS


# ── Generation commands ──────────────────────────────────────────────────────────────────────────────


def add_generation_commands(commands: "Commands") -> None:
    """Add the commands that follow training."""
    parse = add_command(
        commands, "parse", _run_parse, "parse generated texts into records, and count why the others failed"
    )
    parse.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="parse only these files and store nothing (default: generation.text_urls)",
    )
    generate = add_command(
        commands,
        "generate",
        partial(_run_after_training, stage=GENERATED_SERIES),
        "generate series, groups or records with the recipe's backend",
    )
    score = add_command(
        commands, "score", _run_score, "ask a teacher's server for the likeliest ids of every trained token"
    )
    score.add_argument("--dataset", metavar="D", help="only this dataset")
    score.add_argument("--backend", choices=["openai"], help="kind of server: one that speaks OpenAI's /completions")
    score.add_argument("--base-url", metavar="URL", help="the URL that /completions is appended to")
    score.add_argument("--model", metavar="M", help="the model's name on the server")
    score.add_argument("--top-k", type=int, metavar="K", help="likeliest ids of each token (8)")
    score.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    score.add_argument("--timeout", type=float, metavar="S", help="seconds until an attempt times out (120)")
    score.add_argument("--retries", type=int, metavar="N", help="further attempts of a request (5)")
    score.add_argument("--concurrency", type=int, metavar="N", help="requests of each worker at once (16)")
    score.add_argument("--output", metavar="FOLDER", help="folder of the scored datasets (default: scored/RECIPE)")
    add_workers_option(score)
    for parser in (parse, generate):
        parser.add_argument("--dataset", metavar="D", help="only this dataset")
        parser.add_argument("--output", metavar="FILE", help="also write the accepted records to FILE as JSON Lines")


def _run_parse(args: argparse.Namespace) -> int:
    from rowmill.inspection import generated_output
    from rowmill.reports.console import render_parsed_files

    if not args.files:
        return _run_after_training(args, PARSED_RECORDS)
    project = open_project(args)
    datasets = generated_output.select_datasets(project, PARSED_RECORDS, args.dataset)
    if len(datasets) > 1:
        raise ConfigError(f"several datasets are generated: {', '.join(datasets)}; choose one with --dataset")
    parsed = generated_output.parse_files(project, datasets[0], args.files)
    show(render_parsed_files(parsed))
    if args.output:
        generated_output.write_json_lines(Path(args.output), parsed.records)
    return ExitStatus.SUCCESS


_TEACHER_FLAGS = {
    "backend": "kind", "base_url": "base_url", "model": "model", "top_k": "top_k", "api_key_env": "api_key_env",
    "timeout": "timeout_seconds", "retries": "retries", "concurrency": "concurrency",
}  # fmt: skip
"""Flags of `score`, and the options of `teacher` that they replace."""


def _run_score(args: argparse.Namespace) -> int:
    """Score the chosen datasets, and copy their scores to the output folder."""
    from rowmill.inspection import generated_output
    from rowmill.stages import teacher_scores

    if "://" in (args.output or ""):
        raise ConfigError(
            f"--output {args.output}: a URL; scored datasets are written to a folder of this machine; name one, and "
            "copy it afterwards"
        )
    flags = {option: value for flag, option in _TEACHER_FLAGS.items() if (value := getattr(args, flag)) is not None}
    project = generated_output.choose_teacher(open_project(args), args.dataset, flags)
    datasets = project.recipe.datasets if args.dataset is None else [args.dataset]
    blocked, outputs = _build_after_training(project, teacher_scores.STAGE.name, datasets)
    if blocked:
        return ExitStatus.GATE_CLOSED
    # Relative paths of a recipe start at its project, not at the folder of this command.
    output = Path(os.path.abspath(args.output or project.base / "scored" / project.recipe.name))
    for scores in outputs:
        generated_output.copy_scored_dataset(project.store, scores, output / scores.key[1])
    print(generated_output.format_scored_datasets(project.recipe, outputs, output))
    return ExitStatus.SUCCESS


def _run_after_training(args: argparse.Namespace, stage: str) -> int:
    """Run a stage that reads a trained model's output, and write its records to `--output`."""
    from rowmill.inspection import generated_output

    project = open_project(args)
    datasets = generated_output.select_datasets(project, stage, args.dataset)
    blocked, outputs = _build_after_training(project, stage, datasets)
    if args.output:
        accepted = (generated_output.iterate_accepted_records(project.store, output) for output in outputs)
        generated_output.write_json_lines(Path(args.output), list(chain.from_iterable(accepted)))
    return ExitStatus.GATE_CLOSED if blocked else ExitStatus.SUCCESS


def _build_after_training(project: "Project", stage: str, datasets: Collection[str]) -> "tuple[bool, list[Manifest]]":
    """Build a stage of some datasets, and show what came out; return whether a check failed, and the outputs."""
    from rowmill.build import runner
    from rowmill.inspection import generated_output
    from rowmill.reports.console import render_generated, render_outdated_builds
    from rowmill.schema import manifest

    steps = [step for step in runner.plan_steps(project) if step.name == stage and step.dataset in datasets]
    built = [step.dataset for step in steps if step.dataset is not None]
    show(render_outdated_builds(generated_output.find_outdated_builds(project, built)), stream=sys.stderr)
    blocked = build_stages(project, steps, [stage], built)
    outputs = [output for step in steps if (output := manifest.load_current(project.store, step.key)) is not None]
    show(render_generated(outputs))
    return blocked, outputs
