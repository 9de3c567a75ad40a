"""Fields of token rows: which tokens a list of numbers is of, and one reason for each bad value."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rowmill.core.errors import ConfigError
from rowmill.kinds.reading.canonicalization import hash_row_content
from rowmill.recipe import recipe
from rowmill.schema.examples import WEIGHT_COLUMN, RolloutFields, find_token_fields, join_fields
from rowmill.schema.rows import Rejected, Row
from rowmill.shards.native import SEQUENCE_SCHEMA, extend_schema
from tests.support.row_reading import load, read

IDS = [5, 6, 7, 8, 9]
PROMPT = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "response_mask": [1, 0, 1]}
MASKED = {"input_ids": IDS, "loss_mask": [0, 0, 1, 0, 1]}
TURNS = {"turns": [{"prompt_token_ids": [5, 6], "generation_token_ids": [7], "logprobs": [-0.5]},
                   {"prompt_token_ids": [5, 6, 7, 8], "generation_token_ids": [9], "logprobs": [-1.5]}]}  # fmt: skip


def _read(record: Any, **options: Any) -> Row | Rejected:
    return read(record, {"kind": "tokens", **(options or {"token_fields": ["logprobs"]})})


def _values(record: Any) -> list[float]:
    row = _read(record)
    assert isinstance(row, Row), row
    assert row.columns["logprobs"].dtype == np.float32
    return row.columns["logprobs"].tolist()


PLACED: list[tuple[dict[str, Any], list[float]]] = [
    (PROMPT | {"logprobs": [1, 2, 3, 4, 5]}, [1, 2, 3, 4, 5]),
    (PROMPT | {"logprobs": [-0.5, -1.0, -1.5]}, [0, 0, -0.5, -1.0, -1.5]),
    (PROMPT | {"logprobs": [-0.5, -1.5]}, [0, 0, -0.5, 0, -1.5]),
    (MASKED | {"logprobs": [-0.5, -1.5]}, [0, 0, -0.5, 0, -1.5]),
    (MASKED | {"logprobs": [-0.5, -1, -1.5], "response_length": 3}, [0, 0, -0.5, -1.0, -1.5]),
    (MASKED | {"loss_mask": [1, 0, 1], "logprobs": [-0.5, -1, -1.5], "response_length": 3}, [0, 0, -0.5, -1.0, -1.5]),
    ({"input_ids": IDS, "labels": [-100, -100, 7, -100, 9], "logprobs": [-0.5, -1.5]}, [0, 0, -0.5, 0, -1.5]),
    ({"input_ids": IDS, "num_actions": 3, "logprobs": [1, 2, 3]}, [0, 0, 1, 2, 3]),
    (TURNS, [0, 0, -0.5, 0, -1.5]),
    ({"turns": [TURNS["turns"][0] | {"logprobs": None}, TURNS["turns"][1]]}, [0, 0, 0, 0, -1.5]),
    (TURNS | {"turns": [{**turn, "logprobs": None} for turn in TURNS["turns"]], "logprobs": [-0.5, -1.5]},
     [0, 0, -0.5, 0, -1.5]),
    # The first id trains nothing, but has its logprob.
    ({"input_ids": IDS, "loss_mask": [1, 0, 0, 0, 1], "logprobs": [-0.5, -1.5]}, [-0.5, 0, 0, 0, -1.5]),
    # Padding goes with its values.
    ({"input_ids": [0, *IDS, 0], "mask": [0, 0, 0, 1, 0, 1, 0], "attention_mask": [0, 1, 1, 1, 1, 1, 0],
      "logprobs": [9, 1, 2, 3, 4, 5, 9]}, [1, 2, 3, 4, 5]),
    (PROMPT | {"response_ids": [7, 8, 9, 0], "response_mask": [1, 0, 1, 0], "logprobs": [1, 2, 3, 9],
               "attention_mask": [1, 1, 1, 1, 1, 0]}, [0, 0, 1, 2, 3]),
    (PROMPT, [0, 0, 0, 0, 0]),
    (PROMPT | {"logprobs": None}, [0, 0, 0, 0, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("record", "expected"), PLACED, ids=range(len(PLACED)))
def test_values_are_at_the_tokens_that_they_are_of(record: dict[str, Any], expected: list[float]) -> None:
    assert _values(record) == expected


HOSTILE: list[tuple[dict[str, Any], str]] = [
    (PROMPT | {"logprobs": [1, 2, 3, 4]}, "length_mismatch"),
    (PROMPT | {"logprobs": []}, "length_mismatch"),
    (PROMPT | {"logprobs": -0.5}, "bad_field"),
    (PROMPT | {"logprobs": "-0.5"}, "bad_field"),
    (PROMPT | {"logprobs": [-0.5, "1", 2]}, "bad_field"),
    (PROMPT | {"logprobs": [None, -1.0, -1.5]}, "bad_field"),
    (PROMPT | {"logprobs": [True, False, True]}, "bad_field"),
    (PROMPT | {"logprobs": [True, -0.5, -1.0]}, "bad_field"),
    (PROMPT | {"logprobs": [[-0.5], [-1.0], [-1.5]]}, "bad_field"),
    (PROMPT | {"logprobs": [-0.5, float("nan"), -1.5]}, "bad_field"),
    (PROMPT | {"logprobs": [-0.5, float("-inf"), -1.5]}, "bad_field"),
    (PROMPT | {"logprobs": [-0.5, 1e39, -1.5]}, "bad_field"),
    (PROMPT | {"logprobs": [-0.5, 2**70, -1.5]}, "bad_field"),
    ({"turns": [TURNS["turns"][0] | {"logprobs": [1.0, 2.0]}, TURNS["turns"][1]]}, "length_mismatch"),
    # `response_length` that does not hold all trained ids says nothing about the values.
    ({"input_ids": IDS, "loss_mask": [0, 1, 0, 0, 1], "response_length": 3, "logprobs": [1, 2, 3]}, "length_mismatch"),
    (PROMPT | {"reward": "1"}, "bad_field"),
    (PROMPT | {"reward": True}, "bad_field"),
    (PROMPT | {"reward": float("nan")}, "bad_field"),
    (PROMPT | {"reward": 2**2000}, "bad_field"),
    (PROMPT | {"group_id": 1.5}, "bad_field"),
    (PROMPT | {"group_id": ["a"]}, "bad_field"),
]


@pytest.mark.parametrize(("record", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_bad_value_has_one_reason(record: dict[str, Any], reason: str) -> None:
    row = _read(record, token_fields=["logprobs"], row_fields=["reward", "group_id"])

    assert isinstance(row, Rejected)
    assert row.reason == reason


TEACHER = {"teacher_ids": {"type": "int32", "size": 2}, "teacher_logprobs": {"type": "float16", "size": 2},
           "entropy": {"type": "float16", "values": "logprobs"}, "rank": {"type": "int32", "values": "numbers"},
           "teacher_weights": {"size": 2}}  # fmt: skip
LISTS = [[1, 2], [3, 4], [5, 6]]
LISTED: list[tuple[dict[str, Any], str, list[Any], type[np.generic]]] = [
    (PROMPT | {"teacher_ids": LISTS}, "teacher_ids", [[0, 0], [0, 0], *LISTS], np.int32),
    (PROMPT | {"teacher_ids": LISTS[:2]}, "teacher_ids", [[0, 0], [0, 0], [1, 2], [0, 0], [3, 4]], np.int32),
    (PROMPT | {"teacher_logprobs": [[-0.5, -1], [0, -65504], [-1, -2]]}, "teacher_logprobs",
     [[0, 0], [0, 0], [-0.5, -1], [0, -65504], [-1, -2]], np.float16),
    (PROMPT | {"teacher_weights": [[0.5, 1], [2, 3], [4, 5]]}, "teacher_weights",
     [[0, 0], [0, 0], [0.5, 1], [2, 3], [4, 5]], np.float32),
    (PROMPT | {"entropy": [0, -1, -2]}, "entropy", [0, 0, 0, -1, -2], np.float16),
    (PROMPT | {"rank": [-1, 2**31 - 1, 5]}, "rank", [0, 0, -1, 2**31 - 1, 5], np.int32),
    (PROMPT, "teacher_ids", [[0, 0]] * 5, np.int32),
    ({"turns": [TURNS["turns"][0] | {"teacher_ids": [[1, 2]]}, TURNS["turns"][1]]}, "teacher_ids",
     [[0, 0], [0, 0], [1, 2], [0, 0], [0, 0]], np.int32),
    ({"input_ids": [0, *IDS, 0], "mask": [0, 0, 0, 1, 0, 1, 0], "attention_mask": [0, 1, 1, 1, 1, 1, 0],
      "teacher_ids": [[9, 9], *[[1, 2]] * 5, [9, 9]]}, "teacher_ids", [[1, 2]] * 5, np.int32),
]  # fmt: skip


@pytest.mark.parametrize(("record", "name", "expected", "dtype"), LISTED, ids=range(len(LISTED)))
def test_lists_of_a_size_are_at_the_tokens_that_they_are_of(
    record: dict[str, Any], name: str, expected: list[Any], dtype: type[np.generic]
) -> None:
    row = _read(record, token_fields=TEACHER)

    assert isinstance(row, Row), row
    assert row.columns[name].dtype == dtype
    assert row.columns[name].tolist() == expected


BAD_LISTS: list[tuple[dict[str, Any], str]] = [
    ({"teacher_ids": LISTS[:1]}, "length_mismatch: teacher_ids has 1 values, expected 5 or 3 or 2"),
    ({"teacher_ids": [[1, 2], [3], [5, 6]]}, "length_mismatch: teacher_ids has 1 at 1, expected 2"),
    ({"teacher_ids": [[1, 2, 3]] * 3}, "length_mismatch: teacher_ids has 3 at 0, expected 2"),
    ({"teacher_ids": [1, 2, 3]}, "bad_field: teacher_ids is an integer at 0, expected a list of 2 integers"),
    ({"teacher_ids": [None, [1, 2], [3, 4]]}, "bad_field: teacher_ids is null at 0, expected a list of 2 integers"),
    ({"teacher_ids": 7}, "bad_field: teacher_ids is an integer, expected lists of 2 integers"),
    ({"teacher_ids": [[1, 2.5], [3, 4], [5, 6]]}, "bad_field: teacher_ids is a list, expected lists of 2 integers"),
    ({"teacher_ids": [[1, True], [3, 4], [5, 6]]}, "bad_field: teacher_ids is a list, expected lists of 2 integers"),
    ({"teacher_ids": [[1, None], [3, 4], [5, 6]]}, "bad_field: teacher_ids is a list, expected lists of 2 integers"),
    ({"teacher_ids": [[1, 2], [3, -1], [5, 6]]}, "bad_field: teacher_ids is -1 at 1, expected the id of a token"),
    ({"teacher_ids": [[1, 2], [3, 2**31], [5, 6]]},
     "bad_field: teacher_ids is 2147483648 at 1, expected the id of a token"),
    ({"teacher_logprobs": [[-1, -2], [0.25, -1], [-1, -2]]},
     "bad_field: teacher_logprobs is 0.25 at 1, expected a finite float16, at most 0"),
    ({"teacher_logprobs": [[-1, -2], [-1, float("nan")], [-1, -2]]},
     "bad_field: teacher_logprobs is nan at 1, expected a finite float16, at most 0"),
    ({"teacher_logprobs": [[-1, -2], [-1, -65536], [-1, -2]]},
     "bad_field: teacher_logprobs is -65536 at 1, expected a finite float16, at most 0"),
    ({"teacher_logprobs": [["-1", -2], [-1, -2], [-1, -2]]},
     "bad_field: teacher_logprobs is a list, expected lists of 2 numbers"),
    ({"entropy": [-1, 0.5, 0]}, "bad_field: entropy is 0.5 at 1, expected a finite float16, at most 0"),
    ({"rank": [1, 2, -(2**31) - 1]}, f"bad_field: rank is {-(2**31) - 1} at 2, expected a finite int32"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), BAD_LISTS, ids=range(len(BAD_LISTS)))
def test_bad_list_of_a_size_has_one_reason(fields: dict[str, Any], expected: str) -> None:
    row = _read(PROMPT | fields, token_fields=TEACHER)

    assert isinstance(row, Rejected)
    assert f"{row.reason}: {row.detail}" == expected


def test_row_without_a_declared_field_is_noted_and_rows_that_differ_in_one_are_no_duplicates() -> None:
    fields: dict[str, Any] = {"token_fields": ["logprobs"], "row_fields": ["reward", "group_id"]}
    full = _read(PROMPT | {"logprobs": [1, 2, 3], "reward": 1, "group_id": 7}, **fields)
    bare = _read(PROMPT, **fields)

    assert isinstance(full, Row)
    assert (full.columns["reward"], full.columns["group_id"], full.report.notes) == (1.0, "7", ())
    assert isinstance(bare, Row)
    assert (bare.columns["reward"], bare.columns["group_id"]) == (None, None)
    assert bare.report.notes == ("without_logprobs", "without_reward", "without_group_id")

    values = [([1, 2, 3], 1.0), ([1, 2, 4], 1.0), ([1, 2, 3], 0.0), ([1, 2, 3], 1.0)]
    some = [PROMPT | {"logprobs": logprobs, "reward": reward} for logprobs, reward in values]
    rows = [row for record in some if isinstance(row := _read(record, **fields), Row)]
    plain = _read(PROMPT | {"logprobs": [1, 2, 3]}, ids_fields=["input_ids"])

    hashes = [hash_row_content(row) for row in rows]
    assert (len(hashes), len(set(hashes)), hashes[0]) == (4, 3, hashes[3])
    assert isinstance(plain, Row)
    assert hash_row_content(plain) == hash_row_content(
        replace(rows[0], columns={name: rows[0].columns[name] for name in ("input_ids", "loss_mask")})
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_fields": ["input_ids"]}, "is a name of rowmill's own columns and batches"),
        ({"token_fields": ["seq_idx"]}, "is a name of rowmill's own columns and batches"),
        ({"token_fields": ["reward"]}, "is a name of rowmill's own columns and batches"),
        ({"token_fields": ["log probs"]}, "cannot name a column of the shards"),
        ({"token_fields": ["logprobs", "logprobs"]}, "is listed twice"),
        ({"row_fields": ["score"]}, "must be reward or group_id"),
    ],
)
def test_wrong_fields_are_refused_when_the_recipe_is_loaded(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({"kind": "tokens"} | fields)


def test_row_fields_need_one_attention_span_per_row() -> None:
    opened = {"defaults": {"packing": {"block_cross_document_attention": False}}}

    assert load({"kind": "tokens"} | {"token_fields": ["logprobs"]}, **opened).rollout_fields.names == ("logprobs",)
    with pytest.raises(ConfigError, match="reward is a field of rows"):
        load({"kind": "tokens"} | {"row_fields": ["reward"]}, **opened)


@pytest.mark.parametrize(
    "kind", ["skyrl", "verl", "axolotl", "tinker", "llama_factory", "olmo_core", "megatron_bridge"]
)
def test_exports_that_cannot_store_fields_are_refused(kind: str) -> None:
    exports = [{"kind": kind, "name": "out"} | ({"sequence_len": 64} if kind == "axolotl" else {})]

    said = r"exports\.out: kind \w+ cannot store logprobs, a field of the rows of datasets\.rows.* native and hf can"
    with pytest.raises(ConfigError, match=said):
        load({"kind": "tokens", "token_fields": ["logprobs"]}, exports=exports)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"type": "int64"}, "a.type: must be float32, float16 or int32; got 'int64'"),
        ({"size": 0}, "a.size: input should be greater than or equal to 1; got 0"),
        ({"length": 8}, "a.length: unknown key; allowed here: size, type or values"),
        ({"type": "int32", "values": "logprobs"}, "a: values: logprobs of type int32; token_ids are int32"),
        ({"values": "token_ids"}, "a: values: token_ids of type float32; token_ids are int32, logprobs are"),
    ],
)  # fmt: skip
def test_bad_declaration_of_a_field_is_told(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"datasets.rows.format.token_fields.{message}")):
        load({"kind": "tokens", "token_fields": {"a": declared}})


def test_field_of_another_size_in_another_dataset_is_refused() -> None:
    dataset = {"source": {"train_urls": ["b.jsonl"]}, "format": {"kind": "tokens", "token_fields": {"a": {"size": 2}}}}
    rollouts = {"source": {"train_urls": ["a.jsonl"]}, "format": {"kind": "tokens", "token_fields": ["a"]}}

    with pytest.raises(
        ConfigError, match=r"datasets\.more\.format\.token_fields: a is .*\[2\], and float in datasets\.r"
    ):
        recipe.parse_recipe(
            {"tokenizer": "t", "seq_len": 64, "datasets": {"rollouts": rollouts, "more": dataset}},
            name="demo",
            where="configs/demo.yaml",
        )


def test_only_types_other_than_float32_change_the_identity_and_foreign_columns_are_fields() -> None:
    plain = load({"kind": "tokens", "token_fields": ["a"], "row_fields": ["reward"]}).rollout_fields
    same = load({"kind": "tokens", "token_fields": {"a": {}}, "row_fields": ["reward"]}).rollout_fields
    lists = load({"kind": "tokens", "token_fields": {"a": {"size": 2}}, "row_fields": ["reward"]}).rollout_fields

    assert plain.describe() == same.describe() == [["a"], ["reward"]]
    assert lists.describe() == [["a"], ["reward"], ["a", "fixed_size_list<item: float>[2]"]]

    number = pa.float32()
    several = RolloutFields({"a": number, "b": number}), RolloutFields({"b": number, "c": number}, ("reward",))
    fields = join_fields({"one": several[0], "other": several[1], "none": RolloutFields()})
    types = {WEIGHT_COLUMN: number, **fields.per_token}
    schema = extend_schema(SEQUENCE_SCHEMA, types, fields.row_columns)

    assert (tuple(fields.per_token), fields.per_row) == (("a", "b", "c"), ("reward",))
    assert find_token_fields(schema.names) == ["a", "b", "c"]
    assert find_token_fields(SEQUENCE_SCHEMA.names) == []
    # A null list would be a sequence without a number for each of its tokens.
    assert not any(schema.field(name).nullable for name in fields.per_token)
