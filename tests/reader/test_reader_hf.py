"""Rank shards in other people's hands: Hugging Face `datasets` reads them with no glue."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rowmill.build import runner, steps
from rowmill.reader import Reader

# Great Expectations, which judges the build, imports a module that Python 3.11 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning")

TOKENIZER = Path(__file__).resolve().parents[2] / "configs" / "demo" / "tokenizer"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a recipe of one dataset for two ranks."""
    folder = tmp_path_factory.mktemp("hf")
    (folder / "configs").mkdir()
    texts = [{"text": f"Document {i}: " + "the sum of the parts. " * (1 + i % 9)} for i in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in texts), encoding="utf-8")
    recipe = {
        "tokenizer": str(TOKENIZER),
        "seq_len": 64,
        "defaults": {"splits": {"validation": 0, "test": 0}},
        "datasets": {"texts": {"source": {"train_urls": ["texts.jsonl"]}, "format": {"kind": "text"}}},
        "partitions": {"world_size": 2},
        "gates": {"fill": {"at_least": 0}, "filler_share": {"at_most": 1}, "rank_balance": {"at_most": 9}},
        "execution": {"workers": 1},
    }
    (folder / "configs" / "tiny.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    runner.build(steps.open_project(folder / "configs" / "tiny.yaml", str(folder / "built")))
    return folder / "built"


@pytest.fixture
def load_parquet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that loads Parquet files with `datasets`, offline and with a cache of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    return lambda files: datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path))


@pytest.mark.slow
def test_shards_of_a_rank_load_as_its_sequences(root: Path, load_parquet: Any) -> None:
    reader = Reader(root, "tiny", rank=1, world_size=2, as_torch=False)
    rows = load_parquet(reader.data_files["rank-00001-of-00002"])

    assert len(rows) == len(reader)
    for i, row in enumerate(rows):
        assert row["input_ids"] == reader[i].input_ids.tolist()
        assert row["labels"] == reader[i].labels.tolist()
        assert row["position_ids"] == reader[i].position_ids.tolist()
        assert row["seq_lengths"] == reader[i].seq_lengths.tolist()


def test_interleaved_ranks_are_the_order_of_training(root: Path, load_parquet: Any) -> None:
    import datasets

    one = Reader(root, "tiny", rank=0, world_size=1, as_torch=False)
    rows = datasets.interleave_datasets([load_parquet(files) for files in one.data_files.values()])

    assert rows["input_ids"][:] == [one[i].input_ids.tolist() for i in range(len(one))]


def test_glob_over_all_ranks_loads_every_sequence_once(root: Path, load_parquet: Any) -> None:
    rows = load_parquet(os.fspath(root / "tiny/gpu_partitions/parts/*/rank-*-of-00002/data/*.parquet"))
    readers = [Reader(root, "tiny", rank=rank, world_size=2, as_torch=False) for rank in range(2)]
    expected = [reader[i].input_ids.tolist() for reader in readers for i in range(len(reader))]

    assert sorted(rows["input_ids"]) == sorted(expected)
