"""Compare two renders, or two masks, of one conversation and describe where they differ.

What belongs here: the comparison and its reject. What does not: making the masks (`loss_mask.py`).
"""

from rowmill.schema.rows import MaskedConversation, Rejected


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


def require_agreement(
    searched: MaskedConversation | Rejected, proven: MaskedConversation | Rejected
) -> MaskedConversation | Rejected:
    """Return the mask if both methods agree, else a reject; if either method rejects, the proof's result."""
    if isinstance(searched, Rejected) or isinstance(proven, Rejected):
        return proven
    if (searched.text, searched.trained) != (proven.text, proven.trained):
        return Rejected("render_mismatch", _describe_mask_difference(searched, proven))
    return searched


def _describe_mask_difference(searched: MaskedConversation, proven: MaskedConversation) -> str:
    """Describe the first trained range that only one of the masks has."""
    in_search, in_proof = set(searched.trained), set(proven.trained)
    differing = sorted(in_search ^ in_proof, key=lambda span: (span.start, span.end))
    if not differing:
        return "the appended ends differ"
    span = differing[0]
    which = "search" if span in in_search else "proof"
    text = (searched if span in in_search else proven).text
    return f"message {span.message}: only the {which} trains {text[span.start : span.end][:60]!r}"


def describe_text_difference(marked: str, plain: str | Rejected) -> str:
    """Describe the first character at which a render with marks differs from the plain one."""
    if isinstance(plain, Rejected):
        return f"the plain render is refused: {plain.detail}"
    at = _measure_common_prefix(marked, plain)
    return f"character {at}: {marked[at : at + 20]!r} with marks, {plain[at : at + 20]!r} without"
