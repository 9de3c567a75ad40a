"""Train a small transformer on examples that share prefixes, with FlexAttention where it is compiled.

python docs/explanation/shared_prefixes.py .rowmill airline --steps 20
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rowmill import Reader, tree_mask


class Block(nn.Module):
    """Attention over the keys that a mask allows, then a small network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, hidden: Any, mask: Any) -> Any:
        """Return the hidden states of the next layer, [B, L, width]."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1))
        if isinstance(mask, BlockMask):
            attend: Any = torch.compile(flex_attention) if hidden.is_cuda else flex_attention
            mixed = attend(q, k, v, block_mask=mask)
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.inner(hidden)


class Model(nn.Module):
    """A transformer that knows where a token is from its position id alone."""

    def __init__(
        self, vocab_size: int, *, positions: int = 8192, width: int = 64, heads: int = 2, layers: int = 2
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Any, position_ids: Any, mask: Any) -> Any:
        """Return logits [B, L, V]; `mask` is a block mask, or bool[B, L, L]."""
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(hidden)


def tree_loss(logits: Any, batch: dict[str, Any]) -> Any:
    """Return the sum over all examples: each target by the logits at its predecessor, as often as examples train it."""
    ahead = logits.gather(1, batch["predecessors"][..., None].expand(-1, -1, logits.shape[-1]))
    losses = nn.functional.cross_entropy(ahead.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * batch["loss_weights"].flatten()).sum()


def train(model: Model, optimizer: Any, reader: Reader, device: str) -> Iterator[float]:
    """Train on batch after batch and yield the mean loss of each, over the targets of its examples."""
    for arrays in reader:
        batch = {name: values.to(device) for name, values in arrays.items()}
        # FlexAttention has no gradients on a CPU.
        mask = tree_mask(batch) if device == "cuda" else torch.from_numpy(tree_mask(batch, as_block_mask=False))
        logits = model(batch["input_ids"], batch["position_ids"], mask)
        loss = tree_loss(logits, batch) / batch["loss_weights"].sum().clamp(min=1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach())


def main() -> None:
    """Train on a build and print the loss of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reader = Reader(arguments.root, arguments.recipe, rank=0, world_size=1, as_torch=True)
    torch.manual_seed(0)
    model = Model(reader.vocab_size, positions=reader.seq_len).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, loss in zip(range(arguments.steps), train(model, optimizer, reader, device), strict=False):
        print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
