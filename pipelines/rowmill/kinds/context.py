"""What a stage hands to a dataset's kind: where the work is done, and the recipe whose options decide it.

`base.py` names the kinds of a recipe's datasets; here they are a type variable, so that neither imports the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rowmill.parts.context import WorkContext
from rowmill.tokenization.tokenizer_source import TokenizerChoice

DatasetT_co = TypeVar("DatasetT_co", covariant=True)


class RecipeNumbers(Protocol):
    """What kinds read of a recipe to say what decides their rows, examples and lengths."""

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""

    @property
    def seed(self) -> int:
        """What everything random is drawn from."""

    @property
    def vocab_size(self) -> int | None:
        """Ids that the model has; None: those of the tokenizer."""

    def limit_of(self, dataset: str) -> int:
        """Return the most tokens of an example of a dataset; of a pair's, that of each side."""


class RecipeOptions(RecipeNumbers, Protocol[DatasetT_co]):
    """The options of a recipe that kinds read, so that a kind imports no recipe."""

    @property
    def datasets(self) -> Mapping[str, DatasetT_co]:
        """The options of each dataset by its name."""

    @property
    def tokenizer_choice(self) -> TokenizerChoice:
        """The recipe's choice of the tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeContext(WorkContext, Generic[DatasetT_co]):
    """Where the work is done, and the recipe whose options decide it."""

    recipe: RecipeOptions[DatasetT_co]

    @property
    def dataset(self) -> DatasetT_co:
        """The dataset's options; only for stages of one dataset."""
        assert self.dataset_name is not None
        return self.recipe.datasets[self.dataset_name]

    @property
    def limit(self) -> int:
        """The most tokens of an example of the dataset; of a pair's, that of each side."""
        assert self.dataset_name is not None
        return self.recipe.limit_of(self.dataset_name)

    @property
    def tokenizer_choice(self) -> TokenizerChoice:
        """The recipe's choice of the tokenizer, with which it is opened from the store."""
        return self.recipe.tokenizer_choice
