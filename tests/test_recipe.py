"""Reading a recipe: defaults, groups, aliases, and errors that say where, what, what was allowed, what to do."""

from pathlib import Path
from typing import Any

import pytest

from pipelines import recipe
from pipelines.errors import ConfigError
from pipelines.recipe import Recipe

SOURCE = {"train_urls": ["a.jsonl"]}


def _parse(dataset: "dict[str, Any] | None" = None, **top: Any) -> Recipe:
    values = {"tokenizer": "t", "seq_len": 64, "datasets": {"a": {"source": SOURCE, **(dataset or {})}}, **top}
    return recipe.parse(values, name="demo", where="configs/demo.yaml")


def _refusal(dataset: "dict[str, Any] | None" = None, **top: Any) -> str:
    with pytest.raises(ConfigError) as refusal:
        _parse(dataset, **top)
    return str(refusal.value)


def test_defaults_fill_what_a_dataset_leaves_out_and_its_own_value_wins() -> None:
    defaults = {"splits": {"validation": 0.2, "seed": 3}, "truncation": {"max_length": 32}}

    parsed = _parse({"splits": {"validation": 0.1}}, defaults=defaults)

    assert parsed.datasets["a"].splits.validation == 0.1
    assert parsed.datasets["a"].splits.seed == 3
    assert parsed.limit_of("a") == 32


def test_defaults_of_a_group_that_a_kind_does_not_read_leave_it_alone() -> None:
    parsed = _parse({"format": {"kind": "text"}}, defaults={"loss": {"supervise": "last_assistant"}})

    assert parsed.datasets["a"].loss.supervise == "all_assistant"


def test_options_under_format_move_to_their_group() -> None:
    parsed = _parse(
        {"format": {"kind": "chat", "supervise": "last_assistant", "overlong": "drop", "think_mode": "drop"}}
    )

    dataset = parsed.datasets["a"]
    assert (dataset.loss.supervise, dataset.truncation.overlong, dataset.reasoning.think_mode) == (
        "last_assistant",
        "drop",
        "drop",
    )


def test_an_option_in_format_and_in_its_group_is_refused() -> None:
    text = _refusal({"format": {"kind": "chat", "overlong": "drop"}, "truncation": {"overlong": "drop"}})

    assert text == (
        "configs/demo.yaml: datasets.a: overlong stands in format and in truncation; once is allowed; "
        "delete it from format"
    )


@pytest.mark.parametrize(
    ("dataset", "top", "expected"),
    [
        ({"format": {"kind": "chatt"}}, {},
         "configs/demo.yaml: datasets.a.format: 'chatt' is not a kind; choose chat, "),
        ({"format": {"kind": "chat", "mesages_field": "m"}}, {},
         "datasets.a.format.mesages_field: unknown key; allowed here: "),
        ({"truncation": {"overlong": "cut"}}, {},
         "datasets.a.truncation.overlong: must be truncate, drop, split, raise or keep; got 'cut'"),
        ({"truncation": {"max_length": True}}, {}, "datasets.a.truncation.max_length: must be an integer; got True"),
        ({"truncation": {"max_length": 128}}, {},
         "datasets.a.truncation.max_length is 128, seq_len 64 is the most allowed; lower it"),
        ({"source": {"train_urls": "a.jsonl"}}, {},
         "datasets.a.source.train_urls: must be a list; got 'a.jsonl', which is a string"),
        ({"format": {"kind": "text"}, "template": {}}, {},
         "datasets.a.template: a text dataset does not read this group"),
        ({"loss": {"weights": True}}, {}, "datasets.a.loss.weights: true is not built yet"),
        ({}, {"sed": 1}, "configs/demo.yaml: sed: unknown key; allowed here: "),
        ({}, {"seq_len": 1}, "seq_len: input should be greater than or equal to 2"),
        ({}, {"defaults": {"trunc": {}}}, "defaults.trunc: unknown group; allowed: reasoning, "),
        ({}, {"mixture": {"train_weights": {"b": 1},
         "steps": 4, "batch_size": 2}}, "mixture.train_weights: 'b' is no dataset; choose a"),
        ({}, {"datasets": {"../x": {"source": SOURCE}}}, "datasets.../x: '../x' cannot be a name"),
        ({}, {"datasets": {}}, "datasets: dictionary should have at least 1 item"),
        ({}, {"name": "x"}, "name: the file's name is the recipe's name"),
    ],
)  # fmt: skip
def test_a_mistake_is_worded_in_four_parts(dataset: dict[str, Any], top: dict[str, Any], expected: str) -> None:
    assert expected in _refusal(dataset, **top)


def test_several_mistakes_are_told_at_once() -> None:
    text = _refusal({"truncation": {"overlong": "cut"}, "filters": {"max_item": 3}}, seed="x")

    assert len(text.splitlines()) == 3
    assert "did you mean max_items?" in text


def test_load_of_a_key_given_twice_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text("tokenizer: a\nseq_len: 8\ntokenizer: b\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="line 3: key 'tokenizer' is given twice"):
        recipe.load(path)


@pytest.mark.parametrize(
    ("content", "expected"), [(b"\xff\xfe", "not UTF-8"), (b"- a\n", "top level is a list"), (b"a: [", "not YAML")]
)
def test_load_of_what_is_no_recipe_says_what_it_is(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "demo.yaml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=expected):
        recipe.load(path)


def test_recipe_survives_its_own_dump() -> None:
    parsed = _parse({"format": {"kind": "chat"}}, gates={"rejects": {"at_most": 0.2}})

    again = Recipe.model_validate_json(parsed.model_dump_json())

    assert again == parsed


def test_every_group_of_a_dataset_is_listed() -> None:
    assert set(recipe.GROUPS) == set(recipe.Dataset.model_fields) - {"source", "format"}
    assert all(groups <= set(recipe.GROUPS) for groups in recipe.GROUPS_READ.values())
