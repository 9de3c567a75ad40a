"""What a row of each kind of data costs beside plain chats of the same texts, from source files to shards.

    python -m benchmarks.kinds [million tokens]

| kind | rows | plain chats of the same texts |
|---|---|---|
| `preference` | 300 real pairs (`preference/dpo_en_demo.json`), numbered | two for a pair, one of each side |
| `prompts` | the questions of GSM8K, numbered, with their results | the question, and the result as the answer |
| `tokens` | ids of the questions and answers of GSM8K | the question and the answer |
| `records` | lines of a shop's table | the question "Row?", and the line as JSON as the answer |

Each build is one process with one worker, its tokenizer opened before; processor time is compared. A profiling timer
says every 4 ms of processor time which module of the engine is at work: the three that are met most often are a kind's
largest costs.
"""

import csv
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import corpus, measure, records
from rowmill.build import runner
from rowmill.build.steps import Project
from rowmill.core.storage import Store
from rowmill.recipe.recipe import parse_recipe

Row = dict[str, Any]
SAMPLED_EVERY_S = 0.004
LARGEST = 3


def make_chat(asked: str, answer: str) -> Row:
    """Return a plain chat of a question and its answer."""
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


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


def list_questions() -> Iterator[tuple[str, str]]:
    """Yield questions and answers of GSM8K, over and over with another number; none begins like a list of messages."""
    lines = (corpus.DATA / "math/gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for number in count():
        for row in rows:
            yield f"{number}: {row['question']}", row["answer"]


def list_prompts() -> Iterator[tuple[Row, list[Row]]]:
    """Yield a prompt with its ground truth, and the chat of both."""
    for asked, answer in list_questions():
        result = answer.rpartition("#### ")[2]
        yield {"prompt": asked, "ground_truth": result}, [make_chat(asked, result)]


def list_token_rows() -> Iterator[tuple[Row, list[Row]]]:
    """Yield the ids of a question and its answer, and the chat of both."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.TOKENIZER / "tokenizer.json"))
    for asked, answer in list_questions():
        prompt, response = tokenizer.encode_batch_fast([asked, answer], add_special_tokens=False)
        yield {"prompt_ids": prompt.ids, "response_ids": response.ids}, [make_chat(asked, answer)]


def list_records(folder: Path) -> Iterator[tuple[Row, list[Row]]]:
    """Yield the lines of a table, and the chat whose answer a line is."""
    table = folder / "retail.csv"
    records.write_retail(table, records.RETAIL_ROWS)
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield row, [make_chat("Row?", json.dumps(row, ensure_ascii=False))]


@contextmanager
def sampled() -> Generator[Counter[str]]:
    """Count, while the block runs, which module of the engine the main thread is in."""
    found: Counter[str] = Counter()
    root = str(measure.ROOT / "pipelines/rowmill") + "/"

    def note(_: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(root):
            frame = frame.f_back
        found[frame.f_code.co_filename.removeprefix(root).removesuffix(".py") if frame else "other"] += 1

    before = signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, SAMPLED_EVERY_S, SAMPLED_EVERY_S)
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def build_rows(rows: list[Row], form: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build shards of some rows; return their tokens, processor seconds and largest costs."""
    name = form["kind"]
    if name == "records":
        source = folder / f"{name}.csv"
        with source.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        source = folder / f"{name}.jsonl"
        source.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    dataset: Row = {"source": {"train_urls": [str(source)]}, "format": form, "splits": {"validation": 0}}
    if name not in {"tokens", "records"}:
        dataset |= {"template": {"chat_template": {"file": str(corpus.TEMPLATE)}}}
    if name != "records":
        dataset |= {"filters": {"deduplicate": "off"}}
    values = {"tokenizer": str(corpus.TOKENIZER), "seq_len": 8192, "datasets": {"rows": dataset},
              "execution": {"workers": 1}, "gates": {"dropped_share": {"severity": "warn"}}}  # fmt: skip
    root = Store(str(folder / "store"))
    project = Project(parse_recipe(values, name=f"bench-{name}", where="benchmark"), root, measure.ROOT)
    begin = time.process_time()
    with sampled() as found:
        made = runner.build(project, only=measure.TO_SHARDS)
    seconds, tokens = time.process_time() - begin, int(made[-1][1].manifest.facts["tokens"])
    return {
        "rows": len(rows), "tokens": tokens, "cpu_s": round(seconds, 2),
        "cpu_s_per_million_tokens": round(seconds / tokens * 1e6, 2),
        "largest_costs": {module: round(n / found.total(), 2) for module, n in found.most_common(LARGEST)},
    }  # fmt: skip


def compare(kind: str, rows: list[tuple[Row, list[Row]]]) -> None:
    """Build rows of a kind and the chats of the same texts; print both, and what a row costs beside its chats."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_rows([make_chat("a", "b")], {"kind": "chat"}, folder)
        chats = build_rows([chat for _, own in rows for chat in own], {"kind": "chat"}, folder)
        made = build_rows([row for row, _ in rows], {"kind": kind}, folder)
    ratio = round(made["cpu_s"] / chats["cpu_s"], 2)
    measure.emit(f"kinds {kind}", made=made, chats=chats, row_beside_its_chats=ratio)


def main(tokens: float) -> None:
    """Compare each kind on so many million tokens."""
    with tempfile.TemporaryDirectory() as name:
        listed = {
            "preference": (list_pairs(), 1200), "prompts": (list_prompts(), 70), "tokens": (list_token_rows(), 190),
            "records": (list_records(Path(name)), 60),
        }  # fmt: skip
        for kind, (rows, tokens_per_row) in listed.items():
            compare(kind, list(islice(rows, int(tokens * 1e6 / tokens_per_row))))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 4)
