"""An example that is longer than the context stops the build where the recipe says so, and every suggestion helps."""

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import ValidationError

from rowmill.core.errors import ConfigError, ContextOverflowError
from rowmill.recipe.recipe import Dataset, parse_dataset
from tests.support.recipes import CHAT, TEXT, Workspace
from tests.support.tiers import mark_all_but

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
    **{
        f"{kind}: kept and sliced": Stopped(kind, {"overlong": "keep"}, {"slice_strategy": "error"})
        for kind in ("chat", "tokens")
    },
}


def apply_change(group: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options with some changed; those whose new value is None are deleted."""
    return {name: value for name, value in {**group, **change}.items() if value is not None}


def write(folder: Path, stopped: Stopped, *, seq_len: int = SEQ_LEN, **groups: Any) -> Workspace:
    form, rows = ROWS[stopped.kind]
    workspace = Workspace(folder)
    given = {"truncation": stopped.truncation, "packing": stopped.packing}
    options = {name: apply_change(group, groups.get(name, {})) for name, group in given.items()}
    own = {name: group for name, group in options.items() if group}
    return workspace.one("rows.jsonl", rows, form, **own, seq_len=seq_len)


def read_suggestions(message: str) -> Iterator[dict[str, Any]]:
    """Yield the changes of the recipe that the last part of an error suggests."""
    remedies = message.rpartition("; ")[2]
    assert re.search(r"^raise (seq_len|truncation.max_length \(at most seq_len\))", remedies), remedies
    yield {"seq_len": 4096} | ({"truncation": {"max_length": 4096}} if "max_length" in remedies else {})
    yield from read_option_changes(remedies)


def read_option_changes(remedies: str) -> Iterator[dict[str, Any]]:
    """Yield the changes of a dataset's options that remedies suggest; an option to delete is None."""
    policies = re.search(r"truncation\.overlong ([a-z_, ]+)", remedies)
    assert policies is not None
    packing = {"packing": {"slice_strategy": None}} if "delete packing.slice_strategy and" in remedies else {}
    for policy in re.findall(r"\b(?:truncate|drop|split|raise|keep)\b", policies[1]):
        needs_cut = f"{policy} with truncation.token_cut: allow" in remedies
        yield {"truncation": {"overlong": policy, **({"token_cut": "allow"} if needs_cut else {})}, **packing}
    if slices := re.search(r"choose packing\.slice_strategy ([a-z_, ]+)", remedies):
        for strategy in re.findall(r"\b(?:keep_start|keep_end|split|drop)\b", slices[1]):
            yield {"packing": {"slice_strategy": strategy}}


def parse_options(form: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> Dataset:
    """Return a dataset of some options, or raise what a recipe with it would."""
    value = {"source": {"train_urls": ["rows.jsonl"]}, "format": form, **{k: dict(v) for k, v in groups.items()}}
    return Dataset.model_validate(parse_dataset("rows", value, {}, "recipe.yaml", Path()))


def iterate_stopping_options() -> Iterator[dict[str, dict[str, Any]]]:
    """Yield option groups with which a dataset may stop at a long example, whether or not its kind accepts them."""
    values = {
        "overlong": (None, "raise", "keep"),
        "max_length": (None, 64),
        "token_cut": (None, "allow", "reject"),
        "truncate_side": (None, "right"),
        "slice_strategy": (None, "error"),
        "pack_strategy": (None, "best_fit"),
        "pack": (None, False),
    }
    for combination in itertools.product(*values.values()):
        chosen = {name: value for name, value in zip(values, combination, strict=True) if value is not None}
        packing = {name: chosen.pop(name) for name in ("slice_strategy", "pack_strategy", "pack") if name in chosen}
        if "overlong" in chosen or "slice_strategy" in packing:
            yield {name: group for name, group in (("truncation", chosen), ("packing", packing)) if group}


@pytest.mark.parametrize("kind", ROWS)
def test_every_suggestion_for_an_example_that_is_too_long_is_accepted_beside_the_other_options(kind: str) -> None:
    form, accepted, policies = ROWS[kind][0], 0, set[str]()
    for groups in iterate_stopping_options():
        try:
            dataset = parse_options(form, groups)
        except (ConfigError, ValidationError):
            continue
        policy = dataset.truncation.policy(dataset.row_kind, sliced=dataset.packing.slice_strategy is not None)
        policies.add(policy)
        remedies = [dataset.format.suggest_overlong_policies(dataset)]
        if policy == "keep" and dataset.packing.strategy_for(dataset.row_kind) != "concat":
            # Packing stops at long examples, but where it joins texts.
            remedies.append(dataset.format.suggest_slicing())
        for change in read_option_changes(", or ".join(filter(None, remedies))):
            names = dict.fromkeys([*groups, *change])
            changed = {name: apply_change(groups.get(name, {}), change.get(name, {})) for name in names}
            parse_options(form, changed)
            accepted += 1

    assert policies == {"raise", "keep"}
    assert accepted >= 4


@pytest.mark.slow
@pytest.mark.parametrize("stopped", mark_all_but(list(CASES.values())[::3], CASES.values()), ids=list(CASES))
def test_every_suggestion_for_an_example_that_is_too_long_helps(tmp_path: Path, stopped: Stopped) -> None:
    with pytest.raises(ContextOverflowError, match=r"^datasets\.rows: .*1 (row|example) is ") as caught:
        write(tmp_path / "stopped", stopped).build()

    changes = list(read_suggestions(str(caught.value)))
    assert len(changes) > 1
    for number, change in enumerate(changes):
        built = write(tmp_path / f"changed-{number}", stopped, **change).build()
        assert built.facts("rows", "packed_shards")["conservation"] == 0
