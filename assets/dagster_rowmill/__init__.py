"""The Dagster layer: wraps the engine in assets, checks, schedules and pages, and computes nothing itself.

Only public names of `dagster` are used, except in `history.py` and `event_log.py`, which say so.
Never `from __future__ import annotations` here: Dagster compares annotations when it defines an asset.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagster_rowmill.component import RecipeComponent as Recipe
    from dagster_rowmill.definitions import build_definitions
    from dagster_rowmill.materialize import materialize_recipe
    from dagster_rowmill.resources import StorageResource

__all__ = ["Recipe", "StorageResource", "build_definitions", "materialize_recipe"]

_HOMES = {
    "Recipe": ("dagster_rowmill.component", "RecipeComponent"),
    "StorageResource": ("dagster_rowmill.resources", "StorageResource"),
    "build_definitions": ("dagster_rowmill.definitions", "build_definitions"),
    "materialize_recipe": ("dagster_rowmill.materialize", "materialize_recipe"),
}


if not TYPE_CHECKING:  # a type checker that saw it would take every misspelt name for a public one

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first asked for: loading one module must not load all others."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _HOMES[name]
        return getattr(import_module(module), attribute)

    def __dir__() -> list[str]:
        """List the public names too: `dg` finds components by `dir`."""
        return sorted({*globals(), *__all__})
