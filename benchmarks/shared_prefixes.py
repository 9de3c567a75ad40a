"""Tokens that `packing.share_prefixes` saves, and what planning trees of 10⁶ examples takes.

    python -m benchmarks.shared_prefixes [examples]

Prints one JSON line for each: the airline dialogues of tau-bench with an example for each answer, eight samples each of
1,000 GSM8K prompts, and the plan of synthetic examples. The peer is the same recipe without sharing.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rowmill.build.runner import build
from rowmill.build.steps import open_project
from rowmill.packing.pack_plan import keep_examples_whole, plan_best_fit
from rowmill.packing.prefix_trees import plan_trees, sort_by_tokens
from rowmill.schema.manifest import load_current

DATA = Path(__file__).resolve().parents[2] / "shared/data"
STAGES = ("raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards")
SAMPLES, PROMPTS = 8, 1000
LIMIT = 4096


def list_samples() -> Iterator[dict[str, Any]]:
    """Yield eight answers to each prompt: its own, begun in eight ways, as samples of a model would be."""
    with (DATA / "math/gsm8k_train.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(PROMPTS), lines, strict=False)]
    for row in rows:
        for sample in range(SAMPLES):
            answer = f"Attempt {sample + 1}. {row['answer']}"
            messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]
            yield {"messages": messages}


def measure_build(name: str, source: Path, *, seq_len: int, min_shared: int, template: dict[str, Any]) -> None:
    """Build shards with and without sharing, and print the tokens and sequences of both."""
    facts: dict[bool, dict[str, Any]] = {}
    sizes: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for shares in (False, True):
            packing = {"share_prefixes": True, "min_shared": min_shared} if shares else {}
            dataset = {
                "source": {"train_urls": [str(source)]},
                "format": {"kind": "chat"},
                "packing": packing,
                "template": {"chat_template": "qwen2.5", **template},
                "splits": {"validation": 0},
                "filters": {"deduplicate": "off"},
            }
            tokenizer = str(DATA / "tokenizers/qwen3")
            recipe = {"tokenizer": tokenizer, "seq_len": seq_len, "datasets": {"rows": dataset}}
            file = Path(folder) / "configs" / f"{'shared' if shares else 'plain'}.yaml"
            file.parent.mkdir(exist_ok=True)
            file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
            project = open_project(file, f"{folder}/store")
            build(project, only=STAGES)
            packed = load_current(project.store, (project.recipe.name, "rows", "packed_shards"))
            assert packed is not None
            facts[shares] = packed.facts
            sizes.append(sum(file.bytes for file in packed.files("shard")))
    plain, shared = facts[False], facts[True]
    line = {
        "benchmark": "shared_prefixes",
        "data": name,
        "seq_len": seq_len,
        "tokens": plain["tokens"],
        "stored": shared["tokens"],
        "times_fewer": round(plain["tokens"] / shared["tokens"], 2),
        "shard_bytes": sizes,
        "sequences": [plain["sequences"], shared["sequences"]],
        "segments": shared["segments"],
        "fill": [round(plain["fill"], 4), round(shared["fill"], 4)],
    }
    print(json.dumps(line))


def measure_plan(examples: int) -> None:
    """Print the seconds of comparing and planning examples in groups of eight that share half of their tokens."""
    numbers = np.random.default_rng(0)
    prompts = numbers.integers(64, 256, examples // SAMPLES)
    lengths = np.repeat(prompts, SAMPLES) + numbers.integers(16, 256, examples // SAMPLES * SAMPLES)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ids = numbers.integers(0, 150_000, int(offsets[-1]), dtype=np.int32)
    for prompt, size in enumerate(prompts.tolist()):
        first = int(offsets[prompt * SAMPLES])
        for sample in range(1, SAMPLES):
            at = int(offsets[prompt * SAMPLES + sample])
            ids[at : at + size] = ids[first : first + size]
    pieces = keep_examples_whole(lengths)
    begin = time.perf_counter()
    by_tokens = sort_by_tokens(ids, None, offsets, min_shared=64)
    compared = time.perf_counter()
    plan = plan_trees(pieces, by_tokens, LIMIT)
    planned = time.perf_counter()
    plain = plan_best_fit(lengths, LIMIT, None)
    line = {
        "benchmark": "shared_prefixes",
        "data": f"{len(lengths)} examples in groups of {SAMPLES}",
        "tokens": len(ids),
        "stored": int(plan.tokens.sum()),
        "compare_s": round(compared - begin, 2),
        "plan_s": round(planned - compared, 2),
        "plan_without_sharing_s": round(time.perf_counter() - planned, 2),
        "sequences": [plain.sequences, plan.sequences],
    }
    print(json.dumps(line))


def main() -> None:
    """Measure both data sets and the plan."""
    airline = DATA / "tools/tau_airline_gpt4o.messages.jsonl"
    measure_build("airline dialogues, an example for each answer", airline, seq_len=32_768, min_shared=64,
                  template={"turns": "message"})  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.jsonl"
        samples.write_text("".join(json.dumps(row) + "\n" for row in list_samples()), encoding="utf-8")
        measure_build(
            f"{SAMPLES} samples of {PROMPTS} GSM8K prompts", samples, seq_len=4096, min_shared=64, template={}
        )
        measure_build(
            f"{SAMPLES} samples of {PROMPTS} GSM8K prompts", samples, seq_len=4096, min_shared=16, template={}
        )
    measure_plan(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)


if __name__ == "__main__":
    main()
