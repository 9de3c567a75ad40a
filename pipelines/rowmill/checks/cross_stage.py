"""Facts that no stage can count by itself: what was lost on the way to the sequences, and what shrank since last time.

What belongs here: measuring them from manifests that are there. What does not: bounds (`catalog.py`), results
(`judge.py`), counting rows and tokens (the stages).

    raw_dataset ─► canonical_rows ─► tokenized_examples ─► packed_shards     end_to_end_loss: multiplied over the stages
        │               │                                       │
    published.json: what each of them held in the ranks that trainers have   shrunk: each held against it

Both may change while the output at hand does not. So neither is part of its manifest, nor of its version: they are
measured when they are judged, and a result is kept for what they were measured against (`basis`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from rowmill.core.errors import IntegrityError
from rowmill.core.stage_names import (
    CANONICAL_ROWS,
    GPU_PARTITIONS,
    PACKED_SHARDS,
    RAW_DATASET,
    TOKENIZED_EXAMPLES,
    TRAINING_SPLITS,
)
from rowmill.core.storage import Store, digest_json, parse_sealed
from rowmill.schema import manifest
from rowmill.schema.facts import (
    CanonicalRowsFacts,
    PackedShardsFacts,
    RawDatasetFacts,
    TokenizedExamplesFacts,
    Uncounted,
    read_facts,
    require_counted,
)
from rowmill.schema.ledger import INTENDED_REASONS, KEPT, REJECTED
from rowmill.schema.manifest import NOT_APPLICABLE, Manifest, StageKey


@dataclass(frozen=True, slots=True)
class CrossStageMeasurement:
    """A fact and the sentence that explains its number; `is_intended` where a change of the recipe explains it."""

    value: float | str
    what: str = ""
    is_intended: bool = False


@dataclass(frozen=True, slots=True)
class CrossStageFact:
    """How a check's number is found; `basis` identifies all that it is measured against beside the output itself."""

    basis: Callable[[Store, Manifest], str]
    measure: Callable[[Store, Manifest], CrossStageMeasurement]
    compares: bool = False
    """Whether it compares with what is published: nothing that is asked of what was published before."""


# ── What was lost ──────────────────────────────────────────────────────────────────────────────────


def _measure_loss(store: Store, packed: Manifest) -> CrossStageMeasurement:
    """Return the larger of the shares, of records and of trained tokens, that entered and stand in no sequence.

    A record counts from where it was read, a trained token from where its row was tokenized. What the recipe left out
    on purpose (`take`, copies, surplus of validation) counts as neither.
    """
    if "packing_losses" not in packed.facts:
        return CrossStageMeasurement(NOT_APPLICABLE, "made by a version of rowmill that did not count it")
    inputs = manifest.load_inputs(store, packed)
    tokenized = next(one for one in inputs.values() if one.stage == TOKENIZED_EXAMPLES)
    canonical = next(iter(manifest.load_inputs(store, tokenized).values()))
    packing = read_facts(PackedShardsFacts, packed.facts).packing_losses
    records = {
        CANONICAL_ROWS: _count_rejected(canonical, INTENDED_REASONS),
        TOKENIZED_EXAMPLES: _count_rejected(tokenized, frozenset()),
        PACKED_SHARDS: packing["examples"],
    }
    trained: dict[str, tuple[int, int]] = {}
    examples = read_facts(TokenizedExamplesFacts, tokenized.facts)
    if not isinstance(examples.trained_removed, Uncounted):
        cut, refused = examples.trained_removed, require_counted(examples.dropped_trained)
        trained["truncation"] = (cut, examples.trained_tokens + cut + refused)
        trained[TOKENIZED_EXAMPLES] = (refused, trained["truncation"][1] - cut)
    trained[PACKED_SHARDS] = packing["trained_tokens"]
    worst, counted = max(
        (("records", records), ("trained tokens", trained)),
        key=lambda one: _compound_loss(one[1].values()),
    )
    value = _compound_loss(counted.values())
    entered = next(iter(counted.values()))[1]
    if not entered:
        return CrossStageMeasurement(NOT_APPLICABLE)
    lost = ", ".join(f"{name} {count:,}" for name, (count, _) in counted.items() if count)
    return CrossStageMeasurement(
        value, f"{worst} that entered and stand in no sequence, of {entered:,}: {lost or 'none'}"
    )


def _count_rejected(made: Manifest, chosen: frozenset[str]) -> tuple[int, int]:
    """Return how many records a stage rejected though nobody asked for it, and how many it should have kept."""
    kept = sum(count for state, _, count in made.ledger if state == KEPT)
    rejected = sum(count for state, reason, count in made.ledger if state == REJECTED and reason not in chosen)
    return rejected, kept + rejected


def _compound_loss(stages: Iterable[tuple[int, int]]) -> float:
    """Return what share is lost over stages of which each loses `lost` of `entered`."""
    left = 1.0
    for lost, entered in stages:
        left *= 1 - lost / entered if entered else 1
    return round(1 - left, 9)


# ── What shrank ────────────────────────────────────────────────────────────────────────────────────


def published_path(recipe: str) -> str:
    """Return the path of the counts of what trainers have."""
    return f"{recipe}/{GPU_PARTITIONS}/published.json"


_NOTHING_PUBLISHED: Mapping[str, Any] = {"version": "", "stages": {}}


def write_published_counts(store: Store, ranks: Manifest) -> None:
    """Keep what every stage of some ranks held, for later builds to be compared with.

    `published.json` has the ranks' `version`, when it was published (`at`), and for each of `stages` its `version`,
    `code_version` and `counts`, and with which published version it was compared itself (`compared_with`).
    """
    path = published_path(ranks.key[0])
    kept = store.read_sealed(path)
    found = _describe_stages(store, ranks, kept or _NOTHING_PUBLISHED)
    if kept is None or kept["stages"] != found["stages"]:
        store.write_sealed(path, found)


@lru_cache(maxsize=8)
def _decode_published(content: bytes) -> Mapping[str, Any] | None:
    """Decode published counts: every stage of every dataset asks for the same, several times a build."""
    return parse_sealed(content)


def _load_published(store: Store, recipe: str) -> Mapping[str, Any] | None:
    """Return what is kept of the published ranks; where that was lost, or never written, their manifests say it."""
    path = published_path(recipe)
    kept = _decode_published(store.read(path)) if store.exists(path) else None
    if kept is not None:
        return kept
    current = store.read_sealed(f"{recipe}/{GPU_PARTITIONS}/current.json")
    if current is None:
        return None
    try:
        ranks = manifest.load_version(store, (recipe, GPU_PARTITIONS), current["version"])
        return _describe_stages(store, ranks, _NOTHING_PUBLISHED)
    except IntegrityError:
        # One of them was collected: then nothing can be compared.
        return None


def _describe_stages(store: Store, ranks: Manifest, earlier: Mapping[str, Any]) -> dict[str, Any]:
    stages: dict[str, dict[str, Any]] = {}
    for one in _iterate_history(store, ranks):
        name = "/".join(one.key)
        before = earlier["stages"].get(name, {})
        is_known = before.get("version") == one.version
        stages[name] = {
            "version": one.version,
            "code_version": one.code_version,
            "counts": read_counts(one),
            "compared_with": before["compared_with"] if is_known else earlier["version"],
        }
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"version": ranks.version, "at": at, "stages": stages}


def read_counts(made: Manifest) -> dict[str, float]:
    """Return the counts of an output that should not fall from one build to the next, by name."""
    count = SHRINKING_COUNTS.get(made.stage)
    return {} if count is None else count(made)


def _count_source(scanned: Manifest) -> dict[str, float]:
    facts = read_facts(RawDatasetFacts, scanned.facts)
    return {"files": facts.files, "records": facts.records}


def _count_rows(canonical: Manifest) -> dict[str, float]:
    return {"rows": read_facts(CanonicalRowsFacts, canonical.facts).kept}


def _count_packed(packed: Manifest) -> dict[str, float]:
    facts = read_facts(PackedShardsFacts, packed.facts)
    return {"tokens": facts.tokens, "trained tokens": facts.trained_tokens}


def _measure_mixture_shares(order: Manifest) -> dict[str, float]:
    """Return each dataset's share of the order's trained tokens."""
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
"""Stage → its counts: of the stages that the check `shrunk` is of."""


def _measure_shrinkage(store: Store, made: Manifest) -> CrossStageMeasurement:
    """Return the largest share by which a count of an output fell since the published build."""
    published = _load_published(store, made.key[0])
    before = (published or {}).get("stages", {}).get("/".join(made.key))
    if published is None or before is None:
        return CrossStageMeasurement(NOT_APPLICABLE, "nothing is published yet that it could be compared with")
    now = read_counts(made)
    fell = {name: 1 - now.get(name, 0) / count for name, count in before["counts"].items() if count}
    if not fell:
        return CrossStageMeasurement(NOT_APPLICABLE, "the published build had none of it")
    name, share = max(fell.items(), key=lambda one: one[1])
    value = round(max(share, 0.0), 9)
    since = f"since version {published['version'][:12]}, published {published['at'][:19]}"
    if not value:
        return CrossStageMeasurement(value, f"nothing of it is less {since}")
    what = (
        f"{name}: {_format_count_or_share(now.get(name, 0))}, were {_format_count_or_share(before['counts'][name])} "
        f"{since}"
    )
    changed = _find_changed_options(store, made, published["stages"])
    return CrossStageMeasurement(
        value, f"{what}; the options of {changed} changed, too" if changed else what, bool(changed)
    )


def _find_changed_options(store: Store, made: Manifest, published: Mapping[str, Any]) -> str:
    """Name a stage, among those that an output was made by, whose options are not those of the published build."""
    for one in _iterate_history(store, made):
        name = "/".join(one.key)
        if published.get(name, {}).get("code_version") != one.code_version:
            return name
    return ""


def _iterate_history(store: Store, made: Manifest) -> Iterator[Manifest]:
    """Yield an output and all that it was made of, each once."""
    waiting, seen = [made], set[StageKey]()
    while waiting:
        one = waiting.pop()
        if one.key not in seen:
            seen.add(one.key)
            yield one
            waiting += manifest.load_inputs(store, one).values()


def _find_compared_version(store: Store, made: Manifest) -> str:
    """Return the published version that an output is held against; one that is published keeps its comparison."""
    published = _load_published(store, made.key[0])
    if published is None:
        return ""
    own = published["stages"].get("/".join(made.key), {})
    return str(own["compared_with"] if own.get("version") == made.version else published["version"])


def _format_count_or_share(count: float) -> str:
    return f"{count:,}" if isinstance(count, int) else f"{100 * count:.1f} %"


CROSS_STAGE_FACTS: dict[str, CrossStageFact] = {
    "end_to_end_loss": CrossStageFact(lambda _, made: digest_json(made.inputs), _measure_loss),
    "shrunk": CrossStageFact(_find_compared_version, _measure_shrinkage, compares=True),
}
"""Check → how its number is found; the numbers of all other checks stand in the manifest."""
