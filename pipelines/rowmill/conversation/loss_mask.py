"""Make the loss mask of a conversation: render, choose messages, locate own text, cut the turns, verify.

    private code points ─► own text, proven ─► closed list ─► trained ─► verified

A row whose mask cannot be verified is rejected with a reason, never guessed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter

from rowmill.conversation.character_ownership import (
    LocatedContent,
    RenderedConversation,
    is_tool_missing,
    locate_own_text,
)
from rowmill.conversation.frame_learning import MAX_CACHED_FRAMES, learn_frames_once
from rowmill.conversation.options import Loss, MaskRules
from rowmill.conversation.part_weights import cut_parts, locate_parts
from rowmill.conversation.renderer import Renderer
from rowmill.conversation.template_contract import observe_template_once
from rowmill.conversation.template_frames import TemplateFrames, get_call_ids, list_end_tokens
from rowmill.conversation.turn_cutting import TurnCutter
from rowmill.conversation.turn_layouts import MIN_FOREIGN_CHARS, TurnLayout, learn_layout
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json, to_json
from rowmill.schema.examples import SPAN_KINDS
from rowmill.schema.rows import ContentSpan, Conversation, MaskedConversation, Message, Rejected, Span

MASKING_VERSION = 12
"""Increment it when any mask may change."""


ASKS_FOR_ANSWER: Mapping[str, Json] = {"add_generation_prompt": True}
"""The template argument that makes a conversation wait for an answer."""
_NOT_PROVEN = Rejected("span_not_found", "the template looks at texts that are hidden from it to prove their place")


class Masker:
    """Makes and verifies the masks of conversations rendered by one template."""

    def __init__(self, renderer: Renderer, loss: Loss, rules: MaskRules | None = None) -> None:
        self._renderer = renderer
        self._contract = observe_template_once(renderer)
        self._loss = loss
        self._trains_everything = loss.trains_everything
        self._rules = rules or MaskRules()
        self._policy = {"reasoning": "count", **(self._rules.on_dropped or {})}
        self._roles = self._rules.assistant_roles
        if self._rules.spans == "generation" and not renderer.has_blocks:
            raise ConfigError(
                "template.spans: generation needs a template with {% generation %} blocks, and this one has none; "
                "auto works with any template; set template.spans: auto"
            )
        self._by_blocks = renderer.has_blocks and not loss.trains_everything
        self._frames: dict[str, TemplateFrames] = {}
        end_tokens = list_end_tokens(renderer.eos_token, renderer.control_tokens)
        ends = [self._contract.printed_end, renderer.eos_token, *end_tokens]
        frames = [*self._contract.empty_reasoning, *self._contract.reasoning_close, self._contract.finish]
        self._constants = frozenset(text.strip() for text in (*frames, *ends))

    # ── one conversation ──

    def split_turns(self, conversation: Conversation) -> list[tuple[Conversation, frozenset[int] | None]]:
        """Split a conversation as `template.turns` says; each part has the messages that may train (None: all).

        Invariant: every supervised message trains in exactly one part.
        """
        turns = self._rules.turns
        if turns == "auto":
            turns = "message" if self._rewrites_history(conversation) else "whole"
        if turns == "whole":
            return [(conversation, None)]
        groups = self._split_per_exchange(conversation)
        if turns == "message":
            groups = [(index + 1, frozenset({index})) for index in self.supervised(conversation.messages)]
        drafts = [(replace(conversation, messages=conversation.messages[:end]), only) for end, only in groups]
        return [*drafts] or [(conversation, None)]

    def frames(self, kwargs: Mapping[str, Json]) -> TemplateFrames:
        """Return the frames for rows with these template values, learned at the first such row."""
        key = to_json(dict(kwargs)) if kwargs else ""
        known = self._frames.get(key)
        if known is None:
            known = learn_frames_once(self._renderer, self._roles, kwargs)
            if len(self._frames) >= MAX_CACHED_FRAMES:
                self._frames.clear()
            self._frames[key] = known
        return known

    def mask(self, conversation: Conversation, *, only: frozenset[int] | None = None) -> MaskedConversation | Rejected:
        """Render a conversation and find its trained characters; `only` limits supervision to some messages.

        A reject has a reason of the closed list, and a detail that names messages and kinds.
        """
        printed = self._renderer.render(conversation.messages, conversation.tools, conversation.kwargs)
        if isinstance(printed, Rejected):
            return printed
        if self._trains_everything:
            ownership = self._renderer.prove_ownership(printed, self._roles)
            located = locate_own_text(ownership, printed, conversation.messages, self._roles) or LocatedContent()
            whole = (Span(0, len(printed.text), -1),) if printed.text else ()
            return MaskedConversation(printed.text, whole, tuple(located.pieces()), _count_kinds(located.dropped))
        supervised = self.supervised(conversation.messages)
        if only is not None:
            supervised = [index for index in supervised if index in only]
        if not supervised:
            if not any(message["role"] in self._roles for message in conversation.messages):
                return Rejected("no_assistant", "no message has one of the model's roles")
            return Rejected("no_loss_tokens", "every message is context by its flag, role or the supervise option")
        ownership = self._renderer.prove_ownership(printed, self._roles)
        located = locate_own_text(ownership, printed, conversation.messages, self._roles)
        if located is None:
            return _NOT_PROVEN
        return self._cut_and_verify(conversation, printed, supervised, located)

    def render_prompt(self, conversation: Conversation) -> MaskedConversation | Rejected:
        """Render a conversation that waits for an answer, with the generation prompt; nothing of it trains."""
        kwargs = {**conversation.kwargs, **ASKS_FOR_ANSWER}
        printed = self._renderer.render(conversation.messages, conversation.tools, kwargs)
        if isinstance(printed, Rejected):
            return printed
        ownership = self._renderer.prove_ownership(printed, self._roles)
        located = locate_own_text(ownership, printed, conversation.messages, self._roles)
        if located is None:
            return _NOT_PROVEN
        dropped = list(located.dropped)
        if conversation.tools and is_tool_missing(conversation.tools, printed.text, ()):
            dropped.append(("tool_list", -1))
        kept = self._apply_drop_policy(conversation.messages, [], dropped)
        if isinstance(kept, Rejected):
            return kept
        return MaskedConversation(printed.text, (), tuple(located.pieces()), _count_kinds(dropped))

    def _cut_and_verify(
        self, conversation: Conversation, rendered: RenderedConversation, supervised: list[int], located: LocatedContent
    ) -> MaskedConversation | Rejected:
        """Cut the turns of supervised messages out of a render, and verify that exactly these train."""
        dropped, pieces = list(located.dropped), located.pieces()
        if conversation.tools:
            models = [(p.start, p.end) for p in pieces if conversation.messages[p.message]["role"] in self._roles]
            if is_tool_missing(conversation.tools, rendered.text, models):
                dropped.append(("tool_list", -1))
        if dropped:
            printed = self._select_printed(conversation.messages, supervised, dropped, located)
            if isinstance(printed, Rejected):
                return printed
            supervised = printed
        frames = self.frames(conversation.kwargs)
        cutter = TurnCutter(
            rendered,
            conversation.messages,
            located.unproven,
            frames,
            self._renderer.eos_token,
            self._loss,
            self._roles,
            self._by_blocks,
        )
        cut = cutter.cut(pieces, supervised)
        if isinstance(cut, Rejected):
            return cut
        region = cut.trained, 0, set[int]()
        if self._loss.think_loss != "all":
            region = self._exclude_reasoning(conversation.messages, cut.text, cut.trained, located)
        if isinstance(region, Rejected):
            return region
        trained, untrained, excluded = region
        blocks: dict[int, frozenset[str]] = {}
        has_parts = False
        for index in supervised:
            has_parts = has_parts or "part_weights" in conversation.messages[index]
            if self._by_blocks and conversation.messages[index]["role"] in self._roles:
                blocks[index] = self._constants
        problem = verify_mask(cut.text, trained, supervised, located, excluded, blocks)
        if problem is not None and _leave_line_breaks_to_headers(cut.text, trained, located):
            pieces = located.pieces()
            problem = verify_mask(cut.text, trained, supervised, located, excluded, blocks)
        if problem is not None:
            return problem
        own = tuple(pieces)
        parts: tuple[tuple[int, int, float], ...] = ()
        if has_parts:
            located_parts = locate_parts(rendered, conversation.messages, supervised, located)
            if isinstance(located_parts, Rejected):
                return located_parts
            trained, own, parts = cut_parts(trained, own, located_parts)
            if not trained:
                return Rejected("no_loss_tokens", "no part of a supervised message trains")
        merged: list[Span] = []
        weights: dict[int, float] = {}
        for span in trained:
            weight = float(conversation.messages[span.message].get("weight", 1))
            if weight != 1:
                weights[span.message] = weight
            is_next = merged and merged[-1].message == span.message and merged[-1].end == span.start
            if is_next and "part_weights" not in conversation.messages[span.message]:
                merged[-1] = Span(merged[-1].start, span.end, span.message)
            else:
                merged.append(span)
        lost = _count_kinds(dropped) if dropped else {}
        weights = dict(sorted(weights.items()))
        return MaskedConversation(
            cut.text, tuple(merged), own, lost, untrained, weights, message_ends=cut.message_ends, part_weights=parts
        )

    def find_layout(self, roles: Sequence[str]) -> TurnLayout | None:
        """Return the layout of chats with these roles; None if each of their rows must be masked by itself.

        A row of that layout has the mask that `mask` would give it. The layout is learned from the verified mask of
        placeholders, whose ownership is proven.
        """
        return None if self._rules.turns != "whole" else self._learn_layout(roles, {}, self.mask)

    def find_prompt_layout(self, roles: Sequence[str]) -> TurnLayout | None:
        """Return the layout of prompts with these roles; a row of it has what `render_prompt` would give it."""
        return self._learn_layout(roles, ASKS_FOR_ANSWER, self.render_prompt)

    def _learn_layout(
        self,
        roles: Sequence[str],
        kwargs: Mapping[str, Json],
        make: Callable[[Conversation], MaskedConversation | Rejected],
    ) -> TurnLayout | None:
        placeholders = self._renderer.render_placeholders(roles, kwargs)
        if placeholders is None:
            return None
        contents = zip(roles, placeholders.contents, strict=True)
        masked = make(Conversation([{"role": role, "content": content} for role, content in contents]))
        if isinstance(masked, Rejected) or masked.dropped or masked.reasoning_untrained:
            return None
        return learn_layout(roles, placeholders, masked, SPAN_KINDS)

    # ── which messages ──

    def supervised(self, messages: Sequence[Message]) -> list[int]:
        """Return the messages to train: chosen by their own flag, else by role, else by `supervise`."""
        loss, roles = self._loss, self._roles
        by_default = not loss.mask and loss.mask_default == "mask"
        first = 0
        if loss.supervise == "last_turn":
            first = max((i + 1 for i, m in enumerate(messages) if m["role"] == "user"), default=0)
        elif loss.supervise == "last_assistant":
            first = max((i for i, m in enumerate(messages) if m["role"] in roles), default=len(messages))
        chosen: list[int] = []
        for index, message in enumerate(messages):
            role = message["role"]
            flag = message.get("train")
            if flag is None and message.get("weight") == 0:
                flag = False
            if flag is None:
                is_model = role in roles
                trains = is_model if by_default else loss.mask.get(role, loss.mask_default) == "train"
                flag = trains and (not is_model or index >= first)
            if flag:
                chosen.append(index)
        return chosen

    # ── dropped content ──

    def _apply_drop_policy(
        self, messages: Sequence[Message], supervised: list[int], dropped: Sequence[tuple[str, int]]
    ) -> list[int] | Rejected:
        refused = sorted({kind for kind, _ in dropped if self._policy.get(kind, "reject") == "reject"})
        if refused:
            return Rejected("content_dropped", ", ".join(refused))
        off = {
            index
            for kind, origin in dropped
            if self._policy.get(kind) == "untrain"
            for index in find_affected_answers(messages, origin, self._roles)
        }
        return [index for index in supervised if index not in off]

    def _select_printed(
        self,
        messages: Sequence[Message],
        supervised: list[int],
        dropped: Sequence[tuple[str, int]],
        located: LocatedContent,
    ) -> list[int] | Rejected:
        """Return which supervised messages still train, given the own text that the template dropped."""
        kept = self._apply_drop_policy(messages, supervised, dropped)
        if isinstance(kept, Rejected):
            return kept
        # A message of which nothing is printed trains nothing, if the recipe counts all that is missing of it.
        allowed = self._rules.on_dropped or {}
        missing = {index: {kind for kind, origin in dropped if origin == index} for _, index in dropped}
        unprinted = {i for i, kinds in missing.items() if all(allowed.get(kind) == "count" for kind in kinds)}
        printed = [index for index in kept if index in located.own or index not in unprinted]
        if not printed:
            return Rejected("no_loss_tokens", "the template dropped text of every supervised message")
        return printed

    # ── reasoning ──

    def _exclude_reasoning(
        self, messages: Sequence[Message], text: str, trained: list[Span], located: LocatedContent
    ) -> tuple[list[Span], int, set[int]] | Rejected:
        """Exclude reasoning regions from the loss; return the spans, the number of regions, and their messages."""
        kept: list[Span] = []
        seen: set[int] = set()
        excluded: set[int] = set()
        count = 0
        for span in trained:
            index = span.message
            if index < 0 or index in seen or messages[index]["role"] not in self._roles:
                kept.append(span)
                continue
            seen.add(index)
            end = self._find_reasoning_end(text, span, index, located)
            if end is None:
                return Rejected("reasoning_not_located", f"message {index}")
            if end <= span.start:
                kept.append(span)
                continue
            count += 1
            reasoning = located.reasoning(index)
            if self._loss.think_loss == "answer_plus_think" and reasoning is not None:
                kept.append(Span(*reasoning, index))
            else:
                excluded.add(index)
            if end < span.end:
                kept.append(Span(end, span.end, index))
        return kept, count, excluded

    def _find_reasoning_end(self, text: str, span: Span, index: int, located: LocatedContent) -> int | None:
        """Return the end of a message's reasoning with its closing frame; `span.start` if it has no reasoning.

        None if the end is unknown.
        """
        reasoning, first = located.reasoning(index), located.answer(index)
        answer = span.end if first is None else first
        if reasoning is not None:
            for close in self._contract.reasoning_close:
                if close and text.startswith(close, reasoning[1]):
                    return min(reasoning[1] + len(close), answer)
            # Tags that the row's content holds are part of the reasoning's piece.
            return reasoning[1] if text[reasoning[0] : reasoning[1]].rstrip().endswith(">") else None
        for frame in self._contract.empty_reasoning:
            if text.startswith(frame, span.start):
                return min(span.start + len(frame), answer)
        return span.start

    # ── more than one example per conversation ──

    def _rewrites_history(self, conversation: Conversation) -> bool:
        """Return whether some supervised turn is rendered differently once other turns follow it."""
        contract = self._contract
        if all(contract.prefix_preserving.values()) and set(contract.prompt_match.values()) == {"full"}:
            return False
        whole = self._renderer.render(conversation.messages, conversation.tools, conversation.kwargs)
        if isinstance(whole, Rejected):
            return False
        asking = {**conversation.kwargs, **ASKS_FOR_ANSWER}
        last_differs = contract.last_turn_differs or contract.reasoning == "last"
        for index in self.supervised(conversation.messages):
            before, through = conversation.messages[:index], conversation.messages[: index + 1]
            prompt = self._renderer.render(before, conversation.tools, asking) if before else None
            if isinstance(prompt, RenderedConversation) and not whole.text.startswith(prompt.text):
                return True
            if last_differs and self._ends_otherwise(through, conversation, whole.text):
                return True
        return False

    def _ends_otherwise(self, through: Sequence[Message], conversation: Conversation, whole: str) -> bool:
        """Return whether a turn is rendered otherwise while it is last, from its header to its end."""
        turn = self._renderer.render(through, conversation.tools, conversation.kwargs)
        if isinstance(turn, Rejected) or whole.startswith(turn.text):
            return False
        index = len(through) - 1
        located = locate_own_text(self._renderer.prove_ownership(turn, self._roles), turn, through, self._roles)
        pieces = located.own.get(index) if located is not None else None
        if not pieces:
            return True
        end = max(piece.end for piece in pieces)
        ids = get_call_ids(turn.messages[index])
        if self._contract.end_of_turn in ("own", "next_header"):
            ending = self.frames(conversation.kwargs).match_end(turn.text, end, pieces[-1].kind, ("",), ids)
            end += len(ending or "")
        return not whole.startswith(turn.text[:end])

    def _split_per_exchange(self, conversation: Conversation) -> list[tuple[int, frozenset[int]]]:
        messages = conversation.messages
        starts = [i for i, m in enumerate(messages) if m["role"] == "user"]
        ends = [*starts[1:], len(messages)] if starts else [len(messages)]
        supervised = self.supervised(messages)
        groups: list[tuple[int, frozenset[int]]] = []
        start = 0
        for end in ends:
            inside = frozenset(index for index in supervised if start <= index < end)
            if inside:
                groups.append((max(inside) + 1, inside))
            start = end
        return groups


def _count_kinds(dropped: Sequence[tuple[str, int]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for kind, _ in dropped:
        counts[kind] = counts.get(kind, 0) + 1
    return counts


# ── which answers dropped text affects ──


def find_affected_answers(messages: Sequence[Message], origin: int, roles: frozenset[str]) -> Iterator[int]:
    """Yield the assistant messages that text dropped from message `origin` affects.

    The message itself if it is the assistant's; every later one for a system message or the tools (−1); else the next.
    """
    if origin >= 0 and messages[origin]["role"] in roles:
        yield origin
        return
    following = [i for i, m in enumerate(messages) if i > origin and m["role"] in roles]
    everywhere = origin < 0 or messages[origin]["role"] == "system"
    yield from following if everywhere else following[:1]


# ── the checks of a mask ──


def _leave_line_breaks_to_headers(text: str, trained: Sequence[Span], located: LocatedContent) -> bool:
    r"""Let own texts begin where their turns do; return whether any began before that, in whitespace.

    Whitespace is not covered, so that its owner is unknown: where a template prints the answer "\nYes" without its
    line break, that of the header before "Yes" was taken for it.
    """
    is_changed = False
    for index, group in groupby(trained, key=attrgetter("message")):
        first, own = next(group), located.own.get(index)
        if own and own[0].start < first.start < own[0].end and text[own[0].start : first.start].isspace():
            own[0] = own[0]._replace(start=first.start)
            is_changed = True
    return is_changed


def verify_mask(
    text: str,
    trained: Sequence[Span],
    supervised: Sequence[int],
    located: LocatedContent,
    excluded: set[int],
    blocks: Mapping[int, frozenset[str]],
) -> Rejected | None:
    """Return the reject of a mask that fails a check, else None.

    `blocks`: the messages whose spans come from `{% generation %}` blocks, each with the template text that such blocks
    contain in every message. The template text of other spans was already matched with the closed list.
    """
    by_message: dict[int, list[Span]] = {}
    for span in trained:
        if span.message in by_message:
            by_message[span.message].append(span)
        else:
            by_message[span.message] = [span]
    own_texts = _OwnTexts(text, located.own)
    for index in supervised:
        own, spans = located.own.get(index), by_message.get(index)
        if not own:
            # At most template text would train: an empty answer that the row does not have.
            return Rejected("assistant_untrained", f"message {index}: nothing of it is printed")
        if spans is None:
            return Rejected("assistant_untrained", f"message {index}")
        for piece in own:
            if piece.kind == "reasoning" and index in excluded:
                continue
            start, end = piece.start, piece.end
            if not (spans[0].start <= start and end <= spans[0].end) and not any(
                span.start <= start and end <= span.end for span in spans
            ):
                return Rejected("own_text_untrained", f"message {index}: {piece.kind}")
        constants = blocks.get(index)
        problem = None if constants is None else _find_foreign_text(index, spans, own, own_texts, constants)
        if problem is not None:
            return problem
    return None


@dataclass(slots=True)
class _OwnTexts:
    """The own texts of a row, to be looked for in template text, which is the same around most of its messages."""

    text: str
    own: Mapping[int, Sequence[ContentSpan]]
    texts: set[str] = field(default_factory=set[str])
    without: set[str] = field(default_factory=set[str])
    """Template text without any of them."""

    def find_foreign(self, index: int, start: int, end: int, own: Sequence[ContentSpan]) -> int | None:
        """Return a message other than `index`, whose pieces are `own`, a text of which is in `[start, end)`; or None.

        Text that both messages have, such as a value that two calls share, is not foreign.
        """
        text, part = self.text, self.text[start:end]
        if part in self.without:
            return None
        if not self.texts:
            for pieces in self.own.values():
                for one in pieces:
                    if one.end - one.start >= MIN_FOREIGN_CHARS:
                        self.texts.add(text[one.start : one.end])
        if not any(map(part.__contains__, self.texts)):
            self.without.add(part)
            return None
        for other, pieces in self.own.items():
            for piece in pieces:
                if other != index and MIN_FOREIGN_CHARS <= piece.end - piece.start <= end - start:
                    found = text[piece.start : piece.end]
                    if found in part and all(text[p.start : p.end] != found for p in own):
                        return other
        return None


def _find_foreign_text(
    index: int, spans: Sequence[Span], own: Sequence[ContentSpan], own_texts: _OwnTexts, constants: frozenset[str]
) -> Rejected | None:
    """Reject a message whose trained spans contain text of another message."""
    for span in spans:
        for start, end in _find_uncovered_parts(span, own):
            if end - start < MIN_FOREIGN_CHARS or own_texts.text[start:end].strip() in constants:
                continue
            other = own_texts.find_foreign(index, start, end, own)
            if other is not None:
                return Rejected("foreign_text_trained", f"message {index} holds text of message {other}")
    return None


def _find_uncovered_parts(span: Span, own: Sequence[ContentSpan]) -> list[tuple[int, int]]:
    parts: list[tuple[int, int]] = []
    position = span.start
    for piece in own:
        if piece.start > position:
            parts.append((position, min(piece.start, span.end)))
        position = max(position, piece.end)
    if position < span.end:
        parts.append((position, span.end))
    return parts
