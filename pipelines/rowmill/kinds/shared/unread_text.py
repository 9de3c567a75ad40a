"""Measures the text of a record that nothing reads: what a recipe leaves out without saying so.

    {"question": "…", "response": "…", "hint": "…"}      read: question, response      unread: hint

Text that a row holds anyway, such as a prompt that is repeated beside the messages, counts as read.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from rowmill.core.json import Json
from rowmill.schema.rows import PlainChat, Row

IDENTIFIER_CHARS = 40
"""A text of one word up to this length is a name, a link or a hash, not text that could be trained."""

_LEAST_CHARS = 4
"""Shorter texts stand in others by chance."""


def iterate_texts(value: Json) -> Iterator[str]:
    """Yield the texts inside a value, without names and links."""
    if type(value) is str:
        is_name = len(value) <= IDENTIFIER_CHARS and " " not in value.strip()
        if not is_name and not value.startswith(("http://", "https://")):
            yield value
    elif type(value) is dict or type(value) is list:
        for inner in value.values() if type(value) is dict else value:
            yield from iterate_texts(inner)


def measure_row_text(row: Row) -> int:
    """Count the characters that a row holds."""
    return sum(map(len, _list_row_texts(row))) + sum(map(len, iterate_texts(list(row.tools or ()))))


def measure_unread_text(record: Mapping[str, Json], row: Row, read: Collection[str]) -> dict[str, int]:
    """Return the characters of each column that is not read and that the row does not hold."""
    found: dict[str, int] = {}
    held: list[str] = []
    for name, value in record.items():
        if value is None or name in read:
            continue
        for text in iterate_texts(value):
            held = held or _list_row_texts(row)
            if any(text.strip() in one for one in held):
                continue
            # A text that repeats the row, as Alpaca's `text` does, holds nothing else.
            repeated = sum(len(one) for one in held if len(one) >= _LEAST_CHARS and one in text)
            found[name] = found.get(name, 0) + max(0, len(text) - repeated)
    return found


class UnreadTextCounter:
    """Sums, over the records of a part, the share of each record's text that a column holds and nothing reads."""

    def __init__(self, read_elsewhere: Collection[str] | None) -> None:
        """Take the columns that other options read; None counts nothing, as where the reader is the user's."""
        self._read_elsewhere = None if read_elsewhere is None else frozenset(read_elsewhere)
        self.rows = 0
        self.columns: Counter[str] = Counter()
        """Millionths of a record's text by column, summed: whole numbers are the same in any order."""

    def add(self, record: Json, made: "Row | PlainChat") -> None:
        """Count one record, which became a row."""
        if self._read_elsewhere is None or type(record) is not dict:
            return
        self.rows += 1
        read = made.read_columns
        # Types are compared without calls: most records have nothing but what is read.
        names = [
            name
            for name, value in record.items()
            if type(value) is str and name not in read and name not in self._read_elsewhere
        ]
        if not names:
            return
        row = made if isinstance(made, Row) else Row("conversation", tuple(made.messages))
        unread = measure_unread_text({name: record[name] for name in names}, row, ())
        if unread:
            total = measure_row_text(row) + sum(unread.values())
            self.columns.update({name: round(1e6 * size / total) for name, size in unread.items()})


def holds_text(row: Row, text: str) -> bool:
    """Return whether a text is part of what a row says, as the first message is in some datasets of messages."""
    wanted = text.strip()
    return any(wanted in one for one in _list_row_texts(row))


def _list_row_texts(row: Row) -> list[str]:
    texts = [row.text, row.output]
    for message in row.messages:
        texts += [value if type(value) is str else "".join(iterate_texts(value)) for value in message.values()]
    texts += [value for value in row.columns.values() if type(value) is str]
    return [one for one in texts if one]
