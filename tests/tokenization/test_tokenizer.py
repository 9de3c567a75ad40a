"""The fast path and the reference path of encoding, control strings, and mapping characters to tokens."""

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from rowmill.core.errors import ConfigError
from rowmill.core.storage import Store
from rowmill.tokenization import stored_tokenizers, tokenizer
from rowmill.tokenization.control_tokens import ControlStrings, restore_control_strings
from rowmill.tokenization.encoded_batch import FlatSpans, find_trained_tokens, locate_in_batch
from rowmill.tokenization.reference_sample import Stretch
from rowmill.tokenization.tokenizer import Encoder, LoadedTokenizer
from rowmill.tokenization.vocabulary import TokenLengths, read_token_lengths
from tests.support.recipes import write_tokenizer
from tests.support.tiers import mark_all_but

TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("ab \n<|>im_end\u00e9\u65e5\U0001f600"), st.characters(codec="utf-8")),
    max_size=60,
)


def test_card_of_a_byte_level_tokenizer_names_the_preferred_engine(loaded: LoadedTokenizer, tmp_path: Path) -> None:
    assert (loaded.card.engine, loaded.card.refused) == ("gigatoken", {})
    assert loaded.card.byte_level
    stored_tokenizers.write_tokenizer(Store(str(tmp_path)), "a.json", loaded)
    assert stored_tokenizers.read_tokenizer(Store(str(tmp_path)), "a.json") == loaded


@settings(deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=5))
def test_encode_any_text_gives_the_reference_ids_and_covers_every_byte(encoder: Encoder, texts: list[str]) -> None:
    encoded = encoder.encode(texts)

    reference = encoder.reference.encode_batch(texts, add_special_tokens=False)
    for i, text in enumerate(texts):
        own = slice(int(encoded.offsets[i]), int(encoded.offsets[i + 1]))
        assert encoded.ids[own].tolist() == reference[i].ids
        covered = b"".join(text.encode()[s:e] for s, e in zip(encoded.starts[own], encoded.ends[own], strict=True))
        assert covered == text.encode()


@settings(deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_reference_path_equals_fast_path(encoder: Encoder, texts: list[str]) -> None:
    fast, slow = encoder.encode(texts), encoder.without_fast_path().encode(texts)
    for name in ("ids", "offsets", "starts", "ends"):
        assert getattr(fast, name).tolist() == getattr(slow, name).tolist()
    assert slow.reference_texts == len(texts)


def test_comparison_finds_other_ids_and_control_strings_have_no_control_id(encoder: Encoder) -> None:
    encoded = encoder.encode(["the river", "seven"])
    encoded.ids[0] += 1
    assert not encoder.matches_reference(["the river", "seven"], encoded, [Stretch(0, 0, 9), Stretch(1, 0, 5)])
    assert encoder.matches_reference(["the river", "seven"], encoded, [Stretch(1, 0, 5)])

    # Equal texts are encoded once, and each is compared, as a whole and in stretches.
    texts = ["the river\nseven", "the river\nseven", "seven"]
    parts = [Stretch(0, 10, 15, "\n"), Stretch(1, 10, 15, "\n"), Stretch(2, 0, 5)]
    encoded = encoder.encode(texts)
    assert encoder.matches_reference(texts, encoded, parts)
    encoded.ids[encoded.offsets[2] - 1] += 1
    for stretches in (parts, [Stretch(number, 0, len(text)) for number, text in enumerate(texts)]):
        assert not encoder.matches_reference(texts, encoded, stretches)
        assert encoder.matches_reference(texts, encoded, [stretches[0], stretches[2]])

    text = "a<|im_end|>b"
    around = encoder.encode_pieces([text], [[(1, 11)]])
    assert encoder.card.eos_id in encoder.encode([text]).ids
    assert encoder.card.eos_id not in around.ids
    assert encoder.decode(around.ids.tolist()) == text
    assert (around.starts[0], around.ends[-1]) == (0, len(text))


@settings(deadline=None)
@given(text=TEXTS, data=st.data())
def test_trained_tokens_touch_the_span_and_no_other_messages_text(
    encoder: Encoder, text: str, data: st.DataObject
) -> None:
    size = len(text.encode())
    start, end = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    before, behind = data.draw(st.integers(0, start)), data.draw(st.integers(end, size))
    encoded = encoder.encode([text])
    places = [np.array([value], np.int64) for value in (0, start, end, before, behind)]
    spans = FlatSpans(places[0], places[1], places[2], places[3], places[4])

    found = find_trained_tokens(encoded, locate_in_batch(encoded), spans)

    inside = (encoded.starts >= start) & (encoded.ends <= end)
    touches = (encoded.starts < end) & (encoded.ends > start)
    shared = ((encoded.starts < start) & (encoded.starts < before)) | ((encoded.ends > end) & (encoded.ends > behind))
    expected = touches & ~shared if start < end else np.zeros(len(inside), bool)
    assert found.crossing == int((expected & ~inside).sum())
    expected[:1] = False
    assert found.mask.tolist() == expected.tolist()
    assert found.withheld.tolist() == np.flatnonzero(touches & shared & (start < end)).tolist()


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b c", "<|im_end|>", "\u00e9<|", " ", "\n"]), max_size=8), min_size=1, max_size=4
    ),
    st.data(),
)
def test_pieces_of_a_batch_are_encoded_as_the_reference_encodes_each_alone(
    encoder: Encoder, words: list[list[str]], data: st.DataObject
) -> None:
    texts = ["".join(one) for one in words]
    ranges = [[match.span() for match in re.finditer(r"<\|im_end\|>", text)] for text in texts]
    cuts = [sorted(data.draw(st.sets(st.integers(1, max(1, len(one) - 1)), max_size=2))) for one in texts]
    ordinary = encoder.encode_pieces(["<|im_end|>"], [[(0, 10)]]).ids.tolist()

    encoded = encoder.encode_pieces(texts, ranges, cuts)

    for i, text in enumerate(texts):
        apart = {edge for one in ranges[i] for edge in one}
        inside = {at for start, end in ranges[i] for at in range(start + 1, end)}
        edges = sorted({0, len(text)} | apart | (set(cuts[i]) - inside))
        expected = list[int]()
        for start, end in pairwise(edges):
            piece = encoder.reference.encode(text[start:end], add_special_tokens=False).ids
            expected += ordinary if (start, end) in ranges[i] else piece
        found = encoded.get_text(i)
        assert found.ids.tolist() == expected
        assert b"".join(text.encode()[s:e] for s, e in zip(found.starts, found.ends, strict=True)) == text.encode()


@settings(deadline=None)
@given(contents=st.lists(st.text(alphabet="a<|im_end>\u00e9 Q", max_size=30), min_size=1, max_size=4))
def test_hide_then_reveal_gives_the_row_back_at_the_same_places(loaded: LoadedTokenizer, contents: list[str]) -> None:
    control = ControlStrings(loaded.card, "template")
    row = [{"role": "user", "content": content + "<|im_end|>"} for content in contents]
    hidden, placeholders = control.hide(row, orjson.dumps(row).decode())

    for before, after in zip(row, hidden, strict=True):
        assert not any(text in after["content"] for text in control.strings)
        assert len(after["content"]) == len(before["content"])
        assert restore_control_strings(after["content"], placeholders)[0] == before["content"]


def test_open_tokenizer_without_its_file_or_folder_says_what_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer: .*tokenizer\.json"):
        tokenizer.open_tokenizer(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=r"no folder './nowhere' \(looked in"):
        tokenizer.open_tokenizer("./nowhere", tmp_path)


@cache
def load_real(real_data: Path, name: str) -> LoadedTokenizer:
    """Load a real tokenizer once: that takes up to two seconds."""
    folder = real_data / "tokenizers" / name
    return tokenizer.open_tokenizer(str(folder), folder)


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", mark_all_but(["gpt2", "tinyllama"], ["qwen3", "smollm3", "gpt2", "tinyllama"]))
def test_encode_real_texts_equals_transformers_in_every_row(real_data: Path, name: str) -> None:
    from transformers import AutoTokenizer

    loaded = load_real(real_data, name)
    lines = (real_data / "text/c4_demo.jsonl").read_text(encoding="utf-8").split("\n")[:200]
    texts = [json.loads(line)["text"][:3000] for line in lines]
    texts += [line[:3000] for line in (real_data / "text/wiki_demo.txt").read_text(encoding="utf-8").split("\n")]

    encoded = Encoder(loaded).encode(texts)

    reference = AutoTokenizer.from_pretrained(real_data / "tokenizers" / name)
    assert loaded.card.engine == "gigatoken"
    # Decoding removes the first space of a text, which is counted on the reference path.
    assert encoded.reference_texts == (sum(text.startswith(" ") for text in texts) if name == "tinyllama" else 0)
    for i, text in enumerate(texts):
        ids = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
        assert ids == reference(text, add_special_tokens=False).input_ids


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", ["qwen3", "smollm3", "gpt2", "tinyllama"])
def test_real_tokenizer_arranged_for_opening_is_the_same_to_every_engine(real_data: Path, name: str) -> None:
    from gigatoken.gigatoken_rs import load_hf_json

    backend = tokenizers.Tokenizer.from_file(str(real_data / "tokenizers" / name / "tokenizer.json")).to_str()
    texts = [*tokenizer.PROBE_TEXTS, *(real_data / "text/wiki_demo.txt").read_text(encoding="utf-8").split("\n")]

    arranged = tokenizer.arrange_for_opening(backend)

    assert arranged != backend
    # The same tokens by id, merges by rank, and steps around the model.
    assert tokenizers.Tokenizer.from_str(arranged).to_str() == backend
    was, now = load_hf_json(backend), load_hf_json(arranged)
    assert (was.vocab, was.merges) == (now.vocab, now.merges)
    for open_engine in tokenizer.FAST_ENGINES.values():
        expected, found = open_engine(backend)(texts), open_engine(arranged)(texts)
        assert all(map(np.array_equal, expected, found))
    byte_level = name != "tinyllama"
    of_was, of_now = (read_token_lengths(text, byte_level=byte_level) for text in (backend, arranged))
    assert isinstance(of_was, TokenLengths)
    assert isinstance(of_now, TokenLengths)
    for field in ("lengths", "added", "partial"):
        assert np.array_equal(getattr(of_was, field), getattr(of_now, field))
    assert of_was.prefix == of_now.prefix


MODELS: dict[str, Callable[[], Any]] = {
    "Unigram": lambda: models.Unigram([("<unk>", 0.0), ("b", -1.0), ("a", -2.0)], 0),
    "WordPiece": lambda: models.WordPiece({"b": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"),
    "WordLevel": lambda: models.WordLevel({"b": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"),
    "BPE with a blank in a merge": lambda: models.BPE({"b": 0, " ": 1, " b": 2}, [(" ", "b")]),
    "BPE with a merge like a comment": lambda: models.BPE({"#version": 0, "b": 1, "#versionb": 2}, [("#version", "b")]),
}


@pytest.mark.parametrize("model", MODELS)
def test_tokenizer_that_cannot_be_arranged_for_opening_stays_as_it_is(model: str) -> None:
    backend = tokenizers.Tokenizer(MODELS[model]()).to_str()

    assert tokenizer.arrange_for_opening(backend) == backend


def test_merges_keep_their_order_and_tokens_their_ids_when_they_are_arranged() -> None:
    tokens = {"b": 0, "é": 1, "a": 2, "😀": 3, "ab": 4, "\uffff": 5, "é😀": 6}
    backend = tokenizers.Tokenizer(models.BPE(tokens, [("é", "😀"), ("a", "b")])).to_str()

    arranged = json.loads(tokenizer.arrange_for_opening(backend))["model"]

    assert arranged["merges"] == ["é 😀", "a b"]
    assert arranged["vocab"] == tokens
    assert [*arranged["vocab"]] == sorted(tokens, key=str.encode)


def test_tokenizer_that_opens_to_another_when_it_is_arranged_is_stored_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    expected = tokenizer.open_tokenizer(str(folder), folder)
    given: list[str] = []

    def swap_first_merges(backend: str) -> str:
        given.append(backend)
        parsed = orjson.loads(backend)
        parsed["model"]["merges"][:2] = parsed["model"]["merges"][1::-1]
        return orjson.dumps(parsed).decode()

    monkeypatch.setattr(tokenizer, "arrange_for_opening", swap_first_merges)

    found = tokenizer.open_tokenizer(str(folder), folder)

    assert ([found.backend], found.card) == (given, expected.card)
    assert found.backend != expected.backend


@pytest.mark.slow
@pytest.mark.real_data
def test_text_that_the_normalizer_changes_and_control_strings_are_treated_as_specified(real_data: Path) -> None:
    encoded = Encoder(load_real(real_data, "qwen3")).encode(["plain", "e\u0301 decomposed", "plain again"])
    assert encoded.reference_texts == 1
    assert (encoded.ends > encoded.starts).all()

    encoder = Encoder(load_real(real_data, "qwen3"))
    assert encoder.encode_pieces(["a<|im_end|>b"], [[(1, 11)]]).ids.tolist() == [64, 27, 91, 318, 6213, 91, 29, 65]
    assert encoder.encode(["a<|im_end|>b"]).ids.tolist() == [64, 151645, 65]
    encoder = Encoder(load_real(real_data, "tinyllama"))
    split = [*encoder.encode(["ab\n"]).ids.tolist(), *encoder.encode(["cd"], continuation=True).ids.tolist()]
    assert split == encoder.encode(["ab\ncd"]).ids.tolist()
