"""Blocks of answers that stay together in an export of preferences: pairs, and rows that exchange their answers.

pairs          chosen 0, rejected 0 │ chosen 1, rejected 1 │ …      blocks of 2 segments
KL of KTO      row 0, row 1, row 2 │ row 3, row 4, row 5 │ …        0 gets the answer of 2, and 1 that of 0
"""

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import Ints, compute_offsets, expand_ranges, make_list_array
from rowmill.exports.base import CHUNK_TOKENS, ExportIndex, ExportJob, Sharded
from rowmill.shards.sequences import SequenceBatch


def count_blocks_at_once(seq_len: int, block: int) -> int:
    """Return the number of blocks of a chunk."""
    return max(1, CHUNK_TOKENS // (seq_len * block))


def cut_blocks(export: Sharded, index: ExportIndex, block: int) -> list[ExportJob]:
    """Cut the order into files of whole blocks of segments, which take the place of sequences."""
    count = len(index.lengths)
    offsets = np.append(np.arange(0, count, block), count)
    tokens = np.add.reduceat(index.lengths, offsets[:-1]) if count else np.empty(0, np.int64)
    return export.cut(tokens, offsets, np.arange(count))


def locate_answers(chunk: SequenceBatch) -> Ints:
    """Return where the answer of each segment begins, behind its prompt."""
    return chunk.offsets[:-1] + chunk.columns["prompt_lengths"].to_numpy().astype(np.int64)


def take_ranges(chunk: SequenceBatch, begins: Ints, ends: Ints) -> pa.Array:
    """Return the ids of ranges of tokens, a list for each."""
    counts = ends - begins
    return make_list_array(compute_offsets(counts), chunk.ids[expand_ranges(begins, counts)])


def rotate_blocks(offsets: Ints) -> Ints:
    """Return for each row the one before it in its block, and for a block's first row its last."""
    before = np.arange(-1, int(offsets[-1]) - 1)
    before[offsets[:-1]] = offsets[1:] - 1
    return before
