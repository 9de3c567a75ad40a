"""The table of a dataset's options, one line each: its group, its default, and a value that it refuses."""

from typing import Any

import pytest

from rowmill.core.errors import ConfigError
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Dataset

SOURCE = {"train_urls": ["a.jsonl"]}
CHAT, PAIR, TEXT = "chat", "supervised", "text"

TABLE: list[tuple[str, str, str, Any, Any]] = [
    # kind, group, option, default, a value that it refuses
    (CHAT, "format", "dataset_schema", "auto", "openai"),
    (CHAT, "format", "messages_field", "messages", ["messages"]),
    (CHAT, "format", "prompt_fields",
     ["prompt", "question", "instruction", "query", "problem", "input", "inputs"], "prompt"),
    (CHAT, "format", "response_fields",
     ["response", "completion", "answer", "output", "outputs", "targets", "target", "solution"], "response"),
    (CHAT, "format", "role_map", {}, ["human"]),
    (CHAT, "format", "unknown_roles", "warn", "drop"),
    (CHAT, "format", "system_prompt", None, 3),
    (CHAT, "format", "on_existing_system", "merge", "append"),
    (CHAT, "format", "single_turn", False, 1),
    (CHAT, "format", "assistant_roles", ["assistant"], "assistant"),
    (CHAT, "format", "message_flags", ["train", "training", "weight", "loss", "loss_weight"], "weight"),
    (CHAT, "format", "domain_key", None, ["source"]),
    (CHAT, "format", "add_bos", "auto", "yes"),
    (CHAT, "reasoning", "reasoning_keys",
     ["reasoning", "reasoning_content", "thinking", "reason", "reasoning_details", "thinking_blocks", "think",
      "thought"], "thinking"),
    (CHAT, "reasoning", "extract_think_tags", True, "yes"),
    (CHAT, "reasoning", "think_tags", [["<think>", "</think>"]], ["<think>", "</think>"]),
    (CHAT, "reasoning", "think_mode", "auto", "strip"),
    (CHAT, "reasoning", "think_max_tokens", 0, -1),
    (CHAT, "reasoning", "think_role", "think", True),
    (CHAT, "tools", "tools_fields", ["tools", "tool_schemas", "functions", "function_schemas"], "tools"),
    (CHAT, "tools", "arguments", "auto", "json"),
    (CHAT, "tools", "tool_ids", "auto", "drop"),
    (CHAT, "template", "chat_template", None, 3),
    (CHAT, "template", "template_kwargs", {}, "x"),
    (CHAT, "template", "chat_template_kwargs", "chat_template_kwargs", ["kwargs"]),
    (CHAT, "template", "template_now", "2025-01-01T00:00:00", "today"),
    (CHAT, "template", "enable_thinking", None, "no"),
    (CHAT, "template", "turns", "whole", "turn"),
    (CHAT, "template", "spans", "auto", "prefix"),
    (CHAT, "template", "control_tokens", "as_text", "keep"),
    (CHAT, "template", "on_dropped", {}, {"reasoning": "ignore"}),
    (CHAT, "template", "verify_render", 0.02, 1.5),
    (CHAT, "loss", "mask", {}, {"user": "yes"}),
    (CHAT, "loss", "mask_default", "mask", "keep"),
    (CHAT, "loss", "mask_user_turns", True, "false"),
    (CHAT, "loss", "mask_inputs", True, 0),
    (CHAT, "loss", "supervise", "all_assistant", "assistant"),
    (CHAT, "loss", "think_loss", "all", "none"),
    (CHAT, "loss", "lead", None, "keep"),
    (CHAT, "loss", "end_of_turn", None, "keep"),
    (CHAT, "loss", "trailing", None, "keep"),
    (CHAT, "loss", "finish", "auto", 3),
    (CHAT, "loss", "boundary", None, "merge"),
    (CHAT, "loss", "weights", False, "true"),
    (CHAT, "truncation", "max_length", None, 1),
    (CHAT, "truncation", "overlong", None, "cut"),
    (CHAT, "truncation", "truncate_side", "left", "middle"),
    (CHAT, "truncation", "token_cut", "allow", "forbid"),
    (CHAT, "filters", "deduplicate", "exact", "fuzzy"),
    (CHAT, "filters", "max_items", None, 0),
    (PAIR, "format", "input_field", "prompt", ["prompt"]),
    (PAIR, "format", "output_field", "response", 3),
    (PAIR, "format", "separate_with", None, True),
    (PAIR, "format", "add_eos", "auto", 1),
    (TEXT, "format", "text_key", "text", 3),
    (TEXT, "filters", "min_chars", 0, -1),
    (TEXT, "filters", "max_chars", None, "2000000"),
]  # fmt: skip
LINES = pytest.mark.parametrize(("kind", "group", "option", "default", "wrong"), TABLE)


def dataset(kind: str, **groups: Any) -> Dataset:
    form = {"kind": kind, **groups.pop("format", {})}
    values = {"tokenizer": "t", "seq_len": 64, "datasets": {"a": {"source": SOURCE, "format": form, **groups}}}
    return recipe.parse_recipe(values, name="demo", where="demo.yaml").datasets["a"]


@LINES
def test_option_is_in_its_group_with_its_default(kind: str, group: str, option: str, default: Any, wrong: Any) -> None:
    value = getattr(getattr(dataset(kind), group), option)
    assert value == default
    assert type(value) is type(default)


@LINES
def test_option_refuses_a_wrong_value_and_says_where(
    kind: str, group: str, option: str, default: Any, wrong: Any
) -> None:
    with pytest.raises(ConfigError) as refusal:
        dataset(kind, **{group: {option: wrong}})
    assert str(refusal.value).startswith("demo.yaml: datasets.a")
    assert option in str(refusal.value).partition(";")[0]


@LINES
def test_option_may_be_written_under_format(kind: str, group: str, option: str, default: Any, wrong: Any) -> None:
    choices = {"truncation": "drop", "boundary": "whole", "lead": "train", "end_of_turn": "mask", "trailing": "train"}
    value = default if default is not None else choices.get(group, choices.get(option))
    if option == "max_length":
        value = 32
    if value is None or group == "format" or (option, value) == ("boundary", "whole"):
        value = default
    assert getattr(getattr(dataset(kind, format={option: value}), group), option) == value


@LINES
def test_option_mistyped_names_the_nearest(kind: str, group: str, option: str, default: Any, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key; allowed here: .*; did you mean {option}\?"):
        dataset(kind, **{group: {option[:-1] + "_" + option[-1]: default}})


@pytest.mark.parametrize(
    ("kind", "alias", "group", "option", "value", "meant"),
    [
        (CHAT, "messages_key", "format", "messages_field", "m", "m"),
        (PAIR, "prompt_key", "format", "input_field", "p", "p"),
        (PAIR, "input_key", "format", "input_field", "p", "p"),
        (PAIR, "response_key", "format", "output_field", "r", "r"),
        (PAIR, "target_key", "format", "output_field", "r", "r"),
        (CHAT, "max_seq_len", "truncation", "max_length", 32, 32),
        (TEXT, "enforce_eos", "format", "add_eos", True, "auto"),
        (TEXT, "enforce_eos", "format", "add_eos", False, False),
    ],
)
def test_alias_means_its_option_and_both_are_an_error(
    kind: str, alias: str, group: str, option: str, value: Any, meant: Any
) -> None:
    assert getattr(getattr(dataset(kind, format={alias: value}), group), option) == meant
    both = {group: {option: meant, alias: value}} if group == "format" else {group: {option: meant}}
    with pytest.raises(ConfigError):
        dataset(kind, **{"format": {alias: value}, **both})


@pytest.mark.parametrize(
    ("groups", "kind"),
    [
        ({"format": {"type": "instruction"}}, "supervised"),
        ({"format": {"type": "chat"}}, "chat"),
        ({"format": {"type": "text"}}, "text"),
        ({}, "auto"),
    ],
)
def test_type_means_kind_and_left_out_it_is_auto(groups: dict[str, Any], kind: str) -> None:
    values = {"tokenizer": "t", "seq_len": 64, "datasets": {"a": {"source": SOURCE, **groups}}}
    assert recipe.parse_recipe(values, name="demo", where="demo.yaml").datasets["a"].format.kind == kind


@pytest.mark.parametrize(
    "loss",
    [
        {"mask_user_turns": False, "supervise": "last_assistant"},
        {"mask_inputs": False, "mask": {"user": "train"}},
        {"mask_user_turns": False, "think_loss": "answer_only"},
        {"mask_user_turns": False, "mask_default": "train"},
    ],
)
def test_training_everything_excludes_choosing(loss: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"trains every token, but .* selects"):
        dataset(CHAT, loss=loss)
