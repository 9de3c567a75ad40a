"""The longest example of a dataset, and what becomes of longer ones."""

from dataclasses import dataclass

from rowmill.conversation.truncation import OverlongPolicy, Truncation
from rowmill.recipe.recipe import Dataset
from rowmill.schema.rows import Rejected, RowKind
from rowmill.tokenization.encoded_batch import Example, TokenizationCounts

RowOutcome = list[Example] | Rejected
"""The outcome of one row: its examples in order, or its reject."""


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The most tokens of an example, and the options for longer ones; `sliced`: packing slices them."""

    tokens: int
    options: Truncation
    sliced: bool

    @classmethod
    def of_dataset(cls, dataset: Dataset, tokens: int) -> "LengthLimit":
        """Return the limit of a dataset's examples."""
        return cls(tokens, dataset.truncation, dataset.keeps_overlong)

    def get_policy(self, kind: RowKind) -> OverlongPolicy:
        """Return what happens to a longer example of a kind of rows."""
        return self.options.policy(kind, sliced=self.sliced)

    def keeps_all(self, kind: RowKind) -> bool:
        """Return whether examples of any length stay as they are; with `raise`, the stage fails after its last part."""
        return self.get_policy(kind) in ("keep", "raise")

    def apply_policy(self, example: Example, kind: RowKind, counts: TokenizationCounts) -> RowOutcome | None:
        """Return the outcome of an example that is not shortened; None if it is."""
        if len(example.ids) <= self.tokens or self.keeps_all(kind):
            return [example]
        if self.get_policy(kind) == "drop":
            why = Rejected("overlong", f"{len(example.ids)} tokens, at most {self.tokens}")
            return reject_for_length(example, why, counts)
        return None


def reject_for_length(example: Example, rejected: Rejected, counts: TokenizationCounts) -> Rejected:
    """Count the tokens of an example that is rejected for its length; all of them were encoded already."""
    counts.dropped_tokens += len(example.ids)
    counts.dropped_trained += int(example.mask.sum())
    return rejected
