"""The parts of examples → one task per pack group.

A task names its own parts and nothing of the others, so that tasks stay small however many parts there are, and a
group is made again only when one of its parts, or an option, changed. Joined documents (`concat`) cross the borders of
groups: the last sequence of a group takes the tokens that it lacks from the following parts, and the next group begins
after them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.stage_names import TOKENIZED_EXAMPLES
from rowmill.packing.layout import round_up
from rowmill.packing.pack_plan import StreamStretch, choose_group_tokens, cut_groups, find_stretch
from rowmill.recipe.recipe import Recipe
from rowmill.schema.manifest import File, Part
from rowmill.schema.rows import SEGMENT_COLUMNS, describe_columns
from rowmill.shards import native
from rowmill.sources import SourcePart
from rowmill.stages import inputs
from rowmill.stages.base import StageContext
from rowmill.stages.inputs import list_example_sources
from rowmill.stages.packed_shards.pack_group import PackGroupInputs
from rowmill.stages.packed_shards.split_plans import SPLITS, HeldOutValidation, PackingRules, get_holdout_size

VERSION = 8
"""Increase it when any shard may hold other bytes, or other facts are counted on the way."""


def identify_packed_shards(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide shards; all have weights as soon as one dataset of the recipe has."""
    dataset = recipe.datasets[name]
    held = get_holdout_size(recipe, name)
    return {
        # Absent where it is not asked for, as in recipes from before it.
        **({"domains": True} if recipe.stores_domains else {}),
        "versions": [VERSION],
        "packing": dataset.packing.model_dump(mode="json"),
        "row_kind": dataset.row_kind,
        "seq_len": recipe.seq_len,
        "carved": None if held is None else [held, dataset.splits.model_dump(mode="json")],
        "weights": [dataset.loss.has_weights, recipe.has_loss_weights],
        "columns": describe_columns(SEGMENT_COLUMNS, dataset.row_kind),
        "rollout_fields": recipe.rollout_fields.describe(),
    }


def build_shard_card(context: StageContext) -> dict[str, Any]:
    """Return the identity card of a dataset's shards, which each of them carries."""
    packing = context.dataset.packing
    attention = "tree" if packing.share_prefixes else "blocked" if packing.block_cross_document_attention else "open"
    own = {
        "format": "native",
        "format_version": VERSION,
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
    borders = cut_groups([part.tokens for part in parts], [part.file.digest for part in parts], target)
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
                files=tuple(part.file for part in taken),
                own=end - first,
                tokens=sum(part.tokens for part in taken),
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
    facts: Mapping[str, Any]
    tokens: int
    sources: Sequence[SourcePart]
    splits: "NDArray[np.int8] | None"


def _list_example_parts(context: StageContext, held: HeldOutValidation | None) -> list[_ExamplePart]:
    firsts = None if held is None else held.first_rows
    return [
        _ExamplePart(
            file=part.files["examples"],
            facts=part.facts,
            tokens=int(part.facts["tokens"]),
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
        "weighted": context.recipe.has_loss_weights,
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
        by_split: list[Mapping[str, Mapping[str, int]]] = [part.facts["tokens_by_split"] for part in parts]
        counts = [
            {split: sum(int(classes.get(name, 0)) for name in kinds) for split, classes in own.items()}
            for own in by_split
        ]
    else:
        counts = [_count_split_room(context, part, multiple) for part in parts]
    return {split: compute_offsets([count.get(split, 0) for count in counts]) for split in SPLITS}


def _count_split_room(context: StageContext, part: _ExamplePart, multiple: int) -> dict[str, int]:
    """Sum the tokens of a part's examples by split, each rounded up to a multiple."""
    table = context.store.table(part.file, ["tokens", "split"])
    room = round_up(table.column("tokens").to_numpy(), multiple)
    splits = part.splits
    if splits is None:
        splits = pc.index_in(table.column("split"), pa.array(SPLITS)).to_numpy()
    return {split: int(room[splits == code].sum()) for code, split in enumerate(SPLITS)}
