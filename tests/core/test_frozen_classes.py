"""Frozen dataclasses whose methods are compiled late behave like those of `dataclasses`."""

import copy
import dataclasses
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, ClassVar

import pytest

from rowmill.core.frozen_classes import frozen_dataclass

DECORATORS = [dataclass(frozen=True, slots=True), frozen_dataclass]


def make_part(decorator: Any) -> Any:
    """Return a class with every sort of field."""

    class Part:
        """A part."""

        KIND: ClassVar[str] = "part"

        name: str
        size: int = 3
        facts: dict[str, int] = field(default_factory=dict[str, int])
        note: str = field(default="", compare=False, repr=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "name", self.name.strip())

        @property
        def double(self) -> int:
            return 2 * self.size

    return decorator(Part)


@frozen_dataclass
class Point:
    """A point at module level, so that it can be pickled."""

    x: int
    y: int = 0


@frozen_dataclass(eq=False)
class Handle:
    """Compared by identity."""

    number: int


@frozen_dataclass(kw_only=True)
class Options:
    """Given by name."""

    first: int
    second: int = 2


@pytest.mark.parametrize("decorator", DECORATORS)
def test_values_defaults_order_and_text_are_those_of_a_dataclass(decorator: Any) -> None:
    part = make_part(decorator)

    one = part(" a ", facts={"rows": 1}, note="n")

    assert (one.name, one.size, one.facts, one.note, one.double) == ("a", 3, {"rows": 1}, "n", 6)
    assert repr(one).endswith("Part(name='a', size=3, facts={'rows': 1})")
    assert part.__match_args__ == ("name", "size", "facts", "note")
    assert part.KIND == "part"
    assert part("b").facts is not part("b").facts
    assert one == part("a", facts={"rows": 1})
    assert one != part("a")
    assert one != "a"
    assert not hasattr(one, "__dict__")
    assert list(inspect.signature(part).parameters) == ["name", "size", "facts", "note"]
    assert dataclasses.asdict(one) == {"name": "a", "size": 3, "facts": {"rows": 1}, "note": "n"}
    assert dataclasses.replace(one, size=5) == part("a", 5, {"rows": 1})


@pytest.mark.parametrize("decorator", DECORATORS)
def test_wrong_arguments_are_refused_by_the_first_call_and_by_later_ones(decorator: Any) -> None:
    part = make_part(decorator)

    for _ in range(2):
        with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'name'"):
            part()
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            part("a", colour=1)


@pytest.mark.parametrize("decorator", DECORATORS)
def test_no_field_is_assigned_or_deleted(decorator: Any) -> None:
    one = make_part(decorator)("a")

    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'size'"):
        one.size = 4
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'size'"):
        del one.size


def test_equal_objects_have_equal_hashes_before_anything_else_was_called() -> None:
    assert hash(Point(1)) == hash(Point(1, 0)) == hash((1, 0))
    assert {Point(1), Point(1, 0)} == {Point(1)}
    with pytest.raises(TypeError, match="unhashable"):
        hash(make_part(frozen_dataclass)("a"))


def test_a_class_without_comparison_compares_by_identity() -> None:
    one = Handle(1)

    assert one == one  # noqa: PLR0124
    assert one != Handle(1)
    assert len({one, Handle(1)}) == 2
    assert repr(one) == "Handle(number=1)"


def test_fields_given_by_name_alone() -> None:
    assert Options(first=1) == Options(first=1, second=2)
    with pytest.raises(TypeError, match="positional argument"):
        Options(1)  # pyrefly: ignore[unexpected-positional-argument]


def test_copies_and_pickles_are_equal_and_frozen() -> None:
    for made in (pickle.loads(pickle.dumps(Point(1, 2))), copy.copy(Point(1, 2)), copy.deepcopy(Point(1, 2))):
        assert made == Point(1, 2)
        with pytest.raises(FrozenInstanceError):
            made.x = 3  # pyrefly: ignore[read-only]


def test_a_method_that_the_class_writes_itself_stays() -> None:
    @frozen_dataclass
    class Name:
        text: str

        def __repr__(self) -> str:
            return f"<{self.text}>"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Name) and self.text.lower() == other.text.lower()

        def __hash__(self) -> int:
            return 7

    assert repr(Name("a")) == "<a>"
    assert Name("a") == Name("A")
    assert hash(Name("a")) == 7


@pytest.mark.slow
def test_threads_may_call_a_class_for_the_first_time_at_once() -> None:
    for _ in range(50):
        part = make_part(frozen_dataclass)
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(part, ["a"] * 16))
        assert made == [part("a")] * 16


def test_a_dataclass_among_the_bases_is_refused() -> None:
    with pytest.raises(AssertionError):

        @frozen_dataclass
        class Child(Point):
            z: int = 0


def test_nothing_is_compiled_before_the_first_call() -> None:
    part = make_part(frozen_dataclass)
    before = part.__init__

    part("a")

    assert part.__init__ is not before
