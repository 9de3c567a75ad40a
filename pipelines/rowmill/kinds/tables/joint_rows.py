"""What the stages and commands ask of tables; the modules that do it are imported when they are asked."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rowmill import sources
from rowmill.core import config
from rowmill.core.stage_names import GENERATED_SERIES, PARSED_RECORDS
from rowmill.formats.filters import REMOVAL_FILTERS
from rowmill.kinds.base import DatasetOptions
from rowmill.kinds.joint_rows import DatasetAdvice, ExamplePlan, JointRows, KindContext, NearRows, ParsedFiles
from rowmill.kinds.tables.options import require_records
from rowmill.kinds.tables.table_contract import TableContract
from rowmill.parts.context import StageOutput, WorkContext
from rowmill.parts.functions import MappedParts
from rowmill.schema.manifest import Manifest, Part
from rowmill.sources import FileScan
from rowmill.sources.sharing import TakenGroup

if TYPE_CHECKING:
    from rowmill.kinds.tables.partitions import ObservedTable
    from rowmill.tokenization.tokenizer_card import LoadedTokenizer


class TableRows(JointRows):
    """Rows that follow one table contract, and examples of several records."""

    def check_contract(self, options: Mapping[str, Any], where: str) -> None:
        """Refuse a table contract that cannot be read; `where` is its file."""
        config.validate_options(TableContract, options, where)

    # Rows.

    def identify_rows(self, dataset: DatasetOptions, limit: int) -> dict[str, Any]:
        """Return the options that decide rows, and separately those of the advice on groups; prompts affect neither."""
        from rowmill.kinds.tables import table_rows

        form = require_records(dataset)
        times = {"is_timeseries", "timestamp_format", "timestamp_interval_seconds"}
        rows = {
            "versions": [table_rows.VERSION, sources.SCAN_VERSION],
            "group_columns": form.group_columns,
            "is_grouped_by_file": form.is_grouped_by_file,
            "is_one_group_column": isinstance(form.data.group_training_examples_by, str),
            "order_column": form.order_column,
            "domain_key": form.domain_key,
            "mode": form.mode,
            "time_series": form.time_series.model_dump(mode="json", include=times),
            "table": None if form.table is None else form.table.to_json(),
            "filters": dataset.filters.model_dump(mode="json", exclude=set(REMOVAL_FILTERS)),
            "splits": dataset.splits.model_dump(mode="json"),
            "max_run_chars": dataset.source.limits.max_run_chars,
        }
        advice = {"limit": limit, "cap": form.cap, "on_overflow": form.assembly.on_overflow}
        return {"rows": rows, "advice": advice}

    def make_rows(self, context: KindContext, parts: TakenGroup, options: str) -> "tuple[MappedParts, ObservedTable]":
        """Observe all parts, decide schema and sort key, and make the rows of all parts."""
        from rowmill.kinds.tables import table_rows

        return table_rows.make_table_rows(context, parts, options)

    def assign_splits(self, context: KindContext, parts: list[Part], decided: "ObservedTable") -> list[Part]:
        """Assign splits by number of rows if the recipe says so, and keep a single series in train."""
        from rowmill.kinds.tables import table_rows

        return table_rows.apply_exact_splits(context, parts, decided)

    def complete_rows(self, context: KindContext, draft: StageOutput, decided: "ObservedTable") -> StageOutput:
        """Add the facts that only records have: schema, groups, times, splits."""
        from rowmill.kinds.tables import table_rows

        return table_rows.complete_table_output(context, draft, decided)

    def accepts_rows(self, context: KindContext, kept: Manifest) -> bool:
        """Tell whether existing rows of the same data were made under the contract that is in force now."""
        from rowmill.kinds.tables import table_rows

        return table_rows.is_under_current_contract(context, kept)

    # Examples.

    def identify_examples(
        self, dataset: DatasetOptions, limit: int, seed: int, vocab_size: int | None
    ) -> dict[str, Any]:
        """Return the options that decide examples; those of generation do not."""
        from rowmill.kinds.tables import partitions, record_tokens
        from rowmill.tokenization.tokenizer import TOKENIZATION_VERSION

        return {
            "versions": [record_tokens.VERSION, TOKENIZATION_VERSION, partitions.split_block_keys.version],
            "format": require_records(dataset).model_dump(mode="json", exclude={"generation"}),
            "limit": limit,
            "seed": seed,
            "vocab_size": vocab_size,
        }

    def reads_tokenizer_name(self, dataset: DatasetOptions) -> bool:
        """Tell whether the style of prompts depends on the tokenizer's name."""
        return require_records(dataset).prompt.style == "reference"

    def make_examples(self, context: KindContext, tokenizer: "LoadedTokenizer", path: str) -> StageOutput:
        """Encode, plan, and write examples; if planning fails, no examples are written."""
        from rowmill.kinds.tables import table_examples

        return table_examples.make_table_examples(context, tokenizer, path)

    def identify_lengths(self, dataset: DatasetOptions, seed: int, seq_len: int) -> dict[str, Any]:
        """Return the options that decide the facts of records, in addition to those of all kinds."""
        from rowmill.kinds.tables import table_lengths

        format_options = require_records(dataset).model_dump(mode="json", exclude={"generation"})
        return {"records": table_lengths.VERSION, "format": format_options, "seed": seed, "seq_len": seq_len}

    def measure_lengths(self, context: KindContext) -> StageOutput:
        """Measure the examples, and plan the records at other lengths."""
        from rowmill.kinds.tables import table_lengths

        return table_lengths.make_table_lengths(context)

    def find_near_rows(self, context: WorkContext, dataset: DatasetOptions, rows: Manifest) -> NearRows:
        """Compare the held-out records of a table with its train records, cell by cell."""
        from rowmill.kinds.tables import near_records

        return near_records.find_near_records(context, rows, require_records(dataset).group_columns)

    # Before a build.

    def plan_examples(self, context: KindContext, tokenizer: "LoadedTokenizer", path: str) -> ExamplePlan:
        """Plan the examples as a build would."""
        from rowmill.kinds.tables import table_examples

        return table_examples.dry_run_table(context, tokenizer, path)

    def advise(self, context: KindContext, tokenizer: "LoadedTokenizer", path: str) -> DatasetAdvice:
        """Rate every column that can group records."""
        from rowmill.kinds.tables import sizing

        return sizing.advise_dataset(context, tokenizer, path)

    def propose_contract(self, context: KindContext, parts: TakenGroup) -> str | None:
        """Observe a dataset, and return the YAML file of its table contract; None without rows."""
        from rowmill.kinds.tables import table_rows

        return table_rows.propose_contract(context, parts)

    # With a trained model.

    def list_generation_stages(self, dataset: DatasetOptions) -> Sequence[str]:
        """Return the on-demand stages: none without `generation`, and only texts without its backend."""
        generation = require_records(dataset).generation
        if generation is None:
            return ()
        return (PARSED_RECORDS,) if generation.backend is None else (PARSED_RECORDS, GENERATED_SERIES)

    def identify_parsed(self, dataset: DatasetOptions) -> dict[str, Any]:
        """Return the options of files and validation; the expected form of texts comes from the input."""
        from rowmill.kinds.tables import generated_texts

        form = require_records(dataset)
        assert form.generation is not None
        return {
            "versions": [generated_texts.VERSION, sources.SCAN_VERSION],
            "text_urls": form.generation.text_urls,
            "validation": form.generation.validation.model_dump(mode="json"),
            "group_columns": form.group_columns,
            "order_column": form.order_column,
            "interval_seconds": form.time_series.timestamp_interval_seconds,
            "is_private": form.privacy.dp_enabled,
        }

    def scan_texts(self, context: KindContext) -> list[FileScan]:
        """Scan the files of generated text; there may be none in the default folder."""
        from rowmill.kinds.tables import generated_texts

        return generated_texts.scan_generated_texts(context)

    def parse_texts(self, context: KindContext, scans: Sequence[FileScan]) -> StageOutput:
        """Parse all texts."""
        from rowmill.kinds.tables import generated_texts

        return generated_texts.make_parsed_records(context, scans)

    def parse_files(self, context: KindContext, urls: Sequence[str]) -> ParsedFiles:
        """Parse some other files of generated text."""
        from rowmill.kinds.tables import generated_texts

        return generated_texts.parse_files(context, urls)

    def identify_generated(self, dataset: DatasetOptions, limit: int, seed: int) -> dict[str, Any]:
        """Return the options of generation; the backend's API key does not affect its answers."""
        from rowmill.kinds.tables import generated_series

        form = require_records(dataset)
        assert form.generation is not None
        options = form.generation
        backend = None if options.backend is None else options.backend.model_dump(mode="json", exclude={"api_key_env"})
        return {
            "versions": [generated_series.VERSION],
            "generation": options.model_dump(mode="json", exclude={"text_urls", "backend"}),
            "backend": backend,
            "time_series": form.time_series.model_dump(
                mode="json", include={"start_timestamp", "stop_timestamp", "timestamp_interval_seconds"}
            ),
            "group_columns": form.group_columns,
            "order_column": form.order_column,
            "is_private": form.privacy.dp_enabled,
            "limit": limit,
            "seed": seed,
        }

    def generate(self, context: KindContext) -> StageOutput:
        """Generate with the backend, and store the results."""
        from rowmill.kinds.tables import generated_series

        return generated_series.make_generated_series(context)
