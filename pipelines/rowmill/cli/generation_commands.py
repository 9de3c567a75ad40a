"""`rowmill parse` and `generate`: what comes after training.

What belongs here: their options, one call of the engine each, its report printed. What does not: parsing, generating.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rowmill.cli.arguments import add_command
from rowmill.cli.build_commands import build_stages
from rowmill.cli.error_boundary import BLOCKED, DONE
from rowmill.cli.projects import open_project
from rowmill.core.errors import ConfigError

if TYPE_CHECKING:
    from rowmill.cli.arguments import Commands


def add_generation_commands(commands: "Commands") -> None:
    """Add the commands that come after training."""
    parse = add_command(commands, "parse", _run_parse, "take generated texts apart: records, and why the rest is none")
    parse.add_argument(
        "files", metavar="FILE", nargs="*", help="parse these alone and store nothing; default: generation.text_urls"
    )
    generate = add_command(
        commands, "generate", _run_generate, "ask the recipe's backend for series, groups or records"
    )
    for parser in (parse, generate):
        parser.add_argument("--dataset", metavar="D", help="only this dataset")
        parser.add_argument("--output", metavar="FILE", help="write the accepted records there, as JSON Lines")


def _run_parse(given: argparse.Namespace) -> int:
    from rowmill.core import console as terminal
    from rowmill.inspection import generated_output
    from rowmill.reports.console import render_parsed_files
    from rowmill.stages import parsed_records

    stage = parsed_records.STAGE.name
    if not given.files:
        return _run_after_training(given, stage)
    project = open_project(given)
    dataset = _require_one_dataset(generated_output.select_datasets(project, stage, given.dataset))
    parsed = generated_output.parse_files(project, dataset, given.files)
    terminal.make_console().print(render_parsed_files(parsed))
    if given.output:
        generated_output.write_json_lines(Path(given.output), parsed.records)
    return DONE


def _run_generate(given: argparse.Namespace) -> int:
    from rowmill.stages import generated_series

    return _run_after_training(given, generated_series.STAGE.name)


def _run_after_training(given: argparse.Namespace, stage: str) -> int:
    """Run a stage behind a trained model, show what came of it, and write its records where that is asked for."""
    from rowmill.build import runner
    from rowmill.core import console as terminal
    from rowmill.inspection import generated_output
    from rowmill.reports.console import render_generated, render_outdated_builds
    from rowmill.schema import manifest

    project = open_project(given)
    datasets = generated_output.select_datasets(project, stage, given.dataset)
    steps = [step for step in runner.plan_steps(project) if step.name == stage and step.dataset in datasets]
    terminal.make_console(sys.stderr).print(
        render_outdated_builds(generated_output.find_outdated_builds(project, datasets))
    )
    blocked = build_stages(project, steps, [stage], datasets)
    made = [one for step in steps if (one := manifest.load_current(project.store, step.key)) is not None]
    terminal.make_console().print(render_generated(made))
    if given.output:
        records = [text for one in made for text in generated_output.iterate_accepted_records(project.store, one)]
        generated_output.write_json_lines(Path(given.output), records)
    return BLOCKED if blocked else DONE


def _require_one_dataset(datasets: Sequence[str]) -> str:
    if len(datasets) > 1:
        raise ConfigError(f"several datasets are generated: {', '.join(datasets)}; one is needed; add --dataset")
    return datasets[0]
