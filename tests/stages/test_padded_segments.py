"""`packing.segment_multiple_of` in a build: what is padded, what does not see it, and what is counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmill.inspection.trace import trace_sequence, view_sequence
from tests.support.built_exports import load_rows
from tests.support.preferences import cut_sides
from tests.support.reader_builds import in_bytes
from tests.support.recipes import CHAT, TEXT, Built, Workspace, chat, document, open_encoder, open_reader, sentence

MULTIPLE = 16
EXPORTS = [{"kind": "native", "name": "native"}, {"kind": "hf", "name": "hf"}]


def build(
    folder: Path, rows: "list[dict[str, Any]]", kind: dict[str, Any], *, layout: str = "copied", **packing: Any
) -> Built:
    """Build rows in several files with an export of the native form and one of single segments."""
    workspace = Workspace(folder)
    contents = {f"{i}.jsonl": rows[i::3] for i in range(3)}
    dataset = workspace.files(contents, kind, packing=packing, splits={"validation": 0.2})
    exports, partitions = EXPORTS if kind == CHAT else [], {"world_size": 2, "layout": layout}
    changes = {"exports": exports, "mixture": {"batch_size": 6}, "partitions": partitions}
    return workspace.recipe({"rows": dataset}, **changes).build()


CHATS = [chat(i, turns=1 + i % 4) for i in range(60)]


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("padded"), CHATS, CHAT, segment_multiple_of=MULTIPLE)


def shards(built: Built) -> list[dict[str, Any]]:
    return built.rows_of("rows", "packed_shards", file="shard")


def pieces(built: Built) -> list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
    """Return example, start, ids and labels of every segment, without padding, which is checked on the way."""
    found: list[tuple[str, int, tuple[int, ...], tuple[int, ...]]] = []
    for row in shards(built):
        at = 0
        own = zip(row["example_ids"], row["starts"], row["segment_lengths"], row["segment_padding"], strict=True)
        for name, start, length, padding in own:
            ids, labels = (row[column][at : at + length] for column in ("input_ids", "labels"))
            found.append((name, start, tuple(ids), tuple(labels)))
            at += length
            assert row["labels"][at : at + padding] == [-100] * padding
            at += padding
        assert at == len(row["input_ids"]) == sum(row["seq_lengths"]) <= 256
        assert not any(length % MULTIPLE for length in row["seq_lengths"])
    return found


@pytest.mark.slow
def test_every_segment_of_shards_and_ranks_is_padded_and_no_token_is_lost(padded: Built) -> None:
    examples = {one["example_id"]: one["input_ids"] for one in padded.examples()}

    found = pieces(padded)

    assert sorted((name, ids) for name, _, ids, _ in found) == sorted((k, tuple(v)) for k, v in examples.items())
    assert {tuple(row["seq_lengths"]) for row in shards(padded)} != {(256,)}
    manifest = padded.manifest("rows", "packed_shards")
    padding = sum(sum(row["segment_padding"]) for row in shards(padded))
    tokens = sum(map(len, examples.values()))
    assert (manifest.facts["padding"], manifest.facts["tokens"]) == (padding, tokens)
    assert manifest.facts["padding_share"] == pytest.approx(padding / (tokens + padding), abs=1e-6)
    assert ("all", "padding", padding) in manifest.token_ledger
    results = padded.outcomes("rows", "packed_shards")
    assert (results["conservation"], results["padding_share"]) == ("passed", "failed")

    rows = padded.rank_rows()

    counted = {name: count for _, name, count in padded.manifest("gpu_partitions").token_ledger}

    assert any(row["filler"] for row in rows)
    assert all(length % MULTIPLE == 0 for row in rows for length in row["seq_lengths"])
    assert sum(counted.values()) == sum(len(row["input_ids"]) for row in rows)
    assert counted["padding"] == sum(2 * row["filler"] + sum(row["segment_padding"]) for row in rows)


@pytest.mark.slow
def test_indexes_of_padded_sequences_have_the_batches_and_counts_of_copies(padded: Built, tmp_path: Path) -> None:
    indexed = build(tmp_path, CHATS, CHAT, layout="index", segment_multiple_of=MULTIPLE)

    for rank in range(2):
        first, second = (in_bytes(open_reader(one, rank, 2, batch_size=3)) for one in (padded, indexed))
        assert first
        assert first == second
    assert indexed.manifest("gpu_partitions").token_ledger == padded.manifest("gpu_partitions").token_ledger


def test_native_export_is_padded_and_others_are_not(padded: Built) -> None:
    native, plain = (load_rows(padded, name).to_list() for name in ("native", "hf"))

    segments = [(row["segment_lengths"], row["segment_padding"], row["seq_lengths"]) for row in native]
    assert all([-length % MULTIPLE for length in lengths] == padding for lengths, padding, _ in segments)
    assert all(np.add(lengths, padding).tolist() == spans for lengths, padding, spans in segments)
    trained = sorted(one["input_ids"] for one in padded.examples() if one["split"] == "train")
    assert sorted(row["input_ids"] for row in plain) == trained


def test_traces_shown_sequences_and_readers_tell_padding_from_tokens(padded: Built) -> None:
    shown = view_sequence(padded.project, "rows", open_encoder(padded), max_tokens=10_000)
    traced = trace_sequence(padded.project, "rows/train/0:0")

    assert shown is not None
    assert (
        len(shown.read("input_ids"))
        == len(shown.kinds)
        == len(shown.texts)
        == sum(place.length for place in shown.segments)
    )
    last = traced.places[-1]
    token = trace_sequence(padded.project, f"rows/train/0:{last.offset}")
    [example] = [one for one in padded.examples() if one["example_id"] == last.example_id]
    assert token.read("input_ids")[0] == example["input_ids"][0]

    reader = open_reader(padded, 0, 2, batch_size=3)
    rows = [reader[i] for i in range(3)]

    flat = next(iter(reader))
    wide = reader.map(lambda row: row).get_batch([0, 1, 2])

    assert flat["cu_seqlens_padded"].tolist() == flat["cu_seq_lens_q"].tolist() == wide["cu_seq_lens_q"].tolist()
    real, spans = np.diff(flat["cu_seqlens"]), np.diff(flat["cu_seqlens_padded"])
    assert real.tolist() == [length for row in rows for length in row.real_lengths.tolist()]
    assert (real < spans).any()
    assert (-real % MULTIPLE == spans - real).all()
    batch = open_reader(padded, 0, 2, batch_size=3, layout="padded").get_batch([0, 1, 2])
    assert int(batch["attention_mask"].sum()) == int(real.sum()) == int((batch["segment_ids"] >= 0).sum())


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["keep", "drop"])
def test_joined_documents_are_cut_at_multiples(tmp_path: Path, tail: str) -> None:
    rows = [document(i, words=3 + i % 90) for i in range(60)]

    built = build(tmp_path, rows, TEXT, segment_multiple_of=MULTIPLE, pack_strategy="concat", tail=tail)

    manifest = built.manifest("rows", "packed_shards")
    found = pieces(built)
    assert sum(len(ids) for *_, ids, _ in found) == manifest.facts["tokens"]
    left = sum(count for _, name, count in manifest.token_ledger if name == "dropped")
    assert manifest.facts["tokens"] + left == sum(len(one["input_ids"]) for one in built.examples())
    assert (left > 0) is (tail == "drop")
    sizes = [len(row["input_ids"]) for row in shards(built)]
    assert sorted(sizes)[2 if tail == "keep" else 0] == 256


@pytest.mark.slow
def test_estimated_sequences_are_those_of_padded_segments(tmp_path: Path) -> None:
    """Of 3, 5 and 6 ids padded to 4, 8 and 8 none share a sequence of 8; without padding, 3 and 5 do."""
    rows = [{"input_ids": list(range(3, 3 + n)), "response_length": 1} for n in (3, 5, 6)]
    texts = [document(i, words=20 + 9 * i) for i in range(8)]
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for multiple in (1, 4):
        packing: dict[str, Any] = {"segment_multiple_of": multiple}
        many = [*texts, *(document(100 + i, words=3) for i in range(20 * multiple))]
        for name, own, kind, options in (("ids", rows, {"kind": "tokens"}, packing), ("texts", many, TEXT, packing),
                                         ("best", many, TEXT, {**packing, "pack": True})):  # fmt: skip
            workspace = Workspace(tmp_path / f"{name}-{multiple}")
            seq_len = 8 if name == "ids" else 64
            made = workspace.one(
                "a.jsonl", own, kind, packing=options, splits={"validation": 0}, seq_len=seq_len
            ).build()
            [estimated] = [row[3] for row in made.manifest("rows", "truncation_stats").tables["what_if"].rows
                           if row[0] == seq_len]  # fmt: skip
            found[name, multiple] = estimated, made.facts("rows", "packed_shards")["sequences"]

    assert (found["ids", 1], found["ids", 4]) == ((2, 2), (3, 3))
    for estimated, packed in found.values():
        assert estimated == packed


@pytest.mark.slow
def test_flops_count_the_padding_that_is_computed(tmp_path: Path) -> None:
    """With 10 n + n², 3 and 5 ids padded to 4 and 8 cost 56 + 144, and without padding 39 + 75."""
    rows = [{"input_ids": list(range(3, 3 + n)), "response_length": 1} for n in (3, 5)]
    costs: dict[int, int] = {}
    for multiple in (1, 4):
        workspace = Workspace(tmp_path / str(multiple))
        partitions = {"balance": "flops", "flops_linear": 10}
        made = workspace.one(
            "a.jsonl",
            rows,
            {"kind": "tokens"},
            packing={"segment_multiple_of": multiple},
            splits={"validation": 0},
            seq_len=64,
            partitions=partitions,
        ).build()
        costs[multiple] = made.facts("training_splits")["flops"]

    assert costs == {1: 39 + 75, 4: 56 + 144}


@pytest.mark.slow
def test_sides_of_pairs_are_padded_and_batches_of_pairs_are_not(tmp_path: Path) -> None:
    rows = [{"prompt": sentence(i, 5), "chosen": sentence(i + 1, 9), "rejected": sentence(i, 7)} for i in range(30)]

    built = build(tmp_path, rows, {"kind": "preference"}, segment_multiple_of=MULTIPLE, pack=True)

    assert len(pieces(built)) == 60
    facts = built.facts("rows", "packed_shards")
    assert (facts["pair_intact"], facts["prompt_identical"], facts["conservation"]) == (0, 0, 0)
    batch = next(iter(open_reader(built, 0, 2, layout="preference", batch_size=2)))
    sides = {tuple(ids) for row in built.examples() for ids, _ in cut_sides(row)}
    sizes = batch["attention_mask"].sum(axis=1)
    shown = {tuple(ids[:size]) for ids, size in zip(batch["input_ids"].tolist(), sizes.tolist(), strict=True)}
    assert shown <= sides


def test_default_length_of_a_side_leaves_its_padding_space(tmp_path: Path) -> None:
    packing = {"segment_multiple_of": 8}
    workspace = Workspace(tmp_path).one("a.jsonl", [], {"kind": "preference"}, packing=packing, seq_len=280)

    assert workspace.project.recipe.limit_of("rows") == 136
