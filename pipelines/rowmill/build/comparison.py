"""Compares two kept versions of a stage: rows added and removed, lengths, fill, shares of datasets.

A comparison covers every upstream stage as well: two versions of the order compare every dataset, two versions of one
dataset's shards compare that dataset only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from rowmill.build.steps import Project
from rowmill.core.errors import IntegrityError
from rowmill.parts.context import scan_rows
from rowmill.schema import manifest
from rowmill.schema.manifest import NOT_APPLICABLE, Manifest, StageKey
from rowmill.stages import catalog, truncation_stats
from rowmill.stages.canonical_rows import stage as canonical_rows
from rowmill.stages.tokenized_examples import stage as tokenized_examples
from rowmill.stages.training_splits import stage as training_splits


@dataclass(frozen=True, slots=True)
class NumberComparison:
    """One number of both versions; None where a version lacks it. A share is a fraction of 1."""

    name: str
    before: float | None
    after: float | None
    is_share: bool = False


@dataclass(frozen=True, slots=True)
class ScopeComparison:
    """One dataset, or the whole recipe (`scope` None): its numbers, and the rows added and removed by content."""

    scope: str | None
    lines: tuple[NumberComparison, ...]
    added: int | None = None
    removed: int | None = None


def compare_versions(project: Project, before: Manifest, after: Manifest) -> list[ScopeComparison]:
    """Compare two versions of a stage, dataset by dataset, then the recipe as a whole."""
    left, right = collect_lineage(project, before), collect_lineage(project, after)
    kept = _list_datasets(left) | _list_datasets(right)
    compared: list[ScopeComparison] = []
    # The recipe's datasets in order, then datasets that only an older version has.
    for name in dict.fromkeys([*project.recipe.datasets, *_list_datasets(left), *_list_datasets(right)]):
        if name in kept:
            key = (project.recipe.name, name, canonical_rows.STAGE.name)
            moved = _count_moved_rows(project, left.get(key), right.get(key)) or (None, None)
            compared.append(ScopeComparison(name, tuple(_compare_numbers(left, right, name)), *moved))
    recipe_numbers = tuple(_compare_numbers(left, right, None))
    return [*compared, *([ScopeComparison(None, recipe_numbers)] if recipe_numbers else [])]


def find_previous_version(project: Project, output: Manifest) -> Manifest | None:
    """Return the newest kept version of a stage that was built before this one, or None."""
    earlier = [
        one
        for one in manifest.list_versions(project.store, output.key)
        if one.version != output.version and one.built_at < output.built_at
    ]
    return earlier[-1] if earlier else None


def compare_stage_facts(before: Manifest, after: Manifest) -> list[NumberComparison]:
    """Compare the numbers that a stage declares for comparisons, without its inputs; equal ones are left out."""
    numbers = [
        NumberComparison(one.name, _read_number(before, one.fact), _read_number(after, one.fact), one.is_share)
        for one in catalog.find_stage(after.stage).compared
    ]
    return [number for number in numbers if number.before != number.after]


def collect_lineage(project: Project, output: Manifest) -> dict[StageKey, Manifest]:
    """Return a version and all its upstream versions that are still kept, with the statistics of each."""
    found: dict[StageKey, Manifest] = {}
    waiting = [output]
    while waiting:
        one = waiting.pop()
        found[one.key] = one
        for name, version in one.inputs.items():
            try:
                waiting.append(manifest.load_version(project.store, tuple(name.split("/")), version))
            except IntegrityError:
                continue  # removed by gc
    for key, one in list(found.items()):
        if one.stage == tokenized_examples.STAGE.name:
            # No manifest names the statistics of examples, since they are no stage's input.
            at = (*key[:-1], truncation_stats.STAGE.name)
            versions = manifest.list_versions(project.store, at)
            kept = [statistics for statistics in versions if statistics.inputs.get("/".join(key)) == one.version]
            found |= {at: kept[-1]} if kept else {}
    return found


def _list_datasets(made: Mapping[StageKey, Manifest]) -> set[str]:
    return {key[1] for key in made if len(key) == 3}


def _compare_numbers(
    left: Mapping[StageKey, Manifest], right: Mapping[StageKey, Manifest], scope: str | None
) -> Iterator[NumberComparison]:
    for stage in catalog.STAGES:
        before, after = (_find_manifest(made, stage.name, scope) for made in (left, right))
        if before is None and after is None:
            continue
        for figure in stage.compared:
            values = [None if one is None else _read_number(one, figure.fact) for one in (before, after)]
            if values == [None, None]:
                continue
            yield NumberComparison(figure.name, *values, is_share=figure.is_share)
    if scope is not None:
        shares = [
            _measure_order_share(_find_manifest(made, training_splits.STAGE.name, None), scope)
            for made in (left, right)
        ]
        if shares != [None, None]:
            yield NumberComparison("share of the order", *shares, is_share=True)


def _read_number(output: Manifest, fact: str) -> float | None:
    """Return a fact, or None where it does not apply to the data."""
    value = output.facts.get(fact)
    return None if value == NOT_APPLICABLE else value


def _find_manifest(made: Mapping[StageKey, Manifest], stage: str, scope: str | None) -> Manifest | None:
    inside = [one for key, one in made.items() if key[-1] == stage and (key[1] if len(key) == 3 else None) == scope]
    return inside[0] if inside else None


def _measure_order_share(splits: Manifest | None, dataset: str) -> float | None:
    """Return a dataset's share of the order, from the manifest's mixture table."""
    table = splits.tables.get("mixture") if splits is not None else None
    if table is None:
        return None
    name, places = table.columns.index("dataset"), table.columns.index("sequences")
    total = sum(row[places] for row in table.rows)
    dataset_places = sum(row[places] for row in table.rows if row[name] == dataset)
    return dataset_places / total if total else None


def _count_moved_rows(project: Project, before: Manifest | None, after: Manifest | None) -> tuple[int, int] | None:
    """Count the rows added and removed by content; equal rows count individually."""
    if before is None or after is None:
        return None
    counts = [_count_contents(project, one.files("rows")) for one in (before, after)]
    both = counts[0].join(counts[1], on="content_hash", how="full", coalesce=True, suffix="_after")
    change = (pl.col("n_after").fill_null(0).cast(pl.Int64) - pl.col("n").fill_null(0).cast(pl.Int64)).alias("change")
    moved = both.select(change).select(
        pl.col("change").filter(pl.col("change") > 0).sum().alias("added"),
        (-pl.col("change").filter(pl.col("change") < 0).sum()).alias("removed"),
    )
    added, removed = moved.collect(engine="streaming").row(0)
    return int(added), int(removed)


def _count_contents(project: Project, files: Sequence[manifest.File]) -> pl.LazyFrame:
    filled = [file for file in files if file.rows]
    if not filled:
        return pl.LazyFrame({"content_hash": [], "n": []}, schema={"content_hash": pl.Binary, "n": pl.UInt32})
    rows = scan_rows(project.store, filled, ["content_hash"])
    return rows.group_by(pl.col("content_hash").cast(pl.Binary)).agg(pl.len().alias("n"))
