"""Examples → packed shards: groups of parts are packed independently, one task each.

    parts of examples ─► groups ─► per group: plan ─► shards, lineage
                                                 └► left_out: what is cut, dropped or surplus
    (validation by number ─► set aside by each group ─► packed together)

An example has its tokens in sequences, or a line in `left_out` that says how many are not and why.

A task names its own parts and nothing of the others, so that tasks stay small however many parts there are, and a
group is made again only when one of its parts, or an option, changed. Joined documents (`concat`) cross the borders of
groups: the last sequence of a group takes the tokens that it lacks from the following parts, and the next group begins
after them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets, format_percent, format_size
from rowmill.core.stage_names import CANONICAL_ROWS, PACKED_SHARDS, RAW_DATASET, TOKENIZED_EXAMPLES, TRUNCATION_STATS
from rowmill.packing.pack_plan import StreamStretch, choose_group_tokens, cut_groups, find_stretch, round_up
from rowmill.parts.context import StageOutput
from rowmill.recipe.recipe import Recipe
from rowmill.schema.counts import CountSet, compute_share
from rowmill.schema.example_counts import ExampleCounts
from rowmill.schema.indexed_shards import drop_tokens, list_token_columns
from rowmill.schema.manifest import DisplayTable, File, Histogram, Part, add_up_counts
from rowmill.schema.rows import ROW_KINDS, SPLITS, describe_columns
from rowmill.schema.shard_counts import (
    FILL_BINS,
    PackGroupDetails,
    PackingCounts,
    ShardDetails,
    SharedPrefixCounts,
    name_fill_bin,
    select_shards,
)
from rowmill.shards import native
from rowmill.shards.native import find_content_damage
from rowmill.sources import SourcePart
from rowmill.stages import inputs
from rowmill.stages.base import ComparedNumber, PreparedStage, StageContext, StageDeclaration
from rowmill.stages.inputs import list_example_sources
from rowmill.stages.packed_shards.pack_group import GroupMode, PackGroupInputs, pack_group
from rowmill.stages.packed_shards.split_plans import (
    HeldOutValidation,
    PackingRules,
    get_holdout_size,
    hold_out_validation,
)
from rowmill.stats.tables import StatsInputs, count_rows_of

FORMAT_VERSION = 8
"""Increase it when any shard may hold other bytes; every shard names it."""

VERSION = 9
"""Increase it when shards are counted differently."""


def identify_packed_shards(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide shards; all have weights as soon as one dataset of the recipe has."""
    dataset = recipe.datasets[name]
    held = get_holdout_size(recipe, name)
    return {
        "versions": [FORMAT_VERSION, VERSION],
        "packing": dataset.packing.model_dump(mode="json"),
        "row_kind": dataset.row_kind,
        "seq_len": recipe.seq_len,
        "domains": recipe.stores_domains,
        "carved": None if held is None else [held, dataset.splits.model_dump(mode="json")],
        "weights": [dataset.loss.has_weights, recipe.has_loss_weights],
        "columns": describe_columns(ROW_KINDS[dataset.row_kind].segment_columns),
        "rollout_fields": recipe.rollout_fields.describe(),
    }


def build_shard_card(context: StageContext) -> dict[str, Any]:
    """Return the identity card of a dataset's shards, which each of them carries."""
    packing = context.dataset.packing
    attention = "tree" if packing.share_prefixes else "blocked" if packing.block_cross_document_attention else "open"
    own = {
        "format": "native",
        "format_version": FORMAT_VERSION,
        "seq_len": context.recipe.seq_len,
        "attention": attention,
        "recipe": context.recipe.name,
        "dataset": context.dataset_name or "",
    }
    return context.input(TOKENIZED_EXAMPLES).card | own


def get_packing_rules(context: StageContext) -> PackingRules:
    """Return the rules that a dataset's examples are packed by."""
    dataset, form = context.dataset, context.dataset.format
    ways = ["raise seq_len", form.suggest_overlong_policies(dataset), form.suggest_slicing()]
    return PackingRules(
        dataset.packing,
        dataset.row_kind,
        context.recipe.seq_len,
        where=f"datasets.{context.dataset_name}",
        remedies=", or ".join(one for one in ways if one),
    )


def plan_groups(context: StageContext, held: HeldOutValidation | None) -> list[PackGroupInputs]:
    """Cut the parts into groups and describe the work of each; parts without examples are in no group."""
    rules = get_packing_rules(context)
    parts = _list_example_parts(context, held)
    target = choose_group_tokens(rules.seq_len, rules.packing.group_tokens)
    borders = cut_groups([part.counts.tokens for part in parts], [part.file.digest for part in parts], target)
    streams = _count_streams(context, rules, parts, held) if rules.strategy == "concat" else None
    groups: list[PackGroupInputs] = []
    for first, end in borders:
        stretches = dict[str, StreamStretch]()
        # The end of the parts whose tokens the group's sequences hold.
        last = end
        for split, before in (streams or {}).items():
            begin, tail = int(before[first]), rules.packing.tail == "keep"
            own, total = int(before[end]) - begin, int(before[-1])
            stretches[split] = find_stretch(begin, own, total, rules.seq_len, keeps_tail=tail)
            if left_until := stretches[split].left_until:
                last = max(last, int(np.searchsorted(before, begin + left_until)))
        taken = parts[first:last]
        splits = [part.splits for part in taken if part.splits is not None]
        groups.append(
            PackGroupInputs(
                **_get_common_inputs(context, [part.file for part in taken]),
                mode=GroupMode.SET_ASIDE if splits else GroupMode.ALL,
                files=tuple(part.file for part in taken),
                own=end - first,
                tokens=sum(part.counts.tokens for part in taken),
                sources=_locate_sources([source for part in taken for source in part.sources]),
                rules=rules,
                stores_weights=context.dataset.loss.has_weights,
                stretches=None if streams is None else stretches,
                splits=np.concatenate(splits) if splits else None,
            )
        )
    return groups


def plan_held_group(context: StageContext, held: HeldOutValidation, parts: Sequence[Part]) -> list[PackGroupInputs]:
    """Describe the work of packing the validation sequences that the groups set aside."""
    files = [part.files["held"] for part in parts if "held" in part.files]
    if not files:
        return []
    rules = get_packing_rules(context)
    code = SPLITS.index("validation")
    # Sequences are held out of a few parts: the others are in no segment.
    touched = [part for part in _list_example_parts(context, held) if part.splits is not None and code in part.splits]
    return [
        PackGroupInputs(
            **_get_common_inputs(context, files),
            mode=GroupMode.HELD_OUT,
            files=tuple(files),
            own=len(files),
            tokens=int(held.tokens[held.splits == code].sum()),
            sources=_locate_sources([source for part in touched for source in part.sources]),
            rules=rules,
            stores_weights=context.recipe.has_loss_weights,
            splits=np.full(sum(file.rows for file in files), code, np.int8),
            planned=held.plan,
        )
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _ExamplePart:
    """A part of examples: its file, tokens, the source parts of its rows, and its examples' splits if held out."""

    file: File
    counts: ExampleCounts
    sources: Sequence[SourcePart]
    splits: "NDArray[np.int8] | None"


def _list_example_parts(context: StageContext, held: HeldOutValidation | None) -> list[_ExamplePart]:
    firsts = None if held is None else held.first_rows
    return [
        _ExamplePart(
            file=part.files["examples"],
            counts=part.get_counts(ExampleCounts),
            sources=own,
            splits=None if held is None or firsts is None else held.splits[int(firsts[i]) : int(firsts[i + 1])],
        )
        for i, (part, own) in enumerate(list_example_sources(context))
        if part.files["examples"].rows
    ]


def _locate_sources(parts: Sequence[SourcePart]) -> dict[str, tuple[str, int]]:
    return {part.part_id: (part.url, part.first_record) for part in parts}


def _get_common_inputs(context: StageContext, files: Sequence[File]) -> dict[str, Any]:
    """Return what all groups of a dataset are made of; `files` are those of a group's examples."""
    name = context.dataset_name or ""
    card = build_shard_card(context)
    # An index names its examples by their paths, which the digests of the files leave open.
    paths = {"examples": [file.path for file in files]} if context.dataset.packing.layout == "index" else {}
    return {
        # The card is in every shard: another one must not take the place of files that a kept version names.
        "options": {"recipe": identify_packed_shards(context.recipe, name), "card": card, **paths},
        "dataset": name,
        "card": {field: str(value) for field, value in card.items()},
        "token_types": context.recipe.token_types,
        "fields": context.recipe.rollout_fields,
        "columns": tuple(inputs.list_filled_columns(context.recipe, context.dataset.row_kind)),
        "pad_id": native.choose_pad_id(card) if context.recipe.segment_multiple_of > 1 else None,
    }


def _count_streams(
    context: StageContext, rules: PackingRules, parts: Sequence[_ExamplePart], held: HeldOutValidation | None
) -> dict[str, Ints]:
    """Return the tokens of each split before each part, int64[P + 1]; with padding, if there is any."""
    multiple = rules.packing.room_multiple
    if held is None and multiple == 1:
        kinds = ("trained", "context", "template")
        by_split: list[Mapping[str, Mapping[str, int]]] = [part.counts.tokens_by_split for part in parts]
        counts = [
            {split: sum(int(classes.get(name, 0)) for name in kinds) for split, classes in own.items()}
            for own in by_split
        ]
    else:
        counts: list[dict[str, int]] = []
        for part in parts:
            table = context.store.table(part.file, ["tokens", "split"])
            room, splits = round_up(table.column("tokens").to_numpy(), multiple), part.splits
            if splits is None:
                splits = pc.index_in(table.column("split"), pa.array(SPLITS)).to_numpy()
            counts.append({split: int(room[splits == code].sum()) for code, split in enumerate(SPLITS)})
    return {split: compute_offsets([count.get(split, 0) for count in counts]) for split in SPLITS}


def make_packed_shards(context: StageContext) -> StageOutput:
    """Pack all groups, and the validation sequences that are held out by number."""
    wanted = get_holdout_size(context.recipe, context.dataset_name or "")
    held_out = None if wanted is None else hold_out_validation(context, get_packing_rules(context), wanted)
    maps = [context.map(pack_group, plan_groups(context, held_out))]
    side: list[Part] = []
    if held_out is not None:
        maps.append(context.map(pack_group, plan_held_group(context, held_out, maps[0].parts)))
        if context.dataset.packing.layout == "index":
            side += [
                Part(group.fingerprint, {"held": group.files["held"]})
                for group in maps[0].parts
                if "held" in group.files
            ]
        place = context.place("moved", held_out.moved)
        side.append(Part(place.fingerprint, {"moved": place.write("moved", held_out.moved)}))
    groups = [group for made in maps for group in made.parts]
    shards = _list_shards(groups)
    left = [one for one in groups if "left_out" in one.files]
    parts = [*shards, *(Part(one.fingerprint, {"left_out": one.files["left_out"]}) for one in left)]
    counts = add_up_counts(groups, PackingCounts())
    packing, saved = counts.get(PackingCounts), counts.find(SharedPrefixCounts)
    fills = [packing.sequences_by_fill.get(name_fill_bin(number), 0) for number in range(FILL_BINS)]
    edges = tuple(number / FILL_BINS for number in range(FILL_BINS + 1))
    columns = inputs.make_shard_schema(context.recipe, context.dataset.row_kind)
    return StageOutput(
        parts=[*parts, *side],
        counts=counts,
        ledger=packing.list_ledger(),
        token_ledger=[
            *([("all", "dropped", packing.tokens_left_out)] if packing.tokens_left_out > 0 else []),
            *([] if saved is None else [("all", "shared", saved.tokens_shared)]),
            *([("all", "padding", packing.padding)] if packing.is_padded else []),
        ],
        tables=_tabulate_splits(context, packing, shards),
        histograms={"fill": Histogram("fill", "share of seq_len", edges, tuple(fills))},
        schema=inputs.describe_schema(_make_file_schema(context, columns)),
        details={"columns": inputs.describe_schema(columns)},
        card=build_shard_card(context),
        parts_reused=sum(made.reused for made in maps),
        rows_made=sum(made.rows_made for made in maps),
    )


def _list_shards(groups: Sequence[Part]) -> list[Part]:
    """Return a part per shard, by split and in the order of groups.

    Its details say where its sequences begin in their split, which depends on all earlier groups.
    """
    parts: list[Part] = []
    for split in SPLITS:
        first = 0
        for group in groups:
            for number, shard in enumerate(group.get_details(PackGroupDetails).shards):
                if shard.split == split:
                    files = {name: group.files[f"{name}-{number:05d}"] for name in ("shard", "segments", "sequences")}
                    details = replace(shard, first_sequence=first)
                    parts.append(Part(group.fingerprint, files, details={ShardDetails.__name__: details.to_json()}))
                    first += shard.sequences
    return parts


def _tabulate_splits(context: StageContext, packing: PackingCounts, shards: Sequence[Part]) -> dict[str, DisplayTable]:
    """Tabulate examples and sequences by split, and how full sequences are."""
    rows: list[tuple[Any, ...]] = []
    lines: list[tuple[Any, ...]] = []
    for split in SPLITS:
        own = PackingCounts.add_up(
            [
                PackingCounts(),
                *(
                    part.get_details(ShardDetails).count(seq_len=context.recipe.seq_len)
                    for part in select_shards(shards, split)
                ),
            ]
        )
        examples = packing.examples_by_split.get(split, 0)
        if examples:
            rows.append((context.dataset_name, split, examples, own.sequences, own.trained_tokens))
        if own.sequences:
            each = round(own.segments / own.sequences, 2)
            share = compute_share(own.trained_tokens, own.tokens)
            lines.append((split, own.sequences, each, own.tokens, own.share_filled(), share))
    return {
        "splits": DisplayTable(("dataset", "split", "rows", "sequences", "trained_tokens"), tuple(rows)),
        "packing": DisplayTable(
            ("split", "sequences", "segments_each", "tokens", "fill", "trained_share"), tuple(lines)
        ),
    }


SHARED_TOKEN_BYTES = 12
"""What a token would take if it stood once more: its id, label and position, before compression."""


def _make_file_schema(context: StageContext, columns: pa.Schema) -> pa.Schema:
    """Return the columns of the shards' files: in an index, references to examples instead of tokens."""
    if context.dataset.packing.layout == "copied":
        return columns
    none = np.zeros(0, np.int64)
    return drop_tokens(columns.empty_table(), none, none, list_token_columns(context.recipe.token_types)).schema


def _summarize_packed_shards(counts: CountSet, rows: str) -> Sequence[str]:
    shared = counts.get(SharedPrefixCounts).tokens_shared
    saved = f"sharing saves {shared:,} tokens, {format_size(SHARED_TOKEN_BYTES * shared)}" if shared else ""
    return rows, f"{format_percent(counts.get(PackingCounts).share_filled())} full", saved


STAGE = StageDeclaration(
    name=PACKED_SHARDS,
    counts=PackingCounts,
    description="Examples packed into sequences of at most seq_len tokens, as Parquet.",
    identity=identify_packed_shards,
    prepare=lambda context: PreparedStage((), lambda: make_packed_shards(context)),
    inputs=(TOKENIZED_EXAMPLES, RAW_DATASET),
    origins=(CANONICAL_ROWS,),
    # Shards are not packed past a failed check of the statistics.
    gates=(TRUNCATION_STATS,),
    divides_into_shares=True,
    uses_all_cores=True,
    stats_inputs=StatsInputs(
        count_rows_of(PackingCounts, lambda counts: counts.sequences, "sequence"),
        files={"shard": "sequences", "segments": "segments", "left_out": "left_out"},
    ),
    summarize=_summarize_packed_shards,
    compared=(
        ComparedNumber("sequences", PackingCounts, lambda counts: counts.sequences),
        ComparedNumber("fill", PackingCounts, lambda counts: counts.share_filled(), is_share=True),
    ),
    find_content_damage=lambda store, output: find_content_damage(
        store, "/".join(output.key), output.files("shard"), output.get_counts(PackingCounts).content_hash
    ),
    list_shared_inputs=lambda made: (TOKENIZED_EXAMPLES,) if "example_files" in dict(made.schema) else (),
)
