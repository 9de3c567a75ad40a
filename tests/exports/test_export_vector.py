"""The specification's vector in every format, to the byte: two segments small enough to check by eye."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError
from rowmill.exports.mds import cut_turns
from rowmill.shards.sequences import SequenceBatch
from tests.support import export_readers as readers
from tests.support.export_cases import VECTOR, export, sequences, shape, terms, write

SEGMENTS = [((10, 11, 2), (False, True, True)), ((20, 2), (False, True))]


MDS = pytest.mark.skipif(
    find_spec("streaming") is None, reason="mosaicml-streaming is not installed: pip install 'rowmill[mds]'"
)
WEIGHTS = [0, 0.5, 2, 0, 0.25]


def written(folder: Path, content: SequenceBatch | None = None, *, terms: Any = None, **options: Any) -> Path:
    """Write the vector, or other sequences, with an export; return the folder of its data."""
    data, _ = write(export(**options), sequences(VECTOR) if content is None else content, folder, **terms or {})
    return data


@pytest.mark.parametrize("options", [{"kind": "native"}, {"kind": "hf", "unit": "packed"}], ids=["native", "hf"])
def test_packed_parquet_of_the_vector(tmp_path: Path, options: dict[str, Any]) -> None:
    [row] = readers.rows(written(tmp_path, **options))
    assert row == {
        "input_ids": [10, 11, 2, 20, 2],
        "labels": [-100, 11, 2, -100, 2],
        "position_ids": [0, 1, 2, 0, 1],
        "seq_lengths": [3, 2],
        "segment_lengths": [3, 2],
        "example_ids": ["e0#0", "e1#0"],
        "starts": [0, 0],
        "dataset": "d",
        "sequence_id": 0,
        "tokens": 5,
        "trained_tokens": 3,
        "filler": False,
    }


def test_packed_parquet_has_the_specified_types_and_no_nulls(tmp_path: Path) -> None:
    [path] = written(tmp_path, terms={"card": '{"a": 1}'}, kind="native").iterdir()
    ints = pl.List(pl.Int32)
    assert dict(pl.read_parquet_schema(path)) == {
        "input_ids": ints, "labels": ints, "position_ids": ints, "seq_lengths": ints, "example_ids": pl.List(pl.String),
        "starts": ints, "segment_lengths": ints, "dataset": pl.Categorical, "sequence_id": pl.Int64, "tokens": pl.Int32,
        "trained_tokens": pl.Int32, "filler": pl.Boolean,
    }  # fmt: skip
    assert pl.read_parquet_metadata(path)["rowmill"] == '{"a": 1}'
    assert all(count == 0 for count in pl.read_parquet(path).null_count().row(0))


def test_open_attention_is_one_span_of_several_segments(tmp_path: Path) -> None:
    content = sequences([[([10, 11], [0, 1]), ([20, 2], [1, 1])]], is_open=True)
    [row] = readers.rows(written(tmp_path, content, kind="native"))
    assert row["position_ids"] == [0, 1, 2, 3]
    assert (row["seq_lengths"], row["segment_lengths"]) == ([4], [2, 2])
    assert row["labels"] == [-100, 11, 20, 2]


@pytest.mark.parametrize("kind", ["hf", "axolotl"])
def test_unpacked_parquet_of_the_vector(tmp_path: Path, kind: str) -> None:
    [path] = written(tmp_path, kind=kind).iterdir()
    ints = pl.List(pl.Int32)
    assert readers.unpacked(readers.rows(path.parent)) == SEGMENTS
    assert pl.read_parquet_schema(path) == {"input_ids": ints, "attention_mask": pl.List(pl.Int8), "labels": ints}


@pytest.mark.parametrize("kind", ["skyrl", "verl"])
def test_masked_rows_of_the_vector(tmp_path: Path, kind: str) -> None:
    [path] = written(tmp_path, kind=kind).iterdir()
    assert readers.rows(path.parent) == [
        {"input_ids": [10, 11, 2], "loss_mask": [0, 1, 1]},
        {"input_ids": [20, 2], "loss_mask": [0, 1]},
    ]
    assert pl.read_parquet_schema(path) == {"input_ids": pl.List(pl.Int32), "loss_mask": pl.List(pl.Int8)}


def test_axolotl_json_lines_of_the_vector(tmp_path: Path) -> None:
    data = written(tmp_path, kind="axolotl", ds_type="json")
    assert (data / "part-00000.jsonl").read_bytes().splitlines() == [
        b'{"attention_mask":[1,1,1],"input_ids":[10,11,2],"labels":[-100,11,2]}',
        b'{"attention_mask":[1,1],"input_ids":[20,2],"labels":[-100,2]}',
    ]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["packed", "unpacked"])
def test_saved_dataset_of_the_vector_is_loaded_by_its_library(tmp_path: Path, unit: str) -> None:
    import datasets

    data = written(tmp_path, kind="hf", arrow=True, unit=unit)
    loaded = datasets.load_from_disk(str(data))

    assert set(loaded) == {"train"}
    rows = loaded["train"].to_list()
    assert (readers.packed(rows)[0] if unit == "packed" else readers.unpacked(rows)) == SEGMENTS
    assert readers.saved(data, "train") == rows


def test_tinker_lines_of_the_vector(tmp_path: Path) -> None:
    data = written(tmp_path, kind="tinker")
    first, second = (data / "part-00000.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(first) == {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [10, 11]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [11, 2], "dtype": "int64", "shape": [2]},
            "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
        },
    }
    assert json.loads(second)["model_input"]["chunks"][0]["tokens"] == [20]
    assert json.loads(second)["loss_fn_inputs"]["target_tokens"]["data"] == [2]
    assert (tmp_path / "example_ids.txt").read_text(encoding="utf-8") == "e0#0\ne1#0\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "example_ids.txt"]


def tinker_weights(data: Path) -> list[list[float]]:
    return [line["loss_fn_inputs"]["weights"]["data"] for line in readers.json_rows(data)]


def test_tinker_mean_gives_each_datum_a_sum_of_one_or_nothing(tmp_path: Path) -> None:
    content = sequences([[([5, 6, 7, 8], [0, 1, 1, 1]), ([5, 6], [0, 0]), ([5, 6], [0, 1])]])
    thirds, *others = tinker_weights(written(tmp_path, content, kind="tinker", reduction="mean"))
    assert others == [[0.0], [1.0]]
    assert thirds == pytest.approx([1 / 3] * 3)
    assert all(np.float32(one) == one for one in np.array(thirds, np.float32))


@pytest.mark.parametrize(
    ("kind", "read", "expected"),
    [
        ("tinker", tinker_weights, [[0.5, 2.0], [0.25]]),
        ("native", lambda data: [row["loss_weights"] for row in readers.rows(data)], [WEIGHTS]),
        pytest.param("mds", lambda data: [row["loss_weights"] for row in readers.mds(data)], [WEIGHTS], marks=MDS),
    ],
)
def test_float_weights_are_those_of_targets_or_a_column_of_their_own(
    tmp_path: Path, kind: str, read: Callable[[Path], Any], expected: list[list[float]]
) -> None:
    assert read(written(tmp_path, sequences(VECTOR, weights=WEIGHTS), kind=kind)) == expected


def test_megatron_bridge_of_the_vector(tmp_path: Path) -> None:
    data = written(tmp_path / "plain", kind="megatron_bridge", pack_size=64)
    [row] = pl.read_parquet(data / "part-00000.idx.parquet").to_dicts()
    assert row == {"input_ids": [10, 11, 2, 20, 2], "seq_start_id": [0, 3], "loss_mask": [1, 1, 0, 1, 0]}
    assert json.loads((data / "64_metadata.jsonl").read_text(encoding="utf-8")) == [
        {
            "dataset_max_seqlen": 2,
            "max_samples_per_bin": 2,
            "min_packed_seqlen": 3,
            "pack_size": 64,
            "packing_efficiency": 4.69,
            "packing_factor": 2.0,
        }
    ]
    data = written(tmp_path / "padded", kind="megatron_bridge", pad_segments_to=4)
    [row] = pl.read_parquet(data / "part-00000.idx.parquet").to_dicts()
    # Four tokens and the one that its reader drops, per segment.
    assert row == {
        "input_ids": [10, 11, 2, 2, 2, 20, 2, 2, 2, 2],
        "seq_start_id": [0, 5],
        "loss_mask": [1, 1, 0, 0, 0, 1, 0, 0, 0, 0],
    }


def test_astrai_bin_of_the_vector_has_a_mask_and_that_of_text_alone_none(tmp_path: Path) -> None:
    folder = written(tmp_path / "chats", kind="astrai_bin") / "__default__"

    assert (folder / "sequence.bin").stat().st_size == 40
    assert {path.stem: np.fromfile(path, "<i8").tolist() for path in folder.glob("*.bin")} == {
        "sequence": [10, 11, 2, 20, 2],
        "loss_mask": [0, 1, 1, 0, 1],
        "position_ids": [0, 1, 2, 0, 1],
    }
    assert (folder / "meta.json").read_bytes() == (
        b'{"loss_mask":{"dtype":"int64","shape":[5]},"position_ids":{"dtype":"int64","shape":[5]},'
        b'"sequence":{"dtype":"int64","shape":[5]}}'
    )
    folder = written(tmp_path / "text", terms={"kinds": frozenset({"text"})}, kind="astrai_bin") / "__default__"
    assert {path.name for path in folder.iterdir()} == {"meta.json", "position_ids.bin", "sequence.bin"}
    column = {"dtype": "int64", "shape": [5]}
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    assert meta == {"position_ids": column, "sequence": column}


def test_astrai_h5_of_the_vector(tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="h5py is not installed: pip install 'rowmill[h5]'")
    assert readers.astrai_h5(written(tmp_path, kind="astrai_h5")) == {"__default__": SEGMENTS}


def test_olmo_core_of_the_vector_and_of_bos_with_eos_inside(tmp_path: Path) -> None:
    data = written(tmp_path / "vector", kind="olmo_core")
    assert (data / "token_ids_part_00000.npy").read_bytes() == bytes.fromhex("0a0b021402")
    assert (data / "labels_mask_part_00000.npy").read_bytes() == bytes.fromhex("0001010001")
    assert readers.olmo(data, "u1") == SEGMENTS
    # No clock and no name in the head of the gzip file.
    assert (data / "token_ids_part_00000.csv.gz").read_bytes()[3:8] == bytes(5)
    content = sequences([[([1, 10, 2, 11, 2], [0, 1, 1, 1, 1]), ([1, 20, 2], [0, 0, 1])]])
    data = written(tmp_path / "bos", content, terms={"bos_id": 1}, kind="olmo_core")
    assert [ids for ids, _ in readers.olmo(data, "u1")] == [(1, 10, 2, 11, 2), (1, 20, 2)]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (2**32, "uint32"), (2**32 + 1, "uint64")],
)
def test_olmo_core_takes_the_smallest_type_that_holds_the_vocabulary(vocab_size: int, dtype: str) -> None:
    said = export(kind="olmo_core").pointer("data", terms(vocab_size=vocab_size))
    assert f"NumpyDatasetDType.{dtype}," in said


@pytest.mark.parametrize(
    ("segments", "bos", "said"),
    [
        ([([10, 2, 11, 2], [0, 1, 1, 1])], None, r"example e0#0 holds 2 \(EOS\) before its end"),
        ([([10, 2], [0, 1]), ([10, 11], [0, 1])], None, r"example e1#0 ends in 11, not in 2 \(EOS\)"),
        ([([1, 10, 2], [0, 1, 1]), ([10, 2], [0, 1])], 1, r"example e1#0 begins with 10, not with 1 \(BOS\)"),
        ([([1, 2, 1, 2], [0, 1, 1, 1])], 1, r"example e0#0 holds 2 \(EOS\) before its end"),
    ],
)
def test_olmo_core_refuses_segments_that_its_reader_would_split_elsewhere(
    tmp_path: Path, segments: Any, bos: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        written(tmp_path, sequences([segments]), terms={"bos_id": bos}, kind="olmo_core")


def test_olmo_core_reader_cuts_as_the_exporter_promised(tmp_path: Path) -> None:
    utils = pytest.importorskip("olmo_core.data.utils", reason="OLMo-core is not installed", exc_type=ImportError)
    content = sequences([[([10, 11, 2], [0, 1, 1]), ([20, 2], [0, 1])], [([30, 31, 32, 2], [0, 0, 1, 1])]])
    file = written(tmp_path, content, kind="olmo_core") / "token_ids_part_00000.npy"
    cuts = utils.iter_document_indices(file, eos_token_id=2, dtype=np.uint8)
    assert [(int(a), int(b)) for a, b in cuts] == [(0, 3), (3, 5), (5, 9)]


@MDS
def test_mds_of_the_vector(tmp_path: Path) -> None:
    data = written(tmp_path, kind="mds")
    assert readers.mds(data) == [
        {
            "input_ids": [10, 11, 2, 20, 2],
            "labels": [-100, 11, 2, -100, 2],
            "position_ids": [0, 1, 2, 0, 1],
            "seq_lengths": [3, 2],
            "sequence_id": 0,
        }
    ]
    assert bytes.fromhex("0405 0a000000 0b000000 02000000 14000000 02000000") in (data / "shard.00000.mds").read_bytes()
    # The loader of LLM Foundry takes `labels` for a response: the page sends such users to `llm_foundry`.
    [(ids, _)] = readers.llm_foundry(readers.mds(data), 2)
    assert len(ids) == 2 * 5


@MDS
def test_mds_pretrain_refuses_untrained_tokens_unless_they_are_accepted(tmp_path: Path) -> None:
    pretrain: dict[str, Any] = {"kind": "mds", "profile": "pretrain", "terms": {"seq_len": 5}}
    with pytest.raises(ConfigError, match="tokens without loss"):
        written(tmp_path / "a", **pretrain)
    data = written(tmp_path / "b", **pretrain, accept_untrained_as_trained=True)
    assert readers.mds(data) == [{"tokens": [10, 11, 2, 20, 2]}]


TURNS = [([10, 11, 12, 13, 14, 2, 15], [0, 0, 1, 0, 1, 1, 0]), ([20, 2], [0, 1])]
"""A segment with two runs of targets and context after them, and one of the vector's."""


@MDS
def test_llm_foundry_of_turns_is_read_as_the_targets_that_went_in(tmp_path: Path) -> None:
    data, files = write(export(kind="llm_foundry"), sequences([[one] for one in TURNS]), tmp_path)
    samples = readers.mds(data)
    assert samples == [
        {"turns": [{"input_ids": [10, 11], "labels": [12]}, {"input_ids": [13], "labels": [14, 2]}]},
        {"turns": [{"input_ids": [20], "labels": [2]}]},
    ]
    assert readers.llm_foundry(samples, 2) == [
        ((10, 11, 12, 13, 14, 2), (False, False, True, False, True, True)),
        ((20, 2), (False, True)),
    ]
    assert (sum(one.tokens for one in files), sum(one.trained_tokens for one in files)) == (8, 4)


@MDS
@pytest.mark.parametrize(
    ("segment", "said"),
    [
        (([10, 11, 12], [0, 1, 1]), r"its last target is 12, .* append 2 \(EOS\).*accept_appended_eos: true"),
        (([10, 11, 2], [0, 0, 0]), "has no target"),
    ],
)
def test_llm_foundry_refuses_what_its_loader_would_change(tmp_path: Path, segment: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"exports\.tested: example e0#0.* {said}"):
        written(tmp_path, sequences([[segment]]), kind="llm_foundry")


@MDS
def test_llm_foundry_with_accepted_eos_trains_one_more(tmp_path: Path) -> None:
    content = sequences([[([10, 11, 12], [0, 1, 1])]])
    data = written(tmp_path, content, kind="llm_foundry", accept_appended_eos=True)
    assert readers.llm_foundry(readers.mds(data), 2) == [((10, 11, 12, 2), (False, True, True, True))]


@given(trained=st.lists(st.booleans(), min_size=1, max_size=40).filter(any))
def test_turns_are_the_segment_up_to_its_last_target(trained: list[bool]) -> None:
    mask = np.array([False, *trained])
    ids = np.arange(len(mask), dtype=np.int32)
    turns, length = cut_turns(ids, mask)

    assert all(turn["input_ids"] and turn["labels"] for turn in turns)
    cut = (tuple(ids[:length].tolist()), tuple(mask[:length].tolist()))
    assert readers.llm_foundry([{"turns": turns}], None) == [cut]
    assert not mask[length:].any()


# ── Which segments go into which files ──


@pytest.mark.parametrize("kind", ["llm_foundry", "tinker"])
def test_segments_of_one_token_and_sequences_of_nothing_else_are_left_out(kind: str) -> None:
    layout = export(kind=kind).lay_out(shape([3, 1, 1, 2, 4], [2, 1, 2]))
    [job] = layout.jobs
    assert (job.segments.tolist(), layout.left_out) == ([0, 3, 4], {"not_taken": 2})
    assert kind != "tinker" or job.sequence_offsets.tolist() == [0, 1, 3]


def test_mds_pretrain_leaves_short_sequences_to_the_ledger() -> None:
    layout = export(kind="mds", profile="pretrain").lay_out(shape([40, 24, 30, 10, 20], [2, 1, 2]))
    assert [job.segments.tolist() for job in layout.jobs] == [[0, 1]]
    assert layout.left_out == {"tail": 3}
    assert (layout.notes["tail_sequences"], layout.notes["tail_tokens"]) == (2, 60)


def test_files_close_where_the_plan_says() -> None:
    tokens = shape([10, 10, 30, 5, 5, 5], [1, 1, 1, 1, 1, 1])
    by_bytes = export(kind="hf", shard_bytes=4 * 20).lay_out(tokens)
    by_count = export(kind="hf", shard_sequences=4).lay_out(tokens)

    # The third sequence is longer than a file may be, and is one by itself.
    assert [job.segments.tolist() for job in by_bytes.jobs] == [[0, 1], [2], [3, 4, 5]]
    assert [job.segments.tolist() for job in by_count.jobs] == [[0, 1, 2, 3], [4, 5]]
    assert [job.name for job in by_count.jobs] == ["part-00000", "part-00001"]


@pytest.mark.parametrize(
    ("options", "lengths", "message"),
    [
        (
            {"kind": "axolotl", "sequence_len": 16},
            [10, 20, 40],
            r"sequence_len: 16, but 2 segments are longer, the longest has 40.*e1#0",
        ),
        ({"kind": "megatron_bridge", "pack_size": 16}, [10, 17, 18], r"pack_size: 16, but 1 segments are longer"),
    ],
)
def test_segments_that_a_reader_would_drop_are_refused(
    options: dict[str, Any], lengths: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        export(**options).lay_out(shape(lengths, [3]))
