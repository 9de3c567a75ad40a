"""The protocol of backends: prompts in, completions out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as text and, if known, as the token ids of training."""

    text: str
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion; `finish_reason` is `stop` if the model ended it, and then the text does not contain the EOS."""

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

        A prompt that failed has the error in its place; the others keep their completions.
        """
        ...
