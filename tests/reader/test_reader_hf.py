"""Rank shards in other people's hands: Hugging Face `datasets` reads them with no glue."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.reader_builds import make, open_reader


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a recipe of one dataset for two ranks."""
    texts = {"texts": {"source": {"train_urls": ["texts.jsonl"]}, "format": {"kind": "text"}}}
    return make(tmp_path_factory.mktemp("hf") / "project", datasets=texts, partitions={"world_size": 2})


@pytest.fixture
def load_parquet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that loads Parquet files with `datasets`, offline and with a cache of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    return lambda files: datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path))


@pytest.mark.slow
def test_shards_of_a_rank_load_as_its_sequences(root: Path, load_parquet: Any) -> None:
    reader = open_reader(root, 1, 2)
    rows = load_parquet(reader.data_files["rank-00001-of-00002"])

    assert len(rows) == len(reader)
    for i, row in enumerate(rows):
        for name in ("input_ids", "labels", "position_ids", "seq_lengths"):
            assert row[name] == getattr(reader[i], name).tolist()


def test_interleaved_ranks_are_the_order_of_training(root: Path, load_parquet: Any) -> None:
    import datasets

    one = open_reader(root)
    rows = datasets.interleave_datasets([load_parquet(files) for files in one.data_files.values()])
    assert rows["input_ids"][:] == [one[i].input_ids.tolist() for i in range(len(one))]


def test_glob_over_all_ranks_loads_every_sequence_once(root: Path, load_parquet: Any) -> None:
    rows = load_parquet(os.fspath(root / "tiny/gpu_partitions/parts/*/rank-*-of-00002/data/*.parquet"))
    readers = [open_reader(root, rank, 2) for rank in range(2)]
    expected = [reader[i].input_ids.tolist() for reader in readers for i in range(len(reader))]
    assert sorted(rows["input_ids"]) == sorted(expected)
