"""The initial prefill of generated series: the first records of each training series, as trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from rowmill.core.arrays import find_distinct
from rowmill.core.storage import File, Store, digest_json
from rowmill.formats import Records
from rowmill.schema.manifest import Part
from rowmill.stages.kept_parts import part_folder
from rowmill.stages.part_files import write_table
from rowmill.stages.table_inputs import read_row_column
from rowmill.stages.table_plan import PartitionPlan
from rowmill.stages.tokenized_examples.table_tokens import VERSION
from rowmill.tabular.prompt import PromptFrame
from rowmill.tabular.row_index import RowIndex
from rowmill.tabular.schema import RecordSchema
from rowmill.tabular.serialization import RecordDecoder, RecordProblem, Serialiser, read_json

PREFILL_RECORDS = 3


PREFILL_SCHEMA = pa.schema(
    [
        pa.field("group_key", pa.string(), nullable=False),
        pa.field("records", pa.list_(pa.string()), nullable=False),
        pa.field("start", pa.string()),
        pa.field("stop", pa.string()),
        pa.field("length", pa.int64(), nullable=False),
    ]
)
"""Per training series of a partition, in the order of keys: its first records as trained, its first and last time as
JSON, and its number of records."""


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """How the records of an initial prefill are written."""

    form: Records
    schema: RecordSchema
    frame: PromptFrame


def write_prefill(
    store: Store, folder: str, options: PrefillOptions, files: Sequence[File], index: RowIndex, plan: PartitionPlan
) -> list[Part]:
    """Write the initial prefill of a partition; none under differential privacy, since it would publish records.

    `files` are the parts of rows that the index counts.
    """
    form = options.form
    train = next((one for one in plan.splits if one.split == "train"), None)
    if plan.mode != "sequential" or form.privacy.dp_enabled or train is None:
        return []
    begins, ends = train.records.groups[:-1], train.records.groups[1:]
    wanted = np.concatenate(
        [
            np.append(np.arange(a, min(a + PREFILL_RECORDS, b)), b - 1)
            for a, b in zip(begins.tolist(), ends.tolist(), strict=True)
        ]
    )
    shown = find_distinct(train.rows[wanted])
    texts = dict(zip(shown.tolist(), read_row_column(store, files, index, shown, "record"), strict=True))
    read = RecordDecoder(options.schema)
    write = Serialiser(options.schema, special_tokens=options.frame.special_tokens, wire=form.codec.wire)
    lines: list[dict[str, Any]] = []
    for group, first, last in zip(train.groups.tolist(), begins.tolist(), ends.tolist(), strict=True):
        own = train.rows[first:last]
        lines.append(
            {
                "group_key": index.keys[group],
                "records": [_format_as_trained(texts[row], read, write) for row in own[:PREFILL_RECORDS].tolist()],
                "start": _read_record_time(texts[int(own[0])], form.order_column),
                "stop": _read_record_time(texts[int(own[-1])], form.order_column),
                "length": last - first,
            }
        )
    table = pa.Table.from_pylist(lines, schema=PREFILL_SCHEMA)
    fingerprint = digest_json("prefill", VERSION, lines)
    path = f"{part_folder(folder, fingerprint)}/prefill.arrow"
    return [Part(fingerprint, {"prefill": write_table(store, path, table)}, {})]


def _format_as_trained(text: str, read: RecordDecoder, write: Serialiser) -> str:
    record = read(read_json(text))
    assert not isinstance(record, RecordProblem), record
    line = write(record)
    assert isinstance(line, str), line
    return line


def _read_record_time(text: str, column: str | None) -> str | None:
    """Return a record's time as the JSON text of its value."""
    if column is None:
        return None
    record: dict[str, Any] = read_json(text)
    value = record.get(column)
    return None if value is None else orjson.dumps(value, default=str).decode()
