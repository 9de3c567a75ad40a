"""`rowmill …`: parses a command line, runs the command, turns what it raises into an exit status and one message.

What belongs here: the parser's frame and the boundary. What does not: commands (`*_commands.py`, one module per group),
what an exception means (`error_boundary.py`), tables and sentences (`reports/`).

Nothing heavy is imported before a command needs it, so that `rowmill --help` answers at once.
"""

import argparse
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rowmill.cli.build_commands import add_build_commands
from rowmill.cli.error_boundary import (
    BLOCKED,
    DONE,
    FOUND,
    WRONG,
    choose_exit_status,
    explain_error,
    name_missing_package,
)
from rowmill.cli.generation_commands import add_generation_commands
from rowmill.cli.inspection_commands import add_inspection_commands
from rowmill.cli.project_commands import add_init_command, add_ui_command
from rowmill.cli.version_commands import add_version_commands
from rowmill.core import code_permission

if TYPE_CHECKING:
    from rowmill.cli.arguments import Command

__all__ = ["BLOCKED", "DONE", "FOUND", "WRONG", "main"]

QUIET_LIBRARIES = {
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Nothing reports to anyone, and no library talks into our lines."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A pipe may speak ASCII; a mark that it cannot say must not end a build.
            stream.reconfigure(errors="replace")
    parser = _make_parser()
    given, unknown = parser.parse_known_args(arguments)
    command: Command | None = getattr(given, "command", None)
    if command is None:
        parser.print_help()
        return WRONG
    os.environ.update({name: value for name, value in QUIET_LIBRARIES.items() if name not in os.environ})
    if getattr(given, "no_code", False):
        os.environ[code_permission.NO_CODE_VARIABLE] = "1"
    try:
        given.overrides = _parse_overrides(parser, unknown, allowed=getattr(given, "takes_overrides", False))
        return command(given)
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001  (the boundary: whatever it is, a user gets words)
        if isinstance(raised, BrokenPipeError) and _is_output_unread():
            # `rowmill sql … | head`: the reader has enough. What is left to flush goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return DONE
        given_words = sys.argv[1:] if arguments is None else arguments
        error = name_missing_package(raised, given_words)
        _print_error(explain_error(error, given_words))
        return choose_exit_status(error)


def _is_output_unread() -> bool:
    """Tell whether nobody reads what we print any more; a connection to a storage may break, too."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _parse_overrides(parser: argparse.ArgumentParser, words: Sequence[str], *, allowed: bool) -> dict[str, str]:
    """Read `--data__max_sequences_per_example 3`: options of records datasets, a path with `__` between its words."""
    found: dict[str, str] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, sign, value = word.removeprefix("--").partition("=")
        if not allowed or not word.startswith("--") or "__" not in name or (not sign and not waiting):
            parser.error(f"unrecognized arguments: {' '.join(words)}")
        found[name] = value if sign else waiting.pop(0)
    return found


def _print_error(message: str) -> None:
    sys.stdout.flush()
    try:
        from rich.text import Text

        from rowmill.core.console import BAD, make_console
    except ModuleNotFoundError:  # the base install
        print(message, file=sys.stderr)
        return
    make_console(sys.stderr).print(Text(message, BAD), soft_wrap=True)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rowmill",
        description="Raw datasets in, packed token shards and per-GPU partitions out.",
        epilog="RECIPE is a file, or the name of one under configs/. `rowmill COMMAND --help` says more. "
        "plan, build and advise take options of records datasets, such as --data__max_sequences_per_example 3. "
        "Exit status: 0 done; 1 a closed gate; 2 the recipe, the command, a source or what is stored is not as it must "
        "be; 3 a disk, a network, a storage or a permission failed; 4 `stats --strict` has a hint, or "
        "`template-report --prove` a wrong mask; 70 a bug of rowmill; 130 interrupted.",
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_init_command(commands)
    add_build_commands(commands)
    add_inspection_commands(commands)
    add_generation_commands(commands)
    add_version_commands(commands)
    add_ui_command(commands)
    return parser


class _PrintVersion(argparse.Action):
    """Looks the version up only when it is asked for: reading a distribution's metadata takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import rowmill

        print(f"rowmill {rowmill.__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
