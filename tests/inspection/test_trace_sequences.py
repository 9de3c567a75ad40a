"""A packed sequence by token: text, class and message of each, as its example has them."""

from pathlib import Path

import pytest

from rowmill.inspection import trace
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer
from tests.support.recipes import Built, Workspace, chat, text_of


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    rows = [chat(i, turns=1 + i % 2, words=6) for i in range(12)]
    rows[0]["messages"][0]["content"] = "👩‍🚀 naïve Ωmega"
    return Workspace(tmp_path_factory.mktemp("packed")).one("rows.jsonl", rows).build()


@pytest.fixture(scope="module")
def encoder(built: Built) -> Encoder:
    return Encoder(open_tokenizer("tokenizer", built.project.base))


@pytest.mark.slow
def test_every_token_has_the_text_class_and_message_of_its_example(built: Built, encoder: Encoder) -> None:
    examples = {one["example_id"]: one for one in built.examples()}
    one = trace.view_sequence(built.project, "rows", encoder, max_tokens=10_000)
    assert one is not None
    assert len(one.segments) > 1
    assert one.tokens == len(one.read("input_ids")) == len(one.texts) == len(one.kinds) == len(one.messages)
    for place in one.segments:
        own, example = slice(place.offset, place.offset + place.length), examples[place.example_id]
        assert "".join(one.texts[own]) == text_of(example)
        assert [trained for _, trained in one.classes[own]] == example["loss_mask"]
        roles = {kind for kind, trained in one.classes[own] if trained}
        assert roles == {"assistant", "template"}
        assert all((message < 0) == (kind == "template") or message >= 0 for kind, message in
                   zip(one.kinds[own], one.messages[own], strict=True))  # fmt: skip


def test_long_sequence_is_cut_after_the_wanted_tokens(built: Built, encoder: Encoder) -> None:
    whole = trace.view_sequence(built.project, "rows", encoder, max_tokens=10_000)
    cut = trace.view_sequence(built.project, "rows", encoder, max_tokens=7)

    assert whole is not None
    assert cut is not None
    assert (cut.tokens, len(cut.segments)) == (whole.tokens, 1)
    for column in ("texts", "kinds", "messages", "classes"):
        assert list(getattr(cut, column)) == list(getattr(whole, column)[:7])
    for column in ("input_ids", "labels", "position_ids"):
        assert cut.read(column) == whole.read(column)[:7]


def test_character_of_several_tokens_is_shown_at_the_last_of_them(encoder: Encoder) -> None:
    text = "a 👩 b Ω c"
    texts = trace.decode_each(encoder, encoder.encode([text]).ids.tolist())
    assert "".join(texts) == text
    assert "" in texts
    assert "👩" in [one.strip() for one in texts]


def test_sequence_with_several_whole_segments_is_chosen_before_one_of_cut_or_tiny_ones() -> None:
    starts = [[0], [331, 0, 0], [0] * 40, [0, 0, 0], [0, 0, 0]]
    assert trace.choose_sequence(starts) == 3


def test_dataset_that_is_not_packed_has_no_sequence(tmp_path: Path, encoder: Encoder) -> None:
    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(i) for i in range(4)])
    built = workspace.build(only={("mini", "rows", "raw_dataset")})
    assert trace.view_sequence(built.project, "rows", encoder, max_tokens=9) is None
