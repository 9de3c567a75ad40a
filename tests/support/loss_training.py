"""A rank of a run over one epoch, which writes the loss of each example: the loop of docs/how-to/train.md, on a CPU."""

import importlib.util
from pathlib import Path
from typing import Any

from rowmill import ExampleLosses, Reader

TRAIN_SCRIPT = Path(__file__).parents[2] / "docs" / "how-to" / "train.py"


def load_train_script() -> Any:
    """Return the script of the documentation as a module."""
    spec = importlib.util.spec_from_file_location("train_script", TRAIN_SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_rank(rank: int, world_size: int, meeting: str, root: str, recipe: str, losses: str) -> None:
    """Train a copy of the script's Llama as one of several processes, which meet in the file `meeting`."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    reader = Reader(root, recipe, rank=rank, world_size=world_size, batch_size=4, as_torch=True, segment_sources=True)
    model = torch.nn.parallel.DistributedDataParallel(load_train_script().small_llama(reader.vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with ExampleLosses(reader, losses) as kept:
        for batch in reader:
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
            token_losses = functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="none")
            kept.add(token_losses, batch)
            assert reader.step is not None
            # Gradients are averaged over ranks; this makes them the sum over the targets of the step.
            (token_losses.sum() * world_size / reader.step.trained_tokens).backward()
            if reader.step.is_complete:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()
