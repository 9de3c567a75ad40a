"""Tables as Arrow files: equal tables have equal bytes, because files are named by digests of their content.

Arrow leaves the values of null slots, and what lies behind the last value, as they happened to be in memory, and its
writer takes some of it along. `encode_table` writes zeros there, or nothing.

What it costs beside Parquet is in decision 36.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

SUFFIX = ".arrow"
_MAGIC = b"ARROW1"
_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1), use_threads=False)


def make_required_schema(**columns: pa.DataType) -> pa.Schema:
    """Return a schema of columns that cannot be null."""
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def encode_table(table: pa.Table) -> bytes:
    """Return a table as an Arrow file of one batch, compressed with zstd.

    Raises TypeError if a column has a type that no stage writes, such as a dictionary.
    """
    joined = [column.chunk(0) if column.num_chunks == 1 else column.combine_chunks() for column in table.columns]
    columns = [_clear_unused_bits(cast("pa.Array", array)) for array in joined]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=_OPTIONS) as writer:
        if table.num_rows:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=table.schema))
    return cast(bytes, sink.getvalue().to_pybytes())


def is_arrow_file(content: pa.Buffer) -> bool:
    """Return whether some bytes begin as an Arrow file does."""
    return content.slice(0, min(len(_MAGIC), content.size)).to_pybytes() == _MAGIC


def decode_table(content: pa.Buffer, columns: Sequence[str] | None, *, use_threads: bool) -> pa.Table:
    """Return a table, or some columns of it in the file's order; other columns are not decompressed.

    As with Parquet, a column that the file lacks is left out.
    """
    chosen = None
    if columns is not None:
        wanted = {*columns}
        chosen = [place for place, name in enumerate(read_schema(content).names) if name in wanted]
    options = pa.ipc.IpcReadOptions(included_fields=chosen, use_threads=use_threads)
    table = pa.ipc.open_file(pa.BufferReader(content), options=options).read_all()
    # Arrow takes an empty list of columns for all.
    return table.select([]) if chosen == [] else table


def read_schema(content: pa.Buffer) -> pa.Schema:
    """Return the schema of an Arrow file."""
    return pa.ipc.open_file(pa.BufferReader(content)).schema


def _clear_unused_bits(array: pa.Array) -> pa.Array:
    """Return an equal array that holds its values and nothing else: zeros under nulls, no bytes behind its end."""
    kind = array.type
    if not len(array) or pa.types.is_null(kind):
        return pa.nulls(len(array), kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _clear_list(cast("pa.ListArray[Any]", array))
    if pa.types.is_boolean(kind):
        import pyarrow.compute as pc

        bits = pc.fill_null(array, fill_value=False) if array.null_count else array
        if bits.offset % 8:
            packed = _pack_bits(bits.to_numpy(zero_copy_only=False))
        else:
            packed = _end_bits(bits.buffers()[1], bits.offset // 8, len(bits))
        return pa.Array.from_buffers(kind, len(array), [_pack_validity(array), packed])
    if _is_text(kind) and array.null_count == len(array):
        # Most tables have some columns of texts that are all null.
        width = 8 if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) else 4
        sizes = (-(-len(array) // 8), (len(array) + 1) * width, 0)
        empty = [pa.py_buffer(bytes(size)) for size in sizes]
        return pa.Array.from_buffers(kind, len(array), empty, null_count=len(array))
    if _is_text(kind):
        # `fill_null` makes arrays of its own, so what lies under nulls is gone.
        filled = array.fill_null("" if pa.types.is_string(kind) else b"") if array.null_count else array
        offsets, first, last = _cut_offsets(filled)
        data = filled.buffers()[2]
        characters = pa.py_buffer(b"") if data is None else data.slice(first, last - first)
        return pa.Array.from_buffers(kind, len(array), [_pack_validity(array), offsets, characters])
    if pa.types.is_fixed_size_list(kind) and not array.null_count:
        values = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return pa.Array.from_buffers(kind, len(array), [None], children=[_clear_unused_bits(values)])
    if not (pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind)):
        raise TypeError(f"{kind}: no stage writes a column of this type; add it to rowmill.core.arrow_files")
    width = kind.bit_width // 8
    content = array.buffers()[1].slice(array.offset * width, len(array) * width)
    if array.null_count:
        values = np.frombuffer(content, np.uint8).copy().reshape(-1, width)
        values[array.is_null().to_numpy(zero_copy_only=False)] = 0
        content = pa.py_buffer(values)
    return pa.Array.from_buffers(kind, len(array), [_pack_validity(array), content])


def _clear_list(array: "pa.ListArray[Any]") -> pa.Array:
    """Return an equal array of lists: a null holds no values."""
    import pyarrow.compute as pc

    if array.null_count:
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        starts = np.zeros(len(array) + 1, np.int64 if pa.types.is_large_list(array.type) else np.int32)
        np.cumsum(lengths, out=starts[1:])
        offsets, values = pa.py_buffer(starts), array.flatten()
    else:
        offsets, first, last = _cut_offsets(array)
        values = array.values.slice(first, last - first)
    buffers = [_pack_validity(array), offsets]
    return pa.Array.from_buffers(array.type, len(array), buffers, children=[_clear_unused_bits(values)])


def _cut_offsets(array: pa.Array) -> tuple[pa.Buffer, int, int]:
    """Return the offsets of texts or lists from 0 on, and the first and last value that they held."""
    kind = array.type
    is_wide = pa.types.is_large_list(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    width = 8 if is_wide else 4
    held = array.buffers()[1].slice(array.offset * width, (len(array) + 1) * width)
    offsets = np.frombuffer(held, np.int64 if is_wide else np.int32)
    first, last = int(offsets[0]), int(offsets[-1])
    return (pa.py_buffer(offsets - offsets[0]) if first else held), first, last


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind)


def _pack_validity(array: pa.Array) -> pa.Buffer | None:
    if not array.null_count:
        return None
    if array.offset % 8:
        return _pack_bits(array.is_valid().to_numpy(zero_copy_only=False))
    return _end_bits(array.buffers()[0], array.offset // 8, len(array))


def _end_bits(held: pa.Buffer, first_byte: int, count: int) -> pa.Buffer:
    """Return `count` bits from a byte on, with zeros behind the last one."""
    held = held.slice(first_byte, -(-count // 8))
    if not count % 8:
        return held
    values = np.frombuffer(held, np.uint8).copy()
    values[-1] &= (1 << count % 8) - 1
    return pa.py_buffer(values)


def _pack_bits(values: "NDArray[np.bool_]") -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def encode_parquet(table: pa.Table) -> bytes:
    """Return a table as a Parquet file, for what other programs read, too."""
    buffer = BytesIO()
    pq.write_table(table, buffer, compression="zstd", compression_level=1)
    return buffer.getvalue()
