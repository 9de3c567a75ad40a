"""Shows a recipe that cannot be loaded as an asset group of its own, with its error.

A code location in which one recipe is wrong loads all others: their schedules tick, and one typing error is not an
outage for everyone who shares the location.
"""

import dagster as dg

from rowmill.core.errors import PipelineError

LAST_PART = "cannot_be_loaded"
"""The last part of the asset's key, which is its name in the graph."""


class RecipeLoadError(PipelineError):
    """A recipe that cannot be loaded, named as Dagster names its group."""

    def __init__(self, group: str, message: str) -> None:
        """Store both as arguments, so that pickling keeps them."""
        super().__init__(group, message)
        self.group = group
        self.message = message

    def __str__(self) -> str:
        """Return the message alone."""
        return self.message


def make_broken_asset(error: RecipeLoadError) -> dg.AssetsDefinition:
    """Return the only asset of a recipe that cannot be loaded: its page shows the error, and so does a run of it."""
    text = error.message.replace("```", "'''")

    @dg.asset(
        key=[error.group, LAST_PART],
        group_name=error.group,
        kinds={"error"},
        description=f"This recipe cannot be loaded, so it has no other assets and no schedule.\n\n```\n{text}\n```\n\n"
        "Correct it, and reload the code location.",
    )
    def body() -> None:
        raise dg.Failure(error.message, allow_retries=False)

    return body
