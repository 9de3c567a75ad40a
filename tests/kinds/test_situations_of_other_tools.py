"""Situations from public reports about other tools, beyond those of the real data: what trains is what the data says.

Each test names the report whose situation it rebuilds, with rows of our own. Text in capitals must train, other text of
the rows never.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rowmill.core.errors import PipelineError
from tests.support.recipes import Workspace, tokenizer_json

USER = {"role": "user", "content": "why?"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def talk(*answers: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """Return a conversation in which each message of the model follows a question."""
    return {"messages": [message for answer in answers for message in (USER, answer)], **columns}


def answer(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def trained_texts(folder: Path, row: dict[str, Any], template: str = "chatml", **groups: Any) -> list[str]:
    """Build one row; return the trained text of each stretch of trained tokens of its examples."""
    groups = {"template": {"chat_template": template}, "seq_len": 2048, **groups}
    found: list[str] = []
    decode = Tokenizer.from_str(tokenizer_json()).decode
    for example in Workspace(folder).one("a.jsonl", [row], **groups).examples():
        run: list[int] = []
        for token, trains in zip([*example["input_ids"], 0], [*example["loss_mask"], False], strict=True):
            if trains:
                run.append(token)
            elif run:
                found.append(decode(run, skip_special_tokens=False))
                run = []
    return found


def test_end_of_turn_trains_where_it_is_the_padding_too(tmp_path: Path) -> None:
    """huggingface/trl pull request 456: with pad = EOS, its collator masks every EOS, and the model never stops."""
    row = talk(answer("GOOD"))
    texts = trained_texts(tmp_path, row, packing={"pack": False})

    assert texts == ["GOOD<|im_end|>"]


@pytest.mark.parametrize("template", ["llama3.1", "qwen3", "gemma3", "mistral"])
def test_answers_train_in_templates_without_generation_blocks(template: str, tmp_path: Path) -> None:
    """marin-community/marin issue 7237: the mask is all zeros, silently, for every template as it is published."""
    texts = trained_texts(tmp_path, talk(answer("FIRST"), answer("SECOND")), template)

    assert [re.findall("[A-Z]{4,}", text) for text in texts] == [["FIRST"], ["SECOND"]]
    assert "why" not in "".join(texts)


def test_each_answer_of_a_chat_trains_without_the_header(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Speech pull request 16284: the last answer alone; ml-explore/mlx-lm pull request 584: its header."""
    texts = trained_texts(tmp_path, talk(answer("FIRST"), answer("SECOND"), answer("THIRD")))

    assert texts == ["FIRST<|im_end|>", "SECOND<|im_end|>", "THIRD<|im_end|>"]


def test_questions_of_a_mistral_chat_do_not_train(tmp_path: Path) -> None:
    """axolotl-ai-cloud/axolotl issue 2089: the turns of its template are found at wrong places, and questions train."""
    texts = trained_texts(tmp_path, talk(answer("NOT MASKED"), answer("NOT MASKED"), answer("NOT MASKED")), "mistral")

    assert len(texts) == 3
    assert all("NOT MASKED" in text and "INST" not in text and "why" not in text for text in texts)


def test_call_of_a_function_trains_with_its_arguments(tmp_path: Path) -> None:
    """fw-ai/cookbook pull request 394: structured calls are dropped from the text, and the model never learns them."""
    call = {"type": "function", "function": {"name": "LOOK", "arguments": {"CITY": "OSLO"}}}
    row = talk(answer("", tool_calls=[call]), tools=TOOLS)
    (text,) = trained_texts(tmp_path, row, "qwen3", gates={"rejects": {"at_most": 1}})

    assert all(word in text for word in ("LOOK", "CITY", "OSLO"))


def talk_with_call(**flag: Any) -> dict[str, Any]:
    call = {"role": "tool_call", "content": '{"name": "look", "arguments": {}}', **flag}
    return {"messages": [USER, call, {"role": "tool_response", "content": "rain"}, answer("GOOD")], "tools": TOOLS}


def test_flag_of_a_call_is_obeyed_like_one_of_an_answer(tmp_path: Path) -> None:
    """modelscope/ms-swift issue 9263: `loss: false` on a message `tool_call` had no effect."""
    assert trained_texts(tmp_path, talk_with_call(loss=False), "qwen3") == ["<think>\n\n</think>\n\nGOOD<|im_end|>"]


@pytest.mark.parametrize("value", [0, "0"])
def test_flag_of_another_name_blocks_until_the_recipe_says_what_it_means(value: Any, tmp_path: Path) -> None:
    """baidu-baige/LoongForge pull request 89: `loss_mask` on a message, as a number or as text."""
    rows = [talk_with_call(loss_mask=value)] * 20
    workspace = Workspace(tmp_path)

    with pytest.raises(PipelineError, match=r"unread_flags.*format\.message_flags"):
        workspace.one("a.jsonl", rows, template={"chat_template": "qwen3"}, seq_len=2048).build()


def test_result_of_a_tool_does_not_train(tmp_path: Path) -> None:
    """huggingface/trl pull request 6328: results of tools in rows of token ids were trained like the model's text."""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [USER, answer("", tool_calls=[call]), {"role": "tool", "content": "rain"}, answer("GOOD")]
    texts = trained_texts(tmp_path, {"messages": messages, "tools": TOOLS}, "qwen3")

    assert "rain" not in "".join(texts)
    assert len(texts) == 2


def test_truncation_keeps_the_answer_of_a_long_question(tmp_path: Path) -> None:
    """huggingface/trl issue 6668: every label is cut off, the loss is reported as 0.0, and the run looks successful."""
    row = {"messages": [{"role": "user", "content": "why " * 90}, answer("GOOD")]}

    assert trained_texts(tmp_path, row, seq_len=32) == ["GOOD<|im_end|>"]


def test_answer_marked_as_bad_does_not_train(tmp_path: Path) -> None:
    """hiyouga/LLaMA-Factory issue 3803: with labels beside the rows, all of them train as good answers."""
    workspace = Workspace(tmp_path)
    rows = [talk(answer(f"{'GOOD' if i % 2 else 'bad'} {i}"), label=bool(i % 2)) for i in range(20)]

    with pytest.raises(PipelineError, match="preference_data"):
        workspace.one("a.jsonl", rows, template={"chat_template": "chatml"}).build()


def test_model_that_speaks_first_trains(tmp_path: Path) -> None:
    """axolotl-ai-cloud/axolotl pull request 723: a conversation that begins with the model lost its first message."""
    row = {"messages": [answer("HELLO"), USER, answer("GOOD")]}

    assert trained_texts(tmp_path, row) == ["HELLO<|im_end|>", "GOOD<|im_end|>"]


def test_reasoning_without_its_opening_tag_is_reasoning(tmp_path: Path) -> None:
    """huggingface/trl pull request 6363: the prompt printed `<think>`, so a stored answer has the closing tag alone."""
    texts = trained_texts(tmp_path, talk(answer("THINKING.\n</think>\n\nGOOD")), "qwen3")

    assert texts == ["<think>\nTHINKING.\n</think>\n\nGOOD<|im_end|>"]


def test_answers_of_earlier_turns_train_where_a_template_drops_their_reasoning(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge pull request 5633: the answer after the dropped reasoning fell out of the mask."""
    row = talk(answer("FIRST", reasoning_content="so"), answer("SECOND", reasoning_content="THEN"))
    first, second = trained_texts(tmp_path, row, "qwen3")

    assert (first, second) == ("FIRST<|im_end|>", "<think>\nTHEN\n</think>\n\nSECOND<|im_end|>")
