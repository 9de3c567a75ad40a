"""Finds where an option belongs that a recipe writes one level too high, too low, or under another kind.

datasets.chats.format.group_training_examples_by        written here: an unknown key
datasets.*.format.data.group_training_examples_by       declared here, of kind records
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from rowmill.core.errors import join_choices

ANY_NAME = "*"
"""The step of a place for a name that users choose, such as a dataset's, or an element's number."""

MAX_PLACES = 3
"""A name that stands in more places at the same distance is too common to say where it belongs."""


@dataclass(frozen=True, slots=True)
class OptionPlace:
    """A group that has an option: its path, and the kinds that groups on the way must be of, by path length."""

    name: str
    group: tuple[str, ...]
    kinds: tuple[tuple[int, str], ...] = ()


def iterate_option_places(
    model: type[BaseModel], group: tuple[str, ...] = (), kinds: tuple[tuple[int, str], ...] = ()
) -> Iterator[OptionPlace]:
    """Yield every option of a model and of the models inside it; fields that a user cannot write are left out."""
    for name, field in model.model_fields.items():
        if name in getattr(model, "FILLED_IN", ()):
            continue
        yield OptionPlace(name, group, kinds)
        inner = list(_find_inner_models(field.annotation))
        for one, wildcards in inner:
            path = (*group, name, *[ANY_NAME] * wildcards)
            kind = _get_kind(one) if len(inner) > 1 else None
            yield from iterate_option_places(one, path, kinds if kind is None else (*kinds, (len(path), kind)))


def _find_inner_models(annotation: Any, wildcards: int = 0) -> Iterator[tuple[type[BaseModel], int]]:
    """Yield the models of an annotation, and how many containers each is in."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, wildcards
        return
    deeper = wildcards + (get_origin(annotation) in (dict, list, tuple))
    for inner in get_args(annotation):
        yield from _find_inner_models(inner, deeper)


def _get_kind(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    tags = () if field is None else get_args(field.annotation)
    return str(tags[0]) if tags else None


def explain_place(
    root: type[BaseModel], name: str, written: Sequence[str], kinds: Mapping[tuple[str, ...], str]
) -> str | None:
    """Say where an unknown key belongs; None if no group has it, or too many do.

    `written` is the path of the group that holds the key, `kinds` the kinds of the groups on the way to it.
    """
    here = tuple(written)
    places = [_PlaceFromHere(place, here, kinds) for place in iterate_option_places(root) if place.name == name]
    usable = [place for place in places if place.is_named and (place.group != here or place.other_kinds)]
    if not usable:
        return None
    nearest = min(one.rank for one in usable)
    kinds_by_group: dict[tuple[str, ...], list[str]] = {}
    for one in usable:
        if one.rank == nearest:
            kinds_by_group.setdefault(one.group, []).extend(one.kinds_to_name)
    if len(kinds_by_group) > MAX_PLACES:
        return None
    if list(kinds_by_group) == [here]:
        return f"{name} is an option of kind {join_choices(kinds_by_group[here])}; delete it, or choose that kind"
    return f"{name} belongs {join_choices(starmap(_describe_group, kinds_by_group.items()))}; move it there"


def _describe_group(group: tuple[str, ...], kinds: Sequence[str]) -> str:
    """Name a group, with the kinds that have the option."""
    path = ".".join("NAME" if step == ANY_NAME else step for step in group)
    where = f"under {path}" if path else "at the top level of the recipe"
    return f"{where} (kind {join_choices(dict.fromkeys(kinds))})" if kinds else where


class _PlaceFromHere:
    """A place as seen from where a key was written: names that users chose are those of the way there."""

    def __init__(self, place: OptionPlace, here: tuple[str, ...], kinds: Mapping[tuple[str, ...], str]) -> None:
        self.group = _fill_in_names(place.group, here)
        self.here = here
        shared = next((i for i, (a, b) in enumerate(zip(self.group, here, strict=False)) if a != b), None)
        self._shared = min(len(self.group), len(here)) if shared is None else shared
        self.other_kinds = [kind for length, kind in place.kinds if kinds.get(self.group[:length], kind) != kind]
        missing = [kind for length, kind in place.kinds if self.group[:length] not in kinds]
        self.kinds_to_name = [*self.other_kinds, *missing][-1:]

    @property
    def is_named(self) -> bool:
        """Whether the place lies below the written one, or no name has to be guessed to go there."""
        return ANY_NAME not in self.group or self._shared == len(self.here)

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """How unlikely the place is meant: of another kind, neither above nor below, far away."""
        is_beside = self._shared < min(len(self.group), len(self.here))
        return bool(self.other_kinds), is_beside, len(self.group) + len(self.here) - 2 * self._shared


def _fill_in_names(group: tuple[str, ...], here: tuple[str, ...]) -> tuple[str, ...]:
    """Return a place's path with the names on the way to `here`, as far as both ways are the same."""
    filled: list[str] = []
    for i, step in enumerate(group):
        is_shared = tuple(filled) == here[:i] and i < len(here)
        filled.append(here[i] if step == ANY_NAME and is_shared else step)
    return tuple(filled)
