r"""Prompts as a chat template prints them for generation: where their own text is, and nothing that trains.

What belongs here: rendering a conversation that waits for an answer, and locating its text. What does not:
conversations that have answers (`loss_mask.py`).

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
                      └┘ user        └ generation prompt ──┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rowmill.conversation.loss_mask import Masker, describe_text_difference, needs_plain_check
from rowmill.conversation.loss_options import MaskRules
from rowmill.conversation.owned_spans import is_tool_missing, locate_own_text
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.turn_layouts import TurnLayout, learn_layout
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json
from rowmill.schema.conversation import Conversation
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.rows import MaskedConversation, Rejected


@frozen_dataclass
class PromptRenderer:
    """Renders the prompts of one dataset; `masker` knows the template's frames."""

    renderer: Renderer
    masker: Masker
    rules: MaskRules

    def render(self, conversation: Conversation) -> MaskedConversation | Rejected:
        """Render a conversation with the generation prompt; of a share of the rows the render is checked."""
        asking = replace(conversation, kwargs={**conversation.kwargs, **_ASKS})
        printed = self.renderer.render(asking.messages, asking.tools, asking.kwargs)
        if isinstance(printed, Rejected):
            return printed
        if needs_plain_check(conversation.row_hash, self.rules.verify_render):
            plain = self.renderer.plain(asking.messages, asking.tools, asking.kwargs)
            if plain != printed.text:
                return Rejected("render_mismatch", describe_text_difference(printed.text, plain))
        located = locate_own_text(self.renderer, printed, conversation.messages, self.rules.assistant_roles)
        if located is None:
            return Rejected(
                "span_not_found", "the template looks at texts that are hidden from it to prove their place"
            )
        dropped = [kind for kind, _ in located.dropped]
        if conversation.tools and is_tool_missing(conversation.tools, printed.text, ()):
            dropped.append("tool_list")
        policy = {"reasoning": "count", **(self.rules.on_dropped or {})}
        refused = sorted({kind for kind in dropped if policy.get(kind, "reject") == "reject"})
        if refused:
            return Rejected("content_dropped", ", ".join(refused))
        counts = {kind: dropped.count(kind) for kind in dict.fromkeys(dropped)}
        return MaskedConversation(printed.text, (), tuple(located.pieces()), counts)

    def find_layout(self, roles: Sequence[str]) -> TurnLayout | None:
        """Return the layout of prompts with these roles; None if each of their rows must be rendered by itself.

        A row of that layout has the text and the spans that `render` would give it.
        """
        placeholders = self.renderer.render_placeholders(roles, _ASKS)
        if placeholders is None:
            return None
        contents = zip(roles, placeholders.contents, strict=True)
        messages = [{"role": role, "content": content} for role, content in contents]
        rendered = self.render(Conversation(messages))
        if isinstance(rendered, Rejected) or rendered.dropped:
            return None
        return learn_layout(roles, placeholders, rendered, SPAN_KINDS)


_ASKS: Mapping[str, Json] = {"add_generation_prompt": True}
"""The template argument that makes a conversation wait for an answer."""
