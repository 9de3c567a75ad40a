"""Parquet: one record per row, whatever the columns are."""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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


def _encode_parquet_rows(stream: BinaryIO, url: str, options: FileOptions) -> Iterator[bytes]:
    done = 0
    with _open_parquet(stream, url, options.is_seekable) as file:
        require_columns(url, file.schema_arrow.names, options.limits.max_columns)
        require_expansion(url, *_sum_column_sizes(file), options.limits.max_expansion)
        names = set(file.schema_arrow.names)
        added = {name: value for name, value in read_folder_columns(url).items() if name not in names}
        batches = file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except SourceError:
                raise
            except (pa.ArrowException, OSError) as error:
                raise _unreadable_error(url, f"after {done:,} rows: {error}") from error
            if batch is None:
                return
            yield from encode_batch(batch, keeps_non_finite=options.keeps_non_finite, added=added)
            done += batch.num_rows


def _sum_column_sizes(file: pq.ParquetFile) -> tuple[int, int]:
    """Return the decompressed and the compressed size of the columns."""
    groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    return sum(chunk.total_uncompressed_size for chunk in chunks), sum(chunk.total_compressed_size for chunk in chunks)


@contextmanager
def _open_parquet(stream: BinaryIO, url: str, seekable: bool) -> Generator[pq.ParquetFile, None, None]:
    """Open a file; a compressed one is spooled to disk first, since Parquet is read from its end."""
    with open_seekable(stream, is_seekable=seekable) as content:
        try:
            file = pq.ParquetFile(content, pre_buffer=False)
        except SourceError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise _unreadable_error(url, str(error)) from error
        require_distinct_names(url, file.schema_arrow.names)
        yield file


def require_distinct_names(url: str, names: Sequence[str]) -> None:
    """Refuse a file that has two columns of one name."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise SchemaError(f"{url}: two columns are named {twice[0]!r}; names must differ; rename one")


def _unreadable_error(url: str, why: str) -> SourceError:
    return SourceError(
        f"{url}: not readable as Parquet ({' '.join(why.split())}); expected a complete Parquet file; "
        "fetch or write the file again"
    )


class _Parquet(FileFormat):
    def note_options(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> FileScan:
        return replace(scan, keeps_non_finite=file.keeps_non_finite)

    def is_current(self, scan: FileScan, file: FileOptions) -> bool:
        return super().is_current(scan, file) and scan.keeps_non_finite == file.keeps_non_finite

    def cut_parts(self, stream: BinaryIO, scan: FileScan, file: FileOptions) -> Iterator[PartContent]:
        return cut_rows(_encode_parquet_rows(stream, scan.url, file), file.limits.max_record_bytes)

    def read_columns(self, scan: FileScan, file: FileOptions, open_stream: OpenStream) -> dict[str, str]:
        with open_stream() as stream, _open_parquet(stream, scan.url, file.is_seekable) as content:
            declared = {field.name: str(field.type) for field in content.schema_arrow}
            return declared | {name: "string" for name in read_folder_columns(scan.url) if name not in declared}


FORMAT = _Parquet("parquet", version=1, suffixes=(".parquet",), is_seekable=True, is_arrow=True)
