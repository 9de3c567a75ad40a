"""Facts that no single stage can count: losses over all stages, and what moved since the published build.

    raw_dataset ─► canonical_rows ─► tokenized_examples ─► packed_shards     end_to_end_loss: multiplied over the stages
        │               │                   │                   │
    published.json: counts of the published build's stages                  shrunk: each compared with it
                          versions of its examples                          drift: their distributions (`drift.py`)

They may change although the output does not. So neither is part of a manifest or its version: they are measured when
they are judged, and a result is stored together with what it was measured against (`basis`). So is what is only noted
of a source, and changes no row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rowmill.checks import drift
from rowmill.checks.gates import Comparison
from rowmill.core.errors import IntegrityError
from rowmill.core.stage_names import (
    CANONICAL_ROWS,
    GPU_PARTITIONS,
    PACKED_SHARDS,
    RAW_DATASET,
    TOKENIZED_EXAMPLES,
    TRAINING_SPLITS,
)
from rowmill.core.storage import Store, digest_json
from rowmill.schema import manifest
from rowmill.schema.example_counts import ExampleCounts, RowExampleCounts
from rowmill.schema.ledger import INTENDED_REASONS, KEPT, REJECTED
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.schema.row_counts import RowCounts
from rowmill.schema.shard_counts import PackingCounts
from rowmill.schema.source_counts import SourceCounts


@dataclass(frozen=True, slots=True)
class CrossStageMeasurement:
    """A fact and the sentence that explains it; `is_intended` if a change of the recipe explains it.

    `changes` are sentences on what was counted.
    """

    value: float | None
    what: str = ""
    is_intended: bool = False
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CrossStageFact:
    """How a check's fact is measured; `basis` identifies everything that the output is compared with.

    `measure` is also given the comparison of the dataset's kind, if it has one for the check.
    """

    basis: Callable[[Store, Manifest], str]
    measure: Callable[[Store, Manifest, Comparison | None], CrossStageMeasurement]
    compares: bool = False
    """Whether it compares with the published build; it then does not apply to ancestors of a kept version."""


# ── What was lost ──────────────────────────────────────────────────────────────────────────────────


def _measure_loss(store: Store, packed: Manifest, _: Comparison | None) -> CrossStageMeasurement:
    """Return the larger of the shares of records and of trained tokens that entered but are in no sequence.

    A record counts from where it was read, a trained token from where its row was tokenized. Rows that the recipe left
    out on purpose (`max_items`, copies, surplus of validation) count as neither.
    """
    packing = packed.find_counts(PackingCounts)
    if packing is None:
        return CrossStageMeasurement(None, "built by a version of rowmill that did not count it")
    inputs = manifest.load_inputs(store, packed)
    tokenized = next(entry for entry in inputs.values() if entry.stage == TOKENIZED_EXAMPLES)
    canonical = next(iter(manifest.load_inputs(store, tokenized).values()))
    losses = packing.count_losses()
    records = {
        CANONICAL_ROWS: _count_rejected(canonical, INTENDED_REASONS),
        TOKENIZED_EXAMPLES: _count_rejected(tokenized, frozenset()),
        PACKED_SHARDS: losses["examples"],
    }
    trained: dict[str, tuple[int, int]] = {}
    of_rows = tokenized.find_counts(RowExampleCounts)
    if of_rows is not None:
        cut, refused = of_rows.trained_removed, of_rows.dropped_trained
        trained["truncation"] = (cut, tokenized.get_counts(ExampleCounts).trained_tokens + cut + refused)
        trained[TOKENIZED_EXAMPLES] = (refused, trained["truncation"][1] - cut)
    trained[PACKED_SHARDS] = losses["trained_tokens"]
    worst, counted = max(
        (("records", records), ("trained tokens", trained)), key=lambda entry: _compound_loss(entry[1].values())
    )
    value = _compound_loss(counted.values())
    entered = next(iter(counted.values()))[1]
    if not entered:
        return CrossStageMeasurement(None)
    lost = ", ".join(f"{name} {count:,}" for name, (count, _) in counted.items() if count)
    return CrossStageMeasurement(
        value, f"{worst} that entered but are in no sequence, of {entered:,}: {lost or 'none'}"
    )


def _count_rejected(output: Manifest, chosen: frozenset[str]) -> tuple[int, int]:
    """Return how many records a stage rejected unintentionally, and how many it should have kept."""
    kept = sum(count for state, _, count in output.ledger if state == KEPT)
    rejected = sum(count for state, reason, count in output.ledger if state == REJECTED and reason not in chosen)
    return rejected, kept + rejected


def _compound_loss(stages: Iterable[tuple[int, int]]) -> float:
    """Return the share lost over all stages, each of which loses `lost` of `entered`."""
    remaining = 1.0
    for lost, entered in stages:
        remaining *= 1 - lost / entered if entered else 1
    return round(1 - remaining, 9)


# ── What shrank ────────────────────────────────────────────────────────────────────────────────────


def published_path(recipe: str) -> str:
    """Return the path of the published build's counts."""
    return f"{recipe}/{GPU_PARTITIONS}/published.json"


CHANGES_FOLDER = "changes"
"""Folder of the ranks with what each published build changed since the one before it (`build/comparison.py`)."""

SHOWN_CHANGES = 10
"""Changes since the published output that are shown."""

_NOTHING_PUBLISHED: Mapping[str, Any] = {"version": "", "stages": {}}


def write_published_counts(store: Store, ranks: Manifest) -> None:
    """Store the counts of every stage of the published ranks, for comparison with later builds.

    `published.json` holds the ranks' `version`, the time of publication (`at`), and for each of `stages` its `version`,
    `options_version`, `counts`, and the published version that it was compared with (`compared_with`).
    """
    path = published_path(ranks.key[0])
    kept = store.read_sealed(path)
    counts = _describe_stages(store, ranks, kept or _NOTHING_PUBLISHED)
    if kept is None or kept["stages"] != counts["stages"]:
        store.write_sealed(path, counts)


def load_published(store: Store, recipe: str) -> Mapping[str, Any] | None:
    """Return the published build as `write_published_counts` stores it; recomputed from manifests if that is lost."""
    kept = store.recall_sealed(published_path(recipe))
    if kept is not None:
        return kept
    current = store.read_sealed(f"{recipe}/{GPU_PARTITIONS}/current.json")
    if current is None:
        return None
    try:
        ranks = manifest.load_version(store, (recipe, GPU_PARTITIONS), current["version"])
        return _describe_stages(store, ranks, _NOTHING_PUBLISHED)
    except IntegrityError:
        # gc removed one of the manifests, so nothing can be compared.
        return None


def _describe_stages(store: Store, ranks: Manifest, earlier: Mapping[str, Any]) -> dict[str, Any]:
    stages: dict[str, dict[str, Any]] = {}
    for output in iterate_history(store, ranks):
        name = "/".join(output.key)
        before = earlier["stages"].get(name, {})
        is_known = before.get("version") == output.version
        stages[name] = {
            "version": output.version,
            "options_version": output.details["options_version"],
            "counts": read_counts(output),
            "compared_with": before["compared_with"] if is_known else earlier["version"],
        }
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"version": ranks.version, "at": at, "stages": stages}


def read_counts(output: Manifest) -> dict[str, float]:
    """Return the counts of an output that should not decrease from build to build, by name."""
    count = SHRINKING_COUNTS.get(output.stage)
    return {} if count is None else count(output)


def _count_source(scanned: Manifest) -> dict[str, float]:
    counts = scanned.get_counts(SourceCounts)
    return {"files": counts.files, "records": counts.records}


def _count_rows(canonical: Manifest) -> dict[str, float]:
    return {"rows": canonical.get_counts(RowCounts).kept}


def _count_packed(packed: Manifest) -> dict[str, float]:
    counts = packed.get_counts(PackingCounts)
    return {"tokens": counts.tokens, "trained tokens": counts.trained_tokens}


def _measure_mixture_shares(order: Manifest) -> dict[str, float]:
    table = order.tables["mixture"]
    name, trained = table.columns.index("dataset"), table.columns.index("trained_tokens")
    total = sum(int(row[trained]) for row in table.rows)
    return {f"share of {row[name]}": round(int(row[trained]) / total, 9) for row in table.rows} if total else {}


SHRINKING_COUNTS: Mapping[str, Callable[[Manifest], dict[str, float]]] = {
    RAW_DATASET: _count_source,
    CANONICAL_ROWS: _count_rows,
    PACKED_SHARDS: _count_packed,
    TRAINING_SPLITS: _measure_mixture_shares,
}
"""Counts by stage, for the stages of the check `shrunk`."""


def _measure_shrinkage(store: Store, output: Manifest, _: Comparison | None) -> CrossStageMeasurement:
    published = load_published(store, output.key[0])
    before = (published or {}).get("stages", {}).get("/".join(output.key))
    if published is None or before is None:
        return CrossStageMeasurement(None, "nothing is published yet to compare it with")
    now = read_counts(output)
    fell = {name: 1 - now.get(name, 0) / count for name, count in before["counts"].items() if count}
    if not fell:
        return CrossStageMeasurement(None, "the published build had no such counts")
    name, share = max(fell.items(), key=lambda item: item[1])
    since = f"since version {published['version'][:12]}, published {published['at'][:19]}"
    value = round(max(share, 0.0), 9)
    if not value:
        return CrossStageMeasurement(value, f"nothing decreased {since}")
    after, earlier = (_format_count_or_share(count) for count in (now.get(name, 0), before["counts"][name]))
    return _excuse_changed_options(store, output, published, value, f"{name}: {after}, down from {earlier} {since}")


def _excuse_changed_options(
    store: Store, output: Manifest, published: Mapping[str, Any], value: float, what: str
) -> CrossStageMeasurement:
    """Return a measurement, intended if options of the output's history differ from those of the published build.

    Waivers are no such options: accepting a failure of one check excuses no other.
    """
    earlier = {name: stage["options_version"] for name, stage in published["stages"].items()}
    history = {"/".join(stage.key): stage.details["options_version"] for stage in iterate_history(store, output)}
    changed = next((name for name, own in history.items() if earlier.get(name) != own), "")
    excuse = f"; the options of {changed} changed as well" if changed else ""
    return CrossStageMeasurement(value, f"{what}{excuse}", bool(changed))


def measure_shifts(store: Store, examples: Manifest, published: Mapping[str, Any]) -> list[drift.Shift] | None:
    """Return how far the distributions of a dataset moved since a published build; None if it cannot be compared."""
    before = published["stages"].get("/".join(examples.key))
    if before is None:
        return None
    try:
        earlier = manifest.load_version(store, examples.key, before["version"])
        profile = drift.load_profile(store, earlier)
    except IntegrityError:
        return None  # removed by gc, or damaged
    return drift.compare_profiles(profile, drift.load_profile(store, examples, earlier))


def _measure_drift(store: Store, examples: Manifest, _: Comparison | None) -> CrossStageMeasurement:
    """Return the index of the distribution that moved most since the published build."""
    published = load_published(store, examples.key[0])
    shifts = None if published is None else measure_shifts(store, examples, published)
    if published is None or shifts is None:
        return CrossStageMeasurement(None, "nothing is published yet to compare it with")
    compared = [shift for shift in shifts if shift.index is not None]
    if not compared:
        fewest = f"{drift.MIN_ROWS_PER_BIN} rows per bin"
        return CrossStageMeasurement(None, f"too few rows to compare distributions: fewer than {fewest}")
    worst = compared[0]
    bins = "; ".join(f"{name} {_format_count_or_share(p)} → {_format_count_or_share(q)}" for name, p, q in worst.bins)
    since = f"since version {published['version'][:12]}, published {published['at'][:19]}"
    what = f"distribution of {worst.distribution}: {bins or 'unchanged'} {since}"
    return _excuse_changed_options(store, examples, published, worst.index or 0.0, what)


def _measure_changes(store: Store, output: Manifest, compare: Comparison | None) -> CrossStageMeasurement:
    """Count the changes since the published output, as the dataset's kind finds them."""
    published = load_published(store, output.key[0])
    before = (published or {}).get("stages", {}).get("/".join(output.key))
    if published is None or before is None:
        return CrossStageMeasurement(None, "nothing is published yet to compare it with")
    try:
        earlier = manifest.load_version(store, output.key, before["version"])
        changes = None if compare is None else compare(store, output, earlier)
    except IntegrityError:
        return CrossStageMeasurement(None, "the published version is no longer kept")
    if changes is None:
        return CrossStageMeasurement(None, "it is not compared with the published build")
    what = f"changes since version {published['version'][:12]}, published {published['at'][:19]}"
    measured = _excuse_changed_options(store, output, published, len(changes), what)
    return replace(measured, changes=tuple(changes[:SHOWN_CHANGES]))


def iterate_history(store: Store, output: Manifest) -> Iterator[Manifest]:
    """Yield an output and all its ancestors, each once."""
    waiting, seen = [output], set[StageKey]()
    while waiting:
        current = waiting.pop()
        if current.key not in seen:
            seen.add(current.key)
            yield current
            waiting += manifest.load_inputs(store, current).values()


def _find_compared_version(store: Store, output: Manifest) -> str:
    """Return the published version that an output is compared with; a published one keeps its comparison."""
    published = load_published(store, output.key[0])
    if published is None:
        return ""
    entry = published["stages"].get("/".join(output.key), {})
    return str(entry["compared_with"] if entry.get("version") == output.version else published["version"])


def _format_count_or_share(count: float) -> str:
    return f"{count:,}" if isinstance(count, int) else f"{100 * count:.1f} %"


# ── What its source looks like ────────────────────────────────────────────────────────────────────


def _list_dialects(scanned: Manifest) -> list[tuple[str, dict[str, Any]]]:
    """Return the CSV files of a source by URL, with what was found of each."""
    return [(scan["url"], dialect) for scan in scanned.details["scans"] if (dialect := scan.get("dialect"))]


def _measure_doubtful_headers(_: Store, scanned: Manifest, __: Comparison | None) -> CrossStageMeasurement:
    """Count the CSV files whose header looks like the rows below it; a note on them, not a part of what was read."""
    dialects = _list_dialects(scanned)
    doubtful = [url for url, dialect in dialects if dialect["looks_headless"]]
    if not dialects:
        return CrossStageMeasurement(None)
    return CrossStageMeasurement(
        len(doubtful), f"the first line of {doubtful[0]} looks like the others" if doubtful else ""
    )


CROSS_STAGE_FACTS: dict[str, CrossStageFact] = {
    # Files may be renamed although their content is the same.
    "doubtful_header": CrossStageFact(
        lambda _, scanned: digest_json(_list_dialects(scanned)), _measure_doubtful_headers
    ),
    "end_to_end_loss": CrossStageFact(lambda _, output: digest_json(output.inputs), _measure_loss),
    # Rows may change although their examples do not.
    "drift": CrossStageFact(
        lambda store, output: digest_json(_find_compared_version(store, output), output.inputs),
        _measure_drift,
        compares=True,
    ),
    "shrunk": CrossStageFact(_find_compared_version, _measure_shrinkage, compares=True),
    # Equal rows may come from other files, which the changes name, and from other options, such as a pinned contract.
    "table_drift": CrossStageFact(
        lambda store, output: digest_json(_find_compared_version(store, output), output.fingerprint),
        _measure_changes,
        compares=True,
    ),
}
"""Measurement by check; the facts of all other checks are in the manifest."""
