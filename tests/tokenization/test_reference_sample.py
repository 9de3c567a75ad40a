"""Which stretches of a part's texts are compared with the reference tokenizer, and what the comparison notices."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.tokenization import reference_sample, tokenizer
from rowmill.tokenization.encoded_batch import PartTally, encode_and_compare
from rowmill.tokenization.reference_sample import (
    MAX_WHOLE_CHARS,
    MIN_DATASET_CHARS,
    MIN_PART_CHARS,
    ReferenceSample,
    Stretch,
    divide_minimum,
)
from rowmill.tokenization.tokenizer import EncodedTexts, Encoder, LoadedTokenizer, open_tokenizer
from tests.support import recipes

LINES = tuple(recipes.sentence(i, 12) for i in range(400))


def _make_text(number: int, chars: int) -> str:
    lines = [f"{number}: {LINES[(number * 31 + k) % len(LINES)]}" for k in range(chars // 40 + 1)]
    return "\n".join(lines)[:chars]


def _take(texts: Sequence[str], stretches: Sequence[Stretch]) -> list[str]:
    return [texts[one.text][one.begin : one.end] for one in stretches]


@pytest.mark.parametrize("chars", [(1000,) * 400, (30_000,) * 20, (2_000_000,), (5, 0, 700_000, 90_000, 10)], ids=str)
def test_sample_has_two_percent_of_a_batch_and_64k_of_a_part_from_as_many_texts_as_possible(
    chars: tuple[int, ...],
) -> None:
    texts = [_make_text(i, size) for i, size in enumerate(chars)]
    sample = ReferenceSample()
    first, then = sample.choose(texts, ()), sample.choose(texts, ())

    total = sum(map(len, texts))
    assert sum(map(len, _take(texts, first))) >= max(MIN_PART_CHARS, total // 50)
    assert sum(map(len, _take(texts, then))) >= total // 50
    assert max(one.end - one.begin for one in first) < 9_000
    assert len({one.text for one in first}) >= min(len([size for size in chars if size]), 50)
    places = sorted((one.text, one.begin, one.end) for one in first)
    assert len({place[:2] for place in places}) == len(places)
    assert all(one[0] < other[0] or one[2] <= other[1] for one, other in pairwise(places))


@pytest.mark.parametrize("parts", [0, 1, 16, 60, 10_000])
def test_parts_of_a_dataset_share_a_million_characters(parts: int) -> None:
    minimum = divide_minimum(parts)
    assert minimum <= MIN_PART_CHARS
    assert minimum == MIN_PART_CHARS or minimum * parts <= MIN_DATASET_CHARS < (minimum + 1) * parts


def test_sample_depends_on_the_texts_alone_and_takes_none_with_few_borders_whole() -> None:
    texts = [_make_text(i, 3_000) for i in range(300)]
    backwards = texts[::-1]
    chosen = _take(texts, ReferenceSample().choose(texts, ()))
    assert chosen == _take(backwards, ReferenceSample().choose(backwards, ()))

    texts = [_make_text(i, 3_000) for i in range(200)]
    texts[7] = ",".join(f'"{i}":[{i},"{LINES[i % 9]}"]'.replace(" ", "_") + "\na" * (i % 60 == 0) for i in range(2_000))
    place = texts[7].index('"1234"')
    texts[7] = f"{texts[7][:place]}Ж{texts[7][place:]}"
    chosen = ReferenceSample().choose(texts, ())

    assert "Ж" in "".join(_take(texts, chosen))
    assert max(one.end - one.begin for one in chosen) < 20_000


def test_every_control_string_and_script_of_a_part_is_in_its_sample() -> None:
    texts = [_make_text(i, 3_000) for i in range(600)]
    rare = {"Ж", "語", "ก", "€", "<|rare|>"}
    for number, content in enumerate(sorted(rare)):
        text = texts[100 * number + 50]
        texts[100 * number + 50] = f"{text[:2000]}{content}{text[2000:]}"
    sample = ReferenceSample()
    chosen = "".join(_take(texts, sample.choose(texts, ["<|rare|>"])))

    assert {one for one in rare if one in chosen} == rare
    assert {"CYRILLIC", "CJK", "THAI", "Sc", "<|rare|>"} <= sample.features
    # Once in a part: the next batch has its two percent.
    assert len(sample.choose(texts, ["<|rare|>"])) <= len(texts) * 3_000 // 50 // 1_000 + 1


@pytest.mark.parametrize(("chars", "expected"), [(200_000, [(0, 200_000)]), (MAX_WHOLE_CHARS + 1, [])])
def test_text_without_a_border_is_compared_whole_unless_it_is_too_long(
    chars: int, expected: list[tuple[int, int]]
) -> None:
    chosen = ReferenceSample().choose(["QUJD" * (chars // 4) + "Q" * (chars % 4)], ())
    assert [(one.begin, one.end) for one in chosen if one.begin] == []
    assert [(0, one.end) for one in chosen if not one.tail] == expected


BORDERED = st.lists(
    st.sampled_from([*" \n\r\t.,:;!?'\"-_/()<|>", "\n\n", "  ", "word", "It's", "naïve", "漢字", "ไทย", "한국어", "、",
                     "。", "123", "7", "🎉", "e\u0301", "<|im_end|>", "</s>", "x" * 40]),
    min_size=1, max_size=60,
).map("".join)  # fmt: skip


def assert_borders_are_of(encoder: Encoder, text: str) -> None:
    """Check that no token of the reference crosses a border."""
    encoded = encoder.encode([text])
    place = reference_sample.find_border(text, 1, len(text))
    while place is not None:
        at = len(text[:place].encode())
        inside = (encoded.starts < at) & (at < encoded.ends)
        assert not inside.any(), (text[max(0, place - 20) : place], text[place : place + 20])
        place = reference_sample.find_border(text, place + 1, len(text))


@settings(deadline=None)
@given(text=BORDERED)
def test_borders_are_those_of_the_tiny_tokenizer(loaded: LoadedTokenizer, text: str) -> None:
    assert_borders_are_of(Encoder(loaded, fast_path=False), text)


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "smollm3", "tinyllama"])
def test_borders_are_those_of_real_tokenizers(real_data: Path, name: str) -> None:
    opened = Encoder(open_tokenizer(str(real_data / "tokenizers" / name), Path()), fast_path=False)

    @settings(deadline=None)
    @given(text=BORDERED)
    def check(text: str) -> None:
        assert_borders_are_of(opened, text)

    check()


def make_wrong_engine(wrong: str, other: str) -> Callable[[str], tokenizer.EncodeTexts]:
    """Return the opener of an engine that takes one character for another one of as many bytes and tokens."""
    open_engine = tokenizer.FAST_ENGINES["gigatoken"]

    def open_wrong(backend: str) -> tokenizer.EncodeTexts:
        encode = open_engine(backend)
        return lambda texts: encode([text.replace(wrong, other) for text in texts])

    return open_wrong


def test_right_engine_agrees_in_every_stretch(loaded: LoadedTokenizer) -> None:
    texts = [*(_make_text(i, 5_000) for i in range(60)), "漢字、" * 400, "<|im_end|>" * 90, "QUJD" * 20_000]
    counts = PartTally()
    encode_and_compare(Encoder(loaded), texts, counts)

    assert (counts.fast_path_mismatches, counts.reference_path_texts) == (0, 0)
    assert counts.sample.characters < sum(map(len, texts))


@pytest.mark.parametrize(
    ("wrong", "other", "share"),
    [("Ж", "И", 1), ("語", "話", 1), ("e", "o", 60), ("<|im_end|>", "<|im_End|>", 1)],
    ids=["a script", "a sign of a script", "a frequent letter", "a control string"],
)
def test_engine_that_is_wrong_on_some_characters_is_noticed(
    loaded: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch, wrong: str, other: str, share: int
) -> None:
    texts = [_make_text(i, 5_000) for i in range(60)]
    for i in range(share):
        texts[-1 - i] = f"{texts[-1 - i][:3000]}{wrong}{texts[-1 - i][3000:]}"
    monkeypatch.setitem(tokenizer.FAST_ENGINES, "gigatoken", make_wrong_engine(wrong, other))
    encoder, counts = Encoder(loaded), PartTally()
    assert encoder.encode(texts).ids.tolist() != encoder.without_fast_path().encode(texts).ids.tolist()
    encoded = encode_and_compare(encoder, texts, counts)

    assert (counts.engine_differs, counts.fast_path_mismatches) == (True, 1)
    assert encoded.ids.tolist() == encoder.without_fast_path().encode(texts).ids.tolist()


def list_examples(encoded: EncodedTexts) -> list[list[list[int]]]:
    """Return ids, starts and ends of each text."""
    texts = [encoded.get_text(i) for i in range(len(encoded.offsets) - 1)]
    return [[one.ids.tolist(), one.starts.tolist(), one.ends.tolist()] for one in texts]


def test_first_texts_of_a_part_are_encoded_by_the_reference_alone_and_all_after_them_are_compared_in_full(
    loaded: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_engine = tokenizer.FAST_ENGINES["gigatoken"]
    monkeypatch.setitem(tokenizer.FAST_ENGINES, "gigatoken", lambda text: (opened.append(text), open_engine(text))[1])
    batches = [[_make_text(i, 9_000), "", "<|im_end|>a\0e\u0301"] for i in range(2 * MIN_PART_CHARS // 9_100)]
    encoder, counts = Encoder(loaded), PartTally()
    encoded = [encode_and_compare(encoder, batch, counts) for batch in batches]

    assert opened == []
    assert (counts.reference_path_texts, counts.sample.characters) == (0, 0)
    assert [*map(list_examples, encoded)] == [list_examples(encoder.encode(batch)) for batch in batches]
    assert len(opened) == 1

    several = [_make_text(i, 5_000) for i in range(60)]
    encode_and_compare(encoder, several, counts)
    assert counts.sample.characters >= MIN_PART_CHARS
    # From then on the engine makes all ids of the part.
    before = counts.sample.characters
    encode_and_compare(encoder, ["the river"], counts)
    assert counts.sample.characters == before + 9


def test_engine_that_is_wrong_behind_the_first_texts_of_a_part_is_noticed(
    loaded: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tokenizer.FAST_ENGINES, "gigatoken", make_wrong_engine("Ж", "И"))
    encoder, counts = Encoder(loaded), PartTally()
    first, later = ["Ж the river"], [*(_make_text(i, 5_000) for i in range(60)), "Ж"]
    expected = [encoder.without_fast_path().encode(texts).ids.tolist() for texts in (first, later)]

    found = [encode_and_compare(encoder, first, counts).ids.tolist()]
    assert counts.fast_path_mismatches == 0
    found.append(encode_and_compare(encoder, later, counts).ids.tolist())

    assert found == expected
    assert (counts.engine_differs, counts.fast_path_mismatches) == (True, 1)
