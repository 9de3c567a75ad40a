"""Prompts for reinforcement learning: messages and ground truths, in the columns of several trainers.

    messages [user "48 + 24?"]   ground_truth "72"   data_source gsm8k

    verl            prompt [{role, content}]   reward_model {rule, 72}   data_source gsm8k   ability   extra_info
    skyrl           prompt [{role, content}]   reward_spec {rule, 72}    data_source gsm8k   env_class   extra_info
    trl             prompt [{role, content}]   solution 72               data_source gsm8k
    openrlhf        input [{role, content}]    label 72                  datasource gsm8k
    open_instruct   messages [{role, content}] ground_truth [72]         dataset [gsm8k]
    nemo_rl         input "48 + 24?"           output 72

A message of an Arrow list has the same fields in every row, null where a message lacks one, and templates print those
nulls. So messages have a role and a text, and a prompt with anything else stops the export.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from rowmill.core.errors import ConfigError
from rowmill.core.json import Json, from_json, to_json
from rowmill.exports.base import (
    ExportContext,
    ExportIndex,
    ExportLayout,
    TableExport,
    WrittenFile,
)
from rowmill.exports.hf import PARQUET_LOAD
from rowmill.schema.examples import Objective
from rowmill.schema.recipe_summary import RecipeSummary
from rowmill.shards.label_conventions import LabelConvention
from rowmill.shards.sequences import SequenceBatch

PromptLayout: TypeAlias = Literal["verl", "skyrl", "trl", "openrlhf", "open_instruct", "nemo_rl"]

_TEXT = pa.string()
_TEXTS = pa.list_(_TEXT)
_MESSAGES = pa.list_(pa.struct([("role", _TEXT), ("content", _TEXT)]))
_EXTRA_INFO = pa.struct([("split", _TEXT), ("index", pa.int64()), ("row_id", _TEXT), ("extra", _TEXT)])
_COLUMNS: Mapping[PromptLayout, Mapping[str, pa.DataType]] = {
    "verl": {
        "data_source": _TEXT,
        "prompt": _MESSAGES,
        "ability": _TEXT,
        "reward_model": pa.struct([("style", _TEXT), ("ground_truth", _TEXT)]),
        "extra_info": _EXTRA_INFO,
    },
    "skyrl": {
        "data_source": _TEXT,
        "prompt": _MESSAGES,
        "env_class": _TEXT,
        "reward_spec": pa.struct([("method", _TEXT), ("ground_truth", _TEXT)]),
        "extra_info": _EXTRA_INFO,
    },
    "trl": {"prompt": _MESSAGES, "solution": _TEXT, "data_source": _TEXT, "extra": _TEXT},
    "openrlhf": {"input": _MESSAGES, "label": _TEXT, "datasource": _TEXT, "extra": _TEXT},
    "open_instruct": {"messages": _MESSAGES, "ground_truth": _TEXTS, "dataset": _TEXTS, "extra": _TEXT},
    "nemo_rl": {"input": _TEXT, "output": _TEXT, "data_source": _TEXT, "extra": _TEXT},
}


class PromptProblem(StrEnum):
    """Why a layout cannot hold a prompt, as part of a sentence."""

    TOOLS = "have tools, which have no column"
    TEMPLATE_KWARGS = "have template arguments of their own, which have no column"
    FIELDS = "have messages with more than a role and text"
    TURNS = "are not a single user message"
    IMAGE = "contain <image>, for which OpenRLHF puts an image"
    SOURCES = "have several data sources"
    TRUTHS = "have several data sources and not a list of as many ground truths"
    NOT_TEXT = "have a ground truth that is not text"


_REMEDIES: Mapping[PromptProblem, str] = {
    PromptProblem.TOOLS: "remove the rows with tools, or delete the export",
    PromptProblem.TEMPLATE_KWARGS: "set template.chat_template_kwargs for all rows instead",
    PromptProblem.FIELDS: "remove the other fields, or the rows",
    PromptProblem.TURNS: "choose another layout",
    PromptProblem.IMAGE: "remove the rows with <image>, or choose another layout",
    PromptProblem.SOURCES: "choose layout: open_instruct, or another format.source_field",
    PromptProblem.TRUTHS: "give each data source its ground truth",
    PromptProblem.NOT_TEXT: "set ground_truth: json, or format.ground_truth_pattern",
}


class RLPrompts(TableExport):
    """Prompts and their ground truths for verl, SkyRL, TRL, OpenRLHF, open-instruct and NeMo-RL."""

    MEANT_BY: ClassVar = ("trl", "grpo", "rl")

    CONVENTION: ClassVar[LabelConvention] = "none"
    OBJECTIVES: ClassVar[frozenset[Objective]] = frozenset({"prompts"})

    kind: Literal["rl_prompts"] = "rl_prompts"
    """Messages and ground truths for trainers of reinforcement learning, which render the messages themselves."""
    unit: Literal["unpacked"] = "unpacked"
    """Prompts one by one."""
    layout: PromptLayout = "verl"
    """Which trainer's columns."""
    ground_truth: Literal["text", "json"] = "text"
    """`text`: ground truths are texts, and any other is an error; `json`: every ground truth as JSON text."""
    env_class: str | None = None
    """With `skyrl`, which needs it: the environment that judges the answers."""

    def refuse(self, summary: RecipeSummary) -> None:
        """Refuse SkyRL's rows without an environment, and an environment for other trainers."""
        super().refuse(summary)
        if (self.layout == "skyrl") != bool(self.env_class):
            raise ConfigError(
                f"env_class: {self.env_class or 'null'} with layout: {self.layout}; SkyRL needs the name of an "
                "environment, such as gsm8k, and the others take none; "
                + ("set env_class" if self.layout == "skyrl" else "delete env_class")
            )

    def lay_out(self, index: ExportIndex) -> ExportLayout:
        """Cut the order into files."""
        notes = {
            "layout": self.layout,
            "ground_truth": self.ground_truth,
            "env_class": self.env_class,
            "longest_prompt": int(index.lengths.max()) if len(index.lengths) else 0,
        }
        return ExportLayout(super().lay_out(index).jobs, notes=notes)

    def make_table(self, chunk: SequenceBatch, file: WrittenFile, context: ExportContext) -> pa.Table:
        """Return prompts as rows; the note counts those that the layout cannot hold, with the first row by problem."""
        names = ("messages", "tools", "template_kwargs", "ground_truth", "data_source", "extra")
        values = zip(*(chunk.columns[name].to_pylist() for name in names), strict=True)
        abilities = chunk.datasets.take(pa.array(np.repeat(np.arange(len(chunk)), np.diff(chunk.sequence_offsets))))
        about = zip(chunk.example_ids.to_pylist(), abilities.to_pylist(), strict=True)
        refused: dict[PromptProblem, tuple[int, str]] = file.note or {}
        rows: list[dict[str, Any]] = []
        for index, ((messages, tools, kwargs, truth, sources, extra), (example_id, ability)) in enumerate(
            zip(values, about, strict=True), file.first_sequence + file.sequences
        ):
            row_id = example_id.rpartition("#")[0]
            prompt = self._read_prompt(messages, tools, kwargs, truth, len(sources))
            if isinstance(prompt, PromptProblem):
                count, first_row = refused.get(prompt, (0, row_id))
                refused[prompt] = count + 1, first_row
            else:
                info = {"split": self.split, "index": index, "row_id": row_id, "extra": extra}
                rows.append(self._make_row(*prompt, sources, ability, info))
        file.note = refused
        file.add(chunk, trained=0)
        columns = [pa.field(name, dtype) for name, dtype in _COLUMNS[self.layout].items()]
        return pa.Table.from_pylist(rows, schema=pa.schema(columns))

    def _read_prompt(
        self, messages: str, tools: str | None, template_kwargs: str | None, ground_truth: str | None, sources: int
    ) -> tuple[list[dict[str, Json]], list[str]] | PromptProblem:
        """Return a prompt's messages and a ground truth for each data source, or why the layout cannot hold it."""
        prompt: list[dict[str, Json]] = from_json(messages)
        if tools is not None:
            return PromptProblem.TOOLS
        if template_kwargs is not None and from_json(template_kwargs):
            return PromptProblem.TEMPLATE_KWARGS
        if any(set(message) != {"role", "content"} for message in prompt):
            return PromptProblem.FIELDS
        if self.layout == "nemo_rl" and [message["role"] for message in prompt] != ["user"]:
            return PromptProblem.TURNS
        if self.layout == "openrlhf" and any("<image>" in message["content"] for message in prompt):
            return PromptProblem.IMAGE
        if sources > 1 and self.layout != "open_instruct":
            return PromptProblem.SOURCES
        truth: Json = None if ground_truth is None else from_json(ground_truth)
        truths: Json = truth if sources > 1 else [truth]
        if type(truths) is not list or len(truths) != sources:
            return PromptProblem.TRUTHS
        if self.ground_truth == "json":
            return prompt, [to_json(value) for value in truths]
        return (prompt, truths) if all(type(value) is str for value in truths) else PromptProblem.NOT_TEXT

    def _make_row(
        self, messages: list[dict[str, Json]], truths: list[str], sources: list[str], ability: str, info: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a row of the layout."""
        [truth, *_], [source, *_] = truths, sources
        extra = {"extra": info["extra"]}
        match self.layout:
            case "verl":
                judged = {"style": "rule", "ground_truth": truth}
                about = {"ability": ability, "reward_model": judged, "extra_info": info}
                return {"data_source": source, "prompt": messages, **about}
            case "skyrl":
                judged = {"method": "rule", "ground_truth": truth}
                about = {"env_class": self.env_class, "reward_spec": judged, "extra_info": info}
                return {"data_source": source, "prompt": messages, **about}
            case "trl":
                return {"prompt": messages, "solution": truth, "data_source": source, **extra}
            case "openrlhf":
                return {"input": messages, "label": truth, "datasource": source, **extra}
            case "open_instruct":
                # With one verifier open-instruct makes such lists itself.
                return {"messages": messages, "ground_truth": truths, "dataset": sources, **extra}
            case "nemo_rl":
                return {"input": messages[0]["content"], "output": truth, "data_source": source, **extra}

    def finish(self, folder: Path, written: Sequence[WrittenFile], context: ExportContext) -> list[WrittenFile]:
        """Raise ConfigError if the layout cannot hold a prompt of any file."""
        refused: dict[PromptProblem, tuple[int, str]] = {}
        for problem, (count, row_id) in (entry for one in written for entry in one.note.items()):
            before, first_row = refused.get(problem, (0, row_id))
            refused[problem] = before + count, first_row
        if refused:
            counts = ", ".join(
                f"{count} {problem} ({first} is the first)" for problem, (count, first) in refused.items()
            )
            raise ConfigError(
                f"exports.{self.name}: layout {self.layout} cannot hold all prompts: {counts}; messages have a role "
                "and text, and a prompt one ground truth, text unless ground_truth: json; "
                + "; ".join(_REMEDIES[problem] for problem in refused)
            )
        return []

    def pointer(self, data: str, context: ExportContext) -> str:
        """Return the options or lines that open it."""
        files = f"{data}/*.parquet"
        match self.layout:
            case "verl":
                return f"data.train_files='{files}' data.prompt_key=prompt data.max_prompt_length={context.seq_len}"
            case "skyrl":
                return f"data.train_data=\"['{files}']\" trainer.max_prompt_length={context.seq_len}"
            case "trl":
                return f"{PARQUET_LOAD.format(data=data)}\nGRPOTrainer(…, reward_funcs=…, train_dataset=rows)"
            case "openrlhf":
                return (
                    f"--data.prompt_dataset '{files}' --data.input_key input --data.label_key label "
                    "--data.apply_chat_template"
                )
            case "open_instruct":
                # Its files are named one by one: it takes another path for a name on the hub.
                return (
                    f"--dataset_mixer_list $(for file in {files}; do echo $file 1.0; done) "
                    f"--max_prompt_token_length {context.seq_len}"
                )
            case "nemo_rl":
                return (
                    f"data:\n  max_input_seq_length: {context.seq_len + 1}   # a prompt must be shorter\n  train:\n"
                    f'    dataset_name: ResponseDataset\n    data_path: "{files}"\n    split: train\n'
                    "    input_key: input\n    output_key: output"
                )
