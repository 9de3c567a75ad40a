"""What the groups of a recipe know of each other: the facts that decide whether their options are possible together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowmill.schema.examples import OBJECTIVE_DESCRIPTIONS, Objective
from rowmill.schema.rows import RowKind


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """The facts of one dataset that decide which other options are possible."""

    kind: RowKind
    is_joined: bool
    """Whether its documents are joined and cut every `seq_len` tokens."""
    is_open: bool
    """Whether attention crosses from one of its segments to the next."""
    has_weights: bool
    objective: Objective = "next_token"
    fields: tuple[str, ...] = ()
    """The names of the fields that its token rows carry."""
    shares_prefixes: bool = False
    """Whether its examples are trees of shared segments."""
    segment_multiple_of: int = 1
    """What its segments are padded to a multiple of."""
    makes_records: bool = False
    """Whether a model that is trained on it generates records, and they are not its own source."""
    holdout_options: tuple[str, ...] = ()
    """The options that decide which of its rows are held out."""

    @property
    def predicts_next_token(self) -> bool:
        """Whether each trained token of its examples is predicted from those before it, and nothing else is."""
        return OBJECTIVE_DESCRIPTIONS[self.objective].predicts_next_token


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    """The facts of a recipe that decide which of its options are possible, before any data is read."""

    seq_len: int
    datasets: Mapping[str, DatasetSummary]
    name: str = ""
    batch_sizes: Sequence[tuple[int, int]] = ()
    """The first step and the batch size of each stage of the mixture; none without a batch size."""
    counted_validation: frozenset[str] = frozenset()
    """The datasets of which a number of sequences is held out, instead of rows."""
    row_fields: tuple[str, ...] = ()
    """The names of the fields that have one value for each row."""

    @property
    def first(self) -> str:
        """The first dataset, with which all others must agree."""
        return next(iter(self.datasets))

    def limit_sides(self, sides: int) -> int:
        """Return how long each of several sides of an example can be if all are in one sequence, each padded."""
        return limit_sides(self.seq_len, sides, self.datasets[self.first].segment_multiple_of)


def limit_sides(seq_len: int, sides: int, multiple_of: int) -> int:
    """Return how long each of several sides of an example can be in one sequence, each padded to a multiple."""
    return seq_len // sides // multiple_of * multiple_of
