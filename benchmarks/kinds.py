"""Pairs and prompts against chats of the same texts: tokens per second of processor time, from source files to shards.

    python -m benchmarks.kinds [million tokens]

The texts are 300 real pairs (`preference/dpo_en_demo.json`), each repeated with its number in the prompt, and the
questions of GSM8K. A pair is compared with two chats, one of each side. A prompt is compared with a chat of the
question and its number as the answer, which has nearly the same tokens. One process, the tokenizer opened before.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from benchmarks import corpus, measure
from rowmill.build import runner
from rowmill.build.steps import Project
from rowmill.core.storage import Store
from rowmill.recipe.recipe import parse_recipe

TOKENS_PER_PAIR, TOKENS_PER_PROMPT = 1200, 70
Row = dict[str, Any]


def list_pairs() -> Iterator[tuple[Row, list[Row]]]:
    """Yield a pair and the chats of its two sides, over and over with another number."""
    rows = json.loads((corpus.DATA / "preference/dpo_en_demo.json").read_text(encoding="utf-8"))
    for number in count():
        for row in rows:
            turns = [
                {"role": corpus.ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
                for turn in row["conversations"]
            ]
            turns[0] |= {"content": f"[{number}] {turns[0]['content']}"}
            sides = [{"role": "assistant", "content": row[name]["value"]} for name in ("chosen", "rejected")]
            pair = {"prompt": turns, "chosen": [sides[0]], "rejected": [sides[1]]}
            yield pair, [{"messages": [*turns, side]} for side in sides]


def list_prompts() -> Iterator[tuple[Row, list[Row]]]:
    """Yield a prompt with its ground truth, and the chat of both, over and over with another number."""
    lines = (corpus.DATA / "math/gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for number in count():
        for row in rows:
            asked, answer = f"[{number}] {row['question']}", row["answer"].rpartition("#### ")[2]
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            yield {"prompt": asked, "ground_truth": answer}, [{"messages": messages}]


def build_rows(rows: list[Row], kind: str, folder: Path) -> dict[str, Any]:
    """Build shards of some rows; return tokens and processor seconds."""
    source = folder / f"{kind}.jsonl"
    source.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    values = {
        "tokenizer": str(corpus.TOKENIZER),
        "seq_len": 8192,
        "datasets": {
            "rows": {
                "source": {"train_urls": [str(source)]},
                "format": {"kind": kind},
                "template": {"chat_template": {"file": str(corpus.TEMPLATE)}},
                "splits": {"validation": 0},
                "filters": {"deduplicate": "off"},
            }
        },
        "execution": {"workers": 1},
    }
    root = Store(str(folder / "store"))
    project = Project(parse_recipe(values, name=f"bench-{kind}", where="benchmark"), root, measure.ROOT)
    begin = time.process_time()
    made = runner.build(project, only=measure.TO_SHARDS)
    seconds = time.process_time() - begin
    return {"rows": len(rows), "tokens": int(made[-1][1].manifest.facts["tokens"]), "cpu_s": round(seconds, 2)}


def compare(kind: str, rows: list[tuple[Row, list[Row]]]) -> None:
    """Build rows of a kind and the chats of the same texts; print both, and the share of the chats' speed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_rows(
            [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], "chat", folder
        )
        chats = build_rows([chat for _, own in rows for chat in own], "chat", folder)
        made = build_rows([row for row, _ in rows], kind, folder)
    speed = {one: found["tokens"] / found["cpu_s"] for one, found in ((kind, made), ("chat", chats))}
    measure.emit(f"kinds {kind}", made=made, chats=chats, share_of_chats=round(speed[kind] / speed["chat"], 2))


def main(tokens: float) -> None:
    """Compare both kinds on so many million tokens each."""
    compare("preference", list(islice(list_pairs(), int(tokens * 1e6 / TOKENS_PER_PAIR))))
    compare("prompts", list(islice(list_prompts(), int(tokens * 1e6 / TOKENS_PER_PROMPT))))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 4)
