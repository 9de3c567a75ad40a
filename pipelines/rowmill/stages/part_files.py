"""The files of a part: tables, the rejects and the ledger next to the rows, one writer for each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.arrow_files import encode_table
from rowmill.core.storage import Store, digest_bytes
from rowmill.schema.ledger import KEPT, LEDGER_SCHEMA, NOT_TAKEN, REJECTED
from rowmill.schema.manifest import File
from rowmill.schema.rows import REJECT_SCHEMA, REJECTED_ROW_COLUMNS, Rejected


def write_table(store: Store, path: str, table: pa.Table) -> File:
    """Write a table that only stages read, atomically, as an Arrow file."""
    return _write_content(store, path, encode_table(table), table.num_rows)


def write_parquet(store: Store, path: str, table: pa.Table) -> File:
    """Write a table that other programs read, too, atomically."""
    buffer = BytesIO()
    pq.write_table(table, buffer, compression="zstd", compression_level=1)
    return _write_content(store, path, buffer.getvalue(), table.num_rows)


def _write_content(store: Store, path: str, content: bytes, rows: int) -> File:
    store.write(path, content)
    return File(path=path, bytes=len(content), digest=digest_bytes(content), rows=rows)


@dataclass(slots=True)
class RejectLog:
    """Rejected records of a part, with their raw bytes."""

    stage: str
    row_ids: list[str] = field(default_factory=list[str])
    reasons: list[str] = field(default_factory=list[str])
    details: list[str] = field(default_factory=list[str])
    raws: list[bytes] = field(default_factory=list[bytes])

    def add(self, row_id: str, rejected: Rejected, raw: bytes) -> None:
        """Add one reject with its reason and raw record."""
        self.row_ids.append(row_id)
        self.reasons.append(rejected.reason)
        self.details.append(rejected.detail[:500])
        self.raws.append(raw)

    def table(self) -> pa.Table:
        """Return the rejects in `REJECT_SCHEMA`."""
        return pa.table(
            [self.row_ids, [self.stage] * len(self.row_ids), self.reasons, self.details, self.raws],
            schema=REJECT_SCHEMA,
        )

    def counts(self) -> dict[str, int]:
        """Return how many rejects there are by reason."""
        return dict(sorted(Counter(self.reasons).items()))


def write_accounts(
    store: Store,
    stage_folder: str,
    fingerprint: str,
    kept: pa.ChunkedArray,
    log: RejectLog,
    left_out: Sequence[str] = (),
    state: str = NOT_TAKEN,
) -> dict[str, File]:
    """Write the rejects and the ledger of a part; `left_out` records share one state."""
    at = f"{stage_folder}/parts/{fingerprint}"
    return {
        "rejects": _write_rejects(store, stage_folder, at, log),
        "ledger": write_table(store, f"{at}/ledger.arrow", _build_ledger(kept, log, left_out, state)),
    }


def count_accounts(log: RejectLog, left_out: Sequence[str] = (), state: str = NOT_TAKEN) -> dict[str, Any]:
    """Return the part's counts of rejects by reason, with samples, and of records left out."""
    return {
        "reasons": log.counts(),
        "examples_of_rejects": _sample_rejects(log),
        "left_out": {state: len(left_out)} if left_out else {},
    }


def _write_rejects(store: Store, stage_folder: str, at: str, log: RejectLog) -> File:
    """Write a part's rejects; parts without rejects share one file."""
    if log.row_ids:
        return write_table(store, f"{at}/rejects.arrow", log.table())
    path = f"{stage_folder}/no_rejects.arrow"
    content = _empty_rejects()
    if not store.exists(path):
        store.write(path, content)
    return File(path=path, bytes=len(content), digest=digest_bytes(content), rows=0)


@lru_cache(maxsize=1)
def _empty_rejects() -> bytes:
    return encode_table(RejectLog("none").table())


def _build_ledger(kept: pa.ChunkedArray, log: RejectLog, left_out: Sequence[str], state: str) -> pa.Table:
    """Return a part's ledger: rows kept, rejected, and left out in one state."""
    others = pa.array([*log.row_ids, *left_out], pa.string())
    states = [REJECTED] * len(log.row_ids) + [state] * len(left_out)
    reasons = [*log.reasons, *[""] * len(left_out)]

    def column(of_kept: str, rest: Sequence[str]) -> pa.ChunkedArray:
        same = pa.repeat(pa.scalar(of_kept), len(kept))
        return pa.chunked_array([same, pa.array(rest, pa.string())], pa.string())

    row_ids = pa.chunked_array([*kept.chunks, others], pa.string())
    stages = column(log.stage, [log.stage] * len(others))
    return pa.Table.from_arrays([row_ids, stages, column(KEPT, states), column("", reasons)], schema=LEDGER_SCHEMA)


def _sample_rejects(log: RejectLog) -> dict[str, list[str]]:
    """Return the first three rejects of each reason."""
    found: dict[str, list[str]] = {}
    for row_id, reason in zip(log.row_ids, log.reasons, strict=True):
        if len(found.setdefault(reason, [])) < 3:
            found[reason].append(row_id)
    return dict(sorted(found.items()))


def row_as_bytes(row: dict[str, Any]) -> bytes:
    """Return a stored canonical row as JSON, for the rejects of later stages; `rowmill trace` finds the raw record."""
    return orjson.dumps({k: v for k, v in row.items() if v is not None and k in REJECTED_ROW_COLUMNS})
