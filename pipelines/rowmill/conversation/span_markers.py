"""The reference path to every message's span: change the template's syntax tree so that it prints marks.

What belongs here: the change to the syntax tree, the state that prints marks, and reading marks back as
spans. What does not: the marks in the template's text (`minijinja_engine.py`, which uses the same `read_marks`).

A call is inserted before and after every `for` loop, and one at the start of its body, which receives the loop's
targets and prints a mark only if one of them *is* a message of the row:

    {% for m in messages %}          open();  for m in messages: head(m) …  close()
    «1.0»<|im_start|>user…«1.1»<|im_start|>assistant…«1»
     │ └ message 0          └ message 1                └ end of loop activation 1
     └ activation

A mark is a character that occurs in neither template nor row, the activation and the message, and the character
again. Removing a mark yields a position. Activations form a stack, so text of an inner loop belongs to the messages it
iterates over, and text after the inner loop to the outer message again.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from rowmill.conversation.sandbox import estimate_printed_size
from rowmill.conversation.template_contract import RenderedConversation
from rowmill.schema.rows import Message, Span

MARK_CHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Unicode non-characters: valid in a string, never assigned, so they hardly occur in text."""

MAX_LITERAL_SIZE = 1_000_000
"""Maximum printed size of one list or dict literal of a template, in characters."""

GENERATION_OPENS = "{"
GENERATION_CLOSES = "}"


class MarkRecorder(Extension):
    """Jinja extension that adds `{% generation %}`, charges the budget, and prints marks while a render is watched."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads the attribute)

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.watch((), "")

    def watch(self, messages: Sequence[Message], mark: str) -> None:
        """Watch the next render for these message objects; an empty mark prints nothing."""
        self._mark = mark
        self._indices = {id(message): index for index, message in enumerate(messages)} if mark else {}
        # Keeps the objects alive, because their ids are unique only for that long.
        self._watched = messages
        self._activations = 0
        self._stack: list[list[int]] = []
        self.marked_loops: set[int] = set()

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse `{% generation %}…{% endgeneration %}` as `apply_chat_template` does, as a call block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("generated"), [], [], body).set_lineno(line)

    def generated(self, caller: Any) -> str:
        """Return the block's text between two marks."""
        text = caller()
        mark = self._mark
        if not mark:
            return text
        return f"{mark}{GENERATION_OPENS}{mark}{text}{mark}{GENERATION_CLOSES}{mark}"

    def step(self, constant_characters: int) -> str:
        """Charge a loop iteration or macro call to the budget."""
        return self.environment.budget.step(constant_characters)  # pyrefly: ignore[missing-attribute]

    def joined(self, *values: Any) -> str:
        """Join values as `~` does, charged to the budget."""
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

    def opened(self) -> str:
        """Push a loop activation; returns an empty string, because the template prints the result."""
        self._activations += 1
        self._stack.append([self._activations, 0])
        return ""

    def head(self, loop: int, *targets: Any) -> str:
        """Return a mark if one of the loop's targets is a message."""
        for target in targets:
            index = self._indices.get(id(target))
            if index is not None:
                top = self._stack[-1]
                top[1] = 1
                self.marked_loops.add(loop)
                return f"{self._mark}{top[0]}.{index}{self._mark}"
        return ""

    def closed(self) -> str:
        """Pop a loop activation; returns its end mark if it printed a mark."""
        activation, marked = self._stack.pop()
        return f"{self._mark}{activation}{self._mark}" if marked else ""


class _ChargeTransformer(NodeTransformer):
    """Charge every loop iteration, macro call and `~`, without changing the text."""

    def __init__(self, recorder: MarkRecorder) -> None:
        self.recorder = recorder

    def _call(self, name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        return self.recorder.call_method(name, args, lineno=line)

    def _charge(self, node: Any) -> nodes.ExprStmt:
        constant = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        constant += sum(len(c.value) for c in node.find_all(nodes.Const) if isinstance(c.value, str))
        return nodes.ExprStmt(self._call("step", [nodes.Const(constant)], node.lineno), lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> Any:  # noqa: N802  (jinja2 dispatches on the name)
        self.generic_visit(node)
        node.body.insert(0, self._charge(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, self._charge(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> Any:  # noqa: N802
        self.generic_visit(node)
        return self._call("joined", list(node.nodes), node.lineno)

    def _made(self, node: Any) -> Any:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or not contains_node(node, nodes.Name, nodes.Call, nodes.Getattr):
            return node
        return self._call("made", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _made  # noqa: N815


class _MarkTransformer(_ChargeTransformer):
    """Charge like the plain template, and print marks around and inside every loop."""

    def __init__(self, recorder: MarkRecorder) -> None:
        super().__init__(recorder)
        self.loops = 0

    def visit_For(self, node: nodes.For) -> Any:  # noqa: N802
        loop = self.loops
        self.loops += 1
        if is_silent_loop(node):
            return super().visit_For(node)
        targets = _list_loop_targets(node)
        super().visit_For(node)
        line = node.lineno
        head = self._call("head", [nodes.Const(loop), *targets], line)
        node.body.insert(0, nodes.Output([head], lineno=line))
        return [
            nodes.ExprStmt(self._call("opened", [], line), lineno=line),
            node,
            nodes.Output([self._call("closed", [], line)], lineno=line),
        ]


def _list_loop_targets(node: nodes.For) -> list[nodes.Expr]:
    names = [name.name for name in [node.target, *node.target.find_all(nodes.Name)] if isinstance(name, nodes.Name)]
    targets: list[nodes.Expr] = [nodes.Name(name, "load", lineno=node.lineno) for name in dict.fromkeys(names)]
    if _is_range_call(node.iter):
        for statement in node.body:
            found = [statement] if isinstance(statement, nodes.Getitem) else []
            for item in [*found, *statement.find_all(nodes.Getitem)]:
                if isinstance(item.arg, nodes.Name) and item.arg.name in names and isinstance(item.node, nodes.Name):
                    owner, index = (nodes.Name(one, "load") for one in (item.node.name, item.arg.name))
                    return [*targets, nodes.Getitem(owner, index, "load", lineno=node.lineno)]
    return targets


def is_silent_loop(loop: nodes.For) -> bool:
    """Return whether a loop prints nothing, such as one that looks for the last user message, and needs no marks."""
    return not contains_node(loop, nodes.Output, nodes.CallBlock, nodes.FilterBlock, nodes.Include)


def contains_node(node: nodes.Node, *kinds: type[nodes.Node]) -> bool:
    """Return whether a node contains a node of one of these kinds."""
    return any(node.find(kind) is not None for kind in kinds)


def find_silent_loops(tree: nodes.Template) -> frozenset[int]:
    """Return the loops that print nothing, numbered in the order of their tags."""
    return frozenset(
        number for number, (loop, _) in enumerate(_iterate_loops(tree, captured=False)) if is_silent_loop(loop)
    )


def find_captured_loops(tree: nodes.Template) -> frozenset[int]:
    """Return the loops whose output the template itself can read, numbered in the order of their tags.

    A loop inside a macro, `set`, `filter` or `call` block prints into a string; if it iterates over messages, the
    template may count, cut or trim its marks.
    """
    return frozenset(number for number, (_, captured) in enumerate(_iterate_loops(tree, captured=False)) if captured)


def _iterate_loops(node: nodes.Node, *, captured: bool) -> Iterator[tuple[nodes.For, bool]]:
    """Yield loops in the order of their tags, and whether each prints into a string."""
    captured = captured or isinstance(node, nodes.Macro | nodes.AssignBlock | nodes.FilterBlock | nodes.CallBlock)
    if isinstance(node, nodes.For):
        yield node, captured
    for child in node.iter_child_nodes():
        yield from _iterate_loops(child, captured=captured)


def _is_range_call(expression: nodes.Node) -> bool:
    return (
        isinstance(expression, nodes.Call)
        and isinstance(expression.node, nodes.Name)
        and expression.node.name == "range"
    )


def charge_template(tree: nodes.Template, recorder: MarkRecorder) -> nodes.Template:
    """Return the template with its loops charged and its text unchanged: the plain render."""
    return _ChargeTransformer(recorder).visit(tree).set_environment(recorder.environment)


def mark_template(tree: nodes.Template, recorder: MarkRecorder) -> nodes.Template:
    """Return the template with marks; removing the marks from its text gives the plain render."""
    return _MarkTransformer(recorder).visit(tree).set_environment(recorder.environment)


def read_marks(text: str, mark: str, messages: Sequence[Message]) -> RenderedConversation:
    """Remove marks from a render and return the text with the spans that they mark.

    Raises
    ------
    ValueError
        If the marks are malformed because the template cut its own output.

    """
    parts = text.split(mark)
    if len(parts) % 2 == 0:
        raise ValueError("the template cut through a mark")
    text = "".join(parts[::2])
    payloads = parts[1::2]
    if payloads and payloads == _make_loop_payloads(payloads[0], len(payloads)):
        return _read_one_loop(text, parts, messages)
    return _read_nested_loops(text, parts, messages)


@lru_cache(maxsize=4096)
def _make_loop_payloads(first: str, count: int) -> list[str]:
    """Return the payloads of one loop over `count - 1` messages in order, which nearly every template prints."""
    activation, dot, message = first.partition(".")
    if not dot:
        return []
    start = int(message)
    return [*(f"{activation}.{index}" for index in range(start, start + count - 1)), activation]


def _read_one_loop(text: str, parts: Sequence[str], messages: Sequence[Message]) -> RenderedConversation:
    position = len(parts[0])
    index = int(parts[1].partition(".")[2])
    spans: list[Span] = []
    for after in parts[2:-1:2]:
        if after:
            end = position + len(after)
            spans.append(Span(position, end, index))
            position = end
        index += 1
    return RenderedConversation(text, tuple(spans), (), position, messages)


def _read_nested_loops(text: str, parts: Sequence[str], messages: Sequence[Message]) -> RenderedConversation:
    """Read marks of nested loops with a stack of activations, of which the innermost owns the text."""
    position = len(parts[0])
    loop_end = 0
    activations: list[str] = []
    owners: list[int] = []
    pieces: list[tuple[int, int, int]] = []
    generation: list[Span] = []
    generated: list[tuple[int, int]] = []
    for payload, after in zip(parts[1::2], parts[2::2], strict=True):
        if payload == GENERATION_OPENS:
            generated.append((position, owners[-1] if owners else -1))
        elif payload == GENERATION_CLOSES:
            start, owner = generated.pop()
            generation.append(Span(start, position, owner))
        else:
            activation, dot, message = payload.partition(".")
            _close_activation(activations, owners, activation)
            if dot:
                activations.append(activation)
                owners.append(int(message))
            elif not activations:
                loop_end = position
        if after:
            if owners:
                pieces.append((position, position + len(after), owners[-1]))
            position += len(after)
    if generated:
        raise ValueError("the template lost the end of a generation block")
    return RenderedConversation(text, tuple(_merge_adjacent_spans(pieces)), tuple(generation), loop_end, messages)


def _merge_adjacent_spans(pieces: Sequence[tuple[int, int, int]]) -> Iterator[Span]:
    """Yield one span for each run of adjacent pieces of the same message."""
    at = 0
    while at < len(pieces):
        start, end, owner = pieces[at]
        at += 1
        while at < len(pieces) and pieces[at][2] == owner and pieces[at][0] == end:
            end = pieces[at][1]
            at += 1
        yield Span(start, end, owner)


def _close_activation(stack: list[str], owners: list[int], activation: str) -> None:
    """Remove an activation and those inside it from the stack."""
    if activation in stack:
        depth = stack.index(activation)
        del stack[depth:]
        del owners[depth:]
