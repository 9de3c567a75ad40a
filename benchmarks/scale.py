"""Size and change: peak memory of a worker on 2 GB of input, and what one per cent of new rows costs.

    python -m benchmarks.scale [gigabytes]

Peak memory is the largest resident anonymous memory (`RssAnon`) of any process that the build started, sampled from
/proc while the build runs: pages of mapped scratch files belong to the page cache, which the system takes back by
itself.
"""

import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from benchmarks import corpus, measure


class ProcessWatch(threading.Thread):
    """Samples memory and processor time of this process and of all that it started, until told to stop.

    Workers are children of the fork server, not of this process, so children of children are sampled, too.
    """

    def __init__(self) -> None:
        """Prepare an empty record."""
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.samples: list[int] = []
        self.own = 0
        self._cpu: dict[int, float] = {}

    @property
    def cpu_seconds(self) -> float:
        """Return the processor time of all processes that were seen, as of the last sample of each."""
        return sum(self._cpu.values())

    def run(self) -> None:
        """Sample every fifth of a second."""
        before = _measure_cpu_seconds(os.getpid())
        while not self.stopped.wait(0.2):
            started = _list_descendants(os.getpid())
            self.samples.append(max(map(_measure_anonymous_bytes, started), default=0))
            self.own = max(self.own, _measure_anonymous_bytes(os.getpid()))
            self._cpu |= {pid: seconds for pid in started if (seconds := _measure_cpu_seconds(pid))}
            self._cpu[os.getpid()] = _measure_cpu_seconds(os.getpid()) - before


def _list_descendants(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children + [one for child in children for one in _list_descendants(child)]


def _measure_anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def _measure_cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(folder: Path, gigabytes: float) -> None:
    """Build a large input once and report the peak, overall and by tenth of the run: flat means equal tenths."""
    rows = folder / "large.jsonl"
    count = corpus.write(rows, size_bytes=int(gigabytes * 1e9))
    watch = ProcessWatch()
    watch.start()
    begin = time.perf_counter()
    reports = measure.build_shards(measure.project(rows, folder / "large", workers=2))
    seconds = time.perf_counter() - begin
    watch.stopped.set()
    watch.join()
    size = max(1, len(watch.samples) // 10)
    tenths = [round(max(watch.samples[i * size : (i + 1) * size]) / 1e9, 3) for i in range(10)]
    tokens = reports[-1].manifest.facts["tokens"]
    measure.emit(
        "memory",
        input_gb=gigabytes,
        rows=count,
        seconds=round(seconds, 1),
        worker_peak_gb=round(max(watch.samples) / 1e9, 3),
        worker_peak_gb_by_tenth=tenths,
        main_peak_gb=round(watch.own / 1e9, 3),
        tokens=tokens,
        cpu_ms_per_million_tokens=round(watch.cpu_seconds / tokens * 1e9),
    )


def one_per_cent(folder: Path) -> None:
    """Append one per cent of rows to a built source and report how many rows were tokenised again."""
    rows = folder / "growing.jsonl"
    count = corpus.write(rows, repeats=10)
    one = measure.project(rows, folder / "growing", workers=2)
    measure.build_shards(one)
    more = folder / "more.jsonl"
    corpus.write(more, repeats=1, first=10)
    added = more.read_bytes().splitlines(keepends=True)[: count // 100]
    with rows.open("ab") as sink:
        sink.writelines(added)
    begin = time.perf_counter()
    reports = measure.build_shards(one)
    tokenised = next(r for r in reports if r.manifest.stage == "tokenized_examples")
    measure.emit(
        "one_per_cent_new_rows",
        rows=count + len(added),
        added=len(added),
        rows_tokenised=tokenised.rows_made,
        share_tokenised=round(tokenised.rows_made / (count + len(added)), 5),
        seconds=round(time.perf_counter() - begin, 2),
    )


def main(gigabytes: float) -> None:
    """Run both."""
    with tempfile.TemporaryDirectory() as name:
        one_per_cent(Path(name))
        memory(Path(name), gigabytes)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 2.0)
