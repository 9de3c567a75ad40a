"""The tokens of chats: encoded whole or apart at trained starts, BOS, control strings of the data, round trips."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from rowmill.core.errors import ConfigError
from rowmill.schema.rows import ContentSpan, MaskedConversation, Rejected, Span
from rowmill.tokenization.control_tokens import contains_added_token
from rowmill.tokenization.encoded_batch import Example, PartTally, make_columns, make_examples
from rowmill.tokenization.token_truncation import prepend_bos
from rowmill.tokenization.tokenizer import Encoder, LoadedTokenizer, TokenizerCard, open_tokenizer
from tests.support import recipes
from tests.support.messages import assistant, user
from tests.support.recipes import CHATML, CONTROL, Built, Workspace, rewrite_tokenizer, text_of
from tests.support.tiers import draw


def example_of(encoder: Encoder, masked: MaskedConversation, *, split: bool = False) -> Example:
    [made] = make_examples([masked], [[]], encoder, PartTally(), split=split)
    assert isinstance(made, Example)
    return made


def masked(text: str, *trained: tuple[int, int]) -> MaskedConversation:
    return MaskedConversation(text, tuple(Span(*one, 0) for one in trained), ())


@settings(deadline=None, max_examples=draw(60))
@given(text=st.text(alphabet="the river stone maps\n<|im_end|>\u00e9", min_size=2, max_size=60), data=st.data())
def test_split_at_a_trained_start_gives_the_prompts_own_ids(encoder: Encoder, text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(1, len(text) - 1))

    apart = example_of(encoder, masked(text, (start, len(text))), split=True)

    prompt, answer = (encoder.encode([one]).ids.tolist() for one in (text[:start], text[start:]))
    assert apart.ids.tolist() == [*prompt, *answer]
    assert apart.mask.tolist() == [False] * len(prompt) + [True] * len(answer)


@settings(deadline=None, max_examples=draw(40))
@given(texts=st.lists(st.text(alphabet="the maps\n\u65e5", max_size=30), min_size=1, max_size=4), data=st.data())
def test_split_of_a_batch_is_each_texts_own(encoder: Encoder, texts: list[str], data: st.DataObject) -> None:
    ranges = [sorted(data.draw(st.tuples(*[st.integers(0, len(t))] * 2))) for t in texts]
    rows = [masked(t, (a, b)) if a < b else masked(t) for t, (a, b) in zip(texts, ranges, strict=True)]
    together = make_examples(rows, [[]] * len(rows), encoder, PartTally(), split=True)

    for row, made in zip(rows, together, strict=True):
        alone = example_of(encoder, row, split=True)
        assert isinstance(made, Example)
        assert made.ids.tolist() == alone.ids.tolist()
        assert made.mask.tolist() == alone.mask.tolist()


def merging(tmp_path: Path) -> Encoder:
    """Return a tokenizer that joins a and b into one token."""

    def change(parsed: dict[str, Any]) -> None:
        parsed["model"]["merges"] = [("a", "b")]
        vocabulary = parsed["model"]["vocab"].items()
        base = {token: number for token, number in vocabulary if len(token) == 1 or token in CONTROL}
        parsed["model"]["vocab"] = base | {"ab": max(base.values()) + 1}

    folder = rewrite_tokenizer(tmp_path / "tokenizer", change)
    return Encoder(open_tokenizer(str(folder), folder))


def test_merge_over_a_trained_start_trains_only_where_the_text_is_encoded_whole(tmp_path: Path) -> None:
    """A merge of prompt and answer (tinker-cookbook#877) gives ids that inference never sees; split gives its own."""
    encoder = merging(tmp_path)
    pieces = (ContentSpan(0, 2, 0, "user"), ContentSpan(2, 4, 1, "assistant"))
    row = MaskedConversation("xaby", (Span(2, 4, 1),), pieces)
    whole, apart = (example_of(encoder, row, split=split) for split in (False, True))

    assert [encoder.decode([i]) for i in whole.ids.tolist()] == ["x", "ab", "y"]
    assert whole.mask.tolist() == [False, False, True]
    assert [encoder.decode([i]) for i in apart.ids.tolist()] == ["x", "a", "b", "y"]
    assert apart.mask.tolist() == [False, False, True, True]

    counts = PartTally()
    [made] = make_examples([masked("xaby", (2, 4))], [[]], merging(tmp_path), counts)
    assert isinstance(made, Example)
    assert made.mask.tolist() == [False, True, True]
    assert counts.boundary_tokens == 1


@pytest.mark.parametrize(
    ("text", "reasoning", "trained", "mask"),
    [
        # Reasoning that truncation cut ends in a full stop, and the trained end of its frame begins with a line break.
        ("xaby", (0, 2), (2, 4), [False, False, True]),
        ("xyab", (3, 4), (1, 3), [False, True, False]),
    ],
    ids=["before", "behind"],
)
def test_token_shared_with_untrained_text_of_its_own_message_does_not_train(
    tmp_path: Path, text: str, reasoning: tuple[int, int], trained: tuple[int, int], mask: list[bool]
) -> None:
    row = MaskedConversation(text, (Span(*trained, 0),), (ContentSpan(*reasoning, 0, "reasoning"),))
    assert example_of(merging(tmp_path), row).mask.tolist() == mask


@pytest.mark.parametrize(
    ("text", "answer", "trained"),
    [
        # The header's last character and the answer's first are one token, as a space and a SentencePiece word are.
        ("xaby", (2, 4), (2, 4)),
        # The answer's last character and the first one of its end are one token, as a full stop and a line break are.
        ("xyab", (1, 3), (1, 4)),
        ("xyab", (1, 3), (1, 3)),
    ],
    ids=["header", "end", "masked-end"],
)
def test_token_shared_with_the_template_trains_at_both_edges(
    tmp_path: Path, text: str, answer: tuple[int, int], trained: tuple[int, int]
) -> None:
    pieces = (ContentSpan(0, 1, 0, "user"), ContentSpan(*answer, 1, "assistant"))
    made = example_of(merging(tmp_path), MaskedConversation(text, (Span(*trained, 1),), pieces))
    assert made.mask.tolist() == [False, True, True]
    assert make_columns([(0, 0, made)]).count_verified()[2] == 1


def test_recipe_with_split_boundary_keeps_inference_ids_in_every_turn(tmp_path: Path) -> None:
    rows = [recipes.chat(i, turns=2) for i in range(4)]

    built = Workspace(tmp_path).one("a.jsonl", rows, loss={"boundary": "split"}).build()

    encoder = Encoder(open_tokenizer(str(tmp_path / "tokenizer"), tmp_path))
    assert built.rejects() == []
    for example in built.examples():
        starts = np.flatnonzero(np.diff(np.array(example["loss_mask"], np.int8)) == 1) + 1
        assert len(starts) == 2
        prompt = encoder.decode(example["input_ids"][: starts[0]])
        assert encoder.encode([prompt]).ids.tolist() == example["input_ids"][: starts[0]]


@pytest.mark.parametrize(("ids", "span_starts"), [([5, 6], [0, 1]), ([1, 5, 6], [0])])
def test_bos_is_put_first_unless_it_is_there_and_does_not_train(ids: list[int], span_starts: list[int]) -> None:
    zeros = np.zeros(1, np.int64)
    example = Example(
        ids=np.array(ids, np.int32), mask=np.array([False] * (len(ids) - 1) + [True]), span_starts=zeros,
        span_messages=zeros, span_kinds=np.ones(1, np.int8), original_tokens=len(ids), original_trained=1,
    )  # fmt: skip
    made = prepend_bos(example, 1)

    assert (made.ids.tolist(), made.mask.tolist()) == ([1, 5, 6], [False, False, True])
    assert (made.original_tokens, made.span_starts.tolist()) == (3, span_starts)


def build_with_bos(folder: Path, add_bos: Any, **groups: Any) -> dict[str, Any]:
    """Build one chat with a tokenizer that has a BOS; return its example."""
    path = recipes.write_tokenizer(folder / "tokenizer") / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "bos_token": CONTROL[0]}), encoding="utf-8")
    kind = {"kind": "chat", "add_bos": add_bos}
    [example] = Workspace(folder).one("a.jsonl", [recipes.chat(0)], kind, **groups).build().examples()
    return example


@pytest.mark.slow
@pytest.mark.parametrize(("add_bos", "first"), [("auto", "<|im_start|>"), (True, "<|endoftext|>")])
def test_template_decides_bos_unless_the_recipe_adds_one(tmp_path: Path, add_bos: Any, first: str) -> None:
    example = build_with_bos(tmp_path, add_bos)
    assert CONTROL[example["input_ids"][0]] == first
    assert example["tokens"] == len(example["input_ids"]) == example["original_tokens"]


@pytest.mark.slow
def test_bos_that_the_template_printed_is_not_doubled(tmp_path: Path) -> None:
    """Double BOS (OpenRLHF#393)."""
    template = {"chat_template": "{{ bos_token }}" + CHATML}
    assert build_with_bos(tmp_path, add_bos=True, template=template)["input_ids"].count(0) == 1


def test_bos_that_the_tokenizer_lacks_cannot_be_added(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"format\.add_bos"):
        Workspace(tmp_path).one("a.jsonl", [recipes.chat(0)], {"kind": "chat", "add_bos": True}).build()


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [user(question), assistant(answer)]}


def control_ids(built: Built) -> list[list[int]]:
    return [[i for i in one["input_ids"] if i < len(CONTROL)] for one in built.examples()]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "ids"), [("as_text", [1, 2, 1, 2]), ("allow", [1, 2, 1, 2, 2])])
def test_control_string_of_the_data_becomes_a_control_id_only_where_allowed(
    tmp_path: Path, policy: str, ids: list[int]
) -> None:
    """Quoted <|im_end|> becomes control (transformers#29279)."""
    rows = [talk("say something", "a<|im_end|>b")]
    built = Workspace(tmp_path).one("a.jsonl", rows, template={"control_tokens": policy}).build()

    assert control_ids(built) == [ids]
    assert "a<|im_end|>b<|im_end|>" in text_of(built.examples()[0])
    [line] = built.manifest("rows", "tokenized_examples").tables["control_strings"].rows
    assert tuple(line) == ("assistant", "<|im_end|>", 1)


@pytest.mark.slow
def test_placeholder_that_the_template_changes_is_a_reject(tmp_path: Path) -> None:
    lowering = CHATML.replace("m['content']", "m['content'] | lower", 1)
    rows = [talk("what is <|im_end|>?", "it is the end"), talk("what is it?", "it is the end")]
    template = {"chat_template": lowering, "on_dropped": {"user": "count"}}
    built = Workspace(tmp_path).one("a.jsonl", rows, template=template).build()
    assert built.rejects() == [(0, "control_token_in_content")]


def test_control_id_made_of_ordinary_text_is_found() -> None:
    """Unigram vocabularies hold the strings of their control tokens as ordinary pieces."""
    vocabulary = [("<unk>", 0.0), ("</s>", -1.0), *((letter, -5.0) for letter in "ab</s>")]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    card = TokenizerCard(
        digest="", files={}, vocab_size=8, bos_id=None, eos_id=1, pad_id=None, special_tokens={},
        added=((1, "</s>", True),), chat_template=None, adds_bos=False, adds_eos=False, byte_level=False,
        engine="tokenizers", engine_version=None, refused={},
    )  # fmt: skip
    encoder = Encoder(LoadedTokenizer(card, tokenizer.to_str()))

    around = encoder.encode_pieces(["a</s>b"], [[(1, 5)]])

    assert contains_added_token(encoder, around, "a</s>b", [(1, 5)]) is (1 in around.ids.tolist())
    [made] = make_examples([masked("a</s>b", (0, 6))], [[(1, 5)]], encoder, PartTally())
    assert isinstance(made, Rejected)
    assert made.reason == "control_token_in_content"


@pytest.mark.slow
def test_texts_that_a_normalising_tokenizer_changes_are_kept_and_counted(tmp_path: Path) -> None:
    rewrite_tokenizer(tmp_path / "tokenizer", lambda parsed: parsed.update(normalizer={"type": "NFC"}))
    rows = [talk("why?", "e\u0301"), talk("why?", "plain"), talk("why?", "also plain"), talk("so?", "\u00e9")]
    built = Workspace(tmp_path).one("a.jsonl", rows).build()
    assert built.rejects() == []
    assert built.facts("rows", "tokenized_examples")["text_roundtrip"] == 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "check", "value"),
    [
        ({}, "contract", 0),
        ({"loss": {"finish": "none"}, "template": {"chat_template": CHATML.replace("<|im_end|>", "")}}, "contract", 1),
        ({}, "date_pinned", 0),
        ({"template": {"chat_template": "{{ strftime_now('%d %b %Y') }}" + CHATML}}, "date_pinned", 1),
        ({}, "prompt_match", 0),
        ({"template": {"chat_template": CHATML + "{% if add_generation_prompt %}Sure{% endif %}"}}, "prompt_match", 3),
    ],
)
def test_template_check_counts_the_warnings_of_its_contract(
    tmp_path: Path, changes: dict[str, Any], check: str, value: float
) -> None:
    built = Workspace(tmp_path).one("a.jsonl", [recipes.chat(i) for i in range(3)], **changes).build()
    [result] = [one for one in built.steps["rows", "tokenized_examples"][1] if one.check == check]
    assert (result.value, result.passed, result.blocking) == (value, value == 0, False)
