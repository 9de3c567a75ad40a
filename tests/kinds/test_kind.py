"""A kind is its module and its line in the union: a new one is checked at load, built and shown like the others."""

import ast
from pathlib import Path
from typing import Any

import pytest

from rowmill.formats import RowFormat, register_format
from rowmill.kinds.base import OPTION_GROUPS, DatasetKind
from rowmill.kinds.catalog import KIND_ALIASES, KINDS
from tests.support.extended_engine import ExtendedEngine
from tests.support.recipes import Workspace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

READY = '''
"""Records that hold their tokens: a kind that exists in this test only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from rowmill.core.json import Json
from rowmill.kinds.base import BuildContext, DatasetKind, DatasetOptions, TokenBuilder
from rowmill.kinds.shared.canonicalization import RecordReader
from rowmill.schema.rows import Row, RowKind, make_plain_report


class Ready(DatasetKind):
    """Each record is an example."""

    ROW_KIND: ClassVar[RowKind] = "conversation"
    GROUPS: ClassVar[frozenset[str]] = frozenset({"filters", "splits", "truncation", "packing"})

    kind: Literal["ready"] = "ready"
    """Examples."""
    domain_key: str | None = None
    """Column that names the domain."""

    def make_record_reader(self, options: DatasetOptions) -> RecordReader:
        report = make_plain_report("ready")
        return lambda record: Row("record", record=dict(record), report=report)

    def open_example_builder(self, context: BuildContext[Any], base: Path) -> TokenBuilder:
        return lambda record: {"ids": record["ids"], "loss_mask": [0, *(1 for _ in record["ids"][1:])]}
'''

QUESTIONS = """
from rowmill.kinds.catalog import KINDS
from rowmill.recipe.recipe import json_schema

tables = {}
for stage, file in (("canonical_rows", "rows"), ("tokenized_examples", "examples")):
    tables[stage] = [
        one for part in load("mini", "rows", stage).parts for one in store.table(part.files[file]).to_pylist()
    ]
found["rows"] = [[one["kind"], one["schema"], one["text"], one["output"]] for one in tables["canonical_rows"]]
found["examples"] = [[one["input_ids"], one["loss_mask"]] for one in tables["tokenized_examples"]]
found["ranks"] = sum(int(part.facts["tokens"]) for part in load("mini", "gpu_partitions").parts)
found["kinds"] = list(KINDS)
found["schema"] = json.dumps(json_schema())
"""


def build_with(tmp_path: Path, kind: str, source: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Build a dataset of a kind that is added to a copy of the engine by its file and its line."""
    engine = ExtendedEngine(tmp_path / "engine")
    engine.write(f"pipelines/rowmill/kinds/{kind}.py", source)
    listed, prompts = "pipelines/rowmill/kinds/catalog.py", "from rowmill.kinds.prompts import Prompts\n"
    engine.replace(listed, prompts, f"{prompts}from rowmill.kinds.{kind} import {kind.title()}\n")
    engine.replace(listed, "    Chat  # lists of messages", f"    {kind.title()}\n    | Chat  # lists of messages")
    workspace = Workspace(tmp_path / "project").one("rows.jsonl", records, format={"kind": kind})
    made = engine.build(workspace.config, tmp_path / "built", QUESTIONS, (("plan",), ("build",), ("verify",)))
    assert kind in made["kinds"]
    assert f'"const": "{kind}"' in made["schema"], "editors complete the name of the kind"
    return made


@pytest.mark.campaign
def test_kind_that_builds_its_own_tokens_is_built_to_partitions(tmp_path: Path) -> None:
    examples = [[i, i + 1, i + 2] for i in range(3, 15)]

    made = build_with(tmp_path, "ready", READY, [{"ids": ids} for ids in examples])

    assert sorted(made["examples"]) == [[ids, [False, True, True]] for ids in examples]
    assert made["ranks"] == 3 * len(examples)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_kind_declares_existing_groups_and_options(kind: type[DatasetKind]) -> None:
    assert set(OPTION_GROUPS) >= kind.GROUPS
    for group, fields in kind.FIELDS_NOT_READ.items():
        assert group in kind.GROUPS, "a group that is not read has no options to name"
        assert fields <= set(OPTION_GROUPS[group].model_fields)
    assert set(kind.ALIASES.values()) <= set(kind.model_fields)
    assert set(kind.FILLED_IN) <= set(kind.model_fields)


def test_only_a_kind_depends_on_its_name() -> None:
    """Differences between kinds are declarations or hooks of the kind's class."""
    found: list[str] = []
    for package in ("pipelines/rowmill", "assets"):
        for path in (ROOT / package).rglob("*.py"):
            found += [f"{path.relative_to(ROOT)}:{line}" for line in find_kind_questions(path)]

    assert found == []


def find_kind_questions(path: Path) -> list[int]:
    """Return the lines that compare a format's `kind`, or test whether a format is of a kind's class."""
    names = {kind.__name__ for kind in KINDS.values()}
    lines: list[int] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Compare(left=ast.Attribute(value=ast.Attribute(attr="format"), attr="kind")):
                lines.append(node.lineno)
            case ast.Call(func=ast.Name(id="isinstance" | "getattr"), args=[ast.Attribute(attr="format"), *_]):
                lines.append(node.lineno)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]) if path.parent.name != "core":
                asked = {one.id for one in ast.walk(kinds) if isinstance(one, ast.Name)}
                lines += [node.lineno] if asked & names else []
            case _:
                pass
    return lines


def test_registered_format_cannot_take_the_name_of_a_kind() -> None:
    class Mine(RowFormat):
        def rows(self, record: Any) -> None:
            return None

    for name in (*KINDS, *KIND_ALIASES):
        with pytest.raises(ValueError, match="names must be unique"):
            register_format(name)(Mine)
