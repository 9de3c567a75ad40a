"""Some packed sequences as flat arrays: what every exporter is handed, and what must be true of it.

What belongs here: taking segments out of rows of native shards, in any grouping; the checks before anything
is written. What does not: how a format stores them (one file per format), or who takes which (`export.py`).

    ids               10 11 2 20 2 | 7 7 2
    trained            0  1 1  0 1 | 0 1 1
    offsets            0      3    5       8     segments in tokens
    sequence_offsets   0           2       3     sequences in segments
    is_open            no            no          open: a sequence is one attention span
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.errors import IntegrityError
from pipelines.shards import gather
from pipelines.shards.letters import IGNORE, Bools, Ints, Tokens, Weights

WEIGHTS = "loss_weights"
"""The column that holds a float per token in builds whose recipe has such weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """S sequences of K segments and T tokens, flat.

    ids int32[T], trained bool[T], weights float32[T] or None · offsets int64[K + 1] · sequence_offsets
    int64[S + 1] · is_open bool[S] · example_ids, starts int32 per segment · datasets, numbers int64 per sequence.
    A token is trained if it is itself a target. With `weights`, that is where they are not 0.
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

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_offsets) - 1

    @property
    def token_offsets(self) -> Ints:
        """Where each sequence begins in the tokens, and their number."""
        return self.offsets[self.sequence_offsets]

    @property
    def segment_lengths(self) -> Tokens:
        """Tokens per segment."""
        return np.diff(self.offsets).astype(np.int32)

    def spans(self) -> tuple[Ints, Ints]:
        """Return the borders of attention spans in the tokens, and of sequences in the spans.

        A span is a segment; with open attention it is the whole sequence.
        """
        counts = np.diff(self.sequence_offsets)
        begins = np.ones(len(self.offsets) - 1, bool)
        begins[np.repeat(self.is_open, counts)] = False
        begins[self.sequence_offsets[:-1]] = True
        borders = np.append(self.offsets[:-1][begins], self.offsets[-1])
        per_sequence = np.where(self.is_open, 1, counts)
        return borders, np.concatenate((np.zeros(1, np.int64), np.cumsum(per_sequence)))


def lists(offsets: Ints, values: NDArray[np.generic]) -> pa.ListArray:
    """Return an Arrow list column: row i is `values[offsets[i]:offsets[i + 1]]`."""
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


# ── Out of native shards ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class Shelf:
    """Native shards laid out for taking: row r holds segments `[first_segments[r], first_segments[r + 1])`.

    Rows and segments are numbered over all files. `first_rows` int64[F + 1] are the numbers of each file's first
    row, and the total.
    """

    files: Sequence[str]
    first_rows: Ints
    first_segments: Ints


def take(shelf: Shelf, segments: Ints, sequence_offsets: Ints) -> Sequences:
    """Return segments by their number over all files, in the order wanted, grouped as `sequence_offsets` says.

    A sequence bears the name and number of the one that its first segment stood in.
    """
    rows, place = np.unique(np.searchsorted(shelf.first_segments, segments, "right") - 1, return_inverse=True)
    table = gather.take(shelf.files, shelf.first_rows, rows)
    lengths = _flat(table, "segment_lengths").astype(np.int64)
    bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    names = table.column("example_ids").combine_chunks()
    first = np.asarray(names.offsets, np.int64) - int(names.offsets[0].as_py())
    # The number of each wanted segment among those of the rows that were read.
    found = first[place] + segments - shelf.first_segments[rows[place]]
    sizes = lengths[found]
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    index = np.repeat(bounds[found] - offsets[:-1], sizes) + np.arange(int(offsets[-1]))
    weights = _flat(table, WEIGHTS)[index].astype(np.float32) if WEIGHTS in table.column_names else None
    heads = place[sequence_offsets[:-1]]
    ids = _flat(table, "input_ids")[index]
    return Sequences(
        ids=ids,
        trained=_flat(table, "labels")[index] != IGNORE,
        weights=weights,
        offsets=offsets,
        sequence_offsets=sequence_offsets,
        is_open=_is_open(table)[heads],
        example_ids=names.flatten().take(pa.array(found)),
        starts=_flat(table, "starts")[found],
        datasets=table.column("dataset").combine_chunks().take(pa.array(heads)),
        numbers=table.column("sequence_id").to_numpy()[heads],
    )


def _flat(table: pa.Table, name: str) -> "NDArray[np.int32]":
    return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _is_open(table: pa.Table) -> Bools:
    """Tell which rows hold several segments in one attention span."""
    spans = np.diff(np.asarray(table.column("seq_lengths").combine_chunks().offsets, np.int64))
    segments = np.diff(np.asarray(table.column("segment_lengths").combine_chunks().offsets, np.int64))
    return spans < segments


# ── Before anything is written ─────────────────────────────────────────────────────────────────────


def require_sound(sequences: Sequences, *, vocab_size: int, where: str) -> None:
    """Refuse tokens that no trainer could use.

    Raises
    ------
    IntegrityError
        For an id outside the vocabulary, an empty segment, a mask of another length, or an attention span
        whose first token is a target.

    """
    ids = sequences.ids
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        bad = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        _refuse(
            where,
            f"token id {int(ids[bad])} in example {_name_at(sequences, bad)}; ids are 0 to {vocab_size - 1}",
            "set vocab_size to the model's embedding rows, or build again with its tokenizer",
        )
    if (sequences.segment_lengths < 1).any():
        empty = int(np.flatnonzero(sequences.segment_lengths < 1)[0])
        _refuse(
            where, f"an empty segment of example {sequences.example_ids[empty].as_py()}; each holds a token", _AGAIN
        )
    of_tokens = [sequences.trained] if sequences.weights is None else [sequences.trained, sequences.weights]
    for one in of_tokens:
        if len(one) != len(ids):
            _refuse(where, f"a mask of {len(one)} positions for {len(ids)} tokens; they are of one length", _AGAIN)
    borders, _ = sequences.spans()
    firsts = borders[:-1][sequences.trained[borders[:-1]]]
    if len(firsts):
        name = _name_at(sequences, int(firsts[0]))
        _refuse(
            where, f"example {name} trains on the first token of its attention span, which nothing predicts", _AGAIN
        )


_AGAIN = "this is a bug of rowmill: remove the packed shards, build again, and report it if it returns"


def _refuse(where: str, what: str, remedy: str) -> None:
    raise IntegrityError(f"{where}: {what}; {remedy}")


def _name_at(sequences: Sequences, token: int) -> str:
    return str(sequences.example_ids[int(np.searchsorted(sequences.offsets, token, "right")) - 1].as_py())
