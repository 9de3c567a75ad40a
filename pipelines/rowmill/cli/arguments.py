"""The arguments that commands share: adding a command, the recipe it works on, the storage root, numbers.

What belongs here: what `argparse` is handed by more than one command. What does not: a command.
"""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

Command: TypeAlias = Callable[[argparse.Namespace], int]
"""Takes the parsed arguments and returns the exit status."""


def add_command(
    commands: "Commands", name: str, command: Command, summary: str, *, takes_overrides: bool = False
) -> argparse.ArgumentParser:
    """Add a command that works on a recipe; `takes_overrides` for options of records datasets by path."""
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.set_defaults(command=command, takes_overrides=takes_overrides)
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of one under configs/")
    add_root_option(parser)
    return parser


def add_root_option(parser: argparse.ArgumentParser) -> None:
    """Add where built things are stored, and whether a recipe may run code."""
    words = "where built things lie: a folder or URL (default: $ROWMILL_STORE, or .rowmill in the project)"
    parser.add_argument("--root", metavar="R", help=words)
    parser.add_argument("--no-code", action="store_true", help="refuse a recipe that names Python code of its own")


def parse_positive(text: str) -> int:
    """Return a positive integer, or refuse the argument."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value
