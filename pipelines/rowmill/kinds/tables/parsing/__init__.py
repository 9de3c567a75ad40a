r"""Parsing generated text into records: every character is classified, every object accepted or rejected with a reason.

    text ──split at BOS, EOS──► pieces ──ObjectScanner──► objects ──RecordDecoder──► records ──rules──► ParsedText
                                                    └ prose, delimiter, truncated, invalid(reason)

Spans partition any string, and no text raises an error. Everything that depends on schema and options is compiled once
per `Parser`.
"""

import re
from collections.abc import Mapping

from rowmill.core.errors import ConfigError
from rowmill.kinds.tables.parsing.rules import (
    DelimitedSpans,
    PlacementColumns,
    Validation,
    validate_group,
    validate_series,
)
from rowmill.kinds.tables.parsing.scanner import (
    REASONS,
    ObjectScanner,
    ParsedText,
    SpanCounts,
    SpanKind,
    TextSpan,
    count_spans,
    merge_span_counts,
)
from rowmill.kinds.tables.schema import Mode, Record, RecordSchema, Value
from rowmill.kinds.tables.serialization import RecordDecoder, RecordProblem, Wire
from rowmill.kinds.tables.time_order import Position

__all__ = [
    "REASONS",
    "ParsedText",
    "Parser",
    "PlacementColumns",
    "SpanCounts",
    "SpanKind",
    "TextSpan",
    "Validation",
    "merge_span_counts",
    "parse_generated_text",
]  # fmt: skip


class Parser:
    """Parses generated texts of one schema and mode.

    `bos` and `eos` are the texts of the delimiters; `place` names the columns that group and order records.

    Raises
    ------
    ConfigError
        If the mode is grouped and BOS and EOS are the same text.

    """

    def __init__(
        self,
        schema: RecordSchema,
        mode: Mode,
        *,
        bos: str,
        eos: str,
        place: PlacementColumns,
        validation: Validation,
        wire: Wire = "lossless",
    ) -> None:
        if mode == "grouped" and bos == eos:
            raise ConfigError(
                f"tokens: BOS and EOS are both {bos!r}; with groups they must differ; set tokens.bos or tokens.eos"
            )
        self._mode: Mode = mode
        self._bos = bos
        self._eos = eos
        self._place = place
        self._validation = validation
        self._read = RecordDecoder(schema, wire=wire)
        self._scanner = ObjectScanner()
        texts = sorted({one for one in (bos, eos) if one}, key=len, reverse=True)
        self._delimiter = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def __call__(
        self,
        text: str,
        *,
        open_at_start: bool = False,
        closed_at_end: bool = False,
        group: Mapping[str, Value] | None = None,
        after: Position | None = None,
    ) -> ParsedText:
        """Parse one text.

        `open_at_start`: the prompt ended with BOS; `closed_at_end`: the server stopped at EOS and did not return
        it. In sequential mode `group` is the key that all records must have, `after` the position of the record
        before the first one.
        """
        spans: list[TextSpan] = []
        pieces: list[DelimitedSpans] = []
        start, is_begun, has_objects = 0, open_at_start, False
        for found in self._delimiter.finditer(text):
            scanned = self._scan_spans(text, start, found.start())
            has_objects = has_objects or any(span.kind in {"record", "invalid"} for span in scanned)
            # Where both delimiters are the same text, the first one only begins.
            is_end = found[0] == self._eos and (found[0] != self._bos or has_objects)
            pieces.append(DelimitedSpans(scanned, is_begun, is_end))
            spans += scanned
            spans.append(TextSpan(found.start(), found.end(), "delimiter"))
            start, is_begun = found.end(), found[0] == self._bos
        pieces.append(DelimitedSpans(self._scan_spans(text, start, len(text)), is_begun, closed_at_end))
        spans += pieces[-1].spans
        records: list[Record] = []
        positions: list[Position] = []
        match self._mode:
            case "tabular":
                records = [span.record for span in spans if span.record is not None]
            case "grouped":
                for piece in pieces:
                    records += validate_group(piece, self._place, self._validation)
            case "sequential":
                records, positions = validate_series(pieces, self._place, group=group, after=after)
        return ParsedText(spans, records, count_spans(spans), positions)

    def _scan_spans(self, text: str, start: int, end: int) -> list[TextSpan]:
        """Scan a piece and decode its objects; a span is a record if its object is valid by itself."""
        spans: list[TextSpan] = []
        has_place = self._place.order is not None
        for span, value in self._scanner.scan(text, start, end):
            spans.append(span)
            if span.kind != "record":
                continue
            read = self._read(value)
            if isinstance(read, RecordProblem):
                span.fail(*read)
                continue
            span.record = read
            misplaced = self._place.find_problem(read) if has_place else None
            if misplaced is not None:
                span.fail(*misplaced)
                span.record = None
        return spans


def parse_generated_text(
    text: str,
    schema: RecordSchema,
    mode: Mode,
    *,
    bos: str,
    eos: str,
    place: PlacementColumns,
    validation: Validation,
    open_at_start: bool = False,
    closed_at_end: bool = False,
) -> ParsedText:
    """Parse one text; for many texts, reuse a `Parser`."""
    parser = Parser(schema, mode, bos=bos, eos=eos, place=place, validation=validation)
    return parser(text, open_at_start=open_at_start, closed_at_end=closed_at_end)
