"""The corridor: which stage comes after which, what each is made of, and whether it must be made again.

What belongs here: the order of the stages, their fingerprints, reuse, gates, one `run` per stage. What does
not: any stage's work. No room imports another; this module (with `parts.py`, what one worker does with one
part) hands each room what it needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipelines.findings import Terms
from pipelines.manifest import Key, Manifest
from pipelines.storage import Store

if TYPE_CHECKING:
    from pipelines.recipe import Recipe


class Progress(Protocol):
    """Who wants to hear how far a stage is."""

    def __call__(self, stage: str, *, done: int, total: int, rows: int, tokens: int, seconds: float) -> None:
        """Hear that `done` of `total` parts are finished after so many rows, tokens and seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of one dataset, or of the whole recipe: a node of the asset graph.

    `inputs` are read; `gates` are the stages whose findings must be open (a superset of `inputs`).
    """

    name: str
    recipe: str
    dataset: str | None
    key: Key
    inputs: tuple[Key, ...]
    gates: tuple[Key, ...]
    code_version: str
    description: str
    terms: tuple[Terms, ...]


@dataclass(frozen=True, slots=True)
class Project:
    """A recipe and where its work is done. `base` resolves the recipe's relative paths."""

    recipe: "Recipe"
    store: Store
    base: Path


@dataclass(frozen=True, slots=True)
class Report:
    """What running a step came to: its manifest, and how much of it was new."""

    manifest: Manifest
    reused: bool
    parts: int
    parts_reused: int
    rows_made: int
    seconds: float


def road(project: Project) -> tuple[Step, ...]:
    """Return the steps of a recipe in the order in which they can run."""
    raise NotImplementedError


def open_inputs(project: Project, step: Step) -> dict[Key, Manifest]:
    """Return the current manifest of every input whose gates are open.

    Raises
    ------
    GateError
        Naming each closed check with its number, threshold and remedy.
    IntegrityError
        If an input was never built.

    """
    raise NotImplementedError


def run(
    project: Project,
    step: Step,
    inputs: Mapping[Key, Manifest],
    *,
    ranks: Sequence[str] = (),
    version: str | None = None,
    progress: Progress | None = None,
    run_id: str = "",
) -> Report:
    """Make one step's output, or find that it is there already; `ranks` are folder names such as `rank-00003-of-00008`.

    With `version`, return that kept version instead, verified whole.
    """
    raise NotImplementedError
