"""TRL's preference trainers: token ids of prompts and answers, in the columns that their collators read.

    P = 5 6, chosen 7 8 9, rejected 7 4, margin 0.5; 9 is not a target

    reward   chosen_ids 5 6 7 8    rejected_ids 5 6 7 4    margin 0.5
    dpo      prompt_ids 5 6        chosen_ids 7 8          rejected_ids 7 4
    kto      prompt_ids 5 6        completion_ids 7 8      label true        KL_completion_ids: another row's answer

The trainers have no mask: every token of an answer trains. So an answer ends with its last target, and an answer with
other tokens before that is an error.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from rowmill.core.arrays import Ints, compute_offsets, expand_ranges, make_list_array
from rowmill.core.errors import ConfigError
from rowmill.exports.base import ExportContext, ExportIndex, ExportLayout, TableExport, WrittenFile
from rowmill.exports.hf import PARQUET_LOAD
from rowmill.schema.examples import Objective
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.sequences import SequenceBatch

_IDS = pa.list_(pa.int32())
_COLUMNS: dict[str, dict[str, pa.DataType]] = {
    "reward": {"chosen_ids": _IDS, "rejected_ids": _IDS, "margin": pa.float32()},
    "dpo": {"prompt_ids": _IDS, "chosen_ids": _IDS, "rejected_ids": _IDS},
    "kto": {"prompt_ids": _IDS, "completion_ids": _IDS, "label": pa.bool_()},
}
_KL_COLUMN = "KL_completion_ids"
_CLASSES = {"reward": "Reward", "dpo": "DPO", "kto": "KTO"}


class TRLPreference(TableExport):
    """Token ids of preferences for TRL's reward, DPO and KTO trainers."""

    CONVENTION: ClassVar[LabelConvention] = "none"
    OBJECTIVES: ClassVar[frozenset[Objective]] = frozenset({"paired", "unpaired"})

    kind: Literal["trl_preference"] = "trl_preference"
    """Prompts and answers as ids, for TRL."""
    unit: Literal["unpacked"] = "unpacked"
    """Pairs, or marked answers, one by one."""
    trainer: Literal["reward", "dpo", "kto"] = "dpo"
    """Which trainer's columns; `kto` takes `objective: unpaired`, the others `paired`."""
    kl_block: Annotated[int, Field(ge=2)] | None = None
    """With `kto`: rows per device and batch, each of which gets another one's answer for the KL term; null: no such
    column, for losses without the term. A file then holds whole blocks, which `shard_sequences` counts."""
    accept_untrained_as_trained: bool = False
    """Whether answers may have tokens before their last target that are none themselves; TRL trains them."""

    def refuse(self, summary: RecipeSummary) -> None:
        """Refuse datasets of the objective of another trainer, and blocks without a KL term."""
        super().refuse(summary)
        objective = "unpaired" if self.trainer == "kto" else "paired"
        for name, facts in summary.datasets.items():
            if facts.objective != objective:
                raise ConfigError(
                    f"trainer: {self.trainer} with datasets.{name}, whose objective is {facts.objective}; it trains on "
                    f"{objective}; set format.objective: {objective}, or choose another trainer"
                )
        if self.kl_block is not None and self.trainer != "kto":
            raise ConfigError(
                f"kl_block with trainer: {self.trainer}, whose loss has no KL term; only kto has; delete kl_block"
            )

    def count_together(self, objective: Objective) -> int:
        """Return both sides of a pair, or the rows that exchange their answers."""
        return 2 if self.trainer != "kto" else self.kl_block or 1

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Cut the order into files of whole pairs or blocks."""
        notes = {
            "trainer": self.trainer,
            "kl_block": self.kl_block,
            "accept_untrained_as_trained": self.accept_untrained_as_trained,
        }
        return ExportLayout(super().lay_out(index).jobs, notes=notes)

    def make_table(self, chunk: SequenceBatch, file: WrittenFile, context: ExportContext) -> pa.Table:
        """Return pairs, or marked answers, as rows."""
        kl = {} if self.kl_block is None else {_KL_COLUMN: _IDS}
        types = {**_COLUMNS[self.trainer], **kl}
        schema = pa.schema([pa.field(name, dtype, nullable=False) for name, dtype in types.items()])
        columns, tokens = self._make_columns(chunk, context.seq_len)
        file.add(chunk, trained=int(chunk.trained.sum()), tokens=tokens)
        return pa.table([columns[name] for name in schema.names], schema=schema)

    def _make_columns(self, chunk: SequenceBatch, seq_len: int) -> tuple[dict[str, pa.Array], int]:
        """Return the columns of a chunk, and how many tokens they hold beside those of the KL term."""
        first = chunk.offsets[:-1]
        answer = chunk.answer_starts
        # An answer ends behind its last target.
        places = np.where(chunk.trained, np.arange(len(chunk.ids)), -1)
        end = np.maximum(np.maximum.reduceat(places, first) + 1, answer)
        untrained = end - answer - np.add.reduceat(chunk.trained, first, dtype=np.int64)
        refused = np.flatnonzero(untrained)
        # A reward is that of a whole text: its trainer has no targets.
        if len(refused) and self.trainer != "reward" and not self.accept_untrained_as_trained:
            where = f"exports.{self.name}: {chunk.example_ids[int(refused[0])].as_py()}"
            raise ConfigError(
                f"{where} has {int(untrained[refused[0]])} tokens without loss inside an answer, and TRL's "
                f"{_CLASSES[self.trainer]}Trainer trains every token of an answer; all up to its last target must be "
                "targets; change the group loss, or set accept_untrained_as_trained: true"
            )
        if self.trainer == "kto":
            columns = {
                "prompt_ids": take_ranges(chunk, first, answer),
                "completion_ids": take_ranges(chunk, answer, end),
                "label": chunk.columns["sides"].cast(pa.bool_()),
            }
            if self.kl_block is not None:
                partner = rotate_blocks(chunk.sequence_offsets)
                longest = seq_len - (answer - first)
                columns[_KL_COLUMN] = take_ranges(
                    chunk, answer[partner], answer[partner] + np.minimum((end - answer)[partner], longest)
                )
            return columns, int((end - first).sum())
        begin = first if self.trainer == "reward" else answer
        sides = {
            "chosen_ids": take_ranges(chunk, begin[::2], end[::2]),
            "rejected_ids": take_ranges(chunk, begin[1::2], end[1::2]),
        }
        if self.trainer == "reward":
            # A margin of 0 is none: TRL subtracts it from the difference of the rewards.
            margins = chunk.columns["margins"].fill_null(0.0).take(pa.array(np.arange(0, len(first), 2)))
            return sides | {"margin": margins}, int((end - first).sum())
        prompts = take_ranges(chunk, first[::2], answer[::2])
        return {"prompt_ids": prompts, **sides}, int((end - first).sum() - (answer - first)[1::2].sum())

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the code that trains on it."""
        load, name = PARQUET_LOAD.format(data=data), _CLASSES[self.trainer]
        if self.trainer == "reward":
            return f"{load}\nRewardTrainer(…, args=RewardConfig(…, max_length=None), train_dataset=rows)"
        return (
            f"{load}\n\nclass Tokenized{name}Trainer({name}Trainer):\n"
            "    def _prepare_dataset(self, dataset, *args, **kwargs):\n        return dataset\n\n"
            f"Tokenized{name}Trainer(…, args={name}Config(…, max_length=None), train_dataset=rows)"
        )


def take_ranges(chunk: SequenceBatch, begins: Ints, ends: Ints) -> pa.Array:
    """Return the ids of ranges of tokens, a list for each."""
    counts = ends - begins
    return make_list_array(compute_offsets(counts), chunk.ids[expand_ranges(begins, counts)])


def rotate_blocks(offsets: Ints) -> Ints:
    """Return for each row the one before it in its block, and for a block's first row its last.

    blocks of 3 rows: 0 gets the answer of 2, 1 that of 0, and 2 that of 1
    """
    before = np.arange(-1, int(offsets[-1]) - 1)
    before[offsets[:-1]] = offsets[1:] - 1
    return before
