"""How far a reader has to go: what one conversation enters on its way to token ids, bounded by today's figures.

A chat's way is measured with `sys.setprofile` while `rowmill.sft_tokenize` runs warm on one row: the modules and
functions that it enters, the deepest stack of our own frames, and how often a call enters another package than its
caller's. A bound is lowered by whoever shortens the way, and never raised.
"""

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import rowmill
from tests.support.recipes import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "pipelines" / "rowmill"

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "call_abc12", "type": "function", "function": {"name": "find", "arguments": {"city": "Oslo"}}}
PLAIN: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "What is two plus two?"},
        {"role": "assistant", "content": "It is four, of course."},
    ]
}
WITH_TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": None, "reasoning_content": "I must look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_abc12", "content": "cold"},
        {"role": "assistant", "content": "It is cold today."},
    ],
    "tools": [FIND],
}


@dataclass(frozen=True)
class Way:
    """What one row enters; each number is a bound when it stands in a test."""

    modules: int
    functions: int
    deepest: int
    package_changes: int

    def exceeds(self, bound: "Way") -> list[str]:
        """Name each number that is above its bound."""
        return [
            f"{name}: {value} is above {limit}"
            for name, limit in vars(bound).items()
            if (value := getattr(self, name)) > limit
        ]


def measure_way(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Way:
    """Tokenize a row three times, and count what the third enters."""
    modules, functions, stack = set[str](), set[tuple[str, str]](), list[str]()
    changes, deepest = 0, 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal changes, deepest
        path = frame.f_code.co_filename
        if not path.startswith(str(ENGINE)):
            return
        name = Path(path).relative_to(ENGINE).as_posix()
        if event == "call":
            modules.add(name)
            functions.add((name, frame.f_code.co_qualname))
            package = name.split("/", maxsplit=1)[0]
            changes += bool(stack) and stack[-1] != package
            stack.append(package)
            deepest = max(deepest, len(stack))
        elif event == "return" and stack:
            stack.pop()

    tokenize = rowmill.sft_tokenize
    for _ in range(2):
        tokenize([row], tokenizer, max_seq_len=2048)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        tokenize([row], tokenizer, max_seq_len=2048)
    finally:
        sys.setprofile(before)
    return Way(len(modules), len(functions), deepest, changes)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Open the tests' tokenizer under the template of Qwen3, which prints reasoning, tools, calls and results."""
    folder = write_tokenizer(tmp_path_factory.mktemp("ways") / "tokenizer")
    return rowmill.get_chat_template(AutoTokenizer.from_pretrained(folder), "qwen3")


@pytest.mark.parametrize(
    ("row", "bound"),
    [
        pytest.param(PLAIN, Way(modules=12, functions=59, deepest=9, package_changes=19), id="plain"),
        pytest.param(WITH_TOOLS, Way(modules=21, functions=149, deepest=11, package_changes=25), id="tools"),
    ],
)
def test_way_of_a_conversation_is_no_longer_than_its_bound(
    row: dict[str, Any], bound: Way, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert measure_way(row, tokenizer).exceeds(bound) == []


def list_imports_by_string(files: Sequence[Path]) -> list[str]:
    """Name the imports of our own modules that are written as strings, which import-linter cannot see."""
    return [
        f"{path.name}: {node.args[0].value}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args
        if isinstance(node.args[0], ast.Constant)
        if str(node.args[0].value).partition(".")[0] in {"dagster_rowmill", "rowmill"}
    ]


def test_imports_by_string_are_no_more_than_these() -> None:
    allowed = {
        "projects.py: dagster_rowmill.outside_builds",
        "fork_server.py: rowmill.stages.catalog",
    }

    assert set(list_imports_by_string(sorted(ENGINE.rglob("*.py")))) <= allowed
