"""Tables planned in partitions: what a new row changes, what does not depend on workers, and that no row is lost."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rowmill.build import share
from rowmill.build.share import ShareOutcome
from rowmill.executors import LocalPool, Share, local
from rowmill.inspection import inspect
from rowmill.kinds.tables import partitions
from rowmill.kinds.tables import partitions as row_partitions
from rowmill.kinds.tables.generated_records import load_prefills, load_trained_model
from rowmill.kinds.tables.generation import Prefill
from rowmill.kinds.tables.partitions import assign_partitions
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.stages.base import StageContext
from tests.support.recipes import TO_LENGTHS, TO_ROWS, Built, Workspace, sentence
from tests.support.tables import grouped, records

pytestmark = pytest.mark.slow

FILES, ROWS_OF_A_FILE = 6, 500
"""So many rows are a part of their own: some 110 KiB."""
BITS = 4
GROUPS = grouped("shop", "day", max_sequences_per_example=3)


def make_row(i: int, shop: int) -> dict[str, Any]:
    return {"shop": f"S-{shop:03d}", "day": f"2026-01-{1 + i % 28:02d}", "text": sentence(i, 40), "number": i}


def list_files() -> list[list[dict[str, Any]]]:
    """Return the rows of files; each shop has 20 rows, in all files."""
    return [
        [make_row(i, i * 7 % 150) for i in range(file * ROWS_OF_A_FILE, (file + 1) * ROWS_OF_A_FILE)]
        for file in range(FILES)
    ]


APPENDED = [make_row(10_000 + i, (4, 151)[i % 2]) for i in range(30)]
"""One row in a hundred: of a shop that there is, and of a new one."""


def build(folder: Path, files: Sequence[Any], form: dict[str, Any], **options: Any) -> Built:
    return write_recipe(folder, files, form, **options).build(only=TO_LENGTHS)


def write_recipe(
    folder: Path, files: Sequence[Any], form: dict[str, Any], *, root: str | None = None, **options: Any
) -> Workspace:
    workspace = Workspace(folder, root)
    contents = {f"{number:03d}.jsonl": rows for number, rows in enumerate(files)}
    dataset = workspace.files(contents, records(**form), splits={"test": 0.1})
    return workspace.recipe({"rows": dataset}, **{"seq_len": 4096, **options})


@pytest.fixture(autouse=True)
def small_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a partition have at most 256 rows, and a block of keys two files."""
    monkeypatch.setattr(partitions, "PARTITION_ROWS", 256)
    monkeypatch.setattr(row_partitions, "KEY_BLOCK_ROWS", 2 * ROWS_OF_A_FILE)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Built]:
    """Build a table of shops, before and after a file was appended, in one store."""
    folder = tmp_path_factory.mktemp("shops")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitions, "PARTITION_ROWS", 256)
        patch.setattr(row_partitions, "KEY_BLOCK_ROWS", 2 * ROWS_OF_A_FILE)
        return build(folder, list_files(), GROUPS), build(folder, [*list_files(), APPENDED], GROUPS)


def partition_of(*keys: str) -> set[int]:
    return set(assign_partitions(pa.chunked_array([list(keys)]), BITS).tolist())


def parts_of(built: Built) -> dict[str, list[dict[str, Any]]]:
    """Return the examples of each part, by the digest of its file."""
    files = built.manifest("rows", "tokenized_examples").files("examples")
    return {file.digest: built.project.store.table(file).to_pylist() for file in files}


def assert_rows_are_shown_once(built: Built) -> None:
    rows = Counter(row["row_id"] for row in built.rows_of("rows", "canonical_rows", file="rows"))
    states = Counter(row["row_id"] for row in built.rows_of("rows", "tokenized_examples", file="ledger"))

    assert Counter(name for one in built.examples() for name in one["row_ids"]) == rows == states
    assert len({one["example_id"] for one in built.examples()}) == len(built.examples())
    assert built.facts("rows", "tokenized_examples")["accounted"] == 0


def test_groups_are_whole_and_appended_rows_change_the_examples_of_their_partitions_alone(
    both: tuple[Built, Built],
) -> None:
    sizes: dict[str, int] = defaultdict(int)
    for built in both:
        assert_rows_are_shown_once(built)
        for examples in parts_of(built).values():
            keys = [key for one in examples for key in one["group_keys"]]

            assert len(partition_of(*keys)) == 1
            assert len(set(keys)) == len(keys)
    for one in both[0].examples():
        for key in one["group_keys"]:
            sizes[key] += 1
    assert len(sizes) == 150
    assert set(sizes.values()) == {1}

    before, after = map(parts_of, both)
    touched = partition_of('"S-004"', '"S-151"')

    changed = {digest: after[digest] for digest in after.keys() - before.keys()}
    assert len(touched) == 2
    assert partition_of(*(key for part in changed.values() for one in part for key in one["group_keys"])) == touched
    # Train of both partitions, and test of the one that has any.
    assert len(changed) <= 4 < len(before) // 4
    assert both[1].report("rows", "tokenized_examples").parts_reused == len(after) - len(changed)

    [planned] = inspect.plan_tables(both[1].project)
    made = both[1].manifest("rows", "tokenized_examples")

    assert planned.plan is not None
    assert planned.plan.table().rows == tuple(tuple(row) for row in made.tables["plan"].rows)
    assert planned.plan.facts["train"]["examples"] + planned.plan.facts["test"]["examples"] == made.facts["examples"]


def test_workers_and_remote_storage_decide_nothing(
    both: tuple[Built, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = write_recipe(tmp_path, list_files(), GROUPS, root="memory://table-partitions")

    assert workspace.build(only=TO_LENGTHS).versions() == both[0].versions()

    monkeypatch.setattr(local, "INLINE_BELOW_BYTES", 0)
    built = build(tmp_path, [*list_files(), APPENDED], GROUPS, execution={"workers": 2})

    assert list(parts_of(built)) == list(parts_of(both[1]))
    assert built.versions() == both[1].versions()


def test_shares_of_any_pass_make_what_a_build_makes(both: tuple[Built, Built], tmp_path: Path) -> None:
    write_recipe(tmp_path, list_files(), GROUPS).build(only=TO_ROWS)
    project = Workspace(tmp_path).project
    outcomes: list[share.ShareOutcome] = []
    # Ids, keys, plans, ledgers and examples, each of which needs what all shares made before.
    while ShareOutcome.MADE in outcomes[-3:] or not outcomes:
        for number in (1, 2, 3):
            [report] = share.make_share(project, Share(number, 3), only=["tokenized_examples"])
            outcomes.append(report.outcome)
        assert len(outcomes) < 24
    built = Workspace(tmp_path).build(only=TO_LENGTHS)

    assert set(outcomes[-3:]) == {ShareOutcome.FINISHED}
    assert built.versions() == both[0].versions()
    assert built.report("rows", "tokenized_examples").parts_reused == len(parts_of(built))


def test_records_without_groups_change_in_the_last_run_of_parts(tmp_path: Path) -> None:
    form = {"data": {"max_sequences_per_example": 7}}
    before = build(tmp_path, list_files(), form)
    after = build(tmp_path, [*list_files(), APPENDED], form)
    first, second = parts_of(before), parts_of(after)

    assert_rows_are_shown_once(before)
    assert_rows_are_shown_once(after)
    assert len(first) >= 2 * (FILES // 2)
    # A run has train and test.
    assert [*first][:-2] == [*second][: len(first) - 2]
    assert len(second.keys() - first.keys()) <= 2


SERIES = {**GROUPS, "time_series": {"is_timeseries": True}, "generation": {}}


def test_series_have_the_examples_that_they_have_in_one_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a series draws depends on its key alone, so that partitions decide only the order of examples."""
    built = build(tmp_path / "partitions", list_files(), SERIES, seq_len=1024)
    appended = build(tmp_path / "partitions", [*list_files(), APPENDED], SERIES, seq_len=1024)
    monkeypatch.setattr(partitions, "PARTITION_ROWS", FILES * ROWS_OF_A_FILE)
    whole = build(tmp_path / "whole", list_files(), SERIES, seq_len=1024)

    # The last example of a pass says so, and there is one in each partition.
    found, wanted = (
        [{name: value for name, value in one.items() if name != "flush"} for one in made.examples()]
        for made in (built, whole)
    )
    changed = {key for digest, part in parts_of(appended).items() if digest not in parts_of(built)
               for one in part for key in one["group_keys"]}  # fmt: skip
    assert len(parts_of(built)) > 2**BITS
    assert sorted(found, key=lambda one: one["example_id"]) == sorted(wanted, key=lambda one: one["example_id"])
    assert partition_of(*changed) == partition_of('"S-004"', '"S-151"')
    assert load_series(built) == load_series(whole)


def load_series(built: Built) -> list[Prefill]:
    project, key = built.project, ("mini", "rows", "tokenized_examples")
    inputs: dict[StageKey, Manifest] = {key: built.manifest(*key[1:])}
    at = ("mini", "rows", "generated_series")
    context = StageContext(project.store, project.base, at, "rows", inputs, LocalPool(1), recipe=project.recipe)
    return load_prefills(context, load_trained_model(context))


@pytest.mark.parametrize("form", [{}, GROUPS, SERIES], ids=["records", "groups", "series"])
def test_sample_and_overflow_are_those_of_the_whole_table(tmp_path: Path, form: dict[str, Any]) -> None:
    rows = [*list_files(), [make_row(i, 300) | {"text": sentence(i, 5000)} for i in range(20)]]
    more = {"training": {"num_input_records_to_sample": 4000}, "assembly": {"on_overflow": "reject"}}
    built = build(tmp_path, rows, {**form, **more})
    made = built.manifest("rows", "tokenized_examples")
    states = Counter(
        (row["state"], row["reason"]) for row in built.rows_of("rows", "tokenized_examples", file="ledger")
    )
    shown = sum(len(one["row_ids"]) for one in built.examples() if one["split"] == "train")
    [planned] = inspect.plan_tables(built.project)
    reason = "group_overflow" if form is GROUPS else "record_overflow"
    lengths = {row[0]: row[1] for row in built.manifest("rows", "truncation_stats").tables["what_if"].rows}

    assert states["rejected", reason] == 20
    assert {detail.split(" needs ")[0] for detail in built.details()} >= ({"shop='S-300'"} if form is GROUPS else set())
    assert all("widest column text" in detail for detail in built.details())
    # A group is never cut, so that each partition may take the rest of its last one.
    assert 4000 <= shown <= (4000 + 20 * 2**BITS if form is GROUPS else 4000)
    assert made.facts["accounted"] == 0
    assert planned.plan is not None
    assert planned.plan.facts["train"]["records"] == shown
    assert planned.plan.overflows.count == (1 if form is GROUPS else 20)
    assert lengths[4096] == made.facts["examples"]


@pytest.mark.parametrize("form", [{}, SERIES], ids=["records", "series"])
def test_inserted_file_gives_what_an_empty_store_gives(tmp_path: Path, form: dict[str, Any]) -> None:
    """Finished plans of other partitions are used again, whose parts have other numbers now."""
    form = {**form, "assembly": {"on_overflow": "reject"}}
    rows = [*list_files(), [make_row(i, 300) | {"text": sentence(i, 5000)} for i in range(20)]]
    first = [make_row(20_000 + i, 401) for i in range(2 * ROWS_OF_A_FILE)]
    build(tmp_path / "one", rows, form)
    rebuilt = build(tmp_path / "one", [first, *rows], form)
    fresh = build(tmp_path / "other", [first, *rows], form)

    assert rebuilt.report("rows", "tokenized_examples").parts_reused > 0
    assert rebuilt.versions() == fresh.versions()
