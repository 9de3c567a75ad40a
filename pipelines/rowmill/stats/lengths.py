"""Facts about lengths: how long examples are, how many hit the limit, what another limit would change."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rowmill.schema.manifest import DisplayTable, Histogram

Lengths: TypeAlias = npt.NDArray[np.integer[Any]]
"""Lengths in tokens, one per example, none negative."""

MAX_LENGTH_BARS = 48
"""Bars of a histogram: more do not fit into the sparkline that a page shows inline."""

QUANTILES = (25, 50, 75, 90, 95, 99)
BUCKETS = ("under_25", "25_to_50", "50_to_75", "75_to_100", "at_max")
"""Shares of the limit in per cent; `at_max` holds everything as long as the limit or longer."""

RAISE_LIMIT = "increase max_length or pre-filter long samples"
LOWER_LIMIT = "lower max_length to reduce VRAM usage"


def make_length_histogram(lengths: Lengths, limit: int, *, title: str = "original length") -> Histogram:
    """Count lengths into at most 48 bins, one edge of which is the limit if any length reaches it.

    Bins have equal widths, except the first (shorter if the limit is not a multiple of the width) and the last, which
    takes the far tail: without it, one document of a million tokens would squeeze all others into the first bar.
    """
    edges = np.array([0, limit], dtype=np.int64)
    if len(lengths):
        longest = int(lengths.max())
        body = min(longest + 1, max(2 * limit, math.ceil(1.25 * _find_quantile(lengths, 99))))
        # Three bars are reserved: the short first one, the one that rounding up adds, the far tail.
        step = _choose_bin_width(body / (MAX_LENGTH_BARS - 3), limit)
        first = limit % step if limit <= body else 0
        edges = np.arange(first, body + step, step, dtype=np.int64)
        # The last edge lies past the longest length, so no bin includes its upper edge.
        after = [longest + 1] if edges[-1] <= longest else []
        edges = np.concatenate([np.array([0] if first else [], np.int64), edges, np.array(after, np.int64)])
    counts, _ = np.histogram(lengths, edges)
    return Histogram(title, "tokens", tuple(map(float, edges)), tuple(map(int, counts)), limit=float(limit))


def _choose_bin_width(at_least: float, limit: int) -> int:
    """Return a round bin width, preferably a divisor of the limit, so that bins start at zero."""
    decades = range(math.ceil(math.log10(max(at_least, 1))) + 2)
    round_numbers = sorted({m * 10**k for k in decades for m in (1, 2, 5)} | {2**k for k in range(64)})
    wide_enough = [number for number in round_numbers if number >= at_least]
    dividing = [number for number in wide_enough if limit % number == 0 and number <= 2 * wide_enough[0]]
    return (dividing or wide_enough)[0]


def compute_length_quantiles(lengths: Lengths) -> dict[str, int]:
    """Return p25, p50, p75, p90, p95, p99 and max: lengths that occur, not interpolated; 0 for no lengths."""
    if len(lengths) == 0:
        return {**{f"p{q}": 0 for q in QUANTILES}, "max": 0}
    return {**{f"p{q}": _find_quantile(lengths, q) for q in QUANTILES}, "max": int(lengths.max())}


def _find_quantile(lengths: Lengths, per_cent: int) -> int:
    """Return the smallest length that at least this percentage of the examples does not exceed."""
    rank = max(math.ceil(len(lengths) * per_cent / 100), 1) - 1
    return int(np.partition(lengths, rank)[rank])


def count_length_buckets(lengths: Lengths, limit: int) -> dict[str, int]:
    """Count examples by length as a share of the limit; the counts add up to all examples."""
    # Integer arithmetic: a quarter of an odd limit is no integer, and 0.25 * limit would misplace exact hits.
    bounds = [-(-limit * quarter // 4) for quarter in range(1, len(BUCKETS))]
    at_least = [int(np.count_nonzero(lengths >= bound)) for bound in bounds]
    counts = -np.diff([len(lengths), *at_least, 0])
    return {name: int(count) for name, count in zip(BUCKETS, counts, strict=True)}


def suggest_limits(buckets: Mapping[str, int]) -> tuple[str, ...]:
    """Return the hints that the buckets justify: any of two."""
    total = sum(buckets.values())
    hints: list[str] = []
    if buckets["at_max"] > 0.3 * total:
        hints.append(RAISE_LIMIT)
    if buckets["under_25"] > 0.5 * total:
        hints.append(LOWER_LIMIT)
    return tuple(hints)


def choose_candidate_seq_lens(limit: int) -> tuple[int, ...]:
    """Return the limit and the powers of two from a quarter of it to four times it."""
    around = 1 << (limit.bit_length() - 1)
    powers = {around * 4, around * 2, around, around // 2, around // 4}
    return tuple(sorted({limit} | {power for power in powers if power >= 2}))


def estimate_seq_len_effects(
    original_tokens: Lengths,
    trained_tokens: Lengths,
    seq_lens: Iterable[int],
    *,
    plan: Callable[[Lengths, int], int],
) -> DisplayTable:
    """Estimate for each limit how many examples exceed it, what that costs and how many sequences result.

    `trained_tokens[i]` are the trained tokens of example i before truncation. The loss of an example is estimated in
    proportion to its length: which exchanges are removed is known only after rendering, that is, in a build. So the
    line of the current limit can differ from what truncation removed (`views.ESTIMATE_NOTES`).
    `plan(lengths, limit)` returns the number of sequences for lengths of at most the limit.
    """
    rows: list[tuple[int, int, int, int]] = []
    for seq_len in sorted(set(seq_lens)):
        over = np.flatnonzero(original_tokens > seq_len)
        whole, trained = original_tokens[over].astype(np.int64), trained_tokens[over].astype(np.int64)
        lost = trained * (whole - seq_len) // whole
        sequences = plan(np.minimum(original_tokens, seq_len), seq_len)
        rows.append((seq_len, len(over), int(lost.sum()), int(sequences)))
    return DisplayTable(columns=("seq_len", "examples_over", "trained_lost", "sequences"), rows=tuple(rows))


def make_lengths_table(histograms: Mapping[str, Histogram]) -> DisplayTable:
    """Return histograms, one per split, as lines `split, lower, upper, examples`; upper is exclusive."""
    rows = [
        (split, int(lower), int(upper), count)
        for split, histogram in histograms.items()
        for lower, upper, count in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False)
    ]
    return DisplayTable(columns=("split", "lower", "upper", "examples"), rows=tuple(rows))
