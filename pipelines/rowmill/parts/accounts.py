"""What became of a part's records: rejects, ledger, rewritten parts, and sentences on the rows behind a failed check.

    rows of the part   a  b  c  d          drop b: duplicate      rows a c d, rejects + b, ledger b: rejected
    splits             0  0  0  0          splits 0 0 1 0         c is validation

The original of a rewritten part is kept as well: the next build starts from it.

The sentences become `Manifest.samples`, which are not part of a version: they name paths, on which no output depends.
Only a few rows are looked up, and the source is read again for one row at most.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.core.arrays import format_count
from rowmill.core.arrow_files import encode_table, make_required_schema
from rowmill.core.json import from_json
from rowmill.core.stage_names import CANONICAL_ROWS, RAW_DATASET
from rowmill.core.storage import File, Store, digest_bytes
from rowmill.parts.context import WorkContext
from rowmill.parts.functions import PartInputs, PartPlace, PartResult, part_function
from rowmill.schema import manifest
from rowmill.schema.counts import Counts, CountSet
from rowmill.schema.example_counts import ExampleCounts
from rowmill.schema.ledger import KEPT, LEDGER_SCHEMA, NOT_TAKEN, REJECTED, sum_counts
from rowmill.schema.manifest import Part
from rowmill.schema.row_counts import (
    MessageCounts,
    RowCounter,
    RowCounts,
    count_left_messages,
    count_written_rows,
)
from rowmill.schema.rows import (
    REJECT_SCHEMA,
    REJECTED_ROW_COLUMNS,
    SPLITS,
    Rejected,
    is_row_id,
    parse_row_id,
)
from rowmill.sources.reading import load_scans

if TYPE_CHECKING:
    import polars as pl


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

    def find_samples(self) -> dict[str, tuple[str, ...]]:
        """Return up to three ids of each reason."""
        return {reason: tuple(ids) for reason, ids in self.add_samples({}).items()}

    def add_samples(self, known: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Return up to three ids of each reason, those that are known already first."""
        samples = {reason: list(ids) for reason, ids in known.items()}
        for row_id, reason in zip(self.row_ids, self.reasons, strict=True):
            if len(samples.setdefault(reason, [])) < 3:
                samples[reason].append(row_id)
        return dict(sorted(samples.items()))


def write_accounts(
    place: PartPlace, kept: pa.ChunkedArray, log: RejectLog, left_out: Sequence[str] = (), state: str = NOT_TAKEN
) -> dict[str, File]:
    """Write the rejects and the ledger of a part; `left_out` records share one state."""
    others = pa.array([*log.row_ids, *left_out], pa.string())
    states = [REJECTED] * len(log.row_ids) + [state] * len(left_out)
    reasons = [*log.reasons, *[""] * len(left_out)]

    def column(of_kept: str, rest: Sequence[str]) -> pa.ChunkedArray:
        same = pa.repeat(pa.scalar(of_kept), len(kept))
        return pa.chunked_array([same, pa.array(rest, pa.string())], pa.string())

    if log.row_ids:
        rejects = place.write("rejects", log.table())
    else:
        # Parts without rejects share one file.
        path, content = f"{place.stage_folder}/no_rejects.arrow", _encode_no_rejects()
        if not place.store.exists(path):
            place.store.write(path, content)
        rejects = File(path=path, bytes=len(content), digest=digest_bytes(content), rows=0)
    row_ids = pa.chunked_array([*kept.chunks, others], pa.string())
    stages = column(log.stage, [log.stage] * len(others))
    columns = [row_ids, stages, column(KEPT, states), column("", reasons)]
    return {"rejects": rejects, "ledger": place.write("ledger", pa.Table.from_arrays(columns, schema=LEDGER_SCHEMA))}


@lru_cache(maxsize=1)
def _encode_no_rejects() -> bytes:
    return encode_table(RejectLog("none").table())


def row_as_bytes(row: dict[str, Any]) -> bytes:
    """Return a stored canonical row as JSON, for the rejects of later stages; `rowmill trace` finds the raw record."""
    return orjson.dumps({k: v for k, v in row.items() if v is not None and k in REJECTED_ROW_COLUMNS})


# ── Finished parts of canonical rows, rewritten ──


REMOVED_SCHEMA = make_required_schema(place=pa.int64(), reason=pa.string(), detail=pa.string())
"""A row of a part that goes, and why."""


@dataclass(frozen=True, slots=True)
class RewriteInputs(PartInputs):
    """A part, the rows to remove in `REMOVED_SCHEMA`, and each row's split (None: unchanged).

    `splits` are the bytes of an int8 array that indexes `SPLITS`.
    Removed rows are a table, or a file if a worker chose them: the inputs of all parts are in memory at once.
    """

    part: Part
    removed: "File | pa.Table"
    splits: bytes | None = None

    @property
    def input_bytes(self) -> int:
        return self.part.files["rows"].bytes


def rewrite_parts(
    context: WorkContext, parts: Sequence[Part], changes: Sequence[RewriteInputs | None], counter: RowCounter
) -> list[Part]:
    """Return the parts after what is to change in each of them; None: it stays as it is."""
    asked = [change for change in changes if change is not None]
    rewritten = iter(context.map(rewrite_rows, asked, shared=counter).parts)
    return [part if change is None else next(rewritten) for part, change in zip(parts, changes, strict=True)]


def plan_removal(part: Part, removed: Mapping[int, Rejected]) -> RewriteInputs | None:
    """Return what rejects some rows of a part; None if there are none."""
    return RewriteInputs(part, tabulate_removed(removed)) if removed else None


def tabulate_removed(removed: Mapping[int, Rejected]) -> pa.Table:
    """Return rows of a part that go, by their places, for `RewriteInputs.removed`."""
    places = sorted(removed)
    reasons, details = [removed[place].reason for place in places], [removed[place].detail for place in places]
    return pa.table([places, reasons, details], schema=REMOVED_SCHEMA)


@part_function(version=2)
def rewrite_rows(inputs: RewriteInputs, place: PartPlace, counter: RowCounter) -> PartResult:
    """Rewrite a part; dropped rows are added to its rejects, and what is left is counted again."""
    store, part = place.store, inputs.part
    rows = store.table(part.files["rows"])
    if inputs.splits is not None:
        names = np.array(SPLITS)[np.frombuffer(inputs.splits, np.int8)]
        rows = rows.set_column(rows.schema.get_field_index("split"), rows.schema.field("split"), pa.array(names))
    log = RejectLog(CANONICAL_ROWS)
    removed = store.table(inputs.removed) if isinstance(inputs.removed, File) else inputs.removed
    drop, why, details = (column.to_pylist() for column in removed.columns)
    dropped = rows.take(pa.array(drop, pa.int64())).to_pylist()
    for row, reason, detail in zip(dropped, why, details, strict=True):
        log.add(row["row_id"], Rejected(reason, detail), row_as_bytes(row))
    keep = np.ones(rows.num_rows, bool)
    keep[drop] = False
    kept = rows.filter(pa.array(keep))
    rejects = pa.concat_tables([store.table(part.files["rejects"]), log.table()])
    before = store.table(part.files["ledger"])
    states, reasons = before.column("state").to_pylist(), before.column("reason").to_pylist()
    gone = dict(zip(log.row_ids, log.reasons, strict=True))
    for i, row_id in enumerate(before.column("row_id").to_pylist()):
        if row_id in gone:
            states[i], reasons[i] = REJECTED, gone[row_id]
    ledger = pa.table([before.column("row_id"), before.column("stage"), states, reasons], schema=LEDGER_SCHEMA)
    files = {
        "rows": place.write("rows", kept),
        "rejects": place.write("rejects", rejects),
        "ledger": place.write("ledger", ledger),
    }
    counted = CountSet.parse(part.counts)
    of_rows = counted.get(RowCounts)
    again: list[Counts] = [
        replace(
            count_written_rows(kept),
            further_rows=of_rows.further_rows,
            reasons=sum_counts([of_rows.reasons, log.counts()]),
            left_out=of_rows.left_out,
            is_text_file=of_rows.is_text_file,
            samples_of_rejects={
                reason: tuple(ids) for reason, ids in log.add_samples(of_rows.samples_of_rejects).items()
            },
        ),
        *counter.count_rows(kept),
    ]
    of_messages = counted.find(MessageCounts)
    if of_messages is not None:
        removed_messages = (from_json(row["messages"] or "[]") for row in dropped)
        again.append(count_left_messages(of_messages, kept, removed_messages))
    unchanged = [one for kind, one in counted.by_class.items() if kind not in {type(one) for one in again}]
    return PartResult(files, counts=(*again, *unchanged), kept_details=part.details)


# ── Sentences on the rows behind a failed check ──


SHOWN_REASONS = 3
"""Maximum number of reasons or values that a check lists."""
MAX_VALUE_CHARS = 200
"""Longer values of the data are cut."""


def describe_rejects(context: WorkContext, parts: Sequence[Part], reasons: Mapping[str, int]) -> tuple[str, ...]:
    """Describe the most frequent reject reasons: count, and the first record's place and detail."""
    locator, lines = RowLocator(context), list[str]()
    for rank, (reason, count) in enumerate(sort_by_count(reasons)[:SHOWN_REASONS]):
        line = f"{reason}: {count:,}"
        first = _find_first_reject(context.store, parts, reason)
        if first is not None:
            row_id, detail = first
            line += f", the first is {locator.locate(row_id, reads_lines=rank == 0)}"
            line += f": {clean_value(detail)}" if detail else ""
        lines.append(line)
    return (*lines, *_count_others("reason", reasons))


def describe_values(noun: str, counts: Mapping[str, int], first: str) -> tuple[str, ...]:
    """Describe the most frequent values: `role 'narrator': 54`; `first` is a place of the most frequent one."""
    lines = [f"{noun} {clean_value(value)!r}: {count:,}" for value, count in sort_by_count(counts)[:SHOWN_REASONS]]
    if lines and first:
        lines[0] += f", the first is {first}"
    return (*lines, *_count_others(noun, counts))


def _count_others(noun: str, counts: Mapping[str, int]) -> list[str]:
    rest = sort_by_count(counts)[SHOWN_REASONS:]
    return [f"{format_count(len(rest), f'other {noun}')}: {sum(count for _, count in rest):,}"] if rest else []


def find_first_row(store: Store, parts: Iterable[Part], column: str, value: str) -> str:
    """Return the id of the first row with a value in a column of lists; empty if there is none."""
    import polars as pl

    for part in parts:
        frame = cast("pl.DataFrame", pl.from_arrow(store.table(part.files["rows"], ["row_id", column])))
        found = frame.filter(pl.col(column).list.contains(value))["row_id"]
        if len(found):
            return str(found[0])
    return ""


def sort_by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return names and counts, the most frequent first."""
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))


def clean_value(text: str) -> str:
    """Return text from data on one line, short, without characters that move a terminal's cursor."""
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in " ".join(text.split()))
    return line if len(line) <= MAX_VALUE_CHARS else f"{line[: MAX_VALUE_CHARS - 1]}…"


def find_reject_samples(part: Part) -> Mapping[str, Sequence[str]]:
    """Return a few ids of a part's rejects by reason."""
    return part.get_counts(ExampleCounts).samples_of_rejects or part.get_counts(RowCounts).samples_of_rejects


def _find_first_reject(store: Store, parts: Sequence[Part], reason: str) -> tuple[str, str] | None:
    """Return the id and detail of the first reject of a reason."""
    for part in parts:
        ids = find_reject_samples(part).get(reason)
        if ids:
            table = store.table(part.files["rejects"], ["row_id", "reason", "detail"])
            of_row = pc.and_(pc.equal(table.column("row_id"), ids[0]), pc.equal(table.column("reason"), reason))
            details = table.filter(of_row).column("detail").to_pylist()
            return ids[0], details[0] if details else ""
    return None


class RowLocator:
    """Finds the place of rows in their source: `data/sales.csv line 20002 (3f0c…:17)`."""

    def __init__(self, context: WorkContext) -> None:
        self._work = context

    def locate(self, name: str, *, reads_lines: bool) -> str:
        """Describe the place of a row or example; finding its line requires reading the file, unlike its number."""
        row_id = name.partition("#")[0]
        if not is_row_id(row_id):
            return name
        part_id, number = parse_row_id(row_id)
        if part_id not in self._owners:
            return name
        part, scan = self._owners[part_id]
        return f"{sources.describe_place(part, scan, self._work.base, number, reads_lines=reads_lines)} ({name})"

    @cached_property
    def _owners(self) -> dict[str, tuple[sources.SourcePart, sources.FileScan]]:
        # The manifest that the stage's inputs were built from.
        key = (*self._work.dataset_key, RAW_DATASET)
        manifests = dict(self._work.inputs)
        while manifests and key not in manifests:
            manifests = {
                name: before
                for later in manifests.values()
                for name, before in manifest.load_inputs(self._work.store, later).items()
            }
        scans = load_scans(manifests.get(key))
        return {part.part_id: (part, scan) for scan in scans for part in scan.parts}
