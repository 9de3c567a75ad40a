"""What ranks are made of: the sequences of all datasets, and which of them is at each place of the order.

row      0 1 2 | 3 4 | 5 6 7 | 8      over the train shards of all datasets, in recipe order; the last is the filler
place    0 1 2 3 …  ─► row 4 8 0 6 …
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.stage_names import PACKED_SHARDS, TRAINING_SPLITS
from rowmill.core.storage import Store
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.manifest import File, Manifest, Part
from rowmill.schema.rows import PADDING_COLUMN, SEGMENT_COLUMNS, RowKind
from rowmill.shards import native
from rowmill.shards.segment_padding import list_padding_tokens
from rowmill.shards.sequence_hashes import SequenceHashes, join_hashes, read_hashes, tabulate_hashes
from rowmill.stages import inputs, part_files
from rowmill.stages.base import StageContext


@dataclass(frozen=True)
class RankSources:
    """The packed shards of the order, and the order."""

    context: StageContext
    packed: Mapping[str, Manifest]
    order: pa.Table

    @cached_property
    def shards(self) -> list[Part]:
        """The train shards of all datasets, in recipe order."""
        return list_train_shards(self.packed)

    @cached_property
    def first_rows(self) -> Ints:
        """The first row of each shard, of the filler, and the number of rows: int64[S + 2]."""
        return compute_offsets([*(part.files["shard"].rows for part in self.shards), 1])

    @cached_property
    def steps(self) -> pa.Table:
        """The facts of all ranks per step."""
        splits = self.context.inputs[(self.context.recipe.name, TRAINING_SPLITS)]
        return inputs.load_rank_steps(self.context.store, splits)

    @cached_property
    def filler(self) -> pa.Table:
        """One sequence without a target, which fills a place that no sequence has."""
        recipe, card = self.context.recipe, next(iter(self.packed.values())).card
        return native.make_fillers(
            1,
            pad_id=native.choose_pad_id(card),
            dataset="",
            weighted=recipe.has_loss_weights,
            token_fields=recipe.rollout_fields.per_token,
            columns=(*SEGMENT_COLUMNS.get(get_row_kind(recipe), ()), *recipe.rollout_fields.row_columns),
            multiple=recipe.segment_multiple_of,
        )

    @cached_property
    def padding(self) -> Ints:
        """The pad tokens of each row: int64[R]; all 0 where the recipe pads no segments."""
        if self.context.recipe.segment_multiple_of == 1:
            return np.zeros(int(self.first_rows[-1]), np.int64)
        shards = (self.context.store.table(part.files["shard"], [PADDING_COLUMN]) for part in self.shards)
        return np.concatenate([list_padding_tokens(one) for one in (*shards, self.filler)])

    @cached_property
    def hashes(self) -> SequenceHashes:
        """The content hashes and sizes of all rows."""
        store = self.context.store
        return join_hashes(
            [*(read_hashes(store, part) for part in self.shards), tabulate_hashes(self.filler.combine_chunks())]
        )

    @cached_property
    def rows(self) -> Ints:
        """The row at each place of the order."""
        shards = (list_train_shards({name: one}) for name, one in self.packed.items())
        firsts = compute_offsets([sum(part.files["shard"].rows for part in own) for own in shards])
        filler = self.order.column("filler").to_numpy(zero_copy_only=False)
        datasets = np.where(filler, 0, self.order.column("dataset").to_numpy())
        return np.where(filler, firsts[-1], firsts[datasets] + self.order.column("sequence_id").to_numpy())

    def select_rank(self, rank: int) -> slice:
        """Return the places of a rank."""
        return slice(rank, None, self.context.recipe.partitions.world_size)


def open_rank_sources(context: StageContext) -> RankSources:
    """Open the order that ranks are made of."""
    splits = context.inputs[(context.recipe.name, TRAINING_SPLITS)]
    return RankSources(context, inputs.get_packed_shards(context), inputs.load_order(context.store, splits))


def list_train_shards(packed: Mapping[str, Manifest]) -> list[Part]:
    """Return the parts that are train shards: what a shard's number in an index counts."""
    return [part for one in packed.values() for part in one.parts if part.facts["split"] == "train"]


def load_packed_inputs(store: Store, output: Manifest) -> dict[str, Manifest]:
    """Return the packed shards that ranks were made of, by dataset, in the order of the recipe."""
    found = manifest.load_inputs(store, output)
    names = found[(output.key[0], TRAINING_SPLITS)].card["datasets"]
    return {name: found[(output.key[0], name, PACKED_SHARDS)] for name in names}


def get_row_kind(recipe: Recipe) -> RowKind:
    """Return the kind of the first dataset's rows: all datasets are of it if it has columns of its own in shards."""
    return next(iter(recipe.datasets.values())).row_kind


def make_rank_card(context: StageContext, rank: int) -> dict[str, str]:
    """Return the identity card that every file of a rank carries."""
    splits = context.inputs[(context.recipe.name, TRAINING_SPLITS)]
    shard_card: dict[str, Any] = next(iter(inputs.get_packed_shards(context).values())).card
    own = {
        "recipe": context.recipe.name,
        "order": str(splits.card["order"]),
        "rank": str(rank),
        "world_size": str(context.recipe.partitions.world_size),
    }
    return {k: str(v) for k, v in shard_card.items() if k != "dataset"} | own


def write_step_facts(sources: RankSources, folder: str, rank: int) -> File:
    """Write a rank's facts per step beside its files, so that the folder of a rank is complete."""
    own = sources.steps.filter(pc.equal(sources.steps.column("rank"), rank))
    return part_files.write_parquet(sources.context.store, f"{folder}/facts.parquet", own)


def summarize_rank(sequences: int, counted: Mapping[str, Sequence[int]], padding: int) -> dict[str, Any]:
    """Return a rank's facts from each dataset's sequences, tokens and trained tokens; fillers have an empty name."""
    own = {name: list(counts) for name, counts in sorted(counted.items()) if name != FILLERS}
    return {
        "sequences": sequences,
        "fillers": counted[FILLERS][0] if FILLERS in counted else 0,
        "tokens": sum(tokens for _, tokens, _ in own.values()),
        "trained_tokens": sum(trained for _, _, trained in own.values()),
        "datasets": own,
        "padding": padding,
    }


FILLERS = ""
"""The dataset name of fillers; no dataset has an empty name."""
