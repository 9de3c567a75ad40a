"""TRL trains from our shards with the configuration that the documentation gives, word for word, on our batches.

There is no FlashAttention on a CPU, so the model's attention is SDPA, which is all that differs from the pages.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmill.build import runner, steps
from rowmill.reader import Reader
from rowmill.stages.exports import locate_export
from tests.docs.test_docs import blocks
from tests.support.real_chats import ROOT, one_thread, write_recipe
from tests.support.recipes import current

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rowmill[train]'")
trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'rowmill[train]'")
pytestmark = [
    pytest.mark.real_data,
    # TRL 1.16 sets an option that transformers 5.23 has renamed.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    # A loader pins memory by default, even without a GPU.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]
__all__ = ["one_thread"]

PAGES = ("docs/formats.md", "docs/how-to/train.md")
FROM_OUR_SHARDS = {"input_ids", "labels", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"}


def documented(page: str) -> dict[str, Any]:
    """Return what a page's SFTConfig is called with."""
    nodes = [node for text in blocks(ROOT / page, "python") for node in ast.walk(ast.parse(text))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    [call] = [one for one in calls if ast.unparse(one.func) == "SFTConfig"]
    return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}


@pytest.fixture(scope="module")
def built(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> steps.Project:
    """Build the real chats without steps, so that the order has no fillers, with a native export."""
    exports = [{"kind": "native", "name": "shards"}]
    project = write_recipe(tmp_path_factory.mktemp("trl"), real_data, mixture={}, exports=exports)
    runner.build(project)
    return project


@pytest.fixture(scope="module")
def rows(built: steps.Project, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load the export as the documentation does."""
    import datasets

    made = current(built, "exports", "shards")
    files = str(built.store.local(f"{locate_export(made)}/data") / "*.parquet")
    cache = str(tmp_path_factory.mktemp("cache"))
    return datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny Llama with the tokenizer of the build, as someone would have it on a disk."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    folder = tmp_path_factory.mktemp("model")
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4000, num_attention_heads=2, use_cache=False, **shape))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "configs/demo/tokenizer").save_pretrained(folder)
    return folder


def trainer_of(rows: Any, model_folder: Path, folder: Path, page: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    options = documented(page) | {"output_dir": str(folder), "report_to": "none", "use_cpu": True, "bf16": False}
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa")
    return trl.SFTTrainer(model, trl.SFTConfig(**(options | changes)), train_dataset=rows)


@pytest.mark.parametrize("page", PAGES)
def test_batches_of_the_documented_trainer_are_those_of_our_reader(
    built: steps.Project, rows: Any, model_folder: Path, tmp_path: Path, page: str
) -> None:
    theirs = list(trainer_of(rows, model_folder, tmp_path, page).get_train_dataloader())
    ours = list(Reader(built.store.root, "chats", rank=0, world_size=1, batch_size=1, as_torch=True))
    assert len(theirs) == len(ours) > 50
    for one, other in zip(theirs, ours, strict=True):
        assert set(one) >= FROM_OUR_SHARDS
        for name in FROM_OUR_SHARDS:
            assert torch.equal(one[name], other[name]), name
            assert one[name].dtype == other[name].dtype, name
        assert (int(one["max_length_q"]), int(one["max_length_k"])) == (other["max_length_q"], other["max_length_k"])


def test_larger_batches_of_the_trainer_are_joined_rows(
    built: steps.Project, rows: Any, model_folder: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(rows, model_folder, tmp_path, PAGES[0], per_device_train_batch_size=3)
    theirs = next(iter(trainer.get_train_dataloader()))
    reader = Reader(built.store.root, "chats", rank=0, world_size=1, as_torch=True)
    ours = reader.get_batch([0, 1, 2])
    assert all(torch.equal(theirs[name], ours[name]) for name in FROM_OUR_SHARDS)


def test_collator_gives_the_positions_and_borders_of_the_plan(rows: Any) -> None:
    collator = import_module("trl.trainer.sft_trainer").DataCollatorForLanguageModeling(
        pad_token_id=0, padding_free=True
    )
    for row in rows.select(range(40)):
        batch = collator([row])

        bounds = np.concatenate(([0], np.cumsum(row["seq_lengths"])))
        assert batch["cu_seq_lens_q"].tolist() == bounds.tolist()
        assert batch["position_ids"][0].tolist() == row["position_ids"]
        assert batch["labels"][0].tolist() == row["labels"]


def test_trainer_of_the_documentation_learns_from_our_shards(rows: Any, model_folder: Path, tmp_path: Path) -> None:
    changes = {"max_steps": 30, "logging_steps": 5, "learning_rate": 5e-3, "save_strategy": "no"}
    trainer = trainer_of(rows, model_folder, tmp_path, PAGES[0], **changes)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < 0.9 * losses[0]
