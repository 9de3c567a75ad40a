"""An example that is longer than the context stops the build where the recipe says so, and every suggestion helps.

What belongs here: the error of each kind of rows, from tokenization and from packing. What does not: how rows are cut
(`tests/conversation/test_truncation.py`), tables (`tests/end_to_end/test_table_builds.py`).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rowmill.core.errors import ContextOverflowError
from tests.support.recipes import CHAT, TEXT, Workspace
from tests.support.tiers import mark_all_but
from tests.support.tiny_project import FOREIGN_WARNINGS

pytestmark = FOREIGN_WARNINGS

SEQ_LEN = 128
LONG = "very " * 300


def word(i: int) -> str:
    return LONG if i == 3 else "very "


def tokens(i: int) -> dict[str, Any]:
    count = 300 if i == 3 else 4
    return {"input_ids": [5 + (i + k) % 200 for k in range(count)], "loss_mask": [1] * count}


ROWS: Mapping[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "chat": (CHAT, [{"messages": [{"role": "user", "content": f"Is it {i}?"},
                                  {"role": "assistant", "content": f"It is {word(i)}{i}."}]} for i in range(9)]),
    "supervised": ({"kind": "supervised"}, [{"prompt": f"Is it {i}?", "response": f"{word(i)}{i}"} for i in range(9)]),
    "text": (TEXT, [{"text": f"{word(i)}{i}"} for i in range(9)]),
    "preference": ({"kind": "preference"}, [{"prompt": f"Is it {i}?", "chosen": f"It is {word(i)}{i}.",
                                             "rejected": f"Not {i}."} for i in range(9)]),
    "prompts": ({"kind": "prompts"}, [{"prompt": f"Is it {word(i)}{i}?", "ground_truth": f"{i}"} for i in range(9)]),
    "tokens": ({"kind": "tokens"}, [tokens(i) for i in range(9)]),
}  # fmt: skip
"""Kind → its format, and rows of which the fourth is too long."""


class Stopped(NamedTuple):
    """Options with which a long example stops the build."""

    kind: str
    truncation: Mapping[str, Any]
    packing: Mapping[str, Any] = {}


CASES: Mapping[str, Stopped] = {
    **{f"{kind}: tokenization": Stopped(kind, {"overlong": "raise"}) for kind in ROWS},
    **{f"{kind}: packing": Stopped(kind, {"overlong": "keep"}) for kind in ("preference", "prompts", "tokens")},
    "chat: packing": Stopped("chat", {}, {"slice_strategy": "error"}),
    "supervised: packing": Stopped("supervised", {}, {"slice_strategy": "raise"}),
    "text: packing": Stopped("text", {}, {"slice_strategy": "error", "pack_strategy": "best_fit"}),
    "chat: own limit": Stopped("chat", {"overlong": "raise", "max_length": 64}),
}


def write(folder: Path, stopped: Stopped, *, seq_len: int = SEQ_LEN, **groups: Any) -> Workspace:
    form, rows = ROWS[stopped.kind]
    workspace = Workspace(folder)
    given = {"truncation": stopped.truncation, "packing": stopped.packing}
    options = {name: {**group, **groups.get(name, {})} for name, group in given.items()}
    source = {"train_urls": [workspace.write("rows.jsonl", rows)]}
    own = {name: group for name, group in options.items() if group}
    return workspace.recipe({"rows": {"source": source, "format": form, **own}}, seq_len=seq_len)


def read_suggestions(message: str) -> Iterator[dict[str, Any]]:
    """Yield the changes of the recipe that the last part of an error suggests."""
    remedies = message.rpartition("; ")[2]
    assert re.search(r"^raise (seq_len|truncation.max_length \(at most seq_len\))", remedies), remedies
    yield {"seq_len": 4096} | ({"truncation": {"max_length": 4096}} if "max_length" in remedies else {})
    policies = re.search(r"truncation\.overlong ([a-z_, ]+)", remedies)
    assert policies is not None
    for policy in re.findall(r"\b(?:truncate|drop|split|raise|keep)\b", policies[1]):
        needs_cut = f"{policy} with truncation.token_cut: allow" in remedies
        yield {"truncation": {"overlong": policy, **({"token_cut": "allow"} if needs_cut else {})}}
    if slices := re.search(r"packing\.slice_strategy ([a-z_, ]+)", remedies):
        for strategy in re.findall(r"\b(?:keep_start|keep_end|split|drop)\b", slices[1]):
            yield {"packing": {"slice_strategy": strategy}}


@pytest.mark.slow
@pytest.mark.parametrize("stopped", mark_all_but(list(CASES.values())[::4], CASES.values()), ids=list(CASES))
def test_every_suggestion_for_an_example_that_is_too_long_helps(tmp_path: Path, stopped: Stopped) -> None:
    with pytest.raises(ContextOverflowError, match=r"^datasets\.rows: .*1 (row|example) is ") as caught:
        write(tmp_path / "stopped", stopped).build()

    changes = list(read_suggestions(str(caught.value)))
    assert len(changes) > 1
    for number, change in enumerate(changes):
        built = write(tmp_path / f"changed-{number}", stopped, **change).build()
        assert built.manifest("rows", "packed_shards").facts["conservation"] == 0
