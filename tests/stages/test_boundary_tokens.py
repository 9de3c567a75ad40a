"""Tokens that hold the end of an answer and the start of the next message's header do not train, on any path."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.core.console import render_text
from rowmill.core.json import Json
from rowmill.reports.build_view import load_build_view
from rowmill.reports.summary import render_statistics
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer
from tests.support.messages import assistant, user
from tests.support.recipes import CHAT, CHATML, Workspace, chat, rewrite_tokenizer

BLANK_ENDS = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' ' }}{% endgeneration %}"
    "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
"""Every turn ends in a blank, which is the model's to write: `USER: Hi ASSISTANT: It is 3. USER: …`."""


def open_workspace(folder: Path, *merges: tuple[str, str]) -> Workspace:
    """Return a project whose tokenizer joins these pairs before any others."""

    def change(parsed: dict[str, Any]) -> None:
        model = parsed["model"]
        base = {token: number for token, number in model["vocab"].items() if len(token) == 1 or token.startswith("<|")}
        model["merges"] = [*merges]
        model["vocab"] = base | {"".join(pair): max(base.values()) + 1 + i for i, pair in enumerate(merges)}

    workspace = Workspace(folder)
    rewrite_tokenizer(folder / "tokenizer", change)
    return workspace


def list_expected(encoder: Encoder, ids: list[int]) -> tuple[list[bool], int]:
    """Return which tokens of a `BLANK_ENDS` chat must train, from the text alone, and how many reach a header."""
    tokens = [encoder.decode([one]) for one in ids]
    text = "".join(tokens)
    answers: list[tuple[int, int]] = []
    at = text.find("ASSISTANT: ")
    while at >= 0:
        start, end = at + len("ASSISTANT: "), text.find("USER: ", at)
        answers.append((start, end if end >= 0 else len(text)))
        at = text.find("ASSISTANT: ", start)
    mask: list[bool] = []
    reaching, position = 0, 0
    for token in tokens:
        begin, position = position, position + len(token)
        touched = [end for start, end in answers if begin < end and position > start]
        mask.append(any(position <= end for end in touched))
        reaching += any(position > end for end in touched)
    return mask, reaching


PATHS: dict[str, Any] = {
    "fast": lambda row: row,
    "reference": lambda row: {**row, "chat_template_kwargs": {"mood": "calm"}},
}


@pytest.mark.parametrize("path", PATHS)
def test_token_that_reaches_into_the_next_header_does_not_train(tmp_path: Path, path: str) -> None:
    workspace = open_workspace(tmp_path, ("Ġ", "U"), ("Ġ", "s"))
    rows: list[Json] = [PATHS[path](chat(i, turns=2, words=4)) for i in range(20)]
    built = workspace.one("a.jsonl", rows, CHAT, template={"chat_template": BLANK_ENDS, "verify_render": 1.0}).build()

    encoder = Encoder(open_tokenizer(str(tmp_path / "tokenizer"), tmp_path))
    expected = [list_expected(encoder, example["input_ids"]) for example in built.examples()]
    facts = built.facts("rows", "tokenized_examples")
    assert built.rejects() == []
    assert [example["loss_mask"] for example in built.examples()] == [mask for mask, _ in expected]
    assert facts["untrained_boundary_tokens"] == sum(reaching for _, reaching in expected) == 20
    assert facts["mask_verified"] == 1
    assert "20 tokens with trained text and text of another message: untrained" in render_text(
        render_statistics(load_build_view(built.project))
    )


def test_sides_of_a_preference_withhold_such_tokens_too(tmp_path: Path) -> None:
    workspace = open_workspace(tmp_path, ("Ġ", "U"))
    rows: list[Json] = [
        {
            "prompt": [user(f"Add {i}.")],
            "chosen": [assistant("Done."), user("Sure?"), assistant("Yes.")],
            "rejected": [assistant("Done."), user("Sure?"), assistant("No.")],
        }
        for i in range(8)
    ]
    template = {"chat_template": BLANK_ENDS, "verify_render": 1.0}
    built = workspace.one("a.jsonl", rows, {"kind": "preference"}, template=template).build()

    encoder = Encoder(open_tokenizer(str(tmp_path / "tokenizer"), tmp_path))
    for example in built.examples():
        cut = example["side_lengths"][0]
        for side in (slice(0, cut), slice(cut, None)):
            assert example["loss_mask"][side] == list_expected(encoder, example["input_ids"][side])[0]
    assert built.facts("rows", "tokenized_examples")["untrained_boundary_tokens"] == 2 * len(rows)


def test_own_text_that_shares_a_token_with_the_next_header_is_withheld_and_the_mask_is_verified(tmp_path: Path) -> None:
    """The answer's last letter and the header's first are one token: of no message, so that it leaves no hole."""
    template = BLANK_ENDS.replace("{{ m.content + ' ' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}")
    workspace = open_workspace(tmp_path, ("e", "U"))
    rows: list[Json] = [
        {"messages": [user(f"Add {i}"), assistant("Done"), user("Now this one"), assistant("Done once more")]}
        for i in range(10)
    ]
    built = workspace.one("a.jsonl", rows, CHAT, template={"chat_template": template, "verify_render": 1.0}).build()

    facts = built.facts("rows", "tokenized_examples")
    assert facts["untrained_boundary_tokens"] == len(rows)
    assert facts["mask_verified"] == 1


def test_no_token_of_a_template_with_control_tokens_is_withheld(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    built = workspace.one(
        "a.jsonl", [chat(i, turns=2) for i in range(5)], CHAT, template={"chat_template": CHATML}
    ).build()

    assert built.facts("rows", "tokenized_examples")["untrained_boundary_tokens"] == 0
