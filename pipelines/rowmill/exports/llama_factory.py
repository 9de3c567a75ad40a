"""LLaMA-Factory: a `DatasetDict` for its option `tokenized_path`, with the columns that its collators read.

    next_token   input_ids, attention_mask, labels
      packed     position_ids and packing_params too; padded to seq_len + 1, attention_mask 1 1 1 2 2 0
    paired       the three as chosen_… and rejected_…
    unpaired     the three, the three as kl_…, kto_tags

Every row has `images`, `videos` and `audios`, which are null.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from rowmill.core.arrays import Ints, Tokens, compute_offsets, expand_ranges, make_list_array
from rowmill.core.errors import ConfigError
from rowmill.exports import hf
from rowmill.exports.base import (
    ExportContext,
    ExportIndex,
    ExportJob,
    ExportLayout,
    TableExport,
    Unit,
    WrittenFile,
)
from rowmill.exports.trl_preference import rotate_blocks
from rowmill.schema.examples import IGNORED_LABEL, Objective
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.native import choose_pad_id
from rowmill.shards.sequences import SequenceBatch

NO_MEDIA = 1 << 32
"""The segment number that LLaMA-Factory gives to media of a row that has none."""

_MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True, slots=True, eq=False)
class _FlatRows:
    """Rows of ids and labels, flat: row i is `[offsets[i], offsets[i + 1])`."""

    ids: Tokens
    labels: Tokens
    offsets: Ints

    def make_columns(self, prefix: str) -> dict[str, pa.Array]:
        """Return the three columns of rows that the trainer pads."""
        values = {"input_ids": self.ids, "attention_mask": np.ones(len(self.ids), np.int8), "labels": self.labels}
        return {f"{prefix}{name}": make_list_array(self.offsets, array) for name, array in values.items()}


def _take_rows(rows: _FlatRows, selected: Ints) -> _FlatRows:
    return _take_row_parts(rows, rows.offsets[selected], rows.offsets[selected + 1] - rows.offsets[selected])


def _take_row_parts(rows: _FlatRows, begins: Ints, counts: Ints) -> _FlatRows:
    places = expand_ranges(begins, counts)
    return _FlatRows(rows.ids[places], rows.labels[places], compute_offsets(counts))


def _make_packed_columns(chunk: SequenceBatch, segments: _FlatRows, context: ExportContext) -> dict[str, pa.Array]:
    """Return sequences padded to `seq_len` + 1, with the number of its attention span for each token."""
    borders, in_sequences = chunk.spans()
    count, width = len(chunk), context.seq_len + 1
    lengths, spans = np.diff(chunk.token_offsets), np.diff(in_sequences)
    places = np.arange(len(chunk.ids)) + np.repeat(np.arange(count) * width - chunk.token_offsets[:-1], lengths)
    numbers = np.arange(len(borders) - 1) - np.repeat(in_sequences[:-1], spans) + 1
    padding = choose_pad_id({"pad_id": context.pad_id, "eos_id": context.eos_id})
    values = {
        "input_ids": (segments.ids, padding),
        "attention_mask": (np.repeat(numbers, np.diff(borders)).astype(np.int32), 0),
        "position_ids": (chunk.position_ids, 0),
        "labels": (segments.labels, IGNORED_LABEL),
    }
    rows = np.arange(count + 1) * width
    columns: dict[str, pa.Array] = {}
    for name, (of_tokens, fill) in values.items():
        padded = np.full(count * width, fill, np.int32)
        padded[places] = of_tokens
        columns[name] = make_list_array(rows, padded)
    ends = borders[1:] - np.repeat(chunk.token_offsets[:-1], spans)
    # The borders of each row's spans, from 0 on; the padding is the last span.
    offsets = in_sequences + 2 * np.arange(count + 1)
    boundaries = np.zeros(int(offsets[-1]), np.int64)
    boundaries[np.arange(len(ends)) + np.repeat(2 * np.arange(count) + 1, spans)] = ends
    boundaries[offsets[1:] - 1] = width
    none = make_list_array(np.arange(count + 1), np.full(count, NO_MEDIA, np.int64))
    named = {name.removesuffix("s"): none for name in _MEDIA}
    fields = {
        "sequence_boundaries": make_list_array(offsets, boundaries),
        **{f"{name}_subseq_ids": values for name, values in named.items()},
        "right_padding_length": pa.array(width - lengths),
    }
    return columns | {"packing_params": pa.StructArray.from_arrays(list(fields.values()), list(fields))}


def _make_tuning_columns(
    chunk: SequenceBatch, segments: _FlatRows, context: ExportContext, unit: Unit
) -> dict[str, pa.Array]:
    """Return the columns of segments, or of packed sequences."""
    return _make_packed_columns(chunk, segments, context) if unit == "packed" else segments.make_columns("")


def _make_dpo_columns(
    chunk: SequenceBatch, segments: _FlatRows, context: ExportContext, unit: Unit
) -> dict[str, pa.Array]:
    """Return the columns of both sides of each pair."""
    del context, unit
    count = len(chunk.offsets) - 1
    chosen, rejected = (_take_rows(segments, np.arange(side, count, 2)) for side in (0, 1))
    return chosen.make_columns("chosen_") | rejected.make_columns("rejected_")


def _make_kto_columns(
    chunk: SequenceBatch, segments: _FlatRows, context: ExportContext, unit: Unit
) -> dict[str, pa.Array]:
    """Return the columns of each row, and of its prompt with the answer of another row of its block, for the KL term.

    That answer is cut to the limit.
    """
    del unit
    first, answer, partner = chunk.offsets[:-1], chunk.answer_starts, rotate_blocks(chunk.sequence_offsets)
    prompts = answer - first
    answers = np.minimum((chunk.offsets[1:] - answer)[partner], context.seq_len - prompts)
    # Prompt, answer, prompt, answer …
    begins = np.stack((first, answer[partner]), axis=1).ravel()
    parts = _take_row_parts(segments, begins, np.stack((prompts, answers), axis=1).ravel())
    exchanged = _FlatRows(parts.ids, parts.labels, parts.offsets[::2])
    tags = {"kto_tags": chunk.columns["sides"].cast(pa.bool_())}
    return segments.make_columns("") | exchanged.make_columns("kl_") | tags


@dataclass(frozen=True, slots=True)
class _Trainer:
    """One of LLaMA-Factory's trainers, by the name of its `stage`."""

    stage: str
    make_columns: Callable[[SequenceBatch, _FlatRows, ExportContext, Unit], dict[str, pa.Array]]
    """Makes its columns of a batch, its segments, the build's facts and the option `unit`."""
    rows_together: int | None = None
    """How many rows stay together; None: they are independent, and may be packed."""
    exchanges_answers: bool = False
    """Whether rows exchange their answers in blocks (`kl_block`), which then stay together."""


_TRAINERS: dict[Objective, _Trainer] = {
    "next_token": _Trainer("sft", _make_tuning_columns),
    "paired": _Trainer("dpo", _make_dpo_columns, rows_together=2),
    "unpaired": _Trainer("kto", _make_kto_columns, exchanges_answers=True),
}
"""The trainer of each objective that the export holds."""


class LLaMAFactory(TableExport):
    """Tokenized rows for LLaMA-Factory: fine-tuning, rewards and DPO, KTO."""

    CONVENTION: ClassVar[LabelConvention] = "unshifted"
    OBJECTIVES: ClassVar[frozenset[Objective]] = frozenset(_TRAINERS)

    kind: Literal["llama_factory"] = "llama_factory"
    """A folder for LLaMA-Factory's `tokenized_path`."""
    unit: Unit = "unpacked"
    """`unpacked`: a row is a segment; `packed`, for fine-tuning alone: the sequences of the build, for its
    `neat_packing`."""
    kl_block: Annotated[int, Field(ge=2)] = 1000
    """With `objective: unpaired`: in blocks of so many rows, each gets another one's answer for the KL term. The
    number is LLaMA-Factory's `preprocessing_batch_size`."""

    def refuse(self, summary: RecipeSummary) -> None:
        """Refuse packed preferences, and a split that LLaMA-Factory does not read."""
        super().refuse(summary)
        for name, facts in summary.datasets.items():
            if self.unit == "packed" and self.count_together(facts.objective) is not None:
                raise ConfigError(
                    f"unit: packed with datasets.{name}, whose objective is {facts.objective}; LLaMA-Factory packs "
                    "only for fine-tuning; delete unit"
                )
        if self.split == "test":
            raise ConfigError("split: test; LLaMA-Factory reads train and validation; choose one of them")

    def count_together(self, objective: Objective) -> int | None:
        """Return both sides of a pair, or the rows that exchange their answers."""
        trainer = _TRAINERS[objective]
        return self.kl_block if trainer.exchanges_answers else trainer.rows_together

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Return one job of all rows; pairs and blocks of exchanged answers stay together."""
        notes = {"kl_block": self.kl_block} if _TRAINERS[index.context.objective].exchanges_answers else {}
        return ExportLayout(hf.join_jobs([*super().lay_out(index).jobs], self.split), notes=notes)

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write the whole `DatasetDict`."""
        return hf.save_dataset_dict(self, job, chunks, folder, context)

    def make_table(self, chunk: SequenceBatch, file: WrittenFile, context: ExportContext) -> pa.Table:
        """Return the columns of the objective's trainer."""
        file.add(chunk, trained=int(chunk.trained.sum()))
        segments = _FlatRows(
            chunk.ids, label_conventions.make_unshifted_labels(chunk.ids, chunk.trained), chunk.offsets
        )
        columns = _TRAINERS[context.objective].make_columns(chunk, segments, context, self.unit)
        rows = len(next(iter(columns.values())))
        return pa.table(columns | {name: pa.nulls(rows) for name in _MEDIA})

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the lines of LLaMA-Factory's YAML."""
        lines = f"stage: {_TRAINERS[context.objective].stage}\ntokenized_path: {data}"
        # It subtracts one of the option, and pads rows to one more than the rest.
        return f"{lines}\ncutoff_len: {context.seq_len + 1}\nneat_packing: true" if self.unit == "packed" else lines
