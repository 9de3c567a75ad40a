"""A tokenizer opened as data, and its encoding of batches of texts into ids and byte positions.

Two paths give the same ids. The *reference path* is the `tokenizers` library, which `transformers` itself uses. The
*fast path* is `gigatoken`, for byte-level and SentencePiece BPE, or `fastokens`, for byte-level BPE whose split the
other has no code for, such as DeepSeek's (8 times the speed of `tokenizers`) and StarCoder's (4 times): it encodes a
batch into one flat buffer, and because every id stands for a known number of bytes (`vocabulary.py`), one cumulative
sum gives the position of each token. An engine is taken only for tokenizers with which it gave the same ids and
positions on the probe texts; they are compared again on a sample of every batch (`reference_sample.py`), and a text
whose tokens do not add up to its bytes (a normalizer changed it) takes the reference path.

    text        "a<|im_end|>b"                       bytes  0 1          11 12
    tokens      ["a", "<|im_end|>", "b"]             ends     1          11 12
"""

import logging
import re
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Bools, Ints, compute_offsets, expand_ranges, find_distinct
from rowmill.core.errors import ConfigError
from rowmill.core.storage import digest_bytes, digest_json
from rowmill.tokenization.reference_sample import Stretch
from rowmill.tokenization.tokenizer_source import FoundTokenizer, TokenizerChoice, find_tokenizer, hash_tokenizer_files
from rowmill.tokenization.vocabulary import (
    DummyPrefix,
    TokenBytes,
    TokenLengths,
    read_token_bytes,
    read_token_lengths,
)

_LOG = logging.getLogger("rowmill.tokenizer")

REFERENCE_ENGINE = "tokenizers"

FlatIds = tuple[NDArray[np.uint32], Ints]
"""Ids of a batch in one buffer, and offsets int64[N + 1] into it."""

_NO_IDS = np.empty(0, np.uint32)

EncodeTexts = Callable[[Sequence[str]], FlatIds]

_PAGE_BYTES = resource.getpagesize()

MAX_GROWTH_BYTES = 512 << 20
"""How much memory a process may take after it opened an engine before it opens the engine again."""

_BYTES_PER_CHARACTER = 16
"""More than an engine's caches grow per character of text without a repeated word: 11 were measured."""

MAX_PANICS = 10
"""An engine that panicked this often in a process is left alone there: opening it again costs a second."""


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """A batch of encoded texts.

    `ids` int32[T], `offsets` int64[N + 1] into it; `starts` and `ends` int64[T] are each token's bytes within
    its own text. `reference_texts` counts texts that took the reference path, `altered` those whose ids decode to
    other text.
    """

    ids: NDArray[np.int32]
    offsets: Ints
    starts: Ints
    ends: Ints
    reference_texts: int
    altered: int = 0

    def get_text(self, index: int) -> "EncodedTexts":
        """Return one of the texts, without counts."""
        cut = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return EncodedTexts(
            self.ids[cut], self.offsets[index : index + 2] - cut.start, self.starts[cut], self.ends[cut], 0
        )


def rejoin_pieces(encoded: EncodedTexts, pieces: Sequence[str], counts: Ints) -> EncodedTexts:
    """Join encoded pieces to the texts that they were cut from: text i is the next `counts[i]` pieces."""
    sizes = np.array(count_utf8_bytes(pieces), np.int64)
    before = np.cumsum(sizes) - sizes
    bounds = compute_offsets(counts)
    nonempty = counts > 0
    begins = np.zeros(len(counts), np.int64)
    begins[nonempty] = before[bounds[:-1][nonempty]]
    shift = np.repeat(before - np.repeat(begins, counts), np.diff(encoded.offsets))
    return replace(
        encoded,
        offsets=encoded.offsets[bounds],
        starts=encoded.starts + shift,
        ends=encoded.ends + shift,
        reference_texts=min(encoded.reference_texts, len(counts)),
        altered=min(encoded.altered, len(counts)),
    )


def count_utf8_bytes(texts: Iterable[str]) -> list[int]:
    """Return the bytes of each text in UTF-8; a text of ASCII characters, as most are, need not be encoded."""
    return [len(text) if text.isascii() else len(text.encode()) for text in texts]


def compute_byte_positions(text: str) -> Ints:
    """Return for every character index (and the end) its byte index in UTF-8: int64[len(text) + 1]."""
    raw = text.encode()
    if len(raw) == len(text):
        return np.arange(len(text) + 1, dtype=np.int64)
    first = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
    return np.append(np.flatnonzero(first), len(raw))


def join_encodings(pieces: "Sequence[tuple[NDArray[np.int32], Ints, Ints]]", reference_texts: int) -> EncodedTexts:
    """Join single texts, each its ids, starts and ends, to a batch."""
    counts = np.array([len(ids) for ids, _, _ in pieces], np.int64)
    offsets = compute_offsets(counts)
    if not pieces:
        return EncodedTexts(
            np.empty(0, np.int32), offsets, np.empty(0, np.int64), np.empty(0, np.int64), reference_texts
        )
    ids, starts, ends = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return EncodedTexts(ids, offsets, starts, ends, reference_texts)


def replace_texts(
    encoded: EncodedTexts, places: Ints, other: EncodedTexts, chosen: Ints | None = None, *, counted: bool = True
) -> EncodedTexts:
    """Replace the texts of `encoded` at `places` by the `chosen` ones of `other`; `counted` adds the counts of these.

    By default the texts of `other` are as many as the places, in their order.
    """
    chosen = np.arange(len(places)) if chosen is None else chosen
    begins, sizes = encoded.offsets[:-1].copy(), np.diff(encoded.offsets)
    begins[places] = len(encoded.ids) + other.offsets[chosen]
    sizes[places] = np.diff(other.offsets)[chosen]
    tokens = expand_ranges(begins, sizes)
    return EncodedTexts(
        np.concatenate((encoded.ids, other.ids))[tokens],
        compute_offsets(sizes),
        np.concatenate((encoded.starts, other.starts))[tokens],
        np.concatenate((encoded.ends, other.ends))[tokens],
        encoded.reference_texts + counted * other.reference_texts,
        encoded.altered + counted * other.altered,
    )


def locate_tokens(
    ids: NDArray[np.uint32], offsets: Ints, texts: Sequence[str], known: TokenLengths
) -> tuple[Ints, Ints, Ints]:
    """Return the first byte of each token within its own text, the byte behind its last one, as the reference does.

    The third are the texts whose positions are unknown: int64[K].
    """
    lengths = known.lengths[ids]
    sizes = np.array(count_utf8_bytes(texts), np.int64)
    # The tokens that begin with a space which the text does not have.
    prefixed = np.empty(0, np.int64)
    if known.prefix is not DummyPrefix.NEVER and len(ids):
        added, opens = known.added[ids], np.zeros(len(ids), bool)
        opens[offsets[:-1][np.diff(offsets) > 0]] = True
        if known.prefix is DummyPrefix.BEFORE_SECTION:
            opens[1:] |= added[:-1]
        prefixed = np.flatnonzero(opens & ~added)
    lengths[prefixed] -= 1
    begins = compute_offsets(lengths)
    before = begins[offsets]
    starts = begins[:-1] - np.repeat(before[:-1], np.diff(offsets))
    unknown = np.diff(before) != sizes
    if known.prefix is DummyPrefix.BEFORE_TEXT:
        unknown |= np.fromiter((text.startswith(" ") for text in texts), bool, len(texts))
    ends = starts + lengths
    partial = np.flatnonzero(known.partial[ids]) if known.partial.any() else np.empty(0, np.int64)
    alone = prefixed[lengths[prefixed] == 0]
    if len(partial) or len(alone):
        bases = np.repeat(np.cumsum(sizes) - sizes, np.diff(offsets))
        # The byte behind the last text begins no character and belongs to none.
        raw = np.frombuffer("".join(texts).encode() + b"\0", np.uint8)
        continues = (raw & 0xC0) == 0x80
        last = len(raw) - 1
        for _ in range(3):
            places = np.clip(bases[partial] + starts[partial], 0, last)
            starts[partial] -= continues[places]
        ends[alone] += 1
        both = np.concatenate((partial, alone))
        for _ in range(3):
            places = np.clip(bases[both] + ends[both], 0, last)
            ends[both] += continues[places]
    return starts, ends, np.flatnonzero(unknown)


# ── Engines ──


def _open_gigatoken(backend: str) -> EncodeTexts:
    from gigatoken.gigatoken_rs import load_hf_json

    engine = load_hf_json(backend)

    def encode(texts: Sequence[str]) -> FlatIds:
        # Text by text, as fast as its batches: these keep a second cache, return arrays of awkward, which takes 0.2 s
        # to import, and use a thread pool, which does not survive a fork.
        rows = [engine.encode(text) if text else _NO_IDS for text in texts]
        return np.concatenate((_NO_IDS, *rows)), np.cumsum([0, *map(len, rows)], dtype=np.int64)

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
        """Encode a batch, or text by text where that fails; never raises because of a text."""
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
                if not isinstance(error, Exception):
                    # What an engine that panicked holds may be half changed.
                    self._panics += 1
                    self._encode = None
                    _LOG.warning("tokenizer: %s panicked (%s); its text takes the reference path", self._name, error)
        if len(texts) == 1 or self._panics >= MAX_PANICS:
            return EngineResult(_NO_IDS, np.zeros(len(texts) + 1, np.int64), [*range(len(texts))])
        alone = [self.encode([text]) for text in texts]
        ids, failed = [_NO_IDS, *(one.ids for one in alone)], [i for i, one in enumerate(alone) if one.failed]
        return EngineResult(np.concatenate(ids), np.cumsum([*map(len, ids)], dtype=np.int64), failed)


def is_engine_failure(error: BaseException) -> bool:
    """Return whether an engine raised this about a text: an exception, or a panic, which Rust raises past those."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _read_resident_bytes() -> int:
    """Return the memory of this process: what it holds now, or, where no system says that, the most it held."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@dataclass(frozen=True, slots=True)
class TokenizerCard:
    """The identity of a tokenizer: everything that determines its ids, and the properties that other modules read.

    A card does not depend on the path or name by which the tokenizer was opened: a copy has the same card. `files`:
    digests of its files; `added`: its added tokens as `(id, content, special)`; `chat_template`: its template, or
    several by name.

    `engine` makes its ids: the first of the fast ones, in the release `engine_version`, that gave the reference's ids
    on the probe texts, or the reference; `refused` says why not those before it. Engines give the same ids, so they are
    no part of `digest`.
    """

    digest: str
    files: dict[str, str]
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    special_tokens: dict[str, str]
    added: tuple[tuple[int, str, bool], ...]
    chat_template: str | dict[str, str] | None
    adds_bos: bool
    adds_eos: bool
    byte_level: bool
    engine: str
    engine_version: str | None
    refused: dict[str, str]

    @property
    def fast(self) -> bool:
        """Whether another engine than the reference makes the ids."""
        return self.engine != REFERENCE_ENGINE

    def describe(self) -> dict[str, Any]:
        """Return what shards and manifests say of the tokenizer.

        Bytes of shards depend on it, so nothing in it depends on the engine.
        """
        return {
            "tokenizer_digest": self.digest, "tokenizer_files": self.files,
            "vocab_size": self.vocab_size, "bos_id": self.bos_id, "eos_id": self.eos_id, "pad_id": self.pad_id,
            "byte_level": self.byte_level,
        }  # fmt: skip

    def token(self, token_id: int | None) -> str | None:
        """Return the text of an added token; None for other ids."""
        return next((content for one, content, _ in self.added if one == token_id), None)


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer as plain data that can be sent to workers: the card and the backend's JSON text.

    `token_lengths` and `token_bytes` follow from the backend; they are kept with it, since parsing 150,000 tokens takes
    0.2 s. None where they were not kept, or have no use.
    """

    card: TokenizerCard
    backend: str
    token_lengths: TokenLengths | None = field(default=None, compare=False, repr=False)
    token_bytes: TokenBytes | None = field(default=None, compare=False, repr=False)


class Encoder:
    """Encodes and decodes with one tokenizer; opening one of 150,000 tokens takes a second, so once per process."""

    def __init__(self, tokenizer: LoadedTokenizer, *, fast_path: bool = True, reference: Any = None) -> None:
        """Store the arguments; engine and reference are opened at their first use.

        `reference` is the backend of another encoder with the same backend text, which need not be opened twice.
        """
        self.loaded = tokenizer
        self.card = tokenizer.card
        self._backend = tokenizer.backend
        self._reference = reference
        self._takes_fast_path = fast_path and tokenizer.card.fast

    @cached_property
    def _has_engine(self) -> bool:
        """Whether an engine makes the ids: not if another release is installed than was compared with the reference."""
        return self._takes_fast_path and self.card.engine_version == get_engine_version(self.card.engine)

    @cached_property
    def _fast(self) -> FastEngine:
        """The card's engine."""
        return FastEngine(self.card.engine, self._backend)

    @cached_property
    def reference(self) -> Any:
        """The `tokenizers` backend that `transformers` calls."""
        return open_reference_backend(self._backend) if self._reference is None else self._reference

    def open_engines(self) -> None:
        """Open now what is otherwise opened at its first use, so that processes forked later share it."""
        _ = self.reference
        if self._has_engine:
            _ = self._fast, self._token_lengths

    def to_transformers(self) -> Any:
        """Return the tokenizer as `transformers` opens it, with its chat template; takes seconds."""
        from transformers import PreTrainedTokenizerFast

        tokens = {name: text for name, text in self.card.special_tokens.items() if name.endswith("_token")}
        opened = PreTrainedTokenizerFast(tokenizer_object=open_reference_backend(self._backend), **tokens)
        opened.chat_template = self.card.chat_template
        return opened

    @cached_property
    def _ordinary_text_backend(self) -> Any:
        """The tokenizer without its added tokens, for strings that must stay ordinary text.

        Its vocabulary is the reference's own: to open one of 150,000 tokens again takes half a second.
        """
        steps = {"normalizer": self.reference.normalizer, "pre_tokenizer": self.reference.pre_tokenizer}
        described = {name: None if step is None else orjson.loads(step.__getstate__()) for name, step in steps.items()}
        empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        opened = open_reference_backend(_remove_dummy_prefix(orjson.dumps(empty | described).decode()))
        opened.model = self.reference.model
        return opened

    @cached_property
    def _continuation_backend(self) -> Any:
        """The tokenizer without the space that SentencePiece adds before a text, for continuations."""
        # A byte-level tokenizer has no such space, and is not opened a second time.
        return self.reference if self.card.byte_level else open_reference_backend(_remove_dummy_prefix(self._backend))

    @cached_property
    def _token_lengths(self) -> TokenLengths:
        if self.loaded.token_lengths is not None:
            return self.loaded.token_lengths
        lengths = read_token_lengths(self._backend, byte_level=self.card.byte_level)
        assert not isinstance(lengths, str), lengths
        return lengths

    def read_token_bytes(self) -> TokenBytes | None:
        """Return the bytes of every id; None if ids stand for no fixed bytes."""
        kept = self.loaded.token_bytes
        return read_token_bytes(self._backend, byte_level=self.card.byte_level) if kept is None else kept

    @cached_property
    def _fast_continuation(self) -> FastEngine:
        return FastEngine(self.card.engine, _remove_dummy_prefix(self._backend))

    @cached_property
    def can_spare_engine(self) -> bool:
        """Whether `encode` gives the same with the reference's ids instead of the engine's, positions included."""
        return self._has_engine and self.card.byte_level

    def encode(self, texts: Sequence[str], *, continuation: bool = False, spares_engine: bool = False) -> EncodedTexts:
        """Encode texts to the ids that `transformers` gives without adding special tokens.

        A `continuation` of another text is encoded without the tokenizer's leading space. A text that the engine
        refuses, or whose tokens do not add up to its bytes, takes the reference path. With `spares_engine`, if it can
        be spared, the ids are the reference's own, and the engine need not be open.
        """
        if not self._has_engine:
            return self._encode_reference(texts, continuation=continuation)
        # A byte-level tokenizer has no leading space.
        continuation = continuation and not self.card.byte_level
        lengths = self._token_lengths
        if spares_engine and self.can_spare_engine:
            encodings = self.reference.encode_batch_fast(list(texts), add_special_tokens=False)
            rows = [np.array(encoding.ids, np.uint32) for encoding in encodings]
            ids, offsets = np.concatenate((_NO_IDS, *rows)), np.cumsum([0, *map(len, rows)], dtype=np.int64)
            found = EngineResult(ids, offsets, [])
        elif continuation:
            lengths = replace(lengths, prefix=DummyPrefix.NEVER)
            found = self._fast_continuation.encode(texts)
        else:
            found = self._fast.encode(texts)
        starts, ends, unlocated = locate_tokens(found.ids, found.offsets, texts, lengths)
        encoded = EncodedTexts(found.ids.view(np.int32), found.offsets, starts, ends, 0)
        if not len(unlocated) and not found.failed:
            return encoded
        again = find_distinct(np.concatenate((unlocated, np.array(found.failed, np.int64))))
        some = [texts[place] for place in again.tolist()]
        return replace_texts(encoded, again, self._encode_reference(some, continuation=continuation))

    def _encode_reference(self, texts: Sequence[str], *, continuation: bool) -> EncodedTexts:
        backend = self._continuation_backend if continuation else self.reference
        encodings = backend.encode_batch(list(texts), add_special_tokens=False)
        pieces = [self._locate_token_bytes(text, one) for text, one in zip(texts, encodings, strict=True)]
        joined = join_encodings(pieces, reference_texts=len(texts))
        if continuation:
            return joined
        decoded = backend.decode_batch([encoding.ids for encoding in encodings], skip_special_tokens=False)
        altered = sum(
            self._strip_spaces_after_added(one) != self._strip_spaces_after_added(text)
            for one, text in zip(decoded, texts, strict=True)
        )
        return replace(joined, altered=altered)

    def _strip_spaces_after_added(self, text: str) -> str:
        """Return a text without the spaces after added tokens, which decoding may add."""
        return self._after_added_pattern.sub(r"\1", text)

    @cached_property
    def _after_added_pattern(self) -> re.Pattern[str]:
        added = sorted((content for _, content, _ in self.card.added if content), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, added))}) +") if added else re.compile(r"(?!)()")

    def _locate_token_bytes(self, text: str, encoding: Any) -> "tuple[NDArray[np.int32], Ints, Ints]":
        ids = np.array(encoding.ids, np.int32)
        if self.card.byte_level:
            lengths = self._token_lengths.lengths[ids]
            if int(lengths.sum()) == len(text.encode()):
                ends = np.cumsum(lengths)
                return ids, ends - lengths, ends
        chars = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        at = compute_byte_positions(text)
        return ids, at[chars[:, 0]], at[chars[:, 1]]

    def encode_continuation_ids(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], Ints]:
        """Encode continuations as the reference does, but return only ids and offsets, which is twice as fast."""
        encodings = self._continuation_backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        offsets = compute_offsets(counts)
        return np.concatenate(ids) if ids else np.empty(0, np.int32), offsets

    def encode_pieces(
        self,
        texts: Sequence[str],
        ordinary: Sequence[Sequence[tuple[int, int]]],
        cuts: Sequence[Sequence[int]] | None = None,
        *,
        continuation: bool = False,
        encode: Callable[..., EncodedTexts] | None = None,
    ) -> EncodedTexts:
        """Encode texts in pieces; a `continuation` of other texts without the tokenizer's leading space.

        The character ranges `ordinary[i]` of text i, which must not become control tokens, are encoded each by itself,
        and so is what is between them, cut before the characters `cuts[i]`; that by `encode`, if it is given, which
        takes what the method of this name takes.
        """
        pieces: list[str] = []
        between: list[str] = []
        apart: list[int] = []
        later: list[int] = []
        counts: list[int] = []
        for i, text in enumerate(texts):
            ranges = _cut_into_pieces(text, ordinary[i], () if cuts is None else cuts[i])
            counts.append(len(ranges))
            for start, end, is_ordinary in ranges:
                if is_ordinary:
                    apart.append(len(pieces))
                elif start:
                    later.append(len(pieces))
                pieces.append(text[start:end])
                between.append("" if is_ordinary else pieces[-1])
        encode = encode or self.encode
        encoded = encode(between, continuation=continuation)
        # Only then may a text have other ids than the same text as continuation text.
        if later and not continuation and not self.can_spare_engine:
            again = encode([between[i] for i in later], continuation=True)
            encoded = replace_texts(encoded, np.array(later, np.int64), again, counted=False)
        if apart:
            # These texts must not become control tokens.
            ordered = sorted({pieces[i] for i in apart})
            encodings = self._ordinary_text_backend.encode_batch(ordered, add_special_tokens=False)
            found = join_encodings(list(map(self._locate_token_bytes, ordered, encodings)), reference_texts=0)
            places = {text: place for place, text in enumerate(ordered)}
            chosen = np.array([places[pieces[i]] for i in apart], np.int64)
            encoded = replace_texts(encoded, np.array(apart, np.int64), found, chosen)
        return rejoin_pieces(encoded, pieces, np.array(counts, np.int64))

    @cached_property
    def _is_added(self) -> Bools:
        """Which ids are added tokens, and one more, which is none."""
        ids = [token_id for token_id, _, _ in self.card.added]
        is_added = np.zeros(max(ids, default=-1) + 2, bool)
        is_added[ids] = True
        return is_added

    def find_added_tokens(self, ids: NDArray[np.int32]) -> Bools:
        """Return which ids are those of added tokens."""
        return self._is_added.take(ids, mode="clip")

    @cached_property
    def _added_tokens(self) -> tuple[dict[int, str], Bools]:
        """The added tokens by id, and which of the engine's ids they have: bool[ids]."""
        added = {token_id: content for token_id, content, _ in self.card.added if content}
        is_added = np.zeros(max((len(self._token_lengths.lengths), *(token_id + 1 for token_id in added))), bool)
        is_added[list(added)] = True
        return added, is_added

    def find_control_strings(self, texts: Sequence[str], encoded: EncodedTexts) -> set[str]:
        """Return the added tokens that occur in a batch, also those of which an engine made other tokens."""
        added, is_added = self._added_tokens
        found = {added[token_id] for token_id in find_distinct(encoded.ids[is_added[encoded.ids]]).tolist()}
        # Searched together: with one automaton a millisecond for a million characters, one by one a hundred.
        others = sorted(set(added.values()) - found, key=len, reverse=True)
        if others:
            pattern = "|".join(map(re.escape, others))
            hits = pc.match_substring_regex(pa.array(texts, pa.large_string()), pattern)
            for place in np.flatnonzero(hits.to_numpy(zero_copy_only=False)).tolist():
                found.update(re.findall(pattern, texts[place]))
        return found

    def matches_reference(
        self, texts: Sequence[str], encoded: EncodedTexts, stretches: Sequence[Stretch], *, continuation: bool = False
    ) -> bool:
        """Return whether the tokens of stretches of texts are the reference's, and their bytes if it reports them.

        A stretch that differs may be cut where the tokenizer has no border: its whole text decides.
        """
        backend = self._continuation_backend if continuation else self.reference
        # Without the characters of each token, which take as long as the ids, where they follow from these.
        encode = backend.encode_batch_fast if self.card.byte_level else backend.encode_batch
        framed = [one.lead + texts[one.text][one.begin : one.end] + one.tail for one in stretches]
        # System prompts and tools are the same in many texts: half of the stretches of dialogues with tools.
        distinct = list(dict.fromkeys(framed))
        encodings = dict(zip(distinct, encode(distinct, add_special_tokens=False), strict=True))
        for one, text in zip(stretches, framed, strict=True):
            own = texts[one.text]
            if self._equals(one, own, text, encodings[text], encoded):
                continue
            if not one.lead and not one.tail:
                return False
            whole = Stretch(one.text, 0, len(own))
            if not self._equals(whole, own, own, encode([own], add_special_tokens=False)[0], encoded):
                return False
        return True

    def _equals(self, one: Stretch, own: str, framed: str, expected: Any, encoded: EncodedTexts) -> bool:
        """Return whether a text has the tokens in a stretch that the reference gave for the stretch in its frame."""
        tokens = slice(int(encoded.offsets[one.text]), int(encoded.offsets[one.text + 1]))
        ids, starts, ends = encoded.ids[tokens], encoded.starts[tokens], encoded.ends[tokens]
        if self.card.byte_level and framed == own:
            return expected.ids == ids.tolist()
        other_ids, other_starts, other_ends = self._locate_token_bytes(framed, expected)
        begin, lead = len(own[: one.begin].encode()), len(one.lead)
        size = len(own[one.begin : one.end].encode())
        first, last = np.searchsorted(starts, begin), np.searchsorted(ends, begin + size, "right")
        other_first = np.searchsorted(other_starts, lead)
        other_last = np.searchsorted(other_ends, lead + size, "right")
        return (
            np.array_equal(ids[first:last], other_ids[other_first:other_last])
            and np.array_equal(starts[first:last] - begin, other_starts[other_first:other_last] - lead)
            and np.array_equal(ends[first:last] - begin, other_ends[other_first:other_last] - lead)
        )

    def without_fast_path(self) -> "Encoder":
        """Return an encoder that takes only the reference path, for a batch in which the paths differed."""
        return Encoder(self.loaded, fast_path=False, reference=self.reference)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens included, as the reference does."""
        return cast(str, self.reference.decode(list(ids), skip_special_tokens=False))

    def decode_texts(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Decode several lists of ids without their control tokens; ids that no token has are left out."""
        return cast("list[str]", self.reference.decode_batch(list(ids), skip_special_tokens=True))


def _cut_into_pieces(
    text: str, ordinary: Sequence[tuple[int, int]], cuts: Sequence[int]
) -> list[tuple[int, int, bool]]:
    """Cut a text at the edges of its ordinary ranges and, outside of them, before the characters `cuts`.

    Returns the range of each piece, and whether it is ordinary.
    """
    if not ordinary and not cuts:
        return [(0, len(text), False)]
    outside = [(cut, cut) for cut in cuts if not any(start < cut < end for start, end in ordinary)]
    places = sorted([*ordinary, *outside])
    pieces: list[tuple[int, int, bool]] = []
    position = 0
    for start, end in (*places, (len(text), len(text))):
        if position < start:
            pieces.append((position, start, False))
        if start < end:
            pieces.append((start, end, True))
        position = end
    return pieces


def _remove_dummy_prefix(backend: str) -> str:
    def strip(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        one = cast("dict[str, Any]", node)
        if one.get("type") == "Sequence":
            for name in ("normalizers", "pretokenizers"):
                if name in one:
                    kept = [strip(n) for n in one[name] if n.get("type") != "Prepend"]
                    one = one | {name: kept}
            return one
        if one.get("type") == "Metaspace":
            return one | {"prepend_scheme": "never"}
        return None if one.get("type") == "Prepend" else one

    parsed: dict[str, Any] = orjson.loads(backend)
    changed = {"normalizer": strip(parsed["normalizer"]), "pre_tokenizer": strip(parsed["pre_tokenizer"])}
    return orjson.dumps(parsed | changed).decode()


TOKENIZATION_VERSION = 3
"""Increment it when the ids or token spans of any text may change."""


PROBE_TEXTS = (
    "Hello, world!", " leading and trailing ", "Tabs\tand\nnewlines\r\n\r\n\n\n", "naïve café — “quotes” … ½ ﬁ",
    "日本語のテキストと漢字。", "Привет, мир! Это проверка.", "مرحبا بالعالم", "हिन्दी में परीक्षण", "한국어 시험입니다",
    "ภาษาไทย",
    "👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈", "e\u0301 vs \u00e9; \u212b vs \u00c5", "a" * 300, "0123456789" * 20, "1,234,567.89 $€£¥",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": None}  # ok\n", "<|im_start|>user\nHi<|im_end|>\n",
    "<think>\n\n</think>\n\n",
    "</s><s>[INST] x [/INST]", "don't we'll I'M THEY'RE", "   \n   \n", "\u00a0\u2003\u200b\ufeff\u2028x",
    "http://a.b/c?d=e&f=g#h",
    "\\begin{equation} \\frac{a}{b} \\end{equation}", "CamelCaseAndsnake_case-kebab", "\x00\x01\x7f", "",
)  # fmt: skip


def open_tokenizer(name: str, base: Path) -> LoadedTokenizer:
    """Load a tokenizer through `transformers` from a folder or from the hub, never running its code."""
    return load_encoder(find_tokenizer(TokenizerChoice(name=name), base)).loaded


def load_encoder(found: FoundTokenizer) -> Encoder:
    """Load a found tokenizer and return its encoder, open; without a Rust backend, it reports no offsets."""
    from transformers import AutoTokenizer

    name, folder = found.choice.name, found.fetch()
    try:
        hf: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, use_fast=True)
    except Exception as error:
        first = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"tokenizer: {name!r} cannot be loaded ({type(error).__name__}: {first}); expected a folder with "
            "tokenizer.json and tokenizer_config.json, or a hub name; point `tokenizer` at one"
        ) from error
    if getattr(hf, "backend_tokenizer", None) is None or not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"tokenizer: {name!r} has no tokenizer.json, which is needed to find the characters of a token; "
            "save it once with AutoTokenizer.from_pretrained(…).save_pretrained(folder)"
        )
    return _choose_engine(*_make_loaded_tokenizer(hf, folder))


def wrap_tokenizer(hf: Any) -> LoadedTokenizer:
    """Convert a `transformers` tokenizer, opened and perhaps changed by the caller, to plain data."""
    if getattr(hf, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"tokenizer: {type(hf).__name__} has no Rust backend, which is needed to find the characters of a token; "
            "open it with use_fast=True"
        )
    return _choose_engine(*_make_loaded_tokenizer(hf, None)).loaded


def _make_loaded_tokenizer(hf: Any, folder: Path | None) -> tuple[LoadedTokenizer, Any]:
    """Convert an open tokenizer to plain data that names the reference as its engine; return the reference, open."""
    backend = cast(str, hf.backend_tokenizer.to_str())
    parsed: dict[str, Any] = orjson.loads(backend)
    decoder = orjson.dumps(parsed.get("decoder")).decode()
    byte_level = parsed["model"]["type"] == "BPE" and "ByteLevel" in decoder and "ByteFallback" not in decoder
    added = tuple((int(i), str(t.content), bool(t.special)) for i, t in sorted(hf.added_tokens_decoder.items()))
    plain = cast("list[int]", hf.encode("a", add_special_tokens=False))
    with_special = cast("list[int]", hf.encode("a", add_special_tokens=True))
    files = {"backend": digest_bytes(backend.encode())} if folder is None else hash_tokenizer_files(folder)
    special = {k: str(v) for k, v in hf.special_tokens_map.items() if isinstance(v, str)}
    card = TokenizerCard(
        digest=digest_json(files, digest_bytes(backend.encode()), special),
        files=files,
        vocab_size=len(hf),
        bos_id=hf.bos_token_id,
        eos_id=hf.eos_token_id,
        pad_id=hf.pad_token_id,
        special_tokens=special,
        added=added,
        chat_template=hf.chat_template,
        adds_bos=with_special[: len(with_special) - len(plain)][:1] == [hf.bos_token_id] and with_special != plain,
        adds_eos=with_special != plain and with_special[-1] == hf.eos_token_id,
        byte_level=byte_level,
        engine=REFERENCE_ENGINE,
        engine_version=None,
        refused={},
    )
    arranged = arrange_for_opening(backend)
    reference = open_reference_backend(arranged)
    if reference.to_str() != backend:
        arranged, reference = backend, open_reference_backend(backend)
    return LoadedTokenizer(card=card, backend=arranged), reference


def arrange_for_opening(backend: str) -> str:
    """Return a BPE backend's JSON text as it is opened fastest: tokens in the order of their bytes, merges as strings.

    `tokenizers` inserts the tokens into a sorted map, and makes two strings of a merge that is a pair: Qwen3's takes
    0.22 s instead of 0.31, SmolLM3's 0.46 instead of 0.62; the engines take as long as before. A text is left as it is
    if a merge cannot be a string, because its tokens have a blank or begin like a comment.
    """
    parsed: dict[str, Any] = orjson.loads(backend)
    model = parsed["model"]
    if model["type"] != "BPE":
        return backend
    merges: list[list[str]] = model["merges"]
    if any(type(pair) is not list or " " in pair[0] + pair[1] or pair[0].startswith("#version") for pair in merges):
        return backend
    # UTF-8 sorts as the characters' numbers do.
    arranged = {"vocab": dict(sorted(model["vocab"].items())), "merges": [" ".join(pair) for pair in merges]}
    return orjson.dumps(parsed | {"model": model | arranged}).decode()


def _choose_engine(tokenizer: LoadedTokenizer, backend: Any) -> Encoder:
    """Compare the fast engines with the reference on the probe texts; open the first without a difference."""
    reference, refused = Encoder(tokenizer, reference=backend), dict[str, str]()
    lengths = read_token_lengths(tokenizer.backend, byte_level=tokenizer.card.byte_level)
    if isinstance(lengths, str):
        refused = dict.fromkeys(FAST_ENGINES, lengths)
    else:
        texts = [*PROBE_TEXTS, *(_PROBE_OF_ADDED.replace("T", content) for _, content, _ in tokenizer.card.added)]
        expected = _encode_both_ways(reference, texts)
        for name in FAST_ENGINES:
            card = replace(tokenizer.card, engine=name, engine_version=get_engine_version(name), refused=dict(refused))
            found = _open_and_compare(replace(tokenizer, card=card), reference, texts, expected)
            if isinstance(found, Encoder):
                return found
            refused[name] = found
    return Encoder(replace(tokenizer, card=replace(tokenizer.card, refused=refused)), reference=reference.reference)


_PROBE_OF_ADDED = "aTb T c\nT\n TT é"
"""`T` is an added token: beside letters, spaces and itself."""


def _encode_both_ways(encoder: Encoder, texts: list[str]) -> list[EncodedTexts]:
    """Encode texts, and as continuation texts where that is something else."""
    return [encoder.encode(texts), *([] if encoder.card.byte_level else [encoder.encode(texts, continuation=True)])]


def _open_and_compare(
    candidate: LoadedTokenizer, reference: Encoder, texts: list[str], expected: list[EncodedTexts]
) -> Encoder | str:
    """Return an encoder with a card's engine, or why that engine may not make the tokenizer's ids."""
    try:
        encoder = Encoder(candidate, reference=reference.reference)
        found = _encode_both_ways(encoder, texts)
    # Whatever an engine refuses, the reference still works.
    except BaseException as error:
        if not is_engine_failure(error):
            raise
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    for one, other in zip(found, expected, strict=True):
        for name in ("offsets", "ids", "starts", "ends"):
            if not np.array_equal(getattr(one, name), getattr(other, name)):
                return f"other {name} of tokens for the probe texts"
        if not candidate.card.byte_level and one.altered != other.altered:
            return "texts whose bytes add up do not decode to themselves"
        if one.reference_texts > len(texts) // 2:
            return "the bytes of its tokens rarely add up to those of the text"
    return encoder
