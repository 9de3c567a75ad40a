"""The kind `records`: what stages ask of a table, each in the module that does it.

The modules are imported when they are asked: Polars and Arrow's functions take longer than a recipe without tables.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rowmill.core.stage_names import GENERATED_SERIES, PARSED_RECORDS
from rowmill.kinds.base import DatasetOptions, KindContext, NearRows, RowComparison
from rowmill.kinds.joint_rows import DatasetAdvice, ExamplePlan, JointKind, ParsedFiles
from rowmill.kinds.tables.options import RecordOptions
from rowmill.kinds.tables.table_contract import TableContract
from rowmill.schema.manifest import Manifest, Part
from rowmill.sources import FileScan
from rowmill.sources.reading import TakenGroup
from rowmill.tokenization.tokenizer import LoadedTokenizer

if TYPE_CHECKING:
    from rowmill.kinds.context import RecipeNumbers
    from rowmill.kinds.tables.partitions import ObservedTable
    from rowmill.parts.context import StageOutput, WorkContext
    from rowmill.parts.functions import MappedParts


class Records(RecordOptions, JointKind):
    """Each record is a row of a table; its columns are inferred from the data."""

    @classmethod
    def get_contract_model(cls) -> type[TableContract]:
        """Return the options of a table contract."""
        return TableContract

    def has_contract(self) -> bool:
        """Return whether the recipe, or the file next to it, has the table's contract."""
        return self.table is not None

    # ── rows ──

    def identify_rows(self, recipe: "RecipeNumbers", name: str, options: DatasetOptions) -> dict[str, Any]:
        """Return the options that decide rows, and separately those of the advice on groups."""
        from rowmill.kinds.tables import table_rows

        return table_rows.identify_rows(options, recipe.limit_of(name))

    def make_rows(
        self,
        context: KindContext,
        taken: Sequence[TakenGroup],
        digest: str,
        make_groups: "Callable[[Sequence[TakenGroup]], MappedParts]",
    ) -> "tuple[MappedParts, ObservedTable]":
        """Observe all parts, decide schema and sort key, and make the rows of all parts."""
        from rowmill.kinds.tables import table_rows

        # What is decided over all parts names places in them, so small files are not grouped.
        return table_rows.make_table_rows(context, tuple(part for group in taken for part in group), digest)

    def assign_splits(self, context: KindContext, parts: list[Part], decided: "ObservedTable") -> list[Part]:
        """Hold out exact numbers of rows, if the recipe asks for them."""
        from rowmill.kinds.tables import table_rows

        return table_rows.apply_exact_splits(context, parts, decided)

    def complete_rows(self, context: KindContext, draft: "StageOutput", decided: "ObservedTable") -> "StageOutput":
        """Add contract, groups, times and their facts."""
        from rowmill.kinds.tables import table_rows

        return table_rows.complete_table_output(context, draft, decided)

    def list_comparisons(self) -> Mapping[str, RowComparison]:
        """Compare the table's contract and values with the published ones."""
        from rowmill.kinds.tables import table_drift

        return {"table_drift": table_drift.compare_rows}

    # ── examples ──

    def identify_examples(self, recipe: "RecipeNumbers", name: str, options: DatasetOptions) -> dict[str, Any]:
        """Return the options that decide which records form which example."""
        from rowmill.kinds.tables import table_examples

        return table_examples.identify_examples(options, recipe.limit_of(name), recipe.seed, recipe.vocab_size)

    def reads_tokenizer_name(self) -> bool:
        """Return whether the style of prompts depends on the tokenizer's name."""
        return self.prompt.style == "reference"

    def make_examples(
        self,
        context: KindContext,
        tokenizer: LoadedTokenizer,
        path: str,
        tokenize_parts: "Callable[[], StageOutput]",
    ) -> "StageOutput":
        """Encode all records, plan all partitions, and write their examples."""
        from rowmill.kinds.tables import table_examples

        return table_examples.make_table_examples(context, tokenizer, path)

    def identify_lengths(self, recipe: "RecipeNumbers", options: DatasetOptions) -> dict[str, Any]:
        """Return the options that decide plans at other lengths."""
        from rowmill.kinds.tables import table_lengths

        return table_lengths.identify_lengths(options, recipe.seed, recipe.seq_len)

    def measure_lengths(self, context: KindContext, measure_examples: "Callable[[], StageOutput]") -> "StageOutput":
        """Measure the examples, and plan the records at other lengths."""
        from rowmill.kinds.tables import table_lengths

        return table_lengths.make_table_lengths(context)

    def find_near_rows(self, context: "WorkContext", options: DatasetOptions, rows: Manifest) -> NearRows:
        """Compare the held-out records with those that train, cell by cell."""
        from rowmill.kinds.tables import comparison

        return comparison.find_near_records(context, options, rows)

    # ── before a build ──

    def plan_examples(self, context: KindContext, tokenizer: LoadedTokenizer, path: str) -> ExamplePlan:
        """Plan the examples as a build would."""
        from rowmill.kinds.tables import table_examples

        return table_examples.plan_table(context, tokenizer, path)

    def advise(self, context: KindContext, tokenizer: LoadedTokenizer, path: str) -> DatasetAdvice:
        """Rate each column as the one that groups records."""
        from rowmill.kinds.tables import table_lengths

        return table_lengths.advise_dataset(context, tokenizer, path)

    def propose_contract(self, context: KindContext, taken: TakenGroup) -> str | None:
        """Return the YAML file of the contract that the data suggests."""
        from rowmill.kinds.tables import table_rows

        return table_rows.propose_contract(context, taken)

    # ── with a trained model ──

    def list_generation_stages(self) -> Sequence[str]:
        """Return the on-demand stages: none without `generation`, and only texts without its backend."""
        if self.generation is None:
            return ()
        return (PARSED_RECORDS,) if self.generation.backend is None else (PARSED_RECORDS, GENERATED_SERIES)

    def identify_parsed(self, options: DatasetOptions) -> dict[str, Any]:
        """Return the options of files and validation."""
        from rowmill.kinds.tables import generated_records

        return generated_records.identify_parsed(options)

    def scan_texts(self, context: KindContext) -> list[FileScan]:
        """Scan the files of generated text."""
        from rowmill.kinds.tables import generated_records

        return generated_records.scan_generated_texts(context)

    def parse_texts(self, context: KindContext, scans: Sequence[FileScan]) -> "StageOutput":
        """Parse the texts of files into records."""
        from rowmill.kinds.tables import generated_records

        return generated_records.make_parsed_records(context, scans)

    def parse_files(self, context: KindContext, urls: Sequence[str]) -> ParsedFiles:
        """Parse some other files of generated text."""
        from rowmill.kinds.tables import generated_records

        return generated_records.parse_files(context, urls)

    def identify_generated(self, options: DatasetOptions, limit: int, seed: int) -> dict[str, Any]:
        """Return the options of generation."""
        from rowmill.kinds.tables import generated_records

        return generated_records.identify_generated(options, limit, seed)

    def generate(self, context: KindContext) -> "StageOutput":
        """Generate records with the backend of the dataset."""
        from rowmill.kinds.tables import generated_records

        return generated_records.make_generated_series(context)
