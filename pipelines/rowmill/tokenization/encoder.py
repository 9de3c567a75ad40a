"""Encode batches of texts into ids and byte offsets, on the fast path or the reference path."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmill.core.arrays import Ints, compute_offsets, find_distinct
from rowmill.tokenization.engines import FastEngine, get_engine_version, open_reference_backend
from rowmill.tokenization.reference_sample import Stretch
from rowmill.tokenization.token_positions import (
    DummyPrefix,
    EncodedTexts,
    TokenLengths,
    compute_byte_positions,
    join_encodings,
    locate_tokens,
    read_token_lengths,
    rejoin_pieces,
    replace_texts,
)
from rowmill.tokenization.tokenizer_card import LoadedTokenizer


class Encoder:
    """Encodes and decodes with one tokenizer; opening one of 150,000 tokens takes a second, so once per process."""

    def __init__(self, tokenizer: LoadedTokenizer, *, fast_path: bool = True, reference: Any = None) -> None:
        """Open the card's engine if the fast path is wanted; the reference opens at its first use.

        An engine of another release than the one that was compared with the reference is not used. `reference` is the
        backend of another encoder with the same backend text, which need not be opened twice.
        """
        self.loaded = tokenizer
        self.card = tokenizer.card
        self._backend = tokenizer.backend
        self._reference = reference
        verified = tokenizer.card.fast and tokenizer.card.engine_version == get_engine_version(tokenizer.card.engine)
        self._fast = FastEngine(tokenizer.card.engine, tokenizer.backend) if fast_path and verified else None

    @cached_property
    def reference(self) -> Any:
        """The `tokenizers` backend that `transformers` calls."""
        return open_reference_backend(self._backend) if self._reference is None else self._reference

    def open_reference(self) -> None:
        """Open now what is otherwise opened at its first use, so that processes forked later share it."""
        _ = self.reference
        if self._fast is not None:
            _ = self._token_lengths

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
        parsed: dict[str, Any] = orjson.loads(self._backend)
        plain = orjson.dumps(parsed | {"added_tokens": [], "post_processor": None}).decode()
        return open_reference_backend(_remove_dummy_prefix(plain))

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

    @cached_property
    def _fast_continuation(self) -> FastEngine:
        return FastEngine(self.card.engine, _remove_dummy_prefix(self._backend))

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode texts to the ids that `transformers` gives without adding special tokens.

        A text whose tokens do not add up to its bytes takes the reference path.
        """
        if self._fast is None:
            return self._encode_reference(texts)
        return _encode_fast(self._fast, self._token_lengths, texts, self._encode_reference)

    def _encode_reference(self, texts: Sequence[str]) -> EncodedTexts:
        encodings = self.reference.encode_batch(list(texts), add_special_tokens=False)
        pieces = [self._locate_token_bytes(text, one) for text, one in zip(texts, encodings, strict=True)]
        decoded = self.reference.decode_batch([encoding.ids for encoding in encodings], skip_special_tokens=False)
        altered = sum(
            self._strip_spaces_after_added(one) != self._strip_spaces_after_added(text)
            for one, text in zip(decoded, texts, strict=True)
        )
        return replace(join_encodings(pieces, reference_texts=len(texts)), altered=altered)

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

    def encode_continuation(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode continuation text: without the tokenizer's leading space."""
        if self._fast is None:
            return self._encode_reference_continuation(texts)
        if self.card.byte_level:
            return self.encode(texts)
        lengths = replace(self._token_lengths, prefix=DummyPrefix.NEVER)
        return _encode_fast(self._fast_continuation, lengths, texts, self._encode_reference_continuation)

    def _encode_reference_continuation(self, texts: Sequence[str]) -> EncodedTexts:
        encodings = self._continuation_backend.encode_batch(list(texts), add_special_tokens=False)
        return join_encodings(
            [self._locate_token_bytes(t, e) for t, e in zip(texts, encodings, strict=True)], reference_texts=len(texts)
        )

    def encode_continuation_ids(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], Ints]:
        """Encode as `encode_continuation` does, but return only ids and offsets, which is twice as fast."""
        encodings = self._continuation_backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        offsets = compute_offsets(counts)
        return np.concatenate(ids) if ids else np.empty(0, np.int32), offsets

    @property
    def prefixes_texts(self) -> bool:
        """Whether a text may have other ids than the same text as continuation text."""
        return self._fast is None or not self.card.byte_level

    def encode_pieces(
        self,
        texts: Sequence[str],
        ordinary: Sequence[Sequence[tuple[int, int]]],
        cuts: Sequence[Sequence[int]] | None = None,
        *,
        encode: Callable[[Sequence[str]], EncodedTexts] | None = None,
        encode_continuation: Callable[[Sequence[str]], EncodedTexts] | None = None,
    ) -> EncodedTexts:
        """Encode texts in pieces.

        The character ranges `ordinary[i]` of text i, which must not become control tokens, are encoded each by itself,
        and so is what is between them, cut before the characters `cuts[i]`. `encode` and `encode_continuation` encode
        what is between; default: the methods of these names.
        """
        pieces = [
            piece
            for i, text in enumerate(texts)
            for piece in _cut_into_pieces(text, ordinary[i], () if cuts is None else cuts[i])
        ]
        between = ["" if piece.is_ordinary else piece.text for piece in pieces]
        encoded = (encode or self.encode)(between)
        later = [i for i, piece in enumerate(pieces) if piece.start and not piece.is_ordinary]
        if later and self.prefixes_texts:
            again = (encode_continuation or self.encode_continuation)([between[i] for i in later])
            encoded = replace_texts(encoded, np.array(later, np.int64), again, counted=False)
        apart = [i for i, piece in enumerate(pieces) if piece.is_ordinary]
        if apart:
            # These texts must not become control tokens.
            ordered = sorted({pieces[i].text for i in apart})
            encodings = self._ordinary_text_backend.encode_batch(ordered, add_special_tokens=False)
            by_text = {
                text: self._locate_token_bytes(text, encoding)
                for text, encoding in zip(ordered, encodings, strict=True)
            }
            found = join_encodings([by_text[pieces[i].text] for i in apart], reference_texts=0)
            encoded = replace_texts(encoded, np.array(apart, np.int64), found)
        begins = np.flatnonzero([piece.start == 0 for piece in pieces])
        return rejoin_pieces(encoded, [piece.text for piece in pieces], np.diff(begins, append=len(pieces)))

    def find_control_strings(self, texts: Sequence[str], encoded: EncodedTexts) -> set[str]:
        """Return the added tokens that occur in a batch, also those of which an engine made other tokens."""
        added = {token_id: content for token_id, content, _ in self.card.added if content}
        made = encoded.ids[np.isin(encoded.ids, np.fromiter(added, np.int32, len(added)))]
        found = {added[token_id] for token_id in find_distinct(made).tolist()}
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
        encodings = encode(framed, add_special_tokens=False)
        for one, text, expected in zip(stretches, framed, encodings, strict=True):
            own = texts[one.text]
            if self._equals(one, own, text, expected, encoded):
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
            return np.array_equal(np.array(expected.ids, np.int32), ids)
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


class _Piece(NamedTuple):
    """Characters of a text from `start` on."""

    text: str
    start: int
    is_ordinary: bool


def _cut_into_pieces(text: str, ordinary: Sequence[tuple[int, int]], cuts: Sequence[int]) -> list[_Piece]:
    """Cut a text at the edges of its ordinary ranges and, outside of them, before the characters `cuts`."""
    if not ordinary and not cuts:
        return [_Piece(text, 0, is_ordinary=False)]
    places = [(cut, cut) for cut in cuts if not any(start < cut < end for start, end in ordinary)]
    pieces = list[_Piece]()
    position = 0
    for start, end in sorted([*ordinary, *places, (len(text), len(text))]):
        if position < start:
            pieces.append(_Piece(text[position:start], position, is_ordinary=False))
        if start < end:
            pieces.append(_Piece(text[start:end], start, is_ordinary=True))
        position = end
    return pieces


def _encode_fast(
    engine: FastEngine,
    lengths: TokenLengths,
    texts: Sequence[str],
    encode_reference: Callable[[Sequence[str]], EncodedTexts],
) -> EncodedTexts:
    """Encode texts with an engine, and on the reference path those that it refuses or that cannot be located."""
    found = engine.encode(texts)
    located = locate_tokens(found.ids, found.offsets, texts, lengths)
    encoded = EncodedTexts(found.ids.view(np.int32), found.offsets, located.starts, located.ends, 0)
    if not len(located.unlocated) and not found.failed:
        return encoded
    again = find_distinct(np.concatenate((located.unlocated, np.array(found.failed, np.int64))))
    places: list[int] = again.tolist()
    return replace_texts(encoded, again, encode_reference([texts[i] for i in places]))


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
