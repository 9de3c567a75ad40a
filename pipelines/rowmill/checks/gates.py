"""The option group `gates` of a recipe: bounds, severities, waivers, custom expectations, and the thresholds."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from pydantic import Field, create_model, field_validator, model_validator

from rowmill.checks.catalog import CHECKS, CHECKS_BY_NAME, RESULT_VERSION, format_measure
from rowmill.core.config import Config
from rowmill.core.errors import hint_at_name, join_choices, suggest_name
from rowmill.core.storage import Store, digest_json
from rowmill.schema.checks import Check, Severity
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.schema.rows import RowKind


class Bound(Config):
    """The threshold of one check in this recipe; omitted fields keep their defaults."""

    at_most: float | int | None = None
    """Highest value that passes; for checks with an upper bound."""
    at_least: float | int | None = None
    """Lowest value that passes; for checks with a lower bound."""
    severity: Severity | None = None
    """`error` closes the gate, `warn` only shows."""


RUN_WAIVER_PREFIX: Final = "for one run: "
"""Begins the reason of a run's waiver everywhere, so that nobody looks for it in the recipe."""


class Waiver(Config):
    """A failure that was reviewed and accepted, within a bound; shown on every later page."""

    check: str
    """The check that may fail."""
    dataset: str | None = None
    """The dataset for which it may fail; null for checks of the whole recipe."""
    at_most: float | int | None = None
    """How far an upper bound may be exceeded."""
    at_least: float | int | None = None
    """How far a lower bound may be missed."""
    reason: str = Field(min_length=10)
    """Why the failure is acceptable; shown with every failure that it covers."""

    @model_validator(mode="after")
    def _require_waivable_check(self) -> "Waiver":
        check = CHECKS_BY_NAME.get(self.check)
        if check is None:
            guess = suggest_name(self.check, CHECKS_BY_NAME)
            raise ValueError(
                f"{self.check!r} is not a check; choose "
                f"{join_choices(sorted(CHECKS_BY_NAME))}{f'; did you mean {guess}?' if guess else ''}"
            )
        if not check.waivable:
            raise ValueError(
                f"{self.check} guards correctness and cannot be waived; remove the waiver and fix the cause"
            )
        if getattr(self, check.direction) is None:
            raise ValueError(f"{self.check} needs {check.direction}; set how far it may fail")
        return self


def find_unknown_dataset(waiver: Waiver, datasets: Iterable[str]) -> str | None:
    """Return what is wrong with the dataset that a waiver names; None if nothing is."""
    if waiver.dataset is None or waiver.dataset in datasets:
        return None
    return (
        f"{waiver.dataset!r} is not a dataset; choose {join_choices(datasets)}; a waiver for an unknown dataset would "
        "silently waive nothing"
    )


ExpectationType = Literal[
    "expect_column_max_to_be_between",
    "expect_column_mean_to_be_between",
    "expect_column_median_to_be_between",
    "expect_column_min_to_be_between",
    "expect_column_sum_to_be_between",
    "expect_column_values_to_be_between",
]
"""The library's expectations that test whether a number is between bounds.

They are listed so that a recipe can be validated without importing the library. The others take other arguments, do not
apply to a single number, or give the same answer for every number.
"""


class Expectation(Config):
    """A Great Expectations rule of your own over a stage's facts."""

    name: str = Field(pattern=r"^[A-Za-z0-9_]+$")
    """Name of the rule in results and checks; must not be the name of a check."""
    type: ExpectationType = "expect_column_max_to_be_between"
    """The expectation's snake-case name; all are equivalent, since a fact is one number."""
    column: str
    """The fact that it tests; `rowmill verify --facts` lists them."""
    min_value: float | int | None = None
    """Lowest value that passes."""
    max_value: float | int | None = None
    """Highest value that passes."""
    severity: Severity = "error"
    """`error` closes the gate, `warn` only shows."""

    @field_validator("type", mode="before")
    @classmethod
    def _require_range_type(cls, value: object) -> object:
        allowed = get_args(ExpectationType)
        if not isinstance(value, str) or value in allowed:
            return value
        raise ValueError(
            f"{value!r} is not an expectation that tests a number against bounds; choose {join_choices(allowed)}; "
            f"{hint_at_name(value, allowed, 'use min_value and max_value')}"
        )

    @model_validator(mode="after")
    def _require_bound(self) -> "Expectation":
        if self.min_value is None and self.max_value is None:
            raise ValueError(f"{self.name}: has no bound; expected min_value, max_value or both; set at least one")
        if self.min_value is not None and self.max_value is not None and self.min_value > self.max_value:
            raise ValueError(
                f"{self.name}: min_value {self.min_value:g} is above max_value {self.max_value:g}, so that nothing "
                "passes; the lower bound must not be above the upper; correct one"
            )
        if self.name in CHECKS_BY_NAME:
            raise ValueError(f"{self.name} is the name of a check; a custom rule needs another name; rename it")
        return self


class GatesBase(Config):
    """Thresholds of the checks; omitted ones keep their defaults."""

    waivers: tuple[Waiver, ...] = ()
    """Failures that are accepted with a reason."""
    expectations: dict[str, tuple[Expectation, ...]] = Field(default_factory=dict)
    """Custom rules: a mapping from stage names to rules over the stage's facts."""

    @model_validator(mode="after")
    def _require_fitting_bounds(self) -> "GatesBase":
        for check in CHECKS:
            bound: Bound | None = getattr(self, check.name, None)
            opposite = "at_least" if check.direction == "at_most" else "at_most"
            if bound is not None and getattr(bound, opposite) is not None:
                raise ValueError(
                    f"{check.name} has an {check.direction} bound, so {opposite} does not apply; use {check.direction}"
                )
            limit = getattr(bound, check.direction, None)
            is_looser = bound is not None and _is_looser(
                check, check.bound if limit is None else limit, bound.severity or check.severity
            )
            if is_looser and not check.waivable:
                raise ValueError(
                    f"{check.name} guards correctness; allowed is {check.direction} {check.bound:g} or stricter, and "
                    "severity error; remove the option and fix the cause"
                )
        for stage in self.expectations:
            stages = {s for check in CHECKS for s in check.stages}
            if stage not in stages:
                guess = suggest_name(stage, stages)
                hint = f"; did you mean {guess}?" if guess else ""
                raise ValueError(f"expectations.{stage}: no such stage; choose {join_choices(sorted(stages))}{hint}")
            for item in self.expectations[stage]:
                check = CHECKS_BY_NAME.get(item.column)
                if check is not None and stage not in check.stages:
                    raise ValueError(
                        f"expectations.{stage}: rule {item.name} tests {item.column}, which this stage does not "
                        f"measure; {join_choices(check.stages)} does; move the rule to expectations.{check.stages[0]}"
                    )
            names = Counter(item.name for item in self.expectations[stage])
            repeated = [name for name, count in names.items() if count > 1]
            if repeated:
                raise ValueError(
                    f"expectations.{stage}: {names[repeated[0]]} rules are called {repeated[0]}; rules need unique "
                    "names, under which their results are stored; rename all but one"
                )
        return self

    def check_recipe(self, recipe: RecipeSummary) -> None:
        """Refuse a waiver for a dataset that the recipe does not have."""
        for waiver in self.waivers:
            if problem := find_unknown_dataset(waiver, recipe.datasets):
                raise ValueError(f"gates.waivers: {problem}")


def _is_looser(check: Check, bound: float, severity: Severity) -> bool:
    wider = bound > check.bound if check.direction == "at_most" else bound < check.bound
    return wider or (severity, check.severity) == ("warn", "error")


def list_loosened_checks(key: StageKey, thresholds: Iterable["Threshold"]) -> Iterator[str]:
    """Yield the checks of a stage whose bounds a recipe loosens, with both bounds."""
    for threshold in thresholds:
        check = CHECKS_BY_NAME.get(threshold.check)
        if check is not None and _is_looser(check, threshold.bound, threshold.severity):
            yield (
                f"{'/'.join(key)}: {threshold.check} {threshold.direction.replace('_', ' ')} {threshold.bound:g} "
                f"({threshold.severity}); the default is {check.bound:g} ({check.severity})"
            )


def _define_bound_field(check: Check) -> tuple[Any, Any]:
    sign = "≤" if check.direction == "at_most" else "≥"
    where = f" Applies to {check.applies_to}." if check.applies_to else ""
    warned = "" if check.warn_from is None else f"; warns from {check.warn_from:g}"
    text = f"{check.what[0].upper()}{check.what[1:]}; default {sign} {check.bound:g}, {check.severity}{warned}.{where}"
    return Bound | None, Field(default=None, description=text)


if TYPE_CHECKING:
    Gates = GatesBase
else:
    Gates = create_model(
        "Gates",
        __base__=GatesBase,
        __doc__=GatesBase.__doc__,
        **{check.name: _define_bound_field(check) for check in CHECKS},
    )
    """`GatesBase` plus one optional `Bound` per check, so that a mistyped check is an unknown key."""


Comparison: TypeAlias = Callable[[Store, Manifest, Manifest], Sequence[str] | None]
"""Returns the changes of an output since the published one, a sentence each; None if the two cannot be compared."""


@dataclass(frozen=True)
class Threshold:
    """A check's bound under this recipe, which a fact is compared with."""

    check: str
    direction: str
    bound: float
    severity: Severity
    what: str
    remedy: str
    waiver_bound: float | None = None
    waiver_reason: str = ""
    expectation: dict[str, Any] | None = None
    applies_to: str = ""
    warn_from: float | None = None
    """A value beyond it fails, but blocks only beyond `bound`."""
    compare: Comparison | None = field(default=None, compare=False)
    """Finds the changes since the published output that the check counts, for rows of a kind that has such a check."""

    @property
    def fact(self) -> str:
        """The fact that is compared: the check's own, or the column of a recipe's expectation."""
        return self.expectation["column"] if self.expectation else self.check

    @property
    def passing(self) -> float:
        return self.bound if self.warn_from is None else self.warn_from

    @cached_property
    def digest(self) -> str:
        """Digest of the values that decide a result; those under another threshold are not valid for this one.

        Sentences are not among them: a result that was saved before a sentence was reworded still counts.
        """
        decisive = {
            "check": self.check,
            "rule": list(self.rule),
            "direction": self.direction,
            "bound": self.bound,
            "warn_from": self.warn_from,
            "severity": self.severity,
            "waiver_bound": self.waiver_bound,
            "waiver_reason": self.waiver_reason,
            "applies_to_some_data": bool(self.applies_to),
        }
        return digest_json(RESULT_VERSION, decisive)

    @cached_property
    def wanted(self) -> str:
        """The bound as text: `at most 5 %`."""
        expectation = self.expectation or {}
        if expectation.get("min_value") is not None and expectation.get("max_value") is not None:
            return f"from {self._show(expectation['min_value'])} to {self._show(expectation['max_value'])}"
        blocks = "" if self.passing == self.bound else f", and {self._show(self.bound)} before it blocks"
        return f"{self.direction.replace('_', ' ')} {self._show(self.passing)}{blocks}"

    def _show(self, value: float) -> str:
        return format_measure(self.fact, value)

    @property
    def rule(self) -> tuple[str, dict[str, float | str]]:
        """Return the Great Expectations rule for the check: its snake-case name and arguments.

        Range expectations on values pass on zero rows; those on the maximum and minimum do not.
        """
        if self.expectation is not None:
            limits = {k: self.expectation[k] for k in ("min_value", "max_value") if self.expectation[k] is not None}
            return str(self.expectation["type"]), {"column": self.expectation["column"], **limits}
        if self.direction == "at_most":
            return "expect_column_max_to_be_between", {"column": self.check, "max_value": self.passing}
        return "expect_column_min_to_be_between", {"column": self.check, "min_value": self.passing}

    def holds(self, value: float) -> bool:
        """Return whether a number passes: every rule is an inclusive range."""
        _, arguments = self.rule
        return float(arguments.get("min_value", -math.inf)) <= value <= float(arguments.get("max_value", math.inf))


def list_thresholds(
    gates: GatesBase,
    stage: str,
    dataset: str | None,
    *,
    row_kind: RowKind | None,
    recipe_kinds: Collection[RowKind] = (),
    comparisons: Mapping[str, Comparison] = MappingProxyType({}),
) -> tuple[Threshold, ...]:
    """Return the thresholds of every check of a stage under a recipe's gates, in the order of `CHECKS`.

    `row_kind` is what the dataset's kind declares, None for a stage of the whole recipe: checks that exist only for
    rows of another kind are omitted. `recipe_kinds` are those of all datasets of such a stage, whose remedies are for
    them. `comparisons` are those of the dataset's kind, by check.
    """
    row_kinds = recipe_kinds if row_kind is None else (row_kind,)
    listed: list[Threshold] = []
    for check in CHECKS:
        if stage not in check.stages or not check.exists_for(row_kind):
            continue
        bound: Bound | None = getattr(gates, check.name, None)
        configured = getattr(bound, check.direction) if bound else None
        covering = [w for w in gates.waivers if w.check == check.name and w.dataset in (None, dataset)]
        # A waiver for the dataset takes precedence over one for all.
        waiver = min(covering, key=lambda w: w.dataset is None, default=None)
        limit = check.bound if configured is None else configured
        stricter = min if check.direction == "at_most" else max
        threshold = Threshold(
            check=check.name,
            direction=check.direction,
            bound=limit,
            severity=(bound.severity if bound else None) or check.severity,
            what=check.what,
            remedy=check.choose_remedy(row_kinds),
            waiver_bound=getattr(waiver, check.direction) if waiver else None,
            waiver_reason=waiver.reason if waiver else "",
            warn_from=None if check.warn_from is None else stricter(check.warn_from, limit),
            applies_to=check.applies_to,
            compare=comparisons.get(check.name),
        )
        listed.append(threshold)
    for rule in gates.expectations.get(stage, ()):
        limit = rule.min_value if rule.max_value is None else rule.max_value
        assert limit is not None  # its validator requires one
        threshold = Threshold(
            check=rule.name,
            direction="at_least" if rule.max_value is None else "at_most",
            bound=limit,
            severity=rule.severity,
            what=f"{rule.type} on {rule.column}",
            remedy=f"see gates.expectations, rule {rule.name}",
            expectation=rule.model_dump(),
            # A rule is for a stage of every dataset; where its fact does not apply, neither does the rule.
            applies_to=CHECKS_BY_NAME[rule.column].applies_to if rule.column in CHECKS_BY_NAME else "",
        )
        listed.append(threshold)
    return tuple(listed)


def list_output_thresholds(gates: GatesBase, output: Manifest, dataset: str | None) -> tuple[Threshold, ...]:
    """Return the thresholds of an output whose dataset the recipe may no longer have; its facts show its kind."""
    row_kinds: list[RowKind | None] = [
        check.only_for for check in CHECKS if check.only_for and check.name in output.facts
    ]
    return list_thresholds(gates, output.stage, dataset, row_kind=row_kinds[0] if row_kinds else None)
