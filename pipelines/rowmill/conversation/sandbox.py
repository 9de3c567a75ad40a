"""The Jinja environment of chat templates: a sandbox with a budget.

It behaves as `apply_chat_template` does: trimmed blocks, loop controls, `{% generation %}`, `raise_exception`,
`strftime_now`, unsorted unescaped `tojson`, no mutation, no internals. The text that a template prints is never
changed; only `GenerationTag.borders`, set for a covered render, print something at the borders of blocks.

A chat template is a downloaded program. Jinja's sandbox keeps it from reaching Python, but not from using all time and
memory, so every loop, call, print and growing operator is charged:

    steps        loop iterations and calls             → endless loops
    characters   results of operators and calls        → 'x' * 10**9, doubling by `+`, `join`, `replace`, …
    output       printed text, in macros too           → nested loops that print

Compiling is not charged, so the length of a template and the depth of its syntax tree are limited before: Jinja's
compiler, Python's and the fast engine all traverse the tree by recursion.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import orjson
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from rowmill.core.errors import ConfigError
from rowmill.core.json import Json

MAX_STEPS = 300_000
MAX_CHARACTERS = 64_000_000
MAX_OUTPUT_CHARS = 16_000_000
"""Budgets of one render, to which `RenderBudget.refill` adds in proportion to the size of the row."""

MAX_INTEGER_BITS = 4_096
"""Largest integer that a template may compute; arithmetic on larger ones takes longer than a step should."""

MAX_WIDTH = 10_000
"""Widest padding, indent or batch that a template may request; real templates use single digits."""

MAX_TEMPLATE_CHARS = 1 << 17
"""Maximum length of a template; the longest template published with a model has 17,000 characters."""

MAX_TEMPLATE_DEPTH = 100
"""Maximum depth of the syntax tree; the deepest published with a model has 21 levels. Every link of a chain
(`a + b + c`, `elif`) is a level."""

MAX_LITERAL_SIZE = 1_000_000
"""Maximum printed size of one list or dict literal of a template, in characters."""

_UNBOUNDED_SIZE = 1 << 62
_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDTH_FILTERS = ("center", "indent", "wordwrap", "batch", "slice", "truncate", "round", "format")
_WIDE_FORMAT = re.compile(r"\d{5,}|\*|\{[^{}]*\{")
_MAX_CACHED_JSON = 4096


class BudgetError(TemplateError):
    """A render exceeded its budget of steps, characters or output."""


def require_short_template(text: str) -> None:
    """Refuse a template that is too long to compile quickly."""
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ConfigError(
            f"template.chat_template: has {len(text):,} characters; at most {MAX_TEMPLATE_CHARS:,} are allowed; "
            "shorten it, or check that the file is a chat template"
        )


def require_shallow_template(tree: nodes.Template) -> None:
    """Refuse a template whose syntax tree is too deep to compile."""
    pending: list[tuple[nodes.Node, int, int]] = [(tree, 1, 1)]
    while pending:
        node, depth, line = pending.pop()
        if depth > MAX_TEMPLATE_DEPTH:
            raise make_too_deep_error(f"line {line}: ")
        inner = depth + max(1, _count_nesting_levels(node))
        pending += [(child, inner, child.lineno or line) for child in node.iter_child_nodes()]


def _count_nesting_levels(node: nodes.Node) -> int:
    """Return how many levels the fast engine, which crashes on stack overflow, nests for one node."""
    match node:
        case nodes.Concat():
            return len(node.nodes)
        case nodes.Compare():
            return len(node.ops)
        case nodes.If():
            return len(node.elif_)
        case _:
            return 1


def make_too_deep_error(where: str = "") -> ConfigError:
    """Build the error for a template that is too deep."""
    return ConfigError(
        f"template.chat_template: {where}expressions or blocks are nested more than {MAX_TEMPLATE_DEPTH} levels deep; "
        f"at most {MAX_TEMPLATE_DEPTH} are allowed, and each operator or elif of a chain is one; join texts with a "
        "list and join, or set a variable halfway"
    )


class RenderBudget:
    """The remaining budget of one render."""

    __slots__ = ("characters", "output", "steps")

    def __init__(self) -> None:
        self.refill(0)

    def refill(self, row_bytes: int) -> None:
        """Set the budget for a row of that size; real templates take a few steps and copies per byte."""
        self.steps = MAX_STEPS + row_bytes
        self.characters = MAX_CHARACTERS + 256 * row_bytes
        self.output = MAX_OUTPUT_CHARS + 16 * row_bytes

    def step(self, constant_characters: int = 0) -> str:
        """Charge one loop iteration or call, and the constant text that it may print."""
        self.steps -= 1
        self.characters -= constant_characters
        if self.steps < 0 or self.characters < 0:
            raise BudgetError("the template takes too many steps; it loops without end or nearly so")
        return ""

    def grow(self, size: int) -> None:
        """Charge text or items that an operation creates."""
        self.characters -= size
        if self.characters < 0:
            raise BudgetError("the template builds too much text")

    def emit(self, value: Any) -> Any:
        """Charge a printed value; the environment's `finalize`."""
        self.output -= len(value) if type(value) is str else estimate_printed_size(value, self.output)
        if self.output < 0:
            raise BudgetError("the template prints too much text")
        return value


def estimate_printed_size(value: Any, limit: int = MAX_OUTPUT_CHARS) -> int:
    """Estimate the printed size of a value without printing it; above `limit`, return `_UNBOUNDED_SIZE`.

    A list that contains the same list twice, nested thirty levels deep, is small in memory and huge when printed.
    """
    size = 0
    pending = [value]
    while pending and size <= limit:
        one = pending.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping):
            pending.extend(one)
            pending.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            pending.extend(one)
        size += 8
    return _UNBOUNDED_SIZE if pending else size


class _Dict:
    """`dict` for templates, without the attributes of the real type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` for templates; refuses names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], args[1:]
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store {name!r} on a namespace; rename the attribute")


def raise_exception(message: object = "") -> str:
    """Raise an error with the template's message."""
    raise TemplateError(str(message))


def make_clock(now: datetime) -> Callable[[str], str]:
    """Return `strftime_now` for a pinned clock, so that a row's text does not depend on the day it was built."""
    return now.strftime


class ToJson:
    """The `tojson` filter of chat templates: keys in source order, nothing escaped, equal values encoded once.

    Cached because thousands of rows have the same tool schemas, and encoding them takes most of a render's time.
    """

    def __init__(self, budget: RenderBudget) -> None:
        self._budget = budget
        self._known: dict[tuple[bytes, tuple[object, ...]], str] = {}

    def __call__(
        self,
        value: Json,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Encode with the arguments that `json.dumps` has."""
        if indent is not None and _is_wide_indent(indent):
            raise BudgetError("the template asks tojson for an enormous indent")

        def encode() -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        if type(value) is str:
            self._budget.grow(len(value))
            return encode()
        key = _make_cache_key(value)
        if not key:
            self._budget.grow(estimate_printed_size(value))
            return encode()
        options = (ensure_ascii, indent, repr(separators), sort_keys)
        text = self._known.get((key, options))
        if text is None:
            if len(self._known) >= _MAX_CACHED_JSON:
                self._known.clear()
            text = self._known[key, options] = encode()
        self._budget.grow(len(text))
        return text


def _make_cache_key(value: Json) -> bytes:
    """Return bytes that are equal only for equal values; empty for a value that is too large or cannot be encoded.

    Also empty if they contain null, because orjson writes NaN as null.
    """
    try:
        key = orjson.dumps(value)
    except (TypeError, ValueError):
        return b""
    return b"" if len(key) > 65_536 or b"null" in key else key


def _is_wide_indent(indent: Any) -> bool:
    return not isinstance(indent, int) or indent > MAX_WIDTH


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with operators, calls and filters charged to a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: datetime) -> None:
        self.budget = RenderBudget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=self.budget.emit,
        )
        self.filters["tojson"] = ToJson(self.budget)
        known: dict[str, Any] = self.globals
        known["raise_exception"] = raise_exception
        known["strftime_now"] = make_clock(now)
        known["dict"] = _Dict()
        known["namespace"] = _Namespace
        # Random text would differ in every build, and lipsum can generate a gigabyte of it.
        del known["lipsum"]
        self.filters["random"] = _refuse_random
        self._guard_filters()

    def _guard_filters(self) -> None:
        for name, function in list(self.filters.items()):
            if name not in ("tojson", "random"):
                weight = 8 if name in ("sort", "unique", "groupby", "dictsort") else 1
                self.filters[name] = _charge_filter(function, self.budget, weight)
        self.filters["sum"] = _refuse_list_sums(self.filters["sum"])
        for name in _WIDTH_FILTERS:
            self.filters[name] = _limit_width(self.filters[name], self.budget, is_format=name == "format")
        for name, sized in (("join", _measure_joined), ("replace", _measure_replaced)):
            self.filters[name] = _charge_by_size(self.filters[name], self.budget, sized)
        for name in ("string", "pprint", "upper", "lower", "trim", "escape", "e", "urlize"):
            self.filters[name] = _charge_by_size(self.filters[name], self.budget, _measure_printed)

    @property
    def generation_tag(self) -> "GenerationTag":
        """The extension that prints generation blocks and charges the budget."""
        return self.extensions[GenerationTag.identifier]  # pyrefly: ignore[bad-return]

    def compile_charged(self, text: str) -> Any:
        """Compile a template with every loop iteration, macro call, `~` and literal charged to the budget."""
        tree = _ChargeTransformer(self.generation_tag).visit(self.parse(text)).set_environment(self)
        return self.from_string(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge an operator before applying it."""
        match operator:
            case "+":
                self.budget.grow(_measure_sequence(left) + _measure_sequence(right))
                return left + right
            case "*":
                self.budget.grow(_measure_product(left, right))
            case "**":
                self.budget.grow(_measure_power(left, right))
            case _:
                if isinstance(left, str) and _WIDE_FORMAT.search(left):
                    raise BudgetError("the template formats with an enormous width")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Charge a call, and the text that a string method creates."""
        self.budget.step()
        owner = getattr(called, "__self__", None)
        if type(owner) is str:
            self.budget.grow(len(owner) // 4)
            self._charge_method(called.__name__, owner, args, kwargs)
        result = super().call(context, called, *args, **kwargs)
        if type(result) is str:
            self.budget.grow(len(result))
        elif isinstance(called, _Dict):
            self.budget.grow(estimate_printed_size(result))
        return result

    def _charge_method(self, name: str, owner: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if name in _WIDTH_METHODS:
            _check_widths(args, kwargs)
        elif name == "join":
            self.budget.grow(_measure_joined(*args, owner))
        elif name == "replace":
            self.budget.grow(_measure_replaced(owner, *args[:2]))

    def wrap_str_format(self, value: Any) -> Any:
        """Refuse format strings with a computed or very large width."""
        if getattr(value, "__name__", "") in ("format", "format_map"):
            owner = getattr(value, "__self__", None)
            if isinstance(owner, str) and _WIDE_FORMAT.search(owner):
                raise BudgetError("the template formats with an enormous width")
        return super().wrap_str_format(value)


class GenerationTag(Extension):
    """Jinja extension that adds `{% generation %}`, and charges what a template does to the budget."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads the attribute)
    borders: tuple[str, str] | None = None
    """What a block prints before and after its text, in a covered render; else None."""

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse `{% generation %}…{% endgeneration %}` as `apply_chat_template` does, as a call block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("generated"), [], [], body).set_lineno(line)

    def generated(self, caller: Any) -> str:
        """Return the block's text, between its borders if they are set."""
        text = caller()
        return text if self.borders is None else f"{self.borders[0]}{text}{self.borders[1]}"

    def step(self, constant_characters: int) -> str:
        """Charge a loop iteration or macro call."""
        return self.environment.budget.step(constant_characters)  # pyrefly: ignore[missing-attribute]

    def joined(self, *values: Any) -> str:
        """Join values as `~` does."""
        text = [value if type(value) is str else self._charge_print(value) for value in values]
        self.environment.budget.grow(sum(map(len, text)))  # pyrefly: ignore[missing-attribute]
        return "".join(text)

    def made(self, value: Any) -> Any:
        """Charge a list or dict literal, which nested often enough prints without end."""
        budget = self.environment.budget  # pyrefly: ignore[missing-attribute]
        budget.grow(estimate_printed_size(value, min(budget.characters, MAX_LITERAL_SIZE)))
        return value

    def _charge_print(self, value: Any) -> str:
        self.environment.budget.emit(value)  # pyrefly: ignore[missing-attribute]
        return str(value)


class _ChargeTransformer(NodeTransformer):
    """Inserts calls that charge the budget; the text that the template prints stays the same."""

    def __init__(self, tag: GenerationTag) -> None:
        self.tag = tag

    def _call(self, name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        return self.tag.call_method(name, args, lineno=line)

    def _charge_body(self, node: Any) -> Any:
        self.generic_visit(node)
        constant = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        constant += sum(len(c.value) for c in node.find_all(nodes.Const) if isinstance(c.value, str))
        step = self._call("step", [nodes.Const(constant)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    visit_For = visit_Macro = _charge_body  # noqa: N815  (jinja2 dispatches on the name)

    def visit_Concat(self, node: nodes.Concat) -> Any:  # noqa: N802
        self.generic_visit(node)
        return self._call("joined", list(node.nodes), node.lineno)

    def _made(self, node: Any) -> Any:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or not contains_node(node, nodes.Name, nodes.Call, nodes.Getattr):
            return node
        return self._call("made", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _made  # noqa: N815


def contains_node(node: nodes.Node, *kinds: type[nodes.Node]) -> bool:
    """Return whether a node contains a node of one of these kinds."""
    return any(node.find(kind) is not None for kind in kinds)


def _measure_sequence(value: Any) -> int:
    if type(value) is str:
        return len(value)
    # A list item takes as much memory as several characters.
    return 16 * len(value) if isinstance(value, (list, tuple, range)) else 0


def _measure_product(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _UNBOUNDED_SIZE if left.bit_length() + right.bit_length() > MAX_INTEGER_BITS else 0
    if isinstance(right, (str, list, tuple)):
        left, right = right, left
    return _measure_sequence(left) * max(right, 0) if isinstance(right, int) else 0


def _measure_power(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _UNBOUNDED_SIZE if left.bit_length() * abs(right) > MAX_INTEGER_BITS else 0
    return 0


def _measure_joined(parts: Any = (), separator: Any = "", *_: Any, **__: Any) -> int:
    if not isinstance(parts, (list, tuple, str)):
        # The result of a lazy filter, whose items are charged when printed or added.
        return 0
    return estimate_printed_size(parts) + len(parts) * len(str(separator))


def _measure_replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        return 0
    return len(text) + text.count(old) * len(new)


def _measure_printed(value: Any, *_: Any, **__: Any) -> int:
    return len(value) if type(value) is str else estimate_printed_size(value)


def _charge_filter(function: Callable[..., Any], budget: RenderBudget, weight: int) -> Callable[..., Any]:
    """Charge a filter for its input."""
    takes = _count_passed_arguments(function)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget.step()
        if len(args) > takes:
            budget.grow(weight * _measure_sequence(args[takes]))
        return function(*args, **kwargs)

    return _copy_jinja_pass_arg(guarded, function)


def _refuse_list_sums(function: Callable[..., Any]) -> Callable[..., Any]:
    takes = _count_passed_arguments(function)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        start = kwargs.get("start", args[takes + 2] if len(args) > takes + 2 else 0)
        if not isinstance(start, int | float):
            raise BudgetError("the template sums lists, which is quadratic")
        return function(*args, **kwargs)

    return _copy_jinja_pass_arg(guarded, function)


def _charge_by_size(
    function: Callable[..., Any], budget: RenderBudget, sized: Callable[..., int]
) -> Callable[..., Any]:
    takes = _count_passed_arguments(function)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget.step()
        budget.grow(sized(*args[takes:], **{k: v for k, v in kwargs.items() if k != "attribute"}))
        return function(*args, **kwargs)

    return _copy_jinja_pass_arg(guarded, function)


def _limit_width(function: Callable[..., Any], budget: RenderBudget, *, is_format: bool) -> Callable[..., Any]:
    takes = _count_passed_arguments(function)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget.step()
        _check_widths(args[takes + 1 :], kwargs)
        value = args[takes] if len(args) > takes else ""
        if isinstance(value, str):
            if is_format and _WIDE_FORMAT.search(value):
                raise BudgetError("the template formats with an enormous width")
            # An indent is added to every line.
            budget.grow(len(value) * (1 + max([0, *(a for a in args[takes + 1 :] if type(a) is int)]) // 64))
        return function(*args, **kwargs)

    return _copy_jinja_pass_arg(guarded, function)


def _check_widths(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    for one in (*args, *kwargs.values()):
        if isinstance(one, int) and abs(one) > MAX_WIDTH:
            raise BudgetError("the template asks for an enormous width")


def _count_passed_arguments(function: Callable[..., Any]) -> int:
    """Return how many leading arguments (environment, context) Jinja passes to a filter."""
    return 1 if hasattr(function, "jinja_pass_arg") else 0


def _copy_jinja_pass_arg(guarded: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    passes = getattr(function, "jinja_pass_arg", None)
    if passes is not None:
        guarded.jinja_pass_arg = passes  # pyrefly: ignore[missing-attribute]
    return guarded


def _refuse_random(*_: Any) -> str:
    raise TemplateError("the template prints random values; a build must give the same bytes every time")
