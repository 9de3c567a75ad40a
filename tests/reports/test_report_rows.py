"""The rows that can be searched: samples with every token's class, and rejects with their reasons."""

import re

import pytest

from rowmill.reports import report_rows
from tests.support.markup import Page
from tests.support.recipes import Built


@pytest.mark.slow
def test_samples_colour_every_token_and_underline_those_that_train(reported: Built, page: Page) -> None:
    examples = {one["example_id"]: one for name in ("chats", "pairs") for one in reported.examples(name)}
    titles = [title for title in page.values("title", "span") if " tokens, " in title]
    shown = re.findall(r"([0-9a-f]{16}:\d+#\d+) · (?:train|validation)", page.words)

    assert len(shown) == 2 * report_rows.SAMPLES_PER_DATASET
    assert len(set(shown)) == len(shown)
    assert sum(int(title.split()[0]) for title in titles) == sum(examples[name]["tokens"] for name in shown)
    trained = sum(int(title.split()[0]) for title in titles if title.endswith(", trained"))
    assert trained == sum(examples[name]["trained_tokens"] for name in shown)


def test_kinds_of_an_example_are_those_of_its_spans() -> None:
    example = {
        "input_ids": [1, 2, 3, 4], "loss_mask": [False, False, True, False],
        "span_starts": [0, 1, 3], "span_kinds": [6, 2, 6],
    }  # fmt: skip

    assert report_rows.list_token_kinds(example) == [
        ("template", False), ("assistant", False), ("assistant", True), ("template", False),
    ]  # fmt: skip


def test_rows_can_be_chosen_by_each_dataset_reason_and_length(reported: Built, page: Page) -> None:
    rejected = sorted(reason for _, reason in reported.rejects("chats"))
    options = [value for value in page.values("value", "option") if value]

    assert options == ["chats", "pairs", "kept", *sorted(set(rejected)), "characters", "tokens"]
    reasons = page.values("data-reason", "details")
    assert sorted(reason for reason in reasons if reason != "kept") == rejected
    assert len(page.values("data-characters", "details")) == len(reasons)
    assert len(page.values("data-tokens", "details")) == reasons.count("kept")
