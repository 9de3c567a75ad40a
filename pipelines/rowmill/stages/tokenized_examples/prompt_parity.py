r"""Checks whether a prompt sent as text is tokenized to the ids that the model was trained on.

What belongs here: comparing one conversation's generation prompt, encoded alone, with the ids of the training example.
What does not: choosing the rows to compare (`text_examples.py`), whether the template prints the prompt before the
answer at all (`TemplateContract.prompt_match`).

    training     <|im_start|>assistant\n\nYes      …  1 "assistant"  2 "\n\n"  3 "Yes"
    inference    <|im_start|>assistant\n            …  1 "assistant"  4 "\n"           other ids before the answer
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rowmill.conversation.masking import Masker, needs_plain_check
from rowmill.conversation.template_contract import ChatRenderer
from rowmill.core.arrays import Tokens
from rowmill.schema.conversation import Conversation
from rowmill.schema.rows import MaskedConversation, Rejected


def choose_rows(hashes: Sequence[bytes], share: float) -> list[int]:
    """Return the rows of a part to compare: the first one, and those chosen by hash."""
    return [place for place, one in enumerate(hashes) if place == 0 or needs_plain_check(one, share)]


@dataclass(frozen=True, slots=True)
class PromptAndExample:
    """The prompt for a conversation's last answer, as a server renders it, and the conversation up to that answer."""

    row_id: str
    prompt: str
    masked: MaskedConversation


def print_prompt(
    row_id: str, conversation: Conversation, printer: ChatRenderer, masker: Masker
) -> PromptAndExample | None:
    """Render the prompt for a conversation's last answer, and the conversation as in training.

    None if there is nothing to compare: no message is answered, or the text does not start with the prompt.
    """
    messages = conversation.messages
    last = max(masker.supervised(messages), default=0)
    if not last:
        return None
    asking = {**conversation.kwargs, "add_generation_prompt": True}
    prompt = printer.plain(messages[:last], conversation.tools, asking)
    answered = replace(conversation, messages=messages[: last + 1])
    # The row's mask was verified when its example was made; only its text and cuts matter here.
    masked = masker.mask(answered, only=frozenset({last}), prove_sample=False, compare_plain=False)
    if isinstance(prompt, Rejected) or isinstance(masked, Rejected) or not masked.text.startswith(prompt):
        return None
    return PromptAndExample(row_id, prompt, masked)


def begins_with(ids: Tokens, prompt: Tokens) -> bool:
    """Return whether an example's ids start with those of its prompt."""
    return np.array_equal(ids[: len(prompt)], prompt)
