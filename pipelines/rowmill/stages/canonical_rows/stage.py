"""Raw records → canonical rows, over all parts: formats, reasoning, tools, filters and splits, then duplicates.

Duplicates are found after all parts are made, from their hashes alone (`duplicate_rows.py`), and a finished part stays
finished. Then follow rows that have items of benchmarks or resemble a longer row (`near_duplicate_rows.py`), and splits
by time that need all rows: boundaries from shares, and groups on both sides of a boundary. Times are parsed once per
distinct value of a part; memory holds one code per row and one line per group.

    group  times          boundary at 10          later                 reject
    a      3  7                 │                 train                 train
    b      8 12            ─────┼─────            validation, both      straddles_split, both
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmill import sources
from rowmill.core.arrays import find_distinct, format_count
from rowmill.core.errors import ConfigError, join_choices
from rowmill.core.json import from_json
from rowmill.core.stage_names import CANONICAL_ROWS, RAW_DATASET
from rowmill.core.storage import digest_json
from rowmill.kinds.shared.filters import FILTERS_OF_MADE_ROWS, identify_removal_filters
from rowmill.kinds.shared.splits import Boundaries, Splitter, compute_boundaries
from rowmill.kinds.shared.training_flags import explain_unread_flag, parse_unread_flag
from rowmill.parts import accounts
from rowmill.parts.accounts import RewriteInputs, rewrite_parts, tabulate_removed
from rowmill.parts.context import StageOutput, format_rejected, scan_rows
from rowmill.parts.functions import MappedParts
from rowmill.recipe.recipe import Recipe
from rowmill.schema.counts import Counts, CountSet
from rowmill.schema.manifest import DisplayTable, Histogram, Part, add_up_counts
from rowmill.schema.row_counts import GroupCounts, MessageCounts, RowCounts, TimeSplitCounts, UnreadCounts
from rowmill.schema.rows import HELD_OUT, ROW_KINDS, SPLITS, Rejected, make_row_schema
from rowmill.sources.reading import TakenGroup, load_part_groups
from rowmill.stages.base import ComparedNumber, PreparedStage, StageContext, StageDeclaration
from rowmill.stages.canonical_rows import (
    contaminated_rows,
    duplicate_rows,
    left_out_rows,
    near_duplicate_rows,
    text_rows,
)
from rowmill.stages.canonical_rows.contaminated_rows import ScannedBenchmark
from rowmill.stats.tables import StatsInputs, count_rows_of
from rowmill.tokenization.stored_tokenizers import identify_tokenizer, open_recipe_tokenizer

_Decisions = tuple[NDArray[np.int8], dict[int, Rejected]]
"""A part's decisions: the code of each row's split, -1 if rejected, and the rejects."""


def split_by_time(context: StageContext, parts: list[Part]) -> tuple[list[Part], Boundaries | None]:
    """Put every row of a dataset into its split by time; parts without changes are kept.

    Return all parts, and the boundaries if they were computed from shares.
    """
    splits = context.dataset.splits
    if not splits.needs_all_rows or not parts:
        return parts, None
    times = [context.store.table(part.files["rows"], ["order_key"]).column(0).combine_chunks() for part in parts]
    resolved = None
    if splits.boundaries is None:
        counted = Counter[str]()
        for column in times:
            counted.update(column.to_pylist())
        resolved = compute_boundaries(splits, counted.items())
    boundaries = splits.boundaries or resolved
    if boundaries is None:
        return parts, None
    splitter = Splitter(splits.model_copy(update={"boundaries": boundaries}))
    decided: list[_Decisions] = []
    for column in (column.dictionary_encode() for column in times):
        outcomes = [splitter.assign_by_time(value) for value in column.dictionary.to_pylist()]
        of_values = [-1 if isinstance(outcome, Rejected) else SPLITS.index(outcome) for outcome in outcomes]
        which = column.indices.to_numpy(zero_copy_only=False)
        codes = np.array(of_values, np.int8)[which] if outcomes else np.empty(0, np.int8)
        reasons = {place: outcomes[which[place]] for place in np.flatnonzero(codes < 0).tolist()}
        decided.append((codes, {place: one for place, one in reasons.items() if isinstance(one, Rejected)}))
    if splits.group_key is not None:
        decided = _reconcile_groups(context, parts, decided, later=splits.crossing_groups == "later")
    changes: list[RewriteInputs | None] = []
    for part, (codes, rejected) in zip(parts, decided, strict=True):
        before = context.store.table(part.files["rows"], ["split"]).column(0).to_pylist()
        is_same = [SPLITS.index(name) for name in before] == codes.tolist()
        # A dropped row is written with an arbitrary split, which its reject does not show.
        change = RewriteInputs(part, tabulate_removed(rejected), np.maximum(codes, 0).tobytes())
        changes.append(None if is_same else change)
    return rewrite_parts(context, parts, changes, context.dataset.format), resolved


def _reconcile_groups(
    context: StageContext, parts: Sequence[Part], decided: list[_Decisions], *, later: bool
) -> list[_Decisions]:
    """Move each group to its latest split, or reject the rows of groups in several splits."""
    import polars as pl

    names = [context.store.table(part.files["rows"], ["group_key"]).column(0).to_pylist() for part in parts]
    schema = {"group": pl.String, "code": pl.Int8}
    frames = [
        pl.DataFrame({"group": own, "code": codes}, schema=schema)
        for own, (codes, _) in zip(names, decided, strict=True)
    ]
    code = pl.col("code")
    ranges = [frame.filter(code >= 0).group_by("group").agg(first=code.min(), last=code.max()) for frame in frames]
    merged = pl.concat(ranges).group_by("group").agg(pl.col("first").min(), pl.col("last").max())
    spanning = merged.filter(pl.col("first") < pl.col("last"))
    if spanning.is_empty():
        return decided
    reconciled: list[_Decisions] = []
    for own, frame, (codes, rejected) in zip(names, frames, decided, strict=True):
        last = frame.join(spanning, on="group", how="left", maintain_order="left")["last"].fill_null(-1).to_numpy()
        moves = (last >= 0) & (codes >= 0)
        straddling = {
            place: Rejected("straddles_split", str(own[place])[:80])
            for place in np.flatnonzero(moves).tolist()
            if not later
        }
        moved = np.where(moves, last if later else -1, codes).astype(np.int8)
        reconciled.append((moved, rejected | straddling))
    return reconciled


VERSION = 16
"""Increase it when any record may become another row, a row may be in another split, or facts change."""


def identify_canonical_rows(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options and versions that decide rows (`rows`), and those that decide only facts about them."""
    dataset = recipe.datasets[name]
    leave_out = list(dataset.filters.leave_out)
    own = dataset.format.identify_rows(recipe, name, dataset)
    if own is not None:
        return {"versions": [VERSION], **own, "leave_out": leave_out}
    groups = ("format", "reasoning", "tools", "filters", "splits")
    rows = {group: getattr(dataset, group).model_dump(mode="json") for group in groups}
    # A part's rows are made without these filters, so a change of one makes none of them again.
    rows["filters"] = dataset.filters.model_dump(mode="json", exclude=set(FILTERS_OF_MADE_ROWS))
    rows |= {
        "versions": [VERSION, sources.SCAN_VERSION],
        "weights": dataset.loss.weights,
        "allow_negative": dataset.loss.allow_negative,
        "trains_everything": dataset.loss.trains_everything,
        "chat_template_kwargs": dataset.template.chat_template_kwargs,
        "max_run_chars": dataset.source.limits.max_run_chars,
    }
    versions = {"decontaminate": [contaminated_rows.index_benchmarks.version, contaminated_rows.search_part.version],
                "near_duplicates": [near_duplicate_rows.sign_part.version]}  # fmt: skip
    filters = identify_removal_filters(dataset.filters)
    removal = {name: [*versions[name], options] for name, options in filters.items()}
    identity = {"rows": rows, "removal": removal, "leave_out": leave_out}
    # The texts of token ids are those that the tokenizer has for them.
    named = {"tokenizer": identify_tokenizer(recipe.tokenizer_choice)}
    return identity | (named if filters and ROW_KINDS[dataset.row_kind].is_token_ids else {})


def _prepare_canonical_rows(context: StageContext) -> PreparedStage:
    """Scan the benchmarks of the dataset, whose content is part of the output's identity."""
    benchmarks = contaminated_rows.scan_benchmarks(context)
    outside = contaminated_rows.identify_benchmarks(benchmarks)
    selection = left_out_rows.load_selection(context)
    if selection is not None:
        outside.append(["leave_out", selection.digest])
    if ROW_KINDS[context.dataset.row_kind].is_token_ids and identify_removal_filters(context.dataset.filters):
        outside.append(open_recipe_tokenizer(context)[0].card.digest)
    return PreparedStage(tuple(outside), lambda: make_canonical_rows(context, benchmarks, selection))


def make_canonical_rows(
    context: StageContext, benchmarks: tuple[ScannedBenchmark, ...], selection: left_out_rows.Selection | None = None
) -> StageOutput:
    """Make the rows of all parts, and drop what is left out by hand, duplicates and what other filters remove."""
    part_groups = load_part_groups(context.input(RAW_DATASET))
    scanned = [part for group in part_groups for part in group]
    _refuse_second_holdout(context, scanned)
    # Everything that decides the rows of a part, except the part itself.
    name = context.dataset_name or ""
    options = digest_json(CANONICAL_ROWS, name, identify_canonical_rows(context.recipe, name)["rows"])

    def make_groups(groups: Sequence[TakenGroup]) -> MappedParts:
        inputs = [text_rows.CanonicalInputs(options, taken, context.dataset, name, context.base) for taken in groups]
        return context.map(text_rows.canonicalize_part, inputs)

    form = context.dataset.format
    made, decided = form.make_rows(context, _limit_groups(context, part_groups), options, make_groups)
    parts, left_out_tables = left_out_rows.leave_out_rows(context, made.parts, selection)
    distinct = duplicate_rows.drop_duplicates(context, parts)
    clean = contaminated_rows.remove_contaminated_rows(context, distinct, benchmarks)
    near = near_duplicate_rows.remove_near_duplicates(context, distinct if clean is None else clean.parts)
    searches = [search for search in (clean, near) if search is not None]
    split, resolved = split_by_time(context, searches[-1].parts if searches else distinct)
    final = form.assign_splits(context, split, decided)
    boundaries = {} if resolved is None else resolved.model_dump(mode="json", exclude_none=True)
    groups = _count_group_rows(context, final)
    own_counts, own_samples = form.count_dataset(context.store, parts, final)
    counts = add_up_counts(
        final,
        RowCounts(
            records=sum(part.records for part in scanned),
            validation_source=any(part.split_hint == "validation" for part in scanned),
        ),
        *own_counts,
    )
    taken = counts.get(RowCounts).count_taken()
    further: list[Counts] = [search.count(taken) for search in searches]
    if context.dataset.splits.time_key is not None:
        further.append(TimeSplitCounts(boundaries=boundaries))
    draft = _build_rows_output(context, counts + CountSet.of(*further), final, groups)
    draft.samples |= own_samples
    draft.tables |= left_out_tables
    draft.parts_reused, draft.rows_made = made.reused, made.rows_made
    for search in searches:
        draft.parts = [
            replace(part, files=part.files | files) for part, files in zip(draft.parts, search.found, strict=True)
        ]
        draft.tables |= search.tables
    if clean is not None:
        draft.details["scans"] = [scan.to_json() for one in benchmarks for scan in one.scans]
    output = form.complete_rows(context, draft, decided)
    # A kind whose rows form groups without `splits.group_key` counts them itself.
    if context.dataset.splits.group_key is not None and output.counts.find(GroupCounts) is None:
        largest = groups["rows"][0].as_py() if len(groups) else 0
        output.counts += CountSet.of(GroupCounts(groups=len(groups), rows_of_largest_group=largest))
    return output


def _refuse_second_holdout(context: StageContext, scanned: Sequence[sources.SourcePart]) -> None:
    """Refuse splits by time beside rows of the source that are held out already."""
    if context.dataset.splits.time_key is not None and any(part.split_hint in HELD_OUT for part in scanned):
        held = join_choices(split for split in HELD_OUT if any(part.split_hint == split for part in scanned))
        raise ConfigError(
            f"datasets.{context.dataset_name}.splits.time_key: the source has rows for {held} of its own; one of "
            f"the two may say what is held out; delete time_key, or name a source without {held}"
        )


def _count_group_rows(context: StageContext, final: Sequence[Part]) -> pa.Table:
    """Return the number of rows of each group (`group_key`, `rows`), largest first; no line without a group key."""
    if context.dataset.splits.group_key is None or not final:
        return pa.table({"group_key": pa.array([], pa.string()), "rows": pa.array([], pa.uint32())})
    import polars as pl

    keys = scan_rows(context.store, [part.files["rows"] for part in final], ["group_key"])
    counted = keys.group_by("group_key").agg(pl.len().alias("rows"))
    return counted.sort("rows", "group_key", descending=[True, False]).collect(engine="streaming").to_arrow()


def list_taken_parts(context: StageContext) -> TakenGroup:
    """Return the parts of a dataset's source, each with the number of its records to take (None: all)."""
    groups = _limit_groups(context, load_part_groups(context.input(RAW_DATASET)))
    return tuple(part for taken in groups for part in taken)


def _limit_groups(context: StageContext, groups: Sequence[sources.PartGroup]) -> list[TakenGroup]:
    """Return each part with the number of its records that `max_items` admits (None: all)."""
    left = context.dataset.filters.max_items
    if left is None:
        return [tuple((part, None) for part in group) for group in groups]
    taken: list[TakenGroup] = []
    for group in groups:
        own: list[tuple[sources.SourcePart, int | None]] = []
        for part in group:
            take = min(left, part.records)
            left -= take
            own.append((part, take))
        taken.append(tuple(own))
    return taken


def _build_rows_output(context: StageContext, counts: CountSet, final: list[Part], groups: pa.Table) -> StageOutput:
    rows, messages, unread = counts.get(RowCounts), counts.get(MessageCounts), counts.get(UnreadCounts)
    samples, boundaries = rows.samples_of_rejects, counts.get(TimeSplitCounts).boundaries
    rejects = (
        (reason, count, " ".join(samples.get(reason, ())[:3])) for reason, count in _take_most_frequent(rows.reasons)
    )
    first_groups, sizes = groups.slice(0, 10).to_pydict().values()
    largest = zip(map(str, first_groups), sizes, strict=True)
    noticed = {
        "reasoning messages": messages.reasoning_messages,
        "tool call messages": messages.tool_call_messages,
        "tool calls": messages.tool_calls,
        "extracted think from content": messages.extracted_think_from_content,
        "moved reasoning keys": messages.moved_reasoning_keys,
        "dropped think messages": messages.dropped_think_messages,
        "tools present": messages.tools_present,
        "tools parsed from string": messages.tools_parsed_from_string,
    }
    return StageOutput(
        counts=counts,
        parts=final,
        ledger=rows.list_ledger(),
        tables={
            "rejects": DisplayTable(("reason", "records", "for_example"), tuple(rejects)),
            "schemas": DisplayTable(("schema", "rows"), tuple(rows.schemas.items())),
            **_tabulate_found("preference_columns", ("column", "records"), unread.preference_columns.items()),
            **_tabulate_found("unknown_roles", ("role", "rows"), _take_most_frequent(messages.rows_by_unknown_role)),
            **_tabulate_found("largest_groups", ("group", "rows"), largest),
            **_tabulate_found("roles", ("role", "messages"), _take_most_frequent(messages.messages_by_role)),
            **_tabulate_found(
                "reasoning_and_tools", ("found", "times"), noticed.items() if messages.messages_by_role else ()
            ),
            # New rows move boundaries that are computed from shares, so a recipe should pin them.
            **_tabulate_found("boundaries", ("split", "begins"), boundaries.items()),
        },
        histograms={"group_sizes": _draw_group_sizes(context, groups)} if len(groups) else {},
        samples={
            "rejects": accounts.describe_rejects(context, final, rows.count_unintended()),
            "duplicates": samples.get("duplicate", ()),
            "unknown_roles": _describe_unknown_roles(context, final, messages.rows_by_unknown_role),
            "preference_data": _describe_preferences(context, unread),
            "unread_flags": _describe_unread_flags(context, messages.notes, unread),
            "unread_text": tuple(
                f"column {name!r}: {share:.1%}" for name, share in list(unread.share_unread_text().items())[:5]
            ),
            "group_size": tuple(map(str, first_groups)),
        }
        | ({"unpinned_boundaries": tuple(f"{name}: {at}" for name, at in boundaries.items())} if boundaries else {}),
        schema=tuple(
            (f.name, str(f.type))
            for f in make_row_schema(context.dataset.row_kind, context.dataset.format.get_rollout_fields().columns)
        ),
    )


def _draw_group_sizes(context: StageContext, groups: pa.Table) -> Histogram:
    """Return the histogram of rows per group, with the bound of the check of it."""
    sizes = groups["rows"].to_numpy().astype(np.int64)
    edges = find_distinct(np.geomspace(1, max(int(sizes.max()) + 1, 2), 24).round().astype(np.int64))
    heights, _ = np.histogram(sizes, bins=edges)
    bound = getattr(context.recipe.gates, "group_size", None)
    limit = bound.at_most if bound is not None and bound.at_most is not None else 10_000
    bars = tuple(float(edge) for edge in edges), tuple(int(height) for height in heights)
    return Histogram("rows per group", "rows", *bars, float(limit))


def _describe_unknown_roles(context: StageContext, final: Sequence[Part], roles: Mapping[str, int]) -> tuple[str, ...]:
    """Describe the unknown roles, and where the first row with the most frequent one is."""
    if not roles:
        return ()
    most = accounts.sort_by_count(roles)[0][0]
    having = [part for part in final if most in part.get_counts(MessageCounts).rows_by_unknown_role]
    first = accounts.find_first_row(context.store, having, "unknown_roles", most)
    place = accounts.RowLocator(context).locate(first, reads_lines=True) if first else ""
    return accounts.describe_values("role", roles, place)


def _describe_preferences(context: StageContext, unread: UnreadCounts) -> tuple[str, ...]:
    """Describe the columns of preference data, and where the first record with one of them is."""
    lines = accounts.describe_values("column", unread.preference_columns, "")
    first = unread.samples_of_preferences.get("", ())
    if not first:
        return lines
    return *lines, f"the first record is {accounts.RowLocator(context).locate(first[0], reads_lines=True)}"


def _describe_unread_flags(context: StageContext, counts: Mapping[str, int], unread: UnreadCounts) -> tuple[str, ...]:
    """Describe the flags that nothing reads, with a value and its place of each, and the options for it."""
    form, described = context.dataset.format, list[str]()
    for note, (row_id, raw) in unread.samples_of_unread_flags.items():
        found = parse_unread_flag(note)
        assert found is not None
        place, name = found
        where = accounts.RowLocator(context).locate(row_id, reads_lines=True)
        shown = accounts.clean_value(raw)
        options = explain_unread_flag(
            place,
            name,
            from_json(raw),
            reads=place != "column" or form.READS_FLAG_COLUMNS,
            is_known=name in form.list_message_flags(),
        )
        holder = {"message": "messages have", "part": "parts of messages have", "column": "there is the column"}[place]
        rows = format_count(counts.get(note, 0), "row")
        described.append(f"{holder} `{accounts.clean_value(name)}` in {rows}, {shown} in {where}: {options}")
    return tuple(described)


def _take_most_frequent(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return accounts.sort_by_count(counts)[:30]


def _tabulate_found(
    name: str, columns: tuple[str, str], lines: Iterable[tuple[str, object]]
) -> dict[str, DisplayTable]:
    rows = tuple(lines)
    return {name: DisplayTable(columns, rows)} if rows else {}


STAGE = StageDeclaration(
    name=CANONICAL_ROWS,
    counts=RowCounts,
    description="One row per record, in one shape for all sources; rejects are kept with their reason.",
    identity=identify_canonical_rows,
    prepare=_prepare_canonical_rows,
    inputs=(RAW_DATASET,),
    divides_into_shares=True,
    stats_inputs=StatsInputs(
        count_rows_of(RowCounts, lambda counts: counts.kept, "row"),
        files={
            "rows": "rows",
            "rejects": "rejects",
            contaminated_rows.CONTAMINATION_FILE: "contamination",
            near_duplicate_rows.NEAR_DUPLICATES_FILE: "near_duplicate_groups",
        },
    ),
    summarize=lambda counts, rows: (rows, format_rejected(counts.get(RowCounts).rejected)),
    compared=(
        ComparedNumber("rows", RowCounts, lambda counts: counts.kept),
        ComparedNumber("rejected records", RowCounts, lambda counts: counts.rejected),
    ),
)
