"""Sequences of shards: their content hashes, and their tokens as the flat arrays that every exporter receives.

    ids               10 11 2 20 2 | 7 7 2
    trained            0  1 1  0 1 | 0 1 1
    offsets            0      3    5       8     segments in tokens
    sequence_offsets   0           2       3     sequences in segments
    is_open            no            no          open: a sequence is one attention span

Ranks hold sequences in another order, and some several times: rows 2 0 0 have the content h2 + 2 h0 modulo 2^128. So
nobody has to read the tokens of all shards again to know what a rank must hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import (
    Bools,
    Ints,
    Numbers,
    Tokens,
    Weights,
    compute_offsets,
    expand_ranges,
    group_equal,
    view_numbers,
)
from rowmill.core.errors import IntegrityError
from rowmill.core.storage import Store
from rowmill.schema.examples import IGNORED_LABEL, ROW_FIELDS, WEIGHT_COLUMN, find_token_fields
from rowmill.schema.manifest import Part
from rowmill.schema.rows import SEGMENT_COLUMNS
from rowmill.shards import host_scratch, native

SEQUENCE_HASHES = pa.schema(
    [
        pa.field("content_hash", pa.binary(16), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
    ]
)
"""One line per sequence of a shard, in its order. A hash is stored with its lowest byte first."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceHashes:
    """S sequences: `limbs` uint32[S, 4] are their hashes, lowest 32 bits first; tokens and targets int64[S]."""

    limbs: NDArray[np.uint32]
    tokens: Ints
    trained_tokens: Ints

    def sum_content(self, numbers: Ints) -> int:
        """Return the sum of some sequences' hashes modulo 2^128; a number may occur several times."""
        counts = np.bincount(numbers, minlength=len(self.limbs)).astype(np.uint64)
        # A limb is below 2^32, so that 2^32 sequences fit into 64 bits.
        sums = [int(counts @ self.limbs[:, limb].astype(np.uint64)) for limb in range(4)]
        return sum(value << 32 * limb for limb, value in enumerate(sums)) % native.HASH_MODULUS


def tabulate_hashes(shard: pa.Table) -> pa.Table:
    """Return the hashes and sizes of a shard's sequences."""
    hashes = [value.to_bytes(16, "little") for value in native.hash_sequences(native.recover_segments(shard))]
    sizes = (shard.column(name).combine_chunks() for name in ("tokens", "trained_tokens"))
    return pa.Table.from_arrays([pa.array(hashes, pa.binary(16)), *sizes], schema=SEQUENCE_HASHES)


def join_hashes(tables: Sequence[pa.Table]) -> SequenceHashes:
    """Return the sequences of several shards as one."""
    joined = pa.concat_tables([SEQUENCE_HASHES.empty_table(), *tables]).combine_chunks()
    hashes = joined.column("content_hash").combine_chunks()
    content = b"" if not len(hashes) else hashes.buffers()[1].to_pybytes()
    return SequenceHashes(
        limbs=np.frombuffer(content, "<u4").reshape(-1, 4),
        tokens=joined.column("tokens").to_numpy().astype(np.int64),
        trained_tokens=joined.column("trained_tokens").to_numpy().astype(np.int64),
    )


def read_hashes(store: Store, part: Part) -> pa.Table:
    """Return the hashes of a packed shard's sequences."""
    return store.table(part.files["sequences"])


# ── Flat arrays ──


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBatch:
    """S sequences of K segments and T tokens, flat.

    ids int32[T], trained bool[T], weights float32[T] or None · offsets int64[K + 1] · sequence_offsets
    int64[S + 1] · is_open bool[S] · example_ids, starts int32 per segment · datasets, numbers int64 per sequence.
    A token is trained if it is a target. `weights`, if given, are 0 for all other tokens. `token_fields` are further
    numbers of each token by name, [T] or [T, size]. `columns` have the values per segment that not all recipes have: of
    one kind of rows (`rows.SEGMENT_COLUMNS`), and fields of a row.
    """

    ids: Tokens
    trained: Bools
    weights: Weights | None
    offsets: Ints
    sequence_offsets: Ints
    is_open: Bools
    example_ids: pa.Array
    starts: Tokens
    datasets: pa.Array
    numbers: Ints
    token_fields: Mapping[str, Numbers] = field(default_factory=dict[str, Numbers])
    columns: Mapping[str, pa.Array] = field(default_factory=dict[str, pa.Array])

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_offsets) - 1

    @property
    def token_offsets(self) -> Ints:
        """The first token of each sequence, then the number of tokens: int64[S + 1]."""
        return self.offsets[self.sequence_offsets]

    @property
    def segment_lengths(self) -> Tokens:
        """Tokens per segment."""
        return np.diff(self.offsets).astype(np.int32)

    @property
    def position_ids(self) -> Tokens:
        """Positions int32[T], from 0 in each attention span."""
        borders, _ = self.spans()
        return (np.arange(len(self.ids)) - np.repeat(borders[:-1], np.diff(borders))).astype(np.int32)

    @property
    def answer_starts(self) -> Ints:
        """Where the answer of each segment of preferences begins, behind its prompt: int64[K]."""
        return self.offsets[:-1] + self.columns["prompt_lengths"].to_numpy().astype(np.int64)

    def spans(self) -> tuple[Ints, Ints]:
        """Return the offsets of attention spans in the tokens, and of sequences in the spans.

        A span is a segment, or with open attention the whole sequence.
        """
        counts = np.diff(self.sequence_offsets)
        begins = np.ones(len(self.offsets) - 1, bool)
        begins[np.repeat(self.is_open, counts)] = False
        begins[self.sequence_offsets[:-1]] = True
        borders = np.append(self.offsets[:-1][begins], self.offsets[-1])
        per_sequence = np.where(self.is_open, 1, counts)
        return borders, compute_offsets(per_sequence)


# ── Out of native shards ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class SegmentFiles:
    """Native shards as scratch files: file f holds segments `[first_segments[f], first_segments[f + 1])`."""

    files: Sequence[str]
    first_segments: Ints


def take_segments(source: SegmentFiles, segments: Ints, sequence_offsets: Ints) -> SequenceBatch:
    """Return segments by their number over all files, in the given order, grouped by `sequence_offsets`.

    A sequence gets the dataset and number of the sequence that its first segment came from. Only the pages with these
    segments are read, because a domain may have one segment in a hundred.
    """
    which = np.searchsorted(source.first_segments, segments, "right") - 1
    by_file = list(group_equal(which))
    pieces = [
        _select_file_segments(
            host_scratch.read_scratch_file(source.files[file]), segments[places] - source.first_segments[file]
        )
        for file, places in by_file
    ]
    back = np.empty(len(segments), np.int64)
    back[np.concatenate([places for _, places in by_file])] = np.arange(len(segments))
    sizes = np.concatenate([piece.sizes for piece in pieces])
    tokens = expand_ranges(compute_offsets(sizes)[:-1][back], sizes[back])
    heads = back[sequence_offsets[:-1]]
    columns = frozenset(pieces[0].columns).intersection(*(piece.columns for piece in pieces))
    weights = [piece.weights for piece in pieces if piece.weights is not None]
    return SequenceBatch(
        ids=np.concatenate([piece.ids for piece in pieces])[tokens],
        trained=np.concatenate([piece.labels for piece in pieces])[tokens] != IGNORED_LABEL,
        weights=np.concatenate(weights)[tokens].astype(np.float32) if weights else None,
        offsets=compute_offsets(sizes[back]),
        sequence_offsets=sequence_offsets,
        is_open=np.concatenate([piece.is_open for piece in pieces])[heads],
        example_ids=pa.concat_arrays([piece.example_ids for piece in pieces]).take(pa.array(back)),
        starts=np.concatenate([piece.starts for piece in pieces])[back],
        datasets=pa.concat_arrays([piece.datasets for piece in pieces]).take(pa.array(heads)),
        numbers=np.concatenate([piece.numbers for piece in pieces])[heads],
        token_fields={
            name: np.concatenate([piece.token_fields[name] for piece in pieces])[tokens]
            for name in pieces[0].token_fields
        },
        columns={
            name: pa.concat_arrays([piece.columns[name] for piece in pieces]).take(pa.array(back))
            for name in sorted(columns)
        },
    )


@dataclass(frozen=True, slots=True, eq=False)
class _FileSegments:
    """Segments of one file; the values of a sequence are repeated for each of its segments."""

    sizes: Ints
    ids: Tokens
    labels: Tokens
    weights: Weights | None
    example_ids: pa.Array
    starts: Tokens
    is_open: Bools
    datasets: pa.Array
    numbers: Ints
    token_fields: Mapping[str, Numbers]
    columns: Mapping[str, pa.Array]


def _select_file_segments(table: pa.Table, selected: Ints) -> _FileSegments:
    lengths = _flatten_list_values(table, "segment_lengths").astype(np.int64)
    sizes = lengths[selected]
    tokens = expand_ranges(compute_offsets(lengths)[:-1][selected], sizes)
    segments = _read_list_offsets(table, "segment_lengths")
    rows = np.searchsorted(segments, selected, "right") - 1
    is_open = np.diff(_read_list_offsets(table, "seq_lengths")) < np.diff(segments)
    return _FileSegments(
        sizes=sizes,
        ids=_flatten_list_values(table, "input_ids")[tokens],
        labels=_flatten_list_values(table, "labels")[tokens],
        weights=_flatten_list_values(table, WEIGHT_COLUMN)[tokens] if WEIGHT_COLUMN in table.column_names else None,
        example_ids=table.column("example_ids").chunk(0).values.take(pa.array(selected)),
        starts=_flatten_list_values(table, "starts")[selected],
        is_open=is_open[rows],
        datasets=table.column("dataset").chunk(0).take(pa.array(rows)),
        numbers=table.column("sequence_id").to_numpy()[rows],
        token_fields={
            name: _flatten_list_values(table, name)[tokens] for name in find_token_fields(table.column_names)
        },
        columns={
            name: table.column(name).chunk(0).values.take(pa.array(selected))
            for name in _SEGMENT_COLUMN_NAMES
            if name in table.column_names
        },
    )


_SEGMENT_COLUMN_NAMES = sorted(
    {column.name for columns in SEGMENT_COLUMNS.values() for column in columns} | ROW_FIELDS.keys()
)


def _flatten_list_values(table: pa.Table, name: str) -> Any:
    """Return all values of a list column, without copying them."""
    values = table.column(name).chunk(0).values
    if pa.types.is_fixed_size_list(values.type):
        return view_numbers(values)
    return values.to_numpy(zero_copy_only=False)


def _read_list_offsets(table: pa.Table, name: str) -> Ints:
    return np.asarray(table.column(name).chunk(0).offsets, np.int64)


# ── Checks before an export is written ─────────────────────────────────────────────────────────────


def require_valid_tokens(sequences: SequenceBatch, *, vocab_size: int, where: str) -> None:
    """Refuse tokens that a trainer cannot use.

    Raises IntegrityError for an id outside the vocabulary, an empty segment, a mask of a different length, or an
    attention span whose first token is a target.
    """
    ids = sequences.ids
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        bad = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise IntegrityError(
            f"{where}: token id {int(ids[bad])} in example {_find_example_name(sequences, bad)}; ids are 0 to "
            f"{vocab_size - 1}; set vocab_size to the model's embedding rows, or build again with its tokenizer"
        )
    if (sequences.segment_lengths < 1).any():
        empty = int(np.flatnonzero(sequences.segment_lengths < 1)[0])
        raise IntegrityError(
            f"{where}: an empty segment of example {sequences.example_ids[empty].as_py()}; each has at least one "
            f"token; {_REBUILD_ADVICE}"
        )
    of_tokens = [sequences.trained] if sequences.weights is None else [sequences.trained, sequences.weights]
    of_tokens = [*of_tokens, *sequences.token_fields.values()]
    for token in of_tokens:
        if len(token) != len(ids):
            raise IntegrityError(
                f"{where}: a mask of {len(token)} positions for {len(ids)} tokens; both must have the same length; "
                f"{_REBUILD_ADVICE}"
            )
    borders, _ = sequences.spans()
    firsts = borders[:-1][sequences.trained[borders[:-1]]]
    if len(firsts):
        name = _find_example_name(sequences, int(firsts[0]))
        raise IntegrityError(
            f"{where}: example {name} trains on the first token of its attention span, which no token precedes; "
            f"{_REBUILD_ADVICE}"
        )


_REBUILD_ADVICE = "this is a bug in rowmill: remove the packed shards, build again, and report it if it recurs"


def _find_example_name(sequences: SequenceBatch, token: int) -> str:
    return str(sequences.example_ids[int(np.searchsorted(sequences.offsets, token, "right")) - 1].as_py())
