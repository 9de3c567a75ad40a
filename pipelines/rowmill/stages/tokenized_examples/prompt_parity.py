r"""Checks whether a prompt sent as text is tokenized to the ids that the model was trained on.

What belongs here: choosing conversations, and comparing the generation prompt of each, encoded alone, with the ids of
its training example. What does not: whether the template prints the prompt before the answer at all
(`TemplateContract.prompt_match`).

    training     <|im_start|>assistant\n\nYes      …  1 "assistant"  2 "\n\n"  3 "Yes"
    inference    <|im_start|>assistant\n            …  1 "assistant"  4 "\n"           other ids before the answer
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.conversation.masking import Masker, find_plain_checks
from rowmill.conversation.template_contract import ChatRenderer
from rowmill.core.arrays import Ints, Tokens
from rowmill.schema.conversation import Conversation
from rowmill.schema.rows import MaskedConversation, Rejected
from rowmill.stages.tokenized_examples.conversation_encoding import ConversationEncoder, decode_conversations
from rowmill.tokenization.example_encoding import TokenizationCounts


def compare_prompts(table: pa.Table, encoder: ConversationEncoder, counts: TokenizationCounts) -> None:
    """Encode the generation prompts of some conversations alone, as a server does, and compare."""
    rows = table.filter(pc.equal(table.column("kind"), "conversation"))
    # A control string in a row's text is encoded differently on purpose; `control_strings` counts such rows.
    rows = rows.filter(pa.array(~encoder.control.find_rows(rows)))
    chosen = choose_rows(rows.column("content_hash").combine_chunks(), encoder.dataset.template.verify_render)
    if not len(chosen):
        return
    rows = rows.take(pa.array(chosen))
    names: list[str] = rows.column("row_id").to_pylist()
    printed = (
        print_prompt(row_id, encoder.inline_reasoning(encoder.limit_reasoning(one)), encoder.printer, encoder.masker)
        for row_id, one in zip(names, decode_conversations(rows), strict=True)
    )
    pairs = [one for one in printed if one is not None]
    # Counted separately, because these rows were already counted.
    examples = encoder.encode_masked([pair.masked for pair in pairs], [[]] * len(pairs), TokenizationCounts())
    prompts = encoder.encode_prompts([pair.prompt for pair in pairs])
    for one, example, prompt in zip(pairs, examples, prompts, strict=True):
        if not isinstance(example, Rejected):
            counts.prompts_compared += 1
            counts.prompts_that_differ += [] if begins_with(example.ids, prompt) else [one.row_id]


def choose_rows(hashes: pa.FixedSizeBinaryArray, share: float) -> Ints:
    """Return the rows of a part to compare: the first one, and those chosen by hash."""
    chosen = find_plain_checks(hashes, share)
    chosen[:1] = True
    return np.flatnonzero(chosen)


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
