"""Dagster resources of the assets: the storage root, and the executors of a run.

What belongs here: the storage root as a Dagster resource, the executors that a recipe can name. What does not: logic,
or the engine's own executors (`pipelines/rowmill/executors/`), which work inside one step.
"""

from typing import Any, Final

import dagster as dg

from rowmill.core.storage import Store


class StorageResource(dg.ConfigurableResource[Any]):
    """The storage root of the engine: a folder or any fsspec URL."""

    root: str
    reports_url: str = ""
    """Base URL of served reports; empty if they are not served."""

    def store(self) -> Store:
        """Return the engine's store for the root."""
        return Store(self.root)

    def served(self, own: str | None) -> str:
        """Return the base URL of reports: the recipe's, else this server's."""
        return own or self.reports_url


RUN_EXECUTORS: Final = {"in_process": dg.in_process_executor, "multiprocess": dg.multiprocess_executor}
"""`execution.run_executor`. In process is the default: a new process costs each step two seconds of imports,
and our workers already use all cores inside a step."""
