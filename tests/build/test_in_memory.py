"""Rows to tokens and Datums in a user's program: the shift, and equality with a build."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.build.in_memory import Datum, make_datum, make_datums, row_to_datum, sft_tokenize
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.schema.examples import ExampleTokens
from rowmill.schema.rows import Rejected
from tests.support.recipes import CHAT, PAIR, TEXT, Workspace, chat, document, pair, write_tokenizer

MASKS = st.lists(st.booleans(), min_size=0, max_size=12)


def lists(datum: Datum | None) -> tuple[list[int], list[int], list[float]]:
    assert datum is not None
    return datum.model_input.tolist(), datum.target_tokens.tolist(), datum.weights.tolist()


def test_datum_is_the_example_shifted_by_one_with_its_loss_weights() -> None:
    datum = make_datum([10, 20, 30, 40, 50], [False, False, True, True, True])
    assert lists(datum) == ([10, 20, 30, 40], [20, 30, 40, 50], [0, 1, 1, 1])
    assert datum is not None
    assert (datum.target_tokens.dtype, datum.weights.dtype) == (np.int64, np.float32)
    assert lists(make_datum([1, 2, 3], [False, True, True], reduction="mean"))[2] == [0.5, 0.5]
    mask, weights = [False, False, True, True], [0, 0, 0.5, 1.5]
    plain, mean = (make_datum([1, 2, 3, 4], mask, loss_weights=weights, reduction=one) for one in ("none", "mean"))
    assert lists(plain) == ([1, 2, 3], [2, 3, 4], [0, 0.5, 1.5])
    assert lists(mean) == ([1, 2, 3], [2, 3, 4], [0, 0.25, 0.75])
    examples = [
        ExampleTokens(np.array(ids, np.int32), np.array(mask, np.bool_))
        for ids, mask in (([1], [True]), ([1, 2], [False, True]), ([1, 2], [False, False]))
    ]
    kept, skipped = make_datums(examples)
    assert (len(kept), skipped) == (1, 2)


@pytest.mark.parametrize(("ids", "mask"), [([], []), ([1], [True]), ([1, 2], [True, False]), ([1, 2], [False, False])])
def test_datum_without_targets_is_none(ids: list[int], mask: list[bool]) -> None:
    assert make_datum(ids, mask) is None


@given(MASKS)
def test_datum_targets_exactly_the_trained_tokens(mask: list[bool]) -> None:
    ids = list(range(100, 100 + len(mask)))
    datum, mean = make_datum(ids, mask), make_datum(ids, mask, reduction="mean")
    trained = [one for one, trains in zip(ids[1:], mask[1:], strict=True) if trains]
    assert (datum is None) == (not trained)
    if datum is not None and mean is not None:
        assert datum.target_tokens[datum.weights > 0].tolist() == trained
        assert math.isclose(float(mean.weights.sum()), 1, rel_tol=1e-6)
        assert np.array_equal(datum.model_input[1:], datum.target_tokens[:-1])


# Equality with a build


def tokens_of(row: Json, tokenizer: Any, **more: Any) -> ExampleTokens:
    [made] = sft_tokenize([row], tokenizer, max_seq_len=256, **more)
    assert not isinstance(made, Rejected)
    return made[0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("datums") / "tokenizer")


ROWS: dict[str, tuple[dict[str, Any], list[Json]]] = {
    "chat": (CHAT, [chat(1), chat(2, turns=5, words=20), {"messages": []}, chat(3, turns=2), {"x": 1}]),
    "pair": (PAIR, [pair(1), {"prompt": "q"}, pair(2, words=200)]),
    "text": (TEXT, [document(1), document(2, words=200), {"text": " "}]),
    "tokens": (
        {"kind": "tokens", "token_fields": ["logprobs"], "row_fields": ["reward"]},
        [
            {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "logprobs": [-0.5, -0.25], "reward": 1},
            {"input_ids": [5, -6], "loss_mask": [0, 1]},
            {"prompt_ids": [5, 6], "response_ids": [7]},
        ],
    ),
}


@pytest.mark.parametrize(
    ("kind", "supervise"), [("chat", "last_assistant"), *((kind, "all_assistant") for kind in ROWS)]
)
def test_sft_tokenize_gives_what_a_build_gives(tmp_path: Path, kind: str, supervise: Any) -> None:
    form, rows = ROWS[kind]
    groups: dict[str, Any] = {"loss": {"supervise": supervise}} if kind == "chat" else {}
    found = Workspace(tmp_path).one("a.jsonl", rows, form, **groups, filters={"deduplicate": "off"}).build()
    options = {"format": form}
    made = sft_tokenize(rows, str(tmp_path / "tokenizer"), max_seq_len=256, supervise=supervise, options=options)
    flat = [one for outcome in made if not isinstance(outcome, Rejected) for one in outcome]
    assert [(one.ids.tolist(), one.loss_mask.tolist()) for one in flat] == [
        (one["input_ids"], one["loss_mask"]) for one in found.examples()
    ]
    assert [(i, one.reason) for i, one in enumerate(made) if isinstance(one, Rejected)] == found.rejects()


@pytest.mark.parametrize(
    ("row", "path"),
    [
        (chat(2) | {"note": "a\ud800b"}, "note"),
        (chat(2) | {"note": {"list": [1 << 70, {"deep": "\udfff"}]}}, "note.list[1].deep"),
        (chat(2) | {"a\ud800b": 1}, "a key of the record"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\ud800"}]}, "[1].content"),
    ],
)
def test_sft_tokenize_rejects_a_row_with_a_lone_surrogate_alone(tokenizer: Path, row: Json, path: str) -> None:
    first, bad, last = sft_tokenize([chat(1), row, chat(3)], tokenizer, max_seq_len=256)

    assert isinstance(bad, Rejected)
    assert bad.reason == "invalid_json"
    assert f"{path} holds a lone surrogate" in bad.detail
    assert isinstance(first, list)
    assert isinstance(last, list)


def test_row_to_datum_is_the_shift_of_sft_tokenize_or_none(tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(tokenizer)
    tokens, datum = tokens_of(chat(1), opened), row_to_datum(chat(1), opened, max_seq_len=256)
    assert lists(datum) == lists(make_datum(tokens.ids.tolist(), tokens.loss_mask.tolist()))
    untrained = chat(1)
    untrained["messages"][1]["train"] = False
    assert row_to_datum(untrained, tokenizer, max_seq_len=256) is None
    assert row_to_datum({"messages": [{"role": "user", "content": "q"}]}, tokenizer, max_seq_len=256) is None
    [made] = sft_tokenize([untrained], tokenizer, max_seq_len=256)
    assert isinstance(made, Rejected)
    assert made.reason == "no_loss_tokens"


def test_row_to_datum_weights_each_target_like_its_message(tokenizer: Path) -> None:
    row = chat(1, turns=2)
    row["messages"][1]["weight"] = 0.25
    datum = row_to_datum(row, tokenizer, max_seq_len=256, options={"format": CHAT, "loss": {"weights": True}})
    whole = row_to_datum(chat(1, turns=2), tokenizer, max_seq_len=256)
    assert datum is not None
    assert whole is not None
    assert datum.target_tokens.tolist() == whole.target_tokens.tolist()
    targets = datum.weights[whole.weights > 0]
    assert np.array_equal(datum.weights > 0, whole.weights > 0)
    assert sorted(set(targets.tolist())) == [0.25, 1]
    assert np.array_equal(targets, np.sort(targets))


def test_last_assistant_trains_a_part_of_what_all_train(tokenizer: Path) -> None:
    every = tokens_of(chat(1, turns=3), tokenizer)
    last = tokens_of(chat(1, turns=3), tokenizer, supervise="last_assistant")

    assert np.array_equal(every.ids, last.ids)
    assert not (last.loss_mask & ~every.loss_mask).any()
    assert 0 < last.loss_mask.sum() < every.loss_mask.sum()


def test_enable_thinking_reaches_the_template(tokenizer: Path) -> None:
    template = (
        "{{ 'T' if enable_thinking else 'F' if enable_thinking is defined else 'N' }}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    options = {"template": {"chat_template": template}}
    made = [tokens_of(chat(1), tokenizer, enable_thinking=value, options=options) for value in (True, False, None)]
    assert len({int(one.ids[0]) for one in made}) == 3


@pytest.mark.parametrize("kind", ["preference", "prompts", "records"])
def test_other_kinds_and_wrong_options_are_config_errors(tokenizer: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"format\.kind: .*{kind}.*; expected .*; "):
        sft_tokenize([pair(1)], tokenizer, max_seq_len=256, options={"format": {"kind": kind}})
    with pytest.raises(ConfigError, match=r"options: datasets\.rows\.loss\.supervize: unknown key"):
        sft_tokenize([chat(1)], tokenizer, max_seq_len=256, options={"loss": {"supervize": "last_turn"}})
