"""Invariants of templates and masks over generated conversations: calls, results, reasoning, tools, control strings."""

from collections import Counter
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmill.conversation.character_ownership import CoveredConversation, RenderedConversation
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_engines import replace_generation_tags
from rowmill.conversation.template_registry import list_bundled_templates, read_named_template
from rowmill.core.json import Json, to_json
from rowmill.kinds.base import DatasetOptions
from rowmill.schema.rows import Conversation, MaskedConversation, Message, Rejected
from rowmill.stages.tokenized_examples.conversation_examples import (
    decode_conversations,
    hide_control_strings,
    show_control_strings,
)
from rowmill.tokenization import tokenizer
from rowmill.tokenization.control_tokens import ControlStrings
from rowmill.tokenization.encoded_batch import Example, PartTally, make_examples
from rowmill.tokenization.tokenizer import Encoder
from tests.support import recipes
from tests.support.canonical_rows import canonicalize_row
from tests.support.messages import assistant, call, result, system, tool, trained_characters, trained_texts, user
from tests.support.tiers import draw, mark_all_but

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
COUNT_ALL: dict[str, str] = dict.fromkeys(
    "system user assistant_text text_beside_call call_name call_arguments tool_result tool_list reasoning".split(),
    "count",
)

text = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=25),
    st.sampled_from(["the answer is seven", "why so?", "a\n\nb", "{}", "user", "assistant", "<think>", "</s>"]),
).filter(str.strip)
value = st.recursive(
    st.integers(-99, 10**20)
    | st.booleans()
    | st.none()
    | st.text(max_size=8)
    | st.floats(-9, 9).map(lambda x: round(x, 2)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(st.sampled_from(["at", "key", "n"]), value, max_size=3)
TOOL = tool(description="d", parameters={"type": "object", "properties": {}})


@st.composite
def exchange(draw: st.DrawFn) -> list[Message]:
    """Draw a question, perhaps a call with its result, and an answer that may have reasoning."""
    messages = [user(draw(text))]
    if draw(st.booleans()):
        calls = [call(draw(arguments))]
        messages.append(assistant(draw(st.one_of(st.just(""), text)), tool_calls=calls))
        messages.append({**result(draw(text)), "name": "look"})
    answer = assistant(draw(text))
    if draw(st.booleans()):
        answer["reasoning_content"] = draw(text)
    return [*messages, answer]


@st.composite
def talk(draw: st.DrawFn) -> Conversation:
    """Draw a conversation of one to three exchanges, perhaps led by system text, perhaps with tools."""
    messages = [message for one in draw(st.lists(exchange(), min_size=1, max_size=3)) for message in one]
    if draw(st.booleans()):
        messages.insert(0, system(draw(text)))
    return Conversation(messages, [TOOL] if draw(st.booleans()) else None)


@lru_cache(maxsize=64)
def renderer(name: str, render_path: Any = "auto", *, listed: bool = False) -> Renderer:
    """Open a template; `listed`: without its blocks, so that the closed list decides what trains."""
    text = read_named_template(name)
    return Renderer(RendererSpec(replace_generation_tags(text) if listed else text, TOKENS, render_path=render_path))


@lru_cache(maxsize=256)
def masker(name: str, *, listed: bool = False, **options: Any) -> Masker:
    loss = Loss(**{key: value for key, value in options.items() if key in Loss.model_fields})
    rules = {key: value for key, value in options.items() if key not in Loss.model_fields}
    return Masker(renderer(name, listed=listed), loss, MaskRules(on_dropped=COUNT_ALL, **rules))


ASSISTANT = frozenset({"assistant"})


@pytest.mark.parametrize("name", mark_all_but(["chatml", "llama3.1", "mistral", "qwen3"], list_bundled_templates()))
@given(one=talk())
@settings(max_examples=draw(25), deadline=None)
def test_text_is_the_plain_render_and_its_owners_are_the_same_on_either_path(name: str, one: Conversation) -> None:
    quick, sure = renderer(name), renderer(name, "reference")
    plain = quick.plain(one.messages, one.tools, one.kwargs)
    fast, slow = (way.render(one.messages, one.tools, one.kwargs) for way in (quick, sure))

    for found in (fast, slow):
        assert (found.text if isinstance(found, RenderedConversation) else found) == plain
    if isinstance(fast, RenderedConversation) and isinstance(slow, RenderedConversation):
        assert not slow.is_fast
        assert fast.blocks == slow.blocks
        assert quick.prove_ownership(fast, ASSISTANT) == sure.prove_ownership(slow, ASSISTANT)


@pytest.mark.parametrize("name", mark_all_but(["chatml", "llama3.1", "mistral", "qwen3"], list_bundled_templates()))
@given(one=talk())
@settings(max_examples=draw(25), deadline=None)
def test_own_text_that_is_found_as_text_is_where_arrays_prove_it(name: str, one: Conversation) -> None:
    made = renderer(name)
    printed = made.render(one.messages, one.tools, one.kwargs)
    if not isinstance(printed, RenderedConversation):
        return
    found = made.prove_ownership(printed, ASSISTANT)

    with patch.object(CoveredConversation, "_find_printed", return_value=None):
        assert made.prove_ownership(printed, ASSISTANT) == found


# ── 2: every supervised message trains once, and nothing else trains ──


@pytest.mark.parametrize("turns", ["whole", "exchange", "message", "auto"])
@pytest.mark.parametrize("name", ["chatml", "qwen3", "glm4", "mistral", "llama3"])
@given(one=talk())
@settings(max_examples=15, deadline=None)
def test_every_supervised_message_trains_in_exactly_one_example(name: str, turns: str, one: Conversation) -> None:
    maker = masker(name, turns=turns)
    results = [maker.mask(part, only=only) for part, only in maker.split_turns(one)]
    masked = [result for result in results if isinstance(result, MaskedConversation)]
    if len(masked) < len(results):
        return

    times = Counter(i for one in masked for i in {span.message for span in one.trained if span.message >= 0})
    # A message that the template does not print, if the recipe allows that, does not train.
    printed = {piece.message for one in masked for piece in one.pieces}
    assert times == Counter(dict.fromkeys([i for i in maker.supervised(one.messages) if i in printed], 1))


@pytest.mark.parametrize("name", mark_all_but(["chatml", "llama3.1", "mistral", "qwen3"], list_bundled_templates()))
@given(one=talk())
@settings(max_examples=draw(20), deadline=None)
def test_own_text_trains_if_and_only_if_its_message_is_supervised(name: str, one: Conversation) -> None:
    for listed in (True, False):
        result = masker(name, listed=listed).mask(one)
        if isinstance(result, MaskedConversation):
            for piece in result.pieces:
                own = set(range(piece.start, piece.end))
                is_model = one.messages[piece.message]["role"] == "assistant"
                assert own & trained_characters(result) == (own if is_model else set())


PREFIX_PRESERVING = ("chatml", "llama3", "phi3", "zephyr", "vicuna", "alpaca", "gemma3")


@pytest.mark.parametrize("name", PREFIX_PRESERVING)
@given(one=talk(), other=text)
@settings(max_examples=draw(20), deadline=None)
def test_changing_an_untrained_text_changes_no_trained_text(name: str, one: Conversation, other: str) -> None:
    changed = [{**m, "content": other} if m["role"] in ("user", "tool") else m for m in one.messages]
    first, second = (masker(name).mask(Conversation(messages, one.tools)) for messages in (one.messages, changed))
    if isinstance(first, MaskedConversation) and isinstance(second, MaskedConversation):
        assert trained_texts(first) == trained_texts(second)


CONTROLLED = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", " why ", "so\n"]), min_size=1, max_size=4
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = recipes.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Encoder(tokenizer.open_tokenizer(str(folder), folder))


def control_ids(encoder: Encoder, messages: list[Message]) -> list[int]:
    control = ControlStrings(encoder.card, read_named_template("chatml"))
    hidden, placeholders = hide_control_strings(Conversation(messages), control)
    result = masker("chatml").mask(hidden)
    assert isinstance(result, MaskedConversation)
    shown, ordinary = show_control_strings(result, placeholders)
    (example,) = make_examples([shown], [ordinary], encoder, PartTally())
    assert isinstance(example, Example)
    assert encoder.decode(example.ids.tolist()) == shown.text
    return [i for i in example.ids.tolist() if i in control.ids]


@given(question=CONTROLLED, answer=CONTROLLED)
@settings(max_examples=draw(60), deadline=None)
def test_swapping_control_strings_for_words_changes_no_control_id(
    encoder: Encoder, question: list[str], answer: list[str]
) -> None:
    def messages(*, words: bool) -> list[Message]:
        texts = ["".join("word" if words and "|" in part else part for part in one) for one in (question, answer)]
        return [{"role": "user", "content": "q" + texts[0]}, {"role": "assistant", "content": "a" + texts[1]}]

    assert control_ids(encoder, messages(words=False)) == control_ids(encoder, messages(words=True))


@given(talks=st.lists(talk(), min_size=1, max_size=3))
@settings(max_examples=draw(40), deadline=None)
def test_rows_render_the_same_after_a_parquet_round_trip(talks: list[Conversation]) -> None:
    table = pa.table(
        {
            "messages": [to_json(one.messages) for one in talks],
            "tools": pa.array([to_json(one.tools) if one.tools else None for one in talks], pa.string()),
            "template_kwargs": pa.array([None] * len(talks), pa.string()),
            "content_hash": [b"0" * 16] * len(talks),
            "extracted_think_from_content": [0] * len(talks),
        }
    )
    for before, after in zip(talks, decode_conversations(table), strict=True):
        for name in ("chatml", "qwen2.5"):
            plain = renderer(name).plain(before.messages, before.tools, {})
            assert renderer(name).plain(after.messages, after.tools, after.kwargs) == plain


@pytest.mark.parametrize("name", list_bundled_templates())
@given(given_arguments=arguments)
@settings(max_examples=draw(30), deadline=None)
def test_arguments_as_object_and_as_text_render_equally(name: str, given_arguments: dict[str, Json]) -> None:
    from rowmill.kinds.catalog import Chat

    as_text = orjson.dumps(given_arguments).decode() if _fits(given_arguments) else to_json(given_arguments)
    printed: list[object] = []
    for source in (given_arguments, as_text):
        record = {"messages": [user("why?"), assistant("", tool_calls=[call(source)])]}
        row = canonicalize_row(record, DatasetOptions(format=Chat()))
        assert not isinstance(row, Rejected)
        printed.append(renderer(name).plain(row.messages, [TOOL], {}))

    assert printed[0] == printed[1]


def _fits(value: Json) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("name", ["chatml", "qwen3", "glm4", "llama3.1"])
@pytest.mark.parametrize(
    "less",
    [
        *[{"supervise": which} for which in ("last_assistant", "last_turn")],
        *[{"think_loss": which} for which in ("answer_only", "answer_plus_think")],
        {"end_of_turn": "mask"},
    ],
)
@given(one=talk())
@settings(max_examples=15, deadline=None)
def test_narrower_options_train_a_subset(name: str, less: dict[str, Any], one: Conversation) -> None:
    every, some = (masker(name, listed=True, **options).mask(one) for options in ({}, less))
    if isinstance(every, MaskedConversation) and isinstance(some, MaskedConversation):
        assert trained_characters(some) <= trained_characters(every)
