"""Recipes over real dialogues, for tests that need many rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rowmill.build import steps

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("tool_list", "call_name", "call_arguments", "text_beside_call")
CHECKS = (
    "rejects", "zero_loss_rows", "context_overflow", "packing_loss", "end_to_end_loss", "content_dropped",
    "rank_balance", "duplicates", "unknown_roles",
)  # fmt: skip


def chats_of(real_data: Path) -> dict[str, dict[str, Any]]:
    """Return three files of real dialogues as datasets, in the shapes in which they came."""
    files = {
        "fastchat": "chat/fastchat_dummy_conversation.json",
        "many_turns": "chat/tinker_conversations.jsonl",
        "glaive": "tools/glaive_toolcall_en_demo.json",
    }
    return {
        name: {"source": {"train_urls": [str(real_data / path)]}, "format": {"kind": "chat"}}
        for name, path in files.items()
    }


def write_recipe(folder: Path, real_data: Path, **changes: Any) -> steps.Project:
    """Write a recipe of the real chats with the small tokenizer of the demo."""
    recipe = {
        "tokenizer": str(ROOT / "configs/demo/tokenizer"),
        "seq_len": 256,
        "defaults": {
            "splits": {"validation": 0},
            "truncation": {"overlong": "truncate"},
            "template": {"chat_template": "chatml", "on_dropped": dict.fromkeys(KINDS, "count")},
        },
        "datasets": chats_of(real_data),
        "mixture": {"batch_size": 4, "epochs": 2},
        "gates": {check: {"at_most": 1} for check in CHECKS},
    }
    (folder / "configs").mkdir(parents=True)
    path = folder / "configs" / "chats.yaml"
    path.write_text(yaml.safe_dump(recipe | changes), encoding="utf-8")
    return steps.open_project(path)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch use one thread: its threads busy-wait for each other, which takes minutes next to other tests."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
