"""Frozen dataclasses with slots, whose methods are compiled when they are first called.

`dataclass(frozen=True, slots=True)` compiles up to six methods when the class is made, 0.8 to 1.3 ms. For the engine's
350 classes that were 0.3 s of every command, and a command uses a tenth of them. Here a class first has methods that
compile its real ones, by `dataclasses` itself, put them in their own place, and call them.
"""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass
from threading import RLock
from typing import Any, TypeVar, cast, dataclass_transform, overload

ClassT = TypeVar("ClassT", bound=type[Any])

_COMPILED_METHODS = ("__init__", "__repr__", "__eq__", "__hash__")
"""The last two only for classes that are compared by their fields."""

_COMPILING = RLock()
"""Held while methods are compiled: two threads may call a class for the first time."""


@overload
def frozen_dataclass(cls: ClassT, /) -> ClassT: ...


@overload
def frozen_dataclass(*, eq: bool = True, kw_only: bool = False) -> Callable[[ClassT], ClassT]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen_dataclass(cls: type[Any] | None = None, /, *, eq: bool = True, kw_only: bool = False) -> Any:
    """Make a class a frozen dataclass with slots, as `dataclass(frozen=True, slots=True)` does.

    It has no dataclass among its bases: what their methods are is decided when they are compiled.
    """

    def make(one: ClassT) -> ClassT:
        return _make_dataclass(one, eq=eq, kw_only=kw_only)

    return make if cls is None else make(cls)


def _make_dataclass(original: ClassT, *, eq: bool, kw_only: bool) -> ClassT:
    assert not any(map(is_dataclass, original.__mro__[1:])), original
    written = {name for name in _COMPILED_METHODS if vars(original).get(name) is not None}
    made = dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(original)

    stubs: dict[str, Callable[..., Any]] = {}

    def compile_methods() -> None:
        """Have `dataclasses` compile the methods for the class without slots, and take them from there."""
        with _COMPILING:
            if not stubs:
                return
            for one in fields(original):
                # Where it looks for defaults; the first time it left only values there.
                setattr(original, one.name, one)
            complete = vars(dataclass(frozen=True, eq=eq, kw_only=kw_only)(original))
            for name in stubs:
                setattr(made, name, complete[name])
            stubs.clear()

    for name in _COMPILED_METHODS if eq else _COMPILED_METHODS[:2]:
        if name not in written:
            stubs[name] = _make_stub(made, name, compile_methods)
            setattr(made, name, stubs[name])
    made.__setattr__, made.__delattr__ = _refuse_assignment, _refuse_deletion  # pyrefly: ignore[bad-assignment]
    made.__getstate__, made.__setstate__ = _get_values, _set_values  # pyrefly: ignore[bad-assignment]
    return cast("ClassT", made)


def _make_stub(made: type, name: str, compile_methods: Callable[[], None]) -> Callable[..., Any]:
    """Return a method that puts the compiled ones in its place and calls its own."""

    def compile_and_call(self: object, *args: object, **kwargs: object) -> object:
        compile_methods()
        return getattr(made, name)(self, *args, **kwargs)

    return compile_and_call


def _refuse_assignment(self: object, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _get_values(self: Any) -> list[Any]:
    return [getattr(self, one.name) for one in fields(self)]


def _set_values(self: Any, values: list[Any]) -> None:
    for one, value in zip(fields(self), values, strict=True):
        object.__setattr__(self, one.name, value)
