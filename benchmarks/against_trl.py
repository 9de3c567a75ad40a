"""JSON Lines to packed shards, in turn with what peers do with the same rows: whole processes, and a plot of them.

    python -m benchmarks.against_trl [workloads …] [--rounds 3] [--trl PYTHON] [--axolotl PYTHON]
    python -m benchmarks.against_trl --plot

| workload | rows |
|---|---|
| `chats` | 118,430 plain chats, 22.4 M tokens |
| `airline` | a hundred dialogues of an airline's help desk with tools, each twelve times: 7.9 M tokens |
| `airline_long_run` | the same dialogues, each sixty times: 39.6 M tokens |
| `reasoning` | dialogues with reasoning and tools, repeated to about 5 M tokens |

Every row has another number in its first question. Tools and the arguments of calls are JSON text, as TRL advises for
rows whose keys differ. Every round of ours is a new process with two workers and an empty store but for the opened
tokenizer; the round before the first opens it, and is reported as `first_s`. TRL runs `peer_trl.py` and axolotl
`peer_axolotl.py` with two processes, in the environments of the given Pythons. Bare tokenizing is `peer_encode.py`: the
rendered text through `tokenizers` on both cores, without a mask, packing or a file; the rendering is not counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import corpus, measure

BUILD = "from rowmill.cli.main import run; run()"
"""What the installed command does: `main` alone collects garbage more often, and ends more slowly."""
PICTURE = "docs/images/speed.svg"
STYLE = (
    ":root { color-scheme: light dark } text { fill: #1b1f27 } .ground { fill: #ffffff } .note { fill: #4d5666 } "
    ".ours { fill: #3f7a4f } .theirs { fill: #9aa3b1 } @media (prefers-color-scheme: dark) { text { fill: #e8ebf0 } "
    ".ground { fill: #14171d } .note { fill: #a9b2c1 } .ours { fill: #6fb583 } .theirs { fill: #6b7484 } }"
)
KEYS = ("role", "content", "reasoning_content", "tool_call_id", "name")


class Workload(NamedTuple):
    """Rows, how often each is written, and the longest sequence."""

    label: str
    rows: Callable[[], Iterator[dict[str, Any]]]
    repeats: int
    seq_len: int


def read_plain_chats() -> Iterator[dict[str, Any]]:
    """Yield the plain chats of the corpus."""
    for messages in corpus.conversations():
        if messages[-1]["role"] == "assistant" and messages[0]["role"] in ("user", "system"):
            yield {"messages": messages}


def read_airline_dialogues() -> Iterator[dict[str, Any]]:
    """Yield the dialogues of the help desk."""
    for line in (corpus.DATA / "tools/tau_airline_gpt4o.messages.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield write_as_text(row["messages"], row["tools"])


def read_reasoning_dialogues() -> Iterator[dict[str, Any]]:
    """Yield dialogues with reasoning and tools, with the messages that rowmill reads from each record."""
    from docs.generate import template_table

    for path in ("reasoning/reason_tool_use_demo_50.jsonl", "reasoning/toolrl_rlla_sft.json"):
        for chat in template_table.read_chats(corpus.DATA, template_table.ChatFile(path), sys.maxsize):
            yield write_as_text(chat.messages, chat.tools)


def write_as_text(messages: Sequence[dict[str, Any]], tools: Any) -> dict[str, Any]:
    """Return a row in which tools and the arguments of calls are JSON text."""
    copies = []
    for message in messages:
        copy = {name: message[name] for name in KEYS if message.get(name)} | {"content": message.get("content") or ""}
        if message.get("tool_calls"):
            copy["tool_calls"] = [_write_arguments(call) for call in message["tool_calls"]]
        copies.append(copy)
    return {"messages": copies, "tools": json.dumps(tools) if tools else None}


def _write_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given = function["arguments"]
    text = given if isinstance(given, str) else json.dumps(given)
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": text}}


WORKLOADS = {
    "chats": Workload("Plain chats", read_plain_chats, 10, 2_048),
    "airline": Workload("Dialogues with tools", read_airline_dialogues, 12, 16_384),
    "airline_long_run": Workload("Dialogues with tools, five times as many", read_airline_dialogues, 60, 16_384),
    "reasoning": Workload("Reasoning with tools", read_reasoning_dialogues, 16, 16_384),
}


def write_rows(path: Path, workload: Workload) -> int:
    """Write the rows so many times, each with another number in its first question; return the number of rows."""
    written = 0
    originals = list(workload.rows())
    with path.open("w", encoding="utf-8") as sink:
        for number in range(workload.repeats):
            for row in originals:
                messages = [dict(message) for message in row["messages"]]
                asked = next(message for message in messages if message["role"] == "user")
                asked["content"] = f"[{number}] {asked['content']}"
                sink.write(json.dumps(row | {"messages": messages}, ensure_ascii=False) + "\n")
                written += 1
    return written


def time_process(command: Sequence[str], folder: Path, path: str) -> tuple[float, str]:
    """Run a process; return its seconds from start to end and what it printed."""
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return time.perf_counter() - started, done.stdout


def write_rendered(rows: Path, texts: Path) -> None:
    """Write each row as the template prints it, a line of JSON each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpus.TOKENIZER)
    tokenizer.chat_template = corpus.TRAINING_TEMPLATE.read_text(encoding="utf-8")
    with texts.open("w", encoding="utf-8") as sink:
        for line in rows.read_bytes().splitlines():
            row = json.loads(line)
            tools = json.loads(row["tools"]) if row.get("tools") else None
            sink.write(json.dumps(tokenizer.apply_chat_template(row["messages"], tools=tools, tokenize=False)) + "\n")


def describe_rows() -> dict[str, Any]:
    """Return the dataset of a recipe that reads `rows.jsonl`."""
    dropped = dict.fromkeys(("reasoning", "tool_list", "call_arguments", "text_beside_call"), "count")
    return {
        "source": {"train_urls": ["rows.jsonl"]},
        "format": {"kind": "chat"},
        "splits": {"validation": 0},
        "template": {"chat_template": {"file": str(corpus.TRAINING_TEMPLATE)}, "on_dropped": dropped},
    }


def compare(name: str, rounds: int, trl: str | None, axolotl: str | None = None) -> None:
    """Run both in turn, and print a line."""
    workload = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        rows = write_rows(folder / "rows.jsonl", workload)
        values = {
            "tokenizer": str(corpus.TOKENIZER), "seq_len": workload.seq_len, "execution": {"workers": 2},
            "datasets": {"rows": describe_rows()},
        }  # fmt: skip
        # JSON is YAML.
        (folder / "rows.yaml").write_text(json.dumps(values), encoding="utf-8")
        build = [sys.executable, "-c", BUILD, "build", "rows.yaml", "--root", "store", "--until", "packed_shards"]
        import_path = os.pathsep.join(str(measure.ROOT / one) for one in ("", "pipelines", "assets"))
        peer = [trl or "", str(measure.ROOT / "benchmarks/peer_trl.py"), "rows.jsonl", str(corpus.TOKENIZER),
                str(corpus.TRAINING_TEMPLATE), "--max-length", str(workload.seq_len), "2"]  # fmt: skip
        write_rendered(folder / "rows.jsonl", folder / "texts.jsonl")
        encode = [sys.executable, str(measure.ROOT / "benchmarks/peer_encode.py"), "texts.jsonl",
                  str(corpus.TOKENIZER / "tokenizer.json")]  # fmt: skip
        other = [axolotl or "", str(measure.ROOT / "benchmarks/peer_axolotl.py"), *peer[2:-1]]
        peers = {"encode_batch": encode} | ({"trl": peer} if trl else {}) | ({"axolotl": other} if axolotl else {})
        first, _ = time_process(build, folder, import_path)
        runs: dict[str, list[float]] = {name: [] for name in ("", *peers)}
        printed: dict[str, Any] = {}
        for _ in range(rounds):
            measure.fresh(folder / "store")
            runs[""].append(time_process(build, folder, import_path)[0])
            for label, command in peers.items():
                seconds, output = time_process(command, folder, "")
                printed[label] = json.loads(output.splitlines()[-1])
                # What prepares and counts for axolotl is not counted.
                runs[label].append(printed[label].get("process_s", seconds))
        ours = runs.pop("")
        found: dict[str, Any] = {"rows": rows, "first_s": round(first, 1), "runs_s": [round(one, 1) for one in ours]}
        for label, seconds_of_peer in runs.items():
            found |= {f"{label}_runs_s": [round(one, 1) for one in seconds_of_peer], label: printed[label]}
        if trl:
            found["times"] = round(statistics.median(runs["trl"]) / statistics.median(ours), 2)
        measure.emit(
            "against_trl", workload=name, seq_len=workload.seq_len, median_s=round(statistics.median(ours), 1), **found
        )


PEERS = (("trl", "TRL"), ("axolotl", "axolotl"), ("encode_batch", "encode_batch"))
"""What is drawn beside ours, where it was measured, and its label."""


def find_last_results() -> dict[str, dict[str, dict[str, Any]]]:
    """Return by workload and peer the last result in which that peer ran in turn with us."""
    lines = (measure.ROOT / "benchmarks/results.jsonl").read_text(encoding="utf-8").splitlines()
    results = [one for one in map(json.loads, lines) if one.get("benchmark") == "against_trl"]
    last = {(one["workload"], peer): one for one in results for peer, _ in PEERS if peer in one}
    return {
        name: {peer: last[name, peer] for peer, _ in PEERS if (name, peer) in last}
        for name in WORKLOADS
        if (name, "trl") in last
    }


def draw() -> str:
    """Return the plot of the last results of each workload: million tokens per second, a peer's when it last ran."""
    drawn = find_last_results()
    fastest = max(of_peer["trl"]["trl"]["tokens"] / of_peer["trl"]["median_s"] for of_peer in drawn.values())
    parts, y = list[str](), 72
    for name, of_peer in drawn.items():
        result = of_peer["trl"]
        tokens = result["trl"]["tokens"]
        note = f"{result['rows']:,} rows, {tokens / 1e6:.1f} M tokens: {result['times']:.1f} times as fast as TRL"
        parts.append(f'<text x="14" y="{y}" font-weight="600">{WORKLOADS[name].label}</text>')
        y += 18
        parts.append(f'<text class="note" x="14" y="{y}">{note}</text>')
        bars = [("rowmill", result["median_s"], "ours")]
        bars += [(label, statistics.median(of_peer[peer][f"{peer}_runs_s"]), "theirs")
                 for peer, label in PEERS if peer in of_peer]  # fmt: skip
        for label, seconds, kind in bars:
            y += 22
            width = max(2, round(210 * tokens / seconds / fastest))
            parts.append(f'<text x="104" y="{y}" text-anchor="end">{label}</text><rect class="{kind}" x="112" '
                         f'y="{y - 12}" width="{width}" height="15" rx="2"/><text x="{width + 118}" y="{y}">'
                         f"{tokens / seconds / 1e6:.2f} M/s, {seconds:.1f} s</text>")  # fmt: skip
        y += 36
    title, subtitle = "Tokens per second", "JSON Lines to packed shards with masks, whole processes, two cores"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="460" height="{y - 12}" viewBox="0 0 460 {y - 12}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" aria-label="{title}: {subtitle}"><style>{STYLE}</style>'
        f'<rect class="ground" width="460" height="{y - 12}" rx="8"/><text x="14" y="26" font-size="15" '
        f'font-weight="600">{title}</text><text class="note" x="14" y="44" font-size="12">{subtitle}</text>'
        f"{''.join(parts)}</svg>\n"
    )


def main() -> None:
    """Compare the workloads that are named, or draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl", help="the Python of an environment with torch and TRL")
    parser.add_argument("--axolotl", help="the Python of an environment with axolotl")
    parser.add_argument("--plot", action="store_true", help=f"draw {PICTURE} from the last results")
    options = parser.parse_args()
    if options.plot:
        (measure.ROOT / PICTURE).write_text(draw(), encoding="utf-8")
        return
    for name in options.workloads or WORKLOADS:
        compare(name, options.rounds, options.trl, options.axolotl)


if __name__ == "__main__":
    main()
