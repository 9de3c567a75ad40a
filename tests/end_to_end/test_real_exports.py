"""Exports of real dialogues and problems: read back as the examples that went in, with ids of a large vocabulary."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import runner, steps
from rowmill.core.errors import ConfigError
from rowmill.exports import open_export
from tests.exports.test_exports import READERS, examples, folder_in
from tests.support import export_readers as readers
from tests.support.real_chats import CHECKS, KINDS, chats_of
from tests.support.recipes import Built, Workspace

pytestmark = [pytest.mark.slow, pytest.mark.real_data]
DIALOGUES = ("native", "unpacked", "tinker", "bridge", "json")


def built_of(
    workspace: Workspace, real_data: Path, datasets: dict[str, Any], kinds: dict[str, dict[str, Any]], **changes: Any
) -> Built:
    values: dict[str, Any] = {
        "tokenizer": str(real_data / "tokenizers/qwen3"),
        "defaults": {"splits": {"validation": 0}},
        "exports": [{"name": name, **one} for name, one in kinds.items()],
        "gates": {check: {"at_most": 1} for check in CHECKS},
    }
    (workspace.folder / "tokenizer").mkdir()
    return workspace.recipe(datasets, **(values | changes)).build()


@pytest.fixture(scope="module")
def dialogues(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build real dialogues, with tools and without, through the template of their tokenizer."""
    file = str(real_data / "templates/llamacpp__Qwen-Qwen3-0.6B.jinja")
    template = {"chat_template": {"file": file}, "on_dropped": dict.fromkeys(KINDS, "count")}
    chats = {name: one | {"template": template} for name, one in chats_of(real_data).items()}
    kinds = {
        "native": {"kind": "native", "shard_bytes": 1 << 20},
        "unpacked": {"kind": "hf"},
        "tinker": {"kind": "tinker"},
        "bridge": {"kind": "megatron_bridge"},
        "json": {"kind": "axolotl", "ds_type": "json"},
    }
    workspace = Workspace(tmp_path_factory.mktemp("dialogues"))
    return built_of(workspace, real_data, chats, kinds, seq_len=2048)


@pytest.mark.parametrize("name", DIALOGUES)
def test_real_dialogues_read_back_are_the_examples_that_went_in(dialogues: Built, name: str) -> None:
    went_in = examples(dialogues, dialogues.project.recipe.datasets, at_most=2048)
    # A dialogue of a single token would be left out by tinker; there is none.
    assert Counter(READERS[name](folder_in(dialogues, name))) == Counter(went_in)
    assert sum(sum(mask) for _, mask in went_in) == open_export(folder_in(dialogues, name)).count("trained_tokens")


def test_real_problems_are_cut_by_their_end_as_olmo_core_cuts(
    real_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    form = {"kind": "supervised", "input_field": "question", "output_field": "answer", "separate_with": "\n"}
    source = {"train_urls": [str(real_data / "math/gsm8k_train.jsonl")]}
    math = {"math": {"source": source, "format": form, "filters": {"max_items": 800}}}
    kinds = {"olmo": {"kind": "olmo_core"}, "river": {"kind": "astrai_bin"}}
    built = built_of(Workspace(tmp_path_factory.mktemp("math")), real_data, math, kinds, seq_len=512)
    went_in = Counter(examples(built, ["math"], at_most=512))
    assert Counter(readers.olmo(folder_in(built, "olmo"), "<u4")) == went_in
    [stored] = readers.astrai_bin(folder_in(built, "river")).values()
    assert Counter(stored) == went_in


def test_real_template_that_ends_turns_with_eos_is_refused_by_olmo_core(dialogues: Built) -> None:
    recipe = dialogues.project.recipe
    config = dialogues.project.base / "configs" / "mini.yaml"
    text = config.read_text(encoding="utf-8")
    changed = text.replace("- name: json\n  kind: axolotl\n  ds_type: json", "- name: json\n  kind: olmo_core")
    config.write_text(changed, encoding="utf-8")

    with pytest.raises(ConfigError, match=r"exports\.json: example .* \(EOS\)"):
        runner.build(steps.open_project(config), only=("exports/json",))
    assert recipe.exports[-1].name == "json"
    config.write_text(text, encoding="utf-8")
