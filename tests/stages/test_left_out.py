"""What no sequence shows has a line that says how many tokens, of how many, and why; shards are read back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rowmill.build import gate, runner, steps
from rowmill.core.errors import ContextOverflowError, GateError
from rowmill.packing import pack_plan
from rowmill.schema.manifest import list_versions
from tests.support.recipes import LENIENT, PAIR, TEXT, TO_SHARDS, Built, Workspace, document, pair, sentence

LIMIT = 48


def long_pair(i: int, *, prompt: int, answer: int) -> dict[str, Any]:
    return {"prompt": sentence(i, prompt), "answer": sentence(i + 1, answer)}


ROWS = [pair(1, words=4), long_pair(2, prompt=5, answer=90), long_pair(3, prompt=90, answer=5), pair(4, words=4)]


def built_of(folder: Path, rows: list[dict[str, Any]], kind: dict[str, Any], **options: Any) -> Built:
    workspace = Workspace(folder)
    return workspace.one("rows.jsonl", rows, kind, packing=options, seq_len=LIMIT).build(only=TO_SHARDS)


def fates(built: Built) -> list[tuple[int, str, str]]:
    rows = built.rows_of("rows", "packed_shards", file="left_out")
    return [(int(row["row_id"].rsplit(":", 1)[1]), row["state"], row["reason"]) for row in rows]


def list_segments(built: Built) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield the example, the ids and the labels of every segment of the shards."""
    for row in built.rows_of("rows", "packed_shards", file="shard"):
        at = 0
        for name, length in zip(row["example_ids"], row["segment_lengths"], strict=True):
            yield name, row["input_ids"][at : at + length], row["labels"][at : at + length]
            at += length


def kept_tokens(built: Built) -> dict[int, list[int]]:
    """Return what the sequences show of each record, by its number."""
    shown: dict[int, list[int]] = {}
    for name, ids, _ in list_segments(built):
        shown.setdefault(int(name.split("#")[0].rsplit(":", 1)[1]), []).extend(ids)
    return shown


@pytest.mark.parametrize(("alias", "kept"), [("left", slice(0, LIMIT)), ("keep_end", slice(-LIMIT, None))])
def test_example_cut_to_one_side_keeps_it_and_counts_the_rest(tmp_path: Path, alias: str, kept: slice) -> None:
    built = built_of(tmp_path, ROWS[:2], PAIR, slice_strategy=alias)
    ids = {int(row["row_ids"][0].rsplit(":", 1)[1]): row["input_ids"] for row in built.examples()}
    (line,) = built.rows_of("rows", "packed_shards", file="left_out")

    assert kept_tokens(built) == {0: ids[0], 1: ids[1][kept]}
    assert (line["state"], line["tokens"], line["of_tokens"]) == ("kept", len(ids[1]) - LIMIT, len(ids[1]))
    assert built.manifest("rows", "packed_shards").token_ledger == (("all", "dropped", len(ids[1]) - LIMIT),)


def test_too_long_example_is_an_error_with_its_name_length_and_limit(tmp_path: Path) -> None:
    with pytest.raises(
        ContextOverflowError, match=rf":1#0 has \d+ tokens \(2 examples are too long\); at most {LIMIT} fit"
    ):
        built_of(tmp_path, ROWS, PAIR, slice_strategy="raise")


@pytest.mark.parametrize(
    ("strategy", "expected", "kept"),
    [
        ("keep_start", [(1, "kept", ""), (2, "rejected", "no_loss_tokens")], [0, 1, 3]),
        ("keep_end", None, [0, 1, 2, 3]),
        ("drop", [(1, "rejected", "overlong"), (2, "rejected", "overlong")], [0, 3]),
        ("split", None, [0, 1, 2, 3]),
    ],
)
def test_packing_loss_is_the_larger_share_of_examples_and_trained_tokens(
    tmp_path: Path, strategy: str, expected: list[tuple[int, str, str]] | None, kept: list[int]
) -> None:
    built = built_of(tmp_path, ROWS, PAIR, slice_strategy=strategy)
    packed = built.manifest("rows", "packed_shards")
    trained = sum(row["trained_tokens"] for row in built.examples())
    shown = sum(label != -100 for _, _, labels in list_segments(built) for label in labels)
    gone = sum(state == "rejected" for _, state, _ in fates(built)) / len(ROWS)
    lost = 1 - shown / trained
    found = packed.facts["packing_loss"]

    assert expected is None or fates(built) == expected
    assert sorted(kept_tokens(built)) == kept
    if strategy == "keep_start":
        assert set(packed.ledger) == {("kept", "", 3), ("rejected", "no_loss_tokens", 1)}
    if strategy == "split":
        # A prompt's first pieces hold no answer; every segment that is shown trains something.
        assert (2, "kept", "") in fates(built)
        assert all(row["trained_tokens"] > 0 for row in built.rows_of("rows", "packed_shards", file="shard"))
        assert packed.facts["conservation"] == 0
    # The first token of every later piece of a split example is no target.
    assert found == pytest.approx(max(gone, lost), abs=0.03)
    assert (found > 0.1) == (strategy != "split")


@pytest.mark.slow
@pytest.mark.real_data
def test_pairs_that_packing_cuts_to_nothing_close_the_gate(tmp_path: Path, real_data: Path) -> None:
    workspace = Workspace(tmp_path)
    source = {"train_urls": [str(real_data / "math" / "gsm8k_test.jsonl")]}
    kind = {"kind": "supervised", "input_field": "question", "output_field": "answer"}
    workspace.recipe(
        {"gsm": {"source": source, "format": kind, "packing": {"slice_strategy": "keep_start"}}}, seq_len=64, gates={}
    )

    with pytest.raises(GateError, match=r"gsm/packed_shards: packing_loss: .*at most 10 %"):
        workspace.build()


def test_dropped_tail_is_recorded_by_document(tmp_path: Path) -> None:
    rows = [document(i, words=10) for i in range(9)]
    built = built_of(tmp_path, rows, TEXT, tail="drop")
    facts = built.facts("rows", "packed_shards")
    left = built.rows_of("rows", "packed_shards", file="left_out")
    states = {state: count for state, _, count in built.manifest("rows", "packed_shards").ledger}

    assert facts["tokens"] % LIMIT == 0
    assert 0 < facts["tokens_left_out"] < LIMIT
    assert sum(row["tokens"] for row in left) == facts["tokens_left_out"]
    # At most the first document of a tail has tokens before it.
    assert [row["state"] for row in left][1:] == ["tail"] * (len(left) - 1)
    assert states["kept"] + states.get("tail", 0) == len(rows)


@pytest.mark.slow
def test_segment_limit_that_costs_sequences_is_told(tmp_path: Path) -> None:
    rows = [pair(i, words=1) for i in range(40)]
    limited = built_of(tmp_path / "limited", rows, PAIR, max_segments_per_example=1)
    free = built_of(tmp_path / "free", rows, PAIR, max_segments_per_example=None)
    cost = limited.facts("rows", "packed_shards")["limit_cost"]
    needed = free.facts("rows", "packed_shards")["sequences"]

    assert free.facts("rows", "packed_shards")["limit_cost"] == 0
    assert cost == pytest.approx(1 - needed / 40)
    (_, results) = limited.steps[("rows", "packed_shards")]
    assert [one.check for one in results if one.failed] == ["limit_cost"]


def test_counted_sequences_are_those_of_the_plan() -> None:
    import numpy as np

    lengths = np.random.default_rng(1).integers(1, 100, 2000)

    assert pack_plan.count_best_fit(lengths, 100) == pack_plan.plan_best_fit(lengths, 100, None).sequences
    assert pack_plan.count_best_fit(lengths[:0], 100) == 0


# ── Files that are not what was written ────────────────────────────────────────────────────────────


class Rotting(MemoryFileSystem):
    """A storage that changes one byte in the middle of every packed shard it is given."""

    protocol = "rotting"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("rotting://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if "/packed_shards/" in path and "/data/" in path:
            middle = len(value) // 2
            value = value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]
        super().pipe_file(path, value, mode=mode, **kwargs)


@pytest.fixture
def rotting() -> Iterator[str]:
    fsspec.register_implementation("rotting", Rotting, clobber=True)
    yield "rotting://root"
    Rotting.store.clear()


def test_shard_that_is_not_what_was_written_closes_the_gate(tmp_path: Path, rotting: str) -> None:
    workspace = Workspace(tmp_path, rotting).one("rows.jsonl", [pair(i) for i in range(8)], PAIR)

    with pytest.raises(GateError, match="shard_digests: 1 "):
        workspace.build()
    (made,) = list_versions(workspace.project.store, ("mini", "rows", "packed_shards"))
    assert (made.facts["shard_digests"], made.facts["conservation"]) == (1, 1)


# ── Ranks and files that are not there any more ────────────────────────────────────────────────────


@pytest.mark.slow
def test_ranks_of_an_earlier_order_are_counted_until_they_are_built_again(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    dataset = workspace.dataset("rows.jsonl", [pair(i) for i in range(40)], PAIR)
    stale: list[int] = []

    def make(seed: int, *ranks: str) -> None:
        project = workspace.recipe({"rows": dataset}, seed=seed, partitions={"world_size": 3}).project
        runner.build(project, only=(*TO_SHARDS, "training_splits"))
        step = steps.find_step(project, ("mini", "gpu_partitions"))
        report = runner.run_step(project, step, gate.open_inputs(project, step), ranks=ranks)
        stale.append(report.manifest.facts["stale_rank"])

    make(0)
    make(1, "rank-00001-of-00003")
    make(1, "rank-00000-of-00003")
    make(1)
    make(1)

    assert stale == [0, 2, 1, 0, 0]


def test_file_without_records_is_told(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    dataset = workspace.files({"rows.jsonl": [pair(0)], "empty.jsonl": b"\n"}, PAIR)
    built = workspace.recipe({"rows": dataset}).build(only=("raw_dataset",))
    (report, results) = built.steps[("rows", "raw_dataset")]

    assert report.manifest.facts["empty_files"] == 1
    assert [one.check for one in results if one.failed] == ["empty_files"]


@pytest.mark.slow
def test_shares_of_each_dataset_are_counted_on_the_ranks(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    datasets = {
        name: workspace.dataset(f"{name}.jsonl", [pair(k + i) for i in range(n)], PAIR)
        for name, k, n in (("a", 0, 30), ("b", 99, 9))
    }
    built = workspace.recipe(datasets, seq_len=64, gates=LENIENT).build()
    table = built.manifest("gpu_partitions").tables["datasets"]
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}

    for name in ("a", "b"):
        packed = built.facts(name, "packed_shards")
        assert [rows[name][one] for one in ("sequences", "tokens", "trained_tokens")] == [
            packed[one] for one in ("sequences", "tokens", "trained_tokens")
        ]
    for share in ("sequences_share", "tokens_share", "trained_tokens_share"):
        assert sum(row[share] for row in rows.values()) == pytest.approx(1)
