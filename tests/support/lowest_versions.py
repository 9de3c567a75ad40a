"""Prints the lowest version that pyproject.toml allows of everything it names, as constraints for pip.

    python -m tests.support.lowest_versions > build/lowest.txt

`make lowest` runs the tests with them, so that a bound says what works. Needs nothing but Python.
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
ENVIRONMENTS_OF_THEIR_OWN = frozenset({"mds"})
"""Extras that allow none of the versions of the others."""


def list_lowest_versions() -> list[str]:
    """Return `name==version` for each bound, in the order of pyproject.toml."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    named = [
        *project["dependencies"],
        *(one for extra, of in extras if extra not in ENVIRONMENTS_OF_THEIR_OWN for one in of),
    ]
    bounds = (re.match(r"([\w.-]+)>=([\d.]+)", one) for one in named)
    return list(dict.fromkeys(f"{bound[1]}=={bound[2]}" for bound in bounds if bound))


if __name__ == "__main__":
    print(*list_lowest_versions(), sep="\n")
