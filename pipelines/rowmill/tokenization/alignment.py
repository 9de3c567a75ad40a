"""Map byte spans of texts to the tokens that cover them, for a whole batch at once."""

from dataclasses import dataclass

import numpy as np

from rowmill.core.arrays import Bools, Ints, Weights, compute_offsets, count_true, expand_ranges
from rowmill.tokenization.encoded_texts import EncodedTexts


@dataclass(frozen=True, slots=True)
class FlatSpans:
    """Byte ranges over a batch: range i is `[starts[i], ends[i])` of text `texts[i]`, ascending.

    `before` int64 is where the nearest foreign text, of another message or untrained, ends before each range, 0 without
    one; `behind` is where the next one begins, the text's length or more without one. `weights` float32 are the ranges'
    loss weights (None: all are 1).
    """

    texts: Ints
    starts: Ints
    ends: Ints
    before: Ints
    behind: Ints
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class BatchPositions:
    """The bytes of each token in the concatenation of all texts of a batch, with gaps between the texts.

    Text i begins at `bases[i]`, int64[N]; `starts` and `ends` int64[T] are the tokens' bytes.
    """

    bases: Ints
    starts: Ints
    ends: Ints


def locate_in_batch(encoded: EncodedTexts) -> BatchPositions:
    """Return where the tokens of a batch are in the concatenation of its texts."""
    counts = np.diff(encoded.offsets)
    last = np.zeros(len(counts), np.int64)
    nonempty = counts > 0
    last[nonempty] = np.maximum.reduceat(encoded.ends, encoded.offsets[:-1][nonempty]) if nonempty.any() else 0
    # The gap separates a token at the end of one text from a token at the start of the next.
    bases = compute_offsets(last + 2)[:-1]
    per_token = np.repeat(bases, counts)
    return BatchPositions(bases, encoded.starts + per_token, encoded.ends + per_token)


def find_trained_tokens(encoded: EncodedTexts, positions: BatchPositions, spans: FlatSpans) -> tuple[Bools, int]:
    """Return which tokens train, bool[T], and how many of them cross an edge of a span.

    A token trains if one of its bytes is in a trained span and none belongs to foreign text, as in `transformers` and
    TRL, at both edges. The first token of a text never trains, because no token precedes it.
    """
    if not len(encoded.ids):
        return np.zeros(0, bool), 0
    first, last, boundary_tokens = _find_token_ranges(positions, spans)
    edges = np.zeros(len(encoded.ids) + 1, np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    mask = np.cumsum(edges[:-1]) > 0
    nonempty = np.diff(encoded.offsets) > 0
    mask[encoded.offsets[:-1][nonempty]] = False
    return mask, boundary_tokens


def compute_token_weights(positions: BatchPositions, spans: FlatSpans, mask: Bools) -> Weights:
    """Return the loss weight of every token, float32[T]: the weight of its span if it trains, else 0.

    `mask` is the result of `find_trained_tokens` for the same spans. A token in two spans gets the later span's weight.
    """
    weights = np.zeros(len(mask), np.float32)
    if spans.weights is None or not len(mask):
        return mask.astype(np.float32)
    first, last, _ = _find_token_ranges(positions, spans)
    sizes = last - first
    index = expand_ranges(first, sizes)
    weights[index] = np.repeat(spans.weights, sizes)
    weights[~mask] = 0
    return weights


def _find_token_ranges(positions: BatchPositions, spans: FlatSpans) -> tuple[Ints, Ints, int]:
    """Return the first token of every span, the token after its last one, and how many tokens cross an edge."""
    starts, ends = positions.starts, positions.ends
    offset = positions.bases[spans.texts]
    left, right = spans.starts + offset, spans.ends + offset
    # The first token that ends after the span's start, and the first that begins at or after its end.
    first = np.searchsorted(ends, left, "right")
    last = np.searchsorted(starts, right, "left")
    kept = (first < last) & (left < right)
    begins, stops = starts[np.minimum(first, len(starts) - 1)], ends[np.maximum(last - 1, 0)]
    # A token across an edge is left out if it reaches the neighboring foreign text.
    shares_left = kept & (begins < left) & (begins < spans.before + offset)
    first = first + shares_left
    shares_right = kept & (stops > right) & (stops > spans.behind + offset) & (last > first)
    last = last - shares_right
    kept &= first < last
    whole_left, whole_right = np.searchsorted(starts, left, "left"), np.searchsorted(ends, right, "right")
    boundary_tokens = int((last - first - np.maximum(whole_right - whole_left, 0))[kept].sum())
    return np.where(kept, first, 0), np.where(kept, last, 0), boundary_tokens


def find_token_at(encoded: EncodedTexts, positions: BatchPositions, texts: Ints, places: Ints) -> Ints:
    """Return the first token (numbered over the batch) that begins at or after byte `places[i]` of text `texts[i]`."""
    found = np.searchsorted(positions.starts, places + positions.bases[texts], "left")
    return np.minimum(found, encoded.offsets[texts + 1])


def find_degenerate_texts(encoded: EncodedTexts) -> Bools:
    """Return which texts have tokens with empty or decreasing offsets, bool[N]: their spans are not reliable."""
    bad = encoded.ends <= encoded.starts
    same_text = np.ones(len(bad), bool)
    same_text[encoded.offsets[:-1][np.diff(encoded.offsets) > 0]] = False
    # Byte fallback gives several tokens the same character, so equal starts are valid.
    bad[1:] |= same_text[1:] & (encoded.starts[1:] < encoded.starts[:-1])
    return count_true(bad, encoded.offsets) > 0
