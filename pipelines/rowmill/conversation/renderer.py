"""Render a conversation by its chat template, and prove which of its characters are whose.

`Renderer` runs one template. The reference path is Jinja's sandbox; the fast path is minijinja, which a template takes
if both print the same texts on every probe, and a row that the fast engine refuses takes the reference path. Both run
the template as it is.

    plain render     <user>Hi<end><assistant>Hello<end>
    covered render   <user>①②<end><assistant>③④⑤⑥⑦<end>      own text as private code points: `prove_ownership`
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import orjson
from jinja2 import TemplateSyntaxError, nodes

from rowmill.conversation import content_tracing
from rowmill.conversation.adaptation import Adaptation, BadArgumentsError, probe_adaptation
from rowmill.conversation.character_ownership import (
    COVER_ATTEMPTS,
    CharacterOwnership,
    CoveredConversation,
    RenderedConversation,
    TemplateLiterals,
)
from rowmill.conversation.content_tracing import PlaceholderRendering
from rowmill.conversation.options import RendererSpec
from rowmill.conversation.probe_conversations import ENDING_SHAPES, SENTINELS, WHOLE_FLOATS, make_parity_probes
from rowmill.conversation.template_engines import (
    MAX_TEMPLATE_CHARS,
    ChatSandbox,
    MinijinjaEngine,
    find_engine_obstacle,
    make_clock,
    make_too_deep_error,
    require_shallow_template,
)
from rowmill.conversation.template_frames import CONTROL_TAG_PATTERN, find_common_start, split_into_units
from rowmill.core.errors import ConfigError
from rowmill.core.json import Json
from rowmill.core.template_sandbox import MAX_OUTPUT_CHARS, MAX_STEPS, BudgetError
from rowmill.schema.rows import Message, Rejected

RENDERING_VERSION = 3
"""Increment it when the text of any render may change."""


class Renderer:
    """One template, compiled for both paths and probed; expensive, so built once per worker."""

    def __init__(self, spec: RendererSpec) -> None:
        self.spec = spec
        self._sandbox = ChatSandbox(spec.now)
        self._tree = self._parse()
        require_shallow_template(self._tree)
        self._template = self._compile()
        absent = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
        self._values = {
            **absent,
            "documents": None,
            "add_generation_prompt": False,
            **spec.special_tokens,
            **spec.template_kwargs,
        }
        self.bos_token, self.eos_token = str(self._values["bos_token"]), str(self._values["eos_token"])
        self.control_tokens = tuple(sorted(self._list_control_tokens(), key=len, reverse=True))
        """The tokens that the template or the tokenizer treats as control tokens, longest first."""
        self.has_blocks = any(
            isinstance(call.call.node, nodes.ExtensionAttribute) for call in self._tree.find_all(nodes.CallBlock)
        )
        """Whether the template has `{% generation %}` blocks."""
        self._literals = TemplateLiterals(self._tree)
        self._fast: MinijinjaEngine | None = None
        self._avoids_whole_floats = False
        self._prompts: dict[tuple[str, bool, bytes], str] = {}
        self._latest_tools: tuple[object, bytes] = None, _encode_json(None)
        self._border_pairs = [pair for pair in _BORDER_PAIRS if pair[0] not in spec.text and pair[1] not in spec.text]
        found = probe_adaptation(self.render_probe, self._tree)
        # The recipe's choices come before what probes show.
        if spec.arguments != "auto":
            found = replace(found, arguments=spec.arguments, takes_text=True)
        self.adaptation = replace(found, tool_ids="any") if spec.tool_ids == "keep" else found
        self.fast_path_obstacle = self._try_fast_engine()

    @property
    def render_path(self) -> Literal["fast", "reference"]:
        """The path that rows take; fast only if the texts are equal on every probe."""
        return "reference" if self._fast is None else "fast"

    @cached_property
    def identity(self) -> str:
        """A digest of everything that determines the rendered text."""
        return sha256(_encode_json(asdict(self.spec) | {"now": self.spec.now.isoformat()})).hexdigest()

    @cached_property
    def _tracer(self) -> content_tracing.TracingRenderer:
        return content_tracing.TracingRenderer(self.spec.text, self.spec.now, self._values)

    # ── rows ──

    def render(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> RenderedConversation | Rejected:
        """Render a conversation; the text is `plain`'s, on either path.

        Each generation block prints a private code point at its start and its end, which are then removed. A template
        that inspects a block's text shows this in `prove_ownership`, which renders without them.
        """
        try:
            adapted, offered = self.adaptation.messages(messages), self.adaptation.tools(tools)
        except BadArgumentsError as error:
            return Rejected("bad_tool_arguments", str(error))
        written = _encode_json(adapted) + self._encode_tools(offered) + (_encode_json(dict(kwargs)) if kwargs else b"")
        # Two private code points that neither the row nor the template contains; None if these contain all. Hardly any
        # row has a character of their plane, which in UTF-8 all begin with this byte.
        borders = next(iter(self._border_pairs), None) if self.has_blocks else None
        if borders is not None and b"\xf4" in written:
            taken = written.decode(errors="replace")
            borders = next((one for one in self._border_pairs if one[0] not in taken and one[1] not in taken), None)
        fast = self._render_fast(adapted, offered, kwargs, borders, written)
        text = self._render_by_reference(adapted, offered, kwargs, borders) if fast is None else fast
        if isinstance(text, Rejected):
            return text
        blocks: list[tuple[int, int]] = []
        if borders is not None:
            pieces, position, open_blocks = list[str](), 0, list[int]()
            # A third of the time of splitting at both with a regular expression.
            for is_opened, opened in enumerate(text.split(borders[0])):
                if is_opened:
                    open_blocks.append(position)
                for is_closed, piece in enumerate(opened.split(borders[1])):
                    if is_closed and open_blocks:
                        blocks.append((open_blocks.pop(), position))
                    pieces.append(piece)
                    position += len(piece)
            text = "".join(pieces)
            blocks.sort()
        inline = {i: int(m["inline_reasoning"]) for i, m in enumerate(messages) if m.get("inline_reasoning")}
        return RenderedConversation(text, adapted, offered, kwargs, inline, blocks, fast is not None)

    def plain(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, kwargs: Mapping[str, Json]
    ) -> str | Rejected:
        """Render on the reference path, as `apply_chat_template(…, tokenize=False)` does."""
        try:
            adapted, offered = self.adaptation.messages(messages), self.adaptation.tools(tools)
        except BadArgumentsError as error:
            return Rejected("bad_tool_arguments", str(error))
        return self._render_by_reference(adapted, offered, kwargs)

    def prove_ownership(self, rendered: RenderedConversation, roles: frozenset[str]) -> CharacterOwnership | None:
        """Prove which characters of a render are own text; `roles` are the model's roles.

        None if the template inspects text, so that its render changes in every attempt to cover it.
        """
        for attempt in COVER_ATTEMPTS:
            cover = CoveredConversation(rendered, roles, self.adaptation.reasoning_keys, self._literals, attempt)
            covered: str | Rejected | None = None
            if rendered.is_fast and self._fast is not None:
                # By the engine that rendered the plain one; where it fails, the reference path reports the error.
                with contextlib.suppress(Exception):
                    covered = self._fast.render(cover.messages, rendered.tools, rendered.kwargs)
            if covered is None:
                covered = self._render_by_reference(cover.messages, rendered.tools, rendered.kwargs)
            proof = None if isinstance(covered, Rejected) else cover.prove(covered)
            if proof is not None:
                return proof
        return None

    def render_placeholders(self, roles: Sequence[str], kwargs: Mapping[str, Json]) -> PlaceholderRendering | None:
        """Render one placeholder per role, with proof that other contents render the same way; None without proof."""
        if self._tracer.reason:
            return None
        messages = [
            {"role": role, "content": content_tracing.make_content_placeholder(index)}
            for index, role in enumerate(roles)
        ]
        # The plain render comes first, because it has a budget and the traced render has none.
        text = self.plain(messages, None, kwargs)
        printed = None if isinstance(text, Rejected) else self._tracer.render(roles, kwargs)
        if printed is None or printed.text != text:
            return None
        return replace(printed, hidden=self._literals.hidden)

    def generation_prompt(self, role: str, *, has_tools: bool, kwargs: Mapping[str, Json]) -> str:
        """Return the generation prompt after a message of that role."""
        key = (role, has_tools, _encode_json(kwargs))
        known = self._prompts.get(key)
        if known is None:
            if len(self._prompts) > 4096:
                self._prompts.clear()
            known = self._probe_generation_prompt(role, has_tools=has_tools, kwargs=kwargs)
            self._prompts[key] = known
        return known

    def _probe_generation_prompt(self, role: str, *, has_tools: bool, kwargs: Mapping[str, Json]) -> str:
        """Return what the template adds after a message of that role to ask for an answer.

        Empty if the template prints none, or refuses every probe that ends with the role.
        """
        other = [[*SENTINELS.make("u"), {"role": role, "content": "qzother"}]]
        probes = [SENTINELS.make(shape) for shape in ENDING_SHAPES[role]] if role in ENDING_SHAPES else other
        tools = (SENTINELS.tool,) if has_tools else None
        for probe in probes:
            prompted = self.render_probe(probe, tools, {**kwargs, "add_generation_prompt": True})
            unprompted = self.render_probe(probe, tools, {**kwargs, "add_generation_prompt": False})
            if isinstance(prompted, str):
                last = probe[-1]["content"]
                after, without = (
                    one.rpartition(last)[2] if isinstance(one, str) else "" for one in (prompted, unprompted)
                )
                added = after[len(find_common_start(after, without, self.control_tokens)) :]
                return self._remove_turn_end(added, kwargs)
        return ""

    def _remove_turn_end(self, added: str, kwargs: Mapping[str, Json]) -> str:
        """Return a generation prompt without the end of the last turn, which a template may print only with it.

        A chat that begins with an answer shows the header without such an end.
        """
        [answer] = SENTINELS.make("a")
        alone = self.render_probe([answer], None, kwargs)
        units = split_into_units(added, self.control_tokens)
        header = "" if isinstance(alone, Rejected) else alone.partition(answer["content"])[0]
        if not header or not units or units[0] in header:
            return added
        starts = [i for i, unit in enumerate(units) if unit in self.control_tokens]
        return next((rest for i in starts if (rest := "".join(units[i:])) in header), added)

    def open_tracer(self) -> None:
        """Open now what is otherwise opened at its first use, so that processes forked later share it."""
        _ = self._tracer

    # ── probes ──

    def render_probe(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None = None,
        kwargs: Mapping[str, Json] | None = None,
        *,
        adaptation: Adaptation | None = None,
    ) -> str | Rejected:
        """Render a probe on the reference path; a template that exhausts its budget on one is refused."""
        adapt = adaptation or self.adaptation
        text = self._render_by_reference(adapt.messages(messages), adapt.tools(tools), kwargs or {})
        if isinstance(text, Rejected) and text.detail.startswith(BudgetError.__name__):
            raise ConfigError(
                f"template.chat_template: on a conversation of a few words, {text.detail.partition(': ')[2]}; "
                f"a render may take {MAX_STEPS:,} steps and print {MAX_OUTPUT_CHARS:,} characters; choose another "
                "template"
            )
        return text

    def render_years_later(self, messages: Sequence[Message]) -> str | Rejected:
        """Render with a clock that shows another year, month and day."""
        later = self.spec.now.replace(year=self.spec.now.year + 7, day=1, month=(self.spec.now.month % 12) + 1)
        known: dict[str, Any] = self._sandbox.globals
        pinned = known["strftime_now"]
        known["strftime_now"] = make_clock(later)
        try:
            return self.plain(messages, None, {})
        finally:
            known["strftime_now"] = pinned

    # ── the template ──

    def _parse(self) -> nodes.Template:
        if len(self.spec.text) > MAX_TEMPLATE_CHARS:
            raise ConfigError(
                f"template.chat_template: has {len(self.spec.text):,} characters; at most {MAX_TEMPLATE_CHARS:,} are "
                "allowed; shorten it, or check that the file is a chat template"
            )
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

    def _compile(self) -> Any:
        try:
            return self._sandbox.load_template(self._sandbox.compile_charged(self.spec.text))
        except (TemplateSyntaxError, RecursionError, SyntaxError, MemoryError) as error:
            raise ConfigError(
                f"template.chat_template: the template cannot be compiled ({error}); expected a Jinja chat template; "
                "correct it"
            ) from error

    def _list_control_tokens(self) -> list[str]:
        literals = [data.data for data in self._tree.find_all(nodes.TemplateData)]
        literals += [c.value for c in self._tree.find_all(nodes.Const) if isinstance(c.value, str)]
        written = re.findall(CONTROL_TAG_PATTERN, "\0".join(literals))
        printed = [value for value in self.spec.special_tokens.values() if value]
        return list(dict.fromkeys([*self.spec.control_tokens, *written, *printed]))

    # ── the two engines ──

    def _render_by_reference(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        kwargs: Mapping[str, Json],
        borders: tuple[str, str] | None = None,
    ) -> str | Rejected:
        """Render adapted messages in the sandbox; `borders` are printed around every generation block."""
        self._sandbox.budget.refill(len(_encode_json([messages, tools])))
        self._sandbox.generation_tag.borders = borders
        try:
            return self._template.render(**{**self._values, **kwargs, "messages": messages, "tools": tools})
        except RecursionError:
            # Python's own message depends on the depth of the caller's stack.
            return Rejected("template_error", "RecursionError: the template calls itself too deep")
        except Exception as error:  # noqa: BLE001  (a template may raise anything; the row carries its message)
            return Rejected("template_error", f"{type(error).__name__}: {error}"[:500])

    def _encode_tools(self, tools: Sequence[Json] | None) -> bytes:
        """Return the JSON text of tools; those of the previous row are not encoded again."""
        if tools is not self._latest_tools[0]:
            self._latest_tools = tools, _encode_json(tools)
            to_json: Any = self._sandbox.filters["tojson"]
            to_json.share(tools or ())
        return self._latest_tools[1]

    def _render_fast(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None,
        kwargs: Mapping[str, Json],
        borders: tuple[str, str] | None,
        written: bytes,
    ) -> str | None:
        """Render adapted messages with the fast engine; None if it must not or cannot.

        `written` is the JSON text of messages, tools and values.
        """
        # What the engines print differently: white space that only Python strips, and some floats.
        if self._fast is None or _PYTHON_SPACES in written:
            return None
        if "messages" in kwargs or "tools" in kwargs:
            return None
        if self._avoids_whole_floats:
            calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
            if _WHOLE_FLOAT.search(_encode_json(calls)):
                return None
        self._sandbox.budget.refill(0)
        try:
            return self._fast.render(messages, tools, kwargs, borders)
        except Exception:  # noqa: BLE001  (the reference path renders it, or reports the error)
            return None

    def _try_fast_engine(self) -> str:
        """Build the fast engine and keep it if it agrees on every probe; return why it is not used, else empty."""
        if self.spec.render_path == "reference":
            return "switched off"
        reason = find_engine_obstacle(self._tree)
        if reason:
            return reason
        try:
            tojson: Any = self._sandbox.filters["tojson"]
            self._fast = MinijinjaEngine(self.spec.text, self.spec.now, tojson, self._values)
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
        for name, messages, tools, kwargs in make_parity_probes():
            adapted, offered = self.adaptation.messages(messages), self.adaptation.tools(tools)
            written = _encode_json([adapted, offered, kwargs])
            fast = self._render_fast(adapted, offered, kwargs, _BORDER_PAIRS[0], written)
            if fast is None:
                continue
            reference = self._render_by_reference(adapted, offered, kwargs, _BORDER_PAIRS[0])
            if fast == reference:
                agreed += 1
            elif name.startswith(WHOLE_FLOATS):
                self._avoids_whole_floats = True
            elif isinstance(reference, Rejected):
                return f"probe {name}: the reference refuses it ({reference.detail}), the fast engine does not"
            else:
                return f"probe {name}: the text differs"
        return "" if agreed else "the fast engine rendered no probe"


_BORDER_PAIRS = tuple((chr(point), chr(point + 1)) for point in range(0x10FFD0, 0x10FFFE, 2))
"""Private code points, of which two mark the borders of generation blocks; at most a hostile row contains them all."""

_WHOLE_FLOAT = re.compile(rb"\d\.0[,\]}]|\d[eE]\d")
"""A float such as 1.0 or 1e3 in JSON text, which the fast engine may print as an integer."""

_PYTHON_SPACES = rb"\u001"
"""The JSON escape of U+001C to U+001F, among others: Python's `strip` removes them, the fast engine's does not."""


def _encode_json(value: Any) -> bytes:
    """Return the JSON text of a value, or its `repr` if it cannot be encoded as JSON."""
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):
        # Big integers, lone surrogates, keys that are not strings: rare, and the text is only searched and measured.
        return repr(value).encode("utf-8", "surrogatepass")
