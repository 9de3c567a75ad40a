"""Pack groups in whole builds: what one holds, what new rows change, and what does not depend on groups."""

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmill.kinds.tables import record_tokens
from rowmill.packing.pack_plan import plan_best_fit
from rowmill.parts.functions import PartPlace, PartResult
from rowmill.schema.shard_counts import ShardDetails, select_shards
from rowmill.stages.base import StageContext
from rowmill.stages.packed_shards import pack_group, stage
from rowmill.stages.packed_shards.pack_group import PackGroupInputs, ShardCut, ShardWriter, WrittenShard
from tests.support.recipes import CHAT, TO_SHARDS, Built, Workspace, chat, document, sentence
from tests.support.tables import records
from tests.support.tiers import mark_all_but

pytestmark = [pytest.mark.usefixtures("small_parts"), pytest.mark.slow]

SEQ_LEN = 256
ROWS_OF_A_FILE = 320
"""So many rows are a part of their own: some 90 KiB."""


def rows_of_file(number: int, kind: str = "chat") -> list[dict[str, Any]]:
    first = number * ROWS_OF_A_FILE
    if kind == "text":
        return [document(first + i, words=60 + (first + i) % 23) for i in range(ROWS_OF_A_FILE)]
    return [chat(first + i, words=10 + (first + i) % 31) for i in range(ROWS_OF_A_FILE)]


def workspace_of(folder: Path, files: list[int], kind: str = "chat", **options: Any) -> Workspace:
    workspace = Workspace(folder)
    contents = {f"{number:03d}.jsonl": rows_of_file(number, kind) for number in files}
    groups = {"packing": options.pop("packing", {}), "splits": options.pop("splits", {"validation": 0})}
    dataset = workspace.files(contents, {"kind": kind}, **groups)
    return workspace.recipe({"rows": dataset}, seq_len=SEQ_LEN, partitions={"world_size": 1}, **options)


def packed(workspace: Workspace) -> Built:
    return workspace.build(only=TO_SHARDS)


def facts(built: Built) -> dict[str, Any]:
    return built.facts("rows", "packed_shards")


def shards(built: Built) -> list[str]:
    """Return the digests of all shards, in order."""
    return [file.digest for file in built.manifest("rows", "packed_shards").files("shard")]


def sequences(built: Built, split: str = "train") -> list[tuple[Any, ...]]:
    parts = select_shards(built.manifest("rows", "packed_shards").parts, split)
    rows = [row for part in parts for row in built.project.store.table(part.files["shard"]).to_pylist()]
    return [(row["example_ids"], row["starts"], row["input_ids"], row["labels"]) for row in rows]


def left_out(built: Built) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in built.rows_of("rows", "packed_shards", file="left_out"))


SMALL_GROUPS = {"group_tokens": 40_000}

TEN_FILES = list(range(10))

GROUPED: dict[str, Any] = {"packing": SMALL_GROUPS, "splits": {"validation": 0.1}}


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, Built]:
    workspace = workspace_of(tmp_path_factory.mktemp("grouped"), TEN_FILES, **GROUPED)
    return workspace, packed(workspace)


def test_every_example_is_in_one_group_whole_and_sequences_are_numbered_over_the_groups(
    grouped: tuple[Workspace, Built],
) -> None:
    _, built = grouped
    shown = Counter(name for split in ("train", "validation") for row in sequences(built, split) for name in row[0])

    assert facts(built)["pack_groups"] > 2
    assert shown == Counter(row["example_id"] for row in built.examples())
    assert [facts(built)[name] for name in ("conservation", "shard_digests", "tokens_left_out")] == [0, 0, 0]

    for split in ("train", "validation"):
        parts = select_shards(built.manifest("rows", "packed_shards").parts, split)
        found = [part.get_details(ShardDetails) for part in parts]
        counts = [shard.sequences for shard in found]

        assert len(parts) > 1
        assert [shard.first_sequence for shard in found] == [sum(counts[:i]) for i in range(len(counts))]


def test_appended_or_removed_file_changes_only_the_groups_near_it(
    grouped: tuple[Workspace, Built], tmp_path: Path
) -> None:
    _, before = grouped
    workspace = workspace_of(tmp_path, TEN_FILES, **GROUPED)
    first = packed(workspace)
    second = packed(workspace_of(tmp_path, [*TEN_FILES, 10], **GROUPED))
    report = second.report("rows", "packed_shards")

    assert shards(first) == shards(before)
    # A shard of train and one of validation.
    assert len(set(shards(first)) - set(shards(second))) <= 2
    assert report.parts_reused >= facts(first)["pack_groups"] - 1

    without = [number for number in range(10) if number != 1]
    after = packed(workspace_of(tmp_path, without, **GROUPED))

    assert shards(after) != shards(before)
    assert set(shards(after)) & set(shards(before))
    assert shards(after)[-1] == shards(before)[-1]


def test_rows_appended_to_a_table_leave_the_groups_of_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples of series may join rows of any part, but a group's lineage names the first rows of its own only."""
    monkeypatch.setattr(record_tokens, "PART_TOKENS", 10_000)
    workspace = Workspace(tmp_path)

    def build(files: int) -> Built:
        rows = [
            {"day": i // 50, "time": f"2026-01-{i % 25 + 1:02d}", "text": sentence(i % 500, 40)}
            for i in range(500 * files)
        ]
        contents = {f"{k}.jsonl": rows[500 * k : 500 * k + 500] for k in range(files)}
        data = {"group_training_examples_by": "day", "max_sequences_per_example": 1}
        time = {"is_timeseries": True, "timestamp_column": "time", "timestamp_format": "%Y-%m-%d"}
        dataset = workspace.files(contents, records(data=data, time_series=time), packing=SMALL_GROUPS)
        return packed(workspace.recipe({"rows": dataset}, seq_len=SEQ_LEN))

    def groups(built: Built) -> list[str]:
        parts = built.manifest("rows", "packed_shards").parts
        return list(dict.fromkeys(part.fingerprint for part in parts if "shard" in part.files))

    first = groups(build(3))
    second = groups(build(4))

    assert len(first) > 3
    assert second[: len(first) - 1] == first[:-1]


def test_dataset_of_one_group_is_planned_as_a_whole(tmp_path: Path) -> None:
    built = packed(workspace_of(tmp_path, [0, 1, 2]))
    lengths = np.array([row["tokens"] for row in built.examples()])
    names = [row["example_id"] for row in built.examples()]
    plan = plan_best_fit(lengths, SEQ_LEN, None)

    assert facts(built)["pack_groups"] == 1
    assert [row[0] for row in sequences(built)] == [
        [names[i] for i in plan.examples[plan.sequence_offsets[s] : plan.sequence_offsets[s + 1]]]
        for s in range(plan.sequences)
    ]


@pytest.mark.parametrize("tail", mark_all_but(["keep"], ["keep", "drop"]))
@pytest.mark.parametrize(
    ("splits", "multiple"),
    [
        pytest.param({"validation": 0}, 1, marks=pytest.mark.campaign),
        pytest.param({"validation": 0.2, "test": 0.1}, 1, marks=pytest.mark.campaign),
        ({"validation": 0.2, "test": 0.1}, 16),
    ],
    ids=["train", "three splits", "padded"],
)
def test_joined_documents_do_not_depend_on_groups(
    tmp_path: Path, tail: str, splits: dict[str, Any], multiple: int
) -> None:
    options = {"pack_strategy": "concat", "tail": tail, "segment_multiple_of": multiple}
    files = list(range(6))
    one = packed(workspace_of(tmp_path / "one", files, "text", packing=options, splits=splits))
    many = packed(
        workspace_of(tmp_path / "many", files, "text", packing=options | {"group_tokens": 20_000}, splits=splits)
    )

    assert facts(many)["pack_groups"] > 2 > facts(one)["pack_groups"]
    for split in ("train", "validation", "test"):
        assert sequences(many, split) == sequences(one, split)
    assert left_out(many) == left_out(one)
    assert facts(many) | {"pack_groups": facts(one)["pack_groups"]} == facts(one)
    assert many.manifest("rows", "packed_shards").ledger == one.manifest("rows", "packed_shards").ledger


def test_validation_by_number_does_not_depend_on_groups(tmp_path: Path) -> None:
    held: dict[str, Any] = {"mixture": {"num_validation_sequences": {"rows": 7}}, "splits": {}}
    one = packed(workspace_of(tmp_path / "one", list(range(6)), **held))
    many = packed(workspace_of(tmp_path / "many", list(range(6)), packing=SMALL_GROUPS, **held))

    assert facts(many)["pack_groups"] > 3
    assert len(sequences(many, "validation")) == 7
    assert sequences(many, "validation") == sequences(one, "validation")
    assert left_out(many) == left_out(one)
    trained = [Counter(name for row in sequences(built) for name in row[0]) for built in (one, many)]
    assert trained[0] == trained[1]


def test_sequences_held_out_by_number_name_the_source_parts_of_their_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    map_parts = StageContext.map

    def keep_inputs(context: StageContext, function: Any, inputs: Any, **more: Any) -> Any:
        planned.extend(inputs)
        return map_parts(context, function, inputs, **more)

    monkeypatch.setattr(StageContext, "map", keep_inputs)
    held: dict[str, Any] = {"mixture": {"num_validation_sequences": {"rows": 1}}, "splits": {}}
    built = packed(workspace_of(tmp_path, TEN_FILES, packing=SMALL_GROUPS, **held))

    segments = built.rows_of("rows", "packed_shards", file="segments")
    named = {row["source"] for row in segments if row["split"] == "validation"}
    assert {url for url, _ in planned[-1].sources.values()} == named
    assert len(named) < len({row["source"] for row in segments})


def test_mapped_tokens_give_the_same_shards(
    grouped: tuple[Workspace, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = grouped
    monkeypatch.setattr(pack_group, "IN_MEMORY_TOKENS", 0)
    mapped = packed(workspace_of(tmp_path, TEN_FILES, **GROUPED))

    assert shards(mapped) == shards(before)
    assert not list((tmp_path / ".rowmill").rglob("scratch-*"))


@pytest.mark.parametrize("mixture", [{}, {"num_validation_sequences": {"rows": 3}}])
def test_moved_file_has_its_new_name_in_the_lineage(tmp_path: Path, mixture: dict[str, Any]) -> None:
    splits = {} if mixture else {"validation": 0}
    workspace = workspace_of(tmp_path, [0, 1], packing=SMALL_GROUPS, splits=splits, mixture=mixture)
    packed(workspace)
    (tmp_path / "data" / "000.jsonl").rename(tmp_path / "data" / "moved.jsonl")
    urls = ["data/moved.jsonl", "data/001.jsonl"]
    dataset = {"source": {"train_urls": urls}, "format": CHAT, "packing": SMALL_GROUPS, "splits": splits}
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "partitions": {"world_size": 1}, "mixture": mixture}
    again = packed(workspace.recipe({"rows": dataset}, **options))

    found = {row["source"] for row in again.rows_of("rows", "packed_shards", file="segments")}
    assert found == set(urls)


def test_threads_of_a_task_do_not_change_its_shards(
    grouped: tuple[Workspace, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker has one thread; sixteen have several for each of the few groups, and begin with the largest."""
    planned: list[tuple[PackGroupInputs, PartPlace]] = []
    threads: set[int] = set()

    def keep_order(inputs: PackGroupInputs, place: PartPlace) -> PartResult:
        planned.append((inputs, place))
        return pack_group.pack_group.function(inputs, place)

    def write(writer: ShardWriter, cut: ShardCut) -> WrittenShard:
        threads.add(threading.get_ident())
        return write_shard(writer, cut)

    _, before = grouped
    write_shard = ShardWriter.write_shard
    monkeypatch.setattr(pack_group, "SHARD_TOKENS", 2_000)
    alone = packed(workspace_of(tmp_path / "one", TEN_FILES, **GROUPED))
    monkeypatch.setattr(stage, "pack_group", replace(pack_group.pack_group, function=keep_order))
    monkeypatch.setattr(ShardWriter, "write_shard", write)
    shared = packed(workspace_of(tmp_path / "many", TEN_FILES, **GROUPED, execution={"workers": 16}))

    assert len(shards(alone)) > 2 * len(shards(before))
    assert shards(shared) == shards(alone)
    tokens = [inputs.tokens for inputs, _ in planned]
    assert tokens == sorted(tokens, reverse=True)
    assert {place.threads for _, place in planned} == {-(-32 // len(planned))}
    assert len(threads) > 1
