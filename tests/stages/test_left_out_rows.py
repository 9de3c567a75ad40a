"""`filters.leave_out`: rows that a person left out are rejected by their content, for every kind of data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import ConfigError
from tests.support.recipes import CHAT, PAIR, TEXT, TO_ROWS, Built, Workspace, chat, document, pair

TOKENS = {"kind": "tokens"}
RECORDS = {"kind": "records"}
PROMPTS = {"kind": "prompts", "require_ground_truth": False}
PREFERENCES = {"kind": "preference"}


def tokens(i: int) -> dict[str, Any]:
    return {"input_ids": [i + 5, i + 6, 7, 8], "loss_mask": [0, 1, 1, 1]}


def record(i: int) -> dict[str, Any]:
    return {"name": f"shop {i}", "amount": 3 * i}


def prompt(i: int) -> dict[str, Any]:
    return {"prompt": f"What is {i} plus 4?", "answer": str(i + 4)}


def preference(i: int) -> dict[str, Any]:
    return {"prompt": f"What is {i} plus 4?", "chosen": str(i + 4), "rejected": str(i)}


def hashes(built: Built) -> list[str]:
    return [row["content_hash"].hex() for row in built.rows_of("rows", "canonical_rows", file="rows")]


def leave_out(workspace: Workspace, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"leave_out": [workspace.write("left-out.jsonl", entries)]}


KINDS = [
    pytest.param(chat, CHAT, id="chat"), pytest.param(pair, PAIR, id="supervised"),
    pytest.param(document, TEXT, id="text"),
    pytest.param(tokens, TOKENS, id="tokens"), pytest.param(record, RECORDS, id="records"),
    pytest.param(prompt, PROMPTS, id="prompts"), pytest.param(preference, PREFERENCES, id="preference"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind"), KINDS)
def test_rows_of_every_kind_are_left_out_by_their_content(make: Any, kind: Mapping[str, Any], tmp_path: Path) -> None:
    workspace, rows = Workspace(tmp_path), [make(i) for i in range(6)]
    every = hashes(workspace.one("rows.jsonl", rows, kind).build(only=TO_ROWS))
    entries = [{"content_hash": every[2], "note": "wrong"}, {"content_hash": every[4]}, {"content_hash": "0" * 32}]

    built = workspace.one("rows.jsonl", rows, kind, filters=leave_out(workspace, entries)).build(only=TO_ROWS)

    assert hashes(built) == [one for number, one in enumerate(every) if number not in (2, 4)]
    assert built.rejects() == [(2, "left_out_by_hand"), (4, "left_out_by_hand")]
    assert built.details() == ["wrong", ""]
    assert built.manifest("rows", "canonical_rows").tables["leave_out"].rows == (("data/left-out.jsonl", 3, 2, 1),)
    assert built.facts("rows", "canonical_rows")["rejects"] == 0


def test_row_stays_left_out_when_its_file_grows_and_moves_and_so_do_its_copies(tmp_path: Path) -> None:
    workspace, rows = Workspace(tmp_path), [chat(i) for i in range(4)]
    every = hashes(workspace.one("rows.jsonl", rows).build(only=TO_ROWS))
    filters = leave_out(workspace, [{"content_hash": every[1]}])

    built = workspace.one("moved.jsonl", [chat(9), *rows, chat(1)], filters=filters).build(only=TO_ROWS)

    assert built.rejects() == [(2, "left_out_by_hand"), (5, "left_out_by_hand")]


def test_changed_entries_make_rows_again_and_equal_ones_do_not(tmp_path: Path) -> None:
    workspace, rows = Workspace(tmp_path), [chat(i) for i in range(4)]
    every = hashes(workspace.one("rows.jsonl", rows).build(only=TO_ROWS))
    filters = leave_out(workspace, [{"content_hash": every[1]}])
    workspace.one("rows.jsonl", rows, filters=filters).build(only=TO_ROWS)
    workspace.write("left-out.jsonl", [{"content_hash": every[1], "line": 2}])
    same = workspace.build(only=TO_ROWS)
    workspace.write("left-out.jsonl", [{"content_hash": every[3]}])
    changed = workspace.build(only=TO_ROWS)

    assert same.made() == set()
    assert changed.made() == {"rows/canonical_rows"}
    assert changed.rejects() == [(3, "left_out_by_hand")]
    assert changed.report("rows", "canonical_rows").rows_made == 0


@pytest.mark.parametrize("entry", [{}, {"content_hash": "xyz"}, {"content_hash": 7}])
def test_entry_without_a_hash_is_refused_with_its_line(entry: dict[str, Any], tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    filters = leave_out(workspace, [{"content_hash": "0" * 32}, entry])
    with pytest.raises(
        ConfigError, match=r"^datasets\.rows\.filters\.leave_out: data/left-out\.jsonl:2: content_hash is "
    ):
        workspace.one("rows.jsonl", [chat(0)], filters=filters).build(only=TO_ROWS)


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(0)], filters={"leave_out": ["review/none.jsonl"]})
    with pytest.raises((ConfigError, OSError), match=r"none\.jsonl"):
        workspace.build(only=TO_ROWS)
