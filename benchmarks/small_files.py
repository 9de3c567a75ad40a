"""Many files of one row against the same rows in one file: processor time, disk and files of a build.

python -m benchmarks.small_files [files]
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import ROOT, emit
from benchmarks.quiet_rebuild import run_build


def write_project(folder: Path, rows: int, *, per_file: int) -> Path:
    """Write chats into files of so many rows, and their recipe; return the project's folder."""
    (folder / "configs").mkdir(parents=True)
    (folder / "data").mkdir()
    lines = [f"{json.dumps(_row(i))}\n" for i in range(rows)]
    for first in range(0, rows, per_file):
        text = "".join(lines[first : first + per_file])
        (folder / "data" / f"r{first:07d}.jsonl").write_text(text, encoding="utf-8")
    recipe = {
        "tokenizer": str(ROOT / "configs" / "demo" / "tokenizer"),
        "seq_len": 512,
        "datasets": {
            "rows": {
                "source": {"train_urls": ["data/"]},
                "format": {"kind": "chat"},
                "splits": {"validation": 0.01},
            }
        },
        # One sentence with other numbers: leaks are no subject here.
        "gates": {"split_share": {"at_most": 1}, "near_duplicate": {"at_most": 1}},
    }
    (folder / "configs" / "quiet.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder


def _row(i: int) -> dict[str, Any]:
    question = f"What is {i} plus {i % 7}? Say why in a few words."
    answer = f"{i} plus {i % 7} is {i + i % 7}, since adding {i % 7} to {i} gives it."
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main(files: int) -> None:
    """Build both, and again with nothing changed."""
    with tempfile.TemporaryDirectory() as name:
        for per_file in (files, 1):
            project = write_project(Path(name) / str(per_file), files, per_file=per_file)
            first, again = (run_build(ROOT, project) for _ in range(2))
            stored = [path.stat() for path in (project / ".rowmill").rglob("*") if path.is_file()]
            emit(
                "small_files",
                rows=files,
                files=files // per_file,
                first_cpu_s=round(first[1], 2),
                again_cpu_s=round(again[1], 2),
                disk_mb=round(sum(512 * one.st_blocks for one in stored) / 1e6, 1),
                stored_files=len(stored),
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
