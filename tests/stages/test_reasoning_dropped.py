"""Reasoning under templates that print none: it goes back into its tags, or a check says that it is lost."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.checks.judge import CheckResult
from tests.support.recipes import CHAT, TO_EXAMPLES, Built, Workspace, open_encoder
from tests.support.tables import trained_ids

pytestmark = pytest.mark.slow

PREFERENCE = {"kind": "preference"}


def in_tags(i: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"<think>\nBecause of {i}.\n</think>\n\nAnswer {i}."}


def in_a_key(i: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"Answer {i}.", "reasoning_content": f"Because of {i}."}


def ask(i: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Question {i}?"}


def build(folder: Path, rows: list[dict[str, Any]], kind: Any = CHAT, chat: str = "llama3.1", **groups: Any) -> Built:
    template = {"chat_template": chat}
    return Workspace(folder).one("a.jsonl", rows, kind, template=template, gates={}, **groups).build(only=TO_EXAMPLES)


def results(built: Built) -> list[CheckResult]:
    return [built.result(name, "rows", "tokenized_examples") for name in ("reasoning_dropped", "content_dropped")]


def trained_text(built: Built) -> list[str]:
    return [*map(open_encoder(built).decode, trained_ids(built))]


def test_reasoning_in_a_key_is_lost_and_both_checks_say_so(tmp_path: Path) -> None:
    plain = {"role": "assistant", "content": "Because I say so."}
    rows = [{"messages": [ask(i), plain if i % 4 else in_a_key(i)]} for i in range(12)]
    built = build(tmp_path, rows)

    lost, dropped = results(built)

    assert (lost.value, dropped.value) == (0.25, 0.25)
    assert lost.severity == "error"
    assert lost.causes == ("the template llama3.1 prints no reasoning",)
    assert "reasoning.think_mode to inline" in lost.sentence
    assert not any("Because of" in text for text in trained_text(built))


@pytest.mark.parametrize(
    ("answer", "reasoning", "lost", "shown"),
    [
        (in_tags, {}, 0, True),
        (in_tags, {"think_mode": "keep"}, 1, False),
        (in_a_key, {"think_mode": "inline"}, 0, True),
        (in_a_key, {"think_mode": "drop"}, 0, False),
    ],
)
def test_reasoning_goes_back_into_tags_or_is_lost_as_the_mode_says(
    tmp_path: Path, answer: Any, reasoning: dict[str, str], lost: float, shown: bool
) -> None:
    built = build(tmp_path, [{"messages": [ask(i), answer(i)]} for i in range(12)], reasoning=reasoning)

    assert [one.value for one in results(built)] == [lost, lost]
    for text in trained_text(built):
        assert ("Because of " in text) is ("<think>\nBecause of " in text) is shown
        assert "Answer " in text


def test_reasoning_of_earlier_turns_that_a_template_prints_for_the_last_is_not_counted(tmp_path: Path) -> None:
    rows = [{"messages": [ask(i), in_a_key(i), ask(i + 90), in_a_key(i + 90)]} for i in range(12)]
    built = build(tmp_path, rows, chat="qwen3")

    assert built.facts("rows", "tokenized_examples")["dropped_kinds"] == {"reasoning": 12}
    assert [one.value for one in results(built)] == [0, 0]


@pytest.mark.parametrize(("answer", "value"), [(in_tags, 0), (in_a_key, 1)])
def test_sides_of_preferences_lose_no_reasoning_unseen(tmp_path: Path, answer: Any, value: float) -> None:
    rows = [{"prompt": [ask(i)], "chosen": [answer(i)], "rejected": [answer(i + 50)]} for i in range(12)]
    built = build(tmp_path, rows, PREFERENCE)

    assert [one.value for one in results(built)] == [value, value]
