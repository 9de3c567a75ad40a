"""Small files share parts: fewer parts, the same rows, the same lineage, and changes stay local."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import runner
from rowmill.inspection.trace import trace_row, trace_source
from rowmill.sources import FileScan, SourcePart, group_parts
from rowmill.sources.reading import MAX_GROUP_BYTES, MEAN_GROUP_BYTES, SMALL_FILE_BYTES, load_part_groups
from tests.support.recipes import CHAT, Built, Workspace, chat

FILES = 700
"""So many that they make several groups, each of a few hundred."""


def file_of(name: str, *, content_bytes: int = 2000, parts: int = 1, **other: Any) -> FileScan:
    """Return the scan of a file; its digests follow from its name."""
    options: dict[str, Any] = {"split_hint": None, "reader": "json_lines", "arrow": False, **other}
    made = tuple(
        SourcePart(
            url=name, index=index, offset=0, length=content_bytes, first_line=1, first_record=1, records=1,
            sha256=hashlib.sha256(f"{name} {index}".encode()).hexdigest(), part_id=f"{name}-{index}", stamp="s",
            staged=None, content_bytes=content_bytes, lines=None, **options,
        )
        for index in range(parts)
    )  # fmt: skip
    return FileScan(name, made[0].split_hint, made[0].reader, "s", records=parts, parts=made)


def many(count: int, **options: Any) -> list[FileScan]:
    return [file_of(f"f{number:05d}", **options) for number in range(count)]


def test_groups_are_the_parts_in_their_order() -> None:
    scans = [*many(500), file_of("large", content_bytes=SMALL_FILE_BYTES, parts=3), *many(300, content_bytes=100_000)]
    groups = group_parts(scans)

    assert [*chain(*groups)] == [part for scan in scans for part in scan.parts]
    assert len(groups) < 100
    assert max(sum(part.content_bytes for part in group) for group in groups) <= MAX_GROUP_BYTES


@pytest.mark.slow
def test_groups_of_many_small_files_have_the_mean_size() -> None:
    groups = group_parts(many(20_000))
    assert 0.8 * MEAN_GROUP_BYTES < 20_000 * (2000 + 4096) / len(groups) < 1.2 * MEAN_GROUP_BYTES


@pytest.mark.parametrize(
    "scans",
    [
        [file_of(f"large{number}", content_bytes=SMALL_FILE_BYTES) for number in range(5)],
        [file_of("large", content_bytes=10, parts=2), file_of("a", content_bytes=10)],
    ],
    ids=["files that fill a part", "the last part of a large file"],
)
def test_part_is_not_shared(scans: list[FileScan]) -> None:
    assert {len(group) for group in group_parts(scans)} == {1}


@pytest.mark.parametrize("other", [{"split_hint": "validation"}, {"reader": "delimited"}, {"arrow": True}])
def test_files_of_another_split_or_kind_are_not_grouped(other: dict[str, Any]) -> None:
    groups = group_parts([*(file_of(f"a{n}") for n in range(5)), *(file_of(f"b{n}", **other) for n in range(5))])
    assert all(len({(part.split_hint, part.reader, part.arrow) for part in group}) == 1 for group in groups)


def names(groups: Iterable[Sequence[SourcePart]]) -> set[tuple[str, ...]]:
    return {tuple(part.sha256 for part in group) for group in groups}


@pytest.mark.slow
def test_added_removed_or_changed_file_keeps_other_groups() -> None:
    scans = many(3000)
    before = group_parts(scans)
    made = [
        len(names(group_parts(changed)) - names(before))
        for at in range(0, 3000, 31)
        for changed in (
            [*scans[:at], file_of(f"new{at}"), *scans[at:]],
            [*scans[:at], *scans[at + 1 :]],
            [*scans[:at], file_of(f"changed{at}", content_bytes=9000), *scans[at + 1 :]],
        )
    ]

    assert len(before) > 12
    # Its own group, and one more if the file ends it.
    assert max(made) <= 2
    assert sum(made) / len(made) < 1.1


def write_many(folder: Path, *, large: bool = True) -> Workspace:
    """Write a dataset of many files with one row each, and one that has parts of its own."""
    workspace = Workspace(folder)
    for number in range(FILES):
        workspace.write(f"rows/r{number:04d}.jsonl", [chat(number)])
    if large:
        workspace.write("rows/t.jsonl", [chat(10_000 + number, words=60) for number in range(250)])
    return workspace.recipe({"rows": {"source": {"train_urls": ["data/rows/*.jsonl"]}, "format": CHAT}})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return write_many(tmp_path_factory.mktemp("many")).build()


@pytest.mark.slow
def test_small_files_are_built_in_few_parts_with_the_bytes_of_any_workers(built: Built, tmp_path: Path) -> None:
    raw = built.manifest("rows", "raw_dataset")
    assert raw.facts["files"] == FILES + 1
    for stage in ("canonical_rows", "tokenized_examples"):
        assert len(built.manifest("rows", stage).parts) == raw.facts["parts"] < 20
    rows = [*map(chat, range(FILES)), *(chat(10_000 + number, words=60) for number in range(250))]
    alone = Workspace(tmp_path / "alone").one("rows.jsonl", rows).build()
    tokens = [
        [one["input_ids"] for one in made.rows_of("rows", "packed_shards", file="shard")] for made in (built, alone)
    ]
    assert tokens[0] == tokens[1]
    project = write_many(tmp_path / "two").project
    execution = project.recipe.execution.model_copy(update={"workers": 2})
    steps = runner.build(replace(project, recipe=project.recipe.model_copy(update={"execution": execution})))
    assert {"/".join(step.key[1:]): report.version for step, report, _ in steps} == built.versions()


@pytest.mark.parametrize("number", [0, 1, 350, FILES - 1])
def test_row_is_traced_to_its_file_and_line(built: Built, number: int) -> None:
    [trace] = trace_source(built.project, f"r{number:04d}.jsonl:1")
    [back] = trace_row(built.project, trace.row_id)

    assert (back.origin.url, back.origin.line) == (f"data/rows/r{number:04d}.jsonl", 1)
    assert json.loads(back.origin.raw) == chat(number)
    assert [fate.state for fate in back.fates] == ["kept", "kept"]
    assert back.examples
    assert back.places


@pytest.mark.slow
def test_changed_file_rebuilds_only_its_group(tmp_path: Path) -> None:
    workspace = write_many(tmp_path, large=False)
    groups = load_part_groups(workspace.build().manifest("rows", "raw_dataset"))
    assert len(groups) > 2
    # Not the last of its group: that one decides where the group ends.
    workspace.write(groups[1][0].url.removeprefix("data/"), [chat(99_999)])
    reports = {step.name: report for step, report, _ in runner.build(workspace.project)}

    for stage in ("canonical_rows", "tokenized_examples"):
        assert reports[stage].parts - reports[stage].parts_reused == 1
        assert reports[stage].rows_made == len(groups[1])


def test_records_beyond_max_items_are_left_out_across_files(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for number in range(6):
        workspace.write(f"rows/r{number}.jsonl", [chat(2 * number), chat(2 * number + 1)])
    workspace.recipe({"rows": {"source": {"train_urls": ["data/rows/"]}, "format": CHAT, "filters": {"max_items": 5}}})
    made = workspace.build().manifest("rows", "canonical_rows")

    assert len(made.parts) == 1
    assert (made.facts["kept"], made.facts["accounted"]) == (5, 0)
    assert ("not_taken", "", 7) in made.ledger


@pytest.mark.slow
def test_tables_in_small_files_have_a_part_each(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for number in range(30):
        shops = f"shop,units\nnorth {number},{number}\nsouth,{100 + number}\n"
        workspace.write(f"sales/s{number:02d}.csv", shops.encode())
    held = [workspace.write(f"held{number}.csv", f"shop,units\nwest {number},7\n".encode()) for number in range(3)]
    source = {"train_urls": ["data/sales/"], "validation_urls": held}
    workspace.recipe({"rows": {"source": source, "format": {"kind": "records"}, "splits": {"test": 0}}})
    made = workspace.build()
    # A cell that does not fit is located by its index in its part.
    rows = made.manifest("rows", "canonical_rows")
    assert (len(rows.parts), rows.facts["splits"]) == (33, {"train": 60, "validation": 3})
    [trace] = trace_source(made.project, "s17.csv:2")
    assert b"117" in trace.origin.raw
    assert trace.examples
