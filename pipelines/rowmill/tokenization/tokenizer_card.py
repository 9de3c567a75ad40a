"""What a tokenizer is, as data: its identity, and its kept form."""

import base64
import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import orjson

from rowmill.tokenization.engines import REFERENCE_ENGINE
from rowmill.tokenization.token_positions import DummyPrefix, TokenLengths, read_token_lengths


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

    `token_lengths` follow from the backend; they are kept with it, since parsing 150,000 tokens takes 0.2 s. None where
    they were not kept, or have no use.
    """

    card: TokenizerCard
    backend: str
    token_lengths: TokenLengths | None = field(default=None, compare=False, repr=False)


def serialize_tokenizer(tokenizer: LoadedTokenizer) -> bytes:
    """Serialize a loaded tokenizer, so that workers and later builds do not need `transformers`."""
    content: dict[str, Any] = {"card": asdict(tokenizer.card), "backend": _encode_base64(tokenizer.backend.encode())}
    lengths = read_token_lengths(tokenizer.backend, byte_level=tokenizer.card.byte_level) if tokenizer.card.fast else ""
    if isinstance(lengths, TokenLengths):
        content["token_lengths"] = {
            "lengths": _encode_base64(lengths.lengths.astype("<i8").tobytes()),
            "added": np.flatnonzero(lengths.added).tolist(),
            "partial": np.flatnonzero(lengths.partial).tolist(),
            "prefix": lengths.prefix,
        }
    stored = orjson.dumps(content)
    return b"\n".join((_digest(stored), stored))


def deserialize_tokenizer(content: bytes) -> LoadedTokenizer:
    """Rebuild a loaded tokenizer.

    Raises
    ------
    ValueError
        If the bytes are not those that `serialize_tokenizer` returned.

    """
    digest, _, stored = content.partition(b"\n")
    if digest != _digest(stored):
        raise ValueError("it is not what was written")
    raw = orjson.loads(stored)
    card = raw["card"] | {"added": tuple((int(i), str(c), bool(s)) for i, c, s in raw["card"]["added"])}
    kept = raw.get("token_lengths")
    token_lengths = None
    if kept is not None:
        lengths = np.frombuffer(base64.b64decode(kept["lengths"]), "<i8").astype(np.int64)
        added, partial = np.zeros(len(lengths), bool), np.zeros(len(lengths), bool)
        added[kept["added"]] = True
        partial[kept["partial"]] = True
        token_lengths = TokenLengths(lengths, added, partial, DummyPrefix(kept["prefix"]))
    return LoadedTokenizer(TokenizerCard(**card), base64.b64decode(raw["backend"]).decode(), token_lengths)


def _digest(stored: bytes) -> bytes:
    return hashlib.blake2b(stored, digest_size=16).hexdigest().encode()


def _encode_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
