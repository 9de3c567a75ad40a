"""Conservation of tokens in built rows: original tokens are the final ones plus those that each stage removed."""

import json
from pathlib import Path
from typing import Any

import pytest

from rowmill.conversation.options import RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.stages.tokenized_examples import prompt_parity
from rowmill.tokenization import tokenizer
from rowmill.tokenization.tokenizer import Encoder
from tests.support.recipes import CHAT, TEXT, THINKING, Built, Workspace, chat, sentence, write_tokenizer

pytestmark = pytest.mark.slow

WITH_TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + THINKING


def thinker(i: int, *, turns: int, words: int, thoughts: int) -> dict[str, Any]:
    row = chat(i, turns=turns, words=words)
    for k, message in enumerate(row["messages"]):
        if message["role"] == "assistant":
            message["reasoning"] = sentence(50 * i + k, thoughts)
    return row


def built_of(folder: Path, rows: list[dict[str, Any]], **groups: Any) -> Built:
    write_tokenizer(folder / "tokenizer", template=THINKING)
    return Workspace(folder).one("a.jsonl", rows, CHAT, **groups).build()


def stages_of(example: dict[str, Any]) -> list[str]:
    named = (("exchanges", "exchanges_removed"), ("reasoning", "reasoning_removed"), ("tokens", "tokens_cut"))
    return [stage for stage, column in named if example[column]]


def assert_adds_up(example: dict[str, Any]) -> None:
    removed = example["exchanges_removed"] + example["reasoning_removed"] + example["tokens_cut"]
    trained = example["exchanges_trained"] + example["reasoning_trained"] + example["cut_trained"]
    assert example["original_tokens"] == example["tokens"] + removed
    assert example["trained_removed"] == trained
    assert len(example["input_ids"]) == example["tokens"]
    assert sum(example["loss_mask"]) == example["trained_tokens"]


def test_every_stage_counts_removed_and_removed_trained_tokens(tmp_path: Path) -> None:
    rows = [
        thinker(1, turns=1, words=4, thoughts=4),  # fits
        thinker(2, turns=4, words=4, thoughts=4),  # loses exchanges
        thinker(3, turns=1, words=4, thoughts=60),  # loses reasoning
        thinker(4, turns=2, words=4, thoughts=60),  # loses both
        thinker(5, turns=1, words=60, thoughts=8),  # loses reasoning and tokens
    ]
    built = built_of(tmp_path, rows, truncation={"max_length": 64})

    found = built.examples()
    assert [stages_of(one) for one in found] == [
        [], ["exchanges"], ["reasoning"], ["exchanges", "reasoning"], ["reasoning", "tokens"],
    ]  # fmt: skip
    for one in found:
        assert_adds_up(one)
        took = {
            "exchanges": one["exchanges_trained"],
            "reasoning": one["reasoning_trained"],
            "tokens": one["cut_trained"],
        }
        assert [stage for stage, trained in took.items() if trained] == stages_of(one)


def test_pieces_and_left_out_tokens_of_a_split_row_add_up(tmp_path: Path) -> None:
    row = thinker(1, turns=3, words=6, thoughts=40)
    row["messages"][3]["train"] = False
    whole = built_of(tmp_path / "whole", [row], truncation={"overlong": "keep"})
    split = built_of(tmp_path / "split", [row], truncation={"overlong": "split", "max_length": 100})

    original = whole.examples()[0]["original_tokens"]
    pieces = split.examples()
    for one in pieces:
        assert_adds_up(one)
    dropped = sum(n for _, name, n in split.manifest("rows", "tokenized_examples").token_ledger if name == "dropped")
    assert dropped > 0
    assert sum(one["original_tokens"] for one in pieces) + dropped == original


def test_exact_fit_is_kept_whole_and_one_token_less_is_not(tmp_path: Path) -> None:
    row = chat(1, turns=2)
    length = built_of(tmp_path / "a", [row]).examples()[0]["tokens"]

    fitting = built_of(tmp_path / "b", [row], truncation={"max_length": length}).examples()[0]
    shorter = built_of(tmp_path / "c", [row], truncation={"max_length": length - 1}).examples()[0]

    assert (fitting["tokens"], fitting["messages_removed"]) == (length, 0)
    assert shorter["messages_removed"] == 2


@pytest.mark.parametrize(("turns", "words"), [(1, 4), (3, 6), (6, 20)])
def test_truncated_examples_train_each_kept_supervised_message_once(tmp_path: Path, turns: int, words: int) -> None:
    built = built_of(tmp_path, [thinker(7, turns=turns, words=words, thoughts=6)], truncation={"max_length": 90})

    for one in built.examples():
        starts = [*one["span_starts"], one["tokens"]]
        trained = {
            message
            for message, start, stop in zip(one["span_messages"], starts, starts[1:], strict=False)
            if message >= 0 and any(one["loss_mask"][start:stop])
        }
        assistants = {message for message in one["span_messages"] if message % 2 == 1}
        assert trained <= assistants
        assert assistants - trained <= {min(assistants)}  # truncation at a token may untrain the first one


def test_text_that_begins_with_bos_or_ends_with_eos_gets_no_second_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    config = json.loads((tmp_path / "tokenizer/tokenizer_config.json").read_text())
    (tmp_path / "tokenizer/tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|im_start|>"}))
    rows = [
        {"text": "one"},
        {"text": "<|im_start|>two"},
        {"text": "three<|im_end|>"},
        {"text": "<|im_start|>4<|im_end|>"},
    ]

    built = Workspace(tmp_path).one("a.jsonl", rows, TEXT).build()

    for one in built.examples():
        ids = one["input_ids"]
        assert (ids[0], ids[-1]) == (1, 2)
        assert (ids.count(1), ids.count(2)) == (1, 1)
        assert one["loss_mask"] == [False, *[True] * (len(ids) - 1)]


TOOL = {"type": "function", "function": {"name": "look_up", "description": "Find a word.", "parameters": {}}}


def test_tool_lengths_are_what_the_tools_add_to_the_text_or_those_of_the_schemas_where_a_template_refuses(
    tmp_path: Path,
) -> None:
    import pyarrow as pa

    encoder = Encoder(tokenizer.open_tokenizer(str(write_tokenizer(tmp_path / "t")), tmp_path))
    text = json.dumps([TOOL])
    column = pa.chunked_array([pa.array([text, None, text, json.dumps([TOOL, TOOL])])])

    measured = prompt_parity.measure_tools(column, Renderer(RendererSpec(WITH_TOOLS)), encoder)
    ignored = prompt_parity.measure_tools(column, Renderer(RendererSpec(THINKING)), encoder)

    one, two = (
        len(encoder.encode([f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n"]).ids)
        for tools in ([TOOL], [TOOL] * 2)
    )
    assert measured == (3, 2 * one + two, two)
    assert ignored == (3, 0, 0)

    picky = "{% if messages[0]['content'] == 'x' %}{{ raise_exception('no') }}{% endif %}" + WITH_TOOLS

    measured = prompt_parity.measure_tools(pa.chunked_array([pa.array([text])]), Renderer(RendererSpec(picky)), encoder)

    assert measured.tokens == len(encoder.encode([text]).ids)
