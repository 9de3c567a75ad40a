"""What becomes of each dataset's train sequences in the order: shown once, shown again, or never.

    dataset  state          sequences  tokens
    chats    kept                 461  235,002     shown at least once
    chats    repeated               0        0     shown again, in later passes
    chats    remainder              0        0     left out because a last step or epoch was incomplete
    chats    not_scheduled          5    2,559     never reached

The states are those of the stage's ledger, which counts the sequences of all datasets together; `repeated` counts
further showings of sequences that are kept, so it is not a state of a sequence.

Two bits for each train sequence are held, and one block of the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, compute_offsets
from rowmill.core.storage import Store
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import DisplayTable
from rowmill.stages.training_splits.order_blocks import OrderSource, WrittenOrder

REPEATED, REMAINDER, NOT_SCHEDULED = "repeated", "remainder", "not_scheduled"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStates:
    """Which train sequences are in the order, and which it lacks because a step was incomplete: bool[S]."""

    is_kept: Bools
    is_remainder: Bools

    def count_lines(self) -> Sequence[tuple[str, str, int]]:
        """Return the lines of the stage's ledger."""
        kept, remainder = int(self.is_kept.sum()), int(self.is_remainder.sum())
        left = len(self.is_kept) - kept - remainder
        return [(KEPT, "", kept), (REMAINDER, "", remainder), (NOT_SCHEDULED, "", left)]


def find_sequence_states(store: Store, source: OrderSource, written: WrittenOrder) -> SequenceStates:
    """Read which sequences the order has, block by block, and which it left out."""
    firsts = compute_offsets(source.sizes)
    is_kept, is_left_out = (np.zeros(int(firsts[-1]), np.bool_) for _ in range(2))
    for part in written.parts:
        table = store.table(part.files["order"], ("dataset", "sequence_id", "filler"))
        table = table.filter(pc.invert(table.column("filler")))
        is_kept[firsts[table.column("dataset").to_numpy()] + table.column("sequence_id").to_numpy()] = True
    for left_out in source.steps.dropped:
        order = source.schedule.take(left_out.start, left_out.stop)
        is_left_out[firsts[order.datasets] + order.items] = True
    return SequenceStates(is_kept, is_left_out & ~is_kept)


def tabulate_schedule(
    names: Sequence[str], source: OrderSource, written: WrittenOrder, states: SequenceStates
) -> DisplayTable:
    """Tabulate sequences, tokens and trained tokens by dataset and state."""
    sequences = source.sequences.load()
    firsts = compute_offsets(source.sizes)
    rows: list[tuple[Any, ...]] = []
    for number, name in enumerate(names):
        own = slice(int(firsts[number]), int(firsts[number + 1]))
        kept, remainder = states.is_kept[own], states.is_remainder[own]
        once = _sum_sequences(sequences[own], kept)
        shown = (column[number] for column in (written.sequences, written.tokens, written.trained_tokens))
        every = _Counts(*(int(count) for count in shown))
        counted = {
            KEPT: once,
            REPEATED: _Counts(*(all_places - first for all_places, first in zip(every, once, strict=True))),
            REMAINDER: _sum_sequences(sequences[own], remainder),
            NOT_SCHEDULED: _sum_sequences(sequences[own], ~kept & ~remainder),
        }
        rows += [(name, state, *counts) for state, counts in counted.items()]
    return DisplayTable(("dataset", "state", "sequences", "tokens", "trained_tokens"), tuple(rows))


class _Counts(NamedTuple):
    sequences: int
    tokens: int
    trained_tokens: int


def _sum_sequences(sequences: NDArray[Any], chosen: Bools) -> _Counts:
    """Count the chosen sequences."""
    tokens, trained = (int(sequences[name].sum(dtype=np.int64, where=chosen)) for name in ("tokens", "trained_tokens"))
    return _Counts(int(chosen.sum()), tokens, trained)
