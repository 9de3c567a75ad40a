"""How often a build opens its tokenizer."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rowmill.build import preflight
from rowmill.stages.tokenized_examples import text_parts
from rowmill.tokenization import stored_tokenizers, tokenizer
from tests.support.recipes import TEXT, TO_EXAMPLES, Workspace, document

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
    monkeypatch.setattr(stored_tokenizers, "_STORED_TOKENIZERS", {})
    monkeypatch.setattr(text_parts, "_EXAMPLE_BUILDERS", {})
    monkeypatch.setitem(tokenizer.FAST_ENGINES, "gigatoken", count_engine)
    monkeypatch.setattr(tokenizer, "open_reference_backend", count_reference)
    return found


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
    for kept in ("_ENCODERS", "_STORED_TOKENIZERS"):
        monkeypatch.setattr(stored_tokenizers, kept, {})

    more = workspace.one("more.jsonl", [document(i, words=9) for i in range(50)], TEXT).build(only=TO_EXAMPLES)

    assert opened["engine"] == 2
    assert stored.read_bytes() == whole
    assert [one["input_ids"] for one in more.examples()][:40] == [one["input_ids"] for one in first]
    assert sum("the stored tokenizer is damaged" in one.message for one in caplog.records) == 1
