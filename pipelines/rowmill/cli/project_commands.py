"""`rowmill init` and `ui`: a project in a folder, begun from data and opened in Dagster.

What belongs here: their options, one call each, what was written. What does not: guessing a recipe
(`recipe/new_project.py`), Dagster's environment (`ui.py`).
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rowmill.cli.arguments import parse_positive
from rowmill.cli.error_boundary import DONE
from rowmill.cli.projects import configs_folder

DEFAULT_TOKENIZER = "Qwen/Qwen3-0.6B"
DEFAULT_SEQ_LEN = 2048
"""A small open model, and sequences that fit beside it on one GPU; both are one word in the recipe."""

if TYPE_CHECKING:
    from rowmill.cli.arguments import Commands


def add_init_command(commands: "Commands") -> None:
    """Add the command that begins a project."""
    init = commands.add_parser(
        "init",
        help="begin a project here: write a recipe for your data, workspace.yaml and .gitignore",
        description="Begin a project in this folder: look at data files, guess their format, and write "
        "configs/NAME.yaml, workspace.yaml and .gitignore. Files that exist are never overwritten.",
    )
    init.set_defaults(command=_run_init)
    init.add_argument(
        "data", metavar="DATA", nargs="*", help="files, folders, globs or URLs; each is a dataset (default: data/)"
    )
    init.add_argument("--name", metavar="NAME", help="the recipe's name (default: the dataset's, or this folder's)")
    init.add_argument(
        "--tokenizer",
        metavar="T",
        default=DEFAULT_TOKENIZER,
        help=f"your model's tokenizer: a folder, or a name on the Hugging Face hub ({DEFAULT_TOKENIZER})",
    )
    init.add_argument(
        "--seq-len",
        type=parse_positive,
        metavar="N",
        default=DEFAULT_SEQ_LEN,
        help=f"tokens per training sequence ({DEFAULT_SEQ_LEN})",
    )


def _run_init(given: argparse.Namespace) -> int:
    from rowmill.recipe.new_project import create_project

    here = Path.cwd()
    project = create_project(here, given.data, name=given.name, tokenizer=given.tokenizer, seq_len=given.seq_len)
    for path in project.written:
        print(f"{path.relative_to(here)}  written")
    for path, missing in project.kept.items():
        print(f"{path.relative_to(here)}  exists, left as it is" + ("; add to it:" if missing else ""))
        for line in missing:
            print(f"  {line.strip()}")
    print(f"\nrowmill inspect {project.name}   # rows as the model will see them, trained tokens marked")
    print(f"rowmill build {project.name}     # shards, checks, a report; `rowmill ui` shows them in Dagster")
    return DONE


def add_ui_command(commands: "Commands") -> None:
    """Add the command that opens Dagster."""
    ui = commands.add_parser("ui", help="open Dagster's webserver and daemon on this machine")
    ui.set_defaults(command=_run_ui)
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    ui.add_argument("--port", type=parse_positive, default=3000, help="port to listen on (3000)")


def _run_ui(given: argparse.Namespace) -> int:
    from rowmill.cli import ui

    configs = configs_folder()
    ui.serve_ui(configs.parent if configs else Path.cwd(), host=given.host, port=given.port)
    return DONE
