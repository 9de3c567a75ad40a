"""Check the files that a published build names, before a token of them reaches a trainer.

    file ─► footer: rows, size, identity card                 verify: the digest of every byte as well

The cheap check reads only footers. A Parquet footer holds the position of every column chunk, and so the length that
its file must have; the card in it names order, rank and tokenizer. Changed tokens in a file of the right length are
found by `verify`, which reads everything once.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.errors import IntegrityError, PipelineError
from rowmill.core.remote import read_end, read_range
from rowmill.core.storage import Store, digest_bytes, digest_file

# A Parquet file ends with its footer's length and four magic bytes.
_PARQUET_TAIL_BYTES = 8

FIRST_END_BYTES = 64 << 10
"""What is read of the end of a remote file: the footer, which has some 40 KB in a shard of two million tokens. A longer
one takes two requests more."""


class Shard(NamedTuple):
    """A file of sequences, or an index of them, as `current.json` names it: a tuple, since a build may have 10⁵."""

    path: str
    rows: int
    digest: str


class ExpectedShard(NamedTuple):
    """A shard, and values that its identity card must have."""

    shard: Shard
    card: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class ShardFooter:
    """What a checked shard's footer says: row group g has the rows `[offsets[g], offsets[g + 1])`."""

    metadata: Any
    offsets: Ints
    columns: frozenset[str]
    size_bytes: int

    @property
    def memory_bytes(self) -> int:
        """The memory of the footer as Arrow holds it: measured 280 KB for 42 KB in a file."""
        return 7 * int(self.metadata.serialized_size)


def _read_footer(store: Store, path: str) -> tuple[Any, pa.Schema, int]:
    """Return a shard's metadata, its schema and its size; of a remote file, only its end is read."""
    if store.is_local:
        # Arrow reads a local file itself, not through Python.
        with pq.ParquetFile(store.path(path)) as opened:
            return opened.metadata, opened.schema_arrow, os.path.getsize(store.path(path))
    end, size_bytes = read_end(store.path(path), store.address(path), FIRST_END_BYTES)
    needed = int.from_bytes(end[-_PARQUET_TAIL_BYTES:-4], "little") + _PARQUET_TAIL_BYTES
    if len(end) < min(needed, size_bytes):
        end, size_bytes = read_end(store.path(path), store.address(path), needed)
    # What is before the footer is not looked at, so it may be absent.
    with pq.ParquetFile(pa.BufferReader(end)) as opened:
        return opened.metadata, opened.schema_arrow, size_bytes


def check_shard(store: Store, expected: ExpectedShard, *, verify: bool) -> ShardFooter:
    """Check a shard by its footer, with `verify` by its digest too.

    Raises
    ------
    IntegrityError
        If it is missing or truncated, belongs to another order, rank, dataset or tokenizer, or (`verify`) has another
        digest than the published one.

    """
    shard, where = expected.shard, store.path(expected.shard.path)
    try:
        metadata, schema, size_bytes = _read_footer(store, shard.path)
    except FileNotFoundError:
        raise_missing(where)
    except (pa.ArrowInvalid, OSError) as error:
        raise IntegrityError(f"{where}: not a readable Parquet file ({error}); remove it and build again") from error
    _require_equal(where, "rows", metadata.num_rows, shard.rows)
    _require_equal(where, "bytes", size_bytes, _compute_size_by_footer(metadata))
    card = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    for name, value in expected.card.items():
        _require_equal(where, name, card.get(f"rowmill.{name}"), value)
    if verify:
        _require_equal(where, "digest", _digest_shard(store, shard.path), shard.digest)
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return ShardFooter(metadata, compute_offsets(groups), frozenset(schema.names), size_bytes)


def read_row_group(store: Store, path: str, footer: ShardFooter, group: int, columns: Sequence[str]) -> pa.Table:
    """Read columns of one row group of a checked shard.

    Raises
    ------
    IntegrityError
        If the file is missing by now, or the row group cannot be decoded.

    """
    try:
        source = store.path(path) if store.is_local else _fetch_columns(store, path, footer, group, columns)
        # Not buffered before: Arrow's own threads would do that, which may let go of a Python object only when the
        # interpreter is ending, and that aborts the process. The columns are in memory already, or in a local file.
        file = pq.ParquetFile(source, metadata=footer.metadata, pre_buffer=False)
        try:
            return file.read_row_group(group, columns=list(columns), use_threads=False).combine_chunks()
        finally:
            file.close(force=True)
    except FileNotFoundError:
        raise_missing(store.path(path))
    except PipelineError:
        # The storage does not answer, which says nothing about the file.
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise IntegrityError(
            f"{store.path(path)}: row group {group} cannot be read ({' '.join(str(error).split())}); it must be as the "
            "build wrote it; copy it again, or remove it and build again"
        ) from error


def _fetch_columns(store: Store, path: str, footer: ShardFooter, group: int, columns: Sequence[str]) -> pa.BufferReader:
    """Fetch columns of a row group, and what is between them, in one request.

    Opening the file would take three, and read ahead what is not wanted. The bytes come back at their place in memory
    as long as the file, of which the other pages are never touched.
    """
    chunks = _list_chunks(footer.metadata, group)
    wanted = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
    begin = min(_find_column_start(chunk) for chunk in wanted)
    end = max(_find_column_start(chunk) + chunk.total_compressed_size for chunk in wanted)
    whole = mmap.mmap(-1, footer.size_bytes)
    whole[begin:end] = read_range(store.path(path), store.address(path), begin, end)
    return pa.BufferReader(pa.py_buffer(whole))


def raise_missing(where: str) -> NoReturn:
    """Raise the error for a file that is not there."""
    raise IntegrityError(f"{where}: missing; current.json names it; copy the whole folder, or build again")


def _require_equal(where: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise IntegrityError(f"{where}: {what} {found}, but {expected} was published; remove the file and build again")


def _compute_size_by_footer(metadata: Any) -> int:
    # Row groups are written one after the other: the last one ends where the footer begins.
    last = _list_chunks(metadata, metadata.num_row_groups - 1) if metadata.num_row_groups else []
    end = max((_find_column_start(column) + column.total_compressed_size for column in last), default=4)
    return int(end) + int(metadata.serialized_size) + _PARQUET_TAIL_BYTES


def _list_chunks(metadata: Any, group: int) -> list[Any]:
    row_group = metadata.row_group(group)
    return [row_group.column(i) for i in range(metadata.num_columns)]


def _find_column_start(column: Any) -> int:
    return column.data_page_offset if column.dictionary_page_offset is None else column.dictionary_page_offset


def _digest_shard(store: Store, path: str) -> str:
    return digest_file(store.local(path)) if store.is_local else digest_bytes(store.read(path))
