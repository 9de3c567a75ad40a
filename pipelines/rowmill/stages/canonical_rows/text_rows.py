"""One worker's task for a source part of conversations, pairs or texts: records to rows, rejects and a ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rowmill import sources
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.core.storage import Store
from rowmill.formats.canonicalization import Canonicalizer
from rowmill.formats.long_runs import list_row_texts, reject_long_run
from rowmill.formats.preference_columns import list_present_columns
from rowmill.formats.splits import Splitter
from rowmill.formats.unread_text import UnreadTextCounter
from rowmill.recipe.dataset import Dataset
from rowmill.schema.manifest import Part
from rowmill.schema.rows import NORMALIZATION_COLUMNS, Rejected, Row, make_row_schema
from rowmill.sources.sharing import TakenGroup, count_group_records, read_taken_records
from rowmill.stages.canonical_rows.row_columns import RowColumns
from rowmill.stages.part_files import RejectLog, count_accounts, write_accounts, write_table


@dataclass(frozen=True, slots=True)
class CanonicalTask:
    """Source parts whose rows are made together."""

    root: str
    folder: str
    fingerprint: str
    base: str
    dataset_name: str
    dataset: Dataset
    taken: TakenGroup


def canonicalize_part(task: CanonicalTask) -> Part:
    """Make canonical rows of some source parts; a kind may make several of one record."""
    # A user's class may keep state: every part gets a new reader.
    reader = task.dataset.format.open_row_reader(task.dataset, Path(task.base), task.dataset_name)
    splitter = Splitter(task.dataset.splits, by_group=task.dataset.format.has_groups(task.dataset))
    log = RejectLog(CANONICAL_ROWS)
    by_prefix = task.dataset.filters.deduplicate == "prefix200"
    schema = make_row_schema(task.dataset.row_kind, task.dataset.format.get_rollout_fields().columns)
    columns = RowColumns(task.dataset_name, schema, task.taken[0][0], splitter, by_prefix=by_prefix)
    is_searched = isinstance(reader, Canonicalizer) and task.dataset.row_kind != "tokens"
    unread = UnreadTextCounter(reader.read_elsewhere if is_searched else None)
    left_out: list[str] = []
    further, most_chars = 0, task.dataset.source.limits.max_run_chars
    for part, row_id, record in read_taken_records(task.taken, Path(task.base), left_out):
        may_have_long_run = len(record.raw) > most_chars
        plain = None
        if record.value is not None and not (by_prefix or may_have_long_run):
            plain = reader.read_plain(record.value)
        if plain is not None:
            columns.add_plain(row_id, plain)
            unread.add(record.value, plain)
            continue
        made = (record.rejected,) if record.rejected else reader.read(record.value, arrow=part.arrow)
        if record.value is not None and not (isinstance(made[0], Row) and made[0].kind == "text"):
            columns.note_preferences(row_id, list_present_columns(record.value, reader.unread_preferences))
        further += len(made) - 1
        for k, row in enumerate(made):
            name = f"{row_id}.{k}" if k else row_id
            # Rows of one record are not duplicates of each other, although its first 200 characters are equal.
            seen = [k, record.value] if k else record.value
            is_long = may_have_long_run and isinstance(row, Row)
            long_run = reject_long_run(list_row_texts(row), most_chars) if is_long else None
            refused = row if isinstance(row, Rejected) else long_run or columns.add(name, row, seen)
            if refused is not None:
                log.add(name, refused, record.raw)
            elif isinstance(row, Row):
                unread.add(record.value, row)
    return _save_rows(task, columns, log, left_out, unread, further=further)


def _save_rows(
    task: CanonicalTask,
    columns: RowColumns,
    log: RejectLog,
    not_taken: Sequence[str],
    unread: UnreadTextCounter,
    *,
    further: int,
) -> Part:
    store = Store(task.root)
    table = columns.table()
    facts: dict[str, Any] = {
        "records": count_group_records(task.taken),
        "is_text_file": sources.find_file_format(task.taken[0][0].reader).has_documents,
        "further_rows": further,
        **count_accounts(log, not_taken),
        **columns.count(),
        **count_rows(table),
        "unread_text": dict(sorted(unread.columns.items())),
        "rows_searched": unread.rows,
    }
    files = {
        "rows": write_table(store, f"{task.folder}/parts/{task.fingerprint}/rows.arrow", table),
        **write_accounts(store, task.folder, task.fingerprint, table.column("row_id"), log, not_taken),
    }
    return Part(task.fingerprint, files, facts)


def count_rows(table: pa.Table) -> dict[str, Any]:
    """Return the facts of a part that its rows show.

    They are counted from the table that is written, here and again after rows were removed: a number that was counted
    on the way would describe rows that are gone.
    """
    roles = table.column("unknown_roles")
    return {
        "kept": table.num_rows,
        "splits": _count_values(table.column("split")),
        "schemas": _count_values(table.column("schema")),
        "roles": _count_values(pc.list_flatten(roles)),
        "rows_with_unknown_roles": int(pc.sum(pc.greater(pc.list_value_length(roles), 0)).as_py() or 0),
        "notes": _count_values(pc.list_flatten(table.column("notes"))),
        "noticed": {name: int(pc.sum(table.column(name)).as_py() or 0) for name in NORMALIZATION_COLUMNS},
    }


def _count_values(column: pa.ChunkedArray) -> dict[str, int]:
    counted = column.value_counts()
    return dict(sorted(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True)))
