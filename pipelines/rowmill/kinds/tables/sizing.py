"""Estimated sizes of examples of records, and advice on group columns, from counts alone.

tabular      prompt + record · cap
grouped      prompt + group · cap        each group must fit with the prompt, one BOS and one EOS
sequential   prompt + one group          at most the limit: a series continues in the next example
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from rowmill.core.arrays import Ints, find_distinct
from rowmill.core.stage_names import CANONICAL_ROWS
from rowmill.kinds.joint_rows import DatasetAdvice, ExampleEstimate, GroupAdvice, KindContext
from rowmill.kinds.tables.schema import Mode
from rowmill.kinds.tables.table_examples import measure_table
from rowmill.schema.manifest import Histogram
from rowmill.tokenization.tokenizer_card import LoadedTokenizer

CHARACTERS_PER_TOKEN = 4
"""Assumed without a tokenizer; records of many numbers have two to three, so such estimates are marked approximate."""
DELIMITERS_PER_UNIT = 2
DOMINANT_SHARE = 0.5
UNBOUNDED_P95 = 200
SKEWED_TIMES = 20
FEW_EXAMPLES = 10


def estimate_example(
    mode: Mode,
    *,
    limit: int,
    prompt: int,
    cap: int | None,
    record_tokens: float,
    records_per_group: float = 1,
    is_approximate: bool = False,
) -> ExampleEstimate:
    """Estimate an example from the average tokens per record and records per group; `cap` None means no cap."""
    unit = round(record_tokens if mode == "tabular" else record_tokens * records_per_group)
    largest = limit - prompt - DELIMITERS_PER_UNIT
    if mode == "grouped":
        most = max((limit - prompt) // (unit + DELIMITERS_PER_UNIT), 0)
    else:
        most = max(largest // max(round(record_tokens), 1), 0)
    wanted = most if cap is None else cap
    if mode == "sequential":
        tokens, fits = min(prompt + unit, limit), round(record_tokens) <= largest
        return ExampleEstimate(
            unit, tokens, fits, min(most, wanted), largest, () if fits else ("overflow",), is_approximate
        )
    tokens = prompt + unit * wanted
    advice: list[str] = []
    if unit > largest:
        advice.append("overflow")
    elif tokens > limit:
        advice.append(f"cap_unreachable (flush at {most})")
    return ExampleEstimate(unit, tokens, tokens <= limit, min(most, wanted), largest, tuple(advice), is_approximate)


# ── Groups ─────────────────────────────────────────────────────────────────────────────────────────


def advise_group_column(
    column: str,
    sizes: Ints,
    tokens: Ints,
    *,
    record_budget: int,
    mode: Mode = "grouped",
    cap: int | None = 10,
    is_ordered: bool = True,
    is_approximate: bool = False,
) -> GroupAdvice:
    """Assess a column by the sizes of its groups: `sizes[g]` records and `tokens[g]` tokens each.

    `record_budget` are the tokens that an example has for records.
    """
    total = int(sizes.sum())
    facts = describe_sizes(sizes)
    unsuitable: dict[str, str] = {}
    warnings: dict[str, str] = {}
    largest = int(np.argmax(sizes)) if len(sizes) else 0
    most = int(sizes[largest]) if len(sizes) else 0
    about = "about " if is_approximate else ""
    if mode != "sequential" and len(sizes) and int(tokens.max()) > record_budget:
        over = int((tokens > record_budget).sum())
        unsuitable["overflow"] = (
            f"{over} of {len(sizes)} groups have more than {record_budget} tokens, the largest "
            f"{about}{int(tokens.max())}"
        )
    if mode != "sequential" and len(sizes) > 1 and most > DOMINANT_SHARE * total:
        unsuitable["dominant"] = f"one group has {most} of {total} records; none should have more than half"
    if mode != "sequential" and facts["p95"] > UNBOUNDED_P95:
        unsuitable["unbounded"] = (
            f"one group in twenty has more than {facts['p95']:g} records; up to {UNBOUNDED_P95} are good"
        )
    if most > SKEWED_TIMES * max(facts["p50"], 1):
        warnings["skewed"] = f"the largest group has {most} records, the median one {facts['p50']:g}"
    if not is_ordered:
        warnings["no_order"] = "no order column: records of a group keep the order of the source"
    examples = estimate_example_count(sizes, tokens, record_budget=record_budget, cap=cap, mode=mode)
    if examples < FEW_EXAMPLES:
        warnings["few_examples"] = f"about {examples} examples; lower the cap to 3-5"
    return GroupAdvice(
        column,
        facts,
        f"Largest group: {most} records, {about}{int(tokens[largest]) if len(sizes) else 0} tokens",
        unsuitable,
        warnings,
    )


def estimate_example_count(sizes: Ints, tokens: Ints, *, record_budget: int, cap: int | None, mode: Mode) -> int:
    """Estimate how many examples the groups make, given the cap and the token budget."""
    by_tokens = -(-int(tokens.sum()) // max(record_budget, 1))
    if mode == "sequential":
        by_cap = 0 if cap is None else int((-(-sizes // cap)).sum())
        return max(by_tokens, by_cap, len(sizes))
    return max(by_tokens, 0 if cap is None else -(-len(sizes) // cap))


def describe_sizes(values: Ints) -> dict[str, float]:
    """Return count, mean, standard deviation, minimum, quartiles, p95 and maximum."""
    if not len(values):
        return dict.fromkeys(("count", "mean", "std", "min", "p25", "p50", "p75", "p95", "max"), 0.0)
    p25, p50, p75, p95 = (float(np.percentile(values, p)) for p in (25, 50, 75, 95))
    return {
        "count": len(values), "mean": round(float(values.mean()), 6), "std": round(float(values.std()), 6),
        "min": int(values.min()), "p25": p25, "p50": p50, "p75": p75, "p95": p95, "max": int(values.max()),
    }  # fmt: skip


def size_histogram(sizes: Ints, limit: float | None) -> Histogram:
    """Histogram of records per group, in geometric bins; `limit` is the most records that fit into an example."""
    top = max(int(sizes.max(initial=1)) + 1, 2)
    edges = find_distinct(np.geomspace(1, top, 24).round().astype(np.int64))
    counts, _ = np.histogram(sizes, bins=edges)
    return Histogram(
        "records per group", "records", tuple(float(edge) for edge in edges), tuple(int(count) for count in counts),
        None if limit is None else round(float(limit), 1),
    )  # fmt: skip


# ── The columns of a dataset ───────────────────────────────────────────────────────────────────────


def advise_dataset(context: KindContext, tokenizer: LoadedTokenizer, path: str) -> DatasetAdvice:
    """Rate every column that can group the records of a dataset, and estimate its examples."""
    measured = measure_table(context, tokenizer, path)
    limits, form = measured.limits, measured.form
    lengths = np.maximum(measured.lengths, 0)
    columns = [
        advise_group_column(
            column,
            np.bincount(codes[codes >= 0]).astype(np.int64),
            np.bincount(codes[codes >= 0], weights=lengths[codes >= 0]).astype(np.int64),
            record_budget=limits.records,
            mode="sequential" if form.mode == "sequential" else "grouped",
            cap=limits.cap,
            is_ordered=form.order_column is not None,
        )
        for column, codes in _iterate_group_columns(context)
    ]
    columns.sort(key=lambda one: (len(one.unsuitable), len(one.warnings), -one.sizes["count"], one.column))
    rows = max(int((measured.lengths >= 0).sum()), 1)
    groups = max(len(measured.index.keys), 1)
    estimate = estimate_example(
        form.mode,
        limit=limits.limit,
        prompt=limits.prompt,
        cap=limits.cap,
        record_tokens=float(lengths.sum()) / rows,
        records_per_group=rows / groups,
    )
    return DatasetAdvice(context.dataset_name or "", tuple(columns), estimate, form.mode, form.group_columns)


def _iterate_group_columns(context: KindContext) -> Iterator[tuple[str, Ints]]:
    """Yield each column in which some rows share a value, with the number of each row's value (−1 for null)."""
    texts: list[str] = []
    for part in context.input(CANONICAL_ROWS).parts:
        texts += context.store.table(part.files["rows"], ["record"]).column(0).to_pylist()
    records: list[dict[str, Any]] = [orjson.loads(text) for text in texts]
    for name in dict.fromkeys(key for record in records for key in record):
        numbers: dict[bytes, int] = {}
        codes = np.full(len(records), -1, np.int64)
        for row, record in enumerate(records):
            value = record.get(name)
            if value is not None:
                codes[row] = numbers.setdefault(orjson.dumps(value), len(numbers))
        if 1 < len(numbers) < int((codes >= 0).sum()):
            yield name, codes
