"""`rowmill init` and `ui`: start a project from data files, and open it in Dagster."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rowmill.cli.error_boundary import ExitStatus
from rowmill.cli.projects import configs_folder, parse_positive

DEFAULT_TOKENIZER = "Qwen/Qwen3-0.6B"
DEFAULT_SEQ_LEN = 2048
"""A small open model, and a sequence length that fits on one GPU with it; the recipe can change both."""

if TYPE_CHECKING:
    from rowmill.cli.projects import Commands


def add_init_command(commands: "Commands") -> None:
    """Add the command that starts a project."""
    init = commands.add_parser(
        "init",
        help="start a project here: write a recipe for your data, workspace.yaml and .gitignore",
        description="Start a project in this folder: detect the format of data files, and write "
        "configs/NAME.yaml, workspace.yaml and .gitignore. Existing files are never overwritten.",
    )
    init.set_defaults(command=_run_init)
    init.add_argument(
        "data", metavar="DATA", nargs="*", help="files, folders, globs or URLs; each becomes a dataset (default: data/)"
    )
    init.add_argument("--name", metavar="NAME", help="recipe name (default: the dataset's name, or this folder's)")
    init.add_argument(
        "--tokenizer",
        metavar="T",
        default=DEFAULT_TOKENIZER,
        help=f"your model's tokenizer: a folder, or a name on the Hugging Face hub (default: {DEFAULT_TOKENIZER})",
    )
    init.add_argument(
        "--seq-len",
        type=parse_positive,
        metavar="N",
        default=DEFAULT_SEQ_LEN,
        help=f"tokens per training sequence (default: {DEFAULT_SEQ_LEN})",
    )


def _run_init(args: argparse.Namespace) -> int:
    from rowmill.recipe.new_project import create_project

    folder = Path.cwd()
    project = create_project(folder, args.data, name=args.name, tokenizer=args.tokenizer, seq_len=args.seq_len)
    for path in project.written:
        print(f"{path.relative_to(folder)}  written")
    for path, missing in project.kept.items():
        print(f"{path.relative_to(folder)}  exists, left as it is" + ("; add to it:" if missing else ""))
        for line in missing:
            print(f"  {line.strip()}")
    print(f"\nrowmill inspect {project.name}   # show rows as the model will see them, trained tokens marked")
    print(f"rowmill build {project.name}     # build shards, checks and a report; `rowmill ui` shows them in Dagster")
    return ExitStatus.SUCCESS


def add_ui_command(commands: "Commands") -> None:
    """Add the command that starts Dagster."""
    ui = commands.add_parser("ui", help="start Dagster's webserver and daemon on this machine")
    ui.set_defaults(command=_run_ui)
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    ui.add_argument("--port", type=parse_positive, default=3000, help="port to listen on (default: 3000)")


def _run_ui(args: argparse.Namespace) -> int:
    from rowmill.cli import ui

    configs = configs_folder()
    ui.serve_ui(configs.parent if configs else Path.cwd(), host=args.host, port=args.port)
    return ExitStatus.SUCCESS
