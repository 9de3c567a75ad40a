"""The order and the shards → one folder of shards per data-parallel rank.

What belongs here: moving sequences to ranks, conservation, the file that trainers open. What does not:
which place belongs to which rank (`rank_assignment.py`).

    rank-00003-of-00008/
    ├── data/part-00000.parquet …   that rank's sequences, in training order
    └── facts.parquet               per step: sequences, fillers, tokens, trained tokens, longest segment

Trainers open `current.json`. It is written once all ranks of one order are built.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.checks import cross_stage
from rowmill.checks.judge import CheckResult
from rowmill.core.arrays import Ints, compute_offsets
from rowmill.core.number_text import format_count
from rowmill.core.stage_names import GPU_PARTITIONS, PACKED_SHARDS, TRAINING_SPLITS
from rowmill.core.storage import Store, digest_bytes, digest_json
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.examples import WEIGHT_COLUMN
from rowmill.schema.facts import TrainingSplitsFacts, read_facts
from rowmill.schema.manifest import DisplayTable, File, Manifest, Part
from rowmill.schema.rows import SEGMENT_COLUMNS
from rowmill.shards import gather, native
from rowmill.shards.native import find_content_damage
from rowmill.shards.shard_copies import NumberedShard, ShardCopies
from rowmill.stages import inputs, part_files
from rowmill.stages.base import (
    ComparedFact,
    PreparedStage,
    StageContext,
    StageDeclaration,
    StageOutput,
    compute_share,
    open_host_scratch,
)
from rowmill.stages.kept_parts import load_kept_part, part_folder, save_kept_part
from rowmill.stats import StatsInputs, count_rows_by_fact

VERSION = 4
"""Increase it when the bytes of any rank, or facts, may change."""

SHARD_TOKENS = 2 << 20


def rank_name(rank: int, world_size: int) -> str:
    """Return the folder name of a rank: `rank-00003-of-00008`; it includes the world size."""
    return f"rank-{rank:05d}-of-{world_size:05d}"


def rank_names(world_size: int) -> tuple[str, ...]:
    """Return the folder names of all ranks."""
    return tuple(rank_name(rank, world_size) for rank in range(world_size))


@dataclass(frozen=True, slots=True)
class GpuPartitionsFacts:
    """Facts of the stage's output."""

    conservation: int
    stale_rank: int
    ranks: int
    world_size: int
    sequences: int
    fillers: int
    tokens: int
    trained_tokens: int
    trained_spread: float


def identify_gpu_partitions(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide ranks (`ranks`), and the tags for evaluation."""
    return {
        "ranks": {
            "versions": [VERSION],
            "world_size": recipe.partitions.world_size,
            "seq_len": recipe.seq_len,
            "weighted": recipe.has_loss_weights,
        },
        "tags": {name: list(dataset.source.tags) for name, dataset in recipe.datasets.items()},
    }


def prepare_gpu_partitions(work: StageContext) -> PreparedStage:
    """Determine the ranks of the output: one can be built without the others."""
    return PreparedStage(list_ranks(work), lambda: make_gpu_partitions(work))


def list_ranks(work: StageContext) -> tuple[str, ...]:
    """Return the ranks that the manifest will name: the wanted ones and those already built."""
    names = rank_names(work.recipe.partitions.world_size)
    wanted = set(work.ranks or names)
    return tuple(
        name
        for name in names
        if name in wanted or load_kept_part(work.store, work.folder, _fingerprint_rank(work, name))
    )


def count_stale_ranks(work: StageContext, present: Sequence[str]) -> int:
    """Count partitions kept for an older order or other shards.

    Ranks can be built one at a time; the others are then still from an older order, and must not be mixed with it.
    """
    known = {name for one in manifest.list_versions(work.store, work.key) for name in one.card.get("ranks", ())}
    return len(known & set(rank_names(work.recipe.partitions.world_size)) - set(present))


def _fingerprint_rank(work: StageContext, name: str) -> str:
    """Return the fingerprint of a rank: the order, its sequences, the world size."""
    splits = work.inputs[(work.recipe.name, TRAINING_SPLITS)]
    # The order names sequences by number only, so the shards' content must be included.
    packed = [one.version for one in inputs.get_packed_shards(work).values()]
    return digest_json(GPU_PARTITIONS, identify_gpu_partitions(work.recipe, "")["ranks"], splits.version, packed, name)


def make_gpu_partitions(work: StageContext) -> StageOutput:
    """Write the wanted ranks that do not exist yet, and describe all."""
    present = list_ranks(work)
    kept = {name: load_kept_part(work.store, work.folder, _fingerprint_rank(work, name)) for name in present}
    missing = [name for name, part in kept.items() if part is None]
    if missing:
        for name, part in zip(missing, _write_ranks(work, missing), strict=True):
            save_kept_part(work.store, work.folder, part)
            kept[name] = part
    ranks = [part for part in kept.values() if part is not None]
    return _build_ranks_output(work, list(present), ranks, reused=len(present) - len(missing))


# ── Sequences to ranks ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class _RankSource:
    """What all ranks are made of: row r is in the shard f with `first_rows[f] <= r < first_rows[f + 1]`.

    The last row is the filler, which is in no shard.
    """

    copies: ShardCopies
    first_rows: Ints
    filler: pa.Table


def hash_shard(shard: NumberedShard, source: _RankSource) -> bytes:
    """Return the content hashes of a shard's sequences, 16 bytes each; leave a copy for the ranks of this host."""
    return _hash_sequences(source.copies.read(shard))


def _hash_sequences(segments: native.Segments) -> bytes:
    return b"".join(value.to_bytes(16, "little") for value in native.hash_sequences(segments))


@dataclass(frozen=True, slots=True)
class _RankTask:
    root: str
    at: str
    fingerprint: str
    wanted: Ints
    per_shard: int
    card: dict[str, str]
    facts: pa.Table


def write_rank(task: _RankTask, source: _RankSource) -> tuple[Part, int]:
    """Write one rank's shards; return the part and the content hash of the files read back."""
    store = Store(task.root)
    sources = _require_rank_sources(task, source)
    files: dict[str, File] = {}
    found = 0
    counted: dict[str, list[int]] = {}
    for number, begin in enumerate(range(0, len(task.wanted), task.per_shard)):
        table = _restore_shard_types(
            gather.take_rows(sources, source.first_rows, task.wanted[begin : begin + task.per_shard])
        )
        sink = BytesIO()
        native.write_native_shard(table, sink, task.card)
        content = sink.getvalue()
        name = f"data/part-{number:05d}.parquet"
        store.write(f"{task.at}/{name}", content)
        files[name] = File(f"{task.at}/{name}", len(content), digest_bytes(content), table.num_rows)
        back = store.table(files[name]).combine_chunks()
        found += sum(native.hash_sequences(native.recover_segments(back)))
        _count_rank_tokens(back, counted)
    files["facts"] = part_files.write_parquet(store, f"{task.at}/facts.parquet", task.facts)
    fillers = counted.pop(_FILLERS, [0])[0]
    facts = {
        "sequences": len(task.wanted),
        "fillers": fillers,
        "tokens": sum(tokens for _, tokens, _ in counted.values()),
        "trained_tokens": sum(trained for _, _, trained in counted.values()),
        "datasets": dict(sorted(counted.items())),
    }
    return Part(task.fingerprint, files, facts), found % native.HASH_MODULUS


def _require_rank_sources(task: _RankTask, source: _RankSource) -> list[str]:
    """Return this host's copies of all shards, of which those that the rank needs are there, and of the filler."""
    scratch, fillers = source.copies.scratch, len(source.first_rows) - 2
    needed = np.unique(np.searchsorted(source.first_rows, task.wanted, "right") - 1)
    source.copies.require(needed[needed < fillers].tolist())
    scratch.require({"filler.arrow": partial(native.write_shard_scratch, source.filler)})
    return [*source.copies.files, scratch.locate("filler.arrow")]


_FILLERS = ""
"""The dataset name of fillers; no dataset has an empty name."""


def _count_rank_tokens(shard: pa.Table, counted: dict[str, list[int]]) -> None:
    """Add a shard's sequences, tokens and trained tokens to each dataset's counts; fillers are counted separately."""
    plain = shard.select(["tokens", "trained_tokens"]).append_column(
        "dataset", shard.column("dataset").cast(pa.string())
    )
    sums = plain.group_by("dataset").aggregate([("tokens", "count"), ("tokens", "sum"), ("trained_tokens", "sum")])
    names = ("dataset", "tokens_count", "tokens_sum", "trained_tokens_sum")
    for name, *values in zip(*(sums.column(one).to_pylist() for one in names), strict=True):
        before = counted.get(name, [0, 0, 0])
        counted[name] = [a + int(b) for a, b in zip(before, values, strict=True)]


def _restore_shard_types(table: pa.Table) -> pa.Table:
    column = table.column("dataset").combine_chunks().dictionary_encode()
    typed = table.set_column(table.schema.get_field_index("dataset"), native.SEQUENCE_SCHEMA.field("dataset"), column)
    weighted = WEIGHT_COLUMN in table.column_names
    own = typed.schema.names[len(native.make_sequence_schema(weighted=weighted)) :]
    columns = [pa.field(name, typed.schema.field(name).type.value_type) for name in own]
    return typed.cast(native.make_sequence_schema(weighted=weighted, columns=columns))


def _write_ranks(work: StageContext, names: Sequence[str]) -> list[Part]:
    packed = inputs.get_packed_shards(work)
    parts = [part for one in packed.values() for part in one.parts if part.facts["split"] == "train"]
    shards = tuple(NumberedShard(part.files["shard"], int(part.facts["first_sequence"])) for part in parts)
    first_rows = compute_offsets([*(shard.file.rows for shard in shards), 1])
    wanted = _locate_ordered_rows(work, packed)
    ranks = [_make_rank_task(work, name, wanted) for name in names]
    size = 4 * sum(shard.file.bytes for shard in shards)
    with open_host_scratch(work) as scratch:
        copies = ShardCopies(work.store.root, shards, scratch)
        source = _RankSource(copies, first_rows, _make_filler(work))
        hashes = b"".join(work.pool.map(hash_shard, shards, size_bytes=size, shared=source))
        made = list(work.pool.map(write_rank, ranks, size_bytes=size, shared=source))
    hashes += _hash_sequences(native.recover_segments(source.filler.combine_chunks()))
    values = [int.from_bytes(hashes[16 * i : 16 * i + 16], "little") for i in range(len(hashes) // 16)]
    done: list[Part] = []
    for task, (part, found) in zip(ranks, made, strict=True):
        expected = sum(values[i] for i in task.wanted.tolist()) % native.HASH_MODULUS
        facts = part.facts | {"conserved": found == expected, "content_hash": f"{found:032x}"}
        done.append(Part(part.fingerprint, part.files, facts))
    return done


def _make_filler(work: StageContext) -> pa.Table:
    card = next(iter(inputs.get_packed_shards(work).values())).card
    pad = next((card[name] for name in ("pad_id", "eos_id") if card.get(name) is not None), 0)
    return native.make_fillers(
        1,
        pad_id=int(pad),
        dataset="",
        weighted=work.recipe.has_loss_weights,
        columns=_list_segment_columns(work),
    )


def _list_segment_columns(work: StageContext) -> Sequence[pa.Field]:
    """Return the columns of segments that only one kind of rows has; all datasets of such a recipe are of that kind."""
    return SEGMENT_COLUMNS.get(next(iter(work.recipe.datasets.values())).row_kind, ())


def _make_rank_schema(work: StageContext) -> pa.Schema:
    columns = _list_segment_columns(work)
    return native.make_sequence_schema(weighted=work.recipe.has_loss_weights, columns=columns)


def _locate_ordered_rows(work: StageContext, packed: dict[str, Manifest]) -> Ints:
    """Return for each place of the order the row of its sequence over all shards; fillers are the last row."""
    splits = work.inputs[(work.recipe.name, TRAINING_SPLITS)]
    order = inputs.load_order(work.store, splits, ("dataset", "sequence_id", "filler"))
    rows = [sum(p.files["shard"].rows for p in one.parts if p.facts["split"] == "train") for one in packed.values()]
    firsts = compute_offsets(rows)
    filler = order.column("filler").to_numpy(zero_copy_only=False)
    datasets = np.where(filler, 0, order.column("dataset").to_numpy())
    return np.where(filler, firsts[-1], firsts[datasets] + order.column("sequence_id").to_numpy())


def _make_rank_task(work: StageContext, name: str, wanted: Ints) -> _RankTask:
    world = work.recipe.partitions.world_size
    rank = int(name.split("-")[1])
    fingerprint = _fingerprint_rank(work, name)
    splits = work.inputs[(work.recipe.name, TRAINING_SPLITS)]
    steps = inputs.load_rank_steps(work.store, splits)
    shard_card = next(iter(inputs.get_packed_shards(work).values())).card
    own = {"recipe": work.recipe.name, "order": str(splits.card["order"]), "rank": str(rank), "world_size": str(world)}
    return _RankTask(
        root=work.store.root,
        at=f"{part_folder(work.folder, fingerprint)}/{name}",
        fingerprint=fingerprint,
        wanted=wanted[rank::world],
        per_shard=max(1, SHARD_TOKENS // work.recipe.seq_len),
        card={k: str(v) for k, v in shard_card.items() if k != "dataset"} | own,
        facts=steps.filter(pc.equal(steps.column("rank"), rank)),
    )


# ── The manifest, and publishing for trainers ──────────────────────────────────────────────────────


def _build_ranks_output(work: StageContext, names: list[str], ranks: list[Part], *, reused: int) -> StageOutput:
    trained = [int(part.facts["trained_tokens"]) for part in ranks]
    rows = [
        (name, *(int(p.facts[f]) for f in ("sequences", "fillers", "tokens", "trained_tokens")))
        for name, p in zip(names, ranks, strict=True)
    ]
    return StageOutput(
        parts=ranks,
        facts=GpuPartitionsFacts(
            conservation=sum(not part.facts["conserved"] for part in ranks),
            stale_rank=count_stale_ranks(work, names),
            ranks=len(ranks),
            world_size=work.recipe.partitions.world_size,
            sequences=sum(int(p.facts["sequences"]) for p in ranks),
            fillers=sum(int(p.facts["fillers"]) for p in ranks),
            tokens=sum(int(p.facts["tokens"]) for p in ranks),
            trained_tokens=sum(trained),
            trained_spread=compute_share(max(trained) - min(trained), max(trained)) if trained else 0.0,
        ),
        token_ledger=_account_rank_tokens(ranks),
        tables={
            "ranks": DisplayTable(("rank", "sequences", "fillers", "tokens", "trained_tokens"), tuple(rows[:30])),
            "datasets": _tabulate_datasets(work, ranks),
        },
        schema=tuple((f.name, str(f.type)) for f in _make_rank_schema(work)),
        card={"order": work.inputs[(work.recipe.name, TRAINING_SPLITS)].card["order"], "ranks": names},
        parts_reused=reused,
        rows_made=sum(int(p.facts["sequences"]) for p in ranks),
    )


def _account_rank_tokens(ranks: Sequence[Part]) -> list[tuple[str, str, int]]:
    """Classify every token of the ranks; shards store labels but not span kinds, so unlabeled tokens are context."""
    tokens, trained = (sum(int(part.facts[name]) for part in ranks) for name in ("tokens", "trained_tokens"))
    padding = native.FILLER_TOKENS * sum(int(part.facts["fillers"]) for part in ranks)
    return [
        ("train", "trained", trained),
        ("train", "context", tokens - trained),
        ("train", "padding", padding),
    ]


def _tabulate_datasets(work: StageContext, ranks: Sequence[Part]) -> DisplayTable:
    """Tabulate each dataset's contribution to the ranks: sequences, tokens, trained tokens, and shares."""
    sums = {
        name: [sum(int(part.facts["datasets"].get(name, (0, 0, 0))[i]) for part in ranks) for i in range(3)]
        for name in work.recipe.datasets
    }
    totals = [sum(values[i] for values in sums.values()) for i in range(3)]
    measures = ("sequences", "tokens", "trained_tokens")
    rows = [
        (name, *values, *(compute_share(value, total) for value, total in zip(values, totals, strict=True)))
        for name, values in sums.items()
    ]
    return DisplayTable(("dataset", *measures, *(f"{measure}_share" for measure in measures)), tuple(rows))


def publish_gpu_partitions(
    work: StageContext, made: Manifest, results: Sequence[CheckResult], loosened: Sequence[str]
) -> None:
    """Write `current.json` for trainers, once every rank of this order is built and its tokens are conserved.

    `results` are the check results of the output, `loosened` the bounds of the recipe that are wider than the defaults:
    readers of the ranks can see under which thresholds they were built.

    Its content comes from the output, not from the recipe, since a kept version may be from an older recipe.
    """
    facts = read_facts(GpuPartitionsFacts, made.facts)
    if facts.conservation or facts.ranks != facts.world_size:
        return
    splits = work.inputs[(work.recipe.name, TRAINING_SPLITS)]
    ranks = {
        name: {
            "folder": part.files["facts"].path.rsplit("/", 1)[0],
            "files": [[f.path, f.rows, f.digest] for n, f in part.files.items() if n.startswith("data/")],
            "sequences": part.facts["sequences"],
        }
        for name, part in zip(rank_names(facts.world_size), made.parts, strict=True)
    }
    order = read_facts(TrainingSplitsFacts, splits.facts)
    packed = {name: work.inputs[(work.recipe.name, name, PACKED_SHARDS)] for name in splits.card["datasets"]}
    first = next(iter(packed.values()))
    content = {
        "version": made.version,
        "recipe": work.recipe.name,
        "order": splits.card["order"],
        "order_file": splits.parts[0].files["order"].path,
        # An order of more than a million places has several files, of which the one above is the first.
        "order_files": [file.path for file in splits.files("order")],
        "datasets": splits.card["datasets"],
        "world_size": facts.world_size,
        "seq_len": int(first.card["seq_len"]),
        "places": order.places,
        "steps": order.steps,
        # Orders kept from a VERSION before 3 do not record it.
        "has_steps": splits.card["has_steps"] if "has_steps" in splits.card else bool(work.recipe.mixture.batch_sizes),
        "sets": {name: _describe_evaluation_set(work, name, one) for name, one in packed.items()},
        "inputs": made.inputs,
        "waivers": list(made.waivers),
        "loosened": list(loosened),
        "checks": [
            {
                "name": one.check,
                "value": one.value,
                "wanted": one.wanted,
                "severity": one.severity,
                "outcome": one.outcome,
                "waiver": one.waiver,
                "threshold_digest": one.threshold_digest,
            }
            for one in results
        ],
        "card": {k: v for k, v in first.card.items() if k != "dataset"},
        "ranks": ranks,
    }
    work.store.write_sealed(f"{work.folder}/current.json", content)
    cross_stage.write_published_counts(work.store, made)


def _describe_evaluation_set(work: StageContext, name: str, packed: Manifest) -> dict[str, Any]:
    """Describe a dataset's shards by split, in the order of its plans, and its tags, for evaluation."""
    shards: dict[str, list[list[Any]]] = {}
    for part in packed.parts:
        if "shard" in part.files:
            file = part.files["shard"]
            shards.setdefault(part.facts["split"], []).append([file.path, file.rows, file.digest])
    dataset = work.recipe.datasets.get(name)
    tags = dataset.source.tags if dataset is not None else ()
    return {"tags": list(dict.fromkeys([*tags, name])), "shards": shards}


def _find_rank_damage(store: Store, made: Manifest) -> Iterator[str]:
    for part in made.parts:
        data = [file for name, file in part.files.items() if name.startswith("data/")]
        rank = part.files["facts"].path.rsplit("/", 1)[0]
        yield from find_content_damage(store, rank, data, str(part.facts["content_hash"]))


STAGE = StageDeclaration(
    name=GPU_PARTITIONS,
    facts=GpuPartitionsFacts,
    description="One folder of shards per data-parallel rank, in training order.",
    scope="recipe",
    identity=identify_gpu_partitions,
    prepare=prepare_gpu_partitions,
    inputs=(TRAINING_SPLITS, PACKED_SHARDS),
    gates_on_every_dataset=True,
    publish=publish_gpu_partitions,
    partitions=lambda recipe: rank_names(recipe.partitions.world_size),
    # No tables: ranks hold the same sequences as the shards, whose statistics are recorded already.
    stats_inputs=StatsInputs(count_rows_by_fact("sequences", "sequence")),
    summarize=lambda facts, rows: (format_count(facts.ranks, "rank"), rows),
    compared=(
        ComparedFact("ranks", "ranks"),
        ComparedFact("sequences of all ranks", "sequences"),
        ComparedFact("tokens of all ranks", "tokens"),
    ),
    find_content_damage=_find_rank_damage,
)
