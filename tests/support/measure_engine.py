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

from docs.generate.reference import TITLES

ROOT = Path(__file__).resolve().parents[2]
ENGINE = [ROOT / "pipelines" / "rowmill", ROOT / "assets" / "dagster_rowmill"]
LONG_FUNCTION = 60
"""Lines from which a function is hard to read at once."""
READ_PAGES = ("README.md", "configs/**/*.yaml", "docs/tutorial.md", "docs/how-to/*.md", "docs/explanation/*.md",
              "docs/coming-from/*.md", "docs/*.md", "tests/**/*.yaml")  # fmt: skip
"""Where a person meets an option; the generated reference, which has them all, is not among them."""
GENERATED = {"reference.md", "walk.md", "reasons.md"}


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


def count_dataclasses(modules: dict[Path, ast.Module]) -> tuple[int, int]:
    """Return how many dataclasses are made in exactly one place, and how many there are."""
    classes, calls = set[str](), Counter[str]()
    for tree in modules.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
                classes.add(node.name)
            elif isinstance(node, ast.Call):
                calls[ast.unparse(node.func).rpartition(".")[2]] += 1
    return sum(calls[name] == 1 for name in classes), len(classes)


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
    long, (once, classes), (hidden, options) = (
        list_long_functions(modules),
        count_dataclasses(modules),
        list_hidden_options(),
    )
    print(f"{lines:,} lines in {len(modules)} files, without the viewer")
    print(f"{len(long)} functions over {LONG_FUNCTION} lines:", *(f"\n  {size} {name}" for size, name in long))
    print(f"{once} of {classes} dataclasses are made in one place")
    print(f"{len(hidden)} of {options} options are on no page but the reference:", ", ".join(hidden))


if __name__ == "__main__":
    main()
