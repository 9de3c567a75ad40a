"""Runs checks on a stage's output, stores their results, and refuses outputs with a failed blocking check.

Each threshold is one number between bounds, and is compared here. `rowmill verify` also runs the same thresholds as a
Great Expectations suite (`expectation_suite.py`); a recipe's own expectations are judged in the same way. A missing or
non-finite fact fails as `not_measured`. Results are saved per (content version, threshold) and never judged twice.

A check whose number is None has nothing to ask of the output, and neither passes nor fails. This is allowed only for
checks with `applies_to`; for every other check it counts as not measured, which fails.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from rowmill.checks import cross_stage
from rowmill.checks.catalog import CHECKS_BY_NAME, format_measure, format_remedy
from rowmill.checks.gates import RUN_WAIVER_PREFIX, Threshold
from rowmill.core.errors import GateError
from rowmill.core.storage import DEFAULT_ROOT_NAME, Store, digest_json
from rowmill.schema.checks import Severity
from rowmill.schema.manifest import (
    Manifest,
    StageKey,
    get_stage_folder,
    list_outputs,
    load_current_if_intact,
    load_input,
    parse_stage_key,
)

CheckOutcome = Literal["passed", "failed", "not_applicable"]
RESULTS_FOLDER = "check_results"
"""Folder of a stage's check results."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check judged on one version of one stage's output.

    `blocking` is true if it failed, its severity is error and no waiver covers the value. A check that is not
    applicable neither passed nor failed: use `outcome` or `failed`.
    """

    check: str
    key: StageKey
    version: str
    threshold_digest: str
    value: float | None
    bound: float
    wanted: str
    severity: Severity
    passed: bool
    blocking: bool
    what: str
    remedy: str
    waiver: str = ""
    note: str = ""
    samples: tuple[str, ...] = ()
    applies_to: str = ""
    fact: str = ""
    """The fact that was compared, if it is not the check's own."""
    explanation: str = ""
    """What the comparison of outputs found, in place of the check's own `what`."""
    changes: tuple[str, ...] = ()
    """What has changed since another output, in place of the output's own samples."""

    @property
    def outcome(self) -> CheckOutcome:
        """The outcome: passed, failed or not applicable."""
        if self.note == "not_applicable":
            return "not_applicable"
        return "passed" if self.passed else "failed"

    @property
    def failed(self) -> bool:
        """Whether the check failed, waived or not."""
        return self.outcome == "failed"

    @property
    def sentence(self) -> str:
        """The result in one line: check, value, bound, remedy."""
        if self.outcome == "not_applicable":
            return f"{self.check}: not applicable ({self.what}); applies to {self.applies_to}"
        if self.passed:
            return f"{self.check}: {self.shown} ({self.what}); wanted {self.wanted}"
        excuse = f"; waived: {self.waiver}" if self.waiver and not self.blocking else f"; {self.remedy}"
        return f"{self.check}: {self.shown} ({self.what}); wanted {self.wanted}{excuse}"

    @property
    def shown(self) -> str:
        """The value as text: a share as per cent."""
        return "not measured" if self.value is None else format_measure(self.fact or self.check, self.value)

    @property
    def causes(self) -> tuple[str, ...]:
        """Why it failed, in sentences: the most frequent reasons or values; empty if the samples are only ids."""
        check = CHECKS_BY_NAME.get(self.check)
        return self.samples if self.failed and check is not None and check.names_samples else ()

    @property
    def message(self) -> str:
        """The result with its causes, one line each."""
        return "\n  ".join([self.sentence, *self.causes])


def run_checks(store: Store, manifest: Manifest, thresholds: Sequence[Threshold]) -> list[CheckResult]:
    """Return a result for each threshold; only checks without a saved result on this version are judged."""
    saved = _SavedResults.load(store, manifest)
    results = [saved.find(threshold) for threshold in thresholds]
    if None in results:
        unsaved = [threshold for threshold, result in zip(thresholds, results, strict=True) if result is None]
        saved.add(unsaved, _evaluate_checks(store, manifest, unsaved))
        results = [saved.find(threshold) for threshold in thresholds]
    return [result for result in results if result is not None]


def preview_checks(store: Store, manifest: Manifest, thresholds: Sequence[Threshold]) -> list[CheckResult]:
    """Return what `run_checks` would, without saving: a page that shows a result opens no gate."""
    saved = _SavedResults.load(store, manifest)
    return [saved.find(threshold) or _evaluate_checks(store, manifest, [threshold])[0] for threshold in thresholds]


def prefetch_check_results(store: Store, versions: Mapping[StageKey, str]) -> None:
    """Read the saved results of some versions at once."""
    store.prefetch(_check_results_path(key, version) for key, version in versions.items())


def load_check_results(store: Store, manifest: Manifest, thresholds: Iterable[Threshold]) -> list[CheckResult]:
    """Return the saved results on a version under these thresholds; checks without a result are omitted."""
    saved = _SavedResults.load(store, manifest)
    return [result for threshold in thresholds if (result := saved.find(threshold)) is not None]


def require_passing_checks(store: Store, manifest: Manifest, thresholds: Iterable[Threshold]) -> None:
    """Refuse a manifest that has a failed blocking check, or one without a result under these thresholds."""
    closed: list[str] = []
    saved = _SavedResults.load(store, manifest)
    for threshold in thresholds:
        # A fact that compares outputs may change although this output did not.
        result = (
            run_checks(store, manifest, [threshold])[0]
            if threshold.check in cross_stage.CROSS_STAGE_FACTS
            else saved.find(threshold)
        )
        if result is None and saved.find_run_waiver(threshold.check):
            # Its only results are those of a run that accepted the failure.
            result = _evaluate_checks(store, manifest, [threshold])[0]
        if threshold.severity == "error" and result is None:
            closed.append(
                f"{'/'.join(manifest.key)}: {threshold.check} was never judged on version {manifest.version[:12]}; "
                "run `rowmill verify`"
            )
        elif result is not None and result.blocking:
            closed.append(f"{'/'.join(manifest.key)}: {saved.explain_refusal(result)}")
    if closed:
        raise GateError("\n".join(closed))


@dataclass(frozen=True, slots=True)
class _SavedResults:
    """The saved results of one version, in one file, by what was asked: a digest of the threshold and its basis."""

    store: Store
    manifest: Manifest
    results: dict[str, dict[str, Any]]

    @classmethod
    def load(cls, store: Store, manifest: Manifest) -> "_SavedResults":
        raw = store.recall_sealed(_check_results_path(manifest.key, manifest.version)) or {}
        return cls(store, manifest, dict(raw.get("results", {})))

    def find(self, threshold: Threshold) -> CheckResult | None:
        raw = self.results.get(self._identify(threshold))
        if raw is None:
            return None
        values: dict[str, Any] = {**raw, "key": tuple(raw["key"]), "changes": tuple(raw["changes"])}
        about = _describe_output(
            self.manifest, threshold, values["explanation"], values["changes"], root=self.store.root
        )
        return CheckResult(**values, **about)

    def find_run_waiver(self, check: str) -> str:
        """Return why a run accepted a check's failure on this version; empty if none did."""
        reasons = (str(raw["waiver"]) for raw in self.results.values() if raw["check"] == check)
        return next(
            (reason.removeprefix(RUN_WAIVER_PREFIX) for reason in reasons if reason.startswith(RUN_WAIVER_PREFIX)), ""
        )

    def explain_refusal(self, result: CheckResult) -> str:
        reason = self.find_run_waiver(result.check)
        if not reason:
            return result.message
        hint = (
            f"{result.sentence}; another run accepted it ({reason}), and a run's waiver covers no other run: give this "
            "run the same waiver in Dagster's launchpad, or write it into gates.waivers"
        )
        return "\n  ".join([hint, *result.causes])

    def add(self, thresholds: Sequence[Threshold], results: Sequence[CheckResult]) -> None:
        for threshold, result in zip(thresholds, results, strict=True):
            self.results[self._identify(threshold)] = {name: getattr(result, name) for name in _SAVED}
        self.store.write_sealed(
            _check_results_path(self.manifest.key, self.manifest.version), {"results": self.results}
        )

    def _identify(self, threshold: Threshold) -> str:
        across = cross_stage.CROSS_STAGE_FACTS.get(threshold.check)
        if across is None:
            return threshold.digest
        return digest_json(threshold.digest, across.basis(self.store, self.manifest))


_UNSAVED = ("samples", "what", "wanted", "remedy", "applies_to")
"""Fields of a result that are set anew whenever it is loaded, so that no saved result holds an old sentence, or samples
of another output of equal content: of its rows' ids and places, which are no content."""
_SAVED = [one.name for one in fields(CheckResult) if one.name not in _UNSAVED]


def _describe_output(
    manifest: Manifest, threshold: Threshold, explanation: str, changes: tuple[str, ...], *, root: str
) -> dict[str, Any]:
    return {
        "samples": changes or manifest.samples.get(threshold.check, ()),
        "what": explanation or threshold.what,
        "wanted": threshold.wanted,
        "remedy": format_remedy(threshold.remedy, format_recipe_argument(manifest.key[0], root), manifest.key[1]),
        "applies_to": threshold.applies_to,
    }


def _check_results_path(key: StageKey, version: str) -> str:
    return f"{get_stage_folder(key)}/{RESULTS_FOLDER}/{version}.json"


def _evaluate_checks(store: Store, manifest: Manifest, thresholds: Sequence[Threshold]) -> list[CheckResult]:
    across = {
        threshold.check: cross_stage.CROSS_STAGE_FACTS[threshold.check].measure(store, manifest, threshold.compare)
        for threshold in thresholds
        if threshold.check in cross_stage.CROSS_STAGE_FACTS
    }
    # Rules of a recipe (`gates.expectations`) name any number of an output.
    numbers = manifest.facts | {check: measured.value for check, measured in across.items()}
    results: list[CheckResult] = []
    for threshold in thresholds:
        measured = across.get(threshold.check)
        value = numbers.get(threshold.fact)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        value = float(value) if is_number else None
        check = CHECKS_BY_NAME.get(threshold.check)
        if check is not None and check.is_share and threshold.expectation is None and value is not None and value > 1:
            raise ValueError(
                f"{threshold.check} is {value:g} in {'/'.join(manifest.key)}; a share is at most 1: what was counted "
                "and what it is divided by are not the same rows"
            )
        # A custom rule may name a fact that other kinds of data do not count.
        is_counted = numbers.get(threshold.fact) is not None
        is_missing = threshold.fact not in numbers and threshold.expectation is None
        applies = is_counted or is_missing or not threshold.applies_to
        note = "not_applicable" if not applies else "not_measured" if value is None else ""
        passed = value is not None and threshold.holds(value)
        covered = not passed and value is not None and _is_within(value, threshold.waiver_bound, threshold.direction)
        # A failure is only a warning between `warn_from` and `bound`, and if a change of the recipe explains it.
        only_warns = threshold.warn_from is not None and _is_within(value, threshold.bound, threshold.direction)
        only_warns = only_warns or (measured is not None and measured.is_intended)
        severity = "warn" if only_warns else threshold.severity
        explanation, changes = ("", ()) if measured is None else (measured.what, measured.changes)
        results.append(
            CheckResult(
                check=threshold.check,
                key=manifest.key,
                version=manifest.version,
                threshold_digest=threshold.digest,
                value=value,
                bound=float(threshold.bound),
                severity=severity,
                passed=passed,
                blocking=applies and not passed and severity == "error" and not covered,
                waiver=threshold.waiver_reason if covered else "",
                note=note,
                fact="" if threshold.fact == threshold.check else threshold.fact,
                explanation=explanation,
                changes=changes,
                **_describe_output(manifest, threshold, explanation, changes, root=store.root),
            )
        )
    return results


def format_recipe_argument(recipe: str, root: str) -> str:
    """Return a command's arguments for a recipe and its storage root, which is named unless it is a project's own."""
    return (
        recipe if root.rstrip("/").rpartition("/")[2] == DEFAULT_ROOT_NAME else f"{recipe} --root {shlex.quote(root)}"
    )


def _is_within(value: float | None, bound: float | None, direction: str) -> bool:
    if value is None or bound is None:
        return False
    return value <= bound if direction == "at_most" else value >= bound


# ── Ancestors ──────────────────────────────────────────────────────────────────────────────────────
#
#     packed_shards ──► tokenized_examples v1 ──► canonical_rows v1 ──► raw_dataset v1
#           └╌╌╌╌╌╌╌╌╌► truncation_stats of v1
#                                           canonical_rows v2 is current and passed, which does not cover v1
#
# A gate checks the current versions. A step's inputs may be built from older versions: built before a bound was
# tightened, or a kept version that was made current again. So every ancestor is also judged under the recipe's current
# thresholds. A result is a function of content and threshold, so a missing one is computed here.


def require_passing_ancestors(
    store: Store,
    inputs: Iterable[Manifest],
    *,
    thresholds: Callable[[Manifest], Sequence[Threshold]],
    beside: Callable[[Manifest], Iterable[StageKey]],
    gated: Iterable[Manifest] = (),
) -> None:
    """Refuse inputs with an ancestor that fails a blocking check under the current thresholds.

    `thresholds` returns those of an output, whether or not the recipe still has its stage and dataset. `beside` returns
    the stages that it waits for without reading them; `gated` are manifests whose gates were already checked. Raises
    GateError if a check is closed; the message gives each one's value, threshold and remedy. Raises IntegrityError if
    an ancestor is no longer kept.
    """
    gated_outputs = list(gated)
    judged = {(output.key, output.version) for output in gated_outputs}
    # Comparisons with the published build do not apply to what may not be current.
    compared = {check for check, fact in cross_stage.CROSS_STAGE_FACTS.items() if fact.compares}
    closed: list[str] = []
    known = {(output.key, output.fingerprint): output for output in gated_outputs}
    waiting, seen = list(inputs), set[tuple[StageKey, str]]()
    while waiting:
        output = waiting.pop()
        if (output.key, output.fingerprint) in seen:
            continue
        seen.add((output.key, output.fingerprint))
        # Results are those of a content, ancestors those of an output.
        if (output.key, output.version) not in judged:
            judged.add((output.key, output.version))
            asked = [one for one in thresholds(output) if one.severity == "error" and one.check not in compared]
            closed += [
                f"{'/'.join(output.key)}, version {output.version[:12]}, an ancestor of this input: "
                f"{_SavedResults.load(store, output).explain_refusal(result)}"
                for result in run_checks(store, output, asked)
                if result.blocking
            ]
        for key in map(parse_stage_key, output.inputs):
            named = key, output.input_fingerprints.get("/".join(key), "")
            if named not in seen:
                # Gated ones are not read again.
                waiting.append(known.get(named) or load_input(store, output, key))
        waiting += [_find_sibling_output(store, output, key, gated_outputs) for key in beside(output)]
    if closed:
        raise GateError("\n".join(closed))


def _find_sibling_output(store: Store, output: Manifest, key: StageKey, gated: Iterable[Manifest]) -> Manifest:
    """Return the output of a sibling stage that was built from the same inputs as an output."""
    for candidate in _iterate_candidates(store, key, gated):
        if all(output.inputs.get(name) in (None, version) for name, version in candidate.inputs.items()):
            return candidate
    named = ", ".join(f"version {version[:12]} of {name}" for name, version in sorted(output.inputs.items()))
    raise GateError(
        f"{'/'.join(key)}: no kept version belongs to version {output.version[:12]} of {'/'.join(output.key)}, which "
        f"was built from {named}; an output without check results cannot be used; make these versions current with "
        f"`rowmill use`, and build {key[-1]} again"
    )


def _iterate_candidates(store: Store, key: StageKey, gated: Iterable[Manifest]) -> Iterator[Manifest]:
    """Yield a stage's outputs, the most likely first, so that the others are rarely read."""
    yield from (output for output in gated if output.key == key)
    now = load_current_if_intact(store, key)
    if now is not None:
        yield now
    yield from reversed(list_outputs(store, key))
