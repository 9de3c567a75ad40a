"""`rowmill versions`, `publish`, `gc`, `array`: versions of outputs, and builds by a job array."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rowmill.cli.error_boundary import ExitStatus
from rowmill.cli.projects import (
    add_command,
    add_json_option,
    add_workers_option,
    open_project,
    parse_positive,
    report_to_dagster,
    show,
)
from rowmill.core.errors import ConfigError

if TYPE_CHECKING:
    from rowmill.build.runner import Project, Step, StepReport
    from rowmill.build.share import ShareReport
    from rowmill.checks.judge import CheckResult
    from rowmill.cli.projects import Commands

_KEY_HELP = "DATASET/STAGE or STAGE, such as chats/canonical_rows or training_splits"


def add_version_commands(commands: "Commands") -> None:
    """Add the commands on kept versions."""
    versions = add_command(commands, "versions", _run_versions, "list the kept versions of a stage")
    versions.add_argument("key", metavar="KEY", help=_KEY_HELP)
    add_json_option(versions)

    diff = add_command(
        commands, "diff", _run_diff, "compare two kept versions: rows, lengths, fill, shares of datasets"
    )
    diff.add_argument("key", metavar="KEY", help=_KEY_HELP)
    diff.add_argument("before", metavar="BEFORE", help="a version, or a unique prefix of one")
    diff.add_argument("after", metavar="AFTER", nargs="?", help="another version (default: the current one)")

    use = add_command(commands, "use", _run_use, "hold a stage at a kept version until it is released")
    use.add_argument("key", metavar="KEY", help=_KEY_HELP)
    use.add_argument("version", metavar="VERSION", nargs="?", help="a version, or a unique prefix of one")
    use.add_argument("--release", action="store_true", help="let builds make the stage again")

    collect = add_command(commands, "gc", _run_gc, "remove old versions that no current output needs")
    collect.add_argument(
        "--keep", type=parse_positive, metavar="N", default=3, help="newest versions to keep per stage (default: 3)"
    )
    collect.add_argument("--dry-run", action="store_true", help="only list what would be removed")


def _run_versions(args: argparse.Namespace) -> int:
    from rowmill.reports import console as reports
    from rowmill.schema import manifest

    project = open_project(args)
    step = _find_step(project, args.key)
    kept = manifest.list_versions(project.store, step.key)
    current = manifest.load_current(project.store, step.key)
    if args.json:
        fields = {"stage": reports.format_key(step.key), **reports.describe_versions(kept, current)}
        print(reports.format_object(project, fields))
        return ExitStatus.SUCCESS
    show(reports.render_versions(project, kept, current))
    return ExitStatus.SUCCESS


def _run_diff(args: argparse.Namespace) -> int:
    from rowmill.build.comparison import compare_versions
    from rowmill.reports import console as reports
    from rowmill.schema import manifest

    project = open_project(args)
    step = _find_step(project, args.key)
    kept = {output.version: output for output in manifest.list_versions(project.store, step.key)}
    current = manifest.load_current(project.store, step.key)
    chosen = (args.before, args.after or (current.version if current is not None else ""))
    before, after = (kept[_match_version(name, list(kept), f"{project.recipe.name}/{args.key}")] for name in chosen)
    show(reports.render_comparison(before, after, compare_versions(project, before, after)))
    return ExitStatus.SUCCESS


def _run_use(args: argparse.Namespace) -> int:
    from rowmill.build import gate, runner
    from rowmill.reports.console import render_step
    from rowmill.reports.summary import render_released_version, render_used_version
    from rowmill.schema import manifest

    project = open_project(args)
    step = _find_step(project, args.key)
    if args.release == (args.version is not None):
        raise ConfigError(
            f"{project.recipe.name}/{args.key}: use takes a version, or --release; name one of them; "
            f"`rowmill versions {args.recipe} {args.key}` lists the kept versions"
        )
    if args.release:
        hold = gate.release_version(project.store, step.key)
        show(render_released_version(project, step, hold))
        current = manifest.load_current(project.store, step.key)
        if hold is not None and current is not None:
            _show_in_dagster(project, step, runner.report_kept_version(current))
        return ExitStatus.SUCCESS
    runner.publish_statistics(project)
    versions = [output.version for output in manifest.list_versions(project.store, step.key)]
    version = _match_version(args.version, versions, f"{project.recipe.name}/{args.key}")
    report = runner.run_step(project, step, {}, version=version)
    results = runner.check_step(project, step, report.manifest)
    hold = gate.hold_version(project.store, report.manifest)
    _show_in_dagster(project, step, replace(report, held=hold), results)
    show(render_used_version(project, step, report.version))
    show(render_step(project, step, report, results))
    return ExitStatus.GATE_CLOSED if any(result.blocking for result in results) else ExitStatus.SUCCESS


def _show_in_dagster(
    project: "Project", step: "Step", report: "StepReport", results: "Sequence[CheckResult]" = ()
) -> None:
    """Report the version to the project's Dagster instance, as a build does."""
    if (problem := report_to_dagster(project, [(step, report, results)])) is not None:
        print(f"! {problem}", file=sys.stderr)


def _match_version(prefix: str, versions: Sequence[str], where: str) -> str:
    """Return the one known version that starts with `prefix`."""
    matches = [version for version in versions if version.startswith(prefix)]
    if len(matches) == 1:
        return matches[0]
    problem = "no kept version starts with it" if not matches else f"{len(matches)} versions start with it"
    raise ConfigError(f"{where}: {prefix!r}: {problem}; there are {', '.join(versions) or 'none'}; name one of them")


def _find_step(project: "Project", key: str) -> "Step":
    from rowmill.build import steps

    # Dagster's asset keys have a dot where the command line has a slash.
    names = [name for name in key.replace(".", "/").split("/") if name]
    recipe = project.recipe.name
    return steps.find_step(project, tuple(names) if names[:1] == [recipe] else (recipe, *names))


def _run_gc(args: argparse.Namespace) -> int:
    from rowmill.build import gc
    from rowmill.reports.console import render_collected

    project = open_project(args)
    garbage = gc.collect_garbage(project, keep=args.keep, dry_run=args.dry_run)
    show(render_collected(garbage, dry_run=args.dry_run))
    return ExitStatus.SUCCESS


# ── Builds by an array of jobs ──


def add_work_command(commands: "Commands") -> None:
    """Add `work`."""
    work = add_command(
        commands,
        "work",
        _run_work,
        "make one share of the parts of stages, for jobs of Slurm or a batch service; `build` then finds them",
        takes_overrides=True,
    )
    work.add_argument(
        "--share", required=True, metavar="I/N", help="make the parts that fall to share I of N, counted from 1"
    )
    work.add_argument(
        "--only", action="append", metavar="STAGE", default=[], help="make parts of only this stage; repeatable"
    )
    add_workers_option(work)


def _run_work(args: argparse.Namespace) -> int:
    from rowmill.executors import parse_share

    share = parse_share(args.share)
    from rowmill.build.share import ShareOutcome, list_divided_steps, make_share
    from rowmill.core import console as terminal
    from rowmill.reports.progress import BuildProgress

    project, aside = open_project(args), terminal.make_console(sys.stderr)
    with BuildProgress(project, list_divided_steps(project, args.only), aside, aside) as progress:
        reports = make_share(project, share, only=args.only, progress=progress)
    for report in reports:
        print(f"{'/'.join(report.step.key[1:])}: {_describe_report(report)}")
    is_waiting = any(report.outcome is ShareOutcome.WAITING for report in reports)
    return ExitStatus.INPUTS_MISSING if is_waiting else ExitStatus.SUCCESS


def _describe_report(report: "ShareReport") -> str:
    from rowmill.build.share import ShareOutcome
    from rowmill.core.arrays import format_count

    match report.outcome:
        case ShareOutcome.BUILT:
            return "built, nothing to make"
        case ShareOutcome.FINISHED:
            return "all parts are finished; rowmill build makes the output of them"
        case ShareOutcome.MADE:
            missing = format_count(report.missing, "part")
            return f"{format_count(report.made, 'part')} made; {missing} of other shares not finished"
        case ShareOutcome.WAITING:
            return f"waits for {'/'.join((report.waits_for or ())[1:])}; build that, then run this again"


def print_jobs(args: argparse.Namespace) -> int:
    """Print the jobs of a build in shares, each to be submitted to start after the one before it."""
    from rowmill.build.share import list_jobs

    root = ["--root", args.root] if args.root else []
    no_code = ["--no-code"] if args.no_code else []
    overrides = [word for name, value in args.overrides.items() for word in (f"--{name}", value)]
    jobs: list[dict[str, Any]] = []
    for planned in list_jobs(open_project(args)):
        only = [word for name in planned.stages for word in ("--only", name)]
        share = ["--share", "I/N"] if planned.command == "work" else []
        words = ["rowmill", planned.command, args.recipe, *root, *no_code, *overrides, *only, *share]
        jobs.append({"kind": _KINDS[planned.command], "stages": list(planned.stages), "command": shlex.join(words)})
    if args.json:
        print(json.dumps({"jobs": jobs}, indent=2))
    else:
        for job in jobs:
            print(f"{job['kind']:<6} {job['command']}")
    return ExitStatus.SUCCESS


_KINDS = {"work": "array", "build": "one"}
"""How a batch service runs a job: as an array of N, or once."""
