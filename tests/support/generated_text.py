"""A seeded imitation of generated text, in which the class of every character is known.

Nothing here analyses a finished text: each piece is written together with its class.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rowmill.kinds.tables.parsing import GeneratedTextSpec, ParsedText, Parser, PlacementColumns, Validation
from rowmill.kinds.tables.schema import Column, Mode, RecordSchema

BOS, EOS = "<|im_start|>", "<|im_end|>"
SCHEMA = RecordSchema(
    (
        Column("shop", "string"),
        Column("day", "date"),
        Column("amount", "decimal"),
        Column("units", "integer"),
        Column("note", "string", nullable=True),
        Column("tags", "list", required=False, item=Column("item", "string")),
    )
)
PROSE = (
    "Sure, here are the records:",
    "...",
    "{not JSON}",
    "and so on",
    "```json",
    "{ x }",
    "[",
    "]",
    "漢字 {",
    "N/A {a}",
)


@dataclass
class Corpus:
    """Pieces of text with the class of each: a span's kind, or `invalid:` and the reason."""

    seed: int
    pieces: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def __post_init__(self) -> None:
        """Draw from the seed alone."""
        self.random = random.Random(self.seed)

    @property
    def text(self) -> str:
        """The text."""
        return "".join(text for text, _ in self.pieces)

    @property
    def characters(self) -> list[str]:
        """The class of every character."""
        return [one for text, name in self.pieces for one in [name] * len(text)]

    def add(self, text: str, name: str) -> None:
        """Append a piece."""
        self.pieces.append((text, name))

    def gap(self) -> None:
        """Append white space such as that between records."""
        self.add(self.random.choice(["\n", "\r\n", "\n\n", " ", "\t\n"]), "delimiter")

    def record(self, shop: str, day: int) -> dict[str, Any]:
        """Return a valid record."""
        note = self.random.choice([None, "", "a/b", 'he said "so"', "漢\u2028字", "line\nline", "{}", '{"a":1}', "\\"])
        record = {
            "shop": shop,
            "day": f"2024-{1 + day // 28:02d}-{1 + day % 28:02d}",
            "amount": self.random.randrange(10**6) / 100,
            "units": self.random.choice([0, -3, 10**30, self.random.randrange(1000)]),
            "note": note,
        }
        return {**record, "tags": ["x", "y"]} if self.random.random() < 0.3 else record

    def written(self, record: dict[str, Any]) -> str:
        """Write a record in a random format: compact, spaced or over several lines."""
        style = self.random.randrange(4)
        ascii_only = self.random.random() < 0.5
        match style:
            case 0:
                return json.dumps(record, ensure_ascii=ascii_only, indent=1)
            case 1:
                return json.dumps(record, ensure_ascii=ascii_only)
            case _:
                return json.dumps(record, ensure_ascii=ascii_only, separators=(",", ":"))

    def good(self, shop: str, day: int, name: str = "record") -> None:
        """Append a record that is valid by itself."""
        self.add(self.written(self.record(shop, day)), name)
        self.gap()


def bad_objects(corpus: Corpus, shop: str, day: int) -> Iterator[tuple[str, str]]:
    """Yield every kind of invalid object, with its reason; each ends with its line."""
    record = corpus.record(shop, day)
    compact: Callable[[dict[str, Any]], str] = lambda value: json.dumps(value, separators=(",", ":"))  # noqa: E731
    good = compact(record)
    yield good[:-1] + ",}", "invalid_json"
    yield good.replace(":", "=", 1) + " and so forth", "invalid_json"
    yield compact({**record, "units": float("nan")}), "invalid_json"
    yield good.replace(f'"units":{record["units"]}', f'"units":{"7" * 5000}'), "number_too_large"
    yield compact({**record, "units": _nested(70)}), "too_deep"
    yield f'{good[:-1]},"shop":"b"}}', "duplicate_column"
    yield compact({**record, "colour": "red"}), "unknown_column"
    yield compact({name: value for name, value in record.items() if name != "amount"}), "missing_column"
    yield compact({**record, "amount": None}), "null"
    yield compact({**record, "units": "three"}), "type"
    yield compact({**record, "day": "2024-02-30"}), "type"
    yield compact({**record, "units": True}), "type"
    yield "{}", "missing_column"


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"x": value}
    return value


def make(seed: int, groups: int) -> Corpus:
    """Write a text of so many groups, of every sort in turn, that ends in the middle of an object."""
    corpus = Corpus(seed)
    for number in range(groups):
        _SORTS[number % len(_SORTS)](corpus, f"shop {number}")
        if corpus.random.random() < 0.3:
            corpus.add(corpus.random.choice(PROSE[:2]), "prose")
            corpus.add("\n", "delimiter")
    corpus.add(BOS, "delimiter")
    corpus.good("last", 0, "invalid:group_incomplete")
    cut = json.dumps(corpus.record("last", 1))
    corpus.add(cut[: corpus.random.randrange(2, len(cut) - 1)].rstrip(), "truncated")
    return corpus


def _whole(corpus: Corpus, shop: str) -> None:
    corpus.add(BOS, "delimiter")
    for day in range(corpus.random.randrange(1, 9)):
        corpus.good(shop, day)
    corpus.add(EOS, "delimiter")


def _with_bad_object(corpus: Corpus, shop: str) -> None:
    """One group for every invalid object, with which its valid ones are rejected."""
    for text, reason in bad_objects(corpus, shop, 1):
        corpus.add(BOS, "delimiter")
        corpus.good(shop, 0, "invalid:group_has_invalid")
        corpus.add(text, f"invalid:{reason}")
        corpus.add("\r\n", "delimiter")
        corpus.good(shop, 2, "invalid:group_has_invalid")
        corpus.add(EOS, "delimiter")


def _with_prose(corpus: Corpus, shop: str) -> None:
    corpus.add(BOS, "delimiter")
    for prose in PROSE:
        corpus.add(prose, "prose")
        corpus.add(corpus.random.choice([" ", "\n", "\r\n", "\t"]), "delimiter")
        corpus.good(shop, 0, "invalid:group_has_invalid")
    corpus.add(EOS, "delimiter")


def _mixed(corpus: Corpus, shop: str) -> None:
    corpus.add(BOS, "delimiter")
    for day in range(3):
        corpus.good(shop if day else "another", day, "invalid:group_mixed_key")
    corpus.add(EOS, "delimiter")


def _unordered(corpus: Corpus, shop: str) -> None:
    corpus.add(BOS, "delimiter")
    for day in (3, 1, 2):
        corpus.good(shop, day, "invalid:group_unordered")
    corpus.add(EOS, "delimiter")


def _undelimited(corpus: Corpus, shop: str) -> None:
    for day in range(3):
        corpus.good(shop, day, "invalid:group_incomplete")


def _raw_delimiter_in_a_string(corpus: Corpus, shop: str) -> None:
    corpus.add(BOS, "delimiter")
    corpus.good(shop, 0, "invalid:group_has_invalid")
    corpus.add('{"shop":"a', "invalid:invalid_json")
    corpus.add(EOS, "delimiter")
    corpus.add('b","day":"2024-01-01"}', "prose")
    corpus.add("\r\n", "delimiter")


def _line_end_in_a_string(corpus: Corpus, shop: str) -> None:
    corpus.add(BOS, "delimiter")
    corpus.add(f'{{"shop":"{shop}', "invalid:invalid_json")
    corpus.add("\n", "delimiter")
    corpus.add('b","day":"2024-01-01"}', "prose")
    corpus.add("\n", "delimiter")
    corpus.add(EOS, "delimiter")


def _empty(corpus: Corpus, shop: str) -> None:
    corpus.add(BOS, "delimiter")
    corpus.add(EOS, "delimiter")
    corpus.gap()


_SORTS: tuple[Callable[[Corpus, str], None], ...] = (
    _whole, _with_bad_object, _whole, _with_prose, _mixed, _unordered, _undelimited, _raw_delimiter_in_a_string,
    _line_end_in_a_string, _empty,
)  # fmt: skip


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
    parser = Parser(GeneratedTextSpec(schema=schema, mode=mode, bos=bos, eos=eos, place=place, validation=validation))
    return parser(text, open_at_start=open_at_start, closed_at_end=closed_at_end)
