"""Text that nothing reads: a warning from a tenth of a record on, and no build from a half on, unless it is ignored."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.checks.judge import CheckResult
from tests.support.recipes import CHAT, PAIR, TEXT, Workspace, chat, document, pair

pytestmark = pytest.mark.slow

ROWS = ("raw_dataset", "canonical_rows")
WORDS = "these are words that nobody reads "


def judge(folder: Path, rows: list[dict[str, Any]], kind: dict[str, Any]) -> CheckResult:
    built = Workspace(folder).one("a.jsonl", rows, kind, gates={}).build(only=ROWS)
    return next(one for one in built.steps["rows", "canonical_rows"][1] if one.check == "unread_text")


@pytest.mark.parametrize(("part", "failed", "blocking"), [(0.02, False, False), (0.3, True, False), (3, True, True)])
@pytest.mark.parametrize(("kind", "make"), [(CHAT, chat), (PAIR, pair), (TEXT, document)])
def test_column_of_text_that_nothing_reads_warns_and_blocks(
    tmp_path: Path, kind: dict[str, Any], make: Any, part: float, failed: bool, blocking: bool
) -> None:
    rows = [make(i) for i in range(20)]
    texts = [row.get("text") or "".join(map(str, row.get("messages", row.values()))) for row in rows]
    note = (WORDS * 900)[: round(part * sum(map(len, texts)) / len(texts))]
    rows = [row | {"note": note, "id": f"row-{i}", "url": "https://example.org/a page"} for i, row in enumerate(rows)]
    found = judge(tmp_path, rows, kind)

    assert (found.failed, found.blocking) == (failed, blocking), found.sentence
    if failed:
        [cause] = found.causes
        assert cause.startswith("column 'note': ")


def test_share_is_the_average_over_the_records_without_ignored_and_repeated_text(tmp_path: Path) -> None:
    whole = judge(tmp_path / "whole", [pair(i) | {"note": WORDS * 9} for i in range(20)], PAIR).value
    half = judge(tmp_path / "half", [pair(i) | ({"note": WORDS * 9} if i % 2 else {}) for i in range(20)], PAIR).value

    assert whole is not None
    assert half == pytest.approx(whole / 2, rel=0.05)
    rows = [chat(i) | {"note": WORDS * 90, "first": chat(i)["messages"][0]["content"]} for i in range(20)]
    assert judge(tmp_path / "ignored", rows, CHAT | {"ignore_columns": ["note"]}).value == 0


def test_rows_of_ids_are_not_searched(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7, i], "labels": [-100, 6, 7, i], "text": WORDS * 90} for i in range(20)]
    found = judge(tmp_path, rows, {"kind": "tokens"})

    assert found.note == "not_applicable"
