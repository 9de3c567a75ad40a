"""The export of prompts: each layout gives the prompt and its ground truth back, or says which it cannot hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rowmill.core.errors import ConfigError
from rowmill.stages.exports import format_trainer_pointer
from tests.support.built_exports import load_rows, open_built_export
from tests.support.recipes import CHATML, Built, Workspace, sentence, write_tokenizer

pytestmark = pytest.mark.slow

PROMPTS: dict[str, Any] = {"kind": "prompts", "carry_fields": ["level"]}
ENVIRONMENT = {"skyrl": {"env_class": "gsm8k"}}
COLUMNS = {
    "verl": "data_source prompt ability reward_model extra_info",
    "skyrl": "data_source prompt env_class reward_spec extra_info",
    "trl": "prompt solution data_source extra",
    "openrlhf": "input label datasource extra",
    "open_instruct": "messages ground_truth dataset extra",
}
WHERE = {
    "verl": ("prompt", "reward_model", "data_source"),
    "skyrl": ("prompt", "reward_spec", "data_source"),
    "trl": ("prompt", "solution", "data_source"),
    "openrlhf": ("input", "label", "datasource"),
    "open_instruct": ("messages", "ground_truth", "dataset"),
}
"""The columns of the prompt, the ground truth and the data source."""


def _record(i: int) -> dict[str, Any]:
    asked = [{"role": "user", "content": f"{sentence(i, 6)} why? «{i}»"}]
    if i % 3 == 1:
        asked = [{"role": "system", "content": "Null: \x7f\u2028 <|im_end|>"}, *asked]
    if i % 3 == 2:
        asked = [*asked, {"role": "assistant", "content": "Because."}, {"role": "user", "content": "And now?"}]
    return {"prompt": asked, "answer": f' {{"{i}"}}\n', "data_source": f"set{i % 2}", "level": i % 4}


def _build(folder: Path, records: list[dict[str, Any]], *exports: dict[str, Any], form: Any = None) -> Workspace:
    named = [{"kind": "rl_prompts", **one} for one in exports]
    return Workspace(folder).one("a.jsonl", records, form or PROMPTS, exports=named)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Built:
    exports: list[dict[str, Any]] = [{"name": name, "layout": name, **ENVIRONMENT.get(name, {})} for name in COLUMNS]
    exports[0] |= {"shard_sequences": 7}
    return _build(tmp_path_factory.mktemp("asked"), [_record(i) for i in range(24)], *exports).build()


@pytest.mark.parametrize("layout", COLUMNS)
def test_rows_are_the_prompts_with_their_ground_truths(asked: Built, layout: str) -> None:
    rows = load_rows(asked, layout)
    prompt, truth, source = WHERE[layout]
    assert rows.column_names == COLUMNS[layout].split()
    assert len(rows) == 24
    wanted = {json.dumps(one["prompt"]): one for one in map(_record, range(24))}
    for row in rows:
        record = wanted.pop(json.dumps(row[prompt]))
        found = row[truth]["ground_truth"] if isinstance(row[truth], dict) else row[truth]
        given = (record["answer"], record["data_source"])
        assert (found, row[source]) == (([given[0]], [given[1]]) if layout == "open_instruct" else given)
        assert json.loads(row.get("extra_info", row)["extra"]) == {"level": record["level"]}
    exported = open_built_export(asked, layout)
    assert exported.card["layout"] == layout
    assert (exported.count("segments"), exported.count("trained_tokens")) == (24, 0)


def test_rendered_messages_are_the_ids_of_the_build(asked: Built) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.project.base / "tokenizer")
    by_row = {one["row_ids"][0]: one["input_ids"] for one in asked.examples("rows")}
    rows = load_rows(asked, "verl")
    lengths: list[int] = []
    for row in rows:
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        lengths.append(len(by_row[row["extra_info"]["row_id"]]))
        # A control string in a text is a text for the build, and a control token for the trainer.
        if "<|im_end|>" not in json.dumps(row["prompt"]):
            assert tokenizer.encode(text, add_special_tokens=False) == by_row[row["extra_info"]["row_id"]]
    assert open_built_export(asked, "verl").card["longest_prompt"] == max(lengths)


def test_numbers_of_rows_go_on_over_files_and_pointers_say_where_these_are(asked: Built) -> None:
    rows = load_rows(asked, "verl")

    assert len(open_built_export(asked, "verl").files) == 4
    assert [row["extra_info"]["index"] for row in rows] == list(range(24))
    assert {(row["ability"], row["extra_info"]["split"], row["reward_model"]["style"]) for row in rows} == {
        ("rows", "train", "rule")
    }
    assert set(load_rows(asked, "skyrl")["env_class"]) == {"gsm8k"}
    assert set(rows["prompt"][0][0]) == {"role", "content"}
    said = {
        one.name: format_trainer_pointer(one, asked.manifest("exports", one.name), "/data")
        for one in asked.project.recipe.exports
    }
    assert all("/data/data/*.parquet" in text for text in said.values())
    assert "max_prompt_length=256" in said["verl"]
    assert "--data.label_key label" in said["openrlhf"]


def test_single_questions_and_json_truths(tmp_path: Path) -> None:
    truths: list[Any] = ["72", 72, ["a", None], {"b": "ü"}, None, True]
    records = [{"question": f"{i}?", "answer": truth} for i, truth in enumerate(truths)]
    form = {"kind": "prompts", "require_ground_truth": False}
    options = {"layout": "nemo_rl", "ground_truth": "json"}
    built = _build(tmp_path, records, {"name": "nemo", **options}, form=form).build()
    rows = load_rows(built, "nemo")

    assert {(row["input"], row["data_source"], row["extra"]) for row in rows} == {
        (f"{i}?", "rows", None) for i in range(6)
    }
    assert [json.loads(row["output"]) for row in sorted(rows, key=lambda row: row["input"])] == truths
    [export] = built.project.recipe.exports
    shown = yaml.safe_load(format_trainer_pointer(export, built.manifest("exports", "nemo"), "/data"))
    assert shown["data"]["train"]["data_path"] == "/data/data/*.parquet"
    assert shown["data"]["max_input_seq_length"] == 257


def test_several_verifiers_have_a_truth_each_in_open_instruct(tmp_path: Path) -> None:
    records = [{"prompt": "a?", "answer": ["1", "2"], "dataset": ["math", "ifeval"]}, {"prompt": "b?", "answer": "3"}]
    built = _build(tmp_path, records, {"name": "mine", "layout": "open_instruct"}).build()
    rows = sorted(load_rows(built, "mine"), key=lambda row: row["messages"][0]["content"])

    assert [(row["ground_truth"], row["dataset"]) for row in rows] == [
        (["1", "2"], ["math", "ifeval"]),
        (["3"], ["rows"]),
    ]


HOSTILE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("2 have tools", {}, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}),
    ("2 have template arguments", {}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ("2 have messages with more than a role and text", {}, {"prompt": [{"role": "user", "content": "?", "name": "x"}]}),
    ("2 are not a single user message", {"layout": "nemo_rl"}, {"prompt": _record(1)["prompt"]}),
    ("2 contain <image>", {"layout": "openrlhf"}, {"prompt": "What is <image>?"}),
    ("2 have several data sources (", {"layout": "trl"}, {"data_source": ["a", "b"]}),
    ("2 have several data sources and not a list", {"layout": "open_instruct"}, {"data_source": ["a", "b"]}),
    ("2 have a ground truth that is not text", {}, {"answer": 7}),
]


@pytest.mark.parametrize(("said", "options", "changes"), HOSTILE, ids=[said[2:20] for said, *_ in HOSTILE])
def test_prompts_that_a_layout_cannot_hold_are_counted_with_the_first(
    tmp_path: Path, said: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    plain = [{"prompt": f"{i}?", "answer": "1"} for i in range(3)]
    bad = [json.loads(json.dumps({"prompt": "bad?", "answer": "1"} | changes).replace("?", f" {i}?")) for i in range(2)]
    write_tokenizer(tmp_path / "tokenizer", template="{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    workspace = _build(tmp_path, [*plain, *bad], {"name": "mine", "shard_sequences": 1, **options})

    with pytest.raises(ConfigError) as error:
        workspace.build()

    message = str(error.value)
    assert f"exports.mine: layout {options.get('layout', 'verl')} cannot hold all prompts: {said}" in message
    assert message.count(" is the first)") == 1
    assert not list(workspace.store.rglob("exports/**/manifest.json"))
