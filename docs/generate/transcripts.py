"""Run the commands that a page shows in a fresh folder, and write what they print below them.

    python -m docs.generate.transcripts    docs/tutorial.md

A page's transcript is its blocks of the language `console`: a line `$ COMMAND`, then what the command prints. A line of
only `…` stands for any number of lines. Blocks whose first line is a comment with a path (`# configs/chats.yaml`) are
files, which are written where the page shows them. Commands run in order, in one folder, offline: names on the Hugging
Face hub are looked up in a cache that holds one model.

Times, rates and losses differ between machines, so they are not compared. Programs in Python need torch; without it
they are left out and keep their written output.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```(console|yaml|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w./-]+\.\w+)\n")
VARIABLE = re.compile(r"\b\d[\d,.]*(?:k|M)?(?= (?:s|min|rows/s|tokens/s)\b)|(?<=loss )\d+\.\d+")
"""Figures that differ between machines."""
HOME = "~/first-model"
"""The folder's name on the page."""
MODEL = "Qwen/Qwen3-0.6B"
COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"
WIDTH = 100

PAGES: Mapping[str, Mapping[str, str]] = {
    "docs/tutorial.md": {"chats.jsonl": "configs/demo/data/chats-1.jsonl"},
}
"""Pages with a transcript, and the files that a reader has at its beginning."""


@dataclass(frozen=True)
class Command:
    """A command of a page, with the output that the page shows."""

    line: str
    shown: str

    @property
    def needs_torch(self) -> bool:
        """Whether the command is a program in Python."""
        return self.line.startswith("python ")


def read_transcript(page: str) -> Iterator[Command | tuple[str, str]]:
    """Yield a page's commands, and the files (path, text) that it shows, in order."""
    for language, text in BLOCK.findall(page):
        if language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                line, _, shown = part.partition("\n")
                yield Command(line, shown)
        elif named := FILE_NAME.match(text):
            yield named.group(1), text


def run_page(page: str, files: Mapping[str, Path], tokenizer: Path, folder: Path) -> list[tuple[Command, str | None]]:
    """Run a page's commands in `folder`; return what each printed, None for those that lack torch."""
    project = folder / Path(HOME).name
    project.mkdir()
    for name, source in files.items():
        shutil.copy(source, project / name)
    environment = _prepare_environment(folder, tokenizer)
    printed: list[tuple[Command, str | None]] = []
    for part in read_transcript(page):
        if not isinstance(part, Command):
            path, text = part
            (project / path).write_text(text, encoding="utf-8")
        else:
            runs = not part.needs_torch or has_torch()
            printed.append((part, _run_command(part.line, project, environment) if runs else None))
    return printed


def has_torch() -> bool:
    """Return whether programs that train can run here."""
    return all(find_spec(name) is not None for name in ("torch", "trl"))


def _prepare_environment(folder: Path, tokenizer: Path) -> dict[str, str]:
    # The reader's `rowmill` and `python`, whatever this interpreter is called.
    programs = folder / "bin"
    programs.mkdir()
    for name, words in {"rowmill": f"{sys.executable} -m rowmill.cli.main", "python": sys.executable}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    cache = folder / "hub"
    make_hub_cache(cache, tokenizer)
    return os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_CACHE": str(cache),
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": str(WIDTH),
        # A trainer would use whatever accelerator there is.
        "CUDA_VISIBLE_DEVICES": "",
        "TQDM_DISABLE": "1",
    }


def make_hub_cache(cache: Path, tokenizer: Path) -> None:
    """Make a cache of the hub that holds `MODEL`: a real tokenizer, and with torch a tiny model of its architecture."""
    repository = cache / f"models--{MODEL.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(tokenizer, snapshot)
    snapshot.chmod(0o755)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    if has_torch():
        make_tiny_model(snapshot)


def make_tiny_model(folder: Path) -> None:
    """Write a Qwen3 of two layers whose vocabulary fits the tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 151_936}
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)


def _run_command(line: str, folder: Path, environment: Mapping[str, str]) -> str:
    # The commands are those of our own pages.
    run = subprocess.run(  # noqa: S603
        ["/bin/sh", "-c", line], check=False, cwd=folder, env=environment, capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(f"$ {line}\nexit status {run.returncode}\n{run.stdout}{run.stderr}")
    output = run.stdout.replace(str(folder), HOME)
    return "".join(f"{row.rstrip()}\n" for row in output.splitlines())


def is_shown(shown: str, printed: str) -> bool:
    """Return whether a page shows what was printed, apart from lines left out, line breaks, times and losses."""
    pieces = re.split(r"^…$", shown, flags=re.MULTILINE)
    pattern = ".*".join(re.escape(_fix(piece)) for piece in pieces)
    return re.fullmatch(pattern, _fix(printed), re.DOTALL) is not None


def _fix(text: str) -> str:
    # The length of the folder's path decides where a line is broken, also within a long word.
    return "".join(VARIABLE.sub("N", text).split())


def replace_outputs(page: str, printed: Iterable[tuple[Command, str | None]]) -> str:
    """Return a page with the output of each command replaced where it is no longer what the page shows."""
    begin = 0
    for command, output in printed:
        old = f"$ {command.line}\n{command.shown}"
        new = old if output is None or is_shown(command.shown, output) else f"$ {command.line}\n{output.rstrip()}\n"
        begin = page.index(old, begin)
        page = page[:begin] + new + page[begin + len(old) :]
        begin += len(new)
    return page


def main() -> int:
    """Run the pages' commands and write their outputs."""
    root = Path(__file__).resolve().parents[2]
    tokenizer = Path(os.environ.get("ROWMILL_REAL_DATA", root.parent / "shared" / "data")) / "tokenizers" / "qwen3"
    if not tokenizer.is_dir():
        print(f"{', '.join(PAGES)}  left as they are: no real data at {tokenizer}; set ROWMILL_REAL_DATA")
        return 0
    for path, files in PAGES.items():
        page = (root / path).read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            given = {name: root / source for name, source in files.items()}
            printed = run_page(page, given, tokenizer, Path(folder))
        (root / path).write_text(replace_outputs(page, printed), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
