"""The export for LLaMA-Factory: packed rows to the number, and preferences read back with `datasets`."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from rowmill.stages.exports import format_trainer_pointer
from tests.support import export_readers as readers
from tests.support.built_exports import open_built_export
from tests.support.export_cases import VECTOR, export, sequences, terms, write
from tests.support.export_readers import Segment
from tests.support.preferences import cut_sides, preference_workspace
from tests.support.recipes import Built


def test_packed_rows_of_the_vector(tmp_path: Path) -> None:
    rows = sequences([*VECTOR, [([7, 2], [0, 1])]])
    one = export(kind="llama_factory", unit="packed")
    data, _ = write(one, rows, tmp_path / "blocked", name="train-in-1", seq_len=6, pad_id=0)
    first, second = readers.saved(data, "train")
    assert first["input_ids"] == [10, 11, 2, 20, 2, 0, 0]
    assert first["attention_mask"] == [1, 1, 1, 2, 2, 0, 0]
    assert first["position_ids"] == [0, 1, 2, 0, 1, 0, 0]
    assert first["labels"] == [-100, 11, 2, -100, 2, -100, -100]
    none = {f"{name}_subseq_ids": [4294967296] for name in ("image", "video", "audio")}
    assert first["packing_params"] == {"sequence_boundaries": [0, 3, 5, 7], **none, "right_padding_length": 2}
    assert second["packing_params"] == {"sequence_boundaries": [0, 2, 7], **none, "right_padding_length": 5}
    data, _ = write(one, sequences(VECTOR, is_open=True), tmp_path / "open", name="train-in-1", seq_len=5)
    [row] = readers.saved(data, "train")
    assert row["attention_mask"] == [1, 1, 1, 1, 1, 0]
    assert row["position_ids"] == [0, 1, 2, 3, 4, 0]
    assert row["packing_params"]["sequence_boundaries"] == [0, 5, 6]


def test_pointer_names_the_width_that_is_padded_to() -> None:
    packed = export(kind="llama_factory", unit="packed").pointer("/data", terms(seq_len=4095))
    marked = export(kind="llama_factory").pointer("/data", terms(objective="unpaired"))
    assert yaml.safe_load(marked) == {"stage": "kto", "tokenized_path": "/data"}
    expected = {"stage": "sft", "tokenized_path": "/data", "cutoff_len": 4096, "neat_packing": True}
    assert yaml.safe_load(packed) == expected


def _build(folder: Path, form: dict[str, Any], export: dict[str, Any], **groups: Any) -> Built:
    exports = [{"kind": "llama_factory", "name": "mine", **export}]
    return preference_workspace(folder, form, exports, count=20, **groups).build()


def _sides(example: dict[str, Any]) -> list[Segment]:
    return [(tuple(ids), tuple(mask)) for ids, mask in cut_sides(example)]


def _load(built: Built) -> list[dict[str, Any]]:
    import datasets

    data = open_built_export(built, "mine").data
    rows = datasets.load_from_disk(str(data))["train"]
    assert rows.to_list() == readers.saved(data, "train")
    return rows.to_list()


@pytest.mark.slow
def test_pairs_are_both_sides_with_their_labels(tmp_path: Path) -> None:
    built = _build(tmp_path, {"kind": "preference"}, {"shard_sequences": 7}, packing={"pack": True})
    rows = _load(built)
    found = zip(readers.llama_factory(rows, "chosen_"), readers.llama_factory(rows, "rejected_"), strict=True)
    assert Counter(found) == Counter(tuple(_sides(one)) for one in built.examples("rows"))
    assert len(list(open_built_export(built, "mine").data.glob("train/*.arrow"))) == 3
    [options] = built.project.recipe.exports
    assert "stage: dpo" in format_trainer_pointer(options, built.manifest("exports", "mine"), "/x")


@pytest.mark.slow
def test_marked_answers_have_another_answer_behind_their_prompt(tmp_path: Path) -> None:
    form = {"kind": "preference", "objective": "unpaired"}
    built = _build(tmp_path, form, {"kl_block": 6}, truncation={"max_length": 1024})
    rows = _load(built)
    examples = built.examples("rows")
    sides = {segment: one for one in examples for segment in _sides(one)}
    own, exchanged = readers.llama_factory(rows), readers.llama_factory(rows, "kl_")
    assert Counter(own) == Counter(segment for one in examples for segment in _sides(one))
    assert [row["kto_tags"] for row in rows] == [sides[segment]["sides"] == [1] for segment in own]
    assert len(rows) == 40
    for first in range(0, 40, 6):
        block = own[first : first + 6]
        for segment, other, found in zip(block, [block[-1], *block[:-1]], exchanged[first : first + 6], strict=True):
            size, its = sides[segment]["prompt_length"], sides[other]["prompt_length"]
            assert found[0] == segment[0][:size] + other[0][its:]
            assert found[1] == (False,) * size + other[1][its:]
    assert open_built_export(built, "mine").card["kl_block"] == 6


def test_exchanged_answer_is_cut_to_the_limit(tmp_path: Path) -> None:
    rows = sequences([[([5, 6, 7], [0, 0, 1]), ([8, 1, 2, 3, 4], [0, 1, 1, 1, 1])]])
    columns = {"prompt_lengths": pa.array([2, 1], pa.int32()), "sides": pa.array([1, 0], pa.int8())}
    one = export(kind="llama_factory", kl_block=2)
    named: dict[str, Any] = {"name": "train-in-1", "seq_len": 5, "objective": "unpaired"}
    data, _ = write(one, replace(rows, columns=columns), tmp_path, **named)
    saved = readers.saved(data, "train")
    exchanged = [((5, 6, 1, 2, 3), (False, False, True, True, True)), ((8, 7), (False, True))]
    assert readers.llama_factory(saved, "kl_") == exchanged
    assert [row["kto_tags"] for row in saved] == [True, False]
