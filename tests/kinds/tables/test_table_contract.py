"""The table contract: evidence of columns, inferred types, reading of cells, and changes."""

from decimal import Decimal
from json import dumps, loads
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError
from rowmill.kinds.tables.inference import (
    EVIDENCE,
    TableEvidence,
    build_record_schema,
    infer_contract,
    infer_sort_key,
    merge_evidence,
)
from rowmill.kinds.tables.schema import Column, RecordSchema, SortKey
from rowmill.kinds.tables.serialization import RecordDecoder, Serialiser, read_json
from rowmill.kinds.tables.table_contract import ColumnContract, TableContract, make_cell_writer, parse_declared_column
from rowmill.kinds.tables.table_drift import StoredTable, find_published_changes
from rowmill.kinds.tables.typed_cells import SourceColumn, SourceRecords, observe_records


def seen(values: list[Any], *, are_cells: bool = True) -> TableEvidence:
    if are_cells:
        return observe_records(cells_of(a=values))[0]
    return observe_records(SourceRecords.of_objects([{"a": value} for value in values]))[0]


def cells_of(**columns: list[str]) -> SourceRecords:
    count = len(next(iter(columns.values())))
    return SourceRecords({name: SourceColumn.of_cells(one) for name, one in columns.items()}, range(count), (0, count))


def column_of(values: list[Any], *, are_cells: bool = True, order: str | None = None) -> ColumnContract:
    return infer_contract(seen(values, are_cells=are_cells), {}, order=order).columns["a"]


def separators_of(values: list[Any]) -> tuple[str, str, str]:
    column = column_of(values)
    return column.type, column.decimal, column.thousands


NUMBERS = [str(i) for i in range(20)]
DECIMALS = [f"{i}.5" for i in range(20)]

# ── Types from cells ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "-20", "0"], "integer"),
        (["1", "2.50"], "number"),
        (["true", "false"], "boolean"),
        (["True", "FALSE"], "boolean"),
        (["1", "01234"], "text"),
        ([*NUMBERS, "01"], "text"),
        (["1e5", "1e-05"], "number"),
        (["-0", "+1"], "integer"),
        (["1.", ".5"], "number"),
        (["", "7"], "integer"),
        (["", ""], "text"),
        (["9" * 4300], "integer"),
        (["9" * 4301], "text"),
        (["1", "a"], "text"),
        ([*NUMBERS, "True"], "integer"),
        ([*DECIMALS, ".2", "1e-05", "NA"], "number"),
        ([*NUMBERS, "guest", "other"], "text"),
        (["NA", "US"], "text"),
        (["2024-01-15", "2024-02-01"], "date"),
        (["2024-01-15", "2024-02-01 10:00"], "datetime"),
        (["10:00", "11:30:00"], "time"),
        (["Jan 2024", "Dec 2023"], "date"),
        (["01/02/2024", "03/02/2024"], "text"),
        (["13/02/2024", "03/02/2024"], "date"),
        (["C536365", "536366"], "text"),
    ],
)
def test_type_of_a_column_follows_its_cells(cells: list[str], kind: str) -> None:
    assert column_of(cells).type == kind


@pytest.mark.parametrize(
    ("cells", "signs"),
    [
        (["1,234", "12", "1,234,567"], ("integer", ".", ",")),
        (["1,234.50", "12"], ("number", ".", ",")),
        (["1.234,50", "12"], ("number", ",", ".")),
        (["1,5", "12"], ("number", ",", "")),
        (["1 234,5", "12"], ("number", ",", " ")),
        (["1'234", "12"], ("integer", ".", "'")),
        (["1.234", "12"], ("number", ".", "")),
        (["1,234", "5,678"], ("text", ".", "")),
    ],
)
def test_separators_of_a_column_are_found_or_left_to_the_user(cells: list[str], signs: tuple[str, str, str]) -> None:
    assert separators_of(cells) == signs


def test_stray_cells_are_na_words_or_change_the_type_by_their_number() -> None:
    assert column_of([*NUMBERS, "NA", "?", "N/A"]).na == ("?", "N/A", "NA")
    assert column_of(["Namibia", "NA"]).na == ()

    many = [str(i) for i in range(10, 4000)]

    assert column_of([*many, "x", "y", "z"]).type == "integer"
    assert column_of([*many, "x", "y", "z", "w"]).type == "text"
    assert column_of([*NUMBERS[:9], "x"]).type == "text"

    days = [f"2024-01-{day:02d}" for day in range(1, 29)]

    assert column_of([*days, "soon"]).type == "text"
    assert column_of([*days, "soon"], order="a").type == "date"


# ── Types of JSON and of typed sources ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2], "integer"),
        ([1, Decimal("2.5")], "number"),
        ([True], "boolean"),
        (["1", "2"], "text"),
        (["2024-01-15"], "date"),
        ([1, "a"], "any"),
        ([[1]], "any"),
        ([None], "text"),
    ],
)
def test_json_values_keep_their_types(values: list[Any], kind: str) -> None:
    assert column_of(values, are_cells=False).type == kind


def test_contract_and_evidence_of_two_files_round_trip_and_missing_columns_are_optional() -> None:
    one = observe_records(cells_of(a=["1"], b=[""]))[0]
    other = seen(["x"])

    evidence = merge_evidence([one, other])
    columns = build_record_schema(infer_contract(evidence, {}), evidence, {}, ()).columns

    assert [(c.name, c.type, c.nullable, c.required) for c in columns] == [
        ("a", "string", False, True), ("b", "string", True, False),
    ]  # fmt: skip
    assert build_record_schema(infer_contract(evidence, {}), evidence, {}, ("b", "none")).names == ("b", "a")
    assert EVIDENCE.validate_json(EVIDENCE.dump_json(evidence)) == evidence
    assert (evidence.columns["b"].gap, evidence.columns["a"].gap) == ((1, 0), None)

    contract = infer_contract(seen([*NUMBERS, "NA"]), {}, delimiter=";", quote='"')

    assert TableContract.from_json(read_json(dumps(contract.to_json()))) == contract
    assert RecordSchema((Column("a", "integer", nullable=True),)) == build_record_schema(
        contract, seen([*NUMBERS, "NA"]), {}, ()
    )


@pytest.mark.parametrize(
    ("declared", "kind"),
    [
        ("int32", "integer"), ("double", "float"), ("decimal128(9, 2)", "decimal"), ("bool", "boolean"),
        ("large_string", "string"), ("timestamp[us, tz=UTC]", "datetime"), ("date32[day]", "date"),
        ("time64[us]", "time"), ("duration[ns]", "duration"), ("binary", "bytes"), ("list<element: int64>", "list"),
        ("struct<a: int64, b: list<item: string>>", "struct"), ("map<string, int64>", "json"),
        ("Value('int64')", "integer"), ("Value(dtype='string', id=None)", "string"),
    ],
)  # fmt: skip
def test_declared_types_are_kept(declared: str, kind: str) -> None:
    assert parse_declared_column("a", declared, nullable=False, required=True).type == kind


# ── Cells ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "cell", "written"),
    [
        ({"type": "integer"}, "17", "17"),
        ({"type": "integer"}, "+17", "17"),
        ({"type": "integer"}, " 17 ", "17"),
        ({"type": "integer"}, "017", None),
        ({"type": "integer"}, "1.0", None),
        ({"type": "integer"}, "", "null"),
        ({"type": "integer"}, "NA", None),
        ({"type": "integer", "na": ["NA"]}, "NA", "null"),
        ({"type": "integer", "on_mismatch": "na"}, "guest", "null"),
        ({"type": "integer", "thousands": ","}, "1,234", "1234"),
        ({"type": "number"}, "42.50", "42.50"),
        ({"type": "number"}, ".2", "0.2"),
        ({"type": "number"}, "1e-05", "1e-5"),
        ({"type": "number"}, "18", "18"),
        ({"type": "number"}, "inf", None),
        ({"type": "number", "decimal": ",", "thousands": "."}, "-1.234,50", "-1234.50"),
        ({"type": "number", "decimal": ","}, "1.5", None),
        ({"type": "boolean"}, "TRUE", "true"),
        ({"type": "boolean"}, "yes", None),
        ({"type": "date", "format": "%d/%m/%Y"}, "13/02/2024", '"13/02/2024"'),
        ({"type": "date", "format": "%d/%m/%Y"}, "2024-02-13", None),
        ({"type": "text"}, 'a "b" \n', '"a \\"b\\" \\n"'),
        ({"type": "text"}, "NA", '"NA"'),
    ],
)
def test_cell_is_written_as_its_contract_reads_it(options: dict[str, Any], cell: str, written: str | None) -> None:
    assert make_cell_writer(validate_options(ColumnContract, options, "column"))(cell) == written


CELLS = st.one_of(
    st.integers().map(str),
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["", "NA", "True", "false", "2024-01-15", "1,234", "1.234,5", "01", "-0", ".5", "1e5", "?"]),
    st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=8),
)


@pytest.mark.slow
@given(st.lists(CELLS, min_size=1, max_size=30))
def test_every_cell_that_is_written_reads_back_under_the_proposed_schema(cells: list[str]) -> None:
    evidence = seen(cells)
    contract = infer_contract(evidence, {})
    schema = build_record_schema(contract, evidence, {}, ())
    write, read, print_ = (
        make_cell_writer(contract.columns["a"]),
        RecordDecoder(schema),
        Serialiser(schema, special_tokens=()),
    )

    for cell in cells:
        text = write(cell)
        if text is not None:
            line = f'{{"a":{text}}}'
            record = read(read_json(line))
            assert isinstance(record, dict)
            assert print_(record) == f"{line}\n"


# ── Order ──────────────────────────────────────────────────────────────────────────────────────────


def order_of(
    values: list[Any],
    *,
    pinned: dict[str, Any] | None = None,
    timestamp_format: str = "auto",
    must_be_time: bool = False,
) -> SortKey:
    evidence = seen(values, are_cells=all(isinstance(one, str) for one in values))
    contract = infer_contract(evidence, {}, order="a")
    if pinned is not None:
        contract = validate_options(TableContract, {"columns": {"a": pinned}}, "table")
    schema = build_record_schema(contract, evidence, {}, ())
    return infer_sort_key(
        "a",
        contract,
        evidence,
        schema,
        timestamp_format=timestamp_format,
        must_be_time=must_be_time,
        is_pinned=pinned is not None,
        where="time_series.timestamp_format",
    )


@pytest.mark.parametrize(
    ("values", "name", "positions"),
    [
        (["2024-01-01", "2024-01-02"], "iso8601", [1704067200, 1704153600]),
        (["2013-01-01T06:00:00Z"], "iso8601", [1357020000]),
        (["2024-01-01 00:00:00.25+01:00"], "iso8601", [Decimal("1704063600.25")]),
        (["01/02/2024", "13/02/2024"], "%d/%m/%Y", [1706745600, 1707782400]),
        (["02/01/2024", "02/13/2024"], "%m/%d/%Y", [1706745600, 1707782400]),
        (["Jan 1 2000", "Feb 1 2000"], "%b %d %Y", [946684800, 949363200]),
        (["Jan 2000", "Feb 2000"], "%b %Y", [946684800, 949363200]),
        (["01.02.2024 08:00"], "%d.%m.%Y", [1706774400]),
        (["23:00", "00:00", "00:00:30"], "%H:%M[:%S]", [82800, 86400, 86430]),
        (["10", "9"], "elapsed_seconds", None),
        ([5, 6], "elapsed_seconds", [5, 6]),
    ],
)
def test_order_is_the_type_or_the_one_format_that_reads_every_value(
    values: list[Any], name: str, positions: list[Any] | None
) -> None:
    order = order_of(values)

    assert order.name == name
    assert positions is None or order.read_series(values) == positions


def test_order_that_is_not_clear_is_an_error_that_names_a_value() -> None:
    with pytest.raises(ConfigError, match=r"%d/%m/%Y and %m/%d/%Y both read .* disagree on '01/02/2024'"):
        order_of(["01/02/2024", "02/02/2024"])

    assert order_of(["01/01/2024", "02/02/2024"]).read_series(["02/02/2024"]) == [1706832000]

    with pytest.raises(ConfigError, match=r"iso8601 comes closest and does not read 'soon'.*as a strptime format"):
        order_of(["2024-01-01", "soon"], must_be_time=True)

    with pytest.raises(ConfigError, match="has numbers and 'first'"):
        order_of(["1", "2", "first", "last"])

    with pytest.raises(ConfigError, match="column 'a' is boolean, which has no order"):
        order_of([True])


@pytest.mark.parametrize("must_be_time", [True, False])
def test_text_does_not_order_unless_the_recipe_says_so(must_be_time: bool) -> None:
    said = r"column 'a' is text that no known time format reads, such as 'alpha'.*or `text` to sort by code points"
    with pytest.raises(ConfigError, match=said):
        order_of(["alpha", "beta"], must_be_time=must_be_time)
    assert order_of(["alpha"], pinned={"type": "text"}).name == "text"
    own = order_of(["d20240301 10"], pinned={"type": "datetime", "format": "d%Y%m%d %H"})
    assert own.read_series(["d20231201 09", "d20240301 10"]) == [1701421200, 1709287200]
    assert order_of(["alpha"], timestamp_format="text").name == "text"


# ── Changes ────────────────────────────────────────────────────────────────────────────────────────


def table_of(values: list[Any], *, are_cells: bool = True, declared: str | None = None) -> StoredTable:
    evidence, types = seen(values, are_cells=are_cells), {} if declared is None else {"a": declared}
    return StoredTable(infer_contract(evidence, types), is_pinned=False, declared=types, evidence=evidence)


def changes(before: StoredTable, after: StoredTable) -> list[tuple[str, str | None]]:
    return [(one.change, one.text) for one in find_published_changes(before, after)]


def test_equal_shapes_and_known_mismatches_are_not_a_change() -> None:
    assert changes(table_of(["1", "2.5", "NA"]), table_of(["7", "3"])) == []
    assert changes(table_of(["x", "y"]), table_of(["", ""])) == []

    stray, strays = table_of([*NUMBERS, "guest"]), table_of([*NUMBERS, "guest", *["other"] * 3])
    assert changes(stray, stray) == []
    [new] = find_published_changes(table_of(NUMBERS), stray)
    assert (new.column, new.text, new.place) == ("a", "guest", (0, 20))
    assert changes(stray, strays) == [("was integer, which 4 values do not fit (before: 1)", "guest")]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ([1, 2], [1, 2.5], ("was integer, which 1 value does not fit", "2.5")),
        ([1, 2.5], [1, 2], None),
        ([1, 2], [1, "2"], ("was integer, which 1 value does not fit", "2")),
        (["a"], ["a", 1], ("was text, which 1 value does not fit", "1")),
        (["2024-01-01"], ["2024-01-01", "soon"], ("was date as iso8601, which 1 value does not fit", "soon")),
        (["2024-01-01"], ["2024-01-01", None], None),
        ([True], [True, [1]], ("was boolean, which 1 value does not fit", "[1]")),
        ([[1]], [[1], {"b": 2}], None),
    ],
)
def test_json_values_are_compared_by_their_types(
    before: list[Any], after: list[Any], found: tuple[str, str] | None
) -> None:
    told = changes(*(table_of([{"a": one}["a"] for one in own], are_cells=False) for own in (before, after)))
    assert told == ([] if found is None else [found])


def test_typed_column_is_compared_by_its_type_whatever_its_values_look_like() -> None:
    before = table_of([1.5, "NaN"], are_cells=False, declared="double")
    assert changes(before, table_of([1.5, *["Infinity"] * 5], are_cells=False, declared="float")) == []
    told = changes(before, table_of([True], are_cells=False, declared="bool"))
    assert told == [("was number, and its values now read as boolean", "True")]


def test_stored_table_is_read_back_with_an_example_of_each_shape() -> None:
    stored = table_of([*NUMBERS, "2.5", "NA", "13/02/2024"]).to_json()
    assert loads(dumps(stored)) == stored
    assert {len(one["examples"]) for one in stored["evidence"]["columns"]["a"]["cells"].values()} == {1}


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (NUMBERS, [*NUMBERS, "2.5"], "2.5"),
        (["a", "b"], ["1", "2"], "1"),
        (["13/02/2024"], ["02/13/2024"], "02/13/2024"),
        (["1.5"], ["1,5"], "1,5"),
        (["1.5"], ["1.5", "NA"], "NA"),
    ],
)
def test_column_of_another_type_is_a_change_that_names_the_cell(before: list[str], after: list[str], text: str) -> None:
    [(_, found)] = changes(table_of(before), table_of(after))

    assert found == text


# ── Options ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"type": "date"}, "a column of type date needs a format"),
        ({"type": "text", "format": "iso8601"}, "a column of type text takes no format"),
        ({"type": "date", "format": "yyyy"}, "'yyyy' is not a format"),
        ({"type": "number", "decimal": ",", "thousands": ","}, "cannot be combined"),
        ({"type": "text", "decimal": ","}, "a column of type text has no separators"),
        ({"type": "string"}, "must be integer, number, boolean"),
    ],
)
def test_invalid_column_contract_error_says_what_is_valid(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate_options(ColumnContract, options, "table.columns.a")


ODD_CELLS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", " ", "NA", "nan", "-inf", "1,5", "1.234", "01", "2024-01-15", "1/2/2024", "true", "5e-324", "\u00a0", "?"]
    ),
    st.from_regex(r"[+-]?[0-9]{0,4}[.,eE ']?[0-9]{0,4}", fullmatch=True),
)


@given(
    st.dictionaries(st.text(max_size=5), st.lists(ODD_CELLS, min_size=3, max_size=3), min_size=1, max_size=3),
    st.characters(exclude_characters="\r\n"),
    st.characters(exclude_characters="\r\n"),
    st.booleans(),
)
def test_contract_of_any_cells_is_one_and_reads_them(
    columns: dict[str, list[str]], delimiter: str, quote: str, is_order: bool
) -> None:
    records = cells_of(**columns)
    [evidence] = observe_records(records)
    order = next(iter(columns)) if is_order else None

    contract = infer_contract(evidence, {}, order=order, delimiter=delimiter, quote=quote)

    assert TableContract.from_json(loads(dumps(contract.to_json()))) == contract
    schema = build_record_schema(contract, evidence, {}, ())
    for name, texts in columns.items():
        written = [make_cell_writer(contract.columns[name])(text) for text in records.columns[name].distinct]
        assert None not in written or len(set(texts)) > 1
        # What is written as a number is read back as the same number.
        for text in written:
            if text is not None:
                assert schema.by_name[name].nullable or text != "null"
                loads(text, parse_float=Decimal)
