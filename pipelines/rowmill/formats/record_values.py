"""Values of a decoded record or of options: their types, paths into them, other names of their keys.

What belongs here: functions of one value. What does not: which columns a kind reads (`columns.py`).
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

from rowmill.core.json import Json


def is_mapping(value: Json) -> TypeGuard[dict[str, Any]]:
    """Tell whether a decoded JSON value is a mapping."""
    return type(value) is dict


def is_list(value: Json) -> TypeGuard[list[Any]]:
    """Tell whether a decoded JSON value is a list."""
    return type(value) is list


def rename_aliases(values: Json, aliases: Mapping[str, str]) -> Json:
    """Give aliased keys of a mapping their own names; both names at once is an error."""
    if not is_mapping(values) or aliases.keys().isdisjoint(values):
        return values
    out = dict(values)
    for alias, name in aliases.items():
        if alias not in out:
            continue
        if name in out:
            raise ValueError(f"{alias} says the same as {name} and both are given; one may stand; delete {alias}")
        out[name] = out.pop(alias)
    return out


def apply_eos_alias(values: Json) -> Json:
    """Read the older `enforce_eos: true` as `add_eos: auto`, false as false."""
    out = rename_aliases(values, {"enforce_eos": "add_eos"})
    return {**out, "add_eos": "auto"} if out is not values and out["add_eos"] is True else out


def get_at_path(record: Mapping[str, Json], path: str) -> Json:
    """Look up `a.b` in a record: as one key if there is such a key, else step by step; null where it ends."""
    value = record.get(path)
    if value is not None or "." not in path:
        return value
    here: Json = record
    for step in path.split("."):
        if not is_mapping(here):
            return None
        here = here.get(step)
    return here
