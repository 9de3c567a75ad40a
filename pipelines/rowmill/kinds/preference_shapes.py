r"""Finds the prompt and the sides of a preference record, in any known shape.

    ranked           {"prompt": …, "completions": [{"completion": …, "score": 3}, …]}: the best against the worst
    hh_text          {"chosen": "\n\nHuman: …\n\nAssistant: …", "rejected": "\n\nHuman: …"}
    compared         {"prompt": …, "response_0": …, "response_1": …, "better_response_id": 1}
    sharegpt_pair    {"conversations": […], "chosen": {…}, "rejected": {…}}
    rejected_branch  {"messages": […], "rejected_response": "…"}, or "rejected_messages": […]
    explicit         {"prompt": …, "chosen": …, "rejected": …}, each text, a message or messages
    implicit         {"chosen": […], "rejected": […]}: the prompt is what both begin with
    unpaired         {"prompt": …, "completion": …, "label": true}, or {"messages": […], "label": true}

The first shape that matches wins.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rowmill.core.config import describe_type
from rowmill.core.json import Json
from rowmill.kinds.shared.conversation_rows import DetectedMessages
from rowmill.kinds.shared.messages import is_list, is_mapping, split_open_transcript, split_transcript
from rowmill.kinds.shared.unread import (
    begins_with_system,
    find_first_column,
    find_system,
    join_context,
    read_history,
)
from rowmill.schema.rows import Rejected

if TYPE_CHECKING:
    from rowmill.kinds.preference import Preference

_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_RANKED_COLUMNS = ("completions", "answers", "responses", "candidates")
_RANKED_TEXTS = ("completion", "response", "answer", "text", "content", "output")
_RANKS: Mapping[str, int] = {"rank": -1, "score": 1, "overall_score": 1, "pm_score": 1, "rating": 1}
"""Columns that rank answers, and whether a higher value is better."""


@dataclass(frozen=True, slots=True)
class FoundSides:
    """A record's prompt and sides as in the source, with the keys `role` and `content`.

    Without `prompt`, the sides are whole conversations. A record with a `label` has one side.
    """

    schema: str
    prompt: Sequence[Json] | None
    chosen: Sequence[Json] | None
    rejected: Sequence[Json] | None
    label: bool | None = None
    system: Json = None
    columns: tuple[str, ...] = ()
    """Columns of the record that hold the prompt and the sides."""

    def as_detected(self, messages: list[Json]) -> DetectedMessages:
        """Return some of the messages as those of one conversation."""
        return DetectedMessages(self.schema, messages, system=self.system)


def find_sides(record: Mapping[str, Json], columns: "Preference") -> FoundSides | Rejected:
    """Return the sides of the first shape that matches; null counts as absent."""
    for find_shape in _SHAPES:
        found = find_shape(record, columns)
        if isinstance(found, Rejected):
            return found
        if found is not None:
            return _add_columns(record, found, columns)
    present = ", ".join(sorted(record)[:20]) or "no column"
    return Rejected("unknown_schema", f"neither two sides nor an answer with a label in {present}")


def _add_columns(record: Mapping[str, Json], found: FoundSides, columns: "Preference") -> FoundSides:
    """Add the system message of a column, and the names of the columns that were read."""
    read = [*found.columns, *columns.chosen_fields, *columns.rejected_fields, "messages", "conversations"]
    read += [*columns.completion_fields, *columns.label_fields, *_SHAPE_COLUMNS.get(found.schema, ())]
    if found.prompt is not None and found.schema not in _WHOLE_SHAPES:
        name = find_first_column(record, columns.prompt_fields)[0]
        read += [name, *(["history"] if is_list(record.get("history")) else [])]
        read += columns.context_fields if type(record.get(name)) is str else ()
    name, system = (None, None) if columns.text == "raw" else find_system(record, (columns.system_prompt,))
    if name is None:
        return replace(found, columns=tuple(read))
    whole = found.prompt if found.prompt is not None else found.chosen if found.chosen is not None else found.rejected
    is_repeated = begins_with_system(whole or (), system)
    return replace(found, system=None if is_repeated else system, columns=(*read, name))


_WHOLE_SHAPES = frozenset({"rejected_branch", "sharegpt_pair"})
"""Shapes whose prompt is a list of messages, whatever the columns of prompts hold."""

_SHAPE_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "ranked": ("context", *_RANKED_COLUMNS),
    "rejected_branch": ("rejected_messages", "rejected_response"),
}
"""Columns of a shape beside those that options name."""


# ── Shapes of pairs ────────────────────────────────────────────────────────────────────────────────


def _find_ranked(record: Mapping[str, Json], columns: "Preference") -> FoundSides | Rejected | None:
    answers = _find_value(record, _RANKED_COLUMNS)
    if not is_list(answers) or not answers or not all(map(is_mapping, answers)):
        return None
    rank = next((name for name in _RANKS if all(answer.get(name) is not None for answer in answers)), None)
    prompt = record["context"] if record.get("context") is not None else _find_prompt(record, columns)
    if rank is None or prompt is None:
        return None
    values = [answer[rank] for answer in answers]
    if any(type(value) not in (int, float) for value in values):
        return Rejected("bad_messages", f"a {rank} of completions is no number")
    ordered = sorted(range(len(values)), key=lambda i: _RANKS[rank] * values[i])
    worst, best = ordered[0], next(i for i in range(len(values)) if values[i] == values[ordered[-1]])
    if values[worst] == values[best]:
        return Rejected("tied", f"every completion has the {rank} {values[best]}")
    sides = [_find_value(answers[i], _RANKED_TEXTS) for i in (best, worst)]
    return _pair_sides("ranked", prompt, sides, columns)


def _find_hh_text(record: Mapping[str, Json], columns: "Preference") -> FoundSides | Rejected | None:
    sides = _find_both(record, columns)
    if sides is None or _find_prompt(record, columns) is not None:
        return None
    texts = [side for side in sides if type(side) is str]
    if len(texts) != len(sides):
        return None
    if not all(text.startswith("\n\nHuman:") for text in texts):
        parted = [split_transcript(text) for text in texts]
        if columns.text == "raw" or parted[0] is None or parted[1] is None:
            return None
        return FoundSides("hh_text", None, parted[0], parted[1])
    if columns.text == "raw":
        return _part_hh_texts(*texts)
    return FoundSides("hh_text", None, _cut_hh_text(texts[0]), _cut_hh_text(texts[1]))


def _cut_hh_text(text: str) -> list[Json]:
    pieces = _HH_TURN.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    messages: list[Json] = [
        {"role": roles[who], "content": said.removeprefix(" ")}
        for who, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    return messages


def _part_hh_texts(chosen: str, rejected: str) -> FoundSides | Rejected:
    """Part two texts into the turns that both begin with, through the next `Assistant:`, and the text after that.

    Prompt and answer, end to end, are the record's text. An answer is one turn, as nothing after it would be known to
    be the user's.
    """
    turns = [_HH_TURN.split(text)[1:] for text in (chosen, rejected)]
    whole = [list(zip(own[::2], own[1::2], strict=True)) for own in turns]
    if whole[0] == whole[1]:
        return Rejected("identical_sides", "both sides have the same text")
    shared = next((i for i, pair in enumerate(zip(*whole, strict=False)) if pair[0] != pair[1]), None)
    if shared is None:
        return Rejected("empty_completion", "a side is the beginning of the other")
    if any(own[shared][0] != "Assistant" for own in whole):
        return Rejected("prompt_mismatch", "the sides differ before an answer")
    if any(len(own) > shared + 1 for own in whole):
        return Rejected("content_not_text", "a side goes on after its answer, and is not a single text")
    prompt = "".join(f"\n\n{who}:{said}" for who, said in whole[0][:shared]) + "\n\nAssistant:"
    answers: list[list[Json]] = [
        [{"role": "assistant", "content": own[shared][1]}] if own[shared][1].strip() else [] for own in whole
    ]
    return FoundSides("hh_text", [{"role": "user", "content": prompt}], answers[0], answers[1])


def _find_sharegpt_pair(record: Mapping[str, Json], columns: "Preference") -> FoundSides | Rejected | None:
    asked, sides = _find_value(record, ("conversations", "messages")), _find_both(record, columns)
    if not is_list(asked) or sides is None or not all(map(is_mapping, sides)):
        return None
    return _pair_sides("sharegpt_pair", asked, sides, columns)


def _find_rejected_branch(record: Mapping[str, Json], columns: "Preference") -> FoundSides | Rejected | None:
    messages = record.get("messages")
    if not is_list(messages) or _find_value(record, columns.chosen_fields) is not None:
        return None
    branch, response = record.get("rejected_messages"), record.get("rejected_response")
    whole = _read_side(messages, columns)
    if branch is None and response is None:
        return None
    if isinstance(whole, Rejected):
        return whole
    if is_list(branch):
        rejected = _read_side(branch, columns)
        return rejected if isinstance(rejected, Rejected) else FoundSides("rejected_branch", None, whole, rejected)
    users = [i for i, one in enumerate(whole) if is_mapping(one) and one.get("role") in ("user", "human")]
    if not users:
        return Rejected("prompt_mismatch", "no message of a user, after which the rejected response would be")
    rejected = _read_side(response, columns)
    if isinstance(rejected, Rejected):
        return rejected
    return FoundSides("rejected_branch", whole[: users[-1] + 1], whole[users[-1] + 1 :], rejected)


def _find_explicit(record: Mapping[str, Json], columns: "Preference") -> FoundSides | Rejected | None:
    prompt, sides = _find_prompt(record, columns), _find_both(record, columns)
    if prompt is None or sides is None:
        return None
    return _pair_sides("explicit", prompt, sides, columns)


_ANSWER_STEMS = ("response", "answer", "completion", "conversation", "output", "human_ref")
_SIDE_SUFFIXES = (("0", "1"), ("1", "2"), ("a", "b"), ("A", "B"))
_CHOICES = ("better_response_id", "winner", "preferred", "preference", "choice", "labels", "label")


def find_answer_pair(record: Mapping[str, Json]) -> tuple[str, str] | None:
    """Return the names of two columns that hold answers to the same prompt, such as `response_a` and `response_b`."""
    for stem in _ANSWER_STEMS:
        for first, second in _SIDE_SUFFIXES:
            for between in ("_", ""):
                names = f"{stem}{between}{first}", f"{stem}{between}{second}"
                if all(record.get(name) not in (None, "") for name in names):
                    return names
    return None


def _find_compared(record: Mapping[str, Json], columns: "Preference") -> FoundSides | Rejected | None:
    """Return two answers in the order that another column, or their scores, give them."""
    if record.get("response_j") is not None and record.get("response_k") is not None:
        names, better = ("response_j", "response_k"), 0
    else:
        pair = find_answer_pair(record)
        if pair is None or _find_both(record, columns) is not None:
            return None
        names, better = pair, _read_choice(record, pair)
        if better is None or isinstance(better, Rejected):
            return better
    sides = [record[names[better]], record[names[1 - better]]]
    prompt = _find_prompt(record, columns)
    if prompt is None and all(map(is_list, sides)):
        whole = [_read_side(side, columns) for side in sides]
        if isinstance(whole[0], Rejected) or isinstance(whole[1], Rejected):
            return next(one for one in whole if isinstance(one, Rejected))
        return FoundSides("compared", None, whole[0], whole[1], columns=names)
    found = None if prompt is None else _pair_sides("compared", prompt, sides, columns)
    return replace(found, columns=names) if isinstance(found, FoundSides) else found


def _read_choice(record: Mapping[str, Json], names: tuple[str, str]) -> int | Rejected | None:
    """Return which of two answers is better; None if no column says so in a way that is known."""
    suffixes = [name[-1] for name in names]
    first, second = (record.get(f"score_{suffix}") for suffix in suffixes)
    if isinstance(first, int | float) and isinstance(second, int | float):
        return Rejected("tied", f"both answers have the score {first}") if first == second else int(second > first)
    name, value = find_first_column(record, _CHOICES)
    if type(value) is str:
        said = value.strip().rpartition("_")[2].lower()
        if said.startswith("tie") or value.lower().startswith(("tie", "both")):
            return Rejected("tied", f"{name} is a tie")
        return next((i for i, suffix in enumerate(suffixes) if said == suffix.lower()), None)
    if type(value) is int and name != "label":
        # Stanford's `labels` are 1 where the first answer is preferred; others name the answer by its suffix.
        if name == "labels":
            return 1 - value if value in (0, 1) else None
        return next((i for i, suffix in enumerate(suffixes) if str(value) == suffix), None)
    return None


def _find_implicit(record: Mapping[str, Json], columns: "Preference") -> FoundSides | Rejected | None:
    sides = _find_both(record, columns)
    if sides is None or not all(map(is_list, sides)):
        return None
    read = [_read_side(side, columns) for side in sides]
    for one in read:
        if isinstance(one, Rejected):
            return one
    chosen, rejected = (one for one in read if not isinstance(one, Rejected))
    return FoundSides("implicit", None, chosen, rejected)


def _pair_sides(schema: str, prompt: Json, sides: Sequence[Json], columns: "Preference") -> FoundSides | Rejected:
    """Return a prompt with two sides; sides that repeat the prompt lose it."""
    if isinstance(prompt, Rejected):
        return prompt
    asked = _read_side(prompt, columns, role="user")
    if isinstance(asked, Rejected):
        return asked
    found: list[Sequence[Json]] = []
    for side in sides:
        answer = _read_side(side, columns)
        if isinstance(answer, Rejected):
            return answer
        if type(prompt) is str and is_list(side):
            opening = next((one for one in answer if is_mapping(one) and one.get("role") in ("user", "human")), None)
            begins = _read_role(answer[0]) if answer else None
            if opening is not None and opening.get("content") == prompt and begins not in columns.assistant_roles:
                # The text stands for the first user message of lists that hold the whole conversation.
                found.append(answer)
                continue
            if begins is not None and begins not in columns.assistant_roles and begins not in ("gpt", "model", "bot"):
                return Rejected("prompt_mismatch", "the messages of a side begin with another prompt than the text")
        repeats = list(answer[: len(asked)]) == list(asked)
        found.append(answer[len(asked) :] if repeats else answer)
    whole = [
        type(prompt) is str and bool(side) and _read_role(side[0]) in ("user", "human", "system") for side in found
    ]
    if any(whole):
        return (
            FoundSides("implicit", None, found[0], found[1])
            if all(whole)
            else Rejected("prompt_mismatch", "one side repeats the prompt, and the other does not")
        )
    return FoundSides(schema, asked, found[0], found[1])


# ── One answer ─────────────────────────────────────────────────────────────────────────────────────


def _find_unpaired(record: Mapping[str, Json], columns: "Preference") -> FoundSides | Rejected | None:
    value = _find_value(record, columns.label_fields)
    if value is None:
        return None
    if type(value) not in (bool, int) or value not in (0, 1):
        return Rejected("bad_label", f"{describe_type(value)}, expected true, false, 1 or 0")
    label, prompt, answer = bool(value), _find_prompt(record, columns), _find_value(record, columns.completion_fields)
    if prompt is not None and answer is not None:
        if isinstance(prompt, Rejected):
            return prompt
        asked, answered = _read_side(prompt, columns, role="user"), _read_side(answer, columns)
    else:
        whole = _find_value(record, ("messages", "conversations"))
        if not is_list(whole):
            return None
        asked, answered = None, _read_side(whole, columns)
    if isinstance(asked, Rejected):
        return asked
    if isinstance(answered, Rejected):
        return answered
    sides = (answered, None) if label else (None, answered)
    return FoundSides("unpaired", asked, *sides, label=label)


_SHAPES: Sequence[Callable[[Mapping[str, Json], "Preference"], FoundSides | Rejected | None]] = (
    _find_ranked,
    _find_hh_text,
    _find_compared,
    _find_sharegpt_pair,
    _find_rejected_branch,
    _find_explicit,
    _find_implicit,
    _find_unpaired,
)


# ── Columns ────────────────────────────────────────────────────────────────────────────────────────


def _find_value(record: Mapping[str, Json], names: Iterable[str]) -> Json:
    """Return the value of the first column that is not null."""
    return next((value for name in names if (value := record.get(name)) is not None), None)


def _find_both(record: Mapping[str, Json], columns: "Preference") -> tuple[Json, Json] | None:
    chosen, rejected = _find_value(record, columns.chosen_fields), _find_value(record, columns.rejected_fields)
    return None if chosen is None or rejected is None else (chosen, rejected)


def _find_prompt(record: Mapping[str, Json], columns: "Preference") -> Any:
    """Return the prompt as text or messages, the reject of one that cannot be joined, or None."""
    name, prompt = find_first_column(record, columns.prompt_fields)
    if type(prompt) is not str:
        return prompt
    joined = join_context(record, name, columns.context_fields)
    history = read_history(record)
    if isinstance(joined, Rejected):
        return joined
    if isinstance(history, Rejected):
        return history
    if (parted := split_open_transcript(joined[0])) is not None:
        return [*history, *parted]
    return [*history, {"role": "user", "content": joined[0]}] if history else joined[0]


def _read_side(value: Json, columns: "Preference", *, role: str = "assistant") -> Sequence[Json] | Rejected:
    """Return a text, a message or a list as messages with the keys `role` and `content`; a blank text as none."""
    if type(value) is str:
        return [{"role": role, "content": value}] if value.strip() else []
    messages = [value] if is_mapping(value) else value
    if not is_list(messages):
        return Rejected("content_not_text", f"a side is {describe_type(value)}, expected text or messages")
    renamed: list[Json] = []
    for message in messages:
        if not is_mapping(message):
            renamed.append(message)
            continue
        sharegpt = "from" in message and "role" not in message
        role_key = columns.role_field or ("from" if sharegpt else "role")
        content_key = columns.content_field or ("value" if sharegpt else "content")
        if (role_key, content_key) == ("role", "content"):
            renamed.append(message)
            continue
        others = {key: value for key, value in message.items() if key not in (role_key, content_key)}
        renamed.append({"role": message.get(role_key), "content": message.get(content_key), **others})
    return renamed


def _read_role(message: Json) -> str | None:
    role = message.get("role") if is_mapping(message) else None
    return role if type(role) is str else None
