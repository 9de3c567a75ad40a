"""No module imports itself through others: also not inside a function, nor for type checkers alone.

import-linter says so of the modules of a folder; here a package's own `__init__` counts as one of them.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def read_import_graph(root: Path) -> dict[str, set[str]]:
    """Return which modules below a source root each of them imports, by full names."""
    paths = {path.relative_to(root).with_suffix("").as_posix().replace("/", "."): path for path in root.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = set[str]()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=aliases):
                    imported.update(alias.name for alias in aliases)
                case ast.ImportFrom(module=str(package), names=aliases):
                    members = [f"{package}.{alias.name}" for alias in aliases]
                    imported.update(member if member in modules else package for member in members)
                case _:
                    pass
        graph[name] = (imported & modules.keys()) - {name}
    return graph


def find_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return each group of modules that reach one another."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        found, waiting = set[str](), [module]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        reached[module] = found
    circles = {frozenset(other for other in found if module in reached[other]) for module, found in reached.items()}
    return sorted(sorted(circle) for circle in circles if circle)


@pytest.mark.slow
@pytest.mark.parametrize("root", ["assets", "pipelines"])
def test_no_module_imports_itself_through_others(root: str) -> None:
    graph = read_import_graph(ROOT / root)

    assert len(graph) > 10
    assert find_circles(graph) == []


def test_circle_is_found_wherever_its_imports_are_written(tmp_path: Path) -> None:
    sources = {
        "shop/__init__.py": "from shop.orders import Order",
        "shop/orders.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shop.prices",
        "shop/prices.py": "def find_price():\n    from shop import taxes",
        "shop/taxes.py": "from shop import Order",
        "shop/names.py": "import json\nfrom shop import taxes",
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")

    assert find_circles(read_import_graph(tmp_path)) == [["shop", "shop.orders", "shop.prices", "shop.taxes"]]
