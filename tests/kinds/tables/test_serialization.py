"""A record's text: exact, one line, without delimiters, and decoded to an equal record."""

import json
import math
from decimal import Decimal
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.kinds.tables.schema import Column, ColumnType, RecordSchema
from rowmill.kinds.tables.serialization import RecordDecoder, RecordProblem, Serialiser, read_json
from rowmill.schema.rows import Rejected
from tests.support.record_strategies import SPECIAL, records, schemas, schemas_with_record
from tests.support.tiers import draw
from tests.support.typed_records import serialise_record


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are identical in type, digits, scale and sign of zero; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    match one:
        case float():
            return math.isnan(one) == math.isnan(other) and (math.isnan(one) or repr(one) == repr(other))
        case Decimal():
            return one.as_tuple() == other.as_tuple()
        case list():
            return len(one) == len(other) and all(map(same, one, other))
        case dict():
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        case _:
            return one == other


def one_column(kind: ColumnType, **kwargs: Any) -> RecordSchema:
    return RecordSchema((Column("x", kind, **kwargs),))


def written(value: Any, kind: ColumnType, **kwargs: Any) -> str | Rejected:
    """Return the text of a value in its line."""
    line = serialise_record({"x": value}, one_column(kind, **kwargs), special_tokens=SPECIAL)
    return line if isinstance(line, Rejected) else line.removeprefix('{"x":').removesuffix("}\n")


@pytest.mark.slow
@given(schemas_with_record())
def test_record_read_back_is_the_same_and_one_line_without_delimiters(
    drawn: tuple[RecordSchema, dict[str, Any]],
) -> None:
    schema, record = drawn
    line = Serialiser(schema, special_tokens=SPECIAL)(record)

    assert isinstance(line, str)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert not any(token in line for token in SPECIAL)
    assert same(RecordDecoder(schema)(read_json(line)), record)


@pytest.mark.slow
@settings(max_examples=draw(40))
@given(schemas())
def test_schema_as_json_reads_back(schema: RecordSchema) -> None:
    assert RecordSchema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


@pytest.mark.slow
@settings(max_examples=draw(40))
@given(st.data())
def test_record_written_again_gives_the_same_line(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    line = str(serialise_record(data.draw(records(schema.columns)), schema, special_tokens=SPECIAL))
    again = RecordDecoder(schema)(read_json(line))

    assert not isinstance(again, RecordProblem)
    assert serialise_record(again, schema, special_tokens=SPECIAL) == line


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("integer", 1180591620717411303424, "1180591620717411303424"),
        ("float", 1 / 3, "0.3333333333333333"),
        ("float", 18.0, "18.0"),
        ("float", 1e-12, "1e-12"),
        ("float", 1e20, "1e20"),
        ("float", -0.0, "-0.0"),
        ("float", math.nan, '"NaN"'),
        ("float", -math.inf, '"-Infinity"'),
        ("decimal", Decimal("42.50"), "42.50"),
        ("decimal", Decimal("0.00010"), "0.00010"),
        ("decimal", Decimal("0.00001"), "1e-5"),
        ("decimal", Decimal("5.0E-324"), "5.0e-324"),
        ("decimal", Decimal("0.000000"), "0.000000"),
        ("decimal", Decimal("1E+5"), "1e5"),
        ("decimal", Decimal("-0"), "-0e0"),
        ("decimal", Decimal("-0.0"), "-0.0"),
        ("boolean", True, "true"),
        ("string", "漢\u2028/", '"漢\u2028/"'),
        ("string", '"\\\b\f\n\r\t\x01\x7f', '"\\"\\\\\\b\\f\\n\\r\\t\\u0001\x7f"'),
        ("string", "a\ud800", '"a\\ud800"'),
        ("string", "</s>", '"\\u003c/s>"'),
        ("string", "<<a", '"\\u003c\\u003ca"'),
        ("datetime", "2024-01-15T00:00:00+02:00", '"2024-01-15T00:00:00+02:00"'),
        ("time", "01:02:03", '"01:02:03"'),
        ("duration", Decimal(90), "90"),
        ("duration", Decimal("1E-9"), "0.000000001"),
        ("bytes", b"\x00\x01", '"AAE="'),
        ("json", [1, Decimal("2.0"), None], "[1,2.0,null]"),
        ("json", {"b": True, "a": Decimal(5)}, '{"b":true,"a":5e0}'),
    ],
)
def test_value_of_each_type_is_written_as_specified(kind: ColumnType, value: Any, text: str) -> None:
    assert written(value, kind) == text


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        pytest.param("integer", 10**4300, id="integer-of-4301-digits"),
        ("integer", True),
        ("float", 1),
        ("decimal", Decimal("NaN")),
        ("string", "\ud83d\ude00"),
        ("datetime", "2024-01-15T00:00:00.50"),
        ("date", "2024-02-30"),
        ("time", "24:00:00"),
        ("duration", Decimal("1.50")),
        ("json", {1: 2}),
        ("json", math.nan),
        ("json", {"a": object()}),
    ],
)
def test_value_that_cannot_be_written_is_unserialisable(kind: ColumnType, value: Any) -> None:
    result = written(value, kind)
    assert isinstance(result, Rejected)
    assert result.reason == "unserialisable"


@pytest.mark.parametrize(("levels", "fits"), [(63, True), (64, False)])
def test_json_nested_over_64_with_its_record_is_unserialisable(levels: int, fits: bool) -> None:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    assert isinstance(written(value, "json"), str) is fits


def test_keys_are_present_and_in_order_as_the_schema_says() -> None:
    schema = RecordSchema(
        (Column("a", "integer", nullable=True), Column("b", "integer", required=False), Column("c", "integer"))
    )

    assert serialise_record({"a": None, "c": 1}, schema) == '{"a":null,"c":1}\n'
    assert RecordDecoder(schema)({"c": 1, "a": None}) == {"a": None, "c": 1}
    for record in ({"c": 1}, {"a": 1, "b": None, "c": 1}, {"a": 1}, {"a": 1, "c": None}, {"a": 1, "c": 1, "d": 1}):
        assert isinstance(serialise_record(record, schema), Rejected), record
        assert isinstance(RecordDecoder(schema)(record), RecordProblem), record

    schema = RecordSchema((Column("g", "string"), Column("t", "integer"), Column("v", "integer")))
    assert serialise_record({"v": 1, "t": 2, "g": "a"}, schema) == '{"g":"a","t":2,"v":1}\n'

    schema = RecordSchema((Column("a<s>", "integer"),))
    assert serialise_record({"a<s>": 1}, schema, special_tokens=("<s>",)) == '{"a\\u003cs>":1}\n'

    item = Column("item", "decimal", nullable=True)
    fields = (Column("a", "integer"), Column("b", "string", required=False))
    assert written([Decimal(1), Decimal("2.0"), None], "list", item=item) == "[1,2.0,null]"
    assert written({"a": 1}, "struct", fields=fields) == '{"a":1}'


@pytest.mark.parametrize(
    ("record", "kind", "token", "wire"),
    [({"x": 1}, "integer", '":', "lossless"), ({"x": "a</s>"}, "string", "</s>", "reference")],
    ids=["inside the syntax of JSON", "on the reference wire"],
)
def test_special_token_that_cannot_be_escaped_rejects_the_record(
    record: dict[str, Any], kind: ColumnType, token: str, wire: Any
) -> None:
    result = serialise_record(record, one_column(kind), special_tokens=(token,), wire=wire)
    assert isinstance(result, Rejected)
    assert result.reason == "control_token_in_content"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("integer", "1.0", 1),
        ("integer", "1e2", 100),
        ("float", "18", 18.0),
        ("float", '"Infinity"', math.inf),
        ("decimal", "5", Decimal(5)),
        ("datetime", '"2024-01-15 10:00Z"', "2024-01-15T10:00:00+00:00"),
        ("time", '"01:02:03.500"', "01:02:03.5"),
        ("duration", "9.0e1", Decimal(90)),
    ],
)
def test_value_of_each_type_is_read_as_specified(kind: ColumnType, text: str, value: Any) -> None:
    record = RecordDecoder(one_column(kind))(read_json(f'{{"x":{text}}}'))
    assert not isinstance(record, RecordProblem)
    assert same(record["x"], value)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("integer", "true", "type"),
        ("integer", "1.5", "type"),
        ("integer", "1e5000", "number_too_large"),
        ("integer", "null", "null"),
        ("float", "1e999", "number_too_large"),
        ("float", '"nan"', "type"),
        ("boolean", "1", "type"),
        ("string", "1", "type"),
        ("date", '"2024-02-30"', "type"),
        ("datetime", '"2024-01-15T25:00:00"', "type"),
        ("bytes", '"A"', "type"),
        ("bytes", '"漢"', "type"),
    ],
)
def test_value_of_another_type_has_a_reason(kind: ColumnType, text: str, reason: str) -> None:
    assert RecordDecoder(one_column(kind))(read_json(f'{{"x":{text}}}')) == RecordProblem(reason, "x")


def test_first_reason_of_the_list_wins_over_the_first_column() -> None:
    reader = RecordDecoder(RecordSchema((Column("a", "integer"), Column("b", "float"), Column("c", "integer"))))

    assert reader(read_json('{"a":"x","b":1e999,"d":1}')) == RecordProblem("number_too_large", "b")
    assert reader({"a": "x", "b": 1, "d": 1}) == RecordProblem("unknown_column", "d")
    assert reader({"a": "x", "b": None}) == RecordProblem("missing_column", "c")
    assert reader({"a": "x", "b": None, "c": 1}) == RecordProblem("null", "b")
    assert reader({"a": "x", "b": 1, "c": 1}) == RecordProblem("type", "a")


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "1e99999999999999999999", "1" * 4301, "[" * 100_000])
def test_json_that_cannot_be_read_exactly_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"no JSON|too deep|exponent|integer string conversion"):
        read_json(text)


@pytest.mark.parametrize(
    "value", [42.5, 1e-12, -1e-12, 1 / 3, 1e15, 1e16, 1e20, 1.5e300, 1e-10, 1e-16, 18.0, 0.0, math.nan, math.inf]
)
def test_reference_floats_are_printed_as_pandas_prints_them(value: float) -> None:
    peer = pd.DataFrame({"x": [value]}).to_json(orient="records", lines=True)
    assert serialise_record({"x": value}, one_column("float"), wire="reference") == peer


def test_reference_prints_dates_as_milliseconds_and_escapes_slashes() -> None:
    schema = RecordSchema(
        (
            Column("t", "datetime"),
            Column("d", "date"),
            Column("n", "integer", nullable=True),
            Column("a/b", "string"),
            Column("z", "decimal"),
            Column("l", "list", item=Column("item", "string")),
        )
    )
    times = {"t": "2024-01-15T00:00:00.5+02:00", "d": "2024-01-15"}
    record = {**times, "n": 1, "a/b": "x/y", "z": Decimal("42.50"), "l": ["/"]}

    line = str(serialise_record(record, schema, wire="reference"))

    assert line == '{"t":1705269600500,"d":1705276800000,"n":1.0,"a\\/b":"x\\/y","z":42.5,"l":["\\/"]}\n'
    read = RecordDecoder(schema, wire="reference")(read_json(line))
    assert read == {**record, "t": "2024-01-14T22:00:00.5", "z": Decimal("42.5")}
