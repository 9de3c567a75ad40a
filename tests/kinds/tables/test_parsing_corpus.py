"""A long synthetic text whose characters have known classes."""

from collections import Counter
from itertools import pairwise

import pytest

from rowmill.kinds.tables.parsing import ParsedText, PlacementColumns, Validation, merge_span_counts
from rowmill.kinds.tables.schema import ISO8601
from tests.support.generated_text import BOS, EOS, SCHEMA, Corpus, make, parse_generated_text

PLACE = PlacementColumns(("shop",), "day", ISO8601)


def parsed(text: str) -> ParsedText:
    return parse_generated_text(text, SCHEMA, "grouped", bos=BOS, eos=EOS, place=PLACE, validation=Validation())


def classes(result: ParsedText) -> list[str]:
    """Return the class of every character as the parser has it."""
    names = [(f"invalid:{span.reason}" if span.reason else span.kind, span.end - span.start) for span in result.spans]
    return [name for name, length in names for _ in range(length)]


@pytest.fixture(scope="module", params=range(5))
def corpus(request: pytest.FixtureRequest) -> Corpus:
    return make(seed=request.param, groups=60)


def test_every_character_of_a_text_of_every_class_is_accounted_for(corpus: Corpus) -> None:
    reasons = (
        "invalid_json number_too_large too_deep duplicate_column unknown_column missing_column null type "
        "group_incomplete group_has_invalid group_mixed_key group_unordered"
    ).split()
    kinds = {"record", "delimiter", "prose", "truncated"}
    assert set(corpus.characters) == {*(f"invalid:{reason}" for reason in reasons), *kinds}

    assert classes(parsed(corpus.text)) == corpus.characters

    report = parsed(corpus.text).report
    made = Counter(name for _, name in corpus.pieces if name not in {"delimiter", "prose"})
    assert {name: report.items[name] for name in made} == made
    assert report.characters == Counter(corpus.characters)

    text = corpus.text
    starts = [0, *(at for at in range(1, len(text)) if text.startswith(BOS, at)), len(text)]
    parts = [parsed(text[start:end]).report for start, end in pairwise(starts)]
    assert merge_span_counts(parts) == parsed(text).report
