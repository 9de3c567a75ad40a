"""Parquet and Arrow files, one record per row, also those of `datasets.save_to_disk`; and Arrow batches as JSON lines.

string, number, boolean, list, struct   as in JSON, keys in schema order
number of 32 or 16 bits                 the shortest text of its width: 0.1, not 0.10000000149011612
NaN, infinity                           null; where they are kept: "NaN", "Infinity", "-Infinity"
decimal                                 a JSON number with its own digits: 42.50
timestamp, date, time                   ISO 8601, offset kept: "2024-01-15T00:00:00+02:00"
duration                                exact seconds: 90, 0.000000001
binary                                  base64: "AAE="
JSON text (`arrow.json`)                the JSON value itself
map                                     a list of [key, value]
"""

import base64
import datetime as dt
import decimal
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rowmill.core.errors import SchemaError, SourceError
from rowmill.core.own_process import let_pandas_in
from rowmill.sources.parts import (
    FileFormat,
    FileScan,
    OpenStream,
    PartContent,
    SourceFile,
    cut_rows,
)
from rowmill.sources.urls import read_folder_columns

_BATCH_ROWS = 256
"""Small: rows may hold megabytes each, and decoding in batches of thousands gains little."""

_FILE_MAGIC = b"ARROW1"


def _open_arrow(content: BinaryIO, url: str, file: SourceFile) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    magic = content.read(len(_FILE_MAGIC))
    content.seek(0)
    reader = pa.ipc.open_file(content) if magic == _FILE_MAGIC else pa.ipc.open_stream(content)
    count = reader.num_record_batches if isinstance(reader, pa.RecordBatchFileReader) else None
    batches = iter(reader) if count is None else map(reader.get_batch, range(count))

    def iterate() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            batch.validate()
            yield from (batch.slice(begin, _BATCH_ROWS) for begin in range(0, batch.num_rows, _BATCH_ROWS))

    return reader.schema, iterate()


def _open_parquet(content: BinaryIO, url: str, file: SourceFile) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    reader = pq.ParquetFile(content, pre_buffer=False)
    return reader.schema_arrow, reader.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)


@dataclass(frozen=True)
class _TypedFormat(FileFormat):
    """A format whose files declare the types of their columns."""

    open_batches: Callable[[BinaryIO, str, SourceFile], tuple[pa.Schema, Iterator[pa.RecordBatch]]] = _open_arrow
    """Returns a file's schema and its batches of at most 256 rows."""

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: SourceFile) -> Iterator[PartContent]:
        with self._read_batches(stream, scan.url, file) as (schema, batches):
            added = {name: value for name, value in read_folder_columns(scan.url).items() if name not in schema.names}
            encoded = (encode_batch(one, keeps_non_finite=file.keeps_non_finite, added=added) for one in batches)
            yield from cut_rows(chain.from_iterable(encoded), file.limits.max_record_bytes)

    def read_columns(self, scan: FileScan, file: SourceFile, open_stream: OpenStream) -> dict[str, str]:
        with open_stream() as stream, self._read_batches(stream, scan.url, file) as (schema, _):
            declared = {field.name: str(field.type) for field in schema}
            return declared | {name: "string" for name in read_folder_columns(scan.url) if name not in declared}

    @contextmanager
    def _read_batches(
        self, stream: BinaryIO, url: str, file: SourceFile
    ) -> Generator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        """Give a file's schema and its batches; raises SourceError for an error in either.

        Both formats are read from their end, so a compressed file is copied to disk first.
        """
        done = 0

        def count_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            nonlocal done
            for batch in batches:
                yield batch
                done += batch.num_rows

        with nullcontext(stream) if file.is_seekable else tempfile.TemporaryFile() as content:
            if not file.is_seekable:
                shutil.copyfileobj(stream, content)
                content.seek(0)
            try:
                schema, batches = self.open_batches(content, url, file)
                twice = sorted(name for name, count in Counter(schema.names).items() if count > 1)
                if twice:
                    raise SchemaError(f"{url}: two columns are named {twice[0]!r}; names must differ; rename one")
                yield schema, count_rows(batches)
            except SourceError:
                raise
            except (pa.ArrowException, OSError) as error:
                name = self.name.capitalize()
                raise SourceError(
                    f"{url}: not readable as {name} after {done:,} rows ({' '.join(str(error).split())}); expected a "
                    f"complete {name} file; fetch or write the file again"
                ) from error


PARQUET = _TypedFormat(
    "parquet", version=1, suffixes=(".parquet",), is_seekable=True, is_arrow=True, open_batches=_open_parquet
)
ARROW = _TypedFormat("arrow", suffixes=(".arrow", ".feather"), is_seekable=True, is_arrow=True)


# ── Rows as JSON ──

_NOT_UTF8 = b'"\xff text of this row is not UTF-8"'
"""A line that reading rejects as `not_utf8`; Arrow's own bytes of such a row cannot be shown as JSON."""


def encode_batch(
    batch: pa.RecordBatch | pa.Table, *, keeps_non_finite: bool = False, added: Mapping[str, str | None] | None = None
) -> Iterator[bytes]:
    """Yield one JSON line per row, without its line end; `added` are values that every row has as well."""
    if any(_holds(field.type, _counts_nanoseconds) for field in batch.schema):
        # Only as pandas' objects does pyarrow give nanoseconds.
        let_pandas_in()
        batch = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
        for at, field in enumerate(batch.schema):
            if field.type == pa.time64("ns"):
                # Times of day become text, as `isoformat` writes the others.
                text = pc.replace_substring_regex(batch.column(at).cast(pa.string()), r"(\.\d{6})000$", r"\1")
                batch = batch.set_column(at, field.name, pc.replace_substring_regex(text, r"\.000000$", ""))
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            one = batch.slice(index, 1)
            try:
                one.to_pylist()
            except UnicodeDecodeError:
                yield _NOT_UTF8
            else:
                yield from encode_batch(one, keeps_non_finite=keeps_non_finite, added=added)
        return
    narrow = {field.name: make for field in batch.schema if (make := _make_shortener(field.type)) is not None}
    json_columns = [field for field in batch.schema if _holds(field.type, _is_json)]
    float_columns = [name for name in batch.schema.names if keeps_non_finite and _has_non_finite(batch.column(name))]
    for row in rows:
        for name, shorten in narrow.items():
            row[name] = shorten(row[name])
        for field in json_columns:
            row[field.name] = _unwrap_json(row[field.name], field.type)
        for name in float_columns:
            row[name] = _name_non_finite(row[name])
        if added:
            row.update(added)
        yield orjson.dumps(row, default=_encode_other)


def _holds(kind: pa.DataType, is_wanted: Callable[[pa.DataType], bool]) -> bool:
    """Return whether a type, or one inside it, is wanted."""
    return is_wanted(kind) or any(_holds(kind.field(at).type, is_wanted) for at in range(kind.num_fields))


def _counts_nanoseconds(kind: pa.DataType) -> bool:
    return pa.types.is_temporal(kind) and getattr(kind, "unit", "") == "ns"


def _is_json(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.JsonType)


def _make_shortener(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function that gives the narrow floats in a value the digits of their width; None if it has none."""
    if kind in (pa.float32(), pa.float16()):
        narrow: type[np.floating] = np.float32 if kind == pa.float32() else np.float16
        return lambda value: None if value is None else float(str(narrow(value)))
    inner = {
        kind.field(at).name: make for at in range(kind.num_fields) if (make := _make_shortener(kind.field(at).type))
    }
    if not inner:
        return None
    if pa.types.is_struct(kind):
        return lambda value: value and {**value, **{name: make(value[name]) for name, make in inner.items()}}
    if pa.types.is_map(kind):
        keys, items = _make_shortener(kind.key_type), _make_shortener(kind.item_type)
        return lambda value: (
            value and [(keys(key) if keys else key, items(item) if items else item) for key, item in value]
        )
    [shorten] = inner.values()
    return lambda value: value and [shorten(element) for element in value]


def _has_non_finite(column: pa.Array | pa.ChunkedArray) -> bool:
    """Return whether a column may hold NaN or infinity; True for nested floats, which are not examined."""
    if pa.types.is_floating(column.type):
        values = column.cast(pa.float64()) if column.type == pa.float16() else column
        return pc.any(pc.invert(pc.is_finite(values))).as_py() is True
    return _holds(column.type, pa.types.is_floating)


def _name_non_finite(value: Any) -> Any:
    """Replace non-finite floats in a value by text, since JSON has no numbers for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, (list, tuple)):
        return [_name_non_finite(inner) for inner in cast("Iterable[Any]", value)]
    if isinstance(value, dict):
        return {name: _name_non_finite(inner) for name, inner in cast("dict[str, Any]", value).items()}
    return value


def _encode_other(value: Any) -> Any:
    """Convert a value of a type that orjson does not support."""
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case decimal.Decimal():
            return orjson.Fragment(format(value, "f"))
        case dt.timedelta():
            # A pandas Timedelta has nanoseconds in addition to the fields that it inherits.
            nanoseconds = (value.days * 86400 + value.seconds) * 10**9 + value.microseconds * 1000
            nanoseconds += getattr(value, "nanoseconds", 0)
            whole, fraction = divmod(abs(nanoseconds), 10**9)
            sign = "-" if nanoseconds < 0 else ""
            return orjson.Fragment(f"{sign}{whole}.{fraction:09d}".rstrip("0").rstrip("."))
        case dt.datetime():  # A pandas Timestamp, which has nanoseconds.
            return value.isoformat()
        case tuple():  # Months, days and nanoseconds of an interval.
            return list(value)
        case _:
            raise TypeError(type(value).__name__)


def _unwrap_json(value: Any, kind: pa.DataType) -> Any:
    """Turn the JSON texts inside a value into JSON fragments."""
    if value is None or not _holds(kind, _is_json):
        return value
    if _is_json(kind):
        return orjson.Fragment(value)
    if pa.types.is_struct(kind):
        fields = map(kind.field, range(kind.num_fields))
        return {field.name: _unwrap_json(value[field.name], field.type) for field in fields}
    return [_unwrap_json(element, kind.field(0).type) for element in value]
