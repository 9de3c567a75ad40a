"""No library sends telemetry, or prints advertisements into our output: what tells them so."""

import os
from typing import Final

NO_TELEMETRY: Final = {
    "DAGSTER_DISABLE_TELEMETRY": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    # rowmill does not use PyTorch, so a warning that it is missing would mislead.
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
"""Environment variables, which processes that we start inherit. Dagster's own setting stops only half of it."""


def silence_libraries() -> None:
    """Set the variables that are not set, before the libraries are imported."""
    for name, value in NO_TELEMETRY.items():
        os.environ.setdefault(name, value)
