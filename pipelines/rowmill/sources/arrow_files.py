"""Arrow files: one record per row; those that `datasets` writes with `save_to_disk`, and Feather."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

import pyarrow as pa

from rowmill.core.errors import SourceError
from rowmill.sources.arrow_rows import encode_batch
from rowmill.sources.encodings import open_seekable
from rowmill.sources.file_format import FileFormat, FileOptions, OpenStream
from rowmill.sources.limits import require_columns
from rowmill.sources.parquet import require_distinct_names
from rowmill.sources.parts import FileScan, PartContent, cut_rows
from rowmill.sources.urls import read_folder_columns

_BATCH_ROWS = 256
_FILE_MAGIC = b"ARROW1"


@contextmanager
def _open_batches(
    stream: BinaryIO, url: str, *, is_seekable: bool
) -> Generator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Give a file's schema and its batches; an error in either is a `SourceError`."""
    done = 0

    def iterate(reader: pa.RecordBatchStreamReader | pa.RecordBatchFileReader) -> Iterator[pa.RecordBatch]:
        nonlocal done
        count = reader.num_record_batches if isinstance(reader, pa.RecordBatchFileReader) else None
        batches = iter(reader) if count is None else map(reader.get_batch, range(count))
        for batch in batches:
            batch.validate()
            yield batch
            done += batch.num_rows

    with open_seekable(stream, is_seekable=is_seekable) as content:
        try:
            magic = content.read(len(_FILE_MAGIC))
            content.seek(0)
            reader = pa.ipc.open_file(content) if magic == _FILE_MAGIC else pa.ipc.open_stream(content)
            require_distinct_names(url, reader.schema.names)
            yield reader.schema, iterate(reader)
        except SourceError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{url}: not readable as Arrow after {done:,} rows ({' '.join(str(error).split())}); expected a "
                "complete Arrow stream or file; fetch or write the file again"
            ) from error


class _Arrow(FileFormat):
    def note_options(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> FileScan:
        return replace(scan, keeps_non_finite=file.keeps_non_finite)

    def is_current(self, scan: FileScan, file: FileOptions) -> bool:
        return super().is_current(scan, file) and scan.keeps_non_finite == file.keeps_non_finite

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: FileOptions) -> Iterator[PartContent]:
        return cut_rows(self._encode_rows(stream, scan.url, file), file.limits.max_record_bytes)

    def _encode_rows(self, stream: BinaryIO, url: str, file: FileOptions) -> Iterator[bytes]:
        with _open_batches(stream, url, is_seekable=file.is_seekable) as (schema, batches):
            require_columns(url, schema.names, file.limits.max_columns)
            added = {name: value for name, value in read_folder_columns(url).items() if name not in schema.names}
            for batch in batches:
                for begin in range(0, batch.num_rows, _BATCH_ROWS):
                    rows = batch.slice(begin, _BATCH_ROWS)
                    yield from encode_batch(rows, keeps_non_finite=file.keeps_non_finite, added=added)

    def read_columns(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> dict[str, str]:
        with open_stream() as stream, _open_batches(stream, scan.url, is_seekable=file.is_seekable) as (schema, _):
            declared = {field.name: str(field.type) for field in schema}
            return declared | {name: "string" for name in read_folder_columns(scan.url) if name not in declared}


FORMAT = _Arrow("arrow", suffixes=(".arrow", ".feather"), is_seekable=True, is_arrow=True)
