"""The attention mask of a batch whose examples share prefixes: as an array, or as a block mask for FlexAttention.

    segments a b │ c │ d     query a: a     b: a b     c: a b c     d: a b d

Every key is seen by the queries from it to the end of what continues its segment, so a mask is two comparisons.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from rowmill.core.errors import ConfigError
from rowmill.core.segment_trees import mask_tree


def tree_mask(batch: Mapping[str, Any], *, as_block_mask: bool | None = None) -> Any:
    """Return which keys each query of a batch attends to.

    As an array, bool[B, L, L] for rows of L tokens, true where query q, of the second dimension, attends to key k, of
    the third; for small cases, as it takes L² bytes. As a block mask, a `BlockMask` of torch for `flex_attention` on
    the device of the batch, the same for all heads. `as_block_mask` None: a block mask of a batch of tensors, an array
    of arrays. Padding attends to itself.

    Raises
    ------
    ConfigError
        If the batch is of a recipe without `packing.share_prefixes`, or a block mask is asked for and the batch has no
        tensors.

    """
    if "subtree_ends" not in batch:
        raise ConfigError(
            "tree_mask: the batch has no subtree_ends; a recipe with packing.share_prefixes: true is needed, read with "
            "layout flat or padded; build one, or use the mask that your model makes of position_ids"
        )
    ends = batch["subtree_ends"]
    is_array = isinstance(ends, np.ndarray)
    if as_block_mask is None:
        as_block_mask = not is_array
    if not as_block_mask:
        return mask_tree(ends if is_array else ends.cpu().numpy())
    if is_array:
        raise ConfigError(
            "tree_mask: as_block_mask of a batch of NumPy arrays; FlexAttention takes tensors of torch; open the "
            "reader with as_torch=True, or omit as_block_mask"
        )
    flex_attention: Any = import_module("torch.nn.attention.flex_attention")

    def attends(row: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < ends[row, key])

    rows, length = ends.shape
    return flex_attention.create_block_mask(attends, rows, None, length, length, device=ends.device)
