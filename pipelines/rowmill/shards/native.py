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
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.segment_trees import make_tree_positions
from rowmill.core.storage import Store
from rowmill.schema.content_hash import HASH_MODULUS, format_content_hash
from rowmill.schema.examples import IGNORED_LABEL, WEIGHT_COLUMN, find_token_values, make_token_columns
from rowmill.schema.indexed_shards import METADATA_KEY, ExampleReferences, read_sequences
from rowmill.schema.manifest import File
from rowmill.schema.rows import PADDING_COLUMN, PARENTS_COLUMN, TREE_FIELDS
from rowmill.shards.label_conventions import make_unshifted_labels
from rowmill.shards.prefix_trees import ExampleTrees, TargetRuns

_TOKEN_COLUMNS = ("input_ids", "labels", "position_ids")


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


def list_padding_tokens(table: pa.Table) -> Ints:
    """Return the pad tokens of each row of a shard: int64[R]; they are 0 where segments are not padded."""
    if PADDING_COLUMN not in table.column_names:
        return np.zeros(table.num_rows, np.int64)
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
    for name in (*_TOKEN_COLUMNS, *find_token_values(table.column_names)):
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

SEQUENCE_SCHEMA = make_required_schema(
    **dict.fromkeys(("input_ids", "labels", "position_ids", "seq_lengths"), pa.list_(pa.int32())),
    example_ids=pa.list_(pa.string()),
    starts=pa.list_(pa.int32()),
    segment_lengths=pa.list_(pa.int32()),
    dataset=pa.dictionary(pa.int32(), pa.string()),
    sequence_id=pa.int64(),
    tokens=pa.int32(),
    trained_tokens=pa.int32(),
    filler=pa.bool_(),
)
"""The columns of sequences in training order. `starts`: the first token of each segment in its example. `sequence_id`:
the sequence's number in its split of its dataset, −1 for a filler. Sequences have no padding, unless segments are
padded to a multiple (`native.py`); `tokens` does not count it."""

SHARD_SCHEMA = SEQUENCE_SCHEMA.remove(SEQUENCE_SCHEMA.get_field_index("sequence_id"))
"""The columns of a packed shard. The numbers of its sequences follow from its manifest, and change when earlier shards
do."""


def extend_schema(
    schema: pa.Schema, token_types: Mapping[str, pa.DataType], columns: Iterable[pa.Field] = ()
) -> pa.Schema:
    """Return the columns of sequences or of a packed shard with those that not all recipes have.

    `token_types` are those of further values of each token, weights first, `columns` those of a segment: of one kind of
    rows (`rows.ROW_KINDS`), fields of a row, padding.
    """
    lists = (pa.field(column.name, pa.list_(column.type), nullable=False) for column in columns)
    return pa.schema([*schema, *make_token_columns(token_types), *lists])


def number_sequences(table: pa.Table, numbers: Ints) -> pa.Table:
    """Give the rows of a packed shard their numbers in the split."""
    place = SEQUENCE_SCHEMA.get_field_index("sequence_id")
    return table.add_column(place, SEQUENCE_SCHEMA.field(place), pa.array(numbers))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The segments of several sequences, flat.

    `ids` and `trained`, which are the targets, have one entry per token; `offsets` int64[K + 1] cut them into segments;
    `sequence_offsets` int64[S + 1] cut the segments into sequences; `example_ids` and `starts` have one entry per
    segment. `token_values` have one entry per token, too: the loss weights, 0 for a token without a label, and fields
    of token rows; `columns` have one entry per segment. Most recipes have none of them.

    With `trees`, examples share segments: `example_ids` and `starts` have one entry per example.
    """

    ids: Tokens
    trained: Bools
    offsets: Ints
    sequence_offsets: Ints
    example_ids: pa.Array
    starts: Tokens
    token_values: Mapping[str, Numbers] = field(default_factory=dict[str, Numbers])
    columns: Mapping[str, pa.Array] = field(default_factory=dict[str, pa.Array])
    trees: ExampleTrees | None = None

    @property
    def weights(self) -> Weights | None:
        """The loss weights; None: the recipe has none."""
        return self.token_values.get(WEIGHT_COLUMN)


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
    ids, token_values = segments.ids, segments.token_values
    labels = make_unshifted_labels(ids, segments.trained)
    # These cut the tokens, with their padding, into rows.
    row_offsets = token_offsets
    if padding is not None:
        padded = PaddedSegments.of(np.diff(segments.offsets), padding.lengths)
        ids, labels = padded.insert(ids, padding.pad_id), padded.insert(labels, IGNORED_LABEL)
        token_values = {name: padded.insert(values, 0) for name, values in token_values.items()}
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
    of_tokens = {name: make_list_array(row_offsets, values) for name, values in token_values.items()}
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
    return pa.Table.from_arrays(columns, schema=extend_schema(SHARD_SCHEMA, types, fields))


def choose_pad_id(card: Mapping[str, Any]) -> int:
    """Return the id that fills up sequences: the tokenizer's pad token, else its end of sequence, else 0."""
    return int(next((card[name] for name in ("pad_id", "eos_id") if card.get(name) is not None), 0))


def make_filler(
    *,
    pad_id: int,
    token_types: Mapping[str, pa.DataType],
    columns: Iterable[pa.Field] = (),
    multiple: int = 1,
    has_trees: bool = False,
) -> pa.Table:
    """Return a sequence of two pad tokens without a target, which gives all ranks the same number of sequences.

    If segments are padded to a multiple, this is, too; if examples share segments, it is a tree of one.
    """
    trees, one = None, np.arange(2)
    if has_trees:
        nothing, (tokens, root, end) = np.empty(0, np.int32), np.array([[FILLER_TOKENS], [-1], [0]], np.int32)
        targets = TargetRuns(np.zeros(2, np.int64), nothing, nothing, np.empty(0, np.float32))
        trees = ExampleTrees(tokens, root, one, end, one, targets)
    segments = Segments(
        ids=np.full(FILLER_TOKENS, pad_id, np.int32),
        trained=np.zeros(FILLER_TOKENS, bool),
        offsets=one * FILLER_TOKENS,
        sequence_offsets=one,
        example_ids=pa.array([""], pa.string()),
        starts=np.zeros(1, np.int32),
        token_values={name: make_zeros(FILLER_TOKENS, kind) for name, kind in token_types.items()},
        columns={column.name: pa.nulls(1, column.type) for column in columns},
        trees=trees,
    )
    added = np.array([-FILLER_TOKENS % multiple], np.int32)
    padding = Padding(added, pad_id) if multiple > 1 else None
    table = make_shard_table(segments, added + np.int32(FILLER_TOKENS), one, dataset="", filler=True, padding=padding)
    return number_sequences(table, np.array([-1]))


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
        return Segments(ids[places], trained, offsets, cut, names.flatten(), starts, {WEIGHT_COLUMN: of_tokens})
    return Segments(
        ids=ids,
        trained=labels != IGNORED_LABEL,
        offsets=compute_offsets(flatten_lists(table.column("segment_lengths"))),
        sequence_offsets=cut,
        example_ids=names.flatten(),
        starts=starts,
        token_values={name: flatten_lists(table.column(name)) for name in find_token_values(table.column_names)},
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
    numbers: list[tuple[int, memoryview]] = []
    # Weights come first, then fields by name, whatever the order of the columns is.
    for _, values in sorted(segments.token_values.items(), key=lambda named: (named[0] != WEIGHT_COLUMN, named[0])):
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
