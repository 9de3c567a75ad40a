"""The input of rendering: messages, tools, and further arguments of the template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rowmill.core.json import Json
from rowmill.schema.rows import Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a template: canonical messages, tools, the row's kwargs, and the row's hash."""

    messages: Sequence[Message]
    tools: Sequence[Json] | None = None
    kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])
    row_hash: bytes = b""
    """At least 8 bytes; decides whether the row is in the sample that is rendered twice for verification."""
    had_think_tags: bool = False
    """Whether reasoning of the row stood in tags inside an answer."""
