"""Generation prompts of plain chats: printed by a proven layout where a sequence of roles is frequent."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rowmill.conversation.renderer import Renderer
from rowmill.conversation.turn_layouts import MAX_CACHED_LAYOUTS, TurnLayout
from rowmill.core.json import Json
from rowmill.schema.rows import Message, Rejected

ASKS_FOR_ANSWER: Mapping[str, Json] = {"add_generation_prompt": True}
"""The template argument that makes a conversation wait for an answer."""

RENDERED_FIRST = 4
"""Prompts of a sequence of roles that are rendered; learning its layout costs about as much."""


class PlainPromptPrinter:
    """Prints the prompts of chats whose messages have only a role and a content, without tools or template values.

    `find_layout` learns the layout of prompts with given roles (`PromptRenderer.find_layout`).
    """

    def __init__(self, renderer: Renderer, find_layout: Callable[[Sequence[str]], TurnLayout | None]) -> None:
        """Store the arguments; no layout is learned yet."""
        self._renderer = renderer
        self._find_layout = find_layout
        self._rendered = Counter[tuple[str, ...]]()
        self._layouts: dict[tuple[str, ...], TurnLayout] = {}

    def print_prompt(self, messages: Sequence[Message]) -> str | Rejected:
        """Return the text of `Renderer.plain` with the generation prompt."""
        roles, contents = zip(*[(message["role"], message["content"]) for message in messages], strict=True)
        layout = self._layouts.get(roles)
        if layout is not None and layout.prints(contents):
            return layout.text(contents)
        prompt = self._renderer.plain(messages, None, ASKS_FOR_ANSWER)
        if self._rendered[roles] == RENDERED_FIRST:
            layout = self._find_layout(roles)
            # The layout is proven; that it also prints this row's prompt costs no further render.
            if layout is not None and (not layout.prints(contents) or layout.text(contents) == prompt):
                self._layouts[roles] = layout
        if roles in self._rendered or len(self._rendered) < MAX_CACHED_LAYOUTS:
            self._rendered[roles] += 1
        return prompt
