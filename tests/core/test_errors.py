"""Hints for unknown names: a typing error first, then beginnings, words and trainers' names, then likeness."""

from pathlib import Path
from typing import Any

import pytest

from rowmill.core.errors import ConfigError, suggest_name
from rowmill.recipe import recipe
from tests.support.tiny_project import RECIPE

NAMES = (
    "astrai_bin",
    "astrai_h5",
    "axolotl",
    "hf",
    "llama_factory",
    "megatron",
    "olmo_core",
    "rl_prompts",
    "trl_preference",
)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LLaMA-Factory", "llama_factory"),
        ("axolot", "axolotl"),
        ("mregatron", "megatron"),
        ("trl", "trl_preference"),
        ("astrai", "astrai_bin or astrai_h5"),
        ("hf_datasets", "hf"),
        ("megatron_lm", "megatron"),
        ("prompts", "rl_prompts"),
        ("olmo", "olmo_core"),
        ("trl_prefs", "trl_preference"),
        ("parquet", None),
        ("", None),
    ],
)
def test_names_that_begin_alike_come_before_names_of_some_likeness(name: str, meant: str | None) -> None:
    assert suggest_name(name, NAMES) == meant


def _refuse(**changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        recipe.parse_recipe(RECIPE | changes, name="tiny", where="tiny.yaml", base=Path())
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "meant"),
    [
        ("trl", "trl_preference, hf or layout: trl of kind rl_prompts"),
        ("transformers", "hf"),
        ("grpo", "rl_prompts"),
        ("dpo", "trainer: dpo of kind trl_preference"),
        ("mosaicml", "mds"),
        ("nemo", "megatron_bridge"),
        ("foundry", "llm_foundry"),
        ("astrai", "astrai_bin or astrai_h5"),
    ],
)
def test_trainers_name_for_an_export_leads_to_its_formats(kind: str, meant: str) -> None:
    assert f"; did you mean {meant}?" in _refuse(exports=[{"kind": kind, "name": "mine"}])


@pytest.mark.parametrize(
    ("group", "kind", "meant"),
    [
        ("format", "openai", "chat"),
        ("format", "trl", "preference or prompts"),
        ("format", "sharegpt", "dataset_schema: sharegpt of kind auto or dataset_schema: sharegpt of kind chat"),
        ("format", "csv", "records"),
        ("source", "hf", "huggingface"),
        ("source", "jsonl", "files"),
    ],
)
def test_other_tools_name_for_a_kind_of_data_leads_to_ours(group: str, kind: str, meant: str) -> None:
    dataset = {"source": {"train_urls": ["data/*.jsonl"]}, "format": {"kind": "chat"}} | {group: {"kind": kind}}

    assert f"; did you mean {meant}?" in _refuse(datasets={"chats": dataset})
