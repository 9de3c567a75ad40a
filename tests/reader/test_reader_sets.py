"""The reader's sets: each dataset by itself, as it was packed; held-out ones with their tags, on every rank alike."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from rowmill.core.errors import ConfigError, IntegrityError
from rowmill.reader import PackedSequence, Reader, View
from rowmill.schema.shard_counts import select_shards
from tests.support.recipes import PAIR, TEXT, Built, Workspace, chat, document, open_reader, pair


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    workspace = Workspace(tmp_path_factory.mktemp("sets"))
    tasks, held = [pair(i) for i in range(200, 280)], [pair(i) for i in range(400, 420)]
    texts = [document(i) for i in range(500, 540)]
    datasets = {
        "chats": workspace.dataset("chats.jsonl", [chat(i) for i in range(80)], splits={"test": 0.2}),
        "tasks": workspace.dataset("tasks.jsonl", tasks, PAIR, held=held),
        "texts": workspace.dataset("texts.jsonl", texts, TEXT, splits={"validation": 0.3}),
    }
    datasets["chats"]["source"]["tags"], datasets["texts"]["source"]["tags"] = ["dialogue", "en"], ["texts"]
    return workspace.recipe(
        datasets,
        seq_len=128,
        mixture={
            "batch_size": 4,
            "steps": 5,
            "train_weights": {"tasks": 0.7, "texts": 0.3, "chats": 0},
            "num_validation_sequences": {"chats": 2},
        },
    ).build()


def ids_of(view: View) -> list[list[int]]:
    return [view[i].input_ids.tolist() for i in range(len(view))]


def packed(built: Built, dataset: str, split: str) -> list[list[int]]:
    shards = [part.files["shard"] for part in select_shards(built.manifest(dataset, "packed_shards").parts, split)]
    return [ids for file in shards for ids in built.project.store.table(file, ["input_ids"]).column(0).to_pylist()]


@pytest.mark.slow
def test_held_out_sets_have_their_tags_and_others_are_refused(built: Built) -> None:
    tagged = open_reader(built, 0, 2).tagged_eval_sets()
    assert [tags for _, tags in tagged] == [["dialogue", "en", "chats"], ["tasks"], ["texts"]]
    for (view, _), name in zip(tagged, ("chats", "tasks", "texts"), strict=True):
        assert ids_of(view) == packed(built, name, "validation")
    reader = open_reader(built, 0, 2)
    trained = {row[0]: row[4] for row in built.manifest("training_splits").tables["mixture"].rows}
    assert trained["chats"] == 0
    assert len(reader.validation_set("chats")) == 2
    assert [tags[-1] for _, tags in reader.tagged_eval_sets("test")] == ["chats"]
    with pytest.raises(ConfigError, match=r"test set of 'tasks': this build has none; the datasets with one are chats"):
        open_reader(built, 0, 2).validation_set("tasks", "test")


def test_sets_are_whole_on_every_rank_and_those_that_were_packed(built: Built) -> None:
    readers = [Reader(built.project.store.root, "mini", rank=r, world_size=4, as_torch=False) for r in range(4)]
    sets = [{name: ids_of(view) for name, view in reader.validation_sets().items()} for reader in readers]
    assert all(one == sets[0] for one in sets)
    assert readers[0].state_dict()["taken"] == 0
    reader = open_reader(built, 0, 2)
    sets = {name: ids_of(view) for name, view in reader.train_sets().items()}
    assert sets == {name: packed(built, name, "train") for name in ("chats", "tasks", "texts")}
    assert ids_of(reader.train_set()) == [reader[i].input_ids.tolist() for i in range(len(reader))]
    view = open_reader(built, 0, 2, batch_size=3).validation_set("tasks")
    assert sorted(ids_of(view.shuffle(0))) == sorted(ids_of(view))
    assert sum(batch["labels"].size for batch in view) == sum(len(ids) for ids in ids_of(view))
    one: PackedSequence = open_reader(built, 0, 2).validation_set("chats")[0]
    assert one.seq_lengths.sum() == len(one.input_ids) == len(one.labels)
    assert (one.labels[np.cumsum(one.seq_lengths) - one.seq_lengths] == -100).all()


def test_lengths_are_final_and_finite(built: Built) -> None:
    reader = open_reader(built, 0, 2)

    async def told(one: Reader | View) -> tuple[int, int, int, bool]:
        lengths = (await one.async_len(), await one.current_len(), await one.wait_until_len_at_least(10**9))
        return (*lengths, await one.final_length_is_known())

    for one in (reader, reader.validation_set("chats")):
        assert asyncio.run(told(one)) == (len(one), len(one), len(one), True)
        assert one.is_finite()
        assert one.has_len()


def test_set_whose_shard_is_not_there_is_refused(built: Built, tmp_path: Path) -> None:
    root = Path(built.project.store.root)
    shutil.copytree(root / "mini" / "gpu_partitions", tmp_path / "mini" / "gpu_partitions")
    alone = Reader(tmp_path, "mini", rank=0, world_size=2, as_torch=False)

    assert len(alone) == len(open_reader(built, 0, 2))
    with pytest.raises(IntegrityError, match=r"missing; current\.json names it"):
        alone.tagged_eval_sets()
