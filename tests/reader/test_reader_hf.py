"""Rank shards in other people's hands: Hugging Face `datasets` reads them with no glue."""

import os
from functools import partial
from pathlib import Path

import pytest

from tests.support.reader_builds import make, open_reader


@pytest.mark.slow
def test_datasets_loads_ranks_as_their_sequences_in_the_order_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    texts = {"texts": {"source": {"train_urls": ["texts.jsonl"]}, "format": {"kind": "text"}}}
    root = make(tmp_path / "project", datasets=texts, partitions={"world_size": 2})
    load_parquet = partial(datasets.load_dataset, "parquet", split="train", cache_dir=str(tmp_path))
    reader = open_reader(root, 1, 2)
    rows = load_parquet(data_files=reader.data_files["rank-00001-of-00002"])

    assert len(rows) == len(reader)
    for i, row in enumerate(rows):
        for name in ("input_ids", "labels", "position_ids", "seq_lengths"):
            assert row[name] == getattr(reader[i], name).tolist()
    import datasets

    one = open_reader(root)
    rows = datasets.interleave_datasets([load_parquet(data_files=files) for files in one.data_files.values()])
    assert rows["input_ids"][:] == [one[i].input_ids.tolist() for i in range(len(one))]
    rows = load_parquet(data_files=os.fspath(root / "tiny/gpu_partitions/parts/*/rank-*-of-00002/data/*.parquet"))
    readers = [open_reader(root, rank, 2) for rank in range(2)]
    expected = [reader[i].input_ids.tolist() for reader in readers for i in range(len(reader))]
    assert sorted(rows["input_ids"]) == sorted(expected)
