"""The export `native`: packed sequences in the columns of our own shards, which TRL and Hugging Face datasets read.

What belongs here: writing sequences in training order, and the pointer for TRL. What does not: the columns
(`shards/native.py`).
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from rowmill.exports.base import Job, Sharded, Tally, Terms, Written, write_parquet
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import Letter
from rowmill.shards.native import ROW_GROUP, SEQUENCES, Segments, Spans, to_table
from rowmill.shards.sequences import Sequences

# ── The export ─────────────────────────────────────────────────────────────────────────────────────


GROUP_TOKENS = 32 << 20
"""Tokens in a row group at most: sequences of a hundred thousand tokens make smaller groups."""


class Native(Sharded):
    """Packed Parquet with positions and span lengths: our own form, which HF `datasets` and TRL read unchanged."""

    LETTER: ClassVar[Letter] = "A"
    HOLDS_WEIGHTS: ClassVar[bool] = True

    kind: Literal["native"] = "native"
    """Packed sequences in the columns of our own shards."""
    unit: Literal["packed"] = "packed"
    """Sequences of several segments."""

    def rows_at_once(self, seq_len: int) -> int:
        """Return the rows of a group: 1,024, fewer where sequences are long."""
        return group_rows(seq_len)

    def write(self, job: Job, chunks: Iterator[Sequences], folder: Path, terms: Terms) -> list[Written]:
        """Write one shard."""
        path = f"data/{job.name}.parquet"
        return [write_packed(chunks, folder, path, terms)]

    def pointer(self, data: str, terms: Terms) -> str:
        """Return TRL's configuration."""
        return trl_pointer(PARQUET_LOAD.format(data=data))


TRL_OPTIONS: dict[str, Any] = {
    "packing": False,
    "padding_free": True,
    "max_length": None,
    "per_device_train_batch_size": 1,
    "train_sampling_strategy": "sequential",
    "dataset_kwargs": {"skip_prepare_dataset": True},
}
"""What TRL's `SFTConfig` needs to train packed rows unchanged and in order; the pages on TRL show the same."""


PARQUET_LOAD = 'rows = load_dataset("parquet", data_files="{data}/*.parquet", split="train")'


def trl_pointer(load: str) -> str:
    """Return the lines that train packed rows with TRL, after the one that loads them."""
    options = [f"    {name}={value!r}," for name, value in TRL_OPTIONS.items()]
    model = 'AutoModelForCausalLM.from_pretrained(…, attn_implementation="flash_attention_2")'
    return "\n".join([load, "SFTConfig(", *options, ")", model])


def group_rows(seq_len: int) -> int:
    """Return how many sequences of a length make a row group."""
    return max(1, min(ROW_GROUP, GROUP_TOKENS // seq_len))


def write_packed(chunks: Iterator[Sequences], folder: Path, path: str, terms: Terms) -> Written:
    """Write packed sequences as one Parquet file with the card in its schema."""
    tally = Tally()

    def tables() -> Iterator[pa.Table]:
        for chunk in chunks:
            table = packed(chunk)
            tally.add(chunk, trained=int(table.column("trained_tokens").to_numpy().sum()))
            yield table

    made = tables()
    first = next(made)
    schema = first.schema.with_metadata({"rowmill": terms.card})
    write_parquet(folder / path, chain([first], made), schema, rows=group_rows(terms.seq_len))
    return tally.written(path)


def packed(sequences: Sequences) -> pa.Table:
    """Return sequences in the columns of a shard, and with their weights where they have some."""
    segments = Segments(
        ids=sequences.ids,
        mask=sequences.trained,
        offsets=sequences.offsets,
        sequence_offsets=sequences.sequence_offsets,
        example_ids=sequences.example_ids,
        starts=sequences.starts,
        weights=sequences.weights,
    )
    borders, span_offsets = sequences.spans()
    lengths = np.diff(borders).astype(np.int32)
    spans = Spans(
        labels=label_conventions.unshifted(sequences.ids, sequences.trained),
        position_ids=sequences.position_ids,
        lengths=lengths,
        offsets=span_offsets,
    )
    table = to_table(segments, spans, dataset="", first_sequence=0)
    own = {"dataset": sequences.datasets.dictionary_encode(), "sequence_id": pa.array(sequences.numbers)}
    for name, column in own.items():
        table = table.set_column(table.schema.get_field_index(name), SEQUENCES.field(name), column)
    return table
