"""What the groups of a recipe know of each other: the facts that decide whether their options are possible together."""

from collections.abc import Mapping
from dataclasses import dataclass

from rowmill.schema.examples import Objective
from rowmill.schema.rows import RowKind


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """The facts of one dataset that decide which exports are possible."""

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


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    """The facts of a recipe that decide which exports are possible, before any data is read."""

    seq_len: int
    datasets: Mapping[str, DatasetSummary]
