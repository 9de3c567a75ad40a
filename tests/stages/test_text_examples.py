"""Rows to examples: pairs, windows and truncation; every token has one class; lengths of documents of text files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.checks.judge import CheckResult
from rowmill.core.errors import ConfigError
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.manifest import Manifest
from rowmill.stages.tokenized_examples.text_parts import cut_batches
from rowmill.tokenization.encoded_batch import TEMPLATE_KIND, Example, make_columns
from rowmill.tokenization.token_truncation import cut_pair, split_into_windows, truncate_tokens
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer
from tests.support.recipes import PAIR, TEXT, TO_EXAMPLES, Built, Workspace, document, pair, sentence, text_of

PROMPT, ANSWER = SPAN_KINDS.index("prompt"), SPAN_KINDS.index("assistant")


def _example(ids: list[int], mask: list[int], spans: list[tuple[int, int]] | None = None) -> Example:
    starts, kinds = zip(*(spans or [(0, TEMPLATE_KIND)]), strict=True)
    return Example(
        ids=np.array(ids, np.int32), mask=np.array(mask, bool), span_starts=np.array(starts, np.int64),
        span_messages=np.full(len(starts), -1, np.int64), span_kinds=np.array(kinds, np.int8),
        original_tokens=len(ids), original_trained=sum(mask),
    )  # fmt: skip


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

    assert columns.count_by_kind()[2] == verified + 1


# ── Whole parts ────────────────────────────────────────────────────────────────────────────────────


def test_pair_joined_by_an_id_is_not_encoded_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss\.boundary: whole"):
        Workspace(tmp_path).one("a.jsonl", [pair(0)], PAIR | {"separate_with": 1}, loss={"boundary": "whole"}).build()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [{}, {"mask": {"prompt": "train"}}])
def test_pair_encoded_whole_does_not_train_a_token_across_its_boundary(tmp_path: Path, loss: dict[str, Any]) -> None:
    rows = [{"prompt": "maps and r", "answer": "iver stones"}, {"prompt": "green paper ", "answer": "boats answer"}]
    kind = PAIR | {"add_eos": False}

    built = Workspace(tmp_path).one("a.jsonl", rows, kind, loss={"boundary": "whole", **loss}).build()

    encoder = Encoder(open_tokenizer(str(tmp_path / "tokenizer"), tmp_path))
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


def _ledger_is_whole(built: Built) -> bool:
    found = built.manifest("rows", "tokenized_examples")
    original = sum(one["original_tokens"] for one in built.examples())
    counted = sum(count for _, name, count in found.token_ledger if name != "dropped")
    return counted == original and found.facts["accounted"] == 0


PLAY = "\n".join(f"SPEAKER {i}:\n{sentence(i, 9)}\n{sentence(i + 500, 9)}\n" for i in range(60))


def check_lengths(
    folder: Path, *urls: str, tokenizer: str = "tokenizer", **source: Any
) -> tuple[Manifest, CheckResult]:
    """Build documents to examples; return the build and the check result on their lengths."""
    dataset = {"source": {"train_urls": list(urls), **source}, "format": TEXT}
    made = Workspace(folder).recipe({"rows": dataset}, seq_len=4096).build(only=TO_EXAMPLES)
    report, results = made.steps["rows", "tokenized_examples"]
    return report.manifest, next(one for one in results if one.check == "short_documents")


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


def test_short_records_of_other_files_are_no_warning(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    short = workspace.write("short.jsonl", [document(i, words=3) for i in range(40)])
    long = workspace.write("long.txt", (sentence(1, 60) + "\n").encode())

    assert check_lengths(tmp_path, short)[1].outcome == "not_applicable"
    assert check_lengths(tmp_path, short, long)[1].value == 0
