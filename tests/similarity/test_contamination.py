"""Coverage of benchmark items: the vectors, against sets of words in Python, and equal hashes of other words."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.similarity import contamination
from rowmill.similarity.contamination import Candidate, ItemSearch, Match, build_index, number_distinct_items
from rowmill.similarity.words import HashedTexts, hash_words, split_words


def search_rows(
    rows: Sequence[Sequence[str]],
    items: Sequence[Sequence[str]],
    n: int,
    coverage: float,
    *,
    hash_texts: Callable[[list[str]], HashedTexts] = hash_words,
) -> list[Match | None]:
    """Return each row's best item."""
    texts = [text for item in items for text in item]
    owners = np.repeat(np.arange(len(items)), [len(item) for item in items])
    search = ItemSearch(build_index(hash_texts(texts), owners, len(items), n)[0])
    of_rows = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    covered = search.find_covered(hash_texts([text for row in rows for text in row]), of_rows, coverage)
    found: list[Match | None] = []
    for number, row in enumerate(rows):
        lines = np.flatnonzero(covered.rows == number).tolist()
        pairs = [(int(covered.items[k]), float(covered.coverage[k])) for k in lines]
        candidates = [Candidate(item, items[item], share) for item, share in pairs]
        found.append(search.find_best_match(row, candidates, coverage))
    return found


@pytest.mark.parametrize(
    ("row", "share", "ngram"),
    [("x a b c d y", 4 / 6, "a b c"), ("a b c x d e f", 1.0, "a b c"), ("a b x c d", None, None)],
)
def test_coverage_is_the_share_of_words_in_common_ngrams(row: str, share: float | None, ngram: str | None) -> None:
    [match] = search_rows([[row]], [["a b c d e f"]], 3, 0.01)
    assert (match and match.coverage, match and match.ngram) == (share, ngram)


def test_ngrams_cross_neither_messages_of_a_row_nor_fields_of_an_item() -> None:
    [split, whole] = search_rows([["a b", "c d"], ["a b c d"]], [["a b c d"]], 3, 0.5)
    [joined] = search_rows([["a b c d e f"]], [["a b c", "d e f"]], 4, 0.1)
    assert (split, whole) == (None, Match(0, 1.0, "a b c"))
    assert joined is None


def test_highest_coverage_wins_and_ties_go_to_the_lower_item() -> None:
    items = [["a b c x y z"], ["q a b c d"], ["w a b c d"]]
    assert search_rows([["a b c d"]], items, 3, 0.1) == [Match(1, 0.8, "a b c")]


def test_items_without_an_ngram_match_equal_messages() -> None:
    items = [["Paris"], ["2 + 2", "four"]]
    rows = [["In Paris?"], ["PARIS!"], ["2 2", "Four."], ["2 2"]]
    found = search_rows(rows, items, 3, 0.5)
    assert found == [None, Match(0, 1.0, "paris"), Match(1, 1.0, "2 2"), None]


def test_phrases_of_more_than_ten_items_are_ignored() -> None:
    items = [[f"how many are left of {k}"] for k in range(11)]
    assert search_rows([["so how many are left of that"]], items, 3, 0.01) == [None]
    assert search_rows([["so how many are left of that"]], items[:10], 3, 0.01) == [Match(0, 5 / 6, "how many are")]


def test_a_phrase_that_one_item_repeats_counts_once() -> None:
    assert search_rows([["a b c"]], [["a b c " * 12]], 3, 0.01)[0] is not None


def test_equal_hashes_of_other_words_are_no_match() -> None:
    def hash_all_alike(texts: list[str]) -> HashedTexts:
        hashed = hash_words(texts)
        return HashedTexts(np.zeros_like(hashed.hashes), hashed.offsets)

    items = [["a b c d"], ["no"]]

    found = search_rows([["u v w"], ["a b c"], ["yes"]], items, 3, 0.5, hash_texts=hash_all_alike)
    assert found == [None, Match(0, 0.75, "a b c"), None]


def test_equal_items_are_one() -> None:
    texts = hash_words(["One two", "three", "one TWO three", "", ""])
    assert number_distinct_items(texts, np.array([0, 0, 1, 2, 3]), 4).tolist() == [0, 0, 2, 2]


WORD_TEXTS = st.lists(st.sampled_from("abcd"), max_size=9).map(" ".join)


@pytest.mark.slow
@given(
    st.lists(st.lists(WORD_TEXTS, max_size=3), min_size=1, max_size=4),
    st.lists(st.lists(WORD_TEXTS, min_size=1, max_size=2), min_size=1, max_size=14),
    st.integers(2, 4),
    st.sampled_from([0.1, 0.5, 0.75, 1.0]),
)
def test_search_finds_what_sets_of_words_find(
    rows: list[list[str]], items: list[list[str]], n: int, coverage: float
) -> None:
    found = search_rows(rows, items, n, coverage)

    for row, match in zip(rows, found, strict=True):
        shares = [measure_plainly(row, item, items, n) for item in items]
        best = max(shares)
        assert (match and (match.item, match.coverage)) == ((shares.index(best), best) if best >= coverage else None)


def measure_plainly(row: list[str], item: list[str], items: list[list[str]], n: int) -> float:
    """Return an item's coverage by definition."""

    def list_ngrams(text: str) -> list[tuple[str, ...]]:
        split = split_words(text)
        return [tuple(split[k : k + n]) for k in range(len(split) - n + 1)]

    texts = [split for text in item if (split := split_words(text))]
    if not texts:
        return 0.0
    if all(len(split) < n for split in texts):
        return float(all(split in [split_words(text) for text in row] for split in texts))
    known = {ngram for text in row for ngram in list_ngrams(text)}
    covered = 0
    for text in item:
        split, hit = split_words(text), set[int]()
        for k, ngram in enumerate(list_ngrams(text)):
            having = sum(any(ngram in list_ngrams(one) for one in other) for other in items)
            if ngram in known and having <= contamination.FREQUENT_ITEMS:
                hit |= set(range(k, k + n))
        covered += len(hit)
    return covered / sum(map(len, texts))
