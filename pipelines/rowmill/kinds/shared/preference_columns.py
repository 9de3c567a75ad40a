"""Detects preference data by its columns: its answers must not be trained without selection.

    {"messages": […], "label": false}             a bad answer, marked as such
    {"messages": […], "rejected_response": "…"}   an answer with a worse one

Without the column, either row is an ordinary conversation, and bad answers would be trained like good ones. Detection
uses names, not values: only the data's author knows what a `label` means.
"""

from collections.abc import Collection, Mapping, Sequence

from rowmill.core.json import Json

ANSWER_LABELS = frozenset(
    "label kto_tag desirable is_desirable is_chosen is_rejected is_preferred is_good thumbs_up accepted".split()
)
"""Columns that rate one answer."""

ANSWER_PAIRS = frozenset(
    "chosen rejected chosen_messages rejected_messages chosen_response rejected_response response_chosen "
    "response_rejected chosen_conversations rejected_conversations chosen_answer rejected_answer response_j response_k "
    "chosen_score rejected_score score_chosen score_rejected chosen_rating rejected_rating chosen-rating "
    "rejected-rating preference preferred winner better_response_id safer_response_id".split()
)
"""Columns that hold a better and a worse answer, or compare two."""

PREFERENCE_COLUMNS = ANSWER_LABELS | ANSWER_PAIRS

_SHAPE_COLUMNS = frozenset("conversations system instruction input output history".split())
"""Columns of the known record shapes that are read without being named in the recipe (`conversation_rows.py`)."""


def find_unread_columns(named: Sequence[str | None] | None, others: Collection[str | None]) -> frozenset[str]:
    """Return the columns of preference data that a dataset does not read; none for kinds without answer columns.

    `named` are the kind's columns of answers and prompts, None for a kind without any; `others` are columns and paths
    that other option groups read. A dataset that trains on `chosen` has made the choice between a pair's answers, so
    the other columns of pairs need not be read.
    """
    if named is None:
        return frozenset()
    read = {*_SHAPE_COLUMNS, *(one for name in (*named, *others) if name for one in (name, name.split(".")[0]))}
    chosen = ANSWER_PAIRS if not read.isdisjoint(ANSWER_PAIRS) else frozenset[str]()
    return PREFERENCE_COLUMNS - read - chosen


def list_present_columns(record: Mapping[str, Json], unread: frozenset[str]) -> list[str]:
    """Return the unread columns in which a record has a value, in the record's order; an empty cell is not a value."""
    if unread.isdisjoint(record):
        return []
    return [name for name, value in record.items() if name in unread and value is not None and value != ""]
