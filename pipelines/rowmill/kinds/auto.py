"""The kind `auto`: each record is a conversation if it has the shape of one, else a document."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

from pydantic import model_validator

from rowmill.core.json import Json
from rowmill.kinds.base import TokenOptions
from rowmill.kinds.shared.canonicalization import RecordReader, RowOptions
from rowmill.kinds.shared.columns import ConversationColumns
from rowmill.kinds.shared.conversation_rows import ConversationReader, detect_messages
from rowmill.kinds.shared.messages import apply_eos_alias
from rowmill.kinds.text import make_document_reader


class Auto(ConversationColumns):
    """Each record's shape is detected: messages, ShareGPT, Alpaca, prompt and response, text."""

    ALIASES: ClassVar[Mapping[str, str]] = {**ConversationColumns.ALIASES, "enforce_eos": "add_eos"}

    kind: Literal["auto"] = "auto"
    """Conversations or documents, decided per record."""
    text_key: str = "text"
    """Column with the document, if a record is not a conversation."""
    add_eos: Literal["auto"] | bool = "auto"
    """Whether the end-of-text token ends a document; auto: if the tokenizer has one."""

    @model_validator(mode="before")
    @classmethod
    def _text_aliases(cls, values: Json) -> Json:
        return apply_eos_alias(values)

    def make_record_reader(self, options: RowOptions) -> RecordReader:
        """Read a record as a conversation, or as a document if it has no conversation's shape."""
        read_document = make_document_reader(self.text_key, options.filters)
        detect = partial(detect_messages, columns=self, text_key=self.text_key)
        return ConversationReader(self, options, detect, single_turn=self.single_turn, read_document=read_document)

    def get_token_options(self) -> TokenOptions:
        """Return the model's roles, BOS and EOS."""
        return replace(super().get_token_options(), add_eos=self.add_eos)
