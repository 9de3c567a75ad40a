"""From a trainer's losses to rows that are left out: a small Llama on two ranks finds ten answers that are noise.

2,000 chats, ten with scrambled answers ─► an epoch ─► losses by example ─► list by loss ─► selection ─► build
"""

import json
import multiprocessing
import random
import re
from pathlib import Path
from typing import Any

import pytest

from rowmill.schema.rows import parse_row_id
from rowmill.viewer.builds import Builds
from tests.support.loss_training import train_rank
from tests.support.recipes import Workspace, chat
from tests.support.viewer import ask

pytest.importorskip("torch", reason="torch is not installed: pip install 'rowmill[train]'")
pytestmark = pytest.mark.campaign

CHATS = 2_000
SCRAMBLED = tuple(range(90, CHATS, 200))
"""The records whose answers are noise: ten, spread over the file."""
LOOKED_AT = 20
"""Rows at the beginning of the list: the first screen, which a person reads."""
WORLD_SIZE = 2


def make_chats() -> list[dict[str, Any]]:
    """Return chats, ten of them with the letters of their answer in another order."""
    rows = [chat(i) for i in range(CHATS)]
    for number in SCRAMBLED:
        answer = rows[number]["messages"][1]
        letters = list(answer["content"])
        random.Random(number).shuffle(letters)
        answer["content"] = "".join(letters)
    return rows


def test_scrambled_answers_have_the_highest_losses_and_the_next_build_lacks_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"mixture": {"batch_size": 8}, "partitions": {"world_size": WORLD_SIZE}}
    workspace = Workspace(tmp_path).one("chats.jsonl", make_chats(), **options)
    before = workspace.build()
    losses = tmp_path / "losses"
    shared = (WORLD_SIZE, str(tmp_path / "meeting"), before.project.store.root, "mini", str(losses))
    start = multiprocessing.get_context("spawn").Process
    ranks = [start(target=train_rank, args=(rank, *shared)) for rank in range(WORLD_SIZE)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * WORLD_SIZE

    builds = Builds.of_folder(tmp_path / "configs", None, losses=str(losses))
    listed = re.findall(r'<tr data-row="([^"]+)"', ask(builds, "/mini/rows?order=-above_step").text)
    places = {parse_row_id(row_id)[1]: place for place, row_id in enumerate(listed, start=1)}
    found = {number: places.get(number) for number in SCRAMBLED}
    print("places of the scrambled answers among rows by loss above their step:", found)
    assert all(place is not None and place <= LOOKED_AT for place in found.values())

    chosen = [row_id for row_id in listed if parse_row_id(row_id)[1] in SCRAMBLED]
    entries = [json.loads(ask(builds, f"/mini/selection?row={row_id}").text) for row_id in chosen]
    selection = workspace.write("left-out.jsonl", entries)
    after = workspace.one("chats.jsonl", make_chats(), filters={"leave_out": [selection]}, **options).build()

    assert after.rejects() == [(number, "left_out_by_hand") for number in SCRAMBLED]
    kept = (built.facts("rows", "canonical_rows")["kept"] for built in (before, after))
    assert [*kept] == [CHATS, CHATS - len(SCRAMBLED)]
