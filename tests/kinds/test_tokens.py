"""Rows that are token ids already: the shapes, the vectors of the specification, and one reason for each bad record."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmill.core.errors import ConfigError
from rowmill.kinds.reading.canonicalization import hash_row_content
from rowmill.schema.rows import Rejected, Row
from tests.support.row_reading import load, read

IDS, MASK = [5, 6, 7, 8, 9], [False, False, True, False, True]


def _read(record: Any, **options: Any) -> Row | Rejected:
    return read(record, {"kind": "tokens", **options})


def _row(record: Any, **options: Any) -> tuple[str, list[int], list[bool]]:
    row = _read(record, **options)
    assert isinstance(row, Row), row
    return row.report.schema, row.columns["input_ids"].tolist(), row.columns["loss_mask"].tolist()


SAME: list[tuple[str, dict[str, Any]]] = [
    ("prompt_response", {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "response_mask": [1, 0, 1]}),
    ("prompt_response", {"prompt_token_ids": [5, 6], "completion_ids": [7, 8, 9], "loss_mask": [True, False, True]}),
    ("masked", {"input_ids": IDS, "loss_mask": [0, 0, 1, 0, 1]}),
    ("masked", {"token_ids": IDS, "completion_mask": [0.0, 0.0, 1.0, 0.0, 1.0]}),
    ("masked", {"input_ids": IDS, "response_mask": [1, 0, 1], "response_length": 3}),
    ("masked", {"input_ids": [0, *IDS, 0, 0], "mask": [0, 0, 0, 1, 0, 1, 0, 0],
                "attention_mask": [0, 1, 1, 1, 1, 1, 0, 0]}),
    ("labelled", {"input_ids": IDS, "labels": [-100, -100, 7, -100, 9]}),
    ("turns", {"turns": [{"prompt_token_ids": [5, 6], "generation_token_ids": [7]}, {"role": "tool"},
                         {"prompt_token_ids": [5, 6, 7, 8], "generation_token_ids": [9]}]}),
    ("turns", {"response": {"output": [{"prompt_token_ids": [5, 6], "generation_token_ids": [7]},
                                       {"prompt_token_ids": [5, 6, 7, 8], "generation_token_ids": [9]}]}}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "record"), SAME, ids=range(len(SAME)))
def test_every_shape_gives_the_vector_of_the_specification(schema: str, record: dict[str, Any]) -> None:
    assert _row(record) == (schema, IDS, MASK)


def test_token_trains_if_all_masks_of_its_record_and_its_label_say_so() -> None:
    both = {"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 0, 1, 0, 1]}

    assert _row({"input_ids": IDS, **both}) == ("masked", IDS, MASK)
    assert _row({"input_ids": IDS, **both, "labels": [-100, -100, 7, -100, 9]}) == ("masked", IDS, MASK)
    sides = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9]}
    assert _row({**sides, "response_mask": [1, 1, 1], "loss_mask": [1, 0, 1]}) == ("prompt_response", IDS, MASK)
    # The first token is no target, whatever a mask says of it.
    assert _row({"input_ids": IDS, "loss_mask": [1, 0, 1, 0, 1], "labels": [-100, -100, 7, -100, 9]})[2] == MASK


@pytest.mark.parametrize("labels", [[-100, -100, 7, 8, 9], [-100, -100, 7, -100, -100]])
def test_labels_that_contradict_a_mask_are_rejected(labels: list[int]) -> None:
    rejected = _read({"input_ids": IDS, "loss_mask": [0, 0, 1, 0, 1], "labels": labels})

    assert isinstance(rejected, Rejected)
    assert rejected.reason == "labels_disagree"
    assert "loss_mask" in rejected.detail


def test_counted_ids_are_trained_but_the_first_and_named_columns_take_the_place_of_known_ones() -> None:
    trained = [False, False, True, True, True]

    assert _row({"input_ids": IDS, "response_length": 3}) == ("counted", IDS, trained)
    assert _row({"input_ids": IDS, "num_actions": 3}) == ("counted", IDS, trained)
    assert _row({"prompt_ids": [5, 6], "response_ids": [7, 8, 9]}) == ("prompt_response", IDS, trained)

    assert _row({"input_ids": IDS, "loss_mask": [1] * 5})[2] == [False, True, True, True, True]

    record = {"ids": IDS, "train": [0, 0, 1, 0, 1], "input_ids": [1], "loss_mask": [1]}

    assert _row(record, ids_fields=["ids"], mask_fields=["train"]) == ("masked", IDS, MASK)


def test_rows_are_equal_in_ids_and_mask_and_shifted_labels_are_called_so() -> None:
    made = [_read(record) for _, record in SAME]
    other = _read({"input_ids": IDS, "loss_mask": [0, 0, 1, 1, 1]})

    assert isinstance(other, Row)
    hashes = {hash_row_content(row) for row in made if isinstance(row, Row)}
    assert len(hashes) == 1
    assert hash_row_content(other) not in hashes

    shifted = _read({"input_ids": [5, 6, 7], "labels": [6, 7, -100]})
    wrong = _read({"input_ids": [5, 6, 7], "labels": [-100, 9, 7]})

    assert isinstance(shifted, Rejected)
    assert isinstance(wrong, Rejected)
    assert "shifted" in shifted.detail
    assert "shifted" not in wrong.detail


HOSTILE: list[tuple[Any, str]] = [
    ({}, "unknown_schema"), ({"input_ids": IDS}, "unknown_schema"), ({"prompt_ids": IDS}, "unknown_schema"),
    ([1, 2], "not_an_object"), ({"input_ids": "5 6", "loss_mask": [1, 1]}, "bad_tokens"),
    ({"input_ids": [5, -1], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [5, 2**31], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [5, 2**63], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [5, 2**70], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [5, 6.5], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [5, True], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [True, False], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [[5, 6]], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [5, [6]], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [5, None], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [5, "6"], "loss_mask": [0, 1]}, "bad_tokens"),
    ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "bad_mask"),
    ({"input_ids": [5, 6], "loss_mask": [0, 0.5]}, "bad_mask"),
    ({"input_ids": [5, 6], "loss_mask": "01"}, "bad_mask"),
    ({"input_ids": [5, 6], "labels": [-100, "6"]}, "bad_mask"),
    ({"input_ids": [5, 6], "response_length": -1}, "bad_mask"),
    ({"input_ids": [5, 6], "response_length": "1"}, "bad_mask"),
    ({"input_ids": [5, 6], "response_length": True}, "bad_mask"),
    ({"input_ids": [5, 6], "response_length": 3}, "length_mismatch"),
    ({"input_ids": [5, 6], "loss_mask": [1]}, "length_mismatch"),
    ({"input_ids": [5, 6], "labels": [6]}, "length_mismatch"),
    ({"prompt_ids": [5], "response_ids": [6, 7], "loss_mask": [0, 1, 1]}, "length_mismatch"),
    ({"input_ids": [5, 6], "loss_mask": [0, 1], "attention_mask": [1]}, "length_mismatch"),
    ({"input_ids": [5, 0, 6], "loss_mask": [0, 0, 1], "attention_mask": [1, 0, 1]}, "padded_inside"),
    ({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}, "labels_disagree"),
    ({"input_ids": [5, 6, 7], "labels": [-100, 9, 7]}, "labels_disagree"),
    ({"input_ids": [], "loss_mask": []}, "no_loss_tokens"), ({"input_ids": [5], "loss_mask": [1]}, "no_loss_tokens"),
    ({"input_ids": [5, 6], "loss_mask": [1, 0]}, "no_loss_tokens"),
    ({"input_ids": [5, 6], "loss_mask": [0, 1], "attention_mask": [0, 0]}, "no_loss_tokens"),
    ({"turns": [{"prompt_token_ids": [5, 6], "generation_token_ids": [7]},
                {"prompt_token_ids": [5, 9, 7, 8], "generation_token_ids": [9]}]}, "not_append_only"),
    ({"turns": [{"prompt_token_ids": [5, 6], "generation_token_ids": [7]},
                {"prompt_token_ids": [5, 6], "generation_token_ids": [9]}]}, "not_append_only"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_records_have_one_reason_each(record: Any, reason: str) -> None:
    made = _read(record)

    assert isinstance(made, Rejected)
    assert made.reason == reason


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from("input_ids prompt_ids response_ids loss_mask labels num_actions attention_mask turns".split()),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=4),
            max_leaves=8,
        ),
    )
)  # fmt: skip
def test_no_record_raises(record: dict[str, Any]) -> None:
    made = _read(record)

    assert isinstance(made, Rejected) or len(made.columns["input_ids"]) == len(made.columns["loss_mask"])


@pytest.mark.parametrize(
    ("groups", "part"),
    [
        ({"truncation": {"overlong": "truncate"}}, "token_cut: allow"),
        ({"truncation": {"overlong": "split"}}, "several examples of one"),
        ({"loss": {"supervise": "last_turn"}}, "does not read this group"),
        ({"template": {"chat_template": "chatml"}}, "does not read this group"),
    ],
)
def test_what_cannot_be_done_to_ids_is_refused(groups: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        load({"kind": "tokens"}, groups=groups)
