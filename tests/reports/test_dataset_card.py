"""The dataset card says what is published, is valid Croissant, and states no licence that the recipe does not."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rowmill.build.steps import plan_steps
from rowmill.cli import main
from rowmill.core.errors import ConfigError, DamagedFileError, GateError, IntegrityError
from rowmill.reader import Reader
from rowmill.recipe import recipe
from rowmill.reports.dataset_card import describe_record_set, write_card
from tests.support.recipes import LENIENT, TEXT, Workspace, chat, document

pytestmark = pytest.mark.slow
CHATS, TEXTS = 40, 25


def write_project(folder: Path, *, licenses: Sequence[str | None] = ("cc-by-4.0", "mit"), **changes: Any) -> Workspace:
    """Write a project of chats and texts, some chats held out, whose sources have these licences."""
    workspace = Workspace(folder)
    rows = {"chats": [*(chat(i) for i in range(CHATS)), chat(0)], "texts": [document(i) for i in range(TEXTS)]}
    told, filters = {"license": licenses[0], "tags": ["dialogue"]}, {"min_chars": 5}
    datasets = {
        "chats": workspace.dataset("chats.jsonl", rows["chats"], source=told, splits={"validation": 0.2}),
        "texts": workspace.dataset(
            "texts.jsonl", rows["texts"], TEXT, source={"license": licenses[1]}, filters=filters
        ),
    }
    exports = [{"kind": "hf", "name": "rows"}]
    return workspace.recipe(datasets, **({"exports": exports} | changes))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a built project, whose cards no test changes."""
    workspace = write_project(tmp_path_factory.mktemp("card"))
    workspace.build()
    write_card(workspace.project)
    return workspace


def read_card(folder: Path) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Return a card's front matter, its text, and the Croissant."""
    _, front_matter, body = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front_matter), body, json.loads((folder / "croissant.json").read_text(encoding="utf-8"))


def read_table(body: str, title: str) -> list[list[str]]:
    """Return the rows of the first table of a section."""
    section = body.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = re.search(r"(?:^\|.*\n?)+", section, re.MULTILINE)
    assert lines is not None
    return [line.strip("| ").split(" | ") for line in lines[0].splitlines()[2:]]


def test_card_has_the_counts_and_digest_of_the_published_build_and_its_recipe_makes_it(built: Workspace) -> None:
    front_matter, body, _ = read_card(built.store / "mini")
    identity = Reader(str(built.store), "mini", rank=0, world_size=1).identity
    assert front_matter["license"] == ["cc-by-4.0", "mit"]
    assert front_matter["size_categories"] == ["n<1K"]
    assert front_matter["tags"][:4] == ["rowmill", "chat", "text", "dialogue"]
    assert f"| digest | {identity['digest']} |" in body
    assert f"| version | {identity['version']} |" in body
    assert [row[:5] for row in read_table(body, "Sources")] == [
        ["chats", "data/chats.jsonl", "cc-by-4.0", "1", "41"],
        ["texts", "data/texts.jsonl", "mit", "1", "25"],
    ]
    counts = {name: line for name, *line in read_table(body, "Counts")}
    assert counts["chats"][:3] == ["41", "40", "1"]
    assert {tuple(row[:2]) for row in read_table(body, "Splits")} >= {("chats", "validation"), ("texts", "train")}
    assert "| chats | canonical_rows | rejected | duplicate | 1 |" in body
    assert '| texts | min_chars: 5; deduplicate: "exact" |' in body
    [text] = re.findall(r"```yaml\n(.*?)```", body, re.DOTALL)
    project = built.project
    again = recipe.parse_recipe(yaml.safe_load(text), name="mini", where="card", base=project.base)
    made = project.__class__(again, project.store, project.base)
    assert [step.code_version for step in plan_steps(made)] == [step.code_version for step in plan_steps(project)]


def test_files_that_card_and_croissant_name_are_those_of_the_build(built: Workspace) -> None:
    folder = built.store / "mini"
    front_matter, body, croissant = read_card(folder)
    splits = {(row[0], row[1]): int(row[3]) for row in read_table(body, "Splits")}
    found = {
        (config["config_name"], one["split"]): sum(pq.read_metadata(folder / path).num_rows for path in one["path"])
        for config in front_matter["configs"]
        for one in config["data_files"]
    }
    assert found == {key: count for key, count in splits.items() if count}
    files = {one["contentUrl"]: one for one in croissant["distribution"] if one["@type"] == "cr:FileObject"}
    shards = {path.relative_to(folder).as_posix() for path in folder.glob("*/packed_shards/parts/*/data/*/*.parquet")}
    assert shards
    assert shards < files.keys()
    assert any("exports/rows/" in path for path in files)
    for path, one in files.items():
        content = (folder / path).read_bytes()
        assert one["sha256"] == hashlib.sha256(content).hexdigest()
        assert one["contentSize"] == f"{len(content)} B"
    assert {one["license"] for one in croissant["isBasedOn"]} == {"cc-by-4.0", "mit"}


def test_shards_without_tokens_are_described_with_the_examples_that_have_them(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    rows = {"index": [chat(i) for i in range(9)], "own": [chat(i) for i in range(20, 29)], "none": [{"messages": []}]}
    mit = {"license": "mit"}
    datasets = {name: workspace.dataset(f"{name}.jsonl", of_it, source=mit) for name, of_it in rows.items()}
    datasets["index"]["packing"] = {"layout": "index"}
    workspace.recipe(datasets).build()
    write_card(workspace.project)
    folder = workspace.store / "mini"
    front_matter, _, croissant = read_card(folder)

    # The hub can load neither shards without tokens nor a set without files.
    assert [config["config_name"] for config in front_matter["configs"]] == ["own"]
    files = {one["@id"]: one for one in croissant["distribution"] if one["@type"] == "cr:FileObject"}
    [shard] = [one for name, one in files.items() if name.startswith("index/train/")]
    [examples] = [one for name, one in files.items() if name.startswith("index/examples/")]
    assert "input_ids" not in pq.read_schema(folder / shard["contentUrl"]).names
    with pa.ipc.open_file(folder / examples["contentUrl"]) as opened:
        assert opened.read_all().column("input_ids").null_count == 0
    assert examples["encodingFormat"] == "application/vnd.apache.arrow.file"
    assert not [name for name in files if name.startswith("own/examples/")]


# pandas and rdflib, which mlcroissant reads with, warn of their own future.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_mlcroissant_finds_no_error_and_reads_the_sequences(built: Workspace) -> None:
    mlcroissant = pytest.importorskip("mlcroissant", reason="mlcroissant is not installed: pip install 'rowmill[test]'")
    dataset = mlcroissant.Dataset(str(built.store / "mini/croissant.json"))
    issues = dataset.metadata.issues
    assert not issues.errors
    # The recipe does not say how a dataset is cited, and a card does not make it up.
    assert [line for line in issues.warnings if "citeAs" not in line] == []
    [shard] = (built.store / "mini").glob("texts/packed_shards/parts/*/data/train/*.parquet")
    read = [list(row["texts/train/input_ids"]) for row in dataset.records("texts/train")]
    assert read == pq.read_table(shard, columns=["input_ids"], partitioning=None).column(0).to_pylist()
    assert {one.uuid for one in dataset.metadata.record_sets} >= {"chats/train", "chats/validation", "texts/train"}


# As above.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_lists_of_lists_are_described_and_read_and_other_columns_are_named(tmp_path: Path) -> None:
    mlcroissant = pytest.importorskip("mlcroissant", reason="mlcroissant is not installed: pip install 'rowmill[test]'")
    workspace = Workspace(tmp_path)
    scored = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1], "top": [[0, 0], [1, 2], [3, 4], [5, 6]]}
    form = {"kind": "tokens", "token_fields": {"top": {"type": "int32", "size": 2}}}
    dataset = workspace.dataset("scored.jsonl", [scored], form, source={"license": "mit"})
    workspace.recipe({"scored": dataset}).build()
    write_card(workspace.project)
    _, _, croissant = read_card(workspace.store / "mini")

    [records] = [one for one in croissant["recordSet"] if one["name"] == "scored/train"]
    fields = {field["name"]: field for field in records["field"]}
    assert (fields["input_ids"]["isArray"], fields["input_ids"]["arrayShape"]) == (True, "-1")
    assert (fields["top"]["dataType"], fields["top"]["arrayShape"]) == ("sc:Integer", "-1,2")
    assert "description" not in records
    dataset = mlcroissant.Dataset(str(workspace.store / "mini/croissant.json"))
    assert not dataset.metadata.issues.errors
    [row] = dataset.records("scored/train")
    assert [list(pair) for pair in row["scored/train/top"]] == scored["top"]


def test_column_that_is_not_described_is_named() -> None:
    schema = pa.schema(
        {"ids": pa.large_list(pa.list_(pa.list_(pa.int32(), 3))), "turns": pa.list_(pa.struct({"a": pa.string()}))}
    )
    described = describe_record_set("rows/train", schema)

    [field] = described["field"]
    assert (field["name"], field["arrayShape"]) == ("ids", "-1,-1,3")
    assert described["description"] == "Columns that are not described: turns (list<item: struct<a: string>>)."


def test_card_is_the_same_twice_and_elsewhere_points_at_the_same_files(built: Workspace, tmp_path: Path) -> None:
    before = {name: (built.store / "mini" / name).read_bytes() for name in ("README.md", "croissant.json")}

    assert main.main(["card", str(built.config), "--out", str(tmp_path / "public")]) == 0
    write_card(built.project)

    assert before == {name: (built.store / "mini" / name).read_bytes() for name in before}
    front_matter, _, croissant = read_card(tmp_path / "public")
    assert "configs" not in front_matter
    for one in croissant["distribution"]:
        assert one["@type"] == "cr:FileSet" or (tmp_path / "public" / one["contentUrl"]).is_file()


def test_missing_licence_is_asked_for_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = write_project(tmp_path, licenses=("cc-by-4.0", None))
    workspace.build()

    assert main.main(["card", str(workspace.config)]) == 2

    assert "mini: datasets.texts.source: no license; a card states" in capsys.readouterr().err
    assert not (workspace.store / "mini/README.md").exists()


def test_licence_stated_later_changes_no_version(built: Workspace, tmp_path: Path) -> None:
    bare = write_project(tmp_path, licenses=(None, None)).build().versions()
    licensed = write_project(tmp_path, licenses=("unknown", "My Data Licence")).build()

    assert licensed.versions() == bare
    assert licensed.made() == set()
    write_card(licensed.project)
    front_matter, _, croissant = read_card(tmp_path / ".rowmill/mini")
    assert front_matter["license"] == ["unknown", "other"]
    assert front_matter["license_name"] == "My Data Licence"
    assert croissant["license"] == ["unknown", "My Data Licence"]


def test_card_describes_what_trainers_read_while_a_newer_build_is_blocked(tmp_path: Path) -> None:
    workspace = write_project(tmp_path, gates=LENIENT | {"rejects": {"at_most": 0.3}})
    workspace.build()
    published = Reader(str(workspace.store), "mini", rank=0, world_size=1).identity["version"]
    workspace.write("chats.jsonl", [*(chat(i) for i in range(CHATS)), *({"messages": 7} for _ in range(90))])
    with pytest.raises(GateError):
        workspace.build()

    write_card(workspace.project)

    _, body, _ = read_card(workspace.store / "mini")
    assert f"| version | {published} |" in body
    assert read_table(body, "Sources")[0][4] == "41"


def test_changed_recipe_unpublished_build_and_damaged_shard_are_refused(tmp_path: Path) -> None:
    workspace = write_project(tmp_path)
    with pytest.raises(IntegrityError, match="run `rowmill build`"):
        write_card(workspace.project)
    workspace.build()
    write_project(tmp_path, seed=3)
    with pytest.raises(ConfigError, match="the recipe changed since the published build"):
        write_card(workspace.project)
    write_project(tmp_path)
    [shard] = (workspace.store / "mini").glob("texts/packed_shards/parts/*/data/train/*.parquet")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedFileError, match=r"part-00000\.parquet"):
        write_card(workspace.project)
    assert not (workspace.store / "mini/README.md").exists()
