"""Recorded versions of our recipes' outputs: a code change that changes one of them changes users' data.

    python -m tests.support.recorded        writes tests/support/recorded_versions.json again

A version is a digest of what a stage wrote: bytes of files, facts, ledger. A commit that changes one on purpose records
it and says why.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from rowmill.build import runner, steps
from tests.support.recipes import LENIENT

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded_versions.json")
OWN = (
    "demo/demo.yaml",
    *sorted(str(one.relative_to(ROOT / "configs")) for one in ROOT.glob("configs/examples/*/*.yaml")),
)
"""The recipes of this repository, below `configs`."""

REAL = "real_mixture.yaml"
"""The mixture of real data in the record; it is written where it is built."""


def real_mixture() -> dict[str, Any]:
    """Return a recipe over real chats with tools, pairs, documents and a table, all below the folder `real`."""
    chats = {"template": {"chat_template": "chatml", "on_dropped": dict.fromkeys(_DROPPED, "count")}}
    answers = {"kind": "supervised", "input_field": "question", "output_field": "answer"}
    datasets: dict[str, tuple[str, dict[str, Any]]] = {
        "chats": ("chat/tinker_conversations.jsonl", {"format": {"kind": "chat"}, **chats}),
        "tools": ("tools/glaive_toolcall_en_demo.json", {"format": {"kind": "chat"}, **chats}),
        "pairs": ("math/gsm8k_test.jsonl", {"format": answers}),
        "texts": ("text/c4_demo.jsonl", {"format": {"kind": "text"}, "packing": {"pack_strategy": "concat"}}),
        "weather": ("tabular/seattle_weather.csv", {"format": {"kind": "records"}}),
    }
    return {
        "tokenizer": "configs/demo/tokenizer",
        "seq_len": 1024,
        "defaults": {"truncation": {"overlong": "truncate"}, "splits": {"validation": 0.05}},
        "datasets": {
            name: {"source": {"train_urls": [f"real/{path}"]}, **own} for name, (path, own) in datasets.items()
        },
        "partitions": {"world_size": 2},
        "gates": LENIENT,
        "execution": {"workers": 1},
    }


_DROPPED = ("tool_list", "call_name", "call_arguments", "text_beside_call")


def write_project(folder: Path, data: Path | None) -> list[str]:
    """Copy what the recipes read into a folder, and return the recipes' names, below `configs`."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    if data is None:
        return list(OWN)
    # A link, so that no version depends on the path of the data.
    (folder / "real").symlink_to(data, target_is_directory=True)
    (folder / "configs" / REAL).write_text(yaml.safe_dump(real_mixture(), sort_keys=False), encoding="utf-8")
    return [*OWN, REAL]


def versions_of(config: Path) -> dict[str, str]:
    """Build a recipe and return the version of each stage."""
    project = steps.open_project(config)
    return {"/".join(step.key[1:]): report.version for step, report, _ in runner.build(project)}


def main() -> None:
    data = Path(os.environ.get("ROWMILL_REAL_DATA", ROOT.parent / "shared" / "data"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = write_project(folder, data if data.is_dir() else None)
        found = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
        for name in names:
            found[name] = versions_of(folder / "configs" / name)
            print(name, file=sys.stderr)
        RECORDED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
