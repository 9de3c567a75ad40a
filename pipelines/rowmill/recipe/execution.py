"""How a recipe is run: the options that do not affect the output."""

from typing import Literal

from pydantic import Field

from rowmill.core.config import Config
from rowmill.executors import AnyExecutor, LocalExecutor


class Execution(Config):
    """How a recipe is run; no option here affects the output or is part of a fingerprint."""

    workers: int = Field(default=0, ge=0)
    """Number of worker processes on this machine; 0 is one per core."""
    executor: AnyExecutor = LocalExecutor()
    """Where the tasks of a stage run."""
    cron: str = "0 2 * * *"
    """Cron expression of the nightly rebuild, in UTC."""
    schedule_on: bool = False
    """Whether the nightly schedule is on when Dagster first loads it."""
    watch_sources: bool = False
    """Whether a sensor rebuilds after source files changed and then stayed unchanged for one tick."""
    automation: Literal["off", "on_change"] = "off"
    """Whether Dagster materializes assets automatically when their inputs have changed."""
    run_executor: Literal["in_process", "multiprocess"] = "in_process"
    """How Dagster runs a job's steps; workers run in parallel inside a stage either way."""
    overdue_hours: float | None = Field(default=None, gt=0)
    """Hours without a build after which Dagster shows `training_splits` as overdue; null: never."""
    owners: tuple[str, ...] = ()
    """Owners shown in Dagster: e-mail addresses or `team:name`."""
    reports_url: str | None = None
    """Where reports are served, for links from Dagster's pages."""

    def limit_to_this_machine(self, workers: int | None = None) -> "Execution":
        """Return the same with processes of this machine, for work that must not leave it."""
        chosen = self.workers if workers is None else workers
        return self.model_copy(update={"executor": LocalExecutor(), "workers": chosen})
