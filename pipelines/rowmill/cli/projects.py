"""Which recipe and which storage a command works on: by a path, by a name under `configs/`, by the environment.

What belongs here: finding them and opening the project. What does not: what is done with it.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rowmill.core.errors import ConfigError, suggest_name

if TYPE_CHECKING:
    from rowmill.build.steps import Project
    from rowmill.core.storage import Store


def open_project(given: argparse.Namespace) -> "Project":
    """Open the project of a command's recipe, with the command's overrides and workers."""
    from rowmill.build import steps

    overrides: dict[str, str] = getattr(given, "overrides", {})
    project = steps.open_project(recipe_path(given.recipe), choose_root(given), overrides)
    workers = getattr(given, "workers", None)
    if workers is None:
        return project
    execution = project.recipe.execution.model_copy(update={"workers": workers})
    return replace(project, recipe=project.recipe.model_copy(update={"execution": execution}))


def choose_root(given: argparse.Namespace) -> str | None:
    """Return the storage root of --root or $ROWMILL_STORE; None: the project's own."""
    return given.root or os.environ.get("ROWMILL_STORE") or None


def configs_folder() -> Path | None:
    """Return $ROWMILL_CONFIGS, or the `configs` folder here or above; None if there is none."""
    if os.environ.get("ROWMILL_CONFIGS"):
        return Path(os.environ["ROWMILL_CONFIGS"])
    here = Path.cwd()
    return next((folder / "configs" for folder in (here, *here.parents) if (folder / "configs").is_dir()), None)


def recipe_path(name: str) -> Path:
    """Return the file of a recipe given by its path or its name.

    Raises
    ------
    ConfigError
        Naming the recipes there are, and the nearest.

    """
    from rowmill.recipe import recipe

    given = Path(name)
    if given.is_file() or given.suffix in (".yaml", ".yml"):
        return given
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


def open_folder_store(given: argparse.Namespace) -> "Store":
    """Return the storage of the folder's recipes, whichever they are."""
    from rowmill.core.storage import Store

    configs = configs_folder()
    root = choose_root(given) or str((configs.parent if configs else Path.cwd()) / ".rowmill")
    return Store(root)
