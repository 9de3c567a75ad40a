"""A recipe as a Dagster component, for `defs.yaml` files in a Dagster project of the user's own.

    type: dagster_rowmill.Recipe
    attributes:
      recipe: configs/sft.yaml

`dg list components`, `dg scaffold defs` and `dg check` find it through the entry point in `pyproject.toml`.
"""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import dagster as dg
from pydantic import Field

from dagster_rowmill.definitions import define_recipe, make_broken_asset
from dagster_rowmill.names import name_group_of_file
from dagster_rowmill.recipe_loading import RecipeLoadError
from dagster_rowmill.resources import GATES_RESOURCE, NO_RUN_WAIVERS, StorageResource
from rowmill.build.steps import Project
from rowmill.core import config
from rowmill.core.errors import ConfigError, PipelineError
from rowmill.core.storage import DEFAULT_ROOT_NAME, Store
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Execution


class RecipeScaffolder(dg.Scaffolder[Any]):
    """Writes a `defs.yaml` with a recipe that has everything but the user's tokenizer and files."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        """Write it; the recipe is named as its folder."""
        dataset = {"source": {"train_urls": ["data/*.jsonl"], "after": []}, "format": {"kind": "chat"}}
        started = {"tokenizer": "path/of/a/tokenizer", "seq_len": 2048, "datasets": {"chats": dataset}}
        dg.scaffold_component(request, {"store": DEFAULT_ROOT_NAME, "recipe": started})


@dg.scaffold_with(RecipeScaffolder)
class RecipeComponent(dg.Component, dg.Model, dg.Resolvable):
    """A rowmill recipe: one asset per stage and dataset, their checks, a job, a nightly schedule and a sensor."""

    recipe: str | dict[str, Any] = Field(
        description="The path of a recipe file, from this folder or from the project's root; or the recipe itself."
    )
    name: str | None = Field(
        default=None, description="The name of a recipe that is written here; default: the name of this folder."
    )
    store: str | None = Field(
        default=None,
        description="The storage root: a folder from the project's root, or any fsspec URL; default: .rowmill. All "
        "recipes of a project share one.",
    )
    reports_url: str = Field(default="", description="The address at which the store's folder reports/ is served.")
    executor: dict[str, Any] | None = Field(
        default=None, description="Where the tasks of a stage run, as in execution.executor; it wins over the recipe's."
    )
    on_error: Literal["raise", "show"] = Field(
        default="raise",
        description="What a recipe that cannot be loaded does: raise, so that dg check fails; or show one asset with "
        "the error, while everything else in the code location loads.",
    )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the recipe's definitions.

        Raises ConfigError if the recipe cannot be loaded, unless `on_error` is `show`; with one line per problem.
        """
        try:
            project = self.open_project(context.path, context.project_root)
            storage = _share_storage(project.store.root, self.reports_url)
            return define_recipe(project, {"storage": storage, GATES_RESOURCE: NO_RUN_WAIVERS})
        except PipelineError as error:
            if self.on_error == "raise":
                raise
            broken = RecipeLoadError(name_group_of_file(self._find_name(context.path)), str(error))
            return dg.Definitions(assets=[make_broken_asset(broken)])

    def open_project(self, folder: Path, root: Path) -> Project:
        """Open the recipe of the component in `folder`, in a Dagster project in `root`."""
        where = str(folder / "defs.yaml") if folder.is_dir() else str(folder)
        if isinstance(self.recipe, str):
            start = folder if folder.is_dir() else folder.parent
            places = [start / self.recipe, root / self.recipe]
            file = next((place for place in places if place.is_file()), None)
            if file is None:
                raise ConfigError(
                    f"{where}: attributes.recipe: {self.recipe!r} is not a file in {start} or {root}; expected the "
                    "path of a recipe file, or the recipe itself as a mapping; correct the path, or make one with "
                    "rowmill init"
                )
            base, loaded = recipe.project_folder(file), recipe.load_recipe(file)
        else:
            place = f"{where}: attributes.recipe"
            base, loaded = root, recipe.parse_recipe(self.recipe, name=self._find_name(folder), where=place, base=root)
        if self.executor is not None:
            changed = loaded.execution.model_dump(mode="json") | {"executor": self.executor}
            execution = config.validate_options(Execution, changed, f"{where}: attributes")
            loaded = loaded.model_copy(update={"execution": execution})
        store = self.store or DEFAULT_ROOT_NAME
        return Project(loaded, Store(store if "://" in store else str(root / store)), base)

    def _find_name(self, folder: Path) -> str:
        if self.name is not None:
            return self.name
        if isinstance(self.recipe, str):
            return Path(self.recipe).stem
        return folder.name if folder.is_dir() else folder.parent.name


@cache
def _share_storage(root: str, reports_url: str) -> StorageResource:
    """Return one resource for all components with the same storage: Dagster merges only identical ones."""
    return StorageResource(root=root, reports_url=reports_url)
