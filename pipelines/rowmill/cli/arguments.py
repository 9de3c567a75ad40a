"""Arguments that several commands share: the recipe, the storage root, positive numbers."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

Command: TypeAlias = Callable[[argparse.Namespace], int]
"""Takes the parsed arguments and returns the exit status."""


def add_command(
    commands: "Commands", name: str, command: Command, summary: str, *, takes_overrides: bool = False
) -> argparse.ArgumentParser:
    """Add a command that works on a recipe; with `takes_overrides` it accepts `--data__option VALUE` arguments."""
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.set_defaults(command=command, takes_overrides=takes_overrides)
    parser.add_argument("recipe", metavar="RECIPE", help="recipe file, or name of a recipe under configs/")
    add_root_option(parser)
    return parser


def add_root_option(parser: argparse.ArgumentParser) -> None:
    """Add `--root` and `--no-code`."""
    root_help = "storage root, a folder or URL (default: $ROWMILL_STORE, or .rowmill in the project)"
    parser.add_argument("--root", metavar="R", help=root_help)
    parser.add_argument("--no-code", action="store_true", help="refuse a recipe that imports the user's Python code")


def add_workers_option(parser: argparse.ArgumentParser) -> None:
    """Add `--workers`, which replaces `execution.workers`."""
    parser.add_argument(
        "--workers", type=parse_positive, metavar="N", help="worker processes (default: the recipe's execution.workers)"
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json`: one object on stdout and nothing else there; progress and errors stay on stderr."""
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")


def parse_positive(text: str) -> int:
    """Parse a positive integer."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return value
