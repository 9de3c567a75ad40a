"""Custom formats: a user's class that turns a record into rows, or directly into tokens, and how these are checked.

    @register_format("tickets")
    class Tickets(RowFormat):
        def rows(self, record): ...           a Row, several, or None to skip the record
        def build(self, record, ctx): ...     {"ids": […], "loss_mask": […], "domain": …}, or None

A class defines one of the two. An exception that it raises rejects that record and never stops a build. The class's
source file is part of the identity of its output; other modules that it imports are not: keep the code that decides
rows in one file, or increase a constant in it when they change.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rowmill.core.config import Config, describe_type
from rowmill.core.errors import ConfigError, require_code_permission
from rowmill.core.json import Json
from rowmill.schema.rows import Rejected, Row


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


ENTRY_POINT_GROUP = "rowmill.formats"
"""Entry point group of installed formats: `tickets = "my_package.formats:Tickets"`."""

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True)
class BuildContext(Generic[ConfigT]):
    """The arguments of `build` besides the record: tokenizer, the dataset's options, maximum number of tokens."""

    open_tokenizer: Callable[[], Any]
    config: ConfigT
    max_length: int

    @cached_property
    def tokenizer(self) -> Any:
        """The recipe's tokenizer, a fast tokenizer of `transformers` with its chat template; opened on first use."""
        return self.open_tokenizer()


class RowFormat:
    """Derive from this class and define `rows` or `build`; the recipe's `options` are the constructor's arguments."""

    def rows(self, record: Mapping[str, Json]) -> Row | Sequence[Row] | None:
        """Return the record's rows: conversations, pairs or texts. None skips the record."""
        raise NotImplementedError

    def build(self, record: Mapping[str, Json], ctx: BuildContext[Any]) -> Mapping[str, Any] | None:
        """Return the record's example: `ids`, `loss_mask` of equal length, optionally `domain`. None skips the record.

        `loss_mask[i]` is true if token i itself is a target; the first token never is.
        """
        raise NotImplementedError


FormatT = TypeVar("FormatT", bound=type[RowFormat])

_REGISTERED: dict[str, str] = {}


def register_format(name: str) -> Callable[[FormatT], FormatT]:
    """Register a class as `format.kind: <name>` for recipes loaded afterwards.

    Raises
    ------
    TypeError
        If it is not a `RowFormat` with one of `rows` and `build`.
    ValueError
        If the name is taken.

    """

    def register(cls: FormatT) -> FormatT:
        # The kinds import this module.
        from rowmill.kinds.catalog import KIND_ALIASES, KINDS

        problem = _find_format_problem(cls)
        if problem:
            raise TypeError(f"register_format({name!r}): {problem}")
        path = f"{cls.__module__}:{cls.__qualname__}"
        # The same path again means that the module was loaded again, in a worker or after a change.
        if name in {*KINDS, *KIND_ALIASES} or _REGISTERED.get(name, path) != path:
            holder = _REGISTERED.get(name, "a built-in kind")
            raise ValueError(
                f"register_format({name!r}): the name is taken by {holder}; names must be unique; choose another"
            )
        _REGISTERED[name] = path
        return cls

    return register


def list_registered_formats() -> Mapping[str, str]:
    """Return the registered names with `module:Name` of each, including those of installed packages."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)} | _REGISTERED


def get_format_method(cls: type[RowFormat]) -> Literal["rows", "build"]:
    """Return which of the two methods a class defines."""
    return "build" if cls.build is not RowFormat.build else "rows"


def find_format(path: str, base: Path, where: str) -> type[RowFormat]:
    """Return the class that `module:Name` names; modules of the project in `base` take precedence.

    Raises
    ------
    ConfigError
        If there is no such module or class, it is not a `RowFormat`, or code is forbidden.

    """
    module_name, _, name = path.partition(":")
    module = _load_module(module_name, find_source_file(path, base, where), base, where)
    found: Any = module
    for step in name.split("."):
        found = getattr(found, step, None)
    if found is None:
        classes = [key for key, one in vars(module).items() if isinstance(one, type) and issubclass(one, RowFormat)]
        known = ", ".join(key for key in classes if key != "RowFormat") or "none"
        raise ConfigError(f"{where}: module {module_name} has no {name}; its formats are {known}; name one of them")
    problem = _find_format_problem(found)
    if problem:
        raise ConfigError(f"{where}: {path}: {problem}")
    return found


def hash_format_source(path: str, base: Path, where: str) -> str:
    """Return the digest of the source file that defines a class."""
    return hashlib.sha256(find_source_file(path, base, where).read_bytes()).hexdigest()


def find_source_file(path: str, base: Path, where: str) -> Path:
    """Return the file of the module that `module:Name` names."""
    module_name, colon, name = path.partition(":")
    if not (colon and name and all(step.isidentifier() for step in module_name.split("."))):
        raise ConfigError(f"{where}: expected module:Name, such as my_formats:Tickets, got {path!r}")
    # Looking up an installed module imports its parent packages.
    require_code_permission(path, where)
    steps = module_name.split(".")
    for candidate in (base.joinpath(*steps).with_suffix(".py"), base.joinpath(*steps, "__init__.py")):
        if candidate.is_file():
            return candidate.resolve()
    loaded = sys.modules.get(module_name)
    if loaded is not None:
        origin = getattr(loaded, "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(module_name)
        except ImportError:
            spec = None
        origin = spec.origin if spec is not None and spec.has_location else None
    if origin is None:
        raise ConfigError(
            f"{where}: no module {module_name} in {base} or among the installed packages; expected a Python source "
            "file; put it next to configs/, or install its package"
        )
    return Path(origin).resolve()


_LOADED_MODULES: dict[tuple[str, str], ModuleType] = {}


def _load_module(name: str, file: Path, base: Path, where: str) -> ModuleType:
    """Load a module from its file, again if its source changed, since a server may run for days."""
    key = (str(file), hashlib.sha256(file.read_bytes()).hexdigest())
    if key in _LOADED_MODULES:
        return _LOADED_MODULES[key]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {file} is not Python source; expected a .py file; name another module")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        # The module may import others of the project; behind the libraries, a file of the project hides none of them.
        sys.path.append(str(base))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(base))
    except Exception as error:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise ConfigError(
            f"{where}: module {name} cannot be loaded ({type(error).__name__}: {error}); correct {file}"
        ) from error
    _LOADED_MODULES[key] = module
    return module


def _find_format_problem(cls: object) -> str:
    """Return why a value is not a valid format class; empty if it is."""
    if not (isinstance(cls, type) and issubclass(cls, RowFormat)):
        return "it is not a RowFormat; expected a class derived from rowmill.RowFormat; derive it"
    own = [name for name in ("rows", "build") if getattr(cls, name) is not getattr(RowFormat, name)]
    if len(own) == 1:
        return ""
    has = "both rows and build" if own else "neither rows nor build"
    return f"it defines {has}; exactly one of them is needed; define one"
