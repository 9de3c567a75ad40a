"""What assets are handed from outside: where built things lie, and what runs the steps of a Dagster run.

What belongs here: the storage root as a Dagster resource, the executors a recipe may name. What does not:
logic of any kind, or the engine's own executors (`pipelines/executors/`), which work inside one step.
"""

from typing import Any, Final

import dagster as dg

from rowmill.core.storage import Store


class StorageResource(dg.ConfigurableResource[Any]):
    """The root under which the engine writes: a folder or any fsspec URL."""

    root: str
    reports_url: str = ""
    """Where the folder of reports is served; empty where it is not."""

    def store(self) -> Store:
        """Return the engine's view of the root."""
        return Store(self.root)

    def served(self, own: str | None) -> str:
        """Return where reports are served: where the recipe says, else where this server does."""
        return own or self.reports_url


RUN_EXECUTORS: Final = {"in_process": dg.in_process_executor, "multiprocess": dg.multiprocess_executor}
"""`execution.run_executor`. In process is the default: a new process costs each step two seconds of imports,
and our workers already use all cores inside a step."""
