"""Flags of training in messages, their parts, and columns: read, or noted so that the check `unread_flags` blocks.

The situations are those that users of other tools reported; each names its source.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.conversation.options import Loss
from rowmill.core.json import Json
from rowmill.kinds.base import DatasetKind
from rowmill.kinds.catalog import Chat, Preference, Prompts, Supervised, Text, Tokens
from rowmill.kinds.shared.training_flags import find_meaning, may_be_flag
from rowmill.schema.rows import Message
from tests.support.canonical_rows import kept, rejection

PAIR = {"prompt": "Why?", "response": "So it is."}


def talk(**answer: Json) -> dict[str, Any]:
    """Return a chat of two exchanges, whose first answer has further keys."""
    messages: list[Json] = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "BAD", **answer},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "GOOD"},
    ]
    return {"messages": messages}


def flags(record: Json, form: Any = None, **groups: Any) -> list[tuple[bool | None, float | None]]:
    """Return what each message of a record's row says of its training."""
    messages: tuple[Message, ...] = kept(record, form, **groups).messages
    return [(one.get("train"), one.get("weight")) for one in messages]


def unread(record: Json, form: Any = None, **groups: Any) -> list[str]:
    """Return the flags of a record that nothing reads."""
    notes = kept(record, form, **groups).report.notes
    return [note.removeprefix("unread_flag ") for note in notes if note.startswith("unread_flag ")]


NO, YES, OPEN = (False, None), (True, None), (None, None)

# ── Messages ──


@pytest.mark.parametrize(
    ("key", "value"),
    [
        # verl-project/verl pull request 5472: `trainable`, later `loss_mask` of 0 and 1.
        ("trainable", False),
        ("loss_mask", 0),
        # axolotl, docs on conversations: ranges of the content, by `message_field_training_detail`.
        ("train_detail", [{"begin_offset": 0, "end_offset": 2, "train": False}]),
        # modelscope/ms-swift pull request 9266: a weight of one message.
        ("loss_scale", 0.5),
        # meta-pytorch/torchtune issue 2261: `Message.masked`.
        ("masked", True),
        ("mask", True),
        ("ignore", True),
        ("no_loss", 1),
        ("exclude", "true"),
        ("isTrainable", False),
        ("supervise", False),
        ("context_only", True),
    ],
)
def test_flag_of_a_message_that_no_option_reads_is_noted_until_the_recipe_says_what_it_is(
    key: str, value: Json
) -> None:
    record = talk(**{key: value})

    assert unread(record) == [f"message {key}"]
    assert unread(record, Chat(message_flags={key: "ignore"})) == []
    assert kept(record, Chat(message_flags={key: "ignore"})).messages[1][key] == value


@pytest.mark.parametrize("key", ["score", "is_correct", "toxic", "redacted", "timestamp", "index", "learning_rate"])
@pytest.mark.parametrize("value", [True, 0, 1, 0.5, 7])
def test_measure_of_a_message_or_of_a_row_is_no_flag(key: str, value: Json) -> None:
    assert unread(talk(**{key: value}) | {key: value, "label_id": value}) == []


def test_mapping_adds_flags_to_the_known_ones_and_says_which_way_each_points() -> None:
    form = Chat(message_flags={"masked": "mask", "trainable": "train"})

    assert flags(talk(masked=True), form) == [OPEN, NO, OPEN, OPEN]
    assert flags(talk(masked=0), form) == [OPEN, YES, OPEN, OPEN]
    assert flags(talk(trainable=False, train=False), form) == [OPEN, NO, OPEN, OPEN]
    assert rejection(talk(masked=True, train=True), form).reason == "flag_conflict"
    assert rejection(talk(masked=0.5), form).reason == "bad_weight"
    # A list names all flags, and the known ones that it leaves out are noted.
    assert unread(talk(weight=0), Chat(message_flags=["trainable"])) == ["message weight"]
    assert flags(talk(weight=0), Chat(message_flags=["trainable"])) == [OPEN] * 4
    assert flags(talk(weight=0), Chat(message_flags={"weight": "ignore"})) == [OPEN] * 4


def test_weights_of_prompts_say_nothing_of_their_training() -> None:
    """OpenAI's format has weights on every message; together.ai's too, and both train the model's only."""
    record = talk(weight=0)
    for message in record["messages"]:
        message.setdefault("weight", 1)

    assert flags(record) == [(None, 1.0), (False, 0.0), (None, 1.0), (True, 1.0)]

    record["messages"][0] = {"role": "user", "content": "Q", "train": True}

    assert flags(record)[0] == YES


def test_flags_are_noted_where_the_recipe_trains_everything() -> None:
    assert unread(talk(train=False), loss=Loss(mask_user_turns=False)) == ["message train"]
    assert unread(talk(train=True), loss=Loss(mask_user_turns=False)) == []


# ── Columns ──


@pytest.mark.parametrize("value", [[0, 1], [False, True], [None, 0, 0, 1], "[0, 1]"])
def test_column_with_a_flag_of_each_answer_or_message_is_read(value: Json) -> None:
    """hiyouga/LLaMA-Factory pull request 9630: a list `loss_mask` beside the conversation, of its answers."""
    record = {**talk(), "loss_mask": value}

    assert unread(record) == ["column loss_mask"]
    read = flags(record, Chat(message_flags={"loss_mask": "train"}))
    assert [bool(train) for train, _ in read] == [False, False, False, True]
    assert read[1][0] is False


def test_list_of_flags_with_another_length_rejects_its_row() -> None:
    form = Chat(message_flags={"loss_mask": "train"})

    assert rejection({**talk(), "loss_mask": [1, 0, 1]}, form).reason == "length_mismatch"
    assert rejection({**talk(train=True), "train": [False, True]}).reason == "flag_conflict"


def test_list_of_flags_is_counted_before_a_system_message_is_added() -> None:
    record = {"system": "Be kind.", **talk(), "train": [False, False, False, True]}

    assert [bool(train) for train, _ in flags(record)] == [False, False, False, False, True]


def test_binary_list_as_long_as_messages_or_answers_is_noted_under_any_name() -> None:
    assert unread({**talk(), "which": [1, 0]}) == ["column which"]
    assert unread({**talk(), "which": [True, False, True, False]}) == ["column which"]
    assert unread({**talk(), "which": [1, 0, 1]}) == []
    assert unread({**talk(), "lengths": [12, 7]}) == []
    assert unread({**talk(), "which": [1, 0]}, Chat(ignore_columns=["which"])) == []


def test_weight_of_a_row_multiplies_those_of_its_answers() -> None:
    record = {**talk(weight=0.5), "weight": 2.5}
    weighed = Loss(weights=True)

    assert flags(record, loss=weighed) == [OPEN, (True, 1.25), OPEN, (None, 2.5)]
    assert flags({**talk(train=False), "weight": 2.5}, loss=weighed)[1] == NO
    assert rejection({**talk(), "weight": 0.0}, loss=weighed).reason == "untrained_row"
    assert rejection({**talk(), "train": False}).reason == "untrained_row"
    assert rejection({**talk(), "weight": -1.0}, loss=weighed).reason == "bad_weight"


@pytest.mark.parametrize("weight", [0, 0.0, 0.5, 2.5])
def test_weight_of_a_row_is_noted_without_the_option_that_reads_it(weight: float) -> None:
    assert unread({**talk(), "weight": weight}) == ["column weight"]
    assert unread({**talk(), "weight": 1.0}) == []
    assert unread({**talk(), "weight": weight}, Chat(ignore_columns=["weight"])) == []
    assert unread({**talk(), "weight": weight}, Chat(message_flags={"weight": "ignore"})) == []


@pytest.mark.parametrize(
    ("form", "record"),
    [
        (Supervised(), PAIR),
        (Text(), {"text": "A document."}),
        (Preference(), {"prompt": "Why?", "chosen": "So.", "rejected": "Because."}),
        (Prompts(), {"prompt": "Why?", "answer": "42"}),
        (Tokens(), {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}),
    ],
    ids=["pair", "text", "preference", "prompts", "tokens"],
)
def test_column_is_noted_by_kinds_that_read_none(form: DatasetKind, record: dict[str, Json]) -> None:
    ignoring = type(form).model_validate({**form.model_dump(), "ignore_columns": ["weight", "train"]})

    assert unread({**record, "weight": 0.5, "score": 0, "quality": 1}, form) == ["column weight"]
    assert unread({**record, "train": False}, form) == ["column train"]
    assert unread({**record, "train": False, "weight": 0}, ignoring) == []


@pytest.mark.parametrize(
    "column",
    [
        # hiyouga/LLaMA-Factory's option `mask_history`, and NeMo's column of the role that is masked.
        {"mask_history": True},
        {"mask": "User"},
        # PrimeIntellect-ai/prime-rl pull request 978: roles that train.
        {"loss_mask": {"system": False, "tool": True}},
        {"train_on_roles": ["assistant", "tool"]},
    ],
)
def test_columns_of_other_tools_that_no_flag_expresses_are_noted(column: dict[str, Json]) -> None:
    [name] = column

    assert unread({**talk(), **column}) == [f"column {name}"]


def test_mask_beside_ids_is_noted_unless_a_tokenizer_writes_it() -> None:
    record = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "special_tokens_mask": [1, 0, 0]}

    assert unread(record, Tokens()) == []
    assert unread({**record, "which": [0, 1, 0]}, Tokens()) == ["column which"]
    assert unread({**record, "weights": [0.1, 0.5, 1.0]}, Tokens()) == ["column weights"]
    assert unread({**record, "weights": [0.1, 0.5, 1.0]}, Tokens(token_fields=["weights"])) == []


# ── Parts ──


def parted(*parts: tuple[str, Json], **answer: Json) -> dict[str, Any]:
    content: list[Json] = [{"type": "text", "text": text, **({} if flag is None else {"train": flag})}
                           for text, flag in parts]  # fmt: skip
    return {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content, **answer}]}


def test_parts_with_different_flags_keep_them() -> None:
    """axolotl, docs on content parts: each may have `train` or `weight`."""
    answer = kept(parted(("BAD ", False), ("GOOD", None))).messages[1]

    assert answer == {"role": "assistant", "content": "BAD GOOD", "part_weights": {"content": [[4, 0.0], [4, 1.0]]}}

    answer = kept(parted(("BAD ", None), ("GOOD", True), train=False)).messages[1]

    assert (answer["train"], answer["part_weights"]) == (True, {"content": [[4, 0.0], [4, 1.0]]})
    assert "part_weights" not in kept(parted(("A", True), ("B", True))).messages[1]
    assert kept(parted(("A", False), ("B", False))).messages[1]["train"] is False


def test_parts_of_reasoning_and_reasoning_in_tags_keep_their_flags() -> None:
    thoughts = [{"type": "text", "text": "bad ", "train": False}, {"type": "text", "text": "good"}]
    message = {"role": "assistant", "reasoning_content": thoughts, "content": "A"}
    answer = kept({"messages": [{"role": "user", "content": "Q"}, message]}).messages[1]

    assert answer["reasoning_content"] == "bad good"
    assert answer["part_weights"] == {"content": [[1, 1.0]], "reasoning": [[4, 0.0], [4, 1.0]]}

    answer = kept(parted(("<think>bad</think>\n\n", False), ("GOOD", True))).messages[1]

    assert (answer["content"], answer["reasoning_content"]) == ("GOOD", "bad")
    assert answer["part_weights"] == {"content": [[4, 1.0]], "reasoning": [[3, 0.0]]}
    assert rejection(parted(("<think>b", False), ("ad</think>\n\nGOOD", True))).reason == "flag_conflict"


def test_weights_of_parts_need_the_option() -> None:
    content = [{"type": "text", "text": "A", "weight": 0.5}, {"type": "text", "text": "B", "weight": -1}]
    record = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content}]}

    assert rejection(record).reason == "bad_weight"
    assert rejection(record, loss=Loss(weights=True)).reason == "bad_weight"
    answer = kept(record, loss=Loss(weights=True, allow_negative=True)).messages[1]
    assert answer["part_weights"] == {"content": [[1, 0.5], [1, -1.0]]}
    assert unread(parted(("A", None))) == []
    content[0] = {"type": "text", "text": "A", "masked": True}
    content[1] = {"type": "text", "text": "B"}
    assert unread(record) == ["part masked"]
    answer = kept(record, Chat(message_flags={"masked": "mask"})).messages[1]
    assert answer["part_weights"] == {"content": [[1, 0.0], [1, 1.0]]}


# ── Names ──


@pytest.mark.parametrize(
    ("name", "meaning"),
    [("trainable", "train"), ("do_not_train", "mask"), ("untrained", "mask"), ("isMasked", "mask"), ("loss", "train"),
     ("no-loss", "mask"), ("loss_mask", "train"), ("mask", "mask"), ("skip", "mask"), ("unmasked", "train")],
)  # fmt: skip
def test_name_of_a_flag_says_which_way_it_points(name: str, meaning: str) -> None:
    assert (may_be_flag(name), find_meaning(name)) == (True, meaning)


@given(st.text())
def test_any_name_is_a_flag_or_none(name: str) -> None:
    assert may_be_flag(name) in (True, False)
