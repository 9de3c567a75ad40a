"""A conversation as rendering takes it: messages, tools, and the template's further arguments.

What belongs here: the value. What does not: how it is rendered or masked (`conversation/`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rowmill.core.json import Json
from rowmill.schema.rows import Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is given: canonical messages, tools, the row's own kwargs, and the row's hash."""

    messages: Sequence[Message]
    tools: Sequence[Json] | None = None
    kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])
    row_hash: bytes = b""
    """At least 8 bytes; decides whether the row is in the share that is rendered a second time."""
