"""Encode batches of texts into ids and byte offsets, on the fast path or the reference path.

What belongs here: the encoder of a worker. What does not: opening a tokenizer (`tokenizer.py`), which tokens train
(`alignment.py`), control tokens in the data (`control_tokens.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from rowmill.core.arrays import Ints
from rowmill.tokenization.encoded_texts import EncodedTexts, compute_byte_positions, join_encodings, replace_texts
from rowmill.tokenization.engines import encode_flat, open_fast_backend, open_reference_backend
from rowmill.tokenization.token_bytes import read_byte_lengths
from rowmill.tokenization.tokenizer_card import LoadedTokenizer


class Encoder:
    """Encodes and decodes with one tokenizer; opening one of 150,000 tokens takes a second, so once per process."""

    def __init__(self, loaded: LoadedTokenizer, *, fast_lane: bool = True) -> None:
        """Open the fast path if it is wanted and the card allows it; the reference opens at its first use."""
        self.card = loaded.card
        self._backend = loaded.backend
        self._fast: Any = open_fast_backend(loaded.backend) if fast_lane and loaded.card.fast else None

    @cached_property
    def usual(self) -> Any:
        """The `tokenizers` backend that `transformers` calls."""
        return open_reference_backend(self._backend)

    def open_reference(self) -> None:
        """Open now what is otherwise opened at its first use, so that processes forked later share it."""
        _ = self.usual
        if self._fast is not None:
            _ = self._byte_lengths

    def to_transformers(self) -> Any:
        """Return the tokenizer as `transformers` opens it, with its chat template; takes seconds."""
        from transformers import PreTrainedTokenizerFast

        tokens = {name: text for name, text in self.card.special_tokens.items() if name.endswith("_token")}
        opened = PreTrainedTokenizerFast(tokenizer_object=open_reference_backend(self._backend), **tokens)
        opened.chat_template = self.card.chat_template
        return opened

    @cached_property
    def _ordinary_text_backend(self) -> Any:
        """The tokenizer without its added tokens, for strings that must stay ordinary text."""
        return open_reference_backend(_remove_dummy_prefix(_remove_added_tokens(self._backend)))

    @cached_property
    def _continuation_backend(self) -> Any:
        """The tokenizer without the space that SentencePiece adds before a text, for continuations."""
        return open_reference_backend(_remove_dummy_prefix(self._backend))

    @cached_property
    def _byte_lengths(self) -> Ints:
        return read_byte_lengths(self._backend)

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode texts to the ids that `transformers` gives without adding special tokens.

        A text whose tokens do not add up to its bytes takes the reference path.
        """
        if self._fast is None:
            return self._encode_reference(texts)
        ids, offsets = encode_flat(self._fast, texts)
        lengths = self._byte_lengths[ids]
        ends_flat = np.cumsum(lengths)
        before = np.concatenate(([0], ends_flat))[offsets]
        sizes = np.fromiter((len(t.encode()) for t in texts), np.int64, len(texts))
        wrong = np.flatnonzero(np.diff(before) != sizes)
        starts = ends_flat - lengths - np.repeat(before[:-1], np.diff(offsets))
        encoded = EncodedTexts(ids.astype(np.int32), offsets, starts, starts + lengths, 0)
        if not len(wrong):
            return encoded
        return replace_texts(encoded, wrong, self._encode_reference([texts[i] for i in wrong.tolist()]))

    def _encode_reference(self, texts: Sequence[str]) -> EncodedTexts:
        encodings = self.usual.encode_batch(list(texts), add_special_tokens=False)
        pieces = [self._locate_token_bytes(text, one) for text, one in zip(texts, encodings, strict=True)]
        decoded = self.usual.decode_batch([one.ids for one in encodings], skip_special_tokens=False)
        altered = sum(
            self._strip_spaces_after_added(one) != self._strip_spaces_after_added(text)
            for one, text in zip(decoded, texts, strict=True)
        )
        return replace(join_encodings(pieces, usual=len(texts)), altered=altered)

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
            lengths = self._byte_lengths[ids]
            if int(lengths.sum()) == len(text.encode()):
                ends = np.cumsum(lengths)
                return ids, ends - lengths, ends
        chars = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        at = compute_byte_positions(text)
        return ids, at[chars[:, 0]], at[chars[:, 1]]

    def encode_continuation(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode continuation text: without the tokenizer's leading space."""
        if self._fast is not None:
            return self.encode(texts)
        encodings = self._continuation_backend.encode_batch(list(texts), add_special_tokens=False)
        return join_encodings(
            [self._locate_token_bytes(t, e) for t, e in zip(texts, encodings, strict=True)], usual=len(texts)
        )

    def encode_continuation_ids(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], Ints]:
        """Encode as `encode_continuation` does, but return only ids and offsets, which is twice as fast."""
        encodings = self._continuation_backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(one.ids, np.int32) for one in encodings]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        return np.concatenate(ids) if ids else np.empty(0, np.int32), offsets

    def reencode_continuations(self, encoded: EncodedTexts, texts: Sequence[str], places: Ints) -> EncodedTexts:
        """Encode the texts at the given indices again, as continuation text; the others are unchanged."""
        if self._fast is not None or not len(places):
            return encoded
        chosen: list[int] = places.tolist()
        return replace_texts(encoded, places, self.encode_continuation([texts[i] for i in chosen]), counted=False)

    def encode_around(self, text: str, ordinary: Sequence[tuple[int, int]], cuts: Sequence[int] = ()) -> EncodedTexts:
        """Encode a text whose character ranges `ordinary` must not become control tokens, each range separately.

        The text is also cut before the characters `cuts`, as in `rejoin_pieces`.
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
            return join_encodings([], usual=0)
        ids, starts, ends = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return join_encodings([(ids, starts, ends)], usual=1)

    def matches_reference(self, texts: Sequence[str], encoded: EncodedTexts, chosen: Sequence[int]) -> bool:
        """Return whether the ids of the chosen texts equal the reference's."""
        # Without the characters of each token, which take as long as the ids.
        expected = self.usual.encode_batch_fast([texts[i] for i in chosen], add_special_tokens=False)
        spans = [encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist() for i in chosen]
        return all(one.ids == ids for one, ids in zip(expected, spans, strict=True))

    def without_fast_path(self) -> "Encoder":
        """Return an encoder that takes only the reference path, for a batch in which the paths differed."""
        return Encoder(LoadedTokenizer(card=self.card, backend=self._backend), fast_lane=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens included, as the reference does."""
        return cast(str, self.usual.decode(list(ids), skip_special_tokens=False))


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
