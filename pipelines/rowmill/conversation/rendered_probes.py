"""Renders of probe conversations, in which the position of every own text is proven.

What belongs here: rendering a probe once, and the template text around its own text. What does not: the conversations
(`probe_shapes.py`), what is learned from their renders (`prefix_probes.py`, `frame_probes.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rowmill.conversation.owned_spans import group_by_message, is_tool_missing, locate_own_text
from rowmill.conversation.probe_shapes import make_probe_shapes
from rowmill.conversation.template_frames import find_common_end, get_call_ids
from rowmill.core.frozen_classes import frozen_dataclass
from rowmill.core.json import Json, to_json
from rowmill.schema.rows import ContentSpan, Message, Rejected

if TYPE_CHECKING:
    from rowmill.conversation.renderer import Renderer


@frozen_dataclass
class ContentRun:
    """Consecutive own text of one message."""

    message: int
    pieces: list[ContentSpan]
    start: int
    """End of the previous run; 0 for the first one."""
    stop: int
    """Start of the next run; the length of the render for the last one."""
    follower: int
    """The message of the next run; −1 for the last one."""


@frozen_dataclass
class RenderedShape:
    """One rendered probe conversation."""

    messages: Sequence[Message]
    tools: Sequence[Json] | None
    text: str
    every_run: list[ContentRun]
    runs: list[ContentRun]
    """The runs of the model's messages."""
    before: dict[int, str]
    """By message of another role: the template text before its own text."""
    ids: list[tuple[str, ...]]
    """By message: the ids of its calls, as rendered."""


def _split_content_runs(pieces: Sequence[ContentSpan], length: int) -> Iterator[ContentRun]:
    """Yield runs of consecutive pieces of the same message, with the bounds of the template text around each."""
    groups = group_by_message(pieces)
    ends = [0, *(max(p.end for p in group) for group in groups)]
    starts = [*(group[0].start for group in groups), length]
    for i, group in enumerate(groups):
        follower = groups[i + 1][0].message if i + 1 < len(groups) else -1
        yield ContentRun(group[0].message, group, ends[i], starts[i + 1], follower)


class RenderedProbes:
    """Renders the probes of one template with one set of template values, each once."""

    def __init__(self, renderer: "Renderer", roles: frozenset[str], kwargs: Mapping[str, Json]) -> None:
        self.roles = roles
        self.tokens = renderer.control_tokens
        self.eos, self.bos = renderer.eos_token, renderer.bos_token
        self._renderer = renderer
        self._kwargs = kwargs
        self._requires_all_messages = True
        """Whether to skip shapes of which the template drops a message; off if it drops every message of some role."""
        self._rendered_shapes: dict[tuple[bool, str], RenderedShape | None] = {}
        self._texts: dict[str, str | None] = {}

    def render_shapes(self) -> list[RenderedShape]:
        """Render all shapes that the template accepts."""
        role = "assistant" if "assistant" in self.roles else min(self.roles)
        seen = [one for shape in make_probe_shapes(role) if (one := self.render_shape(*shape)) is not None]
        if not any(one.runs for one in seen):
            self._requires_all_messages = False
            seen = [one for shape in make_probe_shapes(role) if (one := self.render_shape(*shape)) is not None]
        return seen

    def render_shape(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> RenderedShape | None:
        """Render a shape, once; None if the template refuses it or drops a message."""
        key = (self._requires_all_messages, to_json([list(messages), bool(tools)]))
        if key not in self._rendered_shapes:
            self._rendered_shapes[key] = self._render_and_locate(messages, tools)
        return self._rendered_shapes[key]

    def _render_and_locate(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> RenderedShape | None:
        rendered = self._renderer.render(messages, tools, self._kwargs)
        if isinstance(rendered, Rejected):
            return None
        located = locate_own_text(self._renderer, rendered, messages, self.roles)
        if located is None:
            return None
        wanted = (i for i, m in enumerate(messages) if self._requires_all_messages or m["role"] in self.roles)
        if any(i not in located.own for i in wanted):
            # Template text of a message without own text cannot be separated from its neighbors'.
            return None
        runs = list(_split_content_runs(located.pieces(), len(rendered.text)))
        before = {
            run.message: rendered.text[run.start : run.pieces[0].start]
            for run in runs
            if messages[run.message]["role"] not in self.roles
        }
        if tools and is_tool_missing(tools, rendered.text, []):
            tools = None
        model = [run for run in runs if messages[run.message]["role"] in self.roles]
        ids = [get_call_ids(message) for message in rendered.messages]
        return RenderedShape(messages, tools, rendered.text, runs, model, before, ids)

    def list_gaps_after(self, role: str) -> set[str]:
        """Return the template text between a message of that role and one of another role than the model's."""
        return {
            gap
            for one in self._rendered_shapes.values()
            if one is not None
            for index, gap in one.before.items()
            if index and one.messages[index - 1]["role"] == role
        }

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, *, with_prompt: bool = False
    ) -> str | None:
        """Render a conversation, optionally with the generation prompt; None if the template refuses it."""
        if not messages:
            return None
        key = to_json([list(messages), bool(tools), with_prompt])
        if key not in self._texts:
            kwargs = {**self._kwargs, "add_generation_prompt": True} if with_prompt else self._kwargs
            rendered = self._renderer.render(messages, tools, kwargs)
            self._texts[key] = None if isinstance(rendered, Rejected) else rendered.text
        return self._texts[key]

    def render_with_prompt(self, rendered_shape: RenderedShape, index: int) -> str | None:
        """Render the messages before one, with the generation prompt."""
        return self.render_text(rendered_shape.messages[:index], rendered_shape.tools, with_prompt=True)

    def get_prompt(self, rendered_shape: RenderedShape, index: int) -> str:
        """Return the generation prompt before a message; empty after the model's own, where templates print a part."""
        before = rendered_shape.messages[index - 1]["role"] if index else "user"
        return "" if before in self.roles else self.get_prompt_after(rendered_shape, before)

    def get_prompt_after(self, rendered_shape: RenderedShape, role: str) -> str:
        """Return the generation prompt after a message of a role."""
        return self._renderer.generation_prompt(role, has_tools=bool(rendered_shape.tools), kwargs=self._kwargs)

    def list_prompts(self, rendered_shape: RenderedShape, index: int) -> list[str]:
        """Return the generation prompts that the template may print before a message."""
        found = [
            self.get_prompt(rendered_shape, index),
            *(self.get_prompt_after(rendered_shape, role) for role in ("user", "tool")),
        ]
        return list(dict.fromkeys(prompt for prompt in found if prompt))


def find_common_headers(seen: Sequence[RenderedShape], tokens: tuple[str, ...]) -> dict[str, str]:
    """Return by role the longest common suffix of all template text before its own text."""
    gaps: dict[str, dict[str, bool]] = {}
    for one in seen:
        first = min(one.before, default=-1)
        for index, gap in one.before.items():
            held = gaps.setdefault(one.messages[index]["role"], {})
            held[gap] = held.get(gap, False) or index == first == 0
    # Text common to all of them may still be the end of the previous turn, unless one of them begins the render.
    known = {role: found for role, found in gaps.items() if len(found) > 1 or any(found.values())}
    return {role: find_common_end(list(found), tokens) for role, found in known.items()}
