"""What is installed: the extra that brings a missing package, versions that are too old, and the command that mends it.

    polars is missing          ──► explain_failure ──► pip install 'rowmill[build]'
    polars 1.33, wanted 1.36.1 ──► explain_failure ──► the same: pip raises what is below its bound

The metadata of installed distributions is read after an error, and when Dagster loads its definitions: reading it costs
20 ms, which every command would pay.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from rowmill.core.errors import MissingPackageError

_EXTRAS = ("build", "dagster")
"""The extras that commands need, in the order in which they are searched."""

_INSTALLERS = {"pipx_metadata.json": "pipx install --force", "uv-receipt.toml": "uv tool install --force"}
"""Files that installers of programs leave in the environments that they make, and what installs into those again."""

_DISTRIBUTIONS = {"yaml": "pyyaml"}
"""Modules whose name differs from their distribution's."""

_REQUIREMENT = re.compile(
    r"""^(?P<name>[\w.-]+)[^>;]*(?:>=(?P<least>[\d.]+))?[^;]*(?:;.*extra\s*==\s*["'](?P<extra>[\w-]+))?"""
)


def format_install_command(*extras: str) -> str:
    """Return the command that installs extras of this rowmill from where it came: a registry, a wheel or a clone.

    It is that of the program that made the environment, as far as one leaves a file there: pip is not in all of them.
    """
    import json
    from importlib.metadata import distributions

    named = f"[{','.join(extras)}]" if extras else ""
    # PEP 610: written if rowmill was not installed by its name alone. A clone has metadata of its own, without it.
    noted = (found.read_text("direct_url.json") for found in distributions(name="rowmill"))
    origin: dict[str, Any] = json.loads(next((text for text in noted if text), "{}"))
    url: str = origin.get("url", "")
    target = f"rowmill{named}"
    if url.startswith("file://"):
        target = f"{unquote(urlsplit(url).path)}{named}"
    elif url:
        vcs = origin.get("vcs_info")
        target += f" @ {url}" if vcs is None else f" @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    editable = "--editable " if origin.get("dir_info", {}).get("editable") else ""
    installers = (command for file, command in _INSTALLERS.items() if os.path.exists(os.path.join(sys.prefix, file)))
    return f"{next(installers, 'pip install')} {editable}{shlex.quote(target)}"


def explain_failure(where: str, error: BaseException) -> MissingPackageError | None:
    """Return what the installation lacks, if that may be why something failed: a package, or a newer version of one."""
    missing = _explain_missing_package(where, error) if isinstance(error, ModuleNotFoundError) else None
    return missing or explain_old_package(where)


def _explain_missing_package(where: str, error: ModuleNotFoundError) -> MissingPackageError | None:
    """Return the error for a failed import of a package that an extra brings; None if no extra brings it."""
    missing = (error.name or "").partition(".")[0]
    wanted = _normalize_name(_DISTRIBUTIONS.get(missing, missing))
    brought_by = {extra for name, _, extra in _read_requirements() if _normalize_name(name) == wanted}
    extra = next((extra for extra in _EXTRAS if extra in brought_by), None)
    if extra is None:
        return None
    return MissingPackageError(
        f"{where}: the package {missing} is not installed; the base install of rowmill only reads built partitions; "
        f"run {format_install_command(extra)}"
    )


def explain_old_package(where: str) -> MissingPackageError | None:
    """Return the error for an installed package that is older than what rowmill needs; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    for name, least, extra in _read_requirements():
        if not least or extra not in ("", *_EXTRAS):
            continue
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if _parse_release(installed) < _parse_release(least):
            return MissingPackageError(
                f"{where}: {name} {installed} is installed; rowmill needs {name} {least} or newer; run "
                f"{format_install_command(*filter(None, [extra]))}"
            )
    return None


def _read_requirements() -> Iterator[tuple[str, str, str]]:
    """Yield name, least version and extra of what the installed rowmill requires; the latter two may be empty."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("rowmill") or []
    except PackageNotFoundError:
        return
    for line in lines:
        if match := _REQUIREMENT.match(line):
            yield match["name"], match["least"] or "", match["extra"] or ""


def _parse_release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version's release, without zeros at the end: (1, 36, 1) of `1.36.1+local`."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
