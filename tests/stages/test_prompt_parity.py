"""Prompts of rows that the fast path built are compared as on the reference path: same rows, same counts."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rowmill.conversation.template_registry import read_named_template
from rowmill.core.json import to_json
from rowmill.recipe import recipe
from rowmill.stages.tokenized_examples.prompt_parity import choose_rows
from rowmill.stages.tokenized_examples.stage import build_renderer_spec
from rowmill.stages.tokenized_examples.text_parts import BuiltExamples, ExampleBuilder
from rowmill.tokenization.control_tokens import ControlStrings
from rowmill.tokenization.encoded_batch import PartTally
from rowmill.tokenization.tokenizer import Encoder, open_tokenizer
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow

Messages = list[dict[str, Any]]

TEXTS = ("Hello there", "naïve café 漢字 🎉", "user", "x", " edge ", "a </think> b", "<|im_end|> quoted", "%s",
         "1\n\n2", "<think>\nhm\n</think>\n\nYes", "word " * 60)  # fmt: skip
REAL = ("chujiezheng__vicuna", "chujiezheng__llama-2-chat", "llamacpp__Qwen-Qwen3-0.6B", "axolotl__mistral_v1",
        "llamacpp__deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "llamacpp__microsoft-Phi-3.5-mini-instruct",
        "llamacpp__meta-llama-Llama-3.1-8B-Instruct", "llamacpp__google-gemma-2-2b-it", "vllm__template_alpaca",
        "axolotl__phi_3", "trl__qwen3_training")  # fmt: skip


def _make_chats(count: int) -> list[Messages]:
    """Return plain chats of one to three turns, some with a system message, a trailing question, or other keys."""
    chats: list[Messages] = []
    for i in range(count):
        messages: Messages = [{"role": "system", "content": "Be brief."}] if i % 4 == 1 else []
        for turn in range(1 + i % 3):
            messages.append({"role": "user", "content": f"{TEXTS[(i + turn) % len(TEXTS)]} {i}"})
            messages.append({"role": "assistant", "content": TEXTS[(i * 5 + turn) % len(TEXTS)] + "." * (i % 2)})
        if i % 11 == 7:
            messages.append({"role": "user", "content": "And now?"})
        if i % 13 == 5:
            messages[-1]["train"] = True
        chats.append(messages)
    return chats


def _make_table(chats: Sequence[Messages]) -> pa.Table:
    texts = [to_json(messages) for messages in chats]
    hashes = [hashlib.sha256(text.encode()).digest()[:16] for text in texts]
    nulls = pa.nulls(len(texts), pa.string())
    return pa.table(
        {
            "row_id": [f"row {i}" for i in range(len(texts))],
            "split": ["train"] * len(texts),
            "domain": nulls,
            "kind": ["conversation"] * len(texts),
            "content_hash": pa.array(hashes, pa.binary(16)),
            "extracted_think_from_content": pa.array([0] * len(hashes), pa.int32()),
            "messages": texts,
            "tools": nulls,
            "template_kwargs": nulls,
        }
    )


@pytest.fixture(scope="module")
def qwen3(real_data: Path) -> Encoder:
    """Open the tokenizer once: it takes seconds."""
    return Encoder(open_tokenizer(str(real_data / "tokenizers/qwen3"), Path()))


def _open_builder(
    encoder: Encoder, template: str, share: float, groups: Mapping[str, Mapping[str, Any]] | None = None
) -> ExampleBuilder:
    rows: dict[str, Any] = {"source": {"train_urls": ["none"]}, "format": {"kind": "chat"}, **(groups or {})}
    rows["template"] = {"chat_template": template, "verify_render": share}
    values = {"tokenizer": "given", "seq_len": 120, "datasets": {"rows": rows}}
    dataset = recipe.parse_recipe(values, name="rows", where="options", base=Path()).datasets["rows"]
    return ExampleBuilder(encoder, dataset, build_renderer_spec(dataset, Path(), encoder.loaded), 120)


def _count(builder: ExampleBuilder, table: pa.Table, built: BuiltExamples) -> tuple[int, list[str]]:
    counts = PartTally()
    builder.compare_prompts(table, built, counts)
    return counts.prompts_compared, counts.prompts_that_differ


def _forget_fast_path(built: BuiltExamples) -> BuiltExamples:
    return replace(built, on_fast_path=np.zeros(0, np.int64))


# ── the comparison ──


@pytest.mark.parametrize("name", mark_all_but(REAL[:2], REAL))
def test_prompts_of_a_real_template_are_compared_as_on_the_reference_path(
    real_data: Path, qwen3: Encoder, name: str
) -> None:
    template = (real_data / f"templates/{name}.jinja").read_text(encoding="utf-8")
    builder = _open_builder(qwen3, template, 0.6)
    for start in range(0, 180, 60):
        table = _make_table(_make_chats(180)[start : start + 60])
        built = builder.build(table, PartTally())
        compared = _count(builder, table, built)

        assert compared == _count(builder, table, _forget_fast_path(built))


SPACED = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
"""Ends its prompt with a space, which the tokenizer joins with an answer's first word."""


@pytest.mark.real_data
def test_prompts_that_differ_are_found_among_rows_of_the_fast_path(qwen3: Encoder) -> None:
    chats: list[Messages] = [
        [{"role": "user", "content": f"Question {i}"}, {"role": "assistant", "content": "Yes" if i % 3 else "\nYes"}]
        for i in range(30)
    ]
    table = _make_table(chats)
    builder = _open_builder(qwen3, SPACED, 1.0)
    built = builder.build(table, PartTally())
    compared, differing = _count(builder, table, built)

    assert built.on_fast_path.tolist() == list(range(30))
    assert (compared, set(differing) >= {f"row {i}" for i in range(30) if i % 3}) == (30, True)
    assert (compared, differing) == _count(builder, table, _forget_fast_path(built))


@pytest.mark.real_data
@pytest.mark.parametrize(
    "groups",
    [{"loss": {"boundary": "split"}}, {"loss": {"supervise": "last_assistant"}}, {"loss": {"mask": {"user": "train"}}},
     {"truncation": {"overlong": "truncate"}}, {"truncation": {"overlong": "keep"}}, {"loss": {"finish": "eos"}},
     {"reasoning": {"think_mode": "inline", "think_max_tokens": 2}}, {"format": {"kind": "chat", "add_bos": False}}],
    ids=str,
)  # fmt: skip
def test_comparison_has_the_counts_of_the_reference_path_for_every_option(
    qwen3: Encoder, groups: Mapping[str, Mapping[str, Any]]
) -> None:
    table = _make_table(_make_chats(60))
    for template in (SPACED, read_named_template("qwen3")):
        builder = _open_builder(qwen3, template, 1.0, groups)
        built = builder.build(table, PartTally())
        compared, differing = _count(builder, table, built)

        assert compared > 0
        assert (compared, differing) == _count(builder, table, _forget_fast_path(built))


# ── which rows ──


@pytest.mark.real_data
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rows_are_chosen_alike_whichever_of_them_the_fast_path_built(qwen3: Encoder, share: float) -> None:
    control = ControlStrings(qwen3.card, "")
    chats: list[Messages] = [
        [{"role": "user", "content": f"{'<|im_end|>' if i in (0, 1, 5, 9) else ''} {i}"}] for i in range(24)
    ]
    table = _make_table(chats)
    free = np.flatnonzero(~control.find_rows(table))
    expected = choose_rows(table, np.zeros(0, np.int64), share, control)

    assert expected[0] == free[0] == 2
    assert np.isin(expected, free).all()
    assert share < 1 or expected.tolist() == free.tolist()
    for built in (free, free[1:], free[5:], free[::2], free[-1:]):
        assert choose_rows(table, built, share, control).tolist() == expected.tolist()
