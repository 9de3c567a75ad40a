"""A model trained on real chats: it learns, segments do not see each other, and a run goes on where it stopped."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rowmill.build import runner, steps
from rowmill.reader import Reader
from tests.support.real_chats import ROOT, one_thread, write_recipe

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rowmill[train]'")
pytestmark = pytest.mark.real_data
__all__ = ["one_thread"]

STEPS = 200
VOCABULARY = 4000
"""The tokenizer of the demo."""


@pytest.fixture(scope="module")
def built(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> steps.Project:
    """Build the real chats, once."""
    project = write_recipe(tmp_path_factory.mktemp("chats"), real_data)
    runner.build(project)
    return project


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Return the script of the documentation."""
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "docs/how-to/train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reader_of(built: steps.Project, **options: Any) -> Reader:
    return Reader(built.store.root, "chats", rank=0, world_size=1, as_torch=True, **options)


@pytest.fixture(scope="module")
def losses(built: steps.Project, script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Train for some hundred steps without a stop, and keep the model."""
    reader = reader_of(built)
    assert reader.vocab_size == VOCABULARY
    return script.run(reader, VOCABULARY, steps=STEPS, checkpoint=tmp_path_factory.getbasetemp() / "trained.pt")


def test_loss_falls_on_real_chats(losses: list[float]) -> None:
    first, last = np.mean(losses[:10]), np.mean(losses[-20:])
    assert len(losses) == STEPS
    assert np.isfinite(losses).all()
    # At first every token is as likely as any other.
    assert abs(losses[0] - np.log(VOCABULARY)) < 0.5
    assert last < 0.7 * first


def test_run_that_stops_in_an_epoch_goes_on_with_the_same_batches(
    built: steps.Project, script: ModuleType, losses: list[float], tmp_path: Path
) -> None:
    kept = tmp_path / "run.pt"
    stopped = script.run(reader_of(built), VOCABULARY, steps=7, checkpoint=kept)
    resumed = script.run(reader_of(built), VOCABULARY, steps=20, checkpoint=kept)

    assert len(stopped) == 7
    assert resumed == losses[:20]


@pytest.mark.usefixtures("losses")
def test_loss_of_each_packed_segment_is_its_loss_alone(
    built: steps.Project, script: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = script.small_llama(VOCABULARY)
    trained = torch.load(tmp_path_factory.getbasetemp() / "trained.pt", weights_only=True)
    model.load_state_dict(trained["model"])
    model.eval()
    batch = reader_of(built, batch_size=4).get_batch(range(12))
    borders = batch["cu_seq_lens_q"].tolist()
    with torch.no_grad():
        packed = by_segment(model(**batch).logits[0], batch["labels"][0], borders)
        blind = by_segment(model(input_ids=batch["input_ids"]).logits[0], batch["labels"][0], borders)
        lengths = np.diff(borders).tolist()
        segments = zip(*(torch.split(batch[name][0], lengths) for name in ("input_ids", "labels")), strict=True)
        alone = [by_segment(model(input_ids=ids[None]).logits[0], labels, [0, len(ids)])[0] for ids, labels in segments]

    assert len(alone) > 15
    torch.testing.assert_close(torch.stack(packed), torch.stack(alone), atol=1e-4, rtol=1e-4)
    # Without positions segments do see each other, and this comparison notices.
    assert (torch.stack(blind) - torch.stack(alone)).abs().max() > 0.01


def by_segment(logits: Any, labels: Any, borders: list[int]) -> list[Any]:
    """Return the summed loss of each segment: position i predicts label i + 1, inside the segment."""
    summed: list[Any] = []
    for begin, end in itertools.pairwise(borders):
        ahead = torch.nn.functional.cross_entropy(
            logits[begin : end - 1], labels[begin + 1 : end], reduction="sum", ignore_index=-100
        )
        summed.append(ahead)
    return summed


def test_script_of_the_documentation_runs_as_a_command(built: steps.Project, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs/how-to/train.py"), built.store.root, "chats", "--steps", "20"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "pipelines"), "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True, env=environment)
    reader = reader_of(built)
    tokens = [reader.step.trained_tokens for _ in itertools.islice(reader, 20) if reader.step is not None]
    lines = [re.fullmatch(r"step +(\d+)   loss ([\d.]+)   tokens ([\d,]+)", line) for line in shown.stdout.splitlines()]
    printed = [line.groups() for line in lines if line is not None]
    assert [int(step) for step, _, _ in printed] == list(range(1, 21))
    assert [int(count.replace(",", "")) for _, _, count in printed] == tokens
    assert float(printed[-1][1]) < np.log(VOCABULARY)
