"""Parquet and Arrow files, one record per row: those of `datasets.save_to_disk` and Feather, too."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.errors import SchemaError, SourceError
from rowmill.sources.arrow_rows import encode_batch
from rowmill.sources.encodings import open_seekable
from rowmill.sources.file_format import FileFormat, FileOptions, OpenStream
from rowmill.sources.limits import require_columns, require_expansion
from rowmill.sources.parts import FileScan, PartContent, cut_rows
from rowmill.sources.urls import read_folder_columns

_BATCH_ROWS = 256
"""Small: rows may hold megabytes each, and decoding in batches of thousands gains little."""

_FILE_MAGIC = b"ARROW1"


def _open_arrow(content: BinaryIO, url: str, file: FileOptions) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
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


def _open_parquet(content: BinaryIO, url: str, file: FileOptions) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    reader = pq.ParquetFile(content, pre_buffer=False)
    groups = [reader.metadata.row_group(index) for index in range(reader.num_row_groups)]
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    size, size_on_disk = (
        sum(chunk.total_uncompressed_size for chunk in chunks),
        sum(chunk.total_compressed_size for chunk in chunks),
    )
    require_expansion(url, size, size_on_disk, file.limits.max_expansion)
    return reader.schema_arrow, reader.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)


@dataclass(frozen=True)
class _TypedFormat(FileFormat):
    """A format whose files declare the types of their columns."""

    open_batches: Callable[[BinaryIO, str, FileOptions], tuple[pa.Schema, Iterator[pa.RecordBatch]]] = _open_arrow
    """Returns a file's schema and its batches of at most 256 rows."""

    def note_options(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> FileScan:
        return replace(scan, keeps_non_finite=file.keeps_non_finite)

    def is_current(self, scan: FileScan, file: FileOptions) -> bool:
        return super().is_current(scan, file) and scan.keeps_non_finite == file.keeps_non_finite

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: FileOptions) -> Iterator[PartContent]:
        return cut_rows(self._encode_rows(stream, scan.url, file), file.limits.max_record_bytes)

    def _encode_rows(self, stream: BinaryIO, url: str, file: FileOptions) -> Iterator[bytes]:
        with self._read_batches(stream, url, file) as (schema, batches):
            added = {name: value for name, value in read_folder_columns(url).items() if name not in schema.names}
            for batch in batches:
                yield from encode_batch(batch, keeps_non_finite=file.keeps_non_finite, added=added)

    def read_columns(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> dict[str, str]:
        with open_stream() as stream, self._read_batches(stream, scan.url, file) as (schema, _):
            declared = {field.name: str(field.type) for field in schema}
            return declared | {name: "string" for name in read_folder_columns(scan.url) if name not in declared}

    @contextmanager
    def _read_batches(
        self, stream: BinaryIO, url: str, file: FileOptions
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

        with open_seekable(stream, is_seekable=file.is_seekable) as content:
            try:
                schema, batches = self.open_batches(content, url, file)
                twice = sorted(name for name, count in Counter(schema.names).items() if count > 1)
                if twice:
                    raise SchemaError(f"{url}: two columns are named {twice[0]!r}; names must differ; rename one")
                require_columns(url, schema.names, file.limits.max_columns)
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
