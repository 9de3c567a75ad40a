r"""Hashes of the prompts of rows, case-folded with collapsed spaces: an equal prompt in two splits is a leak.

    "Who are\n You? "  ─► "who are you?"  ─► BLAKE2b of 8 bytes

Prompts of ASCII characters are folded together as bytes, the others one by one.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

HASH_BYTES = 8

_ASCII_SPACES = b"\t\n\v\f\r\x1c\x1d\x1e\x1f "
"""The ASCII characters at which `str.split` splits."""
_FOLD_ASCII = bytes(ord(" ") if byte in _ASCII_SPACES else ord(chr(byte).lower()) for byte in range(128)) + bytes(
    range(128, 256)
)
"""Every ASCII character in lower case, white space as a space."""
_SEPARATOR = b"\xff"
"""A byte that no UTF-8 text has."""


def hash_prompts(prompts: Sequence[str | None]) -> list[bytes | None]:
    """Hash prompts; an absent or empty one has no hash."""
    folded = iter(_fold_ascii_prompts([prompt for prompt in prompts if prompt and prompt.isascii()]))
    return [
        blake2b(next(folded) if prompt.isascii() else _fold_prompt(prompt), digest_size=HASH_BYTES).digest()
        if prompt
        else None
        for prompt in prompts
    ]


def _fold_prompt(prompt: str) -> bytes:
    return " ".join(prompt.casefold().split()).encode(errors="surrogatepass")


def _fold_ascii_prompts(prompts: Sequence[str]) -> list[bytes]:
    """Fold prompts as `_fold_prompt` does, all at once."""
    if not prompts:
        return []
    text = np.frombuffer(_SEPARATOR.join(map(str.encode, prompts)).translate(_FOLD_ASCII), np.uint8)
    is_space = text == ord(" ")
    # Of each run of spaces the last one is kept; at the end of a prompt none, at its begin it is stripped.
    is_dropped = is_space & np.append(is_space[1:] | (text[1:] == ord(_SEPARATOR)), True)
    return [prompt.lstrip(b" ") for prompt in text[~is_dropped].tobytes().split(_SEPARATOR)]
