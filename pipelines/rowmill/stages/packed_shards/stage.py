"""Examples → packed shards: groups of parts are packed independently, one task each.

    parts of examples ─► groups ─► per group: plan ─► shards, lineage
                                                 └► left_out: what is cut, dropped or surplus
    (validation by number ─► set aside by each group ─► packed together)

An example has its tokens in sequences, or a line in `left_out` that says how many are not and why.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from rowmill.core.arrays import format_percent, format_size
from rowmill.core.stage_names import PACKED_SHARDS, RAW_DATASET, TOKENIZED_EXAMPLES, TRUNCATION_STATS
from rowmill.parts.context import StageOutput, compute_share
from rowmill.schema.facts import UNCOUNTED, PackedShardsFacts, require_counted
from rowmill.schema.indexed_shards import drop_tokens, list_token_columns
from rowmill.schema.ledger import KEPT, REJECTED, sum_counts
from rowmill.schema.manifest import NOT_APPLICABLE, DisplayTable, Histogram, Part
from rowmill.shards import native
from rowmill.shards.native import find_content_damage
from rowmill.stages import inputs
from rowmill.stages.base import ComparedFact, PreparedStage, StageContext, StageDeclaration
from rowmill.stages.packed_shards.group_tasks import (
    build_shard_card,
    get_packing_rules,
    identify_packed_shards,
    plan_groups,
    plan_held_group,
)
from rowmill.stages.packed_shards.pack_group import FILL_BINS, pack_group
from rowmill.stages.packed_shards.split_plans import SPLITS, get_holdout_size, hold_out_validation
from rowmill.stats import StatsInputs, count_rows_by_fact


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
                Part(group.fingerprint, {"held": group.files["held"]}, _NO_SPLIT)
                for group in maps[0].parts
                if "held" in group.files
            ]
        place = context.place("moved", held_out.moved)
        side.append(Part(place.fingerprint, {"moved": place.write("moved", held_out.moved)}, _NO_SPLIT))
    groups = [group for made in maps for group in made.parts]
    # A part per shard, by split and in the order of groups, then what each group left out. A shard's facts say where
    # its sequences begin in their split, which depends on all earlier groups.
    parts: list[Part] = []
    for split in SPLITS:
        first = 0
        for group in groups:
            for number, facts in enumerate(group.facts["shards"]):
                if facts["split"] == split:
                    files = {name: group.files[f"{name}-{number:05d}"] for name in ("shard", "segments", "sequences")}
                    parts.append(Part(group.fingerprint, files, {**facts, "first_sequence": first}))
                    first += int(facts["sequences"])
    shards = list(parts)
    left = [one for one in groups if "left_out" in one.files]
    parts += [Part(one.fingerprint, {"left_out": one.files["left_out"]}, _NO_SPLIT) for one in left]
    planned, sequences, segments, trained = (
        sum(int(part.facts[name]) for part in shards) for name in ("tokens", "sequences", "segments", "trained_tokens")
    )
    total = sum(int(group.facts["tokens_read"]) for group in groups)
    states = sum((Counter(group.facts["left_out"]) for group in groups), Counter[str]())
    fates = {(state, reason): states[f"{state}/{reason}"] for state, reason in _FATES}
    kept = sum(int(group.facts["examples"]) for group in groups) - sum(fates.values())
    # What was held out and then not needed counts neither as lost nor as entered.
    entered, entered_trained = (sum(int(group.facts["entered"][i]) for group in groups) for i in (0, 1))
    rejected, lost = (sum(int(group.facts[name]) for group in groups) for name in ("rejected", "trained_lost"))
    losses = {"examples": (rejected, entered), "trained_tokens": (min(entered_trained, lost), entered_trained)}
    found = _add_group_hashes(groups, "found")
    shares = context.dataset.packing.share_prefixes
    shared = sum(int(group.facts["shared"]) for group in groups) if shares else 0
    padding = sum(int(part.facts["padding"]) for part in shards)
    is_padded = context.recipe.segment_multiple_of > 1
    fills = np.sum([group.facts["fill"] for group in groups], axis=0) if groups else np.zeros(FILL_BINS, np.int64)
    edges = accumulate([1] * FILL_BINS, initial=0)
    rows: list[tuple[Any, ...]] = []
    for split in SPLITS:
        examples = sum(int(group.facts["splits"][split]) for group in groups)
        sums = _sum_split(shards, split)
        if examples:
            rows.append((context.dataset_name, split, examples, sums["sequences"], sums["trained_tokens"]))
    lines: list[tuple[Any, ...]] = []
    for split in SPLITS:
        sums = _sum_split(shards, split)
        count, tokens = sums["sequences"], sums["tokens"]
        if count:
            each = round(sums["segments"] / count, 2)
            fill = compute_share(tokens, count * context.recipe.seq_len)
            lines.append((split, count, each, tokens, fill, compute_share(sums["trained_tokens"], tokens)))
    return StageOutput(
        parts=[*parts, *side],
        facts=PackedShardsFacts(
            conservation=int(found != _add_group_hashes(groups, "expected")),
            shard_digests=sum(int(group.facts["damaged"]) for group in groups),
            fill=compute_share(planned, sequences * context.recipe.seq_len) if sequences else 1,
            limit_cost=compute_share(sequences - sum(int(group.facts["unlimited"]) for group in groups), sequences),
            packing_loss=max(compute_share(*of) for of in losses.values()) if losses["examples"][1] else NOT_APPLICABLE,
            packing_losses=losses,
            pack_groups=len(groups),
            sequences=sequences,
            segments=segments,
            tokens=planned,
            trained_tokens=trained,
            tokens_left_out=total - planned - shared,
            content_hash=native.format_content_hash(found),
            padding=padding,
            padding_share=compute_share(padding, planned + padding) if is_padded else NOT_APPLICABLE,
            tokens_shared=shared if shares else UNCOUNTED,
            **sum_counts(group.facts["pairs"] for group in groups),
        ),
        ledger=[(KEPT, "", kept), *((*fate, count) for fate, count in fates.items() if count)],
        token_ledger=[
            *([("all", "dropped", total - planned - shared)] if total > planned + shared else []),
            *([("all", "shared", shared)] if shares else []),
            *([("all", "padding", padding)] if is_padded else []),
        ],
        tables={
            "splits": DisplayTable(("dataset", "split", "rows", "sequences", "trained_tokens"), tuple(rows)),
            "packing": DisplayTable(
                ("split", "sequences", "segments_each", "tokens", "fill", "trained_share"), tuple(lines)
            ),
        },
        histograms={
            "fill": Histogram(
                "fill",
                "share of seq_len",
                tuple(edge / FILL_BINS for edge in edges),
                tuple(int(count) for count in fills),
            )
        },
        schema=tuple((f.name, str(f.type)) for f in _make_schema(context)),
        card=build_shard_card(context),
        parts_reused=sum(made.reused for made in maps),
        rows_made=sum(made.rows_made for made in maps),
    )


_NO_SPLIT = {"split": ""}
"""The facts of parts that are not shards."""


def _make_schema(context: StageContext) -> pa.Schema:
    """Return the columns of the shards' files."""
    weighted, token_fields = context.recipe.has_loss_weights, context.recipe.rollout_fields.per_token
    columns = inputs.list_segment_columns(context.recipe, context.dataset.row_kind)
    schema = native.make_shard_schema(weighted=weighted, token_fields=token_fields, columns=columns)
    if context.dataset.packing.layout == "copied":
        return schema
    none = np.zeros(0, np.int64)
    names = list_token_columns(weighted=weighted, token_fields=token_fields)
    return drop_tokens(schema.empty_table(), none, none, names).schema


_FATES = ((REJECTED, "overlong"), (REJECTED, "no_loss_tokens"), ("tail", ""), ("validation_surplus", ""))
"""How an example can end at this stage without a token in any sequence: state and reason."""


def _add_group_hashes(groups: Sequence[Part], name: str) -> int:
    return sum(int(group.facts[name], 16) for group in groups) % native.HASH_MODULUS


def _sum_split(shards: Sequence[Part], split: str) -> dict[str, int]:
    names = ("sequences", "segments", "tokens", "trained_tokens")
    return {name: sum(int(part.facts[name]) for part in shards if part.facts["split"] == split) for name in names}


SHARED_TOKEN_BYTES = 12
"""What a token would take if it stood once more: its id, label and position, before compression."""


def _summarize_packed_shards(facts: PackedShardsFacts, rows: str) -> Sequence[str]:
    shared = require_counted(facts.tokens_shared) if facts.tokens_shared else 0
    saved = f"sharing saves {shared:,} tokens, {format_size(SHARED_TOKEN_BYTES * shared)}" if shared else ""
    return rows, f"{format_percent(facts.fill)} full", saved


STAGE = StageDeclaration(
    name=PACKED_SHARDS,
    facts=PackedShardsFacts,
    description="Examples packed into sequences of at most seq_len tokens, as Parquet.",
    identity=identify_packed_shards,
    prepare=lambda context: PreparedStage((), lambda: make_packed_shards(context)),
    inputs=(TOKENIZED_EXAMPLES, RAW_DATASET),
    # Shards are not packed past a failed check of the statistics.
    gates=(TRUNCATION_STATS,),
    divides_into_shares=True,
    uses_all_cores=True,
    stats_inputs=StatsInputs(
        count_rows_by_fact("sequences", "sequence"),
        files={"shard": "sequences", "segments": "segments", "left_out": "left_out"},
    ),
    summarize=_summarize_packed_shards,
    compared=(ComparedFact("sequences", "sequences"), ComparedFact("fill", "fill", is_share=True)),
    find_content_damage=lambda store, output: find_content_damage(
        store, "/".join(output.key), output.files("shard"), str(output.facts["content_hash"])
    ),
    list_shared_inputs=lambda made: (TOKENIZED_EXAMPLES,) if "example_files" in dict(made.schema) else (),
)
