"""Assembly of unordered records: shuffled, appended, flushed at the cap or when the next record would not fit."""

import numpy as np

from rowmill.tabular.assembly import (
    AssembledExamples,
    ExampleLimits,
    RecordLengths,
    RecordPass,
    chain_run_ends,
    explain_flushes,
    find_run_ends,
    join_passes,
)


def assemble_records(records: RecordLengths, passes: list[RecordPass], limits: ExampleLimits) -> AssembledExamples:
    """Assemble the records of the passes into examples of one unit each; every record fits `limits.records`."""
    order, _, starts = join_passes(passes)
    offsets = chain_run_ends(find_run_ends(records.tokens[order], starts, limits.records, limits.cap))
    count = len(offsets) - 1
    return AssembledExamples(
        records=order,
        units=offsets,
        examples=np.arange(count + 1, dtype=np.int64),
        passes=np.searchsorted(starts, offsets[:-1], "right") - 1,
        budgets=np.full(count, limits.records, np.int64),
        flushes=explain_flushes(offsets, starts, limits.cap),
    )
