"""Every option of every kind, set: it changes what is built, or it is an error; none is accepted and ignored.

The options are found by walking the models, so that one which is added to a group is tried with every kind that does
not refuse it.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from rowmill.build import runner, steps
from rowmill.build.steps import Project
from rowmill.core.errors import ConfigError, PipelineError
from rowmill.kinds import catalog
from rowmill.recipe.recipe import Recipe
from rowmill.schema.manifest import Manifest, StageKey
from tests.support.option_changes import (
    BACKEND,
    OptionPath,
    candidates,
    get,
    literals,
    options_of,
    parsed,
    put,
    watched,
)
from tests.support.recipes import Workspace, chat, document, pair, sentence, write_tokenizer

pytestmark = pytest.mark.slow

TEMPLATE = (
    "[{{ strftime_now('%Y') }}]{% if tools %}{{ tools | tojson }}\n{% endif %}{% if style %}({{ style }}){% endif %}"
    "{% if enable_thinking %}(think){% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }} "
    "{% if m['reasoning_content'] %}<think>{{ m['reasoning_content'] }}</think>{% endif %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<call>{{ c['id'] }} {{ c['function']['name'] }} "
    "{{ c['function']['arguments'] | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Prints everything that an option can change: the date, tools, ids of calls, reasoning, arguments of the template."""

NINE_LETTER_IDS = (
    "{% for m in messages %}{% for c in m['tool_calls'] or [] %}{% if c['id'] | length != 9 %}"
    "{{ raise_exception('an id of nine letters') }}{% endif %}{% endfor %}{% endfor %}"
)
NO_END_OF_TURN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"

TOOLS = [{"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}]


def answer(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def ask(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def talk(number: int, *messages: Any, **columns: Any) -> dict[str, Any]:
    """Return a conversation that begins with a question."""
    return {"messages": [ask(f"q{number}"), *messages], **columns}


MORE = (ask("q"), answer("a"))
CALL = {"id": "my_call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "x"}'}}
CALLED = (answer("", tool_calls=[CALL]), {"role": "tool", "content": "r", "tool_call_id": "my_call_1"})


ODD_CHATS: Sequence[Mapping[str, Any]] = [
    talk(1, answer("a1", reasoning_content=sentence(1, 12))),
    talk(2, answer("a2", why="hidden")),
    talk(3, answer("<think>inside</think>a3")),
    talk(4, answer("<t>other tags</t>a4")),
    talk(5, {"role": "critic", "content": "hm"}, answer("a5")),
    talk(6, {"role": "model2", "content": "from another"}, answer("a6")),
    talk(7, answer("a7", keep=False), *MORE),
    talk(8, answer("a8", weight=0.5), *MORE),
    talk(29, answer("a29", weight=-0.5), *MORE),
    talk(9, *CALLED, answer("a9"), tools=TOOLS),
    talk(10, answer("a10"), my_tools=TOOLS),
    {"messages": [ask("q11 <|im_end|> here"), answer("a11")]},
    {"messages": [{"role": "system", "content": "be brief"}, ask("q12"), answer("a12"), ask("unanswered")]},
    talk(13, {"role": "thought", "content": "a thought"}, answer("a13")),
    talk(14, answer("a14"), chat_template_kwargs={"style": "formal"}),
    talk(15, answer("a15"), my_kwargs={"style": "loose"}),
    {"prompt": "q16", "response": "a16"},
    {"prompt": sentence(13, 40), "response": "a16"},
    {"prompt": "q17", "context": "of this", "response": "a17"},
    {"prompt": "q18", "about": "of that", "response": "a18"},
    {"my_prompt": "q19", "my_response": "a19"},
    {"my_messages": [ask("q20"), answer("a20")]},
    {"messages": [{"speaker": "user", "says": "q21"}, {"speaker": "assistant", "says": "a21"}]},
    {"conversations": [{"from": "human", "value": "q22"}, {"from": "gpt", "value": "a22"}]},
    talk(23, answer("a23"), remark=sentence(5, 60)),
    talk(25, answer("a25"), sys="From a column."),
    {"messages": [{"role": "system", "content": "own"}, ask("q26"), answer("a26")], "sys": "From a column."},
    {"messages": [ask(sentence(9, 300)), answer(sentence(10, 30))]},
    {"messages": [ask(sentence(11, 30)), answer(sentence(12, 300))]},
    talk(27, answer("a27", reasoning_content=sentence(2, 9)), ask("q"), answer("b", why="w"), ask("last"), answer("c")),
    talk(28, answer("<think>in an early turn</think>a28"), ask("q"), answer("<t>x</t>b"), ask("last"), answer("c")),
    talk(24, answer("a24", name="bo"), ask("q"), {"role": "function", "content": "f"}, answer("b")),
]
"""Conversations each of which gives some option something to do."""


def add_keys(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "who": f"w{i % 9}", "time": i, "topic": "ab"[i % 2]} for i, row in enumerate(rows)]


PLAIN_ROWS = 12
"""Rows without anything odd, of the kinds whose rows take longest: an ignored option has no effect in any number."""


def list_chats() -> list[dict[str, Any]]:
    plain = [chat(i, turns=1 + i % 6) for i in range(PLAIN_ROWS)]
    alike = [{"messages": [ask(sentence(7, 40)), answer(sentence(8, 40) + f" {i}")]} for i in range(4)]
    return add_keys([*plain, *alike, plain[3], *ODD_CHATS])


def list_pairs() -> list[dict[str, Any]]:
    plain = [pair(i, words=4 + 3 * i) for i in range(40)]
    odd = [{"prompt": "q1", "context": "c", "answer": "a"}, {"prompt": "q2", "about": "c", "answer": "a"}]
    other = [{"q": "q3", "a": "a3"}, {"prompt": "q4 <|im_end|>", "answer": "a4"}]
    odd += [
        {"prompt": "riv", "answer": "er stone"},
        {"prompt": "q6", "answer": sentence(3, 600)},
        {"prompt": sentence(4, 600), "answer": "a7"},
    ]
    return add_keys([*plain, plain[3], *odd, *other, {"prompt": "q5", "answer": "a5", "remark": sentence(5, 60)}])


def list_texts() -> list[dict[str, Any]]:
    plain = [document(i, words=10 + 9 * i) for i in range(40)]
    plain += [{"text": f"{sentence(7, 12)} {end}"} for end in ("one", "two")]
    return add_keys(
        [*plain, plain[3], {"body": "other"}, {"text": "t5", "remark": sentence(5, 60)}, {"text": "<|im_end|> t"}]
    )


def list_prompts() -> list[dict[str, Any]]:
    plain = [
        {"prompt": f"What is {i} and one? {sentence(i, 4 + i)}", "answer": f"it is #{i}", "unit": "m"}
        for i in range(PLAIN_ROWS)
    ]
    odd = [
        {"prompt": "q1", "context": "c", "answer": "1"},
        {"prompt": "q2", "about": "c", "answer": "1"},
        {"prompt": "q3"},
        {"prompt": [ask("q4"), answer("given")], "answer": "1"},
        {"my_prompt": "q5", "answer": "1"},
        {"prompt": "q6", "truth": "2"},
        {"prompt": "q7", "answer": "1", "data_source": "d", "origin": "o"},
        {"prompt": "q8", "answer": "1", "remark": sentence(5, 60)},
        *(
            {"prompt": row["messages"][:-1], "answer": "1", **{k: v for k, v in row.items() if k != "messages"}}
            for row in ODD_CHATS
            if "messages" in row
        ),
    ]
    return add_keys([*plain, plain[3], *odd])


def list_preferences() -> list[dict[str, Any]]:
    plain = [
        {"prompt": f"{sentence(i, 4 + i)}?", "chosen": f"yes {i}", "rejected": f"no {i}", "margin": i / 10, "gap": 1.0}
        for i in range(PLAIN_ROWS)
    ]
    odd = [
        {"prompt": "q1", "context": "c", "chosen": "y", "rejected": "n"},
        {"prompt": "q2", "about": "c", "chosen": "y", "rejected": "n"},
        {"my_prompt": "q3", "chosen": "y", "rejected": "n"},
        {"prompt": "q4", "better": "y", "rejected": "n"},
        {"prompt": "q5", "chosen": "y", "worse": "n"},
        {"prompt": "q6", "completion": "y", "label": True},
        {"prompt": "q7", "my_completion": "y", "label": True},
        {"prompt": "q8", "completion": "y", "good": True},
        {
            "prompt": [{"role": "user", "says": "q11"}],
            "chosen": [{"role": "assistant", "says": "y"}],
            "rejected": [{"role": "assistant", "says": "n"}],
        },
        {"prompt": "q9", "chosen": "y", "rejected": "n", "remark": sentence(5, 60)},
        *(
            {
                "prompt": row["messages"][:-1],
                "chosen": row["messages"][-1:],
                "rejected": [answer("no")],
                **{k: v for k, v in row.items() if k != "messages"},
            }
            for row in ODD_CHATS
            if "messages" in row
        ),
        *(
            {"prompt": [ask("q10")], "chosen": row["messages"][1:], "rejected": [answer("no")]}
            for row in ODD_CHATS
            if "messages" in row and row["messages"][0].get("role") == "user"
        ),
    ]
    return add_keys([*plain, plain[3], *odd])


def list_tokens() -> list[dict[str, Any]]:
    plain = [
        {
            "input_ids": [3 + i % 90, *range(3, 10 + 2 * i)],
            "loss_mask": [0, *[1] * (7 + 2 * i)],
            "logprobs": [0.5] * (8 + 2 * i),
            "reward": 1.0,
        }
        for i in range(40)
    ]
    plain += [
        {"input_ids": [5, 7, *[3 + k % 90 for k in range(400 + i)]], "loss_mask": [0, 1, *[1] * (400 + i)]}
        for i in range(2)
    ]
    plain += [{"input_ids": [9, 8, 7, 6, end], "loss_mask": [0, 1, 1, 1, 1]} for end in (4, 5)]
    odd: list[dict[str, Any]] = [
        {"my_ids": [3, 4, 5], "loss_mask": [0, 1, 1]},
        {"input_ids": [3, 4, 5], "my_mask": [0, 0, 1]},
    ]
    odd.append({"input_ids": [3, 4, 6], "loss_mask": [0, 1, 1], "trainable": True})
    return add_keys([*plain, plain[3], *odd])


def list_records() -> list[dict[str, Any]]:
    rows = [
        {"who": f"w{i * i % 11}", "time": f"2024-01-{1 + i % 28:02d}", "amount": i * i, "name": sentence(i, 1 + i % 7)}
        for i in range(60)
    ]
    odd = [
        {"who": "w0", "time": "2024-02-01", "amount": 1, "name": "<|im_end|>"},
        {"who": "w1", "time": "2024-02-02", "amount": 2, "name": sentence(1, 700)},
    ]
    return [row | {"topic": "ab"[i % 2]} for i, row in enumerate([*rows, *odd])]


GROUPED = {
    "kind": "records",
    "data": {"group_training_examples_by": "who", "max_sequences_per_example": 1},
    "assembly": {"on_overflow": "reject"},
}

PYTHON = """
from rowmill.formats import RowFormat
from rowmill.schema.rows import Row


class Mine(RowFormat):
    def __init__(self, greeting="Hello"):
        self.greeting = greeting

    def rows(self, record):
        if "messages" in record and "speaker" not in record["messages"][0]:
            tools = tuple(record.get("tools") or ()) or None
            return Row("conversation", messages=tuple(record["messages"]), tools=tools)
        if "prompt" in record:
            return Row("pair", text=record["prompt"], output=record["response"])
        return Row("text", text=f"{self.greeting} {record}"[: 30 if "my_prompt" in record else 200])
"""


KINDS: dict[str, tuple[Mapping[str, Any], list[dict[str, Any]]]] = {
    "chat": ({"kind": "chat"}, list_chats()),
    "supervised": ({"kind": "supervised", "input_field": "prompt", "output_field": "answer"}, list_pairs()),
    "text": ({"kind": "text"}, list_texts()),
    "auto": ({"kind": "auto"}, add_keys([*list_chats(), *list_texts()])),
    "records": ({"kind": "records", "assembly": {"on_overflow": "reject"}}, list_records()),
    "records in groups": (GROUPED, list_records()),
    "records in series": (
        {
            **GROUPED,
            "data": {"group_training_examples_by": "who", "order_training_examples_by": "time"},
            "time_series": {"is_timeseries": True},
            "generation": {"backend": BACKEND},
        },
        list_records(),
    ),
    "python": ({"kind": "python", "class": "mine:Mine"}, list_chats()),
    "prompts": ({"kind": "prompts"}, list_prompts()),
    "preference": ({"kind": "preference"}, list_preferences()),
    "tokens": ({"kind": "tokens"}, list_tokens()),
}

SEQ_LEN = 300

VALUES: dict[str, Any] = {
    "format.role_field": "speaker",
    "format.content_field": "says",
    "format.role_map": {"critic": "user"},
    "format.system_prompt": "sys",
    "format.assistant_roles": ["assistant", "model2"],
    "format.message_flags": ["keep"],
    "format.ignore_columns": ["remark", "trainable"],
    "format.domain_key": "topic",
    "format.dataset_schema": "messages",
    "format.messages_field": "my_messages",
    "format.prompt_fields": ["my_prompt"],
    "format.context_fields": ["about"],
    "format.response_fields": ["my_response"],
    "format.input_field": "q",
    "format.output_field": "a",
    "format.text_field": "body",
    "format.ground_truth_fields": ["truth"],
    "format.ground_truth_pattern": "#(.*)",
    "format.source_field": "origin",
    "format.carry_fields": ["unit"],
    "format.chosen_fields": ["better"],
    "format.rejected_fields": ["worse"],
    "format.completion_fields": ["my_completion"],
    "format.label_fields": ["good"],
    "format.margin_field": "gap",
    "format.ids_fields": ["my_ids"],
    "format.mask_fields": ["my_mask"],
    "format.token_fields": ["logprobs"],
    "format.row_fields": ["reward"],
    "reasoning.reasoning_keys": ["why"],
    "reasoning.think_tags": [["<t>", "</t>"]],
    "reasoning.think_max_tokens": 3,
    "reasoning.think_role": "thought",
    "tools.tools_fields": ["my_tools"],
    "tools.tool_ids": "keep",
    "template.chat_template": "chatml",
    "template.template_kwargs": {"style": "plain"},
    "template.chat_template_kwargs": "my_kwargs",
    "template.template_now": "2020-02-02T00:00:00",
    "template.on_dropped": {"reasoning": "reject"},
    "loss.mask": {"user": "train"},
    "filters.min_chars": 60,
    "filters.max_chars": 100,
    "splits.validation": 0.4,
    "splits.test": 0.4,
    "splits.group_key": "who",
    "splits.time_key": "time",
    "splits.max_rows": 5,
    "splits.boundaries": {"validation": 30},
    "format.class_name": "mine:Other",
    "format.options": {"greeting": "Hi"},
    "format.generation": {"num_records": 5},
    "format.time_series.timestamp_column": "time",
    "format.time_series.timestamp_interval_seconds": 3600,
    "format.time_series.timestamp_format": "%Y-%m-%d",
    "format.time_series.start_timestamp": "2020-01-01",
    "format.time_series.stop_timestamp": "2030-01-01",
    "format.data.order_training_examples_by": "amount",
    "records in groups: format.data.max_sequences_per_example": 2,
    "records in series: format.time_series.timestamp_column": "amount",
    "records in series: format.time_series.timestamp_format": "elapsed_seconds",
    "records in series: format.generation.backend.base_url": "http://127.0.0.1:8/v1",
    "records in groups: splits.group_key": "topic",
    "records in series: splits.group_key": "topic",
    "packing.ignore_token_id": 2,
    "tokens: packing.ignore_token_id": 5,
    "packing.group_tokens": 1,
    "packing.min_shared": 1,
    "records in series: packing.min_shared": 4000,
    "teacher": {"base_url": "http://127.0.0.1:9/v1", "model": "m"},
    "loss.finish": "STOP",
    "supervised: loss.mask": {"prompt": "train"},
}
"""Values by an option's name that have something to do in these rows."""

TOGETHER: dict[str, dict[str, Any]] = {
    "format.on_existing_system": {"format.system_prompt": "sys"},
    "tokens: truncation.truncate_side": {"truncation.overlong": "truncate", "truncation.token_cut": "allow"},
    "tokens: truncation.token_cut": {"truncation.overlong": "truncate", "truncation.token_cut": "allow"},
    "tokens: packing.slice_strategy": {"truncation.overlong": "keep", "packing.slice_strategy": "drop"},
    "preference: packing.pack_strategy": {"packing.pack": True},
    "preference: packing.max_segments_per_example": {"packing.pack": True},
    "preference: packing.segment_multiple_of": {"packing.pack": True},
    "text: packing.max_segments_per_example": {"packing.pack_strategy": "best_fit"},
    "text: packing.slice_strategy": {"packing.pack_strategy": "best_fit"},
    "loss.finish": {"template.chat_template": {"text": NO_END_OF_TURN}},
    "loss.allow_negative": {"loss.weights": True},
    "packing.tail": {"packing.pack_strategy": "concat"},
    "packing.min_shared": {"packing.share_prefixes": True},
    "splits.gap": {"splits.time_key": "time", "splits.validation": 0.3},
    "splits.crossing_groups": {"splits.time_key": "time", "splits.group_key": "who", "splits.validation": 0.3},
    "tools.tool_ids": {"template.chat_template": {"text": NINE_LETTER_IDS + TEMPLATE}},
    "template.on_dropped": {"template.chat_template": "llama3", "reasoning.think_mode": "keep"},
    "splits.seed": {"splits.validation": 0.3},
    "splits.boundaries": {"splits.time_key": "time"},
}
"""Options without which another one has nothing to do; they are on both sides of the comparison."""


HAS_EFFECT_ELSEWHERE: Mapping[str, str] = {
    "packing.group_tokens": "a group is made of whole parts of 512 KiB: `stages/test_pack_groups.py`",
    "template.verify_render": "it decides how many rows are rendered twice, which changes only rows that a template "
    "prints otherwise the second time: `conversation/test_rendering.py`",
    "format.generation.backend.api_key_env": "the name of a variable, read when texts are generated",
}
"""Options that a few rows show no effect of; that a stage reads them is still demanded where it runs here."""

VARIANTS: Mapping[str, Sequence[str]] = {
    **{name: (name,) for name in KINDS if not name.startswith("records in")},
    # Tables are read in three ways, and some options belong to one of them.
    "records": ("records", "records in groups", "records in series"),
}


@dataclass
class Trial:
    """A project of one dataset, and what its recipes came to."""

    name: str
    workspace: Workspace
    monkeypatch: pytest.MonkeyPatch
    known: dict[str, dict[StageKey, str]] = field(default_factory=dict[str, dict[StageKey, str]])

    def list_options(self) -> list[tuple[OptionPath, BaseModel]]:
        """Return the options of the dataset but those of its source, which are the same for all kinds."""
        recipe = parsed(self.workspace, self.written)
        return [(p, model) for p, model in options_of(recipe) if p[:2] == ("datasets", "rows") and p[2] != "source"]

    @cached_property
    def project(self) -> Project:
        return self.workspace.project

    @cached_property
    def _read(self) -> dict[str, Any]:
        values: dict[str, Any] = yaml.safe_load(self.workspace.config.read_text(encoding="utf-8"))
        return values

    @property
    def written(self) -> dict[str, Any]:
        """A copy of what the recipe's file holds, to be changed."""
        return copy.deepcopy(self._read)

    def try_option(self, path: OptionPath, model: BaseModel) -> str:
        """Set an option; return `effect`, `error` or `refused`, or how it was ignored."""
        before, base = self.prepare(path)
        outcome, refusals = "no valid value", set[str]()
        for value in self.iterate_values(path, model):
            values = copy.deepcopy(before)
            put(values, path, value)
            try:
                after = parsed(self.workspace, values)
            except PipelineError as error:
                refusals.add("refused" if "does not read" in str(error) else "error")
                continue
            if get(after, path) == get(base, path):
                continue
            known = self.run_once(base)
            try:
                versions, read = self.run(after, known)
            except PipelineError:
                return "error"
            if versions != known:
                return "effect"
            outcome = "no effect" if (type(model).__name__, str(path[-1])) in read else "not read"
        if outcome != "no valid value":
            return outcome
        # A guess of another type says nothing about the option.
        is_of_its_type = self.find_value(path) is not None or has_few_values(model, str(path[-1]))
        return "refused" if refusals == {"refused"} else "error" if is_of_its_type else outcome

    def prepare(self, path: OptionPath) -> tuple[dict[str, Any], Recipe]:
        """Return the recipe in which the option has something to do, if the kind has such a recipe."""
        together = self.written
        for other, value in TOGETHER.get(f"{self.name}: {name_of(path)}", TOGETHER.get(name_of(path), {})).items():
            put(together, ("datasets", "rows", *other.split(".")), value)
        with contextlib.suppress(PipelineError):
            return together, parsed(self.workspace, together)
        return self.written, parsed(self.workspace, self.written)

    def iterate_values(self, path: OptionPath, model: BaseModel) -> Iterator[Any]:
        found = self.find_value(path)
        if found is not None:
            yield found
        else:
            yield from candidates(path, model, str(path[-1]))

    def find_value(self, path: OptionPath) -> Any:
        return VALUES.get(f"{self.name}: {name_of(path)}", VALUES.get(name_of(path)))

    def run_once(self, recipe: Recipe) -> dict[StageKey, str]:
        text = recipe.model_dump_json()
        if text not in self.known:
            self.known[text] = self.run(recipe)[0]
        return self.known[text]

    def run(
        self, recipe: Recipe, known: Mapping[StageKey, str] | None = None
    ) -> tuple[dict[StageKey, str], frozenset[tuple[str, str]]]:
        """Make a recipe's outputs; return their versions, and the options that were read meanwhile.

        What comes after a version other than the known one is not made. Stages that call a model are not run; their
        code versions stand for what they would make.
        """
        project = replace(self.project, recipe=recipe)
        planned = steps.plan_steps(project)
        made = dict[StageKey, Manifest]()
        with watched(self.monkeypatch) as read:
            self.monkeypatch.setattr(runner, "_publish_output", lambda *_: None)
            for step in planned:
                if not step.on_demand:
                    inputs = {key: made[key] for key in step.inputs}
                    made[step.key] = runner.run_step(project, step, inputs).manifest
                    if known is not None and made[step.key].version != known.get(step.key):
                        break
        versions = {key: one.version for key, one in made.items()}
        return versions | {step.key: step.code_version for step in planned if step.on_demand}, frozenset(read)


def name_of(path: OptionPath) -> str:
    return ".".join(map(str, path[2:]))


def has_few_values(model: BaseModel, name: str) -> bool:
    annotation = type(model).model_fields[name].annotation
    return annotation is bool or any(True for _ in literals(annotation))


def open_trial(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    options, rows = KINDS[name]
    write_tokenizer(folder / "tokenizer", template=TEMPLATE)
    (folder / "mine.py").write_text(PYTHON, encoding="utf-8")
    made = Workspace(folder)
    half = len(rows) // 2
    urls = [made.write("first.jsonl", rows[:half]), made.write("second.jsonl", rows[half:])]
    made.write("other.jsonl", rows[:9])
    made.recipe({"rows": {"source": {"train_urls": urls}, "format": options}}, seq_len=SEQ_LEN)
    return Trial(name, made, monkeypatch)


def test_every_kind_is_tried() -> None:
    assert set(VARIANTS) == set(catalog.KINDS)


@pytest.mark.parametrize("kind", VARIANTS)
def test_option_that_a_kind_accepts_has_an_effect_or_is_an_error(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: dict[str, set[str]] = {}
    for number, variant in enumerate(VARIANTS[kind]):
        trial = open_trial(variant, tmp_path / str(number), monkeypatch)
        for path, model in trial.list_options():
            outcomes.setdefault(name_of(path), set()).add(trial.try_option(path, model))

    ignored = {name: found for name, found in outcomes.items() if not found & {"effect", "error", "refused"}}
    assert len(outcomes) > 60
    assert {name: found for name, found in ignored.items() if name not in HAS_EFFECT_ELSEWHERE} == {}


# ── Options that other options leave without effect ───────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "groups", "message"),
    [
        (
            {"kind": "tokens"},
            {"truncation": {"truncate_side": "right"}},
            r"truncation\.truncate_side: right has no effect: .* is drop, .*; set overlong: truncate",
        ),
        (
            {"kind": "tokens"},
            {"packing": {"slice_strategy": "split"}},
            r"rows\.packing\.slice_strategy: split has no effect: .* set overlong: keep, or delete slice_strategy",
        ),
        (
            {"kind": "chat"},
            {"packing": {"pack": False, "pack_strategy": "greedy"}},
            r"rows\.packing\.pack_strategy: greedy has no effect: packing\.pack is false, .* set pack: true, or delete",
        ),
        (
            {"kind": "text"},
            {"packing": {"max_segments_per_example": 4}},
            r"rows\.packing\.max_segments_per_example: 4 has no effect: .* is concat, .* set pack_strategy: best_fit",
        ),
        (
            {"kind": "chat"},
            {"truncation": {"truncate_side": "right"}, "packing": {"slice_strategy": "drop"}},
            r"right has .* is keep, .*; set overlong: truncate and delete packing\.slice_strategy, or delete \w+$",
        ),
        (
            {"kind": "chat"},
            {"truncation": {"overlong": "split", "token_cut": "allow"}, "packing": {"slice_strategy": "drop"}},
            r"strategy: drop has .* is split, .*; set overlong: keep and delete truncation\.token_cut, or delete \w+$",
        ),
        (
            {"kind": "text"},
            {"truncation": {"overlong": "drop"}, "packing": {"slice_strategy": "drop"}},
            r"is drop, .*, and .* is concat, .*; set overlong: keep and pack_strategy: best_fit, or delete \w+$",
        ),
    ],
)
def test_option_that_others_leave_without_effect_is_refused_with_what_to_do(
    kind: Mapping[str, Any], groups: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    made = Workspace(tmp_path).one("rows.jsonl", [{"text": "t"}], kind, **groups)

    with pytest.raises(ConfigError, match=message):
        _ = made.project


def test_option_without_effect_is_not_inherited(tmp_path: Path) -> None:
    made = Workspace(tmp_path)
    datasets = {f"{kind}s": made.dataset("rows.jsonl", [{"text": "t"}], {"kind": kind}) for kind in ("chat", "text")}
    made.recipe(datasets, defaults={"packing": {"max_segments_per_example": 4}})

    packing = {name: dataset.packing for name, dataset in made.project.recipe.datasets.items()}

    assert packing["chats"].max_segments_per_example == 4
    assert packing["texts"].max_segments_per_example is None
