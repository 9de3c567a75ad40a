"""Canonical rows that a process of its own makes while the command opens its tokenizer and tries the first records.

    command  opens the tokenizer, compiles the template, tries the first records ──► stages; workers
    helper   scans the sources, makes parts of canonical rows ──────────────────┘

Like a share, it writes parts and nothing that names them: no output, no statistics. If the first records show a
mistake, the parts stay as those of an interrupted build do, and the next build takes them if its options still make
them.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rowmill import sources
from rowmill.build.held_versions import find_held_version
from rowmill.build.prepare import has_current_options, make_stage_context, open_shared_executor, prepare_step
from rowmill.build.runner import make_manifest
from rowmill.build.share import LOCK_NAME
from rowmill.build.steps import Project, Step
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.stage_names import CANONICAL_ROWS, RAW_DATASET
from rowmill.executors import ForkedHelper, LocalPool, fork_helper
from rowmill.schema import manifest
from rowmill.schema.manifest import Part, StageKey
from rowmill.sources import FileScan
from rowmill.stages import inputs
from rowmill.stages.base import EarlyWork

_LOG = logging.getLogger("rowmill.build")

ResultT = TypeVar("ResultT")

MAX_EARLY_BYTES = 256 << 20
"""Datasets with more than this are not begun early: their scan takes longer than what there is to wait for."""


def start_early_parts(project: Project, steps: Sequence[Step], datasets: Iterable[str]) -> ForkedHelper | None:
    """Start a process that makes canonical rows of some datasets; None if there is no time to save.

    Call it before anything starts a thread. `finish_early_parts` ends it.
    """
    pool = open_shared_executor(project.recipe)
    sizes = {name: sources.sum_local_bytes(project.recipe.datasets[name].source, project.base) for name in datasets}
    if not isinstance(pool, LocalPool) or not pool.forks_for(sum(sizes.values())) or not project.store.is_local:
        return None
    chosen = list(
        choose_early_steps(project, steps, [name for name, size in sizes.items() if 0 < size <= MAX_EARLY_BYTES])
    )
    return fork_helper(partial(make_early_parts, project, chosen)) if chosen else None


def finish_early_parts(helper: ForkedHelper | None) -> EarlyWork:
    """Have the process end after the part that it is making, and return what it did."""
    answer = None if helper is None else helper.finish()
    return answer if isinstance(answer, EarlyWork) else EarlyWork()


def choose_early_steps(project: Project, steps: Sequence[Step], datasets: Sequence[str]) -> Iterator[tuple[Step, Step]]:
    """Yield the raw dataset and the canonical rows of those datasets whose rows are about to be made."""
    by_key = {step.key: step for step in steps}
    for name in datasets:
        raw, rows = (by_key.get((project.recipe.name, name, stage)) for stage in (RAW_DATASET, CANONICAL_ROWS))
        if raw is None or rows is None or has_current_options(project, rows):
            continue
        if all(find_held_version(project.store, step.key) is None for step in (raw, rows)):
            yield raw, rows


# ── In the process ─────────────────────────────────────────────────────────────────────────────────


class _EnoughError(Exception):
    """Ends a stage where its first parts are made, or where the process is asked to stop."""


@frozen_dataclass
class _EarlyPool:
    """An executor that runs tasks here until it is asked to stop, and ends the stage behind them."""

    is_asked_to_stop: Callable[[], bool]
    made: list[str]
    workers: int = 1
    spans_hosts: bool = False

    def map(
        self, function: Callable[..., ResultT], tasks: Iterable[object], *, size_bytes: int, shared: object = None
    ) -> Iterator[ResultT]:
        del size_bytes
        for task in tasks:
            if self.is_asked_to_stop():
                raise _EnoughError
            result = function(task) if shared is None else function(task, shared)
            results = result if isinstance(result, list) else [result]
            self.made.extend(one.fingerprint for one in results if isinstance(one, Part))
            yield result
        raise _EnoughError

    def start(self, size_bytes: int) -> None:
        del size_bytes

    def run_on_hosts(self, function: Callable[[], ResultT]) -> dict[str, ResultT]:
        del function
        return {}

    def close(self) -> None:
        pass


def make_early_parts(
    project: Project, chosen: Sequence[tuple[Step, Step]], is_asked_to_stop: Callable[[], bool]
) -> EarlyWork:
    """Scan the sources of some datasets and make the first parts of their rows, until it is asked to stop."""
    pool = _EarlyPool(is_asked_to_stop, [])
    scans: dict[StageKey, tuple[FileScan, ...]] = {}
    for raw, rows in chosen:
        try:
            to_scan = make_stage_context(project, raw, {})
            fingerprint, prepared = prepare_step(to_scan, raw)
            scanned = make_manifest(to_scan, raw, prepared.make(), fingerprint, time.monotonic(), "")
            scans[raw.key] = tuple(inputs.load_scans(scanned))
            context = replace(make_stage_context(project, rows, {raw.key: scanned}), pool=pool)
            lock = f"{manifest.get_stage_folder(rows.key)}/{LOCK_NAME}"
            with project.store.lock(lock, what="/".join(rows.key), shared=True):
                prepare_step(context, rows)[1].make()
        # What else goes wrong, the build meets again, and says it.
        except Exception as error:  # noqa: BLE001
            _LOG.debug("%s: not made early: %s", "/".join(rows.key), error or "enough was made")
    return EarlyWork(scans, frozenset(pool.made))
