"""Reading a recipe: defaults, groups, aliases, and errors that say where, what, what was allowed, what to do."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import ConfigError
from rowmill.kinds.base import OPTION_GROUPS
from rowmill.kinds.catalog import Chat, Text
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Dataset, Recipe

SOURCE = {"train_urls": ["a.jsonl"]}


def _parse(dataset: "dict[str, Any] | None" = None, **top: Any) -> Recipe:
    values = {"tokenizer": "t", "seq_len": 64, "datasets": {"a": {"source": SOURCE, **(dataset or {})}}, **top}
    return recipe.parse_recipe(values, name="demo", where="configs/demo.yaml")


def _refusal(dataset: "dict[str, Any] | None" = None, **top: Any) -> str:
    with pytest.raises(ConfigError) as refusal:
        _parse(dataset, **top)
    return str(refusal.value)


def test_defaults_fill_what_a_dataset_leaves_out_and_its_own_value_wins() -> None:
    defaults = {"splits": {"validation": 0.2, "seed": 3}, "truncation": {"max_length": 32}}

    parsed = _parse({"splits": {"validation": 0.1}}, defaults=defaults)
    assert (parsed.datasets["a"].splits.validation, parsed.datasets["a"].splits.seed) == (0.1, 3)
    assert parsed.limit_of("a") == 32


def test_defaults_of_a_group_that_a_kind_does_not_read_leave_it_alone() -> None:
    parsed = _parse({"format": {"kind": "text"}}, defaults={"loss": {"supervise": "last_assistant"}})
    assert parsed.datasets["a"].loss.supervise == "all_assistant"


def test_options_under_format_move_to_their_group() -> None:
    options = {"supervise": "last_assistant", "overlong": "drop", "think_mode": "drop"}
    dataset = _parse({"format": {"kind": "chat", **options}}).datasets["a"]
    assert dataset.loss.supervise == "last_assistant"
    assert (dataset.truncation.overlong, dataset.reasoning.think_mode) == ("drop", "drop")


def test_an_option_in_format_and_in_its_group_is_refused() -> None:
    text = _refusal({"format": {"kind": "chat", "overlong": "drop"}, "truncation": {"overlong": "drop"}})

    assert text == (
        "configs/demo.yaml: datasets.a: overlong is set in format and in truncation; only one is allowed; "
        "delete it from format"
    )


@pytest.mark.parametrize(
    ("dataset", "top", "expected"),
    [
        ({"format": {"kind": "chatt"}}, {},
         "configs/demo.yaml: datasets.a.format: 'chatt' is not a kind; choose chat, "),
        ({"format": {"kind": "chat", "mesages_field": "m"}}, {},
         "datasets.a.format.mesages_field: unknown key; allowed here: "),
        ({"format": {"kind": "chatt"}}, {}, "; did you mean chat?"),
        ({"truncation": {"overlong": "trunkate"}}, {}, "got 'trunkate'; did you mean truncate?"),
        ({}, {"exports": [{"kind": "axolot", "name": "a"}]}, "exports.0: 'axolot' is not a kind; choose native, "),
        ({}, {"exports": [{"kind": "axolot", "name": "a"}]}, "; did you mean axolotl?"),
        ({}, {"exports": {"kind": "axolotl", "name": "a", "split": "train"}},
         ("exports: must be a list; got {'kind': 'axolotl', 'name': 'a', 'split': 'train'}, which is a mapping; "
         "write a list of it: [{kind: axolotl, name: a, …}]")),
        ({}, {"exports": "axolotl"}, "which is a string; write a list: [{kind: axolotl}]"),
        ({}, {"gates": {"rejects": 0.1}},
         "gates.rejects: must be a mapping; got 0.1, which is a number; write {at_least: 0.1} or {at_most: 0.1}"),
        ({}, {"gates": {"rejects": {"at_most": 0.1, "severity": "err"}}},
         "gates.rejects.severity: must be error or warn; got 'err'; did you mean error?"),
        ({}, {"gates": {"unknown_rols": {"at_most": 0.1}}}, "; did you mean unknown_roles?"),
        ({"truncation": {"overlong": "cut"}}, {},
         "datasets.a.truncation.overlong: must be truncate, drop, split, raise or keep; got 'cut'"),
        ({"truncation": {"max_length": True}}, {}, "datasets.a.truncation.max_length: must be an integer; got True"),
        ({"truncation": {"max_length": 128}}, {},
         "datasets.a.truncation.max_length is 128, seq_len 64 is the most allowed; lower it"),
        ({"source": {"train_urls": "a.jsonl"}}, {},
         "datasets.a.source.train_urls: must be a list; got 'a.jsonl', which is a string"),
        ({"format": {"kind": "text"}, "loss": {}}, {},
         "datasets.a.loss: a text dataset does not read this group"),
        ({"format": {"kind": "text"}, "template": {"turns": "whole"}}, {},
         "datasets.a.template.turns: a text dataset does not read this option; of template it reads control_tokens"),
        ({}, {"sed": 1}, "configs/demo.yaml: sed: unknown key; allowed here: "),
        ({}, {"seq_len": 1}, "seq_len: input should be greater than or equal to 2"),
        ({}, {"defaults": {"trunc": {}}}, "defaults.trunc: unknown group; allowed: reasoning, "),
        ({}, {"mixture": {"train_weights": {"b": 1},
         "steps": 4, "batch_size": 2}}, "mixture.train_weights: 'b' is not a dataset; choose a"),
        ({}, {"gates": {"waivers": [
            {"check": "rejects", "dataset": "b", "at_most": 1, "reason": "known and counted"}]}},
         "gates.waivers: 'b' is not a dataset; choose a"),
        ({}, {"datasets": {"../x": {"source": SOURCE}}}, "datasets.../x: '../x' cannot be a name"),
        ({}, {"cache_dir": "gs://b/c"}, "demo.yaml: cache_dir: a recipe holds only options that affect the output"),
        ({"cache_dir": "gs://b/c"}, {}, "datasets.a: cache_dir: a recipe holds only options that affect the output"),
        ({}, {"datasets": {}}, "datasets: dictionary should have at least 1 item"),
        ({}, {"name": "x"}, "name: the file's name is the recipe's name"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_in_four_parts(dataset: dict[str, Any], top: dict[str, Any], expected: str) -> None:
    assert expected in _refusal(dataset, **top)


def test_a_mistyped_key_is_reported_before_the_option_that_it_leaves_missing() -> None:
    values = {"tokenizer": "t", "seq_lenn": 64, "datasets": {"a": {"source": SOURCE}}}
    with pytest.raises(ConfigError) as refusal:
        recipe.parse_recipe(values, name="demo", where="demo.yaml")

    first, second = str(refusal.value).splitlines()
    assert first.startswith("demo.yaml: seq_lenn: unknown key; allowed here: ")
    assert first.endswith("; did you mean seq_len?")
    assert second == "demo.yaml: seq_len: is missing and has no default; add it"


STEPS = {"batch_size": 4, "steps": 2}


@pytest.mark.parametrize(
    ("dataset", "top", "expected"),
    [
        ({}, {"mixture": STEPS | {"train_weights": {"a": -1}}},
         "mixture.train_weights.a: -1 is not a weight; expected a decimal of at least 0; write for example 0.3"),
        ({}, {"mixture": STEPS | {"train_weights": [[0, {"a": "x"}]]}},
         "mixture.train_weights.0.1.a: 'x' is not a weight; expected a decimal of at least 0; write for example 0.3"),
        ({}, {"mixture": STEPS | {"train_weights": {"a": float("nan")}}},
         ("mixture.train_weights.a: .nan is not a finite number; an option takes finite numbers; "
          "write one")),
        ({"splits": {"validation": float("-inf")}}, {},
         ("datasets.a.splits.validation: -.inf is not a finite number; an option takes finite numbers; "
         "write one")),
        ({}, {"mixture": {"shuffle": {"io_block": 3}}},
         ("mixture.shuffle.io_block: unknown key; allowed here: io_block_size or window_blocks; did you mean "
         "io_block_size?")),
        ({}, {"mixture": {"shuffle": "no"}},
         ("mixture.shuffle: must be true or false; got 'no', which is a string; write true or false; or must be an "
         "integer; got 'no', which is a string; write an integer; or must be a mapping; got 'no', which is a string; "
         "write a mapping")),
        ({}, {"mixture": {"batch_size": 3}, "partitions": {"world_size": 2}},
         ("partitions.world_size: 2 does not divide batch_size 3; every rank must get the same number of "
          "sequences of a step; choose 1 or 3, or another batch_size")),
        ({}, {"mixture": {"batch_size": [[0, 4], [10, 6]]}, "partitions": {"world_size": 4}},
         ("partitions.world_size: 4 does not divide batch_size 4 or 6; every rank must get the same number of "
          "sequences of a step; choose 1 or 2, or another batch_size")),
        ({"packing": {"pack_strategy": "concat"}}, {},
         ("datasets.a: packing.pack_strategy: concat for rows of kind conversation; concat cuts examples anywhere, "
         "so it is only allowed for text; choose best_fit or greedy")),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_about_what_was_written(
    dataset: dict[str, Any], top: dict[str, Any], expected: str
) -> None:
    assert _refusal(dataset, **top) == f"configs/demo.yaml: {expected}"


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ({"format": {"kind": "chat"}, "filters": {"min_chars": 3}},
         ("datasets.a.filters.min_chars: a chat dataset does not read this option; of filters it reads decontaminate, "
         "deduplicate, leave_out, max_items or near_duplicates; delete it")),
        ({"format": {"kind": "chat", "min_chars": 3}}, "datasets.a.filters.min_chars: a chat dataset does not read"),
        ({"format": {"kind": "supervised"}, "loss": {"think_loss": "answer_only"}},
         "datasets.a.loss.think_loss: a supervised dataset does not read this option"),
        ({"format": {"kind": "text"}, "truncation": {"token_cut": "reject"}},
         "datasets.a.truncation.token_cut: a text dataset does not read this option"),
        ({"format": {"kind": "supervised"}, "truncation": {"overlong": "split"}},
         "datasets.a: truncation.overlong: split cannot be done to a pair"),
        ({"format": {"kind": "supervised"}, "loss": {"mask": {"user": "train"}}},
         "datasets.a: loss.mask: 'user' does not occur in the rows of a supervised dataset; allowed are prompt"),
        ({"format": {"kind": "chat"}, "loss": {"mask": {"assistant": "train", "prompt": "train"}}},
         "datasets.a: loss.mask: 'prompt' does not occur in the rows of a chat dataset; allowed are roles"),
    ],
)  # fmt: skip
def test_an_option_that_the_kind_would_ignore_is_refused(dataset: dict[str, Any], expected: str) -> None:
    assert expected in _refusal(dataset)


def test_a_mask_may_name_the_sides_of_a_pair_and_roles_called_so() -> None:
    sides = _parse({"format": {"kind": "supervised"}, "loss": {"mask": {"prompt": "train", "response": "mask"}}})
    roles = _parse({"format": {"kind": "chat", "role_map": {"p": "prompt"}}, "loss": {"mask": {"prompt": "train"}}})
    assert sides.datasets["a"].loss.mask["prompt"] == roles.datasets["a"].loss.mask["prompt"] == "train"


def test_defaults_leave_out_what_a_kind_does_not_read() -> None:
    defaults = {"filters": {"min_chars": 50, "max_items": 9}, "truncation": {"token_cut": "reject"}}

    chat = _parse({"format": {"kind": "chat"}}, defaults=defaults).datasets["a"]
    text = _parse({"format": {"kind": "text"}}, defaults=defaults).datasets["a"]

    assert (chat.filters.min_chars, chat.filters.max_items, chat.truncation.token_cut) == (0, 9, "reject")
    assert (text.filters.min_chars, text.filters.max_items, text.truncation.token_cut) == (50, 9, "allow")


def test_defaults_of_the_format_reach_the_kinds_that_have_them() -> None:
    defaults = {"format": {"kind": "text", "add_eos": False, "messages_key": "dialog"}}

    text = _parse(defaults=defaults).datasets["a"].format
    chat = _parse({"format": {"kind": "chat"}}, defaults=defaults).datasets["a"].format

    assert isinstance(text, Text)
    assert text.add_eos is False
    assert isinstance(chat, Chat)
    assert chat.messages_field == "dialog"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"mesages_field": "m"}, "defaults.format.mesages_field: no kind of format has this option; allowed: "),
        ({"mesages_field": "m"}, "did you mean messages_field?"),
        ({"max_length": 8}, "write it under defaults.truncation"),
    ],
)
def test_defaults_of_the_format_that_no_kind_has_are_refused(values: dict[str, Any], expected: str) -> None:
    assert expected in _refusal(defaults={"format": values})


def test_several_mistakes_are_reported_together() -> None:
    text = _refusal({"truncation": {"overlong": "cut"}, "filters": {"max_item": 3}}, seed="x")
    assert len(text.splitlines()) == 3
    assert "did you mean max_items?" in text


def test_load_of_a_key_given_twice_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text("tokenizer: a\nseq_len: 8\ntokenizer: b\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3: key 'tokenizer' is given twice"):
        recipe.load_recipe(path)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"\xff\xfe", "not UTF-8"), (b"- a\n", "top level is a list"), (b"a: [", "not YAML")]
)
def test_load_of_another_file_says_what_it_is(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "demo.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        recipe.load_recipe(path)


def test_recipes_of_a_mounted_config_map_are_found_once(tmp_path: Path) -> None:
    (tmp_path / "..2027_01").mkdir()
    (tmp_path / "..2027_01/chat.yaml").touch()
    (tmp_path / "..data").symlink_to("..2027_01")
    (tmp_path / "chat.yaml").symlink_to("..data/chat.yaml")

    assert recipe.find_recipes(tmp_path) == [tmp_path / "chat.yaml"]


def test_recipe_survives_its_own_dump() -> None:
    parsed = _parse({"format": {"kind": "chat"}}, gates={"rejects": {"at_most": 0.2}})
    again = Recipe.model_validate_json(parsed.model_dump_json())
    assert again == parsed


def test_every_group_of_a_dataset_is_listed() -> None:
    assert set(OPTION_GROUPS) == set(Dataset.model_fields) - {"source", "format", "teacher"}
