"""The graph of a recipe: its steps in order, what each reads, and whose checks it waits for."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import cast

from rowmill.checks.catalog import CHECKS, CHECKS_BY_NAME
from rowmill.checks.gates import Threshold, list_thresholds
from rowmill.core.config import Config
from rowmill.core.errors import ConfigError
from rowmill.core.storage import DEFAULT_ROOT_NAME, Store
from rowmill.parts.context import MadeAhead
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Dataset, Recipe
from rowmill.schema.manifest import StageKey
from rowmill.schema.rows import RowKind
from rowmill.sources import GeneratedSource
from rowmill.stages import catalog
from rowmill.stages.base import StageDeclaration


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of one dataset, or of the whole recipe: a node of the asset graph.

    `inputs` are read; `gates` are the stages whose checks must have passed (a superset of `inputs`).
    """

    stage: StageDeclaration = field(compare=False, repr=False)
    recipe: str
    dataset: str | None
    key: StageKey
    inputs: tuple[StageKey, ...]
    gates: tuple[StageKey, ...]
    code_version: str
    options_version: str
    """The code version that it has without waivers: it differs only if an option or the code does."""
    thresholds: tuple[Threshold, ...]
    off_checks: frozenset[str]
    """Checks of what the dataset does not ask for: `rowmill verify` and SQL have them, pages do not show them."""
    generated_by: StageKey | None = None
    """The stage that generates the records of its source, if the recipe determines it."""

    @property
    def shown_thresholds(self) -> tuple[Threshold, ...]:
        """The thresholds of the checks that pages show."""
        return tuple(threshold for threshold in self.thresholds if threshold.check not in self.off_checks)

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def description(self) -> str:
        return self.stage.description

    @property
    def on_demand(self) -> bool:
        return self.stage.on_demand

    @property
    def label(self) -> str:
        """The stage's name; for exports, followed by the export's name."""
        return f"{self.name}/{self.key[-1]}" if self.stage.scope == "export" else self.name


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The steps of a recipe and their thresholds; each is computed once, on first use.

    `base` is the project's folder.
    """

    recipe: Recipe
    base: Path

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps in the order in which they can run: of datasets, of the recipe, its exports, those on demand."""
        recipe, base, steps = self.recipe, self.base, list[Step]()
        for dataset in recipe.datasets:
            steps += _iterate_dataset_steps(recipe, base, dataset, on_demand=False)
        steps += [_make_step(recipe, base, stage, (recipe.name, stage.name)) for stage in catalog.list_stages("recipe")]
        for stage in catalog.list_stages("export"):
            keys = [(recipe.name, stage.name, export.name) for export in recipe.exports]
            steps += [_make_step(recipe, base, stage, key) for key in keys]
        for dataset in recipe.datasets:
            steps += _iterate_dataset_steps(recipe, base, dataset, on_demand=True)
        return tuple(steps)

    @cached_property
    def thresholds(self) -> Mapping[StageKey, tuple[Threshold, ...]]:
        return {step.key: step.thresholds for step in self.steps}


@dataclass(frozen=True, slots=True)
class Project:
    """A recipe and its storage. `base` resolves the recipe's relative paths."""

    recipe: Recipe
    store: Store
    base: Path
    graph: StepGraph = field(default=cast("StepGraph", None), compare=False, repr=False)
    """The recipe's steps; `replace` keeps them as long as the recipe and its folder are the same."""
    ahead: MadeAhead = field(default_factory=MadeAhead, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Make the recipe's graph, unless the given one belongs to it."""
        graph = cast("StepGraph | None", self.graph)
        if graph is None or graph.recipe is not self.recipe or graph.base != self.base:
            object.__setattr__(self, "graph", StepGraph(self.recipe, self.base))


def open_project(path: str | Path, root: str | None = None, overrides: Mapping[str, str] | None = None) -> Project:
    """Load a recipe and choose its storage; `overrides` as `apply_overrides` takes them.

    Relative paths in a recipe start at the project: the folder that holds `configs/`, or the recipe's own folder if
    there is none. `root` defaults to `.rowmill` there.
    """
    file = Path(path)
    base = recipe.project_folder(file)
    return Project(recipe.load_recipe(file, overrides), Store(root or str(base / DEFAULT_ROOT_NAME)), base)


def plan_steps(project: Project) -> tuple[Step, ...]:
    """Return the steps of a recipe in the order in which they can run."""
    return project.graph.steps


def choose_steps(project: Project, only: Collection[str] = (), datasets: Collection[str] | None = None) -> list[Step]:
    """Return the steps of a build; `only` names stages, in any case also those on demand, and `datasets` datasets."""
    return [
        step
        for step in plan_steps(project)
        if ({step.name, step.label} & {*only} if only else not step.on_demand)
        and (datasets is None or step.dataset in datasets)
    ]


def _iterate_dataset_steps(loaded: Recipe, base: Path, dataset: str, *, on_demand: bool) -> Iterator[Step]:
    for stage in catalog.list_stages("dataset", on_demand=on_demand):
        if stage.applies(loaded.datasets[dataset]):
            yield _make_step(loaded, base, stage, (loaded.name, dataset, stage.name), dataset)


def _make_step(loaded: Recipe, base: Path, stage: StageDeclaration, key: StageKey, dataset: str | None = None) -> Step:
    inputs = tuple(key for name in stage.inputs for key in _find_stage_keys(loaded, name, dataset))
    # The checks of its inputs must have passed before a stage, and those of the gates that it names.
    named = [key for name in stage.gates for key in _find_stage_keys(loaded, name, dataset)]
    every = [
        key
        for other in (loaded.datasets if stage.gates_on_every_dataset else ())
        for gate in catalog.list_stages("dataset")
        for key in _find_stage_keys(loaded, gate.name, other)
    ]
    gates = tuple(dict.fromkeys((*every, *inputs, *named)))
    # The checks whose options the dataset leaves at their defaults, or does not have.
    off_checks = [
        check.name
        for check in CHECKS
        if dataset is not None
        and check.requested_by
        and not any(_is_set(loaded.datasets[dataset], option) for option in check.requested_by)
    ]
    row_kind = None if dataset is None else loaded.datasets[dataset].row_kind
    recipe_kinds: set[RowKind] = {other.row_kind for other in loaded.datasets.values()}
    own = {} if dataset is None else loaded.datasets[dataset].format.list_comparisons()
    comparisons = {name: partial(compare, base) for name, compare in own.items()}
    identity = "" if stage.scope == "recipe" else key[-1] if dataset is None else dataset
    return Step(
        stage=stage,
        recipe=loaded.name,
        dataset=dataset,
        key=key,
        inputs=inputs,
        gates=gates,
        code_version=stage.code_version(loaded, identity, sorted(set(iterate_gate_waivers(loaded, gates)))),
        options_version=stage.code_version(loaded, identity, ()),
        thresholds=list_thresholds(
            loaded.gates, stage.name, dataset, row_kind=row_kind, recipe_kinds=recipe_kinds, comparisons=comparisons
        ),
        off_checks=frozenset(off_checks),
        generated_by=_find_generating_stage(loaded, dataset) if dataset is not None and not inputs else None,
    )


def _is_set(dataset: Dataset, path: str) -> bool:
    *groups, name = path.split(".")
    options: Config = dataset
    for group in groups:
        # Only some kinds have an option, or a group of options, of `format`.
        if group not in type(options).model_fields:
            return False
        options = getattr(options, group)
    fields = type(options).model_fields
    return name in fields and getattr(options, name) != fields[name].default


def _find_stage_keys(loaded: Recipe, name: str, dataset: str | None) -> Iterator[StageKey]:
    """Yield the keys of a stage named by another: for that one's dataset, or for every dataset if it has none."""
    stage = catalog.find_stage(name)
    if stage.scope == "recipe":
        yield (loaded.name, name)
        return
    for one in loaded.datasets if dataset is None else (dataset,):
        if stage.applies(loaded.datasets[one]):
            yield (loaded.name, one, name)


def _find_generating_stage(loaded: Recipe, dataset: str) -> StageKey | None:
    """Return the stage that a source of generated records reads; None if two stages qualify, and one is found later."""
    source = loaded.datasets[dataset].source
    if not isinstance(source, GeneratedSource):
        return None
    recipe_name, origin = source.dataset_key(loaded.name)
    own = loaded.datasets.get(origin) if recipe_name == loaded.name else None
    made = [stage.name for stage in catalog.STAGES if stage.on_demand and own is not None and stage.applies(own)]
    name = source.stage or (made[0] if len(made) == 1 else None)
    return None if name is None else (recipe_name, origin, name)


def find_step(project: Project, key: StageKey) -> Step:
    """Return the step of a key; raise ConfigError with the known keys if there is none."""
    steps = plan_steps(project)
    for step in steps:
        if step.key == key:
            return step
    names = ", ".join("/".join(step.key) for step in steps)
    raise ConfigError(f"{'/'.join(key)}: no such asset; there are {names}; choose one")


def find_downstream_steps(project: Project, key: StageKey) -> tuple[Step, ...]:
    """Return the steps that read a step's output, directly or through other steps, in order."""
    reached = {key}
    found: list[Step] = []
    for step in plan_steps(project):
        if reached & set(step.inputs):
            reached.add(step.key)
            found.append(step)
    return tuple(found)


def find_upstream_steps(project: Project, steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return the steps that some steps read or whose checks they wait for, directly or through others, in order."""
    wanted = {key for step in steps for key in (*step.inputs, *step.gates)}
    found: list[Step] = []
    for step in reversed(plan_steps(project)):
        if step.key in wanted:
            wanted.update((*step.inputs, *step.gates))
            found.append(step)
    return tuple(reversed(found))


def iterate_gate_waivers(loaded: Recipe, gates: Sequence[StageKey]) -> Iterator[str]:
    """Yield the waivers that apply to the gates of a step."""
    for waiver in loaded.gates.waivers:
        check = CHECKS_BY_NAME[waiver.check]
        if any(
            key[-1] in check.stages and waiver.dataset in (None, key[1] if len(key) == 3 else None) for key in gates
        ):
            yield f"{waiver.check}{f' on {waiver.dataset}' if waiver.dataset else ''}: {waiver.reason}"
