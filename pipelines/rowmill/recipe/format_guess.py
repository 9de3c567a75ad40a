"""A format guessed from a dataset's first records, with the evidence for it.

What belongs here: choosing the `format` options of a new recipe, with the reasons. What does not: reading data
(`sources/`), writing the recipe (`new_project.py`), and `kind: auto`, which decides record by record during a build.

    a list of messages, under any column name    chat
    instruction and output; a prompt, a response supervised
    one column of text                           text
    columns of single values                     records

A guess is a proposal for a person to review, so nothing here reaches a fingerprint.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from rowmill.core.config import describe_type
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json
from rowmill.formats.auto import Auto
from rowmill.formats.columns import MAPPED_ROLES
from rowmill.formats.detection import DetectedMessages, detect_messages
from rowmill.formats.preference_columns import PREFERENCE_COLUMNS
from rowmill.formats.record_values import is_list, is_mapping

PAIR_COLUMNS = (
    *(("prompt", "response"), ("prompt", "completion"), ("prompt", "answer"), ("question", "answer")),
    *(("question", "response"), ("instruction", "output"), ("instruction", "response"), ("query", "response")),
    *(("input", "output"), ("inputs", "targets"), ("source", "target"), ("prompt", "output")),
)
"""Columns that hold a prompt and its response, the most likely first."""

TEXT_COLUMNS = ("text", "content", "document", "body", "raw_content")
"""Columns that hold a document, the most likely first."""

_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")


@frozen_dataclass
class FormatGuess:
    """Options of `format` and the evidence for them; `evidence` quotes no value of the data."""

    options: Mapping[str, Any]
    evidence: Sequence[str]
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """Most common type of each column."""

    @property
    def uses_template(self) -> bool:
        """Whether rows are rendered by a chat template."""
        return self.options["kind"] == "chat"


def guess_format(records: Sequence[Mapping[str, Json]]) -> FormatGuess | None:
    """Return the format of the majority of some records, or None if no known shape fits them."""
    columns = _describe_columns(records)
    guess = (
        _guess_chat(records)
        or _guess_pair(records)
        or _guess_text(records, columns)
        or _guess_records(records, columns)
    )
    if guess is None:
        return None
    marked = sorted(columns.keys() & PREFERENCE_COLUMNS) if guess.options["kind"] != "records" else []
    warning = [
        f"`{name}` is a column of preference data: if it marks answers that must not be trained, filter them first, "
        "or the check preference_data stops the build"
        for name in marked
    ]
    return FormatGuess(guess.options, [*guess.evidence, *warning], columns)


def _describe_columns(records: Sequence[Mapping[str, Json]]) -> dict[str, str]:
    found: dict[str, Counter[str]] = {}
    for record in records:
        for name, value in record.items():
            if value is not None:
                found.setdefault(name, Counter())[describe_type(value).split(" ", 1)[-1]] += 1
    return {name: types.most_common(1)[0][0] for name, types in found.items()}


def _guess_chat(records: Sequence[Mapping[str, Json]]) -> FormatGuess | None:
    columns = Auto()
    shapes = Counter(
        found.schema for record in records if isinstance(found := detect_messages(record, columns), DetectedMessages)
    )
    for schema, column in (("messages", "messages"), ("sharegpt", "conversations")):
        if _is_most(shapes[schema], records):
            return _make_chat_guess({}, f"`{column}` is a list of messages", shapes[schema], records)
    sides = sum(all(is_list(one.get(name)) for name in ("prompt", "completion")) for one in records)
    if _is_most(min(sides, shapes["prompt_response"]), records):
        return _make_chat_guess({}, "`prompt` and `completion` are lists of messages", sides, records)
    lists = Counter(name for record in records for name, value in record.items() if _is_answered_conversation(value))
    for name, count in lists.most_common():
        if name not in PREFERENCE_COLUMNS and _is_most(count, records):
            return _make_chat_guess({"messages_field": name}, f"`{name}` is a list of messages", count, records)
    return None


def _make_chat_guess(
    options: Mapping[str, Any], what: str, count: int, records: Sequence[Mapping[str, Json]]
) -> FormatGuess:
    return FormatGuess({"kind": "chat", **options}, [f"chat: {what} in {count} of {len(records)} records"])


def _is_answered_conversation(value: Json) -> bool:
    """Return whether a value is a list of messages with an assistant message: prompts alone train nothing."""
    if not is_list(value) or not all(map(is_mapping, value)):
        return False
    roles = [next((one[key] for key in _ROLE_KEYS if key in one), None) for one in value]
    has_content = all(any(key in one for key in (*_CONTENT_KEYS, "tool_calls")) for one in value)
    return has_content and None not in roles and any(MAPPED_ROLES.get(str(role), role) == "assistant" for role in roles)


def _guess_pair(records: Sequence[Mapping[str, Json]]) -> FormatGuess | None:
    for prompt, response in PAIR_COLUMNS:
        count = sum(type(record.get(prompt)) is str and type(record.get(response)) is str for record in records)
        if _is_most(count, records):
            return FormatGuess(
                {"kind": "supervised", "input_field": prompt, "output_field": response},
                [
                    f"supervised: `{prompt}` and `{response}` are text in {count} of {len(records)} records",
                    "they are joined without a chat template; to have one, write:",
                    f"{{kind: chat, prompt_fields: [{prompt}], response_fields: [{response}]}}",
                ],
            )
    return None


def _guess_text(records: Sequence[Mapping[str, Json]], columns: Mapping[str, str]) -> FormatGuess | None:
    names = [name for name in TEXT_COLUMNS if name in columns] or list(columns)[: 1 if len(columns) == 1 else 0]
    for name in names:
        count = sum(type(record.get(name)) is str for record in records)
        if _is_most(count, records):
            options = {"kind": "text"} | ({} if name == "text" else {"text_key": name})
            return FormatGuess(options, [f"text: `{name}` is text in {count} of {len(records)} records"])
    return None


def _guess_records(records: Sequence[Mapping[str, Json]], columns: Mapping[str, str]) -> FormatGuess | None:
    count = sum(not any(is_list(value) or is_mapping(value) for value in record.values()) for record in records)
    if not columns or not _is_most(count, records):
        return None
    return FormatGuess(
        {"kind": "records"},
        [
            f"records: each of the {len(columns)} columns holds single values in {count} of {len(records)} records",
            "where rows belong together, name their column: data: {group_training_examples_by: COLUMN}",
        ],
    )


def _is_most(count: int, records: Sequence[object]) -> bool:
    return count * 2 > len(records)
