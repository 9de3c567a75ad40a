"""Messages of conversations by their role, and masks drawn with brackets around what trains."""

from rowmill.core.json import Json
from rowmill.schema.rows import MaskedConversation, Message, Rejected


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str, **more: Json) -> Message:
    return {"role": "user", "content": text, **more}


def assistant(text: str, **more: Json) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(arguments: Json, *, name: str = "look", number: int = 0) -> Json:
    return {"id": f"call_{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, number: int = 0) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": f"call_{number:05}"}


def tool(name: str = "look", **more: Json) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": {}, **more}}


def draw_mask(masked: MaskedConversation | Rejected) -> str:
    """Draw a mask, trained characters in brackets; or say why there is none."""
    if isinstance(masked, Rejected):
        return f"{masked.reason}: {masked.detail}"
    pieces: list[str] = []
    position = 0
    for span in masked.trained:
        pieces += [masked.text[position : span.start], "⟦", masked.text[span.start : span.end], "⟧"]
        position = span.end
    return "".join([*pieces, masked.text[position:]]).replace("⟧⟦", "")


def trained_texts(masked: MaskedConversation) -> list[str]:
    return [masked.text[span.start : span.end] for span in masked.trained]


def trained_characters(masked: MaskedConversation) -> set[int]:
    return {i for span in masked.trained for i in range(span.start, span.end)}
