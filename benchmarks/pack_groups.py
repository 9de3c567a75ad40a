"""What packing in groups costs: the share of fill lost against one plan over everything, by length distribution.

Prints one JSON line per distribution. Lengths are log-normal, clipped at the context length.

    python -m benchmarks.pack_groups [million tokens]
"""

import json
import sys
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import find_distinct
from rowmill.packing.pack_plan import choose_group_tokens, plan_best_fit

DISTRIBUTIONS = {
    "chat": (4096, ((1.0, 250, 1.0),)),
    "mixed": (8192, ((0.7, 200, 0.8), (0.3, 1500, 0.8))),
    "reasoning 32k": (32_768, ((1.0, 6000, 0.9),)),
    "reasoning 128k": (131_072, ((1.0, 15_000, 1.1),)),
    "agent 256k": (262_144, ((1.0, 40_000, 1.0),)),
}
"""Context length, and components: share of the examples, median length, sigma."""

SIZES_MI = (8, 16, 64, 256)


def draw_lengths(name: str, tokens: int) -> NDArray[np.int64]:
    """Return lengths of about so many tokens, in random order."""
    limit, components = DISTRIBUTIONS[name]
    random = np.random.default_rng(0)

    def draw(count: int) -> NDArray[np.int64]:
        drawn = [random.lognormal(np.log(median), sigma, int(share * count)) for share, median, sigma in components]
        return np.clip(random.permutation(np.concatenate(drawn)), 1, limit).astype(np.int64)

    return draw(int(tokens / draw(20_000).mean()))


def count_grouped(lengths: NDArray[np.int64], limit: int, target: int) -> int:
    """Return the number of sequences if every `target` tokens are planned on their own."""
    borders = find_distinct(np.searchsorted(np.cumsum(lengths), np.arange(0, int(lengths.sum()) + target, target)))
    return sum(plan_best_fit(one, limit, None).sequences for one in np.split(lengths, borders[1:]) if len(one))


def measure(tokens: int) -> Iterator[dict[str, object]]:
    """Yield the fill of one plan, and what groups of several sizes lose of it, per distribution."""
    for name, (limit, _) in DISTRIBUTIONS.items():
        lengths = draw_lengths(name, tokens)
        total, whole = int(lengths.sum()), plan_best_fit(lengths, limit, None).sequences
        fill = total / (whole * limit)
        sizes = {f"{size} Mi": size << 20 for size in SIZES_MI} | {"default": choose_group_tokens(limit, None)}
        lost = {size: fill - total / (count_grouped(lengths, limit, at) * limit) for size, at in sizes.items()}
        yield {
            "benchmark": "pack_groups",
            "lengths": name,
            "seq_len": limit,
            "tokens": total,
            "one_plan": round(fill, 5),
            "lost": {size: round(share, 5) for size, share in lost.items()},
        }


if __name__ == "__main__":
    for line in measure((int(sys.argv[1]) if len(sys.argv) > 1 else 512) << 20):
        sys.stdout.write(json.dumps(line) + "\n")
