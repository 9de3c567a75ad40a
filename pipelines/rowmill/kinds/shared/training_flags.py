"""Keys and columns that say what trains: their names, the forms of their values, and what they mean.

    {"role": "assistant", "content": "…", "train": false}          a flag of a message
    {"type": "text", "text": "…", "weight": 0}                     of a part of its content
    {"messages": […], "loss_mask": [0, 1]}                         of each message, or of each answer, in a column
    {"messages": […], "weight": 0.5}                               of the whole row

`KNOWN_FLAGS` are read wherever they are. Any other key or column that looks as if it said what trains is read once the
recipe says what it means (`format.message_flags`); until then it is counted, and the check `unread_flags` blocks the
build: data that is trained against its own flags is worse than no data. A name looks so by its words (`LOOKS_LIKE`)
beside a value that can be a flag; a list of true and false, or of 0 and 1, that is as long as the messages or as the
answers looks so under any name. Measures of a row (`score`, `is_correct`, `label`, `quality`) do not.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

from rowmill.core.json import Json

FlagMeaning = Literal["train", "mask", "ignore"]
"""`train`: true trains, and a number is a weight; `mask`: true does not train; `ignore`: the key says nothing of it."""

KNOWN_FLAGS: Mapping[str, FlagMeaning] = dict.fromkeys(("train", "training", "weight", "loss", "loss_weight"), "train")
"""The flags that are read without being named, by the documentation of OpenAI, axolotl, ms-swift and others."""

WEIGHT_NAMES = frozenset(
    f"{prefix}{noun}"
    for noun in ("weight", "weights", "loss_scale", "scale")
    for prefix in ("", "loss_", "sample_", "example_", "instance_", "row_", "message_", "turn_", "train_", "training_",
                   "token_", "sft_")
    if (prefix, noun) != ("", "scale")
)  # fmt: skip
"""Names whose numbers are weights. OpenAI and others write them on every message, where they mean the model's only."""

_LOOKS_LIKE = re.compile(
    r"(?:un|non)?(?:train(?:s|ed|ing|able)?|supervis(?:e|ed|ion)|learn(?:s|ed|able)?|loss(?:es)?|mask(?:s|ed|ing)?|weights?"
    r"|grad(?:ient)?s?|backprop(?:agate|agated)?|(?:fine)?tune[sd]?)"
)
"""Matches a word of a name that speaks of training."""

_LOOKS_LIKE_ALONE = frozenset(
    "ignore ignored exclude excluded include included skip skipped omit omitted drop dropped keep noloss notrain "
    "frozen freeze target is_target context_only is_context no_grad".split()
)
"""Whole names, without `is_` or `to_be_`, that say so of a message although they do not speak of training."""

_NEGATIVE = re.compile(
    r"(?:no|not|non|dont|never|without|skip|skipped|ignore|ignored|exclude|excluded|omit|omitted|drop|dropped|disable"
    r"|disabled|untrained|untrainable|nontrainable|unsupervised|masked|masking|noloss|notrain|frozen|freeze|context)"
)
"""Matches a word that turns a name's meaning around."""

_NEGATIVE_NAMES = frozenset({"mask", "is_mask", "mask_loss", "mask_out", "mask_message", "mask_turn"})

_MEASURES = frozenset(
    "id ids idx index no count counts num number n length lengths len size tokens time date name names set split rate "
    "step steps epoch epochs type kind source url path file files hash kg lb lbs".split()
)
"""Last words of names of other things: `train_id`, `loss_count`, `training_tokens`."""

NO_FLAGS = frozenset({"attention_mask", "special_tokens_mask", "token_type_ids", "position_ids"})
"""What tokenizers write beside ids."""

_ROLE_WORDS = frozenset("user human system assistant gpt model bot tool all none prompt response".split())

_TEXT_FLAGS = frozenset({"true", "false", "yes", "no", "0", "1"})

_UNREAD = "unread_flag"


@lru_cache(maxsize=4096)
def split_name(name: str) -> tuple[str, ...]:
    """Return the words of a name in small letters: `isTrainable` and `is-trainable` are `is`, `trainable`."""
    return tuple(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", " ", name).lower().split())


@lru_cache(maxsize=4096)
def may_be_flag(name: str) -> bool:
    """Return whether a name looks as if it said what trains."""
    words = split_name(name)
    if not words or name in NO_FLAGS or words[-1] in _MEASURES:
        return False
    core = words[1:] if words[0] in ("is", "to", "do", "should") else words
    return "_".join(core) in _LOOKS_LIKE_ALONE or any(map(_LOOKS_LIKE.fullmatch, words))


@lru_cache(maxsize=4096)
def find_meaning(name: str) -> FlagMeaning:
    """Return what a flag of this name probably means: whether true trains, or masks."""
    words = split_name(name)
    folded = "_".join(words)
    if folded in _NEGATIVE_NAMES or any(map(_NEGATIVE.fullmatch, words)):
        return "mask"
    return "train"


def is_weight_name(name: str) -> bool:
    """Return whether numbers under a name are weights."""
    return "_".join(split_name(name)) in WEIGHT_NAMES


def looks_like_flag(name: str, value: Json) -> bool:
    """Return whether a key or column looks by its name as if it said what trains, and its value can be such a flag."""
    if not may_be_flag(name):
        return False
    kind = type(value)
    if kind is bool:
        return True
    if kind is int or kind is float:
        return value in (0, 1) or name in KNOWN_FLAGS or is_weight_name(name)
    if kind is str:
        return value.strip().lower() in _TEXT_FLAGS or value.strip().lower() in _ROLE_WORDS or is_flag_list(value)
    if kind is list:
        # A list of flags, of roles, or of places in the text, as axolotl's `train_detail`.
        return bool(value) and (
            is_flag_list(value)
            or all(type(one) is dict for one in value)
            or all(type(one) is str and one.lower() in _ROLE_WORDS for one in value)
        )
    return kind is dict and any(type(one) in (bool, int, float) for one in value.values())


def is_flag_list(value: Json) -> bool:
    """Return whether a value is a list of booleans and numbers, some of which may be null, or such a list as text."""
    if type(value) is str:
        return _LIST_AS_TEXT.fullmatch(value) is not None
    return type(value) is list and bool(value) and all(one is None or type(one) in _SCALARS for one in value)


def is_binary_list(value: Json, sizes: Iterable[int]) -> bool:
    """Return whether a value is a list of true and false, or of 0 and 1, as long as one of some sizes over 1."""
    if type(value) is not list or len(value) < 2 or type(value[0]) not in _SCALARS or len(value) not in sizes:
        return False
    return all(one is None or (type(one) in _SCALARS and one in (0, 1)) for one in value)


_LIST_AS_TEXT = re.compile(r"\s*\[[\s\d.,eE+-]*(?:(?:true|false|null)[\s\d.,eE+-]*)*\]\s*")

_SCALARS = frozenset({bool, int, float})


def has_scalars(value: Json) -> bool:
    """Return whether a value is a list that begins with a boolean or a number; quick, for every column."""
    return type(value) is list and len(value) > 1 and type(value[0]) in _SCALARS


def name_flags(option: Sequence[str] | Mapping[str, FlagMeaning]) -> dict[str, FlagMeaning]:
    """Return the meaning of each flag that `format.message_flags` names; a mapping adds to the known ones."""
    if isinstance(option, Mapping):
        return {**KNOWN_FLAGS, **option}
    return dict.fromkeys(option, "train")


# ── Flags that nothing reads ──


def note_unread_flag(place: Literal["message", "part", "column"], name: str) -> str:
    """Return the note of a row on a flag that nothing reads."""
    return f"{_UNREAD} {place} {name}"


def parse_unread_flag(note: str) -> tuple[str, str] | None:
    """Return the place and the name of the flag that a row's note is about; None for other notes."""
    kind, _, rest = note.partition(" ")
    place, _, name = rest.partition(" ")
    return (place, name) if kind == _UNREAD else None


_OTHER_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("mask_history", "train_on_last_turn_only", "train_only_last_turn", "last_turn_only"),
                    "loss.supervise: last_assistant trains the last answer only"),
    **dict.fromkeys(("train_on_input", "train_on_inputs", "train_on_prompt", "mask_inputs", "mask_prompt"),
                    "loss.mask: {user: train} trains prompts"),
    **dict.fromkeys(("train_detail", "training_detail"), "write its ranges as parts of the content, each with `train`"),
}  # fmt: skip
"""What does the same as columns of other tools that no flag can express, by their names."""


def suggest_meaning(name: str, value: Json) -> FlagMeaning | None:
    """Return the meaning under which a flag can be read, if its name says it; None if the recipe's author must."""
    is_plain = type(value) in _SCALARS or is_flag_list(value)
    return find_meaning(name) if is_plain and may_be_flag(name) and name not in _OTHER_OPTIONS else None


def explain_unread_flag(place: str, name: str, value: Json, *, reads: bool, is_known: bool) -> str:
    """Return which option reads a flag that nothing reads, or leaves it out.

    `reads`: whether the kind of data reads flags there; `is_known`: whether the recipe reads flags of this name.
    """
    ignore = f"format.ignore_columns: [{name}]" if place == "column" else f"format.message_flags: {{{name}: ignore}}"
    leave = f"{ignore} leaves it out"
    if name in _OTHER_OPTIONS:
        return f"{_OTHER_OPTIONS[name]}; {leave}"
    if not reads:
        return f"this kind of data trains whole rows and reads none; {leave}"
    if is_known and place == "column" and type(value) is not bool:
        return f"loss.weights: true reads it as the row's weight; {leave}"
    if is_known:
        return f"loss.mask_user_turns: false trains all, whatever it says: delete that; {leave}"
    first = suggest_meaning(name, value)
    if first is None and not is_flag_list(value):
        return f"{leave}; what it means cannot be read: give each message or part a flag of its own instead"
    meanings = {"train": "if true trains", "mask": "if true does not train"}
    order = ("mask", "train") if first == "mask" else ("train", "mask")
    options = ", or ".join(f"{{{name}: {meaning}}} {meanings[meaning]}" for meaning in order)
    return f"format.message_flags: {options}; {leave}, if it says nothing of training"


def find_value(record: Json, name: str) -> Json:
    """Return the first value under a key, at any depth of a record; None without one."""
    if type(record) is dict:
        if record.get(name) is not None:
            return record[name]
        record = list(record.values())
    if type(record) is list:
        return next((found for one in record if (found := find_value(one, name)) is not None), None)
    return None
