"""What pages show of the program's output is what it prints: the same words in the same order, other numbers."""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rowmill.cli.main import ExitStatus
from tests.support.cli_project import BAD_LINE, ROOT, CliProject, run

pytestmark = pytest.mark.slow

ENGLISH = "What is the name of the river that flows through this town, and how long is it?"
GERMAN = "Welchen Namen hat der Fluss, der durch die Stadt und das Land fließt, und wie lang wird er auf dem Weg?"


def chats(count: int, text: str = ENGLISH, *, first: int = 0) -> str:
    rows = (
        {
            "messages": [
                {"role": "user", "content": f"{text} {i}"},
                {"role": "assistant", "content": f"It is the {i}th."},
            ]
        }
        for i in range(first, first + count)
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


def find_block(page: str, begin: str) -> list[str]:
    """Return the lines of the page's block that has a line which begins so, but for those left out."""
    blocks = re.findall(
        r"^```\w*\n(.*?)^```", (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    [block] = [block for block in blocks if any(line.startswith(begin) for line in block.splitlines())]
    return [line for line in block.splitlines() if line.strip() not in ("", "…")]


def generalize(line: str) -> str:
    """Return a line without its numbers, versions, times and widths of columns."""
    line = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", "#", line)
    return " ".join(re.sub(r"\d+(?:[.,:-]\d+)*", "#", line).split())


def list_missing(shown: Iterable[str], printed: str) -> list[str]:
    """Return the shown lines that were not printed; `…` in one stands for any words."""
    lines = {generalize(line) for line in printed.splitlines()}
    patterns = [".*".join(map(re.escape, generalize(line).split("…"))) for line in shown]
    return [pattern for pattern in patterns if not any(re.fullmatch(pattern, line) for line in lines)]


@pytest.fixture
def mine(tmp_path: Path) -> CliProject:
    project = CliProject(tmp_path)
    project.write_data("chats.jsonl", chats(300))
    return project


def write(mine: CliProject, *, format: dict[str, Any] | None = None, **changes: Any) -> CliProject:  # noqa: A002
    source = {"train_urls": ["data/chats.jsonl"]}
    lenient = {"split_share": {"at_most": 1}, "fill": {"at_least": 0}, "filler_share": {"at_most": 1}}
    datasets = {"chats": {"source": source, "format": format or {"kind": "chat"}}}
    return mine.write_recipe(**{"datasets": datasets, "gates": lenient | {"drift": {"at_most": 99}}} | changes)


def test_messages_of_alerts(mine: CliProject, tmp_path: Path) -> None:
    told = tmp_path / "told"
    keep = (
        "import json, sys; message = json.load(sys.stdin)\n"
        f"with open({str(told)!r}, 'a') as file: print(message['title'], *message['lines'], sep='\\n', file=file)"
    )
    alert = {"kind": "command", "run": [sys.executable, "-c", keep], "on": ["blocked", "published"]}
    url = "https://reports.example.org"
    write(mine, execution={"workers": 1, "alerts": [alert], "reports_url": url}).run("build", "--alert")
    mine.write_data("chats.jsonl", chats(290) + f"{BAD_LINE}\n" * 40)
    mine.run("build", "--alert", status=ExitStatus.GATE_CLOSED)
    mine.write_data("chats.jsonl", chats(300) + chats(8, GERMAN, first=300))
    mine.run("build", "--alert")
    # Checks of orders, which change with a few rows, come after what the page shows.
    page, printed = "hear-about-a-bad-night.md", told.read_text(encoding="utf-8").replace("; training_splits", "\n")
    shown = [*find_block(page, "small: blocked"), *find_block(page, "small: published")]
    # A second night takes another day: `tests/alerts`.
    assert list_missing([line.replace(" on the second night", "") for line in shown], printed) == []


def test_plan_versions_and_reuse(mine: CliProject) -> None:
    mine.write_data("chats.jsonl", chats(12_000))
    write(mine).run("build")
    mine.write_data("chats.jsonl", chats(12_010))
    plan = mine.run("plan").out
    built = mine.run("build").out
    versions = run("versions", mine.recipe, "chats/packed_shards").out
    page = "storage-and-reuse.md"
    assert list_missing(find_block(page, "  + raw_dataset"), plan) == []
    assert list_missing(find_block(page, "  ✓ canonical_rows"), built) == []
    assert list_missing(find_block(page, "$ rowmill versions")[1:], versions) == []


def test_change_of_a_table(mine: CliProject) -> None:
    table = "order,customer,amount\n" + "".join(f"{i},{i % 90},{i * i}\n" for i in range(200))
    mine.write_data("orders.csv", table)
    orders = {"source": {"train_urls": ["data/orders.csv"]}, "format": {"kind": "records"}}
    write(mine, datasets={"orders": orders}).run("build")
    mine.write_data("orders.csv", table + "200,guest,7\n")
    printed = mine.run("build", status=ExitStatus.GATE_CLOSED)
    shown = [line.replace("sales/", "small/") for line in find_block("tables.md", "sales/orders")]
    assert list_missing(shown, printed.out + printed.err) == []


def test_trained_text_of_a_row(mine: CliProject) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "What is 0 plus 0?"},
            {"role": "assistant", "content": "0 plus 0 is 0."},
        ]
    }
    mine.write_data("chats.jsonl", json.dumps(row) + "\n")
    printed = write(mine).run("inspect", "-n", "1").out

    assert list_missing(find_block("write-a-recipe.md", "<|im_start|>"), printed) == []


def test_mistake_in_a_recipe(mine: CliProject) -> None:
    write(mine, format={"kind": "chatt"})
    printed = mine.run("plan", status=ExitStatus.INVALID).err
    [shown] = find_block("write-a-recipe.md", "configs/mine.yaml: datasets.chats.format")
    assert list_missing([shown.replace("configs/mine.yaml", mine.recipe)], printed.replace("\n", " ")) == []


def test_output_that_is_no_longer_printed_is_noticed() -> None:
    shown = ["small: published", "rows +12 -0 of 4bcb33c2f90d3a6e; …, done"]

    assert list_missing(shown, "small: published\nrows +3 -1 of 11d24ee4ad70f88a; two more, done") == []
    assert list_missing(shown, "small: published\ncolumns +3 -1 of 11d24ee4ad70f88a; two more, done") != []
