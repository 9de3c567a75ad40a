"""Shards of the store as scratch files of this host, out of which a task takes rows in any order."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from rowmill.core.storage import Store
from rowmill.schema.indexed_shards import read_sequences
from rowmill.schema.manifest import File
from rowmill.shards import native
from rowmill.shards.host_scratch import HostScratch
from rowmill.shards.native import drop_padding


@dataclass(frozen=True, slots=True)
class NumberedShard:
    """A shard, and the number of its first sequence in the split of its dataset."""

    file: File
    first_sequence: int


@dataclass(frozen=True, slots=True)
class ShardCopies:
    """Shards of the store at `root`, each copied to a host when a task there first needs it.

    A copy has the numbers of its sequences, which the shard itself lacks. `keeps_padding` says whether copies have the
    padding of segments.
    """

    root: str
    shards: tuple[NumberedShard, ...]
    scratch: HostScratch
    keeps_padding: bool

    @property
    def files(self) -> list[str]:
        """The copies' paths on this host, in the order of the shards; not all may have been made."""
        return [self.scratch.locate(_name_copy(shard)) for shard in self.shards]

    def require(self, numbers: Iterable[int]) -> None:
        """Copy some shards, as far as this host lacks them."""
        chosen = {_name_copy(self.shards[number]): self.shards[number] for number in numbers}
        self.scratch.require({name: partial(self._copy_shard, shard) for name, shard in chosen.items()})

    def read(self, shard: NumberedShard) -> native.Segments:
        """Return a shard's segments, and copy it while it is in memory."""
        table = read_sequences(Store(self.root), shard.file).combine_chunks()
        self.scratch.require({_name_copy(shard): partial(self._write_copy, table, shard.first_sequence)})
        return native.recover_segments(table)

    def _copy_shard(self, shard: NumberedShard, target: str) -> None:
        self._write_copy(read_sequences(Store(self.root), shard.file), shard.first_sequence, target)

    def _write_copy(self, table: pa.Table, first_sequence: int, target: str) -> None:
        numbers = np.arange(first_sequence, first_sequence + table.num_rows, dtype=np.int64)
        kept = table if self.keeps_padding else drop_padding(table)
        native.write_shard_scratch(native.number_sequences(kept, numbers), target)


def _name_copy(shard: NumberedShard) -> str:
    return f"{shard.file.digest}-{shard.first_sequence}.arrow"
