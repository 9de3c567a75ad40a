r"""Golden rows, lengths and pairs in whole builds, with a template and a tokenizer that can be checked by eye.

T1   <u>U1<e>\n<a>⟦A1<e>⟧\n …         seven characters and the content, for each message
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.recipes import CHAT, Workspace

T1 = (
    "{% for m in messages %}{{ '<'+m.role[0]+'>'+m.content+'<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
THINKING = T1.replace(
    "+m.content", "+('<k>'+m.reasoning_content+'</k>' if m.reasoning_content is defined else '')+m.content"
)


@cache
def characters() -> str:
    """Return a tokenizer that has a token for every byte and two of its own, and merges none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in ("[B]", "[E]")])
    return tokenizer.to_str()


def workspace(folder: Path, template: str = T1) -> Workspace:
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer/tokenizer.json").write_text(characters(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "[B]", "eos_token": "[E]"}
    settings = json.dumps(config | {"chat_template": template})
    (folder / "tokenizer/tokenizer_config.json").write_text(settings, encoding="utf-8")
    return Workspace(folder)


def talk(words: str) -> dict[str, Any]:
    roles = {"S": "system", "U": "user", "A": "assistant"}
    return {"messages": [{"role": roles[word[0]], "content": word} for word in words.split()]}


def shown(example: dict[str, Any]) -> str:
    """Return an example's text with its trained stretches in brackets."""
    ids, mask = example["input_ids"], [False, *example["loss_mask"], False]
    tokenizer = Tokenizer.from_str(characters())
    edges = np.flatnonzero(np.diff(np.array(mask, np.int8)))
    pieces = [tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in np.split(np.array(ids), edges)]
    return "".join(piece if i % 2 == 0 else f"⟦{piece}⟧" for i, piece in enumerate(pieces))


def examples(folder: Path, row: dict[str, Any], template: str = T1, **groups: Any) -> list[dict[str, Any]]:
    return workspace(folder, template).one("a.jsonl", [row], CHAT, **groups).examples()


def trained(example: dict[str, Any]) -> list[int]:
    return np.flatnonzero(example["loss_mask"]).tolist()


@pytest.mark.parametrize(
    ("groups", "flags", "positions"),
    [
        ({}, {}, [*range(12, 17), *range(30, 35)]),
        ({"loss": {"supervise": "last_assistant"}}, {}, [*range(30, 35)]),
        ({}, {1: {"weight": 0}}, [*range(30, 35)]),
        ({"loss": {"mask": {"user": "train"}}}, {}, [*range(1, 8), *range(18, 26)]),
    ],
)
def test_two_exchanges_are_36_tokens_of_which_these_train(
    tmp_path: Path, groups: dict[str, Any], flags: dict[int, Any], positions: list[int]
) -> None:
    row = talk("U1 A1 U2 A2")
    for index, flag in flags.items():
        row["messages"][index] |= flag
    (one,) = examples(tmp_path, row, **groups)
    assert one["tokens"] == 36
    assert trained(one) == positions


def test_two_exchanges_weigh_where_they_train_and_as_much_as_their_messages(tmp_path: Path) -> None:
    """Weights say something of the model's messages only, unless `loss.mask` says that others train."""
    row = talk("U1 A1 U2 A2")
    row["messages"][0]["loss_weight"], row["messages"][1]["weight"] = 0.25, 0.5
    answers = {**dict.fromkeys(range(12, 17), 0.5), **dict.fromkeys(range(30, 35), 1)}
    questions = {**dict.fromkeys(range(1, 8), 0.25), **dict.fromkeys(range(18, 26), 1)}
    trains_all = {"mask": {"user": "train", "assistant": "train"}}
    for loss, weights in (({}, answers), (trains_all, dict(sorted({**answers, **questions}.items())))):
        (one,) = examples(tmp_path / f"{len(loss)}", row, loss={"weights": True, **loss})
        assert one["loss_weights"] == [weights.get(i, 0) for i in range(36)]
        assert trained(one) == [*weights]


WHOLE = "<s>S<e>\n<u>U1<e>\n<a>⟦A1<e>⟧\n<u>U2<e>\n<a>⟦A2<e>⟧\n"
LATTER = "<s>S<e>\n<u>U2<e>\n<a>⟦A2<e>⟧\n"


@pytest.mark.parametrize(
    ("limit", "text", "stages"),
    [
        (44, WHOLE, (0, 0, 0, 0)),
        (43, LATTER, (2, 18, 0, 0)),
        (26, LATTER, (2, 18, 0, 0)),
        (25, LATTER[1:], (2, 18, 0, 1)),
    ],
)
def test_truncation_of_44_tokens(tmp_path: Path, limit: int, text: str, stages: tuple[int, ...]) -> None:
    (one,) = examples(tmp_path, talk("S U1 A1 U2 A2"), truncation={"max_length": limit})
    assert one["original_tokens"] == 44
    assert shown(one) == text
    assert (one["messages_removed"], one["exchanges_removed"], one["reasoning_removed"], one["tokens_cut"]) == stages
    assert one["tokens"] <= limit


@pytest.mark.slow
def test_truncation_of_reasoning_keeps_13_tokens_as_context(tmp_path: Path) -> None:
    row = talk("U A")
    row["messages"][1]["reasoning"] = "abcdefghijklmnopqrst"
    (whole,) = examples(tmp_path / "whole", row, THINKING)
    (cut,) = examples(tmp_path / "cut", row, THINKING, truncation={"max_length": 36})
    assert whole["tokens"] == 43
    assert (cut["tokens"], cut["reasoning_removed"]) == (36, 7)
    assert shown(cut) == "<u>U<e>\n<a>⟦<k>⟧abcdefghijklm⟦</k>A<e>⟧\n"


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ({"separate_with": "\n", "add_bos": True}, "[B]ab\n⟦cd[E]⟧"),
        ({"separate_with": 5}, "ab&⟦cd[E]⟧"),
        ({"add_eos": False}, "ab⟦cd⟧"),
        ({"mask": {"prompt": "train", "response": "mask"}}, "a⟦b⟧cd[E]"),
        ({"mask_inputs": False}, "a⟦bcd[E]⟧"),
        ({"max_length": 4}, "b⟦cd[E]⟧"),
        ({"max_length": 4, "truncate_side": "right"}, "a⟦cd[E]⟧"),
        ({"max_length": 2}, "c⟦d⟧"),
    ],
)
def test_pair_by_its_options(tmp_path: Path, groups: dict[str, Any], text: str) -> None:
    row = {"prompt": "ab", "response": "cd"}
    (one,) = workspace(tmp_path).one("a.jsonl", [row], {"kind": "supervised", **groups}).examples()
    assert shown(one) == text


@pytest.mark.parametrize(
    ("groups", "texts"),
    [
        ({}, ["[B]⟦abcdef[E]⟧"]),
        ({"add_bos": False, "add_eos": False}, ["a⟦bcdef⟧"]),
        ({"max_length": 3}, ["[B]⟦ab⟧", "c⟦de⟧", "f⟦[E]⟧"]),
        ({"max_length": 3, "overlong": "truncate"}, ["[B]⟦ab⟧"]),
    ],
)
def test_text_by_its_options(tmp_path: Path, groups: dict[str, Any], texts: list[str]) -> None:
    found = workspace(tmp_path).one("a.jsonl", [{"text": "abcdef"}], {"kind": "text", **groups}).examples()
    assert [shown(one) for one in found] == texts


@pytest.mark.parametrize(("limit", "turns"), [(40, "whole"), (60, "whole"), (40, "message"), (60, "exchange")])
def test_every_supervised_message_of_a_split_row_trains_in_exactly_one_example(
    tmp_path: Path, limit: int, turns: str
) -> None:
    row = talk("S " + " ".join(f"U{i} A{i}" for i in range(5)))
    options = {"truncation": {"overlong": "split", "max_length": limit}, "template": {"turns": turns}}
    found = workspace(tmp_path).one("a.jsonl", [row], CHAT, **options).examples()
    texts = [shown(one) for one in found]
    assert [sum(f"⟦A{i}<e>⟧" in text for text in texts) for i in range(5)] == [1] * 5
    assert all(text.startswith("<s>S<e>") for text in texts)
    assert all(one["tokens"] <= limit for one in found)
