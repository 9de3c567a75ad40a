"""Hazards that other projects reported, as rows in whole builds: one test each."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.recipes import CHAT, Built, Workspace, chat, text_of, write_tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}<think>{{ m['reasoning_content'] }}</think>{% endif %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<call>{{ c['function']['name'] }} "
    "{{ c['function']['arguments'] | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "what is it?"}
UP_TO_TOKENS = ("raw_dataset", "canonical_rows", "tokenized_examples")


def built_of(folder: Path, rows: "list[Any] | bytes", name: str = "a.jsonl", **groups: Any) -> Built:
    write_tokenizer(folder / "tokenizer", template=TEMPLATE)
    return Workspace(folder).one(name, rows, CHAT, filters={"deduplicate": "off"}, **groups).build(only=UP_TO_TOKENS)


def texts(folder: Path, rows: list[Any], **groups: Any) -> list[str]:
    built = built_of(folder, rows, **groups)
    assert built.rejects() == [], built.details()
    return [text_of(one) for one in built.examples()]


def said(**assistant: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": "", **assistant}]}


@pytest.mark.slow
def test_arguments_are_encoded_once_however_often_the_source_encoded_them(tmp_path: Path) -> None:
    arguments = {"word": 'say "hi"', "n": [1, 2.5, None], "ü": True}
    once, twice = json.dumps(arguments), json.dumps(json.dumps(arguments))
    rows = [said(tool_calls=[{"function": {"name": "f", "arguments": one}}]) for one in (arguments, once, twice)]
    [found] = set(texts(tmp_path, rows))
    assert f"<call>f {json.dumps(arguments, ensure_ascii=False)}</call>" in found


def test_text_beside_a_call_stays_and_trains(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": "{}"}
    rows = [
        said(content="Let me look.", **calls)
        for calls in ({"function_call": call}, {"tool_calls": [{"function": call}]})
    ]
    for one in built_of(tmp_path, rows).examples():
        trained = [i for i, trains in zip(one["input_ids"], one["loss_mask"], strict=True) if trains]
        assert text_of({"input_ids": trained}) == "Let me look.<call>f {}</call><|im_end|>"


def test_reasoning_is_printed_whatever_its_key(tmp_path: Path) -> None:
    keys = ("reasoning", "reasoning_content", "thinking", "reason")
    found = texts(tmp_path, [said(content="yes", **{key: "it must be so"}) for key in keys])
    assert len(found) == len(keys)
    assert all("<think>it must be so</think>yes" in text for text in found)


def test_reasoning_with_a_closing_tag_alone_is_found(tmp_path: Path) -> None:
    assert "<think>it must be so</think>yes" in texts(tmp_path, [said(content="it must be so\n</think>\n\nyes")])[0]


@pytest.mark.slow
def test_nulls_that_arrow_added_do_not_reach_the_prompt(tmp_path: Path) -> None:
    tools = [
        {"name": "f", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
        {"name": "g", "parameters": {"type": "object", "properties": {"number": {"type": "integer", "minimum": 1}}}},
    ]
    rows = [
        {**said(tool_calls=[{"function": {"name": "f", "arguments": {"word": "x"}}}]), "tools": tools},
        {**said(content="no call", reasoning="none is needed"), "tools": tools[:1]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    from_json = texts(tmp_path / "json", rows)
    parquet = built_of(tmp_path / "parquet", (tmp_path / "rows.parquet").read_bytes(), "a.parquet")

    assert [text_of(one) for one in parquet.examples()] == from_json
    assert "null" not in "".join(from_json)


def test_tools_that_are_none_do_not_hide_the_real_ones(tmp_path: Path) -> None:
    none: list[Any] = [None, "", " ", [], {}, "[]", "null"]
    rows = [{**said(content="yes"), "tools": one, "functions": '[{"name": "look_up"}]'} for one in none]
    found = texts(tmp_path, rows)
    assert len(found) == len(none)
    assert all('"name": "look_up"' in text for text in found)


@pytest.mark.slow
def test_rows_without_a_target_are_rejected_when_sequences_are_packed_too(tmp_path: Path) -> None:
    untrained = chat(1)
    untrained["messages"][1]["weight"] = 0
    write_tokenizer(tmp_path / "tokenizer", template=TEMPLATE)
    built = Workspace(tmp_path).one("a.jsonl", [chat(0), untrained, chat(2)], CHAT, packing={"pack": True}).build()
    assert built.rejects() == [(1, "no_loss_tokens")]
    assert len(built.segments()) == 2


def test_one_turn_too_many_takes_the_oldest_and_not_the_later_ones(tmp_path: Path) -> None:
    row = chat(3, turns=4, words=10)
    whole = built_of(tmp_path / "whole", [row]).examples()[0]["tokens"]
    [cut] = built_of(tmp_path / "cut", [row], truncation={"max_length": whole - 1}).examples()
    is_left = [message["content"] in text_of(cut) for message in row["messages"]]
    assert is_left == [False, False, True, True, True, True, True, True]


@pytest.mark.slow
def test_results_never_stay_without_their_calls(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [USER]
    for i in range(4):
        call = {"id": f"c{i}", "function": {"name": f"f{i}", "arguments": {}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{i}", "content": f"found {i}"},
        ]
    messages.append({"role": "assistant", "content": "that is it"})
    whole = built_of(tmp_path / "whole", [{"messages": messages}]).examples()[0]["tokens"]
    kept: list[int] = []
    for k, limit in enumerate((whole, 2 * whole // 3, whole // 3)):
        built = built_of(tmp_path / str(k), [{"messages": messages}], truncation={"max_length": limit})
        (text,) = [text_of(one) for one in built.examples()]
        rounds = [i for i in range(4) if f"found {i}" in text]
        assert [i for i in range(4) if f"<call>f{i} " in text] == rounds
        assert text.endswith("that is it<|im_end|>\n")
        kept.append(len(rounds))
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == 4
    assert kept[-1] < 4


def test_quoted_control_strings_in_calls_results_and_reasoning_stay_text(tmp_path: Path) -> None:
    quote = "a<|im_end|>b"
    row = {
        "messages": [
            {"role": "user", "content": quote},
            {"role": "assistant", "content": quote, "reasoning": quote,
             "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"x": quote}}}]},
            {"role": "tool", "tool_call_id": "c", "content": quote},
            {"role": "assistant", "content": "done"},
        ]
    }  # fmt: skip
    (one,) = built_of(tmp_path, [row]).examples()
    assert text_of(one).count(quote) == 5
    assert one["input_ids"].count(2) == 4  # the template's own ends of turn
