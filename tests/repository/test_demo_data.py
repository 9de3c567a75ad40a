"""The demo's data are what its script says, right in what they claim, and broken in every way that they should be."""

import csv
import io
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rowmill.build import runner, steps
from rowmill.kinds.reading.canonicalization import Canonicalizer
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Recipe
from rowmill.schema.ledger import REJECT_REASONS
from rowmill.schema.rows import Rejected, Row
from tests.support.canonical_rows import canonicalize_row

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo"
MEGABYTE = 1_000_000
CHAT_FILES = ("chats-1.jsonl", "chats-2.jsonl")
LATER = {
    "bad_tool_arguments",
    "content_dropped",
    "group_missing",
    "no_assistant",
    "no_loss_tokens",
    "template_error",
}
"""Reasons that are found only when rows are split, rendered or masked."""
UNREADABLE = {"invalid_json", "not_utf8", "not_an_object", "too_deep"}
"""Reasons that are found when a file is read."""


@pytest.fixture(scope="module")
def demo() -> Recipe:
    return recipe.load_recipe(DEMO / "demo.yaml")


@pytest.fixture(scope="module")
def flaws() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DEMO))
    import flaws as module

    yield module
    sys.path.remove(str(DEMO))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer" / "tokenizer.json"))


def lines(name: str) -> list[bytes]:
    """Return the lines of a JSON Lines file, unpacked where it is packed."""
    content = (DEMO / "data" / name).read_bytes()
    if name.endswith(".zst"):
        content = zstandard.ZstdDecompressor().stream_reader(content).read()
    return content.rstrip(b"\n").split(b"\n")


def readable(name: str) -> Iterator[Any]:
    """Yield the records of a JSON Lines file that are JSON."""
    for line in lines(name):
        try:
            yield json.loads(line)
        except ValueError:
            continue


def conversations() -> Iterator[Any]:
    """Yield every readable record of the chats dataset."""
    for name in CHAT_FILES:
        yield from readable(name)
    yield from json.loads((DEMO / "data" / "sharegpt.json").read_bytes())


@pytest.mark.slow
def test_generator_run_again_gives_the_committed_files(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-B", str(DEMO / "generate.py"), str(tmp_path)], check=True, cwd=tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert {str(path) for path in made} == {
        "data/chats-1.jsonl",
        "data/chats-2.jsonl",
        "data/documents.jsonl.zst",
        "data/instructions.csv",
        "data/sharegpt.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    }
    for path in made:
        fresh, kept = (tmp_path / path).read_bytes(), (DEMO / path).read_bytes()
        if path.suffix == ".zst":
            # Releases of zstandard may pack the same content differently.
            fresh, kept = (zstandard.ZstdDecompressor().stream_reader(one).read() for one in (fresh, kept))
        assert fresh == kept, f"{path} is not what configs/demo/generate.py writes; run it and commit the result"


def test_demo_files_stay_small() -> None:
    sizes = {path: path.stat().st_size for path in DEMO.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    assert max(sizes.values()) < MEGABYTE
    assert sum(sizes.values()) < 3 * MEGABYTE


def test_products_and_python_expressions_that_the_data_state_are_right() -> None:
    text = "\n".join(line.decode(errors="replace") for name in CHAT_FILES for line in lines(name))
    products = re.findall(r"(?<![\d.])(\d+) × (\d+) = (\d+)(?![\d.])", text)

    assert len(products) > 100
    assert [one for one in products if int(one[0]) * int(one[1]) != int(one[2])] == []
    asked = re.findall(r"`sum\((\[[\d, ]+\])\)` give in Python\?.*?\"content\":\"[^`]*`(\d+)`", text)
    assert len(asked) > 5
    assert [one for one in asked if sum(json.loads(one[0])) != int(one[1])] == []


def test_flaws_of_every_kind_are_named_by_the_ledger_and_in_the_committed_files(flaws: ModuleType) -> None:
    named = {
        reason for reason, _ in [*flaws.chat_flaws(), *flaws.SHAREGPT_FLAWS, *flaws.CSV_FLAWS, *flaws.DOCUMENT_FLAWS]
    }

    assert named <= REJECT_REASONS
    assert len(named) >= 25
    chats = {line for name in CHAT_FILES for line in lines(name)}
    table = (DEMO / "data" / "instructions.csv").read_bytes()
    shares = json.loads((DEMO / "data" / "sharegpt.json").read_bytes())
    assert {line for _, line in flaws.chat_flaws()} <= chats
    assert {line for _, line in flaws.DOCUMENT_FLAWS} <= set(lines("documents.jsonl.zst"))
    assert all(line in table for _, line in flaws.CSV_FLAWS)
    assert all(flaw in shares for _, flaw in flaws.SHAREGPT_FLAWS)


def test_flawed_records_are_rejected_for_their_listed_reason(flaws: ModuleType, demo: Recipe) -> None:
    chats = [(reason, json.loads(line)) for reason, line in flaws.chat_flaws() if reason not in LATER | UNREADABLE]
    texts = [(reason, json.loads(line)) for reason, line in flaws.DOCUMENT_FLAWS if reason not in UNREADABLE]
    for dataset, flawed in (("chats", [*chats, *flaws.SHAREGPT_FLAWS]), ("documents", texts)):
        found = [canonicalize_row(record, demo.datasets[dataset]) for _, record in flawed]

        reasons = [one.reason if isinstance(one, Rejected) else "kept" for one in found]
        assert reasons == [reason for reason, _ in flawed]


@pytest.mark.slow
def test_demo_build_rejects_exactly_its_flaws_and_opens_every_gate(flaws: ModuleType, tmp_path: Path) -> None:
    planted = [*flaws.chat_flaws(), *flaws.SHAREGPT_FLAWS, *flaws.CSV_FLAWS, *flaws.DOCUMENT_FLAWS]
    wanted = Counter(reason for reason, _ in planted) + Counter({"duplicate": 10 + 8 + 4, "too_long": 1})
    done = runner.build(steps.open_project(DEMO / "demo.yaml", str(tmp_path)))
    found: Counter[str] = Counter()
    for step, report, _ in done:
        if step.name in {"canonical_rows", "tokenized_examples"}:
            found.update({reason: count for state, reason, count in report.manifest.ledger if state == "rejected"})
    assert found == wanted
    failed = [result for _, _, results in done for result in results if result.failed]
    # The one warning that the README shows: the demo's context is short, so that truncation can be seen.
    assert [(result.check, result.severity) for result in failed] == [("end_to_end_loss", "warn")]
    assert done[-1][0].name == "gpu_partitions"


def test_conversations_without_flaws_become_rows_of_every_shape(demo: Recipe) -> None:
    read = Canonicalizer(demo.datasets["chats"])
    records = [one for one in conversations() if isinstance(one, dict) and one.get("topic", "flaws") != "flaws"]
    rows = [read(record) for record in records]
    kept = [row for row in rows if isinstance(row, Row)]
    assert len(kept) == len(rows) > 1200
    reports = [row.report for row in kept]
    assert {report.schema for report in reports} == {"messages", "sharegpt"}
    assert sum(report.extracted_think_from_content for report in reports) > 100
    assert sum(report.moved_reasoning_keys for report in reports) > 50
    assert sum(report.tools_parsed_from_string for report in reports) > 10
    assert 0 < sum(bool(report.unknown_roles) for report in reports) < len(records) / 100
    assert {role for report in reports for role in report.unknown_roles} == {"moderator"}


def test_conversations_and_instructions_repeat_little_but_not_nothing() -> None:
    every = [line for name in CHAT_FILES for line in lines(name)]
    repeated = len(every) - len(set(every))

    assert 5 <= repeated <= len(every) / 50
    text = (DEMO / "data" / "instructions.csv").read_bytes().decode(errors="replace")
    rows = [tuple(row) for row in csv.reader(io.StringIO(text))][1:]
    whole = [row for row in rows if len(row) == 3]
    assert Counter(Counter(whole).values()) == {1: len(set(whole)) - 8, 2: 8}


def test_conversations_of_one_group_share_an_opening_and_few_groups_do() -> None:
    groups: dict[str, set[str]] = {}
    for record in conversations():
        messages = record.get("messages") or record.get("conversations") if isinstance(record, dict) else None
        if isinstance(messages, list) and isinstance(record["conversation_id"], str) and record["topic"] != "flaws":
            user = next(one for one in messages if one.get("role", one.get("from")) in {"user", "human"})
            groups.setdefault(str(user.get("content", user.get("value"))), set()).add(record["conversation_id"])
    shared = sum(len(ids) > 1 for ids in groups.values())

    assert 5 <= shared <= len(groups) / 50


@pytest.mark.slow
def test_documents_reach_from_a_paragraph_to_several_contexts(tokenizer: Tokenizer, demo: Recipe) -> None:
    texts = [record["text"] for record in readable("documents.jsonl.zst") if isinstance(record.get("text"), str)]
    limit = demo.datasets["documents"].filters.max_chars
    lengths = [len(tokenizer.encode(text).ids) for text in texts if len(text) <= (limit or 0)]
    over = sum(length > demo.seq_len for length in lengths)
    assert len(lengths) / 20 < over < len(lengths) / 4
    assert max(lengths) > 2 * demo.seq_len
    assert any(len(text) > (limit or 0) for text in texts)


@pytest.mark.slow
@given(st.text())
def test_tokenizer_decodes_what_it_encoded(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer" / "tokenizer.json"))

    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_gives_digits_one_by_one_and_knows_its_control_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<|im_start|>user\n12 × 34<|im_end|>").tokens

    assert tokens == ["<|im_start|>", "user", "Ċ", "1", "2", "ĠÃĹ", "Ġ3", "4", "<|im_end|>"]
    assert tokenizer.get_vocab_size() == 4000


def rendered(messages: list[dict[str, Any]], **more: Any) -> str:
    """Render through transformers, as the pipeline's reference does."""
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(DEMO / "tokenizer")
    return loaded.apply_chat_template(messages, tokenize=False, **more)


def test_template_prints_tools_reasoning_calls_and_any_role() -> None:
    arguments = {"city": "Kraków", "day": "2025-03-01"}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Umbrella?"},
        {"role": "assistant", "content": "", "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "fog"}'},
        {"role": "moderator", "content": "Short, please."},
        {"role": "assistant", "content": "No."},
    ]
    text = rendered(messages, tools=[tool])

    assert text == (
        "<|im_start|>system\nYou may use these tools, one JSON object per line:\n"
        '{"type": "function", "function": {"name": "get_weather", "parameters": {}}}\n'
        'To use one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\n'
        "<|im_start|>user\nUmbrella?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nAsk.\n</think>\n\n"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Kraków", "day": "2025-03-01"}}</tool_call>'
        "<|im_end|>\n"
        '<|im_start|>tool\n{"sky": "fog"}<|im_end|>\n'
        "<|im_start|>moderator\nShort, please.<|im_end|>\n"
        "<|im_start|>assistant\nNo.<|im_end|>\n"
    )


def test_template_prints_every_turn_as_it_was_and_refuses_a_system_message_in_the_middle() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "6"},
    ]
    shorter = rendered(messages[:3])

    assert rendered(messages).startswith(shorter)
    assert rendered(messages[:2], add_generation_prompt=True) + "<think>" == shorter[: shorter.index("<think>") + 7]
    from jinja2.exceptions import TemplateError

    with pytest.raises(TemplateError, match="may only come first"):
        rendered([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
