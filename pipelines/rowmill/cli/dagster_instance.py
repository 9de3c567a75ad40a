"""Reports a build of the command line to the project's Dagster instance, if there is one."""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rowmill.build.steps import Project


def find_dagster_home(project: "Project") -> str | None:
    """Return $DAGSTER_HOME, or the project's `.dagster`, if it holds a `dagster.yaml`; None without Dagster.

    None also for a storage root other than the one that Dagster's assets have.
    """
    home = Path(os.environ.get("DAGSTER_HOME") or project.base / ".dagster").expanduser()
    of_assets = os.environ.get("ROWMILL_STORE") or str(project.base / ".rowmill")
    if project.store.root != of_assets or not (home / "dagster.yaml").is_file():
        return None
    is_installed = all(importlib.util.find_spec(name) is not None for name in ("dagster", "dagster_rowmill"))
    return str(home.absolute()) if is_installed else None


def report_to_dagster(project: "Project", finished: Sequence[Any]) -> str | None:
    """Report finished steps to the project's instance; return a sentence if that failed, since the build did not."""
    home = find_dagster_home(project)
    if home is None or not finished:
        return None
    os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "1")
    try:
        importlib.import_module("dagster_rowmill.outside_builds").report_steps(home, project, finished)
    # Dagster's storage can fail in any way; the build is complete, and the next one reports what is missing.
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split())[:200]
        return (
            f"{home}: Dagster's history could not be written ({type(error).__name__}: {reason}); the build itself is "
            "complete; the next one reports it, or materialize the assets in Dagster"
        )
    return None
