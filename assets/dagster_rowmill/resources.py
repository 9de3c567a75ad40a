"""Dagster resources of the assets: the storage root, the waivers of a run, and the executors of a run."""

from typing import Any, Final

import dagster as dg
from pydantic import Field

from rowmill.build.gate import add_run_waivers
from rowmill.build.steps import Project
from rowmill.core.storage import Store


class StorageResource(dg.ConfigurableResource[Any]):
    """The storage root of the engine: a folder or any fsspec URL."""

    root: str
    reports_url: str = ""
    """Base URL of served reports; empty if they are not served."""
    viewer_url: str = ""
    """Address of a `rowmill view` over this storage; empty if there is none."""

    def store(self) -> Store:
        """Return the engine's store for the root."""
        return Store(self.root)

    def served(self, configured_url: str | None) -> str:
        """Return the base URL of reports: the recipe's, else this server's."""
        return configured_url or self.reports_url


class RunWaiver(dg.Config):
    """A failure that is accepted for one run, as in a recipe's `gates.waivers`."""

    check: str
    dataset: str | None = None
    at_most: float | None = None
    at_least: float | None = None
    reason: str


class RunGatesResource(dg.ConfigurableResource[Any]):
    """What a person accepts for one run, once for all its steps: written in the launchpad, empty otherwise."""

    waivers: list[RunWaiver] = Field(default=[])

    def apply(self, project: Project) -> Project:
        """Return the project as this run builds it; raises ConfigError if a waiver is invalid."""
        return add_run_waivers(project, self.list_given(), f"resources.{GATES_RESOURCE}.config.waivers")

    def list_given(self) -> list[dict[str, Any]]:
        """Return the waivers as they were written."""
        return [waiver.model_dump(exclude_none=True) for waiver in self.waivers]


GATES_RESOURCE: Final = "gates"
"""The key of `RunGatesResource` in the definitions, and so in the launchpad."""

NO_RUN_WAIVERS: Final = RunGatesResource()
"""One object for all recipes: Dagster merges only identical resources."""


RUN_EXECUTORS: Final = {"in_process": dg.in_process_executor, "multiprocess": dg.multiprocess_executor}
"""`execution.run_executor`. In process is the default: a new process costs each step two seconds of imports,
and our workers already use all cores inside a step."""
