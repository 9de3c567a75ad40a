"""One dataset of a recipe: its source, its kind and its option groups, checked together."""

from pydantic import model_validator

from rowmill.conversation.options import Loss, Template
from rowmill.conversation.truncation import Truncation
from rowmill.core.config import Config
from rowmill.exports import DatasetSummary
from rowmill.formats import Auto, Format
from rowmill.formats.filters import Filters
from rowmill.formats.reasoning import Reasoning
from rowmill.formats.splits import Splits
from rowmill.formats.tool_calls import Tools
from rowmill.packing.options import Packing
from rowmill.schema.rows import RowKind
from rowmill.sources import GeneratedSource, Source


class Dataset(Config):
    """One dataset: the source of its rows, and how they become packed sequences."""

    source: Source
    """Location of the raw records."""
    format: Format = Auto()
    """How a record's own columns become a row."""
    reasoning: Reasoning = Reasoning()
    """Where reasoning is found, and how it is handled."""
    tools: Tools = Tools()
    """Where tools are found, and the form in which the template receives calls."""
    template: Template = Template()
    """The chat template, its arguments and how its masks are made."""
    loss: Loss = Loss()
    """Which tokens are trained."""
    truncation: Truncation = Truncation()
    """How rows longer than the context are shortened."""
    filters: Filters = Filters()
    """Which rows are left out on purpose."""
    splits: Splits = Splits()
    """Which rows are held out."""
    packing: Packing = Packing()
    """How examples share sequences."""

    @model_validator(mode="after")
    def _require_packable_rows(self) -> "Dataset":
        """Refuse a packing strategy that the kind's rows do not support, before a row is read."""
        self.packing.strategy_for(self.row_kind)
        return self

    @model_validator(mode="after")
    def _require_records_format(self) -> "Dataset":
        if isinstance(self.source, GeneratedSource) and not self.format.IS_TABLE:
            raise ValueError(
                f"source.generated: {self.source.generated} holds records of a table, but format.kind is "
                f"{self.format.kind}; expected records; set format: {{kind: records}}"
            )
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> "Dataset":
        self.format.check_options(self)
        return self

    @property
    def row_kind(self) -> RowKind:
        """The kind of most of its rows."""
        return self.format.ROW_KIND

    @property
    def keeps_non_finite(self) -> bool:
        """Whether NaN and infinity of typed sources are kept as values: only records datasets have text for them."""
        return self.format.IS_TABLE

    @property
    def keeps_overlong(self) -> bool:
        """Whether rows over the limit are left to packing, unless `truncation.overlong` says otherwise."""
        joined = self.packing.strategy_for(self.row_kind) == "concat" and self.truncation.max_length is None
        return joined or self.packing.slice_strategy is not None


def has_generation(dataset: Dataset) -> bool:
    """Return whether generated records are parsed for a dataset that has training data."""
    table = dataset.format.as_table()
    return table is not None and table.generation is not None and not isinstance(dataset.source, GeneratedSource)


def summarize_dataset(dataset: Dataset) -> DatasetSummary:
    """Return the facts that decide which exports can hold a dataset."""
    return DatasetSummary(
        kind=dataset.row_kind,
        is_joined=dataset.packing.strategy_for(dataset.row_kind) == "concat",
        is_open=not dataset.packing.block_cross_document_attention,
        has_weights=bool(dataset.loss.weights),
        objective=dataset.format.get_objective(),
        fields=dataset.format.get_rollout_fields().names,
    )
