"""`rowmill ui`: a project in a folder, opened in Dagster.

What belongs here: their options. What does not: Dagster's environment (`ui.py`).
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rowmill.cli.arguments import parse_positive
from rowmill.cli.error_boundary import DONE
from rowmill.cli.projects import configs_folder

if TYPE_CHECKING:
    from rowmill.cli.arguments import Commands


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
