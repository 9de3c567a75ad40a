r"""The lead of an assistant's span: what the prompt has already printed when the model begins to write.

What belongs here: cutting a generation prompt into units and matching it. What does not: asking the template
for its generation prompt (`Printer.generation_prompt`).

    G      <|im_start|> assistant\n <think> \n\n </think> \n\n        six units
    span   <|im_start|> assistant\n A1 <|im_end|> \n                     lead: the first two

Whole units, never characters: `<think>` and `<tool_call>` share `<t`.
"""

import re
from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=4096)
def runs(prompt: str, control_tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return all runs of whole units that begin at the prompt's first unit or a control token, longest first."""
    units = _units(prompt, control_tokens)
    starts = [i for i, unit in enumerate(units) if i == 0 or unit in control_tokens]
    found = {"".join(units[start:end]) for start in starts for end in range(start + 1, len(units) + 1)}
    return tuple(sorted(found, key=lambda run: (-len(run), run)))


def _units(prompt: str, control_tokens: Sequence[str]) -> list[str]:
    # A tag such as <think> is a unit even where the tokenizer has no token for it.
    longest_first = [*map(re.escape, sorted(control_tokens, key=len, reverse=True)), r"</?[A-Za-z]\w*>"]
    return [unit for unit in re.split(f"({'|'.join(longest_first)})", prompt) if unit]


def lead_length(text: str, start: int, prompt: str, control_tokens: tuple[str, ...]) -> int:
    """Return how many characters of a span are the prompt's; 0 if it shares no whole unit."""
    if not prompt:
        return 0
    if text.startswith(prompt, start):
        return len(prompt)
    return next((len(run) for run in runs(prompt, control_tokens) if text.startswith(run, start)), 0)
