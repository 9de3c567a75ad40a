"""Typed counts that add up: what a part counts, what a stage sums, and what a check computes its number from.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class DocumentCounts(Counts):
        documents: int = 0
        longest: int = keep_largest()

    DocumentCounts(documents=2, longest=7) + DocumentCounts(documents=3, longest=5) ─► (documents=5, longest=7)

    part 1  {ExampleCounts, DocumentCounts} ┐
    part 2  {ExampleCounts}                 ┴─ add up ─► {ExampleCounts, DocumentCounts}   the counts of the stage

Numbers add, mappings add by key; a field that does neither declares its rule. The defaults are what nothing counts, so
`Class()` adds nothing. A stage adds up the classes of its parts without knowing them: a kind of data has classes of its
own, in its folder. A class that no part counted is absent, and a check of it has nothing to ask.

A property of a class is a number that follows from its fields; a manifest stores it among its values.

What describes one part alone, and adds up to nothing, is its `Details`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Self, TypeVar, cast

CountsT = TypeVar("CountsT", bound="Counts")
DetailsT = TypeVar("DetailsT", bound="Details")

_MERGE = "merge"
_IS_SAMPLE = "is_sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Base of what describes one part; a subclass is a frozen dataclass whose name is unique: it is stored under it."""

    @classmethod
    def parse(cls, stored: Mapping[str, Any]) -> Self:
        """Return what `to_json` described."""
        return cls(**{name: _freeze(value) for name, value in stored.items()})

    def to_json(self, *, with_samples: bool = True) -> dict[str, Any]:
        """Return the fields by name; without samples, those that are content of an output."""
        return {
            one.name: _thaw(getattr(self, one.name))
            for one in fields(self)
            if with_samples or _IS_SAMPLE not in one.metadata
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts(Details):
    """Base of all counts; nothing of them describes one part alone, so that they add up."""

    CLASSES: ClassVar[dict[str, "type[Counts]"]] = {}
    """Every subclass by its name."""

    def __init_subclass__(cls) -> None:
        """Note the class by its name."""
        # A dataclass with slots is made twice; the second is the one that is used.
        Counts.CLASSES[cls.__name__] = cls

    def __add__(self, other: Self) -> Self:
        """Add field by field."""
        return self.add_up([self, other])

    @classmethod
    def add_up(cls, several: Sequence[Self]) -> Self:
        """Add up counts field by field: many at once in less than half of the time that pairs take."""
        return cls(
            **{
                one.name: one.metadata.get(_MERGE, _add_values)([getattr(counts, one.name) for counts in several])
                for one in fields(cls)
            }
        )

    def count_tokens(self) -> int:
        """Return the tokens that a stage reports as progress; 0 for counts of anything else."""
        return 0

    def derive(self) -> dict[str, Any]:
        """Return what follows from the fields: the value of each property."""
        names = [
            name for each in type(self).__mro__ for name, value in vars(each).items() if isinstance(value, property)
        ]
        return {name: getattr(self, name) for name in names}


def declare_merge(rule: Callable[[Sequence[Any]], Any], *, default: Any) -> Any:
    """Declare a field whose values are merged by a rule of its own; the default must add nothing."""
    return field(default=default, metadata={_MERGE: rule})


def keep_largest() -> int:
    """Declare a field of which the largest value of all parts is kept."""
    return declare_merge(max, default=0)


def keep_smallest() -> int | None:
    """Declare a field of which the smallest value of all parts is kept; None in those that have none."""
    return declare_merge(
        lambda values: min((value for value in values if value is not None), default=None), default=None
    )


def add_floats() -> float:
    """Declare a field whose sum does not depend on the order of the parts."""
    return declare_merge(math.fsum, default=0.0)


def keep_any() -> bool:
    """Declare a field that is true if it is true of any part."""
    return declare_merge(any, default=False)


def keep_first() -> tuple[Any, ...]:
    """Declare a field that is equal in all parts which have it, such as a description of their template."""
    return declare_merge(lambda values: next(filter(None, values), ()), default=())


def keep_samples(limit: int = 10) -> dict[str, tuple[str, ...]]:
    """Declare a field with the first few samples of each name, such as row ids by reject reason.

    Samples are kept with a part, and are no content of an output: a manifest names them among its `samples`.
    """
    rule = partial(_join_samples, limit)
    return field(default_factory=dict[str, "tuple[str, ...]"], metadata={_MERGE: rule, _IS_SAMPLE: True})


def _join_samples(limit: int, several: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, tuple[str, ...]]:
    joined: dict[str, list[str]] = {}
    for samples in several:
        for name, own in samples.items():
            held = joined.setdefault(name, [])
            held += own[: limit - len(held)]
    return {name: tuple(joined[name]) for name in sorted(joined)}


def _add_values(values: Sequence[Any]) -> Any:
    match values[0]:
        case bool():
            raise TypeError("a field that is true or false declares how it is merged: keep_any()")
        case int() | float():
            return sum(values)
        case Mapping():
            by_name: dict[str, list[Any]] = {}
            for mapping in cast("Sequence[Mapping[str, Any]]", values):
                for name, value in mapping.items():
                    by_name.setdefault(name, []).append(value)
            # Sorted, so that equal counts give equal bytes.
            return {name: _add_values(by_name[name]) for name in sorted(by_name)}
        case str() if len(set(values)) == 1:
            return values[0]
        case other:
            raise TypeError(f"{type(other).__name__}: does not add up; declare how the field is merged")


def _freeze(value: Any) -> Any:
    """Return a value as it was before it became JSON: lists are tuples."""
    match value:
        case list() | tuple():
            return tuple(_freeze(item) for item in cast("Sequence[Any]", value))
        case dict():
            return {name: _freeze(item) for name, item in cast("Mapping[str, Any]", value).items()}
        case _:
            return value


def _thaw(value: Any) -> Any:
    """Return a value as JSON has it: tuples are lists, so that counts just made equal those that are read again."""
    match value:
        case tuple():
            return [_thaw(item) for item in cast("Sequence[Any]", value)]
        case dict():
            return {name: _thaw(item) for name, item in cast("Mapping[str, Any]", value).items()}
        case Details():
            return value.to_json()
        case _:
            return value


StoredCounts = dict[str, dict[str, Any]]
"""Counts as JSON: the fields by name, by the name of their class."""


@dataclass(frozen=True, slots=True)
class CountSet:
    """The counts of one output, or of one part: at most one of each class."""

    by_class: Mapping[type[Counts], Counts] = field(default_factory=dict[type[Counts], Counts])

    @classmethod
    def of(cls, *counted: Counts) -> "CountSet":
        """Add up some counts, those of equal class together."""
        by_class: dict[type[Counts], list[Counts]] = {}
        for one in counted:
            by_class.setdefault(type(one), []).append(one)
        return cls({kind: own[0] if len(own) == 1 else kind.add_up(own) for kind, own in by_class.items()})

    @classmethod
    def parse(cls, stored: Mapping[str, Mapping[str, Any]]) -> "CountSet":
        """Return the counts that `to_json` described; the modules of their classes are imported."""
        return cls.of(*(Counts.CLASSES[name].parse(values) for name, values in stored.items()))

    def __add__(self, other: "CountSet") -> "CountSet":
        """Add up the counts of each class."""
        return CountSet.of(*self.by_class.values(), *other.by_class.values())

    def find(self, kind: type[CountsT]) -> CountsT | None:
        """Return the counts of a class; None if nothing counted them."""
        return cast("CountsT | None", self.by_class.get(kind))

    def get(self, kind: type[CountsT]) -> CountsT:
        """Return the counts of a class; empty ones if nothing counted them."""
        return self.find(kind) or kind()

    def to_json(self, *, with_samples: bool = True) -> StoredCounts:
        """Return the counts as they are stored."""
        return {kind.__name__: one.to_json(with_samples=with_samples) for kind, one in self.by_class.items()}

    def derive(self) -> dict[str, Any]:
        """Return what follows from the counts, by name."""
        return {name: value for one in self.by_class.values() for name, value in one.derive().items()}


def find_stored(stored: Mapping[str, Mapping[str, Any]], kind: type[DetailsT]) -> DetailsT | None:
    """Return the counts or details of a class among stored ones; None if there are none of it."""
    own = stored.get(kind.__name__)
    return None if own is None else kind.parse(own)


def compute_share(count: float, total: float) -> float:
    """Return a share, 0 if the total is 0, rounded so that it is equal on every machine.

    A share above 1 is an error: its numbers count different things, such as rows before and after duplicates went.
    """
    if count > total:
        raise ValueError(f"{count:,} of {total:,} is no share: both must count the same rows, those that are written")
    return round(count / total, 9) if total else 0.0


def find_share(count: float, total: float) -> float | None:
    """Return a share as `compute_share` does, None if the total is 0: there is nothing to ask."""
    return compute_share(count, total) if total else None


Measure = Callable[[Any], float | None]
"""Computes a check's number from counts; None where there is nothing to ask."""
