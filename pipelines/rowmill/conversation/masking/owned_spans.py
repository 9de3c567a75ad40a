"""Locate a row's own text from the proven ownership of its characters.

What belongs here: `CharacterOwnership` → `LocatedContent`, with the own text that the template dropped. What does not:
the proof (`ChatRenderer.prove_ownership`).

A call's arguments are one piece if the template prints them as JSON, so that their braces do not count as template
text. Otherwise every name and value is a piece, and numbers, booleans and nulls are searched between their neighbours.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from rowmill.conversation.masking.content_spans import (
    LocatedContent,
    get_content_kind,
    get_dropped_kind,
    list_leaf_forms,
)
from rowmill.conversation.template_contract import CharacterOwnership, OwnedText
from rowmill.core.json import Json
from rowmill.schema.rows import ContentSpan, Message

_ARGUMENT_REACH_CHARS = 256
"""Characters after a call's name within which arguments without any string must begin."""


def locate_proven_content(
    ownership: CharacterOwnership,
    messages: Sequence[Message],
    adapted: Sequence[Message],
    text: str,
    roles: frozenset[str],
) -> LocatedContent:
    """Return the pieces of a render; `adapted` are the messages passed to the template, `roles` the model's roles."""
    located = LocatedContent()
    by_call: dict[tuple[int, int], list[OwnedText]] = {}
    for one in ownership.texts:
        if one.call >= 0:
            by_call.setdefault((one.message, one.call), []).append(one)
        else:
            kind = "reasoning" if one.part == "reasoning" else get_content_kind(messages[one.message]["role"], roles)
            located.add(ContentSpan(one.start, one.end, one.message, kind))
    missing = (
        (get_dropped_kind(messages[one.message], one.part, roles), one.message, one.call) for one in ownership.missing
    )
    located.dropped += [(kind, index) for kind, index, _ in dict.fromkeys(missing)]
    for index, message in enumerate(adapted):
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            _add_call_content(located, index, call, by_call.get((index, number), []), ownership.texts, text)
    for one, own in ownership.hidden:
        # Text of other roles does not train, and no position is better than a wrong one.
        if messages[one.message]["role"] in roles:
            _add_hidden_content(located, one, own, messages, text, roles)
    located.sort()
    return located


def _add_call_content(
    located: LocatedContent, index: int, call: Json, texts: Sequence[OwnedText], every: Sequence[OwnedText], text: str
) -> None:
    names = [one for one in texts if one.part == "call_name"]
    values = [one for one in texts if one.part != "call_name"]
    for name in names:
        located.add(ContentSpan(name.start, name.end, index, "tool_call"))
    arguments = (call.get("function") or {}).get("arguments")
    whole = _find_whole_arguments(arguments, names, values, text)
    if whole is not None:
        located.add(ContentSpan(*whole, index, "tool_call"))
        return
    for value in values:
        located.add(ContentSpan(value.start, value.end, index, "tool_call"))
    if isinstance(arguments, dict):
        _add_scalar_content(located, index, arguments, texts, every, text)


def _find_whole_arguments(
    arguments: Json, names: Sequence[OwnedText], values: Sequence[OwnedText], text: str
) -> tuple[int, int] | None:
    """Return the range of a call's arguments as JSON, if it contains all of their proven texts."""
    if not isinstance(arguments, (dict, list)) or not arguments:
        return None
    name_end = max((name.end for name in names), default=0)
    for form in _list_json_forms(arguments):
        if values:
            start = max(0, values[0].end - len(form))
            limit = min(value.start for value in values) + len(form)
        else:
            start, limit = name_end, name_end + _ARGUMENT_REACH_CHARS + len(form)
        at = text.find(form, start, limit)
        if at >= 0 and all(at <= value.start and value.end <= at + len(form) for value in values):
            return at, at + len(form)
    return None


def _list_json_forms(value: Json) -> Iterator[str]:
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(value, ensure_ascii=False, indent=4)
    yield json.dumps(value, ensure_ascii=False, indent=2)


def _add_scalar_content(
    located: LocatedContent,
    index: int,
    arguments: Mapping[str, Json],
    texts: Sequence[OwnedText],
    every: Sequence[OwnedText],
    text: str,
) -> None:
    """Find arguments other than strings between their key, or the call's name, and the row's next own text."""
    keys = {text[one.start : one.end]: one.end for one in texts if one.part == "call_key"}
    proven = {text[one.start : one.end] for one in texts if one.part != "call_name"}
    first = max((one.end for one in texts if one.part == "call_name"), default=0)
    for key, value in arguments.items():
        inside = list(_iterate_texts(value))
        if isinstance(value, str) or value in ({}, []) or not proven.isdisjoint(inside):
            continue
        after = keys.get(key, first)
        until = next((one.start for one in every if one.start >= after), len(text))
        found = _find_printed_value(value, text, after, until)
        if found is None:
            located.dropped.append(("call_arguments", index))
        elif key in keys:
            located.add(ContentSpan(*found, index, "tool_call"))


def _find_printed_value(value: Json, text: str, after: int, until: int) -> tuple[int, int] | None:
    """Find a value as JSON or as Python's `repr`, or all of its parts in order."""
    if not isinstance(value, (dict, list)):
        places = [(at, at + len(form)) for form in list_leaf_forms(value) if (at := text.find(form, after, until)) >= 0]
        return min(places, default=None)
    forms = (*_list_json_forms(value), str(value))
    places = [(at, at + len(form)) for form in forms if (at := text.find(form, after, until)) >= 0]
    if places:
        return min(places)
    position = after
    found: list[tuple[int, int]] = []
    for leaf in _iterate_leaves(value):
        rendered = _find_printed_value(leaf, text, position, until)
        if rendered is None:
            return None
        found.append(rendered)
        position = rendered[1]
    return (found[0][0], position) if found else None


def _iterate_leaves(value: Json) -> Iterator[Json]:
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterate_leaves(item)
    elif value != "":
        yield value


def _iterate_texts(value: Json) -> Iterator[str]:
    """Yield the strings and keys inside a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _iterate_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iterate_texts(item)


def _add_hidden_content(
    located: LocatedContent, one: OwnedText, own: str, messages: Sequence[Message], text: str, roles: frozenset[str]
) -> None:
    """Find a text that could not be replaced by code points, outside all other own text.

    The template text around it is checked later, against the closed list.
    """
    located.sort()
    role = messages[one.message]["role"]
    before = max((p.end for p in located.iterate_spans() if p.message < one.message), default=0)
    after = min((p.start for p in located.iterate_spans() if p.message > one.message), default=len(text))
    kind = "tool_call" if one.call >= 0 else "reasoning" if one.part == "reasoning" else get_content_kind(role, roles)
    for form in dict.fromkeys((own, own.strip(), json.dumps(own.strip(), ensure_ascii=False)[1:-1])):
        at = text.rfind(form, before, after)
        if at >= 0 and not any(p.start < at + len(form) and at < p.end for p in located.iterate_spans()):
            located.add(ContentSpan(at, at + len(form), one.message, kind))
            return
    located.dropped.append((get_dropped_kind(messages[one.message], one.part, roles), one.message))
