"""The tokenized example, its ids, mask, span kinds, source rows and fields of rollouts, and what each column holds.

    input_ids  151644 872 198 13048 151645 198 151644 77091 198 9707 151645 198
    loss_mask       0   0   0     0      0   0      0     0   0    1      1   0
    spans      └ template ┘ └user┘ └─────── template ──────────┘ └asst┘└template┘

    input_ids       5    6     7     8     9      a row of token ids with fields
    logprobs        0    0  -0.5     0  -1.5      the field of the token at the same place
    reward        1.0                             one value for the row

Nothing is shifted: position i itself is the target, and index 0 is never trained. With `loss.weights` there is a column
of weights, not 0 where the mask is true. All shards of a recipe have the same columns, so a dataset without a field
has 0.0 for each token, and null for each row.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.schema.rows import DOMAIN_COLUMN, PADDING_COLUMN, REFERENCE_FIELDS

SPAN_KINDS = ("system", "user", "assistant", "reasoning", "tool_call", "tool_result", "template", "prompt", "record")
"""Kinds of token spans; stored as an index into this tuple, so the order is part of the format."""

Objective: TypeAlias = Literal["next_token", "paired", "unpaired", "prompts"]
"""What a trainer does with a dataset's examples; all datasets of a recipe have one.

next_token: predict the trained tokens; paired: prefer a chosen answer to a rejected one; unpaired: one answer, marked
as good or bad; prompts: the model answers by itself, so nothing is trained.
"""


@dataclass(frozen=True, slots=True)
class ObjectiveDescription:
    """What examples of one objective have."""

    predicts_next_token: bool = False
    """Whether each trained token is predicted from those before it, and nothing else is."""
    has_targets: bool = True
    """Whether they have tokens that train."""
    sides: int = 1
    """How many texts an example has, each of which may be as long as the limit."""


OBJECTIVE_DESCRIPTIONS: Final[Mapping[Objective, ObjectiveDescription]] = {
    "next_token": ObjectiveDescription(predicts_next_token=True),
    "paired": ObjectiveDescription(sides=2),
    "unpaired": ObjectiveDescription(),
    "prompts": ObjectiveDescription(has_targets=False),
}

IGNORED_LABEL = -100
"""The label of a position that is not a target, which PyTorch's cross entropy skips."""

EXAMPLE_SCHEMA = pa.schema(
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("row_ids", pa.list_(pa.string()), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("domain", pa.string()),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("span_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("span_messages", pa.list_(pa.int32()), nullable=False),
        pa.field("span_kinds", pa.list_(pa.int8()), nullable=False),
        *(
            pa.field(name, pa.int32(), nullable=False)
            for name in (
                "original_tokens tokens trained_tokens context_tokens template_tokens messages_removed "
                "exchanges_removed reasoning_removed tokens_cut trained_removed exchanges_trained reasoning_trained "
                "cut_trained"
            ).split()
        ),
    ]
)
"""A part of `tokenized_examples`.

Span j of an example covers tokens `[span_starts[j], span_starts[j + 1])` (the last one to the end); `span_messages` is
the message index or −1; `span_kinds` indexes `SPAN_KINDS`. `exchanges_removed`, `reasoning_removed` and `tokens_cut`
are tokens removed at each stage, `messages_removed` counts messages; `original_tokens == tokens + exchanges_removed +
reasoning_removed + tokens_cut`. `trained_removed` are trained tokens that were removed or lost their loss, and
`exchanges_trained`, `reasoning_trained` and `cut_trained` are each stage's share; a stage that changes what the
template prints for the remaining messages may add some.
"""


@dataclass(frozen=True, slots=True)
class ExampleTokens:
    """One example: `ids` int32[T] and `loss_mask` bool[T], unshifted: position i itself is the target.

    With `loss: {weights: true}` in the options, `loss_weights` float32[T]: 0 where the mask is false.
    """

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    loss_weights: NDArray[np.float32] | None = None


WEIGHT_COLUMN = "loss_weights"
"""The column that holds a float32 per token, in examples and in shards."""

WEIGHT_FIELD = pa.field(WEIGHT_COLUMN, pa.list_(pa.float32()), nullable=False)


def count_tokens_by_weight(weights: pa.Array) -> dict[str, int]:
    """Count trained tokens by loss weight, ascending; weights are formatted as short decimals."""
    import pyarrow.compute as pc

    counts: dict[float, int] = {entry["values"]: entry["counts"] for entry in pc.value_counts(weights).to_pylist()}
    return {f"{weight:g}": counts[weight] for weight in sorted(counts) if weight}


def make_example_schema(*, weighted: bool, columns: Iterable[pa.Field] = ()) -> pa.Schema:
    """Return the schema of a part; with `loss.weights` it has the column of weights, and it ends with other `columns`.

    `columns` are those of one kind of rows (`rows.ROW_KINDS`).
    """
    return pa.schema([*EXAMPLE_SCHEMA, *((WEIGHT_FIELD,) if weighted else ()), *columns])


# ── What each column holds, for pages that show a schema ──


COLUMN_DOCS: Final[Mapping[str, str]] = {
    "row_id": "The record's place in its source: digest of its part, and its number there.",
    "content_hash": "Digest of the row's content; equal rows have equal digests.",
    "dedupe_key": "Digest under which duplicates are found, where it is not the content's.",
    "dataset": "The dataset's name in the recipe.",
    "kind": "conversation, pair, text, record, prompt, tokens or preference.",
    "split": "train, validation or test.",
    "group_key": "Value that keeps rows together in one split.",
    "order_key": "Value by which rows of a group are ordered.",
    "domain": "Value by which numbers are broken down.",
    "messages": "The conversation, as JSON text.",
    "tools": "Tool definitions, as JSON text.",
    "template_kwargs": "Variables for the chat template, as JSON text.",
    "text": "A document, or a pair's prompt.",
    "output": "A pair's response.",
    "record": "A record of a table, as JSON text.",
    "prompt_hash": "Digest of what comes before the first answer.",
    "schema": "The shape in which the source had the record.",
    "extracted_think_from_content": "Messages whose reasoning was taken out of their content.",
    "moved_reasoning_keys": "Messages whose reasoning had another key.",
    "dropped_think_messages": "Messages whose reasoning was left out.",
    "tools_present": "Whether the record has tools.",
    "tools_parsed_from_string": "Whether its tools were JSON text.",
    "unknown_roles": "Roles that no option maps.",
    "notes": "Irregularities that were counted and did not reject the row.",
    "example_id": "The id of its first row, and the example's number in it.",
    "row_ids": "The rows that it was made of.",
    "input_ids": "Token ids.",
    "loss_mask": "True where the token is a target; unshifted.",
    "loss_weights": "Weight of each target in the loss; 0 for other tokens.",
    "span_starts": "The first token of each span.",
    "span_messages": "The message of each span; -1 for none.",
    "span_kinds": "The kind of each span: its number in the list of `SPAN_KINDS`, from system to record.",
    "original_tokens": "Tokens before truncation.",
    "tokens": "Tokens.",
    "trained_tokens": "Tokens that are targets.",
    "context_tokens": "Tokens of the row's own text that are not targets.",
    "template_tokens": "Tokens that the chat template adds.",
    "messages_removed": "Messages removed by truncation.",
    "exchanges_removed": "Tokens removed as whole exchanges.",
    "reasoning_removed": "Tokens removed as reasoning.",
    "tokens_cut": "Tokens cut from an end.",
    "trained_removed": "Targets lost by truncation.",
    "exchanges_trained": "Targets lost as whole exchanges.",
    "reasoning_trained": "Targets lost as reasoning.",
    "cut_trained": "Targets lost by the cut.",
    "group_keys": "The groups whose records it holds.",
    "record_start": "The first record's number in the order of its series, or of its split and partition.",
    "record_stop": "The number after the last record's.",
    "pass": "The pass over the data, from 0.",
    "budget": "Tokens that it may have.",
    "flush": "Why it ended.",
    "labels": "Target ids, unshifted; -100 where there is no target.",
    "position_ids": "Each token's position in its attention span.",
    "seq_lengths": "Lengths of the attention spans.",
    "example_ids": "The example of each segment.",
    "starts": "The first token of each segment in its example.",
    "segment_lengths": "Tokens of each segment.",
    "segment_parents": "The segment that each segment continues; -1 for none.",
    "example_ends": "The segment that each example ends with.",
    "target_examples": "The example of each run of targets: its number in the sequence.",
    "target_starts": "The first token of each run of targets in its example.",
    "target_lengths": "Tokens of each run of targets.",
    "target_weights": "Weight in the loss of each run of targets.",
    "sequence_id": "The sequence's number in its split of its dataset; -1 for a filler.",
    "filler": "Whether it only fills a step, without targets.",
    "step": "The training step, from 0.",
    "ground_truth": "What an answer is compared with, as JSON text.",
    "data_source": "Names that choose a verifier.",
    "extra": "Further fields of the record, as a JSON object.",
    "chosen": "The preferred answer, as JSON text of its messages.",
    "rejected": "The other answer, as JSON text of its messages.",
    "label": "Whether the one answer is good.",
    "margin": "By how much the chosen answer is better.",
    "reward": "The reward of the row, or of each segment's row.",
    "group_id": "The row's group, such as the samples of one prompt, or that of each segment's row.",
    "sides": "1 for a chosen or good answer, 0 for a rejected or bad one.",
    "side_lengths": "Tokens of each side.",
    "prompt_length": "Tokens of the prompt, with which each side begins.",
    "prompt_lengths": "Tokens of the prompt of each side.",
    "margins": "By how much the chosen answer of each segment is better.",
    "stage": "The stage that wrote the line.",
    "text_id": "The generated text.",
    "number": "The record's number in its text, from 0.",
}
"""Description by column name."""


# ── Fields of rollouts ──


ROW_FIELDS: Mapping[str, pa.Field] = {
    "reward": pa.field("reward", pa.float32()),
    "group_id": pa.field("group_id", pa.string()),
}
"""The fields of a row that can be carried; a group is named by text, also where the source numbers it."""

BATCH_NAMES = frozenset(
    "attention_mask completion_mask cu_seq_lens_k cu_seq_lens_q cu_seqlens cu_seqlens_padded margin max_length_k "
    "max_length_q predecessors segment_dataset segment_domain segment_ids seq_idx source_names subtree_ends".split()
)
"""Names in a reader's batches that are not columns of shards."""

TAKEN_NAMES = frozenset(
    {
        *COLUMN_DOCS,
        *ROW_FIELDS,
        *BATCH_NAMES,
        PADDING_COLUMN,
        DOMAIN_COLUMN,
        *(field.name for field in REFERENCE_FIELDS),
    }
)
"""Names that no field per token can have: every other column of a shard is such a field."""


@dataclass(frozen=True, slots=True)
class RolloutFields:
    """The declared fields: `per_token` have a value of an Arrow type for each token, `per_row` are of `ROW_FIELDS`.

    A value of a token is a number, or a fixed-size list of numbers. Those of `of_token_ids` are ids of tokens.
    """

    per_token: Mapping[str, pa.DataType] = field(default_factory=dict[str, pa.DataType])
    per_row: tuple[str, ...] = ()
    of_token_ids: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is any field."""
        return bool(self.per_token or self.per_row)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of their columns."""
        return (*self.per_token, *self.per_row)

    @property
    def columns(self) -> tuple[pa.Field, ...]:
        """The columns in rows and examples, which come after all others."""
        return (*make_token_columns(self.per_token), *self.row_columns)

    @property
    def row_columns(self) -> tuple[pa.Field, ...]:
        """The columns of values per row; a shard has a list of them for each sequence, an entry per segment."""
        return tuple(ROW_FIELDS[name] for name in self.per_row)

    def describe(self) -> list[list[str]]:
        """Return the fields for a stage's identity; the types of those that are no float32 stand after the names."""
        types = [[name, str(kind)] for name, kind in self.per_token.items() if kind != pa.float32()]
        return [list(self.per_token), list(self.per_row), *types]


def make_token_columns(types: Mapping[str, pa.DataType]) -> tuple[pa.Field, ...]:
    """Return the columns of values per token, in rows, examples and shards."""
    return tuple(pa.field(name, pa.list_(kind), nullable=False) for name, kind in types.items())


def join_fields(several: Mapping[str, RolloutFields]) -> RolloutFields:
    """Return the fields of all datasets of a recipe, each once, in the order in which they are declared."""
    per_token: dict[str, pa.DataType] = {}
    for dataset, fields in several.items():
        for name, kind in fields.per_token.items():
            if per_token.setdefault(name, kind) != kind:
                first = next(other for other, found in several.items() if name in found.per_token)
                raise ValueError(
                    f"datasets.{dataset}.format.token_fields: {name} is {kind}, and {per_token[name]} in "
                    f"datasets.{first}; all shards of a recipe have the same columns; declare one type and size, or "
                    "rename one of the columns in its source"
                )
    return RolloutFields(
        per_token,
        tuple(dict.fromkeys(name for fields in several.values() for name in fields.per_row)),
        tuple(dict.fromkeys(name for fields in several.values() for name in fields.of_token_ids)),
    )


def find_token_fields(names: Iterable[str]) -> list[str]:
    """Return which columns of a shard are fields per token, in their order."""
    return [name for name in names if name not in TAKEN_NAMES]


def find_token_values(names: Iterable[str]) -> list[str]:
    """Return which columns of a shard are loss weights or fields per token, in their order."""
    return [name for name in names if name == WEIGHT_COLUMN or name not in TAKEN_NAMES]
