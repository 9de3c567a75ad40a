"""What the stages and commands ask of tables."""

from collections.abc import Sequence
from typing import Any

from rowmill import sources
from rowmill.core import config
from rowmill.core.stage_names import GENERATED_SERIES, PARSED_RECORDS
from rowmill.kinds.base import DatasetOptions
from rowmill.kinds.joint_rows import JointRows
from rowmill.kinds.shared.filters import REMOVAL_FILTERS
from rowmill.kinds.tables import comparison, generated_records, partitions, record_tokens, table_examples, table_rows
from rowmill.kinds.tables.options import require_records
from rowmill.kinds.tables.table_contract import TableContract
from rowmill.tokenization.tokenizer import TOKENIZATION_VERSION


def _identify_rows(dataset: DatasetOptions, limit: int) -> dict[str, Any]:
    """Return the options that decide rows, and separately those of the advice on groups; prompts affect neither."""
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


def _identify_examples(dataset: DatasetOptions, limit: int, seed: int, vocab_size: int | None) -> dict[str, Any]:
    """Return the options that decide examples; those of generation do not."""
    return {
        "versions": [record_tokens.VERSION, TOKENIZATION_VERSION, partitions.split_block_keys.version],
        "format": require_records(dataset).model_dump(mode="json", exclude={"generation"}),
        "limit": limit,
        "seed": seed,
        "vocab_size": vocab_size,
    }


def _identify_lengths(dataset: DatasetOptions, seed: int, seq_len: int) -> dict[str, Any]:
    """Return the options that decide the facts of records, in addition to those of all kinds."""
    format_options = require_records(dataset).model_dump(mode="json", exclude={"generation"})
    return {"records": table_examples.LENGTHS_VERSION, "format": format_options, "seed": seed, "seq_len": seq_len}


def _list_generation_stages(dataset: DatasetOptions) -> Sequence[str]:
    """Return the on-demand stages: none without `generation`, and only texts without its backend."""
    generation = require_records(dataset).generation
    if generation is None:
        return ()
    return (PARSED_RECORDS,) if generation.backend is None else (PARSED_RECORDS, GENERATED_SERIES)


def _identify_parsed(dataset: DatasetOptions) -> dict[str, Any]:
    """Return the options of files and validation; the expected form of texts comes from the input."""
    form = require_records(dataset)
    assert form.generation is not None
    return {
        "versions": [generated_records.PARSING_VERSION, sources.SCAN_VERSION],
        "text_urls": form.generation.text_urls,
        "validation": form.generation.validation.model_dump(mode="json"),
        "group_columns": form.group_columns,
        "order_column": form.order_column,
        "interval_seconds": form.time_series.timestamp_interval_seconds,
        "is_private": form.privacy.dp_enabled,
    }


def _identify_generated(dataset: DatasetOptions, limit: int, seed: int) -> dict[str, Any]:
    """Return the options of generation; the backend's API key does not affect its answers."""
    form = require_records(dataset)
    assert form.generation is not None
    options = form.generation
    backend = None if options.backend is None else options.backend.model_dump(mode="json", exclude={"api_key_env"})
    return {
        "versions": [generated_records.GENERATION_VERSION],
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


TABLE_ROWS = JointRows(
    check_contract=lambda options, where: config.validate_options(TableContract, options, where),
    identify_rows=_identify_rows,
    make_rows=table_rows.make_table_rows,
    assign_splits=table_rows.apply_exact_splits,
    complete_rows=table_rows.complete_table_output,
    accepts_rows=table_rows.is_under_current_contract,
    identify_examples=_identify_examples,
    # The style of prompts may depend on the tokenizer's name.
    reads_tokenizer_name=lambda dataset: require_records(dataset).prompt.style == "reference",
    make_examples=table_examples.make_table_examples,
    identify_lengths=_identify_lengths,
    measure_lengths=table_examples.make_table_lengths,
    find_near_rows=comparison.find_near_records,
    plan_examples=table_examples.plan_table,
    advise=table_examples.advise_dataset,
    propose_contract=table_rows.propose_contract,
    list_generation_stages=_list_generation_stages,
    identify_parsed=_identify_parsed,
    scan_texts=generated_records.scan_generated_texts,
    parse_texts=generated_records.make_parsed_records,
    parse_files=generated_records.parse_files,
    identify_generated=_identify_generated,
    generate=generated_records.make_generated_series,
)
"""Rows that follow one table contract, and examples of several records."""
