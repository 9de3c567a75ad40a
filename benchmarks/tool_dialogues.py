"""Dialogues with tools, JSON Lines to packed shards: whole processes, in turn with TRL's preparation of the same rows.

    python -m benchmarks.tool_dialogues [rounds] [python of an environment with torch and trl]

The rows are the hundred dialogues of an airline's help desk with their tools, each twelve times with another number in
its first question: 7.9 M tokens. Tools and the arguments of calls are JSON text, as TRL advises for rows whose keys
differ. Every round of ours is a new process with two workers and an empty store but for the opened tokenizer; the round
before the first opens it, and is reported as `first_s`. TRL runs `peer_trl.py` with two processes.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import corpus, measure

SEQ_LEN = 16_384
REPEATS = 12
BUILD = "import sys; from rowmill.cli.main import main; sys.exit(main(sys.argv[1:]))"


def write_dialogues(path: Path, repeats: int) -> int:
    """Write the dialogues so many times; return the number of rows."""
    lines = (corpus.DATA / "tools/tau_airline_gpt4o.messages.jsonl").read_text(encoding="utf-8").splitlines()
    rows = 0
    with path.open("w", encoding="utf-8") as sink:
        for number in range(repeats):
            for line in lines:
                sink.write(json.dumps(_number_dialogue(json.loads(line), number), ensure_ascii=False) + "\n")
                rows += 1
    return rows


def _number_dialogue(row: dict[str, Any], number: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    asked = False
    for message in row["messages"]:
        one = {name: message[name] for name in ("role", "content", "tool_call_id", "name") if message.get(name)}
        one["content"] = message.get("content") or ""
        if message["role"] == "user" and not asked:
            one["content"], asked = f"[{number}] {one['content']}", True
        if message.get("tool_calls"):
            one["tool_calls"] = [_write_arguments(call) for call in message["tool_calls"]]
        messages.append(one)
    return {"messages": messages, "tools": json.dumps(row["tools"])}


def _write_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given = function["arguments"]
    text = given if isinstance(given, str) else json.dumps(given)
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": text}}


def time_process(command: Sequence[str], folder: Path, path: str) -> tuple[float, str]:
    """Run a process; return its seconds from start to end and what it printed."""
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return time.perf_counter() - started, done.stdout


def main(rounds: int, trl: str | None) -> None:
    """Run both in turn, and print a line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_dialogues(folder / "airline.jsonl", REPEATS)
        values = {
            "tokenizer": str(corpus.TOKENIZER), "seq_len": SEQ_LEN, "execution": {"workers": 2},
            "datasets": {"airline": {
                "source": {"train_urls": ["airline.jsonl"]}, "format": {"kind": "chat"}, "splits": {"validation": 0},
                "template": {"chat_template": {"file": str(corpus.TRAINING_TEMPLATE)}},
            }},
        }  # fmt: skip
        # JSON is YAML.
        (folder / "airline.yaml").write_text(json.dumps(values), encoding="utf-8")
        build = [sys.executable, "-c", BUILD, "build", "airline.yaml", "--root", "store", "--until", "packed_shards"]
        own_path = os.pathsep.join(str(measure.ROOT / one) for one in ("", "pipelines", "assets"))
        peer = [trl or "", str(measure.ROOT / "benchmarks/peer_trl.py"), "airline.jsonl", str(corpus.TOKENIZER),
                str(corpus.TRAINING_TEMPLATE), "--max-length", str(SEQ_LEN), "2"]  # fmt: skip
        first, _ = time_process(build, folder, own_path)
        ours, theirs, printed = list[float](), list[float](), ""
        for _ in range(rounds):
            measure.fresh(folder / "store")
            ours.append(time_process(build, folder, own_path)[0])
            if trl is not None:
                seconds, printed = time_process(peer, folder, "")
                theirs.append(seconds)
        found: dict[str, Any] = {"rows": rows, "first_s": round(first, 1), "runs_s": [round(one, 1) for one in ours]}
        if theirs:
            times = statistics.median(theirs) / statistics.median(ours)
            found |= {"trl_runs_s": [round(one, 1) for one in theirs], "times": round(times, 2)}
            found["trl"] = json.loads(printed.splitlines()[-1])
        measure.emit("tool_dialogues", seq_len=SEQ_LEN, median_s=round(statistics.median(ours), 1), **found)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3, sys.argv[2] if len(sys.argv) > 2 else None)
