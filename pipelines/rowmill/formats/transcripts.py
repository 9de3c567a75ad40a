r"""Parts a conversation that is one text into its messages.

    "\n\nHuman: Hi\n\nAssistant: Hello"                                  HH
    "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>\n\n\nFUNCTION RESPONSE: {…}"    Glaive
    "### Human: Hi### Assistant: Hello"                                  Guanaco

A text is a transcript if it begins with the name of a speaker and a model's turn follows. Its first name says how all
of them are written: in capitals or not, behind `###` or at the beginning of a line, and whether a blank line comes
before. A name that is written otherwise is text of the turn in which it stands.
"""

import re
from functools import cache

from rowmill.core.json import Json, from_json_without_repeats
from rowmill.formats.record_values import is_mapping

SPEAKERS = {
    "system": "system",
    "user": "user",
    "human": "user",
    "instruction": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "response": "assistant",
    "tool": "tool",
    "function response": "tool",
    "observation": "tool",
}
"""Roles by the names of speakers, in small letters."""

_FIRST = re.compile(
    rf"\s*(?P<sign>#{{2,4}} ?)?(?P<name>{'|'.join(sorted(SPEAKERS, key=len, reverse=True))}):", re.IGNORECASE
)
_ENDINGS = ("<|endoftext|>", "<|im_end|>", "</s>", "<|end|>")
"""Texts of control tokens at the end of a turn, which the chat template writes itself."""

_CALL = re.compile(
    r"""<functioncall>\s*\{\s*"name":\s*"(?P<name>[^"]+)"\s*(?:,\s*"arguments":\s*(?:'(?P<quoted>.*)'|(?P<plain>\{.*\}))\s*)?\}""",
    re.DOTALL,
)


def split_transcript(text: str) -> list[Json] | None:
    """Return the messages of a transcript, or None if the text is not one."""
    first = _FIRST.match(text)
    if first is None:
        return None
    name = first["name"]
    if name.islower():
        return None
    written = "upper" if name.isupper() else "title"
    # Names behind a sign need no line of their own; where the second is behind a blank line, all are.
    if first["sign"]:
        between = rf"\s*{re.escape(first['sign'].strip())} ?"
    else:
        loose = _compile_names(written, r"\n[ \t]*").search(text, first.end())
        is_apart = loose is not None and text[: loose.start() + 1].endswith("\n\n")
        between = r"\n[ \t]*\n[ \t]*" if is_apart else r"\n[ \t]*"
    pieces = _compile_names(written, between).split(text[first.end() :])
    speakers = [name, *pieces[1::2]]
    messages: list[Json] = [
        _make_message(SPEAKERS[speaker.lower()], said) for speaker, said in zip(speakers, pieces[::2], strict=True)
    ]
    has_answer = any(message["role"] == "assistant" for message in messages)
    return messages if has_answer and len(messages) > 1 else None


def split_open_transcript(text: str) -> list[Json] | None:
    """Return the messages of a transcript that ends with the model's name, as prompts do; None for any other text."""
    messages = split_transcript(text)
    if messages is None or messages[-1] != {"role": "assistant", "content": ""}:
        return None
    return messages[:-1]


def strip_speaker(text: str, role: str) -> str:
    """Remove the name of a speaker from the beginning of a text of one turn, as `SYSTEM:`."""
    first = _FIRST.match(text)
    return text[first.end() :].strip() if first is not None and SPEAKERS[first["name"].lower()] == role else text


@cache
def _compile_names(written: str, between: str) -> re.Pattern[str]:
    names = [name.upper() if written == "upper" else name.capitalize() for name in SPEAKERS]
    if written == "title":
        names += [name.title() for name in SPEAKERS if " " in name]
    return re.compile(rf"{between}({'|'.join(sorted(names, key=len, reverse=True))}):")


def _make_message(role: str, said: str) -> dict[str, Json]:
    text = said.strip()
    for ending in _ENDINGS:
        text = text.removesuffix(ending).rstrip()
    call = _CALL.fullmatch(text) if role == "assistant" and text.startswith("<functioncall>") else None
    if call is None:
        return {"role": role, "content": text}
    given = call["quoted"] or call["plain"]
    try:
        arguments = from_json_without_repeats(given) if given else {}
    except ValueError:
        return {"role": role, "content": text}
    if not is_mapping(arguments):
        return {"role": role, "content": text}
    return {"role": role, "content": "", "tool_calls": [{"name": call["name"], "arguments": arguments}]}
