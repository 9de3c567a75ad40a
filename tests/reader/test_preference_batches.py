"""Batches of pairs: chosen sides, then rejected ones, with the ids and targets of the examples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmill.core.errors import ConfigError
from rowmill.reader import PackedSequence, Reader
from tests.support.recipes import CHAT, Workspace, chat, sentence

pytestmark = pytest.mark.slow

PAIRS: dict[str, Any] = {"kind": "preference"}


def _record(i: int, **columns: Any) -> dict[str, Any]:
    sides = {"chosen": sentence(i, 9), "rejected": sentence(i + 1, 5 + i % 7)}
    return {"prompt": chat(i, turns=2)["messages"][:3], **sides, **columns}


def _build(workspace: Workspace) -> Reader:
    workspace.build()
    return Reader(workspace.store, "mini", rank=0, world_size=1, batch_size=3, layout="preference", as_torch=False)


def _cut(example: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    cut = example["side_lengths"][0]
    ids, mask = example["input_ids"], np.array(example["loss_mask"], int).tolist()
    return [(ids[:cut], mask[:cut]), (ids[cut:], mask[cut:])]


def _read_sides(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return each row's ids and mask without its padding, which must be at the end."""
    sizes = batch["attention_mask"].sum(axis=1).tolist()
    assert batch["attention_mask"].tolist() == [
        [1] * size + [0] * (batch["attention_mask"].shape[1] - size) for size in sizes
    ]
    assert not (batch["completion_mask"] > batch["attention_mask"]).any()
    rows = zip(batch["input_ids"].tolist(), batch["completion_mask"].tolist(), sizes, strict=True)
    return [(ids[:size], mask[:size]) for ids, mask, size in rows]


@pytest.mark.parametrize("packing", [{}, {"pack": True}], ids=["single", "packed"])
def test_batches_have_every_pair_once_with_its_sides_and_margin(tmp_path: Path, packing: dict[str, Any]) -> None:
    workspace = Workspace(tmp_path)
    source = {"train_urls": [workspace.write("a.jsonl", [_record(i, margin=i / 4) for i in range(30)])]}
    workspace.recipe({"rows": {"source": source, "format": PAIRS, "packing": packing}}, seq_len=1024)
    expected = sorted((*_cut(one), one["margin"]) for one in workspace.examples())

    batches = list(_build(workspace))

    found = []
    for batch in batches:
        assert {name: str(one.dtype) for name, one in batch.items()} == {
            "input_ids": "int64",
            "attention_mask": "int64",
            "completion_mask": "int64",
            "margin": "float32",
        }
        sides, pairs = _read_sides(batch), len(batch["margin"])
        assert len(sides) == 2 * pairs
        found += list(zip(sides[:pairs], sides[pairs:], batch["margin"].tolist(), strict=True))
    assert sorted(found) == expected
    assert (max(len(one["margin"]) for one in batches) > 3) is bool(packing)


def test_fillers_are_pairs_without_targets_and_missing_margins_are_nothing(tmp_path: Path) -> None:
    records = [_record(i, **({"margin": 2.0} if i == 4 else {})) for i in range(9)]
    workspace = Workspace(tmp_path).one("a.jsonl", records, PAIRS)
    reader = _build(workspace)

    batch = reader.preference_batch(range(len(reader)))

    sides = _read_sides(batch)
    assert len(reader) == 10
    assert len(sides) == 20
    untrained = [i for i, (_, mask) in enumerate(sides) if not any(mask)]
    assert len(untrained) == 2
    assert untrained[1] == untrained[0] + 10
    assert sides[untrained[0]] == sides[untrained[1]]
    assert sorted(batch["margin"].tolist()) == [0.0] * 9 + [2.0]
    assert "margin" not in Reader(
        _workspace_without_margins(tmp_path / "none"), "mini", rank=0, world_size=1, layout="preference", as_torch=False
    ).preference_batch([0])


def _workspace_without_margins(folder: Path) -> Path:
    workspace = Workspace(folder).one("a.jsonl", [_record(i) for i in range(4)], PAIRS)
    workspace.build()
    return workspace.store


def test_any_layout_gives_pairs_and_a_sequence_says_which_side_is_which(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one(
        "a.jsonl", [_record(i, margin=1.5) for i in range(6)], PAIRS, packing={"pack": True}
    )
    ordered = _build(workspace)
    flat = Reader(workspace.store, "mini", rank=0, world_size=1, as_torch=False)

    first, second = flat.preference_batch([0, 1]), ordered.get_batch([0, 1])
    sequence: Any = next(one for one in map(flat.__getitem__, range(len(flat))) if (one.labels != -100).any())

    assert {name: value.tolist() for name, value in first.items()} == {
        name: value.tolist() for name, value in second.items()
    }
    assert sequence.sides.tolist() == [1, 0] * (len(sequence.seq_lengths) // 2)
    assert sequence.margins.tolist() == [1.5] * len(sequence.sides)
    starts = np.cumsum(sequence.seq_lengths) - sequence.seq_lengths
    assert all(
        (sequence.labels[at : at + size] == -100).all() and sequence.labels[at + size] != -100
        for at, size in zip(starts.tolist(), sequence.prompt_lengths.tolist(), strict=True)
    )


def test_loss_weights_are_laid_out_by_side(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("a.jsonl", [_record(i) for i in range(4)], PAIRS)
    reader = _build(workspace)

    def weigh(row: PackedSequence) -> PackedSequence:
        weights = (row.labels != -100) * np.float32(0.5)
        return PackedSequence(row.input_ids, row.labels, row.seq_lengths, weights, row.sides, row.prompt_lengths)

    batch = reader.map(weigh).get_batch([0, 1])

    assert (batch["loss_weights"] == batch["completion_mask"] * np.float32(0.5)).all()


def test_builds_of_other_objectives_are_refused(tmp_path: Path) -> None:
    chats = Workspace(tmp_path / "chats").one("a.jsonl", [chat(i) for i in range(4)], CHAT)
    marked = Workspace(tmp_path / "marked").one(
        "a.jsonl", [_record(i) for i in range(4)], {**PAIRS, "objective": "unpaired"}
    )

    with pytest.raises(ConfigError, match=r"no sides; .*objective: paired"):
        next(iter(_build(chats)))
    with pytest.raises(ConfigError, match=r"single answers with a label; .*objective: paired"):
        next(iter(_build(marked)))
    assert Reader(chats.store, "mini", rank=0, world_size=1)[0].sides is None
