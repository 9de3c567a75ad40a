"""A build after an option was changed and changed back is the first build again, for every option of a recipe.

CI tries a third of the rounds of changes, which concern all kinds; the campaign tries all of them.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import yaml

from rowmill.build.steps import Project
from rowmill.core.errors import PipelineError
from rowmill.recipe.recipe import Recipe
from tests.support.option_changes import OptionChange, OptionPath, change_option, options_of, parsed, put, write_project
from tests.support.recipes import Workspace, build_project
from tests.support.tiers import take_third

pytestmark = pytest.mark.slow

WHOLE_RECIPE = "the whole recipe"
OF_ALL_DATASETS = ("tokenizer", "vocab_size", "seq_len", "seed")
ON_THE_HUB = ("tokenizer", "revision")
"""The option that needs a tokenizer on the hub, which no test reaches."""
MOST_REFUSED = 30
"""Options whose other value here suits no data, at most: what is refused early leaves little to go back from."""


@dataclass
class Round:
    """Options that are changed at once: at most one of each dataset, so that none hides what another leaves."""

    changes: dict[str, OptionChange] = field(default_factory=dict[str, OptionChange])

    @property
    def together(self) -> dict[OptionPath, Any]:
        """The options that some of the changes need on both sides."""
        return {path: value for change in self.changes.values() for path, value in change.together.items()}

    @property
    def is_of_all_datasets(self) -> bool:
        """Whether a change concerns what is made of every dataset; it is the only one."""
        return any(change.path[0] in OF_ALL_DATASETS for change in self.changes.values())

    def recipes(self, workspace: Workspace, written: Mapping[str, Any]) -> tuple[Recipe, Recipe]:
        """Return the recipe before and after the changes."""
        before = copy.deepcopy(dict(written))
        for path, value in self.together.items():
            put(before, path, value)
        after = copy.deepcopy(before)
        for change in self.changes.values():
            change.write(after)
        return parsed(workspace, before), parsed(workspace, after)


def list_changes(workspace: Workspace, written: Mapping[str, Any]) -> Iterator[tuple[str, OptionChange]]:
    """Yield a change of every option once, with the dataset that it is changed in: one that has few of them."""
    places: dict[tuple[str, str], list[tuple[str, Any, OptionPath]]] = {}
    for path, model in options_of(parsed(workspace, written)):
        if path == ON_THE_HUB:
            continue
        scope = str(path[1]) if path[0] == "datasets" else WHOLE_RECIPE
        places.setdefault((type(model).__name__, str(path[-1])), []).append((scope, model, path))
    taken = dict.fromkeys([WHOLE_RECIPE, *written["datasets"]], 0)
    for found in sorted(places.values(), key=len):
        for scope, model, path in sorted(found, key=lambda place: taken[place[0]]):
            if (change := change_option(workspace, written, path, model)) is not None:
                taken[scope] += 1
                yield scope, change
                break


def plan_rounds(changes: Sequence[tuple[str, OptionChange]]) -> list[Round]:
    """Divide changes into rounds; those that need the same other options are changed in the same rounds."""
    rounds: list[Round] = []
    for scope, change in sorted(changes, key=lambda one: str(sorted(map(str, one[1].together)))):
        fitting = [one for one in rounds if scope not in one.changes and not one.is_of_all_datasets]
        fitting = [one for one in fitting if bool(one.together) == bool(change.together)]
        if change.path[0] in OF_ALL_DATASETS or not fitting:
            rounds.append(Round({scope: change}))
        else:
            fitting[0].changes[scope] = change
    return rounds


def build_versions(project: Project, recipe: Recipe) -> dict[str, str]:
    """Build a recipe in a project's store; return the version of every step."""
    built = build_project(replace(project, recipe=recipe))
    assert not any(result.blocking for _, results in built.steps.values() for result in results)
    return built.versions()


@pytest.mark.timeout(1800)
def test_build_after_an_option_was_changed_back_is_the_first_build_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    workspace = write_project(tmp_path_factory.mktemp("life"))
    written = yaml.safe_load(workspace.config.read_text(encoding="utf-8"))
    project, first = workspace.project, dict[str, dict[str, str]]()
    rounds = plan_rounds(list(list_changes(workspace, written)))
    waiting, unlike, refused = take_third(rounds), list[str](), list[str]()
    while waiting:
        one = waiting.pop()
        before, after = one.recipes(workspace, written)
        text, names = before.model_dump_json(), ", ".join(change.name for change in one.changes.values())
        if text not in first:
            first[text] = build_versions(project, before)
        try:
            build_versions(project, after)
        except PipelineError:
            # Some values suit no data: the build is refused, or blocked by a check; the others are built without them.
            if len(one.changes) > 1:
                waiting += [Round({scope: change}) for scope, change in one.changes.items()]
                continue
            refused.append(names)
        try:
            again = build_versions(project, before)
        except PipelineError as error:
            unlike.append(f"{names}: {error}")
        else:
            unlike += [f"{names}: {step}" for step in first[text] if again[step] != first[text][step]]

    assert unlike == []
    assert len(refused) < MOST_REFUSED
