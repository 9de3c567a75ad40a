"""Frames of templates: what decides them, and what does not."""

import random
from collections.abc import Iterator

import pytest

from rowmill.conversation import frame_learning
from rowmill.conversation.frame_learning import learn_frames
from rowmill.conversation.options import RendererSpec
from rowmill.conversation.probe_conversations import make_learning_probes
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_registry import list_bundled_templates, read_named_template
from rowmill.core.json import Json
from rowmill.schema.rows import Message
from tests.support.tiers import mark_all_but

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MODEL = frozenset({"assistant"})


def yield_shuffled_probes(role: str) -> Iterator[tuple[list[Message], list[Json] | None]]:
    probes = [*make_learning_probes(role)]
    random.Random(7).shuffle(probes)
    yield from probes


@pytest.mark.parametrize("name", mark_all_but(["llama3.1", "mistral", "qwen3"], list_bundled_templates()))
def test_frames_do_not_depend_on_the_order_of_the_probes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(RendererSpec(read_named_template(name), TOKENS))
    in_order = learn_frames(renderer, MODEL, {})
    monkeypatch.setattr(frame_learning, "make_learning_probes", yield_shuffled_probes)

    assert learn_frames(renderer, MODEL, {}) == in_order


PROMPT_WITH_TOOLS = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not tools %}plain: {% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function | tojson }}</call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt and tools %}<|assistant|>\n{% endif %}"
)
"""Asks for an answer only where there are tools, and begins one otherwise where there are none."""


def yield_probes_with_tools_first(role: str) -> Iterator[tuple[list[Message], list[Json] | None]]:
    yield from sorted(make_learning_probes(role), key=lambda probe: probe[1] is None)


def test_whether_there_is_a_generation_prompt_is_asked_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(RendererSpec(PROMPT_WITH_TOOLS, TOKENS))
    in_order = learn_frames(renderer, MODEL, {})
    monkeypatch.setattr(frame_learning, "make_learning_probes", yield_probes_with_tools_first)

    assert learn_frames(renderer, MODEL, {}) == in_order
