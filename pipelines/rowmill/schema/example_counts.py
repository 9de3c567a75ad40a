"""What tokenized examples are counted by, whatever kind of data they were made of, and by a chat template.

The checks of these counts are in `checks/catalog.py`. What only one kind of data counts stands with the kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from rowmill.schema.counts import Counts, Details, compute_share, keep_any, keep_first, keep_largest, keep_samples
from rowmill.schema.ledger import KEPT, REJECTED, count_unaccounted, sum_counts

LENGTH_REASONS: Final = frozenset({"overlong", "overlong_after_structure", "record_overflow", "group_overflow"})
NO_TARGET_REASONS: Final = frozenset({"no_loss_tokens", "no_assistant", "assistant_untrained"})
TEMPLATE_REASON: Final = "content_dropped"
JUDGE_REASONS: Final = ("render_mismatch", "mask_judged_wrong")
SHORT_TOKENS: Final = 20
"""Shorter documents are probably lines of a document that was cut wrongly."""

TOKEN_COLUMNS: Final = {"trained": "trained_tokens", "context": "context_tokens", "template": "template_tokens"}
"""The column that counts the tokens of each class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleCounts(Counts):
    """What examples of all kinds of data are counted by."""

    rows: int = 0
    kept: int = 0
    examples: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rejected rows by reason."""
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rows left out on purpose, by state."""
    tokens_by_split: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    """Tokens by class, of each split: trained, context, template and truncated."""
    dropped_tokens: int = 0
    """Tokens of rows that were encoded and then rejected."""
    unaccounted_tokens: int = 0
    """Tokens of no class, or of two."""
    verified_examples: int = 0
    """Examples whose loss mask agrees with what was computed apart from it: with their spans
    (`ExampleColumns.count_verified`), those of tables too (`count_verified` in `kinds/tables/record_tokens.py`)."""
    rows_to_train: int = 0
    """Rows that shall have a trained token; of examples that join rows, the examples."""
    untrained_rows: int = 0
    """Those of them that have none."""
    ids_outside_vocabulary: int = 0
    altered_texts: int = 0
    """Texts whose ids decode to other text, each as often as it was encoded."""
    reference_path_texts: int = 0
    """Texts that the reference path encoded, not the fast one."""
    fast_path_mismatches: int = 0
    """Batches of which a sampled text differed between the paths; the reference path encoded them again."""
    samples_of_rejects: Mapping[str, tuple[str, ...]] = keep_samples()

    @property
    def rejected(self) -> int:
        return sum(self.reasons.values())

    @property
    def tokens(self) -> int:
        return sum(self.count_classes().get(name, 0) for name in TOKEN_COLUMNS)

    @property
    def trained_tokens(self) -> int:
        return self.count_classes().get("trained", 0)

    @property
    def trained_share(self) -> float:
        return compute_share(self.trained_tokens, self.tokens)

    def count_tokens(self) -> int:
        """Return the tokens of the examples."""
        return self.tokens

    def count_output(self) -> int:
        """Return how many examples came out."""
        return self.examples

    def count_unaccounted(self) -> int:
        """Return how many rows and tokens the ledgers miss, or count twice."""
        return count_unaccounted(self.rows, self.list_ledger()) + self.unaccounted_tokens

    def share_rejected(self) -> float:
        """Return the share of rows rejected by reasons that have no check of their own, which `count_refused` names."""
        return compute_share(sum(self.count_refused().values()), self.rows)

    def count_classes(self) -> dict[str, int]:
        """Return the tokens of each class in all splits."""
        return sum_counts(self.tokens_by_split.values())

    def count_refused(self) -> dict[str, int]:
        """Return the rejects by those reasons that have no check of their own."""
        others = {*LENGTH_REASONS, *NO_TARGET_REASONS, TEMPLATE_REASON}
        return {reason: count for reason, count in self.reasons.items() if reason not in others}

    def list_ledger(self) -> list[tuple[str, str, int]]:
        """Return the lines of the ledger of rows."""
        return [
            (KEPT, "", self.kept),
            *((REJECTED, reason, count) for reason, count in self.reasons.items()),
            *((state, "", count) for state, count in self.left_out.items()),
        ]

    def list_token_ledger(self) -> list[tuple[str, str, int]]:
        """Return the lines of the ledger of tokens."""
        lines = [(split, name, count) for split, own in self.tokens_by_split.items() for name, count in own.items()]
        return [*lines, ("rejected", "dropped", self.dropped_tokens)] if self.dropped_tokens else lines


def count_tokens_by_split(examples: pa.Table) -> dict[str, dict[str, int]]:
    """Return the tokens of each class in the examples of each split."""
    columns = {name: examples.column(column).to_numpy().astype(np.int64) for name, column in TOKEN_COLUMNS.items()}
    original = examples.column("original_tokens").to_numpy().astype(np.int64)
    columns["truncated"] = original - examples.column("tokens").to_numpy()
    splits = examples.column("split").to_numpy(zero_copy_only=False)
    return {
        str(split): {name: int(values[splits == split].sum()) for name, values in sorted(columns.items())}
        for split in sorted(set(splits.tolist()))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedExampleDetails(Details):
    """A part of examples that join rows: all of them are of one split."""

    split: str
    source_parts: tuple[str, ...]
    """The source parts of the first rows of examples, which lineage names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowExampleCounts(Counts):
    """What examples are counted by that are made of one row each, and may be cut."""

    trained_removed: int = 0
    """Tokens that truncation removed and that would have been trained."""
    dropped_trained: int = 0
    """Tokens of rejected rows that would have been trained."""
    boundary_tokens: int = 0
    """Tokens that cross an edge between trained and other text."""
    untrained_boundary_tokens: int = 0
    """Tokens with trained text that do not train, because they hold text of another message too."""
    tokens_by_weight: Mapping[str, int] = field(default_factory=dict[str, int])
    """Trained tokens by loss weight, where rows have weights."""
    overlong_rows: int = 0
    """Rows over the limit, where such rows stop the build."""
    longest_overlong: int = keep_largest()
    """Tokens of the longest of them."""
    samples_of_overlong: Mapping[str, tuple[str, ...]] = keep_samples(20)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStringCounts(Counts):
    """Rows whose text holds strings of control tokens."""

    searched_rows: int = 0
    rows_with_control_strings: int = 0
    control_string_occurrences: Mapping[str, int] = field(default_factory=dict[str, int])
    """Occurrences by role and string: `user <|im_end|>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts(Counts):
    """Generation prompts that were encoded alone, as a server does, and compared with what trains."""

    prompts_compared: int = 0
    prompts_that_differ: int = 0
    samples_of_prompts: Mapping[str, tuple[str, ...]] = keep_samples()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCounts(Counts):
    """What a chat template does to rows; all parts have the same one."""

    rendered_rows: int = 0
    rows_not_printed: int = 0
    """Rows rejected because the template does not print all of their content."""
    rows_losing_reasoning: int = 0
    """Rows of which an answer trains without its reasoning, because the template prints none."""
    dropped_kinds: Mapping[str, int] = field(default_factory=dict[str, int])
    """Pieces of rows that the template did not print, by kind."""
    is_judged: bool = keep_any()
    """Whether rows are compared with what `transformers` renders."""
    rows_judged_wrong: int = 0
    template_warnings: tuple[str, ...] = keep_first()
    mismatched_prompts: tuple[str, ...] = keep_first()
    """Roles after which the inference prompt differs from the training text."""
    prints_date: bool = keep_any()
    rows_with_tools: int = 0
    tool_tokens: int = 0
    most_tool_tokens: int = keep_largest()
    """Tokens of tools in the row that has most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFileCounts(Counts):
    """Documents of text files, which may be lines of longer documents."""

    documents: int = 0
    documents_under_20_tokens: int = 0


def count_text_files(lengths: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.float64]]) -> TextFileCounts:
    """Count documents by their lengths in tokens; those of no tokens are none."""
    tokens = np.asarray(lengths)
    return TextFileCounts(
        documents=int((tokens > 0).sum()),
        documents_under_20_tokens=int(((tokens > 0) & (tokens < SHORT_TOKENS)).sum()),
    )
