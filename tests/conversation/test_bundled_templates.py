"""The bundled templates: each renders like its family's own template, and its blocks train what the list would."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from docs.generate.template_table import read_template_file
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec, Template, resolve_template
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import observe_template_once
from rowmill.conversation.template_engines import replace_generation_tags
from rowmill.conversation.template_registry import (
    get_chat_template,
    list_bundled_templates,
    read_named_template,
    register_chat_template,
)
from rowmill.core.config import validate_options
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.schema.rows import Conversation, MaskedConversation, Message, Rejected
from tests.end_to_end.test_real_templates import TOKENS, chats
from tests.support.messages import assistant, system, trained_characters, user
from tests.support.recipes import Workspace, text_of
from tests.support.tiers import mark_all_but

NAMES = set("chatml qwen2.5 qwen3 llama3 llama3.1 mistral gemma3 phi3 glm4 zephyr vicuna alpaca".split())
DIFFERENCES = {"mistral": ("adds ' '",)}
"""Where blocks train otherwise than the list: nothing prompts the space before a Mistral answer, so it trains."""


def test_bundled_and_registered_templates_are_found_by_names_of_their_own() -> None:
    assert set(list_bundled_templates()) == NAMES

    with pytest.raises(ConfigError, match=r"'qwen4' is not a bundled template.*did you mean qwen3"):
        get_chat_template(Tokenizer(), chat_template="qwen4")

    for _ in range(2):
        register_chat_template("test-registered", "{{ 'registered' }}")
    options = validate_options(Template, {"chat_template": "test-registered"}, "template")

    assert resolve_template(options, tokenizer_chat_template=None) == "{{ 'registered' }}"
    for taken in ("test-registered", "qwen3"):
        with pytest.raises(ValueError, match="the name is taken"):
            register_chat_template(taken, "{{ 'other' }}")


@pytest.mark.parametrize("name", mark_all_but(["chatml", "llama3.1", "mistral", "qwen3"], list_bundled_templates()))
def test_bundled_template_takes_the_fast_path_and_its_blocks_train_what_the_list_would(name: str) -> None:
    renderer = Renderer(RendererSpec(read_named_template(name), TOKENS))
    contract = observe_template_once(renderer)

    assert renderer.render_path == "fast", renderer.fast_path_obstacle
    assert contract.generation_differences == DIFFERENCES.get(name, ())
    assert contract.generation_blocks == ("differs" if name in DIFFERENCES else "equal")
    assert contract.end_trained


@dataclass
class Tokenizer:
    chat_template: str | dict[str, str] | None = None
    vocabulary: tuple[str, ...] = ("a",)


@pytest.mark.parametrize(
    ("asked", "text"),
    [("qwen3", read_named_template("qwen3")), ("{{ messages }}", "{{ messages }}"), ("rag", "{{ 'rag' }}")],
)
def test_get_chat_template_returns_a_new_tokenizer_with_the_template(asked: str, text: str) -> None:
    tokenizer = Tokenizer({"rag": "{{ 'rag' }}"})
    changed = get_chat_template(tokenizer, chat_template=asked)
    assert (changed.chat_template, tokenizer.chat_template) == (text, {"rag": "{{ 'rag' }}"})
    assert changed.vocabulary is tokenizer.vocabulary


OWN_MODULE = """
from rowmill.formats import RowFormat
from rowmill.conversation.template_registry import register_chat_template
from rowmill.schema.rows import Row

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role | upper }}\\n{{ m.content }}<|im_end|>{% endfor %}"
register_chat_template("test-shouted", TEMPLATE)


class Asked(RowFormat):
    def rows(self, record):
        question, answer = {"role": "user", "content": "why?"}, {"role": "assistant", "content": record["a"]}
        return Row("conversation", messages=(question, answer))
"""


@pytest.mark.slow
def test_template_registered_by_the_module_of_a_custom_format_is_known_in_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "shouting.py").write_text(OWN_MODULE, encoding="utf-8")
    kind = {"kind": "python", "class": "shouting:Asked"}

    built = Workspace(tmp_path).one("a.jsonl", [{"a": "so"}], kind, template={"chat_template": "test-shouted"}).build()

    texts = [text_of(example) for example in built.examples()]
    assert texts == ["<|im_start|>USER\nwhy?<|im_end|><|im_start|>ASSISTANT\nso<|im_end|>"]


@pytest.mark.slow
@pytest.mark.real_data
def test_real_tokenizer_renders_with_the_template_of_get_chat_template(real_data: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_data / "tokenizers" / "tinyllama")
    before = tokenizer.chat_template

    changed = get_chat_template(tokenizer, chat_template="llama3")

    talk = [user("Hi"), assistant("Hello")]
    expected = Renderer(RendererSpec(read_named_template("llama3"), tokenizer.special_tokens_map)).plain(talk, None, {})
    assert changed.apply_chat_template(talk, tokenize=False) == expected
    assert tokenizer.chat_template == before != changed.chat_template


def same(ours: str, messages: list[Message], asked: bool) -> str:
    return ours


def without_last_header(ours: str, messages: list[Message], asked: bool) -> str:
    """Remove the header that ends our last answer; the model's own template leaves the answer open."""
    if asked or messages[-1]["role"] != "assistant":
        return ours
    return ours.removesuffix("<|user|>").removesuffix("<|observation|>")


def without_ends(ours: str, messages: list[Message], asked: bool) -> str:
    """Remove what makes Alpaca trainable: EOS, and the blank line that the original omits after a last question.

    The original also prints the place of the system text without one.
    """
    text = ("" if messages[0]["role"] == "system" else "\n\n") + ours.replace(TOKENS["eos_token"], "")
    if messages[-1]["role"] != "user":
        return text
    prompt = "### Response:\n" if asked else ""
    return text.removesuffix(prompt).removesuffix("\n\n") + prompt


@dataclass(frozen=True)
class Family:
    """A real template to compare with: what it cannot render, and how ours differs on purpose."""

    name: str
    real: str
    least: int
    """How many of the renders must be accepted by both."""
    kwargs: tuple[tuple[str, Json], ...] = ()
    seen_as: Callable[[str, list[Message], bool], str] = same
    trims: bool = False
    """It trims texts, which the family's first template did not."""
    drops_system: bool = False
    """It prints system text only where the last message is the question."""


TEKKEN = (("tekken", True),)
FAMILIES = [
    Family("qwen2.5", "llamacpp__Qwen-Qwen2.5-7B-Instruct", 200),
    Family("qwen2.5", "trl__qwen2_5_training", 200),
    Family("qwen3", "llamacpp__Qwen-Qwen3-0.6B", 200),
    Family("llama3", "trl__llama3_training", 200),
    Family("llama3", "chujiezheng__llama-3-instruct", 90),
    Family("llama3.1", "llamacpp__meta-llama-Llama-3.1-8B-Instruct", 200),
    Family("mistral", "vllm__tool_chat_template_mistral", 90, drops_system=True),
    Family("mistral", "axolotl__mistral_v2v3", 90, drops_system=True),
    Family("mistral", "llamacpp__mistralai-Mistral-Nemo-Instruct-2407", 90, TEKKEN, drops_system=True),
    Family("mistral", "axolotl__mistral_v3_tekken", 90, TEKKEN, drops_system=True),
    Family("gemma3", "axolotl__gemma3", 90),
    Family("gemma3", "trl__gemma3_training", 90),
    Family("phi3", "llamacpp__microsoft-Phi-3.5-mini-instruct", 200),
    Family("phi3", "trl__phi3_training", 200),
    Family("glm4", "llamacpp__GLM-4.6", 200, seen_as=without_last_header),
    Family("zephyr", "chujiezheng__zephyr", 90, trims=True),
    Family("vicuna", "chujiezheng__vicuna", 90),
    Family("alpaca", "vllm__template_alpaca", 200, seen_as=without_ends),
]


def talks(folder: Path) -> Iterator[tuple[list[Message], list[Json] | None]]:
    """Yield the real chats with and without system text, whole and up to the last message."""
    for chat in chats(folder):
        led = [system("Be kind."), *chat.messages]
        for messages in (chat.messages, led) if chat.messages[0]["role"] != "system" else (chat.messages,):
            yield messages, chat.tools
            yield messages[:-1], chat.tools


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize(
    "family", mark_all_but(list(FAMILIES)[::4], FAMILIES), ids=[f"{one.name}-{one.real}" for one in FAMILIES]
)
def test_bundled_template_prints_what_the_familys_own_prints(family: Family, real_data: Path) -> None:
    ours = Renderer(RendererSpec(read_named_template(family.name), TOKENS))
    theirs = Renderer(RendererSpec(read_template_file(real_data, family.real), TOKENS))
    compared: Counter[str] = Counter()
    for source, tools in talks(real_data):
        messages = [{**m, "content": m["content"].strip()} for m in source] if family.trims else source
        for asked in (False, True):
            prompt = {"add_generation_prompt": asked}
            expected = theirs.plain(messages, tools, prompt)
            found = ours.plain(messages, tools, {**dict(family.kwargs), **prompt})
            if isinstance(expected, Rejected):
                compared["refused"] += 1
            elif family.drops_system and messages[0]["role"] == "system" and messages[-1]["role"] != "user":
                compared["no system text"] += 1
            else:
                assert isinstance(found, str), found
                assert family.seen_as(found, messages, asked) == expected
                compared["equal"] += 1
    assert compared["equal"] >= family.least, compared


@pytest.mark.real_data
def test_bundled_zephyr_and_mistral_print_what_real_ones_print_and_system_text_before_the_question(
    real_data: Path,
) -> None:
    text = (real_data / "tokenizers/tinyllama/chat_template.jinja").read_text(encoding="utf-8")
    ours, theirs = Renderer(RendererSpec(read_named_template("zephyr"), TOKENS)), Renderer(RendererSpec(text, TOKENS))

    for messages, _ in talks(real_data):
        if all(m["role"] != "tool" and "tool_calls" not in m for m in messages):
            assert ours.plain(messages, None, {}) == theirs.plain(messages, None, {})

    ours = Renderer(RendererSpec(read_named_template("mistral"), TOKENS))
    stock = Renderer(RendererSpec(read_template_file(real_data, "vllm__tool_chat_template_mistral"), TOKENS))
    asked = [system("Be kind."), user("U1"), assistant("A1"), user("U2")]
    prompt = stock.plain(asked, None, {})

    assert isinstance(prompt, str)
    assert "Be kind." not in str(stock.plain([*asked, assistant("A2")], None, {}))
    assert ours.plain([*asked, assistant("A2")], None, {}) == prompt + " A2</s>"


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.parametrize("name", mark_all_but(["chatml", "llama3.1", "mistral", "qwen3"], list_bundled_templates()))
def test_bundled_template_masks_real_chats_by_blocks_as_by_the_closed_list(name: str, real_data: Path) -> None:
    rules: dict[str, Any] = {"on_dropped": dict.fromkeys(("text_beside_call", "tool_list", "tool_result"), "count")}
    rules["on_dropped"] |= dict.fromkeys(("call_name", "call_arguments"), "untrain")
    text = read_named_template(name)
    by_blocks, by_list = (
        Masker(Renderer(RendererSpec(one, TOKENS)), Loss(), MaskRules(**rules))
        for one in (text, replace_generation_tags(text))
    )
    outcomes: Counter[str] = Counter()
    for chat in chats(real_data):
        one, other = (masker.mask(Conversation(chat.messages, chat.tools)) for masker in (by_blocks, by_list))
        outcomes["masked" if isinstance(one, MaskedConversation) else one.reason] += 1
        if isinstance(one, MaskedConversation) and isinstance(other, MaskedConversation):
            assert one.text.startswith(other.text) or other.text.startswith(one.text)
            in_blocks, listed = trained_characters(one), trained_characters(other)
            # The space before a Mistral answer.
            assert listed <= in_blocks
            assert all(one.text[i] == " " for i in in_blocks - listed) or name != "mistral"
            assert name == "mistral" or in_blocks == listed

    assert outcomes["masked"] >= 12
    assert set(outcomes) <= {"masked", "template_error", "no_loss_tokens"}
