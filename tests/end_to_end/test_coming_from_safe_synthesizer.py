"""The page for people who come from Safe Synthesizer: the recipes that it links build and do what it says."""

import re
from pathlib import Path
from typing import Any

import pytest

from rowmill.build import runner
from rowmill.build.steps import open_project
from rowmill.kinds.tables.parsing import GeneratedTextSpec, Parser, PlacementColumns
from rowmill.kinds.tables.schema import ELAPSED, Column, Mode, RecordSchema
from rowmill.schema.manifest import Manifest
from rowmill.stages import catalog
from rowmill.stages.packed_shards import stage as packed_shards

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs/examples/records"
PAGE = ROOT / "docs/coming-from/safe-synthesizer.md"
NAMES = ("table", "groups", "series", "private")
Builds = dict[str, dict[str, Manifest]]
"""What each stage of a recipe of the page wrote."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Build every recipe of the page as far as its shards."""
    root, stages = str(tmp_path_factory.mktemp("records")), catalog.list_stages_up_to(packed_shards.STAGE)
    steps = {name: runner.build(open_project(FOLDER / f"{name}.yaml", root), only=stages) for name in NAMES}
    return {name: {step.name: report.manifest for step, report, _ in made} for name, made in steps.items()}


def split(built: Builds, name: str, which: str = "train") -> dict[str, Any]:
    plan = built[name]["tokenized_examples"].tables["plan"]
    return next(dict(zip(plan.columns, row, strict=True)) for row in plan.rows if row[0] == which)


R = '{"g":"a","t":0,"v":1}'
SPREAD = R.replace(",", ",\n")
SCHEMA = RecordSchema((Column("g", "string"), Column("t", "integer"), Column("v", "integer")))
PLACE = PlacementColumns(("g",), "t", ELAPSED)


@pytest.mark.parametrize(
    ("row", "text", "mode", "said"),
    [
        ("Windows line ends", f"{R}\r\n{R} behind\n[{R}]\n{SPREAD}", "tabular", {"record": 4, "prose": 3}),
        ("several objects on a line", R + R, "tabular", {"record": 2}),
        ("truncated by the end of the text", R[:-3], "tabular", {"truncated": 1}),
        ("text without an object", "I cannot", "tabular", {"prose": 1}),
        ("without quoted keys", "{'g': 'a'}", "tabular", {"invalid:invalid_json": 1}),
        ("`NaN` unquoted", R.replace("1", "NaN"), "tabular", {"invalid:invalid_json": 1}),
        ("a key twice", R.replace("{", '{"g":"b",'), "tabular", {"invalid:duplicate_column": 1}),
        ("more than 4,300 digits", R.replace("1", "1" * 5000), "tabular", {"invalid:number_too_large": 1}),
        ("`01234` in a column of text", R.replace('"a"', '"01234"'), "tabular", {"record": 1}),
        ("a value that train does not have", R.replace("1", "-99999"), "tabular", {"record": 1}),
        ("records outside BOS and EOS", f"{R}\n{R}", "grouped", {"invalid:group_incomplete": 2}),
        ("records after the first bad one", f"{{}}\n{R}", "sequential",
         {"invalid:missing_column": 1, "invalid:after_failure": 1}),
        ("an earlier time", f"{R.replace('0', '5')}\n{R}", "sequential", {"record": 1, "invalid:order": 1}),
    ],
)  # fmt: skip
def test_parser_differs_from_the_original_as_the_page_says(
    row: str, text: str, mode: Mode, said: dict[str, int]
) -> None:
    parsed = Parser(GeneratedTextSpec(schema=SCHEMA, mode=mode, bos="<s>", eos="</s>", place=PLACE))(text)
    reasons = {name.removeprefix("invalid:") for name in said if name.startswith("invalid:")}
    [line] = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|") and row in line]

    assert {name: count for name, count in parsed.report.items.items() if name != "delimiter"} == said
    assert all(f"`{reason}`" in line for reason in reasons - {"missing_column"})


def test_page_links_every_recipe() -> None:
    linked = set(
        re.findall(r"\]\(\.\./\.\./configs/examples/records/([a-z]+)\.yaml\)", PAGE.read_text(encoding="utf-8"))
    )

    assert linked == {path.stem for path in FOLDER.glob("*.yaml")} == {*NAMES}


@pytest.mark.slow
def test_recipes_build_what_the_page_says(built: Builds) -> None:
    train = split(built, "table")
    assert (train["records"], train["flush_restart"]) == (400, 2)
    assert train["example_records_max"] == 10
    train, test = split(built, "groups"), split(built, "groups", "test")
    assert train["groups"] + test["groups"] == 24
    assert train["example_groups_max"] == 4
    assert abs(test["records"] - 10) <= 2
    made = built["series"]["tokenized_examples"]
    assert split(built, "series")["groups"] == 4
    assert split(built, "series")["flush_budget"] > 0
    assert made.details["records"]["interval_seconds"] == "3600"
    assert len(made.files("prefill")) == 1
    facts = built["private"]["packed_shards"].facts
    assert split(built, "private")["example_groups_max"] == 1
    assert facts["sequences"] == facts["segments"]
