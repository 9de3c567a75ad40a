"""Render a conversation by its chat template: the text, and which characters belong to which message.

What belongs here: `Renderer`, which runs one template. What does not: options and resolving a template (`options.py`),
which characters train (`conversation/loss_mask.py`), token ids (`tokenization/`).

Two paths give the same result. The reference path changes the template's syntax tree (`span_markers.py`) and runs it
in Jinja's sandbox. The fast path writes the marks into the template's text for another engine (`minijinja_engine.py`);
a template takes it only if text and spans are equal on every probe (`engine_parity.py`), and a row that the fast engine
refuses takes the reference path.

    options               which template, which values       sandbox              Jinja's sandbox and its budget
    template_registry     templates by name                  span_markers         marks in the syntax tree → spans
    adaptation            messages in the template's form    minijinja_engine     marks in the template's text
    probes                probe conversations                engine_parity        probes on which both must agree
    template_observation  behavior observed on the probes    character_ownership  proof of every character's owner
    content_tracing       proof that contents are only printed
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any, Literal

from jinja2 import TemplateSyntaxError, nodes

from rowmill.conversation import content_tracing, engine_parity, minijinja_engine, probes
from rowmill.conversation.adaptation import Adaptation, BadArgumentsError
from rowmill.conversation.character_ownership import COVER_ATTEMPTS, CoveredConversation, TemplateLiterals
from rowmill.conversation.sandbox import (
    MAX_OUTPUT_CHARS,
    MAX_STEPS,
    BudgetError,
    Sandbox,
    make_clock,
    make_too_deep_error,
    require_shallow_template,
    require_short_template,
)
from rowmill.conversation.span_markers import (
    MARK_CHARACTERS,
    MarkRecorder,
    charge_template,
    find_captured_loops,
    find_silent_loops,
    mark_template,
    read_marks,
)
from rowmill.conversation.template_contract import (
    CONTROL_TAG_PATTERN,
    CharacterOwnership,
    PlaceholderRendering,
    RenderedConversation,
    TemplateBehavior,
)
from rowmill.conversation.template_observation import observe_template
from rowmill.conversation.template_options import RendererSpec
from rowmill.conversation.text_search import WHOLE_FLOAT, encode_for_search, lacks_marks
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.schema.rows import Message, Rejected

RENDERING_VERSION = 3
"""Increment it when the text or the spans of any render may change."""


class Renderer:
    """One template, compiled for both paths and probed; expensive, so built once per worker.

    More than 250 lines, because both paths, the probes and the proofs share the compiled template, its values and its
    budget.
    """

    def __init__(self, spec: RendererSpec) -> None:
        self.spec = spec
        self._sandbox = Sandbox(spec.now, [MarkRecorder])
        self._recorder: MarkRecorder = self._sandbox.extensions[MarkRecorder.identifier]  # pyrefly: ignore[bad-assignment]
        self._tree = self._parse()
        require_shallow_template(self._tree)
        self._plain = self._compile(charge_template(self._parse(), self._recorder))
        self._marked = self._compile(mark_template(self._parse(), self._recorder))
        self._captured = find_captured_loops(self._tree)
        self._marks_inert = True
        absent = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
        self._values = {
            **absent,
            "documents": None,
            "add_generation_prompt": False,
            **spec.special_tokens,
            **spec.template_kwargs,
        }
        self._fast: minijinja_engine.MinijinjaEngine | None = None
        self._tracer: content_tracing.TracingRenderer | None = None
        self._avoids_whole_floats = False
        self._compares_messages = minijinja_engine.compares_messages(self._tree)
        self._contract: TemplateBehavior | None = None
        self._prompts: dict[tuple[str, bool, bytes], str] = {}
        self._clean_tools: object = None
        self._literals: TemplateLiterals | None = None
        self._identity = ""
        self.adaptation = Adaptation(reasoning_keys=probes.find_reasoning_keys(self._tree))
        self.fast_path_obstacle = "not probed"
        self.adaptation = self._apply_spec_choices(probes.probe_adaptation(self._render_probe, self.adaptation))
        self.fast_path_obstacle = self._try_fast_engine()

    @property
    def render_path(self) -> Literal["fast", "reference"]:
        """The path that rows take; fast only if text and spans are equal on every probe."""
        return "reference" if self._fast is None else "fast"

    @property
    def identity(self) -> str:
        """A digest of everything that determines the rendered text."""
        if not self._identity:
            self._identity = sha256(
                encode_for_search(asdict(self.spec) | {"now": self.spec.now.isoformat()})
            ).hexdigest()
        return self._identity

    @property
    def contract(self) -> TemplateBehavior:
        """The template's behavior, observed on probes at the first access."""
        if self._contract is None:
            self._contract = self._observe_behavior()
        return self._contract

    def _observe_behavior(self) -> TemplateBehavior:
        observed = observe_template(
            self._render_probe,
            self.generation_prompt,
            eos_token=str(self._values["eos_token"]),
            bos_token=str(self._values["bos_token"]),
            adds_bos=self.spec.adds_bos,
            control_tokens=self._list_control_tokens(),
            known_tokens=frozenset((*self.spec.control_tokens, *self.spec.special_tokens.values())),
            has_blocks=self._has_generation_blocks(),
            adaptation=self.adaptation,
            other_clock=self._render_with_other_clock,
        )
        return replace(
            observed,
            marks_inert=self._marks_inert,
            render_path=self.render_path,
            fast_path_obstacle=self.fast_path_obstacle,
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> RenderedConversation | Rejected:
        """Render a conversation, with the span of every message.

        Invariant: on either path the text equals `plain` of the same conversation.
        """
        if self._fast is not None:
            printed = self._render_fast(messages, tools, kwargs)
            if printed is not None:
                return printed
        return self.render_by_reference(messages, tools, kwargs)

    def render_by_reference(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> RenderedConversation | Rejected:
        """Render on the reference path."""
        try:
            adapted = self.adaptation.messages(messages)
        except BadArgumentsError as error:
            return Rejected("bad_tool_arguments", str(error))
        return self._render_reference(adapted, self.adaptation.tools(tools), kwargs)

    def plain(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> str | Rejected:
        """Render without marks, as `apply_chat_template(…, tokenize=False)` does."""
        try:
            adapted, offered = self.adaptation.messages(messages), self.adaptation.tools(tools)
        except BadArgumentsError as error:
            return Rejected("bad_tool_arguments", str(error))
        size = len(encode_for_search([adapted, offered]))
        self._recorder.watch((), "")
        return self._run_template(self._plain, adapted, offered, kwargs, size)

    def prove_ownership(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        kwargs: Mapping[str, Json],
        text: str,
        roles: frozenset[str],
    ) -> CharacterOwnership | None:
        """Prove which characters of `text`, the plain render, are own text; `roles` are the model's roles.

        None if the template inspects text, so that its render changes in every attempt to cover it.
        """
        if self._literals is None:
            self._literals = TemplateLiterals(self._tree)
        try:
            adapted = self.adaptation.messages(messages)
        except BadArgumentsError:
            return None
        offered = self.adaptation.tools(tools)
        inline_reasoning = {i: int(m["inline_reasoning"]) for i, m in enumerate(messages) if m.get("inline_reasoning")}
        for attempt in COVER_ATTEMPTS:
            cover = CoveredConversation(
                adapted, roles, self.adaptation.reasoning_keys, self._literals, attempt, inline_reasoning, text
            )
            covered = self._render_covered(cover.messages, offered, kwargs)
            proof = None if covered is None else cover.prove(covered, text)
            if proof is not None:
                return proof
        return None

    def _render_covered(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> str | None:
        """Render adapted messages without marks, on the fast path if the template has one."""
        if self._fast is not None:
            self._sandbox.budget.refill(0)
            try:
                fuel = minijinja_engine.BASE_FUEL + minijinja_engine.FUEL_PER_MESSAGE * (
                    len(messages) + len(tools or ())
                )
                return self._fast.plain(messages, tools, kwargs, fuel=fuel)
            except Exception:  # noqa: BLE001, S110  (the reference path renders it, or reports the error)
                pass
        size = sum(len(str(message)) for message in messages)
        self._recorder.watch((), "")
        text = self._run_template(self._plain, messages, tools, kwargs, size)
        return None if isinstance(text, Rejected) else text

    def generation_prompt(self, role: str, *, has_tools: bool, kwargs: Mapping[str, Json]) -> str:
        """Return the generation prompt after a message of that role."""
        key = (role, has_tools, encode_for_search(kwargs))
        known = self._prompts.get(key)
        if known is None:
            if len(self._prompts) > 4096:
                self._prompts.clear()
            known = self._prompts[key] = probes.probe_generation_prompt(self._render_probe, role, has_tools, kwargs)
        return known

    def open_proofs(self) -> None:
        """Open now what is otherwise opened at its first use, so that processes forked later share it."""
        _ = self.contract
        self._open_tracer()

    def _open_tracer(self) -> content_tracing.TracingRenderer:
        if self._tracer is None:
            self._tracer = content_tracing.TracingRenderer(self.spec.text, self.spec.now, self._values)
        return self._tracer

    def render_placeholders(self, roles: Sequence[str], kwargs: Mapping[str, Json]) -> PlaceholderRendering | None:
        """Render one placeholder per role, with proof that other contents render the same way; None without proof."""
        tracer = self._open_tracer()
        if tracer.reason:
            return None
        messages = [
            {"role": role, "content": content_tracing.make_content_placeholder(index)}
            for index, role in enumerate(roles)
        ]
        # The plain render comes first, because it has a budget and the traced render has none.
        text = self.plain(messages, None, kwargs)
        printed = None if isinstance(text, Rejected) else tracer.render(roles, kwargs)
        return printed if printed is not None and printed.text == text else None

    def _apply_spec_choices(self, found: Adaptation) -> Adaptation:
        """Override the adaptation found by probes with the recipe's choices."""
        if self.spec.arguments != "auto":
            found = replace(found, arguments=self.spec.arguments, takes_text=True)
        return replace(found, tool_ids="any") if self.spec.tool_ids == "keep" else found

    def _parse(self) -> nodes.Template:
        require_short_template(self.spec.text)
        try:
            return self._sandbox.parse(self.spec.text)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"template.chat_template: line {error.lineno}: {error.message}; expected a Jinja chat template; "
                "correct that line"
            ) from error
        except RecursionError as error:
            raise make_too_deep_error() from error
        except ValueError as error:
            raise ConfigError(
                f"template.chat_template: the template cannot be parsed ({error}); expected a Jinja chat template; "
                "correct it"
            ) from error

    def _compile(self, tree: nodes.Template) -> Any:
        try:
            return self._sandbox.from_string(tree)
        except (TemplateSyntaxError, RecursionError, SyntaxError, MemoryError) as error:
            raise ConfigError(
                f"template.chat_template: the template cannot be compiled ({error}); expected a Jinja chat template; "
                "correct it"
            ) from error

    def _list_control_tokens(self) -> tuple[str, ...]:
        literals = [data.data for data in self._tree.find_all(nodes.TemplateData)]
        literals += [c.value for c in self._tree.find_all(nodes.Const) if isinstance(c.value, str)]
        text = "\0".join(literals)
        written = re.findall(CONTROL_TAG_PATTERN, text)
        printed = [value for value in self.spec.special_tokens.values() if value]
        return tuple(dict.fromkeys([*self.spec.control_tokens, *written, *printed]))

    def _has_generation_blocks(self) -> bool:
        calls = self._tree.find_all(nodes.CallBlock)
        return any(isinstance(call.call.node, nodes.ExtensionAttribute) for call in calls)

    # ── the reference path ──

    def _render_reference(
        self,
        adapted: Sequence[Message],
        tools: Sequence[Json] | None,
        kwargs: Mapping[str, Json],
        size_and_mark: tuple[int, str] | None = None,
    ) -> RenderedConversation | Rejected:
        if len({id(message) for message in adapted}) < len(adapted):
            adapted = [dict(message) for message in adapted]
        size, mark = size_and_mark or self._choose_mark(adapted, tools, kwargs)
        if not mark:
            return Rejected("template_error", "the row holds every character that could serve as a mark")
        self._recorder.watch(adapted, mark)
        marked_loops = self._recorder.marked_loops
        text = self._run_template(self._marked, adapted, tools, kwargs, size)
        if isinstance(text, Rejected):
            return text
        if self._captured and not self._captured.isdisjoint(marked_loops):
            self._marks_inert = False
        try:
            return read_marks(text, mark, adapted)
        except (ValueError, IndexError) as error:
            return Rejected("span_not_found", str(error))

    def _run_template(
        self,
        template: Any,
        adapted: Sequence[Message],
        tools: Sequence[Json] | None,
        kwargs: Mapping[str, Json],
        size: int,
    ) -> str | Rejected:
        self._sandbox.budget.refill(size)
        try:
            return template.render(**{**self._values, **kwargs, "messages": adapted, "tools": tools})
        except RecursionError:
            # Python's own message depends on the depth of the caller's stack.
            return Rejected("template_error", "RecursionError: the template calls itself too deep")
        except Exception as error:  # noqa: BLE001  (a template may raise anything; the row carries its message)
            return Rejected("template_error", f"{type(error).__name__}: {error}"[:500])
        finally:
            self._recorder.watch((), "")

    def _choose_mark(
        self, adapted: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> tuple[int, str]:
        dumped = encode_for_search([adapted, tools, dict(kwargs)])
        for mark in MARK_CHARACTERS:
            if mark.encode() not in dumped and mark not in self.spec.text:
                return len(dumped), mark
        return len(dumped), ""

    def _render_probe(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None = None,
        kwargs: Mapping[str, Json] | None = None,
        *,
        adaptation: Adaptation | None = None,
    ) -> RenderedConversation | Rejected:
        """Render a probe on the reference path.

        Raises
        ------
        ConfigError
            If the template exhausts its budget even on a short probe.

        """
        adapt = adaptation or self.adaptation
        rendered = self._render_reference(adapt.messages(messages), adapt.tools(tools), kwargs or {})
        if isinstance(rendered, Rejected) and rendered.detail.startswith(BudgetError.__name__):
            raise ConfigError(
                f"template.chat_template: on a conversation of a few words, {rendered.detail.partition(': ')[2]}; "
                f"a render may take {MAX_STEPS:,} steps and print {MAX_OUTPUT_CHARS:,} characters; choose another "
                "template"
            )
        return rendered

    def _render_with_other_clock(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> str | Rejected:
        later = self.spec.now.replace(year=self.spec.now.year + 7, day=1, month=(self.spec.now.month % 12) + 1)
        known: dict[str, Any] = self._sandbox.globals
        pinned = known["strftime_now"]
        known["strftime_now"] = make_clock(later)
        try:
            return self.plain(messages, tools, {})
        finally:
            known["strftime_now"] = pinned

    # ── the fast path ──

    def _render_fast(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> RenderedConversation | None:
        engine = self._fast
        if engine is None or not self._can_render_fast(messages, tools, kwargs):
            return None
        if self._compares_messages and minijinja_engine.has_equal_messages(messages):
            return None
        if self._avoids_whole_floats and any(
            WHOLE_FLOAT.search(encode_for_search(m["tool_calls"])) for m in messages if "tool_calls" in m
        ):
            return None
        fuel = minijinja_engine.BASE_FUEL + minijinja_engine.FUEL_PER_MESSAGE * (len(messages) + len(tools or ()))
        self._sandbox.budget.refill(0)
        try:
            adapted = [
                {**m, minijinja_engine.INDEX_KEY: str(i)} for i, m in enumerate(self.adaptation.messages(messages))
            ]
            return engine.render(adapted, self.adaptation.tools(tools), kwargs, fuel=fuel)
        except Exception:  # noqa: BLE001  (the reference path renders it, or reports the error)
            return None

    def _can_render_fast(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> bool:
        """Return whether a row lacks the fast path's mark and key, and white space that the engines trim differently.

        The tools of the previous row are not searched again.
        """
        if not lacks_marks(encode_for_search(messages)):
            return False
        if kwargs and ("messages" in kwargs or "tools" in kwargs or not lacks_marks(encode_for_search(kwargs))):
            return False
        if tools is not None and tools is not self._clean_tools:
            if not lacks_marks(encode_for_search(tools)):
                return False
            self._clean_tools = tools
        return True

    def _try_fast_engine(self) -> str:
        """Build the fast engine and keep it if it agrees on every probe; return why it is not used, else empty."""
        if self.spec.render_path == "reference":
            return "switched off"
        if not lacks_marks(self.spec.text.encode()):
            return "the template contains the mark"
        reason = minijinja_engine.find_engine_obstacle(self._tree)
        if reason:
            return reason
        try:
            tojson: Any = self._sandbox.filters["tojson"]
            silent = find_silent_loops(self._tree)
            self._fast = minijinja_engine.MinijinjaEngine(self.spec.text, self.spec.now, tojson, self._values, silent)
        except Exception as error:  # noqa: BLE001  (an engine that cannot read the template is not used)
            return f"the fast engine cannot read the template: {str(error).splitlines()[0]}"
        reason = self._find_engine_difference()
        if reason:
            self._fast = None
        return reason

    def _find_engine_difference(self) -> str:
        """Return the first difference between both paths on the probes, empty if they agree.

        A difference on floats like 1.0 only sends rows with such arguments to the reference path.
        """
        agreed = 0
        for name, messages, tools, kwargs in engine_parity.make_parity_probes():
            fast = self._render_fast(messages, tools, kwargs)
            if fast is None:
                continue
            reason = engine_parity.describe_difference(fast, self.render_by_reference(messages, tools, kwargs))
            if reason and name.startswith(engine_parity.WHOLE_FLOATS):
                self._avoids_whole_floats = True
            elif reason:
                return f"probe {name}: {reason}"
            agreed += not reason
        return "" if agreed else "the fast engine rendered no probe"
