"""Convert targets to the four conventions in which trainers store them, one function each.

    tokens t0 t1 t2 t3, loss on t2 and t3

    unshifted        ids t0 t1 t2 t3     labels -100 -100 t2 t3             the model shifts
    shifted          ids t0 t1 t2        targets t1 t2 t3, weights 0 1 1    already shifted
    rolled_mask      ids t0 t1 t2 t3     mask 0 1 1 0                       the reader shifts, span by span
    unshifted_mask   ids t0 t1 t2 t3     mask 0 0 1 1                       the trainer shifts

The first token of an attention span is never a target: `trained` must be false there, and
`sequences.require_valid_tokens` checks it. Exporters compute no masks themselves.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints, Tokens, Weights
from rowmill.schema.examples import IGNORED_LABEL

LabelConvention: TypeAlias = Literal["unshifted", "shifted", "rolled_mask", "unshifted_mask", "none"]
"""How a format stores targets; `none`: only ids, and the trainer trains on all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class ShiftedTargets:
    """Convention `shifted` for several spans, flat: span k is `[offsets[k], offsets[k + 1])` of all three arrays."""

    inputs: Tokens
    targets: Tokens
    weights: Weights
    offsets: Ints


def make_unshifted_labels(ids: Tokens, trained: Bools) -> Tokens:
    """Convention `unshifted`: return the id of each target, -100 elsewhere."""
    return np.where(trained, ids, np.int32(IGNORED_LABEL)).astype(np.int32, copy=False)


def make_shifted_targets(ids: Tokens, weights: NDArray[Any], spans: Ints) -> ShiftedTargets:
    """Convention `shifted`: return each span without its last token, and the token that follows each of them.

    `weights`: of the targets, unshifted, 0 and 1 or floats. `spans` int64[K + 1]: offsets of the spans.
    """
    is_input, is_target = np.ones(len(ids), bool), np.ones(len(ids), bool)
    is_input[spans[1:] - 1] = False
    is_target[spans[:-1]] = False
    offsets = spans - np.arange(len(spans), dtype=np.int64)
    return ShiftedTargets(ids[is_input], ids[is_target], weights[is_target].astype(np.float32), offsets)


def make_rolled_mask(trained: Bools, spans: Ints) -> Bools:
    """Convention `rolled_mask`: return for each token whether the next one in its span is a target.

    At the end of a span it is False.
    """
    following = np.zeros(len(trained), bool)
    following[:-1] = trained[1:]
    following[spans[1:] - 1] = False
    return following


def make_unshifted_mask(trained: Bools) -> Bools:
    """Convention `unshifted_mask`: return for each token whether it is itself a target."""
    return trained
