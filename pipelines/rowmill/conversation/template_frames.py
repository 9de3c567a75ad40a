r"""Frames: the closed list of template text that may train, and matching a turn with it.

    …<|im_end|>\n <|im_start|>assistant\n <think>\n\n</think>\n\n Hello \n<tool_call>\n{"name": " get … <|im_end|> \n
                  └──── header ────┘ └──── rest ───┘ └own┘└───── inner ────┘└own┘    └─ end ─┘
                  the prompt prints it  the model writes all of this

The header is part of the generation prompt, so the model never writes it. The model writes the rest, the inner text
between own texts, and the end. All are learned from probe conversations of every shape. A row with any other template
text around its own text is rejected. Numbers in template text, as in `[Round 2]`, count the turns: text that differs
in its numbers alone is the same text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from rowmill.schema.rows import Message

CONTROL_TAG_PATTERN = r"<[|｜][^<>|｜\s]{1,40}[|｜]?>|<[^<>|｜\s]{1,40}[|｜]>"
"""How templates write control tokens: `<|…|>`, `<|…>` and `<…|>`."""

_DIGITS = re.compile(r"\d+")
_SCALAR_PATTERN = r"(?<!\w)(?:true|false|null|True|False|None|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?!\w)"
_SCALARS = re.compile(_SCALAR_PATTERN)
_JSON_SYNTAX = rf"(?:[\s{{}}\[\]\",:]|{_SCALAR_PATTERN})*"
_JSON_START = re.compile(_JSON_SYNTAX)
_JSON_END = re.compile(rf"{_JSON_SYNTAX}\Z")
"""The end of a text that is JSON syntax and scalars: what JSON prints around the strings of a call's arguments."""


ID_PLACEHOLDER = "\0"
"""Placeholder for a call's id, which templates print within template text."""
_MAX_KNOWN_ENDINGS = 4096
_MAX_MORE_DIGITS = 16
"""How much longer the numbers of a text may be than those of the learned one."""
MIN_ID_CHARS = 3
"""Ids shorter than this are ignored: they occur in other text by chance."""


def replace_call_ids(text: str, ids: Sequence[str]) -> str:
    """Replace the ids of a message's calls in template text by `ID_PLACEHOLDER`; `call_10` before `call_1`."""
    for one in sorted(ids, key=len, reverse=True):
        text = text.replace(one, ID_PLACEHOLDER)
    return text


def fill_in_call_ids(text: str, ids: Sequence[str]) -> tuple[str, ...]:
    """Return learned template text with its placeholder filled in, once for each call id of the message."""
    if ID_PLACEHOLDER not in text:
        return (text,)
    return tuple(text.replace(ID_PLACEHOLDER, one) for one in ids)


def get_call_ids(message: Message) -> tuple[str, ...]:
    """Return the ids of an adapted message's calls, in order."""
    calls, found = message.get("tool_calls"), list[str]()
    for call in calls if isinstance(calls, list) else ():
        identifier = call.get("id") if isinstance(call, dict) else None
        if isinstance(identifier, str) and len(identifier) >= MIN_ID_CHARS:
            found.append(identifier)
    return tuple(found)


@lru_cache(maxsize=4096)
def _compile_numbered(text: str, *, is_ending: bool) -> "re.Pattern[str] | None":
    """Return a pattern for a text with any numbers, None if it has none; an ending is matched up to a search's end."""
    parts = _DIGITS.split(text)
    return re.compile(r"\d+".join(map(re.escape, parts)) + (r"\Z" if is_ending else "")) if len(parts) > 1 else None


def find_ending(text: str, ending: str, start: int, stop: int) -> int | None:
    """Return where an ending of `text[start:stop]` begins, whatever its numbers are; None if it ends otherwise."""
    pattern = _compile_numbered(ending, is_ending=True)
    if pattern is None:
        return stop - len(ending) if text.endswith(ending, start, stop) else None
    found = pattern.search(text, max(start, stop - len(ending) - _MAX_MORE_DIGITS), stop)
    return found.start() if found else None


def remove_ending(text: str, ending: str) -> str:
    """Return a text without an ending, whatever its numbers are; the whole text if it ends otherwise."""
    return text[: find_ending(text, ending, 0, len(text))]


@dataclass(frozen=True, slots=True)
class TurnPrefix:
    """Template text before a turn's first own text: the `header`, part of the prompt, and the `rest`, which trains."""

    header: str
    rest: str


@dataclass(frozen=True)
class TemplateFrames:
    """Template text that may train, for one template and its values.

    `prefixes` are sorted longest first. `inner` holds (kind before, kind after, `normalize_inner_text`). `ends` maps
    (kind of the last own text, role of the next message or "") to the ends of such turns, longest first. `finish` maps
    the kind to the end that is appended to a last turn without one. `headers` maps every other role to the text with
    which its messages always begin, and `closings` to the texts that may end them, longest first.
    """

    prefixes: tuple[TurnPrefix, ...] = ()
    inner: frozenset[tuple[str, str, str]] = frozenset()
    ends: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict[tuple[str, str], tuple[str, ...]])
    finish: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    closings: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    model_roles: frozenset[str] = frozenset({"assistant"})
    next_header_ends: bool = False
    """Whether the first token of the user's header is all that ends an answer."""
    bos_token: str = ""
    end_tokens: tuple[str, ...] = ()
    """The tokens that may end a turn."""

    @cached_property
    def ends_by_kind(self) -> dict[str, list[str]]:
        """All known ends by kind, longest first."""
        found: dict[str, set[str]] = {}
        for (kind, role), ends in self.ends.items():
            # Between two turns of the model the end may be missing in whole or in part.
            if role in self.model_roles:
                continue
            found.setdefault(kind, set()).update(end for end in ends if end)
        return {kind: sorted(ends, key=lambda end: (-len(end), end)) for kind, ends in found.items()}

    def find_header(self, gap: str) -> str:
        """Return the header in the text before a message's own text: without BOS and the end of the message before."""
        ends = (*self.ends.values(), *self.closings.values())
        at = max((gap.rfind(end) + len(end) for known in ends for end in known if end and end in gap), default=0)
        return gap[at:].lstrip().removeprefix(self.bos_token)

    @cached_property
    def _varying_prefixes(self) -> dict[TurnPrefix, bool]:
        """All prefixes, longest first, and whether their rest holds ids, which differ from row to row."""
        return {one: ID_PLACEHOLDER in one.rest for one in self.prefixes}

    def match_prefix(self, text: str, start: int, position: int, ids: Sequence[str]) -> TurnPrefix | None:
        """Return the prefix that ends at `position` of a render and begins at `start` or later.

        `ids` are the ids of the message's calls, here and below.
        """
        for prefix, varies in self._varying_prefixes.items():
            for rest in fill_in_call_ids(prefix.rest, ids) if varies else (prefix.rest,):
                at = find_ending(text, rest, start, position)
                header = None if at is None else find_ending(text, prefix.header, start, at)
                # A prefix without header must directly follow other own text or begin the render.
                if header is not None and (prefix.header or at == start):
                    return TurnPrefix(text[header:at], text[at:position])
        return None

    def allows_inner(self, before: str, after: str, text: str, ids: Sequence[str]) -> bool:
        """Return whether the template may print `text` between own texts of one message."""
        return (
            not text
            or text.isspace()
            or (before, after, normalize_inner_text(before, after, replace_call_ids(text, ids))) in self.inner
        )

    def match_end(self, text: str, position: int, kind: str, roles: Sequence[str], ids: Sequence[str]) -> str | None:
        """Return the end of the turn whose last own text ends at `position`; None if the text there is not a known end.

        `roles`: of the next message and of the next rendered one, "" for none. Ends known before these roles are tried
        first, then all ends of turns of that kind.
        """
        after = position + (measure_json_closing(text, position) if kind == "tool_call" else 0)
        every, found = self.ends_by_kind.get(kind, []), ""
        for role in roles:
            end = _find_end_at(self.ends.get((kind, role), ()), text, after, ids)
            found = end if len(end) > len(found) else found
        found = found or _find_end_at(every, text, after, ids)
        if found:
            return text[position:after] + found
        # The template prints no end before such a message, or never ends an answer.
        known = [self.ends.get((kind, role)) for role in roles]
        runs_on = any(
            ends is not None and (not any(ends) or ("" in ends and role in self.model_roles))
            for ends, role in zip(known, roles, strict=True)
        )
        return "" if runs_on or (not every and kind == "assistant") else None

    @cached_property
    def _tokens_of_endings(self) -> dict[tuple[str, str], str]:
        return {}

    def find_end_token(self, kind: str, ending: str) -> str:
        """Return the part of a turn's ending that does not belong to its body.

        What closes the frame of the last own text, as `</tool_call>` does, belongs to the body.
        """
        known = self._tokens_of_endings
        if (kind, ending) not in known:
            tokens = [one for one in self.end_tokens if ending.endswith(one)]
            if kind == "assistant":
                token = tokens[0] if tokens else ending
            else:
                tokens = [*filter(ending.endswith, self.ends_by_kind.get("assistant", [])), *tokens]
                token = max(tokens, key=len, default="")
            if len(known) >= _MAX_KNOWN_ENDINGS:
                known.clear()
            known[kind, ending] = token
        return known[kind, ending]

    def get_finish(self, kind: str, ids: Sequence[str]) -> str:
        """Return the end of a turn of that kind that other messages follow."""
        return next(iter(fill_in_call_ids(self.finish.get(kind, ""), ids[-1:])), "")


def _find_end_at(ends: Sequence[str], text: str, position: int, ids: Sequence[str]) -> str:
    for end in ends:
        for one in fill_in_call_ids(end, ids) if ID_PLACEHOLDER in end else (end,):
            pattern = _compile_numbered(one, is_ending=False)
            if pattern is not None:
                found = pattern.match(text, position)
                if found:
                    return found.group()
            elif one and text.startswith(one, position):
                return one
    return ""


@lru_cache(maxsize=4096)
def normalize_inner_text(before: str, after: str, text: str) -> str:
    """Return the form in which text between own texts of two kinds is learned and looked up; it has no call ids.

    Next to a call's own text, JSON syntax and scalars are removed: they follow from the row.
    """
    if before == "tool_call":
        text = text[measure_json_closing(text, 0) :]
    if after == "tool_call":
        found = _JSON_END.search(text)
        text = text[: found.start()] if found else text
    return _DIGITS.sub("0", _SCALARS.sub("0", text))


def measure_json_closing(text: str, position: int) -> int:
    """Return how many characters of JSON syntax and scalars begin at a position."""
    found = _JSON_START.match(text, position)
    return found.end() - position if found else 0


@lru_cache(maxsize=64)
def list_end_tokens(eos: str, control_tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tokens that may end a turn: all but closing tags."""
    return tuple(token for token in (eos, *control_tokens) if token and not token.startswith("</"))


# ── units of template text ──


@lru_cache(maxsize=64)
def _compile_unit_pattern(control_tokens: tuple[str, ...]) -> "re.Pattern[str]":
    longest_first = map(re.escape, sorted(control_tokens, key=len, reverse=True))
    return re.compile("|".join([*longest_first, CONTROL_TAG_PATTERN, r"</?[A-Za-z]\w*>", r"\[/?[A-Z_]+\]",
                                r"\w+", r"\s", r"."]), re.DOTALL)  # fmt: skip


def split_into_units(text: str, control_tokens: tuple[str, ...]) -> list[str]:
    """Split template text into control tokens, tags, words, and single other characters."""
    return _compile_unit_pattern(control_tokens).findall(text)


def find_common_start(first: str, second: str, control_tokens: tuple[str, ...], *, any_numbers: bool = False) -> str:
    """Return the longest common prefix of whole units, of the first text if units may differ in their numbers."""
    units, others = split_into_units(first, control_tokens), split_into_units(second, control_tokens)
    forms = map(_mask_numbers, (units, others)) if any_numbers else (units, others)
    count = _count_common_units(*forms)
    return "".join(units[:count])


def find_common_end(texts: Sequence[str], control_tokens: tuple[str, ...]) -> str:
    """Return the longest common suffix of whole units, of the first text; units may differ in their numbers."""
    found = split_into_units(texts[0], control_tokens)[::-1]
    for text in texts[1:]:
        other = split_into_units(text, control_tokens)[::-1]
        found = found[: _count_common_units(_mask_numbers(found), _mask_numbers(other))]
    return "".join(reversed(found))


def _mask_numbers(units: Sequence[str]) -> list[str]:
    return [_DIGITS.sub("0", unit) for unit in units]


def _count_common_units(first: Sequence[str], second: Sequence[str]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def find_first_control_token(text: str, control_tokens: Sequence[str]) -> str:
    """Return the control token that begins a text after white space; empty if there is none."""
    start = text.lstrip()
    return max((token for token in control_tokens if start.startswith(token)), key=len, default="")


def find_opening_token(text: str, control_tokens: tuple[str, ...]) -> str:
    """Return the control token or tag that begins a text, with the white space before it; empty if there is none."""
    start = text.lstrip()
    written = re.match(CONTROL_TAG_PATTERN, start)
    token = find_first_control_token(start, control_tokens) or (written.group() if written else "")
    return text[: len(text) - len(start)] + token if token else ""


def is_token(unit: str, control_tokens: Sequence[str]) -> bool:
    """Return whether a unit of template text is a control token or a tag."""
    return len(unit) > 1 and (unit in control_tokens or unit[0] in "<[")


def cut_at_last_token(text: str, control_tokens: tuple[str, ...]) -> str:
    """Return a text from its last control token or tag on; the whole text if it has none."""
    parts = split_into_units(text, control_tokens)
    for i in range(len(parts) - 1, -1, -1):
        if is_token(parts[i], control_tokens):
            return "".join(parts[i:])
    return text


# ── the header in the text before a turn ──


def split_turn_prefix(gap: str, prompts: Sequence[str], control_tokens: tuple[str, ...]) -> TurnPrefix | None:
    """Split the text before a turn's first own text at the generation prompt; the text after it is the rest.

    Tried in turn, each with all `prompts`: the whole prompt; the prompt with other white space; the longest run of
    whole units of it that begins at its first unit or a control token and is not only white space.
    """
    known = [prompt for prompt in prompts if prompt]
    for prompt in known:
        at = gap.rfind(prompt)
        if at >= 0:
            return TurnPrefix(prompt, gap[at + len(prompt) :])
    for prompt in known:
        found = _find_last_match(_make_spaced_pattern(prompt, control_tokens), gap)
        if found is not None:
            return TurnPrefix(gap[found[0] : found[1]], gap[found[1] :])
    for prompt in known:
        for run in _list_unit_runs(prompt, control_tokens):
            at = gap.rfind(run)
            if at >= 0:
                return TurnPrefix(run, gap[at + len(run) :])
    return None


def contains_prompt(text: str, prompts: Sequence[str], control_tokens: tuple[str, ...]) -> bool:
    """Return whether a text contains a whole prompt, up to white space."""
    known = [prompt for prompt in prompts if prompt.strip()]
    return any(
        prompt in text or _find_last_match(_make_spaced_pattern(prompt, control_tokens), text) for prompt in known
    )


def _make_spaced_pattern(prompt: str, control_tokens: tuple[str, ...]) -> str:
    """Return a pattern that matches a prompt's units with any white space between them, and any numbers."""
    parts = [unit for unit in split_into_units(prompt, control_tokens) if not unit.isspace()]
    joined = r"\s*".join(r"\d+".join(map(re.escape, _DIGITS.split(part))) for part in parts)
    return joined + (r"\s*" if prompt[-1:].isspace() else "") if parts else r"(?!)"


def _find_last_match(pattern: str, text: str) -> tuple[int, int] | None:
    last = None
    for found in re.finditer(pattern, text):
        last = found.span()
    return last


@lru_cache(maxsize=4096)
def _list_unit_runs(prompt: str, control_tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return runs of whole units of a prompt, longest first.

    Units, not characters, because `<think>` and `<tool_call>` share `<t`.
    """
    longest_first = [
        *map(re.escape, sorted(control_tokens, key=len, reverse=True)),
        CONTROL_TAG_PATTERN,
        r"</?[A-Za-z]\w*>",
    ]
    parts = [unit for unit in re.split(f"({'|'.join(longest_first)})", prompt) if unit]
    is_token = re.compile(CONTROL_TAG_PATTERN).fullmatch
    starts = [i for i, unit in enumerate(parts) if i == 0 or unit in control_tokens or is_token(unit)]
    found = {"".join(parts[start:end]) for start in starts for end in range(start + 1, len(parts) + 1)}
    return tuple(sorted((run for run in found if run.strip()), key=lambda run: (-len(run), run)))
