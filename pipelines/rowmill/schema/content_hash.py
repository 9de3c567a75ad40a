"""The content hash of tokens: a sum of the hashes of segments, equal in whatever order and files these are stored.

segments  a   b   c        b   c  │  a               hash(a) + hash(b) + hash(c)  modulo 2^128
"""

from collections.abc import Sequence

from rowmill.schema.counts import declare_merge

_HASH_NAME = "xxh3"

HASH_MODULUS = 1 << 128
"""A content hash is the sum of its segments' hashes modulo this, so it does not depend on their order. It is computed
from examples and plan, and again from the written shards: counts alone would not detect a packer that replaces tokens
by copies of others."""


def format_content_hash(total: int) -> str:
    """Return a sum of content hashes as text that names the hash function."""
    return f"{_HASH_NAME}:{total % HASH_MODULUS:032x}"


def _add_content_hashes(hashes: Sequence[str]) -> str:
    return format_content_hash(sum(int(one.removeprefix(f"{_HASH_NAME}:"), 16) for one in hashes))


def add_content_hashes() -> str:
    """Declare a count that is the content hash of some segments: that of all parts is the sum of theirs."""
    return declare_merge(_add_content_hashes, default=format_content_hash(0))
