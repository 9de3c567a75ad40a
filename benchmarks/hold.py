"""Whether a build got slower: its processor time, divided by that of bare work on the same rows in the same run.

    python -m benchmarks.hold [workloads …] [--rounds 5] [--against CHECKOUT …] [--whole]

| workload | rows | bare work |
|---|---|---|
| `chats` | 11,843 plain chats | `tokenizers.encode_batch` of the rendered text |
| `airline` | a hundred dialogues with tools, twice | the same |
| `reasoning` | 450 dialogues with reasoning and tools, twice | the same |
| `retail` | 54,190 lines of a shop's table | `polars.read_csv` of the table, ten times |

Every run is a whole process with two workers and a store that is empty but for the opened tokenizer; its processor
time is that of all its processes, user and system together. A ratio moves little with the machine and with what else
runs on it. Each checkout that is named is measured in turn with this one, on the same rows: name the commit before a
change, and the one before the round. `--whole` takes all rows of `against_trl`, where elapsed times say something too.

A line for each commit is kept in `benchmarks/results.jsonl`. The command fails where a ratio of this checkout is more
than 5 % above the best that was ever kept for the workload.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import corpus, measure, records
from benchmarks.against_trl import BUILD, WORKLOADS, describe_rows, write_rendered, write_rows

TENTHS = {"chats": 1, "airline": 2, "reasoning": 2}
"""How often the rows of a workload are repeated here; `against_trl` repeats them ten times as often, or about so."""
RETAIL_ROWS = records.RETAIL_ROWS // 10
ALLOWED = 1.05
"""What of the best ratio is still no loss: twice what two runs on one machine differ by."""
READ_CSV = "import sys, polars\nfor _ in range(10): polars.read_csv(sys.argv[1], infer_schema=False)"


class Spent(NamedTuple):
    """What a process and all that it started took, in seconds."""

    elapsed: float
    processor: float


def run(command: Sequence[str], folder: Path, checkout: Path | None = None) -> Spent:
    """Run a process to its end in a folder; `checkout` is whose modules it imports."""
    path = os.pathsep.join(str(checkout / one) for one in ("", "pipelines", "assets")) if checkout else ""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command, cwd=folder, stdout=printed, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path}
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed.seek(0)
            raise SystemExit(printed.read().decode())
    return Spent(time.perf_counter() - started, usage.ru_utime + usage.ru_stime)


def prepare(name: str, folder: Path, *, whole: bool) -> list[str]:
    """Write the rows and the recipe of a workload; return the command of the bare work."""
    if name == "retail":
        records.write_retail(folder / "rows.csv", records.RETAIL_ROWS if whole else RETAIL_ROWS)
        gates = {one: {"severity": "warn"} for one in ("rejects", "group_size", "near_duplicate", "dropped_share")}
        rows = {"source": {"train_urls": ["rows.csv"]}, "format": {"kind": "records"}, "splits": {"validation": 0}}
        recipe: dict[str, Any] = {"seq_len": 4096, "datasets": {"rows": rows}, "gates": gates}
        bare = [sys.executable, "-c", READ_CSV, "rows.csv"]
    else:
        workload = WORKLOADS[name] if whole else WORKLOADS[name]._replace(repeats=TENTHS[name])
        write_rows(folder / "rows.jsonl", workload)
        write_rendered(folder / "rows.jsonl", folder / "texts.jsonl")
        recipe = {"seq_len": workload.seq_len, "datasets": {"rows": describe_rows()}}
        bare = [sys.executable, str(measure.ROOT / "benchmarks/peer_encode.py"), "texts.jsonl",
                str(corpus.TOKENIZER / "tokenizer.json")]  # fmt: skip
    recipe |= {"tokenizer": str(corpus.TOKENIZER), "execution": {"workers": 2}}
    # JSON is YAML.
    (folder / "rows.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return bare


def measure_workload(name: str, checkouts: Mapping[str, Path], rounds: int, *, whole: bool) -> dict[str, Any]:
    """Build in turn with each checkout and do the bare work; return by checkout the medians and their ratio."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        bare = prepare(name, folder, whole=whole)
        spent: dict[str, list[Spent]] = {label: [] for label in ("bare", *checkouts)}
        for number in range(rounds + 1):
            for label, checkout in checkouts.items():
                store = f"store-{label}"
                measure.fresh(folder / store)
                build = [sys.executable, "-c", BUILD, "build", "rows.yaml", "--root", store, "--until", "packed_shards"]
                found = run(build, folder, checkout)
                # The first run opens the tokenizer and reads everything from the disk.
                if number:
                    spent[label].append(found)
            if number:
                spent["bare"].append(run(bare, folder))
    processor = {label: statistics.median(one.processor for one in runs) for label, runs in spent.items()}
    elapsed = {label: statistics.median(one.elapsed for one in runs) for label, runs in spent.items()}
    return {
        label: {
            "processor_s": round(processor[label], 2), "bare_processor_s": round(processor["bare"], 2),
            "elapsed_s": round(elapsed[label], 2), "bare_elapsed_s": round(elapsed["bare"], 2),
            "ratio": round(processor[label] / processor["bare"], 3),
            "elapsed_ratio": round(elapsed[label] / elapsed["bare"], 3),
        }
        for label in checkouts
    }  # fmt: skip


def name_commit(checkout: Path) -> str:
    """Return the first eight digits of a checkout's commit, and a plus sign where files differ from it."""
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
    # The results are written by each workload before the next one.
    changed = [*git, "status", "--porcelain", "--", ".", ":!benchmarks/results.jsonl"]
    is_changed = subprocess.run(changed, capture_output=True, text=True, check=True).stdout
    return commit.stdout.strip() + ("+" if is_changed else "")


def find_best(name: str, *, whole: bool) -> float | None:
    """Return the lowest ratio of a workload that was ever kept, None where there is none."""
    lines = (measure.ROOT / "benchmarks/results.jsonl").read_text(encoding="utf-8").splitlines()
    kept = (one for one in map(json.loads, lines) if one.get("benchmark") == "hold")
    return min((one["ratio"] for one in kept if (one["workload"], one["whole"]) == (name, whole)), default=None)


def main() -> int:
    """Measure the workloads that are named, or all; return 1 where this checkout is slower than the best before it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(TENTHS)} and retail; default: all")
    parser.add_argument("--rounds", type=int, default=measure.RUNS)
    parser.add_argument(
        "--against", nargs="*", type=Path, default=[], help="folders with other commits of this project"
    )
    parser.add_argument("--whole", action="store_true", help="all rows of against_trl, not a tenth")
    options = parser.parse_args()
    own = name_commit(measure.ROOT)
    checkouts = {own: measure.ROOT} | {name_commit(one): one.resolve() for one in options.against}
    lost: list[str] = []
    for name in options.workloads or (*TENTHS, "retail"):
        best = find_best(name, whole=options.whole)
        found = measure_workload(name, checkouts, options.rounds, whole=options.whole)
        for label, numbers in found.items():
            measure.emit("hold", commit=label, workload=name, whole=options.whole, rounds=options.rounds, **numbers)
        ratio = found[own]["ratio"]
        if best is not None and ratio > best * ALLOWED:
            lost.append(f"{name}: {ratio} times bare work, and {best} was reached before; see benchmarks/results.jsonl")
    print(*lost, sep="\n", file=sys.stderr)
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
