"""Hypothesis strategies: schemas, and records of a schema."""

from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from rowmill.kinds.tables.schema import (
    TYPES,
    Column,
    RecordSchema,
    canonical_datetime,
    canonical_duration,
    canonical_time,
)

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<<a", "<a")


def _not_one_character(text: str) -> bool:
    """Tell whether no two lone surrogates are adjacent, which JSON reads as one character."""
    return not any("\ud800" <= a <= "\udbff" and "\udc00" <= b <= "\udfff" for a, b in pairwise(text))


texts = st.one_of(
    st.text(max_size=8),
    st.text(alphabet='<>/s|ima"\\\x00\n漢\u2028é', max_size=12),
    st.sampled_from([*SPECIAL, "a</s>b", "<<a<a", "</", "<|im_end|></s>"]),
    st.text(alphabet="a\ud800\udfff\ud8ff", max_size=4).filter(_not_one_character),
)
integers = st.one_of(st.integers(), st.integers(min_value=-(10**4299), max_value=10**4299))
decimals = st.builds(
    lambda sign, digits, exponent: Decimal((sign, digits, exponent)),
    st.integers(0, 1),
    st.lists(st.integers(0, 9), min_size=1, max_size=40).map(lambda digits: tuple(_trimmed(digits))),
    st.integers(-500, 50),
)
_offsets = st.one_of(
    st.none(), st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
)
datetimes = st.datetimes(timezones=_offsets).map(datetime.isoformat).map(canonical_datetime)
MIXED = st.recursive(
    st.one_of(st.none(), st.booleans(), integers, decimals, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "integer": integers,
    "float": st.floats(),
    "decimal": decimals,
    "boolean": st.booleans(),
    "string": texts,
    "datetime": datetimes,
    "date": st.dates().map(date.isoformat),
    "time": st.times().map(time.isoformat).map(canonical_time),
    "duration": st.decimals(-(10**9), 10**9, places=9).map(canonical_duration),
    "bytes": st.binary(max_size=8),
    "json": MIXED,
}


def _trimmed(digits: list[int]) -> list[int]:
    """Drop zeros before the first other digit, which a number does not keep."""
    start = next((index for index, digit in enumerate(digits) if digit), len(digits) - 1)
    return digits[start:]


def columns(name: str, depth: int = 2) -> st.SearchStrategy[Column]:
    """Draw a column of any type."""
    scalar = st.builds(
        Column, st.just(name), st.sampled_from(sorted(VALUES)), nullable=st.booleans(), required=st.booleans()
    )
    if depth == 0:
        return scalar
    inner = columns("item", depth - 1)
    listed = st.builds(
        Column, st.just(name), st.just("list"), nullable=st.booleans(), required=st.booleans(), item=inner
    )
    fields = st.lists(texts, max_size=3, unique=True).flatmap(
        lambda names: st.tuples(*(columns(one, depth - 1) for one in names))
    )
    struct = st.builds(
        Column, st.just(name), st.just("struct"), nullable=st.booleans(), required=st.booleans(), fields=fields
    )
    return st.one_of(scalar, scalar, listed, struct)


def schemas() -> st.SearchStrategy[RecordSchema]:
    """Draw a schema of one to four columns."""
    names = st.lists(texts, min_size=1, max_size=4, unique=True)
    return names.flatmap(lambda chosen: st.tuples(*map(columns, chosen))).map(RecordSchema)


def values(column: Column) -> st.SearchStrategy[Any]:
    """Draw a value of a column."""
    if column.item is not None:
        typed = st.lists(values(column.item), max_size=3)
    elif column.type == "struct":
        typed = records(column.fields)
    else:
        typed = VALUES[column.type].filter(lambda value: value is not None)
    return st.none() | typed if column.nullable else typed


def records(columns_: tuple[Column, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a record, keys in the order of its columns."""
    required = {one.name: values(one) for one in columns_ if one.required}
    optional = {one.name: values(one) for one in columns_ if not one.required}
    return st.fixed_dictionaries(required, optional=optional).map(
        lambda drawn: {one.name: drawn[one.name] for one in columns_ if one.name in drawn}
    )


def schemas_with_record() -> st.SearchStrategy[tuple[RecordSchema, dict[str, Any]]]:
    """Draw a schema and a record of it."""
    return schemas().flatmap(lambda schema: st.tuples(st.just(schema), records(schema.columns)))


assert {*VALUES, "list", "struct"} == {*TYPES}
