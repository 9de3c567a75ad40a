"""The kinds of datasets, one line per kind; a kind decides which columns become which canonical rows.

A kind's fields, declarations and hooks are in its own file.
"""

from typing import Annotated, TypeAlias, get_args

from pydantic import BeforeValidator, Field

from rowmill.core.json import Json
from rowmill.kinds.base import DatasetKind
from rowmill.kinds.chat import Auto, Chat
from rowmill.kinds.preference import Preference
from rowmill.kinds.prompts import Prompts
from rowmill.kinds.python import Python, list_registered_formats
from rowmill.kinds.shared.messages import is_mapping, rename_aliases
from rowmill.kinds.supervised import Supervised
from rowmill.kinds.tables.options import Records
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
