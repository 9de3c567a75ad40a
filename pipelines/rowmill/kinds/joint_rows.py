"""The contract of kinds whose rows are decided over the whole dataset, and whose examples join several rows.

Tables are one: `Records.get_joint_rows` in `kinds/tables/options.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rowmill.core.storage import Store
from rowmill.kinds.base import DatasetKind, DatasetOptions
from rowmill.parts.context import StageOutput, WorkContext
from rowmill.parts.functions import MappedParts
from rowmill.schema.facts import SpanCounts
from rowmill.schema.manifest import DisplayTable, Manifest, Part
from rowmill.sources import FileScan
from rowmill.sources.reading import TakenGroup
from rowmill.tokenization.tokenizer import LoadedTokenizer
from rowmill.tokenization.tokenizer_source import TokenizerChoice


@dataclass(frozen=True, slots=True)
class KindContext(WorkContext, ABC):
    """What a stage hands to the dataset's kind: where the work is done, and the recipe's options that decide it."""

    @property
    @abstractmethod
    def dataset(self) -> DatasetOptions:
        """The dataset's options."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """What everything random is drawn from."""

    @property
    @abstractmethod
    def seq_len(self) -> int:
        """Tokens of a sequence."""

    @property
    @abstractmethod
    def limit(self) -> int:
        """The most tokens of an example of the dataset; of a pair's, that of each side."""

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """Ids that the model has; None: those of the tokenizer."""

    @property
    @abstractmethod
    def tokenizer_choice(self) -> TokenizerChoice:
        """The recipe's choice of the tokenizer."""


class ExamplePlan(Protocol):
    """The examples that a build would make, in numbers; `options` are the values that decide them."""

    @property
    def mode(self) -> str:
        """How examples are assembled."""

    @property
    def options(self) -> Mapping[str, Any]:
        """The values that decide the examples, by name."""

    @property
    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """Numbers of each split, by name."""

    @property
    def overflows(self) -> Any:
        """How many units fit into no example (`count`), and the `first` of them."""

    @property
    def changed(self) -> int:
        """Rows whose text does not say all that they hold."""

    def table(self) -> DisplayTable:
        """Return the numbers of each split."""


@dataclass(frozen=True, slots=True)
class ExampleEstimate:
    """Estimated size of an example.

    `unit_tokens` are those of a record or a group, `example_tokens` those of an example filled to the cap, `units` the
    most units of an example, `largest_unit` the most tokens of a unit that still fits.
    """

    unit_tokens: int
    example_tokens: int
    fits: bool
    units: int
    largest_unit: int
    advice: tuple[str, ...]
    is_approximate: bool


@dataclass(frozen=True, slots=True)
class GroupAdvice:
    """Assessment of a column as the group column.

    `sizes` are count, mean, std, min, p25, p50, p75, p95 and max of records per group; `unsuitable` and `warnings` map
    keywords of closed lists to explanations.
    """

    column: str
    sizes: dict[str, float]
    largest: str
    unsuitable: dict[str, str]
    warnings: dict[str, str]

    def table(self) -> DisplayTable:
        """Return a table with one line per fact and per piece of advice."""
        rows: list[tuple[Any, ...]] = [("column", self.column), ("largest", self.largest)]
        rows += [(name, f"{value:g}") for name, value in self.sizes.items()]
        rows += [(name, why) for name, why in (self.unsuitable | self.warnings).items()]
        return DisplayTable(("about", "says"), tuple(rows))


@dataclass(frozen=True, slots=True)
class DatasetAdvice:
    """Advice on a dataset's columns for grouping, best first, and the estimated examples of the current options."""

    dataset: str
    columns: tuple[GroupAdvice, ...]
    estimate: ExampleEstimate
    mode: str
    chosen: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NearRows:
    """How many held-out rows were compared, and the ids of those with a near duplicate in train."""

    compared: int
    row_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParsedFiles:
    """Counts and accepted records of some files of generated text."""

    report: SpanCounts
    texts: int
    unreadable: int
    records: Sequence[str]
    table: DisplayTable
    """The counts by class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointRows:
    """What the stages, and the commands that try a recipe, ask of a kind whose rows depend on one another.

    The functions named `identify_…` return the options and versions that decide a stage's output.
    """

    check_contract: Callable[[Mapping[str, Any], str], object]
    """Refuse a pinned contract that cannot be read; the text is its file."""

    # Rows.

    identify_rows: Callable[[DatasetOptions, int], dict[str, Any]]
    """Return what decides rows (`rows`), and what only facts about them, given the most tokens of an example."""
    make_rows: Callable[[KindContext, TakenGroup, str], tuple[MappedParts, Any]]
    """Make the rows of source parts, each with how many of its records are taken (None: all).

    The text identifies the dataset's options. Also return what was decided over all parts, for the hooks that follow.
    """
    assign_splits: Callable[[KindContext, list[Part], Any], list[Part]]
    """Return the parts after splits that need all rows."""
    complete_rows: Callable[[KindContext, StageOutput, Any], StageOutput]
    """Add the kind's own facts and tables to the output of rows."""
    comparisons: Mapping[str, Callable[[Path, Store, Manifest, Manifest], Sequence[str] | None]]
    """For checks that compare rows with published ones, by name: the function that returns the changes, a sentence
    each, or None if the two cannot be compared. The path is the project's folder."""

    # Examples.

    identify_examples: Callable[[DatasetOptions, int, int, int | None], dict[str, Any]]
    """Return what decides examples, given the most tokens of one, the seed, and the vocabulary's size."""
    reads_tokenizer_name: Callable[[DatasetOptions], bool]
    """Tell whether examples depend on how the tokenizer is called."""
    make_examples: Callable[[KindContext, LoadedTokenizer, str], StageOutput]
    """Make the examples of all rows; the text is the tokenizer's path in the store."""
    identify_lengths: Callable[[DatasetOptions, int, int], dict[str, Any]]
    """Return what decides the facts of lengths beside the options of all kinds, given seed and `seq_len`."""
    measure_lengths: Callable[[KindContext], StageOutput]
    """Measure the examples, and plan the rows at other lengths."""
    find_near_rows: Callable[[WorkContext, DatasetOptions, Manifest], NearRows]
    """Compare the held-out rows with those that train."""

    # Before a build.

    plan_examples: Callable[[KindContext, LoadedTokenizer, str], ExamplePlan]
    """Plan the examples as a build would; raises `ContextOverflowError` where the recipe makes this an error."""
    advise: Callable[[KindContext, LoadedTokenizer, str], DatasetAdvice]
    """Rate the columns that could group rows."""
    propose_contract: Callable[[KindContext, TakenGroup], str | None]
    """Observe the rows, and return the file of a contract for them; None without rows."""

    # With a trained model.

    list_generation_stages: Callable[[DatasetOptions], Sequence[str]]
    """Return the names of the on-demand stages that the dataset has."""
    identify_parsed: Callable[[DatasetOptions], dict[str, Any]]
    """Return what decides the records that are parsed from texts."""
    scan_texts: Callable[[KindContext], list[FileScan]]
    """Scan the files of generated text."""
    parse_texts: Callable[[KindContext, Sequence[FileScan]], StageOutput]
    """Parse the texts of files into records."""
    parse_files: Callable[[KindContext, Sequence[str]], ParsedFiles]
    """Parse some other files of generated text."""
    identify_generated: Callable[[DatasetOptions, int, int], dict[str, Any]]
    """Return what decides the records that are generated, given the most tokens of an example, and the seed."""
    generate: Callable[[KindContext], StageOutput]
    """Generate records with the backend of the dataset."""


def require_joint_rows(kind: DatasetKind) -> JointRows:
    """Return what a kind does itself, of which the caller knows that it does."""
    rows = kind.get_joint_rows()
    assert rows is not None
    return rows
