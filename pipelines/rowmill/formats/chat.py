"""The kind `chat`: conversations, in any known columns.

What belongs here: the kind's fields and declarations. What does not: detecting shapes (`detection.py`), reading one
message (`messages.py`).
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

from rowmill.formats.canonicalization import RecordReader, RowOptions
from rowmill.formats.columns import ConversationColumns
from rowmill.formats.conversation_rows import ConversationReader
from rowmill.formats.detection import detect_messages


class Chat(ConversationColumns):
    """Each record is a conversation: messages, ShareGPT, Alpaca, or prompt and response."""

    MEANT_BY: ClassVar = ("openai", "chatml", "conversation", "conversations", "sft")

    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {"filters": frozenset({"min_chars", "max_chars"})}

    kind: Literal["chat"] = "chat"
    """Conversations, rendered by a chat template."""

    def make_record_reader(self, options: RowOptions) -> RecordReader:
        """Read every record as a conversation."""
        return ConversationReader(self, options, partial(detect_messages, columns=self), single_turn=self.single_turn)
