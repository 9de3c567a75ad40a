"""The kinds `chat`: conversations, in any known columns; and `auto`: conversations or documents, record by record.

Shapes of records are detected in `conversation_rows.py`, a message is read in `messages.py`; here are the kinds'
declarations, and how columns are recognized where they have other names than the known ones.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal

from rowmill.kinds.base import DatasetOptions, RecordReader
from rowmill.kinds.reading.conversation_rows import (
    ConversationColumns,
    ConversationReader,
)
from rowmill.kinds.reading.recognition import try_options
from rowmill.kinds.shared.messages import (
    ASKING_COLUMNS,
    FUNCTION_CALL,
    KNOWN_ROLES,
    LIST_COLUMNS,
    MAPPED_ROLES,
    SYSTEM_COLUMNS,
    fold_role,
    is_list,
    is_mapping,
    parse_messages,
    split_open_transcript,
    split_transcript,
)
from rowmill.kinds.shared.samples import Recognition, Sample, choose_best, suggest_context

ROLE_KEYS = ("role", "from", "speaker", "author", "sender", "type")
CONTENT_KEYS = ("content", "value", "text", "message", "utterance", "parts")
_PAIR_SCHEMAS = frozenset({"prompt_response", "alpaca"})


class Chat(ConversationColumns):
    """Each record is a conversation: messages, ShareGPT, Alpaca, or prompt and response."""

    MEANT_BY: ClassVar = ("openai", "chatml", "conversation", "conversations", "sft")

    PRECEDENCE: ClassVar[int] = 40
    FIELDS_NOT_READ: ClassVar[Mapping[str, frozenset[str]]] = {"filters": frozenset({"min_chars", "max_chars"})}

    kind: Literal["chat"] = "chat"
    """Conversations, rendered by a chat template."""

    @classmethod
    def recognise(cls, sample: Sample) -> Recognition | None:
        """Recognise conversations under any names of columns, keys and roles.

        A prompt and a response that are texts, with nothing else of a conversation, are left to the kind `supervised`;
        a prompt that is a transcript is a conversation.
        """
        found = choose_best(try_options(cls, options, sample) for options in _suggest_columns(sample))
        found = _name_models(found, sample) if found is None or not found.is_sure else found
        if found is None or not (found.schemas and set(found.schemas) <= _PAIR_SCHEMAS):
            return found
        has_more = {*SYSTEM_COLUMNS, "history"} & set(found.columns)
        has_lists = any(
            is_list(parse_messages(record.get(name))) or is_mapping(record.get(name))
            for record in sample.whole
            for name in found.columns
        )
        has_turns = sample.is_mostly(
            any(type(text := record.get(name)) is str and split_open_transcript(text) for name in found.columns)
            for record in sample.whole
        )
        return found if has_more or has_lists or has_turns else None

    def make_record_reader(self, options: DatasetOptions) -> RecordReader:
        """Read every record as a conversation."""
        return ConversationReader(self, options)


class Auto(ConversationColumns):
    """Each record's shape is detected: messages, ShareGPT, Alpaca, prompt and response, text."""

    ALIASES: ClassVar[Mapping[str, str]] = {**ConversationColumns.ALIASES, "enforce_eos": "add_eos"}

    kind: Literal["auto"] = "auto"
    """Conversations or documents, decided per record."""
    text_key: str = "text"
    """Column with the document, if a record is not a conversation."""
    add_eos: Literal["auto"] | bool = "auto"
    """Whether the end-of-text token ends a document; auto: if the tokenizer has one."""

    def make_record_reader(self, options: DatasetOptions) -> RecordReader:
        """Read a record as a conversation, or as a document if it has no conversation's shape."""
        return ConversationReader(self, options, text_key=self.text_key)


def _suggest_columns(sample: Sample) -> Iterator[dict[str, Any]]:
    """Yield options for the columns of some records, the known ones first."""
    yield {}
    if context := suggest_context(sample, *ASKING_COLUMNS):
        yield context
    # Columns that are lists of messages, with the keys of role and content.
    found: Counter[tuple[str, str, str]] = Counter()
    for record in sample.whole:
        for name, value in record.items():
            messages = parse_messages(value)
            first = messages[0] if is_list(messages) and messages else None
            if not is_mapping(first):
                continue
            role_key = next((key for key in ROLE_KEYS if type(first.get(key)) is str), None)
            content_key = next((key for key in CONTENT_KEYS if key in first), None)
            if role_key is not None and content_key is not None:
                found[name, role_key, content_key] += 1
    keys_of = {name: (role_key, content_key) for (name, role_key, content_key), _ in found.most_common()}
    for name, (role_key, content_key) in keys_of.items():
        column = {} if name in LIST_COLUMNS else {"messages_field": name}
        keys = {} if role_key in ("role", "from") else {"role_field": role_key}
        if content_key not in ("content", "value", "parts"):
            keys |= {"role_field": role_key, "content_field": content_key}
        if column or keys:
            yield column | keys
    for name in sample.columns:
        if name not in LIST_COLUMNS and sample.is_mostly(
            type(text := record.get(name)) is str and split_transcript(text) is not None for record in sample.whole
        ):
            yield {"messages_field": name}
        # Texts of user and model in turn, as in UltraChat; a list of texts with another name may be anything.
        if name == "data" and sample.is_mostly(
            is_list(turns := record.get(name))
            and len(turns) > 1
            and all(type(turn) is str and " " in turn for turn in turns)
            for record in sample.whole
        ):
            yield {"messages_field": name}


def _name_models(found: Recognition | None, sample: Sample) -> Recognition | None:
    """Map names that answer the user in the place of the model's role, as those of several models do."""
    names: Counter[str] = Counter()
    for record in sample.whole:
        for value in record.values():
            if is_list(value) and value and all(map(is_mapping, value)):
                roles = [next((one[key] for key in ROLE_KEYS if type(one.get(key)) is str), "") for one in value]
                known = [MAPPED_ROLES.get(fold_role(role), role) for role in roles]
                if "assistant" not in known and "user" in known:
                    names.update(
                        role
                        for before, role in pairwise(known)
                        if before == "user" and role not in (*KNOWN_ROLES, FUNCTION_CALL)
                    )
    if not names:
        return found
    options = dict(found.options) if found is not None else {}
    options.pop("kind", None)
    note = f"{', '.join(sorted(names))}: names of models in the place of the role, which are mapped to assistant"
    mapped = try_options(Chat, {**options, "role_map": dict.fromkeys(sorted(names), "assistant")}, sample, notes=[note])
    return choose_best([mapped, *([found] if found is not None else [])])
