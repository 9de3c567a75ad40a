"""`filters.decontaminate` in a build: what goes, what is said of it, and what a change of the benchmarks remakes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rowmill.build.steps import plan_steps
from rowmill.core.errors import ConfigError, GateError, SourceError
from rowmill.stats.views import query_views
from tests.support.recipes import CHAT, PAIR, TEXT, TO_ROWS, Workspace, chat, sentence, tokenizer_json, write_tokenizer

QUESTION = "A farmer has nine sheep and all but seven of them run away at night. How many are left?"
OTHER = "Which planet of the solar system has the shortest day, and how long is it in hours?"


def user(text: str, answer: str = "I do not know that, sorry.") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]}


def decontaminate(*urls: str, fields: Sequence[str] = ("question",), **changes: Any) -> dict[str, Any]:
    return {
        "decontaminate": {"benchmarks": [{"name": "riddles", "urls": list(urls), "fields": list(fields)}], **changes}
    }


def project(
    folder: Path, rows: Sequence[Mapping[str, Any]], items: Sequence[Any] = ({"question": QUESTION},),
    kind: Mapping[str, Any] = CHAT, *, near: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Workspace:  # fmt: skip
    """Write rows and the items of a benchmark, by default the question; `changes` are of the search."""
    workspace = Workspace(folder)
    filters = decontaminate(workspace.write("items.jsonl", items), **changes)
    if near is not None:
        filters["near_duplicates"] = near
    return workspace.one("rows.jsonl", rows, kind, filters=filters, **(options or {}))


def test_rows_with_an_item_are_rejected_and_the_detail_names_it(tmp_path: Path) -> None:
    rows = [chat(0), user(f"Riddle: {QUESTION.upper()}"), chat(1), user("Hm.", f"You asked: {OTHER}"), chat(2)]
    workspace = project(tmp_path, rows, [{"question": OTHER}, {"question": QUESTION}])

    built = workspace.build(only=TO_ROWS)

    assert built.rejects() == [(1, "contaminated"), (3, "contaminated")]
    assert [json.loads(detail) for detail in built.details()] == [
        {"benchmark": "riddles", "item": 1, "coverage": 1.0, "ngram": "a farmer has nine sheep and all but"},
        {"benchmark": "riddles", "item": 0, "coverage": 1.0, "ngram": "which planet of the solar system has the"},
    ]
    facts = built.facts("rows", "canonical_rows")
    assert (facts["kept"], facts["contaminated"], facts["decontamination_items"]) == (3, 0.4, 2)
    assert facts["rejects"] == facts["accounted"] == 0


@pytest.mark.slow
def test_view_and_page_show_what_was_removed_beside_what_it_matched(tmp_path: Path) -> None:
    half = " ".join(QUESTION.split()[:11])
    workspace = project(tmp_path, [user(half), chat(1), user(QUESTION)], [{"question": "?"}, {"question": QUESTION}])

    built = workspace.build(only=TO_ROWS)

    select = "select benchmark, item, source, record, round(coverage, 3), text, item_text from contamination"
    _, found = query_views(workspace.project.store, f"{select} order by coverage")
    source = "data/items.jsonl"
    assert found == [
        ("riddles", 1, source, 2, 0.579, half, QUESTION),
        ("riddles", 1, source, 2, 1.0, QUESTION, QUESTION),
    ]
    made = built.manifest("rows", "canonical_rows")
    assert [line[1:] for line in made.tables["contamination"].rows] == [
        (QUESTION, "riddles", 1, QUESTION, 1.0),
        (half, "riddles", 1, QUESTION, 0.578947368),
    ]
    assert made.tables["benchmarks"].rows == (("riddles", source, 2, 1, 2),)


@pytest.mark.slow
def test_report_keeps_and_counts_the_rows(tmp_path: Path) -> None:
    workspace = project(tmp_path, [user(QUESTION), chat(1)], action="report")

    built = workspace.build(only=TO_ROWS)

    made = built.manifest("rows", "canonical_rows")
    assert (built.rejects(), made.facts["kept"], made.facts["contaminated"]) == ([], 2, 0.5)
    assert query_views(workspace.project.store, "select count(*) from contamination")[1] == [(1,)]
    result = built.result("contaminated", "rows", "canonical_rows")
    assert (result.failed, result.blocking) == (True, False)


def test_search_that_cannot_be_done_is_an_error(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.write("items.jsonl", [{"question": QUESTION}])
    workspace.write("empty.jsonl", [{"query": QUESTION}, {"question": None}, {"question": " ?! "}])
    workspace.one("rows.jsonl", [chat(0)], filters=decontaminate("data/items.jsonl", "data/empty.jsonl"))

    with pytest.raises(GateError, match=r"decontamination_items: 0 .*fields that the records of every file have"):
        workspace.build()

    workspace = project(tmp_path, [chat(0)], max_ngrams=10)

    with pytest.raises(ConfigError, match=r"datasets\.rows\.filters\.decontaminate\.max_ngrams: .* have 12 n-grams"):
        workspace.build(only=TO_ROWS)

    workspace = Workspace(tmp_path).one("rows.jsonl", [chat(0)], filters=decontaminate("data/none.jsonl"))

    with pytest.raises(SourceError, match=r"found no data at data/none\.jsonl"):
        workspace.build(only=TO_ROWS)


@pytest.mark.parametrize(
    ("fields", "record"),
    [
        (["turns"], {"turns": [OTHER, QUESTION]}),
        (["q.text"], {"q": {"text": QUESTION}}),
        (["prompt"], {"prompt": [{"role": "user", "content": QUESTION}]}),
        (["answer", "question"], {"question": QUESTION, "answer": "7"}),
    ],
)
def test_fields_are_paths_to_texts_lists_or_messages(tmp_path: Path, fields: list[str], record: dict[str, Any]) -> None:
    workspace = project(tmp_path, [user(QUESTION)], [record], fields=fields, coverage=0.4)

    assert workspace.build(only=TO_ROWS).rejects() == [(0, "contaminated")]


def test_texts_of_every_kind_of_row_are_searched(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": QUESTION}}}
    ends = [{"role": "tool", "content": "No."}, {"role": "assistant", "content": "Sorry."}]
    start = {"role": "user", "content": "Find it."}
    rows = [
        {"messages": [start, {"role": "assistant", "content": "", "tool_calls": [call]}, *ends]},
        {"messages": [start, {"role": "assistant", "content": "Seven", "reasoning_content": QUESTION}]},
        {"messages": [{"role": "system", "content": QUESTION}, start, ends[1]]},
    ]

    pairs = [{"prompt": QUESTION, "answer": "7"}, {"prompt": "Say it.", "answer": QUESTION}]
    texts = [{"text": f"Chapter 1. {QUESTION} Chapter 2."}, {"text": "Nothing of it."}]
    found = {
        name: project(tmp_path / name, own, kind=kind).build(only=TO_ROWS).rejects()
        for name, own, kind in (("chats", rows, CHAT), ("pairs", pairs, PAIR), ("texts", texts, TEXT))
    }

    assert {name: [place for place, _ in own] for name, own in found.items()} == {
        "chats": [0, 1, 2], "pairs": [0, 1], "texts": [0],
    }  # fmt: skip
    assert {reason for own in found.values() for _, reason in own} == {"contaminated"}


@pytest.mark.slow
def test_another_benchmark_file_is_another_output_and_the_same_is_reused(tmp_path: Path) -> None:
    workspace = project(tmp_path, [user(QUESTION), user(OTHER)])
    first = workspace.build(only=TO_ROWS)
    again = workspace.build(only=TO_ROWS)

    workspace.write("items.jsonl", [{"question": OTHER}, {"question": QUESTION}])
    changed = workspace.build(only=TO_ROWS)

    assert (again.made(), changed.made()) == (set(), {"rows/canonical_rows"})
    assert (first.rejects(), changed.rejects()) == ([(0, "contaminated")], [(0, "contaminated"), (1, "contaminated")])


def test_the_filter_can_be_added_to_a_dataset_that_was_built_and_taken_away_again(tmp_path: Path) -> None:
    rows = [user(QUESTION), chat(1)]
    plain = Workspace(tmp_path).one("rows.jsonl", rows).build(only=TO_ROWS)
    filtered = project(tmp_path, rows).build(only=TO_ROWS)
    again = Workspace(tmp_path).one("rows.jsonl", rows).build(only=TO_ROWS)

    outcomes = plain.outcomes("rows", "canonical_rows")
    assert (outcomes["contaminated"], outcomes["decontamination_items"]) == ("not_applicable", "not_applicable")
    assert filtered.rejects() == [(0, "contaminated")]
    assert (plain.rejects(), again.versions()) == ([], plain.versions())


@pytest.mark.slow
def test_splits_by_time_and_duplicates_stand_beside_it(tmp_path: Path) -> None:
    rows = [user(QUESTION), chat(1), chat(1), user(QUESTION), chat(2), chat(3)]
    dated = [row | {"time": at} for at, row in enumerate(rows)]
    splits = {"time_key": "time", "boundaries": {"validation": 5}}
    workspace = project(tmp_path, dated, options={"splits": splits})

    built = workspace.build(only=TO_ROWS)

    assert sorted(built.rejects()) == [(0, "contaminated"), (2, "duplicate"), (3, "duplicate")]
    made = built.manifest("rows", "canonical_rows")
    assert made.facts["splits"] == {"train": 2, "validation": 1}
    assert query_views(workspace.project.store, "select count(*) from contamination")[1] == [(1,)]


def tokens(*texts: str) -> list[dict[str, Any]]:
    """Return rows of token ids, with a control token at their end."""
    encoder = Tokenizer.from_str(tokenizer_json())
    ids = [encoder.encode(f"{text}<|im_end|>").ids for text in texts]
    return [{"input_ids": own, "loss_mask": [1] * len(own)} for own in ids]


def test_token_ids_are_searched_as_the_text_that_they_are(tmp_path: Path) -> None:
    rows = tokens(sentence(0, 30), f"Riddle: {QUESTION.upper()}", sentence(1, 30), "why seven?")
    rows += tokens(f"{sentence(1, 30)} And more.")
    items = [{"question": QUESTION}, {"question": "Why seven?"}]
    workspace = project(tmp_path, rows, items, {"kind": "tokens"}, near={"ngram": 3, "min_words": 5})

    built = workspace.build(only=(*TO_ROWS, "tokenized_examples"))

    # Without the control token, the last row equals an item that has fewer words than an n-gram.
    assert built.rejects() == [(1, "contaminated"), (2, "near_duplicate"), (3, "contaminated")]
    assert built.kept() == [0, 4]
    [shown] = built.manifest("rows", "canonical_rows").tables["near_duplicates"].rows
    assert shown[1].startswith(sentence(1, 30)[:40])
    assert built.facts("rows", "canonical_rows")["decontamination_items"] == 2


def test_another_tokenizer_is_another_search_of_token_ids_and_of_nothing_else(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    write_tokenizer(tmp_path / "other", template="{{ messages }}")

    def find_code_version(kind: str, rows: list[dict[str, Any]], tokenizer: str) -> str:
        workspace = project(tmp_path, rows, kind={"kind": kind}, options={"tokenizer": tokenizer})
        return next(one.code_version for one in plan_steps(workspace.project) if one.key[-1] == "canonical_rows")

    for kind, rows, is_other in (("tokens", tokens(QUESTION), True), ("chat", [chat(0)], False)):
        versions = {find_code_version(kind, rows, tokenizer) for tokenizer in ("tokenizer", "other")}
        assert (len(versions) == 2) is is_other


@pytest.mark.slow
def test_prompt_and_both_sides_of_preferences_are_searched(tmp_path: Path) -> None:
    answers = ["I cannot say that.", "Ask somebody else."]
    texts = [("Hm.", *answers), (QUESTION, *answers), ("Yes?", QUESTION, answers[1]), ("No?", answers[0], QUESTION)]
    pairs: list[dict[str, Any]] = [dict(zip(("prompt", "chosen", "rejected"), one, strict=True)) for one in texts]
    longer = {"prompt": sentence(5, 30), "chosen": sentence(6, 30), "rejected": sentence(7, 30)}
    similar = longer | {"rejected": f"{sentence(7, 30)} And more."}

    built = project(tmp_path, [*pairs, longer, similar], kind={"kind": "preference"}, near={}).build()

    found = [(1, "contaminated"), (2, "contaminated"), (3, "contaminated"), (4, "near_duplicate")]
    assert built.rejects() == found
    assert built.kept() == [0, 5]
    facts = built.facts("rows", "canonical_rows")
    assert (facts["contaminated"], facts["accounted"], facts["swapped_pairs"]) == (0.5, 0, 0)
    assert len(built.segments()) == 4


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize(("coverage", "rows"), [(0.5, [20, 1314, 5162]), (0.8, [])])
def test_real_problems_share_phrases_with_the_test_file_and_three_share_a_question(
    tmp_path: Path, real_data: Path, coverage: float, rows: list[int]
) -> None:
    workspace = Workspace(tmp_path)
    content = (real_data / "math" / "gsm8k_train.jsonl").read_bytes()
    filters = decontaminate(str(real_data / "math" / "gsm8k_test.jsonl"), coverage=coverage)
    form = {"kind": "chat", "prompt_fields": ["question"], "response_fields": ["answer"]}
    workspace.one("train.jsonl", content, form, filters=filters)

    built = workspace.build(only=TO_ROWS)

    questions = [json.loads(line)["question"] for line in content.splitlines()]
    rejects = built.rows_of("rows", "canonical_rows", file="rejects")
    removed = [json.loads(json.loads(one["raw"])["messages"])[0]["content"] for one in rejects]
    assert [questions.index(question) for question in removed] == rows
    assert [json.loads(one["detail"])["item"] for one in rejects] == [632, 602, 602][: len(rows)]


@pytest.mark.slow
@pytest.mark.real_data
def test_every_real_question_is_found_in_another_wording_of_its_answer(tmp_path: Path, real_data: Path) -> None:
    content = (real_data / "math" / "gsm8k_test_socratic.jsonl").read_bytes()
    filters = decontaminate(str(real_data / "math" / "gsm8k_test.jsonl"))
    form = {"kind": "chat", "prompt_fields": ["question"], "response_fields": ["answer"]}
    built = Workspace(tmp_path).one("rows.jsonl", content, form, filters=filters).build(only=TO_ROWS)

    facts = built.facts("rows", "canonical_rows")
    assert (facts["contaminated"], facts["kept"]) == (1.0, 0)
    items = [json.loads(detail) for detail in built.details()]
    assert len(items) == len(content.splitlines()) == 1319
    assert sum(one["item"] == number for number, one in enumerate(items)) == 1319
