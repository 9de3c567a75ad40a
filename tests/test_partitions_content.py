"""Ranks follow the content of sequences, not only their numbers."""

from pathlib import Path

from tests.recipes import Road, chat


def test_a_word_changed_in_the_source_reaches_the_ranks(tmp_path: Path) -> None:
    rows = [chat(i) for i in range(30)]
    road = Road(tmp_path).one("a.jsonl", rows)
    before = road.build()
    changed = [chat(i) for i in range(30)]
    content = changed[7]["messages"][1]["content"]
    # Another word of as many tokens: no count, no length and no order changes.
    changed[7]["messages"][1]["content"] = (
        content.replace(" river", " stone", 1) if " river" in content else content.replace(" stone", " river", 1)
    )
    assert changed != rows
    road.write("a.jsonl", changed)

    after = road.build()

    same_shape = [
        after.manifest("rows", "packed_shards").facts[name] for name in ("tokens", "trained_tokens", "sequences")
    ]
    assert same_shape == [
        before.manifest("rows", "packed_shards").facts[name] for name in ("tokens", "trained_tokens", "sequences")
    ]
    for key in (("rows", "packed_shards"), ("training_splits",), ("gpu_partitions",)):
        assert after.versions()["/".join(key)] != before.versions()["/".join(key)]
    shards = [
        after.project.store.table(file.path, ["input_ids"])
        for part in after.manifest("gpu_partitions").parts
        for name, file in part.files.items()
        if name.startswith("data/")
    ]
    ids = [row["input_ids"] for shard in shards for row in shard.to_pylist()]
    new = next(one["input_ids"] for one in after.examples() if one["row_ids"][0].endswith(":7"))
    assert any(row[i : i + len(new)] == new for row in ids for i in range(len(row)))
