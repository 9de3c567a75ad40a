"""A mixture with examples of up to 262,144 tokens through the whole pipeline: seconds, memory, packing fill.

    python -m benchmarks.long_contexts [million tokens]

Three datasets: chats made long (real conversations joined into one, of log-normal length, a median of 40,000 tokens,
cut off at the context length), the real conversations as they are, and long real documents (Moby Dick, the RFCs of
Rust), each with its number before it where it repeats. Ranks and a rebuild in which nothing changed are part of it.
It is built with two workers, for the seconds, and in one process, whose memory is then that of all the work.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import corpus, measure

SEQ_LEN = 262_144
CHARS_PER_TOKEN = 3.6
BUILD = """
import json, resource, sys, time
import pyarrow.compute as pc
from benchmarks.measure import ROOT
from rowmill.build import runner
from rowmill.build.steps import Project
from rowmill.core.storage import Store
from rowmill.recipe.recipe import parse_recipe
values, root = json.loads(sys.argv[1]), sys.argv[2]
project = Project(parse_recipe(values, name="long", where="benchmark"), Store(root), ROOT)
def find_longest(made):
    columns = (project.store.table(file, ["segment_lengths"]).column(0) for file in made.files("shard"))
    return max(pc.max(pc.list_flatten(one)).as_py() for one in columns)
begin = time.perf_counter()
reports = {"/".join(step.key[1:]): report for step, report, _ in runner.build(project)}
seconds = time.perf_counter() - begin
begin = time.perf_counter()
runner.build(project)
own = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "wall_s": round(seconds, 1), "unchanged_s": round(time.perf_counter() - begin, 1),
    "cpu_s": round(own.ru_utime + own.ru_stime, 1), "memory_gb": round(own.ru_maxrss / 1e6, 2),
    "datasets": {
        name: {one: reports[f"{name}/packed_shards"].manifest.facts[one] for one in ("tokens", "sequences", "fill")}
        for name in values["datasets"]
    },
    "longest": {name: find_longest(reports[f"{name}/packed_shards"].manifest) for name in values["datasets"]},
    "rank_balance": reports["training_splits"].manifest.facts["rank_balance"],
    "stages_s": {key: round(one.seconds, 1) for key, one in reports.items() if one.seconds > 1},
}))
"""


def join_conversations() -> Iterator[list[dict[str, str]]]:
    """Yield conversations of many real ones."""
    drawn = np.random.default_rng(0)
    conversations = list(corpus.conversations())
    for number in count():
        wanted = min(int(drawn.lognormal(np.log(40_000), 1.0)), SEQ_LEN - 2000) * CHARS_PER_TOKEN
        messages = [{"role": "user", "content": f"Conversation {number}."}, {"role": "assistant", "content": "Yes."}]
        size = 0
        while size < wanted:
            own = [one for one in conversations[int(drawn.integers(len(conversations)))] if one["role"] != "system"]
            messages += own
            size += sum(len(one["content"]) + 20 for one in own)
        yield messages


def list_documents() -> Iterator[str]:
    """Yield the long documents, over and over."""
    rows = [
        json.loads(line)["text"]
        for name in ("long_moby_dick", "rust_rfcs")
        for line in (corpus.DATA / "text" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for number in count():
        yield from (f"[{number}] {text}" for text in rows)


def write_until(path: Path, rows: Iterator[dict[str, Any]], characters: float) -> str:
    """Write rows until they have so many characters; return the path."""
    with path.open("w", encoding="utf-8") as sink:
        while sink.tell() < characters:
            sink.write(json.dumps(next(rows), ensure_ascii=False) + "\n")
    return str(path)


def main(million: float) -> None:
    """Build a mixture of so many million tokens: half of them long chats, a quarter each of the others."""
    characters = million * 1e6 * CHARS_PER_TOKEN
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        template = {"template": {"chat_template": {"file": str(corpus.TEMPLATE)}}, "format": {"kind": "chat"}}
        rows: dict[str, tuple[Iterator[dict[str, Any]], float, dict[str, Any]]] = {
            "long_chats": (({"messages": one} for one in join_conversations()), 0.5, template),
            "chats": (({"messages": one} for one in corpus.conversations()), 0.1, template),
            "documents": (({"text": one} for one in list_documents()), 0.4, {"format": {"kind": "text"}}),
        }
        datasets = {
            one: {
                "source": {"train_urls": [write_until(folder / f"{one}.jsonl", found, share * characters)]},
                "splits": {"validation": 0},
                "packing": {"pack": True},
                **options,
            }
            for one, (found, share, options) in rows.items()
        }
        found: list[dict[str, Any]] = []
        for workers in (2, 1):
            values = {
                "tokenizer": str(corpus.TOKENIZER), "seq_len": SEQ_LEN, "datasets": datasets,
                "mixture": {"batch_size": 4}, "partitions": {"world_size": 2, "balance": "flops"},
                "gates": {"rank_balance": {"at_most": 9}, "filler_share": {"at_most": 1}, "fill": {"at_least": 0}},
                "execution": {"workers": workers},
            }  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-c", BUILD, json.dumps(values), str(folder / f"store-{workers}")],
                cwd=measure.ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(done.stderr)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    two, one = found
    measure.emit("long_contexts", seq_len=SEQ_LEN, two_workers_wall_s=two["wall_s"], one_process=one)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 40)
