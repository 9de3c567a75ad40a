"""The kinds of datasets, one line per kind, and the names of users' own formats.

A kind decides which columns become which canonical rows; its fields, declarations and hooks are in its own file.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Annotated, TypeAlias, TypeVar, get_args

from pydantic import BeforeValidator, Field

from rowmill.core.json import Json
from rowmill.kinds.base import DatasetKind
from rowmill.kinds.chat import Auto, Chat
from rowmill.kinds.preference import Preference
from rowmill.kinds.prompts import Prompts
from rowmill.kinds.python import Python, RowFormat, find_format_problem
from rowmill.kinds.shared.messages import is_mapping, rename_aliases
from rowmill.kinds.supervised import Supervised
from rowmill.kinds.tables.records import Records
from rowmill.kinds.text import Text
from rowmill.kinds.tokens import Tokens

_AnyKind: TypeAlias = (
    Chat  # lists of messages, and whatever can be read as one: ShareGPT, Alpaca, prompt and response
    | Supervised  # a prompt and its response, joined without a chat template
    | Text  # documents
    | Records  # rows of tables
    | Auto  # chat or text, decided row by row
    | Preference  # a better and a worse answer, or one that is marked as good or bad
    | Prompts  # what a model is asked in reinforcement learning, and the ground truth
    | Tokens  # token ids with their mask, kept exactly
    | Python  # the rows that a class of the user's makes of them
)

KINDS: dict[str, type[DatasetKind]] = {kind.get_name(): kind for kind in get_args(_AnyKind)}
"""All kinds by the name in `format.kind`, in the order of the union."""

KIND_ALIASES = {alias: name for name, kind in KINDS.items() for alias in kind.KIND_ALIASES}
"""Other names of kinds."""


ENTRY_POINT_GROUP = "rowmill.formats"
"""Entry point group of installed formats: `tickets = "my_package.formats:Tickets"`."""


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
        problem = find_format_problem(cls)
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


def resolve_kind(name: str) -> tuple[str, str | None]:
    """Return a kind's canonical name, and `module:Name` of the class if the name is a registered format's."""
    name = KIND_ALIASES.get(name, name)
    registered = None if name in KINDS else list_registered_formats().get(name)
    return (name, None) if registered is None else (Python.get_name(), registered)


def _normalize_kind(values: Json) -> Json:
    """Accept `type` for `kind`, aliases of a kind, a registered name, and a missing kind as `auto`."""
    if not is_mapping(values):
        return values
    named: dict[str, Json] = rename_aliases(values, {"type": "kind"})
    kind = named.get("kind", Auto.get_name())
    if type(kind) is not str:
        return {**named, "kind": kind}
    name, registered = resolve_kind(kind)
    own = {} if registered is None else {"class": registered}
    return {**own, **named, "kind": name}


Format: TypeAlias = Annotated[_AnyKind, Field(discriminator="kind"), BeforeValidator(_normalize_kind)]
