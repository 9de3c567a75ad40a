"""How often a build opens its tokenizer, and a part in which a fast engine gave other ids than the reference."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rowmill.build import preflight
from rowmill.stages.tokenized_examples import text_parts
from rowmill.tokenization import reference_sample, stored_tokenizers, tokenizer
from tests.support.recipes import TEXT, TO_EXAMPLES, Workspace, document, sentence

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count openings in a process that has none open yet."""
    found: Counter[str] = Counter()
    open_engine, open_reference = tokenizer.FAST_ENGINES["gigatoken"], tokenizer.open_reference_backend

    def count_engine(backend: str) -> tokenizer.EncodeTexts:
        found["engine"] += 1
        return open_engine(backend)

    def count_reference(backend: str) -> object:
        found["reference"] += 1
        return open_reference(backend)

    monkeypatch.setattr(stored_tokenizers, "_ENCODERS", {})
    monkeypatch.setattr(text_parts, "_EXAMPLE_BUILDERS", {})
    monkeypatch.setitem(tokenizer.FAST_ENGINES, "gigatoken", count_engine)
    monkeypatch.setattr(tokenizer, "open_reference_backend", count_reference)
    return found


def test_first_build_opens_engine_and_reference_once_and_the_next_opens_neither(
    tmp_path: Path, opened: Counter[str]
) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [document(i, words=9) for i in range(40)], TEXT)

    workspace.build(only=TO_EXAMPLES)
    assert opened == {"engine": 1, "reference": 1}

    workspace.one("more.jsonl", [document(i, words=9) for i in range(50)], TEXT).build(only=TO_EXAMPLES)
    assert opened == {"engine": 1, "reference": 1}


def test_trial_of_first_records_opens_engine_and_reference_once_and_the_next_builds_open_neither(
    tmp_path: Path, opened: Counter[str]
) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [document(i, words=9) for i in range(40)], TEXT)

    preflight.require_no_mistakes(workspace.project)
    assert opened == {"engine": 1, "reference": 1}

    workspace.build(only=TO_EXAMPLES)
    workspace.one("more.jsonl", [document(i, words=9) for i in range(50)], TEXT).build(only=TO_EXAMPLES)
    assert opened == {"engine": 1, "reference": 1}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda _: b"",
    "cut": lambda old: old[:-9],
    "longer": lambda old: old + b"\0",
    "changed": lambda old: old.replace(b"a", b"b"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_stored_tokenizer_is_made_again(
    damage: str, tmp_path: Path, opened: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [document(i, words=9) for i in range(40)], TEXT)
    first = workspace.build(only=TO_EXAMPLES).examples()
    [stored] = (workspace.store / "tokenizers").iterdir()
    whole = stored.read_bytes()
    stored.write_bytes(DAMAGES[damage](whole))
    monkeypatch.setattr(stored_tokenizers, "_ENCODERS", {})

    more = workspace.one("more.jsonl", [document(i, words=9) for i in range(50)], TEXT).build(only=TO_EXAMPLES)

    assert opened["engine"] == 2
    assert stored.read_bytes() == whole
    assert [one["input_ids"] for one in more.examples()][:40] == [one["input_ids"] for one in first]
    assert sum("the stored tokenizer is damaged" in one.message for one in caplog.records) == 1


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
    # Of so few characters no engine would make ids.
    monkeypatch.setattr(reference_sample, "MIN_PART_CHARS", 1 << 10)
    made = wrong.build(only=TO_EXAMPLES)

    assert [one["input_ids"] for one in made.examples()] == [one["input_ids"] for one in expected.examples()]
    assert expected.facts("rows", "tokenized_examples")["fast_path_mismatches"] == 0
    assert made.facts("rows", "tokenized_examples")["fast_path_mismatches"] > 0
    assert (
        made.facts("rows", "tokenized_examples")["reference_path_texts"]
        >= len(texts)
        > expected.facts("rows", "tokenized_examples")["reference_path_texts"]
    )
