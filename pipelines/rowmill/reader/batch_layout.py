"""The layout of a reader's batches: its name and its options, NumPy or torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from rowmill.core.errors import ConfigError, join_choices
from rowmill.reader.layouts import Batch, join_flat, stack_padded
from rowmill.reader.preference_batches import stack_pairs
from rowmill.reader.sequences import PackedSequence

LayoutName: TypeAlias = Literal["flat", "padded", "preference"]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How batches are laid out; `pad_to` is the length of a batch's rows, None: that of the longest."""

    name: LayoutName
    pad_id: int
    pad_to: int | None
    as_torch: bool

    def make_batch(self, rows: Sequence[PackedSequence]) -> Batch:
        """Make a batch of one or more sequences."""
        match self.name:
            case "flat":
                batch = join_flat(rows, pad_id=self.pad_id, length=self.pad_to)
            case "padded":
                batch = stack_padded(rows, pad_id=self.pad_id, length=self.pad_to)
            case "preference":
                batch = stack_pairs(rows, pad_id=self.pad_id, length=self.pad_to)
        return _make_tensors(batch) if self.as_torch else batch


def make_layout(name: LayoutName, *, pad_id: int, pad_to: int | None, as_torch: bool | None) -> BatchLayout:
    """Validate a layout and return it; `as_torch` None: tensors if torch is installed."""
    known = get_args(LayoutName)
    if name not in known:
        raise ConfigError(f"layout: {name!r}; known are {join_choices(known)}; choose one")
    installed = find_spec("torch") is not None
    if as_torch and not installed:
        raise ConfigError(
            "as_torch: torch is not installed here; it is needed for tensors; install it, or omit as_torch"
        )
    return BatchLayout(name, pad_id, pad_to, installed if as_torch is None else as_torch)


def _make_tensors(batch: Batch) -> Batch:
    torch: Any = import_module("torch")
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in batch.items()}
