"""Batches of pairs: chosen sides, then rejected ones, with the ids and targets of the examples."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmill.core.errors import ConfigError
from rowmill.reader import Reader
from tests.support.preferences import cut_sides, preference, preference_workspace
from tests.support.recipes import CHAT, Workspace, chat, open_reader

pytestmark = pytest.mark.slow

PAIRS: dict[str, Any] = {"kind": "preference"}


def _record(i: int, **columns: Any) -> dict[str, Any]:
    return {**preference(i), **columns}


def _build(workspace: Workspace) -> Reader:
    workspace.build()
    return open_reader(workspace, batch_size=3, layout="preference")


def _read_sides(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return each row's ids and mask without its padding, which must be at the end."""
    attention = batch["attention_mask"]
    sizes = attention.sum(axis=1).tolist()
    assert attention.tolist() == [[1] * size + [0] * (attention.shape[1] - size) for size in sizes]
    assert not (batch["completion_mask"] > attention).any()
    rows = zip(batch["input_ids"].tolist(), batch["completion_mask"].tolist(), sizes, strict=True)
    return [(ids[:size], mask[:size]) for ids, mask, size in rows]


@pytest.mark.parametrize("packing", [{}, {"pack": True}], ids=["single", "packed"])
def test_batches_have_every_pair_once_with_its_sides_and_margin(tmp_path: Path, packing: dict[str, Any]) -> None:
    records = [_record(i, margin=i / 4) for i in range(30)]
    workspace = preference_workspace(tmp_path, PAIRS, [], records=records, packing=packing)
    expected = sorted((*cut_sides(one), one["margin"]) for one in workspace.examples())
    batches = list(_build(workspace))
    integers = ["input_ids", "attention_mask", "completion_mask"]
    found = []
    for batch in batches:
        types = {name: str(one.dtype) for name, one in batch.items()}
        assert types == {**dict.fromkeys(integers, "int64"), "margin": "float32"}
        sides, pairs = _read_sides(batch), len(batch["margin"])
        assert len(sides) == 2 * pairs
        found += list(zip(sides[:pairs], sides[pairs:], batch["margin"].tolist(), strict=True))
    assert sorted(found) == expected
    assert (max(len(one["margin"]) for one in batches) > 3) is bool(packing)


def test_fillers_are_pairs_without_targets_and_missing_margins_are_nothing(tmp_path: Path) -> None:
    records = [_record(i, **({"margin": 2.0} if i == 4 else {})) for i in range(9)]
    reader = _build(Workspace(tmp_path / "some").one("a.jsonl", records, PAIRS))
    without = _build(Workspace(tmp_path / "none").one("a.jsonl", [_record(i) for i in range(4)], PAIRS))
    batch = reader.preference_batch(range(len(reader)))
    sides = _read_sides(batch)
    assert (len(reader), len(sides)) == (10, 20)
    chosen, rejected = (i for i, (_, mask) in enumerate(sides) if not any(mask))
    assert rejected == chosen + 10
    assert sides[chosen] == sides[rejected]
    assert sorted(batch["margin"].tolist()) == [0.0] * 9 + [2.0]
    assert "margin" not in without.preference_batch([0])


def test_any_layout_gives_pairs_with_their_weights_and_which_side_is_which(tmp_path: Path) -> None:
    records = [_record(i, margin=1.5) for i in range(6)]
    workspace = Workspace(tmp_path).one("a.jsonl", records, PAIRS, packing={"pack": True})
    ordered, flat = _build(workspace), open_reader(workspace)
    first, second = flat.preference_batch([0, 1]), ordered.get_batch([0, 1])
    sequence: Any = next(one for one in map(flat.__getitem__, range(len(flat))) if (one.labels != -100).any())

    assert first.keys() == second.keys()
    assert all(value.tolist() == second[name].tolist() for name, value in first.items())
    assert sequence.sides.tolist() == [1, 0] * (len(sequence.seq_lengths) // 2)
    assert sequence.margins.tolist() == [1.5] * len(sequence.sides)
    starts = np.cumsum(sequence.seq_lengths) - sequence.seq_lengths
    for at, size in zip(starts.tolist(), sequence.prompt_lengths.tolist(), strict=True):
        assert (sequence.labels[at : at + size] == -100).all()
        assert sequence.labels[at + size] != -100
    halves = ordered.map(lambda row: replace(row, loss_weights=(row.labels != -100) * np.float32(0.5)))
    batch = halves.get_batch([0, 1])
    assert (batch["loss_weights"] == batch["completion_mask"] * np.float32(0.5)).all()


def test_builds_of_other_objectives_are_refused(tmp_path: Path) -> None:
    chats = Workspace(tmp_path / "chats").one("a.jsonl", [chat(i) for i in range(4)], CHAT)
    unpaired = {**PAIRS, "objective": "unpaired"}
    marked = Workspace(tmp_path / "marked").one("a.jsonl", [_record(i) for i in range(4)], unpaired)

    with pytest.raises(ConfigError, match=r"no sides; .*objective: paired"):
        next(iter(_build(chats)))
    with pytest.raises(ConfigError, match=r"single answers with a label; .*objective: paired"):
        next(iter(_build(marked)))
    assert open_reader(chats)[0].sides is None
