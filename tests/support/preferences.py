"""Records of preferences, and a project of one dataset of them with exports."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tests.support.recipes import Workspace, chat, sentence


def preference(i: int) -> dict[str, Any]:
    """Return a prompt of three messages with two answers of different lengths."""
    sides = {"chosen": sentence(i, 9), "rejected": sentence(i + 1, 5 + i % 7)}
    return {"prompt": chat(i, turns=2)["messages"][:3], **sides}


def cut_sides(example: Mapping[str, Any]) -> list[tuple[list[int], list[bool]]]:
    """Return the ids and the mask of each side of an example: of both answers, or of a single one."""
    edges = list(accumulate(example["side_lengths"], initial=0))
    return [(example["input_ids"][a:b], example["loss_mask"][a:b]) for a, b in pairwise(edges)]


def preference_workspace(
    folder: Path,
    form: Mapping[str, Any],
    exports: Sequence[Mapping[str, Any]],
    *,
    count: int = 0,
    records: Sequence[Mapping[str, Any]] = (),
    **groups: Any,
) -> Workspace:
    """Write records, or so many preferences, and the recipe of a dataset `rows` with exports."""
    rows = records or [preference(i) for i in range(count)]
    return Workspace(folder).one("a.jsonl", rows, form, **groups, seq_len=1024, exports=list(exports))
