"""`rowmill parse` and `generate`: the commands that follow training."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rowmill.cli.build_commands import build_stages
from rowmill.cli.error_boundary import ExitStatus
from rowmill.cli.projects import add_command, open_project
from rowmill.core.errors import ConfigError

if TYPE_CHECKING:
    from rowmill.cli.projects import Commands


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
        commands, "generate", _run_generate, "generate series, groups or records with the recipe's backend"
    )
    for parser in (parse, generate):
        parser.add_argument("--dataset", metavar="D", help="only this dataset")
        parser.add_argument("--output", metavar="FILE", help="also write the accepted records to FILE as JSON Lines")


def _run_parse(args: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection import generated_output
    from rowmill.reports.console import render_parsed_files
    from rowmill.stages import parsed_records

    stage = parsed_records.STAGE.name
    if not args.files:
        return _run_after_training(args, stage)
    project = open_project(args)
    datasets = generated_output.select_datasets(project, stage, args.dataset)
    if len(datasets) > 1:
        raise ConfigError(f"several datasets are generated: {', '.join(datasets)}; choose one with --dataset")
    parsed = generated_output.parse_files(project, datasets[0], args.files)
    terminal.make_console().print(render_parsed_files(parsed))
    if args.output:
        generated_output.write_json_lines(Path(args.output), parsed.records)
    return ExitStatus.SUCCESS


def _run_generate(args: argparse.Namespace) -> int:
    from rowmill.stages import generated_series

    return _run_after_training(args, generated_series.STAGE.name)


def _run_after_training(args: argparse.Namespace, stage: str) -> int:
    """Run a stage that reads a trained model's output, show the results, and write its records to `--output`."""
    from rowmill.build import runner
    from rowmill.core import console as terminal
    from rowmill.inspection import generated_output
    from rowmill.reports.console import render_generated, render_outdated_builds
    from rowmill.schema import manifest

    project = open_project(args)
    datasets = generated_output.select_datasets(project, stage, args.dataset)
    steps = [step for step in runner.plan_steps(project) if step.name == stage and step.dataset in datasets]
    terminal.make_console(sys.stderr).print(
        render_outdated_builds(generated_output.find_outdated_builds(project, datasets))
    )
    blocked = build_stages(project, steps, [stage], datasets)
    manifests = [output for step in steps if (output := manifest.load_current(project.store, step.key)) is not None]
    terminal.make_console().print(render_generated(manifests))
    if args.output:
        records = [
            text for output in manifests for text in generated_output.iterate_accepted_records(project.store, output)
        ]
        generated_output.write_json_lines(Path(args.output), records)
    return ExitStatus.GATE_CLOSED if blocked else ExitStatus.SUCCESS
