"""The gate before a step: the current manifests of its inputs, if every check that blocks it has passed.

What belongs here: refusing inputs, and inputs of two histories. What does not: checks (`checks/`), running the step
(`runner.py`).
"""

from collections.abc import Iterable, Mapping, Sequence

from rowmill.build.steps import Project, Step
from rowmill.checks import judge, upstream
from rowmill.checks.gates import Threshold, list_output_thresholds
from rowmill.core.errors import IntegrityError, PipelineError
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.sources import GeneratedSource
from rowmill.stages import catalog, generated_source


def open_inputs(project: Project, step: Step) -> dict[StageKey, Manifest]:
    """Return the current manifest of every input whose gates are open.

    Raises
    ------
    GateError
        Naming each closed check with its number, threshold and remedy.
    IntegrityError
        If an input was never built.

    """
    thresholds = project.graph.thresholds
    closed: list[PipelineError] = []
    found: dict[StageKey, Manifest] = {}
    for key in dict.fromkeys((*step.inputs, *step.gates)):
        try:
            pointed = manifest.load_current(project.store, key)
            found[key] = pointed if pointed is not None else manifest.load_version(project.store, key, None)
            if key in step.gates:
                judge.require_passing_checks(project.store, found[key], thresholds[key])
        except PipelineError as error:
            closed.append(error)
    if closed:
        raise type(closed[0])("\n".join(str(error) for error in closed))
    inputs = {key: found[key] for key in step.inputs}
    require_open_ancestry(project, inputs.values(), gated=[found[key] for key in step.gates])
    return inputs | open_generated_source(project, step)


def open_generated_source(project: Project, step: Step) -> dict[StageKey, Manifest]:
    """Return the generated records that a step reads as its source; empty for every other step.

    They and all that they were made of are judged, as all other inputs are.

    Raises
    ------
    SourceError
        If nothing was generated, or both stages have something and the source names none.
    GateError
        Naming each closed check with its number, threshold and remedy.

    """
    source = None if step.inputs or step.dataset is None else project.recipe.datasets[step.dataset].source
    if not isinstance(source, GeneratedSource):
        return {}
    made = generated_source.find_generated_version(project.store, source, project.recipe.name)
    require_open_ancestry(project, [made])
    return {made.key: made}


def require_open_ancestry(project: Project, inputs: Iterable[Manifest], *, gated: Iterable[Manifest] = ()) -> None:
    """Refuse inputs that were made, however far up, of a version that fails today; see `checks/upstream.py`.

    Raises
    ------
    GateError
        Naming each closed check with its number, threshold and remedy.

    """
    graph = project.graph

    def thresholds(made: Manifest) -> Sequence[Threshold]:
        # A kept version may be of a dataset that the recipe no longer has, or calls otherwise: it is judged alike. A
        # waiver names a dataset of the recipe that it stands in, and generated records may be of another one.
        is_own = made.key[0] == project.recipe.name and catalog.find_stage(made.stage).scope == "dataset"
        dataset = made.key[1] if is_own else None
        return graph.thresholds.get(made.key) or list_output_thresholds(project.recipe.gates, made, dataset)

    upstream.require_passing_ancestors(
        project.store, inputs, thresholds=thresholds, beside=_find_sibling_gates, gated=gated
    )


def _find_sibling_gates(made: Manifest) -> list[StageKey]:
    """Return what an output of a dataset waits for without reading it; what a recipe's waits for are its ancestors."""
    return [(*made.key[:-1], name) for name in sorted(catalog.find_stage(made.stage).gates)]


def require_one_history(inputs: Mapping[StageKey, Manifest]) -> None:
    """Refuse inputs of which one was made of another version of the other.

    That happens when an older version of one stage was made current and what follows was not built again.

    Raises
    ------
    IntegrityError
        Naming the input that must be built again.

    """
    for key, made in sorted(inputs.items()):
        for other, found in inputs.items():
            of = made.inputs.get("/".join(other))
            if of is not None and of != found.version:
                raise IntegrityError(
                    f"{'/'.join(key)}: made of version {of[:12]} of {'/'.join(other)}, but {found.version[:12]} is "
                    f"current; inputs must be of one history; build {key[-1]} again, or use the other version"
                )
