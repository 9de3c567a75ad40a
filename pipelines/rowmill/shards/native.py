"""The native format of shards: packed sequences in Parquet, one row each, which HF `datasets` and TRL read as they are.

    input_ids      10   11  2 | 20    2
    labels       -100   11  2 | -100  2       the first token of an attention span is never a target
    position_ids    0    1  2 |  0    1
    seq_lengths     3           2

    with `packing.segment_multiple_of: 4`
    segments  a b c │ d e f g h          segment_lengths   3 5
    stored    a b c P d e f g h P P P    segment_padding   1 3     seq_lengths   4 8

    with `packing.share_prefixes`, examples 10 11 2 and 10 11 7 are stored as a tree (`prefix_trees.py`)
    segments         10 11 │ 2 │ 7       seq_lengths       2 1 1     example_ids   of the examples, not of segments
    segment_parents  -1      0   0       position_ids  0 1 2 2     example_ends  1 2

If the recipe has loss weights, the shard has a column of them, 0 for a token that is not a target. Fields of its token
rows (`schema/examples.py`) have a column each, not shifted, 0 on padding. Hashes, exports and comparisons see the
tokens of a segment without padding.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowmill.core.arrays import (
    Bools,
    Integers,
    Ints,
    Numbers,
    Runs,
    Tokens,
    Weights,
    compute_offsets,
    count_true,
    expand_ranges,
    flatten_lists,
    make_list_array,
    make_position_ids,
    make_zeros,
    read_lists,
    sum_by_span,
)
from rowmill.core.segment_trees import make_tree_positions
from rowmill.core.storage import Store
from rowmill.schema.examples import IGNORED_LABEL, WEIGHT_COLUMN, WEIGHT_FIELD, find_token_fields, make_token_columns
from rowmill.schema.indexed_shards import METADATA_KEY, ExampleReferences, read_sequences
from rowmill.schema.manifest import File
from rowmill.schema.rows import PADDING_COLUMN, PARENTS_COLUMN, TREE_FIELDS
from rowmill.shards.label_conventions import make_unshifted_labels
from rowmill.shards.prefix_trees import ExampleTrees, TargetRuns

_TOKEN_COLUMNS = ("input_ids", "labels", "position_ids", WEIGHT_COLUMN)


@dataclass(frozen=True, slots=True, eq=False)
class PaddedSegments:
    """Where the tokens of K segments are once padding follows each of them.

    `offsets` int64[K + 1] cut the padded tokens into segments; `places` int64[T] are the places of the T real tokens.
    """

    offsets: Ints
    places: Ints

    @classmethod
    def of(cls, lengths: Integers, padding: Integers) -> "PaddedSegments":
        """Lay out segments of some lengths, each with its padding."""
        offsets = compute_offsets(lengths.astype(np.int64) + padding)
        return cls(offsets, expand_ranges(offsets[:-1], lengths))

    def insert(self, values: NDArray[Any], fill: float) -> NDArray[Any]:
        """Return one value per padded token: those of the real tokens, and `fill`."""
        padded = np.full((int(self.offsets[-1]), *values.shape[1:]), fill, values.dtype)
        padded[self.places] = values
        return padded


def count_padding_tokens(table: pa.Table) -> int:
    """Return the pad tokens in some rows of a shard."""
    return int(flatten_lists(table.column(PADDING_COLUMN)).sum()) if PADDING_COLUMN in table.column_names else 0


def list_padding_tokens(table: pa.Table) -> Ints:
    """Return the pad tokens of each row of a shard that has padding: int64[R]."""
    padding, segments = read_lists(table.column(PADDING_COLUMN))
    return np.diff(compute_offsets(padding)[segments])


def drop_padding(table: pa.Table) -> pa.Table:
    """Return rows of a shard without padding, in the columns of a shard that has none."""
    if PADDING_COLUMN not in table.column_names:
        return table
    table = table.combine_chunks()
    padding = flatten_lists(table.column(PADDING_COLUMN))
    lengths, segments = read_lists(table.column("segment_lengths"))
    padded = PaddedSegments.of(lengths, padding)
    kept = compute_offsets(lengths)[segments]
    columns = {name: table.column(name) for name in table.column_names if name != PADDING_COLUMN}
    for name in (*_TOKEN_COLUMNS, *find_token_fields(table.column_names)):
        if name in columns:
            columns[name] = make_list_array(kept, flatten_lists(columns[name])[padded.places])
    if "seq_lengths" in columns:
        stored, spans = read_lists(columns["seq_lengths"])
        columns["seq_lengths"] = make_list_array(spans, stored - sum_by_span(padding, segments, spans))
    fields = [table.schema.field(name) for name in columns]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields, table.schema.metadata))


def read_unpadded(store: Store, file: File, columns: Sequence[str]) -> pa.Table:
    """Read columns of a shard, `segment_lengths` among them, without padding."""
    # A column that the file lacks is not read.
    return drop_padding(read_sequences(store, file, [*columns, PADDING_COLUMN])).combine_chunks()


# ── Tables of sequences ──


ROW_GROUP = 1024
"""Maximum rows of a row group of exports in this form."""

SHARD_GROUP_ROWS = 256
SHARD_GROUP_TOKENS = 1 << 16
"""Maximum rows and tokens of a row group of shards. A reader in random order decodes a whole group for one sequence: 16
sequences of 4,096 tokens take 2 ms. Smaller groups make the file's footer longer: here it is 1 % of the file."""

FILLER_TOKENS = 2

HASH_MODULUS = 1 << 128
"""A content hash is the sum of its segments' hashes modulo this, so it does not depend on their order. It is computed
from examples and plan, and again from the written shards: counts alone would not detect a packer that replaces tokens
by copies of others."""

SEQUENCE_SCHEMA = pa.schema(
    [
        *(
            pa.field(name, pa.list_(pa.int32()), nullable=False)
            for name in ("input_ids", "labels", "position_ids", "seq_lengths")
        ),
        pa.field("example_ids", pa.list_(pa.string()), nullable=False),
        pa.field("starts", pa.list_(pa.int32()), nullable=False),
        pa.field("segment_lengths", pa.list_(pa.int32()), nullable=False),
        pa.field("dataset", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("sequence_id", pa.int64(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
        pa.field("filler", pa.bool_(), nullable=False),
    ]
)
"""The columns of sequences in training order. `starts`: the first token of each segment in its example. `sequence_id`:
the sequence's number in its split of its dataset, −1 for a filler. Sequences have no padding, unless segments are
padded to a multiple (`native.py`); `tokens` does not count it."""

SHARD_SCHEMA = SEQUENCE_SCHEMA.remove(SEQUENCE_SCHEMA.get_field_index("sequence_id"))
"""The columns of a packed shard. The numbers of its sequences follow from its manifest, and change when earlier shards
do."""

_NO_FIELDS: Mapping[str, pa.DataType] = {}


def extend_schema(
    schema: pa.Schema,
    *,
    weighted: bool,
    token_fields: Mapping[str, pa.DataType] = _NO_FIELDS,
    columns: Iterable[pa.Field] = (),
) -> pa.Schema:
    """Return the columns of sequences or of a packed shard with those that not all recipes have.

    `weighted` adds the loss weights. `token_fields` are the types of further values of each token, `columns` those of a
    segment: of one kind of rows (`rows.SEGMENT_COLUMNS`), fields of a row, padding.
    """
    lists = (pa.field(column.name, pa.list_(column.type), nullable=False) for column in columns)
    return pa.schema([*schema, *((WEIGHT_FIELD,) if weighted else ()), *make_token_columns(token_fields), *lists])


def number_sequences(table: pa.Table, numbers: Ints) -> pa.Table:
    """Give the rows of a packed shard their numbers in the split."""
    place = SEQUENCE_SCHEMA.get_field_index("sequence_id")
    return table.add_column(place, SEQUENCE_SCHEMA.field(place), pa.array(numbers))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The segments of several sequences, flat.

    `ids` and `trained`, which are the targets, have one entry per token; `offsets` int64[K + 1] cut them into segments;
    `sequence_offsets` int64[S + 1] cut the segments into sequences; `example_ids` and `starts` have one entry per
    segment. `weights` have one entry per token, 0 for one without a label; None: the recipe has no weights.
    `token_fields` have one entry per token, too, and `columns` one entry per segment; most recipes have none.

    With `trees`, examples share segments: `example_ids` and `starts` have one entry per example.
    """

    ids: Tokens
    trained: Bools
    offsets: Ints
    sequence_offsets: Ints
    example_ids: pa.Array
    starts: Tokens
    weights: Weights | None = None
    token_fields: Mapping[str, Numbers] = field(default_factory=dict[str, Numbers])
    columns: Mapping[str, pa.Array] = field(default_factory=dict[str, pa.Array])
    trees: ExampleTrees | None = None


def locate_tokens(row_offsets: Ints, rows: Ints, starts: Integers, lengths: Integers) -> Runs:
    """Return where the tokens `[starts[k], starts[k] + lengths[k])` of row `rows[k]` are."""
    return Runs.of(row_offsets[rows] + starts, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Padding:
    """The pad tokens after each segment, int32[K], and their id."""

    lengths: Tokens
    pad_id: int


def make_shard_table(
    segments: Segments,
    span_lengths: Tokens,
    span_offsets: Ints,
    *,
    dataset: str,
    filler: bool = False,
    padding: Padding | None = None,
) -> pa.Table:
    """Make the rows of a packed shard; with `padding`, its tokens follow the segments, and it has a column of them.

    The lengths of attention spans, which `span_offsets` int64[S + 1] cut into sequences, include the padding.
    """
    token_offsets = segments.offsets[segments.sequence_offsets]
    count = len(segments.sequence_offsets) - 1
    ids, weights, token_fields = segments.ids, segments.weights, segments.token_fields
    labels = make_unshifted_labels(ids, segments.trained)
    # These cut the tokens, with their padding, into rows.
    row_offsets = token_offsets
    if padding is not None:
        padded = PaddedSegments.of(np.diff(segments.offsets), padding.lengths)
        ids, labels = padded.insert(ids, padding.pad_id), padded.insert(labels, IGNORED_LABEL)
        weights = None if weights is None else padded.insert(weights, 0)
        token_fields = {name: padded.insert(values, 0) for name, values in token_fields.items()}
        row_offsets = padded.offsets[segments.sequence_offsets]
    trees, example_offsets = segments.trees, segments.sequence_offsets
    positions = make_position_ids(span_lengths)
    if trees is not None:
        example_offsets = trees.example_offsets
        positions = make_tree_positions(trees.joined_parents, trees.lengths).astype(np.int32)
    columns = [
        make_list_array(row_offsets, ids),
        make_list_array(row_offsets, labels),
        make_list_array(row_offsets, positions),
        make_list_array(span_offsets, span_lengths),
        pa.ListArray.from_arrays(pa.array(example_offsets, pa.int32()), segments.example_ids),
        make_list_array(example_offsets, segments.starts.astype(np.int32)),
        make_list_array(segments.sequence_offsets, np.diff(segments.offsets).astype(np.int32)),
        pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([dataset], pa.string())),
        pa.array(np.diff(token_offsets).astype(np.int32)),
        pa.array(count_true(segments.trained, token_offsets).astype(np.int32)),
        pa.array(np.full(count, filler)),
    ]
    if weights is not None:
        columns.append(make_list_array(row_offsets, weights))
    of_tokens = {name: make_list_array(row_offsets, values) for name, values in token_fields.items()}
    columns += of_tokens.values()
    values = dict(segments.columns)
    if padding is not None:
        values[PADDING_COLUMN] = pa.array(padding.lengths)
    fields = [pa.field(name, of_segments.type) for name, of_segments in values.items()]
    offsets = pa.array(segments.sequence_offsets, pa.int32())
    columns += [pa.ListArray.from_arrays(offsets, of_segments) for of_segments in values.values()]
    if trees is not None:
        columns += trees.to_columns().values()
        fields += TREE_FIELDS
    types = {name: column.type.value_type for name, column in of_tokens.items()}
    schema = extend_schema(SHARD_SCHEMA, weighted=weights is not None, token_fields=types, columns=fields)
    return pa.Table.from_arrays(columns, schema=schema)


def choose_pad_id(card: Mapping[str, Any]) -> int:
    """Return the id that fills up sequences: the tokenizer's pad token, else its end of sequence, else 0."""
    return int(next((card[name] for name in ("pad_id", "eos_id") if card.get(name) is not None), 0))


def make_fillers(
    count: int,
    *,
    pad_id: int,
    dataset: str,
    weighted: bool,
    token_fields: Mapping[str, pa.DataType] = _NO_FIELDS,
    columns: Iterable[pa.Field] = (),
    multiple: int = 1,
    has_trees: bool = False,
) -> pa.Table:
    """Return sequences of two pad tokens without a target, which give all ranks the same number of sequences.

    If segments are padded to a multiple, these are, too; if examples share segments, each is a tree of one.
    """
    trees = None
    if has_trees:
        numbers, nothing = np.arange(count + 1), np.empty(0, np.int32)
        targets = TargetRuns(np.zeros(count + 1, np.int64), nothing, nothing, np.empty(0, np.float32))
        roots, ends = np.full(count, -1, np.int32), np.zeros(count, np.int32)
        trees = ExampleTrees(np.full(count, FILLER_TOKENS, np.int32), roots, numbers, ends, numbers, targets)
    segments = Segments(
        ids=np.full(2 * count, pad_id, np.int32),
        trained=np.zeros(2 * count, bool),
        offsets=np.arange(0, 2 * count + 1, 2),
        sequence_offsets=np.arange(count + 1),
        example_ids=pa.array([""] * count, pa.string()),
        starts=np.zeros(count, np.int32),
        weights=np.zeros(2 * count, np.float32) if weighted else None,
        token_fields={name: make_zeros(2 * count, kind) for name, kind in token_fields.items()},
        columns={column.name: pa.nulls(count, column.type) for column in columns},
        trees=trees,
    )
    padded = np.full(count, 2 + -2 % multiple, np.int32)
    padding = Padding(padded - np.int32(2), pad_id) if multiple > 1 else None
    table = make_shard_table(segments, padded, np.arange(count + 1), dataset=dataset, filler=True, padding=padding)
    return number_sequences(table, np.full(count, -1, np.int64))


def count_group_rows(seq_len: int) -> int:
    """Return the rows of a row group of shards whose sequences have up to `seq_len` tokens."""
    return max(1, min(SHARD_GROUP_ROWS, SHARD_GROUP_TOKENS // seq_len))


def encode_native_shard(
    table: pa.Table, card: Mapping[str, str], *, group_rows: int, references: ExampleReferences | None = None
) -> bytes:
    """Return a shard as a Parquet file: `group_rows` rows per group, `card` in the schema's metadata.

    A table without tokens needs the `references` to its examples.

    Lists are compressed with zstd and have no statistics: the least and the greatest token of a group choose no rows.
    Other columns have one value a row, which a compressor costs more to open than it saves. Decision 36 has the times.
    """
    described = card if references is None else {**card, METADATA_KEY: references.encode()}
    metadata = {b"rowmill." + name.encode(): value.encode() for name, value in sorted(described.items())}
    lists = [field for field in table.schema if pa.types.is_list(field.type)]
    other_columns = [field.name for field in table.schema if not pa.types.is_list(field.type)]
    paths = [
        f"{field.name}{'.list.element' * (1 + pa.types.is_fixed_size_list(field.type.value_type))}" for field in lists
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(metadata),
        sink,
        compression=dict.fromkeys(paths, "zstd") | dict.fromkeys(other_columns, "none"),
        row_group_size=group_rows,
        use_dictionary=["dataset"],
        write_statistics=other_columns,
    )
    return cast(bytes, sink.getvalue().to_pybytes())


def read_native_shard(content: bytes) -> pa.Table:
    """Read a whole shard from its bytes; `Store.table` reads one from a store."""
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        return file.read(use_threads=False).combine_chunks()


def recover_segments(table: pa.Table) -> Segments:
    """Recover the segments of a shard's rows from its columns, without their padding.

    Of examples that share segments, each is returned as one, with its own mask and weights.
    """
    table = drop_padding(table)
    ids, labels, starts = (flatten_lists(table.column(name)) for name in ("input_ids", "labels", "starts"))
    names = table.column("example_ids").combine_chunks()
    cut = read_lists(table.column("starts"))[1]
    if PARENTS_COLUMN in table.column_names:
        trees = ExampleTrees.of(table)
        places, offsets = trees.list_example_tokens()
        targets, weights = trees.list_target_tokens(offsets)
        trained, of_tokens = np.zeros(len(places), np.bool_), np.zeros(len(places), np.float32)
        trained[targets], of_tokens[targets] = True, weights
        return Segments(ids[places], trained, offsets, cut, names.flatten(), starts, of_tokens)
    return Segments(
        ids=ids,
        trained=labels != IGNORED_LABEL,
        offsets=compute_offsets(flatten_lists(table.column("segment_lengths"))),
        sequence_offsets=cut,
        example_ids=names.flatten(),
        starts=starts,
        weights=flatten_lists(table.column(WEIGHT_COLUMN)) if WEIGHT_COLUMN in table.column_names else None,
        token_fields={name: flatten_lists(table.column(name)) for name in find_token_fields(table.column_names)},
    )


def recover_example_ids(table: pa.Table) -> tuple[Tokens, Ints]:
    """Return the token ids of segments, or of whole examples that share them, joined, and their offsets."""
    ids, lengths = (flatten_lists(table.column(name)) for name in ("input_ids", "segment_lengths"))
    if PARENTS_COLUMN not in table.column_names:
        return ids, compute_offsets(lengths)
    places, offsets = ExampleTrees.of(table).list_example_tokens()
    return ids[places], offsets


def hash_segments(segments: Segments) -> Iterator[int]:
    """Yield the hash of each segment's id, start, tokens, targets, weights and fields.

    XXH3, because it guards against mistakes, not attackers: files have digests of their own.
    """
    # Here, because trainers import exports without what builds need.
    from xxhash import xxh3_128_intdigest

    tokens, flags = _view_bytes(segments.ids, "<i4"), _view_bytes(segments.trained, "?")
    numbers = [] if segments.weights is None else [(4, _view_bytes(segments.weights, "<f4"))]
    for _, values in sorted(segments.token_fields.items(), key=itemgetter(0)):
        width = values.dtype.itemsize * math.prod(values.shape[1:])
        numbers.append((width, _view_bytes(values, values.dtype.newbyteorder("<"))))
    starts: list[bytes] = segments.starts.astype("<i8").view("V8").tolist()
    bounds: list[int] = segments.offsets.tolist()
    names: list[bytes] = segments.example_ids.cast(pa.binary()).to_pylist()
    # One call per segment: segments have about two hundred tokens, so calls cost more than hashing.
    for name, start, left, right in zip(names, starts, bounds, bounds[1:], strict=False):
        content = [name, start, tokens[4 * left : 4 * right], flags[left:right]]
        if numbers:
            content += [values[width * left : width * right] for width, values in numbers]
        yield xxh3_128_intdigest(b"".join(content))


def _view_bytes(values: NDArray[Any], dtype: Any) -> memoryview:
    """Return the bytes of an array, copied only if they are others."""
    return np.ascontiguousarray(values, dtype).ravel().view(np.uint8).data


_HASH_NAME = "xxh3"


def format_content_hash(total: int) -> str:
    """Return a sum of content hashes as text that names the hash function."""
    return f"{_HASH_NAME}:{total % HASH_MODULUS:032x}"


def hash_sequences(segments: Segments) -> list[int]:
    """Return for each sequence of a shard the sum of its segments' hashes modulo 2^128."""
    hashes = list(hash_segments(segments))
    bounds: list[int] = segments.sequence_offsets.tolist()
    return [sum(hashes[left:right]) % HASH_MODULUS for left, right in pairwise(bounds)]


def find_content_damage(store: Store, where: str, files: Sequence[File], expected: str) -> Iterator[str]:
    """Yield an error if the content hash of the files' sequences differs from the one in the stage's manifest."""
    total = 0
    for file in files:
        table = read_sequences(store, file).combine_chunks()
        total += sum(hash_sequences(recover_segments(table)))
    content_hash = format_content_hash(total)
    if content_hash != expected:
        yield (
            f"{where}: its sequences hash to {content_hash}, expected {expected} by its manifest; "
            "remove the stage's folder and build again"
        )
