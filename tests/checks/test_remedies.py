"""Remedies of checks and reject reasons name options that the dataset at hand has."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rowmill.build.steps import plan_steps
from rowmill.checks.catalog import CHECKS_BY_NAME
from rowmill.core.config import iterate_option_places
from rowmill.kinds.base import OPTION_GROUPS
from rowmill.kinds.catalog import KINDS
from rowmill.schema.ledger import REASON_DESCRIPTIONS
from tests.support.recipes import CHAT, PAIR, TEXT, Built, Workspace, chat, document, pair
from tests.support.tables import as_csv, grouped, purchases, records

pytestmark = [pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning")]

PREFERENCE = [{"prompt": f"What is {i}?", "chosen": f"It is {i}, surely.", "rejected": f"Not {i}."} for i in range(30)]
PROMPTS = [{"prompt": f"What is {i} plus 1?", "ground_truth": f"{i + 1}"} for i in range(30)]
TOKENS = [{"input_ids": [5 + i, 6, 7, 8], "loss_mask": [0, 1, 1, 1]} for i in range(30)]

RECIPES: Mapping[str, Mapping[str, tuple[Any, Mapping[str, Any]]]] = {
    "next tokens": {
        "chats": ([chat(i) for i in range(30)], CHAT),
        "pairs": ([pair(i) for i in range(30)], PAIR),
        "texts": ([document(i) for i in range(30)], TEXT),
        "tokens": (TOKENS, {"kind": "tokens"}),
        "table": (as_csv(purchases(60)), records(**grouped())),
    },
    "tables": {"table": (as_csv(purchases(60)), records(**grouped()))},
    "chats": {"chats": ([chat(i) for i in range(30)], CHAT)},
    "preferences": {"sides": (PREFERENCE, {"kind": "preference"})},
    "prompts": {"asked": (PROMPTS, {"kind": "prompts"})},
}
"""Recipe → datasets: every kind of rows, alone or beside others."""


@pytest.fixture(scope="module", params=RECIPES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build a recipe."""
    workspace = Workspace(tmp_path_factory.mktemp("kinds"))
    datasets = {
        name: workspace.dataset(
            f"{name}.{'csv' if isinstance(rows, bytes) else 'jsonl'}", rows, form, splits={"validation": 0.2}
        )
        for name, (rows, form) in RECIPES[request.param].items()
    }
    return workspace.recipe(datasets, seq_len=1024).build()


FORMAT_OPTIONS = {one.name for kind in KINDS.values() for one in iterate_option_places(kind) if "_" in one.name}


def find_options(text: str) -> Iterator[str]:
    """Yield the options of a dataset that a text names: their paths, and names of a format's alone."""
    groups = "|".join(["format", *OPTION_GROUPS])
    yield from re.findall(rf"\b(?:{groups})\.[a-z_]+(?:\.[a-z_]+)*", text)
    yield from (f"format.{name}" for name in re.findall(r"(?<![.\w])[a-z_]+\b", text) if name in FORMAT_OPTIONS)


def has_option(kind: str, path: str) -> bool:
    """Return whether datasets of a kind can set an option."""
    model, (group, *names) = KINDS[kind], path.split(".")
    if group != "format":
        not_read = model.FIELDS_NOT_READ.get(group, frozenset())
        return group in model.GROUPS and names[0] in OPTION_GROUPS[group].model_fields.keys() - not_read
    places = {(*one.group, one.name) for one in iterate_option_places(model)}
    return tuple(names) in places or (len(names) == 1 and names[0] in {place[-1] for place in places})


@pytest.mark.slow
def test_remedy_of_each_check_that_applies_names_options_of_its_dataset(built: Built) -> None:
    project = built.project
    kinds = {name: dataset.format.kind for name, dataset in project.recipe.datasets.items()}
    wrong: list[str] = []
    for step in plan_steps(project):
        judged = built.steps.get(step.key[1:])
        applies = {one.check for one in judged[1] if one.outcome != "not_applicable"} if judged else set[str]()
        own = [kinds[step.dataset]] if step.dataset is not None else list(kinds.values())
        for threshold in step.thresholds:
            if threshold.check in applies:
                named = find_options(threshold.remedy)
                lacking = [one for one in named if not any(has_option(kind, one) for kind in own)]
                wrong += [f"{step.key}: {threshold.check}: {one}" for one in lacking]

    assert built.steps
    assert wrong == []


def test_remedies_of_a_recipe_are_for_the_kinds_that_it_has() -> None:
    """A check of the whole recipe has one remedy for all of its datasets."""
    check = CHECKS_BY_NAME["near_duplicate"]
    of_tables = check.of_kinds["record"]

    assert check.choose_remedy(["conversation", "pair"]) == check.remedy
    assert check.choose_remedy(["record"]) == of_tables
    assert check.choose_remedy(["record", "text"]) == f"{check.remedy}; for tables: {of_tables}"
    assert check.choose_remedy([]) == check.remedy


KINDS_BY_REASON: Mapping[str, str] = {
    "unknown_schema": "chat preference tokens",
    "group_missing": "chat supervised text records preference prompts tokens",
    "no_loss_tokens": "chat supervised text preference tokens",
    "overlong": "chat supervised text preference prompts tokens",
    "overlong_after_structure": "chat preference tokens",
    "no_assistant": "chat preference",
    "missing_ground_truth": "prompts",
    "prompt_ends_with_assistant": "prompts",
    "bad_mask": "tokens",
    "unpaired_row": "preference",
    "bad_label": "preference",
    "bad_margin": "preference",
    "prompt_differs": "preference",
    "overlong_prompt": "preference",
    "near_duplicate": "chat supervised text preference prompts tokens",
    "contaminated": "chat supervised text preference prompts tokens",
    "duplicate": "chat supervised text records preference prompts tokens",
    "split_gap": "chat supervised text preference prompts tokens",
    "straddles_split": "chat supervised text preference prompts tokens",
}
"""Reason → the kinds whose records are rejected for it; by default tables for what is generated, and chats."""


def test_remedy_of_each_reason_names_an_option_of_every_kind_that_has_the_reason() -> None:
    wrong: list[tuple[str, str]] = []
    for reason, description in REASON_DESCRIPTIONS.items():
        named = list(find_options(description.remedy))
        usual = "records" if description.of in {"records", "generated"} else "chat"
        kinds = KINDS_BY_REASON.get(reason, usual).split() if named else []
        wrong += [(reason, kind) for kind in kinds if not any(has_option(kind, one) for one in named)]

    assert wrong == []
