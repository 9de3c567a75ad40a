"""Run Jinja templates from the internet: a sandbox with a budget.

Jinja's sandbox keeps a template from reaching Python, but not from using all time and memory, so every loop, call,
print and growing operator is charged:

    steps        loop iterations and calls             → endless loops
    characters   results of operators and calls        → 'x' * 10**9, doubling by `+`, `join`, `replace`, …
    output       printed text, in macros too           → nested loops that print

The text that a template prints is not changed.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 300_000
MAX_CHARACTERS = 64_000_000
MAX_OUTPUT_CHARS = 16_000_000
"""Budgets of one render, to which `RenderBudget.refill` adds in proportion to the size of the row."""

MAX_INTEGER_BITS = 4_096
"""Largest integer that a template may compute; arithmetic on larger ones takes longer than a step should."""

MAX_WIDTH = 10_000
"""Widest padding, indent or batch that a template may request; real templates use single digits."""

MAX_LITERAL_SIZE = 1_000_000
"""Maximum printed size of one list or dict literal of a template, in characters."""

_UNBOUNDED_SIZE = 1 << 62
_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDTH_FILTERS = ("center", "indent", "wordwrap", "batch", "slice", "truncate", "round", "format")
_WIDE_FORMAT = re.compile(r"\d{5,}|\*|\{[^{}]*\{")


class BudgetError(TemplateError):
    """A render exceeded its budget of steps, characters or output."""


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


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with operators, calls and filters charged to a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, extensions: Sequence[Any] = ()) -> None:
        self.budget = RenderBudget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Charges, *extensions, loopcontrols],
            finalize=self.budget.emit,
        )
        known: dict[str, Any] = self.globals
        known["dict"] = _Dict()
        known["namespace"] = _Namespace
        # Random text would differ in every build, and lipsum can generate a gigabyte of it.
        del known["lipsum"]
        self.filters["random"] = _refuse_random
        self._guard_filters()

    def _guard_filters(self) -> None:
        budget, filters = self.budget, self.filters
        sizes: dict[str, Callable[..., int]] = {"join": _measure_joined, "replace": _measure_replaced}
        sizes |= dict.fromkeys(
            ("string", "pprint", "upper", "lower", "trim", "escape", "e", "urlize"), _measure_printed
        )

        def charge(weight: int, *args: Any, **_: Any) -> None:
            budget.step()
            if args:
                budget.grow(weight * _measure_sequence(args[0]))

        def charge_by_size(measure: Callable[..., int], *args: Any, **kwargs: Any) -> None:
            budget.grow(measure(*args, **{k: v for k, v in kwargs.items() if k != "attribute"}))

        def limit_width(name: str, value: Any = "", *args: Any, **kwargs: Any) -> None:
            _check_widths(args, kwargs)
            if isinstance(value, str):
                if name == "format" and _WIDE_FORMAT.search(value):
                    raise BudgetError("the template formats with an enormous width")
                # An indent is added to every line.
                budget.grow(len(value) * (1 + max([0, *(a for a in args if type(a) is int)]) // 64))

        for name, function in list(filters.items()):
            checks: list[Callable[..., None]] = []
            if name != "random":
                checks.append(partial(charge, 8 if name in ("sort", "unique", "groupby", "dictsort") else 1))
            if name == "sum":
                checks.append(_refuse_list_sums)
            if name in _WIDTH_FILTERS:
                checks.append(partial(limit_width, name))
            if name in sizes:
                checks.append(partial(charge_by_size, sizes[name]))
            filters[name] = _guard(function, checks) if checks else function

    def compile_charged(self, text: str) -> CodeType:
        """Compile a template with every loop iteration, macro call, `~` and literal charged to the budget.

        The code runs in any sandbox that was set up in the same way, by `load_template`.
        """
        tree = _ChargeTransformer(self.extensions[Charges.identifier])  # pyrefly: ignore[bad-argument-type]
        tree = tree.visit(self.parse(text)).set_environment(self)
        return self.compile(tree)

    def load_template(self, code: CodeType) -> Template:
        """Return the template whose code was compiled."""
        return self.template_class.from_code(self, code, self.make_globals(None))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge an operator before applying it."""
        match operator:
            case "+":
                self.budget.grow(_measure_sequence(left) + _measure_sequence(right))
                return left + right
            case "*":
                self.budget.grow(_measure_product(left, right))
            case "**":
                if (
                    isinstance(left, int)
                    and isinstance(right, int)
                    and left.bit_length() * abs(right) > MAX_INTEGER_BITS
                ):
                    self.budget.grow(_UNBOUNDED_SIZE)
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
            if called.__name__ in _WIDTH_METHODS:
                _check_widths(args, kwargs)
            elif called.__name__ == "join":
                self.budget.grow(_measure_joined(*args, owner))
            elif called.__name__ == "replace":
                self.budget.grow(_measure_replaced(owner, *args[:2]))
        result = super().call(context, called, *args, **kwargs)
        if type(result) is str:
            self.budget.grow(len(result))
        elif isinstance(called, _Dict):
            self.budget.grow(estimate_printed_size(result))
        return result

    def wrap_str_format(self, value: Any) -> Any:
        """Refuse format strings with a computed or very large width."""
        if getattr(value, "__name__", "") in ("format", "format_map"):
            owner = getattr(value, "__self__", None)
            if isinstance(owner, str) and _WIDE_FORMAT.search(owner):
                raise BudgetError("the template formats with an enormous width")
        return super().wrap_str_format(value)


class Charges(Extension):
    """Jinja extension whose calls charge what a template does to the budget."""

    def step(self, constant_characters: int) -> str:
        """Charge a loop iteration or macro call."""
        return self.environment.budget.step(constant_characters)  # pyrefly: ignore[missing-attribute]

    def joined(self, *values: Any) -> str:
        """Join values as `~` does."""
        budget: RenderBudget = self.environment.budget  # pyrefly: ignore[missing-attribute]
        texts: list[str] = []
        for value in values:
            if type(value) is not str:
                budget.emit(value)
            texts.append(str(value))
        budget.grow(sum(map(len, texts)))
        return "".join(texts)

    def made(self, value: Any) -> Any:
        """Charge a list or dict literal, which nested often enough prints without end."""
        budget = self.environment.budget  # pyrefly: ignore[missing-attribute]
        budget.grow(estimate_printed_size(value, min(budget.characters, MAX_LITERAL_SIZE)))
        return value


class _ChargeTransformer(NodeTransformer):
    """Inserts calls that charge the budget; the text that the template prints stays the same."""

    def __init__(self, charges: Charges) -> None:
        self.charges = charges

    def _call(self, name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        return self.charges.call_method(name, args, lineno=line)

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
    return next(node.find_all(kinds), None) is not None


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


def _guard(function: Callable[..., Any], checks: Sequence[Callable[..., None]]) -> Callable[..., Any]:
    """Return a filter that passes its arguments to some checks first, without those that Jinja passes (environment)."""
    passes = getattr(function, "jinja_pass_arg", None)
    takes = 0 if passes is None else 1

    def guarded(*args: Any, **kwargs: Any) -> Any:
        for check in checks:
            check(*args[takes:], **kwargs)
        return function(*args, **kwargs)

    if passes is not None:
        guarded.jinja_pass_arg = passes  # pyrefly: ignore[missing-attribute]
    return guarded


def _refuse_list_sums(_: Any = (), __: Any = None, start: Any = 0, **___: Any) -> None:
    if not isinstance(start, int | float):
        raise BudgetError("the template sums lists, which is quadratic")


def _check_widths(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    for one in (*args, *kwargs.values()):
        if isinstance(one, int) and abs(one) > MAX_WIDTH:
            raise BudgetError("the template asks for an enormous width")


def _refuse_random(*_: Any) -> str:
    raise TemplateError("the template prints random values; a build must give the same bytes every time")
