"""The steps from one conversation to its tokens: reasoning, rendering, masking and encoding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.core.arrays import Tokens
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json, from_json_column, to_json
from rowmill.formats.reasoning import REASONING_KEY, inline_reasoning, limit_reasoning
from rowmill.recipe.dataset import Dataset
from rowmill.schema.conversation import Conversation
from rowmill.schema.rows import MaskedConversation, Message, Rejected
from rowmill.stages.tokenized_examples.judged_rows import RowJudge, is_judged
from rowmill.stages.tokenized_examples.shared_templates import open_renderer
from rowmill.tokenization.control_tokens import ControlStrings, restore_control_strings
from rowmill.tokenization.encoded_batch import Example
from rowmill.tokenization.encoder import Encoder
from rowmill.tokenization.example_encoding import TokenizationCounts, encode_and_compare, make_examples
from rowmill.tokenization.token_truncation import prepend_bos


def decode_conversations(table: pa.Table) -> list[Conversation]:
    """Decode the conversations of a table of canonical rows."""
    messages, tools, kwargs = (
        from_json_column(table.column(name)) for name in ("messages", "tools", "template_kwargs")
    )
    hashes = table.column("content_hash").to_pylist()
    tagged = pc.greater(table.column("extracted_think_from_content"), 0).to_pylist()
    return [
        Conversation(m, t, {} if k is None else k, h, had_think_tags=tags)
        for m, t, k, h, tags in zip(messages, tools, kwargs, hashes, tagged, strict=True)
    ]


def hide_control_strings(one: Conversation, control: ControlStrings) -> "tuple[Conversation, dict[str, str]]":
    """Return the conversation with placeholders for control strings, and the string of each placeholder."""
    value = [one.messages, one.tools, one.kwargs]
    hidden, placeholders = control.hide(value, to_json(value))
    messages, tools, kwargs = cast("list[Any]", hidden)
    return replace(one, messages=messages, tools=tools, kwargs=kwargs), placeholders


def show_control_strings(
    masked: MaskedConversation, placeholders: dict[str, str]
) -> "tuple[MaskedConversation, list[tuple[int, int]]]":
    """Restore control strings in a masked text; return it and their positions."""
    if not placeholders:
        return masked, []
    text, ranges = restore_control_strings(masked.text, placeholders)
    return replace(masked, text=text), ranges


@dataclass(frozen=True, slots=True)
class ConversationEncoder:
    """Renders, masks and encodes the conversations of one dataset."""

    encoder: Encoder
    dataset: Dataset
    printer: Renderer
    masker: Masker
    judge: RowJudge
    control: ControlStrings
    prints_no_reasoning: bool
    """Whether the template has no place for reasoning, not even that of the last answer."""
    bos: int | None
    """The BOS to put before chats, only if the recipe sets it; otherwise the template decides."""

    @classmethod
    def open(cls, encoder: Encoder, dataset: Dataset, spec: RendererSpec) -> "ConversationEncoder":
        """Open the renderer and the masker."""
        printer = open_renderer(spec)
        rules = make_mask_rules(dataset)
        masker, judge = Masker(printer, dataset.loss, rules), RowJudge(printer, rules, dataset.template.verify_render)
        control = ControlStrings(encoder.card, spec.text)
        prints_none = printer.contract.reasoning == "none"
        return cls(encoder, dataset, printer, masker, judge, control, prints_none, _resolve_chat_bos(encoder, dataset))

    @property
    def cuts_apart(self) -> bool:
        """Whether spans are encoded apart; only the mask shows where."""
        return self.dataset.loss.boundary == "split"

    def hide_control(
        self, conversation: Conversation, counts: TokenizationCounts
    ) -> tuple[Conversation, dict[str, str]] | Rejected:
        """Treat the control strings of a conversation that has some as the recipe says, and count them.

        Returns the conversation with placeholders for them, and the string of each placeholder.
        """
        policy, hidden = self.dataset.template.control_tokens, (conversation, dict[str, str]())
        if policy == "reject":
            return Rejected("control_token_in_content", "the row's text holds a control string")
        if policy != "allow":
            try:
                hidden = hide_control_strings(conversation, self.control)
            except ConfigError as error:
                # The control token has one character and the row uses every letter and digit: no placeholder is free.
                return Rejected("control_token_in_content", str(error))
        counts.add_control_strings(self.control, conversation)
        return hidden

    def limit_reasoning(self, conversation: Conversation) -> Conversation:
        """Cut each message's reasoning at `think_max_tokens`."""
        limit = self.dataset.reasoning.think_max_tokens
        if not limit:
            return conversation
        return replace(conversation, messages=limit_reasoning(conversation.messages, limit, self.cut_text))

    def inline_reasoning(self, conversation: Conversation) -> Conversation:
        """Return the template's input: with `think_mode: inline`, reasoning is at the start of the content.

        With `auto`, reasoning goes back into the tags that it came in where the template would print none of it.
        """
        options = self.dataset.reasoning
        goes_back = options.think_mode == "auto" and conversation.had_think_tags and self.prints_no_reasoning
        if options.think_mode != "inline" and not goes_back:
            return conversation
        return replace(conversation, messages=inline_reasoning(conversation.messages, options.think_tags[0]))

    def loses_reasoning(self, conversation: Conversation, masked: MaskedConversation) -> bool:
        """Return whether an answer trains without its reasoning, because the template prints none."""
        return self.prints_no_reasoning and any(
            conversation.messages[span.message].get(REASONING_KEY) for span in masked.trained
        )

    def mask(self, conversation: Conversation, *, only: frozenset[int] | None = None) -> MaskedConversation | Rejected:
        """Render and mask a conversation; `only` these messages train, None: all that the options choose."""
        return self.masker.mask(self.inline_reasoning(conversation), only=only)

    def judge_row(self, conversation: Conversation) -> Rejected | None:
        """Return the reject of a row of the judged share whose text or mask is wrong."""
        if not is_judged(conversation.row_hash, self.judge.share):
            return None
        return self.judge.reject(self.inline_reasoning(conversation))

    def encode_masked(
        self,
        masked: Sequence[MaskedConversation],
        ordinary: Sequence[list[tuple[int, int]]],
        counts: TokenizationCounts,
    ) -> list[Example | Rejected]:
        """Encode masked texts; `ordinary` are the character ranges in which control strings are text."""
        made = make_examples(masked, ordinary, self.encoder, counts, split=self.cuts_apart)
        bos = self.bos
        return made if bos is None else [one if isinstance(one, Rejected) else prepend_bos(one, bos) for one in made]

    def encode_prompts(self, prompts: Sequence[str], counts: TokenizationCounts) -> list[Tokens]:
        """Encode generation prompts as a server does: alone."""
        encoded, bos = encode_and_compare(self.encoder, prompts, counts), self.bos
        each = np.split(encoded.ids, encoded.offsets[1:-1]) if prompts else []
        if bos is None:
            return each
        first = np.array([bos], encoded.ids.dtype)
        return [ids if len(ids) and int(ids[0]) == bos else np.concatenate((first, ids)) for ids in each]

    def count_rendered_tokens(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        placeholders: dict[str, str],
    ) -> int | None:
        """Count the tokens of a conversation with other messages and tools; None if it does not render."""
        shown = self.inline_reasoning(replace(conversation, messages=messages, tools=tools))
        if self.cuts_apart:
            masked = self.masker.mask(shown)
            if isinstance(masked, MaskedConversation):
                masked, ordinary = show_control_strings(masked, placeholders)
                example = self.encode_masked([masked], [ordinary], TokenizationCounts())[0]
                return None if isinstance(example, Rejected) else len(example.ids)
        printed = self.printer.render(shown.messages, tools, conversation.kwargs)
        if isinstance(printed, Rejected):
            return None
        text, ranges = restore_control_strings(printed.text, placeholders)
        encoded = self.encoder.encode_pieces([text], [ranges])
        has_bos = self.bos is None or (len(encoded.ids) > 0 and int(encoded.ids[0]) == self.bos)
        return len(encoded.ids) + (not has_bos)

    def cut_text(self, text: str, max_tokens: int) -> str:
        """Return the start of a text that has at most so many tokens."""
        encoded = self.encoder.encode([text])
        if len(encoded.ids) <= max_tokens:
            return text
        if max_tokens <= 0:
            return ""
        return text.encode()[: int(encoded.ends[max_tokens - 1])].decode(errors="ignore")


def make_mask_rules(dataset: Dataset) -> MaskRules:
    """Return the rules of a dataset's masks that are not options of its loss."""
    template = dataset.template
    return MaskRules(
        assistant_roles=dataset.format.get_token_options().assistant_roles,
        spans=template.spans,
        on_dropped={str(kind): policy for kind, policy in template.on_dropped.items()},
        turns=template.turns,
    )


def _resolve_chat_bos(encoder: Encoder, dataset: Dataset) -> int | None:
    if dataset.format.get_token_options().add_bos is not True:
        return None
    if encoder.card.bos_id is None:
        raise ConfigError("format.add_bos: true, but the tokenizer has no BOS; expected auto or false; set auto")
    return encoder.card.bos_id
