"""Text and character spans in, token ids and token spans out; the fast lane and the usual way.

What belongs here: loading a tokenizer once, encoding batches, mapping characters to tokens, keeping
control-token strings of the data from becoming control tokens. What does not: which characters train
(`masking.py`) and how text comes to be (`rendering.py`).

Two lanes give the same ids. *Fast*: `fastokens` encodes a batch into one flat buffer, and because every id
of a byte-level vocabulary stands for a known number of bytes, one cumulative sum tells where each token
lies. *Usual*: the `tokenizers` library, which is what `transformers` uses. The fast lane is taken only for
tokenizers that gave the same ids on the probe texts, is compared again on a sample of every part, and any
text whose bytes do not add up (a normaliser changed it) goes the usual way by itself.

    text        "a<|im_end|>b"                       bytes  0 1          11 12
    tokens      ["a", "<|im_end|>", "b"]             ends     1          11 12
    as_text     ["a", "<", "|", "im", "_end", "|", ">", "b"]   the string came from the data
"""

import base64
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.core.storage import digest_bytes, digest_json
from rowmill.tokenization.tokenizer_source import FoundTokenizer, TokenizerChoice, find_tokenizer, hash_tokenizer_files

TOKENIZATION_VERSION = 3
"""Raise it when ids or token spans of any text may come out differently."""

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenizerCard:
    """The identity card of a tokenizer: what decides ids, and what others need to know about it.

    It holds nothing of the path or name that opened the tokenizer: a copy has the same card. `files` are digests of its
    files; `added` are its added tokens as `(id, content, special)`;
    `chat_template` is its own template, or several by name. `fast` tells whether the fast lane passed the
    probe; if not, `why_usual` says why.
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
    fast: bool
    why_usual: str

    def token(self, token_id: int | None) -> str | None:
        """Return the text of an added token, or None."""
        return next((content for one, content, _ in self.added if one == token_id), None)


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer as data that can travel to workers: the card and the backend's JSON text."""

    card: TokenizerCard
    backend: str


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
    """Load a tokenizer through `transformers` from a folder or from the hub, never running its code.

    Raises
    ------
    ConfigError
        If there is no tokenizer, or none with a Rust backend (only those know their byte offsets).
    UnreachableError
        If the hub does not answer.

    """
    return load_tokenizer(find_tokenizer(TokenizerChoice(name=name), base))


def load_tokenizer(found: FoundTokenizer) -> LoadedTokenizer:
    """Load a tokenizer that was found; errors as in `open_tokenizer`."""
    folder = found.fetch()
    return _make_loaded_tokenizer(_load_from_folder(found.choice.name, folder), folder)


def wrap_tokenizer(hf: Any) -> LoadedTokenizer:
    """Return a tokenizer of `transformers` that a program has opened, and perhaps changed, as data.

    Raises
    ------
    ConfigError
        If it has no Rust backend.

    """
    if getattr(hf, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"tokenizer: {type(hf).__name__} has no Rust backend; only such tokenizers can tell which characters a "
            "token covers; open it with use_fast=True"
        )
    return _make_loaded_tokenizer(hf, None)


def _make_loaded_tokenizer(hf: Any, folder: Path | None) -> LoadedTokenizer:
    backend = cast(str, hf.backend_tokenizer.to_str())
    parsed: dict[str, Any] = orjson.loads(backend)
    byte_level = _is_byte_level(parsed)
    fast, why = _probe_fast_path(backend, byte_level)
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
        fast=fast,
        why_usual=why,
    )
    return LoadedTokenizer(card=card, backend=backend)


def _load_from_folder(name: str, folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        hf: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, use_fast=True)
    except Exception as error:
        first = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"tokenizer: {name!r} cannot be loaded ({type(error).__name__}: {first}); a folder with tokenizer.json and "
            "tokenizer_config.json, or a hub name, is needed; point `tokenizer` at one"
        ) from error
    if getattr(hf, "backend_tokenizer", None) is None or not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"tokenizer: {name!r} has no tokenizer.json; only tokenizers with that file can tell which characters a "
            "token covers; save it once with AutoTokenizer.from_pretrained(…).save_pretrained(folder)"
        )
    return hf


def _is_byte_level(parsed: dict[str, Any]) -> bool:
    decoder = orjson.dumps(parsed.get("decoder")).decode()
    return parsed["model"]["type"] == "BPE" and "ByteLevel" in decoder and "ByteFallback" not in decoder


def _probe_fast_path(backend: str, byte_level: bool) -> tuple[bool, str]:
    """Compare both lanes on the probe texts; a tokenizer with any difference takes the usual way."""
    if not byte_level:
        return False, "not a byte-level BPE"
    try:
        fast = _open_fast_backend(backend)
        ids, offsets = _encode_flat(fast, PROBE_TEXTS)
    except Exception as error:  # noqa: BLE001  (whatever the fast engine dislikes, the usual way still works)
        return False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    usual = _open_reference_backend(backend)
    for i, one in enumerate(usual.encode_batch(list(PROBE_TEXTS), add_special_tokens=False)):
        if one.ids != ids[offsets[i] : offsets[i + 1]].tolist():
            return False, f"other ids for probe text {i}"
    return True, ""


def _open_fast_backend(backend: str) -> Any:
    from fastokens import Tokenizer

    return Tokenizer.from_json_str(backend)


def _open_reference_backend(backend: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(backend)


def _encode_flat(fast: Any, texts: Sequence[str]) -> tuple[NDArray[np.uint32], Ints]:
    ids, offsets = fast.encode_batch_flat(list(texts))
    return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64)


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """A batch of encoded texts.

    `ids` int32[T], `offsets` int64[N + 1] into it; `starts` and `ends` int64[T] are each token's bytes within
    its own text; `usual` counts texts that took the usual way, `altered` those whose ids decode to other text.
    """

    ids: NDArray[np.int32]
    offsets: Ints
    starts: Ints
    ends: Ints
    usual: int
    altered: int = 0


class Encoder:
    """A tokenizer in a worker. Expensive to make (about a second for 150,000 tokens): make one per process."""

    def __init__(self, loaded: LoadedTokenizer, *, fast_lane: bool = True) -> None:
        """Open the fast lane if it is wanted and the card allows it; the usual one is opened when first needed."""
        self.card = loaded.card
        self._backend = loaded.backend
        self._fast: Any = _open_fast_backend(loaded.backend) if fast_lane and loaded.card.fast else None

    @cached_property
    def usual(self) -> Any:
        """The reference: the `tokenizers` backend that `transformers` itself calls."""
        return _open_reference_backend(self._backend)

    def to_transformers(self) -> Any:
        """Return the tokenizer as `transformers` would open it, chat template included; takes seconds."""
        from transformers import PreTrainedTokenizerFast

        tokens = {name: text for name, text in self.card.special_tokens.items() if name.endswith("_token")}
        opened = PreTrainedTokenizerFast(tokenizer_object=_open_reference_backend(self._backend), **tokens)
        opened.chat_template = self.card.chat_template
        return opened

    @cached_property
    def _ordinary_text_backend(self) -> Any:
        """The same tokenizer without its added tokens, for strings that must stay ordinary text."""
        return _open_reference_backend(_remove_dummy_prefix(_remove_added_tokens(self._backend)))

    @cached_property
    def _continuation_backend(self) -> Any:
        """The same tokenizer without the space that SentencePiece puts before a text, for continuations."""
        return _open_reference_backend(_remove_dummy_prefix(self._backend))

    @cached_property
    def _byte_lengths(self) -> Ints:
        return _read_byte_lengths(self._backend)

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode texts, adding no special tokens: the ids that `transformers` gives.

        A text whose tokens' bytes do not add up to its own takes the usual way.
        """
        if self._fast is None:
            return self._encode_reference(texts)
        ids, offsets = _encode_flat(self._fast, texts)
        lengths = self._byte_lengths[ids]
        ends_flat = np.cumsum(lengths)
        before = np.concatenate(([0], ends_flat))[offsets]
        sizes = np.fromiter((len(t.encode()) for t in texts), np.int64, len(texts))
        wrong = np.flatnonzero(np.diff(before) != sizes)
        starts = ends_flat - lengths - np.repeat(before[:-1], np.diff(offsets))
        encoded = EncodedTexts(ids.astype(np.int32), offsets, starts, starts + lengths, 0)
        if not len(wrong):
            return encoded
        return _replace_texts(encoded, wrong, self._encode_reference([texts[i] for i in wrong.tolist()]))

    def _encode_reference(self, texts: Sequence[str]) -> EncodedTexts:
        encodings = self.usual.encode_batch(list(texts), add_special_tokens=False)
        pieces = [self._locate_token_bytes(text, one) for text, one in zip(texts, encodings, strict=True)]
        decoded = self.usual.decode_batch([one.ids for one in encodings], skip_special_tokens=False)
        altered = sum(
            self._strip_spaces_after_added(one) != self._strip_spaces_after_added(text)
            for one, text in zip(decoded, texts, strict=True)
        )
        return replace(_join_encodings(pieces, usual=len(texts)), altered=altered)

    def _strip_spaces_after_added(self, text: str) -> str:
        """Return a text without the spaces behind added tokens, which decoding may add."""
        return self._after_added_pattern.sub(r"\1", text)

    @cached_property
    def _after_added_pattern(self) -> re.Pattern[str]:
        added = sorted((content for _, content, _ in self.card.added if content), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, added))}) +") if added else re.compile(r"(?!)()")

    def _locate_token_bytes(self, text: str, encoding: Any) -> "tuple[NDArray[np.int32], Ints, Ints]":
        ids = np.array(encoding.ids, np.int32)
        if self.card.byte_level:
            lengths = self._byte_lengths[ids]
            if int(lengths.sum()) == len(text.encode()):
                ends = np.cumsum(lengths)
                return ids, ends - lengths, ends
        chars = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        at = compute_byte_positions(text)
        return ids, at[chars[:, 0]], at[chars[:, 1]]

    def encode_continuation(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode texts as what follows another text: no space of the tokenizer's own before them."""
        if self._fast is not None:
            return self.encode(texts)
        encodings = self._continuation_backend.encode_batch(list(texts), add_special_tokens=False)
        return _join_encodings(
            [self._locate_token_bytes(t, e) for t, e in zip(texts, encodings, strict=True)], usual=len(texts)
        )

    def encode_continuation_ids(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], Ints]:
        """Encode texts as `encode_continuation` does and return ids and offsets alone, which is twice as fast."""
        encodings = self._continuation_backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(one.ids, np.int32) for one in encodings]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        return np.concatenate(ids) if ids else np.empty(0, np.int32), offsets

    def reencode_continuations(self, encoded: EncodedTexts, texts: Sequence[str], places: Ints) -> EncodedTexts:
        """Encode the texts in the given places again, as what follows other text; the rest stays as it is."""
        if self._fast is not None or not len(places):
            return encoded
        chosen: list[int] = places.tolist()
        return _replace_texts(encoded, places, self.encode_continuation([texts[i] for i in chosen]), counted=False)

    def encode_around(self, text: str, ordinary: Sequence[tuple[int, int]], cuts: Sequence[int] = ()) -> EncodedTexts:
        """Encode a text whose character ranges `ordinary` must not become control tokens, each in isolation.

        Before the characters `cuts` the text is cut too, as `rejoined` has it.
        """
        pieces: list[tuple[NDArray[np.int32], Ints, Ints]] = []
        position = 0
        at = compute_byte_positions(text)
        empty = [(cut, cut) for cut in cuts if not any(start < cut < end for start, end in ordinary)]
        for start, end in sorted([*ordinary, *empty, (len(text), len(text))]):
            between = self.usual if position == 0 else self._continuation_backend
            for chosen, left, right in ((between, position, start), (self._ordinary_text_backend, start, end)):
                if left < right:
                    encoding = chosen.encode(text[left:right], add_special_tokens=False)
                    ids, starts, ends = self._locate_token_bytes(text[left:right], encoding)
                    pieces.append((ids, starts + at[left], ends + at[left]))
            position = end
        if not pieces:
            return _join_encodings([], usual=0)
        ids, starts, ends = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return _join_encodings([(ids, starts, ends)], usual=1)

    def matches_reference(self, texts: Sequence[str], encoded: EncodedTexts, chosen: Sequence[int]) -> bool:
        """Compare the chosen texts' ids with the reference's own."""
        expected = self.usual.encode_batch([texts[i] for i in chosen], add_special_tokens=False)
        spans = [encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist() for i in chosen]
        return all(one.ids == ids for one, ids in zip(expected, spans, strict=True))

    def without_fast_path(self) -> "Encoder":
        """Return an encoder that takes the usual way only; for a part in which the lanes differed."""
        return Encoder(LoadedTokenizer(card=self.card, backend=self._backend), fast_lane=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids with control tokens shown, as the reference does."""
        return cast(str, self.usual.decode(list(ids), skip_special_tokens=False))


def rejoin_pieces(encoded: EncodedTexts, pieces: Sequence[str], counts: Ints) -> EncodedTexts:
    """Return encoded pieces as the texts they were cut from: text i is the next `counts[i]` pieces, end to end."""
    sizes = np.fromiter((len(one.encode()) for one in pieces), np.int64, len(pieces))
    before = np.cumsum(sizes) - sizes
    bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    nonempty = counts > 0
    begins = np.zeros(len(counts), np.int64)
    begins[nonempty] = before[bounds[:-1][nonempty]]
    shift = np.repeat(before - np.repeat(begins, counts), np.diff(encoded.offsets))
    return replace(
        encoded,
        offsets=encoded.offsets[bounds],
        starts=encoded.starts + shift,
        ends=encoded.ends + shift,
        usual=min(encoded.usual, len(counts)),
        altered=min(encoded.altered, len(counts)),
    )


def compute_byte_positions(text: str) -> Ints:
    """Return for every character index (and the end) its byte index in UTF-8: int64[len(text) + 1]."""
    raw = text.encode()
    if len(raw) == len(text):
        return np.arange(len(text) + 1, dtype=np.int64)
    first = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
    return np.append(np.flatnonzero(first), len(raw))


def _join_encodings(pieces: "Sequence[tuple[NDArray[np.int32], Ints, Ints]]", usual: int) -> EncodedTexts:
    counts = np.array([len(ids) for ids, _, _ in pieces], np.int64)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    if not pieces:
        return EncodedTexts(np.empty(0, np.int32), offsets, np.empty(0, np.int64), np.empty(0, np.int64), usual)
    ids, starts, ends = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return EncodedTexts(ids, offsets, starts, ends, usual)


def _replace_texts(encoded: EncodedTexts, places: Ints, other: EncodedTexts, *, counted: bool = True) -> EncodedTexts:
    """Put the texts of `other` in the given places of `encoded`; `counted` adds what was counted of them."""
    chosen: dict[int, int] = {int(place): i for i, place in enumerate(places)}
    pieces: list[tuple[NDArray[np.int32], Ints, Ints]] = []
    for i in range(len(encoded.offsets) - 1):
        source, j = (other, chosen[i]) if i in chosen else (encoded, i)
        cut = slice(int(source.offsets[j]), int(source.offsets[j + 1]))
        pieces.append((source.ids[cut], source.starts[cut], source.ends[cut]))
    joined = _join_encodings(pieces, usual=encoded.usual + counted * other.usual)
    return replace(joined, altered=encoded.altered + counted * other.altered)


def _make_byte_alphabet() -> dict[str, int]:
    """Map the 256 printable characters by which byte-level vocabularies write bytes, back to the bytes.

    Source: the GPT-2 encoder: printable Latin-1 characters stand for themselves, the rest for U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _read_byte_lengths(backend: str) -> Ints:
    """Return the number of bytes that each id stands for: int64[largest id + 1], −1 where there is no token."""
    parsed: dict[str, Any] = orjson.loads(backend)
    vocabulary: dict[str, int] = parsed["model"]["vocab"]
    added: list[dict[str, Any]] = parsed["added_tokens"]
    size = max([*vocabulary.values(), *(int(t["id"]) for t in added)]) + 1
    lengths = np.full(size, -1, np.int64)
    ids = np.fromiter(vocabulary.values(), np.int64, len(vocabulary))
    lengths[ids] = np.fromiter(map(len, vocabulary), np.int64, len(vocabulary))
    for token in added:
        lengths[int(token["id"])] = len(str(token["content"]).encode())
    return lengths


def read_token_bytes(backend: str) -> list[bytes]:
    """Return the bytes of every id of a byte-level vocabulary; for showing tokens one by one."""
    parsed: dict[str, Any] = orjson.loads(backend)
    alphabet = _make_byte_alphabet()
    vocabulary: dict[str, int] = parsed["model"]["vocab"]
    table = [b""] * (len(_read_byte_lengths(backend)))
    for text, token_id in vocabulary.items():
        table[token_id] = bytes(alphabet.get(c, 0x3F) for c in text)
    for token in parsed["added_tokens"]:
        table[int(token["id"])] = str(token["content"]).encode()
    return table


def _remove_added_tokens(backend: str) -> str:
    parsed: dict[str, Any] = orjson.loads(backend)
    return orjson.dumps(parsed | {"added_tokens": [], "post_processor": None}).decode()


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


# ── Characters to tokens ───────────────────────────────────────────────────────────────────────────


def find_trained_tokens(encoded: EncodedTexts, spans: "FlatSpans") -> tuple[Bools, int]:
    """Return which tokens train, bool[T], and how many of them straddle a span's edge.

    A token trains if a byte of it lies in a trained span and none is another message's own text, as `transformers`
    and TRL have it; at both edges alike. The first token of a text never trains: nothing precedes it.
    """
    if not len(encoded.ids):
        return np.zeros(0, bool), 0
    first, last, straddles = _find_token_ranges(encoded, spans)
    edges = np.zeros(len(encoded.ids) + 1, np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, last, -1)
    mask = np.cumsum(edges[:-1]) > 0
    nonempty = np.diff(encoded.offsets) > 0
    mask[encoded.offsets[:-1][nonempty]] = False
    return mask, straddles


def compute_token_weights(encoded: EncodedTexts, spans: "FlatSpans", mask: Bools) -> Weights:
    """Return the loss weight of every token, float32[T]: its span's if it trains, else 0.

    `mask` is what `find_trained_tokens` makes of the same spans. A token in two spans has the weight of the later one.
    """
    weights = np.zeros(len(mask), np.float32)
    if spans.weights is None or not len(mask):
        return mask.astype(np.float32)
    first, last, _ = _find_token_ranges(encoded, spans)
    sizes = last - first
    index = np.repeat(first - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
    weights[index] = np.repeat(spans.weights, sizes)
    weights[~mask] = 0
    return weights


def _find_token_ranges(encoded: EncodedTexts, spans: "FlatSpans") -> tuple[Ints, Ints, int]:
    """Return the first token of every span and the one after its last, and how many straddle an edge."""
    base = _compute_text_bases(encoded)
    starts, ends = encoded.starts + base.per_token, encoded.ends + base.per_token
    offset = base.at(spans.texts)
    left, right = spans.starts + offset, spans.ends + offset
    # The first token that ends behind the span's start, and the first that begins at or behind its end.
    first = np.searchsorted(ends, left, "right")
    last = np.searchsorted(starts, right, "left")
    kept = (first < last) & (left < right)
    begins, stops = starts[np.minimum(first, len(starts) - 1)], ends[np.maximum(last - 1, 0)]
    # A straddling token is not this message's alone if it reaches the own text of the message beside it.
    shares_left = kept & (begins < left) & (begins < spans.before + offset)
    first = first + shares_left
    shares_right = kept & (stops > right) & (stops > spans.behind + offset) & (last > first)
    last = last - shares_right
    kept &= first < last
    whole_left, whole_right = np.searchsorted(starts, left, "left"), np.searchsorted(ends, right, "right")
    straddles = int((last - first - np.maximum(whole_right - whole_left, 0))[kept].sum())
    return np.where(kept, first, 0), np.where(kept, last, 0), straddles


def find_token_at(encoded: EncodedTexts, texts: Ints, places: Ints) -> Ints:
    """Return the first token (numbered over the batch) that begins at or after byte `places[i]` of text `texts[i]`."""
    base = _compute_text_bases(encoded)
    found = np.searchsorted(encoded.starts + base.per_token, places + base.at(texts), "left")
    return np.minimum(found, encoded.offsets[texts + 1])


@dataclass(frozen=True, slots=True)
class FlatSpans:
    """Byte ranges over a batch: range i is `[starts[i], ends[i])` of text `texts[i]`, ascending.

    `before` int64 is where the nearest own text of another message ends before each range, 0 without one; `behind`
    where the next one begins, the text's length or more without one. `weights` float32 are the ranges' loss weights
    (null: all weigh 1).
    """

    texts: Ints
    starts: Ints
    ends: Ints
    before: Ints
    behind: Ints
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class _TextBases:
    """Where each text begins when all texts of a batch are laid end to end with a gap between them."""

    per_text: Ints
    per_token: Ints

    def at(self, texts: Ints) -> Ints:
        return self.per_text[texts]


def _compute_text_bases(encoded: EncodedTexts) -> _TextBases:
    counts = np.diff(encoded.offsets)
    last = np.zeros(len(counts), np.int64)
    nonempty = counts > 0
    last[nonempty] = np.maximum.reduceat(encoded.ends, encoded.offsets[:-1][nonempty]) if nonempty.any() else 0
    # The gap keeps a token that ends one text from touching one that starts the next.
    per_text = np.concatenate((np.zeros(1, np.int64), np.cumsum(last + 2)))[:-1]
    return _TextBases(per_text, np.repeat(per_text, counts))


def find_degenerate_texts(encoded: EncodedTexts) -> Bools:
    """Return which texts have tokens with empty or backward offsets: bool[N]; their spans cannot be trusted."""
    bad = encoded.ends <= encoded.starts
    same_text = np.ones(len(bad), bool)
    same_text[encoded.offsets[:-1][np.diff(encoded.offsets) > 0]] = False
    # Byte fallback gives several tokens the same character: equal starts are fine, going back is not.
    bad[1:] |= same_text[1:] & (encoded.starts[1:] < encoded.starts[:-1])
    counts = np.concatenate(([0], np.cumsum(bad)))
    return np.diff(counts[encoded.offsets]) > 0


# ── Control tokens in the data ─────────────────────────────────────────────────────────────────────


class ControlStrings:
    """The strings that must not become control tokens when they stand in a row's own text.

    Control tokens are the special added tokens, and added tokens that occur in the template's source.
    """

    def __init__(self, card: TokenizerCard, template: str) -> None:
        """Collect the strings and a pattern that finds them in a row's JSON text."""
        chosen = {content for _, content, special in card.added if content and (special or content in template)}
        self.strings = tuple(sorted(chosen, key=lambda s: (-len(s), s)))
        self.ids = frozenset(i for i, content, _ in card.added if content in chosen)
        forms = {form for s in self.strings for form in (s, orjson.dumps(s)[1:-1].decode())}
        self.pattern = "|".join(re.escape(form) for form in sorted(forms, key=lambda s: (-len(s), s)))
        self._find = re.compile("|".join(map(re.escape, self.strings))) if self.strings else None
        self._template = template

    def count_occurrences(self, messages: Sequence[dict[str, Json]], tools: Json, kwargs: Json) -> dict[str, int]:
        """Count the strings in a row's own text: `role string` → how often; `tools` and `kwargs` are roles here."""
        counts: dict[str, int] = {}
        if self._find is None:
            return counts
        for role, value in [*((str(m["role"]), m) for m in messages), ("tools", tools), ("kwargs", kwargs)]:
            for found in self._find.findall("\0".join(_iterate_strings(value))):
                counts[f"{role} {found}"] = counts.get(f"{role} {found}", 0) + 1
        return counts

    def find_rows(self, table: pa.Table) -> Bools:
        """Tell which canonical rows hold a control string anywhere in their JSON: bool[N]."""
        found = np.zeros(table.num_rows, bool)
        if not self.strings:
            return found
        for name in ("messages", "tools", "template_kwargs"):
            hits = pc.match_substring_regex(table.column(name), self.pattern)
            found |= hits.fill_null(fill_value=False).to_numpy(zero_copy_only=False)
        return found

    def hide(self, value: Json, row_json: str) -> "tuple[Json, dict[str, str]]":
        """Replace control strings in every string of a JSON value by placeholders of equal length.

        Returns the new value and the map from placeholder to string. Equal length keeps every character
        span of the rendered text valid after the strings are put back.
        """
        present = [s for s in self.strings if s in row_json or orjson.dumps(s)[1:-1].decode() in row_json]
        taken = row_json + self._template
        placeholders: dict[str, str] = {}
        for text in present:
            placeholders[text] = _find_free_placeholder(len(text), taken)
            taken += placeholders[text]
        hidden = _map_strings(value, lambda s: self._substitute(s, placeholders))
        return hidden, {placeholder: text for text, placeholder in placeholders.items()}

    def _substitute(self, text: str, placeholders: dict[str, str]) -> str:
        assert self._find is not None
        return self._find.sub(lambda match: placeholders[match.group()], text)


def restore_control_strings(text: str, placeholders: dict[str, str]) -> tuple[str, list[tuple[int, int]]]:
    """Put control strings back; return the text and the character ranges that must stay ordinary text."""
    if not placeholders:
        return text, []
    pattern = re.compile("|".join(map(re.escape, placeholders)))
    ranges = [match.span() for match in pattern.finditer(text)]
    return pattern.sub(lambda match: placeholders[match.group()], text), ranges


def has_changed_placeholder(text: str, placeholders: dict[str, str]) -> bool:
    """Tell whether a print holds a placeholder in other letters, as a template that lowers its text makes them.

    Those of fewer than six characters could stand anywhere by chance and are not looked for.
    """
    long = [one for one in placeholders if len(one) >= 6]
    if not long:
        return False
    lowered = text.lower()
    return any(lowered.count(one.lower()) > text.count(one) for one in long)


def contains_added_token(
    card: TokenizerCard, encoded: EncodedTexts, text: str, ranges: Sequence[tuple[int, int]]
) -> bool:
    """Tell whether an encoded text has an added token inside character ranges that must be ordinary text."""
    at = compute_byte_positions(text)
    starts = at[np.array([start for start, _ in ranges], np.int64)]
    ends = at[np.array([end for _, end in ranges], np.int64)]
    place = np.searchsorted(starts, encoded.starts, "right") - 1
    inside = (place >= 0) & (encoded.starts < ends[np.maximum(place, 0)])
    return bool(np.isin(encoded.ids[inside], [token_id for token_id, _, _ in card.added]).any())


def _find_free_placeholder(length: int, taken: str) -> str:
    """Return an ASCII word of the given length that does not occur in `taken`, always the same one."""
    letters = string.ascii_letters + string.digits
    tail = min(length, 4)
    for combination in product(letters, repeat=tail):
        word = "Q" * (length - tail) + "".join(combination)
        if word not in taken:
            return word
    raise ConfigError(
        f"no free placeholder of {length} characters; the row uses every word of that length; "
        "reject it with template.control_tokens"
    )


def _iterate_strings(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in cast("list[Json]", value):
            yield from _iterate_strings(item)
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Json]", value).items():
            yield key
            yield from _iterate_strings(item)


def _map_strings(value: Json, change: Callable[[str], str]) -> Json:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in cast("list[Json]", value)]
    if isinstance(value, dict):
        return {change(k): _map_strings(v, change) for k, v in cast("dict[str, Json]", value).items()}
    return value


def serialize_tokenizer(loaded: LoadedTokenizer) -> bytes:
    """Serialise a loaded tokenizer, so that workers and later builds need no `transformers`."""
    return orjson.dumps({"card": asdict(loaded.card), "backend": base64.b64encode(loaded.backend.encode()).decode()})


def deserialize_tokenizer(content: bytes) -> LoadedTokenizer:
    """Rebuild a loaded tokenizer."""
    raw = orjson.loads(content)
    card = raw["card"] | {"added": tuple((int(i), str(c), bool(s)) for i, c, s in raw["card"]["added"])}
    # Cards that were kept before had the name under which the tokenizer was first opened.
    card.pop("name", None)
    return LoadedTokenizer(card=TokenizerCard(**card), backend=base64.b64decode(raw["backend"]).decode())
