"""One example per assistant message of long chats: renders made, and their time, against the renders it needs.

    python -m benchmarks.turns [chats]

What it needs is one render per supervised message, cut after it. The covered renders that prove owners, and the sample
compared with Jinja, are counted apart.
"""

import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks import corpus, measure
from rowmill.conversation.character_ownership import CharacterOwnership, RenderedConversation
from rowmill.conversation.loss_mask import Masker
from rowmill.conversation.options import Loss, MaskRules, RendererSpec
from rowmill.conversation.renderer import Renderer
from rowmill.core.json import Json
from rowmill.core.storage import digest_bytes
from rowmill.schema.rows import Conversation, MaskedConversation, Message, Rejected

TURNS = 20
"""Assistant messages per chat."""
RUNS = 3


class Counting(Renderer):
    """A renderer that counts what it is asked for."""

    renders = 0
    again = 0

    def render(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> RenderedConversation | Rejected:
        """Count a render."""
        self.renders += 1
        return super().render(messages, tools, kwargs)

    def plain(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> str | Rejected:
        """Count a second render, by Jinja."""
        self.again += 1
        return super().plain(messages, tools, kwargs)

    def prove_ownership(self, rendered: RenderedConversation, roles: frozenset[str]) -> CharacterOwnership | None:
        """Count the covered render."""
        self.again += 1
        return super().prove_ownership(rendered, roles)


def chat(number: int) -> Conversation:
    """Make a chat of `TURNS` questions, each answer with reasoning, about as long as real ones."""
    messages: list[Message] = []
    for turn in range(TURNS):
        words = " ".join(f"word{(number * 7 + turn * 13 + k) % 997}" for k in range(60))
        messages.append({"role": "user", "content": f"Question {turn} of {number}: {words[:160]}?"})
        messages.append(
            {
                "role": "assistant",
                "content": f"Answer {turn}: {words}.",
                "reasoning_content": f"Thought {turn}: {words[:200]}",
            }
        )
    return Conversation(messages, row_hash=bytes.fromhex(digest_bytes(str(number).encode())))


def main(chats: int) -> None:
    """Print a line for each way of cutting."""
    template = corpus.TEMPLATE.read_text(encoding="utf-8")
    conversations = [chat(number) for number in range(chats)]
    needed = chats * TURNS
    prefixes = [(one.messages[: 2 * turn + 2], one.tools, one.kwargs) for one in conversations for turn in range(TURNS)]
    renderer = Renderer(RendererSpec(template))

    def renders() -> float:
        begin = time.perf_counter()
        for prefix in prefixes:
            renderer.render(*prefix)
        return time.perf_counter() - begin

    bare = measure.timed(renders, runs=RUNS)
    for turns in ("message", "auto", "exchange"):
        printer = Counting(renderer.spec)
        masker = Masker(printer, Loss(), MaskRules(turns=turns))
        made = 0

        def examples(masker: Masker = masker) -> float:
            nonlocal made
            begin = time.perf_counter()
            parts = [part for row in conversations for part in masker.split_turns(row)]
            made = sum(isinstance(masker.mask(one, only=only), MaskedConversation) for one, only in parts)
            return time.perf_counter() - begin

        taken = measure.timed(examples, runs=RUNS)
        measure.emit(
            "turns",
            turns=turns,
            chats=chats,
            examples=made,
            renders_over_needed=round(printer.renders / RUNS / needed, 3),
            renders_again_over_needed=round(printer.again / RUNS / needed, 3),
            time_over_bare_renders=round(taken["median_s"] / bare["median_s"], 3),
            bare=bare,
            **taken,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
