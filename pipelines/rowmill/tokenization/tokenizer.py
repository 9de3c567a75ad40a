"""Open a tokenizer, and keep everything that determines its ids as plain data.

What belongs here: loading a tokenizer, its card, and the probe that decides whether the fast path may be taken. What
does not: finding its files (`tokenizer_source.py`), encoding (`encoder.py`).

Two paths give the same ids. The *fast path*: `fastokens` encodes a batch into one flat buffer, and because every id
of a byte-level vocabulary has a known number of bytes, one cumulative sum gives the position of each token. The
*reference path*: the `tokenizers` library, which `transformers` uses. A tokenizer takes the fast path only if both
paths gave the same ids on the probe texts. They are compared again on a sample of every batch, and a text whose tokens
do not add up to its bytes (a normalizer changed it) takes the reference path.
"""

from pathlib import Path
from typing import Any, cast

import orjson

from rowmill.core.errors import ConfigError
from rowmill.core.storage import digest_bytes, digest_json
from rowmill.tokenization.engines import encode_flat, open_fast_backend, open_reference_backend
from rowmill.tokenization.tokenizer_card import LoadedTokenizer, TokenizerCard
from rowmill.tokenization.tokenizer_source import FoundTokenizer, TokenizerChoice, find_tokenizer, hash_tokenizer_files

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
    return load_tokenizer(find_tokenizer(TokenizerChoice(name=name), base))


def load_tokenizer(found: FoundTokenizer) -> LoadedTokenizer:
    """Load a found tokenizer; raises like `open_tokenizer`."""
    folder = found.fetch()
    return _make_loaded_tokenizer(_load_from_folder(found.choice.name, folder), folder)


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
            f"tokenizer: {name!r} cannot be loaded ({type(error).__name__}: {first}); expected a folder with "
            "tokenizer.json and tokenizer_config.json, or a hub name; point `tokenizer` at one"
        ) from error
    if getattr(hf, "backend_tokenizer", None) is None or not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"tokenizer: {name!r} has no tokenizer.json, which is needed to find the characters of a token; "
            "save it once with AutoTokenizer.from_pretrained(…).save_pretrained(folder)"
        )
    return hf


def _is_byte_level(parsed: dict[str, Any]) -> bool:
    decoder = orjson.dumps(parsed.get("decoder")).decode()
    return parsed["model"]["type"] == "BPE" and "ByteLevel" in decoder and "ByteFallback" not in decoder


def _probe_fast_path(backend: str, byte_level: bool) -> tuple[bool, str]:
    """Return whether both paths give the same ids on the probe texts, and if not, why."""
    if not byte_level:
        return False, "not a byte-level BPE"
    try:
        fast = open_fast_backend(backend)
        ids, offsets = encode_flat(fast, PROBE_TEXTS)
    except Exception as error:  # noqa: BLE001  (the reference path handles any tokenizer that the fast engine refuses)
        return False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    reference = open_reference_backend(backend)
    for i, one in enumerate(reference.encode_batch(list(PROBE_TEXTS), add_special_tokens=False)):
        if one.ids != ids[offsets[i] : offsets[i + 1]].tolist():
            return False, f"other ids for probe text {i}"
    return True, ""
