"""Where the model's turn begins and ends, in templates that print no generation prompt, or no end of a call."""

import pytest

from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.core.json import Json
from rowmill.schema.rows import Conversation, MaskedConversation, Message

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CALL: Json = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
TOOL: Json = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TALK: list[Message] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "name": "look", "content": "blue"},
    {"role": "assistant", "content": "It is blue."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]

OPEN_TAIL = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|turn|><|bot|>
{%- if m.tool_calls %}<|action|>{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }})\
{% endfor %}<|/action|>{% else %}<|say|>{{ m.content }}<|/say|>{% endif %}<|end|>
{%- else -%}
<|turn|><|{{ m.role }}|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
<|turn|><|bot|>"""
"""Every render ends with the header of the model's turn, whether it is asked for a generation prompt or not."""

NO_TAIL = OPEN_TAIL.removesuffix("<|turn|><|bot|>")

STOP_AT_RESULT = """\
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
<|result|>{{ m.content }}<|/result|>
{%- elif m.tool_calls -%}
<|turn|>model:
{%- for c in m.tool_calls %}<|call|>{{ c.function.name }}({{ c.function.arguments | tojson }})<|/call|>{% endfor -%}
{%- if loop.last %}<|result|>{% endif -%}
{%- else -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|turn|>{{ m.role }}:{% endif -%}
{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|turn|>model:{% endif -%}
"""
"""Generation stops at the token that opens a result, which a chat that ends with the call prints."""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (OPEN_TAIL, ['<|action|>look({"at": "sky"})<|/action|><|end|>', "<|say|>It is blue.<|/say|><|end|>",
                     "<|say|>Yes.<|/say|><|end|>"]),
        (STOP_AT_RESULT, ['<|call|>look({"at": "sky"})<|/call|><|result|>', "It is blue.<|end|>", "Yes.<|end|>"]),
    ],
    ids=["behind the header that ends every render", "through the token that stops a call"],
)  # fmt: skip
def test_model_trains_on_all_that_it_writes(template: str, expected: list[str]) -> None:
    text = template.replace("{{ m.role }}:", "{{ 'model' if m.role == 'assistant' else m.role }}:")

    assert list_trained(text) == expected


def test_header_of_a_template_without_generation_prompt_does_not_train() -> None:
    plain = [message for message in TALK if not message.get("tool_calls") and message["role"] != "tool"]

    assert list_trained(NO_TAIL, plain) == ["It is blue.<|/say|><|end|>", "Yes.<|/say|><|end|>"]


def list_trained(template: str, messages: list[Message] | None = None) -> list[str]:
    """Return the text of each stretch that trains."""
    tools = [TOOL] if messages is None else None
    rules = MaskRules(on_dropped={"tool_list": "count", "call_name": "count"})
    masker = Masker(Renderer(RendererSpec(template, TOKENS)), Loss(), rules)
    masked = masker.mask(Conversation(TALK if messages is None else messages, tools))
    assert isinstance(masked, MaskedConversation), masked
    return [masked.text[span.start : span.end] for span in masked.trained]
