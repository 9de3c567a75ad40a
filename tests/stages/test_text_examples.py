"""Rows to examples: pairs, windows and truncation; every token has one class; lengths of documents of text files."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.checks.judge import CheckResult
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.manifest import Manifest
from rowmill.stages.tokenized_examples.text_parts import cut_batches
from rowmill.tokenization.encoded_batch import TEMPLATE_KIND, Example, ExampleFields, make_columns, tabulate_examples
from rowmill.tokenization.token_truncation import (
    TokenColumn,
    concat_token_columns,
    cut_pair,
    make_constant_column,
    split_into_windows,
    truncate_tokens,
)
from tests.support.recipes import (
    CHAT,
    PAIR,
    TEXT,
    TO_EXAMPLES,
    Built,
    Workspace,
    chat,
    document,
    open_encoder,
    pair,
    sentence,
    text_of,
)
from tests.support.tiers import mark_all_but

PROMPT, ANSWER = SPAN_KINDS.index("prompt"), SPAN_KINDS.index("assistant")


def _example(ids: list[int], mask: list[int], spans: list[tuple[int, int]] | None = None) -> Example:
    starts, kinds = zip(*(spans or [(0, TEMPLATE_KIND)]), strict=True)
    return Example(
        ids=np.array(ids, np.int32), mask=np.array(mask, bool), span_starts=np.array(starts, np.int64),
        span_messages=np.full(len(starts), -1, np.int64), span_kinds=np.array(kinds, np.int8),
        original_tokens=len(ids), original_trained=sum(mask),
    )  # fmt: skip


def _stream(rows: list[list[int]], kind: int, *, trains: bool) -> TokenColumn:
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return TokenColumn(np.array([i for row in rows for i in row], np.int32), offsets, kind, trains)


def test_interleaved_columns_are_the_specified_pair_and_never_train_the_first_token() -> None:
    streams = [
        make_constant_column(1, 2, kind=TEMPLATE_KIND, trains=False), _stream([[5, 6], []], PROMPT, trains=False),
        _stream([[7], [8, 9]], ANSWER, trains=True), make_constant_column(2, 2, kind=TEMPLATE_KIND, trains=True),
    ]  # fmt: skip

    first, second = concat_token_columns(streams)

    assert first.ids.tolist() == [1, 5, 6, 7, 2]
    assert first.mask.tolist() == [False, False, False, True, True]
    assert list(zip(first.span_starts.tolist(), first.span_kinds.tolist(), strict=True)) == [
        (0, TEMPLATE_KIND), (1, PROMPT), (3, ANSWER), (4, TEMPLATE_KIND),
    ]  # fmt: skip
    assert second.ids.tolist() == [1, 8, 9, 2]
    assert second.span_starts.tolist() == [0, 1, 3]

    (one,) = concat_token_columns([_stream([[5, 6]], ANSWER, trains=True)])

    assert one.mask.tolist() == [False, True]
    assert one.original_trained == 1


@given(length=st.integers(1, 40), limit=st.integers(2, 15))
def test_windows_lose_no_token_and_train_all_but_their_first(length: int, limit: int) -> None:
    example = _example(list(range(length)), [0] + [1] * (length - 1))

    pieces = split_into_windows(example, limit)

    assert [i for piece in pieces for i in piece.ids.tolist()] == list(range(length))
    assert all(len(piece.ids) <= limit and piece.tokens_cut == 0 for piece in pieces)
    assert all(piece.mask.tolist() == [False] + [True] * (len(piece.ids) - 1) for piece in pieces)
    assert all(piece.original_tokens == len(piece.ids) for piece in pieces)


def test_truncated_pair_loses_the_input_first_and_a_kept_tail_keeps_the_bos() -> None:
    example = _example([1, 10, 11, 12, 20, 21, 2], [0, 0, 0, 0, 1, 1, 1])

    left = cut_pair(example, 5, "left", 3, 1)
    right = cut_pair(example, 5, "right", 3, 1)
    deep = cut_pair(example, 3, "left", 3, 1)

    assert left.ids.tolist() == [1, 12, 20, 21, 2]
    assert right.ids.tolist() == [1, 10, 20, 21, 2]
    assert deep.ids.tolist() == [1, 20, 21]
    assert deep.tokens_cut == 4

    example = _example([1, 10, 11, 12, 13], [0, 1, 1, 1, 1], [(0, TEMPLATE_KIND), (1, PROMPT), (3, ANSWER)])

    kept = truncate_tokens(example, 3, "left", bos_id=1)

    assert kept.ids.tolist() == [1, 12, 13]
    assert kept.mask.tolist() == [False, True, True]
    assert list(zip(kept.span_starts.tolist(), kept.span_kinds.tolist(), strict=True)) == [
        (0, TEMPLATE_KIND),
        (1, ANSWER),
    ]
    assert truncate_tokens(example, 3, "left", bos_id=None).ids.tolist() == [11, 12, 13]
    assert truncate_tokens(example, 3, "right", bos_id=1).ids.tolist() == [1, 10, 11]


@given(sizes=st.lists(st.integers(0, 10), max_size=12), limit=st.integers(1, 15))
def test_batches_are_consecutive_and_leave_no_row_out(sizes: list[int], limit: int) -> None:
    cut = list(cut_batches(sizes, limit))

    assert [i for one in cut for i in range(one.start, one.stop)] == list(range(len(sizes)))


def test_columns_count_every_token_in_one_class() -> None:
    one = _example([1, 5, 6, 2], [0, 0, 1, 1], [(0, TEMPLATE_KIND), (1, PROMPT), (2, ANSWER), (3, TEMPLATE_KIND)])

    columns = make_columns([(0, 0, one), (0, 1, one)])
    rows = pa.table({"row_id": ["a:0"], "split": ["train"], "domain": pa.nulls(1, pa.string())})
    examples, of_rows, verified = tabulate_examples([columns], rows, ExampleFields())
    row = examples.to_pylist()[1]

    assert (of_rows.tolist(), verified) == ([0, 0], 2)
    assert row["example_id"] == "a:0#1"
    assert row["row_ids"] == ["a:0"]
    assert (row["trained_tokens"], row["context_tokens"], row["template_tokens"], row["tokens"]) == (2, 1, 1, 4)


def _chat_example(mask: list[int]) -> Example:
    return _example(
        [1, 5, 6, 3, 7, 8, 2, 4],
        mask,
        [(0, TEMPLATE_KIND), (1, PROMPT), (3, TEMPLATE_KIND), (4, ANSWER), (6, TEMPLATE_KIND)],
    )


@pytest.mark.parametrize(
    ("mask", "verified"),
    [([0, 0, 0, 0, 1, 1, 1, 0], 1), ([0, 0, 0, 1, 1, 1, 0, 0], 1), ([0, 1, 1, 0, 0, 0, 0, 0], 1),
     ([0, 0, 0, 1, 1, 0, 0, 0], 0), ([0, 0, 0, 0, 0, 1, 1, 1], 0), ([0, 0, 1, 1, 1, 1, 1, 0], 0)],
    ids=["as-it-is", "end-left-out", "prompt", "one-early", "one-late", "into-the-prompt"],
)  # fmt: skip
def test_verified_counts_only_masks_that_own_text_agrees_with(mask: list[int], verified: int) -> None:
    columns = make_columns([(0, 0, _chat_example(mask)), (1, 0, _chat_example([0, 0, 0, 0, 1, 1, 1, 0]))])

    assert columns.count_verified()[2] == verified + 1


def _spans(example: dict[str, list[int]]) -> list[tuple[str, list[int]]]:
    bounds = [*example["span_starts"], len(example["input_ids"])]
    return [
        (SPAN_KINDS[kind], example["input_ids"][left:right])
        for kind, left, right in zip(example["span_kinds"], bounds, bounds[1:], strict=False)
    ]


@pytest.mark.slow
def test_chat_trains_the_answer_and_its_end_and_labels_every_token(tmp_path: Path) -> None:
    built = Workspace(tmp_path).one("a.jsonl", [chat(0, turns=2)], CHAT).build()

    (example,) = built.examples()
    text = text_of(example)
    trained = [i for i, mask in zip(example["input_ids"], example["loss_mask"], strict=True) if mask]
    answers = [m["content"] + "<|im_end|>" for m in chat(0, turns=2)["messages"] if m["role"] == "assistant"]
    assert text_of({"input_ids": trained}) == "".join(answers)
    kinds = [kind for kind, _ in _spans(example)]
    assert kinds == ["template", *["user", "template", "assistant", "template"] * 2]
    assert "".join(text_of({"input_ids": ids}) for _, ids in _spans(example)) == text


@pytest.mark.slow
def test_pair_ids_equal_prompt_ids_plus_answer_ids(tmp_path: Path) -> None:
    options = {**PAIR, "separate_with": "\n"}
    built = Workspace(tmp_path).one("a.jsonl", [pair(3)], options).build()

    (example,) = built.examples()
    assert text_of(example) == f"{pair(3)['prompt']}\n{pair(3)['answer']}<|im_end|>"
    assert [kind for kind, _ in _spans(example)] == ["prompt", "assistant", "template"]
    assert example["trained_tokens"] == sum(example["loss_mask"])


# ── Whole parts ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("loss", [{}, {"mask": {"prompt": "train"}}])
def test_pair_encoded_whole_does_not_train_a_token_across_its_boundary(tmp_path: Path, loss: dict[str, Any]) -> None:
    rows = [{"prompt": "maps and r", "answer": "iver stones"}, {"prompt": "green paper ", "answer": "boats answer"}]
    kind = PAIR | {"add_eos": False}

    built = Workspace(tmp_path).one("a.jsonl", rows, kind, loss={"boundary": "whole", **loss}).build()

    encoder = open_encoder(built)
    for row, example in zip(rows, built.examples(), strict=True):
        encoded, edge = encoder.encode([row["prompt"] + row["answer"]]), len(row["prompt"])
        inside = encoded.ends <= edge if loss else encoded.starts >= edge
        inside[0] = False
        assert example["input_ids"] == encoded.ids.tolist()
        assert example["loss_mask"] == inside.tolist()
    assert built.facts("rows", "tokenized_examples")["boundary_tokens"] >= 1


@pytest.mark.parametrize(
    ("overlong", "examples", "reason"), [("split", 3, None), ("truncate", 1, None), ("drop", 0, "overlong")]
)
def test_documents_too_long_follow_the_policy(tmp_path: Path, overlong: str, examples: int, reason: str | None) -> None:
    rows = [document(1, words=150)]
    built = (
        Workspace(tmp_path)
        .one("a.jsonl", rows, TEXT, truncation={"overlong": overlong, "max_length": 64})
        .build(only=TO_EXAMPLES)
    )

    found = built.examples()
    assert len(found) >= examples if overlong == "split" else len(found) == examples
    assert [why for _, why in built.rejects()] == ([reason] if reason else [])
    assert _ledger_is_whole(built)
    dropped = sum(
        count for _, name, count in built.manifest("rows", "tokenized_examples").token_ledger if name == "dropped"
    )
    assert (dropped > 64) is (overlong == "drop")
    if overlong == "split":
        assert "".join(text_of(one) for one in found) == rows[0]["text"] + "<|im_end|>"


def test_chat_too_long_loses_its_oldest_exchange_first(tmp_path: Path) -> None:
    built = (
        Workspace(tmp_path).one("a.jsonl", [chat(0, turns=4, words=12)], CHAT, truncation={"max_length": 150}).build()
    )

    (example,) = built.examples()
    messages = chat(0, turns=4, words=12)["messages"]
    assert messages[-1]["content"] in text_of(example)
    assert messages[0]["content"] not in text_of(example)
    assert example["tokens_cut"] == 0
    assert example["exchanges_removed"] == example["original_tokens"] - example["tokens"] > 0
    assert example["messages_removed"] in (2, 4, 6)
    assert _ledger_is_whole(built)


def _ledger_is_whole(built: Built) -> bool:
    found = built.manifest("rows", "tokenized_examples")
    original = sum(one["original_tokens"] for one in built.examples())
    counted = sum(count for _, name, count in found.token_ledger if name != "dropped")
    return counted == original and found.facts["accounted"] == 0


@pytest.mark.slow
def test_reasoning_limit_keeps_its_first_tokens(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thought = "seven stone maps under paper light and winter moving slowly past"
    row = {
        "messages": [
            {"role": "user", "content": "why?"},
            {"role": "assistant", "content": "because", "reasoning_content": thought},
        ]
    }
    groups = {"template": {"chat_template": template}, "reasoning": {"think_max_tokens": 5}}

    built = Workspace(tmp_path).one("a.jsonl", [row], CHAT, **groups).build()

    (example,) = built.examples()
    kept = dict(_spans(example))["reasoning"]
    assert len(kept) <= 5
    assert thought.startswith(text_of({"input_ids": kept}))


PLAY = "\n".join(f"SPEAKER {i}:\n{sentence(i, 9)}\n{sentence(i + 500, 9)}\n" for i in range(60))


def check_lengths(
    folder: Path, *urls: str, tokenizer: str = "tokenizer", **source: Any
) -> tuple[Manifest, CheckResult]:
    """Build documents to examples; return the build and the check result on their lengths."""
    dataset = {"source": {"train_urls": list(urls), **source}, "format": TEXT}
    made = Workspace(folder).recipe({"rows": dataset}, seq_len=4096, tokenizer=tokenizer).build(only=TO_EXAMPLES)
    key = ("rows", "tokenized_examples")
    return made.manifest(*key), made.result("short_documents", *key)


@pytest.mark.parametrize(
    ("sample_by", "examples", "outcome"),
    [("line", 180, "failed"), ("paragraph", 60, "passed"), ("document", 1, "passed")],
)
def test_lines_treated_as_documents_are_a_warning(tmp_path: Path, sample_by: str, examples: int, outcome: str) -> None:
    path = Workspace(tmp_path).write("play.txt", PLAY.encode())

    made, result = check_lengths(tmp_path, path, sample_by=sample_by)

    assert (made.facts["examples"], result.outcome) == (examples, outcome)
    assert not result.blocking
    assert ("source.sample_by to paragraph or document" in result.sentence) is (outcome == "failed")


@pytest.mark.campaign
@pytest.mark.real_data
@pytest.mark.parametrize(
    ("sample_by", "share"), mark_all_but(["line"], [("line", 0.95), ("paragraph", 0.4), ("document", 0)])
)
def test_real_play_is_a_warning_only_when_split_by_line(
    tmp_path: Path, real_data: Path, sample_by: str, share: float
) -> None:
    path, tokenizer = (str(real_data / name) for name in ("text/tinyshakespeare.txt", "tokenizers/qwen3"))

    made, result = check_lengths(tmp_path, path, tokenizer=tokenizer, sample_by=sample_by)

    assert result.value == pytest.approx(share, abs=0.05)
    assert result.outcome == ("failed" if sample_by == "line" else "passed")
    assert made.facts["accounted"] == 0


def test_short_records_of_other_files_are_no_warning(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    short = workspace.write("short.jsonl", [document(i, words=3) for i in range(40)])
    long = workspace.write("long.txt", (sentence(1, 60) + "\n").encode())

    assert check_lengths(tmp_path, short)[1].outcome == "not_applicable"
    assert check_lengths(tmp_path, short, long)[1].value == 0
