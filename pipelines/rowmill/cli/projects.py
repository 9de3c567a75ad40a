"""The recipe, the storage and the project that a command's arguments name; `rowmill init` and `ui` on a project."""

import argparse
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from rowmill.cli.error_boundary import ExitStatus
from rowmill.core.errors import ConfigError, hint_at_name
from rowmill.core.own_process import keep_pandas_out

if TYPE_CHECKING:
    from rich.console import RenderableType

    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001
    from rowmill.build.steps import Project

Command: TypeAlias = Callable[[argparse.Namespace], int]
"""Takes the parsed arguments and returns the exit status."""


def add_command(
    commands: "Commands", name: str, command: Command, summary: str, *, takes_overrides: bool = False
) -> argparse.ArgumentParser:
    """Add a command that works on a recipe; with `takes_overrides` it accepts `--data__option VALUE` arguments."""
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.set_defaults(command=command, takes_overrides=takes_overrides)
    parser.add_argument("recipe", metavar="RECIPE", help="recipe file, or name of one here or under configs/")
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


def show(*shown: "RenderableType", sep: str = " ", stream: TextIO | None = None) -> None:
    """Print to a stream, standard output by default, with colours on a terminal."""
    from rowmill.core.console import make_console

    make_console(stream).print(*shown, sep=sep)


# ── Recipe and storage root ──


def open_project(args: argparse.Namespace) -> "Project":
    """Open the project of a command's recipe, with the command's overrides and workers."""
    from rowmill.build import steps

    keep_pandas_out()
    overrides: dict[str, str] = getattr(args, "overrides", {})
    project = steps.open_project(recipe_path(args.recipe), choose_root(args), overrides)
    workers = getattr(args, "workers", None)
    if workers is None:
        return project
    execution = project.recipe.execution.model_copy(update={"workers": workers})
    return replace(project, recipe=project.recipe.model_copy(update={"execution": execution}))


def choose_root(args: argparse.Namespace) -> str | None:
    """Return the storage root from --root or $ROWMILL_STORE; None for the project's default."""
    return args.root or os.environ.get("ROWMILL_STORE") or None


def configs_folder() -> Path | None:
    """Return $ROWMILL_CONFIGS, or the nearest `configs` folder in or above the working directory, or None."""
    if os.environ.get("ROWMILL_CONFIGS"):
        return Path(os.environ["ROWMILL_CONFIGS"])
    current = Path.cwd()
    return next((folder / "configs" for folder in (current, *current.parents) if (folder / "configs").is_dir()), None)


def recipe_path(name: str) -> Path:
    """Return the file of a recipe that is named by path, or by name: one in `configs`, or else in this folder."""
    from rowmill.recipe import recipe

    path = Path(name)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return path
    configs = configs_folder()
    recipes = {} if configs is None else {path.stem: path for path in recipe.find_recipes(configs)}
    beside = (path.with_name(f"{path.name}{suffix}") for suffix in (".yaml", ".yml"))
    if found := recipes.get(name) or next((one for one in beside if one.is_file()), None):
        return found
    if configs is None:
        raise ConfigError(
            f"{name}: no such recipe; there is no configs folder here or above; name a recipe file, or run in a project"
        )
    hint = hint_at_name(name, recipes, "name one of them, or a recipe file")
    raise ConfigError(f"{name}: no recipe of this name; there are {', '.join(recipes) or 'none'} in {configs}; {hint}")


# ── Dagster ──


def find_dagster_home(project: "Project") -> str | None:
    """Return $DAGSTER_HOME, or the project's `.dagster`, if it holds a `dagster.yaml`; None without Dagster.

    None also for a storage root other than the one that Dagster's assets have.
    """
    home = Path(os.environ.get("DAGSTER_HOME") or project.base / ".dagster").expanduser()
    of_assets = os.environ.get("ROWMILL_STORE") or str(project.base / ".rowmill")
    if project.store.root != of_assets or not (home / "dagster.yaml").is_file():
        return None
    is_installed = all(importlib.util.find_spec(name) is not None for name in ("dagster", "dagster_rowmill"))
    return str(home.absolute()) if is_installed else None


def report_to_dagster(project: "Project", finished: Sequence[Any]) -> str | None:
    """Report finished steps to the project's instance; return a sentence if that failed, since the build did not."""
    home = find_dagster_home(project)
    if home is None or not finished:
        return None
    try:
        importlib.import_module("dagster_rowmill.outside_builds").report_steps(home, project, finished)
    # Dagster's storage can fail in any way; the build is complete, and the next one reports what is missing.
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split())[:200]
        return (
            f"{home}: Dagster's history could not be written ({type(error).__name__}: {reason}); the build itself is "
            "complete; the next one reports it, or materialize the assets in Dagster"
        )
    return None


# ── `rowmill init` and `ui`: start a project from data files, and open it in Dagster ──


DEFAULT_TOKENIZER = "Qwen/Qwen3-0.6B"
DEFAULT_SEQ_LEN = 2048
"""A small open model, and a sequence length that fits on one GPU with it; the recipe can change both."""


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
    for name in project.untrained:
        print(
            f"datasets.{name}: nothing of it trains: its records look like prompts, which a trainer answers itself; if "
            "they have answers to train, write format.kind supervised or chat with their columns"
        )
    print(f"\nrowmill inspect {project.name}   # show rows as the model will see them, trained tokens marked")
    print(f"rowmill build {project.name}     # build shards, checks and a report; `rowmill ui` shows them in Dagster")
    return ExitStatus.SUCCESS


def add_ui_command(commands: "Commands") -> None:
    """Add the command that starts Dagster."""
    ui = commands.add_parser("ui", help="start Dagster's webserver and daemon on this machine")
    ui.set_defaults(command=_run_ui)
    ui.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    ui.add_argument("--port", type=parse_positive, default=3000, help="port to listen on (default: 3000)")


def add_view_command(commands: "Commands") -> None:
    """Add the command that shows builds in a browser."""
    about = "show builds in a browser: every number leads to its rows; reads only, on this machine only"
    view = commands.add_parser("view", help=about, description=f"{about[0].upper()}{about[1:]}.")
    view.set_defaults(command=_run_view)
    view.add_argument("recipe", metavar="RECIPE", nargs="?", help="recipe to begin with (default: a page of all)")
    view.add_argument(
        "what", metavar="WHAT", nargs="?", default="", help="what to begin with: a row id, file:line, 'step 12', a text"
    )
    add_root_option(view)
    view.add_argument(
        "--losses", metavar="DIR", default="", help="folder of a trainer's ExampleLosses, shown with rows"
    )
    view.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1); others than loopback want a token",
    )
    view.add_argument("--port", type=parse_positive, default=3002, help="port to listen on (default: 3002)")


def _run_view(args: argparse.Namespace) -> int:
    from urllib.parse import urlencode

    from rowmill.cli.ui import require_free_port
    from rowmill.viewer import server
    from rowmill.viewer.builds import Builds

    path = None if args.recipe is None else recipe_path(args.recipe)
    page = "" if path is None else path.stem
    if args.what:
        page += f"/search?{urlencode({'q': args.what})}"
    builds = Builds.of_folder(configs_folder(), choose_root(args), losses=args.losses, recipe=path)
    if path is not None:
        # A recipe that is not valid is an error of the command, not of a page.
        builds.open_project(path.stem)
    require_free_port(args.host, args.port, "rowmill view", "stop that program, or choose another port with --port")
    # A server has no other end than that a person interrupts it.
    with suppress(KeyboardInterrupt):
        server.serve(
            builds,
            host=args.host,
            port=args.port,
            page=page,
            announce=lambda address: print(address, flush=True),
        )
    return ExitStatus.SUCCESS


def _run_ui(args: argparse.Namespace) -> int:
    from rowmill.cli import ui

    configs = configs_folder()
    ui.serve_ui(configs.parent if configs else Path.cwd(), host=args.host, port=args.port)
    return ExitStatus.SUCCESS
