r"""Whether a prompt that is sent as text becomes the ids that the model was trained on.

What belongs here: comparing one conversation's generation prompt, encoded alone, with the ids that the conversation
trains with. What does not: which rows are compared (`text_examples.py`), whether the template prints the prompt before
the answer at all (`TemplateContract.prompt_match`).

    training     <|im_start|>assistant\n\nYes      …  1 "assistant"  2 "\n\n"  3 "Yes"
    inference    <|im_start|>assistant\n            …  1 "assistant"  4 "\n"           other ids before the answer
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rowmill.conversation.masking import Masker, needs_plain_check
from rowmill.conversation.template_contract import ChatRenderer
from rowmill.core.arrays import Tokens
from rowmill.schema.conversation import Conversation
from rowmill.schema.rows import MaskedConversation, Rejected
from rowmill.tokenization.encoded_batch import Example


def choose_rows(hashes: Sequence[bytes], share: float) -> list[int]:
    """Return the rows of a part to compare: those in the share, by their hash, and the first of all."""
    return [place for place, one in enumerate(hashes) if place == 0 or needs_plain_check(one, share)]


def begins_with_prompt(
    conversation: Conversation,
    printer: ChatRenderer,
    masker: Masker,
    *,
    encode_prompt: Callable[[str], Tokens],
    encode_example: Callable[[MaskedConversation], Example | Rejected],
) -> bool | None:
    """Tell whether a conversation's ids begin with those of the prompt for its last answer.

    None where there is nothing to compare: no message is answered, or the text does not begin with the prompt.
    """
    messages = conversation.messages
    last = max(masker.supervised(messages), default=0)
    if not last:
        return None
    asking = {**conversation.kwargs, "add_generation_prompt": True}
    prompt = printer.plain(messages[:last], conversation.tools, asking)
    masked = masker.mask(replace(conversation, messages=messages[: last + 1]), only=frozenset({last}))
    if isinstance(prompt, Rejected) or isinstance(masked, Rejected) or not masked.text.startswith(prompt):
        return None
    example = encode_example(masked)
    if isinstance(example, Rejected):
        return None
    ids = encode_prompt(prompt)
    return np.array_equal(example.ids[: len(ids)], ids)
