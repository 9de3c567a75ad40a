"""The engines that make ids of texts.

What belongs here: opening an engine, and encoding a batch with it. What does not: whether a fast engine gives the right
ids (`tokenizer.py` compares probe texts, `example_encoding.py` a sample of every part).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints


def open_fast_backend(backend: str) -> Any:
    """Open the backend's JSON text in `fastokens`."""
    from fastokens import Tokenizer

    return Tokenizer.from_json_str(backend)


def open_reference_backend(backend: str) -> Any:
    """Open the backend's JSON text in `tokenizers`."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(backend)


def encode_flat(fast: Any, texts: Sequence[str]) -> tuple[NDArray[np.uint32], Ints]:
    """Encode texts on the fast path; return their ids in one buffer, and offsets int64[N + 1] into it."""
    ids, offsets = fast.encode_batch_flat(list(texts))
    return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64)
