"""Files that are named for a split: which names count, what a source does with them, and what `init` writes."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from rowmill.build.steps import open_project
from rowmill.core.errors import ConfigError, SourceError
from rowmill.recipe.new_project import create_project
from rowmill.sources.files import Files, find_files
from rowmill.sources.split_names import find_split_name, name_split
from tests.support.recipes import CHAT, PAIR, TO_ROWS, Workspace, build_project, chat, lines, pair, write_tokenizer
from tests.support.tables import as_csv, purchases, records


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train-00000-of-00001.jsonl", "train"), ("validation-00000-of-00001.jsonl", "validation"),
        ("test-00000-of-00001.parquet", "test"), ("valid.csv", "validation"), ("dev.tsv", "validation"),
        ("squad_val2.jsonl", "validation"), ("my.eval.jsonl.gz", "test"), ("Test.CSV", "test"),
        ("evaluation 1.json", "test"), ("training_data.csv", "train"), ("split=test/0.parquet", "test"),
        ("train/0.jsonl", "train"), ("test/train.jsonl", "test"), ("test/fold1/data.jsonl", "test"),
        ("val-set/0.jsonl", "validation"), ("dev_test.jsonl", "test"),
        # `datasets` took a word within a word for a split (huggingface/datasets#3788).
        ("www_farodevigo_es.jsonl.gz", None), ("latest.jsonl", None), ("contest.jsonl", None), ("device.csv", None),
        ("retrain.jsonl", None), ("devtest.jsonl", None), ("train_test_logs.jsonl", None), ("rows.jsonl", None),
    ],
)  # fmt: skip
def test_name_means_a_split_by_whole_words_only(path: str, split: str | None) -> None:
    assert name_split(path) == split


@pytest.mark.parametrize(
    ("pattern", "url", "split"),
    [
        ("data", "data/test.jsonl", "test"), ("data/", "data/dev/0.jsonl", "validation"),
        ("data/*.jsonl", "data/test.jsonl", "test"), ("s3://b/data/**", "s3://b/data/val/0.jsonl", "validation"),
        ("data/*/0.jsonl", "data/val/0.jsonl", "validation"),
        # Written out, a name is what the recipe says (huggingface/datasets#5778).
        ("data/test.jsonl", "data/test.jsonl", None), ("test/", "test/0.jsonl", None),
        ("home/test/data/*.jsonl", "home/test/data/0.jsonl", None), ("data/test-*.jsonl", "data/test-0.jsonl", None),
        ("test/*.jsonl", "test/train.jsonl", "train"),
    ],
)  # fmt: skip
def test_only_what_a_url_leaves_open_names_a_split(pattern: str, url: str, split: str | None) -> None:
    assert find_split_name(pattern, url) == split


NAMED = {"train": "train-00000-of-00001", "validation": "validation-00000-of-00001", "test": "test-00000-of-00001"}


def write_splits(workspace: Workspace, form: str = "{}.jsonl", **counts: int) -> Path:
    """Write a file of chats for each split into the folder `data/set`; return the project's folder."""
    numbers = iter(range(1000))
    for split, count in counts.items():
        workspace.write(f"set/{form.format(NAMED.get(split, split))}", [chat(next(numbers)) for _ in range(count)])
    return workspace.folder


@pytest.mark.parametrize("pattern", ["data/set", "data/set/*.jsonl", "data/**/*.jsonl"])
def test_folder_that_mixes_splits_is_refused_until_the_recipe_says_otherwise(tmp_path: Path, pattern: str) -> None:
    folder = write_splits(Workspace(tmp_path), train=3, validation=2, test=2)

    with pytest.raises(ConfigError) as refused:
        find_files(Files(train_urls=[pattern]), folder)

    said = str(refused.value)
    assert said.startswith(f"{pattern}: 2 of its 3 files are named for another split than source.train_urls")
    assert "data/set/test-00000-of-00001.jsonl (test), data/set/validation-00000-of-00001.jsonl (validation)" in said
    assert "allowed are files of that split" in said
    assert "name the files of each split apart (train_urls, validation_urls, test_urls)" in said
    assert len(find_files(Files(train_urls=[pattern], named_splits="ignore"), folder)) == 3


def test_folders_named_for_splits_are_refused_as_files_are(tmp_path: Path) -> None:
    """A folder `val/` was not known as validation (huggingface/datasets#4895)."""
    folder = write_splits(Workspace(tmp_path), "{}/0.jsonl", train=1, val=1)

    with pytest.raises(ConfigError, match=r"1 of its 2 files is named .*: data/set/val/0.jsonl \(validation\)"):
        find_files(Files(train_urls=["data/set"]), folder)
    Workspace(tmp_path).write("other/train/test.jsonl", [chat(1)])
    with pytest.raises(ConfigError, match=r"than source.validation_urls"):
        find_files(Files(train_urls=["data/set/train"], validation_urls=["data/other/train/*.jsonl"]), folder)


def test_files_that_are_named_one_by_one_are_what_the_recipe_says(tmp_path: Path) -> None:
    folder = write_splits(Workspace(tmp_path), train=1, validation=1, test=1)
    source = Files(
        train_urls=["data/set/test-00000-of-00001.jsonl", "data/set/{train,validation}-00000-of-00001.jsonl"]
    )

    assert [file.split_hint for file in find_files(source, folder)] == [None] * 3


# ── A source with test rows of its own ──


@pytest.mark.parametrize("kind", ["chats", "pairs", "table", "groups"])
@pytest.mark.parametrize("with_validation", [False, True])
def test_rows_of_a_test_source_are_test_and_no_others_are(tmp_path: Path, kind: str, with_validation: bool) -> None:
    workspace = Workspace(tmp_path)
    forms: dict[str, tuple[Any, Any]] = {
        "chats": (CHAT, chat), "pairs": (PAIR, pair),
        "table": ({"kind": "records"}, lambda i: {"who": i // 4, "amount": i * i % 97, "what": f"thing {i}"}),
        "groups": ({"kind": "records", "data": {"group_training_examples_by": "who", "max_sequences_per_example": 1}},
                   lambda i: {"who": i // 4, "amount": i * i % 97, "what": f"thing {i}"}),
    }  # fmt: skip
    form, make = forms[kind]
    source = {
        "train_urls": [workspace.write("a.jsonl", [make(i) for i in range(200)])],
        "test_urls": [workspace.write("b.jsonl", [make(i) for i in range(200, 220)])],
    }
    if with_validation:
        source["validation_urls"] = [workspace.write("c.jsonl", [make(i) for i in range(220, 230)])]
    dataset = {"source": source, "format": form, "splits": {"validation": 0.2}, "filters": {"deduplicate": "off"}}

    built = workspace.recipe({"rows": dataset}).build(only=TO_ROWS)

    counts = Counter(row["split"] for row in built.rows_of("rows", "canonical_rows", file="rows"))
    assert counts["test"] == 20
    if with_validation:
        assert counts == {"train": 200, "validation": 10, "test": 20}
    else:
        assert counts["validation"] == pytest.approx(40, abs=24)
        assert counts["train"] == 200 - counts["validation"]


def test_test_rows_train_nowhere_and_their_leaks_are_found(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    source = {
        "train_urls": [workspace.write("a.jsonl", [chat(i) for i in range(60)])],
        "test_urls": [workspace.write("b.jsonl", [chat(i) for i in range(58, 64)])],
    }
    dataset = {"source": source, "format": CHAT, "filters": {"deduplicate": "off"}}

    built = workspace.recipe({"rows": dataset}).build(only=("raw_dataset", "canonical_rows", "tokenized_examples",
        "truncation_stats", "packed_shards", "training_splits"))  # fmt: skip

    assert built.facts("training_splits")["split_share"] == 0
    assert built.outcomes("training_splits")["same_row"] == "failed"


def test_test_share_beside_test_rows_is_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    source = {
        "train_urls": [workspace.write("a.jsonl", [chat(1)])],
        "test_urls": [workspace.write("b.jsonl", [chat(2)])],
    }
    made = workspace.recipe({"rows": {"source": source, "format": CHAT, "splits": {"test": 0.1}}})

    with pytest.raises(
        ConfigError, match=r"datasets.rows.splits.test: 0.1 beside source.test_urls; only one of the two"
    ):
        _ = made.project
    defaults = {"splits": {"test": 0.1}}
    inherited = workspace.recipe({"rows": {"source": source, "format": CHAT}}, defaults=defaults).project
    assert inherited.recipe.datasets["rows"].splits.test == 0


def test_splits_by_time_beside_test_rows_are_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    table = as_csv(purchases(40))
    source = {"train_urls": [workspace.write("a.csv", table)], "test_urls": [workspace.write("b.csv", table)]}
    dataset = {"source": source, "format": records(), "splits": {"time_key": "date", "validation": 0.1}}

    with pytest.raises(ConfigError, match=r"rows for test of its own; .*delete time_key"):
        workspace.recipe({"rows": dataset}).build(only=TO_ROWS)


# ── The datasets library's own splits ──


@pytest.mark.slow
def test_test_split_of_a_hub_dataset_is_read_only_where_it_is_named(tmp_path: Path) -> None:
    folder = write_splits(Workspace(tmp_path), train=40, validation=5, test=7)
    workspace = Workspace(folder)

    def count(**source: Any) -> Counter[str]:
        dataset = {"source": {"id": "data/set", **source}, "format": CHAT}
        built = workspace.recipe({"rows": dataset}).build(only=TO_ROWS)
        return Counter(row["split"] for row in built.rows_of("rows", "canonical_rows", file="rows"))

    assert count() == {"train": 40, "validation": 5}
    for _ in range(2):
        assert count(test_split="test") == {"train": 40, "validation": 5, "test": 7}
    assert count() == {"train": 40, "validation": 5}
    with pytest.raises(SourceError, match="each must be another"):
        count(test_split="validation")
    with pytest.raises(SourceError, match="has no split 'check'"):
        count(test_split="check")


# ── What init writes ──


def read_source(folder: Path, *data: str) -> dict[str, Any]:
    """Run `init` on data; return the source of the only dataset, and its recipe's text as `text`."""
    write_tokenizer(folder / "tokenizer")
    made = create_project(folder, list(data), tokenizer="tokenizer", seq_len=256)
    text = made.recipe.read_text(encoding="utf-8")
    (dataset,) = yaml.safe_load(text)["datasets"].values()
    return {**dataset["source"], "text": text}


def test_init_names_the_files_of_each_split_and_says_so(tmp_path: Path) -> None:
    folder = write_splits(Workspace(tmp_path), train=12, validation=3, test=4)

    source = read_source(folder, "data/set")

    text = source.pop("text")
    assert source == {f"{split}_urls": [f"data/set/{name}.jsonl"] for split, name in NAMED.items()}
    assert "files are named for their split: those of validation and test never train" in " ".join(text.split())
    project = open_project(folder / "configs" / "set.yaml", None)
    rows = build_project(project, only=TO_ROWS).rows_of("set", "canonical_rows", file="rows")
    assert Counter(row["split"] for row in rows) == {"train": 12, "validation": 3, "test": 4}


def test_init_shortens_the_files_of_a_split_to_a_folder_or_glob(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    for i in range(3):
        workspace.write(f"set/train-{i}.jsonl", [chat(i)])
        workspace.write(f"set/held/dev/{i}.jsonl", [chat(10 + i)])

    source = read_source(tmp_path, "data/set")

    assert source["train_urls"] == ["data/set/train-*.jsonl"]
    assert source["validation_urls"] == ["data/set/held/dev"]
    files = find_files(Files(train_urls=source["train_urls"], validation_urls=source["validation_urls"]), tmp_path)
    assert [file.split_hint for file in files] == ["train"] * 3 + ["validation"] * 3


def test_init_reads_files_that_a_shell_lists_as_it_reads_their_folder(tmp_path: Path) -> None:
    folder = write_splits(Workspace(tmp_path), train=3, test=2)
    names = [f"data/set/{NAMED[split]}.jsonl" for split in ("test", "train")]

    source = read_source(folder, *names)

    assert (source["train_urls"], source["test_urls"]) == ([names[1]], [names[0]])


def test_init_trains_a_single_file_that_is_named_whatever_its_name(tmp_path: Path) -> None:
    """A path that is written out is read as train (huggingface/datasets#5778)."""
    folder = write_splits(Workspace(tmp_path), test=3)

    assert read_source(folder, f"data/set/{NAMED['test']}.jsonl")["train_urls"] == [f"data/set/{NAMED['test']}.jsonl"]
    with pytest.raises(ConfigError, match="holds only files that are named for held-out splits"):
        create_project(folder, ["data/set"], name="other", tokenizer="tokenizer", seq_len=256)


def test_init_leaves_out_held_out_files_of_another_form(tmp_path: Path) -> None:
    """Competitions give a test file without its answers."""
    workspace = Workspace(tmp_path)
    workspace.write("set/train.jsonl", [pair(i) for i in range(5)])
    workspace.write("set/test.jsonl", lines({"prompt": pair(i)["prompt"]} for i in range(5, 8)))

    source = read_source(tmp_path, "data/set")

    assert source["train_urls"] == ["data/set/train.jsonl"]
    assert "test_urls" not in source
    assert "data/set/test.jsonl (test)" in source["text"]


def test_files_of_the_reports_are_their_splits(tmp_path: Path, real_data: Path) -> None:
    source = read_source(tmp_path, str(real_data / "reports" / "split_files"))

    assert {name: len(urls) for name, urls in source.items() if name != "text"} == {
        "train_urls": 1,
        "validation_urls": 1,
        "test_urls": 1,
    }
