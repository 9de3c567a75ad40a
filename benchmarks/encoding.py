"""Encode real conversations with each engine, and open each: processor time of one process per engine and tokenizer.

    python -m benchmarks.encoding [repetitions]

The first encoding fills an engine's caches, as a build's first part does; the later ones are what a long build has.
`starts and ends` is what a build does: ids and the bytes of each token, at first and later.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from benchmarks import corpus, measure
from rowmill.tokenization import tokenizer
from rowmill.tokenization.tokenizer import Encoder, wrap_tokenizer

CHATS = 10_000
TOKENIZERS = ("qwen3", "tinyllama", "gpt2", "smollm3")


def _render(messages: list[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)


def _time(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return round(time.process_time() - started, 3)


def _measure_engine(path: Path, name: str) -> dict[str, float]:
    """Open an engine and encode with it, in this process."""
    texts, backend = [_render(one) for one in islice(corpus.conversations(), CHATS)], path.read_text(encoding="utf-8")
    if name == tokenizer.REFERENCE_ENGINE:
        opening = _time(lambda: tokenizer.open_reference_backend(backend))
        reference = tokenizer.open_reference_backend(backend)
        return {"open": opening} | {
            key: _time(lambda: [one.ids for one in reference.encode_batch(texts, add_special_tokens=False)])
            for key in ("first", "later")
        }
    opened: list[tokenizer.FastEngine] = []
    opening = _time(lambda: opened.append(tokenizer.FastEngine(name, backend)))
    return {"open": opening} | {key: _time(lambda: opened[0].encode(texts)) for key in ("first", "later")}


def _measure_encoder(path: Path) -> dict[str, float]:
    """Encode with ids and positions, as a build does."""
    from transformers import PreTrainedTokenizerFast

    texts = [_render(one) for one in islice(corpus.conversations(), CHATS)]
    loaded = wrap_tokenizer(PreTrainedTokenizerFast(tokenizer_file=str(path)))
    encoder, reference = Encoder(loaded), Encoder(loaded, fast_path=False)
    return {key: _time(lambda: encoder.encode(texts)) for key in ("first", "later")} | {
        "reference": _time(lambda: reference.encode(texts))
    }


def main(repetitions: int) -> None:
    """Measure every engine with every tokenizer that it takes."""
    for folder in TOKENIZERS:
        path = corpus.DATA / "tokenizers" / folder / "tokenizer.json"
        for name in (*tokenizer.FAST_ENGINES, tokenizer.REFERENCE_ENGINE, "starts and ends"):
            runs = [_measure_apart(path, name) for _ in range(repetitions)]
            if None not in runs:
                values = {key: statistics.median(one[key] for one in runs if one) for key in runs[0] or ()}
                measure.emit("encoding", tokenizer=folder, engine=name, chats=CHATS, cpu_s=values)


def _measure_apart(path: Path, name: str) -> dict[str, float] | None:
    """Measure in a process of its own, with one thread; None for a tokenizer that the engine does not take."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.encoding", str(path), name],
        capture_output=True, text=True, check=False, env=os.environ | {"RAYON_NUM_THREADS": "1"}, cwd=measure.ROOT,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


if __name__ == "__main__":
    match sys.argv[1:]:
        case [path, "starts and ends"]:
            print(json.dumps(_measure_encoder(Path(path))))
        case [path, name]:
            print(json.dumps(_measure_engine(Path(path), name)))
        case [repetitions]:
            main(int(repetitions))
        case _:
            main(3)
