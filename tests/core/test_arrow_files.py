"""Tables as Arrow files: they come back as they were, and equal tables have equal bytes."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.arrow_files import decode_table, encode_table, is_arrow_file, read_schema

TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int": (pa.int32(), st.integers(-5, 5)),
    "float": (pa.float64(), st.floats(allow_nan=False)),
    "flag": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.text(max_size=4)),
    "bytes": (pa.large_binary(), st.binary(max_size=4)),
    "hash": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "nothing": (pa.null(), st.none()),
    "ids": (pa.list_(pa.int32()), st.lists(st.integers(0, 9) | st.none(), max_size=4)),
    "mask": (pa.list_(pa.bool_()), st.lists(st.booleans(), max_size=11)),
    "likeliest": (
        pa.list_(pa.list_(pa.float16(), 2)),
        st.lists(st.lists(st.integers(-9, 0) | st.none(), min_size=2, max_size=2), max_size=4),
    ),
    "names": (pa.large_list(pa.string()), st.lists(st.text(max_size=3) | st.none(), max_size=3)),
}


@st.composite
def tables(draw: st.DrawFn) -> dict[str, pa.Array]:
    rows = draw(st.integers(0, 20))
    return {
        name: pa.array(draw(st.lists(values | st.none(), min_size=rows, max_size=rows)), kind)
        for name, (kind, values) in TYPES.items()
    }


def spoil(array: pa.Array) -> pa.Array:
    """Return an equal array with other bytes under its nulls and behind its end, cut out of a longer one."""
    kind, rows = array.type, len(array)
    if pa.types.is_null(kind):
        return array
    valid = np.concatenate((array.is_valid().to_numpy(zero_copy_only=False), [True, True, True]))
    filler = next(one for one in (True, 7, 7.5, "abc", b"abc", [1], [True], ["abc"], [[7.0, None]]) if _fits(one, kind))
    filled = pa.array([filler if one is None else one for one in array.to_pylist()] + [filler] * 3, kind)
    bits = pa.py_buffer(np.packbits(np.concatenate((valid, np.ones(-len(valid) % 8, bool))), bitorder="little"))
    children = [filled.values] if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    own = filled.buffers()[1 : 2 if children else None]
    return pa.Array.from_buffers(kind, rows + 3, [bits, *own], children=children).slice(0, rows)


def _fits(value: object, kind: pa.DataType) -> bool:
    try:
        return pa.array([value], kind).to_pylist() == [value]
    except (pa.ArrowException, TypeError):
        return False


@pytest.mark.slow
@given(tables(), st.integers(0, 20))
def test_equal_tables_have_equal_bytes(columns: dict[str, pa.Array], cut: int) -> None:
    table = pa.table(columns)
    spoilt = pa.table({name: spoil(array) for name, array in columns.items()})
    assert spoilt.equals(table)
    encoded = encode_table(table)
    assert encode_table(spoilt) == encoded
    # Cut in chunks that begin in the middle of a byte.
    cut = min(cut, table.num_rows)
    assert encode_table(pa.concat_tables([spoilt.slice(0, cut), spoilt.slice(cut)])) == encoded
    assert encode_table(pa.concat_tables([table.slice(cut), table.slice(0, 0)])) == encode_table(spoilt.slice(cut))


@pytest.mark.slow
@given(tables())
def test_a_table_comes_back_as_it_was(columns: dict[str, pa.Array]) -> None:
    table = pa.table(columns).replace_schema_metadata({"about": "this"})
    content = pa.py_buffer(encode_table(table))
    assert is_arrow_file(content)
    assert read_schema(content).equals(table.schema, check_metadata=True)
    assert decode_table(content, None, use_threads=False).equals(table, check_metadata=True)
    assert decode_table(content, ["text", "ids"], use_threads=False).equals(table.select(["text", "ids"]))


def test_columns_come_in_the_order_of_the_file_and_what_is_no_such_file_is_refused() -> None:
    content = pa.py_buffer(encode_table(pa.table({"a": [1], "b": [2], "c": [3]})))
    assert decode_table(content, ["c", "x", "a"], use_threads=False).to_pydict() == {"a": [1], "c": [3]}
    assert decode_table(content, ["x"], use_threads=False).num_columns == 0
    table = pa.table({"a": pa.array(["x"]).dictionary_encode()})
    with pytest.raises(TypeError, match=r"dictionary.*: no stage writes a column of this type"):
        encode_table(table)
    assert not is_arrow_file(pa.py_buffer(b"PAR1"))
    assert not is_arrow_file(pa.py_buffer(b""))
