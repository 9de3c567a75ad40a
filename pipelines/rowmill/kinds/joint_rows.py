"""The base class of kinds whose rows are decided over the whole dataset, and whose examples join several rows.

Tables are one: `kinds/tables/records.py`. The methods named `identify_…` return the options and versions that decide a
stage's output.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rowmill.kinds.base import DatasetKind, DatasetOptions, KindContext
from rowmill.schema.generated_counts import SpanCounts
from rowmill.schema.manifest import DisplayTable
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.sources import FileScan
from rowmill.sources.reading import TakenGroup
from rowmill.tokenization.tokenizer import LoadedTokenizer

if TYPE_CHECKING:
    # A recipe is loaded without what its stages work with.
    from rowmill.parts.context import StageOutput


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
class ParsedFiles:
    """Counts and accepted records of some files of generated text."""

    report: SpanCounts
    texts: int
    unreadable: int
    records: Sequence[str]
    table: DisplayTable
    """The counts by class."""


class JointKind(DatasetKind, ABC):
    """A kind whose rows depend on one another: what commands that try a recipe ask of it, beside what all are asked.

    Of the hooks of `DatasetKind` it has its own rows, splits, examples, lengths, near rows and all their identities.
    """

    PLANS_EXAMPLES: ClassVar[bool] = True
    TAKES_OVERRIDES: ClassVar[bool] = True
    COMPARES_ROWS: ClassVar[bool] = True

    def check_generated_source(self, generated: str) -> None:
        """Accept what a model generates: records of a table."""

    def check_recipe(self, name: str, options: DatasetOptions, recipe: RecipeSummary) -> None:
        """Also refuse to hold out a number of sequences, since splits come before them."""
        super().check_recipe(name, options, recipe)
        if name in recipe.counted_validation:
            raise ValueError(
                f"mixture.num_validation_sequences: {name} holds records, which are split before they are assembled "
                f"into examples; allowed: chats, pairs and texts; set datasets.{name}.splits.validation"
            )

    @abstractmethod
    def has_contract(self) -> bool:
        """Return whether the options hold a contract of the rows."""

    def count_read_records(self, shown: int) -> int | None:
        """Return None: which records share an example depends on all of them."""
        return None

    # ── before a build ──

    @abstractmethod
    def plan_examples(self, context: KindContext, tokenizer: LoadedTokenizer, path: str) -> ExamplePlan:
        """Plan the examples as a build would; raises `ContextOverflowError` where the recipe makes this an error."""

    @abstractmethod
    def advise(self, context: KindContext, tokenizer: LoadedTokenizer, path: str) -> DatasetAdvice:
        """Rate the columns that could group rows."""

    @abstractmethod
    def propose_contract(self, context: KindContext, taken: TakenGroup) -> str | None:
        """Observe the rows, and return the file of a contract for them; None without rows."""

    # ── with a trained model ──

    @abstractmethod
    def identify_parsed(self, options: DatasetOptions) -> dict[str, Any]:
        """Return what decides the records that are parsed from texts."""

    @abstractmethod
    def scan_texts(self, context: KindContext) -> list[FileScan]:
        """Scan the files of generated text."""

    @abstractmethod
    def parse_texts(self, context: KindContext, scans: Sequence[FileScan]) -> "StageOutput":
        """Parse the texts of files into records."""

    @abstractmethod
    def parse_files(self, context: KindContext, urls: Sequence[str]) -> ParsedFiles:
        """Parse some other files of generated text."""

    @abstractmethod
    def identify_generated(self, options: DatasetOptions, limit: int, seed: int) -> dict[str, Any]:
        """Return what decides the records that are generated; `limit`: the most tokens of an example."""

    @abstractmethod
    def generate(self, context: KindContext) -> "StageOutput":
        """Generate records with the backend of the dataset."""


def require_joint_kind(kind: DatasetKind) -> JointKind:
    """Return the kind, of which the caller knows that its rows depend on one another."""
    assert isinstance(kind, JointKind)
    return kind
