"""Lineage in both directions: from every token to its source line, and from every line to its positions in training."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rowmill.build.steps import Project
from rowmill.cli.error_boundary import ExitStatus
from rowmill.inspection import trace
from rowmill.schema.shard_counts import ShardDetails
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer
from tests.support.cli_project import CHATS, NOTES, CliProject, answer, chat, note
from tests.support.recipes import current


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> CliProject:
    """Return a project that is built and that no test changes."""
    project = CliProject(tmp_path_factory.mktemp("built")).write(mixture={"batch_size": 4, "steps": 30})
    project.run("build")
    return project


@pytest.fixture
def copied(built: CliProject, tmp_path: Path) -> CliProject:
    """Return a copy of the built project, to be changed."""
    shutil.copytree(built.folder, tmp_path / "copied")
    return CliProject(tmp_path / "copied")


def line_of(i: int) -> int:
    """Return the line of chat i: the first is on line 1, the others follow a blank, a broken and a blank line."""
    return 1 if i == 0 else i + 4


def shards(project: Project, dataset: str) -> list[dict[str, Any]]:
    """Return all sequences of a dataset with their splits and numbers."""
    return [
        {**row, "split": shard.split, "sequence_id": shard.first_sequence + at}
        for part in current(project, dataset, "packed_shards").parts
        if (shard := part.find_details(ShardDetails)) is not None
        for at, row in enumerate(project.store.table(part.files["shard"]).to_pylist())
    ]


# ── From a line ──
@pytest.mark.slow
def test_source_line_after_blank_and_broken_lines_is_the_right_row(built: CliProject) -> None:
    out = built.run("trace", "--source", "data/chats.jsonl:5").out
    assert "data/chats.jsonl:5" in out
    assert json.dumps(chat(1)) in out
    assert re.search(r"places +chats/(train|validation)/\d+ · segment \d+ · tokens \d+ to \d+", out)


@pytest.mark.parametrize("i", range(CHATS))
def test_every_line_leads_to_its_own_record(built: CliProject, i: int) -> None:
    [found] = trace.trace_source(built.project, f"data/chats.jsonl:{line_of(i)}")
    assert json.loads(found.origin.raw) == chat(i)
    assert found.origin.line == line_of(i)
    assert [fate.state for fate in found.fates] == ["kept", "kept"]


@pytest.mark.parametrize("name", ["chats.jsonl", "data/chats.jsonl", "absolute"])
def test_file_may_be_named_by_its_end_or_its_path(built: CliProject, name: str) -> None:
    file = str(built.folder / "data" / "chats.jsonl") if name == "absolute" else name
    assert json.loads(trace.trace_source(built.project, f"{file}:1")[0].origin.raw) == chat(0)


def test_broken_line_is_traced_to_its_reject(built: CliProject) -> None:
    out = built.run("trace", "--source", "chats.jsonl:3").out
    assert re.search(r"canonical_rows +rejected · invalid_json", out)
    assert "segment" not in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--source chats.jsonl:2", "the nearest are on line 1 and line 3;"),
        ("--source chats.jsonl:4", "the nearest are on line 3 and line 5;"),
        ("--source chats.jsonl:900", f"the nearest are on line {CHATS + 3};"),
        ("--source chat.jsonl:1", r"data/chats\.jsonl|FILE:LINE"),
        ("--source chats.jsonl", r"data/chats\.jsonl|FILE:LINE"),
        ("--source chats.jsonl:x", r"data/chats\.jsonl|FILE:LINE"),
        ("--row 0123456789abcdef:1", "expected a row_id of the view rows, <part>:<number>;"),
        ("--sequence chats/train/99999", "the splits train with"),
        ("--sequence chats/training/0", "the splits train with"),
        ("--sequence chat/train/0", r"did you mean chats\?"),
        ("--sequence chats/train", "DATASET/SPLIT/N"),
        ("--sequence chats/train/0:999", "expected a token from 0 to"),
    ],
)
def test_unknown_place_says_what_is_needed_or_the_nearest(built: CliProject, options: str, said: str) -> None:
    assert re.search(said, built.run("trace", *options.split(), status=ExitStatus.INVALID).err)


# ── From a row ──
def test_row_s_places_hold_its_tokens_and_all_of_them(built: CliProject) -> None:
    project = built.project
    sequences = {(row["split"], row["sequence_id"]): row for row in shards(project, "notes")}
    encoder = Encoder(open_tokenizer(project.recipe.tokenizer_choice.name, project.base))
    for i in range(NOTES):
        [found] = trace.trace_source(project, f"notes.jsonl:{i + 1}")
        pieces = [
            sequences[place.split, place.sequence]["input_ids"][place.offset : place.offset + place.length]
            for place in sorted(found.places, key=lambda place: (place.example_id, place.start))
        ]

        assert encoder.decode([token for piece in pieces for token in piece]).startswith(note(i))
        assert sum(map(len, pieces)) == sum(tokens for _, tokens, _ in found.examples)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["chats", "tasks", "notes"])
def test_every_segment_of_every_sequence_is_found_from_its_row(built: CliProject, dataset: str) -> None:
    project = built.project
    for row in shards(project, dataset):
        whole = trace.trace_sequence(project, f"{dataset}/{row['split']}/{row['sequence_id']}")

        assert [place.example_id for place in whole.places] == row["example_ids"]
        assert [place.length for place in whole.places] == row["segment_lengths"]
        for place in whole.places:
            [found] = trace.trace_row(project, place.example_id)
            assert place in found.places


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["chats", "tasks", "notes"])
def test_positions_of_a_sequence_match_the_ranks_files(built: CliProject, dataset: str) -> None:
    project = built.project
    files = [item for part in built.current("gpu_partitions").parts for item in part.files.items()]
    tables = [project.store.table(file) for name, file in files if name.startswith("data/")]
    rows = [row for table in tables for row in table.to_pylist() if row["dataset"] == dataset]
    wanted = Counter(row["sequence_id"] for row in rows)
    train = [row["sequence_id"] for row in shards(project, dataset) if row["split"] == "train"]
    for sequence in train:
        showings = trace.trace_sequence(project, f"{dataset}/train/{sequence}").places[0].showings

        assert len(showings) == wanted[sequence]
        for one in showings:
            row = pq.read_table(one.file, partitioning=None).slice(one.file_row, 1).to_pylist()[0]
            assert (row["dataset"], row["sequence_id"]) == (dataset, sequence)
            assert f"rank-{one.rank:05d}-of-00002" in one.file


# ── From a place in a shard ──
@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["chats", "notes"])
def test_token_of_a_sequence_is_what_its_label_says(built: CliProject, dataset: str) -> None:
    row = next(row for row in shards(built.project, dataset) if row["split"] == "train")
    place = f"{dataset}/train/{row['sequence_id']}"
    for at in (0, 1, row["tokens"] // 3, row["tokens"] // 2, row["tokens"] - 1):
        found = trace.trace_sequence(built.project, f"{place}:{at}")

        number = at - found.shown.start
        assert (found.token, found.read("input_ids")[number]) == (at, row["input_ids"][at])
        assert found.classes[number][1] == (row["labels"][at] >= 0)
        assert len(found.texts) <= 2 * trace.NEIGHBOR_TOKENS + 1


def test_trained_tokens_of_a_chat_are_its_answer_s(built: CliProject) -> None:
    row = next(row for row in shards(built.project, "chats") if row["split"] == "train")
    first = next(i for i, label in enumerate(row["labels"]) if label >= 0)
    place = f"chats/train/{row['sequence_id']}:{first}"
    record = json.loads(trace.trace_sequence(built.project, place).origins[0].raw)
    number = int(record["messages"][1]["content"].split()[0])

    out = built.run("trace", "--sequence", place).out
    assert "assistant · message 1 · trained" in out
    assert f"data/chats.jsonl:{line_of(number)}" in out
    assert answer(number).split()[0] in out


# ── Changed sources and outputs ──
def test_source_that_changed_since_leaves_the_record_known_and_the_line_not(copied: CliProject) -> None:
    before = trace.trace_sequence(copied.project, "chats/train/0")
    copied.write_data("chats.jsonl", json.dumps(chat(7)) + "\n")
    after = trace.trace_sequence(copied.project, "chats/train/0")
    assert [origin.record for origin in after.origins] == [origin.record for origin in before.origins]
    assert {origin.line for origin in after.origins} == {None}
    assert "data/chats.jsonl" in copied.run("trace", "--sequence", "chats/train/0").out


@pytest.mark.slow
def test_rebuild_of_one_stage_alone_does_not_mix_two_lineages(copied: CliProject) -> None:
    before = trace.trace_sequence(copied.project, "chats/train/0")
    copied.append_chat(1000)
    for stage in ("raw_dataset", "canonical_rows"):
        copied.run("build", "--only", stage)
    after = trace.trace_sequence(copied.project, "chats/train/0")
    assert after.places == before.places
    assert [origin.record for origin in after.origins] == [origin.record for origin in before.origins]


@pytest.mark.slow
def test_order_of_other_shards_is_not_shown(copied: CliProject) -> None:
    copied.append_chat(1000)
    for stage in ("raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards"):
        copied.run("build", "--only", stage)
    out = copied.run("trace", "--sequence", "chats/train/0").out
    assert "was built from other shards: run rowmill build" in out
    assert "rank 0" not in out


@pytest.mark.slow
def test_row_of_a_dataset_that_is_not_packed_says_so(tmp_path: Path) -> None:
    project = CliProject(tmp_path).write()
    project.run("stats")
    assert "not packed yet" in project.run("trace", "--source", "chats.jsonl:1").out
