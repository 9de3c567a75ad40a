"""The recipes of a project and the builds of each: which versions a page shows, and what was built from what.

A complete build is named by the version of its ranks, and every address holds that name: a page shows the version that
was current when it was opened, and says when there is a newer one. An incomplete build has no name, so pages show what
is current at the moment.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from rowmill.build.comparison import collect_lineage
from rowmill.build.steps import Project, open_project, plan_steps
from rowmill.core.errors import ConfigError, IntegrityError, PipelineError, hint_at_name
from rowmill.core.stage_names import CANONICAL_ROWS, GPU_PARTITIONS, TOKENIZED_EXAMPLES
from rowmill.core.storage import Store
from rowmill.inspection.trace import Lineage, select_chain
from rowmill.recipe.recipe import find_recipes
from rowmill.reports.build_view import BuildView
from rowmill.schema import manifest
from rowmill.schema.example_counts import ExampleCounts, RowExampleCounts
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.stats import views

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import duckdb


@dataclass(frozen=True)
class Build(BuildView):
    """A build that pages show. `version` names it, empty if it is not complete; `newer` is the name of a newer one."""

    version: str = ""
    newer: str = ""

    @property
    def recipe(self) -> str:
        return self.project.recipe.name

    @cached_property
    def lineages(self) -> Mapping[str, Lineage]:
        """What was built of each dataset, as far as one output was built from the other."""
        return {
            name: Lineage(self.project, name, select_chain(self.made, self.recipe, name))
            for name in self.project.recipe.datasets
        }

    def list_versions(self, *stages: str) -> list[tuple[str, str]]:
        """Return the dataset and the version of each built output of some stages."""
        pairs = ((key, output) for key, output in self.made.items() if output is not None and len(key) == 3)
        return [(key[1], output.version) for key, output in pairs if output.stage in stages]

    @cached_property
    def has_single_examples(self) -> bool:
        """Whether each row has at most one example, and each example one row."""
        for lineage in self.lineages.values():
            output = lineage.made.get(TOKENIZED_EXAMPLES)
            if output is None:
                continue
            if output.find_counts(RowExampleCounts) is None:
                # Its examples are not made of one row each.
                return False
            kept = sum(count for state, _, count in output.ledger if state == KEPT)
            if kept != output.get_counts(ExampleCounts).examples:
                return False
        return True


class Builds:
    """The recipes of a project, and the views of the statistics of each; used by many threads."""

    def __init__(self, recipes: Mapping[str, Path], root: str | None, losses: str = "") -> None:
        self.recipes = dict(recipes)
        self.losses = losses
        self._root = root
        self._lock = Lock()
        self._projects: dict[str, tuple[int, Project]] = {}
        self._views: dict[tuple[str, frozenset[str] | None], views.Views] = {}
        self._builds: dict[str, tuple[Any, Build]] = {}

    @classmethod
    def of_folder(
        cls, configs: Path | None, root: str | None, *, losses: str = "", recipe: Path | None = None
    ) -> "Builds":
        """Return the recipes of a folder, and of a file that may lie elsewhere."""
        paths = {path.stem: path for path in (find_recipes(configs) if configs is not None else ())}
        return cls(paths | ({recipe.stem: recipe} if recipe is not None else {}), root, losses)

    def open_project(self, name: str) -> Project:
        """Return a recipe's project; the recipe is read again when its file changed."""
        if name not in self.recipes:
            known = ", ".join(self.recipes) or "none"
            raise ConfigError(f"{name}: no such recipe; there are {known}; {hint_at_name(name, self.recipes)}")
        path = self.recipes[name]
        stamp = path.stat().st_mtime_ns
        with self._lock:
            known_stamp, project = self._projects.get(name, (0, None))
            if project is None or known_stamp != stamp:
                project = open_project(path, self._root)
                self._projects[name] = stamp, project
        return project

    def open_build(self, name: str, version: str = "") -> Build:
        """Return a build of a recipe by its version, or a prefix of that; the current one if none is named."""
        project = self.open_project(name)
        store, key = project.store, (name, GPU_PARTITIONS)
        steps = plan_steps(project)
        current = manifest.prefetch_current(store, [step.key for step in steps])
        state = current, version
        with self._lock:
            known, build = self._builds.get(f"{name} {version}", (None, None))
        if build is not None and known == state and build.project is project and is_kept(build):
            return build
        loaded = {step.key: _load(store, step.key, current.get(step.key)) for step in steps}
        ranks = loaded.get(key)
        complete = "" if ranks is None else _name_if_complete(project, loaded, ranks)
        if not version or (complete and complete.startswith(version)):
            build = Build(project, loaded, complete[:12])
        else:
            build = Build(project, _load_kept(project, version, loaded), version[:12], complete[:12] or "current")
        with self._lock:
            if len(self._builds) >= MAX_KEPT_BUILDS:
                self._builds.clear()
            self._builds[f"{name} {version}"] = state, build
        return build

    def list_versions(self, build: Build) -> list[tuple[str, str]]:
        """Return the kept builds of a recipe, the newest first: the beginning of each version, and its time."""
        kept = manifest.list_versions(build.project.store, (build.recipe, GPU_PARTITIONS))
        return [(output.version[:12], output.built_at) for output in reversed(kept)]

    def query_builds(self, build: Build, *others: Build) -> "AbstractContextManager[duckdb.DuckDBPyConnection]":
        """Lend a connection to the views of some builds of a recipe.

        `history` holds the versions of these builds only, so that the files of no other version are opened.
        """
        outputs = [output for one in (build, *others) for output in one.made.values() if output is not None]
        return self._open_views(build.project, frozenset(output.version for output in outputs)).query("the list")

    def prepare_lists(self, build: Build) -> None:
        """Open the views of a build, so that its first list does not wait for it: DuckDB takes 0.3 s to import."""
        # A list says what is wrong; nobody waits for this.
        with suppress(PipelineError, OSError), self.query_builds(build):
            pass

    def query_recipe(self, project: Project, sql: str) -> "AbstractContextManager[duckdb.DuckDBPyConnection]":
        """Lend a connection to the views of a recipe, as `rowmill sql QUERY RECIPE` has them, for a person's query."""
        return self._open_views(project, None).query(sql)

    def _open_views(self, project: Project, versions: frozenset[str] | None) -> views.Views:
        key = project.recipe.name, versions
        with self._lock:
            if key not in self._views:
                if not project.store.exists("stats"):
                    raise ConfigError(
                        f"{project.store.path('')}: no statistics here; expected a storage root that holds a build; "
                        f"run rowmill build {project.recipe.name}"
                    )
                # A page that another thread shows has a connection of its own, which keeps its engine.
                if len(self._views) >= MAX_KEPT_BUILDS:
                    self._views.clear()
                self._views[key] = views.open_views(project.store, project.recipe.name, self.losses, versions=versions)
            return self._views[key]


MAX_KEPT_BUILDS = 16
"""Builds whose manifests, and engines whose views, are kept in memory."""


def is_kept(build: Build) -> bool:
    """Return whether `gc` left a build that was read before."""
    ranks = build.find_output(None, GPU_PARTITIONS)
    if not build.version or ranks is None:
        return True
    names = build.project.store.list(f"{manifest.get_stage_folder(ranks.key)}/versions")
    return any(name.startswith(ranks.version) for name in names)


def require_kept(build: Build) -> None:
    """Raise FileNotFoundError if `gc` has removed a build: what was read of its statistics may then not be all.

    Manifests are removed first.
    """
    if not is_kept(build):
        raise FileNotFoundError(f"{build.recipe}: version {build.version} is not kept")


def _load(store: Store, key: StageKey, version: str | None) -> Manifest | None:
    if version is None:
        return None
    with suppress(IntegrityError):
        return manifest.load_version(store, key, version)
    # A build and `gc` came between reading the pointer and its manifest.
    return manifest.load_current(store, key)


def _name_if_complete(project: Project, loaded: Mapping[StageKey, Manifest | None], ranks: Manifest) -> str:
    """Return the version of the ranks if all that is current was built from each other; else an empty text."""
    try:
        lineage = collect_lineage(project, ranks)
    except PipelineError:
        return ""
    inputs = {key: output.version for key, output in loaded.items() if output is not None and key in lineage}
    wanted = {key: output.version for key, output in lineage.items()}
    is_same = all(wanted.get(key) == version for key, version in inputs.items())
    datasets = [(project.recipe.name, name, CANONICAL_ROWS) for name in project.recipe.datasets]
    return ranks.version if is_same and all(key in wanted for key in datasets) else ""


def _load_kept(
    project: Project, version: str, loaded: Mapping[StageKey, Manifest | None]
) -> dict[StageKey, Manifest | None]:
    """Return what a kept build was made of."""
    key = (project.recipe.name, GPU_PARTITIONS)
    kept = [one for one in manifest.list_versions(project.store, key) if one.version.startswith(version)]
    if len({one.version for one in kept}) != 1:
        raise ConfigError(
            f"{project.recipe.name}: version {version} is not kept; it was removed by rowmill gc, or never was built; "
            "open the current build"
        )
    lineage = collect_lineage(project, kept[-1])
    return {one: lineage.get(one) for one in loaded}
