"""The benchmarks' input: real conversations as OpenAI messages, repeated with changed ids to any size.

Repetition `n` puts the text `[n]` before each conversation's first user message, so that no two rows are equal and no
cache or duplicate filter makes the work smaller.
"""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import orjson

DATA = Path(os.environ.get("ROWMILL_REAL_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TOKENIZER = DATA / "tokenizers" / "qwen3"
TEMPLATE = DATA / "templates" / "llamacpp__Qwen-Qwen3-0.6B.jinja"
TRAINING_TEMPLATE = DATA / "templates" / "trl__qwen3_training.jinja"

ROLES = {"human": "user", "gpt": "assistant"}


def conversations() -> Iterator[list[dict[str, str]]]:
    """Yield the real conversations: plain user and assistant turns, some with a system text."""
    for name in ("math/gsm8k_train.jsonl", "math/gsm8k_test_socratic.jsonl"):
        for line in (DATA / name).open("rb"):
            row = orjson.loads(line)
            yield [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    for row in orjson.loads((DATA / "chat/fastchat_dummy_conversation.json").read_bytes()):
        yield [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
    for row in orjson.loads((DATA / "instruct/gpteacher_roleplay.json").read_bytes()):
        asked = f"{row['instruction']}\n{row['input']}".strip()
        yield [{"role": "user", "content": asked}, {"role": "assistant", "content": row["response"]}]
    for line in (DATA / "chat/tinker_conversations.jsonl").open("rb"):
        yield [{"role": m["role"], "content": m["content"]} for m in orjson.loads(line)["messages"]]
    for line in (DATA / "chat/v1_sft_demo.jsonl").open("rb"):
        messages: list[dict[str, Any]] = orjson.loads(line)["messages"]
        yield [{"role": m["role"], "content": "".join(part["value"] for part in m["content"])} for m in messages]


def write(path: Path, *, size_bytes: int | None = None, repeats: int | None = None, first: int = 0) -> int:
    """Write conversations until a size or a number of repetitions is reached; return the number of rows."""
    whole = [one for one in conversations() if one[-1]["role"] == "assistant" and one[0]["role"] in ("user", "system")]
    rows = 0
    with path.open("wb") as sink:
        for number in count(first) if repeats is None else range(first, first + repeats):
            for messages in whole:
                changed = [dict(message) for message in messages]
                asked = next(message for message in changed if message["role"] == "user")
                asked["content"] = f"[{number}] {asked['content']}"
                sink.write(orjson.dumps({"id": f"{number}-{rows}", "messages": changed}) + b"\n")
                rows += 1
                if size_bytes is not None and sink.tell() >= size_bytes:
                    return rows
    return rows


def words() -> list[str]:
    """Return words as often as they stand in real text, some hundred thousand."""
    text = (DATA / "text/c4_demo.jsonl").read_bytes().splitlines()
    return [word for line in text for word in orjson.loads(line)["text"].split()]
