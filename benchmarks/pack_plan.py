"""Plan 10 million log-normal lengths at 4096 by best fit, without a segment limit and with 64.

Prints one JSON line: the median seconds of five runs for the whole plan (sequence offsets, examples, ranges) and
how many times the lower bound, ceil(tokens / limit), it needs. The lower bound is the peer: no packer can beat it.

    python benchmarks/pack_plan.py [examples]
"""

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rowmill.packing.pack_plan import bound_sequence_count, plan_best_fit

LIMIT, RUNS = 4096, 5


def log_normal_lengths(examples: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return lengths with a median of 245 tokens, clipped to [1, LIMIT]."""
    return np.clip(np.random.default_rng(0).lognormal(5.5, 1, examples), 1, LIMIT).astype(np.int64)


def measure(lengths: np.ndarray[tuple[int], np.dtype[np.int64]], max_segments: int | None) -> dict[str, float]:
    """Plan five times; return the median and the extremes in seconds, and the plan's distance from the bound.

    Planning uses one thread, so processor seconds are what it takes on a machine that does nothing else.
    """
    taken: list[float] = []
    worked: list[float] = []
    sequences = 0
    for _ in range(RUNS):
        begin, began = time.perf_counter(), time.process_time()
        sequences = plan_best_fit(lengths, LIMIT, max_segments).sequences
        taken.append(time.perf_counter() - begin)
        worked.append(time.process_time() - began)
    return {
        "median_s": round(statistics.median(taken), 3),
        "median_cpu_s": round(statistics.median(worked), 3),
        "fastest_s": round(min(taken), 3),
        "slowest_s": round(max(taken), 3),
        "sequences": sequences,
        "times_lower_bound": round(sequences / bound_sequence_count(lengths, LIMIT, None), 6),
    }


def cpu() -> str:
    """Return the processor's name, where the system tells it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Measure and print the one line."""
    examples = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    lengths = log_normal_lengths(examples)
    result = {
        "benchmark": "pack_plan",
        "examples": examples,
        "tokens": int(lengths.sum()),
        "limit": LIMIT,
        "runs": RUNS,
        "no_segment_limit": measure(lengths, None),
        "64_segments": measure(lengths, 64),
        "machine": {"cpu": cpu(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
