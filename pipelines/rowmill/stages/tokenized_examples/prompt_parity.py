r"""Checks whether a prompt sent as text is tokenized to the ids that the model was trained on.

What belongs here: choosing conversations, and comparing the generation prompt of each, encoded alone, with the ids of
its training example. What does not: whether the template prints the prompt before the answer at all
(`TemplateContract.prompt_match`), prompts as text (`plain_prompts.py` for plain chats).

    training     <|im_start|>assistant\n\nYes      …  1 "assistant"  2 "\n\n"  3 "Yes"
    inference    <|im_start|>assistant\n            …  1 "assistant"  4 "\n"           other ids before the answer

A plain chat that ends with its last trained answer is its own example up to that answer: the ids that the fast path
made of it are compared. Of every other conversation, the part up to that answer is masked and encoded once more.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.conversation.loss_mask import find_plain_checks
from rowmill.conversation.prompt_rendering import PromptRenderer
from rowmill.core.arrays import Ints, Tokens
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.schema.conversation import Conversation
from rowmill.schema.rows import MaskedConversation, Rejected
from rowmill.stages.tokenized_examples.conversation_encoding import (
    ConversationEncoder,
    decode_conversations,
    make_mask_rules,
)
from rowmill.stages.tokenized_examples.fast_path import BatchedChatPath
from rowmill.stages.tokenized_examples.plain_prompts import ASKS_FOR_ANSWER, PlainPromptPrinter
from rowmill.tokenization.control_tokens import ControlStrings
from rowmill.tokenization.example_encoding import TokenizationCounts

_READ_COLUMNS = (*("row_id", "messages", "tools", "template_kwargs", "content_hash", "extracted_think_from_content"),)


@frozen_dataclass
class FastPathExamples:
    """The only example of each conversation that the fast path built: `rows` int64[N], ascending.

    The ids of row `rows[j]` are `ids[starts[j]:ends[j]]`.
    """

    rows: Ints
    ids: Tokens
    starts: Ints
    ends: Ints

    def find_ids(self, place: int) -> Tokens | None:
        """Return the ids of a row's example; None if the fast path did not build it."""
        j = int(np.searchsorted(self.rows, place))
        return self.ids[self.starts[j] : self.ends[j]] if j < len(self.rows) and self.rows[j] == place else None


@frozen_dataclass
class PromptAndExample:
    """The prompt for a conversation's last answer, as a server renders it, and the example up to that answer.

    `example` are its ids if they exist already, else its mask.
    """

    row_id: str
    prompt: str
    example: Tokens | MaskedConversation


class PromptComparison:
    """Encodes generation prompts of one dataset alone, as a server does, and compares them with the examples."""

    def __init__(self, encoder: ConversationEncoder, chats: BatchedChatPath | None) -> None:
        """Store the steps; `chats` is the fast path of conversations, if they have one."""
        self._steps = encoder
        self._chats = chats
        rules = make_mask_rules(encoder.dataset)
        layouts = PromptRenderer(encoder.printer, encoder.masker, rules)
        self._prompts = PlainPromptPrinter(encoder.printer, layouts.find_layout)

    def compare(self, table: pa.Table, built: FastPathExamples, counts: TokenizationCounts) -> None:
        """Compare some conversations of a part, and count them; `built` are those of the fast path."""
        places = choose_rows(table, built.rows, self._steps.dataset.template.verify_render, self._steps.control)
        if not len(places):
            return
        rows = table.select(_READ_COLUMNS).take(pa.array(places))
        names: list[str] = rows.column("row_id").to_pylist()
        printed = [
            self._print_pair(row_id, one, built.find_ids(place))
            for row_id, one, place in zip(names, decode_conversations(rows), places.tolist(), strict=True)
        ]
        pairs = [one for one in printed if one is not None]
        prompts = self._steps.encode_prompts([pair.prompt for pair in pairs])
        for one, ids, prompt in zip(pairs, self._encode_examples(pairs), prompts, strict=True):
            if ids is not None:
                counts.prompts_compared += 1
                counts.prompts_that_differ += [] if begins_with(ids, prompt) else [one.row_id]

    def _print_pair(self, row_id: str, conversation: Conversation, ids: Tokens | None) -> PromptAndExample | None:
        last = len(conversation.messages) - 1
        if ids is None or last < 1 or last != max(self._steps.masker.supervised(conversation.messages), default=0):
            return print_prompt(row_id, conversation, self._steps)
        return self._print_plain_pair(row_id, conversation, ids)

    def _print_plain_pair(self, row_id: str, conversation: Conversation, ids: Tokens) -> PromptAndExample | None:
        """Print the prompt of a plain chat whose last message trains; None if its example does not start with it."""
        assert self._chats is not None
        text = self._chats.print_text(conversation.messages)
        prompt = self._prompts.print_prompt(conversation.messages[:-1])
        if isinstance(prompt, Rejected) or not text.startswith(prompt):
            return None
        return PromptAndExample(row_id, prompt, ids)

    def _encode_examples(self, pairs: Sequence[PromptAndExample]) -> list[Tokens | None]:
        """Return the ids of each example; None if it cannot be encoded."""
        masked = [one.example for one in pairs if isinstance(one.example, MaskedConversation)]
        # Counted separately, because these rows were already counted.
        made = self._steps.encode_masked(masked, [[]] * len(masked), TokenizationCounts()) if masked else []
        encoded = iter([None if isinstance(one, Rejected) else one.ids for one in made])
        return [next(encoded) if isinstance(one.example, MaskedConversation) else one.example for one in pairs]


def choose_rows(table: pa.Table, built: Ints, share: float, control: ControlStrings) -> Ints:
    """Return the conversations of a part to compare: the first one, and those chosen by hash.

    A control string in a row's text is encoded differently on purpose, and `control_strings` counts such rows; so they
    are not compared. Rows that the fast path built have none, and only chosen ones of the others are searched.
    """
    places = np.flatnonzero(pc.equal(table.column("kind"), "conversation").to_numpy())
    chosen = find_plain_checks(table.column("content_hash").combine_chunks(), share)[places]
    free = np.isin(places, built)
    could_be_first = np.arange(len(places)) < (int(np.argmax(free)) if free.any() else len(places))
    unknown = np.flatnonzero(~free & (chosen | could_be_first))
    if len(unknown):
        free[unknown] = ~control.find_rows(table.select(_READ_COLUMNS).take(pa.array(places[unknown])))
    if free.any():
        chosen[np.argmax(free)] = True
    return places[chosen & free]


def print_prompt(row_id: str, conversation: Conversation, steps: ConversationEncoder) -> PromptAndExample | None:
    """Render the prompt for a conversation's last answer, and mask the conversation up to it as in training.

    None if there is nothing to compare: no message is answered, or the text does not start with the prompt.
    """
    conversation = steps.inline_reasoning(steps.limit_reasoning(conversation))
    messages = conversation.messages
    last = max(steps.masker.supervised(messages), default=0)
    if not last:
        return None
    prompt = steps.printer.plain(messages[:last], conversation.tools, {**conversation.kwargs, **ASKS_FOR_ANSWER})
    answered = replace(conversation, messages=messages[: last + 1])
    # The row's mask was verified when its example was made; only its text and cuts matter here.
    masked = steps.masker.mask(answered, only=frozenset({last}), compare_plain=False)
    if isinstance(prompt, Rejected) or isinstance(masked, Rejected) or not masked.text.startswith(prompt):
        return None
    return PromptAndExample(row_id, prompt, masked)


def begins_with(ids: Tokens, prompt: Tokens) -> bool:
    """Return whether an example's ids start with those of its prompt."""
    return np.array_equal(ids[: len(prompt)], prompt)
