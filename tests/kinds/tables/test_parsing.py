"""Parsing generated text: the specification's vectors, and invariants over any string."""

import json
from collections import Counter
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError
from rowmill.kinds.tables.parsing import (
    GeneratedTextSpec,
    ParsedText,
    Parser,
    PlacementColumns,
    Validation,
)
from rowmill.kinds.tables.schema import ELAPSED, TIME_OF_DAY, Column, Mode, RecordSchema, SortKey
from rowmill.kinds.tables.serialization import Serialiser
from rowmill.schema.generated_counts import merge_span_counts
from tests.support.record_strategies import SPECIAL, records, schemas
from tests.support.tiers import draw

BOS, EOS = "<s>", "</s>"
SCHEMA = RecordSchema((Column("g", "string"), Column("t", "integer"), Column("v", "integer")))
CLOCK = RecordSchema((Column("g", "string"), Column("t", "string"), Column("v", "integer")))
REPAIRS = tuple(Validation.model_fields)
GROUPED = PlacementColumns(group_columns=("g",), order_column="t", order=ELAPSED)


def line(g: Any = "a", t: Any = 0, v: Any = 1) -> str:
    """Write a record as the codec would, without its line end."""
    return json.dumps({"g": g, "t": t, "v": v}, separators=(",", ":"))


R = line()


def parse(text: str, mode: Mode = "tabular", place: Any = None, **options: Any) -> ParsedText:
    """Parse with the vectors' schema; validation options and flags by name."""
    repairs = {name: options.pop(name) for name in REPAIRS if name in options}
    schema = options.pop("schema", SCHEMA)
    default = {"tabular": PlacementColumns(), "grouped": GROUPED, "sequential": GROUPED}[mode]
    parser = make_parser(schema, mode, bos=BOS, eos=EOS, place=place or default, validation=Validation(**repairs))
    return parser(text, **options)


def make_parser(schema: RecordSchema, mode: Mode, **options: Any) -> Parser:
    return Parser(GeneratedTextSpec(schema=schema, mode=mode, **options))


def classes(parsed: ParsedText) -> list[str]:
    """Return the spans' classes in order, without delimiters."""
    return [span.reason or span.kind for span in parsed.spans if span.kind != "delimiter"]


def assert_partition(text: str, parsed: ParsedText) -> None:
    """Spans cover the text, each character once, and the report counts them all."""
    assert "".join(text[span.start : span.end] for span in parsed.spans) == text
    assert all(span.start < span.end for span in parsed.spans)
    items, characters = Counter[str](), Counter[str]()
    for span in parsed.spans:
        name = f"invalid:{span.reason}" if span.reason else span.kind
        items[name] += 1
        characters[name] += span.end - span.start
    assert (+Counter(parsed.report.items), +Counter(parsed.report.characters)) == (items, characters)
    assert parsed.report.valid == len(parsed.records)


# ── Each object by itself ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{R}\r\n{R}\r\n", ["record", "record"]),
        (R + R, ["record", "record"]),
        (f"{R} foo", ["record", "prose"]),
        (f'{R}\n{{"g":"a","t":', ["record", "truncated"]),
        ("{}", ["missing_column"]),
        ('{"g":"a\nb","t":0,"v":1}', ["invalid_json", "prose"]),
        ('{"g":"a","t":1.0,"v":1}', ["record"]),
        (line(t=True), ["type"]),
        ('{"g":"a","t":NaN,"v":1}', ["invalid_json"]),
        (f'{{"g":"a","t":{"1" * 5000},"v":1}}', ["number_too_large"]),
        ('{"g":"a","t":0,"v":1,"w":1}', ["unknown_column"]),
        ('{"g":"a","t":0,"t":0,"v":1}', ["duplicate_column"]),
        (f"say {{hello}} {R}", ["prose", "record"]),
        (line(g="a\u2028b"), ["record"]),
        (json.dumps({"g": "a\u2028b", "t": 0, "v": 1}, ensure_ascii=False), ["record"]),
        (R.replace("a", "\\u003c/s>"), ["record"]),
        (R.replace("a", EOS), ["invalid_json", "prose"]),
        (f'{{"g":\n"a",\r\n\t"t":0,"v":1 }}{R}', ["record", "record"]),
        (f"[{R},{R}]", ["prose", "record", "prose", "record", "prose"]),
        (f"{R[:-1]},}} {R}\n{R}", ["invalid_json", "record"]),
        (f'{{"g":"a","t":0,"v":{"[" * 64}1{"]" * 64}}}', ["too_deep"]),
        (f'{{"g":"a","t":0,"v":{"[" * 63}1{"]" * 63}}}', ["type"]),
        (f'{{"g":"a","t":0,"v":{"[" * 9999}1{"]" * 9999}}}{R}', ["too_deep", "record"]),
        ('{"g":"a","t":0,"v":1e99999999999999999999}', ["number_too_large"]),
        ('{"g":"a","t":0,"v":{"x":1,"x":2}}', ["duplicate_column"]),
        ('{"g":null,"t":0,"v":1}', ["null"]),
        ("{", ["prose"]),
        ("", []),
        ("{'g': 'a', 't': 0, 'v': 1}", ["invalid_json"]),
        ("{g: 'a', t: 0, v: 1}", ["invalid_json"]),
        ("{\u201cg\u201d: \u201ca\u201d}", ["invalid_json"]),
        (f"{{\n  'g': 'a',\n  't': 0}}\n{R}", ["invalid_json", "prose", "prose", "record"]),
        (f"as asked: {{'g': 'a'}} {R}", ["prose", "invalid_json", "record"]),
    ],
)
def test_object_in_tabular_text_has_its_class(text: str, expected: list[str]) -> None:
    parsed = parse(text)

    assert classes(parsed) == expected
    assert_partition(text, parsed)


def test_report_counts_characters_and_the_share_of_valid_objects_and_names_no_column() -> None:
    assert parse(f'{R}\n{{"g":"a","t":').report.characters["truncated"] == 13
    added = merge_span_counts([parse(R).report, parse(f"{R} so {{}}").report])
    assert (added.items["record"], added.items["invalid:missing_column"], added.characters["record"]) == (
        2,
        1,
        2 * len(R),
    )

    parsed = parse('{"g":"a","t":0,"v":1,"secret":1}')

    assert parsed.spans[0].column == "secret"
    assert "secret" not in repr(parsed.report)

    assert parse(f"prose\n{R}\n{R}\n{{}}\n{R}").report.valid_fraction == 0.75
    assert parse("prose").report.valid_fraction == 0

    as_python_prints_it = "{'g': 'a', 't': 0, 'v': 1}\n" * 99

    assert parse(as_python_prints_it + R).report.valid_fraction == 0.01


@pytest.mark.parametrize("cut", range(2, len('{"g":"\\u00e9\\n","t":-1.5e+3,"v":true,"w":[null,{}]}')))
def test_object_cut_anywhere_is_truncated_not_invalid(cut: int) -> None:
    text = '{"g":"\\u00e9\\n","t":-1.5e+3,"v":true,"w":[null,{}]}'[:cut]

    assert classes(parse(text)) == ["truncated"]


def test_decimals_of_more_digits_than_an_integer_may_have_are_kept() -> None:
    schema = RecordSchema((Column("x", "decimal"),))
    digits = f"0.{'7' * 5000}"
    parsed = parse(f'{{"x":{digits}}}', schema=schema)

    assert parsed.records == [{"x": Decimal(digits)}]


# ── Groups ─────────────────────────────────────────────────────────────────────────────────────────

GOOD5 = "".join(f"{line(t=number)}\n" for number in range(5))


@pytest.mark.parametrize(
    ("text", "repairs", "expected"),
    [
        (R * 3, (), ["group_incomplete"] * 3),
        (R * 3, ("group_by_accept_no_delineator",), ["record"] * 3),
        (f"{BOS}{R}{EOS}", (), ["record"]),
        (f"{BOS}{R}{BOS}{R}{EOS}", (), ["group_incomplete", "record"]),
        (f"{BOS}{R}{EOS}{R}{EOS}", (), ["record", "group_incomplete"]),
        (f"{BOS}{R} so {R}{EOS}", (), ["group_has_invalid", "prose", "group_has_invalid"]),
        (f"{BOS}{R} so {R}{EOS}", ("group_by_ignore_invalid_records",), ["record", "prose", "record"]),
        (f"{BOS}{line(t=None)}{R}{EOS}", (), ["null", "group_has_invalid"]),
        (f"{BOS}{R}{line('b', 5)}{EOS}", (), ["group_mixed_key"] * 2),
        (f"{BOS}{line(t=3)}{R}{EOS}{BOS}{R}{EOS}", (), ["group_unordered"] * 2 + ["record"]),
        (f"{BOS}{EOS}{BOS}{BOS}{R}{R}{EOS}", (), ["record"] * 2),
    ],
)
def test_group_is_accepted_whole_or_rejected_with_a_reason(
    text: str, repairs: tuple[str, ...], expected: list[str]
) -> None:
    parsed = parse(text, "grouped", **dict.fromkeys(repairs, True))

    assert classes(parsed) == expected
    assert_partition(text, parsed)


@pytest.mark.parametrize(
    ("text", "option", "without", "with_option"),
    [
        (f"{BOS}{GOOD5.replace('2,', 'true,')}{EOS}{BOS}{GOOD5}{EOS}", REPAIRS[1], (5, 5), (9, 1)),
        (f"{BOS}{GOOD5}{line('b', 5)}{EOS}", REPAIRS[2], (0, 6), (6, 0)),
        (f"{BOS}{line(t=3)}{GOOD5[: -len(line()) - 1]}{EOS}", REPAIRS[3], (0, 5), (5, 0)),
    ],
)
def test_repair_accepts_what_is_otherwise_rejected(
    text: str, option: str, without: tuple[int, int], with_option: tuple[int, int]
) -> None:
    off, on = parse(text, "grouped").report, parse(text, "grouped", **{option: True}).report

    assert (off.valid, off.invalid) == without
    assert (on.valid, on.invalid) == with_option


def test_repaired_group_takes_the_first_key_and_a_stable_order() -> None:
    parsed = parse(f"{BOS}{line('b', 1)}{line('a', 2)}{EOS}", "grouped", group_by_fix_non_unique_value=True)

    assert parsed.records == [{"g": "b", "t": 1, "v": 1}, {"g": "b", "t": 2, "v": 1}]

    text = f"{BOS}{line(t=2, v=1)}{line(t=1, v=2)}{line(t=2, v=3)}{line(t=1, v=4)}{EOS}"
    parsed = parse(text, "grouped", group_by_fix_unordered_records=True)

    assert [record["v"] for record in parsed.records] == [2, 4, 1, 3]

    assert parse(f"{BOS}{R}{R}{EOS}", "grouped").report.valid == 2


@pytest.mark.parametrize(
    ("text", "flags", "valid"),
    [
        (f"{R}{EOS}", {}, 0),
        (f"{R}{EOS}", {"open_at_start": True}, 1),
        (f"{BOS}{R}", {}, 0),
        (f"{BOS}{R}", {"closed_at_end": True}, 1),
        (R, {"open_at_start": True, "closed_at_end": True}, 1),
    ],
)
def test_delimiters_kept_by_prompt_or_server_are_counted(text: str, flags: dict[str, bool], valid: int) -> None:
    assert parse(text, "grouped", **flags).report.valid == valid


def test_order_value_that_is_unreadable_has_its_own_reason_and_bos_must_not_be_eos() -> None:
    place = PlacementColumns(("g",), "t", SortKey("iso8601"))
    schema = RecordSchema((Column("g", "string"), Column("t", "string", nullable=True), Column("v", "integer")))
    text = f"{BOS}{line(t='2024-01-01')}{line(t='soon')}{line(t=None)}{EOS}"

    assert classes(parse(text, "grouped", place, schema=schema)) == ["group_has_invalid", "timestamp", "order_missing"]

    with pytest.raises(ConfigError, match="with groups they must differ"):
        make_parser(SCHEMA, "grouped", bos=EOS, eos=EOS, place=GROUPED, validation=Validation())


# ── Series ─────────────────────────────────────────────────────────────────────────────────────────


def series(*times: Any, g: str = "a") -> str:
    return "".join(f"{line(g, time)}\n" for time in times)


HOURLY = PlacementColumns(("g",), "t", ELAPSED, 3600)
CLOCKED = PlacementColumns(("g",), "t", TIME_OF_DAY, 3600)


@pytest.mark.parametrize(
    ("text", "place", "after", "expected"),
    [
        (series(3600, 7200, 14400, 18000), HOURLY, 0, ["record", "record", "step", "after_failure"]),
        (series(0, 5, 6, 4), GROUPED, None, ["record", "record", "record", "order"]),
        (series(0, 0), GROUPED, None, ["record", "record"]),
        (series(0) + series(1, g="b") + series(2), GROUPED, None, ["record", "group_mixed_key", "after_failure"]),
        (series(0) + "{}" + series(1) + "{}", GROUPED, None, ["record", "missing_column", *["after_failure"] * 2]),
        (series(0) + EOS + series(1), GROUPED, None, ["record", "after_failure"]),
        (BOS + series(0) + "so" + series(1), GROUPED, None, ["record", "prose", "record"]),
        (series(3, 1), PlacementColumns(), None, ["record", "record"]),
    ],
)
def test_series_stops_at_its_first_bad_record(
    text: str, place: PlacementColumns, after: Any, expected: list[str]
) -> None:
    parsed = parse(text, "sequential", place, after=after)

    assert classes(parsed) == expected
    assert_partition(text, parsed)


def test_series_of_times_of_day_follows_the_day_of_the_position_before_it() -> None:
    parsed = parse(series("23:00", "00:00"), "sequential", CLOCKED, schema=CLOCK, after=22 * 3600)

    assert parsed.positions == [82800, 86400]

    parsed = parse(series("00:00", "01:00"), "sequential", CLOCKED, schema=CLOCK, after=5 * 86400 - 3600)

    assert parsed.positions == [5 * 86400, 5 * 86400 + 3600]


def test_series_of_another_group_or_after_an_end_is_rejected() -> None:
    assert classes(parse(series(0), "sequential", group={"g": "b"})) == ["group_mixed_key"]

    parser = make_parser(SCHEMA, "sequential", bos=EOS, eos=EOS, place=GROUPED, validation=Validation())

    assert classes(parser(f"{EOS}{series(0, 1)}{EOS}{series(2)}")) == ["record", "record", "after_failure"]


@pytest.mark.parametrize("time", [Decimal("0.3"), Decimal("1e5000"), Decimal("1e-5000")])
def test_step_of_decimals_is_exact(time: Decimal) -> None:
    schema = RecordSchema((Column("g", "string"), Column("t", "decimal"), Column("v", "integer")))
    place = PlacementColumns(("g",), "t", ELAPSED, Decimal("0.1"))
    text = R.replace("0", str(time))

    expected = "record" if time == Decimal("0.3") else "step"
    assert classes(parse(text, "sequential", place, schema=schema, after=Decimal("0.2"))) == [expected]


class CountedSchema(RecordSchema):
    """A schema that counts accesses to its columns."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name in {"columns", "by_name", "names"}:
            CountedSchema.looks += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("mode", ["tabular", "grouped", "sequential"])
def test_schema_is_compiled_once_however_many_records_there_are(mode: Mode) -> None:
    schema = CountedSchema(SCHEMA.columns)
    parser = make_parser(schema, mode, bos=BOS, eos=EOS, place=GROUPED, validation=Validation())
    write = Serialiser(schema, special_tokens=(EOS,))
    looks = CountedSchema.looks
    parsed = parser(BOS + series(*range(500)) + "{}" + EOS)
    lines = [write(record) for record in parsed.records]

    assert len(lines) == parsed.report.valid
    assert sum(parsed.report.items.values()) > 500
    assert CountedSchema.looks == looks


# ── Invariants ───────────────────────────────────────────────────────────────────────────────────────────

MODES: tuple[Mode, ...] = ("tabular", "grouped", "sequential")
_pieces = st.sampled_from(
    [BOS, EOS, R, "\n", "\r", " ", "{", "}", "[", "]", '"', "\\", ",", ":", "1", "-", "e", ".", "tru", "NaN", "{}",
     '{"', '{"g":', "\\u12", "\ud800", "\u2028", "é", "</", line("b", 5), line(t=3), line(v=None), "1" * 5000, "{" * 99]
)  # fmt: skip
texts = st.one_of(st.text(), st.lists(_pieces, max_size=30).map("".join), st.text(alphabet='{}[]":,\\\n\r 1ae.u<s/>'))
repairs = st.fixed_dictionaries({name: st.booleans() for name in REPAIRS})
flags = st.fixed_dictionaries({"open_at_start": st.booleans(), "closed_at_end": st.booleans()})


@given(texts, st.sampled_from(MODES), repairs, flags, st.sampled_from([None, 0, 3]))
def test_any_text_is_partitioned_and_nothing_is_raised(
    text: str, mode: Mode, repairs: dict[str, bool], flags: dict[str, bool], after: int | None
) -> None:
    parsed = parse(text, mode, after=after, **repairs, **flags)

    assert_partition(text, parsed)


@pytest.mark.slow
@given(texts, repairs, st.sampled_from(REPAIRS), flags)
def test_no_repair_lowers_the_valid_count(
    text: str, repairs: dict[str, bool], option: str, flags: dict[str, bool]
) -> None:
    off = parse(text, "grouped", **{**repairs, option: False}, **flags).report
    on = parse(text, "grouped", **{**repairs, option: True}, **flags).report

    assert on.valid >= off.valid


@pytest.mark.slow
@settings(max_examples=draw(40))
@given(st.data())
def test_serialised_records_are_parsed_back_whatever_the_delimiters_between_them(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    written = data.draw(st.lists(records(schema.columns), max_size=4))
    serialiser = Serialiser(schema, special_tokens=SPECIAL)
    lines = [str(serialiser(record)) for record in written]
    between = data.draw(st.sampled_from(["", BOS, EOS, "\r\n", "  "]))
    parser = make_parser(schema, "tabular", bos=BOS, eos=EOS, place=PlacementColumns(), validation=Validation())
    parsed = parser(between.join(lines))

    assert [serialiser(record) for record in parsed.records] == lines
    assert set(parsed.report.items) <= {"record", "delimiter"}


@given(st.text(alphabet='{}[]":,\\ 1e.-tn', max_size=30))
def test_accepted_objects_equal_those_of_the_standard_library(text: str) -> None:
    parsed = parse(text)
    for span in parsed.spans:
        if span.kind == "record" or span.reason in {"missing_column", "unknown_column", "type", "null"}:
            assert isinstance(json.loads(text[span.start : span.end]), dict)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), values, min_size=1, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_every_prefix_of_an_object_is_truncated_until_a_character_that_json_never_has(
    value: dict[str, Any], is_ascii: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    for cut in range(text.index('"') + 1, len(text)):
        assert classes(parse(text[:cut])) == ["truncated"]
        assert classes(parse(f"{text[:cut]}\0")) == ["invalid_json"]
    assert classes(parse(text))[0] not in {"truncated", "invalid_json"}
