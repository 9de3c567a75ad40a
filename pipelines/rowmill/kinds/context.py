"""What a stage hands to a dataset's kind that does its work itself."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from rowmill.kinds.base import DatasetOptions
from rowmill.parts.context import WorkContext
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
