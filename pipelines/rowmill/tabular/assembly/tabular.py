"""Rows without order: shuffled, appended, flushed at the cap or when the next row would not fit.

What belongs here: that rule. What does not: the shuffle itself; a pass comes with its order.
"""

import numpy as np

from rowmill.tabular.assembly import Assembled, Pass, Records, Room, ends_of_runs, follow, joined, reasons


def assemble(records: Records, passes: list[Pass], room: Room) -> Assembled:
    """Put the records of the passes into examples of one unit each; every record fits `room.records`."""
    order, _, starts = joined(passes)
    offsets = follow(ends_of_runs(records.tokens[order], starts, room.records, room.cap))
    count = len(offsets) - 1
    return Assembled(
        records=order,
        units=offsets,
        examples=np.arange(count + 1, dtype=np.int64),
        passes=np.searchsorted(starts, offsets[:-1], "right") - 1,
        budgets=np.full(count, room.records, np.int64),
        flushes=reasons(offsets, starts, room.cap),
    )
