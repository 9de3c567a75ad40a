"""Pack groups: their sizes, borders that stay where nothing changed, and joined documents cut as if there were none."""

import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.packing.pack_plan import (
    SequencePlan,
    choose_group_tokens,
    cut_groups,
    find_stretch,
    plan_concat,
    plan_stream,
)


def cut(parts: list[tuple[int, int]], target: int) -> list[tuple[int, int]]:
    """Cut parts given as (tokens, identity)."""
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for _, number in parts]
    return cut_groups([tokens for tokens, _ in parts], digests, target)


PARTS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 1 << 40)), max_size=60)


def test_groups_are_near_their_target_which_follows_from_the_sequence_length() -> None:
    assert choose_group_tokens(512, None) == 8 << 20
    assert choose_group_tokens(32_768, None) == 64 << 20
    assert choose_group_tokens(262_144, None) == 256 << 20
    assert choose_group_tokens(4096, 1000) == 1000

    random = np.random.default_rng(0)
    parts = [(int(tokens), i) for i, tokens in enumerate(random.integers(50, 200, 20_000))]
    groups = cut(parts, 2000)
    assert 0.85 < sum(tokens for tokens, _ in parts) / len(groups) / 2000 < 1.1


@given(parts=PARTS, target=st.integers(1, 1000))
def test_groups_are_runs_of_whole_parts_within_the_sizes(parts: list[tuple[int, int]], target: int) -> None:
    groups = cut(parts, target)

    assert [number for first, end in groups for number in range(first, end)] == list(range(len(parts)))
    for i, (first, end) in enumerate(groups):
        size = sum(tokens for tokens, _ in parts[first:end])
        assert first < end
        assert size <= 2 * target or end - first == 1
        # A group of less than half the target is the last, or the next part would have made it too large.
        assert 2 * size >= target or i == len(groups) - 1 or size + parts[end][0] > 2 * target


@pytest.mark.slow
@given(parts=PARTS, more=PARTS, target=st.integers(1, 1000))
def test_appended_parts_change_the_last_group_only(
    parts: list[tuple[int, int]], more: list[tuple[int, int]], target: int
) -> None:
    assert cut([*parts, *more], target)[: max(len(cut(parts, target)) - 1, 0)] == cut(parts, target)[:-1]


def test_changed_part_in_the_middle_changes_the_groups_near_it_only() -> None:
    parts = [(100, i) for i in range(2000)]
    before = cut(parts, 1000)

    for changed in ([*parts[:1000], *parts[1001:]], [*parts[:1000], (100, 9_999), *parts[1000:]]):
        shift = len(changed) - len(parts)
        after = set(cut(changed, 1000))
        same = [g for g in before if g in after or (g[0] + shift, g[1] + shift) in after]
        assert len(before) - len(same) <= 12
        assert len(before) > 150


@pytest.mark.slow
@given(
    documents=st.lists(st.lists(st.integers(1, 30), max_size=5), min_size=1, max_size=12),
    limit=st.integers(1, 40),
    keeps_tail=st.booleans(),
)
def test_joined_documents_are_cut_as_one_stream(documents: list[list[int]], limit: int, keeps_tail: bool) -> None:
    """`documents` are the lengths of each group's documents."""
    every = np.array([n for group in documents for n in group], np.int64)
    whole = plan_concat(every, limit, "keep" if keeps_tail else "drop")
    found: list[list[list[int]]] = []
    left, before, first = 0, 0, 0
    for group in documents:
        stretch = find_stretch(before, sum(group), int(every.sum()), limit, keeps_tail=keeps_tail)
        found += pieces(plan_stream(every[first:], limit, stretch.begin, stretch.end), first)
        left += stretch.left_until - stretch.end
        before += sum(group)
        first += len(group)

    assert found == pieces(whole, 0)
    assert left == int(every.sum()) - int(whole.ranges[:, 1].sum())


def pieces(plan: SequencePlan, first: int) -> list[list[list[int]]]:
    """Return each sequence's pieces as (document, start, length), documents counted from `first`."""
    borders = pairwise(plan.sequence_offsets.tolist())
    return [[[int(plan.examples[k]) + first, *plan.ranges[k].tolist()] for k in range(*one)] for one in borders]
