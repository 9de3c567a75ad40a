"""Code versions and fingerprints of stages are computed from the same list of options, for every option.

The options are found by walking the models of a recipe that has every kind of dataset, so a new one is in these tests
as soon as it exists.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import yaml

from rowmill.build import gate, prepare, runner, steps
from rowmill.recipe.recipe import Recipe
from rowmill.schema.manifest import Manifest, StageKey
from tests.support.option_changes import OptionPath, change_option, options_of, parsed, watched, write_project
from tests.support.recipes import Workspace

pytestmark = pytest.mark.slow

_OF_STRATEGY = "only whether rows over the limit are left to packing, which `keeps_overlong` says"
DERIVED: dict[tuple[str, str, str], str] = {
    ("Packing", "pack", "tokenized_examples"): _OF_STRATEGY,
    ("Packing", "pack_strategy", "tokenized_examples"): _OF_STRATEGY,
    ("Packing", "tail", "tokenized_examples"): _OF_STRATEGY,
    ("Packing", "share_prefixes", "tokenized_examples"): _OF_STRATEGY,
    ("Mixture", "num_validation_sequences", "packed_shards"): "only the number of its own dataset",
    ("RecordData", "group_training_examples_by", "training_splits"): "only whether there are groups",
}
"""Options of which a stage reads less than their value, and what: that is in its list."""

DECIDES_NOTHING = frozenset({("OpenAIBackend", "api_key_env"), ("Files", "after"), ("Files", "license")})
"""Options that change no output, beside `execution` and the bounds of `gates`."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return write_project(tmp_path_factory.mktemp("identity"))


# ── Every option, changed ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Planned:
    """A recipe with its steps, and its options as text: made once, since they are compared hundreds of times."""

    recipe: Recipe
    options: str
    steps: Mapping[StageKey, steps.Step]

    def moves(self, other: "Planned", key: StageKey) -> bool:
        """Tell whether a step has another code version, or is in one recipe only."""
        return self.version(key) != other.version(key)

    def version(self, key: StageKey) -> str | None:
        return self.steps[key].code_version if key in self.steps else None


@dataclass(frozen=True)
class Change:
    """One option set to another valid value: its path, its model's name, the recipe before and after."""

    path: OptionPath
    option: tuple[str, str]
    before: Planned
    after: Planned


def changes(workspace: Workspace) -> tuple[list[Change], list[OptionPath]]:
    """Return a change for each option of the project's recipe, and the options that could not be changed.

    A kind of dataset refuses options of its groups that it does not read; another kind must accept them.
    """
    written = yaml.safe_load(workspace.config.read_text(encoding="utf-8"))
    project, planned = workspace.project, dict[str, Planned]()

    def plan(loaded: Recipe) -> Planned:
        text = loaded.model_dump_json()
        if text not in planned:
            planned_steps = steps.plan_steps(replace(project, recipe=loaded))
            planned[text] = Planned(loaded, text, {step.key: step for step in planned_steps})
        return planned[text]

    options = list(options_of(parsed(workspace, written)))
    made = [change_option(workspace, written, path, model) for path, model in options]
    found = [Change(one.path, one.option, plan(one.before), plan(one.after)) for one in made if one is not None]
    taken = {change.option for change in found}
    return found, [path for path, model in options if (type(model).__name__, path[-1]) not in taken]


# ── The checks ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def all_changes(workspace: Workspace) -> list[Change]:
    found, missed = changes(workspace)
    # An option without another valid value is not tested: add one to BY_HAND.
    assert missed == []
    return found


@pytest.fixture(scope="module")
def built(workspace: Workspace) -> dict[StageKey, Manifest]:
    return {step.key: report.manifest for step, report, _ in runner.build(workspace.project)}


def test_fingerprint_differs_only_where_the_code_version_differs(
    workspace: Workspace, all_changes: list[Change], built: dict[StageKey, Manifest]
) -> None:
    project, drifted = workspace.project, list[str]()
    known: dict[tuple[StageKey, str], str] = {}

    def fingerprint(step: steps.Step, plan: Planned) -> str:
        # Most recipes before a change are the same; opening the tokenizer for each would take minutes.
        at = (step.key, plan.options)
        if at not in known:
            inputs = {key: built[key] for key in step.inputs}
            context = prepare.make_stage_context(replace(project, recipe=plan.recipe), step, inputs)
            known[at], _ = prepare.prepare_step(context, step)
        return known[at]

    for change in all_changes:
        after = change.after.steps
        for step in change.before.steps.values():
            same = not change.before.moves(change.after, step.key)
            compared = same and concerns(change, step) and not step.on_demand
            if compared and fingerprint(step, change.before) != fingerprint(after[step.key], change.after):
                drifted.append(f"{'.'.join(map(str, change.path))} in {'/'.join(step.key)}")

    assert drifted == []


def test_every_option_makes_a_stage_stale_in_dagster(all_changes: list[Change]) -> None:
    noticed = {
        change.option
        for change in all_changes
        if any(change.before.moves(change.after, key) for key in {*change.before.steps, *change.after.steps})
    }

    assert {change.option for change in all_changes} - noticed == DECIDES_NOTHING


def test_option_that_a_stage_reads_changes_its_own_code_version(
    workspace: Workspace, all_changes: list[Change], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = replace(workspace.project, store=type(workspace.project.store)(str(workspace.folder / "watched")))
    undeclared: list[str] = []
    # The bounds in the metadata of the ranks do not affect any output.
    monkeypatch.setattr(runner, "_publish_output", lambda *_: None)
    with watched(monkeypatch) as read:
        for step in steps.plan_steps(project):
            if step.on_demand:
                continue
            inputs = gate.open_inputs(project, step)
            read.clear()
            made = runner.run_step(project, step, inputs).manifest
            seen = frozenset(read)
            runner.check_step(project, step, made)
            undeclared += [
                f"{'.'.join(map(str, change.path))} in {'/'.join(step.key)}"
                for change in all_changes
                if change.option in seen and (*change.option, step.name) not in DERIVED
                if concerns(change, step) and not change.before.moves(change.after, step.key)
            ]

    assert undeclared == []


def concerns(change: Change, step: steps.Step) -> bool:
    """Tell whether a step can read the option: one of its dataset, or of no dataset."""
    return change.path[0] != "gates" and (change.path[0] != "datasets" or step.dataset in (None, change.path[1]))
