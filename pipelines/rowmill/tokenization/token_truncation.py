"""Cut the tokens of one example, or prepend a BOS: ids and what belongs to them, counting removed tokens."""

from dataclasses import replace
from typing import Literal

import numpy as np

from rowmill.tokenization.encoded_batch import TEMPLATE_KIND, Example


def split_into_windows(example: Example, limit: int) -> list[Example]:
    """Cut a document into consecutive windows of at most `limit` tokens, without dropping any.

    Each window is a separate example, so its first token is not a target.
    """
    pieces: list[Example] = []
    for start in range(0, len(example.ids), limit):
        piece = example.cut(start, min(start + limit, len(example.ids)))
        size, trained = len(piece.ids), int(example.mask[start : start + limit].sum())
        first_target = trained - int(piece.mask.sum())
        pieces.append(
            replace(piece, original_tokens=size, original_trained=trained, tokens_cut=0, cut_trained=first_target)
        )
    return pieces


def cut_pair(example: Example, limit: int, side: Literal["left", "right"], input_tokens: int, first: int) -> Example:
    """Cut a pair to `limit` tokens: first its input, on `side`, then its output on the right.

    The input has `input_tokens` tokens from `first` on (1 after a BOS). EOS is cut with the output's end, because a
    cut answer must not teach the model to stop there.
    """
    excess = len(example.ids) - limit
    from_input = min(excess, input_tokens)
    begin = first if side == "left" else first + input_tokens - from_input
    keep = np.ones(len(example.ids), bool)
    keep[begin : begin + from_input] = False
    keep[len(keep) - (excess - from_input) :] = False
    return example.keep(keep)


def prepend_bos(example: Example, bos_id: int) -> Example:
    """Prepend an untrained BOS to an example that does not begin with one."""
    if len(example.ids) and int(example.ids[0]) == bos_id:
        return example
    opens = len(example.span_kinds) > 0 and int(example.span_kinds[0]) == TEMPLATE_KIND
    kept = slice(1 if opens else 0, None)
    return replace(
        example,
        ids=np.concatenate((np.array([bos_id], np.int32), example.ids)),
        mask=np.concatenate((np.zeros(1, bool), example.mask)),
        weights=None if example.weights is None else np.concatenate((np.zeros(1, np.float32), example.weights)),
        token_fields={
            name: np.concatenate((np.zeros(1, np.float32), values)) for name, values in example.token_fields.items()
        },
        span_starts=np.concatenate((np.zeros(1, np.int64), example.span_starts[kept] + 1)),
        span_messages=np.concatenate((np.full(1, -1, np.int64), example.span_messages[kept])),
        span_kinds=np.concatenate((np.full(1, TEMPLATE_KIND, np.int8), example.span_kinds[kept])),
        original_tokens=example.original_tokens + 1,
    )


def truncate_tokens(example: Example, limit: int, side: Literal["left", "right"], bos_id: int | None) -> Example:
    """Cut an example to `limit` tokens on one side, the last stage of truncation; a BOS is kept."""
    keep = np.ones(len(example.ids), bool)
    leads = bos_id is not None and len(example.ids) > 0 and int(example.ids[0]) == bos_id
    excess = len(example.ids) - limit
    if side == "left":
        keep[int(leads) : int(leads) + excess] = False
    else:
        keep[limit:] = False
    return example.keep(keep)
