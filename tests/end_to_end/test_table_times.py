"""Ambiguous times of tables: each problem is named with its cell and line, warns, and blocks from one in a hundred."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import GateError
from tests.support.recipes import TO_EXAMPLES, TO_ROWS, Built, Workspace
from tests.support.tables import as_csv, grouped, records

SERIES = records(data={"order_training_examples_by": "t"}, time_series={"is_timeseries": True})
GROUPS = records(**grouped("g", "t"))
SERIES_OF_GROUPS = GROUPS | {"time_series": {"is_timeseries": True}}


def rows_at(times: list[str], *groups: str) -> list[dict[str, Any]]:
    """Return a row for each time, and one more for each group after the first."""
    return [{"g": group, "t": time, "v": str(i)} for i, time in enumerate(times) for group in groups or ("A",)]


def minutes(count: int, suffix: str = "") -> list[str]:
    """Return times by day, a minute apart."""
    return [f"2024-05-01T{8 + i // 60:02d}:{i % 60:02d}:00{suffix}" for i in range(count)]


def project(
    folder: Path, form: dict[str, Any], *files: bytes | list[dict[str, Any]], name: str = "t{}.csv", **changes: Any
) -> Workspace:
    workspace = Workspace(folder)
    urls = [workspace.write(name.format(number), content) for number, content in enumerate(files)]
    dataset = {"source": {"train_urls": urls}, "format": form, "splits": {"test": 0}}
    return workspace.recipe({"rows": dataset}, **{"gates": {}, "seq_len": 2048} | changes)


def share_of(built: Built) -> float:
    return built.manifest("rows", "canonical_rows").facts["ambiguous_times"]


def sentences_of(built: Built) -> tuple[str, ...]:
    return built.manifest("rows", "canonical_rows").samples.get("ambiguous_times", ())


def rows_of_table(built: Built) -> list[dict[str, Any]]:
    found = built.manifest("rows", "canonical_rows").tables["ambiguous_times"]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def berlin(count: int) -> list[str]:
    """Return half hours before, in and after the hour that the end of daylight saving repeats."""
    night = ["2024-10-27T01:30", "2024-10-27T02:00", "2024-10-27T02:30"]
    after = [f"2024-10-27T{3 + i // 2:02d}:{i % 2 * 30:02d}" for i in range(count - 5)]
    return [*night, *night[1:], *after]


PROBLEMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], str]] = {
    "a repeated hour": (
        SERIES_OF_GROUPS,
        rows_at(berlin(30), "A", "B"),
        ("repeated hour: 4 records, the first is data/t0.csv line 8: t '2024-10-27T02:00' of series \"A\" comes after "
        "'2024-10-27T02:30' although the source is in order,"),
    ),
    "a repeated hour in groups that are no series": (
        GROUPS,
        rows_at(berlin(30), "A"),
        "repeated hour: 2 records, the first is data/t0.csv line 5: t '2024-10-27T02:00' of series \"A\" comes after",
    ),
    "a time without a zone": (
        SERIES,
        rows_at([*minutes(40, "Z"), "2024-05-01T09:30:00"]),
        ("mixed zones: 1 record, the first is data/t0.csv line 42: t '2024-05-01T09:30:00' has no zone and is read as "
        "UTC, while 40 have one; write the zone into all times"),
    ),
    "a time with a zone in groups": (
        GROUPS,
        rows_at([*minutes(40), "2024-05-01T09:30:00+02:00"]),
        ("mixed zones: 1 record, the first is data/t0.csv line 42: t '2024-05-01T09:30:00+02:00' has a zone, while 40 "
        "have none and are read as UTC;"),
    ),
    "milliseconds": (
        records(time_series={"is_timeseries": True, "timestamp_column": "t"}),
        rows_at([str(1_700_000_000 + 60 * i) for i in range(40)] + ["1700003000000"]),
        ("mixed units: 1 record, the first is data/t0.csv line 42: t '1700003000000' looks like milliseconds since "
        "1970, while 40 look like seconds; convert all to seconds"),
    ),
    "milliseconds in groups": (
        GROUPS,
        rows_at(["1700000000", "1700000000000", "1700000060000"]),
        ("mixed units: 1 record, the first is data/t0.csv line 2: t '1700000000' looks like seconds since 1970, while "
        "2 look like milliseconds; convert all to milliseconds"),
    ),
    "a repeated time": (
        SERIES_OF_GROUPS,
        [*rows_at(minutes(40), "A", "B"), {"g": "B", "t": "2024-05-01T08:01:00", "v": "99"}],
        ("repeated time: 1 record, the first is data/t0.csv line 82: t '2024-05-01T08:01:00' of series \"B\" is the "
        "time of data/t0.csv line 5, too,"),
    ),
}  # fmt: skip
"""The options of records, the rows, and how the sentence begins."""


@pytest.mark.parametrize("problem", PROBLEMS)
def test_ambiguous_time_is_named_with_its_cell_and_line_and_blocks(tmp_path: Path, problem: str) -> None:
    form, rows, said = PROBLEMS[problem]
    workspace = project(tmp_path, form, as_csv(rows))
    built = workspace.build(only=TO_ROWS)
    with pytest.raises(GateError, match="ambiguous_times"):
        workspace.build(only=TO_EXAMPLES)

    [sentence] = sentences_of(built)
    assert sentence[: len(said)] == said
    assert {one["problem"] for one in rows_of_table(built)} == {said.partition(":")[0]}
    assert all(one["place"].startswith("data/t0.csv line ") for one in rows_of_table(built))


QUIET: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "times that series share": (SERIES_OF_GROUPS, rows_at(minutes(40), "A", "B", "C")),
    "events of one time in groups that are no series": (GROUPS, rows_at(minutes(5) * 8)),
    "groups out of order": (GROUPS, rows_at([berlin(30)[i * 7 % 30] for i in range(30)])),
    "steps": (SERIES, rows_at([str(i) for i in range(1, 2001)])),
    "seconds of many years": (SERIES, rows_at([str(1_000_000_000 + 10_000_000 * i) for i in range(70)])),
    "zones that differ": (SERIES, rows_at([*minutes(20, "Z"), *(f"2024-06-0{i}T00:00:00+02:00" for i in range(1, 9))])),
    "dates alone": (SERIES, rows_at([f"2024-05-{day:02d}" for day in range(1, 29)])),
    "hours in UTC": (SERIES, rows_at([f"{time}:00Z" for time in (*berlin(20)[:3], *berlin(20)[5:])])),
    "times of day over midnight": (SERIES, rows_at(["22:00", "23:30", "01:30", "01:00", "02:00"])),
}  # fmt: skip


@pytest.mark.parametrize("case", QUIET)
def test_times_that_have_one_order_are_not_ambiguous(tmp_path: Path, case: str) -> None:
    form, rows = QUIET[case]
    built = project(tmp_path, form, as_csv(rows)).build(only=TO_ROWS)
    assert (share_of(built), sentences_of(built)) == (0, ())
    assert "ambiguous_times" not in built.manifest("rows", "canonical_rows").tables


@pytest.mark.parametrize(("count", "blocks"), [(98, True), (100, False)])
def test_one_record_in_more_than_a_hundred_only_warns(tmp_path: Path, count: int, blocks: bool) -> None:
    workspace = project(tmp_path, SERIES, as_csv(rows_at([*minutes(count), minutes(count)[-1]])))
    _, results = workspace.build(only=TO_ROWS).steps["rows", "canonical_rows"]
    [result] = [one for one in results if one.check == "ambiguous_times"]
    assert (result.passed, result.blocking) == (False, blocks)
    assert blocks or result.severity == "warn"


def test_largest_of_several_problems_is_the_share_of_all_times_that_were_read(tmp_path: Path) -> None:
    times = [*minutes(40, "Z"), "2024-05-01T08:00:00", "2024-05-01T08:01:00Z", "2024-05-01T08:02:00Z"]
    built = project(tmp_path, SERIES, as_csv(rows_at(times))).build(only=TO_ROWS)
    problems = [one.partition(",")[0] for one in sentences_of(built)]
    assert share_of(built) == pytest.approx(3 / 43)
    assert problems == ["mixed zones: 1 record", "repeated time: 3 records"]
    rows = [{"t": "2024-05-01T08:00:00Z", "v": "1"}] * 30 + [{"t": "2024-05-01T09:00:00", "v": "1"}] * 10
    groups = {"filters": {"deduplicate": "exact"}, "splits": {"test": 0}}
    built = Workspace(tmp_path / "duplicates").one("t0.csv", as_csv(rows), SERIES, **groups).build(only=TO_ROWS)
    assert built.manifest("rows", "canonical_rows").facts["kept"] == 2
    assert share_of(built) == 0.25


@pytest.mark.parametrize(("time", "names_zones"), [("2024-10-27T02:00", True), ("2024-10-27", False)])
def test_remedy_of_repeated_times_names_zones_where_a_clock_may_have_been_put_back(
    tmp_path: Path, time: str, names_zones: bool
) -> None:
    built = project(tmp_path, SERIES, as_csv(rows_at([time, time]))).build(only=TO_ROWS)
    [sentence] = sentences_of(built)
    assert ("write the zone into the times" in sentence) is names_zones


def test_waived_times_are_built(tmp_path: Path) -> None:
    waiver = {"check": "ambiguous_times", "at_most": 0.5, "reason": "two sensors share a series on purpose"}
    rows = rows_at([time for time in minutes(20) for _ in range(2)])
    built = project(tmp_path, SERIES, as_csv(rows), gates={"waivers": [waiver]}).build(only=TO_EXAMPLES)
    assert sum(len(one["row_ids"]) for one in built.examples()) == 40


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_results_are_the_same_whichever_parts_were_reused(tmp_path: Path, suffix: str) -> None:
    day, night = rows_at(minutes(30, "Z"), "A"), rows_at(["2024-05-02T08:00:00", "2024-05-02T08:01:00Z"], "A", "B")
    files = [as_csv(day), as_csv(night)] if suffix == "csv" else [day, night]

    def build(folder: str, *contents: Any) -> Built:
        return project(tmp_path / folder, SERIES_OF_GROUPS, *contents, name=f"t{{}}.{suffix}").build(only=TO_ROWS)

    before, after, fresh = build("grown", files[0]), build("grown", *files), build("fresh", *files)
    assert share_of(before) == 0
    assert share_of(after) == share_of(fresh) == pytest.approx(2 / 34)
    assert sentences_of(after) == sentences_of(fresh)
    assert f"data/t1.{suffix} line {2 if suffix == 'csv' else 1}: t '2024-05-02T08:00:00'" in sentences_of(after)[0]
    assert after.manifest("rows", "canonical_rows").version == fresh.manifest("rows", "canonical_rows").version


def test_table_without_an_order_column_does_not_count_them(tmp_path: Path) -> None:
    built = project(tmp_path, records(), as_csv(rows_at(minutes(5)))).build(only=TO_ROWS)
    assert built.manifest("rows", "canonical_rows").facts["ambiguous_times"] is None
