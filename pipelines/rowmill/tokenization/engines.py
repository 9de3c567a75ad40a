"""The engines that make ids of texts: the reference, and those that give its ids in a fraction of its time.

`gigatoken` encodes byte-level and SentencePiece BPE and opens in a third of the time of `fastokens`, which encodes
byte-level BPE only. The reference for both is `tokenizers`, which `transformers` itself calls.
"""

import logging
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets

_LOG = logging.getLogger("rowmill.tokenizer")

REFERENCE_ENGINE = "tokenizers"

FlatIds = tuple[NDArray[np.uint32], Ints]
"""Ids of a batch in one buffer, and offsets int64[N + 1] into it."""

EncodeTexts = Callable[[Sequence[str]], FlatIds]

_PAGE_BYTES = resource.getpagesize()

MAX_GROWTH_BYTES = 512 << 20
"""How much memory a process may take after it opened an engine before it opens the engine again."""

_BYTES_PER_CHARACTER = 16
"""More than an engine's caches grow per character of text without a repeated word: 11 were measured."""

MAX_PANICS = 10
"""An engine that panicked this often in a process is left alone there: opening it again costs a second."""


def _open_gigatoken(backend: str) -> EncodeTexts:
    from gigatoken.gigatoken_rs import load_hf_json

    engine = load_hf_json(backend)

    def encode(texts: Sequence[str]) -> FlatIds:
        # Text by text, as fast as its batches: these keep a second cache, return arrays of awkward, which takes 0.2 s
        # to import, and use a thread pool, which does not survive a fork.
        return join_ids(list(map(engine.encode, texts)))

    return encode


def _open_fastokens(backend: str) -> EncodeTexts:
    from fastokens import Tokenizer

    engine = Tokenizer.from_json_str(backend)

    def encode(texts: Sequence[str]) -> FlatIds:
        ids, offsets = engine.encode_batch_flat(list(texts))
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64)

    return encode


def open_reference_backend(backend: str) -> Any:
    """Open the backend's JSON text in `tokenizers`."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(backend)


FAST_ENGINES: dict[str, Callable[[str], EncodeTexts]] = {"gigatoken": _open_gigatoken, "fastokens": _open_fastokens}
"""Functions that open a backend's JSON text, the preferred engine first."""


def join_ids(rows: Sequence[NDArray[np.uint32]]) -> FlatIds:
    """Join the ids of single texts."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    offsets = compute_offsets(lengths)
    return np.concatenate(rows) if rows else np.empty(0, np.uint32), offsets


@lru_cache
def get_engine_version(name: str) -> str | None:
    """Return the installed version of an engine's package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The ids of a batch, and the places of texts that the engine did not encode, whose ids are missing."""

    ids: NDArray[np.uint32]
    offsets: Ints
    failed: list[int]


class FastEngine:
    """An engine over one tokenizer.

    A text that the engine refuses, or at which it panics, is reported as failed; it is not the build's end.
    """

    def __init__(self, name: str, backend: str) -> None:
        """Open the engine; what it raises is what it has against the tokenizer."""
        self._name = name
        self._backend = backend
        self._panics = 0
        self._encode: EncodeTexts | None = None
        self._open()

    def _open(self) -> EncodeTexts:
        # The old one goes first: both together would be twice the memory.
        self._encode = None
        self._encode = FAST_ENGINES[self._name](self._backend)
        self._characters = 0
        self._resident_bytes = _read_resident_bytes()
        return self._encode

    def encode(self, texts: Sequence[str]) -> EngineResult:
        """Encode a batch; never raises because of a text."""
        if self._panics < MAX_PANICS:
            # The engine is opened again once the words that it keeps may have filled their share of a worker's memory.
            self._characters += sum(map(len, texts))
            may_be_full = self._characters * _BYTES_PER_CHARACTER >= MAX_GROWTH_BYTES and self._encode is not None
            if may_be_full and _read_resident_bytes() - self._resident_bytes > MAX_GROWTH_BYTES:
                self._open()
            try:
                return EngineResult(*(self._encode or self._open())(texts), [])
            except BaseException as error:
                if not is_engine_failure(error):
                    raise
                self._recover(error)
        rows = [self._encode_alone(text) for text in texts]
        ids, offsets = join_ids([np.empty(0, np.uint32) if row is None else row for row in rows])
        return EngineResult(ids, offsets, [place for place, row in enumerate(rows) if row is None])

    def _encode_alone(self, text: str) -> NDArray[np.uint32] | None:
        if self._panics >= MAX_PANICS:
            return None
        try:
            return (self._encode or self._open())([text])[0]
        except BaseException as error:
            if not is_engine_failure(error):
                raise
            self._recover(error)
            return None

    def _recover(self, error: BaseException) -> None:
        """Close an engine that panicked: what it holds may be half changed."""
        if isinstance(error, Exception):
            return
        self._panics += 1
        self._encode = None
        _LOG.warning("tokenizer: %s panicked (%s); its text takes the reference path", self._name, error)


def is_engine_failure(error: BaseException) -> bool:
    """Return whether an engine raised this about a text: an exception, or a panic, which Rust raises past those."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _read_resident_bytes() -> int:
    """Return the memory of this process: what it holds now, or, where no system says that, the most it held."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
