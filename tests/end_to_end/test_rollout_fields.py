"""Fields of token rows: from a record's numbers to shards, ranks, reader and exports, each at its token.

Every number follows from the token that it is of: a response has ids from 100 on, each with the logprob -id/8; of these
the even ones are trained, and have the reward of their row as advantage. A teacher's three likeliest ids are the id and
the two after it, with logprobs that fall by one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from rowmill.reader.layouts import join_flat, stack_padded
from rowmill.schema.examples import BATCH_NAMES
from rowmill.schema.manifest import Manifest
from rowmill.shards import native
from tests.reader.test_index_layout import run_reader_alone
from tests.support.recipes import LENIENT, Built, Workspace, chat, current_rows, open_reader

LIKELIEST = 3
TEACHER = {
    "teacher_ids": {"type": "int32", "size": LIKELIEST},
    "teacher_logprobs": {"type": "float16", "size": LIKELIEST},
}
FIELDS = {"token_fields": {"logprobs": {}, "advantages": {}, **TEACHER}, "row_fields": ["reward", "group_id"]}
TOKENS: dict[str, Any] = {"kind": "tokens", **FIELDS}
OWN_NAMES = {"input_ids", "labels", "position_ids", *TOKENS["token_fields"], *TOKENS["row_fields"]}
GATES = LENIENT | {"same_tokenization": {"at_least": 0}}


NO_TEACHER = [0] * LIKELIEST
"""What a token without a teacher has."""


def rollout(i: int) -> dict[str, Any]:
    """Return a prompt and a response, with its logprobs and the advantages of what is trained."""
    prompt = [3 + (i + k) % 90 for k in range(4 + i % 7)]
    response = [100 + (5 * i + 3 * k) % 400 for k in range(6 + 3 * (i % 11))]
    mask = [1 - one % 2 for one in response]
    return {
        "prompt_ids": prompt, "response_ids": response, "response_mask": mask,
        "logprobs": [-one / 8 for one in response], "advantages": [i / 4] * sum(mask),
        "teacher_ids": [[one, one + 1, one + 2] for one in response],
        "teacher_logprobs": [[-one / 8, -one / 8 - 1, -one / 8 - 2] for one in response],
        "reward": i / 4, "group_id": i // 4,
    }  # fmt: skip


def write_recipe(folder: Path, *, rows: Sequence[Mapping[str, Any]], **changes: Any) -> Workspace:
    workspace = Workspace(folder)
    datasets = {
        "chats": workspace.dataset("c.jsonl", [chat(i) for i in range(15)]),
        "rollouts": workspace.dataset("r.jsonl", rows, TOKENS),
    }
    return workspace.recipe(datasets, seq_len=128, gates=GATES, **changes)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build rollouts beside chats for two ranks, with slices and validation, and all exports that hold fields."""
    exports = [{"kind": "native", "name": "own"}, {"kind": "hf", "name": "single"},
               {"kind": "hf", "name": "packed", "unit": "packed"}]  # fmt: skip
    defaults = {"splits": {"validation": 0.2}, "packing": {"slice_strategy": "split"}}
    return write_recipe(
        tmp_path_factory.mktemp("fields"), rows=[rollout(i) for i in range(80)], exports=exports, defaults=defaults,
        partitions={"world_size": 2, "remainder": "pad"}, mixture={"batch_size": 4},
    ).build()  # fmt: skip


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the same with padded segments, a number of validation sequences, and ranks as indexes."""
    return write_recipe(
        tmp_path_factory.mktemp("padded"), rows=[rollout(i) for i in range(80)],
        defaults={"packing": {"segment_multiple_of": 8}}, exports=[{"kind": "native", "name": "own"}],
        partitions={"world_size": 2, "remainder": "pad", "layout": "index"},
        mixture={"batch_size": 4, "num_validation_sequences": {"rollouts": 2}},
    ).build()  # fmt: skip


@pytest.mark.slow
def test_reading_fields_imports_no_pandas(mixed: Built, padded: Built) -> None:
    assert run_reader_alone(mixed) == run_reader_alone(padded) == "True []"


def export_rows(built: Built, name: str) -> list[dict[str, Any]]:
    part = built.manifest("exports", name).parts[0]
    files = [file for path, file in part.files.items() if path.endswith(".parquet")]
    return [row for file in files for row in pq.read_table(built.project.store.path(file.path)).to_pylist()]


def split_segments(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each segment of a packed row with its own tokens, numbers and values; pad tokens are checked here."""
    first = 0
    padding = row.get("segment_padding") or [0] * len(row["segment_lengths"])
    for number, (length, added) in enumerate(zip(row["segment_lengths"], padding, strict=True)):
        names = ("input_ids", "labels", "logprobs", "advantages", *TEACHER)
        own = {name: row[name][first : first + length] for name in names}
        assert not any(row[name][first + length : first + length + added] != [0] * added for name in names[2:4])
        assert not any(row[name][first + length : first + length + added] != [NO_TEACHER] * added for name in TEACHER)
        first += length + added
        yield {**own, "reward": row["reward"][number], "group_id": row["group_id"][number], "dataset": row["dataset"]}
    assert first == len(row["logprobs"]) == len(row["advantages"])


def segments_of(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [one for row in rows for one in split_segments(row)]


def require_own_numbers(segments: Iterable[Mapping[str, Any]]) -> None:
    """Assert that each number of a segment is the one of its token."""
    for one in segments:
        if one.get("reward") is None:
            assert one["group_id"] is None
            assert not any(one["logprobs"]) and not any(one["advantages"])
            assert all(one[name] == [NO_TEACHER] * len(one["input_ids"]) for name in TEACHER)
            continue
        assert one["group_id"] == str(int(one["reward"] * 4) // 4)
        assert one["logprobs"] == [-i / 8 if i >= 100 else 0 for i in one["input_ids"]]
        assert one["advantages"] == [one["reward"] if i >= 100 and i % 2 == 0 else 0 for i in one["input_ids"]]
        assert one["teacher_ids"] == [[i, i + 1, i + 2] if i >= 100 else NO_TEACHER for i in one["input_ids"]]
        falling = [[-i / 8, -i / 8 - 1, -i / 8 - 2] if i >= 100 else NO_TEACHER for i in one["input_ids"]]
        assert one["teacher_logprobs"] == falling


# ── From records to ranks ──────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["mixed", "padded"])
def test_numbers_of_every_shard_are_those_of_their_tokens(name: str, request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(name)
    for dataset in ("chats", "rollouts"):
        segments = segments_of(built.rows_of(dataset, "packed_shards", file="shard"))
        assert segments
        assert {one["reward"] is None for one in segments} == {dataset == "chats"}
        require_own_numbers(segments)
    assert {result.outcome for result in built.steps["rollouts", "canonical_rows"][1]} <= {"passed", "not_applicable"}


def test_ranks_hold_the_numbers_of_all_rows_and_fillers_none(mixed: Built) -> None:
    segments = segments_of(mixed.rank_rows())
    require_own_numbers(segments)
    own = [one for one in segments if one["dataset"] == "rollouts"]
    examples = [row for row in mixed.examples("rollouts") if row["split"] == "train"]
    assert sum(sum(one["logprobs"]) for one in own) == sum(sum(row["logprobs"]) for row in examples)
    assert {one["reward"] for one in own} == {row["reward"] for row in examples}


def test_content_hash_covers_every_number() -> None:
    one = native.make_filler(pad_id=3, token_types={"logprobs": pa.float32()})
    pairs = {"logprobs": pa.list_(pa.float16(), 2)}
    fillers = native.make_filler(pad_id=3, token_types=pairs, multiple=4)
    assert one.column("logprobs").to_pylist() == [[0, 0]]
    assert fillers.column("logprobs").to_pylist() == [[[0, 0]] * 4]
    changes: list[tuple[pa.Table, Any]] = [(one, np.array([0, -0.5], np.float32))]
    for number in range(4):
        changed = np.zeros((2, 2), np.float16)
        changed.flat[number] = -0.5
        changes.append((fillers, changed))
    for table, changed in changes:
        segments = native.recover_segments(table)
        other = replace(segments, token_values={"logprobs": changed})
        assert native.hash_sequences(segments) != native.hash_sequences(other)


# ── Reader ─────────────────────────────────────────────────────────────────────────────────────────


def require_own_batch(batch: Mapping[str, Any], spans: NDArray[np.int64], count: int) -> None:
    """Assert that the fields of a batch are those of its tokens; `spans` number its spans, -1 is padding."""
    ids, rewards = batch["input_ids"], np.append(batch["reward"], np.nan)[spans]
    assert batch.keys() - OWN_NAMES <= BATCH_NAMES
    for field in ("logprobs", "advantages"):
        assert (batch[field].dtype, batch[field].shape) == (np.dtype(np.float32), batch["labels"].shape)
    for field, dtype in (("teacher_ids", np.int32), ("teacher_logprobs", np.float16)):
        assert (batch[field].dtype, batch[field].shape) == (np.dtype(dtype), (*batch["labels"].shape, LIKELIEST))
    assert (batch["reward"].dtype, batch["reward"].shape, len(batch["group_id"])) == (np.float32, (count,), count)
    for reward, group in zip(batch["reward"].tolist(), batch["group_id"], strict=True):
        assert group == (None if np.isnan(reward) else str(int(4 * reward) // 4))
    is_rollout = ~np.isnan(rewards)
    answers, trained = is_rollout & (ids >= 100), is_rollout & (ids >= 100) & (ids % 2 == 0)
    assert np.array_equal(batch["logprobs"], np.where(answers, -ids / 8, 0))
    assert np.array_equal(batch["advantages"], np.where(trained, rewards, 0))
    likeliest = ids[..., None] + np.arange(LIKELIEST)
    assert np.array_equal(batch["teacher_ids"], np.where(answers[..., None], likeliest, 0))
    falling = -ids[..., None] / 8 - np.arange(LIKELIEST)
    assert np.array_equal(batch["teacher_logprobs"], np.where(answers[..., None], falling, 0))


@pytest.mark.parametrize("name", ["mixed", "padded"])
def test_flat_batches_have_each_number_at_its_token(name: str, request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(name)
    for rank in range(2):
        for batch in open_reader(built, rank, 2, pad_to=512):
            spans = batch["seq_idx"]
            if "cu_seqlens" in batch:
                ends = batch["cu_seqlens_padded"][:-1] + np.diff(batch["cu_seqlens"])
                spans = np.where(np.arange(512) < ends[spans], spans, -1)
            require_own_batch(batch, spans, len(batch["cu_seq_lens_q"]) - 1)


def test_padded_batches_have_each_number_at_its_token(mixed: Built) -> None:
    for batch in open_reader(mixed, 0, 2, layout="padded", batch_size=2):
        counts = batch["segment_ids"].max(axis=1) + 1
        firsts = (np.cumsum(counts) - counts)[:, None]
        spans = np.where(batch["segment_ids"] >= 0, batch["segment_ids"] + firsts, -1)
        require_own_batch(batch, spans, int(counts.sum()))


def test_sequences_without_fields_join_those_that_have_some(mixed: Built) -> None:
    reader = open_reader(mixed, 0, 2)
    rows = (reader[i] for i in range(len(reader)))
    one = next(row for row in rows if not np.isnan(row.row_fields["reward"]).any())
    bare = replace(one, token_fields={}, row_fields={})
    flat = join_flat([bare, one], pad_id=0, length=None)
    stacked = stack_padded([bare, one], pad_id=0, length=None)
    zeros, segments = [0.0] * len(one.input_ids), len(one.seq_lengths)
    assert one.copy().token_fields["logprobs"].base is None
    assert flat["logprobs"][0].tolist() == zeros + one.token_fields["logprobs"].tolist()
    assert stacked["logprobs"].tolist() == [zeros, one.token_fields["logprobs"].tolist()]
    assert np.isnan(flat["reward"]).tolist() == [True] * segments + [False] * segments
    assert flat["group_id"] == stacked["group_id"] == [None] * segments + one.row_fields["group_id"].tolist()


# ── Exports ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["own", "packed", "single"])
def test_exports_hold_the_numbers_of_their_tokens(mixed: Built, padded: Built, name: str) -> None:
    if name == "own":
        require_own_numbers(segments_of(export_rows(padded, name)))
    rows = export_rows(mixed, name)
    segments = rows if name == "single" else segments_of(rows)
    require_own_numbers(segments)
    trained = sorted(one for row in segments for one in row["advantages"])
    assert trained == sorted(one for row in mixed.rank_rows() if not row["filler"] for one in row["advantages"])
    assert all(not any(label >= 0 and not a for label, a in zip(row["labels"], row["advantages"], strict=True))
               for row in segments if row["reward"])  # fmt: skip


# ── What a row may lack, and what is cut ───────────────────────────────────────────────────────────
def test_rows_without_a_field_are_counted_and_wrong_ones_rejected(tmp_path: Path) -> None:
    bad = [
        rollout(2) | {"logprobs": [-0.5]},
        rollout(3) | {"advantages": ["x"]},
        rollout(4) | {"reward": "high"},
        rollout(5) | {"teacher_ids": [[1, 2]] * 20},
        rollout(6) | {"teacher_ids": [[1, 2, 3]]},
    ]
    rows = [rollout(0), rollout(1) | {"logprobs": None}, *bad]

    def build(name: str, kind: Mapping[str, Any]) -> tuple[Manifest, list[str]]:
        workspace = Workspace(tmp_path / name).one("r.jsonl", rows, kind)
        report, results = workspace.build(only=("raw_dataset", "canonical_rows")).steps["rows", "canonical_rows"]
        return report.manifest, [one.outcome for one in results if one.check == "fields_absent"]

    made, outcome = build("fields", TOKENS)
    rejects = current_rows(Workspace(tmp_path / "fields").project, "rows", "canonical_rows", file="rejects")
    assert [json.loads(row["raw"]) for row in rejects] == bad
    assert dict(line[1:] for line in made.ledger if line[0] == "rejected") == {"bad_field": 2, "length_mismatch": 3}
    assert (made.facts["fields_absent"], outcome) == (0.5, ["failed"])
    assert build("plain", {"kind": "tokens"})[1] == ["not_applicable"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_cut_rows_lose_the_numbers_of_the_ids_that_they_lose(tmp_path: Path, side: str) -> None:
    truncation = {"max_length": 20, "overlong": "truncate", "token_cut": "allow", "truncate_side": side}
    made = Workspace(tmp_path).one("r.jsonl", [rollout(i) for i in range(20)], TOKENS, truncation=truncation).examples()
    assert max(len(one["input_ids"]) for one in made) == 20
    require_own_numbers(made)
