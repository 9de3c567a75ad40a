"""Opens the recipes of a code location: where they are, which can be loaded, and what is wrong with the others."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dagster_rowmill.names import dagster_name, make_asset_key, name_group_of_file
from rowmill.build.steps import Project, open_project, plan_steps
from rowmill.core.errors import ConfigError, PipelineError


class RecipeLoadError(PipelineError):
    """A recipe that cannot be loaded, named as Dagster names its group."""

    def __init__(self, group: str, message: str) -> None:
        """Store both as arguments, so that pickling keeps them."""
        super().__init__(group, message)
        self.group = group
        self.message = message

    def __str__(self) -> str:
        return self.message


def configs_folder() -> Path:
    """Return the folder of recipes: $ROWMILL_CONFIGS, or `configs` in the current folder."""
    folder = Path(os.environ.get("ROWMILL_CONFIGS") or "configs")
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; recipes are <name>.yaml files in a configs folder; "
            "make it, or set ROWMILL_CONFIGS"
        )
    return folder.absolute()


def storage_root(configs: Path) -> str:
    """Return the storage root: $ROWMILL_STORE, or `.rowmill` next to the configs folder."""
    return os.environ.get("ROWMILL_STORE") or str(configs.parent / ".rowmill")


def open_projects(recipes: Sequence[Path], store: str) -> list[Project]:
    """Open every recipe file; all problems are raised as one error."""
    projects, broken = try_open_projects(recipes, store)
    raise_together(broken)
    return projects


def try_open_projects(recipes: Sequence[Path], store: str) -> tuple[list[Project], list[RecipeLoadError]]:
    """Return the projects that could be opened, and the problems of the others."""
    projects: list[Project] = []
    broken: list[RecipeLoadError] = []
    for path in recipes:
        try:
            projects.append(open_project(path, store))
        except PipelineError as error:
            broken.append(RecipeLoadError(name_group_of_file(path.stem), str(error)))
    broken += _find_name_clashes(recipes, projects)
    unusable = {error.group for error in broken}
    return [project for project in projects if dagster_name(project.recipe.name) not in unusable], broken


def _find_name_clashes(recipes: Sequence[Path], projects: Sequence[Project]) -> list[RecipeLoadError]:
    """Return an error for each name clash: Dagster's names have no hyphens, so `a-b` and `a_b` are the same."""
    by_recipe = Counter(name_group_of_file(path.stem) for path in recipes)
    clashes = [
        RecipeLoadError(
            name_group_of_file(path.stem),
            f"{path}: recipe {path.stem!r} is named like another one; recipes must differ in more than "
            "'-' and '_'; rename it",
        )
        for path in recipes
        if by_recipe[name_group_of_file(path.stem)] > 1
    ]
    if clashes:
        return clashes
    keys = [make_asset_key(step.key) for project in projects for step in plan_steps(project)]
    steps = Counter(key.to_python_identifier() for key in keys)
    return [
        RecipeLoadError(
            dagster_name(key.path[0]),
            f"{key.to_user_string()}: another stage has the same name in Dagster, {key.to_python_identifier()}; "
            "dataset names must differ in more than '-', '_' and '__'; rename the dataset",
        )
        for key in keys
        if steps[key.to_python_identifier()] > 1
    ]


def raise_together(broken: Sequence[RecipeLoadError]) -> None:
    """Raise the problems of several recipes as one error, if there are any."""
    if broken:
        raise ConfigError("\n".join(str(error) for error in broken))
