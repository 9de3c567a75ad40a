r"""Whether a prompt sent as text has the ids that the model was trained on; and the tokens of tool lists.

    training     <|im_start|>assistant\n\nYes      …  1 "assistant"  2 "\n\n"  3 "Yes"
    inference    <|im_start|>assistant\n            …  1 "assistant"  4 "\n"           other ids before the answer

What is compared is how template and tokenizer behave where a prompt ends, so a stretch before that place is enough, and
each distinct one once per part. A plain chat that ends with its last trained answer is its own example up to that
answer: its text is that of the fast path. Of every other conversation, the part up to that answer is masked once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.conversation.loss_mask import ASKS_FOR_ANSWER
from rowmill.conversation.renderer import Renderer
from rowmill.core.arrays import Ints
from rowmill.core.json import Json, from_json
from rowmill.schema.rows import Conversation, MaskedConversation, Message, Rejected, Span
from rowmill.stages.tokenized_examples.conversation_examples import (
    ConversationSteps,
    decode_conversations,
)
from rowmill.stages.tokenized_examples.fast_path import BatchedChatPath, choose_by_hash
from rowmill.tokenization.control_tokens import ControlStrings
from rowmill.tokenization.encoded_batch import PartTally, encode_texts, list_cuts
from rowmill.tokenization.reference_sample import find_border
from rowmill.tokenization.tokenizer import Encoder

_READ_COLUMNS = (*("row_id", "messages", "tools", "template_kwargs", "content_hash", "extracted_think_from_content"),)


PROMPT_CHARS = 1 << 12
"""Characters before the end of a prompt that are compared: what was printed earlier does not decide how it ends."""


@dataclass(frozen=True, slots=True)
class PromptEnding:
    """The end of a prompt for a conversation's last answer, as a server renders it, and the example around that place.

    `prompt` and `text` begin at the same place, and `text` ends behind the prompt; `trained` are ranges of `text`.
    """

    prompt: str
    text: str
    trained: tuple[Span, ...]


class PromptComparison:
    """Encodes generation prompts of one dataset alone, as a server does, and compares them with the examples."""

    def __init__(self, steps: ConversationSteps, chats: BatchedChatPath | None) -> None:
        self._steps = steps
        self._chats = chats

    def compare(self, table: pa.Table, built: Ints, counts: PartTally) -> None:
        """Compare some conversations of a part, and count them; `built` are the rows of those of the fast path."""
        places = choose_rows(table, built, self._steps.dataset.template.verify_render, self._steps.control)
        if not len(places):
            return
        rows = table.select(_READ_COLUMNS).take(pa.array(places))
        row_ids: dict[PromptEnding, list[str]] = {}
        is_built = np.isin(places, built).tolist()
        names: list[str] = rows.column("row_id").to_pylist()
        for row_id, one, plain in zip(names, decode_conversations(rows), is_built, strict=True):
            printed = self._print_ending(one, is_built=plain)
            if printed is not None:
                row_ids.setdefault(printed, []).append(row_id)
        endings = list(row_ids)
        if not endings:
            return
        # Counted separately, because these rows were already counted; what is in the part's sample stays in it.
        separate = PartTally(sample=counts.sample)
        texts = [MaskedConversation(one.prompt, (), ()) for one in endings]
        texts += [MaskedConversation(one.text, one.trained, ()) for one in endings]
        cuts = list_cuts(texts, split=self._steps.cuts_apart)
        encoded = encode_texts(self._steps.encoder, [one.text for one in texts], [()] * len(texts), separate, cuts=cuts)
        differing: set[str] = set()
        for i, one in enumerate(endings):
            counts.prompts_compared += len(row_ids[one])
            prompt, text = encoded.get_text(i).ids, encoded.get_text(len(endings) + i).ids
            if not np.array_equal(text[: len(prompt)], prompt):
                differing.update(row_ids[one])
        counts.prompts_that_differ += [one for one in names if one in differing]

    def _print_ending(self, conversation: Conversation, *, is_built: bool) -> PromptEnding | None:
        last = len(conversation.messages) - 1
        if not is_built or last < 1 or last != max(self._steps.masker.supervised(conversation.messages), default=0):
            return print_prompt(conversation, self._steps)
        # A plain chat whose last message trains is its own example up to that answer.
        assert self._chats is not None
        text = self._chats.print_text(conversation.messages)
        prompt = self._steps.renderer.plain(conversation.messages[:-1], None, ASKS_FOR_ANSWER)
        if isinstance(prompt, Rejected) or not text.startswith(prompt):
            return None
        return cut_ending(prompt, text, ())


def choose_rows(table: pa.Table, built: Ints, share: float, control: ControlStrings) -> Ints:
    """Return the conversations of a part to compare: the first one, and those chosen by hash.

    A control string in a row's text is encoded differently on purpose, and `control_strings` counts such rows; so they
    are not compared. Rows that the fast path built have none, and only chosen ones of the others are searched.
    """
    places = np.flatnonzero(pc.equal(table.column("kind"), "conversation").to_numpy())
    chosen = choose_by_hash(table.column("content_hash").combine_chunks(), share, half=0)[places]
    free = np.isin(places, built)
    could_be_first = np.arange(len(places)) < (int(np.argmax(free)) if free.any() else len(places))
    unknown = np.flatnonzero(~free & (chosen | could_be_first))
    if len(unknown):
        free[unknown] = ~control.find_rows(table.select(_READ_COLUMNS).take(pa.array(places[unknown])))
    if free.any():
        chosen[np.argmax(free)] = True
    return places[chosen & free]


def print_prompt(conversation: Conversation, steps: ConversationSteps) -> PromptEnding | None:
    """Render the prompt for a conversation's last answer, and mask the conversation up to it as in training.

    None if there is nothing to compare: no message is answered, or the text does not start with the prompt.
    """
    conversation = steps.inline_reasoning(steps.limit_reasoning(conversation))
    messages = conversation.messages
    last = max(steps.masker.supervised(messages), default=0)
    if not last:
        return None
    prompt = steps.renderer.render(messages[:last], conversation.tools, {**conversation.kwargs, **ASKS_FOR_ANSWER})
    answered = replace(conversation, messages=messages[: last + 1])
    # The row's mask was verified when its example was made; only its text and cuts matter here.
    masked = steps.masker.mask(answered, only=frozenset({last}))
    if isinstance(prompt, Rejected) or isinstance(masked, Rejected) or not masked.text.startswith(prompt.text):
        return None
    return cut_ending(prompt.text, masked.text, masked.trained)


def cut_ending(prompt: str, text: str, trained: Sequence[Span]) -> PromptEnding:
    """Return the last characters of a prompt, and the text around its end; both are whole where no border is near."""
    begin = find_border(prompt, max(0, len(prompt) - PROMPT_CHARS), len(prompt)) or 0
    end = find_border(text, len(prompt) + 1, len(prompt) + PROMPT_CHARS) or len(text)
    spans = [
        Span(max(span.start, begin) - begin, min(span.end, end) - begin, span.message)
        for span in trained
        if begin < span.end and span.start < end
    ]
    return PromptEnding(prompt[begin:], text[begin:end], tuple(spans))


PROBES: Sequence[Sequence[Message]] = (
    ({"role": "user", "content": "x"},),
    ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}),
)
"""Conversations to render tools with; some templates refuse one that ends with a user message."""


class ToolTokens(NamedTuple):
    """Rows with tools, the tokens that tools add to all of them, and to the row that has most."""

    rows: int
    tokens: int
    most: int


def measure_tools(tools: pa.ChunkedArray, renderer: Renderer, encoder: Encoder) -> ToolTokens:
    """Count the rows with tools in a column of JSON text, and the tokens that tools add: in total, and most in one row.

    If a template prints tools only in some contexts, they are measured on the first probe that it accepts; if it
    accepts none, the schemas' JSON text is counted.
    """
    counted = pc.value_counts(tools.drop_null())
    distinct: list[str] = counted.field("values").to_pylist()
    rows: list[int] = counted.field("counts").to_pylist()
    bare: dict[int, str] = {}
    texts: list[str] = []
    without: list[str] = []
    for text in distinct:
        parsed: Sequence[Json] = from_json(text)
        for i, probe in enumerate(PROBES):
            printed = renderer.render(probe, parsed, {})
            plain = bare[i] if i in bare else _render_text(renderer, probe)
            if not isinstance(printed, Rejected) and plain is not None:
                bare[i] = plain
                texts.append(printed.text)
                without.append(plain)
                break
        else:
            texts.append(text)
            without.append("")
    lengths = _count_text_tokens(encoder, texts)
    known = dict(zip(set(without), _count_text_tokens(encoder, list(set(without))), strict=True))
    added = [max(length - known[plain], 0) for length, plain in zip(lengths, without, strict=True)]
    total = sum(count * tokens for count, tokens in zip(rows, added, strict=True))
    return ToolTokens(sum(rows), total, max(added, default=0))


def _render_text(renderer: Renderer, probe: Sequence[Message]) -> str | None:
    printed = renderer.render(probe, None, {})
    return None if isinstance(printed, Rejected) else printed.text


def _count_text_tokens(encoder: Encoder, texts: Sequence[str]) -> list[int]:
    if not texts:
        return []
    offsets: list[int] = encoder.encode(texts).offsets.tolist()
    return [end - start for start, end in pairwise(offsets)]
