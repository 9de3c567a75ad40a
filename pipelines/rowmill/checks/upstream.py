"""Checks all ancestors of an output under the current thresholds.

    packed_shards ──► tokenized_examples v1 ──► canonical_rows v1 ──► raw_dataset v1
          └╌╌╌╌╌╌╌╌╌► truncation_stats of v1
                                          canonical_rows v2 is current and passed, which does not cover v1

A gate checks the current versions. A step's inputs may be built from older versions: built before a bound was
tightened, or a kept version that was made current again. So every ancestor is also judged under the recipe's current
thresholds. A result is a function of content and threshold, so a missing one is computed here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rowmill.checks import cross_stage, judge
from rowmill.checks.gates import Threshold
from rowmill.core.errors import GateError
from rowmill.core.storage import Store
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey


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
    gated_outputs = {(output.key, output.version): output for output in gated}
    closed = [
        f"{'/'.join(output.key)}, version {output.version[:12]}, an ancestor of this input: "
        f"{judge.explain_refusal(store, output, result)}"
        for output in _iterate_ancestors(store, inputs, beside, gated_outputs)
        if (output.key, output.version) not in gated_outputs
        for result in judge.run_checks(store, output, _select_blocking_thresholds(thresholds(output)))
        if result.blocking
    ]
    if closed:
        raise GateError("\n".join(closed))


def _select_blocking_thresholds(thresholds: Sequence[Threshold]) -> list[Threshold]:
    """Return the thresholds that can block, without comparisons with the published build."""
    return [
        threshold
        for threshold in thresholds
        if threshold.severity == "error"
        and not (
            threshold.check in cross_stage.CROSS_STAGE_FACTS and cross_stage.CROSS_STAGE_FACTS[threshold.check].compares
        )
    ]


def _iterate_ancestors(
    store: Store,
    inputs: Iterable[Manifest],
    beside: Callable[[Manifest], Iterable[StageKey]],
    gated_outputs: Mapping[tuple[StageKey, str], Manifest],
) -> Iterator[Manifest]:
    """Yield some manifests and all their ancestors, each version once; gated ones are not read again."""
    waiting, seen = list(inputs), set[tuple[StageKey, str]]()
    while waiting:
        output = waiting.pop()
        if (output.key, output.version) in seen:
            continue
        seen.add((output.key, output.version))
        yield output
        named = [(manifest.parse_stage_key(name), version) for name, version in output.inputs.items()]
        waiting += [
            gated_outputs.get(name) or manifest.load_version(store, *name) for name in named if name not in seen
        ]
        waiting += [_find_sibling_version(store, output, key, gated_outputs) for key in beside(output)]


def _find_sibling_version(
    store: Store, output: Manifest, key: StageKey, gated_outputs: Mapping[tuple[StageKey, str], Manifest]
) -> Manifest:
    """Return the version of a sibling stage that was built from the same inputs as an output."""
    for candidate in _iterate_candidate_versions(store, key, gated_outputs):
        if all(output.inputs.get(name) in (None, version) for name, version in candidate.inputs.items()):
            return candidate
    named = ", ".join(f"version {version[:12]} of {name}" for name, version in sorted(output.inputs.items()))
    raise GateError(
        f"{'/'.join(key)}: no kept version belongs to version {output.version[:12]} of {'/'.join(output.key)}, which "
        f"was built from {named}; an output without check results cannot be used; make these versions current with "
        f"`rowmill use`, and build {key[-1]} again"
    )


def _iterate_candidate_versions(
    store: Store, key: StageKey, gated_outputs: Mapping[tuple[StageKey, str], Manifest]
) -> Iterator[Manifest]:
    """Yield a stage's versions, the most likely first, so that the others are rarely read."""
    yield from (output for (of, _), output in gated_outputs.items() if of == key)
    now = manifest.load_current(store, key)
    if now is not None:
        yield now
    yield from reversed(manifest.list_versions(store, key))
