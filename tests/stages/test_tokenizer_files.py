"""How often a build opens its tokenizer.

What belongs here: openings by one process. What does not: what workers share (`executors/test_local.py`), ids
(`tokenization/`).
"""

from collections import Counter
from pathlib import Path

import pytest

from rowmill.tokenization import encoder, engines
from tests.support.recipes import TEXT, Road, document

TO_EXAMPLES = ("raw_dataset", "canonical_rows", "tokenized_examples")


def test_first_build_opens_engine_and_reference_once_and_the_next_opens_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Counter[str] = Counter()
    open_engine, open_reference = engines.FAST_ENGINES["gigatoken"], encoder.open_reference_backend

    def count_engine(backend: str) -> engines.EncodeTexts:
        opened["engine"] += 1
        return open_engine(backend)

    def count_reference(backend: str) -> object:
        opened["reference"] += 1
        return open_reference(backend)

    monkeypatch.setitem(engines.FAST_ENGINES, "gigatoken", count_engine)
    monkeypatch.setattr(encoder, "open_reference_backend", count_reference)
    road = Road(tmp_path).one("rows.jsonl", [document(i, words=9) for i in range(40)], TEXT)

    road.build(only=TO_EXAMPLES)
    assert opened == {"engine": 1, "reference": 1}

    road.one("more.jsonl", [document(i, words=9) for i in range(50)], TEXT).build(only=TO_EXAMPLES)
    assert opened == {"engine": 1, "reference": 1}
