"""The canonical row, one conversation, pair, text or record in one shape for all sources, and its Arrow schema.

    raw record ──formats──► Row | Rejected ──rendering──► Rendered ──tokenization──► Example

`messages`, `tools` and `template_kwargs` are stored as JSON *text*: Arrow would give every message the union of all
keys with nulls for absent ones, and templates print those nulls.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import pyarrow as pa

from rowmill.core.arrow_files import make_required_schema
from rowmill.core.json import Json

RowKind = Literal["conversation", "pair", "text", "record", "prompt", "tokens", "preference"]

Split = Literal["train", "validation", "test"]

HELD_OUT: tuple[Split, ...] = ("validation", "test")
"""The splits whose rows never train."""
SPLITS: tuple[Split, ...] = ("train", *HELD_OUT)
"""The order is stored: codes of splits index it."""

SliceStrategy = Literal["keep_start", "keep_end", "error", "split", "drop"]

_PROMPT_COLUMNS: tuple[pa.Field, ...] = (
    pa.field("ground_truth", pa.string()),
    pa.field("data_source", pa.list_(pa.string()), nullable=False),
    pa.field("extra", pa.string()),
)

_ASKED_PROMPT_COLUMNS: tuple[pa.Field, ...] = (
    *(pa.field(name, pa.string()) for name in ("messages", "tools", "template_kwargs")),
    *_PROMPT_COLUMNS,
)
"""All that a trainer needs to ask a prompt again: its ids are those of one template."""


@dataclass(frozen=True, slots=True)
class RowKindDescription:
    """What rows of one kind have, and what may be done to their examples."""

    plural: str
    """Their name in texts for users."""
    columns: tuple[pa.Field, ...] = ()
    """The columns that its rows have beside those of all rows."""
    content_columns: tuple[str, ...] = ()
    """Those of them in which equal rows are equal."""
    example_columns: tuple[pa.Field, ...] = ()
    """The columns that its examples have beside those of all examples."""
    segment_columns: tuple[pa.Field, ...] = ()
    """What shards have of each segment beside what all shards have; a shard has a list of them for each sequence."""
    has_messages: bool = False
    """Whether its rows have messages, whose places the spans of examples name."""
    answers_in_messages: bool = False
    """Whether its messages are all of its text, the answers that train among them."""
    is_running_text: bool = False
    """Whether its examples may be cut anywhere: packing joins them, and truncation splits them."""
    is_token_ids: bool = False
    """Whether its rows are token ids, whose text only a tokenizer knows."""
    asks_in_text: bool = False
    """Whether the text of a row is its prompt."""
    fills_sequences: bool = True
    """Whether packed examples fill their sequences; prompts are short."""
    slice_strategy: SliceStrategy = "error"
    """What packing does to an example that is too long, unless the recipe says it."""


ROW_KINDS: Mapping[RowKind, RowKindDescription] = {
    "conversation": RowKindDescription(
        "chats", has_messages=True, answers_in_messages=True, slice_strategy="keep_start"
    ),
    "pair": RowKindDescription("pairs", asks_in_text=True, slice_strategy="keep_end"),
    "text": RowKindDescription("documents", is_running_text=True, slice_strategy="split"),
    "record": RowKindDescription("tables"),
    # `ground_truth` is JSON text, `data_source` names the verifiers, `extra` is a JSON object of carried fields.
    "prompt": RowKindDescription(
        "prompts",
        columns=_PROMPT_COLUMNS,
        example_columns=_ASKED_PROMPT_COLUMNS,
        segment_columns=_ASKED_PROMPT_COLUMNS,
        has_messages=True,
        fills_sequences=False,
    ),
    # `loss_mask` is true where a token is a target, never at the first.
    "tokens": RowKindDescription(
        "token rows",
        columns=(
            pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
            pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        ),
        content_columns=("input_ids", "loss_mask"),
        is_token_ids=True,
    ),
    "preference": RowKindDescription(
        "preferences",
        # `chosen` and `rejected` are the messages after the prompt as JSON text; with a `label` there is one of them.
        columns=(
            pa.field("chosen", pa.string()),
            pa.field("rejected", pa.string()),
            pa.field("label", pa.bool_()),
            pa.field("margin", pa.float64()),
        ),
        content_columns=("chosen", "rejected"),
        # `sides` are 1 for a chosen or good answer, 0 for a rejected or bad one; `side_lengths` are their tokens, and
        # each begins with the same `prompt_length` tokens.
        example_columns=(
            pa.field("sides", pa.list_(pa.int8()), nullable=False),
            pa.field("side_lengths", pa.list_(pa.int32()), nullable=False),
            pa.field("prompt_length", pa.int32(), nullable=False),
            pa.field("margin", pa.float32()),
        ),
        # A segment is a side: those of a pair follow each other. Fillers have nulls.
        segment_columns=(
            pa.field("sides", pa.int8()),
            pa.field("prompt_lengths", pa.int32()),
            pa.field("margins", pa.float32()),
        ),
        has_messages=True,
    ),
}
"""The description of each kind of rows. A further kind is one entry here, and its name above."""

PADDING_COLUMN = "segment_padding"

PADDING_FIELD = pa.field(PADDING_COLUMN, pa.int32())
"""Pad tokens after each segment, in shards of recipes that pad segments (`packing.segment_multiple_of`); a shard has a
list of them for each sequence, after the columns of its kind of rows."""

PARENTS_COLUMN = "segment_parents"

TREE_FIELDS: tuple[pa.Field, ...] = (
    pa.field(PARENTS_COLUMN, pa.int32()),
    pa.field("example_ends", pa.int32()),
    pa.field("target_examples", pa.int32()),
    pa.field("target_starts", pa.int32()),
    pa.field("target_lengths", pa.int32()),
    pa.field("target_weights", pa.float32()),
)
"""What shards have if examples share prefixes (`packing.share_prefixes`); each column is a list for each sequence.

`segment_parents`: the segment of the sequence that each segment continues, -1 for none. `example_ends`: the segment
that each of `example_ids` ends with. Run r of targets is `target_lengths[r]` tokens from `target_starts[r]` on in the
example `target_examples[r]` of the sequence, and each of them has the loss weight `target_weights[r]`.
"""

TREE_COLUMNS = tuple(column.name for column in TREE_FIELDS)

DOMAIN_COLUMN = "domains"

DOMAIN_FIELD = pa.field(DOMAIN_COLUMN, pa.string())
"""The domain of each segment's row, in shards of recipes that store it (`packing.store_domains`)."""

REFERENCE_FIELDS = (pa.field("example_files", pa.int32()), pa.field("example_rows", pa.int32()))
"""The file and the row of each segment's example, in shards without tokens of their own (`packing.layout: index`)."""


def are_running_text(kinds: Collection[RowKind]) -> bool:
    """Return whether there are rows, and all of them are running text."""
    return bool(kinds) and all(ROW_KINDS[kind].is_running_text for kind in kinds)


def describe_columns(columns: Iterable[pa.Field]) -> list[str]:
    """Return the columns of one kind for a stage's identity."""
    return [f"{column.name} {column.type}" for column in columns]


Message: TypeAlias = dict[str, Json]
"""A canonical message: always `role` and `content` (str); if present, `reasoning_content` (str), `tool_calls`
(`[{"id", "type": "function", "function": {"name", "arguments"}}]`, arguments an object unless it could not be parsed),
`name`, `tool_call_id`, `train` (bool), `weight` (float), `part_weights`; other keys of the source are kept, because a
template may read them.

`part_weights` are loss weights of what came in parts, if they differ: `{"content": [[12, 0], [7, 1]]}` says that the
first 12 characters of the content do not train, and the last 7 do; so for `reasoning`, and `calls` is one weight."""

REASONING_KEY = "reasoning_content"
"""The one key under which a canonical message keeps its reasoning."""

CANONICAL_FLAGS = frozenset({"train", "weight", "part_weights"})
"""The keys of a canonical message that say what of it trains."""

MESSAGE_KEYS = CANONICAL_FLAGS | frozenset(
    "role content reasoning_content tool_calls arguments_source name tool_call_id".split()
)
"""The keys of a canonical message that rowmill reads."""


@dataclass(frozen=True, slots=True)
class ParseReport:
    """What canonicalization noted about one record; stored as columns of the row."""

    schema: str = ""
    extracted_think_from_content: int = 0
    moved_reasoning_keys: int = 0
    dropped_think_messages: int = 0
    tools_present: bool = False
    tools_parsed_from_string: bool = False
    unknown_roles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Counted irregularities that do not reject the row: `ignored_add_generation_prompt`, `literal_think`, …"""


@cache
def make_plain_report(schema: str) -> ParseReport:
    """Return the report of a row without anything to note; rows of one schema share it."""
    return ParseReport(schema=schema)


@dataclass(slots=True)
class Row:
    """One canonical row, before it has an id. Never changed; not frozen, for that makes a row's creation twice as slow.

    conversation: `messages` (and `tools`, `template_kwargs`); pair: `messages` empty, `text` the
    prompt and `output` the response; text: `text`; record: `record`; prompt: as a conversation, without an answer;
    tokens: `columns` only;
    preference: `messages` are the prompt, and `columns` has the sides.
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
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of the kind's own columns (`ROW_KINDS`), and of the fields that its options add."""
    read_columns: tuple[str, ...] = ()
    """Columns of the record that the row's content was read from."""


class PlainChat(NamedTuple):
    """A record all of whose messages are plain, and that has nothing else: no tools, template arguments or notes.

    `PlainChatReader` says which records are. A named tuple, because one is made per record.
    """

    schema: str
    messages: list[Message]
    read_columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that is not processed further: a reason from the closed list, and a detail for the user."""

    reason: str
    detail: str = ""


class Span(NamedTuple):
    """Characters `[start, end)` of a rendered text that belong to message `message`; a named tuple for speed."""

    start: int
    end: int
    message: int


class ContentSpan(NamedTuple):
    """Characters `[start, end)` of a rendered text that come from the row, with their kind.

    `kind` is one of `examples.SPAN_KINDS`, without `template`.
    """

    start: int
    end: int
    message: int
    kind: str


@dataclass(frozen=True, slots=True)
class MaskedConversation:
    r"""A rendered conversation with its verified loss spans.

    text     "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    pieces                     └┘                                └───┘
    trained                                                      └─────────────┘

    `trained` are character ranges, ascending, disjoint, with the supervised message of each (−1 if everything is
    trained); an appended end of turn belongs to the last message. `pieces` locate the row's own text for token classes;
    `dropped` counts own text that the template did not print, by kind. `weights` are loss weights by the message of a
    trained span; a missing one is 1. `message_ends` are the places, ascending, at which messages that train end, with
    the white space after them: text from there on, such as the next header, belongs to another message.
    """

    text: str
    trained: tuple[Span, ...]
    pieces: tuple[ContentSpan, ...]
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    reasoning_untrained: int = 0
    weights: dict[int, float] = field(default_factory=dict[int, float])
    message_ends: tuple[int, ...] = ()
    part_weights: tuple[tuple[int, int, float], ...] = ()
    """Character ranges of parts of messages with their own loss weights, ascending. The text is encoded apart where one
    begins, so that no token reaches from a part that does not train into one that does."""


ROW_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("content_hash", pa.binary(16), nullable=False),
        pa.field("dedupe_key", pa.binary(16)),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        *(
            pa.field(name, pa.string())
            for name in "group_key order_key domain messages tools template_kwargs text output record".split()
        ),
        pa.field("prompt_hash", pa.binary(8)),
        pa.field("schema", pa.string(), nullable=False),
        *(
            pa.field(name, pa.int32(), nullable=False)
            for name in ("extracted_think_from_content", "moved_reasoning_keys", "dropped_think_messages")
        ),
        pa.field("tools_present", pa.bool_(), nullable=False),
        pa.field("tools_parsed_from_string", pa.bool_(), nullable=False),
        pa.field("unknown_roles", pa.list_(pa.string()), nullable=False),
        pa.field("notes", pa.list_(pa.string()), nullable=False),
    ]
)
"""A part of `canonical_rows`; row order is source order. `dedupe_key` is set if it differs from `content_hash`."""


def make_row_schema(kind: RowKind, columns: Iterable[pa.Field] = ()) -> pa.Schema:
    """Return the schema of a part of a dataset whose rows are of one kind; it ends with what its options add."""
    return pa.schema([*ROW_SCHEMA, *ROW_KINDS[kind].columns, *columns])


NORMALIZATION_COLUMNS = (
    "extracted_think_from_content",
    "moved_reasoning_keys",
    "dropped_think_messages",
    "tools_present",
    "tools_parsed_from_string",
)
"""Columns of `ROW_SCHEMA` that count what canonicalization noted; `rowmill stats` shows their sums."""

REJECT_SCHEMA = make_required_schema(
    row_id=pa.string(), stage=pa.string(), reason=pa.string(), detail=pa.string(), raw=pa.binary()
)
"""Rejected records with the source's raw bytes, or canonical JSON after canonicalization."""

REJECTED_ROW_COLUMNS = frozenset({"kind", "messages", "tools", "template_kwargs", "text", "output", "record"})
"""Those columns of a canonical row that its JSON has in `rejects`."""

_ROW_ID_PATTERN = re.compile(r".+:\d+(\.\d+)?")


def is_row_id(row_id: str) -> bool:
    """Return whether a text is a row id."""
    return _ROW_ID_PATTERN.fullmatch(row_id) is not None


def parse_row_id(row_id: str) -> tuple[str, int]:
    """Return the part id and record number of a row id.

    `<part>:12` is record 12's row; `<part>:12.1` is the next row that a custom format made of it.
    """
    part, _, number = row_id.rpartition(":")
    return part, int(number.partition(".")[0])


# ── The input of rendering ──


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a template: canonical messages, tools, the row's kwargs, and the row's hash."""

    messages: Sequence[Message]
    tools: Sequence[Json] | None = None
    kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])
    row_hash: bytes = b""
    """At least 8 bytes; decides whether the row is in the sample that is rendered twice for verification."""
    had_think_tags: bool = False
    """Whether reasoning of the row stood in tags inside an answer."""
