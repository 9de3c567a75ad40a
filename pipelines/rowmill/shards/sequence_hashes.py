"""The content hash and the size of every sequence of a shard, so that what holds sequences by number can prove it.

    shard row        0        1        2         sequences.arrow: 24 bytes a row, whatever the sequence's length
    content_hash     h0       h1       h2        rows 2 0 0 have the content h2 + 2 h0 modulo 2^128

Ranks hold sequences in another order, and some several times. Their content is compared with the sum of these hashes:
nobody has to read the tokens of all shards again to know what a rank must hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.storage import Store
from rowmill.schema.manifest import Part
from rowmill.shards import native

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
