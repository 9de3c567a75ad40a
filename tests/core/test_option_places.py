"""Every option, written one level too high or too low, is told where it belongs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from rowmill.core.config import ANY_NAME, OptionPlace, iterate_option_places
from rowmill.core.errors import ConfigError
from rowmill.kinds.base import OPTION_GROUPS
from rowmill.recipe import recipe
from rowmill.recipe.recipe import FIELD_ALIASES, FORMAT_ALIASES, Recipe
from tests.support.loops import for_each

PLACES = [
    place
    for place in iterate_option_places(Recipe)
    if place.group[:1] not in [("gates",), ("exports",)]
    and place.group[:2] not in [("execution", "alerts"), ("execution", "log_to")]
    and place.name not in ("kind", "name")
]
"""The options of a recipe; those of checks, exports, alerts and trackers have the same names in many places."""


class Misplaced(NamedTuple):
    """An option, and the group that it is written in."""

    place: OptionPlace
    written: tuple[str, ...]


def list_misplaced() -> Iterator[Misplaced]:
    """Yield each option in the group above its own, and in the first group inside its own."""
    taken = {(place.group, place.name) for place in PLACES}
    for place in PLACES:
        above = place.group[: -2 if place.group[-1:] == (ANY_NAME,) else -1]
        below = next((one.group for one in PLACES if _is_just_below(one, place)), place.group)
        for written in sorted({above, below} - {place.group}):
            if (written, place.name) not in taken and _stays_there(written, place):
                yield Misplaced(place, written)


def _is_just_below(one: OptionPlace, place: OptionPlace) -> bool:
    inner = one.group[len(place.group) :]
    # The group column may be a mapping, which is a value rather than a group.
    is_group = inner not in [(ANY_NAME,), ("group_training_examples_by",)]
    return one.group[: len(place.group)] == place.group and len(inner) == 1 and is_group and one.kinds == place.kinds


def _stays_there(written: tuple[str, ...], place: OptionPlace) -> bool:
    """Return whether the key stays where it is written: some are moved, as other tools place them there."""
    in_format = written[:1] == ("datasets",) and written[-1:] == ("format",)
    moved = in_format and any(place.name in group.model_fields for group in OPTION_GROUPS.values())
    aliases = place.name in FIELD_ALIASES | FORMAT_ALIASES or place.name in ("chat_template", "ignore_token_id")
    named = in_format and place.name in FORMAT_ALIASES
    return not moved and not named and not (aliases and len(written) < 2)


def write_recipe(misplaced: Misplaced) -> dict[str, Any]:
    dataset: dict[str, Any] = {"source": {"train_urls": ["a.jsonl"]}, "format": {"kind": "chat"}}
    for length, kind in misplaced.place.kinds:
        if length == len(("datasets", "rows", "format")):
            dataset[misplaced.place.group[length - 1]]["kind"] = kind
    values: dict[str, Any] = {"tokenizer": {"name": "t"}, "seq_len": 64, "datasets": {"rows": dataset}}
    here: Any = values
    for step in misplaced.written:
        here = here.setdefault("rows" if step == ANY_NAME else step, {})
    here[misplaced.place.name] = None
    return values


CASES = list(list_misplaced())


def test_most_options_are_tried() -> None:
    assert len({case.place.name for case in CASES}) > 80


@for_each("case", CASES, ids=lambda case: ".".join((*case.written, case.place.name)))
def test_option_one_level_too_high_or_low_is_told_where_it_belongs(case: Misplaced) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe.parse_recipe(write_recipe(case), name="demo", where="configs/demo.yaml")

    lines = [line for line in str(refused.value).splitlines() if f"{case.place.name}: unknown key here" in line]
    belongs = ".".join(step.replace(ANY_NAME, "rows") for step in case.place.group) or "at the top level"
    assert any(f"{case.place.name} belongs " in line and belongs in line.replace("NAME", "rows") for line in lines), (
        str(refused.value)
    )
