"""A packed sequence in the report has every token with its numbers, in the segments of the shard."""

import re
from collections.abc import Iterator

from rowmill.inspection.lineage import SegmentLocation
from rowmill.inspection.packed_sequence import SequenceTokens
from rowmill.reports import sequence_view
from tests.support.markup import Page
from tests.support.recipes import Built

COLUMNS = ("ids", "labels", "positions", "segments")


def read_sequences(page: Page) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield what each sequence of a page is called, and its numbers by column."""
    names = re.findall(r"packed sequence (\w+/\w+/\d+)", page.words)
    columns = [page.values(f"data-{name}", "figure") for name in COLUMNS]
    for name, *values in zip(names, *columns, strict=True):
        yield name, {column: value.split(",") for column, value in zip(COLUMNS, values, strict=True)}


def test_numbers_of_each_token_are_those_of_the_shard(reported: Built, page: Page) -> None:
    found = dict(read_sequences(page))

    assert {name.split("/")[0] for name in found} == {"chats", "pairs"}
    for name, columns in found.items():
        dataset, split, number = name.split("/")
        rows = [
            row
            for part in reported.manifest(dataset, "packed_shards").parts
            if part.facts["split"] == split
            for row in reported.project.store.table(part.files["shard"]).to_pylist()
        ]
        row = rows[int(number)]
        segments = [i for i, length in enumerate(row["segment_lengths"]) for _ in range(length)]
        assert columns == {
            "ids": [str(one) for one in row["input_ids"]],
            "labels": ["" if one == -100 else str(one) for one in row["labels"]],
            "positions": [str(one) for one in row["position_ids"]],
            "segments": [str(one) for one in segments],
        }


def test_each_token_is_an_element_within_its_class_and_segment(page: Page) -> None:
    tokens = sum(len(columns["ids"]) for _, columns in read_sequences(page))
    segments = sum(len(set(columns["segments"])) for _, columns in read_sequences(page))

    assert page.tags.count("i") == tokens
    assert page.values("class", "div").count("segment") == segments > 2


def test_token_of_markup_is_text_and_a_token_without_text_is_a_square() -> None:
    place = SegmentLocation("train", 0, 0, "<b>#0", 5, 4, 0, "shard", 0)
    one = SequenceTokens(
        dataset="d", split="train", sequence=0, tokens=9, ids=[1, 2, 3, 4], labels=[-100, 2, 3, 4],
        positions=[0, 1, 2, 3], texts=["</i><script>", "", "\n", "x"], kinds=["template", *["assistant"] * 3],
        messages=[-1, 0, 0, 0], segments=[place], weights=[0.0, 1.0, 0.5, 1.0],
    )  # fmt: skip

    page = Page("".join(sequence_view.render_sequence(one)))

    assert page.tags.count("i") == 4
    assert "script" not in page.tags
    assert "</i><script>▫↵\nx" in page.words
    assert page.values("data-weights") == ["0,1,0.5,1"]
    assert page.values("data-labels") == [",2,3,4"]
    assert "9 tokens · the first 4 of them · 1 segment" in page.words
    assert "from its token 5" in page.words
