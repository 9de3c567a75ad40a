"""JSON Lines to packed shards on disk, against bare `encode_batch` of the rendered text, and one worker against two.

    python -m benchmarks.chats_to_shards [repeats of the corpus] [folder with the results of peer_trl.py]

The clock of a build starts with a cold pool: starting workers and opening the tokenizer in each of them is
counted, importing modules in the calling process is not (nor is it for the peers).
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import corpus, measure


def encode_batch(texts: list[str]) -> float:
    """Return the seconds that the `tokenizers` library needs for the rendered texts, on all cores, nothing else."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.TOKENIZER / "tokenizer.json"))
    begin = time.perf_counter()
    tokenizer.encode_batch(texts, add_special_tokens=False)
    return time.perf_counter() - begin


def rendered(rows: Path) -> list[str]:
    """Return every row as the template prints it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpus.TOKENIZER)
    tokenizer.chat_template = corpus.TEMPLATE.read_text(encoding="utf-8")
    lines = rows.read_bytes().splitlines()
    return [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines]


def main(repeats: int) -> None:
    """Run all and print a line each."""
    from rowmill.build.prepare import close_workers

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with tempfile.TemporaryDirectory() as name:
        rows = Path(name) / "chats.jsonl"
        count = corpus.write(rows, repeats=repeats)
        tokens = 0
        results: dict[int, float] = {}
        for workers in (2, 1):
            root = Path(name) / f"store-{workers}"
            one = measure.project(rows, root, workers=workers)
            measure.build_shards(one)

            def run(one: measure.Project = one, root: Path = root) -> float:
                measure.fresh(root)
                close_workers()
                begin = time.perf_counter()
                reports = measure.build_shards(one)
                nonlocal tokens
                tokens = reports[-1].manifest.facts["tokens"]
                return time.perf_counter() - begin

            taken = measure.timed(run)
            results[workers] = taken["median_s"]
            speed = round(tokens / taken["median_s"] / 1e6, 3)
            measure.emit(
                "chats_to_shards", workers=workers, rows=count, tokens=tokens, million_tokens_per_s=speed, **taken
            )
        measure.emit("two_workers_against_one", times=round(results[1] / results[2], 3))
        texts = rendered(rows)
        bare = measure.timed(lambda: encode_batch(texts))
        measure.emit(
            "against_encode_batch",
            times=round(bare["median_s"] / results[2], 3),
            bare=bare,
            chats_to_shards_s=results[2],
            tokens=tokens,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
