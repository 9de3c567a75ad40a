"""Filters that compare rows with other texts: their options."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from rowmill.core.config import Config
from rowmill.core.public_urls import public_url
from rowmill.sources.files import Files, require_known_suffixes
from rowmill.sources.limits import Limits

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


def identify_removal_filters(filters: Any) -> dict[str, Any]:
    """Return the removal filters that a dataset sets, as JSON values."""
    return {name: one.model_dump(mode="json") for name in sorted(REMOVAL_FILTERS) if (one := getattr(filters, name))}
