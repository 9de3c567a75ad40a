"""The tokenized example: ids, loss mask, span kinds, and source rows.

    input_ids  151644 872 198 13048 151645 198 151644 77091 198 9707 151645 198
    loss_mask       0   0   0     0      0   0      0     0   0    1      1   0
    spans      └ template ┘ └user┘ └─────── template ──────────┘ └asst┘└template┘

`loss_mask` is unshifted: position i itself is the target. Index 0 is never trained. If messages may have weights other
than 0 and 1 (`loss.weights`), there is a column of weights as well: positive where the mask is true, else 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SPAN_KINDS = ("system", "user", "assistant", "reasoning", "tool_call", "tool_result", "template", "prompt", "record")
"""Kinds of token spans; stored as an index into this tuple, so the order is part of the format."""

Objective: TypeAlias = Literal["next_token", "paired", "unpaired", "prompts"]
"""What a trainer does with a dataset's examples; all datasets of a recipe have one.

next_token: predict the trained tokens; paired: prefer a chosen answer to a rejected one; unpaired: one answer, marked
as good or bad; prompts: the model answers by itself, so nothing is trained.
"""

IGNORED_LABEL = -100
"""The label of a position that is not a target, which PyTorch's cross entropy skips."""

TRUNCATION_STAGES = ("exchanges", "reasoning", "tokens")
"""The stages of structured truncation, in the order in which they act."""

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
        pa.field("original_tokens", pa.int32(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
        pa.field("context_tokens", pa.int32(), nullable=False),
        pa.field("template_tokens", pa.int32(), nullable=False),
        pa.field("messages_removed", pa.int32(), nullable=False),
        pa.field("exchanges_removed", pa.int32(), nullable=False),
        pa.field("reasoning_removed", pa.int32(), nullable=False),
        pa.field("tokens_cut", pa.int32(), nullable=False),
        pa.field("trained_removed", pa.int32(), nullable=False),
        pa.field("exchanges_trained", pa.int32(), nullable=False),
        pa.field("reasoning_trained", pa.int32(), nullable=False),
        pa.field("cut_trained", pa.int32(), nullable=False),
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

    With `loss: {weights: true}` in the options, `loss_weights` float32[T]: positive where the mask is true, else 0.
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

    counts: dict[float, int] = {one["values"]: one["counts"] for one in pc.value_counts(weights).to_pylist()}
    return {f"{weight:g}": counts[weight] for weight in sorted(counts) if weight}


def make_example_schema(*, weighted: bool, columns: Iterable[pa.Field] = ()) -> pa.Schema:
    """Return the schema of a part; with `loss.weights` it has the column of weights, and it ends with other `columns`.

    `columns` are those of one kind of rows (`rows.EXAMPLE_COLUMNS`).
    """
    return pa.schema([*EXAMPLE_SCHEMA, *((WEIGHT_FIELD,) if weighted else ()), *columns])
