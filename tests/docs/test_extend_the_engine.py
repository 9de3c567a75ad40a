"""The page on adding to the engine is carried out: every block is applied to a copy, and its recipe is built."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.recipes import LENIENT, lines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/extend-the-engine.md"
PLACE_OR_BLOCK = re.compile(r"^`(pipelines/[\w/]+\.py)`$|^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PROGRAM = """
import contextlib, io, json, sys
from pathlib import Path
from dagster_rowmill.definitions import build_definitions
from rowmill.build import steps
from rowmill.cli import main as cli
from rowmill.recipe.recipe import json_schema
from rowmill.schema import manifest
from rowmill.stats.views import query_views

config, root = Path(sys.argv[1]), sys.argv[2]
found = {}
for command, *options in (["plan"], ["build"], ["verify", "--all"]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main([command, str(config), "--root", root, *options])
    assert status == 0, out.getvalue()
    found[command] = out.getvalue()
project = steps.open_project(config, root)
store = project.store


def query(sql):
    return query_views(store, sql)[1]


found["rows"] = query("SELECT dataset, rows FROM builds WHERE stage = 'row_census' ORDER BY 1")
found["rejects"] = query("SELECT reason, detail FROM rejects WHERE dataset = 'questions' ORDER BY 1")
found["gates"] = [
    "/".join(key) for step in steps.plan_steps(project) if step.name == "gpu_partitions" for key in step.gates
]
graph = build_definitions([config], root).resolve_asset_graph()
census = next(graph.get(key) for key in graph.get_all_asset_keys() if key.path[-1] == "cards.row_census")
found["asset"] = [census.description, sorted("/".join(key.path) for key in census.parent_keys)]
judged = "SELECT dataset, outcome, value, bound FROM check_results WHERE check_name = 'marked_questions' ORDER BY 1"
found["checks"] = query(judged)
own = [key for key in graph.asset_check_keys if key.name == "marked_questions"]
found["asked"] = sorted("/".join(key.asset_key.path) for key in own)


def read(dataset, stage, file):
    parts = manifest.load_current(store, ("both", dataset, stage)).parts
    return [one for part in parts for one in store.table(part.files[file]).to_pylist()]


found["pairs"] = {
    dataset: sorted([one["kind"], one["text"], one["output"]] for one in read(dataset, "canonical_rows", "rows"))
    for dataset in ("cards", "questions")
}
found["talks"] = [[json.loads(one["messages"]), one["kind"]] for one in read("talks", "canonical_rows", "rows")]
found["masks"] = [one["loss_mask"] for one in read("questions", "tokenized_examples", "examples")]
found["schema"] = json.dumps(json_schema())
scans = manifest.load_current(store, ("both", "cards", "raw_dataset")).details["scans"]
found["scans"] = sorted([Path(scan["url"]).name, scan["reader"], scan["columns"]] for scan in scans)
print(json.dumps(found))
"""
"""Runs the commands with the copy of the engine, and tells what they made."""


def apply_page(engine: Path) -> dict[str, Any]:
    """Write the files and make the edits of the page in a copy of the engine; return its recipe."""
    for package in ("assets", "pipelines"):
        shutil.copytree(ROOT / package, engine / package, ignore=shutil.ignore_patterns("__pycache__"))
    place, recipe = engine, ""
    for name, language, text in PLACE_OR_BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if name:
            place = engine / name
        elif language == "py":
            place.write_text(text, encoding="utf-8")
        elif language == "diff":
            diff, content = text.splitlines(keepends=True), place.read_text(encoding="utf-8")
            before, after = ("".join(line[1:] for line in diff if line[0] in kept) for kept in (" -", " +"))
            assert content.count(before) == 1, f"{place} no longer holds this once: {before}"
            place.write_text(content.replace(before, after), encoding="utf-8")
        else:
            recipe = text
    return yaml.safe_load(recipe)


def test_what_the_page_adds_is_built_verified_and_exported(tmp_path: Path) -> None:
    engine, project = tmp_path / "engine", tmp_path / "project"
    recipe = apply_page(engine)
    # Few rows: what is a share of nothing says nothing here.
    recipe["gates"] |= LENIENT | {"marked_questions": {"at_least": 1}}
    recipe["datasets"]["cards"]["source"]["train_urls"].append("data/more.cards.gz")
    for name in ("configs", "data"):
        (project / name).mkdir(parents=True)
    (project / "configs/demo").symlink_to(ROOT / "configs/demo")
    (project / "configs/both.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    questions = [{"question": f"{i} and {i}{'?' if i else ''}", "answers": [f"{i}", f"*{2 * i}"]} for i in range(12)]
    bad = [{"question": "no right answer", "answers": []}, {"question": "no answers"}]
    (project / "data/questions.jsonl").write_bytes(lines([*questions, *bad]))
    turns = [[{"role": role, "content": f"{role} {i}"} for role in ("user", "assistant")] for i in range(3)]
    talks = [[{"role": "system", "content": f"s{i}"}, *turns[0], *turns[1], *turns[2]] for i in range(6)]
    (project / "data/talks.jsonl").write_bytes(lines([{"messages": one} for one in [*talks, turns[0]]]))
    (project / "data/words.cards").write_text("".join(f"word {i}|wort {i}\n" for i in range(9)), encoding="utf-8")
    (project / "data/more.cards.gz").write_bytes(gzip.compress(b"sky|blue\n"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(project / "configs/both.yaml"), str(tmp_path / "built")],
        check=False, cwd=project, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(engine / one) for one in ("pipelines", "assets"))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert all("row_census" in made[command] for command in ("plan", "build", "verify"))
    assert "12 rows · 1 split" in made["build"]
    assert {"both/cards/row_census", "both/questions/row_census"} <= {*made["gates"]}, "each stage is a gate of ranks"
    assert made["asset"] == ["The rows of a dataset, counted once more.", ["both/cards.canonical_rows"]]
    assert made["rows"] == [["cards", 10], ["questions", 12], ["talks", 7]]
    without = [[name, "not_applicable", None, 1] for name in ("cards", "talks")]
    assert made["checks"] == [without[0], ["questions", "failed", round(11 / 12, 9), 1], without[1]]
    assert made["asked"] == [f"both/{name}.canonical_rows" for name in ("cards", "questions", "talks")]
    cut = [[[one[0], *turns[2]], "conversation"] for one in talks]
    assert made["talks"] == [*cut, [turns[0], "conversation"]], "the option is read"
    assert all("write the question mark that is missing" in made[command] for command in ("build", "verify"))
    assert '"const": "quiz"' in made["schema"], "editors complete the name of the kind"
    cards = [["pair", f"word {i}", f"wort {i}"] for i in range(9)]
    answers = sorted(["pair", one["question"], f"{2 * i}"] for i, one in enumerate(questions))
    assert made["pairs"] == {"cards": [["pair", "sky", "blue"], *cards], "questions": answers}
    assert all(0 < sum(mask) < len(mask) for mask in made["masks"]), "the answer trains, the question does not"
    columns = {"prompt": "text", "response": "text"}
    assert made["scans"] == [[name, "cards", columns] for name in ("more.cards.gz", "words.cards")]
    assert made["rejects"] == [["format_error", "KeyError: 'answers'"], ["missing_field", "0 right answers"]]
    exported = [
        json.loads(line)
        for path in (tmp_path / "built").rglob("data/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert exported
    for one in exported:
        trained = [place for place, label in enumerate(one["labels"]) if label != -100]
        assert trained
        assert len(one["input_ids"]) == len(one["labels"])
        assert [one["labels"][i] for i in trained] == [one["input_ids"][i] for i in trained], "labels are not shifted"
