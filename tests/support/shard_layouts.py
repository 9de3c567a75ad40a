"""Recipes of the shards that most builds do not have: an index over examples, and trees of examples."""

from typing import Any

from tests.support.recipes import Workspace, chat

SHARD_LAYOUTS = ("index", "trees")


def write_layout(
    workspace: Workspace, layout: str, *, files: int = 3, chats: int = 16, words: int = 8, **changes: Any
) -> Workspace:
    """Write chats of one to three exchanges, and a recipe of shards that are an index or trees."""
    contents = {
        f"{number:02}.jsonl": [chat(chats * number + i, turns=1 + i % 3, words=words) for i in range(chats)]
        for number in range(files)
    }
    packing = {"layout": "index"} if layout == "index" else {"share_prefixes": True, "min_shared": 8}
    groups = {"template": {"turns": "message"}, "filters": {"deduplicate": "off"}, "packing": packing}
    dataset = workspace.files(contents, **groups)
    ranks = {"world_size": 2, "layout": "index" if layout == "index" else "copied"}
    return workspace.recipe({"rows": dataset}, partitions=ranks, **changes)
