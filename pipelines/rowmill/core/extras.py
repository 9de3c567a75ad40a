"""Finds the extra of rowmill that brings a missing package, and words the error.

A module of its own, because the base install, which has no pydantic, imports it.
"""

import re
from importlib.metadata import PackageNotFoundError, requires

from rowmill.core.errors import MissingPackageError

_EXTRAS = ("build", "dagster")
"""The extras that commands need, in the order in which they are searched."""

_DISTRIBUTIONS = {"yaml": "pyyaml"}
"""Modules whose name differs from their distribution's."""

_REQUIREMENT = re.compile(r"""^([\w.-]+).*;.*extra\s*==\s*["']([\w-]+)["']""")


def explain_missing_package(where: str, error: ModuleNotFoundError) -> MissingPackageError | None:
    """Return the error for a failed import of a package that an extra brings; None if no extra brings it."""
    missing = (error.name or "").partition(".")[0]
    wanted = _normalize_name(_DISTRIBUTIONS.get(missing, missing))
    try:
        lines = requires("rowmill") or []
    except PackageNotFoundError:
        return None
    found = [match.groups() for line in lines if (match := _REQUIREMENT.match(line))]
    brought_by = {extra for name, extra in found if _normalize_name(name) == wanted}
    extra = next((extra for extra in _EXTRAS if extra in brought_by), None)
    if extra is None:
        return None
    return MissingPackageError(
        f"{where}: the package {missing} is not installed; the base install of rowmill only reads built partitions; "
        f"run pip install 'rowmill[{extra}]'"
    )


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
