"""One worker's task for a part of rows: examples in columns, rejects and a ledger."""

import gc
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rowmill.conversation.options import RendererSpec
from rowmill.core.arrays import Ints
from rowmill.core.errors import ContextOverflowError
from rowmill.core.stage_names import TOKENIZED_EXAMPLES
from rowmill.core.storage import Store
from rowmill.recipe.dataset import Dataset
from rowmill.schema.examples import WEIGHT_COLUMN, count_tokens_by_weight
from rowmill.schema.ledger import sum_counts
from rowmill.schema.manifest import File, Part
from rowmill.schema.rows import ROW_KIND_COLUMNS
from rowmill.stages.part_files import RejectLog, count_accounts, row_as_bytes, write_accounts, write_table
from rowmill.stages.tokenized_examples import tool_lengths
from rowmill.stages.tokenized_examples.text_examples import ExampleBuilder, PreparedExamples
from rowmill.stages.tokenizer_files import open_encoder
from rowmill.tokenization import example_columns
from rowmill.tokenization.example_encoding import TokenizationCounts
from rowmill.tokenization.reference_sample import ReferenceSample

# ── Tokenized examples ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TokenizeTask:
    """One part of canonical rows to tokenize; `tokenizer` is a file of the store, `renderer` plain data.

    At least `min_compared_chars` of its texts are compared with the reference tokenizer.
    """

    root: str
    folder: str
    fingerprint: str
    tokenizer: str
    dataset: Dataset
    renderer: RendererSpec | None
    limit: int
    vocab_size: int
    rows: File
    min_compared_chars: int
    base: str = ""


READ_COLUMNS = (
    *("row_id", "content_hash", "kind", "split", "domain", "messages", "tools", "template_kwargs"),
    *("extracted_think_from_content", "text", "output", "record"),
)
"""The columns of canonical rows that decide examples, beside those of one kind of rows."""


_MAX_BUILDERS = 8
"""Example builders that a process keeps: those of the datasets that were tried before a build are used by it."""

_EXAMPLE_BUILDERS: dict[str, "ExampleBuilder"] = {}


def _get_example_builder(task: TokenizeTask) -> "ExampleBuilder":
    """Return this process's example builder for a task's options; the latest are cached, for any store."""
    key = repr((task.tokenizer, task.renderer, task.limit, task.base, task.vocab_size)) + task.dataset.model_dump_json()
    if key not in _EXAMPLE_BUILDERS:
        while len(_EXAMPLE_BUILDERS) >= _MAX_BUILDERS:
            del _EXAMPLE_BUILDERS[next(iter(_EXAMPLE_BUILDERS))]
        encoder = open_encoder(task.root, task.tokenizer)
        _EXAMPLE_BUILDERS[key] = ExampleBuilder(
            encoder, task.dataset, task.renderer, task.limit, base=Path(task.base), vocab_size=task.vocab_size
        )
        if multiprocessing.parent_process() is not None:
            # Opened objects live as long as the worker: scanning them at every garbage collection cost 10 % of a part.
            gc.collect()
            gc.freeze()
    return _EXAMPLE_BUILDERS[key]


def tokenize_part(task: TokenizeTask) -> Part:
    """Tokenize one part of canonical rows."""
    store, preparer = Store(task.root), _get_example_builder(task)
    own = (field.name for field in ROW_KIND_COLUMNS.get(task.dataset.row_kind, ()))
    rows = store.table(task.rows, (*READ_COLUMNS, *own, *task.dataset.format.get_rollout_fields().names))
    counts = TokenizationCounts(sample=ReferenceSample(task.min_compared_chars))
    prepared = preparer.prepare(rows, counts)
    if counts.engine_differs:
        # What the sample showed of some texts may be so in all: nothing of the engine's is kept.
        preparer, mismatches = preparer.on_reference_path, counts.fast_path_mismatches
        counts = TokenizationCounts()
        prepared = preparer.prepare(rows, counts)
        counts.fast_path_mismatches = mismatches
    preparer.compare_prompts(rows, prepared, counts)
    log = RejectLog(TOKENIZED_EXAMPLES)
    for place, rejected in prepared.rejected:
        row = rows.slice(place, 1).to_pylist()[0]
        log.add(row["row_id"], rejected, row_as_bytes(row))
    kept = _exclude_rejected(rows.select(("row_id", "tools")), prepared)
    lengths = _count_short_documents(rows, prepared)
    tools = _measure_part_tools(task, preparer, kept.column("tools"))
    return _save_examples(task, kept.column("row_id"), prepared, log, counts, lengths, tools)


def _exclude_rejected(rows: pa.Table, prepared: PreparedExamples) -> pa.Table:
    if not prepared.rejected:
        return rows
    kept = np.ones(rows.num_rows, bool)
    kept[[place for place, _ in prepared.rejected]] = False
    return rows.filter(pa.array(kept))


def make_overlong_error(
    limit: int, count: int, found: Sequence[tuple[str, int]], where: str, remedies: str
) -> ContextOverflowError:
    """Return the error of `overlong: raise`, with the number of rows, the longest, and up to twenty ids."""
    longest = max(length for _, length in found)
    names = ", ".join(row_id for row_id, _ in found[:20])
    return ContextOverflowError(
        f"{where}: {count} {'row is' if count == 1 else 'rows are'} longer than {limit} tokens, the longest {longest}: "
        f"{names}; at most {limit} fit; {remedies}"
    )


SHORT_TOKENS = 20
"""Shorter documents are probably lines of a document that was cut wrongly."""


def _count_short_documents(rows: pa.Table, prepared: PreparedExamples) -> dict[str, int]:
    """Count the documents that became examples, and those shorter than `SHORT_TOKENS`."""
    is_text = pc.equal(rows.column("kind"), "text").to_numpy(zero_copy_only=False)
    lengths = prepared.examples.column("original_tokens").to_numpy()
    tokens = np.bincount(prepared.places, weights=lengths, minlength=rows.num_rows)[is_text]
    return {
        "documents": int((tokens > 0).sum()),
        "short_documents": int(((tokens > 0) & (tokens < SHORT_TOKENS)).sum()),
    }


def _save_examples(
    task: TokenizeTask,
    kept: pa.ChunkedArray,
    prepared: PreparedExamples,
    log: RejectLog,
    counts: TokenizationCounts,
    documents: dict[str, int],
    tools: tool_lengths.ToolLengths,
) -> Part:
    table = prepared.examples
    by_split = _count_tokens_by_split(table)
    overlong = _list_overlong_rows(task, table)
    facts: dict[str, Any] = {
        "rows": len(kept) + len(log.row_ids),
        "kept": len(kept),
        "examples": table.num_rows,
        **documents,
        "verified": prepared.verified,
        **count_accounts(log),
        "tokens": int(table.column("tokens").to_numpy().sum()),
        "original_tokens": int(table.column("original_tokens").to_numpy().sum()),
        "tokens_by_split": by_split,
        "tokens_by_class": sum_counts(by_split.values()),
        **({"tokens_by_weight": _count_tokens_by_weight(table)} if WEIGHT_COLUMN in table.column_names else {}),
        "outside_vocabulary": example_columns.count_outside_vocabulary(table, task.vocab_size),
        "overlong": overlong[:20],
        "overlong_rows": len(overlong),
        "dropped": dict(sorted(counts.dropped.items())),
        "rows_losing_reasoning": counts.rows_losing_reasoning,
        "reference_path_texts": counts.reference_path_texts,
        "fast_path_mismatches": counts.fast_path_mismatches,
        "control_counts": dict(sorted(counts.control_strings.items())),
        "controlled_rows": counts.controlled_rows,
        "altered": counts.altered,
        "template": counts.template,
        "boundary_tokens": counts.boundary_tokens,
        "prompts_compared": counts.prompts_compared,
        "prompts_that_differ": len(counts.prompts_that_differ),
        "examples_of_prompts": counts.prompts_that_differ[:3],
        "dropped_tokens": counts.dropped_tokens,
        "dropped_trained": counts.dropped_trained,
        "trained_removed": int(table.column("trained_removed").to_numpy().sum()),
        "rows_with_tools": tools.rows,
        "tool_tokens": tools.tokens,
        "most_tool_tokens": tools.most,
        **dict(sorted(counts.of_kind.items())),
    }
    store = Store(task.root)
    files = {
        "examples": write_table(store, f"{task.folder}/parts/{task.fingerprint}/examples.arrow", table),
        **write_accounts(store, task.folder, task.fingerprint, kept, log),
    }
    return Part(task.fingerprint, files, facts)


def _count_tokens_by_weight(table: pa.Table) -> dict[str, int]:
    return count_tokens_by_weight(table.column(WEIGHT_COLUMN).combine_chunks().flatten())


def _list_overlong_rows(task: TokenizeTask, table: pa.Table) -> list[tuple[str, int]]:
    """List the rows over the limit with their lengths, longest first, if such rows stop the build."""
    if task.dataset.truncation.overlong != "raise":
        return []
    lengths = _measure_longest_sides(table)
    places = np.flatnonzero(lengths > task.limit)
    places = places[np.argsort(-lengths[places], kind="stable")]
    names: list[str] = table.column("example_id").take(pa.array(places)).to_pylist()
    return [(name.rpartition("#")[0], int(n)) for name, n in zip(names, lengths[places].tolist(), strict=True)]


def _measure_longest_sides(table: pa.Table) -> Ints:
    """Return the tokens of each example, or of the longer side of a pair."""
    if "side_lengths" not in table.column_names:
        return table.column("tokens").to_numpy().astype(np.int64)
    sides = table.column("side_lengths").combine_chunks()
    lengths = sides.flatten().to_numpy().astype(np.int64)
    return np.maximum.reduceat(lengths, np.asarray(sides.offsets, np.int64)[:-1]) if len(sides) else lengths


def _measure_part_tools(
    task: TokenizeTask, preparer: "ExampleBuilder", tools: pa.ChunkedArray
) -> tool_lengths.ToolLengths:
    if preparer.printer is None or tools.null_count == len(tools):
        return tool_lengths.ToolLengths()
    return tool_lengths.measure_tools(tools, preparer.printer, open_encoder(task.root, task.tokenizer))


def _count_tokens_by_split(table: pa.Table) -> dict[str, dict[str, int]]:
    """Count the original tokens of each split by class; each token is in exactly one."""
    names = {"trained": "trained_tokens", "context": "context_tokens", "template": "template_tokens"}
    columns = {name: table.column(column).to_numpy().astype(np.int64) for name, column in names.items()}
    removed = table.column("original_tokens").to_numpy().astype(np.int64) - table.column("tokens").to_numpy()
    columns["truncated"] = removed
    splits = table.column("split").to_numpy(zero_copy_only=False)
    return {
        str(split): {name: int(values[splits == split].sum()) for name, values in columns.items()}
        for split in sorted(set(splits.tolist()))
    }
