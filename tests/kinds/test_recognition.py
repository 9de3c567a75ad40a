"""Recognition of a format in the first records: the shapes of public datasets, proposed, refused, never another kind.

Each file of `shapes/` has 24 invented records in the shape of the dataset after which it is named: a question that
begins with "Why did people", a good answer that begins with "They cared about", a worse one with "Nobody knows". What
`rowmill init` writes around a proposal is tested in `tests/recipe/test_new_project.py`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rowmill.core.json import from_json
from rowmill.kinds.catalog import KINDS
from rowmill.kinds.reading.recognition import FormatChoice, recognise_format
from rowmill.kinds.shared.messages import MORE_CONTEXT_COLUMNS
from rowmill.kinds.shared.samples import Recognition, Sample
from rowmill.kinds.supervised import PAIR_COLUMNS
from rowmill.schema.rows import Rejected, Row
from tests.support import row_reading

SHAPES = Path(__file__).with_name("shapes")
CHAT, PREFERENCE, PROMPTS = {"kind": "chat"}, {"kind": "preference"}, {"kind": "prompts"}

PUBLIC: dict[str, dict[str, Any]] = {
    "alpaca": {"kind": "supervised", "input_field": "instruction", "output_field": "output"},
    "apigen_mt": CHAT,
    "chatbot_arena_conversations": PREFERENCE,
    "cnn_dailymail": {"kind": "supervised", "input_field": "article", "output_field": "highlights"},
    "dapo_math": PROMPTS,
    "daring_anteater": CHAT,
    "firefly": {"kind": "supervised", "input_field": "input", "output_field": "target"},
    "flan_v2": {"kind": "supervised", "input_field": "inputs", "output_field": "targets"},
    "glaive_v2_calls": CHAT,
    "gsm8k": {"kind": "supervised", "input_field": "question", "output_field": "answer"},
    "helpsteer2": {"kind": "supervised", "input_field": "prompt", "output_field": "response"},
    "hermes_function_calling": CHAT,
    "kto_mix": {"kind": "preference", "objective": "unpaired"},
    "lmsys_chat_1m": CHAT,
    "magpie_pro": CHAT,
    "medical_o1": {"kind": "supervised", "input_field": "Question", "output_field": "Response"},
    "metamath_qa": {"kind": "supervised", "input_field": "query", "output_field": "response"},
    "nectar": PREFERENCE,
    "no_robots": CHAT,
    "numina_math_cot": CHAT,
    "open_math_instruct_2": {"kind": "supervised", "input_field": "problem", "output_field": "generated_solution"},
    "open_orca": CHAT,
    "openassistant_guanaco": {"kind": "chat", "messages_field": "text"},
    "openr1_math": CHAT,
    "orpo_dpo_mix": PREFERENCE,
    "pku_safe_rlhf": PREFERENCE,
    "rollouts": {"kind": "tokens"},
    "samsum": {"kind": "supervised", "input_field": "dialogue", "output_field": "summary"},
    "shp": {"kind": "preference", "prompt_fields": ["history"]},
    "sst2_glue": {"kind": "records"},
    "stack_exchange_paired": PREFERENCE,
    "the_stack": {"kind": "text", "text_key": "content"},
    "toolbench": CHAT,
    "ultrachat_original": {"kind": "chat", "messages_field": "data"},
    "ultrafeedback_binarized_preferences": PREFERENCE,
    "ultrafeedback_prompt": {"kind": "prompts", "require_ground_truth": False},
    "wikipedia": {"kind": "text"},
    "xsum": {"kind": "supervised", "input_field": "document", "output_field": "summary"},
}
"""Options for each shape, of which a build reads every record."""

REFUSED = {"human_eval": "nothing reads test, canonical_solution", "mmlu": ""}
"""Shapes that no kind reads whole, and a part of what is said."""

GIVEN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        "tulu ultrachat slimorca openthoughts xlam toolace glaive_v2 lima capybara wildchat nemotron_post openai_tools "
        "anthropic gemini".split(),
        CHAT,
    ),
    **dict.fromkeys("orca_dpo ultrafeedback hh".split(), PREFERENCE),
    "sharegpt_model_names": {
        "kind": "chat", "role_map": dict.fromkeys(("bard", "bing", "chatgpt"), "assistant")
    },
    "dolly": {"kind": "supervised", "input_field": "instruction", "output_field": "response"},
    "aya": {"kind": "supervised", "input_field": "inputs", "output_field": "targets"},
    "squad": {"kind": "supervised", "input_field": "question", "output_field": "answers.text.0"},
    "verl_prompts": PROMPTS,
    "fineweb": {"kind": "text"},
}  # fmt: skip
"""The shapes of `data/shapes`, but for OASST's, which is refused."""


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def choose(records: Iterable[Mapping[str, Any]], *, is_table_file: bool = False) -> FormatChoice:
    return recognise_format(Sample(list(records), is_table_file=is_table_file), KINDS.values())


def propose(*records: Mapping[str, Any], is_table_file: bool = False) -> Recognition:
    choice = choose(records, is_table_file=is_table_file)
    assert choice.proposal is not None, choice.explain()
    return choice.proposal


def read(record: dict[str, Any], options: Mapping[str, Any]) -> Row:
    row = row_reading.read(record, options)
    assert isinstance(row, Row), row
    return row


def split_sides(row: Row) -> tuple[str, str, str]:
    """Return the text of the prompt, of what is trained or better, and of what is worse."""
    prompt = "\n".join(str(one["content"]) for one in row.messages if one["role"] not in ("assistant", "system"))
    answer = "\n".join(str(one["content"]) for one in row.messages if one["role"] == "assistant")
    sides = [str(row.columns.get(name) or "") for name in ("chosen", "rejected")]
    document = row.text if row.kind == "text" else ""
    return (
        f"{prompt}{row.text if row.kind == 'pair' else ''}",
        f"{answer}{row.output or ''}{sides[0]}{document}",
        sides[1],
    )


# ── Shapes of public datasets ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PUBLIC)
def test_shape_of_a_public_dataset_is_proposed_as_what_it_is(name: str) -> None:
    records = load(SHAPES / f"{name}.jsonl")

    found = propose(*records)

    assert (found.options, found.fits, len(records)) == (PUBLIC[name], 24, 24)


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - {"rollouts", "sst2_glue", "the_stack"}))
def test_questions_are_asked_and_answers_are_answers(name: str) -> None:
    for record in load(SHAPES / f"{name}.jsonl"):
        prompt, answer, worse = split_sides(read(record, PUBLIC[name]))

        given = json.dumps(record, ensure_ascii=False)
        assert "They cared" not in prompt or PUBLIC[name].get("input_field") in ("article", "document")
        assert "Why did people" not in answer
        assert "Why did people" in prompt or "Why did people" not in given
        assert "Why did people" not in worse
        if PUBLIC[name]["kind"] == "preference" and "objective" not in PUBLIC[name]:
            assert "They cared" in answer and "Nobody knows" not in answer
            assert "Nobody knows" in worse and "They cared" not in worse


@pytest.mark.parametrize("name", REFUSED)
def test_shape_that_no_kind_reads_whole_is_refused(name: str) -> None:
    choice = choose(load(SHAPES / f"{name}.jsonl"))

    assert choice.proposal is None
    assert REFUSED[name] in choice.explain()


def test_every_file_of_shapes_has_its_line() -> None:
    assert {path.stem for path in SHAPES.glob("*.jsonl")} == PUBLIC.keys() | REFUSED.keys()


@pytest.mark.real_data
@pytest.mark.parametrize("name", GIVEN)
def test_given_shape_is_proposed_as_what_it_is(real_data: Path, name: str) -> None:
    records = load(real_data / f"shapes/{name}.jsonl")

    found = propose(*records)

    assert found.options == GIVEN[name]
    for record in records:
        row = read(record, found.options)
        prompt, answer, _ = split_sides(row)
        given = json.dumps(record)
        if row.kind != "text":
            assert "What is " in prompt
            assert "What is " not in answer
            assert "It is " not in prompt
        assert "It is " in answer or "It is " not in given or GIVEN[name] == PROMPTS


REPORTED: dict[str, dict[str, Any]] = {
    **dict.fromkeys("role_pairs thought_before_call thinking_parts refusal".split(), CHAT),
}
"""The files of `data/reports` that hold conversations, each of which another tool misreads."""


@pytest.mark.real_data
@pytest.mark.parametrize("name", REPORTED)
def test_reported_file_is_read_as_what_it_is(real_data: Path, name: str) -> None:
    records = load(real_data / f"reports/{name}.jsonl")

    found = propose(*records)

    assert (found.options, found.fits) == (REPORTED[name], len(records))
    for record in records:
        row = read(record, found.options)
        [asked, answered] = [row.messages[0], row.messages[-1]]
        assert (asked["role"], answered["role"]) == ("user", "assistant")
        assert asked["content"].startswith(("Q ", "Add ", "Do bad thing "))
        assert answered["content"].startswith(("A ", "3 ", "It is ", "I cannot "))
        thoughts = [one["reasoning_content"] for one in row.messages if "reasoning_content" in one]
        assert len(thoughts) == ("thin" in name or "thought" in name)


@pytest.mark.real_data
def test_reported_answers_and_contexts_are_read_from_their_columns(real_data: Path) -> None:
    pair = {"kind": "supervised", "input_field": "question", "output_field": "answer"}
    numbers, schemas = (load(real_data / f"reports/{name}.jsonl") for name in ("number_answers", "schema_column"))

    assert propose(*numbers).options == pair
    assert [read(one, pair).output for one in numbers] == [str(one["answer"]) for one in numbers]
    with_schema = propose(*schemas).options
    assert with_schema == pair | {"context_fields": ["schema"]}
    assert read(schemas[0], with_schema).text == f"{schemas[0]['question']}\n{schemas[0]['schema']}"


def test_boolean_answer_about_a_passage_is_a_pair() -> None:
    """BoolQ's columns, as google-research-datasets/boolean-questions describes them."""
    record = {"question": "do olives grow in the cold?", "answer": False, "passage": PASSAGE * 9}

    row = read(record, propose(record).options)

    assert (row.text, row.output) == (f"do olives grow in the cold?\n{PASSAGE * 9}", "false")


CONTEXTS: dict[str, Any] = {
    "text": "The bridge was built in 1900.",
    "passages": ["The bridge was built", "in 1900."],
    "titled": [{"title": "Bridges", "text": "It was built in 1900."}, {"text": "It fell.", "id": 3}],
}


@pytest.mark.parametrize("form", CONTEXTS)
@pytest.mark.parametrize("column", [*MORE_CONTEXT_COLUMNS, "Schema"])
@pytest.mark.parametrize(
    "asked", [{"question": "When was it?", "answer": "In 1900."}, {"question": "When was it?", "ground_truth": "1900"}]
)
def test_context_is_proposed_by_its_name_and_refused_without(asked: dict[str, Any], column: str, form: str) -> None:
    """As CRAG's and MS MARCO's passages, Spider's schemas, and the contexts of RAG datasets are written."""
    record = {**asked, column: CONTEXTS[form]}

    found = propose(record)

    assert found.options["context_fields"] == [column]
    row = read(record, found.options)
    prompt = str(row.text if row.kind == "pair" else row.messages[0]["content"])
    assert prompt.startswith("When was it?\n") and prompt.endswith(("1900.", "It fell."))
    without = {name: value for name, value in found.options.items() if name != "context_fields"}
    if column in MORE_CONTEXT_COLUMNS:
        refused = row_reading.read(record, without)
        assert isinstance(refused, Rejected) and refused.reason == "unread_prompt"
        assert isinstance(row_reading.read({**asked, column: "doc-17"}, without), Row)


def test_context_beside_messages_or_in_an_unknown_form_is_not_left_out() -> None:
    chats = {"messages": [ASKED, ANSWERED], "documents": CONTEXTS["passages"]}
    tables = {"question": "When was it?", "answer": "1900", "passages": [{"cells": ["It was built", "in 1900"]}]}

    for record in (chats, tables):
        assert choose([record]).proposal is None
    assert propose({**chats, "documents": ["doc-17"]}).options == CHAT


@pytest.mark.real_data
def test_messages_of_a_tree_are_refused_and_said_to_be_a_tree(real_data: Path) -> None:
    choice = choose(load(real_data / "shapes/oasst_flat.jsonl"))

    assert choice.proposal is None
    assert "one message of a tree, linked by parent_id" in choice.explain()


def test_columns_of_context_system_and_calls_belong_to_the_conversation() -> None:
    [record, *_] = load(SHAPES / "open_orca.jsonl")

    assert read(record, PUBLIC["open_orca"]).messages[0] == {"role": "system", "content": record["system_prompt"]}
    dolly = {"instruction": "Who built it?", "context": "Ada built the bridge.", "response": "Ada.", "category": "qa"}
    assert read(dolly, propose(dolly).options).text == "Who built it?\nAda built the bridge."

    [record, *_] = load(SHAPES / "glaive_v2_calls.jsonl")
    asked, called, result, answered = read(record, CHAT).messages[1:]

    assert [one["role"] for one in (asked, called, result, answered)] == ["user", "assistant", "tool", "assistant"]
    assert called["tool_calls"][0]["function"] == {"name": "find", "arguments": {"year": 1800}}
    assert from_json(result["content"]) == {"families": 3}
    assert "<|endoftext|>" not in json.dumps([asked, called, result, answered])


# ── Single records ─────────────────────────────────────────────────────────────────────────────────

ASKED = {"role": "user", "content": "What is 1 + 1?"}
ANSWERED = {"role": "assistant", "content": "2"}
SECRET = "4111-1111"


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"messages": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'}, CHAT),
        ({"talk": [ASKED, ANSWERED], "tags": ["a"]}, {"kind": "chat", "messages_field": "talk"}),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, CHAT),
        ({"prompt": "a", "history": [["b", "c"]], "response": "d"}, CHAT),
        (
            {"talk": [{"speaker": "user", "text": "a"}, {"speaker": "assistant", "text": "b"}]},
            {"kind": "chat", "messages_field": "talk", "role_field": "speaker", "content_field": "text"},
        ),
        ({"instruction": "Human: a\nAssistant: b\nHuman: c\nAssistant:\n", "output": "d"}, CHAT),
        (
            {"messages": [{"type": "human", "content": "a"}, {"type": "ai", "content": "b"}]},
            {"kind": "chat", "role_field": "type"},
        ),
        ({"lines": "a b c"}, {"kind": "text", "text_key": "lines"}),
        ({"customer": "ada", "item": "tea", "price": 3}, {"kind": "records"}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, PREFERENCE),
        ({"prompt": "a", "completion": "b", "label": True}, {"kind": "preference", "objective": "unpaired"}),
        ({"prompt": "a", "ground_truth": "b"}, PROMPTS),
    ],
)
def test_proposal_reads_the_records_it_was_made_from(record: dict[str, Any], options: dict[str, Any]) -> None:
    assert propose(record, record, record).options == options
    if options["kind"] != "records":
        read(record, options)


@pytest.mark.parametrize("pair", PAIR_COLUMNS)
def test_every_pair_of_columns_is_a_format_that_reads_it(pair: tuple[str, str]) -> None:
    found = propose({pair[0]: "why is that so?", pair[1]: "for a good reason"})

    assert (found.options["input_field"], found.options["output_field"]) == pair


@pytest.mark.parametrize(
    "record",
    [
        {"chosen_messages": [ASKED, ANSWERED], "rejected_messages": [ASKED, ANSWERED]},
        {"turns": ["a", "b"], "id": 1},
        {"question": "Which of these?", "choices": ["a", "b"], "answer": "a"},
        {"first": "a text of some length " * 9, "second": "another text of some length " * 9},
        {},
    ],
    ids=["sides that are equal", "prompts alone", "choices that nothing reads", "two columns of text", "nothing"],
)
def test_nothing_is_proposed_where_no_format_fits(record: dict[str, Any]) -> None:
    assert choose([record]).proposal is None


PASSAGE = "Olives grow around the sea, where the winter is mild and the summer is dry. " * 3


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"prompt": "Why did they?", "responses": [f"They cared. {PASSAGE}", "Nobody knows."]}, "nothing reads respon"),
        ({"sentences": ["One may be first.", "Another is behind."]}, ""),
        ({"prompt": f"### Q: why? ### A: {PASSAGE}", "output": PASSAGE}, "the prompt holds its response"),
        ({"question": "Where?", "context": PASSAGE, "answers": {"text": []}}, ""),
        ({"prompt": "Why did they?", "reward_model": '{"ground_truth": "1"}'}, ""),
        ({"text": "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>"}, "such as chatml"),
        ({"text": "Below is a task.\n\n### Instruction:\nWhy?\n\n### Response:\nSo."}, "such as alpaca"),
        ({"text": "<s>[INST] Why? [/INST] So. </s>"}, "such as mistral"),
        (
            {"System": "You are brief and kind.", "Question": "Why so?", "Answer": PASSAGE},
            "System: a column of prompts",
        ),
        ({"text": "Write a function that adds.", "code": "def add(a, b): return a + b"}, "a column of documents too"),
        ({"image": "a.png", "messages": [{**ASKED, "content": "<image> What?"}, ANSWERED]}, "(multimodal_content: "),
        ({"prompt": {"text": "Why?", "role": "prompter", "replies": []}}, ""),
        ({"messages": [ASKED, ANSWERED], "thumbs_up": 1}, "thumbs_up: a column of preference data"),
        ({"text": "<human>: Why?\n<bot>: So."}, "whose turns begin with the speaker"),
        ({"text": "**User:** Why?\n\n**Assistant:** So."}, "whose turns begin with the speaker"),
        ({"text": "<｜User｜>Why?<｜Assistant｜>So."}, "whose turns begin with the speaker"),
        ({"note": "[{'from': 'human', 'value': 'Why?'}]"}, "messages as JSON or Python values"),
        ({"data": json.dumps({"messages": [ASKED, ANSWERED]})}, "messages as JSON or Python values"),
        ({"question": "Why?", "answers": ["So.", "No."], "correct": 1}, ""),
        ({"prompt": "Why?", "completion": "They cared a lot.", "label": "bad"}, "label: a column of preference data"),
        ({"prompt": "Why?", "completions": ["So it is.", "But no."], "labels": [True, False]}, ""),
        ({"conversation_id": 1, "role": "user", "content": "Why?"}, "the record is one message, with its role"),
        ({"en": "Where is the old bridge?", "fr": "Où se trouve la vieille tour ?"}, "is text, as of prompts"),
    ],
    ids=[
        *("several responses", "sentences", "prompt with its response", "answers of another form"),
        *("truth as text", "chatml", "alpaca", "mistral", "system in capitals", "two documents", "image"),
        *("tree", "label", "named turns", "bold turns", "full width", "values", "wrapped", "choice", "label of text"),
        *("steps", "message", "translation"),
    ],
)
def test_what_would_train_the_wrong_text_is_not_proposed(record: dict[str, Any], why: str) -> None:
    choice = choose([record] * 20)

    assert choice.proposal is None
    assert why in choice.explain()


def test_table_of_single_messages_is_not_proposed() -> None:
    choice = choose([{"id": "1", "role": "user", "content": "Why?"}] * 9, is_table_file=True)

    assert choice.proposal is None
    assert choice.explain().startswith("the record is one message, with its role")


def test_context_in_capitals_belongs_to_the_prompt() -> None:
    record = {"Instruction": "Sum up the text.", "Input": PASSAGE, "Output": "Where olives grow."}

    options = propose(record).options

    assert read(record, options).text == f"Sum up the text.\n{PASSAGE}"
    assert options["context_fields"] == ["Input"]


def test_mapping_under_the_name_of_a_label_is_none() -> None:
    assert propose({"messages": [ASKED, ANSWERED], "label": {"topic": ["code"]}}).options == CHAT


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_long_text_under_a_telling_name_is_no_table(column: str) -> None:
    record = {"id": 1, column: f"array([{{'role': 'user', 'content': '{PASSAGE}'}}], dtype=object)"}

    assert choose([record], is_table_file=True).proposal is None
    assert propose({"id": 1, column: "short"}, is_table_file=True)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASKED], "response": "They cared."},
        {"prompt": "What is 1 + 1?", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, {**ANSWERED, "content": "No."}]},
        {"prompt": [ASKED], "chosen": "They cared.", "rejected": "Nobody knows."},
        {"prompt": [ASKED], "completion": [ANSWERED], "label": True},
        {"prompt": [ASKED], "ground_truth": "1"},
        {"messages": [ASKED], "ground_truth": "1"},
    ],
    ids=["pair", "sides", "prompt of sides", "unpaired", "prompt", "messages"],
)
@pytest.mark.parametrize("write", [json.dumps, repr])
def test_text_of_messages_is_read_as_the_messages(record: dict[str, Any], write: Callable[[Any], str]) -> None:
    told = {name: write(value) if isinstance(value, list) else value for name, value in record.items()}

    options = propose(told).options

    assert options == propose(record).options
    assert (read(told, options).messages, read(told, options).columns) == (
        read(record, options).messages,
        read(record, options).columns,
    )


def test_list_of_json_texts_is_read_as_the_messages() -> None:
    record = {"messages": [json.dumps(one) for one in (ASKED, ANSWERED)]}

    assert read(record, propose(record).options).messages == (ASKED, ANSWERED)


def test_proposal_fits_most_records_and_most_of_their_text() -> None:
    reviews = {"review": "It broke after a week, and nobody answers. " * 4, "stars": 1}

    assert choose([reviews]).proposal is None
    assert propose(reviews, is_table_file=True).options == {"kind": "records"}

    found = propose({"text": "a"}, {"text": "b"}, {"messages": [ASKED, ANSWERED]})

    assert found.options == {"kind": "text"}
    assert (found.fits, found.records) == (2, 3)

    choice = choose([{"messages": [ASKED, ANSWERED]}, {"messages": [ASKED, ANSWERED]}, {"messages": 3}])

    assert choice.proposal is None
    assert "2 of 3 fit format: {kind: chat} (bad_messages: messages is an integer" in choice.explain()

    choice = choose([{"question": "Why?", "answer": "No.", "explanation": "Because it would not hold. " * 9}])

    assert choice.proposal is None
    assert "nothing reads explanation" in choice.explain()


@pytest.mark.parametrize(("broken", "is_proposed"), [(1, True), (2, False)])
def test_one_broken_record_in_twenty_does_not_hide_a_format(broken: int, is_proposed: bool) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"arguments": {}}]}
    records = [{"messages": [ASKED, call if i < broken else ANSWERED]} for i in range(20)]

    assert (choose(records).proposal is not None) is is_proposed


def test_evidence_names_columns_and_shares_and_no_value() -> None:
    record = {
        "messages": [{**ASKED, "content": SECRET}, ANSWERED], "note": "words that nobody reads", "card": SECRET
    }  # fmt: skip

    found = propose(record)

    assert found.evidence[0] == "chat: `messages` is read in 1 of 1 records"
    assert found.evidence[1].startswith("nothing reads `note` (")
    assert SECRET not in "".join(found.evidence)
