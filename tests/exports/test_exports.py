"""Exports of a build: they read back as the build's examples, with the same bytes for any workers, or do not exist."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmill.build import prepare, runner
from rowmill.core.errors import ConfigError, IntegrityError
from rowmill.executors import local
from rowmill.exports import Exported, open_export, read_datums
from rowmill.recipe.recipe import Execution
from rowmill.schema.shard_counts import ShardDetails, select_shards
from rowmill.stages.exports import locate_export
from tests.support import export_readers as readers
from tests.support.export_readers import Segment
from tests.support.recipes import CHAT, PAIR, TEXT, Built, Workspace, chat, document, pair, write_tokenizer

SEQ_LEN = 256
HOSTILE = (
    "../x", "/x", ".", "..", "", "a/b", "A", "a", "x" * 300, "x" * 301, "nul\0nul", "ümlaut", "__default__", 7, None,
)  # fmt: skip
"""Domains as records may hold them; the last three and the empty one are no domain."""

ALWAYS: dict[str, dict[str, Any]] = {
    "native": {"kind": "native", "shard_sequences": 7},
    "packed": {"kind": "hf", "unit": "packed"},
    "saved": {"kind": "hf", "arrow": True, "shard_bytes": 8000},
    "unpacked": {"kind": "hf", "shard_sequences": 7},
    "axolotl": {"kind": "axolotl", "sequence_len": SEQ_LEN},
    "json": {"kind": "axolotl", "ds_type": "json"},
    "river": {"kind": "astrai_bin", "max_tokens_per_shard": 900},
    "tinker": {"kind": "tinker", "shard_sequences": 5},
    "bridge": {"kind": "megatron_bridge", "shard_sequences": 11},
    "padded": {"kind": "megatron_bridge", "pad_segments_to": 8},
    "olmo": {"kind": "olmo_core", "shard_sequences": 9},
    "skyrl": {"kind": "skyrl", "shard_sequences": 9},
    "verl": {"kind": "verl"},
    "llama": {"kind": "llama_factory", "shard_sequences": 9},
    "neat": {"kind": "llama_factory", "unit": "packed"},
    "megatron": {"kind": "megatron", "loss_mask": "companion"},
}
"""Exports that need nothing beside this project, by name."""
WITH_LIBRARY: dict[str, tuple[str, dict[str, Any]]] = {
    "h5": ("h5py", {"kind": "astrai_h5", "max_tokens_per_shard": 900}),
    "mds": ("streaming", {"kind": "mds", "size_limit_bytes": 10_000}),
    "foundry": ("streaming", {"kind": "llm_foundry", "size_limit_bytes": 10_000}),
}
"""Exports that are written with an optional library: its module, and their options."""
OPTIONS = ALWAYS | {name: one for name, (module, one) in WITH_LIBRARY.items() if find_spec(module) is not None}
NAMES = pytest.mark.parametrize("name", [*ALWAYS, *WITH_LIBRARY])

# A template whose end of turn is not EOS, so that OLMo-core's reader can separate examples by EOS.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def datasets(workspace: Workspace) -> dict[str, dict[str, Any]]:
    """Write two files and return two datasets: dialogues of hostile domains, and pairs without a domain."""
    chats = [chat(i, turns=1 + i % 3) | {"place": HOSTILE[i % len(HOSTILE)]} for i in range(60)]
    groups = {"template": {"on_dropped": {}}, "splits": {"validation": 0.1}}
    return {
        "chats": workspace.dataset("chats.jsonl", chats, {**CHAT, "domain_key": "place"}, **groups),
        "pairs": workspace.dataset("pairs.jsonl", [pair(i) for i in range(40)], PAIR),
    }


def with_exports(workspace: Workspace, options: dict[str, dict[str, Any]], **changes: Any) -> Workspace:
    """Write the project with some exports."""
    if not (workspace.folder / "tokenizer").exists():
        write_tokenizer(workspace.folder / "tokenizer", template=TEMPLATE + "{{ eos_token }}")
    return workspace.recipe(
        datasets(workspace), exports=[{"name": name, **one} for name, one in options.items()], **changes
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the project with every export that can be written here."""
    return with_exports(Workspace(tmp_path_factory.mktemp("exports")), OPTIONS).build()


def folder(built: Built, name: str) -> Path:
    """Return an export's folder, or skip where its library is not installed."""
    if name not in OPTIONS:
        pytest.skip(f"{WITH_LIBRARY[name][0]} is not installed; {name} needs it")
    return built.project.store.local(locate_export(built.manifest("exports", name)))


def examples(
    built: Built, names: Iterable[str] = ("chats", "pairs"), split: str = "train", at_most: int = SEQ_LEN
) -> list[Segment]:
    """Return what went in: every example of a split, whose first token is no target."""
    rows = [row for name in names for row in built.examples(name) if row["split"] == split]
    assert all(len(row["input_ids"]) <= at_most for row in rows)
    return [(tuple(row["input_ids"]), (False, *row["loss_mask"][1:])) for row in rows]


def flat(rows: Iterable[Iterable[Segment]]) -> list[Segment]:
    return [one for row in rows for one in row]


def unpadded(segment: Segment) -> Segment:
    """Remove the EOS that pad a segment; every example here ends in one EOS."""
    ids, mask = segment
    end = next(i for i in range(len(ids), 0, -1) if mask[i - 1])
    assert set(ids[end:]) <= {2}
    return ids[:end], mask[:end]


READERS: dict[str, Callable[[Path], list[Segment]]] = {
    "native": lambda data: flat(readers.packed(readers.rows(data))),
    "packed": lambda data: flat(readers.packed(readers.rows(data))),
    "saved": lambda data: readers.unpacked(readers.saved(data, "train")),
    "unpacked": lambda data: readers.unpacked(readers.rows(data)),
    "axolotl": lambda data: readers.unpacked(readers.rows(data)),
    "json": lambda data: readers.unpacked(readers.json_rows(data)),
    "tinker": readers.datums,
    "bridge": lambda data: flat(readers.bridge(data)),
    "padded": lambda data: [unpadded(one) for one in flat(readers.bridge(data))],
    "olmo": lambda data: readers.olmo(data, "<u2"),
    "skyrl": lambda data: readers.masked(readers.rows(data)),
    "verl": lambda data: readers.masked(readers.rows(data)),
    "llama": lambda data: readers.llama_factory(readers.saved(data, "train")),
    "neat": lambda data: flat(readers.llama_factory_packed(readers.saved(data, "train"))),
    "megatron": lambda data: readers.masked_megatron(data, "megatron"),
    "river": lambda data: flat(readers.astrai_bin(data).values()),
    "h5": lambda data: flat(readers.astrai_h5(data).values()),
    "mds": lambda data: flat(readers.packed(readers.mds(data))),
    "foundry": lambda data: readers.llm_foundry(readers.mds(data), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_export_read_back_is_the_examples_that_went_in(built: Built, name: str) -> None:
    assert Counter(READERS[name](folder(built, name) / "data")) == Counter(examples(built))


@pytest.mark.parametrize("window", [16, SEQ_LEN, 1000])
def test_astrai_trains_the_targets_and_sees_no_other_segment(built: Built, window: int) -> None:
    data = folder(built, "river") / "data"
    stored = flat(readers.astrai_bin(data).values())
    targets = np.array([one for _, mask in stored for one in mask])
    segment_of = np.repeat(np.arange(len(stored)), [len(ids) for ids, _ in stored])
    windows = readers.astrai_sft_windows(data, window)

    assert len(windows) == (len(targets) - 1) // window
    for one in windows:
        following = slice(one["begin"] + 1, one["begin"] + 1 + window)
        inputs = segment_of[one["begin"] : one["begin"] + window]
        assert (one["loss_mask"] == targets[following]).all()
        # A target follows a token of the same segment.
        assert (segment_of[following] == inputs)[one["loss_mask"]].all()
        # Documents of the window are segments, no more and no fewer.
        assert (np.diff(one["document"]) == np.diff(inputs)).all()


@NAMES
def test_export_counts_what_the_ledger_counts_and_its_card_and_folder_say_so(built: Built, name: str) -> None:
    exported = open_export(folder(built, name), verify=True)
    packed = [built.manifest(dataset, "packed_shards") for dataset in ("chats", "pairs")]
    parts = [part for one in packed for part in select_shards(one.parts, "train")]
    shards = [part.get_details(ShardDetails).to_json() for part in parts]
    for count in ("segments", "tokens", "trained_tokens"):
        assert exported.count(count) == exported.card["counts"][count] == sum(shard[count] for shard in shards)
    assert built.manifest("exports", name).facts["conservation"] == 0
    card = exported.card
    conventions = {"tinker": "shifted", "bridge": "rolled_mask", "padded": "rolled_mask", "river": "unshifted_mask",
                   "h5": "unshifted_mask", "olmo": "unshifted_mask", "skyrl": "unshifted_mask",
                   "megatron": "unshifted_mask", "verl": "unshifted_mask"}  # fmt: skip
    assert (card["format"], card["label_convention"]) == (OPTIONS[name]["kind"], conventions.get(name, "unshifted"))
    files = sorted((built.project.base / "tokenizer").iterdir())
    assert card["tokenizer_files"] == {one.name: sha256(one.read_bytes()).hexdigest() for one in files}
    numbers = {"vocab_size": 600, "bos_id": None, "eos_id": 2, "pad_id": 0, "seq_len": 256}
    assert {key: card[key] for key in numbers} == numbers
    assert card["order"] == built.manifest("training_splits").card["order"]
    for dataset, one in card["datasets"].items():
        assert one["attention"] == "blocked"
        assert one["plan"] == built.manifest(dataset, "packed_shards").version
        assert one["source"] == built.manifest(dataset, "raw_dataset").version
    at = folder(built, name)
    ours = {"card.json", "manifest.json"}
    beside = {path.name for path in at.iterdir()} - {"data", *ours}
    assert beside == ({"example_ids.txt"} if name == "tinker" else set())
    files = {path.relative_to(at).as_posix() for path in at.rglob("*") if path.is_file()}
    assert files == {*open_export(at).files, *ours}


def rows_of_ranks(built: Built) -> list[list[dict[str, Any]]]:
    """Return the rows of each rank in its order."""
    parts = [part.files for part in built.manifest("gpu_partitions").parts]
    files = [sorted((name, file) for name, file in part.items() if name.startswith("data/")) for part in parts]
    return [[row for _, file in rank for row in built.project.store.table(file).to_pylist()] for rank in files]


def test_exports_are_in_the_order_of_training_with_the_rows_of_the_ranks(built: Built) -> None:
    places = [row for place in zip(*rows_of_ranks(built), strict=True) for row in place if not row["filler"]]
    order = [name for row in places for name in row["example_ids"]]

    assert [name for row in readers.rows(folder(built, "native") / "data") for name in row["example_ids"]] == order
    assert (folder(built, "tinker") / "example_ids.txt").read_text(encoding="utf-8").splitlines() == order
    by_id = {row["example_id"]: tuple(row["input_ids"]) for name in ("chats", "pairs") for row in built.examples(name)}
    unpacked = READERS["unpacked"](folder(built, "unpacked") / "data")
    assert [ids for ids, _ in unpacked] == [by_id[one] for one in order]
    ranks = [row for rank in rows_of_ranks(built) for row in rank if not row["filler"]]
    rows = readers.rows(folder(built, "native") / "data")
    by_number = itemgetter("dataset", "sequence_id")
    assert sorted(rows, key=by_number) == sorted(ranks, key=by_number)


@pytest.mark.parametrize("name", ["native", "packed", "mds"])
def test_packed_sequences_fit_and_restart_positions_at_spans(built: Built, name: str) -> None:
    data = folder(built, name) / "data"
    for row in readers.mds(data) if name == "mds" else readers.rows(data):
        assert len(row["input_ids"]) == sum(row["seq_lengths"]) <= SEQ_LEN
        assert min(row["seq_lengths"]) > 0
        assert row["position_ids"] == [i for length in row["seq_lengths"] for i in range(length)]


@pytest.mark.parametrize(("name", "multiple"), [("bridge", 1), ("padded", 8)])
def test_segments_of_packs_are_multiples_and_fit(built: Built, name: str, multiple: int) -> None:
    rows = readers.bridge(folder(built, name) / "data")
    assert all((len(ids) - 1) % multiple == 0 for row in rows for ids, _ in row)
    assert all(sum(len(ids) - 1 for ids, _ in row) <= SEQ_LEN for row in rows)


def test_files_close_at_the_borders_of_the_plan(built: Built) -> None:
    files = sorted(open_export(folder(built, "native")).files.items())
    counts = [one["sequences"] for path, one in files if path.endswith("parquet")]
    assert len(counts) > 3
    assert set(counts[:-1]) == {7}


def test_domains_have_folders_that_stay_inside_and_shards_that_split_no_example(built: Built) -> None:
    at = folder(built, "river")
    card = open_export(at).card
    names = {path.name for path in (at / "data").iterdir()}
    assert names == set(card["domains"])
    assert {"%2E.%2Fx", "%2Fx", "%2E", "%2E.", "a%2Fb", "nul%00nul", "%C3%BCmlaut", "__default__"} <= names
    assert len({name.lower() for name in names}) == len(names)
    assert max(len(name.encode()) for name in names) <= 100
    assert sum(name.startswith("x" * 80) for name in names) == 2
    assert {card["domains"][name] for name in names if name[:2] in {"A-", "a-"}} == {"A", "a"}
    assert all(path.resolve().is_relative_to((at / "data").resolve()) for path in (at / "data").rglob("*"))
    # The pairs, and the chats without a domain.
    assert card["segments_without_domain"] >= 40
    data = folder(built, "river") / "data"
    shards = sorted(path.name for path in (data / "__default__").iterdir())
    assert shards == [f"shard_{i:04d}" for i in range(len(shards))]
    assert len(shards) > 1
    wanted = {ids for ids, _ in examples(built)}
    for found in readers.astrai_bin(data / "__default__").values():
        assert {ids for ids, _ in found} <= wanted
        assert sum(len(ids) for ids, _ in found) <= 900 or len(found) == 1


# ── The same bytes, or nothing ─────────────────────────────────────────────────────────────────────


def digests(at: Path) -> dict[str, str]:
    files = [path for path in at.rglob("*") if path.is_file()]
    return {path.relative_to(at).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def by_eight(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Export the same shards elsewhere with eight workers, which get even the smallest task."""
    at = tmp_path_factory.mktemp("eight")
    shutil.copytree(built.project.base, at, dirs_exist_ok=True)
    shutil.rmtree(at / ".rowmill/mini/exports")
    patch = pytest.MonkeyPatch()
    patch.setattr(local, "INLINE_BELOW_BYTES", 0)
    project = Workspace(at).project
    recipe = project.recipe.model_copy(update={"execution": Execution(workers=8)})
    try:
        done = runner.build(replace(project, recipe=recipe), only=("exports",))
    finally:
        patch.undo()
        prepare.close_workers()
    return Built(project, {step.key[1:]: (report, verdicts) for step, report, verdicts in done})


@pytest.mark.slow
@NAMES
def test_second_build_with_eight_workers_gives_equal_bytes(built: Built, by_eight: Built, name: str) -> None:
    assert digests(folder(built, name)) == digests(folder(by_eight, name))


@pytest.mark.slow
def test_second_build_of_the_same_project_reuses_exports(built: Built) -> None:
    again = [report for step, report, _ in runner.build(built.project, only=("exports",)) if step.name == "exports"]
    assert len(again) == len(OPTIONS)
    assert all(report.reused for report in again)


@pytest.fixture
def copied(built: Built, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies an export out, to be damaged."""

    def copy(name: str) -> Path:
        runner.copy_export(built.project, name, tmp_path / name)
        return tmp_path / name

    return copy


def test_copy_of_an_export_is_the_export(built: Built, copied: Callable[[str], Path]) -> None:
    at = copied("tinker")
    assert digests(at) == digests(folder(built, "tinker"))
    with pytest.raises(ConfigError, match="not empty"):
        runner.copy_export(built.project, "tinker", at)


@pytest.mark.parametrize("damage", ["missing", "short", "changed", "card", "no manifest"])
def test_damaged_export_is_refused(copied: Callable[[str], Path], damage: str) -> None:
    at = copied("native")
    file = at / "data" / "part-00000.parquet"
    content = file.read_bytes()
    middle = len(content) // 2
    match damage:
        case "missing":
            file.unlink()
        case "short":
            file.write_bytes(content[:-1])
        case "changed":
            file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        case "card":
            (at / "card.json").write_text("{}", encoding="utf-8")
        case _:
            (at / "manifest.json").unlink()

    with pytest.raises(IntegrityError, match=r"no manifest\.json" if damage == "no manifest" else None):
        open_export(at, verify=True)


def test_export_of_another_tokenizer_is_refused(built: Built, copied: Callable[[str], Path], tmp_path: Path) -> None:
    at, tokenizer = copied("unpacked"), tmp_path / "tokenizer"
    shutil.copytree(built.project.base / "tokenizer", tokenizer)

    assert isinstance(open_export(at, tokenizer=tokenizer), Exported)
    content = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    (tokenizer / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(IntegrityError, match=r"tokenizer\.json: SHA-256"):
        open_export(at, tokenizer=tokenizer)


@pytest.mark.slow
def test_opening_another_kind_is_refused(copied: Callable[[str], Path]) -> None:
    pytest.importorskip("tinker", reason="tinker is not installed: pip install 'rowmill[tinker]'")
    with pytest.raises(IntegrityError, match="its format is native, not tinker"):
        next(iter(read_datums(copied("native"))))


def test_datums_are_what_the_client_makes_of_the_same_arrays(built: Built) -> None:
    tinker = pytest.importorskip("tinker", reason="tinker is not installed: pip install 'rowmill[tinker]'")
    found = list(read_datums(folder(built, "tinker") / "data"))

    assert all(type(one) is tinker.Datum for one in found)
    back: Counter[Segment] = Counter()
    for one in found:
        targets, weights = (one.loss_fn_inputs[name].tolist() for name in ("target_tokens", "weights"))
        back[(*one.model_input.to_ints(), int(targets[-1])), (False, *(weight > 0 for weight in weights))] += 1
    assert back == Counter(examples(built))


# ── Splits, passes, text ───────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_validation_export_holds_the_rows_held_out(tmp_path: Path) -> None:
    built = with_exports(Workspace(tmp_path), {"held": {"kind": "axolotl", "split": "validation"}}).build()
    held = examples(built, split="validation")
    assert Counter(READERS["axolotl"](folder_in(built, "held"))) == Counter(held)
    assert 0 < len(held) < 60


def folder_in(built: Built, name: str) -> Path:
    return built.project.store.local(locate_export(built.manifest("exports", name))) / "data"


@pytest.mark.slow
def test_export_of_an_empty_split_says_so(tmp_path: Path) -> None:
    workspace = with_exports(Workspace(tmp_path), {"none": {"kind": "axolotl", "split": "test"}})
    with pytest.raises(ConfigError, match=r"exports\.none\.split: test has no sequence"):
        workspace.build()


WEIGHTED: dict[str, Any] = {
    "batch_size": 32, "steps": 3, "train_weights": {"chats": 0.9, "pairs": 0.1}, "stop_strategy": "restart",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixture", "remainder"),
    [
        # A step shows some sequences in two passes.
        pytest.param(WEIGHTED, "pad", id="restart"),
        # The first pass lacks what its last step drops.
        pytest.param({"batch_size": 8, "epochs": 3}, "drop", id="drop"),
    ],
)
def test_the_first_passes_are_the_first_places_of_what_all_passes_repeat(
    tmp_path: Path, mixture: dict[str, Any], remainder: str
) -> None:
    options = {"once": {"kind": "native"}, "all": {"kind": "native", "passes": "all"}}
    built = with_exports(Workspace(tmp_path), options, mixture=mixture, partitions={"remainder": remainder}).build()
    once, every = (
        [(row["dataset"], row["sequence_id"]) for row in readers.rows(folder_in(built, name))]
        for name in ("once", "all")
    )

    assert once == list(dict.fromkeys(every))
    assert len(every) > len(once)


@pytest.mark.slow
def test_text_is_exported_in_the_pieces_that_it_was_packed_in(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    texts = workspace.dataset("text.jsonl", [document(i, words=60) for i in range(30)], TEXT)
    kinds = {"river": "astrai_bin", "unpacked": "hf", "native": "native"}
    exports = [{"name": name, "kind": kind} for name, kind in kinds.items()]
    built = workspace.recipe({"text": texts}, exports=exports, seq_len=64).build()
    pieces = [one for row in readers.packed(readers.rows(folder_in(built, "native"))) for one in row]
    assert Counter(READERS["unpacked"](folder_in(built, "unpacked"))) == Counter(pieces)
    [found] = readers.astrai_bin(folder_in(built, "river")).values()
    assert [ids for ids, _ in found] == [ids for ids, _ in pieces]
    # All of it is text, so there is no mask to shift.
    assert all(all(mask) for _, mask in found)
    with pytest.raises(KeyError, match="loss_mask"):
        readers.astrai_sft_windows(folder_in(built, "river"), 64)
    card = open_export(folder_in(built, "river")).card
    assert card["loss_mask"].startswith("left out")
    assert card["train_type"] == "seq"


@pytest.mark.slow
def test_exports_are_made_and_copied_from_an_object_store(tmp_path: Path) -> None:
    options = {"rows": {"kind": "hf"}, "river": ALWAYS["river"]}
    workspace = with_exports(Workspace(tmp_path, root="memory://exports"), options)
    built = workspace.build()
    for name in options:
        runner.copy_export(workspace.project, name, tmp_path / name)
        assert open_export(tmp_path / name, verify=True).count("segments") == len(examples(built))
    assert Counter(readers.unpacked(readers.rows(tmp_path / "rows" / "data"))) == Counter(examples(built))


@pytest.mark.slow
def test_open_attention_is_exported_to_streams_and_packed_rows(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    packing = {"block_cross_document_attention": False}
    texts = workspace.dataset("text.jsonl", [document(i, words=30) for i in range(30)], TEXT, packing=packing)
    exports = [{"name": "native", "kind": "native"}, {"name": "bridge", "kind": "megatron_bridge"}]
    built = workspace.recipe({"text": texts}, exports=exports, seq_len=64).build()
    rows = readers.packed(readers.rows(folder_in(built, "native")))
    assert {len(row) for row in rows} == {1}
    assert readers.bridge(folder_in(built, "bridge")) == rows
    assert open_export(folder_in(built, "native")).card["datasets"]["text"]["attention"] == "open"
