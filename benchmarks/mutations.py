"""Sixty small errors put into the engine one at a time, and how many of them a set of tests notices.

A mutation flips a comparison, drops a statement or changes a constant inside a function. Modules are taken by the hash
of their path, one per package before a package gets a second, and two mutations per module by the hash of their place,
so the same tree always has the same sixty. Each needs only the tests that reach it, which one recorded run of the whole
set finds out:

    python -m benchmarks.mutations list
    python -m benchmarks.mutations record HITS     # rewrites this checkout: each place notes the tests that reach it
    CI=1 python -m pytest -q -n 3 --dist loadfile  # in that checkout, with the tests to be judged
    python -m benchmarks.mutations judge HITS OUT  # in a fresh checkout: one JSON line per mutation

A test of a shared fixture is noted as the first that asked for it, so whole files of tests are run, cheapest first. Run
`record` and `judge` in throw-away clones only: both write into `pipelines/` and `assets/`.
"""

import argparse
import ast
import copy
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = 30
PER_MODULE = 2
LIMIT_S = 900
"""A mutation that makes the tests wait for ever is noticed by this."""

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}

RECORDER = '''"""Notes which test first reaches each place of a mutation; written by benchmarks/mutations.py."""
import os

FOLDER = {folder!r}
_seen = set()


def hit(number):
    """Append the running test's file to the number's list."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "outside").split("::")[0]
    if (number, test) not in _seen:
        _seen.add((number, test))
        with open(f"{{FOLDER}}/{{number}}", "a", encoding="utf-8") as file:
            file.write(test + "\\n")
'''


@dataclass(frozen=True)
class Mutation:
    """One error: where it is, what it does, and its place in the order in which `ast.walk` visits the module."""

    module: str
    line: int
    kind: str
    change: str
    index: int

    @property
    def digest(self) -> str:
        """Hash of the place; the order in which a module's mutations are taken."""
        return hashlib.sha256(f"{self.module}:{self.index}:{self.kind}".encode()).hexdigest()


def choose_mutations() -> list[Mutation]:
    """Return the sixty mutations of this tree, in the order of their modules."""
    modules = [path for root in ("assets", "pipelines") for path in sorted((ROOT / root).rglob("*.py"))]
    by_package: dict[str, list[str]] = {}
    for path in modules:
        name = path.relative_to(ROOT).as_posix()
        by_package.setdefault("/".join(name.split("/")[1:-1][:2]) or name, []).append(name)
    queues = [sorted(names, key=_hash_text) for _, names in sorted(by_package.items())]
    chosen: list[Mutation] = []
    taken = 0
    while taken < MODULES and any(queues):
        for queue in sorted(queues, key=lambda names: _hash_text(names[0]) if names else ""):
            while queue and taken < MODULES:
                found = sorted(_list_mutations(queue.pop(0)), key=lambda mutation: mutation.digest)
                if len(found) >= PER_MODULE:
                    chosen += found[:PER_MODULE]
                    taken += 1
                    break
    return sorted(chosen, key=lambda mutation: (mutation.module, mutation.line, mutation.index))


def record(folder: Path) -> None:
    """Rewrite the modules so that each place of a mutation notes the tests that reach it in `folder`."""
    places: dict[str, dict[int, int]] = {}
    for number, mutation in enumerate(choose_mutations()):
        places.setdefault(mutation.module, {})[number] = mutation.index
    folder.mkdir(parents=True, exist_ok=True)
    # The new module is written last, because it would be among those to choose from.
    (ROOT / "pipelines" / "mutation_recorder.py").write_text(RECORDER.format(folder=str(folder.resolve())))
    for module, numbers in places.items():
        tree = ast.parse((ROOT / module).read_text())
        nodes = list(ast.walk(tree))
        for number, index in numbers.items():
            _insert_recorder(tree, nodes[index], number)
        (ROOT / module).write_text(ast.unparse(ast.fix_missing_locations(tree)))


def judge(hits: Path, out: Path, only: Sequence[int], arguments: Sequence[str]) -> None:
    """Run the tests that reach each mutation against it, and append one JSON line per mutation to `out`."""
    for number, mutation in enumerate(choose_mutations()):
        if only and number not in only:
            continue
        path = hits / str(number)
        files = sorted(set(path.read_text().split())) if path.is_file() else []
        files = [name for name in files if (ROOT / name).is_file()]
        start = time.monotonic()
        noticed = _run_tests(mutation, files, arguments) if files else ""
        line = {
            "mutation": number,
            "place": f"{mutation.module}:{mutation.line}",
            "change": mutation.change,
            "files": len(files),
            "noticed_by": noticed,
            "seconds": round(time.monotonic() - start, 1),
        }
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def _run_tests(mutation: Mutation, files: Sequence[str], arguments: Sequence[str]) -> str:
    """Return the name of the first test that fails under the mutation; empty if all pass."""
    source = (ROOT / mutation.module).read_text()
    tree = ast.parse(source)
    _apply(tree, list(ast.walk(tree))[mutation.index], mutation.kind)
    (ROOT / mutation.module).write_text(ast.unparse(ast.fix_missing_locations(tree)))
    try:
        # The files that mirror the module notice it soonest.
        package = mutation.module.split("/")[2]
        ordered = sorted(files, key=lambda name: (f"tests/{package}/" not in name, "end_to_end" in name, name))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=no", *arguments, *ordered]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "the limit of time"
    finally:
        (ROOT / mutation.module).write_text(source)
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"exit status {done.returncode}"


def _list_mutations(module: str) -> Iterator[Mutation]:
    source = (ROOT / module).read_text()
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in function.body
        for node in ast.walk(statement)
    }
    for index, node in enumerate(ast.walk(tree)):
        if id(node) not in inside:
            continue
        line = getattr(node, "lineno", 0)
        before = ast.unparse(node)
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in FLIPPED:
                kind = "flip"
            case ast.Constant(value=bool() | int()):
                kind = "constant"
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                kind = "drop"
            case _:
                continue
        after = "pass" if kind == "drop" else ast.unparse(_change(copy.deepcopy(node), kind))
        yield Mutation(module, line, kind, f"{before[:80]} -> {after[:80]}", index)


def _change(node: ast.AST, kind: str) -> ast.AST:
    match node:
        case ast.Compare(ops=[operator]) if kind == "flip":
            node.ops = [FLIPPED[type(operator)]()]
        case ast.Constant(value=bool() as value):
            node.value = not value
        case ast.Constant(value=int() as value):
            node.value = value + 1
        case _:
            raise ValueError(f"no {kind} of {ast.dump(node)}")
    return node


def _apply(tree: ast.Module, node: ast.AST, kind: str) -> None:
    if kind != "drop":
        _change(node, kind)
        return
    body = next(body for body in _list_bodies(tree) if any(statement is node for statement in body))
    body[next(place for place, statement in enumerate(body) if statement is node)] = ast.Pass()


def _insert_recorder(tree: ast.Module, node: ast.AST, number: int) -> None:
    """Insert the call before the innermost statement that contains the node, inside its function."""
    innermost: tuple[list[ast.stmt], ast.stmt] | None = None
    for body in _list_bodies(tree):
        for statement in body:
            if any(child is node for child in ast.walk(statement)):
                innermost = (body, statement)
    assert innermost is not None
    body, statement = innermost
    call = ast.parse(f"__import__('mutation_recorder').hit({number})").body[0]
    body.insert(next(place for place, one in enumerate(body) if one is statement), call)


def _list_bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements, outer before inner."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                yield body


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    """Carry out one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    commands.add_parser("record").add_argument("hits", type=Path)
    judging = commands.add_parser("judge")
    judging.add_argument("hits", type=Path)
    judging.add_argument("out", type=Path)
    judging.add_argument("--only", type=int, nargs="*", default=[])
    judging.add_argument("--pytest", default="-n 2 --dist loadfile")
    options = parser.parse_args()
    if options.command == "list":
        for number, mutation in enumerate(choose_mutations()):
            print(f"{number:3} {mutation.module}:{mutation.line}  {mutation.change}")
    elif options.command == "record":
        record(options.hits)
    else:
        os.environ["CI"] = "1"
        judge(options.hits, options.out, options.only, options.pytest.split())


if __name__ == "__main__":
    main()
