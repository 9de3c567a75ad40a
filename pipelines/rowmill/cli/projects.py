"""Finds the recipe and the storage root of a command: by path, by name under `configs/`, or by environment variable."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rowmill.core.errors import ConfigError, suggest_name

if TYPE_CHECKING:
    from rowmill.build.steps import Project
    from rowmill.core.storage import Store


def open_project(args: argparse.Namespace) -> "Project":
    """Open the project of a command's recipe, with the command's overrides and workers."""
    from rowmill.build import steps

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
    here = Path.cwd()
    return next((folder / "configs" for folder in (here, *here.parents) if (folder / "configs").is_dir()), None)


def recipe_path(name: str) -> Path:
    """Return the file of a recipe that is named by path or by name.

    Raises
    ------
    ConfigError
        If there is no such recipe; the message lists the known ones and suggests the closest name.

    """
    from rowmill.recipe import recipe

    path = Path(name)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return path
    configs = configs_folder()
    if configs is None:
        raise ConfigError(
            f"{name}: no such recipe; there is no configs folder here or above; name a recipe file, or run in a project"
        )
    known = {path.stem: path for path in recipe.find_recipes(configs)}
    if name not in known:
        guess = suggest_name(name, known)
        hint = f"did you mean {guess}?" if guess else "name one of them, or a recipe file"
        raise ConfigError(
            f"{name}: no recipe of this name; there are {', '.join(known) or 'none'} in {configs}; {hint}"
        )
    return known[name]


def open_folder_store(args: argparse.Namespace) -> "Store":
    """Return the storage that all recipes of the working directory's project share."""
    from rowmill.core.storage import DEFAULT_ROOT_NAME, Store

    configs = configs_folder()
    root = choose_root(args) or str((configs.parent if configs else Path.cwd()) / DEFAULT_ROOT_NAME)
    return Store(root)
