"""Validates examples whose tokens a kind builds itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmill.core.config import describe_type
from rowmill.schema.rows import Rejected


@dataclass(frozen=True, slots=True)
class BuiltExample:
    """An example whose tokens its kind built: `ids` int32[T], `mask` bool[T]; the first token is never a target."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    domain: str | None


def check_built_example(made: Any, vocab_size: int) -> BuiltExample | Rejected:
    """Return a kind's output as an example, or the reject for what is wrong with it; a reject is returned as is."""
    if made is None or isinstance(made, Rejected):
        return made or Rejected("skipped_by_format")
    if not isinstance(made, Mapping) or "ids" not in made or "loss_mask" not in made:
        return Rejected("bad_example", f"build returned {type(made).__name__}, expected ids and loss_mask")
    ids, mask, domain = to_flat_array(made["ids"]), to_flat_array(made["loss_mask"]), made.get("domain")
    if ids is None or ids.dtype.kind not in "iu" or not len(ids):
        return Rejected("bad_example", "ids are no list of integers, or an empty one")
    if mask is None or len(mask) != len(ids):
        has = "not a flat list" if mask is None else f"{len(mask)} long"
        return Rejected("bad_example", f"loss_mask is {has}, ids are {len(ids)} long")
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        return Rejected("bad_example", "loss_mask holds other values than 0 and 1")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        return Rejected("bad_example", f"id {outside[0]} is unknown; ids are 0 to {vocab_size - 1}")
    if domain is not None and not isinstance(domain, str):
        return Rejected("bad_example", f"domain is {describe_type(domain)}, expected text")
    trained = mask.astype(np.bool_)
    trained[0] = False
    return BuiltExample(ids.astype(np.int32), trained, domain)


def to_flat_array(values: Any) -> NDArray[Any] | None:
    """Return values as an array of one dimension; None if they are nested, of different kinds, or too large."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        return None
    return array if array.ndim == 1 else None
