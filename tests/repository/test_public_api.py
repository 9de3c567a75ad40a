"""The public names of rowmill: which there are, what loading them costs, and that the documentation uses no others."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

import dagster_rowmill
import rowmill
from rowmill.cli.error_boundary import ExitStatus

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/api.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PUBLIC = [
    *("BuildContext", "Json", "Row", "RowFormat", "register_format"),
    *("Project", "build_recipe", "open_project"),
    *("Batch", "PackedSequence", "Reader", "TrainingStep", "View"),
    *("SourceLosses", "SourceNames", "ExampleLosses", "loss_by_source"),
    *("Datum", "ExampleTokens", "Rejected", "canonicalize_rows", "make_datum", "make_datums"),
    *("row_to_datum", "sft_tokenize", "tree_mask"),
    *("get_chat_template", "register_chat_template"),
    *("Exported", "open_export", "read_datums"),
    *("ParsedFiles", "parse_files"),
    *("BusyError", "ConfigError", "ContextOverflowError", "DamagedFileError", "GateError", "GenerationError"),
    *("IntegrityError", "MissingPackageError", "PipelineError", "SchemaError", "SourceError", "UnreachableError"),
]
"""A name that goes breaks programs of users: after the first release it needs a line in the changelog, and a release
that still has it."""


def run_python(code: str, *arguments: str) -> str:
    """Run a program in a fresh interpreter and return what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'pipelines'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ── Names ──


def test_public_names_are_these() -> None:
    assert sorted(rowmill.__all__) == sorted(PUBLIC)
    assert set(rowmill.__all__) <= set(dir(rowmill))


def test_page_on_stability_lists_the_public_names_and_exit_statuses() -> None:
    page = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
    listed = {
        package: re.findall(r"`(\w+)`", re.findall(rf"^From `{package}`:(.*?)$", page, re.MULTILINE | re.DOTALL)[0])
        for package in ("rowmill", "dagster_rowmill")
    }
    statuses = page.split("### Exit statuses")[1].split("##")[0]

    assert listed == {"rowmill": sorted(rowmill.__all__), "dagster_rowmill": sorted(dagster_rowmill.__all__)}
    assert [int(status) for status in re.findall(r"\d+", statuses)] == list(ExitStatus)
    assert len(page.split()) <= 300


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_what_type_checkers_see(name: str) -> None:
    """The imports under TYPE_CHECKING and the table of modules are two lists: here they are one."""
    tree = ast.parse(Path(rowmill.__file__).read_text(encoding="utf-8"))
    [guarded] = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert set(seen) == set(rowmill.__all__)
    module, own_name = seen[name]
    assert module is not None
    __import__(module)
    assert getattr(rowmill, name) is getattr(sys.modules[module], own_name)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'rowmill' has no attribute 'Raeder'"):
        _ = rowmill.Raeder  # pyrefly: ignore[missing-attribute]


# ── What loading costs ──

HEAVY = (
    "dagster",
    "transformers",
    "great_expectations",
    "polars",
    "duckdb",
    "pydantic",
    "jinja2",
    "tokenizers",
    "torch",
)


def test_import_loads_no_other_package_and_the_reader_no_heavy_one() -> None:
    code = (
        "import sys; before = {*sys.modules}; import rowmill; "
        "loaded = {name.partition('.')[0] for name in {*sys.modules} - before}; "
        "print(sorted(loaded - sys.stdlib_module_names))"
    )

    assert run_python(code) == "['rowmill']"
    code = f"import sys; from rowmill import Reader; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code) == "[]"


# ── What users read ──


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's code blocks of one language."""
    return [text for name, text in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


@cache
def user_code() -> dict[str, list[str]]:
    """Return all Python that users read: of pages, the programs beside them, and the examples."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    programs = [*sorted((ROOT / "docs/how-to").rglob("*.py")), *sorted((ROOT / "configs/examples").rglob("*.py"))]
    found = {page.relative_to(ROOT).as_posix(): blocks(page, "python") for page in pages}
    return found | {path.relative_to(ROOT).as_posix(): [path.read_text(encoding="utf-8")] for path in programs}


def imported_names(text: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every import of ours; top-level `await` is allowed, as in a notebook."""
    tree = compile(text, "page", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


@pytest.mark.parametrize("name", sorted(name for name, texts in user_code().items() if texts))
def test_python_that_users_read_imports_public_names_alone(name: str) -> None:
    for text in user_code()[name]:
        for module, imported in imported_names(text):
            if module.partition(".")[0] in ("rowmill", "dagster_rowmill"):
                assert module in ("rowmill", "dagster_rowmill"), f"{module} is no public module"
                assert imported in {"", *(rowmill if module == "rowmill" else dagster_rowmill).__all__}


def test_api_page_shows_every_public_name() -> None:
    shown = {imported for text in blocks(PAGE, "python") for _, imported in imported_names(text)}
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))

    assert shown | rows >= set(rowmill.__all__)


@pytest.mark.slow
def test_examples_of_the_api_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tinker", reason="the page reads tinker's objects; tinker is not installed")
    monkeypatch.chdir(tmp_path)
    recipe = yaml.safe_load(blocks(PAGE, "yaml")[0])
    # Few rows: what is a share of nothing says nothing here.
    recipe["gates"] = {"split_share": {"at_most": 1}, "filler_share": {"at_most": 1}, "fill": {"at_least": 0}}
    for folder in ("configs", "data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "configs/demo").symlink_to(ROOT / "configs/demo")
    (tmp_path / "configs/support.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    chats = [
        {"messages": [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"{i + 1}. " * 9}]}
        for i in range(80)
    ]
    lines = [f"{name},{item},{i}\n" for i in range(20) for name in ("ada", "bo") for item in ("tea", "milk")]
    (tmp_path / "data/chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats), encoding="utf-8")
    (tmp_path / "data/purchases.csv").write_text("customer,item,price\n" + "".join(lines), encoding="utf-8")
    names: dict[str, object] = {"__name__": "api_page"}
    for text in blocks(PAGE, "python"):
        exec(compile(text, "docs/api.md", "exec", dont_inherit=True), names)
    parsed = names["parsed"]
    assert isinstance(parsed, rowmill.ParsedFiles)
    assert parsed.report.valid == 1
