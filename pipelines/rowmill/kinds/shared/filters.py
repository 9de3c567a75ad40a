"""Filters before tokenization: rows that are too short or too long, duplicates, and texts that no tokenizer can cut.

    content     BLAKE2b-128 of a row's canonical content; also the row's identity in splits
    prefix200   MD5 of the first 200 characters of the record's key-sorted JSON

Tokenizers cut a text at its borders and join the pieces that they get, so a piece costs more than its share: with
`gigatoken` a million letters take 0.1 to 0.4 s and ten million 2 to 7 s, and `tokenizers` takes four times as long, or
gives up on white space. Text with borders takes 0.01 s. So a row is rejected if no border stands for a million
characters, as in encoded files. A run is of one class, and a border is where the next begins:

    letters, digits, _     aaaaaaaa…    also Chinese, Japanese and Korean, which have punctuation in every sentence
    white space            ␠␠␠␠␠␠␠␠…
    signs                  --------…    also combining marks, which are borders in Thai and Hindi
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from rowmill.core.config import Config
from rowmill.core.json import Json, canonical_json, from_json
from rowmill.core.remote import public_url
from rowmill.schema.rows import Rejected, Row
from rowmill.sources.files import Files, require_known_suffixes
from rowmill.sources.options import Limits

Action = Literal["reject", "report"]


class BenchmarkLimits(Limits):
    """The limits of a benchmark's files, which are the defaults whatever those of the source are."""


class BenchmarkFiles(Files):
    """The files of a benchmark, read as those of a source are; a class of its own, because it is not the source."""

    limits: Limits = BenchmarkLimits()


class Benchmark(Config):
    """One benchmark: files whose records are its items."""

    name: str = Field(min_length=1)
    """Name in reports and rejects."""
    urls: list[str] = Field(min_length=1)
    """fsspec URLs of its files, of any kind that a source reads. Relative paths are resolved against the project's
    folder."""
    fields: list[str] = Field(min_length=1)
    """Columns of an item's text, as paths such as `question.text`. A column may hold text, a list of texts, or
    messages. Each text is compared by itself."""

    @field_validator("urls")
    @classmethod
    def _require_known_suffixes(cls, values: list[str]) -> list[str]:
        return require_known_suffixes(values)

    @field_serializer("urls")
    def _serialize_public_urls(self, values: list[str]) -> list[str]:
        return [public_url(url) for url in values]

    def open_source(self) -> BenchmarkFiles:
        """Return the files as a source."""
        return BenchmarkFiles(train_urls=self.urls)


class Decontaminate(Config):
    """Removes rows that have an item of a benchmark."""

    benchmarks: tuple[Benchmark, ...] = Field(min_length=1)
    """The benchmarks to keep out of the data."""
    ngram: Annotated[int, Field(ge=2)] = 8
    """Words in an n-gram. An item with fewer words is found where a message equals it."""
    coverage: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of an item's words in n-grams that the row has too, from which the row has the item."""
    action: Action = "reject"
    """reject: such rows are rejected as `contaminated`; report: they are kept and counted."""
    max_ngrams: Annotated[int, Field(ge=1)] = 100_000_000
    """Maximum number of n-grams of all items; every worker holds some 30 bytes of each."""

    @model_validator(mode="after")
    def _require_distinct_names(self) -> "Decontaminate":
        names = [benchmark.name for benchmark in self.benchmarks]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(
                f"benchmarks: {names.count(repeated)} are called {repeated!r}; names must be unique, since rejects "
                "name the benchmark; rename one, or list its files in one benchmark"
            )
        return self


class NearDuplicates(Config):
    """Removes rows that resemble a longer row of the dataset."""

    threshold: Annotated[float, Field(ge=0.7, le=1)] = 0.8
    """Share of common n-grams among those of either row (Jaccard similarity), from which the shorter row goes. At 0.8
    two such rows are found with probability 0.998, at 0.7 with 0.92."""
    ngram: Annotated[int, Field(ge=1)] = 5
    """Words in an n-gram, which may cross messages."""
    min_words: Annotated[int, Field(ge=1)] = 20
    """Rows with fewer words are left alone."""
    action: Action = "reject"
    """reject: such rows are rejected as `near_duplicate`; report: they are kept and counted."""


REMOVAL_FILTERS: frozenset[str] = frozenset({"decontaminate", "near_duplicates"})
"""The options of `filters` that compare rows with others; a row by itself does not depend on them."""


FILTERS_OF_MADE_ROWS = REMOVAL_FILTERS | {"leave_out"}
"""The options of `filters` that are applied after the rows of a part are made, so that a change makes none again."""


def identify_removal_filters(filters: Any) -> dict[str, Any]:
    """Return the removal filters that a dataset sets, as JSON values."""
    return {name: one.model_dump(mode="json") for name in sorted(REMOVAL_FILTERS) if (one := getattr(filters, name))}


CONTENT_HASH_BYTES = 16
PREFIX_CHARACTERS = 200


class Filters(Config):
    """Which rows are kept."""

    min_chars: Annotated[int, Field(ge=0)] = 0
    """Minimum number of characters of a document; text only."""
    max_chars: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of characters of a document; null: no limit; text only."""
    deduplicate: Literal["exact", "prefix200", "off"] = "exact"
    """exact (true): of rows with equal canonical content the first is kept; prefix200: the same for records whose
    key-sorted JSON starts with the same 200 characters; off (false): all are kept."""
    max_items: Annotated[int, Field(ge=1)] | None = None
    """Number of records to take, from the first; null: all. The others are `not_taken`."""
    decontaminate: Decontaminate | None = None
    """Removes rows that have an item of a benchmark; null: no row is compared."""
    near_duplicates: NearDuplicates | None = None
    """Removes rows that resemble a longer row of the dataset; null: no row is compared."""
    leave_out: tuple[str, ...] = ()
    """Files of rows that a person left out, as `rowmill view` hands them over: JSON Lines with the `content_hash` of a
    row and perhaps a `note`. Relative paths are resolved against the project's folder. Rows of this content are
    rejected as `left_out_by_hand`, wherever they are."""

    @field_serializer("leave_out")
    def _serialize_public_urls(self, values: tuple[str, ...]) -> list[str]:
        return [public_url(url) for url in values]

    @field_validator("deduplicate", mode="before")
    @classmethod
    def _read_boolean(cls, value: Json) -> Json:
        # YAML parses a bare `off` as false.
        return {True: "exact", False: "off"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_lengths(self) -> "Filters":
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(
                f"min_chars {self.min_chars} is more than max_chars {self.max_chars}; no document has such a length; "
                "raise max_chars or lower min_chars"
            )
        return self


def hash_record_prefix(record: Mapping[str, Json]) -> bytes:
    """Return a digest of 16 bytes over the first 200 characters of a record's key-sorted JSON."""
    # A character has at most four bytes, so the prefix is cut before decoding.
    start = canonical_json(record)[: 4 * PREFIX_CHARACTERS].decode(errors="ignore")[:PREFIX_CHARACTERS]
    return hashlib.md5(start.encode(), usedforsecurity=False).digest()


_CLASSES: Final = (re.compile(r"\w+"), re.compile(r"\s+"), re.compile(r"[^\w\s]+"))

_SHOWN_CHARS: Final = 20


def reject_long_run(values: Iterable[Json], limit: int) -> Rejected | None:
    """Return the reject if one of the texts in some values has a run of more than `limit` characters."""
    for text in _iterate_texts(values):
        if (found := find_long_run(text, limit)) is not None:
            begin, length = found
            return Rejected(
                "too_long_run",
                f"{length:,} characters without a border, from character {begin + 1:,} of a text on, which begin with "
                f"{text[begin : begin + _SHOWN_CHARS]!r}; source.limits.max_run_chars is {limit:,}",
            )
    return None


def list_row_texts(row: Row) -> list[Json]:
    """Return the values of a row whose texts become tokens; a kind's own columns hold JSON text."""
    parsed: list[Json] = []
    for value in (value for value in row.columns.values() if isinstance(value, str)):
        try:
            parsed.append(from_json(value))
        except ValueError:
            parsed.append(value)
    return [list(row.messages), list(row.tools or ()), row.text, row.output, row.record, *parsed]


def find_long_run(text: str, limit: int) -> tuple[int, int] | None:
    """Return the beginning and length of the first run of more than `limit` characters, or None."""
    # Such a run holds two neighbours of the places that are half as far apart, so only these are looked at.
    step = limit // 2
    for at in range(0, len(text) - step, step) if len(text) > limit else ():
        one, ahead = next((one, found) for one in _CLASSES if (found := one.match(text, at)))
        if ahead.end() - at <= step:
            continue
        behind = one.match(text[max(at - step, 0) : at][::-1])
        begin = at if behind is None else at - behind.end()
        if ahead.end() - begin > limit:
            return begin, ahead.end() - begin
    return None


def _iterate_texts(values: Iterable[Json]) -> Iterator[str]:
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
