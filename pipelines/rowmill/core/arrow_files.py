"""Tables as Arrow files: equal tables have equal bytes, because files are named by digests of their content.

Arrow leaves the values of null slots, and what lies behind the last value, as they happened to be in memory, and its
writer takes some of it along. `encode_table` writes zeros there, or nothing.

What it costs beside Parquet is in decision 36.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmill.core.arrays import compute_offsets

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
    import pyarrow.compute as pc

    kind, types, count = array.type, pa.types, len(array)
    if not count or types.is_null(kind):
        return pa.nulls(count, kind)
    validity = _pack_bits(array.is_valid()) if array.null_count else None
    is_wide = types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
    offset_type = np.dtype(np.int64 if is_wide else np.int32)
    if types.is_list(kind) or types.is_large_list(kind):
        # A null holds no values.
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        offsets = pa.py_buffer(compute_offsets(lengths).astype(offset_type))
        return pa.Array.from_buffers(kind, count, [validity, offsets], children=[_clear_unused_bits(array.flatten())])
    if types.is_boolean(kind):
        return pa.Array.from_buffers(kind, count, [validity, _pack_bits(pc.fill_null(array, fill_value=False))])
    if types.is_string(kind) or types.is_binary(kind) or is_wide:
        # `fill_null` makes arrays of its own, so what lies under nulls is gone.
        filled = array.fill_null("" if types.is_string(kind) else b"") if array.null_count else array
        _, places, data = filled.buffers()
        ends = np.frombuffer(places, offset_type, count + 1, filled.offset * offset_type.itemsize)
        characters = pa.py_buffer(b"") if data is None else data.slice(int(ends[0]), int(ends[-1] - ends[0]))
        return pa.Array.from_buffers(kind, count, [validity, pa.py_buffer(ends - ends[0]), characters])
    if types.is_fixed_size_list(kind) and not array.null_count:
        values = array.values.slice(array.offset * kind.list_size, count * kind.list_size)
        return pa.Array.from_buffers(kind, count, [None], children=[_clear_unused_bits(values)])
    if not (types.is_primitive(kind) or types.is_fixed_size_binary(kind)):
        raise TypeError(f"{kind}: no stage writes a column of this type; add it to rowmill.core.arrow_files")
    width = kind.bit_width // 8
    content = array.buffers()[1].slice(array.offset * width, count * width)
    if array.null_count:
        values = np.frombuffer(content, np.uint8).copy().reshape(-1, width)
        values[array.is_null().to_numpy(zero_copy_only=False)] = 0
        content = pa.py_buffer(values)
    return pa.Array.from_buffers(kind, count, [validity, content])


def _pack_bits(flags: pa.BooleanArray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags.to_numpy(zero_copy_only=False), bitorder="little"))


def encode_parquet(table: pa.Table) -> bytes:
    """Return a table as a Parquet file, for what other programs read, too."""
    buffer = BytesIO()
    pq.write_table(table, buffer, compression="zstd", compression_level=1)
    return buffer.getvalue()
