"""Words and their hashes: what a word is in many scripts, and that hashes of chunks are those of single texts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.similarity import words
from rowmill.similarity.words import hash_ngrams, hash_whole_texts, hash_words, join_texts, split_words

WORDS = {
    "Don't say it, Mr. O_K!": ["don", "t", "say", "it", "mr", "o_k"],
    "STRASSE straße ﬁne ½": ["strasse", "strasse", "fine", "1", "2"],
    "東京タワー、行くよ": list("東京タワー行くよ"),
    "GPT4は良い": ["gpt4", "は", "良", "い"],
    "ｶﾞｽ": ["ガ", "ス"],
    "ไทย ລາວ": ["ไ", "ท", "ย", "ລ", "າ", "ວ"],
    "ភាសា မြန်": [*"ភាសា", *"မြန်"],
    "हिन्दी में": ["हिन्दी", "में"],
    "café cafe\u0301": ["café", "café"],
    "❤️ \u0301alone": ["alone"],
    "İstanbul": ["i\u0307stanbul"],
    "": [],
    " \n—!": [],
}


@pytest.mark.parametrize("text", WORDS)
def test_words_are_runs_of_letters_and_single_characters_of_scripts_without_spaces(text: str) -> None:
    assert split_words(text) == WORDS[text]


TEXTS = st.lists(st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from("ab 東\u0301 \n_İﬁ"), max_size=30))


@given(TEXTS)
def test_equal_words_have_equal_hashes_and_others_do_not(texts: list[str]) -> None:
    hashed = hash_words(texts)

    split = [split_words(text) for text in texts]
    assert hashed.lengths.tolist() == [len(one) for one in split]
    pairs = set(zip([word for one in split for word in one], hashed.hashes.tolist(), strict=True))
    assert len(pairs) == len({word for word, _ in pairs}) == len({number for _, number in pairs})


@pytest.mark.slow
@given(st.lists(st.text("ab \n東é", max_size=40), min_size=1), st.integers(1, 9))
def test_hashes_do_not_depend_on_how_texts_are_cut_into_chunks(texts: list[str], size: int) -> None:
    whole = hash_words(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "CHUNK_CHARS", size)
        cut = hash_words(texts)
        split = [split_words(text) for text in texts]

    assert (cut.hashes.tolist(), cut.offsets.tolist()) == (whole.hashes.tolist(), whole.offsets.tolist())
    assert split == [split_words(text) for text in texts]


def test_ngrams_stay_inside_their_text() -> None:
    ngrams = hash_ngrams(hash_words(["a b c", "d", "b c d"]), 2)
    assert list(zip(ngrams.texts.tolist(), ngrams.starts.tolist(), strict=True)) == [(0, 0), (0, 1), (2, 4), (2, 5)]
    assert ngrams.hashes[1] == ngrams.hashes[2]
    assert len(set(ngrams.hashes.tolist())) == 3


def test_whole_texts_are_equal_if_their_words_are() -> None:
    first, second, third, joined = hash_whole_texts(
        hash_words(["The answer.", "the ANSWER", "answer the", "theanswer"])
    )

    assert first == second
    assert len({int(one) for one in (first, third, joined)}) == 3


def test_texts_of_one_owner_join_and_an_owner_without_texts_has_no_words() -> None:
    joined = join_texts(hash_words(["a b", "", "c"]), np.array([0, 0, 2]), 4)
    assert joined.lengths.tolist() == [2, 0, 1, 0]
