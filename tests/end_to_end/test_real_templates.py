"""Forty public chat templates on real chats: the reference's text, both engines, masks against training templates.

CI runs six templates, and two with two tokenizers; the campaign runs all of them with all tokenizers.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.generate.template_table import read_template_file
from rowmill.checks.mask_judge import JinjaTemplate
from rowmill.conversation.character_ownership import RenderedConversation
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import iterate_text_runs, observe_template_once
from rowmill.conversation.template_engines import replace_generation_tags
from rowmill.conversation.template_registry import list_bundled_templates, read_named_template
from rowmill.core.json import Json
from rowmill.kinds.base import DatasetOptions
from rowmill.kinds.catalog import Auto
from rowmill.kinds.reading.canonicalization import Canonicalizer
from rowmill.kinds.shared.reasoning import Reasoning
from rowmill.schema.rows import Conversation, MaskedConversation, Message, Rejected, Row
from rowmill.tokenization.control_tokens import ControlStrings
from rowmill.tokenization.encoded_batch import Example, PartTally, make_examples
from rowmill.tokenization.tokenizer import Encoder, compute_byte_positions, open_tokenizer
from tests.support.messages import assistant, call, draw_mask, result, system, trained_characters, user
from tests.support.tiers import mark_all_but

pytestmark = [pytest.mark.slow, pytest.mark.real_data]

TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = """axolotl__deepseek_v3 axolotl__gemma3 axolotl__mistral_v1 axolotl__mistral_v2v3 axolotl__mistral_v3_tekken
axolotl__phi_3 axolotl__phi_4 chujiezheng__llama-2-chat chujiezheng__llama-3-instruct chujiezheng__vicuna
chujiezheng__zephyr llamacpp__CohereForAI-c4ai-command-r-plus-tool_use llamacpp__GLM-4.6
llamacpp__HuggingFaceTB-SmolLM3-3B llamacpp__NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use
llamacpp__Qwen-Qwen2.5-7B-Instruct llamacpp__Qwen-Qwen3-0.6B llamacpp__deepseek-ai-DeepSeek-R1-Distill-Qwen-32B
llamacpp__deepseek-ai-DeepSeek-V3.1 llamacpp__google-gemma-2-2b-it llamacpp__ibm-granite-granite-3.3-2B-Instruct
llamacpp__meta-llama-Llama-3.1-8B-Instruct llamacpp__meta-llama-Llama-3.2-3B-Instruct
llamacpp__microsoft-Phi-3.5-mini-instruct llamacpp__mistralai-Mistral-Nemo-Instruct-2407
llamacpp__openai-gpt-oss-120b trl__cohere_training trl__deepseekv3_training trl__gemma3_training
trl__gemma_training trl__glm4moe_training trl__gptoss_training trl__llama3_training trl__phi3_training
trl__qwen2_5_training trl__qwen3_training vllm__template_alpaca vllm__template_chatml
vllm__tool_chat_template_hermes vllm__tool_chat_template_mistral""".split()
CI_TEMPLATES = (
    "axolotl__mistral_v3_tekken", "chujiezheng__zephyr", "llamacpp__Qwen-Qwen3-0.6B", "llamacpp__openai-gpt-oss-120b",
    "trl__glm4moe_training", "vllm__tool_chat_template_hermes",
)  # fmt: skip
"""Those that CI runs: without and with blocks, tools and reasoning."""
EVERY_TEMPLATE = mark_all_but(CI_TEMPLATES, TEMPLATES)
SLOW = {"llamacpp__CohereForAI-c4ai-command-r-plus-tool_use": "the template uses the filter indent"}
"""Templates that take the reference path, and why."""


REASONS = {"template_error", "content_dropped"}
"""Reasons that follow from the templates' own limits; any other reason is a defect."""


@dataclass(frozen=True)
class Chat:
    source: str
    messages: list[Message]
    tools: list[Json] | None


FILES = {
    "fastchat": ("chat/fastchat_dummy_conversation.json", 12),
    "glaive": ("tools/glaive_toolcall_en_demo.json", 12),
    "tau": ("tools/tau_airline_gpt4o.messages.jsonl", 6),
    "reason": ("reasoning/reason_tool_use_demo_50.jsonl", 8),
}


@lru_cache(maxsize=1)
def chats(folder: Path) -> list[Chat]:
    """Read the first chats of each real source as a build does, tags in texts left where they are."""
    read = Canonicalizer(DatasetOptions(format=Auto(), reasoning=Reasoning(extract_think_tags=False)))
    found: list[Chat] = []
    for source, (file, count) in FILES.items():
        text = (folder / file).read_text(encoding="utf-8")
        records = json.loads(text) if file.endswith(".json") else map(json.loads, text.split("\n"))
        for record in islice(records, count):
            row = read(record)
            assert isinstance(row, Row)
            messages = [{k: v for k, v in m.items() if k != "arguments_source"} for m in row.messages]
            found.append(Chat(source, messages, None if row.tools is None else list(row.tools)))
    return found


@lru_cache(maxsize=64)
def renderer(folder: Path, name: str) -> Renderer:
    return Renderer(RendererSpec(read_text(folder, name), TOKENS))


def read_text(folder: Path, name: str) -> str:
    return (folder / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def as_seen(one: Renderer, chat: Chat) -> tuple[list[Message], Any]:
    return one.adaptation.messages(chat.messages), one.adaptation.tools(chat.tools)


@pytest.mark.parametrize("name", EVERY_TEMPLATE)
def test_text_of_real_chats_is_the_references(name: str, real_data: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    one = renderer(real_data, name)
    judged_by = JinjaTemplate(one.spec.text, TOKENS, {}, one.spec.now)
    accepted = 0
    for chat in chats(real_data):
        result, plain = one.render(chat.messages, chat.tools, {}), one.plain(chat.messages, chat.tools, {})
        assert plain == (result.text if isinstance(result, RenderedConversation) else result)
        if isinstance(result, RenderedConversation):
            accepted += 1
            adapted, tools = as_seen(one, chat)
            theirs = render_jinja_template([adapted], tools=tools, chat_template=one.spec.text, **TOKENS)[0][0]
            assert judged_by.render(adapted, tools) == result.text
            if not observe_template_once(one).date_dependent:
                assert result.text == theirs
    assert accepted >= 15
    assert one.fast_path_obstacle == SLOW.get(name, "")


@pytest.mark.parametrize("name", EVERY_TEMPLATE)
def test_real_chats_are_masked_or_refused_for_the_templates_own_limits(name: str, real_data: Path) -> None:
    masker = Masker(renderer(real_data, name), Loss(), MaskRules())
    outcomes: Counter[str] = Counter()
    for chat in chats(real_data):
        result = masker.mask(Conversation(chat.messages, chat.tools))
        outcomes["masked" if isinstance(result, MaskedConversation) else result.reason] += 1
        if isinstance(result, MaskedConversation):
            _check_mask(result, chat)
    assert set(outcomes) <= {"masked", *REASONS}
    assert outcomes["masked"] >= 12


def _check_mask(result: MaskedConversation, chat: Chat) -> None:
    trained = trained_characters(result)
    for piece in result.pieces:
        inside = set(range(piece.start, piece.end)) <= trained
        touched = not trained.isdisjoint(range(piece.start, piece.end))
        is_model = chat.messages[piece.message]["role"] == "assistant"
        assert inside if is_model else not touched


# What a training template trains beyond our mask, and why each is right in its own way.
LINE_END = "\n"
"""White space after the end of turn; ours is `loss.trailing: mask`."""
TRUTH: dict[str, tuple[str | None, set[str]]] = {
    "qwen3": ("llamacpp__Qwen-Qwen3-0.6B", {LINE_END}),
    # Its block also begins before the line end of the header, which the generation prompt prints.
    "qwen2_5": ("llamacpp__Qwen-Qwen2.5-7B-Instruct", {LINE_END}),
    "llama3": (None, set()),
    "gemma": ("llamacpp__google-gemma-2-2b-it", {LINE_END}),
    "gemma3": ("axolotl__gemma3", {LINE_END}),
    # It trains the EOS that follows the last turn, although <|end|> has ended it.
    "phi3": ("llamacpp__microsoft-Phi-3.5-mini-instruct", {LINE_END, "\n</s>"}),
    "glm4moe": ("llamacpp__GLM-4.6", set()),
    # They train the header, which the generation prompt prints.
    "gptoss": ("llamacpp__openai-gpt-oss-120b", {"<|start|>assistant"}),
    "deepseekv3": ("axolotl__deepseek_v3", {"<｜Assistant｜>", "<｜tool▁outputs▁end｜>"}),
    "cohere": (None, set()),
}
COUNT_ALL: dict[str, str] = dict.fromkeys(
    ("system", "user", "assistant_text", "text_beside_call", "call_name", "call_arguments", "tool_result", "tool_list"),
    "count",
)


@pytest.mark.parametrize("name", mark_all_but(["qwen3", "gptoss"], TRUTH))
def test_mask_by_the_closed_list_equals_the_training_templates_blocks(name: str, real_data: Path) -> None:
    stock, explained = TRUTH[name]
    training = renderer(real_data, f"trl__{name}_training")
    listed = Renderer(replace(training.spec, text=replace_generation_tags(training.spec.text)))
    truth = Masker(training, Loss(), MaskRules(spans="generation", on_dropped=COUNT_ALL))
    ours = [Masker(listed, Loss(), MaskRules(on_dropped=COUNT_ALL))]
    if stock:
        ours.append(Masker(renderer(real_data, stock), Loss(), MaskRules(on_dropped=COUNT_ALL)))
    compared: Counter[int] = Counter()
    for chat in chats(real_data):
        conversation = Conversation(chat.messages, chat.tools)
        theirs = truth.mask(conversation)
        for way, masker in enumerate(ours):
            mine = masker.mask(conversation)
            if isinstance(theirs, Rejected) or isinstance(mine, Rejected) or mine.text != theirs.text:
                continue
            compared[way] += 1
            expected, found = trained_characters(theirs), trained_characters(mine)
            assert found <= expected
            assert set(iterate_text_runs(theirs.text, expected - found)) <= explained
    assert all(compared[way] >= 5 for way in range(len(ours)))


WITH_BLOCKS = [name for name in TEMPLATES if name.startswith("trl__") or name == "axolotl__phi_4"]


def test_bundled_qwen3_prints_what_the_models_own_template_prints(real_data: Path) -> None:
    own, stock = Renderer(RendererSpec(read_named_template("qwen3"))), renderer(real_data, "llamacpp__Qwen-Qwen3-0.6B")
    for chat in chats(real_data):
        for kwargs in ({}, {"enable_thinking": False, "add_generation_prompt": True}):
            assert own.plain(chat.messages, chat.tools, kwargs) == stock.plain(chat.messages, chat.tools, kwargs)


GLM, PHI = "llamacpp__GLM-4.6", "llamacpp__microsoft-Phi-3.5-mini-instruct"
TALK = [user("U1"), assistant("A1"), user("U2"), assistant("A2")]
CALLED = [TALK[0], assistant("", tool_calls=[call({"at": "it"})]), result("R"), TALK[1]]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        (GLM, TALK, "<|assistant|>⟦\n<think></think>\nA1<|user|>⟧\nU2<|assistant|>⟦\n<think></think>\nA2<|user|>⟧"),
        (PHI, TALK, "<|assistant|>\n⟦A2<|end|>⟧\n</s>"),
        ("axolotl__deepseek_v3", CALLED, "<｜tool▁outputs▁end｜>⟦A1<｜end▁of▁sentence｜>⟧"),
        ("axolotl__mistral_v2v3", [system("Be kind"), *TALK], "content_dropped: system"),
    ],
)
def test_mask_of_a_real_template_is_the_vector(
    name: str, messages: list[Message], expected: str, real_data: Path
) -> None:
    drawn = draw_mask(Masker(renderer(real_data, name), Loss(), MaskRules()).mask(Conversation(messages)))
    assert drawn.endswith(expected)


HI = [user("Hi"), assistant("Hello")]
HI_IDS = [151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271, 9707, 151645, 198]


@pytest.mark.parametrize("template", ["llamacpp__Qwen-Qwen3-0.6B", "qwen3"])
@pytest.mark.parametrize(("kwargs", "trained"), [({}, (9, 15)), ({"enable_thinking": False}, (13, 15))])
def test_ids_and_mask_of_qwen3_are_the_vector(
    template: str, kwargs: dict[str, Json], trained: tuple[int, int], real_data: Path
) -> None:
    _, encoder = opened(real_data, "qwen3")
    text = replace_generation_tags(read_template_file(real_data, template))
    spec = RendererSpec(text, encoder.card.special_tokens, kwargs)
    result = Masker(Renderer(spec), Loss(), MaskRules()).mask(Conversation(HI))
    assert isinstance(result, MaskedConversation)

    (example,) = make_examples([result], [[]], encoder, PartTally())
    assert isinstance(example, Example)
    assert example.ids.tolist() == HI_IDS
    assert example.mask.tolist() == [trained[0] <= i < trained[1] for i in range(16)]


# ── an independent judge: which characters of the print follow from which message's text ──
def _bounds(one: Renderer, messages: list[Message], tools: list[Json] | None, index: int) -> tuple[int, int] | None:
    """Return the characters of the plain print that change with one message's text, or null if its text does more."""
    before = one.plain(messages, tools, {})
    changed = [{**m, "content": "Zqzqz"} if i == index else m for i, m in enumerate(messages)]
    after = one.plain(changed, tools, {})
    if not isinstance(before, str) or not isinstance(after, str) or "Zqzqz" not in after:
        return None
    start = len(os.path.commonprefix([before, after]))
    end = len(before) - len(os.path.commonprefix([before[start:][::-1], after[start:][::-1]]))
    own = messages[index]["content"].strip()
    # Text that steers the template, as a think tag does, is no judge of its own place.
    return (start, end) if before[start:end].strip() in own and len(before[start:end].strip()) > len(own) // 2 else None


@pytest.mark.parametrize("name", EVERY_TEMPLATE)
def test_characters_that_change_with_a_message_train_if_and_only_if_it_is_the_models(
    name: str, real_data: Path
) -> None:
    one = renderer(real_data, name)
    masker = Masker(one, Loss(), MaskRules(on_dropped=COUNT_ALL))
    judged: Counter[str] = Counter()
    for chat in short_chats(real_data):
        result = masker.mask(Conversation(chat.messages, chat.tools))
        if isinstance(result, Rejected):
            continue
        trained = trained_characters(result)
        for index, message in enumerate(chat.messages[:8]):
            bounds = _bounds(one, chat.messages, chat.tools, index) if message["content"].strip() else None
            if bounds is not None:
                held = {*range(*bounds)} & trained
                is_model = message["role"] == "assistant"
                assert len(held) == (bounds[1] - bounds[0] if is_model else 0), (chat.source, index)
                judged[message["role"]] += 1
    assert judged["assistant"] >= 5
    assert judged["user"] >= 5


# ── forty templates × four tokenizers ──

TOKENIZERS = ("gpt2", "qwen3", "smollm3", "tinyllama")


@lru_cache(maxsize=4)
def opened(folder: Path, name: str) -> tuple[Any, Encoder]:
    """Open a tokenizer once, as `transformers` does and as a build does."""
    from transformers import AutoTokenizer

    path = folder / "tokenizers" / name
    return AutoTokenizer.from_pretrained(path), Encoder(open_tokenizer(str(path), path))


def absent(special: Mapping[str, str]) -> dict[str, str]:
    """Return the tokens that a tokenizer lacks, which a template may print: undefined there, empty here."""
    return {name: "" for name in ("bos_token", "eos_token") if name not in special}


def short_chats(folder: Path) -> list[Chat]:
    """Take a chat or two of each source, of moderate length: ids are compared for every template and tokenizer."""
    by_source: dict[str, list[Chat]] = {}
    for chat in chats(folder):
        if sum(len(m["content"]) for m in chat.messages) < 6000:
            by_source.setdefault(chat.source, []).append(chat)
    return [chat for found in by_source.values() for chat in found[:2]]


TWO = ("llamacpp__Qwen-Qwen3-0.6B", "axolotl__mistral_v3_tekken")


@pytest.mark.parametrize(
    ("tokenizer", "templates"),
    [
        *(pytest.param(one, TEMPLATES, marks=pytest.mark.campaign, id=f"{one}-every template") for one in TOKENIZERS),
        *(pytest.param(one, TWO, id=f"{one}-two templates") for one in ("qwen3", "tinyllama")),
    ],
)
def test_ids_of_templates_equal_transformers(tokenizer: str, templates: Sequence[str], real_data: Path) -> None:
    """Under `boundary: whole`, on rows without control strings: every id, on every row."""
    theirs, encoder = opened(real_data, tokenizer)
    special = {key: value for key, value in theirs.special_tokens_map.items() if isinstance(value, str)}
    compared: Counter[str] = Counter()
    for name in templates:
        text = read_text(real_data, name)
        one = Renderer(RendererSpec(text, special, control_tokens=ControlStrings(encoder.card, text).strings))
        masker = Masker(one, Loss(finish="none"), MaskRules(on_dropped=COUNT_ALL))
        kept: list[tuple[Chat, MaskedConversation]] = []
        for chat in short_chats(real_data):
            result = masker.mask(Conversation(chat.messages, chat.tools))
            if isinstance(result, MaskedConversation):
                kept.append((chat, result))
        made = make_examples([masked for _, masked in kept], [[] for _ in kept], encoder, PartTally())
        for (chat, masked), example in zip(kept, made, strict=True):
            assert isinstance(example, Example), (name, example)
            compared[name] += 1
            assert example.ids.tolist() == theirs(masked.text, add_special_tokens=False).input_ids, (name, chat.source)
            if not observe_template_once(one).date_dependent:
                adapted, tools = as_seen(one, chat)
                given = theirs.apply_chat_template(
                    adapted, tools=tools, chat_template=text, tokenize=True, return_dict=False, **absent(special)
                )
                assert example.ids.tolist() == given, (name, chat.source)
    assert len(compared) == len(templates)
    assert min(compared.values()) >= 3


MATCHING = {"qwen3": ("trl__qwen2_5_training", "trl__qwen3_training", "qwen2.5", "qwen3", "chatml")}
"""Tokenizer → templates whose control tokens it has, so that no token lies across an edge of a block."""


@pytest.mark.parametrize("tokenizer", ["qwen3", pytest.param("smollm3", marks=pytest.mark.campaign)])
def test_assistant_mask_of_every_template_with_blocks_equals_transformers(tokenizer: str, real_data: Path) -> None:
    """Token by token; theirs also trains a token of which one byte is in the block, ours if no other message has it."""
    theirs, encoder = opened(real_data, tokenizer)
    special = {key: value for key, value in theirs.special_tokens_map.items() if isinstance(value, str)}
    rules = MaskRules(spans="generation", on_dropped=COUNT_ALL)
    compared: Counter[str] = Counter()
    for name in [*WITH_BLOCKS, *list_bundled_templates()]:
        text = read_template_file(real_data, name)
        one = Renderer(RendererSpec(text, special, control_tokens=ControlStrings(encoder.card, text).strings))
        masker = Masker(one, Loss(), rules)
        for chat in short_chats(real_data):
            result = masker.mask(Conversation(chat.messages, chat.tools))
            if isinstance(result, Rejected) or observe_template_once(one).date_dependent or is_silent(result, chat):
                continue
            (example,) = make_examples([result], [[]], encoder, PartTally())
            assert isinstance(example, Example)
            adapted, tools = as_seen(one, chat)
            given = theirs.apply_chat_template(
                adapted, tools=tools, chat_template=text, return_dict=True, return_assistant_tokens_mask=True,
                **absent(special),
            )  # fmt: skip
            assert example.ids.tolist() == given["input_ids"]
            different = np.flatnonzero(example.mask != np.array(given["assistant_masks"], bool))
            assert set(different.tolist()) <= across_edges(encoder, result), name
            assert not len(different) or name not in MATCHING.get(tokenizer, ())
            compared[name] += 1
    assert sum(compared.values()) >= 100
    assert set(MATCHING.get(tokenizer, ())) <= set(compared)


def is_silent(masked: MaskedConversation, chat: Chat) -> bool:
    """Tell whether nothing of an assistant is printed; ours does not train its end, theirs does."""
    printed = {piece.message for piece in masked.pieces}
    return any(message["role"] == "assistant" and i not in printed for i, message in enumerate(chat.messages))


def across_edges(encoder: Encoder, masked: MaskedConversation) -> set[int]:
    """Return the tokens that lie across the start or the end of a trained span."""
    encoded, at = encoder.encode([masked.text]), compute_byte_positions(masked.text)
    edges = at[[place for span in masked.trained for place in (span.start, span.end)]]
    inside = (encoded.starts[:, None] < edges) & (edges < encoded.ends[:, None])
    return set(np.flatnonzero(inside.any(axis=1)).tolist())
