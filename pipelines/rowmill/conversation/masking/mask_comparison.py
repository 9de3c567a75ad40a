"""Compare two renders of one conversation and describe where they differ.

What belongs here: the sentence. What does not: rendering (`rendering/renderer.py`).
"""

from rowmill.schema.rows import Rejected


def _measure_common_prefix(left: str, right: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def describe_text_difference(marked: str, plain: str | Rejected) -> str:
    """Describe the first character at which a render with marks differs from the plain one."""
    if isinstance(plain, Rejected):
        return f"the plain render is refused: {plain.detail}"
    at = _measure_common_prefix(marked, plain)
    return f"character {at}: {marked[at : at + 20]!r} with marks, {plain[at : at + 20]!r} without"
