"""Decides whether a recipe may run user code: a format class, or the function of a generation backend.

With the switch on, an untrusted recipe is only data: templates run in a sandbox, and dataset scripts never run.
"""

import os

from rowmill.core.errors import ConfigError

NO_CODE_VARIABLE = "ROWMILL_NO_CODE"
"""The environment variable, which workers, Ray and Dagster's processes inherit; `--no-code` sets it."""


def require_code_permission(target: str, where: str) -> None:
    """Refuse to run the code that a recipe names, if the user has forbidden it."""
    if os.environ.get(NO_CODE_VARIABLE, "0") not in ("", "0"):
        raise ConfigError(
            f"{where}: {target} is Python code, which --no-code or {NO_CODE_VARIABLE} forbids to run; built-in "
            "kinds are allowed; read the code and remove the switch, or choose another kind"
        )
