"""Parsing generated text into records: every character is classified, every object accepted or rejected with a reason.

    text ──split at BOS, EOS──► pieces ──ObjectScanner──► objects ──RecordDecoder──► records ──rules──► ParsedText
                                                    └ prose, delimiter, truncated, invalid(reason)

Spans partition any string, and no text raises an error. Everything that depends on schema and options is compiled once
per `Parser`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Literal

from rowmill.core.config import Config
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.kinds.tables.schema import MAX_DEPTH, MAX_DIGITS, Mode, Position, Record, RecordSchema, SortKey, Value
from rowmill.kinds.tables.serialization import RecordDecoder, RecordProblem, Wire, refuse_constant
from rowmill.schema.generated_counts import SpanCounts
from rowmill.schema.ledger import sum_counts

SpanKind = Literal["record", "invalid", "delimiter", "prose", "truncated"]

REASONS = (
    # One object by itself, in order of precedence.
    "invalid_json number_too_large too_deep duplicate_column unknown_column missing_column null type order_missing "
    "timestamp "
    # An object in its group.
    "group_incomplete group_has_invalid group_mixed_key group_unordered "
    # An object in its series.
    "step order after_failure "
    # A completion that generation discarded.
    "not_chosen past_stop past_bound series_incomplete"
).split()
"""The closed list of reasons why an object of generated text is rejected."""


@dataclass(slots=True)
class TextSpan:
    """Characters `[start, end)` of a text with their kind; `reason` and `column` only if invalid.

    `record` is the object's record if it is valid by itself.
    """

    start: int
    end: int
    kind: SpanKind
    reason: str = ""
    column: str = ""
    record: Record | None = None

    def fail(self, reason: str, column: str = "") -> None:
        """Mark the span invalid."""
        self.kind, self.reason, self.column = "invalid", reason, column


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A parsed text: its spans in order, the accepted records, the counts.

    `positions` are the records' in sequential mode, empty in others. Records of a sorted group are in the new order,
    others in the order of the text.
    """

    spans: Sequence[TextSpan]
    records: Sequence[Record]
    report: SpanCounts
    positions: Sequence[Position] = ()


# ── Objects in a text, found in one pass and in time linear in it ──────────────────────────────────


_OBJECT = re.compile(r'\{[ \t\r\n]*+["}]')
_ATTEMPT = re.compile(r"""\{\s*+(?:'[^'{}\r\n]*+'|[\u2018\u201c][^{}\r\n\u2019\u201d]*+[\u2019\u201d]|\w++)\s*+:""")
"""An object in Python, JavaScript or YAML syntax, or with typographic quotes: `{'a': 1}`, `{a: 1}`, `{“a”: 1}`."""
_SPACE = re.compile(r"\s++")
_LINE_END = re.compile(r"[\r\n]")
_MANY_DIGITS = re.compile(rf"(?<![0-9])[0-9]{{{MAX_DIGITS + 1}}}")

_TOKEN = re.compile(r'[ \t\r\n]*+(["{}\[\],:]|-?[0-9][-+.0-9eE]*+|-|[a-zA-Z]++)?')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][-+]?[0-9]++)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*+)(?:\.[0-9]*+|(?:\.[0-9]++)?[eE][-+]?[0-9]*+)?)?")
_STRING_BODY = re.compile(r'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_NOT_DECODED = (ValueError, RecursionError, InvalidOperation)
_LITERALS = ("true", "false", "null")


class ObjectScanner:
    """Scans text between delimiters; reusable for many texts."""

    def __init__(self) -> None:
        self._repeated: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._build_mapping, parse_float=Decimal, parse_constant=refuse_constant
        )

    def scan(self, text: str, start: int, end: int) -> Iterator[tuple[TextSpan, Json]]:
        """Yield the spans that partition `text[start:end]`, each object with its decoded value.

        An object of valid syntax that is too large, too deep or repeats a key is already `invalid`.
        """
        position, following = start, -1
        returns = text.find("\r", start, end) >= 0
        line, line_start, line_end = "", 0, start
        while position < end:
            space = _SPACE.match(text, position, end)
            if space is not None:
                yield TextSpan(position, space.end(), "delimiter"), None
                position = space.end()
                continue
            if following < position:
                found = _OBJECT.search(text, position, end)
                following = end if found is None else found.start()
            if position >= line_end:
                line_start, line_end = position, _find_line_end(text, position, end, returns=returns)
                line = text[line_start:line_end]
            if following > position:
                limit = min(following, line_end)
                stop = position + len(text[position:limit].rstrip())
                # Where a malformed object begins; `stop` if all of it is prose.
                attempt = text.find("{", position, stop)
                while attempt >= 0 and _ATTEMPT.match(text, attempt, end) is None:
                    attempt = text.find("{", attempt + 1, stop)
                attempt = stop if attempt < 0 else attempt
                if attempt > position:
                    yield TextSpan(position, attempt, "prose"), None
                if attempt < stop:
                    span = TextSpan(attempt, stop, "record")
                    span.fail("invalid_json")
                    yield span, None
            else:
                span, value = self._decode_object(text, position, end, line, line_start)
                yield span, value
                stop = span.end
            position = stop

    def _decode_object(self, text: str, start: int, end: int, line: str, line_start: int) -> tuple[TextSpan, Json]:
        """Decode the object that begins at `start`, on the fast path if it ends on its line."""
        try:
            value, stop = self._decode_json(line, start - line_start)
        except _NOT_DECODED:
            return self._scan_object(text, start, end)
        stop += line_start
        if stop - start > MAX_DIGITS and _MANY_DIGITS.search(text, start, stop):
            return self._scan_object(text, start, end)
        span = TextSpan(start, stop, "record")
        if (
            text.count("{", start, stop) + text.count("[", start, stop) > MAX_DEPTH
            and _ObjectSyntaxScan(text, start, end).is_deep
        ):
            span.fail("too_deep")
        elif self._repeated:
            span.fail("duplicate_column", self._repeated[-1])
        return span, value

    def _scan_object(self, text: str, start: int, end: int) -> tuple[TextSpan, Json]:
        syntax = _ObjectSyntaxScan(text, start, end)
        span = TextSpan(start, syntax.end, "record")
        if syntax.error is not None:
            # The object may have begun lines earlier; only the rest of the error's line is lost.
            span.end = _find_line_end(text, syntax.error, end, returns=True)
            span.fail("invalid_json")
        elif syntax.is_cut and end == len(text):
            span.kind = "truncated"
        elif syntax.is_cut:
            span.fail("invalid_json")
        elif syntax.is_large:
            span.fail("number_too_large")
        elif syntax.is_deep:
            span.fail("too_deep")
        else:
            # Of several lines, or of very many digits.
            try:
                value, _ = self._decode_json(text[span.start : span.end], 0)
            except _NOT_DECODED:
                # The process may have lowered the limit of digits.
                span.fail("number_too_large")
                return span, None
            if self._repeated:
                span.fail("duplicate_column", self._repeated[-1])
            return span, value
        return span, None

    def _decode_json(self, text: str, start: int) -> tuple[Json, int]:
        self._repeated.clear()
        return self._decoder.raw_decode(text, start)

    def _build_mapping(self, pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            # Inner objects come first: the last name is the outermost object's.
            self._repeated.append(next(name for name, _ in pairs if name in seen or seen.add(name)))
        return made


def _find_line_end(text: str, start: int, end: int, *, returns: bool) -> int:
    if returns:
        found = _LINE_END.search(text, start, end)
        return end if found is None else found.start()
    stop = text.find("\n", start, end)
    return end if stop < 0 else stop


class _ObjectSyntaxScan:
    """Syntax check of one object, token by token: where it ends or fails, or that the text ends inside it.

    `docs/decisions/0047-generated-objects-are-scanned-by-token.md` says why the errors of a library do not do.
    """

    def __init__(self, text: str, start: int, end: int) -> None:
        self.end = end
        self.error: int | None = None
        self.is_cut = False
        self.is_large = False
        self.is_deep = False
        closers: list[str] = []
        position = start
        # What the next token may be.
        wanted = "value"
        while self.error is None and not self.is_cut:
            token = _TOKEN.match(text, position, end)
            assert token is not None
            if token[1] is None:
                self._stop_at(token.end(), end)
                return
            begin, position = token.span(1)
            sign = token[1]
            if sign == '"' and wanted in _STRING_EXPECTED:
                body = _STRING_BODY.match(text, position, end)
                assert body is not None
                position = body.end()
                if text[position : position + 1] == '"' and position < end:
                    position += 1
                else:
                    begun = _ESCAPE_BEGUN.match(text, position, end)
                    self._stop_at(position if begun is None or begun.end() < end else begun.end(), end)
                wanted = "colon" if wanted in _KEY_EXPECTED else "comma"
            elif sign in "{[" and wanted in _VALUE_EXPECTED:
                closers.append("}" if sign == "{" else "]")
                self.is_deep = self.is_deep or len(closers) > MAX_DEPTH
                wanted = "key or }" if sign == "{" else "value or ]"
            elif sign in "}]" and closers[-1] == sign and wanted in _CLOSER_EXPECTED[sign]:
                closers.pop()
                wanted = "comma"
                if not closers:
                    self.end = position
                    return
            elif sign == "," and wanted == "comma":
                wanted = "key" if closers[-1] == "}" else "value"
            elif sign == ":" and wanted == "colon":
                wanted = "value"
            elif sign not in '"{}[],:' and wanted in _VALUE_EXPECTED:
                wanted = "comma"
                number = _NUMBER.fullmatch(sign)
                if number is not None:
                    is_whole = number[1] is None and number[2] is None
                    self.is_large = self.is_large or _is_number_too_large(sign, whole=is_whole)
                elif sign not in _LITERALS:
                    # Being cut off by the end of the text is not an error.
                    is_begun = _NUMBER_BEGUN.fullmatch(sign) or any(word.startswith(sign) for word in _LITERALS)
                    self.is_cut = position >= end and bool(is_begun)
                    self.error = None if self.is_cut else begin
            else:
                self.error = begin

    def _stop_at(self, position: int, end: int) -> None:
        """End where no token begins."""
        self.is_cut = position >= end
        self.error = None if self.is_cut else position


_STRING_EXPECTED = {"value", "value or ]", "key", "key or }"}
_KEY_EXPECTED = {"key", "key or }"}
_VALUE_EXPECTED = {"value", "value or ]"}
_CLOSER_EXPECTED = {"}": {"key or }", "comma"}, "]": {"value or ]", "comma"}}


def _is_number_too_large(number: str, *, whole: bool) -> bool:
    if whole:
        return len(number.lstrip("-")) > MAX_DIGITS
    try:
        Decimal(number)
    except InvalidOperation:
        return True
    return False


_EXACT = Context(prec=60, traps=[Inexact])
"""Differences of positions; one that needs more digits cannot equal a configured interval."""


class Validation(Config):
    """Repairs of generated groups; turning one on never lowers the count of valid records."""

    group_by_accept_no_delineator: bool = False
    """Accept records without delimiters around them as a group; otherwise `group_incomplete`."""
    group_by_ignore_invalid_records: bool = False
    """Drop and count the invalid records of a group; otherwise the whole group is `group_has_invalid`."""
    group_by_fix_non_unique_value: bool = False
    """Give all records of a group the first valid one's key; otherwise they are `group_mixed_key`."""
    group_by_fix_unordered_records: bool = False
    """Sort a group by its order column; otherwise it is `group_unordered`."""


@dataclass(frozen=True, slots=True)
class DelimitedSpans:
    """The spans between two delimiters, and whether these begin and end a group."""

    spans: Sequence[TextSpan]
    is_begun: bool
    is_ended: bool


@dataclass(frozen=True, slots=True)
class PlacementColumns:
    """The columns that group and order records, and how the order column is read."""

    group_columns: Sequence[str] = ()
    order_column: str | None = None
    order: SortKey | None = None
    interval: int | Decimal | None = None

    def key(self, record: Record) -> list[Value]:
        """Return a record's typed group key: 1 is not `"1"`."""
        return [record[name] for name in self.group_columns]


def validate_group(piece: DelimitedSpans, place: PlacementColumns, options: Validation) -> list[Record]:
    """Accept all records of a piece or none; they are returned in the group's order.

    A span that is invalid by itself keeps its reason.
    """
    good = [span for span in piece.spans if span.kind == "record"]
    if not (piece.is_begun and piece.is_ended) and not options.group_by_accept_no_delineator:
        return _fail_spans(good, "group_incomplete")
    is_bad = any(span.kind in {"invalid", "truncated", "prose"} for span in piece.spans)
    if is_bad and not options.group_by_ignore_invalid_records:
        return _fail_spans(good, "group_has_invalid")
    records = [span.record for span in good if span.record is not None]
    if not records:
        return []
    key = place.key(records[0])
    if any(place.key(record) != key for record in records[1:]):
        if not options.group_by_fix_non_unique_value:
            return _fail_spans(good, "group_mixed_key")
        records = [{**record, **dict(zip(place.group_columns, key, strict=True))} for record in records]
    if place.order is None or place.order_column is None:
        return records
    positions = place.order.read_series([record[place.order_column] for record in records])
    by_position = sorted(range(len(records)), key=positions.__getitem__)
    if by_position == list(range(len(records))):
        return records
    if not options.group_by_fix_unordered_records:
        return _fail_spans(good, "group_unordered", place.order_column)
    return [records[index] for index in by_position]


def _fail_spans(good: Sequence[TextSpan], reason: str, column: str = "") -> list[Record]:
    for span in good:
        span.fail(reason, column)
    return []


def validate_series(
    pieces: Sequence[DelimitedSpans],
    place: PlacementColumns,
    *,
    group: Mapping[str, Value] | None,
    after: Position | None,
) -> tuple[list[Record], list[Position]]:
    """Accept records up to the first invalid one or the end of sequence; the rest is `after_failure`.

    `group` is the key that all must have (by default the first record's), `after` the position of the record before the
    first one.
    """
    records: list[Record] = []
    positions: list[Position] = []
    key = None if group is None else [group[name] for name in place.group_columns]
    has_ended = False
    for piece in pieces:
        for span in piece.spans:
            if span.kind not in {"record", "invalid"}:
                continue
            if has_ended or span.record is None:
                span.fail(*(("after_failure", "") if has_ended else (span.reason, span.column)))
                has_ended = True
                continue
            key = place.key(span.record) if key is None else key
            position: Position | None = None
            if place.key(span.record) != key:
                span.fail("group_mixed_key", next(name for name in place.group_columns))
            elif place.order is not None and place.order_column is not None:
                reached: Position = place.order.read_after(after, span.record[place.order_column])
                position = reached
                if after is not None and place.interval is not None:
                    try:
                        matches = _EXACT.subtract(reached, after) == place.interval
                    except Inexact:
                        matches = False
                    if not matches:
                        span.fail("step", place.order_column)
                elif after is not None and reached < after:
                    span.fail("order", place.order_column)
            if span.kind == "invalid":
                has_ended = True
                continue
            records.append(span.record)
            if place.order is not None:
                positions.append(position)
                after = position
        has_ended = has_ended or piece.is_ended
    return records, positions


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTextSpec:
    """The expected form of generated texts: what a model was trained on, and how its groups are repaired.

    `bos` and `eos` are the texts of the delimiters; `place` names the columns that group and order records.
    """

    schema: RecordSchema
    mode: Mode
    bos: str
    eos: str
    place: PlacementColumns
    validation: Validation = field(default_factory=Validation)
    wire: Wire = "lossless"


class Parser:
    """Parses generated texts of one form."""

    def __init__(self, meant: GeneratedTextSpec) -> None:
        if meant.mode == "grouped" and meant.bos == meant.eos:
            raise ConfigError(
                f"tokens: BOS and EOS are both {meant.bos!r}; with groups they must differ; set tokens.bos or "
                "tokens.eos"
            )
        self._meant = meant
        self._read = RecordDecoder(meant.schema, wire=meant.wire)
        self._scanner = ObjectScanner()
        texts = sorted({one for one in (meant.bos, meant.eos) if one}, key=len, reverse=True)
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
        meant, place = self._meant, self._meant.place
        spans: list[TextSpan] = []
        pieces: list[DelimitedSpans] = []
        start, is_begun, has_objects = 0, open_at_start, False
        for found in self._delimiter.finditer(text):
            scanned = self._scan_spans(text, start, found.start())
            has_objects = has_objects or any(span.kind in {"record", "invalid"} for span in scanned)
            # Where both delimiters are the same text, the first one only begins.
            is_end = found[0] == meant.eos and (found[0] != meant.bos or has_objects)
            pieces.append(DelimitedSpans(scanned, is_begun, is_end))
            spans += scanned
            spans.append(TextSpan(found.start(), found.end(), "delimiter"))
            start, is_begun = found.end(), found[0] == meant.bos
        pieces.append(DelimitedSpans(self._scan_spans(text, start, len(text)), is_begun, closed_at_end))
        spans += pieces[-1].spans
        records: list[Record] = []
        positions: list[Position] = []
        match meant.mode:
            case "tabular":
                records = [span.record for span in spans if span.record is not None]
            case "grouped":
                for piece in pieces:
                    records += validate_group(piece, place, meant.validation)
            case "sequential":
                records, positions = validate_series(pieces, place, group=group, after=after)
        items, characters = Counter[str](), Counter[str]()
        for span in spans:
            name = f"invalid:{span.reason}" if span.reason else span.kind
            items[name] += 1
            characters[name] += span.end - span.start
        return ParsedText(spans, records, SpanCounts(sum_counts([items]), sum_counts([characters])), positions)

    def _scan_spans(self, text: str, start: int, end: int) -> list[TextSpan]:
        """Scan a piece and decode its objects; a span is a record if its object is valid by itself."""
        spans: list[TextSpan] = []
        place = self._meant.place
        for span, value in self._scanner.scan(text, start, end):
            spans.append(span)
            if span.kind != "record":
                continue
            read = self._read(value)
            if isinstance(read, RecordProblem):
                span.fail(*read)
                continue
            if place.order is not None and place.order_column is not None:
                time = read.get(place.order_column)
                if time is None or place.order.read(time) is None:
                    span.fail("order_missing" if time is None else "timestamp", place.order_column)
                    continue
            span.record = read
        return spans
