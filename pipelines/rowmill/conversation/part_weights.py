r"""Parts of a message that train apart: where they are in a render, and the loss mask without those that do not train.

    part_weights   {"content": [[6, 0], [7, 1]]}           6 characters that do not train, then 7 that do
    render         <a>WRONG RIGHT 2<end>
    trained            ─────┌──────────┐                   template text trains with the part before it

A part's place follows from the place of its text, which is proven. A template that prints the text otherwise than as it
is, apart from white space at its ends, rejects the row.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rowmill.conversation.character_ownership import LocatedContent, RenderedConversation
from rowmill.core.json import Json
from rowmill.schema.rows import ContentSpan, Message, Rejected, Span


class WeightedPart(NamedTuple):
    """Characters `[start, end)` of a render that are a part of a message, with the part's loss weight."""

    start: int
    end: int
    weight: float


def locate_parts(
    rendered: RenderedConversation, messages: Sequence[Message], supervised: Sequence[int], located: LocatedContent
) -> dict[int, list[WeightedPart]] | Rejected:
    """Return the printed parts of each supervised message that has parts with their own weights, ascending."""
    found: dict[int, list[WeightedPart]] = {}
    for index in supervised:
        weights: Mapping[str, Json] = messages[index].get("part_weights", {})
        if not weights:
            continue
        message, text = messages[index], rendered.text
        inlined = rendered.inline_reasoning.get(index, 0)
        for piece in sorted(located.own.get(index, ())):
            printed = text[piece.start : piece.end]
            if piece.kind == "tool_call":
                runs, own = [[len(printed), weights["calls"]]], printed
            elif piece.kind == "reasoning":
                runs = weights["reasoning"]
                own = message["content"][:inlined] if inlined else message.get("reasoning_content", "")
            else:
                runs, own = weights["content"], message["content"][inlined:]
            if len({weight for _, weight in runs}) == 1:
                runs, own = [[len(printed), runs[0][1]]], printed
            # A template may trim the text.
            cut = len(own) - len(own.lstrip()) if printed[:1].strip() else 0
            if not own.startswith(printed, cut) or (inlined and piece.kind == "reasoning" and own is not printed):
                return Rejected(
                    "span_not_found",
                    f"message {index}: the template changes text of which parts have flags of their own",
                )
            position = piece.start - cut
            for length, weight in runs:
                start, end = max(position, piece.start), min(position + length, piece.end)
                if start < end:
                    found.setdefault(index, []).append(WeightedPart(start, end, float(weight)))
                position += length
    return found


def cut_parts(
    trained: Sequence[Span], pieces: Sequence[ContentSpan], parts: Mapping[int, Sequence[WeightedPart]]
) -> tuple[list[Span], tuple[ContentSpan, ...], tuple[tuple[int, int, float], ...]]:
    """Return the trained spans without the parts of weight 0, the own texts cut at their borders, and the weights.

    The template's text around parts trains as the part before it does, or as the first one at the message's beginning.
    """
    # Parts with the same weight are one.
    changes = {
        index: [part for place, part in enumerate(found) if not place or part.weight != found[place - 1].weight]
        for index, found in parts.items()
    }
    spans: list[Span] = []
    weights: list[tuple[int, int, float]] = []
    for span in trained:
        of_message = changes.get(span.message)
        if not of_message:
            spans.append(span)
            continue
        inside = [part.start for part in of_message[1:] if span.start < part.start < span.end]
        for start, end in pairwise((span.start, *inside, span.end)):
            weight = max((part for part in of_message if part.start <= start), default=of_message[0]).weight
            weights.append((start, end, weight))
            if weight:
                spans.append(Span(start, end, span.message))
    own: list[ContentSpan] = []
    for piece in pieces:
        inside = [part.start for part in changes.get(piece.message, ()) if piece.start < part.start < piece.end]
        own += [piece._replace(start=start, end=end) for start, end in pairwise((piece.start, *inside, piece.end))]
    return spans, tuple(own), tuple(weights)
