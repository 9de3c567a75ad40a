"""Checks of what happens when an engine fails, and of tokenizer that were not compared with the reference."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rowmill.tokenization import tokenizer
from rowmill.tokenization.tokenizer import Encoder, EncodeTexts, FastEngine, FlatIds, LoadedTokenizer
from tests.support import recipes

TEXTS = ["the river", "seven", "", "a\0b", "e\u0301", "x" * 1000]


def _open_panicking(backend: str) -> EncodeTexts:
    """Open gigatoken so that it panics at texts that hold `panic`: it is asked for an id beyond its vocabulary."""
    from gigatoken.gigatoken_rs import load_hf_json

    encode, panicking = tokenizer.FAST_ENGINES["fastokens"](backend), load_hf_json(backend)

    def encode_or_panic(texts: Sequence[str]) -> FlatIds:
        if any("panic" in text for text in texts):
            panicking.decode([10**6])
        return encode(texts)

    return encode_or_panic


@pytest.mark.slow
def test_text_at_which_an_engine_panics_takes_the_reference_path(
    loaded: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(tokenizer.FAST_ENGINES, "gigatoken", _open_panicking)
    texts = ["the river", "do not panic", "seven"]
    encoder = Encoder(loaded)
    expected = encoder.without_fast_path().encode(texts)

    for _ in range(tokenizer.MAX_PANICS + 2):
        encoded = encoder.encode(texts)
        assert (encoded.ids.tolist(), encoded.ends.tolist()) == (expected.ids.tolist(), expected.ends.tolist())
    assert "panicked" in capfd.readouterr().err
    # An engine that panics again and again is left alone.
    assert encoder.encode(["seven"]).reference_texts == 1


def test_engine_reports_the_texts_it_refuses_and_one_of_another_release_is_not_used(loaded: LoadedTokenizer) -> None:
    engine = FastEngine("gigatoken", loaded.backend)
    found = engine.encode(["seven", "\ud800", "seven"])
    assert found.failed == [1]
    assert found.ids[: found.offsets[1]].tolist() == found.ids[found.offsets[2] :].tolist() != []

    other = LoadedTokenizer(replace(loaded.card, engine_version="0.0.1"), loaded.backend)
    assert Encoder(loaded).encode(["seven"]).reference_texts == 0
    assert Encoder(other).encode(["seven"]).reference_texts == 1


@pytest.mark.parametrize("name", list(tokenizer.FAST_ENGINES))
def test_engines_give_the_ids_of_the_reference(loaded: LoadedTokenizer, name: str) -> None:
    found = FastEngine(name, loaded.backend).encode(TEXTS)
    expected = Encoder(loaded).without_fast_path().encode(TEXTS)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.offsets.tolist() == expected.offsets.tolist()


def test_interrupt_while_encoding_is_no_failure_of_the_engine(
    loaded: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Sequence[str]) -> FlatIds:
        raise KeyboardInterrupt

    monkeypatch.setitem(tokenizer.FAST_ENGINES, "gigatoken", lambda _: interrupt)
    with pytest.raises(KeyboardInterrupt):
        FastEngine("gigatoken", loaded.backend).encode(["seven"])


def test_engine_is_not_part_of_the_tokenizer_card_in_shards(
    loaded: LoadedTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "FAST_ENGINES", {})
    monkeypatch.setattr(tokenizer, "FAST_ENGINES", {})
    folder = recipes.write_tokenizer(tmp_path / "again")
    slow = tokenizer.open_tokenizer(str(folder), folder)

    assert slow.card.engine == "tokenizers"
    assert slow.card.describe() == loaded.card.describe()


def test_preferred_engine_that_refuses_a_tokenizer_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> EncodeTexts:
        raise ValueError("unknown pre-tokenizer")

    monkeypatch.setitem(tokenizer.FAST_ENGINES, "gigatoken", refuse)
    folder = recipes.write_tokenizer(tmp_path)

    card = tokenizer.open_tokenizer(str(folder), folder).card

    assert (card.engine, card.refused) == ("fastokens", {"gigatoken": "ValueError: unknown pre-tokenizer"})


def test_engine_with_different_ids_for_added_tokens_is_not_used(tmp_path: Path) -> None:
    # The reference finds such a token only between spaces; gigatoken 0.10 finds it inside words.
    folder = recipes.rewrite_tokenizer(tmp_path, lambda parsed: parsed["added_tokens"][0].update(single_word=True))
    loaded = tokenizer.open_tokenizer(str(folder), folder)

    assert loaded.card.refused["gigatoken"].startswith("other")
    text = f"x{recipes.CONTROL[0]}y"
    expected = Encoder(loaded).without_fast_path().encode([text])
    assert Encoder(loaded).encode([text]).ids.tolist() == expected.ids.tolist()


_ENCODE_UNIQUE_WORDS = """
import sys
from pathlib import Path
from random import Random

from rowmill.tokenization import tokenizer

opened, open_engine = [], tokenizer.FAST_ENGINES["gigatoken"]
tokenizer.FAST_ENGINES["gigatoken"] = lambda backend: opened.append(backend) or open_engine(backend)
tokenizer.MAX_GROWTH_BYTES = 8 << 20
engine, random = tokenizer.FastEngine("gigatoken", Path(sys.argv[1]).read_text(encoding="utf-8")), Random(1)
for _ in range(100):
    before = engine.encode(["the river"] * 1000).ids.tobytes()
print(len(opened))
for _ in range(8):
    engine.encode([" ".join("".join(random.choices("abcdefghij", k=9)) for _ in range(50_000))])
print(len(opened), engine.encode(["the river"] * 1000).ids.tobytes() == before)
"""


@pytest.mark.slow
def test_engine_whose_words_take_too_much_memory_is_opened_again(loaded: LoadedTokenizer, tmp_path: Path) -> None:
    (tmp_path / "backend.json").write_text(loaded.backend, encoding="utf-8")
    # A process of its own: this one has memory left from other tests, which an engine takes first.
    told = subprocess.run(
        [sys.executable, "-c", _ENCODE_UNIQUE_WORDS, str(tmp_path / "backend.json")],
        check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout.split()  # fmt: skip

    assert told[0] == "1"
    assert int(told[1]) > 1
    assert told[2] == "True"
