"""Recognizes plain messages and plain chats: known roles and text, with nothing to read, move or reject.

{"role": "user", "content": "Hi"}                   plain
{"from": "human", "value": "Hi"}                    plain under another name
{"role": "assistant", "content": "<think>…"}        not plain: its reasoning must be found
{"role": "user", "content": "Hi", "name": "Ann"}    not plain: a third key
"""

from collections.abc import Mapping

from rowmill.formats.detection import DetectedMessages
from rowmill.formats.reasoning import ThinkTagReader
from rowmill.schema.rows import Message

_KEYS = 2
"""Keys of a plain message: its role and its content."""


class PlainMessages:
    """Recognizes the plain messages of one dataset.

    `roles` are the template's roles by those of the source; `speakers` are the model's, whose messages must have text
    and no tag of reasoning.
    """

    def __init__(self, roles: Mapping[str, str], speakers: frozenset[str], tags: ThinkTagReader) -> None:
        """Store the arguments."""
        self._roles = roles
        self._speakers = speakers
        self._hints = tags.hints

    def take(self, found: DetectedMessages, start: int, out: list[Message], *, is_reasoning_open: bool = False) -> int:
        """Append the plain messages from `start` on, up to the first other one; return that one's place.

        While reasoning waits for the model's next message, that message is not plain.
        """
        roles, speakers, hints = self._roles, self._speakers, self._hints
        _, messages, role_key, content_key, *_ = found
        renames = role_key != "role" or content_key != "content"
        for place in range(start, len(messages)):
            message = messages[place]
            if type(message) is not dict or len(message) != _KEYS:
                return place
            source, content = message.get(role_key), message.get(content_key)
            role = roles.get(source) if type(source) is str else None
            if role is None or type(content) is not str:
                return place
            if role in speakers:
                if is_reasoning_open or not content or content.isspace():
                    return place
                # As `ThinkTagReader.may_contain_tag` says, without a call.
                for hint in hints:
                    if hint in content:
                        return place
            out.append({"role": role, "content": content} if renames or role != source else message)
        return len(messages)
