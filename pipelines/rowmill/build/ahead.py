"""What is made while the calling process opens the tokenizer and tries the first records.

    calling process   opens the tokenizer, learns the template, tries the first records ──► mistakes, or the build
    side process      makes the views for SQL, scans the sources, makes rows, part by part ► ended here

Opening takes up to a second on one core. What is made meanwhile is what the build makes next: the views, over tables
that are still empty; scans, and parts under their fingerprints, as a build leaves them that was killed. The build finds
them and counts rows as made, since this command made them. A build that is refused leaves them for the next one, too,
and no output.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from rowmill.build.gate import find_held_version
from rowmill.build.prepare import make_stage_context, open_shared_executor, sum_source_bytes
from rowmill.build.runner import make_manifest
from rowmill.build.steps import Project, plan_steps
from rowmill.core.stage_names import CANONICAL_ROWS, RAW_DATASET
from rowmill.executors import LocalPool, Note, SideProcess, fork_beside
from rowmill.parts.context import MadeAhead
from rowmill.schema.manifest import Manifest, Part, StageKey
from rowmill.sources import FileScan
from rowmill.sources.reading import load_scans
from rowmill.stats.views import publish_views

ResultT = TypeVar("ResultT")


def begin_rows(project: Project, datasets: Sequence[str]) -> SideProcess | None:
    """Start to make the views, and the rows of some datasets, beside this process; None where there are no cores.

    Few rows are left to the build, which makes them in no time. Forks this process, so call it before anything starts a
    thread. End it with `collect_rows`.
    """
    pool = open_shared_executor(project.recipe)
    # What another machine stores, it is asked for once, by the build.
    if not (isinstance(pool, LocalPool) and pool.can_fork and project.store.is_local):
        return None
    many = datasets if pool.forks_at(sum_source_bytes(project, datasets)) else ()
    return fork_beside(partial(_work_ahead, project, many))


def collect_rows(project: Project, side: SideProcess | None) -> Project:
    """End what `begin_rows` started; return the project, which knows what was made."""
    noted = [] if side is None else side.stop()
    scans = {one.url: one for one in noted if isinstance(one, FileScan)}
    return replace(project, ahead=MadeAhead(scans, frozenset(one for one in noted if isinstance(one, str))))


def _work_ahead(project: Project, datasets: Iterable[str], note: Note) -> None:
    # First what is of no use before it is finished.
    publish_views(project.store)
    _make_rows(project, datasets, note)


def _make_rows(project: Project, datasets: Iterable[str], note: Note) -> None:
    """Run the stages up to `canonical_rows`, whose outputs nobody gets; note scans and the fingerprints of parts."""
    for name in datasets:
        outputs: dict[StageKey, Manifest] = {}
        for step in plan_steps(project):
            if step.dataset != name or step.name not in (RAW_DATASET, CANONICAL_ROWS):
                continue
            is_ready = all(key in outputs for key in step.inputs)
            if not is_ready or find_held_version(project.store, step.key) is not None:
                break
            context = replace(make_stage_context(project, step, outputs), pool=_NotingPool(note))
            draft = step.stage.prepare(context).make()
            made = outputs[step.key] = make_manifest(context, step, draft, "", monotonic(), "")
            if step.name == RAW_DATASET:
                for scan in load_scans(made):
                    note(scan)


class _NotingPool(LocalPool):
    """Makes parts in this process, and notes the fingerprint of each that is finished."""

    def __init__(self, note: Note) -> None:
        super().__init__(1)
        self._note = note

    def map(
        self, function: Callable[..., ResultT], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[ResultT]:
        """Yield the results in task order."""
        for made in super().map(function, tasks, size_bytes=size_bytes, shared=shared):
            parts: list[Any] = made if isinstance(made, list) else []
            for part in parts:
                if isinstance(part, Part):
                    self._note(part.fingerprint)
            yield made
