"""The rows of long statistics tables, read from the part files of a manifest."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rowmill.core.arrow_files import SUFFIX
from rowmill.core.errors import SchemaError
from rowmill.core.storage import Store, damaged_file_error
from rowmill.schema.manifest import File, Manifest, Part
from rowmill.stats.counts import StatsInputs
from rowmill.stats.row_origins import (
    ORIGIN_COLUMNS,
    PREVIEWED_COLUMNS,
    ReadDomain,
    SourceIndex,
    describe_rejects,
    index_sources,
    preview_rows,
)
from rowmill.stats.schemas import SCHEMAS

GROUP_ROWS = 65_536
"""Rows read and written at a time: memory is flat in the size of the dataset."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """A part file that a long table is copied from."""

    part: Part
    file: File


def find_long_tables(manifest: Manifest, inputs: StatsInputs) -> dict[str, list[PartFile]]:
    """Return the part files that each long table is copied from."""
    tables: dict[str, list[PartFile]] = {}
    for part in manifest.parts:
        for name, file in part.files.items():
            if name in inputs.files:
                tables.setdefault(inputs.files[name], []).append(PartFile(part, file))
    return tables


def read_part_rows(
    store: Store, manifest: Manifest, table: str, sources: Sequence[PartFile], read_domain: ReadDomain | None = None
) -> Iterator[pa.Table]:
    """Yield the rows of a long table in groups of about `GROUP_ROWS`.

    Raises
    ------
    SchemaError
        If a part's file lacks a column.
    DamagedFileError
        If a part's file cannot be read.

    """
    schema = SCHEMAS[table]
    read, shape = _choose_shaper(store, manifest, table, read_domain)
    # Most parts have no rejects; opening their empty file costs as much as reading one with rows.
    filled = (source for source in sources if source.file.rows)
    batches = (
        _Columns(shape(batch, source, row), source.file.path)
        for source in filled
        for row, batch in _read_batches(store, source.file, read)
    )
    return _join_batches(batches, schema)


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """The columns of a batch, in the types of the file with this path."""

    content: pa.Table
    path: str


_BatchShaper = Callable[[pa.RecordBatch, PartFile, int], pa.Table]
"""Makes the columns of a table from a batch of a part's file, which begins with row n of it."""


def _choose_shaper(
    store: Store, manifest: Manifest, table: str, read_domain: ReadDomain | None
) -> tuple[Sequence[str], _BatchShaper]:
    """Return the columns to read of a part's file, and what makes a table's columns of them."""
    names = SCHEMAS[table].names
    if table == "sequences":
        return (*names, "shard_row"), _make_sequence_shaper(manifest)
    if table == "rows":
        own = [name for name in names if name not in (*ORIGIN_COLUMNS, "preview")]
        return (*own, *PREVIEWED_COLUMNS), _make_row_shaper(index_sources(store, manifest))
    if table == "rejects":
        own = [name for name in names if name not in (*ORIGIN_COLUMNS, "domain", "preview")]
        return (*own, "raw"), _make_reject_shaper(index_sources(store, manifest), read_domain)
    return (*names, "shard_row") if "sequence_id" in names else names, _shape_columns


def _make_row_shaper(index: SourceIndex) -> _BatchShaper:
    def shape(batch: pa.RecordBatch, source: PartFile, row: int) -> pa.Table:
        del source, row
        content = pa.Table.from_batches([batch])
        own = content.drop_columns(list(PREVIEWED_COLUMNS))
        return _add_columns(own, index.locate(content.column("row_id")) | {"preview": preview_rows(content)})

    return shape


def _make_reject_shaper(index: SourceIndex, read_domain: ReadDomain | None) -> _BatchShaper:
    def shape(batch: pa.RecordBatch, source: PartFile, row: int) -> pa.Table:
        del source, row
        content = pa.Table.from_batches([batch])
        added = describe_rejects(content.column("raw"), read_domain)
        return _add_columns(content, index.locate(content.column("row_id")) | added)

    return shape


def _add_columns(content: pa.Table, columns: Mapping[str, "pa.ChunkedArray | pa.Array"]) -> pa.Table:
    for name, values in columns.items():
        content = content.append_column(name, values)
    return content


def _shape_columns(batch: pa.RecordBatch, source: PartFile, row: int) -> pa.Table:
    del row
    content = pa.Table.from_batches([batch])
    if "shard_row" in content.column_names:
        content = _number_sequences(content, content.column("shard_row"), source)
    return content


def _number_sequences(content: pa.Table, shard_rows: "pa.ChunkedArray | pa.Array", source: PartFile) -> pa.Table:
    """Add the numbers of sequences in their split: shards know only their own rows, manifests where each begins."""
    first = pa.scalar(int(source.part.facts["first_sequence"]), pa.int64())
    return content.append_column("sequence_id", pc.add(shard_rows.cast(pa.int64()), first))


def _make_sequence_shaper(manifest: Manifest) -> _BatchShaper:
    """Return a function that adds a shard's name, split (its column, or its part's fact) and fill to its columns."""
    schema = SCHEMAS["sequences"]
    seq_len = manifest.card.get("seq_len")
    if not isinstance(seq_len, int) or seq_len < 1:
        raise SchemaError(
            f"{'/'.join(manifest.key)}: its card has seq_len {seq_len!r}; expected a positive integer; correct the "
            "stage that writes it"
        )

    def shape(batch: pa.RecordBatch, source: PartFile, row: int) -> pa.Table:
        content = pa.Table.from_batches([batch])
        if "sequence_id" not in content.column_names and "first_sequence" in source.part.facts:
            content = _number_sequences(content, pa.array(range(row, row + len(batch)), pa.int64()), source)
        constants: dict[str, object] = {"shard": source.file.path, "split": source.part.facts.get("split", "")}
        for name, value in constants.items():
            if name not in content.column_names:
                content = content.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(content)))
        require_schema_columns(schema, {*content.column_names, "fill"}, source.file.path)
        fill = pa.array(content.column("tokens").to_numpy() / seq_len, pa.float64())
        return content.append_column("fill", fill)

    return shape


def _read_batches(store: Store, file: File, wanted: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the batches of those columns that a file has, each with the number of its first row."""
    if file.path.endswith(SUFFIX):
        table = store.table(file, wanted)
        for row in range(0, len(table), GROUP_ROWS):
            yield from ((row, batch) for batch in table.slice(row, GROUP_ROWS).to_batches())
        return
    # Not compared with its digest: checks cover the stage's files, and nobody trains on statistics.
    try:
        # One request: columns of a remote file would take several each, and a part is small enough.
        source = store.path(file.path) if store.is_local else pa.BufferReader(store.read(file.path))
        with pq.ParquetFile(source) as parquet:
            present = [name for name in wanted if name in parquet.schema_arrow.names]
            row = 0
            for batch in parquet.iter_batches(batch_size=GROUP_ROWS, columns=present, use_threads=store.is_local):
                yield row, batch
                row += len(batch)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged_file_error(store, file, " ".join(str(error).split())) from error


def _join_batches(batches: Iterable[_Columns], schema: pa.Schema) -> Iterator[pa.Table]:
    """Join small batches, so that thousands of small parts do not make thousands of row groups."""
    waiting: list[_Columns] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += len(batch.content)
        if rows >= GROUP_ROWS:
            yield _cast_batches(waiting, schema)
            waiting, rows = [], 0
    yield _cast_batches(waiting, schema) if waiting else schema.empty_table()


def _cast_batches(batches: Sequence[_Columns], schema: pa.Schema) -> pa.Table:
    """Join batches in the schema's types; those of small parts take longer to cast one by one than to read."""
    first = batches[0].content.schema
    if all(batch.content.schema.equals(first) for batch in batches):
        # If that fails, the error has to name the file.
        with suppress(SchemaError):
            joined = pa.concat_tables([batch.content for batch in batches])
            return cast_to_schema(joined, schema, batches[0].path)
    return pa.concat_tables([cast_to_schema(batch.content, schema, batch.path) for batch in batches])


def cast_to_schema(content: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """Return the schema's columns in its order and types."""
    require_schema_columns(schema, content.column_names, where)
    absent = [name for name in schema.names if name not in content.column_names]
    for name in absent:
        content = content.append_column(name, pa.nulls(len(content), schema.field(name).type))
    try:
        return content.select(schema.names).replace_schema_metadata(None).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise make_misfit_error(where, error, schema) from error


def make_misfit_error(where: str, error: Exception, schema: pa.Schema) -> SchemaError:
    """Return the error for a value that its column cannot hold."""
    expected = ", ".join(f"{field.name} {field.type}" for field in schema)
    return SchemaError(
        f"{where}: a value does not fit ({error}); expected {expected}; correct the stage that writes it"
    )


def require_schema_columns(schema: pa.Schema, columns: Iterable[str], where: str) -> None:
    """Raise SchemaError if columns of a table are missing."""
    # A stage of one dataset may omit the dataset's name: the view then takes the scope.
    missing = set(schema.names) - set(columns) - {"dataset"}
    if missing:
        raise SchemaError(
            f"{where}: column {', '.join(sorted(missing))} is missing; expected {', '.join(schema.names)}; "
            "correct the stage that writes it"
        )
