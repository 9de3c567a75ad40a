"""Keyed permutations, the source of all randomness in a build.

No library's random generator decides a byte, because none promises the same numbers in its next release.

    key(0, "shuffle", "a", 0) ──► 6917724958345623493 ──► feistel(10, k): 0 1 2 3 … ──► 8 1 9 5 …

A permutation is computed place by place, never stored: place i of ten billion costs the same as of ten.
`feistel` is an 8-round balanced Feistel network over the smallest even number of bits that holds n - 1,
walked in cycles back into [0, n) (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), with the
SplitMix64 finaliser as its round function. `linear` is a·x + b modulo n: twenty times cheaper and far less
random. Rejected: a shuffled index array, which is neither small nor seekable.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import gcd
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

GAMMA = 0x9E3779B97F4A7C15
"""SplitMix64's increment: 2^64 divided by the golden ratio, odd."""

PermutationType = Literal["feistel", "linear"]

_MASK = (1 << 64) - 1
_ROUNDS = 8
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# 16,384 integers and their scratch space stay in the second-level cache; larger chunks are slower.
_CHUNK_PLACES = 1 << 14


def hash_labels(*labels: int | str) -> int:
    """Hash labels into 64 bits: BLAKE2b-64 of their compact JSON array, read little-endian.

    Labels carry dataset names, not numbers, so that adding a dataset does not reshuffle the others.
    """
    return int.from_bytes(blake2b(orjson.dumps(labels), digest_size=8).digest(), "little")


def make_label_hasher(*labels: int | str) -> Callable[[int], int]:
    """Return a function from n to `hash_labels(*labels, n)` that encodes the labels once."""
    begin = orjson.dumps(labels)[:-1]

    def key_of(number: int) -> int:
        return int.from_bytes(blake2b(begin + b",%d]" % number, digest_size=8).digest(), "little")

    return key_of


def mix_bits(z: int) -> int:
    """Scramble 64 bits with the SplitMix64 finaliser, a bijection; `z` is taken modulo 2^64."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MULTIPLIERS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIERS[1]) & _MASK
    return z ^ (z >> 31)


def mix_array(z: NDArray[np.uint64]) -> None:
    """Scramble an array of 64-bit numbers in place, each as `mix_bits` does."""
    for start in range(0, z.size, _CHUNK_PLACES):
        some = z[start : start + _CHUNK_PLACES]
        _mix_into(some, np.empty_like(some))


def make_feistel(n: int, k: int) -> "Feistel":
    """Return the Feistel permutation of [0, n) under key `k`."""
    _require_items(n)
    return Feistel(n, _half_bits(n), _derive_round_keys(n, k))


def make_linear(n: int, k: int) -> "Linear":
    """Return the permutation x -> (a·x + b) mod n, with a prime to n, under key `k`."""
    _require_items(n)
    if n == 1:
        return Linear(1, 1, 0)
    a = 1 + mix_bits(k + GAMMA) % (n - 1)
    while gcd(a, n) != 1:
        a = a + 1 if a < n - 1 else 1
    return Linear(n, a, mix_bits(k + 2 * GAMMA) % n)


def make_permutation(kind: PermutationType, n: int, k: int) -> "Feistel | Linear":
    """Return the permutation of the named kind, a bijection of [0, n) that is applied to arrays of places."""
    return make_feistel(n, k) if kind == "feistel" else make_linear(n, k)


def permute_rows(kind: PermutationType, n: int, keys: Sequence[int]) -> NDArray[np.int64]:
    """Return the permutations of [0, n) under many keys as the rows of an array [len(keys), n].

    Row i equals `make_permutation(kind, n, keys[i])(arange(n))`; short rows are computed together, because a call
    per block of ten costs fifty times the arithmetic in it.
    """
    _require_items(n)
    if kind == "linear":
        places = np.arange(n, dtype=np.int64)
        rows = [make_linear(n, k)(places) for k in keys]
        return np.array(rows, dtype=np.int64).reshape(len(keys), n)
    rows = np.empty((len(keys), n), dtype=np.int64)
    together = max(1, _CHUNK_PLACES // n)
    for start in range(0, len(keys), together):
        some = keys[start : start + together]
        # [rounds, rows]: each element of the flattened block finds its row's round keys by number.
        round_keys = np.array([_derive_round_keys(n, k) for k in some], dtype=np.uint64).T.copy()
        owners = np.repeat(np.arange(len(some)), n)
        places = np.tile(np.arange(n, dtype=np.uint64), len(some))
        rows[start : start + together] = _apply_network(places, n, _half_bits(n), round_keys, owners).reshape(-1, n)
    return rows


@dataclass(frozen=True, slots=True)
class Feistel:
    """`make_feistel(n, k)`: halves of `half_bits` bits, one round key per round."""

    n: int
    half_bits: int
    round_keys: tuple[int, ...]

    def __call__(self, places: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Map each place of an array of any shape; IndexError for one outside [0, n)."""
        flat = _require_places(places, self.n).ravel()
        out = np.empty(flat.shape, dtype=np.int64)
        round_keys = np.array(self.round_keys, dtype=np.uint64)
        for start in range(0, flat.size, _CHUNK_PLACES):
            some = flat[start : start + _CHUNK_PLACES].astype(np.uint64)
            out[start : start + _CHUNK_PLACES] = _apply_network(some, self.n, self.half_bits, round_keys, None)
        return out.reshape(places.shape)


@dataclass(frozen=True, slots=True)
class Linear:
    """`make_linear(n, k)`: x -> (a·x + b) mod n in exact integers."""

    n: int
    a: int
    b: int

    def __call__(self, places: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Map each place of an array of any shape; IndexError for one outside [0, n)."""
        places = _require_places(places, self.n)
        if self.n <= 1 << 32:
            # a·x + b < n^2 fits 64 bits.
            a, b, n = np.uint64(self.a), np.uint64(self.b), np.uint64(self.n)
            return ((places.astype(np.uint64) * a + b) % n).astype(np.int64)
        exact = [(self.a * place + self.b) % self.n for place in places.ravel().tolist()]
        return np.array(exact, dtype=np.int64).reshape(places.shape)


def _half_bits(n: int) -> int:
    return max(1, ((n - 1).bit_length() + 1) // 2)


def _derive_round_keys(n: int, k: int) -> tuple[int, ...]:
    start = mix_bits(k + n)
    return tuple(mix_bits(start + (i + 1) * GAMMA) for i in range(_ROUNDS))


def _apply_network(
    places: NDArray[np.uint64], n: int, half_bits: int, round_keys: NDArray[np.uint64], owners: NDArray[np.int64] | None
) -> NDArray[np.uint64]:
    """Apply the network in place; values at or above `n` go through it again until all are below `n`.

    `round_keys` is [rounds], or [rounds, rows] with the row of each place in `owners`.
    """
    if n == 1:
        places[:] = 0
        return places
    _run_rounds(places, half_bits, round_keys if owners is None else round_keys[:, owners])
    outside = np.flatnonzero(places >= n)
    while outside.size:
        again = places[outside]
        _run_rounds(again, half_bits, round_keys if owners is None else round_keys[:, owners[outside]])
        places[outside] = again
        outside = outside[again >= n]
    return places


def _run_rounds(places: NDArray[np.uint64], half_bits: int, round_keys: NDArray[np.uint64]) -> None:
    half, top = np.uint64(half_bits), np.uint64(64 - half_bits)
    left, right = places >> half, places & np.uint64((1 << half_bits) - 1)
    scrambled, scratch = np.empty_like(places), np.empty_like(places)
    for round_key in round_keys:
        np.add(right, round_key, out=scrambled)
        _mix_into(scrambled, scratch)
        np.right_shift(scrambled, top, out=scrambled)
        np.bitwise_xor(left, scrambled, out=left)
        left, right = right, left
    np.left_shift(left, half, out=places)
    np.bitwise_or(places, right, out=places)


def _mix_into(z: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        np.right_shift(z, np.uint64(shift), out=scratch)
        np.bitwise_xor(z, scratch, out=z)
        np.multiply(z, np.uint64(multiplier), out=z)
    np.right_shift(z, np.uint64(31), out=scratch)
    np.bitwise_xor(z, scratch, out=z)


def _require_items(n: int) -> None:
    if n < 1:
        raise ValueError(f"a permutation of {n} items; at least one is needed")


def _require_places(places: NDArray[np.integer[Any]], n: int) -> NDArray[np.integer[Any]]:
    if places.dtype.kind not in "iu":
        raise TypeError(f"places are {places.dtype}, expected integers")
    if places.size and (int(places.min()) < 0 or int(places.max()) >= n):
        raise IndexError(f"places {places.min()} to {places.max()} are not all inside [0, {n})")
    return places
