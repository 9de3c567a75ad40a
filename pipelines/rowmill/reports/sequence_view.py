"""A packed sequence in the report: every token with its id, label, position and segment.

Tokens are coloured by class and underlined where the loss is taken, so the page says the most important without a
script. Numbers are in attributes of the sequence, one list each, since an attribute per token would be ten times as
large.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from rowmill.core.html import escape_text, render_element
from rowmill.core.number_text import format_count, join_facts
from rowmill.inspection.lineage import SegmentLocation
from rowmill.inspection.packed_sequence import SequenceTokens
from rowmill.schema.examples import IGNORED_LABEL, SPAN_KINDS

TOKEN_BYTES = 48
"""Markup and numbers of a token, on average."""


def render_legend(kinds: Collection[str] = SPAN_KINDS) -> str:
    """Return the colours of some classes of tokens."""
    own = (kind for kind in SPAN_KINDS if kind in kinds)
    shown = "".join(render_element("span", kind.replace("_", " "), class_=kind) for kind in own)
    return f'<p class="legend">{shown}<span class="trained">trained</span></p>'


def render_sequence(one: SequenceTokens) -> Iterator[str]:
    """Yield a sequence, segment by segment."""
    place = f"{one.dataset}/{one.split}/{one.sequence}"
    counts = [
        f"packed sequence {place}",
        format_count(one.tokens, "token"),
        f"the first {len(one.ids):,} of them" if len(one.ids) < one.tokens else "",
        format_count(len(one.segments), "segment"),
    ]
    yield f'<figure class="sequence" {_render_numbers(one)}>'
    yield f"<figcaption>{escape_text(join_facts(counts))}</figcaption>"
    yield render_legend(set(one.kinds))
    yield (
        '<p class="token-facts"><span class="facts" aria-live="polite">Point at a token, or move with the arrow keys, '
        'to see its id, label and position.</span> <label class="tools"><input type="checkbox" class="show-ids"> '
        "ids</label></p>"
    )
    yield '<div class="tokens" tabindex="0" role="group" aria-label="tokens of the sequence">'
    yield from (_render_segment(one, segment) for segment in one.segments)
    yield "</div></figure>"


def _render_numbers(one: SequenceTokens) -> str:
    """Return the numbers of all tokens as attributes; an ignored label is left empty."""
    segments = [place.segment for place in one.segments for _ in range(place.length)]
    columns: dict[str, Sequence[object]] = {
        "ids": one.ids,
        "labels": ["" if label == IGNORED_LABEL else label for label in one.labels],
        "positions": one.positions,
        "segments": segments[: len(one.ids)],
        "messages": ["" if message < 0 else message for message in one.messages],
    }
    if one.weights:
        columns["weights"] = [f"{weight:g}" for weight in one.weights]
    return " ".join(f'data-{name}="{",".join(map(str, values))}"' for name, values in columns.items())


def _render_segment(one: SequenceTokens, location: SegmentLocation) -> str:
    end = min(location.offset + location.length, len(one.ids))
    cut = f"from its token {location.start:,}" if location.start else ""
    about = join_facts(
        [f"segment {location.segment}", location.example_id, format_count(location.length, "token"), cut]
    )
    spans: list[str] = []
    classes = list(zip(one.kinds, one.trained, strict=True))
    for (kind, trained), own in groupby(range(location.offset, end), key=classes.__getitem__):
        tokens = "".join(f"<i>{_render_token_text(one.texts[at])}</i>" for at in own)
        spans.append(render_element("span", tokens, class_=f"{kind} trained" if trained else kind))
    # Line ends between elements would be lines of the text.
    text = f'<div class="text">{"".join(spans)}</div>'
    return f'<div class="segment"><p class="segment-name">{escape_text(about)}</p>{text}</div>'


def _render_token_text(text: str) -> str:
    """Return a token's text with line ends marked; one that only completes a later character is a small square."""
    return escape_text(text).replace("\n", "↵\n") if text else "▫"
