"""What changed between two versions: rows and tokens, files, distributions, numbers, and checks.

    rowmill diff          two kept versions of a stage, with all upstream stages of each
    since the last build  what is built now, against the build that was published before it; computed when a build is
                          published, and kept in gpu_partitions/changes/<version>.json

A comparison covers every upstream stage as well: two versions of the order compare every dataset, two versions of one
dataset's shards compare that dataset only. Only files that differ are read.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import TypeAdapter

from rowmill.build.steps import Project, plan_steps
from rowmill.checks import cross_stage, judge
from rowmill.checks.drift import Shift
from rowmill.core.errors import IntegrityError, PipelineError
from rowmill.core.stage_names import CANONICAL_ROWS, GPU_PARTITIONS, RAW_DATASET, TOKENIZED_EXAMPLES
from rowmill.core.storage import Store
from rowmill.parts.context import scan_rows
from rowmill.schema import manifest
from rowmill.schema.manifest import Manifest, StageKey
from rowmill.sources.reading import number_source_parts
from rowmill.stages import catalog, truncation_stats
from rowmill.stages.base import StageDeclaration
from rowmill.stages.training_splits import stage as training_splits

if TYPE_CHECKING:
    import polars as pl

_LOG = logging.getLogger("rowmill.build")


@dataclass(frozen=True, slots=True)
class NumberComparison:
    """One number of both versions; None where a version lacks it. A share is a fraction of 1."""

    name: str
    before: float | None
    after: float | None
    is_share: bool = False


@dataclass(frozen=True, slots=True)
class Moves:
    """How many rows, or tokens, came, went, or are in another split than before, by their content."""

    added: int = 0
    removed: int = 0
    moved: int = 0


@dataclass(frozen=True, slots=True)
class ScopeComparison:
    """One dataset, or the whole recipe (`scope` None): its numbers, and its rows and tokens if both versions are kept.

    The tokens are those of whole examples: one whose ids changed went, and another came.
    """

    scope: str | None
    lines: tuple[NumberComparison, ...]
    rows: Moves | None = None
    tokens: Moves | None = None


def compare_versions(project: Project, before: Manifest, after: Manifest) -> list[ScopeComparison]:
    """Compare two versions of a stage, dataset by dataset, then the recipe as a whole."""
    left, right = collect_lineage(project, before), collect_lineage(project, after)
    kept = _list_datasets(left) | _list_datasets(right)
    compared: list[ScopeComparison] = []
    # The recipe's datasets in order, then datasets that only an older version has.
    for name in dict.fromkeys([*(name for name in project.recipe.datasets if name in kept), *kept]):
        moves: list[Moves | None] = []
        for stage in (CANONICAL_ROWS, TOKENIZED_EXAMPLES):
            key = (project.recipe.name, name, stage)
            has_both = key in left and key in right
            moves.append(_count_moves(project.store, left[key], right[key]) if has_both else None)
        compared.append(ScopeComparison(name, tuple(_compare_numbers(left, right, name)), *moves))
    recipe_numbers = tuple(_compare_numbers(left, right, None))
    return [*compared, *([ScopeComparison(None, recipe_numbers)] if recipe_numbers else [])]


def find_previous_version(project: Project, output: Manifest) -> Manifest | None:
    """Return the newest kept version of a stage that was built before this one, or None."""
    versions = manifest.list_versions(project.store, output.key)
    earlier = [one for one in versions if one.version != output.version and one.built_at < output.built_at]
    return earlier[-1] if earlier else None


def compare_stage_facts(before: Manifest, after: Manifest) -> list[NumberComparison]:
    """Compare the numbers that a stage declares for comparisons, without its inputs; equal ones are left out."""
    numbers = _compare_stage(catalog.find_stage(after.stage), before, after)
    return [number for number in numbers if number.before != number.after]


def collect_lineage(project: Project, output: Manifest) -> dict[StageKey, Manifest]:
    """Return a version and all its upstream versions that are still kept, with the statistics of each."""
    found: dict[StageKey, Manifest] = {}
    waiting = [output]
    while waiting:
        one = waiting.pop()
        found[one.key] = one
        for name in one.inputs:
            with suppress(IntegrityError):  # removed by gc
                waiting.append(manifest.load_input(project.store, one, manifest.parse_stage_key(name)))
    for key, one in list(found.items()):
        if one.stage == TOKENIZED_EXAMPLES:
            # No manifest names the statistics of examples, since they are no stage's input.
            at = (*key[:-1], truncation_stats.STAGE.name)
            kept = manifest.list_outputs(project.store, at)
            of_examples = [other for other in kept if other.inputs.get("/".join(key)) == one.version]
            found |= {at: of_examples[-1]} if of_examples else {}
    return found


def _list_datasets(made: Mapping[StageKey, Manifest]) -> dict[str, None]:
    return dict.fromkeys(key[1] for key in made if len(key) == 3)


def _compare_numbers(
    left: Mapping[StageKey, Manifest], right: Mapping[StageKey, Manifest], scope: str | None
) -> Iterator[NumberComparison]:
    for stage in catalog.STAGES:
        numbers = _compare_stage(stage, *(_find_manifest(made, stage.name, scope) for made in (left, right)))
        yield from (number for number in numbers if (number.before, number.after) != (None, None))
    if scope is not None:
        orders = (_find_manifest(made, training_splits.STAGE.name, None) for made in (left, right))
        shares = [_measure_order_share(order, scope) for order in orders]
        if shares != [None, None]:
            yield NumberComparison("share of the order", *shares, is_share=True)


def _compare_stage(
    stage: StageDeclaration, before: Manifest | None, after: Manifest | None
) -> Iterator[NumberComparison]:
    for figure in stage.compared:
        counted = (None if one is None else one.find_counts(figure.of) for one in (before, after))
        numbers = [None if counts is None else figure.value(counts) for counts in counted]
        yield NumberComparison(figure.name, *numbers, is_share=figure.is_share)


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


ROWS_AT_ONCE = 1 << 22
"""Rows that are compared at once: files with more are read as often as it takes, so memory is flat."""


def _count_moves(store: Store, before: Manifest | None, after: Manifest | None) -> Moves:
    """Count the rows of canonical rows, or the tokens of examples, that came, went and moved; equal ones individually.

    Files that both versions have are not read, so moves are of the others.
    """
    import polars as pl

    some = before or after
    if some is None:
        return Moves()
    name, key, weight = ("rows", "content_hash", pl.lit(1)) if some.stage == CANONICAL_ROWS else (
        "examples", "input_ids", pl.col("tokens"))  # fmt: skip
    sides = [[] if output is None else [file for file in output.files(name) if file.rows] for output in (before, after)]
    same = {file.digest for file in sides[0]} & {file.digest for file in sides[1]}
    files = [[file for file in side if file.digest not in same] for side in sides]
    total = Moves()
    buckets = -(-sum(file.rows or 0 for side in files for file in side) // ROWS_AT_ONCE)
    columns = [key, "split", *(["tokens"] if name == "examples" else [])]
    for bucket in range(buckets):
        counted = [
            scan_rows(store, side, columns)
            .select(pl.col(key).hash().alias("key"), "split", weight.cast(pl.Int64).alias("weight"))
            .filter(pl.col("key") % buckets == bucket)
            .group_by("key", "split")
            .agg(pl.col("weight").first(), pl.len().cast(pl.Int64).alias("n"))
            .with_columns(before=pl.col("n") * (at == 0), after=pl.col("n") * (at == 1))
            for at, side in enumerate(files)
            if side
        ]
        by_split = pl.concat(counted).group_by("key", "split").agg(pl.col("weight").first(), pl.sum("before", "after"))
        by_key = by_split.group_by("key").agg(
            pl.col("weight").first(), pl.sum("before", "after"), stayed=pl.min_horizontal("before", "after").sum()
        )
        both = pl.min_horizontal("before", "after")
        numbers = (pl.col("after") - both, pl.col("before") - both, both - pl.col("stayed"))
        sums = by_key.select((number * pl.col("weight")).sum().alias(str(i)) for i, number in enumerate(numbers))
        added, removed, moved = map(int, sums.collect(engine="streaming").row(0))
        total = Moves(total.added + added, total.removed + removed, total.moved + moved)
    return total


RowChange: TypeAlias = Literal["came", "went", "text", "split", "tokens", "mask", "rejected"]


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """How many rows of a dataset changed in one way, the first of them, and how many were rejected for each reason.

    Reasons belong to rows that went, and to records that are newly rejected. `rows` are ids in the build after the
    change; of rows that went, in the one before.
    """

    dataset: str
    change: RowChange
    count: int
    rows: tuple[str, ...]
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])


def list_changed_rows(
    project: Project,
    dataset: str,
    before: Mapping[StageKey, Manifest],
    after: Mapping[StageKey, Manifest],
    *,
    limit: int,
) -> Iterator[ChangedRows]:
    """Yield the rows of a dataset that came, went, or have another text, split, tokens or mask; none if there are none.

    Rows are the same by content. One that went and one that came at the same place of a file changed its text. Files
    that both builds have are not read, and equal rows are paired in their order. Records that are rejected now and were
    not before come last; a row that went because it is rejected now is not among them.
    """
    import polars as pl

    store, name = project.store, project.recipe.name
    sides = [[made.get((name, dataset, stage)) for stage in (RAW_DATASET, CANONICAL_ROWS)] for made in (before, after)]
    rows = [_read_new_files(store, side[1], sides[1 - i][1], "rows", ["row_id", "content_hash", "split"])
            for i, side in enumerate(sides)]  # fmt: skip
    places = [_locate_rows(frame, side[0]) for frame, side in zip(rows, sides, strict=True)]
    old, new = (
        frame.with_columns(n=pl.int_range(pl.len()).over("content_hash"), place=place)
        for frame, place in zip(rows, places, strict=True)
    )
    came, went = (
        new.join(old, on=["content_hash", "n"], how="anti"),
        old.join(new, on=["content_hash", "n"], how="anti"),
    )
    text = came.join(
        went.unique("place", keep="first", maintain_order=True), on="place", how="semi", maintain_order="left"
    )
    came, went = (one.join(text, on="place", how="anti", maintain_order="left") for one in (came, went))
    both = new.join(old, on=["content_hash", "n"], how="inner", suffix="_before", maintain_order="left")
    found: dict[RowChange, pl.Series] = {
        "came": came["row_id"], "went": went["row_id"], "text": text["row_id"],
        "split": both.filter(pl.col("split") != pl.col("split_before"))["row_id"],
    }  # fmt: skip
    old_examples, new_examples = (made.get((name, dataset, TOKENIZED_EXAMPLES)) for made in (before, after))
    found |= _compare_examples(store, old_examples, new_examples, both)
    left = set(went["place"].to_list())
    rejected = _list_new_rejects(store, sides, left)
    found["rejected"] = rejected["row_id"]
    reasons = {"went": _count_reasons(store, sides[1], left), "rejected": _sum_reasons(rejected)}
    for change, row_ids in found.items():
        if len(row_ids):
            by_reason = reasons.get(change, {})
            yield ChangedRows(dataset, change, len(row_ids), tuple(row_ids.head(limit).to_list()), by_reason)


def _read_new_files(
    store: Store, output: Manifest | None, other: Manifest | None, name: str, columns: list[str]
) -> "pl.DataFrame":
    """Return columns of the files that the other version does not have."""
    import polars as pl

    known = {file.digest for file in other.files(name)} if other is not None else set[str]()
    files = [file for file in output.files(name) if file.rows and file.digest not in known] if output else []
    if not files:
        return pl.DataFrame(schema=dict.fromkeys(columns, pl.String) | {"content_hash": pl.Binary, "raw": pl.Binary})[
            columns
        ]
    return scan_rows(store, files, columns).collect(engine="streaming")


def _locate_rows(rows: "pl.DataFrame", raw: Manifest | None) -> "pl.Series":
    """Return the file and record of each row."""
    import polars as pl

    parts = [part for _, part in number_source_parts(raw)] if raw is not None else []
    known = pl.DataFrame(
        {"part": [part.part_id for part in parts], "url": [part.url for part in parts],
         "first": [part.first_record for part in parts]},
        schema={"part": pl.String, "url": pl.String, "first": pl.Int64},
    )  # fmt: skip
    split = rows.select(
        part=pl.col("row_id").str.extract(r"^(.+):\d+(?:\.\d+)?$"),
        number=pl.col("row_id").str.extract(r":(\d+)(?:\.\d+)?$").cast(pl.Int64),
        further=pl.col("row_id").str.extract(r"(\.\d+)$").fill_null(""),
    )
    located = split.join(known, on="part", how="left", maintain_order="left")
    return located.select(
        pl.concat_str(
            pl.col("url").fill_null(""), pl.lit(":"), pl.col("first").fill_null(0) + pl.col("number"), "further"
        )
    ).to_series()


def _compare_examples(
    store: Store, before: Manifest | None, after: Manifest | None, rows: "pl.DataFrame"
) -> "dict[RowChange, pl.Series]":
    """Return the rows of both builds whose tokens, or of the same tokens whose mask, is another one."""
    import polars as pl

    sides: list[pl.DataFrame] = []
    for output, other in ((before, after), (after, before)):
        known = {file.digest for file in other.files("examples")} if other is not None else set[str]()
        files = [file for file in output.files("examples") if file.rows and file.digest not in known] if output else []
        if not files:
            return {}
        hashed = scan_rows(store, files, ["row_ids", "input_ids", "loss_mask"]).select(
            row_id=pl.col("row_ids").list.first(), ids=pl.col("input_ids").hash(), mask=pl.col("loss_mask").hash()
        )
        sides.append(hashed.collect(engine="streaming").unique("row_id", keep="first", maintain_order=True))
    pairs = rows.join(sides[1], on="row_id", how="inner", maintain_order="left").join(
        sides[0], left_on="row_id_before", right_on="row_id", how="inner", suffix="_old", maintain_order="left"
    )
    has_other_ids = pl.col("ids") != pl.col("ids_old")
    return {
        "tokens": pairs.filter(has_other_ids)["row_id"],
        "mask": pairs.filter(~has_other_ids & (pl.col("mask") != pl.col("mask_old")))["row_id"],
    }


def _count_reasons(store: Store, side: Sequence[Manifest | None], places: set[str]) -> dict[str, int]:
    """Count the reasons for which records at some places are rejected now; records that are not there have none."""
    import polars as pl

    raw, rows = side
    files = [file for file in rows.files("rejects") if file.rows] if rows is not None else []
    if not files or not places:
        return {}
    rejects = scan_rows(store, files, ["row_id", "reason"]).collect(engine="streaming")
    at_places = rejects.with_columns(place=_locate_rows(rejects, raw)).filter(pl.col("place").is_in(list(places)))
    return _sum_reasons(at_places)


def _sum_reasons(rejects: "pl.DataFrame") -> dict[str, int]:
    counted = rejects.group_by("reason").len().sort("len", "reason", descending=[True, False])
    return dict(counted.iter_rows())


def _list_new_rejects(store: Store, sides: Sequence[Sequence[Manifest | None]], known: set[str]) -> "pl.DataFrame":
    """Return the rejects that the build before lacks, by reason and raw record, but for those at known places."""
    import polars as pl

    old, new = (
        _read_new_files(store, side[1], sides[1 - at][1], "rejects", ["row_id", "reason", "raw"])
        .with_columns(raw=pl.col("raw").hash())
        .with_columns(n=pl.int_range(pl.len()).over("reason", "raw"))
        for at, side in enumerate(sides)
    )
    came = new.join(old, on=["reason", "raw", "n"], how="anti", maintain_order="left")
    return came.filter(~_locate_rows(came, sides[1][0]).is_in(list(known)))


# ── Since the last build ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class FileChanges:
    """How many source files are new, gone, or have other content; `named` begins with them, three at most."""

    new: int = 0
    gone: int = 0
    changed: int = 0
    named: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DatasetChanges:
    """What changed of a dataset; `shifts` are its distributions, the one that moved most first."""

    dataset: str
    files: FileChanges
    rows: Moves
    tokens: Moves
    shifts: tuple[Shift, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckChange:
    """A check that failed in one of the two builds alone; empty text where it did not fail."""

    stage: str
    check: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class BuildChanges:
    """What changed since the build that was published before: its version and time, the datasets that are not the same.

    A build in which nothing changed has neither datasets nor checks.
    """

    version: str
    published_at: str
    datasets: tuple[DatasetChanges, ...]
    checks: tuple[CheckChange, ...]


def find_changes(project: Project, made: Mapping[StageKey, Manifest | None]) -> BuildChanges | None:
    """Return what changed since the last build; None if none was published before.

    Of a published build this is what was noted when it was published. What is built now and is not published, because
    a gate is closed or it is not complete, is compared with the published build.
    """
    published = cross_stage.load_published(project.store, project.recipe.name)
    if published is None:
        return None
    current = {"/".join(key): output.version for key, output in made.items() if output is not None}
    if all(current.get(name) == stage["version"] for name, stage in published["stages"].items()):
        noted = _read_note(project, published["version"]).get("since")
        return None if noted is None else TypeAdapter(BuildChanges).validate_python(noted)
    return _compare_with_published(project, published, {key: output for key, output in made.items() if output})


def note_changes(project: Project, ranks: Manifest) -> None:
    """Note what changes with these ranks since the published build, which they are about to replace."""
    published = cross_stage.load_published(project.store, project.recipe.name)
    if published is not None and published["version"] == ranks.version:
        return
    store, made = project.store, dict[StageKey, Manifest]()
    for step in plan_steps(project):
        # The checks of statistics close gates, too, and they are no input of the ranks.
        if step.stage.scope == "dataset" and (output := manifest.load_current_if_intact(store, step.key)) is not None:
            made[step.key] = output
    made |= {output.key: output for output in cross_stage.iterate_history(store, ranks)}
    since = None if published is None else _compare_with_published(project, published, made)
    note = {"failed": _list_failed_checks(project, made), "since": None if since is None else asdict(since)}
    project.store.write_sealed(_note_path(project, ranks.version), note)


def _note_path(project: Project, version: str) -> str:
    return f"{project.recipe.name}/{GPU_PARTITIONS}/{cross_stage.CHANGES_FOLDER}/{version}.json"


def _read_note(project: Project, version: str) -> dict[str, Any]:
    return project.store.read_sealed(_note_path(project, version)) or {}


def _compare_with_published(
    project: Project, published: Mapping[str, Any], made: Mapping[StageKey, Manifest]
) -> BuildChanges | None:
    try:
        return _compare_builds(project, published, made)
    except PipelineError as error:
        # What an older build left may be damaged; that is no reason not to publish this one, or not to show it.
        _LOG.warning("what changed since the last build is not known: %s", error)
        return None


def _compare_builds(project: Project, published: Mapping[str, Any], made: Mapping[StageKey, Manifest]) -> BuildChanges:
    store, recipe = project.store, project.recipe.name
    versions: Mapping[str, str] = {name: stage["version"] for name, stage in published["stages"].items()}
    of_published = (manifest.parse_stage_key(name)[1] for name in versions if name.count("/") == 2)
    datasets: list[DatasetChanges] = []
    for name in dict.fromkeys([*project.recipe.datasets, *of_published]):
        keys = [(recipe, name, stage) for stage in (RAW_DATASET, CANONICAL_ROWS, TOKENIZED_EXAMPLES)]
        pairs: list[tuple[Manifest | None, Manifest | None]] = []
        for key in keys:
            after, version = made.get(key), versions.get("/".join(key))
            is_same = name in project.recipe.datasets and (after is None or after.version == version)
            before = None if is_same or version is None else _load_if_kept(store, key, version)
            pairs.append((None, None) if is_same or (before is None and version is not None) else (before, after))
        (scans, rows, examples) = pairs
        if any(side for pair in pairs for side in pair):
            shifts = cross_stage.measure_shifts(store, examples[1], published) if examples[1] is not None else None
            files = _compare_files(*scans)
            datasets.append(
                DatasetChanges(
                    name, files, _count_moves(store, *rows), _count_moves(store, *examples), tuple(shifts or ())
                )
            )
    before, after = _read_note(project, published["version"]).get("failed"), _list_failed_checks(project, made)
    checks = [
        CheckChange(stage, check, (before or {}).get(stage, {}).get(check, ""), after.get(stage, {}).get(check, ""))
        for stage in sorted({*(before or {}), *after})
        for check in sorted({*(before or {}).get(stage, {}), *after.get(stage, {})})
    ]
    changed = tuple(one for one in checks if before is not None and bool(one.before) != bool(one.after))
    return BuildChanges(published["version"], published["at"], tuple(datasets), changed)


def _load_if_kept(store: Store, key: StageKey, version: str) -> Manifest | None:
    """Return a version; None if it was removed by gc."""
    try:
        return manifest.load_version(store, key, version)
    except IntegrityError:
        return None


def _compare_files(before: Manifest | None, after: Manifest | None) -> FileChanges:
    """Compare scanned source files by their names and by the digests of their parts."""
    files: list[dict[str, list[str]]] = [
        {} if output is None else {
            scan["url"]: [part["sha256"] for part in scan["parts"]] for scan in output.details["scans"]
        }
        for output in (before, after)
    ]  # fmt: skip
    new, gone = sorted(files[1].keys() - files[0].keys()), sorted(files[0].keys() - files[1].keys())
    changed = sorted(url for url in files[0].keys() & files[1].keys() if files[0][url] != files[1][url])
    named = [f"{what} {url}" for what, urls in (("new", new), ("gone", gone), ("changed", changed)) for url in urls]
    return FileChanges(len(new), len(gone), len(changed), tuple(named[:3]))


def _list_failed_checks(project: Project, made: Mapping[StageKey, Manifest]) -> dict[str, dict[str, str]]:
    """Return the checks that fail by stage, with their numbers, and whether they only warn."""
    steps = [
        (step, made[step.key]) for step in plan_steps(project) if step.key in made and step.stage.scope != "export"
    ]
    judge.prefetch_check_results(project.store, {step.key: output.version for step, output in steps})
    failed: dict[str, dict[str, str]] = {}
    for step, output in steps:
        for result in judge.load_check_results(project.store, output, step.shown_thresholds):
            if result.failed:
                means = " (waived)" if result.waiver else " (a warning)" if result.severity == "warn" else ""
                failed.setdefault("/".join(step.key[1:]), {})[result.check] = f"{result.shown}{means}"
    return failed
