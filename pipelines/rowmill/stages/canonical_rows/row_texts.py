"""The texts of canonical rows that are compared with other texts: each message by itself, of all roles.

A message has up to three kinds of text: its reasoning, its content, and its calls, each a name and arguments. Tools are
none: two dialogues that differ only in the tools on offer are the same text. Rows of token ids have one text, their
ids decoded without control tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints
from rowmill.core.json import Json, from_json, to_json
from rowmill.core.storage import Store
from rowmill.schema.rows import make_row_schema
from rowmill.stages.base import StageContext
from rowmill.tokenization.stored_tokenizers import open_encoder, open_recipe_tokenizer

MESSAGE_COLUMNS = ("messages", "chosen", "rejected")
"""Columns of a row that hold messages as JSON text; those of a kind are in its schema."""
PLAIN_COLUMNS = ("text", "output")
"""Columns of a row that are text."""
ID_COLUMN = "input_ids"

SHOWN_ROWS = 30
"""Rows that a table shows beside the texts that they resemble."""
MAX_SHOWN_CHARS = 300
"""Characters of a text in such a table."""


@dataclass(frozen=True, slots=True)
class RowTexts:
    """The texts of some rows: text t is of row `rows[t]`, ascending."""

    texts: list[str]
    rows: Ints
    count: int
    """Rows, those without texts among them."""

    def of_row(self, row: int) -> list[str]:
        """Return the texts of one row."""
        first, last = np.searchsorted(self.rows, [row, row + 1]).tolist()
        return self.texts[first:last]

    @property
    def characters(self) -> Ints:
        """Characters of each row."""
        lengths = np.fromiter(map(len, self.texts), np.int64, len(self.texts))
        return np.bincount(self.rows, lengths, self.count).astype(np.int64)


@dataclass(frozen=True, slots=True)
class TextSource:
    """Where the texts of a dataset's rows are: columns, and for rows of token ids the tokenizer in the store."""

    columns: tuple[str, ...]
    tokenizer: str | None

    @classmethod
    def of_dataset(cls, context: StageContext) -> "TextSource":
        """Find the columns of the dataset's kind of rows; open its tokenizer if they are token ids."""
        known = (*MESSAGE_COLUMNS, *PLAIN_COLUMNS, "record", ID_COLUMN)
        columns = tuple(name for name in make_row_schema(context.dataset.row_kind).names if name in known)
        return cls(columns, open_recipe_tokenizer(context)[1] if ID_COLUMN in columns else None)

    def list_texts(self, store: Store, rows: pa.Table) -> RowTexts:
        """Return the texts of rows, whose table has the columns."""
        if self.tokenizer is None:
            return list_row_texts(rows)
        texts = open_encoder(store.root, self.tokenizer).decode_texts(rows.column(ID_COLUMN).to_pylist())
        return RowTexts(texts, np.arange(len(texts)), len(texts))


def list_row_texts(rows: pa.Table) -> RowTexts:
    """Return the texts of rows that have some, from their columns of messages, texts and records."""
    names = rows.column_names
    conversations = [rows.column(name).to_pylist() for name in MESSAGE_COLUMNS if name in names]
    plain = [rows.column(name).to_pylist() for name in PLAIN_COLUMNS]
    texts: list[str] = []
    counts: list[int] = []
    for row, record in enumerate(rows.column("record").to_pylist()):
        before = len(texts)
        for column in conversations:
            if column[row] is not None:
                for message in from_json(column[row]):
                    if reasoning := message.get("reasoning_content"):
                        texts.append(reasoning)
                    if content := message["content"]:
                        texts.append(content)
                    for call in message.get("tool_calls") or ():
                        function = call["function"]
                        texts.append("\n".join([function["name"], *_list_arguments(function.get("arguments"))]))
        texts += [column[row] for column in plain if column[row]]
        if record is not None:
            texts += list_strings(from_json(record))
        counts.append(len(texts) - before)
    return RowTexts(texts, np.repeat(np.arange(len(counts)), counts), len(counts))


def _list_arguments(value: Json) -> Iterator[str]:
    """Yield the keys and values of a call's arguments; as JSON, escapes would be letters of words."""
    if type(value) is dict:
        for key, inner in value.items():
            yield key
            yield from _list_arguments(inner)
    elif type(value) is list:
        for inner in value:
            yield from _list_arguments(inner)
    else:
        yield value if type(value) is str else to_json(value)


def list_strings(value: Json) -> Iterator[str]:
    """Yield every text inside a JSON value, in its order; keys are none."""
    if type(value) is str:
        if value:
            yield value
    elif type(value) in (dict, list):
        for inner in value.values() if type(value) is dict else value:
            yield from list_strings(inner)


def shorten_text(text: str) -> str:
    """Return the begin of a text, for tables that compare two."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 1]}…"
