"""Names in Dagster: of groups, jobs, schedules and sensors.

What belongs here: turning the engine's names into names that Dagster allows. What does not: choosing the engine's names
(`rowmill.core.storage.check_name`).
"""


def dagster_name(recipe: str) -> str:
    """Return a recipe's name in the form of Dagster's groups, jobs and schedules: without hyphens."""
    return recipe.replace("-", "_")
