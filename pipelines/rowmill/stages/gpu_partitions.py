"""The order and the shards → one partition per data-parallel rank: copied shards, or an index of rows.

    rank-00003-of-00008/
    ├── index.parquet       an index: place 3 11 19 … · step · pass · dataset · sequence_id · shard · row
    ├── filler.parquet      the sequence of places with shard −1
    ├── data/part-00000 …   or copies: that rank's sequences, in training order
    └── facts.parquet       per step: sequences, fillers, tokens, trained tokens, longest segment

`shard` counts the train shards of all datasets, in recipe order. An index is integers: no token is read to write one,
another world size costs no second copy of the tokens, and the packed shards must stay where they are.

A task copies `TASK_SHARDS` shards of one rank, whatever that rank's size is. Rows come from copies of the packed shards
on the task's host, which the first task that needs one makes. Rejected: taking rows out of the packed shards
themselves. In a shuffled order each sequence of 4,096 tokens comes from another row group, so that every token would be
decoded some fifteen times. Trainers open `current.json`, which is written once all ranks of one order are built.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rowmill.checks import cross_stage
from rowmill.checks.judge import CheckResult
from rowmill.core.arrays import Ints, compute_offsets, find_distinct, format_count
from rowmill.core.arrow_files import make_required_schema
from rowmill.core.stage_names import GPU_PARTITIONS, PACKED_SHARDS, TRAINING_SPLITS
from rowmill.core.storage import Store, digest_json, read_tables
from rowmill.parts.context import StageOutput, open_host_scratch
from rowmill.parts.functions import load_kept_part, part_folder, save_kept_part, write_parquet
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.content_hash import HASH_MODULUS, format_content_hash
from rowmill.schema.counts import CountSet, compute_share
from rowmill.schema.manifest import DisplayTable, File, Manifest, Part, add_up_counts
from rowmill.schema.order_counts import OrderCounts
from rowmill.schema.rank_counts import RankCounts, RankDetails
from rowmill.schema.rows import PADDING_COLUMN, RowKind
from rowmill.schema.shard_counts import ShardDetails
from rowmill.shards import host_scratch, native
from rowmill.shards.host_scratch import NumberedShard, ShardCopies
from rowmill.shards.native import find_content_damage, list_padding_tokens
from rowmill.shards.sequences import SequenceHashes, join_hashes, tabulate_hashes
from rowmill.stages import inputs
from rowmill.stages.base import ComparedNumber, PreparedStage, StageContext, StageDeclaration
from rowmill.stats.tables import StatsInputs, count_rows_of

VERSION = 8
"""Increase it when the bytes of any rank, or what is counted of them, may change."""


def identify_gpu_partitions(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide ranks (`ranks`), and the tags for evaluation."""
    return {
        "ranks": {
            "versions": [VERSION],
            "world_size": recipe.partitions.world_size,
            "seq_len": recipe.seq_len,
            "weighted": recipe.has_loss_weights,
            "layout": recipe.partitions.layout,
            "rollout_fields": recipe.rollout_fields.describe(),
            "segment_multiple_of": recipe.segment_multiple_of,
            "domains": recipe.stores_domains,
        },
        "tags": {name: list(dataset.source.tags) for name, dataset in recipe.datasets.items()},
    }


def is_index(output: Manifest) -> bool:
    """Return whether the ranks of an output are indexes of the packed shards."""
    return any("index" in part.files for part in output.parts)


def rank_names(world_size: int) -> tuple[str, ...]:
    """Return the folder names of all ranks."""
    return tuple(f"rank-{rank:05d}-of-{world_size:05d}" for rank in range(world_size))


def fingerprint_rank(context: StageContext, name: str) -> str:
    """Return the fingerprint of a rank: the order, its sequences, the world size."""
    splits = context.inputs[(context.recipe.name, TRAINING_SPLITS)]
    # The order names sequences by number only, so the shards' content must be included.
    packed = [shard.version for shard in inputs.get_packed_shards(context).values()]
    return digest_json(
        GPU_PARTITIONS, identify_gpu_partitions(context.recipe, "")["ranks"], splits.version, packed, name
    )


@dataclass(frozen=True)
class RankSources:
    """The packed shards of the order, and the order."""

    context: StageContext
    packed: Mapping[str, Manifest]
    order: pa.Table

    @cached_property
    def shards(self) -> list[Part]:
        """The train shards of all datasets, in recipe order."""
        return inputs.list_train_shards(self.packed)

    @cached_property
    def first_rows(self) -> Ints:
        """The first row of each shard, of the filler, and the number of rows: int64[S + 2]."""
        return _number_rows([part.files["shard"] for part in self.shards])

    @cached_property
    def steps(self) -> pa.Table:
        """The counts of all ranks per step."""
        splits = self.context.inputs[(self.context.recipe.name, TRAINING_SPLITS)]
        return pa.concat_tables(read_tables(self.context.store, splits.files("rank_steps")))

    @cached_property
    def filler(self) -> pa.Table:
        """One sequence without a target, which fills a place that no sequence has."""
        recipe, card = self.context.recipe, next(iter(self.packed.values())).card
        return native.make_filler(
            pad_id=native.choose_pad_id(card),
            token_types=recipe.token_types,
            columns=inputs.list_filled_columns(recipe, get_row_kind(recipe)),
            multiple=recipe.segment_multiple_of,
            has_trees=recipe.shares_prefixes,
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
        stored = (self.context.store.table(part.files["sequences"]) for part in self.shards)
        return join_hashes([*stored, tabulate_hashes(self.filler.combine_chunks())])

    @cached_property
    def rows(self) -> Ints:
        """The row at each place of the order."""
        firsts = compute_offsets(inputs.count_train_sequences(self.packed))
        filler = self.order.column("filler").to_numpy(zero_copy_only=False)
        datasets = np.where(filler, 0, self.order.column("dataset").to_numpy())
        return np.where(filler, firsts[-1], firsts[datasets] + self.order.column("sequence_id").to_numpy())

    def select_rank(self, rank: int) -> slice:
        """Return the places of a rank."""
        return slice(rank, None, self.context.recipe.partitions.world_size)


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


def _make_rank_part(
    sources: RankSources,
    name: str,
    files: Mapping[str, File],
    lines: Sequence[tuple[str, int, int, int]],
    found: int,
    padding: int,
) -> Part:
    """Describe a rank by what was read back: `lines` are sequences, tokens and trained tokens of datasets."""
    context, rank = sources.context, _parse_rank(name)
    # Its counts per step are beside its files, so that the folder of a rank is complete.
    steps = sources.steps.filter(pc.equal(sources.steps.column("rank"), rank))
    facts = write_parquet(context.store, f"{_locate_rank(context, name)}/facts.parquet", steps)
    by_dataset = [Counter[str](), Counter[str](), Counter[str]()]
    for dataset, *measured in lines:
        for counter, count in zip(by_dataset, measured, strict=True):
            counter[dataset] += count
    fillers = by_dataset[0].pop(FILLERS, 0)
    sequences, tokens, trained = (
        {name: counter[name] for name in sources.packed if counter[name]} for counter in by_dataset
    )
    trained_tokens = sum(trained.values())
    counts = RankCounts(
        ranks=1,
        unequal_ranks=int(found != sources.hashes.sum_content(sources.rows[sources.select_rank(rank)])),
        sequences=sum(sequences.values()) + fillers,
        fillers=fillers,
        tokens=sum(tokens.values()),
        trained_tokens=trained_tokens,
        padding=native.FILLER_TOKENS * fillers + padding,
        most_trained_tokens=trained_tokens,
        least_trained_tokens=trained_tokens,
        sequences_by_dataset=sequences,
        tokens_by_dataset=tokens,
        trained_tokens_by_dataset=trained,
    )
    details = RankDetails(content_hash=format_content_hash(found))
    return Part(
        fingerprint_rank(context, name),
        {**files, "facts": facts},
        counts=CountSet.of(counts).to_json(),
        details={RankDetails.__name__: details.to_json()},
    )


FILLERS = ""
"""The dataset name of fillers; no dataset has an empty name."""


# ── Ranks as indexes: which row of which packed shard comes when, in the order of training ──


FILLER_SHARD = -1

INDEX_GROUP = 1 << 16
"""Lines of a row group: what a reader decodes at once."""

RANK_INDEX_SCHEMA = make_required_schema(
    place=pa.int64(),
    step=pa.int64(),
    **{"pass": pa.int32()},
    dataset=pa.dictionary(pa.int32(), pa.string()),
    sequence_id=pa.int64(),
    shard=pa.int32(),
    row=pa.int32(),
)
"""One line per sequence of a rank, in the order of training. A filler has no dataset's name, sequence and shard −1."""


def write_rank_index(sources: RankSources, name: str) -> Part:
    """Write the index of a rank, and read it back."""
    context, rank = sources.context, _parse_rank(name)
    card, folder = make_rank_card(context, rank), _locate_rank(context, name)
    of_rank = sources.select_rank(rank)
    rows = sources.rows[of_rank]
    shards = np.searchsorted(sources.first_rows, rows, "right") - 1
    is_filler = shards == len(sources.shards)
    numbers = sources.order.column("dataset").to_numpy()[of_rank]
    columns = [
        np.arange(len(sources.rows))[of_rank],
        sources.order.column("step").to_numpy()[of_rank],
        sources.order.column("pass").to_numpy()[of_rank],
        pa.DictionaryArray.from_arrays(
            pa.array(np.where(is_filler, len(sources.packed), numbers).astype(np.int32)),
            pa.array([*sources.packed, FILLERS], pa.string()),
        ),
        sources.order.column("sequence_id").to_numpy()[of_rank],
        np.where(is_filler, FILLER_SHARD, shards).astype(np.int32),
        (rows - sources.first_rows[shards]).astype(np.int32),
    ]
    table = pa.Table.from_arrays([pa.array(one) for one in columns], schema=RANK_INDEX_SCHEMA)
    sink = BytesIO()
    metadata = {f"rowmill.{name}": value for name, value in sorted(card.items())}
    pq.write_table(
        table.replace_schema_metadata(metadata),
        sink,
        compression="zstd",
        row_group_size=INDEX_GROUP,
        use_dictionary=["dataset", "pass"],
    )
    files = {
        "index": context.store.put(f"{folder}/index.parquet", sink.getvalue(), table.num_rows),
        "filler": context.store.put(
            f"{folder}/filler.parquet",
            native.encode_native_shard(sources.filler, card, group_rows=1),
            sources.filler.num_rows,
        ),
    }
    hashes = sources.hashes
    found = hashes.sum_content(_locate_lines(context.store, files["index"], sources.first_rows))
    lines = [
        (dataset, len(own), int(hashes.tokens[own].sum()), int(hashes.trained_tokens[own].sum()))
        for number, dataset in [*enumerate(sources.packed), (FILLER_SHARD, FILLERS)]
        if len(own := rows[numbers == number])
    ]
    return _make_rank_part(sources, name, files, lines, found, int(sources.padding[rows].sum()))


def _number_rows(shards: Sequence[File]) -> Ints:
    """Return the first row of each shard, of the filler, which is the last row, and the number of rows."""
    return compute_offsets([*(shard.rows for shard in shards), 1])


def _locate_lines(store: Store, index: File, first_rows: Ints) -> Ints:
    """Return the row over all shards that each line of an index names, as it was written."""
    table = store.table(index, ("shard", "row"))
    # The filler is the last of all rows.
    shards = np.where(table.column("shard").to_numpy() == FILLER_SHARD, len(first_rows) - 2, table.column("shard"))
    return first_rows[shards] + table.column("row").to_numpy()


# ── Ranks as folders of shards: the sequences of the order, copied in the order of training ──


SHARD_TOKENS = 2 << 20
"""Maximum tokens of a shard: some 60 MB while a worker gathers and writes it."""

TASK_SHARDS = 8
"""Shards that one task writes: a dozen seconds of work."""


@dataclass(frozen=True, slots=True, eq=False)
class _RankTask:
    """Shards of one rank, the first of them number `first`; `wanted` are the rows of their sequences."""

    folder: str
    first: int
    wanted: Ints
    per_shard: int
    group_rows: int
    card: dict[str, str]


_WrittenShards = tuple[dict[str, File], list[tuple[str, int, int, int]], int, int]
"""The files of a task by name, and of these, read back: lines by dataset, their content hash, and pad tokens."""


def write_copied_ranks(sources: RankSources, names: Sequence[str]) -> Iterator[Part]:
    """Write some ranks' shards, and yield each rank once its content was compared with that of the packed shards."""
    context = sources.context
    rows = {name: sources.rows[sources.select_rank(_parse_rank(name))] for name in names}
    shards = tuple(
        NumberedShard(part.files["shard"], part.get_details(ShardDetails).first_sequence) for part in sources.shards
    )
    per_shard = max(1, SHARD_TOKENS // context.recipe.seq_len)
    tasks = {
        name: [
            _RankTask(
                folder=_locate_rank(context, name),
                first=begin // per_shard,
                wanted=rows[name][begin : begin + TASK_SHARDS * per_shard],
                per_shard=per_shard,
                group_rows=native.count_group_rows(context.recipe.seq_len),
                card=make_rank_card(context, _parse_rank(name)),
            )
            for begin in range(0, len(rows[name]), TASK_SHARDS * per_shard)
        ]
        for name in names
    }
    size = 4 * sum(shard.file.bytes for shard in shards)
    with open_host_scratch(context) as scratch:
        copies = ShardCopies(context.store.root, shards, scratch, keeps_padding=True, filler=sources.filler)
        every = [task for own in tasks.values() for task in own]
        made = context.pool.map(partial(write_rank_shards, context.store), every, size_bytes=size, shared=copies)
        for name, own in tasks.items():
            files: dict[str, File] = {}
            lines: list[tuple[str, int, int, int]] = []
            found = padding = 0
            for _ in own:
                of_task, counted, content, padded = next(made)
                files |= of_task
                lines += counted
                found, padding = (found + content) % HASH_MODULUS, padding + padded
            yield _make_rank_part(sources, name, files, lines, found, padding)


def _parse_rank(name: str) -> int:
    return int(name.split("-")[1])


def _locate_rank(context: StageContext, name: str) -> str:
    return f"{part_folder(context.folder, fingerprint_rank(context, name))}/{name}"


def write_rank_shards(store: Store, task: _RankTask, copies: ShardCopies) -> _WrittenShards:
    """Write some shards of a rank, and read them back."""
    # This host's copies of all shards, of which those that the task needs are there.
    first_rows = _number_rows([shard.file for shard in copies.shards])
    copies.require(find_distinct(np.searchsorted(first_rows, task.wanted, "right") - 1).tolist())
    sources = copies.files
    files: dict[str, File] = {}
    found = padding = 0
    lines: list[tuple[str, int, int, int]] = []
    for number, begin in enumerate(range(0, len(task.wanted), task.per_shard), task.first):
        table = host_scratch.take_rows(sources, first_rows, task.wanted[begin : begin + task.per_shard])
        dataset_column = table.column("dataset").combine_chunks().dictionary_encode()
        typed = table.set_column(
            table.schema.get_field_index("dataset"), native.SEQUENCE_SCHEMA.field("dataset"), dataset_column
        )
        added = [field.with_type(field.type.value_type) for field in [*typed.schema][len(native.SEQUENCE_SCHEMA) :]]
        table = typed.cast(native.extend_schema(native.SEQUENCE_SCHEMA, {}, added))
        content = native.encode_native_shard(table, task.card, group_rows=task.group_rows)
        name = f"data/part-{number:05d}.parquet"
        files[name] = store.put(f"{task.folder}/{name}", content, table.num_rows)
        back = store.table(files[name]).combine_chunks()
        found += sum(native.hash_sequences(native.recover_segments(back)))
        # Fillers are counted separately.
        plain = back.select(["tokens", "trained_tokens"]).append_column(
            "dataset", back.column("dataset").cast(pa.string())
        )
        sums = plain.group_by("dataset").aggregate([("tokens", "count"), ("tokens", "sum"), ("trained_tokens", "sum")])
        columns = ("dataset", "tokens_count", "tokens_sum", "trained_tokens_sum")
        lines += zip(*(sums.column(column).to_pylist() for column in columns), strict=True)
        padding += int(list_padding_tokens(back).sum())
    return files, lines, found % HASH_MODULUS, padding


# ── Publishing ranks: `current.json`, which trainers open ──


def publish_gpu_partitions(
    context: StageContext, output: Manifest, results: Sequence[CheckResult], loosened: Sequence[str]
) -> None:
    """Write `current.json` for trainers, once every rank of this order is built and its tokens are conserved.

    `results` are the check results of the output, `loosened` the bounds of the recipe that are wider than the defaults:
    readers of the ranks can see under which thresholds they were built.

    Its content comes from the output, not from the recipe, since a kept version may be from an older recipe.
    """
    counts = output.get_counts(RankCounts)
    if counts.count_unconserved() or counts.ranks != counts.world_size:
        return
    splits = context.inputs[(context.recipe.name, TRAINING_SPLITS)]
    order = splits.get_counts(OrderCounts)
    packed = {name: context.inputs[(context.recipe.name, name, PACKED_SHARDS)] for name in splits.card["datasets"]}
    first = next(iter(packed.values()))
    content = {
        "version": output.version,
        "recipe": context.recipe.name,
        "order": splits.card["order"],
        "order_file": splits.parts[0].files["order"].path,
        # An order of more than a million places has several files, of which the one above is the first.
        "order_files": [file.path for file in splits.files("order")],
        "datasets": splits.card["datasets"],
        "world_size": counts.world_size,
        "layout": "index" if is_index(output) else "copied",
        "seq_len": int(first.card["seq_len"]),
        "places": order.places,
        "steps": order.steps,
        "has_steps": splits.card["has_steps"],
        "sets": {name: _describe_evaluation_set(context, name, one) for name, one in packed.items()},
        "inputs": output.inputs,
        "waivers": list(output.waivers),
        "loosened": list(loosened),
        "checks": [
            {
                "name": result.check,
                "value": result.value,
                "wanted": result.wanted,
                "severity": result.severity,
                "outcome": result.outcome,
                "waiver": result.waiver,
                "threshold_digest": result.threshold_digest,
            }
            for result in results
        ],
        "card": {k: v for k, v in first.card.items() if k != "dataset"},
        "ranks": {
            rank: _describe_rank(part) for rank, part in zip(rank_names(counts.world_size), output.parts, strict=True)
        },
    }
    shards = [shard for one in packed.values() for part in one.parts if (shard := part.find_details(ShardDetails))]
    domains = {name for shard in shards for name in shard.domains}
    if domains:
        content["domains"] = sorted(domains)
    context.store.write_sealed(f"{context.folder}/current.json", content)
    cross_stage.write_published_counts(context.store, output)


def _describe_rank(part: Part) -> dict[str, Any]:
    """Describe a rank's files: its shards, or its index and the filler that the index may name."""
    described = {name: [file.path, file.rows, file.digest] for name, file in part.files.items()}
    return {
        "folder": part.files["facts"].path.rsplit("/", 1)[0],
        "files": [one for name, one in described.items() if name == "index" or name.startswith("data/")],
        "sequences": part.get_counts(RankCounts).sequences,
        **({"filler": described["filler"]} if "filler" in described else {}),
    }


def _describe_evaluation_set(context: StageContext, name: str, packed: Manifest) -> dict[str, Any]:
    """Describe a dataset's shards by split, in the order of its plans, and its tags, for evaluation."""
    shards: dict[str, list[list[Any]]] = {}
    for part in packed.parts:
        shard = part.find_details(ShardDetails)
        if shard is not None:
            file = part.files["shard"]
            shards.setdefault(shard.split, []).append([file.path, file.rows, file.digest])
    dataset = context.recipe.datasets.get(name)
    tags = dataset.source.tags if dataset is not None else ()
    return {
        "tags": list(dict.fromkeys([*tags, name])),
        "template": packed.card.get("template_digest"),
        "shards": shards,
    }


def list_ranks(context: StageContext) -> tuple[str, ...]:
    """Return the ranks that the manifest will name: the wanted ones and those already built."""
    names = rank_names(context.recipe.partitions.world_size)
    wanted = set(context.ranks or names)
    return tuple(
        name
        for name in names
        if name in wanted or load_kept_part(context.store, context.folder, fingerprint_rank(context, name))
    )


def make_gpu_partitions(context: StageContext) -> StageOutput:
    """Write the wanted ranks that do not exist yet, and describe all."""
    present = list_ranks(context)
    kept = {name: load_kept_part(context.store, context.folder, fingerprint_rank(context, name)) for name in present}
    missing = [name for name, part in kept.items() if part is None]
    if missing:
        splits = context.inputs[(context.recipe.name, TRAINING_SPLITS)]
        order = inputs.load_order(context.store, splits)
        packed = inputs.open_ordered_shards(context)
        inputs.require_form_of_recipe(context, packed)
        sources = RankSources(context, packed, order)
        written = (write_rank_index(sources, name) for name in missing)
        if context.recipe.partitions.layout == "copied":
            written = write_copied_ranks(sources, missing)
        for name, part in zip(missing, written, strict=True):
            save_kept_part(context.store, context.folder, part)
            kept[name] = part
    ranks = [part for part in kept.values() if part is not None]
    # Ranks can be built one at a time; those of an older order must not be mixed with it.
    known = {name for one in manifest.list_outputs(context.store, context.key) for name in one.card.get("ranks", ())}
    world_size = context.recipe.partitions.world_size
    stale = len(known & set(rank_names(world_size)) - set(present))
    counts = add_up_counts(ranks, RankCounts(world_size=world_size, stale_ranks=stale))
    total = counts.get(RankCounts)
    each = [(name, part.get_counts(RankCounts)) for name, part in zip(present, ranks, strict=True)]
    rows = [(name, own.sequences, own.fillers, own.tokens, own.trained_tokens) for name, own in each]
    recipe, schema = context.recipe, RANK_INDEX_SCHEMA
    has_index = recipe.partitions.layout == "index"
    if not has_index:
        columns = inputs.list_segment_columns(recipe, get_row_kind(recipe))
        schema = native.extend_schema(native.SEQUENCE_SCHEMA, recipe.token_types, columns)
    return StageOutput(
        parts=ranks,
        counts=counts,
        # Shards store labels but not span kinds, so unlabeled tokens are context.
        token_ledger=[
            ("train", "trained", total.trained_tokens),
            ("train", "context", total.tokens - total.trained_tokens),
            ("train", "padding", total.padding),
        ],
        tables={
            "ranks": DisplayTable(("rank", "sequences", "fillers", "tokens", "trained_tokens"), tuple(rows[:30])),
            "datasets": _tabulate_datasets(list(context.recipe.datasets), total),
        },
        schema=tuple((f.name, str(f.type)) for f in schema),
        card={
            "order": context.inputs[(context.recipe.name, TRAINING_SPLITS)].card["order"],
            "ranks": list(present),
            # Equal indexes may name other tokens, which are another version.
            **({"content": [part.get_details(RankDetails).content_hash for part in ranks]} if has_index else {}),
        },
        parts_reused=len(present) - len(missing),
        rows_made=total.sequences,
    )


def _tabulate_datasets(names: Sequence[str], counts: RankCounts) -> DisplayTable:
    """Tabulate each dataset's contribution to the ranks, and its shares of them."""
    every = {
        "sequences": counts.sequences_by_dataset,
        "tokens": counts.tokens_by_dataset,
        "trained_tokens": counts.trained_tokens_by_dataset,
    }
    totals = [sum(by_dataset.values()) for by_dataset in every.values()]
    rows: list[tuple[Any, ...]] = []
    for name in names:
        own = [by_dataset.get(name, 0) for by_dataset in every.values()]
        shares = (compute_share(value, total) for value, total in zip(own, totals, strict=True))
        rows.append((name, *own, *shares))
    return DisplayTable(("dataset", *every, *(f"{measure}_share" for measure in every)), tuple(rows))


def _find_rank_damage(store: Store, output: Manifest) -> Iterator[str]:
    """Yield an error for each rank whose shards, or the sequences that its index names, are not what it must have."""
    shards = inputs.list_train_shards(load_packed_inputs(store, output)) if is_index(output) else []
    tables = [store.table(part.files["sequences"]) for part in shards]
    for part in output.parts:
        rank, expected = part.files["facts"].path.rsplit("/", 1)[0], part.get_details(RankDetails).content_hash
        if "index" not in part.files:
            data = [file for name, file in part.files.items() if name.startswith("data/")]
            yield from find_content_damage(store, rank, data, expected)
            continue
        hashes = join_hashes([*tables, tabulate_hashes(store.table(part.files["filler"]).combine_chunks())])
        first_rows = _number_rows([shard.files["shard"] for shard in shards])
        found = format_content_hash(hashes.sum_content(_locate_lines(store, part.files["index"], first_rows)))
        if found != expected:
            yield (
                f"{rank}: the sequences that its index names hash to {found}, expected {expected} by "
                "its manifest; remove the stage's folder and build again"
            )


STAGE = StageDeclaration(
    name=GPU_PARTITIONS,
    counts=RankCounts,
    description="One folder of shards, or one index of shards, per data-parallel rank, in training order.",
    scope="recipe",
    identity=identify_gpu_partitions,
    # One rank can be built without the others.
    prepare=lambda context: PreparedStage(list_ranks(context), lambda: make_gpu_partitions(context)),
    inputs=(TRAINING_SPLITS, PACKED_SHARDS),
    gates_on_every_dataset=True,
    publish=publish_gpu_partitions,
    list_shared_inputs=lambda made: (PACKED_SHARDS,) if is_index(made) else (),
    partitions=lambda recipe: rank_names(recipe.partitions.world_size),
    # No tables: ranks hold the same sequences as the shards, whose statistics are recorded already.
    stats_inputs=StatsInputs(count_rows_of(RankCounts, lambda counts: counts.sequences, "sequence")),
    summarize=lambda counts, rows: (format_count(counts.get(RankCounts).ranks, "rank"), rows),
    compared=(
        ComparedNumber("ranks", RankCounts, lambda counts: counts.ranks),
        ComparedNumber("sequences of all ranks", RankCounts, lambda counts: counts.sequences),
        ComparedNumber("tokens of all ranks", RankCounts, lambda counts: counts.tokens),
    ),
    find_content_damage=_find_rank_damage,
)
