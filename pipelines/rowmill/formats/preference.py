"""Preference data, which is not for training on answers as they are: by which columns it is known.

What belongs here: the closed list of columns, and which of them a recipe leaves unread. What does not: what becomes of
such rows; nothing is dropped, a check asks the user (`checks/catalog.py`, `preference_data`).

    {"messages": […], "label": false}             a bad answer, marked as one
    {"messages": […], "rejected_response": "…"}   an answer beside a worse one

Without the column, a row of either kind is a conversation like any other, and bad answers would train like good ones.
Names decide, not values: what a `label` says is known to whoever wrote it.
"""

from collections.abc import Collection, Mapping, Sequence

from rowmill.core.json import Json

ANSWER_LABELS = frozenset(
    "label kto_tag desirable is_desirable is_chosen is_rejected is_preferred is_good thumbs_up accepted".split()
)
"""Columns that say of one answer whether it is good."""

ANSWER_PAIRS = frozenset(
    "chosen rejected chosen_messages rejected_messages chosen_response rejected_response response_chosen "
    "response_rejected chosen_conversations rejected_conversations chosen_answer rejected_answer response_j response_k "
    "chosen_score rejected_score score_chosen score_rejected chosen_rating rejected_rating chosen-rating "
    "rejected-rating preference preferred winner better_response_id safer_response_id".split()
)
"""Columns that hold a better and a worse answer, or say which of two is better."""

PREFERENCE_COLUMNS = ANSWER_LABELS | ANSWER_PAIRS

_SHAPE_COLUMNS = frozenset("conversations system instruction input output history".split())
"""Columns that the known shapes of records have whatever the recipe names (`detection.py`)."""


def find_unread_columns(named: Sequence[str | None] | None, others: Collection[str | None]) -> frozenset[str]:
    """Return the columns of preference data that a dataset leaves unread; none for kinds that name no answers.

    `named` are the columns that the kind names for answers and what leads to them, None for a kind that names none;
    `others` are columns and paths that other groups of options read. Whoever trains on `chosen` has made the choice
    between a pair's answers, so the other columns of pairs need not be read.
    """
    if named is None:
        return frozenset()
    read = {*_SHAPE_COLUMNS, *(one for name in (*named, *others) if name for one in (name, name.split(".")[0]))}
    settled = ANSWER_PAIRS if not read.isdisjoint(ANSWER_PAIRS) else frozenset[str]()
    return PREFERENCE_COLUMNS - read - settled


def list_present_columns(record: Mapping[str, Json], unread: frozenset[str]) -> list[str]:
    """Return which of the unread columns a record has a value in, in the record's order; an empty cell is none."""
    if unread.isdisjoint(record):
        return []
    return [name for name, value in record.items() if name in unread and value is not None and value != ""]
