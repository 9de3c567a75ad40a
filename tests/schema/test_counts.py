"""Counts add up field by field, class by class, and are the same after they were stored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.schema.content_hash import HASH_MODULUS, add_content_hashes, format_content_hash
from rowmill.schema.counts import (
    Counts,
    CountSet,
    add_floats,
    compute_share,
    find_share,
    find_stored,
    keep_any,
    keep_first,
    keep_largest,
    keep_samples,
    keep_smallest,
)
from rowmill.schema.manifest import Part, add_up_counts
from rowmill.schema.shard_counts import PackGroupDetails, PackingCounts, ShardDetails


@dataclass(frozen=True, slots=True, kw_only=True)
class WordCounts(Counts):
    """Words of some texts."""

    words: int = 0
    longest: int = keep_largest()
    by_language: Mapping[str, int] = field(default_factory=dict[str, int])
    by_split: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    is_cased: bool = keep_any()
    names: tuple[str, ...] = keep_first()
    samples: Mapping[str, tuple[str, ...]] = keep_samples(2)

    @property
    def in_known_languages(self) -> int:
        """Words whose language is known."""
        return sum(self.by_language.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCounts(Counts):
    """Lines of some texts."""

    lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HashCounts(Counts):
    """Texts by their content, in whatever order, and numbers that are no integers."""

    content_hash: str = add_content_hashes()
    weight: float = add_floats()
    shortest: int | None = keep_smallest()


@dataclass(frozen=True, slots=True, kw_only=True)
class UndeclaredCounts(Counts):
    """A field that neither adds up nor declares how it is merged."""

    flag: bool = False


NAMES = st.sampled_from(("en", "de", "ja"))
WORDS = st.builds(
    WordCounts,
    words=st.integers(0, 9),
    longest=st.integers(0, 9),
    by_language=st.dictionaries(NAMES, st.integers(1, 9)),
    by_split=st.dictionaries(NAMES, st.dictionaries(NAMES, st.integers(1, 9))),
    is_cased=st.booleans(),
    samples=st.dictionaries(NAMES, st.lists(st.text(max_size=2), min_size=1, max_size=2).map(tuple)),
)


def test_counts_add_field_by_field_as_each_declares() -> None:
    one = WordCounts(
        words=2, longest=7, by_language={"en": 2}, by_split={"train": {"en": 2}}, names=("a",), samples={"en": ("x",)}
    )
    other = WordCounts(
        words=3, longest=5, by_language={"de": 1, "en": 2}, by_split={"train": {"de": 3}}, is_cased=True,
        samples={"en": ("y", "z")},
    )  # fmt: skip

    assert one + other == WordCounts(
        words=5, longest=7, by_language={"de": 1, "en": 4}, by_split={"train": {"de": 3, "en": 2}}, is_cased=True,
        names=("a",), samples={"en": ("x", "y")},
    )  # fmt: skip


@given(st.lists(WORDS, max_size=4), st.lists(WORDS, max_size=4))
def test_sum_does_not_depend_on_how_parts_are_grouped_and_empty_counts_add_nothing(
    left: list[WordCounts], right: list[WordCounts]
) -> None:
    whole = reduce(add, [*left, *right], WordCounts())

    assert reduce(add, left, WordCounts()) + reduce(add, right, WordCounts()) == whole
    assert whole + WordCounts() == whole


@given(WORDS)
def test_stored_counts_are_read_back_equal(counted: WordCounts) -> None:
    stored = orjson.loads(orjson.dumps(CountSet.of(counted, LineCounts(lines=1)).to_json()))

    assert find_stored(stored, WordCounts) == counted
    assert CountSet.parse(stored) == CountSet.of(counted, LineCounts(lines=1))


def test_parts_add_up_class_by_class_and_an_uncounted_class_is_absent() -> None:
    parts = [
        Part("p1", {}, counts=CountSet.of(WordCounts(words=1)).to_json()),
        Part("p2", {}, counts=CountSet.of(WordCounts(words=2), LineCounts(lines=4)).to_json()),
    ]

    total = add_up_counts(parts)

    assert (total.get(WordCounts).words, total.get(LineCounts).lines) == (3, 4)
    assert add_up_counts(parts[:1]).find(LineCounts) is None
    assert add_up_counts([], LineCounts()).find(LineCounts) == LineCounts()


def test_samples_are_no_content_and_what_follows_from_counts_is_derived() -> None:
    counted = CountSet.of(WordCounts(by_language={"en": 2, "de": 1}, samples={"en": ("x",)}))

    assert "samples" in counted.to_json()["WordCounts"]
    assert "samples" not in counted.to_json(with_samples=False)["WordCounts"]
    assert counted.derive() == {"in_known_languages": 3}


HASHES = st.builds(
    HashCounts,
    content_hash=st.integers(0, HASH_MODULUS - 1).map(format_content_hash),
    weight=st.sampled_from((0.1, 1e17, 0.3, -1e17)),
    shortest=st.one_of(st.none(), st.integers(0, 9)),
)


@given(st.permutations(range(4)), st.lists(HASHES, min_size=4, max_size=4))
def test_content_hashes_floats_and_smallest_values_do_not_depend_on_the_order_of_parts(
    order: list[int], parts: list[HashCounts]
) -> None:
    whole = HashCounts.add_up(parts)

    assert HashCounts.add_up([parts[i] for i in order]) == whole
    assert HashCounts.add_up([HashCounts(), *parts]) == whole
    assert int(whole.content_hash.removeprefix("xxh3:"), 16) == (
        sum(int(one.content_hash.removeprefix("xxh3:"), 16) for one in parts) % HASH_MODULUS
    )
    assert whole.shortest == min((one.shortest for one in parts if one.shortest is not None), default=None)


def test_details_of_a_pack_groups_shards_are_read_back_equal() -> None:
    shard = ShardDetails(
        split="train", first_sequence=7, sequences=2, segments=3, tokens=9, trained_tokens=4, padding=0, domains=("a",)
    )
    group = PackGroupDetails(shards=(shard, shard))
    stored = orjson.loads(orjson.dumps({"PackGroupDetails": group.to_json()}))

    assert find_stored(stored, PackGroupDetails) == group
    assert shard.count(seq_len=8) == PackingCounts(
        sequences=2, segments=3, tokens=9, trained_tokens=4, padding=0, capacity=16
    )


def test_field_that_does_not_add_up_is_refused_until_it_declares_how_it_is_merged() -> None:
    with pytest.raises(TypeError, match="keep_any"):
        _ = UndeclaredCounts() + UndeclaredCounts()


def test_share_of_nothing_is_none_where_there_is_nothing_to_ask_and_above_one_an_error() -> None:
    assert (compute_share(1, 4), compute_share(0, 0)) == (0.25, 0.0)
    assert (find_share(1, 4), find_share(0, 0)) == (0.25, None)
    with pytest.raises(ValueError, match="is no share"):
        compute_share(2, 1)
