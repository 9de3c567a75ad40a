"""Sequences of shards: their content hashes, and their tokens as the flat arrays that every exporter receives.

    ids               10 11 2 20 2 | 7 7 2
    trained            0  1 1  0 1 | 0 1 1
    offsets            0      3    5       8     segments in tokens
    sequence_offsets   0           2       3     sequences in segments
    is_open            no            no          open: a sequence is one attention span

Ranks hold sequences in another order, and some several times: rows 2 0 0 have the content h2 + 2 h0 modulo 2^128. So
nobody has to read the tokens of all shards again to know what a rank must hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import (
    Bools,
    Ints,
    Tokens,
    compute_offsets,
    expand_ranges,
    group_equal,
    make_position_ids,
    view_numbers,
)
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.errors import IntegrityError
from rowmill.schema.content_hash import HASH_MODULUS
from rowmill.schema.examples import IGNORED_LABEL, ROW_FIELDS, find_token_values
from rowmill.schema.rows import ROW_KINDS
from rowmill.shards import host_scratch, native
from rowmill.shards.native import Segments

SEQUENCE_HASHES = make_required_schema(content_hash=pa.binary(16), tokens=pa.int32(), trained_tokens=pa.int32())
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
        return sum(value << 32 * limb for limb, value in enumerate(sums)) % HASH_MODULUS


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


# ── Flat arrays ──


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceBatch(Segments):
    """S sequences as exporters receive them.

    is_open bool[S]: a sequence is one attention span · datasets, numbers int64 per sequence. `columns` have the values
    per segment that not all recipes have: of one kind of rows (`rows.ROW_KINDS`), and fields of a row.
    """

    is_open: Bools
    datasets: pa.Array
    numbers: Ints

    def __len__(self) -> int:
        return len(self.sequence_offsets) - 1

    @property
    def token_offsets(self) -> Ints:
        """The first token of each sequence, then the number of tokens: int64[S + 1]."""
        return self.offsets[self.sequence_offsets]

    @property
    def segment_lengths(self) -> Tokens:
        return np.diff(self.offsets).astype(np.int32)

    @property
    def position_ids(self) -> Tokens:
        """Positions int32[T], from 0 in each attention span."""
        return make_position_ids(np.diff(self.spans()[0]))

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


def take_segments(files: Sequence[str], first_segments: Ints, segments: Ints, sequence_offsets: Ints) -> SequenceBatch:
    """Return segments of scratch files in the given order, grouped by `sequence_offsets`.

    The files are those of `host_scratch.py`. Segments are numbered over all of them: file f holds
    `[first_segments[f], first_segments[f + 1])`.

    A sequence gets the dataset and number of the sequence that its first segment came from. Only the pages with these
    segments are read, because a domain may have one segment in a hundred.
    """
    which = np.searchsorted(first_segments, segments, "right") - 1
    by_file = list(group_equal(which))
    tables, of_tokens = zip(
        *(
            _select_file_segments(host_scratch.read_scratch_file(files[file]), segments[places] - first_segments[file])
            for file, places in by_file
        ),
        strict=True,
    )
    back = np.empty(len(segments), np.int64)
    back[np.concatenate([places for _, places in by_file])] = np.arange(len(segments))
    names = [name for name in tables[0].column_names if all(name in piece.column_names for piece in tables)]
    found = pa.concat_tables([piece.select(names) for piece in tables]).combine_chunks()
    begins = compute_offsets(found.column("segment_lengths").to_numpy())[:-1][back]
    table = found.take(pa.array(back))
    lengths = table.column("segment_lengths").to_numpy()
    of_sequences = table.select(["is_open", "dataset", "sequence_id"]).take(pa.array(sequence_offsets[:-1]))
    # Arrow takes lists one by one, at half the speed.
    chosen = expand_ranges(begins, lengths)
    tokens = {
        name: np.concatenate([values[name] for values in of_tokens])[chosen]
        for name in of_tokens[0]
        if all(name in values for values in of_tokens)
    }
    return SequenceBatch(
        ids=tokens["input_ids"],
        trained=tokens["labels"] != IGNORED_LABEL,
        offsets=compute_offsets(lengths),
        sequence_offsets=sequence_offsets,
        is_open=of_sequences.column("is_open").combine_chunks().to_numpy(zero_copy_only=False),
        example_ids=table.column("example_ids").combine_chunks(),
        starts=table.column("starts").to_numpy(),
        datasets=of_sequences.column("dataset").combine_chunks(),
        numbers=of_sequences.column("sequence_id").to_numpy(),
        token_values={name: tokens[name] for name in find_token_values(tokens)},
        columns={name: table.column(name).combine_chunks() for name in _SEGMENT_COLUMN_NAMES if name in names},
    )


def _select_file_segments(table: pa.Table, selected: Ints) -> tuple[pa.Table, dict[str, NDArray[Any]]]:
    """Return some segments of a file, a row each with the values of its sequence, and what they have of each token."""
    stored = {name: table.column(name).chunk(0) for name in table.column_names}
    segments = np.asarray(stored["segment_lengths"].offsets, np.int64)
    rows = np.searchsorted(segments, selected, "right") - 1
    is_open = np.diff(np.asarray(stored["seq_lengths"].offsets, np.int64)) < np.diff(segments)
    lengths = view_numbers(stored["segment_lengths"].values)
    tokens = expand_ranges(compute_offsets(lengths)[selected], lengths[selected])
    of_tokens = ["input_ids", "labels", *find_token_values(table.column_names)]
    names = ("segment_lengths", "example_ids", "starts", *_SEGMENT_COLUMN_NAMES)
    of_segments = {name: stored[name].values.take(pa.array(selected)) for name in names if name in stored}
    of_sequences = {name: stored[name].take(pa.array(rows)) for name in ("dataset", "sequence_id")}
    found = pa.table(of_segments | of_sequences | {"is_open": is_open[rows]})
    return found, {name: view_numbers(stored[name].values)[tokens] for name in of_tokens}


_SEGMENT_COLUMN_NAMES = sorted(
    {column.name for kind in ROW_KINDS.values() for column in kind.segment_columns} | ROW_FIELDS.keys()
)


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
    for token in (sequences.trained, *sequences.token_values.values()):
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
