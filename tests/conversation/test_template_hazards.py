"""Template hazards that other projects reported, one test each, named after the report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmill.conversation.character_ownership import RenderedConversation
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec, Template, make_renderer_spec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import observe_template_once
from rowmill.conversation.template_engines import replace_generation_tags
from rowmill.conversation.template_registry import list_bundled_templates, read_named_template
from rowmill.core.json import Json
from rowmill.kinds.base import DatasetOptions
from rowmill.kinds.catalog import Chat
from rowmill.schema.rows import Conversation, MaskedConversation, Message, Rejected, Span
from rowmill.tokenization.encoded_batch import flatten_masks, make_batch
from rowmill.tokenization.tokenizer import EncodedTexts
from tests.support.canonical_rows import canonicalize_row
from tests.support.messages import assistant, call, system, tool, trained_texts, user
from tests.support.recipes import CHATML, Workspace, chat, text_of
from tests.support.tiers import mark_all_but

pytestmark = pytest.mark.slow

TOKENS: dict[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}


TALK = [user("U1 question"), assistant("A1 answer"), user("U2 question"), assistant("A2 answer")]


def masked(
    text: str, messages: list[Message], tools: list[Json] | None = None, loss: Loss | None = None, **rules: Any
) -> MaskedConversation:
    renderer = Renderer(RendererSpec(text, TOKENS))
    result = Masker(renderer, loss or Loss(), MaskRules(**rules)).mask(Conversation(messages, tools))
    assert isinstance(result, MaskedConversation), result
    return result


TWO_WAYS = {
    name: (read_named_template(name), replace_generation_tags(read_named_template(name)))
    for name in list_bundled_templates()
}
"""Each template with its blocks, and without them: then the closed list decides what trains."""


def trained(masked: MaskedConversation) -> str:
    return "".join(trained_texts(masked))


@pytest.mark.parametrize("template", TWO_WAYS["qwen3"])
def test_qwen3_prefix_lengths_would_train_the_next_user_turn(template: str) -> None:
    """A prefix renders longer than the same turns in the whole conversation: 24 of 221 templates, on plain chats."""
    messages = [user("U1"), assistant("A1", reasoning_content="R1"), user("U2"), assistant("A2")]
    renderer = Renderer(RendererSpec(read_named_template("qwen3"), TOKENS))
    whole, prefix = renderer.plain(messages, None, {}), renderer.plain(messages[:2], None, {})

    result = masked(template, messages)

    assert isinstance(whole, str)
    assert isinstance(prefix, str)
    assert not whole.startswith(prefix)
    assert not observe_template_once(renderer).prefix_preserving["reasoning"]
    assert trained(result) == "A1<|im_end|><think>\n\n</think>\n\nA2<|im_end|>"


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "gemma3", "mistral"])
def test_slime_2263_messages_rendered_singly_would_repeat_bos_default_system_and_date(name: str) -> None:
    result = masked(read_named_template(name), TALK)
    for once in ("You are Qwen", "Today Date", "<s>"):
        assert result.text.count(once) <= 1
        assert once not in trained(result)


def test_qwen35_template_that_raises_on_a_system_only_prefix_is_masked() -> None:
    raising = "{% if messages | length == 1 %}{{ raise_exception('no user query') }}{% endif %}" + CHATML
    result = masked(raising, [system("be kind"), *TALK])
    assert trained(result) == "A1 answer<|im_end|>A2 answer<|im_end|>"


@pytest.mark.parametrize("name", mark_all_but(["llama3.1", "untagged"], [*list_bundled_templates(), "untagged"]))
def test_marin_7237_template_without_generation_tags_is_never_an_all_zero_mask(name: str) -> None:
    text = CHATML if name == "untagged" else read_named_template(name)
    text = text.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    shown = trained(masked(text, TALK))

    assert "generation" not in text.replace("add_generation_prompt", "")
    assert "A1 answer" in shown
    assert "A2 answer" in shown
    assert "question" not in shown


def test_unsloth_2900_row_without_a_single_target_is_rejected_and_reaches_no_shard(tmp_path: Path) -> None:
    muted = {"messages": [user("why?"), assistant("so", train=False)]}
    built = Workspace(tmp_path).one("a.jsonl", [chat(0), muted]).build()
    assert built.rejects() == [(1, "no_loss_tokens")]
    assert all(any(one["loss_mask"]) for one in built.examples())


@pytest.mark.parametrize("name", list_bundled_templates())
def test_llamafactory_9107_text_with_a_call_is_printed_and_trains_or_the_row_is_rejected(name: str) -> None:
    messages = [user("U1 question"), assistant("let me look at it", tool_calls=[call({"at": "this"})])]
    renderer = Renderer(RendererSpec(read_named_template(name), TOKENS))
    result = Masker(renderer, Loss(), MaskRules()).mask(Conversation(messages, [tool()]))

    if isinstance(result, MaskedConversation):
        assert "let me look at it" in trained(result)
    else:
        assert result.reason == "content_dropped"
        assert {"text_beside_call", "call_name"} & set(result.detail.split(", "))


OBJECTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<e>{% endfor %}"
)
STRINGS_ONLY = OBJECTS_ONLY.replace("c.function.arguments | tojson", "c.function.arguments")


def canonical_messages(*messages: Message) -> list[Message]:
    row = canonicalize_row({"messages": list(messages)}, DatasetOptions(format=Chat()))
    assert not isinstance(row, Rejected)
    return list(row.messages)


@pytest.mark.parametrize(
    "template", [OBJECTS_ONLY, STRINGS_ONLY, *map(read_named_template, ("qwen2.5", "llama3.1", "glm4"))]
)
@pytest.mark.parametrize("as_text", [False, True])
def test_oumi_2599_arguments_are_encoded_once_whatever_the_source_has(template: str, as_text: bool) -> None:
    arguments = {"at": 'say "é"', "n": 1}
    source = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    messages = canonical_messages(user("U1 question"), assistant("", tool_calls=[call(source)]))
    result = masked(template, messages, on_dropped={"tool_list": "count"})

    assert '\\\\"' not in result.text
    assert '{\\"at' not in result.text
    assert 'say \\"é\\"' in trained(result) or 'say "é"' in trained(result)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_transformers_44301_reasoning_reaches_a_template_under_the_key_it_reads(key: str) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m." + key + " %}[{{ m." + key + " }}]{% endif %}"
        "{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = canonical_messages(user("U1 question"), assistant("A1 answer", thinking="why so"))
    assert trained(masked(template, messages)) == "[why so]A1 answer<e>"
    assert observe_template_once(Renderer(RendererSpec(template))).reasoning_key == key


def test_ms_swift_6467_nulls_that_arrow_added_reach_no_prompt(tmp_path: Path) -> None:
    printing = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m | tojson }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    called = {"role": "assistant", "content": None, "tool_calls": [call({"at": "this"}), call({"n": 2})]}
    table = pa.Table.from_pylist([{"messages": [user("why?"), called]}, {"messages": [user("so?"), assistant("yes")]}])
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    template = {"chat_template": printing, "on_dropped": {"call_arguments": "count", "assistant_text": "count"}}

    built = Workspace(tmp_path).one("a.parquet", bytes(sink.getvalue()), template=template).build()

    texts = [text_of(one) for one in built.examples()]
    assert (built.rejects(), len(texts)) == ([], 2)
    assert "null" not in "".join(texts)
    assert "None" not in "".join(texts)


@pytest.mark.parametrize(
    ("think_loss", "expected"),
    [
        ("all", "A1 answer<|im_end|><think>\n\n</think>\n\nA2 answer<|im_end|>"),
        ("answer_only", "A1 answer<|im_end|>A2 answer<|im_end|>"),
        ("answer_plus_think", "A1 answer<|im_end|>A2 answer<|im_end|>"),
    ],
)
def test_automodel_3738_empty_think_block_that_the_template_inserts_can_be_left_untrained(
    think_loss: Any, expected: str
) -> None:
    assert trained(masked(read_named_template("qwen3"), TALK, loss=Loss(think_loss=think_loss))) == expected


def test_openrlhf_973_the_mask_is_not_shifted(tmp_path: Path) -> None:
    """Position i itself is the target: the first trained token is the answer's first, the last the end of turn."""
    built = Workspace(tmp_path).one("a.jsonl", [chat(1)]).build()

    (example,) = built.examples()
    ids, mask = example["input_ids"], example["loss_mask"]
    own = [i for i, trains in zip(ids, mask, strict=True) if trains]
    assert text_of({"input_ids": own}) == f"{chat(1)['messages'][1]['content']}<|im_end|>"


@pytest.mark.parametrize(
    ("starts", "ends", "bad"),
    [([0, 2, 2], [2, 2, 4], True), ([0, 2, 1], [2, 3, 3], True), ([0, 2, 2], [2, 4, 4], False)],
)
def test_transformers_32573_zero_width_and_backward_offsets_are_refused(
    starts: list[int], ends: list[int], bad: bool
) -> None:
    offsets = np.array([0, 3], np.int64)
    encoded = EncodedTexts(np.zeros(3, np.int32), offsets, np.array(starts), np.array(ends), 1)
    masked = MaskedConversation("text", (Span(0, 4, 0),), ())
    assert make_batch(encoded, *flatten_masks([masked])).bad.tolist() == [bad]


@pytest.mark.parametrize("name", mark_all_but(["chatml", "llama3.1", "mistral", "qwen3"], list_bundled_templates()))
@pytest.mark.parametrize("way", [0, 1], ids=["blocks", "list"])
def test_torchtune_949_the_end_of_every_turn_trains(name: str, way: int) -> None:
    renderer = Renderer(RendererSpec(read_named_template(name), TOKENS))

    result = masked(TWO_WAYS[name][way], TALK)

    end = observe_template_once(renderer).finish
    assert end
    assert f"A1 answer{end}" in trained(result)
    assert trained(result).endswith(f"A2 answer{end}")


@pytest.mark.parametrize("name", mark_all_but(["chatml", "llama3.1", "mistral", "qwen3"], list_bundled_templates()))
def test_template_that_prints_a_bos_the_tokenizer_lacks_prints_nothing_there(name: str) -> None:
    """`bos_token` is undefined for 12 of 228 templates."""
    result = Renderer(RendererSpec(read_named_template(name))).render(TALK, None, {})

    assert isinstance(result, RenderedConversation)
    assert "None" not in result.text
    assert "undefined" not in result.text.lower()


def test_template_that_prints_today_prints_the_recipes_day_on_every_day() -> None:
    """17 templates print today's date in every row."""
    dated = "{{ strftime_now('%d %B %Y') }}" + CHATML
    source = Renderer(RendererSpec(dated)).plain(TALK, None, {})
    other = make_renderer_spec(Template(template_now="2031-05-06T00:00:00"), dated, special_tokens={})

    assert str(source).startswith("01 January 2025")
    assert str(Renderer(other).plain(TALK, None, {})).startswith("06 May 2031")
    assert observe_template_once(Renderer(RendererSpec(dated))).date_dependent
