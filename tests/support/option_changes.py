"""Every option of a recipe, set to another valid value, and which of them a run reads."""

import contextlib
import copy
import json
import types
import typing
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from rowmill.build import runner
from rowmill.core.config import Config
from rowmill.core.errors import PipelineError
from rowmill.recipe import recipe
from rowmill.recipe.recipe import Execution, Recipe
from tests.support.recipes import CHAT, PAIR, TEXT, Workspace, chat, document, pair, sentence

OptionPath = tuple[str | int, ...]

BACKEND = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m"}

BY_HAND: dict[OptionPath, Any] = {
    ("tokenizer", "name"): "other_tokenizer",
    ("datasets", "*", "source", "train_urls"): ["data/other.jsonl"],
    ("datasets", "*", "source", "validation_urls"): ["data/other.jsonl"],
    ("datasets", "*", "source", "test_urls"): ["data/other.jsonl"],
    ("datasets", "*", "source", "pattern"): "*.jsonl",
    ("datasets", "*", "source", "sample_by"): "line",
    ("datasets", "*", "source", "delimiter"): ";",
    ("datasets", "*", "source", "quote"): "'",
    ("datasets", "*", "source", "escape"): "\\",
    ("datasets", "*", "source", "comment"): "#",
    ("datasets", "*", "source", "column_names"): ["who", "time", "sum", "prompt", "answer", "text"],
    ("datasets", "*", "source", "encoding"): "latin-1",
    ("datasets", "*", "source", "field"): "data",
    ("datasets", "*", "source", "skip"): 0,
    ("datasets", "*", "format", "table"): {
        "columns": {"who": {"type": "text"}, "time": {"type": "number"}, "amount": {"type": "integer", "use": False}}
    },
    ("datasets", "*", "filters", "decontaminate"): {
        "benchmarks": [{"name": "others", "urls": ["data/other.jsonl"], "fields": ["text"]}]
    },
    ("datasets", "*", "filters", "near_duplicates"): {"threshold": 0.9},
    ("datasets", "*", "filters", "leave_out"): ["data/left-out.jsonl"],
    ("datasets", "*", "filters", "decontaminate", "benchmarks", 0, "urls"): ["data/texts.jsonl"],
    ("datasets", "*", "filters", "decontaminate", "benchmarks", 0, "fields"): ["messages"],
    ("datasets", "*", "template", "chat_template"): "chatml",
    ("datasets", "*", "template", "template_now"): "2025-02-02T00:00:00",
    ("datasets", "*", "template", "on_dropped"): {"reasoning": "count"},
    ("datasets", "*", "reasoning", "think_tags"): [["<t>", "</t>"]],
    ("datasets", "*", "loss", "mask"): {"user": "train"},
    ("datasets", "tasks", "loss", "mask"): {"prompt": "train"},
    ("datasets", "*", "splits", "boundaries"): {"validation": 5},
    ("datasets", "*", "teacher"): {"base_url": "http://127.0.0.1:9/v1", "model": "m"},
    ("mixture", "train_weights"): {"chats": 1, "tasks": 2, "texts": 1, "table": 1, "series": 1},
    ("mixture", "max_train_batches"): {"tasks": 1},
    ("mixture", "num_validation_sequences"): {"tasks": 1},
    ("gates", "waivers"): [{"check": "fill", "dataset": "chats", "at_least": 0, "reason": "there are few rows"}],
    ("datasets", "table", "format", "generation", "backend", "base_url"): "http://127.0.0.1:8/v1",
    ("datasets", "series", "format", "generation", "backend"): BACKEND,
    ("datasets", "*", "format", "prompt", "template"): "Columns: {schema}",
    ("datasets", "series", "format", "time_series", "timestamp_column"): "amount",
    ("datasets", "series", "format", "data", "order_training_examples_by"): "amount",
    ("mixture", "target_budget"): 8,
    ("mixture", "experiment_budget"): 2,
}
"""Values that cannot be guessed from an option's type."""

_WEIGHTS = {"chats": 1, "tasks": 2, "texts": 1, "table": 1, "series": 1}
_TIME, _WHO = ("datasets", "chats", "splits", "time_key"), ("datasets", "chats", "splits", "group_key")
TOGETHER: dict[OptionPath, dict[OptionPath, Any]] = {  # pyrefly: ignore[bad-assignment]
    ("tokenizer", "revision"): {("tokenizer", "name"): "owner/name"},
    ("datasets", "chats", "splits", "boundaries"): {_TIME: "time"},
    ("datasets", "chats", "splits", "gap"): {_TIME: "time"},
    ("datasets", "chats", "splits", "crossing_groups"): {_TIME: "time", _WHO: "who"},
    ("datasets", "series", "format", "time_series", "timestamp_column"): {
        ("datasets", "series", "format", "data"): {"group_training_examples_by": "who"},
        ("datasets", "series", "format", "time_series", "timestamp_column"): "time",
    },
    **{
        ("datasets", name, "source", "sample_by"): {("datasets", name, "source", "train_urls"): ["data/other.txt"]}
        for name in _WEIGHTS
    },
    **{
        ("datasets", name, "source", option): {("datasets", name, "source", "train_urls"): ["data/other.csv"]}
        for name in _WEIGHTS
        for option in ("delimiter", "quote", "escape", "header", "skip", "comment", "column_names")
    },
    ("datasets", "chats", "loss", "allow_negative"): {("datasets", "chats", "loss", "weights"): True},
    **{("datasets", name, "packing", "share_prefixes"): {("exports",): []} for name in _WEIGHTS},
    **{
        ("datasets", name, "packing", "min_shared"): {
            ("exports",): [],
            **{("datasets", one, "packing", "share_prefixes"): True for one in _WEIGHTS},
        }
        for name in _WEIGHTS
    },
    ("partitions", "flops_linear"): {("partitions", "balance"): "flops"},
    ("mixture", "stop_strategy"): {("mixture", "train_weights"): _WEIGHTS},
    ("mixture", "block_rounding"): {("mixture", "train_weights"): _WEIGHTS},
    ("mixture", "target_budget"): {("mixture", "target_budget"): 4, ("mixture", "experiment_budget"): 4},
    ("mixture", "experiment_budget"): {("mixture", "target_budget"): 4, ("mixture", "experiment_budget"): 4},
}
"""Options without which another is refused; they are on both sides of the comparison."""

SHARED: frozenset[OptionPath] = frozenset(
    {("datasets", "*", "packing", "segment_multiple_of"), ("datasets", "*", "packing", "share_prefixes")}
)
"""Options that must be the same in all datasets; they are changed in all."""


def varied_chat(i: int) -> dict[str, Any]:
    """Return a conversation: most are plain, some have thoughts or calls, or are too long."""
    row = chat(i, turns=1 + i % 3, words=80 if i % 8 == 7 else 8) | {"who": f"w{i % 9}", "time": i}
    if i % 8 == 3:
        row["messages"][-1]["reasoning_content"] = sentence(i + 7, 20)
    if i % 8 == 4:
        row["messages"][-1]["content"] = f"<think>{sentence(i + 5, 12)}</think>{sentence(i, 6)}"
    if i % 8 == 5:
        call = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": {"to": i}}}
        row["tools"] = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
        row["messages"] += [
            {"role": "user", "content": f"Count to {i}."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": str(i)},
            {"role": "assistant", "content": f"It is {i}."},
        ]
    return row


def write_project(folder: Path) -> Workspace:
    """Write a project with conversations, pairs, texts, records, generated texts and an export."""
    made = Workspace(folder)
    made.write("other.jsonl", [chat(i) | pair(i) | document(i) | {"who": i, "time": i, "amount": i} for i in range(9)])
    sources = {
        "chats": made.write("chats.jsonl", [varied_chat(i) for i in range(40)]),
        "tasks": made.write("tasks.jsonl", [pair(i, words=200 if i % 8 == 7 else 8) for i in range(40)]),
        "texts": made.write("texts.jsonl", [document(i, words=400 if i % 8 == 7 else 40) for i in range(40)]),
        "table": made.write("table.jsonl", [{"who": i % 9, "time": i, "amount": i * i} for i in range(40)]),
        "series": made.write("series.jsonl", [{"who": i % 9, "time": i, "amount": i * i + 1} for i in range(40)]),
    }
    cells = [
        "who,time,amount,prompt,answer,text",
        *(f'{i},{i},{i * i},Why {i}?,"Since {i}, so.",Text {i}.' for i in range(9)),
    ]
    made.write("other.csv", "".join(f"{line}\n" for line in cells).encode())
    made.write("other.txt", b"One line.\n\nAnother paragraph.\n")
    data = {"group_training_examples_by": "who", "order_training_examples_by": "time"}
    kinds: dict[str, dict[str, Any]] = {
        "chats": CHAT,
        "tasks": PAIR,
        "texts": TEXT,
        "table": {"kind": "records", "data": data, "generation": {"backend": BACKEND}},
        "series": {"kind": "records", "data": data, "time_series": {"is_timeseries": True}, "generation": {}},
    }
    datasets: dict[str, dict[str, Any]] = {
        name: {"source": {"train_urls": [url]}, "format": kinds[name]} for name, url in sources.items()
    }
    benchmark = {"name": "others", "urls": ["data/other.jsonl"], "fields": ["text"]}
    # Its template prints thoughts and calls.
    datasets["chats"]["template"] = {"chat_template": "qwen3"}
    datasets["chats"]["filters"] = {"decontaminate": {"benchmarks": [benchmark]}, "near_duplicates": {}}
    made.recipe(
        datasets,
        tokenizer={"name": "tokenizer"},
        mixture={"batch_size": 4, "steps": 4},
        exports=[{"kind": "native", "name": "shards"}],
    )
    other = made.folder / "other_tokenizer"
    other.mkdir()
    for file in (made.folder / "tokenizer").iterdir():
        content = json.loads(file.read_text(encoding="utf-8"))
        if file.name == "tokenizer_config.json":
            content["pad_token"] = "<|im_start|>"
        (other / file.name).write_text(json.dumps(content), encoding="utf-8")
    return made


def options_of(model: BaseModel, path: OptionPath = ()) -> Iterator[tuple[OptionPath, BaseModel]]:
    """Walk a recipe's models; yield each option's path with the model that has it."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        here = (*path, name)
        if path == () and name in ("name", "execution"):
            continue
        if (path == ("gates",) and name != "waivers") or name in getattr(model, "FILLED_IN", ()):
            continue
        if isinstance(value, BaseModel):
            yield from options_of(value, here)
        elif isinstance(value, dict) and value and all(isinstance(one, BaseModel) for one in value.values()):
            for key, one in value.items():
                yield from options_of(one, (*here, key))
        elif isinstance(value, tuple) and value and all(isinstance(one, BaseModel) for one in value):
            for number, one in enumerate(value):
                yield from options_of(one, (*here, number))
        elif not has_one_value(type(model).model_fields[name].annotation):
            yield here, model


def has_one_value(annotation: Any) -> bool:
    return typing.get_origin(annotation) is Literal and len(typing.get_args(annotation)) == 1


@dataclass(frozen=True)
class OptionChange:
    """One option set to another valid value: the recipe before and after.

    `together` are the options without which the other value is refused; they are set on both sides.
    """

    path: OptionPath
    option: tuple[str, str]
    """The name of the model that has the option, and the option's own."""
    value: Any
    before: Recipe
    after: Recipe
    together: Mapping[OptionPath, Any]

    @property
    def name(self) -> str:
        """The option's path in a recipe."""
        return ".".join(map(str, self.path))

    def write(self, values: dict[str, Any]) -> None:
        """Set the option in the values of a recipe that has `together`."""
        places = [("datasets", name, *self.path[2:]) for name in values["datasets"]]
        for place in places if pattern(self.path) in SHARED else [self.path]:
            put(values, place, self.value)


def change_option(
    workspace: Workspace, written: Mapping[str, Any], path: OptionPath, model: BaseModel
) -> OptionChange | None:
    """Return the first change of an option that gives a valid recipe; None if there is none."""
    together = limit_to_datasets(TOGETHER.get(path, {}), written)
    before = copy.deepcopy(dict(written))
    for other, value in together.items():
        put(before, other, value)
    try:
        base = parsed(workspace, before)
    except PipelineError:
        return None
    option = (type(model).__name__, str(path[-1]))
    for value in candidates(path, model, option[1]):
        limited = limit_to_datasets({path: value}, written)[path]
        change, values = OptionChange(path, option, limited, base, base, together), copy.deepcopy(before)
        change.write(values)
        with contextlib.suppress(PipelineError):
            after = parsed(workspace, values)
            if json.dumps(get(after, path), default=str) != json.dumps(get(base, path), default=str):
                return replace(change, after=after)
    return None


def limit_to_datasets(options: Mapping[OptionPath, Any], written: Mapping[str, Any]) -> dict[OptionPath, Any]:
    """Return options without values for datasets that a recipe does not have."""
    limited: dict[OptionPath, Any] = {}
    for path, value in options.items():
        if path[0] == "datasets" and path[1] not in written["datasets"]:
            continue
        if path[0] == "mixture" and isinstance(value, dict):
            limited[path] = {name: one for name, one in value.items() if name in written["datasets"]}
        else:
            limited[path] = value
    return limited


def pattern(path: OptionPath) -> OptionPath:
    return ("datasets", "*", *path[2:]) if path[0] == "datasets" else path


def candidates(path: OptionPath, model: BaseModel, name: str) -> Iterator[Any]:
    for known in (path, pattern(path)):
        if known in BY_HAND:
            yield BY_HAND[known]
            return
    value = getattr(model, name)
    yield from literals(type(model).model_fields[name].annotation)
    if isinstance(value, bool):
        yield not value
    if isinstance(value, int | float):
        yield from (value + 1, value * 2, value / 2)
    yield from (True, False, 1, 2, 3, 16, 0.5, 0.25, "other", ["other"], {"other": "other"}, "2025-02-02", 100, "60")


def literals(annotation: Any) -> Iterator[Any]:
    """Yield the members of the literals inside a type."""
    if typing.get_origin(annotation) is Literal:
        yield from typing.get_args(annotation)
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for inner in typing.get_args(annotation):
            yield from literals(inner)


def put(values: Any, path: OptionPath, value: Any) -> None:
    for word in path[:-1]:
        values = values[word] if isinstance(word, int) else values.setdefault(word, {})
    values[path[-1]] = value


def get(model: Any, path: OptionPath) -> Any:
    for word in path:
        model = getattr(model, str(word)) if isinstance(model, BaseModel) else model[word]
    return model


def parsed(workspace: Workspace, values: Mapping[str, Any]) -> Recipe:
    return recipe.parse_recipe(values, name="mini", where="mini.yaml", base=workspace.folder)


@contextlib.contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Generator[set[tuple[str, str]]]:
    """Record which options of which models are read, except during validation."""
    read: set[tuple[str, str]] = set()
    depth = [0]

    def spy(self: Config, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not depth[0] and name in type(self).model_fields and not isinstance(value, BaseModel | Execution):
            read.add((type(self).__name__, name))
        return value

    def quietly(model: type[Config], content: str | bytes) -> Config:
        depth[0] += 1
        try:
            return super(Config, model).model_validate_json(content)
        finally:
            depth[0] -= 1

    monkeypatch.setattr(Config, "__getattribute__", spy, raising=False)
    # A worker reads the options that it was sent, once in a process.
    monkeypatch.setattr(Config, "model_validate_json", classmethod(quietly), raising=False)
    # It looks ahead at later steps, and so reads all options; the tokenizer of these tests exists.
    monkeypatch.setattr(runner, "require_ready", lambda *_: None)
    try:
        yield read
    finally:
        monkeypatch.undo()
