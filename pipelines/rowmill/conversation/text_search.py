"""Search the JSON text of a row for text that the fast engine renders differently.

What belongs here: the searches, on bytes. What does not: rendering (`renderer.py`, `minijinja_engine.py`).
"""

import re
from typing import Any

import orjson

from rowmill.conversation import minijinja_engine

WHOLE_FLOAT = re.compile(rb"\d\.0[,\]}]|\d[eE]\d")
"""A float such as 1.0 or 1e3 in JSON text, which the fast engine may print as an integer."""

_MARK_BYTES, _KEY_BYTES = minijinja_engine.FAST_PATH_MARK.encode(), minijinja_engine.INDEX_KEY.encode()

_PYTHON_SPACES = rb"\u001"
"""The JSON escape of U+001C to U+001F, among others: Python's `strip` removes them, the fast engine's does not."""


def encode_for_search(value: Any) -> bytes:
    """Return the JSON text of a value, or its `repr` if it cannot be encoded as JSON."""
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):
        # Big integers, lone surrogates, keys that are not strings: rare, and the text is only searched and measured.
        return repr(value).encode("utf-8", "surrogatepass")


def lacks_marks(text: bytes) -> bool:
    """Return whether a text lacks the fast path's mark and key, and white space that the engines trim differently."""
    return _MARK_BYTES not in text and _KEY_BYTES not in text and _PYTHON_SPACES not in text
