"""Train a small Llama on a build with nothing but torch and transformers; stops and goes on at any step.

    python docs/how-to/train.py .rowmill demo --steps 200 --checkpoint checkpoint.pt

Run it again with the same checkpoint and more steps, and it goes on at the next batch.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rowmill import Reader


def small_llama(vocab_size: int, *, seed: int = 0) -> Any:
    """Return a Llama of two layers, on a CPU, without a cache: with one, position ids would part no segments."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "attn_implementation": "sdpa", "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **shape))


def train(model: Any, optimizer: Any, reader: Reader) -> Iterator[tuple[float, int]]:
    """Train on batch after batch; yield each step's mean loss and trained tokens after the optimizer has taken it."""
    total = 0.0
    for batch in reader:
        # A recipe without batch_size has no steps: there each batch is one.
        targets = reader.step.trained_tokens if reader.step else int((batch["labels"] != -100).sum())
        loss = model(**batch, num_items_in_batch=targets).loss
        loss.backward()
        total += float(loss.detach())
        if reader.step is None or reader.step.is_complete:
            optimizer.step()
            optimizer.zero_grad()
            yield total, targets
            total = 0.0


def save(path: Path, model: Any, optimizer: Any, reader: Reader, losses: list[float]) -> None:
    """Keep all that a run needs to go on."""
    import torch

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"reader": reader.state_dict(), "losses": losses}, path)


def load(path: Path, model: Any, optimizer: Any, reader: Reader) -> list[float]:
    """Go on where a run stood; return the losses so far."""
    import torch

    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    reader.load_state_dict(state["reader"])
    return list(state["losses"])


def run(reader: Reader, vocab_size: int, *, steps: int, checkpoint: Path | None = None) -> list[float]:
    """Train up to so many steps in all, print a line after each, and return the losses of every step."""
    import torch

    model = small_llama(vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = load(checkpoint, model, optimizer, reader) if checkpoint and checkpoint.exists() else []
    if len(losses) < steps:
        for loss, tokens in train(model, optimizer, reader):
            losses.append(loss)
            # Flushed, so that a pipe to `tee` or a log file shows each step when it is taken.
            print(f"step {len(losses):5}   loss {loss:.3f}   tokens {tokens:,}", flush=True)
            if len(losses) == steps:
                break
    if checkpoint:
        save(checkpoint, model, optimizer, reader, losses)
    return losses


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", help="the storage root, such as .rowmill")
    parser.add_argument("recipe", help="the recipe's name")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, help="where the run is kept, and gone on from if it is there")
    given = parser.parse_args()
    reader = Reader(given.root, given.recipe, rank=0, world_size=1, as_torch=True)
    if given.checkpoint:
        # What names the data, beside the model that it made.
        given.checkpoint.with_suffix(".data.json").write_text(json.dumps(reader.identity, indent=2))
    run(reader, reader.vocab_size, steps=given.steps, checkpoint=given.checkpoint)


if __name__ == "__main__":
    main()
