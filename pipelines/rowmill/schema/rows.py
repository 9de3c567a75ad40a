"""The canonical row: one conversation, pair, text or record, in one shape whatever its source looked like.

What belongs here: the dataclasses that packages hand to each other before tokens exist, and the Arrow
schema in which they are stored. What does not: how a source's columns become a row (`formats/`), or
what is done to a row afterwards.

    raw record ──formats──► Row | Rejected ──rendering──► Rendered ──tokenization──► Example

`messages`, `tools` and `template_kwargs` are stored as JSON *text*: Arrow would give every message
the union of all keys and fill the gaps with nulls, and templates print those nulls.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Literal, TypeAlias

import pyarrow as pa

from rowmill.core.json import Json

RowKind = Literal["conversation", "pair", "text", "record"]


Message: TypeAlias = dict[str, Json]
"""A canonical message: `role` and `content` (str) always; `reasoning_content` (str), `tool_calls`
(`[{"id", "type": "function", "function": {"name", "arguments"}}]`, arguments an object unless it
could not be parsed), `name`, `tool_call_id`, `train` (bool), `weight` (float) where they apply; other
keys of the source stay as they were, because a template may read them."""


@dataclass(frozen=True, slots=True)
class ParseReport:
    """What canonicalisation noticed about one record; stored as columns beside the row."""

    schema: str = ""
    extracted_think_from_content: int = 0
    moved_reasoning_keys: int = 0
    dropped_think_messages: int = 0
    tools_present: bool = False
    tools_parsed_from_string: bool = False
    unknown_roles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Counted oddities that are no reject: `ignored_add_generation_prompt`, `literal_think`, …"""


@cache
def make_plain_report(schema: str) -> ParseReport:
    """Return the report of a row about which there is nothing to say; rows of one schema share it."""
    return ParseReport(schema=schema)


@dataclass(frozen=True, slots=True)
class Row:
    """One canonical row, before it is given an id.

    conversation: `messages` (and `tools`, `template_kwargs`); pair: `messages` empty, `text` the
    prompt and `output` the response; text: `text`; record: `record`.
    """

    kind: RowKind
    messages: tuple[Message, ...] = ()
    tools: tuple[Json, ...] | None = None
    template_kwargs: dict[str, Json] = field(default_factory=dict[str, Json])
    text: str | None = None
    output: str | None = None
    record: Json = None
    group_key: str | None = None
    order_key: str | None = None
    domain: str | None = None
    report: ParseReport = ParseReport()


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that cannot go on: why, in a word of the closed list, and in detail for a reader."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `[start, end)` of a rendered text that belong to message `message`."""

    start: int
    end: int
    message: int


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Characters `[start, end)` of a rendered text that come from the row itself, and what they are.

    `kind` is one of the span kinds of `examples.KINDS`, without `template`.
    """

    start: int
    end: int
    message: int
    kind: str


@dataclass(frozen=True, slots=True)
class RenderedText:
    r"""A conversation as its chat template prints it.

    text     "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    spans     └───────── message 0 ──────────┘└───────────── message 1 ──────────────┘
    trained                                                          └─────────────┘

    `spans` ascend and do not overlap; a message may own several. Text in no span is the template's
    own (preamble, tail).
    """

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class MaskedConversation:
    """A rendered conversation with its verified loss spans.

    `trained` are character ranges, ascending, disjoint, with the supervised message of each (−1 where everything
    trains); an appended end of turn is its last message's. `pieces` locate the row's own text for token classes;
    `dropped` counts own text that the template did not print, by kind. `weights` are loss weights by the message of
    a trained span; one that is not there weighs 1.
    """

    text: str
    spans: tuple[Span, ...]
    trained: tuple[Span, ...]
    pieces: tuple[ContentSpan, ...]
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    reasoning_untrained: int = 0
    weights: dict[int, float] = field(default_factory=dict[int, float])


ROW_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("content_hash", pa.binary(16), nullable=False),
        pa.field("dedupe_key", pa.binary(16)),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("group_key", pa.string()),
        pa.field("order_key", pa.string()),
        pa.field("domain", pa.string()),
        pa.field("messages", pa.string()),
        pa.field("tools", pa.string()),
        pa.field("template_kwargs", pa.string()),
        pa.field("text", pa.string()),
        pa.field("output", pa.string()),
        pa.field("record", pa.string()),
        pa.field("prompt_hash", pa.binary(8)),
        pa.field("schema", pa.string(), nullable=False),
        pa.field("extracted_think_from_content", pa.int32(), nullable=False),
        pa.field("moved_reasoning_keys", pa.int32(), nullable=False),
        pa.field("dropped_think_messages", pa.int32(), nullable=False),
        pa.field("tools_present", pa.bool_(), nullable=False),
        pa.field("tools_parsed_from_string", pa.bool_(), nullable=False),
        pa.field("unknown_roles", pa.list_(pa.string()), nullable=False),
        pa.field("notes", pa.list_(pa.string()), nullable=False),
    ]
)
"""A part of `canonical_rows`; row order is source order. `dedupe_key` is set where it is not `content_hash`."""


NORMALIZATION_COLUMNS = (
    "extracted_think_from_content",
    "moved_reasoning_keys",
    "dropped_think_messages",
    "tools_present",
    "tools_parsed_from_string",
)
"""Columns of `ROW_SCHEMA` that count what was noticed in a row; `rowmill stats` shows their sums."""


MESSAGE_CONTENT_COUNTS = ("reasoning_messages", "tool_call_messages", "tool_calls")
"""What `count_messages` counts beside roles."""


def count_messages(conversations: Iterable[Sequence[Message]]) -> dict[str, dict[str, int]]:
    """Count messages by role, those that hold reasoning or calls, and the calls."""
    messages = list(chain.from_iterable(conversations))
    # Most messages are a role and a content, so all others are looked into, and they are few.
    others = [one for one in messages if len(one) > 2]
    calls = [len(one["tool_calls"]) for one in others if one.get("tool_calls")]
    reasons = sum(bool(one.get("reasoning_content")) for one in others)
    return {
        "messages_by_role": dict(sorted(Counter(map(itemgetter("role"), messages)).items())),
        "reasoning_and_calls": dict(zip(MESSAGE_CONTENT_COUNTS, (reasons, len(calls), sum(calls)), strict=True)),
    }


def subtract_messages(
    counts: Mapping[str, Mapping[str, int]], gone: Iterable[Sequence[Message]]
) -> dict[str, dict[str, int]]:
    """Take the messages of some rows out of the `count_messages` of all; a role that nobody has left is not named."""
    roles, others = count_messages(gone).values()
    left = {role: count - roles.get(role, 0) for role, count in counts["messages_by_role"].items()}
    return {
        "messages_by_role": {role: count for role, count in left.items() if count},
        "reasoning_and_calls": {name: counts["reasoning_and_calls"][name] - others[name] for name in others},
    }


REJECT_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
        pa.field("raw", pa.binary(), nullable=False),
    ]
)
"""Rejected records with their raw bytes, as the source had them (or the canonical JSON after it)."""


_ROW_ID_PATTERN = re.compile(r".+:\d+(\.\d+)?")


def is_row_id(row_id: str) -> bool:
    """Tell whether a text is a row's id."""
    return _ROW_ID_PATTERN.fullmatch(row_id) is not None


def parse_row_id(row_id: str) -> tuple[str, int]:
    """Return part and record number of a row's id.

    `<part>:12` is record 12's row; `<part>:12.1` is the next one that a format of one's own made of it.
    """
    part, _, number = row_id.rpartition(":")
    return part, int(number.partition(".")[0])
