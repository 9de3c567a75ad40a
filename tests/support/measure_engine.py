"""How large the engine is and where its knowledge stands, as numbers: what the design sets targets for.

    python -m tests.support.measure_engine

Each line is a number that falls when the code gets simpler, with the places where it is highest. `tests/repository`
holds those that must not rise: ways of a chat, questions of kinds, facts by name, circles of imports.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from docs.generate.reference import TITLES

ROOT = Path(__file__).resolve().parents[2]
ENGINE = [ROOT / "pipelines" / "rowmill", ROOT / "assets" / "dagster_rowmill"]
LONG_FUNCTION = 60
"""Lines from which a function is hard to read at once."""
READ_PAGES = ("README.md", "configs/**/*.yaml", "docs/tutorial.md", "docs/how-to/*.md", "docs/explanation/*.md",
              "docs/coming-from/*.md", "docs/*.md", "tests/**/*.yaml")  # fmt: skip
"""Where a person meets an option; the generated reference, which has them all, is not among them."""
GENERATED = {"reference.md", "walk.md", "reasons.md"}
REQUIRED_BASES = ("PartInputs", "Details")
"""Bases of dataclasses that the contracts of the engine demand, however often one is made.

A function over parts takes one frozen dataclass, whose digest is the fingerprint of the part (`parts/functions.py`);
counts and details of a part are stored by the name of their class and add up field by field (`schema/counts.py`).
Where one stage alone maps the function or counts the thing, one place makes it.
"""


def parse_engine() -> dict[Path, ast.Module]:
    """Return the syntax tree of each module of the engine and the Dagster layer, without the viewer."""
    files = [path for folder in ENGINE for path in sorted(folder.rglob("*.py")) if "viewer" not in path.parts]
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def list_long_functions(modules: dict[Path, ast.Module]) -> list[tuple[int, str]]:
    """Return the functions of more than `LONG_FUNCTION` lines, the longest first."""
    found = [
        (node.end_lineno - node.lineno + 1, f"{path}:{node.lineno} {node.name}")
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    return sorted((one for one in found if one[0] > LONG_FUNCTION), reverse=True)


def list_single_dataclasses(modules: dict[Path, ast.Module]) -> tuple[list[str], int, int]:
    """Return the dataclasses made in exactly one place, how many more are because they must be, and all there are.

    A call of a class method that makes one, such as `Share.parse(text)`, is a place that makes it; `cls` in it is not.
    """
    nodes = [(path, node) for path, tree in modules.items() for node in ast.walk(tree)]
    classes, bases, makers = dict[str, str](), dict[str, list[str]](), set[str]()
    for path, node in nodes:
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
            classes[node.name] = f"{path}:{node.lineno} {node.name}"
            bases[node.name] = [ast.unparse(base).partition("[")[0] for base in node.bases]
            makers.update(f"{node.name}.{one.name}" for one in node.body if _makes_own_class(one))
    places = Counter[str]()
    for _, node in nodes:
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            owner = owner.rpartition(".")[2]
            places[owner if f"{owner}.{name}" in makers else name] += 1

    def is_required(name: str) -> bool:
        return name in REQUIRED_BASES or any(is_required(base) for base in bases.get(name, []))

    single = [name for name in classes if places[name] == 1]
    free = [classes[name] for name in single if not is_required(name)]
    return free, len(single) - len(free), len(classes)


def list_possible_bundles(modules: dict[Path, ast.Module], single: list[str]) -> list[str]:
    """Return those of the dataclasses `single` that have no method, and that at most two functions name.

    Of the others, most are nouns of the domain; these are where values may be handed on without one.
    """
    names = {one.rpartition(" ")[2]: one for one in single}
    functions: dict[str, set[ast.AST]] = {name: set() for name in names}
    behaves = set[str]()
    for tree in modules.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(isinstance(one, ast.FunctionDef) for one in node.body):
                behaves.add(node.name)
            elif isinstance(node, ast.FunctionDef):
                for name in names.keys() & set(re.findall(r"\w+", ast.unparse(node))):
                    functions[name].add(node)
    return [one for name, one in names.items() if name not in behaves and len(functions[name]) <= 2]


def _makes_own_class(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    return isinstance(node, ast.FunctionDef) and any(ast.unparse(one.func) == "cls" for one in calls)


def list_options() -> Iterator[tuple[str, str]]:
    """Yield the model and the name of every option of a recipe."""
    for model in TITLES:
        for name in model.model_fields:
            yield model.__name__, name


def list_hidden_options() -> tuple[list[str], int]:
    """Return the options whose name is on no page that a person reads, and the number of all options."""
    pages = {path for pattern in READ_PAGES for path in ROOT.glob(pattern) if path.name not in GENERATED}
    words = {word for path in pages for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    options = sorted(set(list_options()))
    return [f"{model}.{name}" for model, name in options if name not in words], len(options)


def main() -> None:
    """Print every measure."""
    modules = parse_engine()
    lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in modules)
    long, (hidden, options) = list_long_functions(modules), list_hidden_options()
    single, required, classes = list_single_dataclasses(modules)
    print(f"{lines:,} lines in {len(modules)} files, without the viewer")
    print(f"{len(long)} functions over {LONG_FUNCTION} lines:", *(f"\n  {size} {name}" for size, name in long))
    bundles = list_possible_bundles(modules, single)
    print(f"{len(single)} of {classes} dataclasses are made in one place:", *(f"\n  {one}" for one in single))
    print(f"{len(bundles)} of these may only hand arguments on:", *(f"\n  {one}" for one in bundles))
    print(f"{required} more are inputs, counts or details of parts, of which each is a class")
    print(f"{len(hidden)} of {options} options are on no page but the reference:", ", ".join(hidden))


if __name__ == "__main__":
    main()
