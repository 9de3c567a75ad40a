"""Hashes of prompts: the folding of ASCII prompts together, and what counts as an equal prompt."""

from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.stages.canonical_rows.text_rows import hash_prompts

pytestmark = pytest.mark.slow

SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace())
PROMPTS = st.lists(st.none() | st.text(st.sampled_from(f"aZ0.[\x00\x7f{SPACES}") | st.characters(codec=None)))


@given(PROMPTS)
def test_hash_is_that_of_the_folded_prompt(prompts: list[str | None]) -> None:
    folded = [prompt and " ".join(prompt.casefold().split()).encode("utf-8", "surrogatepass") for prompt in prompts]

    assert hash_prompts(prompts) == [
        blake2b(one, digest_size=8).digest() if isinstance(one, bytes) else None for one in folded
    ]


def test_prompts_that_differ_in_case_and_spaces_are_equal() -> None:
    first, *others = hash_prompts(["Who are you?", "\n who  ARE\t\x1cyou? ", "who are\u2003you?", "WHO are you? "])

    assert set(others) == {first}
    assert first not in hash_prompts(["whoare you?", "who are you ?", "", None, " "])
