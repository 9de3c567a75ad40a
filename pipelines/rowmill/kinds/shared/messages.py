r"""Messages in the forms that datasets have, and their tools and calls in one shape, whatever library wrote them.

    transcripts  "\n\nHuman: Hi\n\nAssistant: Hello"                                       HH
                 "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>\n\n\nFUNCTION RESPONSE: {…}"   Glaive
                 "### Human: Hi### Assistant: Hello"                                       Guanaco
    tools        [{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}]
    calls        [{"id": "call_0", "type": "function", "function": {"name": …, "arguments": {…}}}]

A text is a transcript if it begins with the name of a speaker and a model's turn follows. Its first name says how all
of them are written: in capitals or not, behind `###` or at the beginning of a line, and whether a blank line comes
before. A name that is written otherwise is text of the turn in which it stands.

`arguments` are an object in the source's key order. If they came as text, the message also keeps that text in
`arguments_source` (one per call, null if there was none), so that a template which prints strings gets the source's
text, including its spaces.

A placeholder such as `<image>` rejects a record that has the media in a column; without one it is ordinary text.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from typing import Any, Literal, TypeGuard

from pydantic import Field

from rowmill.conversation.options import MAX_WEIGHT, MIN_WEIGHT, Loss
from rowmill.core.config import Config, describe_type
from rowmill.core.json import Json, RepeatedKeyError, from_json, from_json_without_repeats, to_json
from rowmill.core.python_literals import begins_like_literal, from_python
from rowmill.kinds.shared.reasoning import REASONING_PARTS, read_thoughts
from rowmill.kinds.shared.training_flags import FlagMeaning, is_weight_name
from rowmill.schema.rows import CANONICAL_FLAGS, Message, Rejected


class RejectError(Exception):
    """Ends the reading of a record, whose outcome is `rejected`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        """Take the parts of the reject."""
        self.rejected = Rejected(reason, detail)


def is_mapping(value: Json) -> TypeGuard[dict[str, Any]]:
    """Return whether a decoded JSON value is a mapping."""
    return type(value) is dict


def is_list(value: Json) -> TypeGuard[list[Any]]:
    """Return whether a decoded JSON value is a list."""
    return type(value) is list


def rename_aliases(values: Json, aliases: Mapping[str, str]) -> Json:
    """Rename aliased keys of a mapping; an alias together with its key is an error."""
    if not is_mapping(values) or aliases.keys().isdisjoint(values):
        return values
    out = dict(values)
    for alias, name in aliases.items():
        if alias not in out:
            continue
        if name in out:
            raise ValueError(
                f"{alias} is another name of {name}, and both are set; only one is allowed; delete {alias}"
            )
        out[name] = out.pop(alias)
    return out


def get_at_path(record: Mapping[str, Json], path: str) -> Json:
    """Look up `a.b` in a record: as one key if it exists, else step by step; None if a step is missing.

    A step that is a number is the place of an item in a list: `answers.text.0`.
    """
    value = record.get(path)
    if value is not None or "." not in path:
        return value
    here: Json = record
    for step in path.split("."):
        if is_list(here) and step.isdecimal():
            here = here[int(step)] if int(step) < len(here) else None
        elif is_mapping(here):
            here = here.get(step)
        else:
            return None
    return here


FUNCTION_CALL = "function_call"
"""The one role that is not mapped but read: its content is a call by the assistant."""

MAPPED_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "model", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("tool_call", "tool_calls"), FUNCTION_CALL),
    **dict.fromkeys(("observation", "function", "ipython", "function_response", "function_result"), "tool"),
    **dict.fromkeys(("tool_response", "tool_result", "tool_output"), "tool"),
}
"""Roles by their names in datasets, in small letters and with underscores."""

KNOWN_ROLES = ("system", "user", "assistant", "tool")


def fold_role(source: str) -> str:
    """Return a role's name as the known ones are written: `Function-Call` is `function_call`."""
    return source.strip().lower().replace("-", "_").replace(" ", "_")


_ROLE_NAMES = frozenset({*MAPPED_ROLES, *KNOWN_ROLES, FUNCTION_CALL, "developer"})

LIST_COLUMNS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat", "contents")
"""Columns that hold a conversation, in the order in which they are tried."""


def read_value(text: str) -> Json:
    """Decode JSON text, or a Python literal, which `str` makes of lists and mappings; raises ValueError otherwise."""
    try:
        return from_json(text)
    except ValueError:
        if not begins_like_literal(text):
            raise
        return from_python(text)


def read_value_without_repeats(text: str) -> Json:
    """Decode as `read_value` does, but refuse a key that is repeated: one of its values would be lost."""
    try:
        return from_json_without_repeats(text)
    except RepeatedKeyError:
        raise
    except ValueError:
        if not begins_like_literal(text):
            raise
        return from_python(text)


def parse_messages(value: Json, roles: Collection[str] = ()) -> Json:
    """Return the list of messages that a value is a form of; any other value as it is.

    "[{'role': 'user', 'content': 'Hi'}, …]"               JSON text, or Python's
    ['{"role": "user", "content": "Hi"}', …]               a list of texts
    [["user", "Hi"], …]                                    pairs of role and text; `roles` are names beside the known
    [{"user": "Hi"}, …]                                    mappings with the role as their one key
    """
    if type(value) is str:
        # A text that is the JSON of something else is text, as answers in JSON are.
        parsed = _try_parse(value)
        return parsed if _are_messages(parsed) else value
    if not is_list(value) or not value:
        return value
    if all(map(is_mapping, value)):
        named = [next(iter(one)) if len(one) == 1 else None for one in value]
        return [_name_role(*next(iter(one.items()))) for one in value] if _are_roles(named, roles) else value
    if all(is_list(one) and len(one) == len(_ROLE_AND_CONTENT) for one in value):
        return [_name_role(*one) for one in value] if _are_roles([one[0] for one in value], roles) else value
    if all(type(one) is str for one in value):
        parsed = [_try_parse(one) for one in value] if begins_like_literal(value[0]) else []
        return parsed if _are_messages(parsed) else value
    return value


PRINTED_MESSAGES = re.compile(r"""\s*(?:array\()?[\[{].{0,200}?['"](role|from)['"]\s*:""", re.DOTALL)
"""The beginning of messages as JSON, Python or NumPy write them."""


def parse_conversation(value: Json, roles: Collection[str]) -> Json:
    """Return the messages of a column of conversations, which may be an object, or the text of any form.

    {"role": ["user", …], "content": ["Hi", …]}            one list per key, as `datasets` stores a sequence
    {"messages": [{"role": "user", "content": "Hi"}, …]}   inside an object
    [[{"role": "user", "content": "Hi"}, …]]               inside a list
    """
    if type(value) is str and (parsed := _try_parse(value)) is not None:
        value = parsed
    if is_list(value) and len(value) == 1 and is_list(value[0]) and all(map(is_mapping, value[0])):
        [value] = value
    if not is_mapping(value):
        return parse_messages(value, roles)
    inside = [name for name in LIST_COLUMNS if is_list(value.get(name))]
    if len(inside) == 1:
        # What else the object holds may belong to the prompt.
        return value if list_prompt_columns(value, ()) else parse_messages(value[inside[0]], roles)
    lengths = {len(one) if is_list(one) else -1 for one in value.values()}
    if not any(set(keys) <= value.keys() for keys in _MESSAGE_FORMS) or len(lengths) != 1 or min(lengths) < 0:
        return value
    return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]


_MESSAGE_FORMS = (("role", "content"), ("from", "value"))
_ROLE_AND_CONTENT = _MESSAGE_FORMS[0]


def _try_parse(text: str) -> Json:
    try:
        return read_value(text) if begins_like_literal(text) else None
    except ValueError:
        return None


def _are_messages(value: Json) -> bool:
    first = value[0] if is_list(value) and value else None
    return is_mapping(first) and any(set(keys) <= first.keys() for keys in _MESSAGE_FORMS)


def _are_roles(names: Sequence[Json], more: Collection[str]) -> bool:
    return all(is_role(name, more) for name in names)


def is_role(name: Json, more: Collection[str] = ()) -> bool:
    """Return whether a value is the name of a role, or one of `more`."""
    return type(name) is str and (name in more or fold_role(name) in _ROLE_NAMES)


def _name_role(role: str, content: Json) -> Json:
    return dict(zip(_ROLE_AND_CONTENT, (role, content), strict=True))


# ── Placeholders of media ──────────────────────────────────────────────────────────────────────────


PLACEHOLDERS = {f"{name}{ending}": f"<{name}>" for name in ("image", "video", "audio") for ending in ("s", "")}
"""Placeholder in text, by media column."""
MEDIA_COLUMNS = frozenset(PLACEHOLDERS)


def has_media(value: Json) -> bool:
    """Return whether a column holds media; a list of nulls, blank texts and empty mappings does not."""
    if is_list(value):
        return any(has_media(one) for one in value)
    return bool(value.strip() if isinstance(value, str) else value)


# ── Transcripts ────────────────────────────────────────────────────────────────────────────────────


SPEAKERS = {
    "system": "system",
    **dict.fromkeys(("user", "human", "instruction"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "response"), "assistant"),
    **dict.fromkeys(("tool", "function response", "observation"), "tool"),
}
"""Roles by the names of speakers, in small letters."""

_FIRST = re.compile(
    rf"\s*(?P<sign>#{{2,4}} ?)?(?P<name>{'|'.join(sorted(SPEAKERS, key=len, reverse=True))}):", re.IGNORECASE
)
_ENDINGS = ("<|endoftext|>", "<|im_end|>", "</s>", "<|end|>")
"""Texts of control tokens at the end of a turn, which the chat template writes itself."""

_CALL = re.compile(
    r"""(?P<before><(?P<tag>\w+)>.*</(?P=tag)>\s*)?<functioncall>\s*\{\s*"name":\s*"(?P<name>[^"]+)"\s*(?:,\s*"arguments":\s*(?:'(?P<quoted>.*)'|(?P<plain>\{.*\}))\s*)?\}""",
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
    may_call = role == "assistant" and text.startswith("<") and "<functioncall>" in text
    call = _CALL.fullmatch(text) if may_call else None
    if call is None:
        return {"role": role, "content": text}
    given = call["quoted"] or call["plain"]
    try:
        arguments = from_json_without_repeats(given) if given else {}
    except ValueError:
        return {"role": role, "content": text}
    if not is_mapping(arguments):
        return {"role": role, "content": text}
    # Tagged text before a call is reasoning, which the reader of the message finds.
    content = (call["before"] or "").strip()
    return {"role": role, "content": content, "tool_calls": [{"name": call["name"], "arguments": arguments}]}


# ── One message ────────────────────────────────────────────────────────────────────────────────────


TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
CALL_PARTS = frozenset({"tool_call", "tool_use"})
REFUSAL_KEY = "refusal"
"""OpenAI's key of a message, and type of a part, that is the answer in the place of `content`."""
MEDIA_PARTS = tuple("image audio video file document input_image input_audio input_video input_file".split())
FORBIDDEN_KWARGS = frozenset({"messages", "tools", "tokenize", "chat_template"})


def read_parts(content: Json, *, speaks: bool) -> tuple[str, list[str], list[Json]]:
    """Return the text, reasoning and calls of typed parts; the latter two are allowed only if the model `speaks`.

    Reasoning that is redacted is a blank piece.
    """
    if not is_list(content):
        raise RejectError("content_not_text", f"content is {describe_type(content)}, expected text or a list of parts")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Json] = []
    for part in content:
        if not is_mapping(part):
            raise RejectError("unknown_content_part", f"a part is {describe_type(part)}, expected a mapping")
        kind = part.get("type")
        if kind is not None and type(kind) is not str:
            raise RejectError("unknown_content_part", f"a part's type is {describe_type(kind)}")
        if speaks and (kind in REASONING_PARTS or part.get("thought") is True):
            thoughts = read_thoughts(part)
            if thoughts is None:
                raise RejectError("unknown_content_part", f"a {kind} part without text")
            reasoning += thoughts or [""]
        elif kind is None or kind in TEXT_PARTS:
            text = _get_part_text(part, ("text", "value"))
            if text is None:
                raise RejectError("unknown_content_part", "a text part without text")
            texts.append(text)
        elif speaks and kind == REFUSAL_KEY:
            text = _get_part_text(part, (REFUSAL_KEY, "text"))
            if text is None:
                raise RejectError("unknown_content_part", "a refusal without text")
            texts.append(text)
        elif speaks and kind in CALL_PARTS:
            calls.append(part["value"] if part.get("value") is not None else part)
        elif kind.startswith(MEDIA_PARTS):
            raise RejectError("multimodal_content", f"a part is {kind}")
        else:
            raise RejectError("unknown_content_part", f"a part is {kind}")
    return "".join(texts), reasoning, calls


def split_tool_results(message: Mapping[str, Json], content_key: str) -> list[Message]:
    """Return a message whose parts hold results of tools as one message for each; none if it holds no results.

    Anthropic's results are parts of the user's next message, which may hold nothing else.
    """
    content = message.get(content_key)
    if not is_list(content) or not any(is_mapping(part) and part.get("type") == "tool_result" for part in content):
        return []
    results: list[Message] = []
    others: list[Json] = []
    for part in content:
        if not is_mapping(part) or part.get("type") != "tool_result":
            others.append(part)
            continue
        given = part.get("content")
        key = {} if part.get("tool_use_id") is None else {"tool_call_id": part["tool_use_id"]}
        role_key = "from" if "from" in message and "role" not in message else "role"
        results.append({role_key: "tool", content_key: "" if given is None else given, **key})
    return [*results, *([{**message, content_key: others}] if others else [])]


def _get_part_text(part: Mapping[str, Json], keys: Iterable[str]) -> str | None:
    for key in keys:
        text = part.get(key)
        if type(text) is str:
            return text
    return None


def read_flags(
    message: Mapping[str, Json], flags: Mapping[str, FlagMeaning], loss: Loss, *, speaks: bool = True
) -> dict[str, Json]:
    """Turn a message's flags into `train` and, if a number was given, `weight`.

    A boolean decides whether the message is trained, a number its weight. With `loss.weights`, numbers other than 0 and
    1 are allowed, and with `loss.allow_negative` negative ones. A weight makes no message train that is not the model's
    (`speaks`): OpenAI's format writes weights on prompts too. It counts if `loss.mask` trains that role.
    """
    train: bool | None = None
    weight: float | None = None
    decides = False
    for name, meaning in flags.items():
        value = message.get(name)
        if value is None or meaning == "ignore":
            continue
        if type(value) is bool:
            trains = value is (meaning == "train")
        elif type(value) not in (int, float):
            raise RejectError("bad_weight", f"{name} is {describe_type(value)}, expected a boolean or a number")
        elif meaning == "mask":
            if value not in (0, 1):
                raise RejectError("bad_weight", f"{name} is {value}, expected true or false of a flag that masks")
            trains = value == 0
        else:
            size = abs(value) if loss.allow_negative else value
            if not (value in (0, 1) or (loss.weights and MIN_WEIGHT <= size <= MAX_WEIGHT)):
                raise RejectError("bad_weight", f"{name} is {value}")
            if weight not in (None, float(value)):
                raise RejectError("flag_conflict", f"{name} is {value}, but another flag is {weight}")
            weight, trains = float(value), value != 0
        if train not in (None, trains):
            raise RejectError("flag_conflict", f"{name} is {value}, but another flag contradicts it")
        train = trains
        decides = decides or speaks or type(value) is bool or not is_weight_name(name)
    if train is None:
        return {}
    if not decides:
        return {"weight": weight}
    return {"train": train} if weight is None else {"train": train, "weight": weight}


def remove_flags(message: Message) -> Message:
    """Return a canonical message without the flags of its training: in a prompt they mean nothing."""
    if CANONICAL_FLAGS.isdisjoint(message):
        return message
    return {key: value for key, value in message.items() if key not in CANONICAL_FLAGS}


def _parse_text(text: str, reason: str, what: str = "", parse: Callable[[str], Json] = read_value) -> Json:
    try:
        return parse(text)
    except ValueError as error:
        raise RejectError(reason, f"{what}not JSON: {error}") from error


def read_kwargs(value: Json) -> tuple[dict[str, Json], bool]:
    """Return a row's template variables, and whether an `add_generation_prompt` among them was ignored."""
    if type(value) is str:
        if not value or value.isspace():
            return {}, False
        value = _parse_text(value, "bad_template_kwargs")
    if value is None:
        return {}, False
    if not is_mapping(value):
        raise RejectError("bad_template_kwargs", f"{describe_type(value)}, expected a mapping")
    for name in value:
        if name in FORBIDDEN_KWARGS or name.startswith("return_"):
            raise RejectError("bad_template_kwargs", f"a row cannot set {name}")
    if "add_generation_prompt" not in value:
        return value, False
    return {name: one for name, one in value.items() if name != "add_generation_prompt"}, True


# ── Columns beside the messages ──────────────────────────────────────────────────────────────────────


SYSTEM_COLUMNS = ("system", "system_prompt", "system_message", "systemInstruction", "system_instruction")
"""Columns that hold a conversation's system message, the most likely first."""

IDENTIFIER_CHARS = 40
"""A text of one word up to this length is a name, a link or a hash, not text that could be trained."""


def iterate_texts(value: Json) -> Iterator[str]:
    """Yield the texts inside a value, without names and links."""
    if type(value) is str:
        is_name = len(value) <= IDENTIFIER_CHARS and " " not in value.strip()
        if not is_name and not value.startswith(("http://", "https://")):
            yield value
    elif type(value) is dict or type(value) is list:
        for inner in value.values() if type(value) is dict else value:
            yield from iterate_texts(inner)


CONTEXT_COLUMNS = ("input", "context")
"""Columns that hold text which belongs to the prompt and stands after it, the most likely first."""

MORE_CONTEXT_COLUMNS = (
    *("schema", "db_schema", "document", "documents", "passage", "passages", "paragraph", "paragraphs", "article"),
    *("contexts", "evidence", "background", "story"),
)
"""Columns that hold such text in some datasets, and a name or a number in others: where they hold text, a recipe must
say whether it belongs to the prompt."""

_SURE_PROMPT_COLUMNS = frozenset({*SYSTEM_COLUMNS, *CONTEXT_COLUMNS, "history", "instruction", "choices", "options"})

PROMPT_COLUMNS = frozenset({*_SURE_PROMPT_COLUMNS, *MORE_CONTEXT_COLUMNS})
"""Columns whose name says that they belong to a prompt."""


ASKING_COLUMNS = ("prompt", "question", "instruction", "query", "problem", "input", "inputs")
"""Columns that ask, the most likely first."""


def list_prompt_columns(record: Mapping[str, Json], read: Sequence[str]) -> list[str]:
    """Return the columns whose name says that they belong to a prompt, that hold something, and that are not read."""
    return [
        name
        for name in sorted(PROMPT_COLUMNS)
        if name not in read
        and (value := record.get(name))
        and not (type(value) is str and value.isspace())
        and (name in _SURE_PROMPT_COLUMNS or any(iterate_texts(value)))
    ]


def find_first_column(record: Mapping[str, Json], names: Iterable[str]) -> tuple[str, Json]:
    """Return the name and the value of the first column that is not null; if there is none, an empty name and None."""
    return next(((name, value) for name in names if (value := record.get(name)) is not None), ("", None))


def find_system(
    record: Mapping[str, Json],
    read: Sequence[str | None],
    messages: Sequence[Json],
    role_key: str = "role",
    content_key: str = "content",
) -> tuple[str | None, Json]:
    """Return the column of the system message that is not read, and its value, as text if it is a list of parts.

    The value is None if the messages begin with it, so that it need not be added.
    """
    for name in SYSTEM_COLUMNS:
        value = record.get(name)
        if value is None or value == "" or name in read:
            continue
        parts = value.get("parts") if is_mapping(value) else value
        if is_list(parts) and all(is_mapping(part) and type(part.get("text")) is str for part in parts):
            value = "".join(part["text"] for part in parts)
        # A text may begin with the speaker's name, as `SYSTEM:`.
        first = _FIRST.match(value) if type(value) is str else None
        if first is not None and SPEAKERS[first["name"].lower()] == "system":
            value = value[first.end() :].strip()
        opening = messages[0] if messages else None
        is_repeated = is_mapping(opening) and opening.get(role_key) == "system" and opening.get(content_key) == value
        return name, None if is_repeated else value
    return None, None


def join_context(
    record: Mapping[str, Json], prompt_field: str, context_fields: Iterable[str], response_field: str = ""
) -> tuple[str, tuple[str, ...]]:
    """Append the text of the context's columns to a prompt, each on a new line, unless it is blank.

    The columns of both are returned too.
    """
    prompt = record.get(prompt_field)
    if type(prompt) is not str:
        raise RejectError("content_not_text", f"{prompt_field} is {describe_type(prompt)}")
    text, used = prompt, [prompt_field]
    for name in context_fields:
        extra = record.get(name)
        if name in (prompt_field, response_field) or extra is None or extra == "":
            continue
        extra = _join_passages(extra)
        if extra is None:
            raise RejectError("content_not_text", f"{name} is {describe_type(record[name])}, expected text or passages")
        used.append(name)
        if not extra.isspace():
            text = f"{text}\n{extra}"
    return text, tuple(used)


_PASSAGE_KEYS = ("text", "content", "passage", "passage_text", "paragraph_text", "body", "value")


def _join_passages(value: Json) -> str | None:
    """Return a context's text: its own, or that of its passages, each on new lines; None if it is something else.

    ["a", "b"]   [{"title": "A", "text": "a"}, …]
    """
    if type(value) is str:
        return value
    passages: list[str] = []
    for passage in value if is_list(value) else [value]:
        name, text = find_first_column(passage, _PASSAGE_KEYS) if is_mapping(passage) else ("", passage)
        others = {key: one for key, one in passage.items() if key not in (name, "title")} if name else {}
        title = passage.get("title") if name else None
        if type(text) is not str or any(iterate_texts(others)) or not (title is None or type(title) is str):
            return None
        passages += [title, text] if title else [text]
    return "\n".join(passages)


def write_number(value: Json) -> Json:
    """Return a number or a boolean as its text, as a CSV's cell has it; any other value as it is."""
    return to_json(value) if type(value) in (bool, int, float) else value


def read_history(record: Mapping[str, Json]) -> list[Json]:
    """Return the turns before the prompt; none if `history` is absent, empty, or text, which is refused as unread."""
    history = record.get("history")
    if not history or type(history) is str:
        return []
    history = parse_messages(history)
    if is_list(history) and all(is_mapping(message) and "role" in message for message in history):
        return history
    is_one_pair = is_list(history) and len(history) == 2 and all(type(text) is str for text in history)
    turns = pair_history([history] if is_one_pair else history)
    if turns is None:
        raise RejectError("bad_messages", "history is not a list of [user, assistant] pairs, or of messages")
    return turns


def pair_history(value: Json) -> list[Json] | None:
    """Return the messages of a list of [user, assistant] pairs; None if it is something else.

    A list that may be one of roles and texts is rejected: the names of roles would be trained, or asked.
    """
    if not is_list(value) or not all(is_list(pair) and len(pair) == 2 for pair in value):
        return None
    if any(is_list(text) or is_mapping(text) for pair in value for text in pair):
        return None
    for place, which in enumerate(("first", "second")):
        if value and is_role(value[0][place]) and is_role(value[-1][place]):
            raise RejectError(
                "bad_messages",
                f"the {which} items of pairs are names of roles, but not all are; expected [role, text] or [question, "
                "answer]; name other roles in format.role_map",
            )
    roles = ("user", "assistant")
    return [
        {"role": roles[i], "content": write_number(text) if i else text}
        for pair in value
        for i, text in enumerate(pair)
    ]


PAIR_COLUMNS = (
    *(("prompt", "response"), ("prompt", "completion"), ("prompt", "answer"), ("question", "answer")),
    *(("question", "response"), ("instruction", "output"), ("instruction", "response"), ("query", "response")),
    *(("input", "output"), ("inputs", "targets"), ("source", "target"), ("prompt", "output")),
    *(("input", "target"), ("input", "response"), ("input", "completion"), ("query", "answer"), ("query", "output")),
    *(("instruction", "answer"), ("instruction", "completion"), ("question", "output"), ("question", "completion")),
    *(("problem", "solution"), ("problem", "generated_solution"), ("question", "generated_solution")),
    *(("question", "solution"), ("problem", "response"), ("problem", "answer"), ("prompt", "solution")),
    *(("prompt", "target"), ("prompt", "generation"), ("user", "assistant"), ("human", "assistant")),
    *(("document", "summary"), ("article", "highlights"), ("article", "summary"), ("article", "abstract")),
    *(("dialogue", "summary"), ("text", "summary"), ("question", "final_answer"), ("instruction", "code")),
)
"""Columns that hold a prompt and its response, the most likely first."""


_CALL_BEGIN = re.compile(r"\s*(?:\{|\[\s*[\[{\]])")
_TAGGED_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TAG_BEFORE_CALL = re.compile(r"[>\]]\s*(?=[{\[])")
"""The end of a tag with JSON after it."""
_MOST_TAGS = 32
"""Ends of tags after which a call is looked for."""


def part_from_calls(text: str) -> tuple[str, list[Json]]:
    """Return the text before the calls of a turn, such as reasoning in tags, and the text of its calls.

    <think>look it up</think>{"name": …}
    <think>…</think>I look it up.<tool_call>{"name": …}</tool_call>
    """
    if _CALL_BEGIN.match(text):
        return "", [text]
    begin = text.find("<tool_call>")
    if begin >= 0 and not _TAGGED_CALL.sub("", text[begin:]).strip():
        return text[:begin].strip(), _TAGGED_CALL.findall(text, begin)
    for tag in islice(_TAG_BEFORE_CALL.finditer(text), _MOST_TAGS):
        with suppress(ValueError):
            read_value(text[tag.end() :])
            return text[: tag.end()].strip(), [text[tag.end() :]]
    return "", [text]


# ── Tool calls ───────────────────────────────────────────────────────────────────────────────────────


ARGUMENT_KEYS = ("arguments", "parameters", "input", "args")
"""Keys of a call's arguments, as OpenAI, Cohere, Anthropic and LangChain write them."""
_CALL_KEYS = frozenset({*ARGUMENT_KEYS, "id", "name", "type", "function", "index", "call_id"})


class Tools(Config):
    """How tools and calls are read and passed to the template."""

    tools_fields: list[str] = Field(default=["tools", "tool_schemas", "functions", "function_schemas"])
    """Columns that may hold the row's tools; the first with a value that is neither null nor blank is used."""
    arguments: Literal["auto", "object", "string"] = "auto"
    """Form in which the template receives a call's arguments; auto: the form that it prints correctly; string: their
    text, even if it is no JSON object, for which rows are rejected otherwise."""
    tool_ids: Literal["auto", "keep"] = "auto"
    """Whether call ids may be rewritten (to nine letters and digits) for a template that requires it."""


def read_tools(record: Mapping[str, Json], fields: Iterable[str]) -> tuple[tuple[Json, ...] | None, bool, bool]:
    """Return the tools of the first column that holds any, whether one had a value, and whether that was JSON text."""
    for name in fields:
        value = record.get(name)
        if not value or (type(value) is str and value.isspace()):
            continue
        from_text = type(value) is str
        if from_text:
            value = _parse_text(value, "bad_tools", f"{name} is ")
            if value is None or value == []:
                continue
        if is_list(value):
            schemas = value
        elif not is_mapping(value):
            raise RejectError("bad_tools", f"{name}: {describe_type(value)}, expected a list or a mapping")
        elif is_mapping(value.get("function")) or type(value.get("name")) is str:
            schemas = [value]
        else:
            # The key of a schema without a name is its name.
            schemas = [
                schema
                if not is_mapping(schema) or is_mapping(schema.get("function")) or "name" in schema
                else {"name": key, **schema}
                for key, schema in value.items()
            ]
        tools: list[Json] = []
        for schema in schemas:
            tool = _wrap_schema(schema)
            if tool is None:
                raise RejectError("bad_tools", f"{name}: tool {len(tools)} ({describe_type(schema)}) has no name")
            tools.append(tool)
        return tuple(tools) or None, True, from_text
    return None, False, False


def _wrap_schema(value: Json) -> Json:
    """Wrap a bare schema; None if it has no name."""
    if type(value) is str:
        try:
            value = read_value(value)
        except ValueError:
            return None
    if not is_mapping(value):
        return None
    function = value.get("function")
    if is_mapping(function):
        if not _is_name(function.get("name")):
            return None
        return value if type(value.get("type")) is str else {**value, "type": "function"}
    return {"type": "function", "function": value} if _is_name(value.get("name")) else None


def _is_name(value: Json) -> TypeGuard[str]:
    return type(value) is str and bool(value) and not value.isspace()


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The calls of one message, and the source text of each call's arguments, if it was text."""

    calls: list[Json]
    sources: list[str | None]


def read_calls(values: Iterable[Json], arguments: str = "auto") -> ToolCalls:
    """Read calls into one shape; each value is a call, a list of calls, or the JSON text of either.

    Arguments that are text, but no JSON object, are rejected unless `arguments` is `string`: a model that is trained
    on them learns to write what no parser reads.
    """
    calls: list[Json] = []
    sources: list[str | None] = []
    for value in values:
        given = value
        if type(given) is str:
            if not given or given.isspace():
                continue
            given = _parse_text(given, "bad_tool_call", parse=read_value_without_repeats)
        if given is None:
            continue
        if not is_list(given) and not is_mapping(given):
            raise RejectError("bad_tool_call", f"{describe_type(given)}, expected calls")
        for item in given if is_list(given) else [given]:
            call, source = _read_call(item, arguments)
            calls.append(call)
            sources.append(source)
    return ToolCalls(calls, sources)


def _read_call(value: Json, form: str) -> tuple[Json, str | None]:
    if type(value) is str:
        value = _parse_text(value, "bad_tool_call", parse=read_value_without_repeats)
    if not is_mapping(value):
        raise RejectError("bad_tool_call", f"a call is {describe_type(value)}, expected a mapping")
    function = value.get("function")
    body = function if is_mapping(function) else value
    name = body.get("name")
    if not _is_name(name):
        raise RejectError("bad_tool_call", "a call has no name")
    given: Json = next((body[key] for key in ARGUMENT_KEYS if body.get(key) is not None), None)
    if given is None:
        unread = [
            key for key, one in body.items() if key not in _CALL_KEYS and (is_mapping(one) or is_list(one)) and one
        ]
        if unread:
            raise RejectError(
                "bad_tool_call", f"{name}: no {', '.join(ARGUMENT_KEYS)}, and nothing reads its {unread[0]}"
            )
    arguments, is_json = _parse_arguments(given)
    if arguments is None:
        if form != "string" or type(given) is not str:
            raise RejectError("bad_tool_arguments", f"{name}: arguments are not a JSON object")
        arguments, is_json = given, True
    call_id = value.get("id")
    call = {
        "id": call_id if _is_name(call_id) else None,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return call, given if is_json and _is_name(given) else None


def _parse_arguments(value: Json) -> tuple[dict[str, Json] | None, bool]:
    """Read arguments that may be JSON text, or text of text; None if the result is not an object, or repeats a key.

    Whether the text is JSON is returned too: Python's may be read, but a template must not print it.
    """
    is_json = True
    for _ in range(2):
        if type(value) is not str:
            break
        if not value or value.isspace():
            return {}, is_json
        try:
            value = from_json_without_repeats(value)
        except ValueError:
            is_json = False
            try:
                value = read_value_without_repeats(value)
            except ValueError:
                return None, is_json
    if value is None:
        return {}, is_json
    return (value if is_mapping(value) else None), is_json


def link_calls(messages: list[Message]) -> None:
    """Assign ids in place: a new one to each call without an id, and to each result the next open call's.

    A user message closes open calls: a result after it cannot answer a call before it.
    """
    taken = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    names = (name for name in map("call_{}".format, count()) if name not in taken)
    waiting: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] == "user":
            waiting.clear()
        for call in message.get("tool_calls", ()):
            if call["id"] is None:
                call["id"] = next(names)
            waiting.append(call["id"])
        if message["role"] != "tool":
            continue
        answered = message.get("tool_call_id")
        if _is_name(answered):
            if answered in waiting:
                waiting.remove(answered)
        elif waiting:
            messages[index] = {**message, "tool_call_id": waiting.pop(0)}
        else:
            messages[index] = {key: value for key, value in message.items() if key != "tool_call_id"}
