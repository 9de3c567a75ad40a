"""Waivers of one run: failures that a person accepts where the run is started, in addition to the recipe's waivers.

The next run has only the recipe's waivers again: what this run published stays published, and the check is red again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

from rowmill.build.steps import Project
from rowmill.checks.catalog import CHECKS_BY_NAME
from rowmill.checks.gates import RUN_WAIVER_PREFIX, Waiver, find_unknown_dataset
from rowmill.checks.judge import CheckResult
from rowmill.core import config
from rowmill.core.errors import ConfigError
from rowmill.stages import catalog

SHOWN_DIGITS: Final = 2


def add_run_waivers(project: Project, waivers: Sequence[Mapping[str, Any]], where: str) -> Project:
    """Return the project with these waivers before its recipe's own; the project itself without any.

    Raises
    ------
    ConfigError
        If a waiver is invalid; with `where` and its number.

    """
    if not waivers:
        return project
    added: list[Waiver] = []
    for number, values in enumerate(waivers):
        one = config.validate_options(Waiver, values, f"{where}.{number}")
        if problem := find_unknown_dataset(one, project.recipe.datasets):
            raise ConfigError(f"{where}.{number}: dataset: {problem}")
        added.append(one.model_copy(update={"reason": RUN_WAIVER_PREFIX + one.reason}))
    gates = project.recipe.gates
    widened = gates.model_copy(update={"waivers": (*added, *gates.waivers)})
    return replace(project, recipe=project.recipe.model_copy(update={"gates": widened}))


def propose_run_waivers(
    results: Iterable[CheckResult], given: Sequence[Mapping[str, Any]] = ()
) -> list[Mapping[str, Any]]:
    """Return the waivers of a run that gets past these results: those that the run was given, and one per failure.

    A given one is left out if its check failed nevertheless: its bound was too low.
    """
    proposed = [one for one in map(propose_run_waiver, results) if one is not None]
    names = {_name_waived(one) for one in proposed}
    return [*(one for one in given if _name_waived(one) not in names), *proposed]


def _name_waived(waiver: Mapping[str, Any]) -> tuple[object, object]:
    return waiver.get("check"), waiver.get("dataset")


def propose_run_waiver(result: CheckResult) -> dict[str, Any] | None:
    """Return the waiver that would let a failed check pass as it is now, without a reason; None if none would."""
    check = CHECKS_BY_NAME.get(result.check)
    if not result.blocking or result.value is None or check is None or not check.waivable:
        return None
    is_dataset = catalog.find_stage(result.key[-1]).scope == "dataset" if len(result.key) == 3 else False
    dataset = {"dataset": result.key[1]} if is_dataset else {}
    return {
        "check": check.name,
        **dataset,
        check.direction: _round_outwards(result.value, check.direction),
        "reason": "",
    }


def _round_outwards(value: float, direction: str) -> float | int:
    """Return a short number that the value does not exceed: 0.33412 at most 0.34."""
    # The shortest text of the number, since 0.2 is not exactly 0.2.
    exact = Decimal(repr(value))
    if exact == exact.to_integral_value():
        return int(exact)
    step = Decimal(1).scaleb(exact.adjusted() - SHOWN_DIGITS + 1)
    return float(exact.quantize(step, rounding=ROUND_CEILING if direction == "at_most" else ROUND_FLOOR))
