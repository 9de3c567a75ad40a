"""Prompts in, completions out: what every backend keeps to.

What belongs here: the values that go to a backend and come from it, and the protocol. What does not: any backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PromptText:
    """What is to be continued, as text and, where it is known, as the tokens that the model was trained on."""

    text: str
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation; `finish_reason` is `stop` where the model ended it and the end is not in the text."""

    text: str
    finish_reason: str | None = None


class Completer(Protocol):
    """Continues prompts."""

    def complete(
        self,
        prompts: Sequence[PromptText],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        repetition_penalty: float,
        stop: Sequence[str],
        seeds: Sequence[int],
    ) -> Sequence[Sequence[Completion] | Exception]:
        """Return `n` completions per prompt, each prompt sampled with its own seed.

        A prompt that could not be completed has the error in its place; the others are not lost with it.
        """
        ...
