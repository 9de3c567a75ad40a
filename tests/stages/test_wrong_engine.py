"""A part in which a fast engine gave other ids than the reference is made again on the reference path."""

from pathlib import Path

import pytest

from rowmill.stages.tokenized_examples import text_parts
from rowmill.tokenization import stored_tokenizers, tokenizer
from tests.support.recipes import TO_EXAMPLES, Workspace, sentence


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat", "text", "records"])
def test_part_in_which_an_engine_is_wrong_once_is_made_again_on_the_reference_path(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{sentence(i, 40)} {'Ж' if i == 199 else ''}" for i in range(200)]
    rows: dict[str, list[dict[str, object]]] = {
        "chat": [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")]} for text in texts],
        "text": [{"text": text} for text in texts],
        "records": [{"number": i, "text": text} for i, text in enumerate(texts)],
    }
    source = {"source": {"train_urls": ["data/rows.jsonl"]}, "format": {"kind": kind}}
    right, wrong = (Workspace(tmp_path / name) for name in ("right", "wrong"))
    for workspace in (right, wrong):
        workspace.write("rows.jsonl", rows[kind])
        workspace.recipe({"rows": source}, seq_len=2048)
    expected = right.build(only=TO_EXAMPLES)
    open_engine = tokenizer.FAST_ENGINES["gigatoken"]

    def open_wrong(backend: str) -> tokenizer.EncodeTexts:
        encode = open_engine(backend)
        return lambda texts: encode([text.replace("Ж", "И") for text in texts])

    monkeypatch.setitem(tokenizer.FAST_ENGINES, "gigatoken", open_wrong)
    monkeypatch.setattr(stored_tokenizers, "_ENCODERS", {})
    monkeypatch.setattr(text_parts, "_EXAMPLE_BUILDERS", {})
    # The wrong text is in the last batch: the others are made again as well.
    monkeypatch.setattr(text_parts, "BATCH_CHARS", 1 << 14)
    made = wrong.build(only=TO_EXAMPLES)

    assert [one["input_ids"] for one in made.examples()] == [one["input_ids"] for one in expected.examples()]
    assert expected.facts("rows", "tokenized_examples")["fast_path_mismatches"] == 0
    assert made.facts("rows", "tokenized_examples")["fast_path_mismatches"] > 0
    assert (
        made.facts("rows", "tokenized_examples")["reference_path_texts"]
        >= len(texts)
        > expected.facts("rows", "tokenized_examples")["reference_path_texts"]
    )
