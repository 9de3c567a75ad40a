"""The shapes in which datasets arrive, one line per kind: whose columns become which canonical rows.

What belongs here: the union. A kind's fields and rules are in its own file. What does not: what is done
to a message once it is found (`reasoning.py`, `tool_calls.py`); `canonicalization.py` puts them together.
"""

from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field

from rowmill.core.json import Json
from rowmill.formats.auto import Auto
from rowmill.formats.chat import Chat
from rowmill.formats.columns import is_mapping, rename_aliases
from rowmill.formats.custom import RowFormat, list_registered_formats, register_format
from rowmill.formats.python import Python
from rowmill.formats.records import Records
from rowmill.formats.supervised import Supervised
from rowmill.formats.text import Text

__all__ = ["Auto", "Chat", "Format", "Python", "Records", "RowFormat", "Supervised", "Text", "register_format"]

FORMAT_KINDS = ("chat", "supervised", "text", "records", "auto", "python")


def _normalize_kind(values: Json) -> Json:
    """Accept `type` for `kind`, `instruction` for `supervised`, a registered name, and no kind at all for `auto`."""
    if not is_mapping(values):
        return values
    named: dict[str, Json] = rename_aliases(values, {"type": "kind"})
    kind = named.get("kind", "auto")
    own = list_registered_formats().get(kind) if type(kind) is str and kind not in FORMAT_KINDS else None
    if own is not None:
        return {"class": own, **named, "kind": "python"}
    return {**named, "kind": "supervised" if kind == "instruction" else kind}


Format: TypeAlias = Annotated[
    Chat  # lists of messages, and whatever can be read as one: ShareGPT, Alpaca, prompt and response
    | Supervised  # a prompt and its response, joined without a chat template
    | Text  # documents
    | Records  # rows of tables
    | Auto  # chat or text, decided row by row
    | Python,  # whatever a class of one's own makes of them
    Field(discriminator="kind"),
    BeforeValidator(_normalize_kind),
]
