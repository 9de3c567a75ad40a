r"""Text of a model cut into what looks like records.

Spans that partition generated text, and their counts.

{"g":"a","t":1}\n{"g":"a","t":tru
└── record ───┘└┘└── truncated ──┘
             delimiter

Find the JSON objects in generated text, in one pass and in time linear in the text.

    {  followed, after whitespace, by " or }   begins an object
    {  followed by a key without its quotes    begins an attempt at one: invalid_json up to the end of its line
    any other {                                prose
    a syntax error                             invalid_json up to the end of the error's line
    the end of the text inside an object       truncated

The standard library's C scanner decodes most objects, with hooks that make it exact: repeated keys are found, numbers
keep their digits. Only where it fails does the Python scanner below find out why and where. Rejected: orjson, which
takes the last of two keys and rounds numbers.

Two traps. `json` counts the lines of its whole input when it formats an error, which is quadratic for text full of `{`:
so it gets one line at a time, and an error consumes its line. The C scanner recurses: text nested too deeply for it
goes to the Python scanner, which does not.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from rowmill.core.json import Json
from rowmill.kinds.tables.schema import MAX_DEPTH, MAX_DIGITS, Record
from rowmill.kinds.tables.time_order import Position
from rowmill.schema.facts import SpanCounts

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


def count_spans(spans: Iterable[TextSpan]) -> SpanCounts:
    """Count spans and characters by class, sorted by class."""
    items: dict[str, int] = {}
    characters: dict[str, int] = {}
    for span in spans:
        name = f"invalid:{span.reason}" if span.reason else span.kind
        items[name] = items.get(name, 0) + 1
        characters[name] = characters.get(name, 0) + span.end - span.start
    return SpanCounts({name: items[name] for name in sorted(items)}, {name: characters[name] for name in sorted(items)})


def merge_span_counts(reports: Iterable[SpanCounts]) -> SpanCounts:
    """Add up the counts of several texts."""
    items: dict[str, int] = {}
    characters: dict[str, int] = {}
    for report in reports:
        for name, number in report.items.items():
            items[name] = items.get(name, 0) + number
            characters[name] = characters.get(name, 0) + report.characters[name]
    return SpanCounts({name: items[name] for name in sorted(items)}, {name: characters[name] for name in sorted(items)})


# ── Find the JSON objects in generated text, in one pass and in time linear in the text ──


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
            object_pairs_hook=self._build_mapping, parse_float=Decimal, parse_constant=_refuse_json_constant
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


def _refuse_json_constant(name: str) -> Any:
    raise ValueError(name)


class _ObjectSyntaxScan:
    """Syntax check of one object, token by token: where it ends or fails, or that the text ends inside it."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self.end = end
        self.error: int | None = None
        self.is_cut = False
        self.is_large = False
        self.is_deep = False
        self._text = text
        self._limit = end
        self._scan_tokens(start)

    def _scan_tokens(self, start: int) -> None:
        """Scan until the object is closed, invalid or cut off; `wanted` is what the next token may be."""
        closers: list[str] = []
        wanted = "value"
        position = start
        while True:
            token = _TOKEN.match(self._text, position, self._limit)
            assert token is not None
            if token[1] is None:
                self._stop_at(token.end())
                return
            begin, position = token.span(1)
            sign = token[1]
            if sign == '"' and wanted in _STRING_EXPECTED:
                position = self._scan_string(position)
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
                self._scan_scalar(sign, begin, position)
                wanted = "comma"
            else:
                self.error = begin
            if self.error is not None or self.is_cut:
                return

    def _stop_at(self, position: int) -> None:
        """End where no token begins."""
        self.is_cut = position >= self._limit
        self.error = None if self.is_cut else position

    def _scan_string(self, start: int) -> int:
        body = _STRING_BODY.match(self._text, start, self._limit)
        assert body is not None
        end = body.end()
        if self._text[end : end + 1] == '"' and end < self._limit:
            return end + 1
        begun = _ESCAPE_BEGUN.match(self._text, end, self._limit)
        self._stop_at(end if begun is None or begun.end() < self._limit else begun.end())
        return end

    def _scan_scalar(self, sign: str, begin: int, end: int) -> None:
        """Check a number or a literal; being cut off by the end of the text is not an error."""
        number = _NUMBER.fullmatch(sign)
        if number is not None:
            self.is_large = self.is_large or _is_number_too_large(sign, whole=number[1] is None and number[2] is None)
        elif sign in _LITERALS:
            return
        elif end >= self._limit and (_NUMBER_BEGUN.fullmatch(sign) or any(word.startswith(sign) for word in _LITERALS)):
            self.is_cut = True
        else:
            self.error = begin


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
