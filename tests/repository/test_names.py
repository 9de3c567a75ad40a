"""Names can be searched for: a name means one thing, and a function's name says what it does.

What belongs here: rules for names in all modules of the engine. What does not: style that the linter knows.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "pipelines" / "rowmill"
LAYER = ROOT / "assets" / "dagster_rowmill"
MOST_ONE_WORD = 0.2
"""Share of top-level functions whose name may be one word: where the module says the object, as in `packing.pack`."""


def package_of(path: Path) -> str:
    """Return the package of the engine that a module is in, or the Dagster layer as a whole."""
    return path.relative_to(ENGINE).parts[0] if path.is_relative_to(ENGINE) else "dagster_rowmill"


def top_level(kind: type[ast.FunctionDef] | type[ast.ClassDef]) -> Iterator[tuple[Path, str]]:
    """Yield all top-level functions or classes, with their modules; a function with overloads once."""
    for path in sorted([*ENGINE.rglob("*.py"), *LAYER.rglob("*.py")]):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, kind) and not any(ast.unparse(one) == "overload" for one in node.decorator_list):
                yield path, node.name


def test_class_name_is_unique() -> None:
    counts = Counter(name for _, name in top_level(ast.ClassDef))

    assert len(counts) > 300
    assert {name for name, count in counts.items() if count > 1} == set()


def test_function_name_is_unique_in_its_package() -> None:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, name in top_level(ast.FunctionDef):
        found[package_of(path), name.strip("_")].append(path.name)

    assert len(found) > 1500
    assert {key: paths for key, paths in found.items() if len(paths) > 1} == {}


def test_few_functions_have_a_name_of_one_word() -> None:
    names = [name.strip("_") for _, name in top_level(ast.FunctionDef)]

    assert sum("_" not in name for name in names) / len(names) <= MOST_ONE_WORD
