"""Beginning a project: the recipe that is written loads and reads the data it was made from; no file is overwritten."""

import gzip
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowmill.core.errors import ConfigError, SourceError
from rowmill.recipe.new_project import NewProject, create_project
from rowmill.recipe.recipe import Recipe, load_recipe

TOKENIZER = str(Path(__file__).resolve().parents[2] / "configs/demo/tokenizer")
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
PAIR = {"question": "1 + 1", "answer": "2"}


def write_lines(path: Path, *records: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def create(folder: Path, *data: str, name: str | None = None, tokenizer: str = TOKENIZER) -> NewProject:
    return create_project(folder, data, name=name, tokenizer=tokenizer, seq_len=512)


def load(made: NewProject) -> Recipe:
    return load_recipe(made.recipe)


def formats(made: NewProject) -> dict[str, str]:
    return {name: one.format.kind for name, one in load(made).datasets.items()}


def urls(made: NewProject, dataset: str) -> list[str]:
    return load(made).datasets[dataset].source.model_dump()["train_urls"]


def test_recipe_of_every_kind_of_file(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_lines(data / "chats.jsonl", CHAT, CHAT)
    (data / "pairs.json").write_text(json.dumps([PAIR, PAIR]), encoding="utf-8")
    (data / "table.csv").write_text("city;rain\nOslo;3\nRome;1\n", encoding="utf-8")
    (data / "book.txt").write_text("Once upon a time.\n", encoding="utf-8")
    (data / "more.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "a", "year": 1}).encode()))
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["b"]}), data / "tasks.parquet")

    made = create(tmp_path)
    assert made.name == tmp_path.name
    assert formats(made) == {
        "book": "text", "chats": "chat", "more": "text", "pairs": "supervised", "table": "records",
        "tasks": "supervised",
    }  # fmt: skip
    assert load(made).seq_len == 512
    assert (tmp_path / "workspace.yaml").is_file()
    assert (tmp_path / ".gitignore").read_text(encoding="utf-8").split() == [".rowmill/", ".dagster/"]


def test_dataset_of_which_nothing_trains_is_named_with_why(tmp_path: Path) -> None:
    write_lines(tmp_path / "asks.jsonl", *[{"prompt": "1 + 1", "ground_truth": 2}] * 2)
    write_lines(tmp_path / "pairs.jsonl", *[{"question": "1 + 1", "answer": 2}] * 2)

    asks, pairs = create(tmp_path, "asks.jsonl"), create(tmp_path, "pairs.jsonl")

    assert (asks.untrained, pairs.untrained) == (["asks"], [])
    assert (formats(asks), formats(pairs)) == ({"asks": "prompts"}, {"pairs": "supervised"})
    assert "nothing of them trains" in asks.recipe.read_text(encoding="utf-8")


def test_files_that_are_alike_are_one_dataset_and_later_ones_join_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_lines(tmp_path / f"chats/{name}.jsonl", CHAT)

    folder, pattern = create(tmp_path, "chats"), create(tmp_path, "chats/*.jsonl", name="second")
    assert urls(folder, "chats") == ["chats"]
    assert urls(pattern, "a") == ["chats/*.jsonl"]


def test_files_of_one_name_are_two_datasets(tmp_path: Path) -> None:
    write_lines(tmp_path / "one/rows.jsonl", CHAT)
    write_lines(tmp_path / "two/rows.jsonl", PAIR)
    made = create(tmp_path, "one/rows.jsonl", "two/rows.jsonl", name="both")
    assert formats(made) == {"rows": "chat", "rows_2": "supervised"}


@pytest.mark.parametrize("file", ["2024-chats (final).jsonl", "données.jsonl", "-.jsonl"])
def test_any_file_name_becomes_a_name(file: str, tmp_path: Path) -> None:
    write_lines(tmp_path / file, CHAT)
    assert formats(create(tmp_path, file)).values()


def test_absolute_path_below_the_project_is_written_as_relative(tmp_path: Path) -> None:
    write_lines(tmp_path / "data/chats.jsonl", CHAT)
    made = create(tmp_path, str(tmp_path / "data/chats.jsonl"))
    assert urls(made, "chats") == ["data/chats.jsonl"]


def test_column_names_cannot_leave_their_comment(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", {"a\nseed: 7\n#": 1, "b: [": 2})
    assert load(create(tmp_path, "rows.jsonl")).seed == 0


def test_tokenizer_without_a_template_gets_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "chats.jsonl", CHAT)
    (tmp_path / "plain").mkdir()
    for file in Path(TOKENIZER).iterdir():
        text = file.read_text(encoding="utf-8")
        if file.name == "tokenizer_config.json":
            text = json.dumps({key: value for key, value in json.loads(text).items() if key != "chat_template"})
        if file.name != "chat_template.jinja":
            (tmp_path / "plain" / file.name).write_text(text, encoding="utf-8")

    with_one, without = create(tmp_path, "chats.jsonl"), create(tmp_path, "chats.jsonl", name="b", tokenizer="plain")
    assert load(with_one).datasets["chats"].template.chat_template is None
    assert load(without).datasets["chats"].template.chat_template == "chatml"


# ── Nothing is overwritten ──
def test_recipe_that_exists_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    write_lines(tmp_path / "chats.jsonl", CHAT)
    made = create(tmp_path, "chats.jsonl")
    made.recipe.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"chats\.yaml: exists already, and init overwrites nothing; .* --name"):
        create(tmp_path, "chats.jsonl")
    assert made.recipe.read_text(encoding="utf-8") == "mine"


def test_other_files_that_exist_are_left_alone(tmp_path: Path) -> None:
    write_lines(tmp_path / "chats.jsonl", CHAT)
    for name, text in (("workspace.yaml", "load_from: []\n"), (".gitignore", "*.pyc\n/.dagster\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")

    made = create(tmp_path, "chats.jsonl")
    assert {path.name: len(missing) for path, missing in made.kept.items()} == {"workspace.yaml": 1, ".gitignore": 1}
    assert made.kept[tmp_path / ".gitignore"] == [".rowmill/"]
    assert (tmp_path / ".gitignore").read_text(encoding="utf-8") == "*.pyc\n/.dagster\n"
    assert (tmp_path / "workspace.yaml").read_text(encoding="utf-8") == "load_from: []\n"


# ── What cannot be begun ──
def test_no_data_is_an_error_that_names_the_readable_kinds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no data is named, and there is no folder data/ here; .*\.jsonl.*\.txt"):
        create(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_data_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"found no data at chats\.jsonl"):
        create(tmp_path, "chats.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no record could be read from its start; expected"),
        ('{"a": 1, "a": 2}\n', r"from its start \(line 1: duplicate_key: the key 'a' is repeated\); expected"),
        ('{"turns": ["a"]}\n', r"no known format .*columns: turns"),
        ('{"promptt": "Why?", "response": "So."}\n', r"no known format .*; did you mean prompt\?$"),
    ],
)
def test_file_that_cannot_be_guessed_is_an_error(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        create(tmp_path, "rows.jsonl")
    assert not (tmp_path / "configs").exists()


def test_file_of_an_unknown_suffix_is_an_error_of_the_argument(tmp_path: Path) -> None:
    (tmp_path / "rows.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match=r"rowmill init: 'rows\.zip' has no known suffix; allowed are .*; rename"):
        create(tmp_path, "rows.zip")


def test_notes_of_the_hub_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_infos.json").write_text("{}", encoding="utf-8")
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps(CHAT), encoding="utf-8")

    assert formats(create(tmp_path, "data")) == {"train": "chat"}


def test_only_the_beginning_of_a_file_is_read(tmp_path: Path) -> None:
    """The end of the file is missing, which reading it would notice."""
    records = ({**CHAT, "id": i, "digest": sha256(str(i).encode()).hexdigest()} for i in range(9000))
    whole = gzip.compress("".join(json.dumps(one) + "\n" for one in records).encode())
    (tmp_path / "chats.jsonl.gz").write_bytes(whole[: len(whole) * 3 // 4])

    assert formats(create(tmp_path, "chats.jsonl.gz")) == {"chats": "chat"}


def test_column_without_a_name_is_named_in_the_recipe(tmp_path: Path) -> None:
    # As pandas writes a table with its index.
    (tmp_path / "rows.csv").write_text(",city,size\n0,Oslo,3\n1,Rome,4\n2,Bern,5\n", encoding="utf-8")

    made = create_project(tmp_path, ["rows.csv"], tokenizer=str(tmp_path), seq_len=64)

    text = made.recipe.read_text(encoding="utf-8")
    assert "# a column has no name in the header: name it\n" in text
    assert "source: {train_urls: [rows.csv], column_names: [c1, city, size]}\n" in text
