"""What becomes of each dataset's train sequences in the order: shown once, shown again, or never.

What belongs here: counting sequences and their tokens by state and dataset. What does not: the order (`mixture.py`),
ranks (`rank_assignment.py`).

    dataset  state          sequences  tokens
    chats    kept                 461  235,002     shown at least once
    chats    repeated               0        0     shown again, in later passes
    chats    remainder              0        0     left out because a last step or epoch was incomplete
    chats    not_scheduled          5    2,559     never reached

The states are those of the stage's ledger, which counts the sequences of all datasets together; `repeated` counts
further showings of sequences that are kept, so it is no state of a sequence.
"""

from collections.abc import Mapping

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.packing.mixture import SampleOrder
from rowmill.packing.rank_assignment import FILLER, RankOrder
from rowmill.schema.ledger import KEPT
from rowmill.schema.manifest import DisplayTable

REPEATED, REMAINDER, NOT_SCHEDULED = "repeated", "remainder", "not_scheduled"


def tabulate_schedule(order: SampleOrder, dealt: RankOrder, sequences: Mapping[str, tuple[Ints, Ints]]) -> DisplayTable:
    """Tabulate sequences, tokens and trained tokens by dataset and state.

    `sequences` holds the tokens and the trained tokens of every train sequence, by dataset, in recipe order.
    """
    places = dealt.order[dealt.order != FILLER]
    rows: list[tuple[str, str, int, int, int]] = []
    for number, (name, (tokens, trained)) in enumerate(sequences.items()):
        shown = np.bincount(order.items[places[order.datasets[places] == number]], minlength=len(tokens))
        dropped = np.zeros(len(tokens), np.bool_)
        dropped[order.items[dealt.dropped[order.datasets[dealt.dropped] == number]]] = True
        never = shown == 0
        counted = {
            KEPT: (~never).astype(np.int64),
            REPEATED: np.maximum(shown - 1, 0),
            REMAINDER: (never & dropped).astype(np.int64),
            NOT_SCHEDULED: (never & ~dropped).astype(np.int64),
        }
        rows += [
            (name, state, int(times.sum()), int(times @ tokens), int(times @ trained))
            for state, times in counted.items()
        ]
    return DisplayTable(("dataset", "state", "sequences", "tokens", "trained_tokens"), tuple(rows))
