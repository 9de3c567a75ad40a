"""Fields of token rows: which tokens a list of numbers is of, and one reason for each bad value."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmill.core.errors import ConfigError
from rowmill.kinds.shared.filters import hash_row_content
from rowmill.recipe import recipe
from rowmill.schema.examples import RolloutFields, find_token_fields, join_fields
from rowmill.schema.rows import Rejected, Row
from rowmill.shards.native import SEQUENCE_SCHEMA, make_sequence_schema

IDS = [5, 6, 7, 8, 9]
PROMPT = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "response_mask": [1, 0, 1]}
MASKED = {"input_ids": IDS, "loss_mask": [0, 0, 1, 0, 1]}
TURNS = {"turns": [{"prompt_token_ids": [5, 6], "generation_token_ids": [7], "logprobs": [-0.5]},
                   {"prompt_token_ids": [5, 6, 7, 8], "generation_token_ids": [9], "logprobs": [-1.5]}]}  # fmt: skip


def _load(options: dict[str, Any], **groups: Any) -> recipe.Recipe:
    dataset = {"source": {"train_urls": ["a.jsonl"]}, "format": {"kind": "tokens", **options}}
    values = {"tokenizer": "t", "seq_len": 64, "datasets": {"rollouts": dataset}, **groups}
    return recipe.parse_recipe(values, name="demo", where="configs/demo.yaml")


def _read(record: Any, **options: Any) -> Row | Rejected:
    dataset = _load(options or {"token_fields": ["logprobs"]}).datasets["rollouts"]
    [row] = dataset.format.open_row_reader(dataset, Path(), "rollouts").read(record, arrow=False)
    return row


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


def test_row_without_a_declared_field_is_noted() -> None:
    fields: dict[str, Any] = {"token_fields": ["logprobs"], "row_fields": ["reward", "group_id"]}
    full = _read(PROMPT | {"logprobs": [1, 2, 3], "reward": 1, "group_id": 7}, **fields)
    bare = _read(PROMPT, **fields)

    assert isinstance(full, Row)
    assert (full.columns["reward"], full.columns["group_id"], full.report.notes) == (1.0, "7", ())
    assert isinstance(bare, Row)
    assert (bare.columns["reward"], bare.columns["group_id"]) == (None, None)
    assert bare.report.notes == ("without_logprobs", "without_reward", "without_group_id")


def test_rows_that_differ_in_a_field_are_not_duplicates() -> None:
    fields: dict[str, Any] = {"token_fields": ["logprobs"], "row_fields": ["reward", "group_id"]}
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
        _load(fields)


def test_row_fields_need_one_attention_span_per_row() -> None:
    opened = {"defaults": {"packing": {"block_cross_document_attention": False}}}

    assert _load({"token_fields": ["logprobs"]}, **opened).rollout_fields.names == ("logprobs",)
    with pytest.raises(ConfigError, match="reward is a field of rows"):
        _load({"row_fields": ["reward"]}, **opened)


@pytest.mark.parametrize(
    "kind", ["skyrl", "verl", "axolotl", "tinker", "llama_factory", "olmo_core", "megatron_bridge"]
)
def test_exports_that_cannot_store_fields_are_refused(kind: str) -> None:
    exports = [{"kind": kind, "name": "out"} | ({"sequence_len": 64} if kind == "axolotl" else {})]

    with pytest.raises(ConfigError, match=r"cannot store logprobs, a field of the rows of datasets\.rollouts"):
        _load({"token_fields": ["logprobs"]}, exports=exports)


def test_columns_of_a_shard_that_are_not_ours_are_fields() -> None:
    fields = join_fields([RolloutFields(("a", "b")), RolloutFields(("b", "c"), ("reward",)), RolloutFields()])
    schema = make_sequence_schema(weighted=True, token_fields=fields.per_token, columns=fields.row_columns)

    assert (fields.per_token, fields.per_row) == (("a", "b", "c"), ("reward",))
    assert find_token_fields(schema.names) == ["a", "b", "c"]
    assert find_token_fields(SEQUENCE_SCHEMA.names) == []
    # A null list would be a sequence without a number for each of its tokens.
    assert not any(schema.field(name).nullable for name in fields.per_token)
