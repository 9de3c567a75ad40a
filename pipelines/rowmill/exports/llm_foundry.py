"""LLM Foundry: MDS shards of turns, as its finetuning loader reads them; mosaicml-streaming writes them.

    segment    ids 10 11 12 13 14 2    targets 12 and 14 2
    sample     {"turns": [{"input_ids": [10, 11], "labels": [12]}, {"input_ids": [13], "labels": [14, 2]}]}

The loader joins a sample's turns, trains `labels`, masks `input_ids`, and packs. A sample ends with its last target;
later tokens are left out, which costs nothing: tokens attend only to earlier ones. After a last target other than EOS
the loader appends an EOS and trains it.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rowmill.core.arrays import Bools, Tokens
from rowmill.core.errors import ConfigError
from rowmill.exports.base import Export, ExportContext, ExportIndex, ExportJob, ExportLayout, WrittenFile
from rowmill.exports.mds import describe_shards, open_mds_writer
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.sequences import SequenceBatch


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
