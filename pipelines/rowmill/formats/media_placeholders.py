r"""Placeholders: text such as `<image>` that refers to media in a separate column of the record.

    {"messages": [{"role": "user", "content": "<image>\nWhat is it?"}, …], "images": ["cat.jpg"]}   →   rejected

Without such a column, the placeholder is ordinary text and is kept.
"""

from collections.abc import Mapping, Sequence

from rowmill.core.json import Json
from rowmill.formats.record_values import is_list
from rowmill.schema.rows import Rejected, Row

PLACEHOLDERS = {
    "images": "<image>",
    "image": "<image>",
    "videos": "<video>",
    "video": "<video>",
    "audios": "<audio>",
    "audio": "<audio>",
}
"""Placeholder in text, by media column."""
MEDIA_COLUMNS = frozenset(PLACEHOLDERS)


def reject_placeholders(row: Row, record: Mapping[str, Json]) -> Rejected | None:
    """Reject a row whose text holds the placeholder of a media column that is not empty."""
    if MEDIA_COLUMNS.isdisjoint(record):
        return None
    texts = _list_row_texts(row)
    for column, placeholder in PLACEHOLDERS.items():
        if _has_media(record.get(column)) and any(placeholder in text for text in texts):
            return Rejected("multimodal_content", f"the text holds {placeholder}, and the column {column} is not empty")
    return None


def _has_media(value: Json) -> bool:
    """Return whether a column holds media; a list of nulls, blank texts and empty mappings does not."""
    if is_list(value):
        return any(_has_media(one) for one in value)
    return bool(value.strip() if isinstance(value, str) else value)


def _list_row_texts(row: Row) -> Sequence[str]:
    texts = [text for text in (row.text, row.output) if text is not None]
    for message in row.messages:
        texts += [message["content"], message.get("reasoning_content", "")]
    return texts
