"""A model that trains on trees has the loss and the gradients of one that trains on each example by itself."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmill.core.arrays import Ints
from rowmill.reader import Reader
from rowmill.reader.layouts import tree_mask
from tests.support.recipes import Built, Workspace, chat

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 640
"""At least the ids of the test's tokenizer."""
PROGRAM = ROOT / "docs/explanation/shared_prefixes.py"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build chats with an example for each answer, and answers to one prompt, weighted, in batches with fillers."""
    workspace = Workspace(tmp_path_factory.mktemp("trained"))
    rows: list[dict[str, Any]] = [chat(i, turns=1 + i % 3) for i in range(9)]
    for i in range(6):
        answer = {"role": "assistant", "content": f"Answer {i} of several.", "weight": 0.5 + i}
        rows.append({"messages": [*chat(50)["messages"][:-1], answer]})
    return workspace.one(
        "rows.jsonl", rows, packing={"share_prefixes": True, "min_shared": 8}, template={"turns": "message"},
        loss={"weights": True}, partitions={"world_size": 1}, mixture={"batch_size": 3},
    ).build()  # fmt: skip


def read_batches(built: Built, *, as_torch: bool, layout: Any = "flat") -> list[dict[str, Any]]:
    root = built.project.store.root
    return [*Reader(root, "mini", rank=0, world_size=1, layout=layout, as_torch=as_torch)]


class ArrayModel:
    """One layer of causal attention in NumPy, whose only knowledge of order is the position ids and the mask."""

    def __init__(self, vocab_size: int, width: int = 8) -> None:
        numbers = np.random.default_rng(0)
        self.tokens, self.positions = (numbers.normal(size=(size, width)) for size in (vocab_size, 512))
        self.query, self.key, self.value = (numbers.normal(size=(width, width)) for _ in range(3))
        self.head = numbers.normal(size=(width, vocab_size))

    def log_probabilities(self, ids: Ints, positions: Ints, allowed: Any) -> Any:
        hidden = self.tokens[ids] + self.positions[positions]
        scores = np.where(allowed, (hidden @ self.query) @ (hidden @ self.key).T, -np.inf)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        logits = (hidden + scores / scores.sum(axis=1, keepdims=True) @ (hidden @ self.value)) @ self.head
        return (
            logits
            - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
            - (logits.max(axis=1, keepdims=True))
        )


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_loss_of_trees_is_that_of_the_examples_in_numpy(built: Built, layout: str) -> None:
    model = ArrayModel(VOCABULARY)
    found = 0.0
    for batch in read_batches(built, as_torch=False, layout=layout):
        for row, allowed in enumerate(tree_mask(batch)):
            ids, positions, before, labels, weights = (
                batch[name][row] for name in ("input_ids", "position_ids", "predecessors", "labels", "loss_weights")
            )
            ahead = model.log_probabilities(ids, positions, allowed)[before]
            targets = np.flatnonzero(labels != -100)
            found -= float((weights[targets] * ahead[targets, labels[targets]]).sum())

    assert found == pytest.approx(sum_example_log_probabilities(built)[0], rel=1e-10)
    assert found > 100


def sum_example_log_probabilities(built: Built) -> tuple[float, float]:
    """Return the weighted loss of all examples, each with a plain causal mask, and the sum of their weights."""
    model, total, weight = ArrayModel(VOCABULARY), 0.0, 0.0
    for example in built.examples():
        ids, weights = np.array(example["input_ids"]), np.array(example["loss_weights"])[1:]
        scores = model.log_probabilities(ids, np.arange(len(ids)), np.tri(len(ids), dtype=bool))
        total -= float((weights * scores[np.arange(len(ids) - 1), ids[1:]]).sum())
        weight += float(weights.sum())
    return total, weight


def test_loop_of_the_page_prints_the_mean_loss_of_the_examples(
    built: Built, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PROGRAM.with_name("shared-prefixes.md").read_text(encoding="utf-8")
    [loop] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    model = ArrayModel(VOCABULARY)

    def log_probabilities(*arrays: Any) -> Any:
        return np.stack([model.log_probabilities(*row) for row in zip(*arrays, strict=True)])

    monkeypatch.chdir(built.project.base)
    exec(loop.replace('"dialogues"', '"mini"'), {"model": log_probabilities})
    total, weight = sum_example_log_probabilities(built)
    assert float(capsys.readouterr().out) == pytest.approx(total / weight, rel=1e-10)


# ── torch ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def program() -> Any:
    """Return the program of the page on shared prefixes."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'rowmill[train]'")
    spec = importlib.util.spec_from_file_location("shared_prefixes", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def sum_example_losses(torch: Any, model: Any, built: Built) -> Any:
    """Return the weighted loss of every example by itself, each with a plain causal mask."""
    total = torch.zeros((), dtype=torch.float64)
    for example in built.examples():
        ids, weights = torch.tensor([example["input_ids"]]), torch.tensor(example["loss_weights"], dtype=torch.float64)
        count = ids.shape[1]
        causal = torch.ones(1, count, count, dtype=torch.bool).tril()
        logits = model(ids, torch.arange(count)[None], causal)[0]
        total = (
            total + (weights[1:] * torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")).sum()
        )
    return total


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_loss_and_gradients_of_trees_are_those_of_the_examples(built: Built, program: Any, layout: str) -> None:
    import torch

    torch.manual_seed(0)
    model = program.Model(VOCABULARY, positions=512, width=16).double()
    total = torch.zeros((), dtype=torch.float64)

    for batch in read_batches(built, as_torch=True, layout=layout):
        dense = torch.from_numpy(tree_mask(batch, as_block_mask=False))
        total = total + program.tree_loss(model(batch["input_ids"], batch["position_ids"], dense), batch)
    gradients = torch.autograd.grad(total, [*model.parameters()])

    expected = sum_example_losses(torch, model, built)
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)
    for found, wanted in zip(gradients, torch.autograd.grad(expected, [*model.parameters()]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_block_mask_gives_the_attention_of_the_dense_mask(built: Built, program: Any) -> None:
    import torch

    torch.manual_seed(0)
    model = program.Model(VOCABULARY, positions=512, width=32).double()
    with torch.no_grad():
        for batch in read_batches(built, as_torch=True)[:2]:
            inputs = batch["input_ids"], batch["position_ids"]
            dense = torch.from_numpy(tree_mask(batch, as_block_mask=False))
            torch.testing.assert_close(model(*inputs, tree_mask(batch)), model(*inputs, dense), rtol=1e-10, atol=1e-10)


def test_program_of_the_page_learns(built: Built, program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    reader = Reader(built.project.store.root, "mini", rank=0, world_size=1, as_torch=True)
    torch.manual_seed(0)
    model = program.Model(reader.vocab_size, positions=reader.seq_len)
    losses: list[float] = []
    for _ in range(4):
        reader.rewind()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses += program.train(model, optimizer, reader, "cpu")

    assert losses[-1] < losses[0] - 0.5


def test_compiled_attention_on_a_gpu_gives_the_loss_of_the_dense_mask(built: Built, program: Any) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU: FlexAttention is compiled for one")
    torch.manual_seed(0)
    model = program.Model(VOCABULARY, positions=512, width=64).cuda()
    for arrays in read_batches(built, as_torch=True):
        batch = {name: values.cuda() for name, values in arrays.items()}
        inputs = batch["input_ids"], batch["position_ids"]
        dense = torch.from_numpy(tree_mask(arrays, as_block_mask=False)).cuda()
        compiled, expected = (program.tree_loss(model(*inputs, mask), batch) for mask in (tree_mask(batch), dense))
        torch.testing.assert_close(compiled, expected, rtol=1e-3, atol=1e-3)
