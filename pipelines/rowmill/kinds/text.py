"""The kind `text`: documents, one column of text, all of which is trained."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from rowmill.conversation.template_engines import list_answer_marks
from rowmill.kinds.base import ALL_GROUPS, NOT_READ_OF_PLAIN_TEXT, DatasetKind, DatasetOptions, RecordReader
from rowmill.kinds.reading.conversation_rows import make_document_reader
from rowmill.kinds.reading.recognition import try_options
from rowmill.kinds.shared.messages import PRINTED_MESSAGES, SPEAKERS
from rowmill.kinds.shared.samples import Recognition, Sample, choose_best
from rowmill.schema.rows import RowKind

TEXT_COLUMNS = ("text", "content", "document", "body", "raw_content", "article", "code", "passage", "abstract")
"""Columns that hold a document, the most likely first."""

_ASKS, _ANSWERS = (
    "|".join(name for name, role in SPEAKERS.items() if (role == "assistant") is answers) for answers in (False, True)
)
_PRINTED_TURNS = re.compile(
    rf"\W{{,9}}(?:{_ASKS}) ?[:>|｜*\]].*[\n>|｜]\W{{,9}}(?:{_ANSWERS}) ?[:>|｜*\]]", re.DOTALL | re.IGNORECASE
)
"""Turns that begin with a name and a sign: `<human>:`, `**User:**`, `<｜User｜>`, `user:`."""


class Text(DatasetKind):
    """Each record is a document."""

    MEANT_BY: ClassVar = ("pretraining", "pretrain", "cpt")

    FITS_MOST_RECORDS: ClassVar[bool] = True
    PRECEDENCE: ClassVar[int] = 70
    ROW_KIND: ClassVar[RowKind] = "text"
    GROUPS: ClassVar[frozenset[str]] = ALL_GROUPS - {"reasoning", "tools", "loss"}
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {
        "template": NOT_READ_OF_PLAIN_TEXT,
        "truncation": frozenset({"truncate_side", "token_cut"}),
    }
    ALIASES: ClassVar[Mapping[str, str]] = {"enforce_eos": "add_eos"}

    kind: Literal["text"] = "text"
    """Documents, without a chat template and without a prompt."""
    text_key: str = "text"
    """Column with the document."""
    ignore_columns: list[str] = Field(default=[])
    """Columns that are left out on purpose; others of text that nothing reads are reported, and refused if their name
    says what trains."""
    domain_key: str | None = None
    """Column that names the row's domain; a row without text there is in `__default__`."""
    add_bos: Literal["auto"] | bool = "auto"
    """Whether the beginning-of-text token starts a document; auto: if the tokenizer has one."""
    add_eos: Literal["auto"] | bool = "auto"
    """Whether the end-of-text token ends a document; auto: if the tokenizer has one."""

    @classmethod
    def recognise(cls, sample: Sample) -> Recognition | None:
        """Recognise one column of text: a known one, or the only column."""
        columns = sample.columns
        names = [name for name in TEXT_COLUMNS if name in columns] or (columns if len(columns) == 1 else [])
        found = choose_best(try_options(cls, {} if name == "text" else {"text_key": name}, sample) for name in names)
        if found is None:
            return None
        column = found.options.get("text_key", "text")
        if others := [name for name in names if name in found.unread and name != column]:
            return replace(found, problem=f"{', '.join(others)}: a column of documents too, which nothing reads")
        texts = [text for record in sample.whole if type(text := record.get(column)) is str]
        printed = describe_printed_chats(texts)
        return replace(found, problem=f"{column} holds {printed}") if printed else found

    def make_record_reader(self, options: DatasetOptions) -> RecordReader:
        """Read every record as a document."""
        return make_document_reader(self.text_key, options.filters)


def describe_printed_chats(texts: Sequence[str]) -> str:
    """Return what most documents hold, if it is messages, or chats as a template or a person prints them; else nothing.

    All of such a document would train, its prompts too.
    """
    if not texts:
        return ""

    def is_most(holds: Callable[[str], object]) -> bool:
        return sum(bool(holds(text)) for text in texts) * 2 > len(texts)

    for name, mark in list_answer_marks().items():
        if is_most(lambda text, mark=mark: mark in text):
            return f"chats that a template such as {name} has printed: prompts would be trained"
    if is_most(PRINTED_MESSAGES.match):
        return "messages as JSON or Python values: prompts would be trained"
    if is_most(_PRINTED_TURNS.match):
        return "chats whose turns begin with the speaker: prompts would be trained"
    return ""
