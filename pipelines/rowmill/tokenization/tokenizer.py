"""A tokenizer opened as data, and checked for round trips.

Whether ids give back the text that they were made of, byte for byte, for whole batches.

Decoding is a table look-up: every id of a byte-level or SentencePiece vocabulary stands for fixed bytes, so Arrow
takes those of a whole batch at once, in half the time of a NumPy gather byte by byte. A vocabulary of another kind is
decoded by the function handed in.

Open a tokenizer, and keep everything that determines its ids as plain data.

Two paths give the same ids. The *fast path*: `gigatoken` or `fastokens` encodes a batch into one flat buffer, and
because every id stands for a known number of bytes, one cumulative sum gives the position of each token. The *reference
path*: the `tokenizers` library, which `transformers` itself uses. An engine is taken only for tokenizers with which it
gave the same ids and positions on the probe texts; they are compared again on a sample of every batch, and a text whose
tokens do not add up to its bytes (a normalizer changed it) takes the reference path.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.core.errors import ConfigError
from rowmill.core.storage import digest_bytes, digest_json
from rowmill.tokenization.encoder import Encoder
from rowmill.tokenization.engines import FAST_ENGINES, REFERENCE_ENGINE, get_engine_version, is_engine_failure
from rowmill.tokenization.token_positions import EncodedTexts, read_sentencepiece_bytes, read_token_lengths
from rowmill.tokenization.tokenizer_card import LoadedTokenizer, TokenizerCard
from rowmill.tokenization.tokenizer_source import FoundTokenizer, TokenizerChoice, find_tokenizer, hash_tokenizer_files


class RoundTripDecoder:
    """Decodes ids to bytes and compares them with texts.

    `byte_table`: the bytes by id of a byte-level vocabulary, None for others; `decode`: the tokenizer's own function.
    """

    def __init__(
        self, backend: str, byte_table: Sequence[bytes] | None, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._backend = backend
        self._given = byte_table
        self._decode = decode

    @cached_property
    def _byte_table(self) -> pa.LargeBinaryArray | None:
        pieces = self._given if self._given is not None else read_sentencepiece_bytes(self._backend)
        return None if pieces is None else pa.array(pieces, pa.large_binary())

    def altered(self, texts: Sequence[str], ids: NDArray[np.int32], offsets: Ints) -> list[int]:
        """Return the indices of texts that differ from their decoded ids, `[offsets[i], offsets[i + 1])` for text i."""
        if self._byte_table is None:
            pairs = zip(texts, offsets.tolist(), offsets[1:].tolist(), strict=False)
            return [i for i, (text, left, right) in enumerate(pairs) if self._decode(ids[left:right].tolist()) != text]
        _, ends, content = self._byte_table.take(pa.array(ids)).buffers()
        borders = np.frombuffer(ends, np.int64, len(ids) + 1)[offsets]
        wanted = [text.encode("utf-8", "surrogatepass") for text in texts]
        has_same_borders = np.array_equal(np.diff(borders), np.fromiter(map(len, wanted), np.int64, len(wanted)))
        if has_same_borders and content.equals(pa.py_buffer(b"".join(wanted))):
            return []
        found = content.to_pybytes()
        pairs = zip(wanted, pairwise(borders.tolist()), strict=True)
        return [i for i, (text, (begin, end)) in enumerate(pairs) if found[begin:end] != text]


# ── Open a tokenizer, and keep everything that determines its ids as plain data ──


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
    """Load a tokenizer through `transformers` from a folder or from the hub, never running its code.

    Raises
    ------
    ConfigError
        If no tokenizer is found, or it has no Rust backend (only those report offsets).
    UnreachableError
        If the hub does not answer.

    """
    return load_encoder(find_tokenizer(TokenizerChoice(name=name), base)).loaded


def load_encoder(found: FoundTokenizer) -> Encoder:
    """Load a found tokenizer and return its encoder, open; raises like `open_tokenizer`."""
    folder = found.fetch()
    return _choose_engine(_make_loaded_tokenizer(_load_from_folder(found.choice.name, folder), folder))


def wrap_tokenizer(hf: Any) -> LoadedTokenizer:
    """Convert a `transformers` tokenizer, opened and perhaps changed by the caller, to plain data.

    Raises
    ------
    ConfigError
        If it has no Rust backend.

    """
    if getattr(hf, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"tokenizer: {type(hf).__name__} has no Rust backend, which is needed to find the characters of a token; "
            "open it with use_fast=True"
        )
    return _choose_engine(_make_loaded_tokenizer(hf, None)).loaded


def _make_loaded_tokenizer(hf: Any, folder: Path | None) -> LoadedTokenizer:
    """Convert an open tokenizer to plain data that names the reference as its engine."""
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
    return LoadedTokenizer(card=card, backend=backend)


def _load_from_folder(name: str, folder: Path) -> Any:
    from transformers import AutoTokenizer

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
    return hf


def _choose_engine(tokenizer: LoadedTokenizer) -> Encoder:
    """Compare the fast engines with the reference on the probe texts; open the first without a difference."""
    reference = Encoder(tokenizer)
    lengths = read_token_lengths(tokenizer.backend, byte_level=tokenizer.card.byte_level)
    if isinstance(lengths, str):
        return _refuse_engines(reference, dict.fromkeys(FAST_ENGINES, lengths))
    texts = [*PROBE_TEXTS, *(_PROBE_OF_ADDED.replace("T", content) for _, content, _ in tokenizer.card.added)]
    expected = _encode_both_ways(reference, texts)
    refused: dict[str, str] = {}
    for name in FAST_ENGINES:
        card = replace(tokenizer.card, engine=name, engine_version=get_engine_version(name), refused=dict(refused))
        candidate = replace(tokenizer, card=card)
        found = _open_and_compare(candidate, reference, texts, expected)
        if isinstance(found, Encoder):
            return found
        refused[name] = found
    return _refuse_engines(reference, refused)


def _refuse_engines(reference: Encoder, refused: dict[str, str]) -> Encoder:
    """Return an encoder that takes the reference path and says why it takes no other."""
    card = replace(reference.card, refused=refused)
    return Encoder(replace(reference.loaded, card=card), reference=reference.reference)


_PROBE_OF_ADDED = "aTb T c\nT\n TT é"
"""`T` is an added token: beside letters, spaces and itself."""


def _encode_both_ways(encoder: Encoder, texts: list[str]) -> list[EncodedTexts]:
    """Encode texts, and as continuation texts where that is something else."""
    return [encoder.encode(texts), *([] if encoder.card.byte_level else [encoder.encode_continuation(texts)])]


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
