"""`packing.layout: index`: shards without tokens give all readers what copied shards give them."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowmill.build import gc
from rowmill.build.runner import run_step
from rowmill.build.steps import plan_steps
from rowmill.core.errors import DamagedFileError, IntegrityError
from rowmill.inspection.trace import trace_sequence
from rowmill.reader.layouts import LayoutName
from rowmill.schema import manifest
from rowmill.schema.indexed_shards import ExampleReferences, read_sequences
from rowmill.sources import parts
from tests.support.reader_builds import in_bytes
from tests.support.recipes import CHAT, PAIR, TEXT, Built, Workspace, chat, document, open_reader, pair, sentence
from tests.support.tiers import mark_all_but

TOKENS = {"input_ids", "labels", "position_ids", "loss_weights"}
LAYOUTS = ("copied", "index")


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each file be a part of its own, so that a sequence is of several files of examples."""
    monkeypatch.setattr(parts, "SMALLEST_PART_BYTES", 256)


def build(folder: Path, layout: str, datasets: dict[str, Any], **recipe: Any) -> Built:
    """Build datasets, given by their rows and options, of which the packing gets a layout."""
    workspace = Workspace(folder)
    written: dict[str, Any] = {}
    for name, (rows, options) in datasets.items():
        packing = {**options.get("packing", {}), "layout": layout}
        written[name] = workspace.files({f"{name}-{i}.jsonl": rows[i::3] for i in range(3)}) | options
        written[name] |= {"packing": packing}
    every = {"mixture": {"batch_size": 6}, "partitions": {"world_size": 2, "remainder": "pad"}} | recipe
    return workspace.recipe(written, **every).build()


def list_shards(built: Built, *datasets: str) -> list[pa.Table]:
    store = built.project.store
    names = datasets or tuple(built.project.recipe.datasets)
    return [
        read_sequences(store, file) for name in names for file in built.manifest(name, "packed_shards").files("shard")
    ]


def read_batches(built: Built, layout: LayoutName) -> list[dict[str, Any]]:
    reader = open_reader(built, batch_size=2, verify=True, layout=layout, segment_sources=True)
    sets = [
        view.get_batch(range(len(view))) for view in (*reader.train_sets().values(), *reader.validation_sets().values())
    ]
    return [*reader, *sets]


def require_equal(one: Built, other: Built) -> None:
    """Compare what every reader of two builds sees: shards, batches, ranks, exports, counts."""
    for mine, theirs in zip(list_shards(one), list_shards(other), strict=True):
        assert mine.schema.equals(theirs.schema, check_metadata=False)
        assert mine.equals(theirs)
    for layout in ("flat", "padded"):
        batches = [in_bytes(read_batches(built, layout)) for built in (one, other)]
        for mine, theirs in zip(*batches, strict=True):
            assert list(mine) == list(theirs)
            assert [name for name, value in mine.items() if value != theirs[name]] == []
    for dataset in one.project.recipe.datasets:
        assert one.facts(dataset, "packed_shards") == other.facts(dataset, "packed_shards")
    for key in one.steps:
        if "exports" in key:
            mine, theirs = (
                [
                    pq.read_table(built.project.store.local(file.path)).replace_schema_metadata(None)
                    for part in built.manifest(*key).parts
                    for file in part.files.values()
                    if file.path.endswith(".parquet")
                ]
                for built in (one, other)
            )
            # Their cards name the build that they are of.
            assert mine == theirs
            assert mine
        assert not any(result.blocking for result in one.steps[key][1])


CHATS = [chat(i, turns=1 + i % 4) for i in range(40)]
NUMBERS = ["logprobs", "advantages", "ratios", "entropies", "returns"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chats": ({"rows": (CHATS, {"format": CHAT, "splits": {"validation": 0.2}})}, {}),
    "weights beside none": (
        {
            "rows": (CHATS, {"format": CHAT, "loss": {"prompt_weight": 0.5}, "packing": {"store_domains": True}}),
            "texts": ([document(i, words=90) for i in range(12)], {"format": TEXT}),
        },
        {},
    ),
    "joined texts": ({"rows": ([document(i, words=90 + i) for i in range(30)], {"format": TEXT})}, {"seq_len": 128}),
    "open attention": (
        {"rows": (CHATS, {"format": CHAT, "packing": {"block_cross_document_attention": False}})},
        {},
    ),
    "padded segments": ({"rows": (CHATS, {"format": CHAT, "packing": {"segment_multiple_of": 16}})}, {}),
    "ignored token": ({"rows": (CHATS, {"format": CHAT, "packing": {"ignore_token_id": 2}})}, {}),
    "slices": (
        {"rows": ([pair(i, words=60) for i in range(9)], {"format": PAIR, "packing": {"slice_strategy": "split"}})},
        {"seq_len": 32},
    ),
    "token fields": (
        {
            "rows": (
                [
                    {"prompt_ids": [5, 6, i % 50], "response_ids": [*range(7, 10 + i % 9)], "reward": i / 8,
                     **{name: [-0.5 * k for k in range(3 + i % 9)] for name in NUMBERS}}
                    for i in range(40)
                ],
                {"format": {"kind": "tokens", "token_fields": NUMBERS, "row_fields": ["reward"]}},
            )
        },
        {"seq_len": 64},
    ),
    "lists per token": (
        {
            "rows": (
                [
                    {"prompt_ids": [5, 6, i % 50], "response_ids": [*range(7, 10 + i % 9)],
                     "teacher_ids": [[i, k] for k in range(3 + i % 9)],
                     "teacher_logprobs": [[-0.5 * k, -i, -k] for k in range(3 + i % 9)]}
                    for i in range(40)
                ],
                {"format": {"kind": "tokens", "token_fields": {"teacher_ids": {"type": "int32", "size": 2},
                                                               "teacher_logprobs": {"type": "float16", "size": 3}}}},
            ),
            # Its examples have no such columns.
            "texts": ([document(i, words=30) for i in range(12)], {"format": TEXT}),
        },
        {"seq_len": 64, "exports": [{"kind": "native", "name": "own"}]},
    ),
    "preferences": (
        {
            "rows": (
                [
                    {"prompt": sentence(i, 5), "chosen": sentence(i, 9), "rejected": sentence(i + 2, 4), "margin": i}
                    for i in range(20)
                ],
                {"format": {"kind": "preference"}},
            )
        },
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("case", mark_all_but(["chats", "weights beside none", "token fields"], CASES))
def test_index_is_read_as_the_copied_layout(tmp_path: Path, case: str, ranks: str) -> None:
    datasets, recipe = CASES[case]
    exports = (
        []
        if case in ("preferences", "token fields", "weights beside none")
        else [{"kind": "hf", "name": "hf", "unit": "packed"}]
    )
    if case == "open attention":
        exports = [{"kind": "native", "name": "own"}]
    options = {"partitions": {"world_size": 2, "layout": ranks, "remainder": "pad"}, "exports": exports, **recipe}
    copied, index = (build(tmp_path / layout, layout, datasets, **options) for layout in LAYOUTS)

    require_equal(copied, index)

    for name in datasets:
        for file in index.manifest(name, "packed_shards").files("shard"):
            schema = pq.read_schema(index.project.store.local(file.path))
            assert not TOKENS & {*schema.names}
            references = ExampleReferences.parse(schema.metadata)
            assert references is not None
            assert len(references.files) > 1


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=25)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS, st.sampled_from(["best_fit", "greedy"]), st.sampled_from([1, 4]), st.booleans())
def test_index_of_any_lengths_is_read_as_the_copied_layout(
    tmp_path: Path, lengths: list[int], strategy: str, multiple: int, blocked: bool
) -> None:
    shutil.rmtree(tmp_path)
    rows = [document(i, words=words) for i, words in enumerate(lengths)]
    packing = {
        "pack_strategy": strategy, "segment_multiple_of": multiple, "block_cross_document_attention": blocked,
        "group_tokens": 100,
    }  # fmt: skip
    datasets = {"rows": (rows, {"format": TEXT, "packing": packing, "splits": {"validation": 0}})}
    options = {"seq_len": 48, "mixture": {}, "partitions": {"world_size": 1}}
    copied, index = (build(tmp_path / layout, layout, datasets, **options) for layout in LAYOUTS)

    require_equal(copied, index)


def test_held_out_sequences_are_named_where_groups_set_them_aside(tmp_path: Path) -> None:
    datasets = {"rows": (CHATS, {"format": CHAT, "packing": {"group_tokens": 300}})}
    options = {"mixture": {"num_validation_sequences": {"rows": 3}}, "seq_len": 256}
    copied, index = (build(tmp_path / layout, layout, datasets, **options) for layout in LAYOUTS)

    require_equal(copied, index)


def test_workers_and_group_threads_change_no_byte(tmp_path: Path) -> None:
    datasets = {
        "rows": (CHATS * 3, {"format": CHAT, "packing": {"group_tokens": 600}, "filters": {"deduplicate": "off"}})
    }
    one, other = (
        build(tmp_path / str(workers), "index", datasets, execution={"workers": workers}) for workers in (1, 3)
    )
    assert one.versions() == other.versions()
    assert {k.split("/parts/")[-1]: v for k, v in one.digests().items()} == {
        k.split("/parts/")[-1]: v for k, v in other.digests().items()
    }


def test_second_build_reuses_all_and_a_killed_one_goes_on(tmp_path: Path) -> None:
    built = build(tmp_path, "index", {"rows": (CHATS, {"format": CHAT})})
    assert Workspace(tmp_path).build().made() == set()
    folder = Path(built.project.store.local(f"{built.project.recipe.name}/rows/packed_shards"))
    before = built.digests()
    # As if the build had been killed before its manifest: the finished groups are there.
    shutil.rmtree(folder / "manifests")
    (folder / "pointer.json").unlink()

    again = Workspace(tmp_path).build()

    assert again.report("rows", "packed_shards").parts_reused
    assert again.digests() == before


def test_damaged_examples_are_noticed_by_reader_check_and_build(tmp_path: Path) -> None:
    ranks = {"world_size": 1, "layout": "index"}
    built = build(tmp_path, "index", {"rows": (CHATS, {"format": CHAT})}, partitions=ranks)
    store = built.project.store
    step = next(step for step in plan_steps(built.project) if step.name == "gpu_partitions")
    version = built.manifest("gpu_partitions").version
    assert run_step(built.project, step, {}, version=version).version == version
    path = Path(store.local(built.manifest("rows", "tokenized_examples").files("examples")[-1].path))
    path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    with pytest.raises(DamagedFileError, match=r"examples\.arrow"):
        run_step(built.project, step, {}, version=version)
    with pytest.raises(IntegrityError, match=r"examples\.arrow: digest"):
        open_reader(built, verify=True)
    with pytest.raises(IntegrityError, match=r"examples\.arrow: digest"):
        list(open_reader(built))
    path.unlink()
    with pytest.raises(IntegrityError, match=r"examples\.arrow: missing"):
        list(open_reader(built))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_index_ranks_of_other_weights_are_another_version(tmp_path: Path, layout: str) -> None:
    ranks = {"partitions": {"world_size": 1, "layout": "index"}}
    one, other = (
        build(tmp_path, layout, {"rows": (CHATS, {"format": CHAT, "loss": {"prompt_weight": weight}})}, **ranks)
        for weight in (0.25, 0.5)
    )

    assert one.manifest("gpu_partitions").inputs != other.manifest("gpu_partitions").inputs
    assert one.manifest("gpu_partitions").version != other.manifest("gpu_partitions").version
    kept = manifest.list_versions(other.project.store, one.manifest("gpu_partitions").key)
    assert [made.inputs for made in kept] == [made.manifest("gpu_partitions").inputs for made in (one, other)]
    # As many builds as asked for are kept with all that they name.
    assert not gc.collect_garbage(other.project, keep=2, dry_run=True)


def test_trace_and_garbage_collection_follow_the_references(tmp_path: Path) -> None:
    datasets = {"rows": (CHATS, {"format": CHAT})}
    copied, index = (build(tmp_path / layout, layout, datasets) for layout in LAYOUTS)
    found = [trace_sequence(built.project, "rows/train/0:3") for built in (copied, index)]
    assert found[0].row == found[1].row
    assert len({(one.token, "".join(one.texts), *one.kinds, *one.messages) for one in found}) == 1
    assert index.manifest("rows", "packed_shards").schema != copied.manifest("rows", "packed_shards").schema

    gc.collect_garbage(index.project, keep=1, dry_run=False)
    require_equal(copied, index)
