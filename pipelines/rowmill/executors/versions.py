"""The versions that decide the bytes of an output, which all hosts of a build must have alike."""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "fastokens", "gigatoken", "jinja2", "minijinja", "numpy", "orjson", "polars", "pyarrow", "tokenizers",
    "transformers", "zstandard",
)  # fmt: skip


@cache
def describe_versions() -> dict[str, str]:
    """Return the version of each package that decides bytes, and of our own code its digest."""
    return {"the code of rowmill": _digest_code(), **{name: _find_version(name) for name in _PACKAGES}}


def describe_difference(wanted: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Return what one host has instead of what another has; empty if they agree."""
    return ", ".join(
        f"{name} {found.get(name, 'absent')} instead of {one}" for name, one in wanted.items() if found.get(name) != one
    )


def _find_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _digest_code() -> str:
    """Digest the engine's modules and templates: an installed version says nothing of a working copy."""
    root, hasher = Path(__file__).parents[1], hashlib.blake2b(digest_size=6)
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.jinja"))):
        hasher.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()
