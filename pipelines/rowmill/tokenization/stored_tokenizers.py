"""Tokenizers in a store: opened from their files once, kept as data, and opened from that once per process."""

import base64
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from rowmill.core.arrays import Ints
from rowmill.core.errors import DamagedFileError
from rowmill.core.storage import Store, digest_json
from rowmill.tokenization import tokenizer, tokenizer_source
from rowmill.tokenization.tokenizer import (
    FAST_ENGINES,
    REFERENCE_ENGINE,
    Encoder,
    LoadedTokenizer,
    TokenizerCard,
    get_engine_version,
)
from rowmill.tokenization.tokenizer_source import FoundTokenizer, TokenizerChoice
from rowmill.tokenization.vocabulary import (
    DummyPrefix,
    TokenBytes,
    TokenLengths,
    read_token_bytes,
    read_token_lengths,
)

_LOG = logging.getLogger("rowmill.stages")

OpenedT = TypeVar("OpenedT")

TOKENIZER_FOLDER, COMMIT_FOLDER = "tokenizers", "tokenizer_commits"
"""Folders of a store: tokenizers as data, and the last known commit of each revision on the hub."""

_FILE_VERSION = 5
"""Increase it when the layout of a stored tokenizer changes."""

_MAX_OPEN = 2
"""Tokenizers that a process keeps open: each takes some 200 MB."""

_ENCODERS: dict[str, Encoder] = {}
"""Tokenizers by their path in a store, which names their content and never changes: a trial in memory reads and opens
what the build needs, and another store gets what this process has open."""


class TokenizerContext(Protocol):
    """What a tokenizer is opened with: the recipe's choice, the project's folder, and the store that keeps it."""

    @property
    def tokenizer_choice(self) -> TokenizerChoice:
        """The recipe's choice of the tokenizer."""

    @property
    def base(self) -> Path:
        """The project's folder."""

    @property
    def store(self) -> Store:
        """The store."""


def open_recipe_tokenizer(context: TokenizerContext) -> tuple[LoadedTokenizer, str]:
    """Return the recipe's tokenizer and its path in the store, loading it only if its files or an engine changed."""
    found = find_recipe_tokenizer(context)
    # Another release of an engine is another engine until it was compared with the reference.
    releases = {name: get_engine_version(name) for name in (*FAST_ENGINES, REFERENCE_ENGINE)}
    name = digest_json(tokenizer.TOKENIZATION_VERSION, found.stamp, releases, _FILE_VERSION)
    path = f"{TOKENIZER_FOLDER}/{name}.json"
    if context.store.exists(path):
        try:
            return open_encoder(context.store.root, path).loaded, path
        except DamagedFileError as error:
            _LOG.warning("%s; it is made again", error.damage)
    encoder = keep_latest(_ENCODERS, path, _MAX_OPEN, lambda: tokenizer.load_encoder(found))
    write_tokenizer(context.store, path, encoder.loaded)
    return encoder.loaded, path


def open_encoder(root: str, path: str) -> Encoder:
    """Return the encoder of a tokenizer of the store, one per process; the latest are kept."""
    return keep_latest(_ENCODERS, path, _MAX_OPEN, lambda: Encoder(read_tokenizer(Store(root), path)))


def open_shared_encoder(root: str, path: str) -> None:
    """Open a tokenizer of the store, engine and reference, in a process from which workers are forked."""
    open_encoder(root, path).open_engines()


def keep_latest(kept: dict[str, OpenedT], key: str, most: int, make: Callable[[], OpenedT]) -> OpenedT:
    """Return what a process keeps under a key, made now unless it is there; the oldest of `most` makes room."""
    if key not in kept:
        while len(kept) >= most:
            del kept[next(iter(kept))]
        kept[key] = make()
    return kept[key]


def identify_tokenizer(choice: TokenizerChoice) -> dict[str, Any]:
    """Return what names the recipe's tokenizer: the digest of a folder's files, or a name on the hub."""
    return {"name": choice.name, "revision": choice.revision} if choice.content is None else {"files": choice.content}


def find_recipe_tokenizer(context: TokenizerContext) -> FoundTokenizer:
    """Locate the recipe's tokenizer; the current commit of a hub revision is recorded in the store."""
    choice = context.tokenizer_choice
    noted = f"{COMMIT_FOLDER}/{digest_json(choice.name, choice.revision)}.json"
    last: dict[str, Any] = context.store.read_sealed(noted) or {}
    found = tokenizer_source.find_tokenizer(choice, context.base, last_commit=last.get("commit"))
    if found.commit is not None and found.commit != last.get("commit"):
        context.store.write_sealed(noted, {"name": choice.name, "revision": choice.revision, "commit": found.commit})
    return found


def copy_tokenizers(source: Store, target: Store) -> None:
    """Copy stored tokenizers to another store, since opening one from its files takes seconds."""
    for folder in (TOKENIZER_FOLDER, COMMIT_FOLDER):
        for name in source.list(folder):
            target.write(f"{folder}/{name}", source.read(f"{folder}/{name}"))


def write_tokenizer(store: Store, path: str, loaded: LoadedTokenizer) -> None:
    """Store a loaded tokenizer, so that workers and later builds do not need `transformers`."""
    content: dict[str, Any] = {"card": asdict(loaded.card), "backend": loaded.backend}
    lengths = read_token_lengths(loaded.backend, byte_level=loaded.card.byte_level) if loaded.card.fast else ""
    if isinstance(lengths, TokenLengths):
        content["token_lengths"] = {
            "lengths": _write_bytes(lengths.lengths),
            "added": np.flatnonzero(lengths.added).tolist(),
            "partial": np.flatnonzero(lengths.partial).tolist(),
            "prefix": lengths.prefix,
        }
    token_bytes = read_token_bytes(loaded.backend, byte_level=loaded.card.byte_level)
    if token_bytes is not None:
        content["token_bytes"] = {
            "content": _write_bytes(token_bytes.content),
            "offsets": _write_bytes(token_bytes.offsets),
        }
    store.write_sealed_list([path], content)


def _write_bytes(content: bytes | Ints) -> str:
    """Return bytes or int64 numbers as text: numbers in JSON took 10 ms to read."""
    return base64.b64encode(content if isinstance(content, bytes) else content.astype("<i8").tobytes()).decode()


def _read_ints(text: str) -> Ints:
    return np.frombuffer(base64.b64decode(text), "<i8").astype(np.int64, copy=False)


def read_tokenizer(store: Store, path: str) -> LoadedTokenizer:
    """Return a tokenizer of the store; raise DamagedFileError if it is not what `write_tokenizer` wrote."""
    raw = store.read_sealed(path)
    if raw is None:
        raise DamagedFileError(
            f"{store.path(path)}: the stored tokenizer is damaged: it is not what was written; expected the bytes of a "
            "build",
            path,
        )
    card = raw["card"] | {"added": tuple((int(i), str(c), bool(s)) for i, c, s in raw["card"]["added"])}
    kept = raw.get("token_lengths")
    token_lengths = None
    if kept is not None:
        lengths = _read_ints(kept["lengths"])
        added, partial = np.zeros(len(lengths), bool), np.zeros(len(lengths), bool)
        added[kept["added"]] = True
        partial[kept["partial"]] = True
        token_lengths = TokenLengths(lengths, added, partial, DummyPrefix(kept["prefix"]))
    kept = raw.get("token_bytes")
    token_bytes = None if kept is None else TokenBytes(base64.b64decode(kept["content"]), _read_ints(kept["offsets"]))
    return LoadedTokenizer(TokenizerCard(**card), raw["backend"], token_lengths, token_bytes)
