"""The road from a conversation to its mask: print, choose, find own text, cut the spans, verify.

What belongs here: the order of those steps and the cutting. What does not: finding own text (`pieces.py`),
the prompt's units (`leads.py`), the laws (`verification.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pipelines.contract import Conversation, Printed, Printer, TemplateContract
from pipelines.errors import ConfigError
from pipelines.examples import KINDS
from pipelines.masking.leads import lead_length
from pipelines.masking.options import Loss, MaskRules
from pipelines.masking.pieces import SHORT, Located, Locator
from pipelines.masking.shapes import Shape, learn
from pipelines.masking.verification import verify
from pipelines.rows import Masked, Message, Piece, Rejected, Span

VERSION = 3
"""Raise it when any mask may come out differently."""


def share_threshold(share: float) -> int:
    """Return the integer of 64 bits under which the first eight bytes of a hash, read little-endian, are in a share."""
    return min(int(share * 2.0**64), (1 << 64) - 1)


def needs_plain_check(row_hash: bytes, share: float) -> bool:
    """Tell whether a row is in the share that is printed a second time; decided by its hash alone."""
    return share > 0 and int.from_bytes(row_hash[:8].ljust(8, b"\0"), "little") <= share_threshold(share)


class Masker:
    """Makes and verifies the mask of conversations printed by one template."""

    def __init__(self, printer: Printer, loss: Loss, rules: MaskRules | None = None) -> None:
        self._printer = printer
        self._contract: TemplateContract = printer.contract
        self._loss = loss
        self._rules = rules or MaskRules()
        self._policy = {"reasoning": "count", **(self._rules.on_dropped or {})}
        self._roles = self._rules.assistant_roles
        blocks = self._contract.generation_blocks != "none"
        if self._rules.spans == "generation" and not blocks:
            raise ConfigError(
                "template.spans: generation needs a template with {% generation %} blocks, this one has none; "
                "marks works with any template; write auto or marks"
            )
        self._by_blocks = self._rules.spans != "marks" and blocks and not loss.everything
        usual = Loss(boundary=loss.boundary, weights=loss.weights, finish=loss.finish)
        ends_itself = self._contract.end_of_turn == "own" and bool(self._contract.own_end)
        self._is_usual = loss == usual and ends_itself and not self._by_blocks and "assistant" in self._roles
        self._prompts: dict[tuple[str, bool], str] = {}
        enders = [t for t in self._contract.control_tokens if not t.startswith("</")]
        ends = [self._contract.own_end, self._contract.eos_token, *enders]
        frames = [*self._contract.empty_reasoning, *self._contract.reasoning_close, self._contract.finish]
        self._constants = frozenset(text.strip() for text in (*frames, *ends))
        self._enders = tuple(dict.fromkeys(end for end in ends if end))

    # ── the road of one conversation ──

    def render_and_mask(self, batch: Iterable[Conversation]) -> list[Masked | Rejected]:
        """Print and mask a batch, one result per conversation, whole conversations only."""
        return [self.mask(conversation) for conversation in batch]

    def examples(self, conversation: Conversation) -> list[Masked | Rejected]:
        """Make a conversation's examples as `turns` says: whole, per exchange, per message, or what it needs.

        Law: every supervised message trains in exactly one example.
        """
        return [self.mask(one, only=only) for one, only in self.drafts(conversation)]

    def drafts(self, conversation: Conversation) -> list[tuple[Conversation, frozenset[int] | None]]:
        """Say which conversations a row becomes as `turns` asks, and which of their messages may train (None: all)."""
        turns = self._rules.turns
        if turns == "auto":
            turns = "message" if self._rewrites_history(conversation) else "whole"
        if turns == "whole":
            return [(conversation, None)]
        groups = self._per_message(conversation) if turns == "message" else self._per_exchange(conversation)
        drafts = [(replace(conversation, messages=conversation.messages[:end]), only) for end, only in groups]
        return [*drafts] or [(conversation, None)]

    def mask(self, conversation: Conversation, *, only: frozenset[int] | None = None) -> Masked | Rejected:
        """Print a conversation and find what trains; `only` limits supervision to some messages.

        A reject's reason is one of the closed list; its detail names messages and kinds.
        """
        printed = self._printer.render(conversation.messages, conversation.tools, conversation.kwargs)
        if isinstance(printed, Rejected):
            return printed
        again = not self._contract.marks_inert or needs_plain_check(conversation.row_hash, self._rules.verify_render)
        if again:
            plain = self._printer.plain(conversation.messages, conversation.tools, conversation.kwargs)
            if plain != printed.text:
                return Rejected("render_mismatch", _difference(printed.text, plain))
        if self._loss.everything:
            return self._train_all(conversation, printed)
        if self._is_usual and only is None:
            masked = self._usual(conversation, printed)
            if masked is not None:
                return masked
        supervised = self.supervised(conversation.messages)
        if only is not None:
            supervised = [index for index in supervised if index in only]
        if not supervised:
            return self._nothing_supervised(conversation.messages)
        return self._mask(conversation, printed, supervised)

    def _mask(self, conversation: Conversation, printed: Printed, supervised: list[int]) -> Masked | Rejected:
        leads = self._lead_ends(conversation, printed)
        locator = Locator(printed, self._contract)
        located = locator.locate(conversation.messages, self._roles, leads)
        dropped = list(located.dropped)
        if conversation.tools:
            owners = {i for i, m in enumerate(conversation.messages) if m["role"] in self._roles}
            if locator.tools_missing(conversation.tools, [s for s in printed.spans if s.message in owners]):
                dropped.append(("tool_list", -1))
        missing = self._unprinted(conversation, printed, supervised, located, dropped)
        if isinstance(missing, Rejected):
            return missing
        if dropped:
            kept = self._after_drops(conversation.messages, supervised, dropped)
            if isinstance(kept, Rejected):
                return kept
            supervised = kept
            if not supervised:
                return Rejected("no_loss_tokens", "the template dropped text of every supervised message")
        trained, text = self._trained(conversation, printed, supervised, located, leads, missing)
        region = self._without_reasoning(conversation.messages, printed, trained, located)
        if isinstance(region, Rejected):
            return region
        trained, untrained, excluded = region
        problem = verify(printed.text, trained, supervised, located, excluded, self._constants)
        if problem is not None:
            return problem
        lost = _counts(dropped) if dropped else {}
        weights = _weights(conversation.messages, trained)
        return Masked(text, printed.spans, _merged(trained), tuple(located.pieces()), lost, untrained, weights)

    def _usual(self, conversation: Conversation, printed: Printed) -> Masked | None:
        """Mask a plain chat in one pass, or return null: then the long way decides.

        Law: the result is the long way's. A row is usual if every message stands whole in its own span, every
        assistant span is lead, own text, the known end of turn and white space, and nothing else is in play.
        """
        text, spans, messages = printed.text, printed.spans, conversation.messages
        before = len(messages) - len(spans)
        if conversation.tools or not spans or before not in (0, 1):
            return None
        pieces: list[Piece] = []
        trained: list[Span] = []
        predecessor = "user"
        own_end = self._contract.own_end
        if before:
            found = _plain_content(messages[0], text, 0, spans[0].start)
            predecessor = messages[0]["role"]
            if found is None or predecessor != "system":
                return None
            pieces.append(Piece(*found, 0, "system"))
        for index, span in enumerate(spans, before):
            message = messages[index]
            role = message["role"]
            if span.message != index:
                return None
            if role in self._roles:
                prompt = self._prompt(predecessor, conversation.kwargs, has_tools=False)
                start = span.start + len(prompt)
                found = _plain_content(message, text, start, span.end)
                if found is None or not prompt or not text.startswith(prompt, span.start):
                    return None
                stop = found[1] + len(own_end)
                if not text.startswith(own_end, found[1]) or not (stop == span.end or text[stop : span.end].isspace()):
                    return None
                if found[0] != start and text[start : found[0]] not in self._contract.empty_reasoning:
                    return None
                trained.append(Span(start, stop, index))
                pieces.append(Piece(*found, index, "assistant"))
            else:
                found = _plain_content(message, text, span.start, span.end)
                if found is None or role not in ("user", "system"):
                    return None
                pieces.append(Piece(*found, index, role))
            predecessor = role
        return Masked(text, spans, tuple(trained), tuple(pieces)) if trained else None

    def shape(self, roles: Sequence[str]) -> Shape | None:
        """Return what the template prints around contents of these roles; null where each row must be masked itself.

        Law: a row of that shape has the mask that `mask` would give it. The shape is learned from the verified
        mask of placeholders, which the short and the long way must agree on where both can be gone.
        """
        if self._rules.turns != "whole" or not self._contract.marks_inert:
            return None
        printed = self._printer.opaque(roles)
        if printed is None:
            return None
        messages = [{"role": role, "content": content} for role, content in zip(roles, printed.contents, strict=True)]
        conversation = Conversation(messages)
        shown, masked = self._printer.render(messages, None, {}), self.mask(conversation)
        if isinstance(shown, Rejected) or isinstance(masked, Rejected) or masked.dropped or masked.reasoning_untrained:
            return None
        if self._is_usual and masked != self._mask(conversation, shown, self.supervised(messages)):
            return None
        return learn(roles, printed, masked, KINDS)

    def _train_all(self, conversation: Conversation, printed: Printed) -> Masked:
        located = Locator(printed, self._contract).locate(conversation.messages, self._roles, {})
        whole = (Span(0, len(printed.text), -1),) if printed.text else ()
        return Masked(printed.text, printed.spans, whole, tuple(located.pieces()), _counts(located.dropped))

    # ── which messages ──

    def supervised(self, messages: Sequence[Message]) -> list[int]:
        """Choose by flag first, then by role, then (for the model's roles) by `supervise`."""
        loss = self._loss
        by_default = not loss.mask and loss.mask_default == "mask"
        roles = self._roles
        if by_default and loss.supervise == "all_assistant":
            return [
                index
                for index, message in enumerate(messages)
                if (
                    message["role"] in roles
                    if "train" not in message and "weight" not in message
                    else _trains(message, roles)
                )
            ]
        first = 0
        if loss.supervise == "last_turn":
            first = max((i + 1 for i, m in enumerate(messages) if m["role"] == "user"), default=0)
        elif loss.supervise == "last_assistant":
            first = max((i for i, m in enumerate(messages) if m["role"] in self._roles), default=len(messages))
        chosen: list[int] = []
        for index, message in enumerate(messages):
            role = message["role"]
            flag = _flag(message)
            if flag is None:
                is_model = role in self._roles
                trains = is_model if by_default else loss.mask.get(role, loss.mask_default) == "train"
                flag = trains and (not is_model or index >= first)
            if flag:
                chosen.append(index)
        return chosen

    def _nothing_supervised(self, messages: Sequence[Message]) -> Rejected:
        if not any(message["role"] in self._roles for message in messages):
            return Rejected("no_assistant", "no message has one of the model's roles")
        return Rejected("no_loss_tokens", "every message is context by its flag, role or the supervise option")

    # ── leads ──

    def _lead_ends(self, conversation: Conversation, printed: Printed) -> dict[int, int]:
        """Return where each assistant's text begins after the prompt's units."""
        messages = conversation.messages
        ends: dict[int, int] = {}
        seen: set[int] = set()
        has_tools = bool(conversation.tools)
        for span in printed.spans:
            index = span.message
            if index < 0 or index in seen or messages[index]["role"] not in self._roles:
                continue
            seen.add(index)
            predecessor = messages[index - 1]["role"] if index else "user"
            ends[index] = span.start + self._lead(printed.text, span.start, predecessor, has_tools, conversation.kwargs)
        return ends

    def _lead(self, text: str, start: int, predecessor: str, has_tools: bool, kwargs: Mapping[str, object]) -> int:
        tokens = self._contract.control_tokens
        prompt = self._prompt(predecessor, kwargs, has_tools=has_tools)
        if prompt and text.startswith(prompt, start):
            return len(prompt)
        found = lead_length(text, start, prompt, tokens)
        if not found and predecessor != "user":
            found = lead_length(text, start, self._prompt("user", kwargs, has_tools=has_tools), tokens)
        constant = self._contract.constant_lead
        if not found and constant and text.startswith(constant, start):
            found = len(constant)
        return found

    def _prompt(self, role: str, kwargs: Mapping[str, object], *, has_tools: bool) -> str:
        if kwargs:
            return self._printer.generation_prompt(role, has_tools=has_tools, kwargs=kwargs)
        known = self._prompts.get((role, has_tools))
        if known is None:
            known = self._printer.generation_prompt(role, has_tools=has_tools, kwargs=kwargs)
            self._prompts[role, has_tools] = known
        return known

    # ── dropped content ──

    def _after_drops(
        self, messages: Sequence[Message], supervised: list[int], dropped: Sequence[tuple[str, int]]
    ) -> list[int] | Rejected:
        refused = sorted({kind for kind, _ in dropped if self._policy.get(kind, "reject") == "reject"})
        if refused:
            return Rejected("content_dropped", ", ".join(refused))
        off = {
            index
            for kind, origin in dropped
            if self._policy.get(kind) == "untrain"
            for index in self._answers_to(messages, origin)
        }
        return [index for index in supervised if index not in off]

    def _answers_to(self, messages: Sequence[Message], origin: int) -> Iterator[int]:
        """Yield the assistant messages that text of a message bears on: itself, the next one, or all."""
        if origin >= 0 and messages[origin]["role"] in self._roles:
            yield origin
            return
        following = [i for i, m in enumerate(messages) if i > origin and m["role"] in self._roles]
        everywhere = origin < 0 or messages[origin]["role"] == "system"
        yield from following if everywhere else following[:1]

    # ── trained characters ──

    def _unprinted(
        self,
        conversation: Conversation,
        printed: Printed,
        supervised: Sequence[int],
        located: Located,
        dropped: list[tuple[str, int]],
    ) -> dict[int, tuple[int, int]] | Rejected:
        """Find supervised messages that no mark showed, by printing again with other text in their place."""
        owned = {span.message for span in printed.spans}
        found: dict[int, tuple[int, int]] = {}
        if owned.issuperset(supervised):
            return found
        for index in supervised:
            if index in owned:
                continue
            region = self._counterfactual(conversation, printed, index)
            if region is None:
                return Rejected("span_not_found", f"message {index} ({conversation.messages[index]['role']})")
            found[index] = region
            dropped[:] = [one for one in dropped if one[1] != index]
            is_model = conversation.messages[index]["role"] in self._roles
            located.own[index] = [Piece(*region, index, "assistant" if is_model else "system")]
            located.first[index], located.last[index] = region
        return found

    def _counterfactual(self, conversation: Conversation, printed: Printed, index: int) -> tuple[int, int] | None:
        message = conversation.messages[index]
        content = message.get("content")
        if message.get("tool_calls") or message.get("reasoning_content") or type(content) is not str:
            return None
        own = content.strip()
        if not own:
            return None
        sentinel = next(s for s in ("qzsentinelzq", "xwsentinelwx", "vksentinelkv") if not {s[0]} & {own[0], own[-1]})
        others = list(conversation.messages)
        others[index] = {**message, "content": sentinel}
        other = self._printer.render(others, conversation.tools, conversation.kwargs)
        if isinstance(other, Rejected):
            return None
        start = _common(printed.text, other.text)
        limit = min(len(printed.text), len(other.text)) - start
        end = len(printed.text) - min(_common(printed.text[::-1], other.text[::-1]), limit)
        region = printed.text[start:end]
        if region in (content, own):
            return start, end
        if region.strip() == own:
            at = printed.text.find(own, start)
            return at, at + len(own)
        return None

    def _trained(
        self,
        conversation: Conversation,
        printed: Printed,
        supervised: Sequence[int],
        located: Located,
        leads: Mapping[int, int],
        regions: Mapping[int, tuple[int, int]],
    ) -> tuple[list[Span], str]:
        if self._by_blocks:
            return self._block_spans(conversation, printed, set(supervised)), printed.text
        trained: list[Span] = []
        messages = conversation.messages
        position = {span.message: k for k, span in enumerate(printed.spans)}
        wanted = set(supervised)
        for k, span in enumerate(printed.spans):
            index = span.message
            if index not in wanted or index in regions:
                continue
            if messages[index]["role"] in self._roles:
                trained += self._assistant_span(printed, span, k, position[index] == k, located, leads, messages)
            else:
                trained.append(self._other_span(printed.text, span))
        for index, region in regions.items():
            trained.append(self._region_span(printed.text, region, index))
        trained = [span for span in trained if span.end > span.start]
        text = printed.text
        last = len(messages) - 1
        if last in wanted and messages[last]["role"] in self._roles:
            text = self._finish(printed, trained, last, located.last.get(last), regions.get(last))
        return sorted(trained, key=_by_start), text

    def _assistant_span(
        self,
        printed: Printed,
        span: Span,
        k: int,
        is_last: bool,
        located: Located,
        leads: Mapping[int, int],
        messages: Sequence[Message],
    ) -> list[Span]:
        """Return one span of an assistant message without its lead, through its end of turn."""
        text, index = printed.text, span.message
        start, end = span.start, span.end
        lead_end = leads.get(index, start)
        if self._loss.lead == "mask" and start <= lead_end <= end:
            start = min(lead_end, max(start, located.first.get(index, lead_end)))
        if not is_last:
            return [Span(start, end, index)]
        own_end = min(max(located.last.get(index, start), start), end)
        stop = end if self._loss.trailing == "train" else own_end + len(text[own_end:end].rstrip())
        if self._loss.end_of_turn == "mask":
            return [Span(start, self._before_end(text, own_end, stop), index)]
        spans = [Span(start, stop, index)]
        if self._contract.end_of_turn == "next_header":
            spans += self._next_header(printed, k, messages)
        return spans

    def _before_end(self, text: str, own_end: int, stop: int) -> int:
        tail = text[own_end:stop]
        ender = next((end for end in self._enders if tail.rstrip().endswith(end)), "")
        return own_end + len(tail.rstrip()) - len(ender) if ender else own_end

    def _next_header(self, printed: Printed, k: int, messages: Sequence[Message]) -> list[Span]:
        """Return the control token that begins the next message, where that is what ends a turn."""
        if k + 1 >= len(printed.spans):
            return []
        following = printed.spans[k + 1]
        if messages[following.message]["role"] in self._roles:
            return []
        start = (
            following.start
            + len(printed.text[following.start : following.end])
            - len(printed.text[following.start : following.end].lstrip())
        )
        token = self._control_at(printed.text, start)
        return [Span(start, start + len(token), printed.spans[k].message)] if token else []

    def _control_at(self, text: str, start: int) -> str:
        # The contract lists the longest token first.
        return next((token for token in self._contract.control_tokens if text.startswith(token, start)), "")

    def _other_span(self, text: str, span: Span) -> Span:
        """Return a message of another role: header included, white space after it not."""
        if self._loss.trailing == "train":
            return span
        return Span(span.start, span.start + len(text[span.start : span.end].rstrip()), span.message)

    def _region_span(self, text: str, region: tuple[int, int], index: int) -> Span:
        """Return own text found by a counterfactual, through an end of turn that follows at once."""
        start, end = region
        if self._loss.end_of_turn == "train":
            own = self._contract.own_end
            ending = own if own and text.startswith(own, end) else self._control_at(text, end)
            end += len(ending)
        return Span(start, end, index)

    def _finish(
        self, printed: Printed, trained: list[Span], index: int, own_end: int | None, region: tuple[int, int] | None
    ) -> str:
        """Train or append the end of a conversation whose last message, `index`, does not end itself."""
        text = printed.text
        finish = self._loss.finish
        if self._loss.end_of_turn == "mask" or own_end is None:
            return text
        last = trained[-1].end if trained else own_end
        stop = max(last, own_end)
        tail = text[own_end:stop].rstrip()
        if tail and any(tail.endswith(end) for end in self._enders):
            return text
        eos = self._contract.eos_token
        if eos and region is None:
            at = text.find(eos, max(printed.loop_end, own_end))
            if at >= 0:
                trained.append(Span(at, at + len(eos), index))
                return text
        ending = {"auto": self._contract.finish or eos, "none": "", "eos": eos}.get(finish, finish)
        if ending:
            trained.append(Span(len(text), len(text) + len(ending), -1))
        return text + ending

    def _block_spans(self, conversation: Conversation, printed: Printed, wanted: set[int]) -> list[Span]:
        """Return exactly the characters of generation blocks that lie in supervised messages."""
        trained: list[Span] = []
        last = len(conversation.messages) - 1
        for block in printed.generation:
            if block.message < 0:
                # Outside every message, as an EOS after the loop: the last message's, if it trains.
                if last in wanted and block.end > block.start:
                    trained.append(Span(block.start, block.end, last))
                continue
            for span in printed.spans:
                start, end = max(span.start, block.start), min(span.end, block.end)
                if start < end and span.message in wanted:
                    trained.append(Span(start, end, span.message))
        return trained

    # ── reasoning ──

    def _without_reasoning(
        self, messages: Sequence[Message], printed: Printed, trained: list[Span], located: Located
    ) -> tuple[list[Span], int, set[int]] | Rejected:
        """Take the loss off reasoning regions; return the spans, how many regions, and whose reasoning is out."""
        if self._loss.think_loss == "all":
            return trained, 0, set()
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
            end = self._region_end(printed.text, span, index, located)
            if end is None:
                return Rejected("reasoning_not_located", f"message {index}")
            if end <= span.start:
                kept.append(span)
                continue
            count += 1
            reasoning = located.reasoning.get(index)
            if self._loss.think_loss == "answer_plus_think" and reasoning is not None:
                kept.append(Span(*reasoning, index))
            else:
                excluded.add(index)
            if end < span.end:
                kept.append(Span(end, span.end, index))
        return kept, count, excluded

    def _region_end(self, text: str, span: Span, index: int, located: Located) -> int | None:
        """Return where a message's reasoning region ends: after the frame that closes it, or at its start."""
        reasoning = located.reasoning.get(index)
        if reasoning is not None:
            for close in self._contract.reasoning_close:
                if close and text.startswith(close, reasoning[1]):
                    return min(reasoning[1] + len(close), located.answer.get(index, span.end))
            # Tags that the row itself brought stand inside the piece.
            return reasoning[1] if text[reasoning[0] : reasoning[1]].rstrip().endswith(">") else None
        for frame in self._contract.empty_reasoning:
            if text.startswith(frame, span.start):
                return min(span.start + len(frame), located.answer.get(index, span.end))
        return span.start

    # ── more than one example per conversation ──

    def _rewrites_history(self, conversation: Conversation) -> bool:
        """Tell whether the whole render lacks a supervised turn's prompt, or what the turn prints as the last one."""
        contract = self._contract
        if all(contract.prefix_preserving.values()) and set(contract.prompt_match.values()) == {"full"}:
            return False
        whole = self._printer.render(conversation.messages, conversation.tools, conversation.kwargs)
        if isinstance(whole, Rejected):
            return False
        asking = {**conversation.kwargs, "add_generation_prompt": True}
        last_differs = contract.last_turn_differs or contract.reasoning == "last"
        for index in self.supervised(conversation.messages):
            before, through = conversation.messages[:index], conversation.messages[: index + 1]
            prompt = self._printer.render(before, conversation.tools, asking) if before else None
            if isinstance(prompt, Printed) and not whole.text.startswith(prompt.text):
                return True
            turn = self._printer.render(through, conversation.tools, conversation.kwargs) if last_differs else None
            if isinstance(turn, Printed) and not whole.text.startswith(turn.text[: turn.loop_end]):
                return True
        return False

    def _per_message(self, conversation: Conversation) -> list[tuple[int, frozenset[int]]]:
        return [(index + 1, frozenset({index})) for index in self.supervised(conversation.messages)]

    def _per_exchange(self, conversation: Conversation) -> list[tuple[int, frozenset[int]]]:
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


_UNUSUAL = frozenset({"tool_calls", "reasoning_content", "inline_reasoning", "train", "weight"})


def _plain_content(message: Message, text: str, start: int, end: int) -> tuple[int, int] | None:
    """Find the content of a message that has nothing else, long enough to stand nowhere by chance."""
    content = message["content"]
    if not _UNUSUAL.isdisjoint(message) or type(content) is not str or len(content) < SHORT or content.isspace():
        return None
    at = text.find(content, start, end)
    return None if at < 0 else (at, at + len(content))


def _trains(message: Message, roles: frozenset[str]) -> bool:
    flag = _flag(message)
    return message["role"] in roles if flag is None else flag


def _flag(message: Message) -> bool | None:
    train = message.get("train")
    if train is not None:
        return bool(train)
    weight = message.get("weight")
    return None if weight is None else weight > 0


def _weights(messages: Sequence[Message], trained: Sequence[Span]) -> dict[int, float]:
    """Return the loss weights, other than 1, of trained spans by their message."""
    # An appended end of turn is span −1's, and as an index −1 is the message that it ends: the last one.
    found = {index: float(messages[index].get("weight", 1)) for index in {span.message for span in trained}}
    return {index: weight for index, weight in sorted(found.items()) if weight != 1}


def _by_start(one: Span | Piece) -> int:
    return one.start


def _merged(trained: Sequence[Span]) -> tuple[Span, ...]:
    """Return spans in order, adjacent ones of one message joined; they are disjoint already."""
    merged: list[Span] = []
    for span in trained:
        if merged and merged[-1].message == span.message and merged[-1].end == span.start:
            merged[-1] = Span(merged[-1].start, span.end, span.message)
        else:
            merged.append(span)
    return tuple(merged)


def _counts(dropped: Sequence[tuple[str, int]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for kind, _ in dropped:
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _common(left: str, right: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _difference(marked: str, plain: str | Rejected) -> str:
    if isinstance(plain, Rejected):
        return f"the plain render is refused: {plain.detail}"
    at = _common(marked, plain)
    return f"character {at}: {marked[at : at + 20]!r} with marks, {plain[at : at + 20]!r} without"
