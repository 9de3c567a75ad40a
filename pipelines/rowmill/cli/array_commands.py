"""`rowmill work`, and `plan --stages`: a build whose parts are made by an array of jobs."""

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

from rowmill.cli.arguments import add_command, add_workers_option
from rowmill.cli.error_boundary import ExitStatus
from rowmill.cli.projects import open_project

if TYPE_CHECKING:
    from rowmill.build.share import Job, ShareReport
    from rowmill.cli.arguments import Commands


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
    from rowmill.core.number_text import format_count

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

    jobs = list_jobs(open_project(args))
    lines = [(_KINDS[job.command], _write_command(args, job)) for job in jobs]
    if args.json:
        listed: list[dict[str, Any]] = [
            {"kind": kind, "stages": list(job.stages), "command": command}
            for job, (kind, command) in zip(jobs, lines, strict=True)
        ]
        print(json.dumps({"jobs": listed}, indent=2))
    else:
        for kind, command in lines:
            print(f"{kind:<6} {command}")
    return ExitStatus.SUCCESS


_KINDS = {"work": "array", "build": "one"}
"""How a batch service runs a job: as an array of N, or once."""


def _write_command(args: argparse.Namespace, job: "Job") -> str:
    only = [word for name in job.stages for word in ("--only", name)]
    root = ["--root", args.root] if args.root else []
    no_code = ["--no-code"] if args.no_code else []
    overrides = [word for name, value in args.overrides.items() for word in (f"--{name}", value)]
    share = ["--share", "I/N"] if job.command == "work" else []
    return shlex.join(["rowmill", job.command, args.recipe, *root, *no_code, *overrides, *only, *share])
