"""Fields that rows of token ids carry to a trainer beside their ids: numbers per token, and values per row.

    input_ids    5    6     7     8     9
    loss_mask    0    0     1     0     1
    logprobs     0    0  -0.5     0  -1.5      the field of the token at the same place: nothing is shifted
    reward     1.0                             one value for the row

As all shards of a recipe have the same columns, a dataset without a field has 0.0 for each token, and null for each
row.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from rowmill.schema.column_docs import COLUMN_DOCS
from rowmill.schema.rows import PADDING_COLUMN

ROW_FIELDS: Mapping[str, pa.Field] = {
    "reward": pa.field("reward", pa.float32()),
    "group_id": pa.field("group_id", pa.string()),
}
"""The fields of a row that can be carried; a group is named by text, also where the source numbers it."""

BATCH_NAMES = frozenset(
    {
        "attention_mask",
        "completion_mask",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "cu_seqlens",
        "cu_seqlens_padded",
        "margin",
        "max_length_k",
        "max_length_q",
        "segment_ids",
        "seq_idx",
    }
)
"""Names in a reader's batches that are not columns of shards."""

TAKEN_NAMES = frozenset({*COLUMN_DOCS, *ROW_FIELDS, *BATCH_NAMES, PADDING_COLUMN})
"""Names that no field per token can have: every other column of a shard is such a field."""


@dataclass(frozen=True, slots=True)
class RolloutFields:
    """The names of the declared fields: `per_token` have a float32 for each token, `per_row` are of `ROW_FIELDS`."""

    per_token: tuple[str, ...] = ()
    per_row: tuple[str, ...] = ()

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
        """Return the fields for a stage's identity."""
        return [list(self.per_token), list(self.per_row)]


def make_token_columns(names: Iterable[str]) -> tuple[pa.Field, ...]:
    """Return the columns of fields per token, in rows, examples and shards."""
    return tuple(pa.field(name, pa.list_(pa.float32()), nullable=False) for name in names)


def join_fields(several: Iterable[RolloutFields]) -> RolloutFields:
    """Return the fields of all datasets of a recipe, each once, in the order in which they are declared."""
    declared = list(several)
    return RolloutFields(
        tuple(dict.fromkeys(name for one in declared for name in one.per_token)),
        tuple(dict.fromkeys(name for one in declared for name in one.per_row)),
    )


def find_token_fields(names: Iterable[str]) -> list[str]:
    """Return which columns of a shard are fields per token, in their order."""
    return [name for name in names if name not in TAKEN_NAMES]
