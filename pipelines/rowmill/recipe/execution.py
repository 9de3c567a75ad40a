"""How a recipe is run: nothing here changes a byte of the output.

What belongs here: options that never enter a fingerprint. What does not: everything else of a recipe (`recipe.py`).
"""

from typing import Literal

from pydantic import Field

from rowmill.core.config import Config


class Execution(Config):
    """How a recipe is run: nothing here changes a byte, and nothing here enters a fingerprint."""

    workers: int = Field(default=0, ge=0)
    """Number of worker processes; 0 is one per core."""
    cron: str = "0 2 * * *"
    """When the nightly rebuild runs, in UTC."""
    schedule_on: bool = False
    """Whether the nightly rebuild is on when the location is first loaded."""
    watch_sources: bool = False
    """Whether a sensor rebuilds when source files have changed and settled."""
    automation: Literal["off", "on_change"] = "off"
    """Whether assets materialize themselves when what they read has changed."""
    run_executor: Literal["in_process", "multiprocess"] = "in_process"
    """How Dagster runs a job's steps; workers parallelise inside a stage either way."""
    overdue_hours: float | None = Field(default=None, gt=0)
    """Hours without a build after which Dagster shows the order of training as overdue; null is never."""
    owners: tuple[str, ...] = ()
    """Owners shown in Dagster: e-mail addresses or `team:name`."""
    reports_url: str | None = None
    """Where reports are served, for links from Dagster's pages."""
