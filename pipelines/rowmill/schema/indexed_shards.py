"""Shards that name the tokens of examples instead of holding a copy of them (`packing.layout: index`).

    parts of examples          a shard's row                            the same row with its tokens
    file 0   e0: 5 6 7 8       example_files    0 1                     input_ids     6 7 8 | 3 4
             e1: 1 2           example_rows     0 0                     labels     -100 7 8 | -100 4
    file 1   e2: 3 4           starts           1 0                     position_ids  0 1 2 | 0 1
                               segment_lengths  3 2

The files are listed in the shard's metadata. A shard with its tokens has exactly the columns and values of a copied
one, so everything that reads shards reads both; files of examples are compared with their digests whenever they are
read.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import (
    Bools,
    Ints,
    Numbers,
    Tokens,
    compute_offsets,
    expand_ranges,
    flatten_lists,
    group_equal,
    make_list_array,
    make_zeros,
)
from rowmill.core.storage import Store
from rowmill.schema.examples import IGNORED_LABEL, WEIGHT_COLUMN, make_token_columns
from rowmill.schema.manifest import File
from rowmill.schema.rows import PADDING_COLUMN, REFERENCE_FIELDS

METADATA_KEY = "examples"
"""The key of a shard's metadata, after `rowmill.`, under which its files of examples are listed."""
_METADATA_NAME = f"rowmill.{METADATA_KEY}".encode()

_TOKEN_FIELDS = tuple(
    pa.field(name, pa.list_(pa.int32()), nullable=False) for name in ("input_ids", "labels", "position_ids")
)
NEEDED_COLUMNS = (
    "seq_lengths", "starts", "segment_lengths", PADDING_COLUMN, *(field.name for field in REFERENCE_FIELDS)
)  # fmt: skip
"""The columns of a shard without tokens from which these are found; not all shards have padding."""


@dataclass(frozen=True, slots=True, eq=False)
class ExampleTokenColumns:
    """The tokens of a file of examples, end to end: `offsets` int64[N + 1] cut them; `values` are weights, fields."""

    offsets: Ints
    ids: Tokens
    mask: Bools
    values: Mapping[str, Numbers]

    @property
    def size_bytes(self) -> int:
        """The memory that they take."""
        return sum(values.nbytes for values in (self.offsets, self.ids, self.mask, *self.values.values()))


@dataclass(frozen=True, slots=True)
class ExampleReferences:
    """What a shard needs beside its columns to have its tokens: the files, and how labels and weights are made."""

    files: tuple[File, ...]
    weighted: bool
    token_fields: tuple[tuple[str, str, int], ...]
    """Name, NumPy type and size of each field per token; size 0: one number."""
    ignore_token_id: int | None
    pad_id: int | None

    def encode(self) -> str:
        """Return the references as text for a shard's metadata."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, metadata: Mapping[bytes, bytes] | None) -> "ExampleReferences | None":
        """Return the references of a shard's metadata; None if the shard holds its tokens itself."""
        text = (metadata or {}).get(_METADATA_NAME)
        if text is None:
            return None
        values = json.loads(text)
        files, fields = values.pop("files"), values.pop("token_fields")
        return cls(tuple(File(**file) for file in files), token_fields=tuple(map(tuple, fields)), **values)

    @property
    def token_types(self) -> dict[str, pa.DataType]:
        """The Arrow types of the loss weights and fields of each token."""
        types = {WEIGHT_COLUMN: pa.float32()} if self.weighted else {}
        for name, kind, size in self.token_fields:
            number = pa.from_numpy_dtype(np.dtype(kind))
            types[name] = pa.list_(number, size) if size else number
        return types

    def list_columns(self, stored: Collection[str]) -> list[str]:
        """Return all columns that a shard has with its tokens; `stored` are those in its file."""
        own = (name for name in stored if name not in _REFERENCE_NAMES)
        return [*list_token_columns(self.token_types), *own]


_REFERENCE_NAMES = frozenset(field.name for field in REFERENCE_FIELDS)


def load_example_tokens(store: Store, file: File, names: Sequence[str]) -> ExampleTokenColumns:
    """Read the tokens of a file of examples, with those of their values that it has, and compare the file's digest."""
    table = store.table(file, ("tokens", "input_ids", "loss_mask", *names)).combine_chunks()

    def flatten(name: str) -> NDArray[Any]:
        return flatten_lists(table.column(name))

    return ExampleTokenColumns(
        offsets=compute_offsets(table.column("tokens").to_numpy()),
        ids=flatten("input_ids"),
        mask=flatten("loss_mask"),
        values={name: flatten(name) for name in names if name in table.column_names},
    )


def read_sequences(store: Store, file: File, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a packed shard, or some of its columns, with its tokens wherever they are stored.

    A column that the shard lacks is left out. Raises DamagedFileError if the shard or a file that it names is missing,
    or its digest is another than the one written down.
    """
    wanted = None if columns is None else [*columns, *NEEDED_COLUMNS]
    table = store.table(file, wanted)
    references = ExampleReferences.parse(table.schema.metadata)
    if references is not None:
        table = insert_tokens(table, references, partial(load_example_tokens, store), columns)
    return table if columns is None else table.select([name for name in table.column_names if name in {*columns}])


def drop_tokens(table: pa.Table, files: Ints, rows: Ints, token_columns: Collection[str]) -> pa.Table:
    """Return rows of a shard without tokens, but with the file and the row of each segment's example."""
    kept = table.select([name for name in table.column_names if name not in token_columns])
    offsets = compute_offsets(table.column("starts").combine_chunks().value_lengths().to_numpy())
    for field, values in zip(REFERENCE_FIELDS, (files, rows), strict=True):
        named = pa.field(field.name, pa.list_(field.type), nullable=False)
        kept = kept.append_column(named, make_list_array(offsets, values.astype(np.int32)))
    return kept


def list_token_columns(token_values: Iterable[str]) -> list[str]:
    """Return the columns of a shard that its references replace, the weights and fields of tokens among them."""
    return [*(field.name for field in _TOKEN_FIELDS), *token_values]


def insert_tokens(
    table: pa.Table,
    references: ExampleReferences,
    load: Callable[[File, Sequence[str]], ExampleTokenColumns],
    columns: Collection[str] | None = None,
) -> pa.Table:
    """Return rows of a shard with their tokens, in the columns of a copied shard; `columns` None: with all of them."""
    fields = (*_TOKEN_FIELDS, *make_token_columns(references.token_types))
    made = [field for field in fields if columns is None or field.name in columns]
    table = table.combine_chunks()
    found = _make_token_columns(table, references, load, {field.name for field in made}) if made else {}
    head = [field for field in made if field in _TOKEN_FIELDS]
    tail = [field for field in made if field not in _TOKEN_FIELDS]
    stored = [field for field in table.schema if field.name not in _REFERENCE_NAMES]
    # Weights and fields of tokens follow the columns that every shard has.
    place = next((i for i, field in enumerate(stored, 1) if field.name == "filler"), 0)
    ordered = [*head, *stored[:place], *tail, *stored[place:]]
    values = [found[field.name] if field.name in found else table.column(field.name) for field in ordered]
    metadata = {key: value for key, value in (table.schema.metadata or {}).items() if key != _METADATA_NAME}
    return pa.Table.from_arrays(values, schema=pa.schema(ordered, metadata))


def _make_token_columns(
    table: pa.Table,
    references: ExampleReferences,
    load: Callable[[File, Sequence[str]], ExampleTokenColumns],
    wanted: Collection[str],
) -> dict[str, pa.Array]:
    def flatten(name: str) -> Ints:
        return table.column(name).combine_chunks().flatten().to_numpy().astype(np.int64)

    lengths, starts = flatten("segment_lengths"), flatten("starts")
    files, rows = (flatten(field.name) for field in REFERENCE_FIELDS)
    padding = flatten(PADDING_COLUMN) if PADDING_COLUMN in table.column_names else np.zeros(len(lengths), np.int64)
    begins = compute_offsets(lengths + padding)
    total = int(begins[-1])
    ids = np.full(total, references.pad_id or 0, np.int32)
    mask = np.zeros(total, np.bool_)
    types = references.token_types
    numbers = {name: make_zeros(total, kind) for name, kind in types.items() if name in wanted}
    for number, some in group_equal(files):
        examples = load(references.files[number], [*types])
        taken = expand_ranges(examples.offsets[rows[some]] + starts[some], lengths[some])
        places = expand_ranges(begins[some], lengths[some])
        ids[places] = examples.ids[taken]
        mask[places] = examples.mask[taken]
        for name, values in numbers.items():
            # A dataset without weights has 1 where the mask is true, one without a field 0.0 everywhere.
            held = examples.values.get(name, examples.mask if name == WEIGHT_COLUMN else None)
            if held is not None:
                values[places] = held[taken]
    spans = table.column("seq_lengths").combine_chunks()
    borders = compute_offsets(spans.flatten().to_numpy())
    offsets = borders[compute_offsets(spans.value_lengths().to_numpy())]
    # The first token of an attention span is never a target.
    mask[borders[:-1]] = False
    if references.ignore_token_id is not None:
        mask &= ids != references.ignore_token_id
    if WEIGHT_COLUMN in numbers:
        numbers[WEIGHT_COLUMN][~mask] = 0
    arrays: dict[str, NDArray[Any]] = {
        "input_ids": ids,
        "labels": np.where(mask, ids, np.int32(IGNORED_LABEL)),
        "position_ids": (np.arange(total) - np.repeat(borders[:-1], np.diff(borders))).astype(np.int32),
        **numbers,
    }
    return {name: make_list_array(offsets, values) for name, values in arrays.items() if name in wanted}
