"""MDS shards for mosaicml-streaming, written by its writer: packed sequences, or turns for LLM Foundry.

    profile finetune    input_ids, labels, position_ids, seq_lengths   ndarray:int32      sequence_id   int
    profile pretrain    tokens                                         ndarray:int32, each exactly seq_len
    llm_foundry         {"turns": [{"input_ids": [10, 11], "labels": [12]}, {"input_ids": [13], "labels": [14, 2]}]}
                        for the segment 10 11 12 13 14 2 with the targets 12 and 14 2

`finetune` is for loops over a StreamingDataset. LLM Foundry's text loader reads `pretrain`: `tokens` cannot store a
mask, so `pretrain` takes only sequences that train throughout. Its finetuning loader takes `input_ids` for a prompt and
`labels` for its response, and would train packed sequences twice, so it gets turns: it joins those of a sample, trains
`labels`, masks `input_ids`, and packs. A sample ends with its last target, since later tokens change nothing; after a
last target other than EOS the loader appends an EOS and trains it.

An export is one job: the writer closes a shard by size, so the boundaries depend on the whole order.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import orjson
from pydantic import Field

from rowmill.core.arrays import Bools, Tokens, compute_offsets
from rowmill.core.errors import ConfigError
from rowmill.exports.base import Export, ExportContext, ExportIndex, ExportJob, ExportLayout, WrittenFile
from rowmill.schema.examples import IGNORED_LABEL, WEIGHT_COLUMN
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.shards import label_conventions
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.sequences import SequenceBatch

ARRAY_TYPE = "ndarray:int32"
FINETUNE_COLUMNS = dict.fromkeys(("input_ids", "labels", "position_ids", "seq_lengths"), ARRAY_TYPE) | {
    "sequence_id": "int"
}


class MDS(Export):
    """Packed sequences in shards of mosaicml-streaming, for loops over its StreamingDataset."""

    MEANT_BY: ClassVar = ("mosaic", "mosaicml", "streaming", "composer")

    CONVENTION: ClassVar[LabelConvention] = "unshifted"
    HOLDS_WEIGHTS: ClassVar[bool] = True
    NEEDS: ClassVar[tuple[str, str] | None] = ("streaming", "mds")

    kind: Literal["mds"] = "mds"
    """mosaicml-streaming."""
    unit: Literal["packed"] = "packed"
    """Sequences of several segments."""
    profile: Literal["finetune", "pretrain"] = "finetune"
    """`finetune`: ids, labels and positions; `pretrain`: `tokens` alone, each sample exactly `seq_len`."""
    size_limit_bytes: Annotated[int, Field(ge=1 << 10, lt=1 << 32)] = 64 << 20
    """Bytes per shard, below 4 GiB: offsets in a shard are 32 bits wide."""
    accept_untrained_as_trained: bool = False
    """`pretrain` only: whether tokens without loss may be trained, since the format has no mask."""

    @property
    def label_convention(self) -> LabelConvention:
        return "unshifted" if self.profile == "finetune" else "none"

    def refuse(self, summary: RecipeSummary) -> None:
        """Refuse datasets that `tokens` cannot store."""
        super().refuse(summary)
        if self.profile == "finetune":
            if self.accept_untrained_as_trained:
                raise ConfigError(
                    "accept_untrained_as_trained with profile: finetune, which stores labels; it is for formats "
                    "without a mask; delete it"
                )
            return
        for name, dataset in summary.datasets.items():
            if not dataset.is_joined:
                raise ConfigError(
                    f"profile: pretrain takes sequences of exactly {summary.seq_len} tokens, but datasets.{name} ends "
                    "them where examples end; joined text (packing.pack_strategy: concat) is needed; choose profile: "
                    "finetune"
                )
            if dataset.has_weights:
                raise ConfigError(
                    f"profile: pretrain cannot store the loss weights of datasets.{name}; choose profile: finetune"
                )
            if not dataset.is_open and not self.accept_untrained_as_trained:
                raise ConfigError(
                    f"profile: pretrain stores no mask, but the first token of every document of datasets.{name} is "
                    "not a target; every token must be a target; set packing.block_cross_document_attention: false, or "
                    "accept_untrained_as_trained: true"
                )

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Return one job; with `pretrain`, of the full sequences."""
        numbers = np.arange(len(index.lengths))
        if self.profile == "finetune":
            return ExportLayout([ExportJob("data", numbers, index.sequence_offsets)])
        counts = np.diff(index.sequence_offsets)
        is_full = index.tokens == index.context.seq_len
        kept = np.repeat(is_full, counts)
        offsets = compute_offsets(counts[is_full])
        notes = {
            "accept_untrained_as_trained": self.accept_untrained_as_trained,
            "tail_sequences": int((~is_full).sum()),
            "tail_tokens": int(index.lengths[~kept].sum()),
        }
        return ExportLayout(
            [ExportJob("data", numbers[kept], offsets)] if is_full.any() else [], {"tail": int((~kept).sum())}, notes
        )

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write all shards and their index."""
        counts: list[tuple[int, int, int]] = []
        writer: Any = None
        for chunk in chunks:
            if writer is None:
                # Opened with the first chunk, which shows whether there are weights.
                columns = {"tokens": ARRAY_TYPE}
                if self.profile == "finetune":
                    columns = FINETUNE_COLUMNS | ({} if chunk.weights is None else {WEIGHT_COLUMN: "ndarray:float32"})
                writer = open_mds_writer(folder, columns, self.size_limit_bytes)
            samples = (
                self._make_finetune_samples(chunk)
                if self.profile == "finetune"
                else self._make_pretrain_samples(chunk, context)
            )
            for sample, count in samples:
                writer.write(sample)
                counts.append(count)
        writer.finish()
        return describe_shards(folder, counts)

    def _make_finetune_samples(self, chunk: SequenceBatch) -> "Iterator[tuple[dict[str, Any], tuple[int, int, int]]]":
        borders, in_sequences = chunk.spans()
        labels = label_conventions.make_unshifted_labels(chunk.ids, chunk.trained)
        lengths = np.diff(borders).astype(np.int32)
        positions = chunk.position_ids
        segments = np.diff(chunk.sequence_offsets)
        tokens = chunk.token_offsets
        for i in range(len(chunk)):
            span = slice(int(tokens[i]), int(tokens[i + 1]))
            sample: dict[str, Any] = {
                "input_ids": chunk.ids[span],
                "labels": labels[span],
                "position_ids": positions[span],
                "seq_lengths": lengths[in_sequences[i] : in_sequences[i + 1]],
                "sequence_id": int(chunk.numbers[i]),
            }
            if chunk.weights is not None:
                sample[WEIGHT_COLUMN] = chunk.weights[span]
            trained = int((labels[span] != IGNORED_LABEL).sum())
            yield sample, (int(segments[i]), span.stop - span.start, trained)

    def _make_pretrain_samples(
        self, chunk: SequenceBatch, context: ExportContext
    ) -> "Iterator[tuple[dict[str, Any], tuple[int, int, int]]]":
        tokens, segments = chunk.token_offsets, np.diff(chunk.sequence_offsets)
        untrained = ~chunk.trained
        # With open attention a document's first token follows another document: it is trained too, as the recipe sets.
        firsts = chunk.offsets[:-1]
        untrained[firsts[np.repeat(chunk.is_open, segments)]] = False
        untrained[tokens[:-1]] = False
        for i in range(len(chunk)):
            span = slice(int(tokens[i]), int(tokens[i + 1]))
            trained, without = int(chunk.trained[span].sum()), int(untrained[span].sum())
            if without and not self.accept_untrained_as_trained:
                where = f"exports.{self.name}: sequence {int(chunk.numbers[i])} of {chunk.datasets[i].as_py()}"
                raise ConfigError(
                    f"{where} has {without} tokens without loss, and profile: pretrain stores no mask; every token but "
                    "the first must train; choose profile: finetune, or set accept_untrained_as_trained: true"
                )
            yield {"tokens": chunk.ids[span]}, (int(segments[i]), context.seq_len, trained)

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the code that opens it, by LLM Foundry if it has a loader for the profile."""
        if self.profile == "pretrain":
            loader = f"train_loader: {{name: text, dataset: {{streams: {{rowmill: {{local: {data}}}}}, max_seq_len: "
            return f"{loader}{context.seq_len}, shuffle: true}}}}   # LLM Foundry"
        return f'StreamingDataset(local="{data}", remote=None, batch_size=1)'


def open_mds_writer(folder: Path, columns: Mapping[str, str], size_limit_bytes: int) -> Any:
    """Return the library's shard writer for an export's folder."""
    streaming: Any = import_module("streaming")
    return streaming.MDSWriter(
        out=str(folder / "data"), columns=dict(columns), compression=None, hashes=["sha256"],
        size_limit=size_limit_bytes, exist_ok=True,
    )  # fmt: skip


def describe_shards(folder: Path, counts: Sequence[tuple[int, int, int]]) -> list[WrittenFile]:
    """Return the written shards and their index; `counts` are each sample's segments, tokens, targets."""
    index = orjson.loads((folder / "data" / "index.json").read_bytes())
    written: list[WrittenFile] = []
    first = 0
    for shard in index["shards"]:
        shard_counts = counts[first : first + int(shard["samples"])]
        first += len(shard_counts)
        segments, tokens, trained = (sum(values) for values in zip(*shard_counts, strict=True))
        path = f"data/{shard['raw_data']['basename']}"
        written.append(WrittenFile(path, 0, len(shard_counts), segments, tokens, trained))
    return [*written, WrittenFile("data/index.json")]


class LLMFoundry(Export):
    """LLM Foundry's finetuning loader: turns of context and response in MDS shards."""

    CONVENTION: ClassVar[LabelConvention] = "unshifted"
    NEEDS: ClassVar[tuple[str, str] | None] = ("streaming", "mds")

    kind: Literal["llm_foundry"] = "llm_foundry"
    """LLM Foundry's `finetuning` loader."""
    unit: Literal["unpacked"] = "unpacked"
    """A sample per segment; the loader packs."""
    size_limit_bytes: Annotated[int, Field(ge=1 << 10, lt=1 << 32)] = 64 << 20
    """Bytes per shard, below 4 GiB: offsets in a shard are 32 bits wide."""
    accept_appended_eos: bool = False
    """Whether segments may end in a token other than a trained EOS; the loader then appends an EOS and trains it."""

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Return one job of all segments that can have a target; the writer closes shards by size."""
        numbers = np.flatnonzero(index.lengths > 1)
        notes = {
            "accept_appended_eos": self.accept_appended_eos,
            "trailing_context": "left out: what follows a segment's last target has no place in turns",
        }
        left_out = {"not_taken": len(index.lengths) - len(numbers)}
        jobs = [ExportJob("data", numbers, np.arange(len(numbers) + 1))] if len(numbers) else []
        return ExportLayout(jobs, left_out if left_out["not_taken"] else {}, notes)

    def write(
        self, job: ExportJob, chunks: Iterator[SequenceBatch], folder: Path, context: ExportContext
    ) -> list[WrittenFile]:
        """Write all shards and their index."""
        writer = open_mds_writer(folder, {"turns": "json"}, self.size_limit_bytes)
        counts: list[tuple[int, int, int]] = []
        for chunk in chunks:
            for i, (begin, end) in enumerate(pairwise(chunk.offsets.tolist())):
                ids, trained = chunk.ids[begin:end], chunk.trained[begin:end]
                where = f"exports.{self.name}: example {chunk.example_ids[i].as_py()}"
                if not trained.any():
                    raise ConfigError(
                        f"{where} has no target, and LLM Foundry's loader needs one in each sample; filter such rows, "
                        "or choose another kind"
                    )
                last = int(ids[np.flatnonzero(trained)[-1]])
                if last != context.eos_id and context.eos_id is not None and not self.accept_appended_eos:
                    raise ConfigError(
                        f"{where}: its last target is {last}, and LLM Foundry's loader would append {context.eos_id} "
                        "(EOS) and train it; every segment must end in a trained EOS; set accept_appended_eos: true to "
                        "train these tokens too, or keep examples whole with a template that ends answers in EOS"
                    )
                sample, tokens = cut_turns(ids, trained)
                writer.write({"turns": sample})
                counts.append((1, tokens, int(trained.sum())))
        writer.finish()
        return describe_shards(folder, counts)

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the loader's configuration."""
        return "\n".join(
            [
                "train_loader:",
                "  name: finetuning",
                "  dataset:",
                f"    streams: {{rowmill: {{local: {data}}}}}",
                f"    max_seq_len: {context.seq_len}",
                "    decoder_only_format: true",
                "    target_prompts: none",
                "    target_responses: all   # the default trains the last response alone",
                "    packing_ratio: auto",
                "    shuffle: true",
                "  drop_last: true",
                "  num_workers: 8",
            ]
        )


def cut_turns(ids: Tokens, trained: Bools) -> tuple[list[dict[str, Any]], int]:
    """Return a segment as turns of context and response, and how many of its tokens they hold.

    The first token is not a target, so every run of targets has a context before it.
    """
    end = int(np.flatnonzero(trained)[-1]) + 1
    bounds = [0, *(np.flatnonzero(np.diff(trained[:end])) + 1).tolist(), end]
    # The loader's files are JSON, whose writer takes lists: here alone a token becomes a Python object.
    pieces = [ids[first:last].tolist() for first, last in pairwise(bounds)]
    turns = [{"input_ids": pieces[i], "labels": pieces[i + 1]} for i in range(0, len(pieces), 2)]
    return turns, bounds[-1]
