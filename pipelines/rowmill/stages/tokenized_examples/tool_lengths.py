"""Measures how many tokens a row's tools add to its rendering, for the cost of schemas in `rowmill stats`.

print(user, tools) − print(user)   tokens of the schemas and of the template's text around them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from rowmill.conversation.renderer import Renderer
from rowmill.core.json import Json, from_json
from rowmill.schema.rows import Message, Rejected
from rowmill.tokenization.encoder import Encoder

PROBES: Sequence[Sequence[Message]] = (
    ({"role": "user", "content": "x"},),
    ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}),
)
"""Conversations to render tools with; some templates refuse one that ends with a user message."""


@dataclass(frozen=True, slots=True)
class ToolLengths:
    """The number of rows with tools, the tokens that tools add in total, and the most in one row."""

    rows: int = 0
    tokens: int = 0
    most: int = 0


def measure_tools(tools: pa.ChunkedArray, printer: Renderer, encoder: Encoder) -> ToolLengths:
    """Measure a column of tools as JSON text; null if the row has none.

    If a template prints tools only in some contexts, they are measured on the first probe that it accepts; if it
    accepts none, the schemas' JSON text is counted.
    """
    counted = pc.value_counts(tools.drop_null())
    distinct: list[str] = counted.field("values").to_pylist()
    rows: list[int] = counted.field("counts").to_pylist()
    bare: dict[int, str] = {}
    texts: list[str] = []
    without: list[str] = []
    for text in distinct:
        parsed: Sequence[Json] = from_json(text)
        for i, probe in enumerate(PROBES):
            printed = printer.render(probe, parsed, {})
            plain = bare[i] if i in bare else _render_text(printer, probe)
            if not isinstance(printed, Rejected) and plain is not None:
                bare[i] = plain
                texts.append(printed.text)
                without.append(plain)
                break
        else:
            texts.append(text)
            without.append("")
    lengths = _count_text_tokens(encoder, texts)
    known = dict(zip(set(without), _count_text_tokens(encoder, list(set(without))), strict=True))
    added = [max(length - known[plain], 0) for length, plain in zip(lengths, without, strict=True)]
    total = sum(count * tokens for count, tokens in zip(rows, added, strict=True))
    return ToolLengths(rows=sum(rows), tokens=total, most=max(added, default=0))


def _render_text(printer: Renderer, probe: Sequence[Message]) -> str | None:
    printed = printer.render(probe, None, {})
    return None if isinstance(printed, Rejected) else printed.text


def _count_text_tokens(encoder: Encoder, texts: Sequence[str]) -> list[int]:
    if not texts:
        return []
    offsets: list[int] = encoder.encode(texts).offsets.tolist()
    return [end - start for start, end in pairwise(offsets)]
