"""Helpers for one value of a decoded record or of options: types, paths, aliases of keys."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from rowmill.core.json import Json


def is_mapping(value: Json) -> TypeGuard[dict[str, Any]]:
    """Return whether a decoded JSON value is a mapping."""
    return type(value) is dict


def is_list(value: Json) -> TypeGuard[list[Any]]:
    """Return whether a decoded JSON value is a list."""
    return type(value) is list


def rename_aliases(values: Json, aliases: Mapping[str, str]) -> Json:
    """Rename aliased keys of a mapping; an alias together with its key is an error."""
    if not is_mapping(values) or aliases.keys().isdisjoint(values):
        return values
    out = dict(values)
    for alias, name in aliases.items():
        if alias not in out:
            continue
        if name in out:
            raise ValueError(
                f"{alias} is another name of {name}, and both are set; only one is allowed; delete {alias}"
            )
        out[name] = out.pop(alias)
    return out


def apply_eos_alias(values: Json) -> Json:
    """Read the alias `enforce_eos: true` as `add_eos: auto`, false as false."""
    out = rename_aliases(values, {"enforce_eos": "add_eos"})
    return {**out, "add_eos": "auto"} if out is not values and out["add_eos"] is True else out


def get_at_path(record: Mapping[str, Json], path: str) -> Json:
    """Look up `a.b` in a record: as one key if it exists, else step by step; None if a step is missing.

    A step that is a number is the place of an item in a list: `answers.text.0`.
    """
    value = record.get(path)
    if value is not None or "." not in path:
        return value
    here: Json = record
    for step in path.split("."):
        if is_list(here) and step.isdecimal():
            here = here[int(step)] if int(step) < len(here) else None
        elif is_mapping(here):
            here = here.get(step)
        else:
            return None
    return here
