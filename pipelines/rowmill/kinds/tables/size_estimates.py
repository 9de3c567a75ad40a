"""How large examples and groups are, estimated from counts, for `rowmill advise` and the facts of rows.

                 tokens that must be at most the limit            tokens that are reported
    tabular      prompt + BOS + record · cap + EOS                prompt + record · cap
    grouped      prompt + (BOS + group + EOS) · cap               prompt + group · cap
    sequential   prompt + BOS + record + EOS                      prompt + series, at most the limit

A series continues in the next example, so only its records must fit.
"""

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.kinds.joint_rows import ExampleEstimate, GroupAdvice
from rowmill.kinds.tables.partition_plan import DELIMITERS_PER_UNIT
from rowmill.kinds.tables.schema import Mode

CHARACTERS_PER_TOKEN = 4
"""Assumed without a tokenizer; records of many numbers have two to three, so such estimates are marked approximate."""
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
    record, group = round(record_tokens), round(record_tokens * records_per_group)
    largest = limit - prompt - DELIMITERS_PER_UNIT
    if mode == "grouped":
        entry, most = group, max((limit - prompt) // (group + DELIMITERS_PER_UNIT), 0)
    else:
        entry, most = record, max(largest // max(record, 1), 0)
    wanted = most if cap is None else cap
    if mode == "sequential":
        overflow = ("overflow",) if record > largest else ()
        tokens = min(prompt + group, limit)
        return ExampleEstimate(group, tokens, not overflow, min(most, wanted), largest, overflow, is_approximate)
    # As specified, the reported tokens are those of the prompt and the records; BOS and EOS decide whether they fit.
    tokens = prompt + entry * wanted
    delimiters = DELIMITERS_PER_UNIT * (wanted if mode == "grouped" else 1)
    advice: list[str] = []
    if entry > largest:
        advice.append("overflow")
    elif tokens + delimiters > limit:
        advice.append(f"cap_unreachable (flush at {most})")
    return ExampleEstimate(entry, tokens, not advice, min(most, wanted), largest, tuple(advice), is_approximate)


def advise_group_column(
    column: str,
    sizes: Ints,
    tokens: Ints,
    *,
    record_room: int,
    mode: Mode = "grouped",
    cap: int | None = 10,
    is_ordered: bool = True,
    is_approximate: bool = False,
) -> GroupAdvice:
    """Assess a column by the sizes of its groups: `sizes[g]` records and `tokens[g]` tokens each.

    `record_room` are the tokens that an example has for records.
    """
    total = int(sizes.sum())
    described = dict.fromkeys(("count", "mean", "std", "min", "p25", "p50", "p75", "p95", "max"), 0.0)
    if len(sizes):
        p25, p50, p75, p95 = (float(np.percentile(sizes, percent)) for percent in (25, 50, 75, 95))
        described = {
            "count": len(sizes), "mean": round(float(sizes.mean()), 6), "std": round(float(sizes.std()), 6),
            "min": int(sizes.min()), "p25": p25, "p50": p50, "p75": p75, "p95": p95, "max": int(sizes.max()),
        }  # fmt: skip
    unsuitable: dict[str, str] = {}
    warnings: dict[str, str] = {}
    largest = int(np.argmax(sizes)) if len(sizes) else 0
    most = int(sizes[largest]) if len(sizes) else 0
    about = "about " if is_approximate else ""
    if mode != "sequential" and len(sizes) and int(tokens.max()) > record_room:
        over = int((tokens > record_room).sum())
        unsuitable["overflow"] = (
            f"{over} of {len(sizes)} groups have more than {record_room} tokens, the largest {about}{int(tokens.max())}"
        )
    if mode != "sequential" and len(sizes) > 1 and most > DOMINANT_SHARE * total:
        unsuitable["dominant"] = f"one group has {most} of {total} records; none should have more than half"
    if mode != "sequential" and described["p95"] > UNBOUNDED_P95:
        unsuitable["unbounded"] = (
            f"one group in twenty has more than {described['p95']:g} records; up to {UNBOUNDED_P95} are good"
        )
    if most > SKEWED_TIMES * max(described["p50"], 1):
        warnings["skewed"] = f"the largest group has {most} records, the median one {described['p50']:g}"
    if not is_ordered:
        warnings["no_order"] = "no order column: records of a group keep the order of the source"
    examples = -(-int(tokens.sum()) // max(record_room, 1))
    if mode == "sequential":
        examples = max(examples, 0 if cap is None else int((-(-sizes // cap)).sum()), len(sizes))
    elif cap is not None:
        examples = max(examples, -(-len(sizes) // cap))
    if examples < FEW_EXAMPLES:
        warnings["few_examples"] = f"about {examples} examples; lower the cap to 3-5"
    return GroupAdvice(
        column,
        described,
        f"Largest group: {most} records, {about}{int(tokens[largest]) if len(sizes) else 0} tokens",
        unsuitable,
        warnings,
    )
