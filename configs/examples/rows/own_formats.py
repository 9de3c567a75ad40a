"""Two formats of one's own, for `own-rows.yaml` and `own-tokens.yaml`; see docs/your-own-format.md."""

from collections.abc import Mapping
from typing import Any

from rowmill import Json, Row, RowFormat, register_format


@register_format("exercises")
class Exercises(RowFormat):
    """A task becomes a conversation, and a pair without a template where there is nothing to read beside it."""

    def __init__(self, quote: str = "> ") -> None:
        self.quote = quote

    def rows(self, record: Mapping[str, Json]) -> list[Row] | None:
        """Return one or two rows; none for a record without an answer, which is left out on purpose."""
        task, given, answer = record["instruction"], record["input"] or "", record["output"]
        if not answer:
            return None
        quoted = "".join(f"\n{self.quote}{line}" for line in given.splitlines())
        messages = ({"role": "user", "content": f"{task}{quoted}"}, {"role": "assistant", "content": answer})
        chat = Row("conversation", messages=messages, domain="quoted" if given else "bare")
        return [chat] if given else [chat, Row("pair", text=f"{task}\n", output=answer, domain="pairs")]


class FirstWords(RowFormat):
    """A document of which only the first tokens train: a class that makes tokens itself."""

    def __init__(self, trained: int) -> None:
        self.trained = trained

    def build(self, record: Mapping[str, Json], ctx: Any) -> dict[str, Any]:
        """Return the document's tokens and the mask that trains the first of them."""
        ids = ctx.tokenizer.encode(record["text"], add_special_tokens=False)[: ctx.max_length]
        return {"ids": ids, "loss_mask": [i < self.trained for i in range(len(ids))], "domain": record.get("source")}
