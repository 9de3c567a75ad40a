"""How long examples of records are, and what another length would come to: planned anew, not estimated.

What belongs here: facts, histograms, the what-if table and advice of `truncation_stats` for tables. What does not:
those of all other kinds, which truncation shortens (`truncation_stats/stage.py`), plans (`table_plan.py`).

An example of records is whole or it is not made, and at another length other records would share it. So nothing here is
about truncation: records are counted that no example can hold, and a what-if plans all records at each length.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill import stats
from rowmill.packing.plan import plan_slices, whole
from rowmill.recipe.recipe import Recipe
from rowmill.schema import manifest
from rowmill.schema.ledger import REJECTED, add_up
from rowmill.schema.manifest import NOT_APPLICABLE, Manifest, Table
from rowmill.stages import table_inputs, table_plan
from rowmill.stages.base import Draft, Work, share
from rowmill.stages.table_inputs import form_of, index_of_files, known_of
from rowmill.stages.table_plan import Asked, Replanned
from rowmill.tabular.assembly import Ints, Room

VERSION = 1
"""Raise it when other facts are counted of records."""

OVERFLOWS = ("record_overflow", "group_overflow")
"""Reasons of records that no example can hold."""
OF_TRUNCATION = ("shortened", "tokens_removed", "trained_removed")
"""Facts about examples that lost tokens."""
MUCH_PROMPT = 0.25
"""Share of all tokens from which on the prompt is worth a word."""


def identity_of(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the options that decide what is counted of records beside those of all kinds."""
    format_options = recipe.datasets[name].format.model_dump(mode="json", exclude={"generation"})
    return {"records": VERSION, "format": format_options, "seed": recipe.seed, "seq_len": recipe.seq_len}


def make(work: Work) -> Draft:
    """Measure the examples, and plan the records at other lengths."""
    made = work.input("tokenized_examples")
    limit = work.recipe.limit_of(work.dataset_name or "")
    columns = {part.files["examples"]: str(part.facts["split"]) for part in made.parts if "examples" in part.files}
    own = [work.store.table(file, ["tokens"]).column(0).to_numpy().astype(np.int64) for file in columns]
    lengths = np.concatenate([np.empty(0, np.int64), *own])
    records = sum(count for _, _, count in made.ledger)
    over = sum(count for state, reason, count in made.ledger if state == REJECTED and reason in OVERFLOWS)
    by_split: dict[str, list[Ints]] = {}
    for split, tokens in zip(columns.values(), own, strict=True):
        by_split.setdefault(split, []).append(tokens)
    drawn = {
        split: stats.length_histogram(np.concatenate(tokens), limit, title="example length")
        for split, tokens in sorted(by_split.items())
    }
    quantiles = stats.length_quantiles(lengths)
    hints = _advice(made, records, over, quantiles["p50"], limit)
    return Draft(
        facts={
            "context_overflow": share(over, records),
            "limit": limit,
            "examples": len(lengths),
            "records": records,
            "dropped_for_length": over,
            **dict.fromkeys(OF_TRUNCATION, NOT_APPLICABLE),
            "quantiles": quantiles,
            "buckets": stats.length_buckets(lengths, limit),
            "hints": list(hints),
        },
        tables={
            "what_if": _what_if(work, made, limit),
            "lengths": stats.lengths_table(drawn),
            "quantiles": Table(("quantile", "tokens"), tuple(quantiles.items())),
            "advice": Table(("hint",), tuple((hint,) for hint in hints)),
        },
        histograms={"lengths": stats.length_histogram(lengths, limit, title="example length")},
        samples={"context_overflow": _first_over(work, made)},
    )


def _first_over(work: Work, made: Manifest, limit: int = 10) -> tuple[str, ...]:
    """Return the first records that no example can hold; read from as few parts as it takes."""
    found: list[str] = []
    for part in made.parts:
        if len(found) < limit and any(part.facts.get("reasons", {}).get(reason) for reason in OVERFLOWS):
            table = work.store.table(part.files["rejects"], ["row_id", "reason"])
            is_over = pc.is_in(table.column("reason"), pa.array(OVERFLOWS))
            found += table.filter(is_over).column("row_id").to_pylist()
    return tuple(found[:limit])


# ── Other lengths ──────────────────────────────────────────────────────────────────────────────────


def _what_if(work: Work, made: Manifest, limit: int) -> Table:
    """Say what each length would come to: examples, records in none of them, and packed sequences."""
    key = (*work.dataset_key, "canonical_rows")
    rows = manifest.by_version(work.store, key, made.inputs["/".join(key)])
    index = index_of_files(work, rows.files("rows"), known_of(made.details))
    lengths = table_inputs.lengths_of(work.store, made.files("tokens"))
    form = form_of(work)
    asked = Asked(
        work.dataset_name or "", work.recipe.seed, form, Room(limit, int(made.facts["prompt_tokens"]), form.cap)
    )
    lines: list[tuple[int, ...]] = []
    for candidate in stats.candidate_seq_lens(limit):
        one = table_plan.replan(asked, index, lengths, candidate)
        examples = sum(len(split) for split in one.lengths)
        lines.append((candidate, examples, one.records_over, one.tokens_over, _sequences(work, one)))
    return Table(("seq_len", "examples", "examples_over", "trained_lost", "sequences"), tuple(lines))


def _sequences(work: Work, planned: Replanned) -> int:
    """Pack examples of another length as a build would; only a length of its own leaves `seq_len` as it is."""
    options = work.dataset.packing
    has_own_limit = form_of(work).assembly.max_seq_length is not None
    seq_len = max(planned.limit, work.recipe.seq_len) if has_own_limit else planned.limit
    plans = (
        plan_slices(
            whole(lengths),
            limit=seq_len,
            strategy=options.strategy_for(work.dataset.row_kind),
            max_segments=options.segment_limit,
            tail=options.tail,
        )
        for lengths in planned.lengths
        if len(lengths)
    )
    return sum(plan.sequences for plan in plans)


# ── Advice ─────────────────────────────────────────────────────────────────────────────────────────


def _advice(made: Manifest, records: int, over: int, median: int, limit: int) -> tuple[str, ...]:
    """Say what would make better examples of this table."""
    flushes = add_up(part.facts["flushes"] for part in made.parts if "flushes" in part.facts)
    examples, tokens = int(made.facts["examples"]), int(made.facts["tokens"])
    cap, prompt = made.details["records"]["options"]["cap"], int(made.facts["prompt_tokens"]) * examples
    hints: list[str] = []
    if over:
        hints.append(
            f"{over:,} of {records:,} records are in no example: they, or their groups, need more than {limit:,} "
            "tokens; raise seq_len or format.assembly.max_seq_length, or choose a finer group column"
        )
    if cap is not None and flushes.get("max_records", 0) > examples / 2 > 0 and 2 * median < limit:
        hints.append(
            f"most examples end at max_sequences_per_example {cap} and fill less than half of {limit:,} tokens; raise "
            "it, or lower seq_len or format.assembly.max_seq_length"
        )
    if tokens and prompt > MUCH_PROMPT * tokens:
        hints.append(
            f"the prompt is {prompt / tokens:.0%} of all tokens; raise max_sequences_per_example, or set "
            "format.prompt.style: names"
        )
    return tuple(hints)
