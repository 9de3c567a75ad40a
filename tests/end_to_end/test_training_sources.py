"""Loss by source while a tiny model trains: the lines of the documentation, on a CPU, as torch tensors."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rowmill
from rowmill.reader import Reader
from tests.docs.test_docs import blocks
from tests.reader.test_source_losses import TOPICS, build
from tests.support.real_chats import ROOT, one_thread
from tests.support.recipes import Built

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rowmill[train]'")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]
__all__ = ["one_thread"]

PAGE = ROOT / "docs/how-to/train.md"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def model(built: Built) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        vocab_size=open_reader(built).vocab_size, num_attention_heads=2, use_cache=False, **shape
    )
    return transformers.LlamaForCausalLM(config)


def open_reader(built: Built, **options: Any) -> Reader:
    every: dict[str, Any] = {"as_torch": True, "segment_sources": True, "batch_size": 2} | options
    return Reader(built.project.store.root, built.project.recipe.name, rank=0, world_size=1, **every)


def compute_logits(model: Any, batch: Any) -> Any:
    return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits


def run_lines(start: str, **names: Any) -> dict[str, Any]:
    """Run the block of the page that begins with some text."""
    [lines] = [text for text in blocks(PAGE, "python") if text.startswith(start)]
    exec(compile(lines, str(PAGE), "exec"), names)
    return names


@pytest.fixture
def group() -> Any:
    """Open a group of one process, in which sums of ranks are those of the one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed
    torch.distributed.destroy_process_group()


def test_documented_lines_of_a_loop_give_the_loss_of_each_source(
    built: Built, model: Any, group: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = next(iter(open_reader(built)))
    logits = compute_logits(model, batch)
    names = run_lines("token_losses", torch=torch, rowmill=rowmill, dist=group, logits=logits, batch=batch)

    assert capsys.readouterr().out
    found, losses = names["losses"], names["token_losses"]
    assert not found.sums.requires_grad
    losses = losses.detach()
    labels, weights = (batch[name][0, 1:] for name in ("labels", "loss_weights"))
    of_tokens = torch.repeat_interleave(batch["segment_dataset"], batch["segment_lengths"])[1:]
    for number, name in enumerate(found.names.datasets):
        mine = (of_tokens == number) & (labels >= 0)
        expected = (losses * weights)[mine].sum() / weights[mine].sum()
        assert found.datasets[name].tokens == int(mine.sum())
        if mine.any():
            assert found.datasets[name].loss == pytest.approx(float(expected), rel=1e-5)
    assert sum(loss.tokens for loss in found.datasets.values()) == int((labels >= 0).sum())


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_tensors_and_arrays_give_the_same_sums(built: Built, layout: Any) -> None:
    arrays = open_reader(built, layout=layout, as_torch=False)
    for array, tensor in zip(arrays, open_reader(built, layout=layout), strict=True):
        losses = np.where(array["labels"] < 0, np.nan, array["labels"] % 11 + 0.5)
        for cut, shifted in itertools.product((0, 1), (False, True)):
            one = rowmill.loss_by_source(losses[:, cut:], array, shifted=shifted)
            other = rowmill.loss_by_source(torch.from_numpy(losses[:, cut:]), tensor, shifted=shifted)
            np.testing.assert_allclose(other.sums.numpy(), one.sums, rtol=1e-12)


def test_loss_of_transformers_is_the_shifted_one(built: Built, model: Any) -> None:
    """Its own loss shifts labels and keeps the length: the mean over all sources is the model's loss."""
    batch = next(iter(open_reader(built)))
    logits, labels = compute_logits(model, batch), batch["labels"]
    ahead = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits[0], ahead[0], reduction="none")
    unweighted = {name: value for name, value in batch.items() if name != "loss_weights"}
    found = rowmill.loss_by_source(losses, unweighted, shifted=True)
    own = model.loss_function(logits=logits.detach(), labels=labels, vocab_size=logits.shape[-1])
    count = len(found.names.datasets)
    assert float(found.sums[0, :count].sum() / found.sums[1, :count].sum()) == pytest.approx(float(own), rel=1e-5)


def test_documented_callback_logs_what_trl_evaluates(built: Built, model: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'rowmill[train]'")
    datasets = pytest.importorskip("datasets")
    reader = open_reader(built)

    def compute_losses(model: Any, batch: Any) -> Any:
        logits = compute_logits(model, batch)
        return torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="none")

    # The build holds nothing out: what its datasets train on is evaluated instead.
    class Held:
        validation_set = staticmethod(lambda name: reader.train_sets()[name])

    callback = run_lines(
        "class SourceLosses", transformers=transformers, rowmill=rowmill, reader=Held, compute_losses=compute_losses
    )["SourceLosses"]()
    rows = datasets.load_dataset(
        "parquet", data_files=reader.data_files["rank-00000-of-00002"], split="train", cache_dir=str(tmp_path)
    )
    config = trl.SFTConfig(
        output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True, bf16=False, packing=False, padding_free=True,
        max_length=None, per_device_train_batch_size=1, per_device_eval_batch_size=1, max_steps=2,
        eval_strategy="steps", eval_steps=2, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(built.project.base / "tokenizer")
    trainer = trl.SFTTrainer(
        model, config, train_dataset=rows, eval_dataset=rows.select([0]), processing_class=tokenizer,
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    logged = [line for line in trainer.state.log_history if set(line) >= {*TOPICS, "step"}]
    assert len(logged) == len(list(reader.train_sets()["chats"]))
    assert all(np.isfinite(line[name].loss) or not line[name].tokens for line in logged for name in TOPICS)
