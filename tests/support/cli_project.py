"""A small project for tests of the command line: what is where, so that each count can be checked by eye.

`data/chats.jsonl` begins so, which makes line numbers and record numbers differ:

    line 1   chat 0
    line 2
    line 3   {"messages": [            no JSON: rejected
    line 4
    line 5   chat 1 …
"""

import json
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rowmill.build import steps
from rowmill.cli import main
from rowmill.schema import manifest
from tests.support.recipes import current

ROOT = Path(__file__).resolve().parents[2]
CHATS, TASKS, NOTES = 40, 30, 6

BAD_LINE = '{"messages": ['

RECIPE: dict[str, Any] = {
    "tokenizer": str(ROOT / "configs" / "demo" / "tokenizer"),
    "seq_len": 128,
    "defaults": {"splits": {"validation": 0.1, "test": 0}},
    "datasets": {
        "chats": {"source": {"train_urls": ["data/chats.jsonl"]}, "format": {"kind": "chat"}},
        "tasks": {"source": {"train_urls": ["data/tasks.csv"]}, "format": {"kind": "supervised"}},
        "notes": {"source": {"train_urls": ["data/notes.jsonl"]}, "format": {"kind": "text"}},
    },
    "partitions": {"world_size": 2},
    # Few rows: shares mean little here.
    "gates": {
        "split_share": {"at_most": 1},
        "rank_balance": {"at_most": 9},
        "fill": {"at_least": 0},
        "filler_share": {"at_most": 1},
    },
    "execution": {"workers": 1},
}


@dataclass(frozen=True)
class CliProject:
    """A project in a folder."""

    folder: Path

    @property
    def recipe(self) -> str:
        return str(self.folder / "configs" / "small.yaml")

    @property
    def project(self) -> steps.Project:
        return steps.open_project(Path(self.recipe))

    def write(self, **changes: Any) -> "CliProject":
        """Write data and recipe."""
        chats = [json.dumps(chat(i)) for i in range(CHATS)]
        self.write_data("chats.jsonl", "\n".join([chats[0], "", BAD_LINE, "", *chats[1:]]) + "\n")
        self.write_data("tasks.csv", "prompt,response\n" + "".join(f"{p},{r}\n" for p, r in map(task, range(TASKS))))
        self.write_data("notes.jsonl", "".join(json.dumps({"text": note(i)}) + "\n" for i in range(NOTES)))
        return self.write_recipe(**changes)

    def write_data(self, name: str, content: str) -> None:
        path = self.folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")

    def append_chat(self, number: int) -> None:
        with (self.folder / "data" / "chats.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(chat(number)) + "\n")

    def write_recipe(self, **changes: Any) -> "CliProject":
        """Write the recipe with some top-level keys replaced."""
        path = Path(self.recipe)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(RECIPE | changes, sort_keys=False), encoding="utf-8")
        return self

    def rowmill(self, verb: str, *options: str) -> int:
        """Run a verb on the recipe; what it prints is for `capsys`."""
        return main.main([verb, self.recipe, *options])

    def run(self, verb: str, *options: str, status: int = main.ExitStatus.SUCCESS) -> "Printed":
        """Run a verb on the recipe, which must end with the status; return what it printed."""
        return run(verb, self.recipe, *options, status=status)

    def current(self, *stage: str) -> manifest.Manifest:
        return current(self.project, *stage)


class Printed(NamedTuple):
    """What a command printed."""

    out: str
    err: str


def run(*arguments: str, status: int = main.ExitStatus.SUCCESS) -> Printed:
    """Run a command, which must end with the status; return what it printed."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        ended = main.main(arguments)
    printed = Printed(out.getvalue(), err.getvalue())
    assert ended == status, printed
    return printed


def list_files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def chat(i: int) -> Mapping[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"What is {i} plus 1?"}, {"role": "assistant", "content": answer(i)}]
    }


def answer(i: int) -> str:
    return f"{i} plus 1 is {i + 1}. Größer 🙂"


def task(i: int) -> tuple[str, str]:
    return f"Name a number above {i}.", f"{i + 1} is above {i}."


def note(i: int) -> str:
    """Return a text longer than two sequences."""
    return " ".join(f"Note {i} says that {k} follows {k - 1}." for k in range(1, 40))
