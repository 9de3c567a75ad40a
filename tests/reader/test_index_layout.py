"""Ranks as indexes give the batches that copied ranks give, byte for byte, wherever a run begins."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import orjson
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rowmill.build import gate, runner, steps
from rowmill.build.gc import collect_garbage
from rowmill.core import remote
from rowmill.core.errors import ConfigError, IntegrityError
from rowmill.core.storage import Store
from rowmill.inspection import trace
from rowmill.reader import Reader, stored_rows
from rowmill.schema import manifest
from tests.support.object_server import serving_s3fs
from tests.support.preferences import preference
from tests.support.reader_builds import in_bytes
from tests.support.recipes import PAIR, TEXT, Built, Workspace, chat, document, flip_bit, open_reader, pair

WORLD = 4


def mixed(workspace: Workspace, layout: str, *, rows: int = 60, world_size: int = WORLD, **options: Any) -> Workspace:
    """Write a mixture of weighted chats, pairs and documents over two passes, with validation and fillers."""
    chats = [chat(i, turns=1 + i % 3, words=5 + i % 20) for i in range(rows)]
    for i, one in enumerate(chats):
        one["messages"][1]["weight"] = (0.5, 1, 2)[i % 3]
    weighted = {"splits": {"validation": 0.2}, "loss": {"weights": True}}
    datasets = {
        "chats": workspace.dataset("chats.jsonl", chats, **weighted),
        "pairs": workspace.dataset("pairs.jsonl", [pair(i) for i in range(23)], PAIR),
        "texts": workspace.dataset("texts.jsonl", [document(i, words=90) for i in range(11)], TEXT),
    }
    partitions = {"world_size": world_size, "layout": layout}
    mixture = {"batch_size": 8, "epochs": 2}
    return workspace.recipe(datasets, seq_len=128, partitions=partitions, mixture=mixture, **options)


def preferences(workspace: Workspace, layout: str) -> Workspace:
    """Write a recipe of pairs of answers, some with a margin."""
    rows = [{**preference(i), **({"margin": i / 4} if i % 2 else {})} for i in range(30)]
    options = {"seq_len": 512, "partitions": {"world_size": WORLD, "layout": layout}, "mixture": {"batch_size": 4}}
    return workspace.one("a.jsonl", rows, {"kind": "preference"}, packing={"pack": True}, **options)


RECIPES = {"mixed": mixed, "preferences": preferences}


@pytest.fixture(scope="module", params=list(RECIPES))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """Build a recipe in both layouts; return the builds by layout."""
    workspace = Workspace(tmp_path_factory.mktemp("copied"))
    made = {"copied": RECIPES[request.param](workspace, "copied").build()}
    other = tmp_path_factory.mktemp("index") / "project"
    shutil.copytree(workspace.folder, other)
    return made | {"index": RECIPES[request.param](Workspace(other), "index").build()}


@pytest.fixture
def indexed(tmp_path: Path, indexed_once: Path) -> Workspace:
    """Return a copy of a project with indexes, to be changed."""
    shutil.copytree(indexed_once, tmp_path / "project")
    return Workspace(tmp_path / "project")


@pytest.fixture(scope="module")
def indexed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = mixed(Workspace(tmp_path_factory.mktemp("once")), "index")
    workspace.build()
    return workspace.folder


def open_remote(workspace: Workspace, name: str, **options: Any) -> Reader:
    """Copy what was published to a storage in memory, and open it there."""
    fsspec.filesystem("memory").put(str(workspace.store / "mini"), f"/{name}/mini", recursive=True)
    return Reader(f"memory://{name}", "mini", rank=0, world_size=1, as_torch=False, **options)


def shard_of(workspace: Workspace) -> Path:
    """Return the first packed shard that the indexes name."""
    return workspace.store / current(workspace)["sets"]["chats"]["shards"]["train"][0][0]


def current(workspace: Workspace) -> dict[str, Any]:
    return orjson.loads((workspace.store / "mini" / "gpu_partitions" / "current.json").read_bytes())


# ── The same batches ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["flat", "padded", "preference"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_batches_of_both_layouts_are_equal(both: dict[str, Built], world_size: int, layout: Any) -> None:
    has_pairs = "chats" not in {key[0] for key in both["copied"].steps}
    if layout == "preference" and not has_pairs:
        with pytest.raises(ConfigError, match="no sides"):
            list(open_reader(both["index"], layout=layout))
        return
    for rank in range(world_size):
        copied, index = (
            in_bytes(open_reader(both[name], rank, world_size, layout=layout)) for name in ("copied", "index")
        )
        assert index == copied
        assert copied


def test_sequences_with_all_their_fields_are_equal_in_any_order(both: dict[str, Built]) -> None:
    copied, index = (open_reader(both[name]) for name in ("copied", "index"))
    fillers = 0
    for number in np.random.default_rng(0).permutation(len(copied)).tolist():
        one, other = copied[number], index[number]
        for name in one.__dataclass_fields__:
            expected, found = getattr(one, name), getattr(other, name)
            if expected is None or isinstance(expected, Mapping):
                # Fields of token rows, which this recipe has not, are empty mappings.
                assert found == expected
                assert not expected
            else:
                assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())
        fillers += bool((one.labels == -100).all())

    assert len(copied) == len(index)
    assert fillers > 0, "the order has no filler to compare"


@pytest.mark.slow
def test_run_goes_on_in_the_other_layout_at_every_batch(both: dict[str, Built]) -> None:
    whole = in_bytes(iter(open_reader(both["copied"], 1, 2, batch_size=3)))
    for before, after in (("copied", "index"), ("index", "copied"), ("index", "index")):
        for stop in range(0, len(whole), 2):
            first = open_reader(both[before], 1, 2, batch_size=3)
            seen = in_bytes(islice(first, stop))
            second = open_reader(both[after], 1, 2, batch_size=3)
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))

            assert seen + in_bytes(islice(second, 2)) == whole[: stop + 2]


READ = """
import sys
from rowmill import Reader
batches = list(Reader(sys.argv[1], "mini", rank=0, world_size=2, as_torch=False))
print(len(batches) > 0, [name for name in ("fsspec", "pandas", "pyarrow.compute") if name in sys.modules])
"""


def run_reader_alone(built: Built) -> str:
    """Read batches in a process that does nothing else; return whether there were some, and packages it could spare."""
    command = [sys.executable, "-c", READ, built.project.store.root]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["copied", "index"])
def test_process_that_reads_batches_imports_little(both: dict[str, Built], layout: str) -> None:
    assert run_reader_alone(both[layout]) == "True []"


def test_facts_checks_and_held_out_sets_are_equal(both: dict[str, Built]) -> None:
    copied, index = (both[name].manifest("gpu_partitions") for name in ("copied", "index"))
    for name in ("facts", "token_ledger", "tables"):
        assert getattr(index, name) == getattr(copied, name)
    assert [(part.counts, part.details) for part in index.parts] == [
        (part.counts, part.details) for part in copied.parts
    ]
    results = [
        [(one.check, one.value, one.outcome) for one in both[name].steps[("gpu_partitions",)][1]]
        for name in ("copied", "index")
    ]
    assert results[0] == results[1]
    assert copied.facts["conservation"] == 0
    assert both["index"].manifest("training_splits").version == both["copied"].manifest("training_splits").version
    held_out = [
        {name: [view[i].input_ids.tolist() for i in range(len(view))] for name, view in sets.items()}
        for sets in (open_reader(both[name]).validation_sets() for name in ("copied", "index"))
    ]
    assert held_out[0] == held_out[1]


# ── What it costs, and what stays ──────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_another_world_size_makes_integers_only(indexed: Workspace) -> None:
    batches = in_bytes(iter(open_reader(indexed)))
    shard = shard_of(indexed)
    before = shard.stat().st_mtime_ns
    made = mixed(indexed, "index", world_size=2).build()
    ranks = made.manifest("gpu_partitions")
    assert made.made() == {"training_splits", "gpu_partitions"}
    assert {name for part in ranks.parts for name in part.files} == {"index", "filler", "facts"}
    assert shard.stat().st_mtime_ns == before
    assert in_bytes(iter(open_reader(indexed))) == batches


def test_index_names_the_sequence_of_every_place(indexed: Workspace) -> None:
    found, store = current(indexed), indexed.project.store
    shards = [one for name in found["datasets"] for one in found["sets"][name]["shards"]["train"]]
    order = store.unchecked_table(found["order_file"]).to_pylist()
    lines = [line for one in found["ranks"].values() for line in store.unchecked_table(one["files"][0][0]).to_pylist()]
    by_place = sorted(lines, key=itemgetter("place"))

    assert [line["place"] for line in by_place] == list(range(len(order)))
    for line, expected in zip(by_place, order, strict=True):
        assert {name: line[name] for name in ("step", "pass", "sequence_id")}.items() <= expected.items()
        if expected["filler"]:
            assert (line["shard"], line["row"], line["dataset"]) == (-1, 0, "")
        else:
            assert line["dataset"] == found["datasets"][expected["dataset"]]
            assert shards[line["shard"]][0].split("/")[1] == line["dataset"]
            assert 0 <= line["row"] < shards[line["shard"]][1]


@pytest.mark.slow
def test_shards_that_an_index_names_stay_when_garbage_is_collected(indexed: Workspace) -> None:
    batches = in_bytes(iter(open_reader(indexed, verify=True)))
    mixed(indexed, "index", rows=75)
    only = ("raw_dataset", "canonical_rows", "tokenized_examples", "truncation_stats", "packed_shards")
    indexed.build(only=only)
    newest = manifest.load_current(indexed.project.store, ("mini", "chats", "packed_shards"))
    collect_garbage(indexed.project, keep=1, dry_run=False)

    assert newest is not None
    assert newest.version != current(indexed)["inputs"]["mini/chats/packed_shards"]
    assert in_bytes(iter(open_reader(indexed, verify=True))) == batches


@pytest.mark.slow
def test_version_that_is_used_again_gives_its_batches_again(indexed: Workspace) -> None:
    batches, version = in_bytes(iter(open_reader(indexed))), current(indexed)["version"]
    mixed(indexed, "copied", rows=75).build()
    assert in_bytes(iter(open_reader(indexed))) != batches
    step = steps.find_step(indexed.project, ("mini", "gpu_partitions"))
    runner.run_step(indexed.project, step, {}, version=version)

    assert current(indexed)["layout"] == "index"
    assert in_bytes(iter(open_reader(indexed))) == batches


@pytest.mark.slow
def test_version_whose_shards_are_damaged_is_not_used_again(indexed: Workspace) -> None:
    version, shard = current(indexed)["version"], shard_of(indexed)
    mixed(indexed, "copied", rows=75).build()
    published = current(indexed)
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    step = steps.find_step(indexed.project, ("mini", "gpu_partitions"))
    with pytest.raises(IntegrityError, match=shard.name):
        runner.run_step(indexed.project, step, {}, version=version)

    assert current(indexed) == published


@pytest.mark.slow
def test_ranks_built_one_at_a_time_are_published_together(tmp_path: Path) -> None:
    workspace = mixed(Workspace(tmp_path), "index", world_size=2)
    workspace.build(only=[step.name for step in steps.plan_steps(workspace.project) if step.name != "gpu_partitions"])
    step = steps.find_step(workspace.project, ("mini", "gpu_partitions"))
    inputs = gate.open_inputs(workspace.project, step)
    runner.run_step(workspace.project, step, inputs, ranks=["rank-00000-of-00002"])
    assert not (workspace.store / "mini" / "gpu_partitions" / "current.json").exists()
    runner.run_step(workspace.project, step, inputs, ranks=["rank-00001-of-00002"])

    assert len(open_reader(workspace, verify=True)) == current(workspace)["places"]


def test_trace_names_the_row_of_the_shared_shard(indexed: Workspace) -> None:
    store = indexed.project.store
    segments = [one for row in trace.trace_source(indexed.project, "data/chats.jsonl:7") for one in row.places]
    shown = [(segment, showing) for segment in segments for showing in segment.showings]

    assert len(shown) >= 2, "two passes"
    for segment, showing in shown:
        rows = store.unchecked_table(showing.file.removeprefix(f"{store.path('')}/")).to_pylist()
        assert (showing.file, showing.file_row) == (segment.shard, segment.shard_row)
        assert segment.example_id in rows[showing.file_row]["example_ids"]


def test_remote_storage_reads_as_the_local_one_and_a_shard_takes_two_requests(indexed: Workspace) -> None:
    assert in_bytes(open_remote(indexed, "indexed", verify=True)) == in_bytes(open_reader(indexed))
    fsspec.register_implementation("counted", CountedFiles, clobber=True)
    fsspec.filesystem("memory").put(str(indexed.store / "mini"), "/counted/mini", recursive=True)
    CountedFiles.requests.clear()
    Reader("counted://counted", "mini", rank=0, world_size=1, as_torch=False)
    shards = {path: times for path, times in CountedFiles.requests.items() if "/data/train/" in path}
    assert shards
    assert set(shards.values()) == {2}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["copied", "index"])
def test_reader_on_an_object_store_that_fails_now_and_then_gives_all_batches(
    both: dict[str, Built], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    made, root = both[layout], Path(both[layout].project.store.root)
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    with serving_s3fs(monkeypatch) as server:
        for file in root.joinpath("mini").rglob("*"):
            if file.is_file():
                server.objects[f"bucket/{file.relative_to(root)}"] = file.read_bytes()
        server.fail("503", "cut", every=5)
        far = Reader("s3://bucket", "mini", rank=0, world_size=1, as_torch=False)

        assert in_bytes(iter(far)) == in_bytes(iter(open_reader(made)))
        assert server.failed > 0


class CountedFiles(MemoryFileSystem):
    """Counts the requests that S3 would get for each file."""

    protocol = "counted"
    requests: ClassVar[Counter[str]] = Counter()

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def info(self, path: str, **options: Any) -> Any:
        self.requests[path] += 1
        return super().info(path, **options)

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        self.requests[path] += 1
        return super().cat_file(path, *args, **options)

    def _open(self, path: str, *args: Any, **options: Any) -> Any:
        # Each read of the open file is another one.
        self.requests[path] += 10
        return super()._open(path, *args, **options)


@pytest.mark.parametrize("length", [8, 100])
def test_footer_longer_than_what_is_read_at_first_is_read_too(
    indexed: Workspace, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(stored_rows, "FIRST_END_BYTES", length)
    assert in_bytes(open_remote(indexed, f"long-{length}")) == in_bytes(open_reader(indexed))


# ── Faults ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("end", [b"", b"PAR1", b"\xff\xff\xff\x7fPAR1", b"\x00\x00\x00\x00PAR1", bytes(200)])
def test_shard_with_another_end_is_refused(indexed: Workspace, end: bytes) -> None:
    """The last bytes of a Parquet file are the length of its footer and a name."""
    shard = shard_of(indexed)
    shard.write_bytes(shard.read_bytes()[: -100 if end else 0] + end)
    with pytest.raises(IntegrityError, match="not a readable Parquet file"):
        open_remote(indexed, f"ended-{end.hex()[:16]}")


def test_changed_or_missing_bytes_of_a_shard_are_refused(indexed: Workspace) -> None:
    shard = shard_of(indexed)
    flip_bit(shard, 60)

    assert len(open_reader(indexed)) > 0
    with pytest.raises(IntegrityError, match="digest"):
        open_reader(indexed, verify=True)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="not a readable Parquet file"):
        open_reader(indexed)
    shard.unlink()
    for open_it in (open_reader, partial(open_remote, name="missing")):
        with pytest.raises(IntegrityError, match=r"part-00000\.parquet: missing; current\.json names it"):
            open_it(indexed)


@pytest.mark.parametrize("kind", ["index", "filler"])
def test_file_of_another_rank_is_refused(indexed: Workspace, kind: str) -> None:
    ranks = list(current(indexed)["ranks"].values())
    paths = [indexed.store / (one["files"][0] if kind == "index" else one["filler"])[0] for one in ranks]
    shutil.copyfile(paths[1], paths[0])
    with pytest.raises(IntegrityError, match="rank 1, but 0 was published"):
        open_reader(indexed)


def test_other_rows_and_files_of_a_rank_are_refused_with_what_to_do(indexed: Workspace) -> None:
    """Whatever wrote it, the content that an index names must be that of the order."""
    made = manifest.load_current(indexed.project.store, ("mini", "gpu_partitions"))
    assert made is not None
    first, second = made.parts[:2]
    swapped = replace(made, parts=(replace(first, files=second.files), *made.parts[1:]))
    find = steps.find_step(indexed.project, ("mini", "gpu_partitions")).stage.find_content_damage
    assert find is not None

    assert list(find(Store(str(indexed.store)), made)) == []
    assert "the sequences that its index names hash to" in "".join(find(Store(str(indexed.store)), swapped))
    with pytest.raises(ConfigError, match=r"partitions\.layout: index; .* build with partitions\.layout: copied"):
        open_reader(indexed).data_files  # noqa: B018
