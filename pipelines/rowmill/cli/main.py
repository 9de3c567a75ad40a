"""Entry point of `rowmill`: parse the command line, run the command, turn an exception into a status and a message.

Heavy imports wait until a command needs them, so that `rowmill --help` is fast.
"""

import argparse
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from rowmill.cli.build_commands import add_build_commands, add_generation_commands
from rowmill.cli.error_boundary import ExitStatus, choose_exit_status, explain_error
from rowmill.cli.inspection_commands import add_inspection_commands
from rowmill.cli.projects import add_init_command, add_ui_command, add_view_command
from rowmill.cli.version_commands import add_version_commands, add_work_command
from rowmill.core import errors, installation, own_process
from rowmill.core.telemetry import silence_libraries

if TYPE_CHECKING:
    from rowmill.cli.projects import Command

__all__ = ["ExitStatus", "main", "run"]


def run() -> NoReturn:
    """Run one command as a whole process: the entry point of the `rowmill` script."""
    end = own_process.QuickExit()
    own_process.collect_rarely()
    status = main()
    end.set_status(status)
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A pipe may be ASCII; a character that it cannot encode must not end a build.
            stream.reconfigure(errors="replace")
    # Modules' byte code is kept, in this process and those that it starts. Container images set
    # `PYTHONDONTWRITEBYTECODE`; where modules were installed without byte code (by uv, or with pip's `--no-compile`),
    # every process would compile them again: 8 s for Great Expectations instead of 4.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    args = parse_command_line(arguments)
    command: Command | None = getattr(args, "command", None)
    if command is None:
        _make_parser().print_help()
        return ExitStatus.INVALID
    silence_libraries()
    if getattr(args, "no_code", False):
        os.environ[errors.NO_CODE_VARIABLE] = "1"
    try:
        return command(args)
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001  (the boundary: every exception becomes a message)
        if isinstance(raised, BrokenPipeError) and _is_output_unread():
            # `rowmill sql … | head`: the reader closed the pipe. The rest of the output is discarded.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitStatus.SUCCESS
        command_line = sys.argv[1:] if arguments is None else arguments
        error = raised
        if not isinstance(raised, errors.PipelineError | OSError | KeyboardInterrupt):
            # A package may be missing, or too old to have what is used of it: the error names the command to run.
            error = installation.explain_failure(f"rowmill {' '.join(command_line[:1])}", raised) or raised
        _print_error(explain_error(error, command_line))
        return choose_exit_status(error)


def parse_command_line(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command and its options; exit with status 2 and a message if there is no such command or option."""
    parser = _make_parser()
    args, unknown = parser.parse_known_args(arguments)
    allowed = getattr(args, "takes_overrides", False)
    overrides: dict[str, str] = {}
    remaining = list(unknown)
    while remaining:
        option = remaining.pop(0)
        name, sign, value = option.removeprefix("--").partition("=")
        if not allowed or not option.startswith("--") or "__" not in name or (not sign and not remaining):
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        overrides[name] = value if sign else remaining.pop(0)
    args.overrides = overrides
    return args


def _is_output_unread() -> bool:
    """Return whether stdout's reader is gone; a BrokenPipeError can also come from a connection to a storage."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


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
        description="Build packed token shards and per-GPU partitions from raw datasets.",
        epilog="RECIPE is a recipe file, or the name of one here or under configs/. `rowmill COMMAND --help` shows a "
        "command's options. plan, build, work and advise take options of records datasets, such as "
        "--data__max_sequences_per_example 3. Exit status: 0 done; 1 a gate is closed; 2 invalid recipe, command or "
        "source, or a permission or space is missing; 3 a disk, network, storage or worker failed, so try again; 4 "
        "`stats --strict` has a hint, or `template-report --prove` found a wrong mask; 70 a bug of rowmill; 74 a "
        "stored file is damaged; 75 `work` waits for a stage that is not built; 130 interrupted.",
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_init_command(commands)
    add_build_commands(commands)
    add_work_command(commands)
    add_inspection_commands(commands)
    add_generation_commands(commands)
    add_version_commands(commands)
    add_view_command(commands)
    add_ui_command(commands)
    return parser


class _PrintVersion(argparse.Action):
    """Looks up the version only when asked: reading the distribution's metadata takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import rowmill

        print(f"rowmill {rowmill.__version__}")
        parser.exit()


if __name__ == "__main__":
    run()
